"""The account of a node: the seconds of its agent by what they were spent on. Pure. See docs/account.md.

At each moment exactly one kind of ``Spent`` is running, so the seconds of all kinds add up to those since the agent's start.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from elastirun.worker.progress_page import NS, Page

LONG = 600.0  # seconds; after so long also a job of one node with a single round ends with its account in words
FAILURE, LEAVE, UNKNOWN = "failure", "leave", "unknown"  # causes that this module names; all others come from the round record


class Spent(str, Enum):
    """The kinds of spending. The values are those of events, /status and /metrics."""

    TRAINING = "training"  # steps that counted
    REPEATED = "repeated"  # steps that an earlier round had made already
    SAVING = "saving"  # training held up by a save of a checkpoint
    STARTING = "starting"  # from the start of workers to their first step; at first also the start of the agent
    WAITING = "waiting"  # for the store and for other nodes, before this node's first round and after it has sat out
    RESTARTING = "restarting"  # from the last step before a round ended early to the start of the next workers
    SITTING_OUT = "sitting_out"  # by --strikes
    FINISHING = "finishing"  # after the workers' success, or after the end of this node's part


@dataclass(frozen=True)
class Stamps:
    """Stamps of all workers of one round together. Moments are on ``elastirun.clock``; None: not known."""

    first: float | None = None  # the first step of the worker that was the last to make one
    last: float | None = None  # the last step of any worker
    at: int = 0  # as in ``Page``, the highest; 0: not known
    caught_up: float | None = None
    saving: float = 0.0  # seconds


NO_STAMPS = Stamps()


def stamps(pages: Iterable[Page], now: float, monotonic: int) -> Stamps:
    """Return the stamps of the workers whose pages these are. ``monotonic``: now in nanoseconds of CLOCK_MONOTONIC, as in the pages."""

    def moment(nanoseconds: int) -> float:
        return now - max(0, monotonic - nanoseconds) / NS

    known = [page for page in pages if page.pid]
    first = [moment(page.first) for page in known if page.first]
    last = [moment(page.stamped) for page in known if page.steps]
    caught_up = [moment(page.caught_up) for page in known if page.caught_up]
    return Stamps(
        first=max(first, default=None),
        last=max(last, default=None),
        at=max((page.at for page in known), default=0),
        caught_up=min(caught_up, default=None),
        saving=max((page.saving for page in known), default=0) / NS,
    )


@dataclass(frozen=True)
class RoundSpent:
    """The seconds of one round on this node, from the end of the training before it to its own."""

    cause: str  # of the end of the round before; empty: this is the first round of this node
    restarting: float
    starting: float
    repeated: float
    saving: float
    training: float


@dataclass(frozen=True)
class Totals:
    """The account at one moment. The fields are those of ``account`` in /status and in the event.

    The values of ``seconds`` add up to ``total``, where null counts as 0.
    """

    total: float  # seconds since the agent's start
    goodput: float  # the part of ``total`` that is training; at most so large where ``repeated`` is null
    seconds: Mapping[str, float | None]  # by ``Spent``; None: it is not known, and its seconds are in ``training``
    lost_seconds: Mapping[str, float]  # restarting, and after it starting and repeated, by the cause that ended the round
    rounds_ended: Mapping[str, int]  # rounds of this node that ended early, by cause
    steps_stamped: bool  # else ``starting`` ends with the start of the workers' processes


@dataclass
class _Round:
    """The running round on this node."""

    began: float  # when the start of its workers began
    cause: str  # of the end of the round before
    restarted: float  # seconds of restarting before it
    started: float | None = None  # when its processes were there
    over: float | None = None  # when this node knew that it is over; None: it goes on
    over_cause: str = ""
    certain: bool = False  # the round record says ``over_cause``
    saved: float = 0.0  # seconds of saving when it was over


class Account:
    """Adds up the seconds since ``began``. ``now`` is later in each call than in the one before, and on the same clock."""

    def __init__(self, began: float) -> None:
        self.farthest = 0  # the highest ``at`` of all rounds
        self._began = began
        self._spent: defaultdict[tuple[Spent, str], float] = defaultdict(float)  # by kind and cause; not what runs now
        self._kind, self._cause, self._since = Spent.STARTING, "", began  # what runs now, while there is no ``_round``
        self._certain = False  # the round record says ``_cause``
        self._restarting_since = began  # while ``_kind`` is RESTARTING, whatever its causes
        self._round: _Round | None = None
        self._ended: defaultdict[str, int] = defaultdict(int)  # rounds that ended early, by cause
        self._unstamped: defaultdict[str, float] = defaultdict(float)  # training in rounds without a step, by the cause of their start
        self._stamped = self._numbered = self._saved = False  # workers have stamped steps, given their numbers, or told of saves

    @property
    def running(self) -> bool:
        """Workers of a round run here, or are being stopped."""
        return self._round is not None

    def join(self, now: float) -> None:
        """The agent is ready, and waits for the store and other nodes."""
        self._become(Spent.WAITING, "", now)

    def sit_out(self, now: float) -> None:
        """The agent takes no part in the next rounds, until ``join``."""
        self._become(Spent.SITTING_OUT, "", now)

    def start_round(self, now: float) -> None:
        """The start of a round's workers begins."""
        if self._kind is Spent.FINISHING:  # a round has formed, and its end was not seen here
            self.end_early(UNKNOWN, now)
        cause, restarted = self._cause, now - self._restarting_since if self._kind is Spent.RESTARTING else 0.0
        self._become(Spent.STARTING, cause, now)
        self._round = _Round(now, cause, restarted)

    def workers_started(self, now: float) -> None:
        """The processes of the round's workers are there."""
        if self._round is not None:
            self._round.started = now

    def end_early(self, cause: str, now: float, found: Stamps = NO_STAMPS, certain: bool = True, again: bool = False) -> None:
        """The round is over before its work is done. ``certain``: the round record says why; else a later call may name another cause.

        ``again``: an end that was counted already, of which the round record tells more. Its last cause is charged.
        """
        one = self._round
        if one is not None:
            if one.over is None:
                one.over, one.saved = now, found.saving
            if certain or not one.over_cause:
                one.over_cause, one.certain = cause, certain
        elif self._kind is Spent.RESTARTING and (again or not self._certain):
            self._cause, self._certain = (cause, True) if certain else (self._cause, False)
        elif self._kind not in (Spent.WAITING, Spent.SITTING_OUT) and certain and not again:
            self._become(Spent.RESTARTING, cause, now)
            self._certain = True

    def end_round(self, now: float, found: Stamps) -> RoundSpent | None:
        """All workers of the round have ended. Return what it was spent on; None: there is no round."""
        one = self._round
        if one is None:
            return None
        self._remember(found)
        parts, trained_until = self._split(one, now, found)
        for kind, seconds in parts.items():
            self._spent[kind, _charged(kind, one.cause)] += seconds
        if found.first is None:
            self._unstamped[one.cause] += parts[Spent.TRAINING]
        self.farthest, self._round = max(self.farthest, found.at), None
        self._kind, self._cause, self._since = Spent.FINISHING, "", trained_until
        if one.over is not None:
            self._kind, self._cause, self._certain = Spent.RESTARTING, one.over_cause, one.certain
            self._restarting_since = trained_until
        named = {kind.value: round(seconds, 3) for kind, seconds in parts.items()}
        return RoundSpent(one.cause, round(one.restarted, 3), **named)

    def end_part(self, now: float) -> None:
        """This node runs no further round, because the job is decided or this node leaves."""
        if self._kind is Spent.RESTARTING:
            self._kind, self._cause = Spent.FINISHING, ""
        else:
            self._become(Spent.FINISHING, "", now)

    def totals(self, now: float, found: Stamps) -> Totals:
        """Return the account as of now. ``found``: the stamps of the running round."""
        self._remember(found)
        spent, ended = self._spent.copy(), self._ended.copy()
        kind, cause, since = self._kind, self._cause, self._since
        if self._round is not None:
            parts, since = self._split(self._round, now, found)
            for part, seconds in parts.items():
                spent[part, _charged(part, self._round.cause)] += seconds
            kind, cause = Spent.RESTARTING, self._round.over_cause
        spent[kind, cause] += now - since
        if kind is Spent.RESTARTING and cause:
            ended[cause] += 1
        return self._as_totals(spent, ended, now - self._began)

    def _as_totals(self, spent: Mapping[tuple[Spent, str], float], ended: Mapping[str, int], total: float) -> Totals:
        by_kind, by_cause = dict.fromkeys(Spent, 0.0), defaultdict[str, float](float)
        for (kind, cause), value in spent.items():
            by_kind[kind] += value
            if cause:
                by_cause[cause] += value
        for cause, value in self._unstamped.items() if self._stamped else ():  # those rounds ended before their first step
            by_kind[Spent.TRAINING] -= value
            by_kind[Spent.STARTING] += value
            if cause:
                by_cause[cause] += value
        seconds: dict[str, float | None] = {kind.value: round(value, 3) for kind, value in by_kind.items()}
        seconds |= {} if self._numbered else {Spent.REPEATED.value: None}
        seconds |= {} if self._saved else {Spent.SAVING.value: None}
        goodput = by_kind[Spent.TRAINING] / total if total > 0 else 0.0
        lost = {cause: round(value, 3) for cause, value in sorted(by_cause.items(), key=lambda item: -item[1])}
        return Totals(round(total, 3), round(goodput, 4), seconds, lost, dict(ended), self._stamped)

    def _remember(self, found: Stamps) -> None:
        """Remember what the workers of this job tell at all."""
        self._stamped = self._stamped or found.first is not None
        self._numbered = self._numbered or found.at > 0
        self._saved = self._saved or found.saving > 0

    def _split(self, one: _Round, now: float, found: Stamps) -> tuple[dict[Spent, float], float]:
        """Return the seconds of a round by kind, and the moment until which it has trained.

        Training ends with the last step where the round ended early: what came after this step is lost.
        """
        until = now if one.over is None else min(now, one.over)
        if one.over is not None and found.last is not None:
            until = min(now, found.last)
        until = max(one.began, until)
        first = found.first if found.first is not None else until if self._stamped or one.started is None else one.started
        first = min(max(one.began, first), until)
        caught_up = first
        if self.farthest and found.at:
            caught_up = until if found.caught_up is None else min(max(first, found.caught_up), until)
        saving = min(found.saving if one.over is None else one.saved, until - caught_up)
        parts = {
            Spent.STARTING: first - one.began,
            Spent.REPEATED: caught_up - first,
            Spent.SAVING: saving,
            Spent.TRAINING: until - caught_up - saving,
        }
        return parts, until

    def _become(self, kind: Spent, cause: str, now: float) -> None:
        self._spent[self._kind, self._cause] += now - self._since
        if self._kind is Spent.RESTARTING:
            self._ended[self._cause] += 1
        elif kind is Spent.RESTARTING:
            self._restarting_since = now
        self._kind, self._cause, self._since, self._certain = kind, cause, now, False


def _charged(kind: Spent, cause: str) -> str:
    """Return the cause that is charged with a round's seconds of this kind: that of the round's start, or none."""
    return cause if kind in (Spent.STARTING, Spent.REPEATED) else ""


# -- in words ------------------------------------------------------------------------------------------------------------------

_WORDS = {
    Spent.TRAINING: "training",
    Spent.REPEATED: "steps done again",
    Spent.SAVING: "saving",
    Spent.RESTARTING: "restarting",
    Spent.STARTING: "starting",
    Spent.WAITING: "waiting for nodes",
    Spent.SITTING_OUT: "sitting out",
    Spent.FINISHING: "finishing",
}


def lines(node: str, totals: Totals) -> list[str]:
    """Return the account in three lines for people. ``node``: the host name."""
    known = {_WORDS[kind]: totals.seconds[kind.value] for kind in _WORDS}
    unknown = [] if totals.steps_stamped else ["first steps of the rounds"]
    unknown += [words for words, seconds in known.items() if seconds is None]
    at_most = "at most " if unknown else ""
    not_known = f" (not known: {', '.join(unknown)})" if unknown else ""
    parts = [f"{words} {seconds:.1f} s" for words, seconds in known.items() if seconds]
    lost = [f"{cause} {seconds:.1f} s ({_times(totals.rounds_ended.get(cause, 0))})" for cause, seconds in totals.lost_seconds.items()]
    return [
        f"time of {node}: {totals.total:.1f} s, {at_most}{100 * totals.goodput:.1f} % of it training that counted{not_known}",
        f"  spent on: {', '.join(parts)}",
        f"  lost by cause: {', '.join(lost) or 'nothing'}",
    ]


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"

"""The account of a node: the seconds of its agent by what they were spent on. Pure. See docs/account.md.

At each moment the node is in exactly one state, so the seconds of all kinds (``SPENT``) add up to those since the agent's start.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from elastirun.agent.observe.node_states import SPENT, WORDS, NodeState
from elastirun.agent.observe.round_ends import UNKNOWN
from elastirun.rendezvous.wire.records import Cause
from elastirun.worker.progress_page import NS, Page

LONG = 600.0  # seconds; after so long also a job of one node with a single round ends with its account in words
# A round without a step is starting for so many seconds, and times the longest start before; then its workers are taken for some that
# stamp no steps, as workers do that were executed and not forked.
PATIENCE, PATIENCE_TIMES = 30.0, 5.0
_TRAINING = WORDS[NodeState.RUNNING].spent


@dataclass(frozen=True)
class StateChange:
    """The node was in ``state`` from ``at`` on. Replaces what was told of the time after ``at``: some is known later."""

    state: NodeState
    at: float
    cause: str  # of the early end of the round before, or of this one once it is over; empty: none has ended early


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
    seconds: Mapping[str, float | None]  # by kind; None: it is not known, and its seconds are in ``training``
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
    told: tuple[list[NodeState], float] | None = None  # its states when they were told last, and the seconds of the first one


class Account:
    """Adds up the seconds since ``began``. ``now`` is later in each call than in the one before, and on the same clock.

    ``tell`` gets each change of state, see ``StateChange``.
    """

    def __init__(self, began: float, tell: Callable[[StateChange], None]) -> None:
        self.farthest = 0  # the highest ``at`` of all rounds
        self._began = began
        self._spent: defaultdict[tuple[NodeState, str], float] = defaultdict(float)  # by kind and cause; not what runs now
        self._tell = tell
        self._kind, self._cause, self._since = NodeState.STARTING, "", began  # what runs now, while there is no ``_round``
        self._certain = False  # the round record says ``_cause``
        self._restarting_since = began  # while ``_kind`` is RESTARTING, whatever its causes
        self._round: _Round | None = None
        self._ended: defaultdict[str, int] = defaultdict(int)  # rounds that ended early, by cause
        self._unstamped: defaultdict[str, float] = defaultdict(float)  # training in rounds without a step, by the cause of their start
        self._longest_start = 0.0  # seconds to the first step, of the rounds that had one
        self._stamped = self._numbered = self._saved = False  # workers have stamped steps, given their numbers, or told of saves
        tell(StateChange(NodeState.STARTING, began, ""))

    @property
    def running(self) -> bool:
        """Workers of a round run here, or are being stopped."""
        return self._round is not None

    def join(self, now: float) -> None:
        """The agent is ready, and waits for the store and other nodes."""
        self._become(NodeState.JOINING, "", now)

    def sit_out(self, now: float) -> None:
        """The agent takes no part in the next rounds, until ``join``."""
        self._become(NodeState.SITTING_OUT, "", now)

    def wait_beside(self, now: float) -> None:
        """A round has formed without this node, which waits for the next one."""
        if self._kind is NodeState.RESTARTING and self._round is None:
            self._become(NodeState.JOINING, "", now)

    def start_round(self, now: float) -> None:
        """The start of a round's workers begins."""
        if self._kind is NodeState.FINISHING:  # a round has formed, and its end was not seen here
            self.end_early(UNKNOWN, now)
        cause, restarted = self._cause, now - self._restarting_since if self._kind is NodeState.RESTARTING else 0.0
        self._become(NodeState.STARTING, cause, now)
        self._round = _Round(now, cause, restarted)

    def workers_started(self, now: float) -> None:
        """The processes of the round's workers are there."""
        if self._round is not None:
            self._round.started = now

    def look(self, now: float, found: Stamps) -> None:
        """Tell what the workers do by their stamps, if that is news."""
        if self._round is not None and self._round.over is None:
            self._remember(found)
            self._tell_parts(self._round, self._split(self._round, now, found)[0])

    def end_early(self, cause: str, now: float, found: Stamps = NO_STAMPS, certain: bool = True, again: bool = False) -> None:
        """The round is over before its work is done. ``certain``: the round record says why; else a later call may name another cause.

        ``again``: an end that was counted already, of which the round record tells more. Its last cause is charged.
        """
        one = self._round
        if one is not None:
            if one.over is None:
                one.over, one.saved = now, found.saving
                self._tell(StateChange(NodeState.STOPPING, now, cause))
            if certain or not one.over_cause:
                one.over_cause, one.certain = cause, certain
        elif self._kind is NodeState.RESTARTING and (again or not self._certain):
            if certain and cause != self._cause:
                self._tell(StateChange(NodeState.RESTARTING, now, cause))
            self._cause, self._certain = (cause, True) if certain else (self._cause, False)
        elif self._kind not in (NodeState.JOINING, NodeState.SITTING_OUT) and certain and not again:
            self._become(NodeState.RESTARTING, cause, now)
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
        if found.first is not None:
            self._longest_start = max(self._longest_start, found.first - one.began)
        elif not self._stamped:
            self._unstamped[one.cause] += parts[NodeState.RUNNING]
        self._tell_parts(one, parts, ended=True)
        self.farthest, self._round, self._since = max(self.farthest, found.at), None, trained_until
        if one.over is None:
            self._kind, self._cause = NodeState.FINISHING, ""
            self._tell(StateChange(NodeState.FINISHING, trained_until, ""))
        else:
            self._kind, self._cause, self._certain = NodeState.RESTARTING, one.over_cause, one.certain
            self._restarting_since = trained_until
            self._tell(StateChange(NodeState.STOPPING, trained_until, self._cause))
            self._tell(StateChange(NodeState.RESTARTING, now, self._cause))
        named = {WORDS[kind].spent: round(seconds, 3) for kind, seconds in parts.items()}
        return RoundSpent(one.cause, round(one.restarted, 3), **named)

    def end_part(self, now: float) -> None:
        """This node runs no further round, because the job is decided or this node leaves.

        What has passed since the end of its last round belongs to that end, unless it waited for a node in place of a lost one.
        """
        if self._kind is NodeState.RESTARTING and self._cause != Cause.LOST.value:
            self._kind, self._cause = NodeState.FINISHING, ""
            self._tell(StateChange(NodeState.FINISHING, self._since, ""))
        else:
            self._become(NodeState.FINISHING, "", now)

    def totals(self, now: float, found: Stamps) -> Totals:
        """Return the account as of now. ``found``: the stamps of the running round."""
        self._remember(found)
        spent, ended = self._spent.copy(), self._ended.copy()
        kind, cause, since = self._kind, self._cause, self._since
        if self._round is not None:
            parts, since = self._split(self._round, now, found)
            for part, seconds in parts.items():
                spent[part, _charged(part, self._round.cause)] += seconds
            kind, cause = NodeState.RESTARTING, self._round.over_cause
        spent[kind, cause] += now - since
        if kind is NodeState.RESTARTING and cause:
            ended[cause] += 1
        return self._as_totals(spent, ended, now - self._began)

    def _as_totals(self, spent: Mapping[tuple[NodeState, str], float], ended: Mapping[str, int], total: float) -> Totals:
        by_kind, by_cause = dict.fromkeys(SPENT, 0.0), defaultdict[str, float](float)
        for (kind, cause), value in spent.items():
            by_kind[WORDS[kind].spent] += value
            if cause:
                by_cause[cause] += value
        for cause, value in self._unstamped.items() if self._stamped else ():  # those rounds ended before their first step
            by_kind[_TRAINING] -= value
            by_kind[WORDS[NodeState.STARTING].spent] += value
            if cause:
                by_cause[cause] += value
        seconds: dict[str, float | None] = {kind: round(value, 3) for kind, value in by_kind.items()}
        seconds |= {} if self._numbered else {WORDS[NodeState.REPEATED].spent: None}
        seconds |= {} if self._saved else {WORDS[NodeState.SAVING].spent: None}
        goodput = by_kind[_TRAINING] / total if total > 0 else 0.0
        lost = {cause: round(value, 3) for cause, value in sorted(by_cause.items(), key=lambda item: -item[1])}
        return Totals(round(total, 3), round(goodput, 4), seconds, lost, dict(ended), self._stamped)

    def _remember(self, found: Stamps) -> None:
        """Remember what the workers of this job tell at all."""
        self._stamped = self._stamped or found.first is not None
        self._numbered = self._numbered or found.at > 0
        self._saved = self._saved or found.saving > 0

    def _split(self, one: _Round, now: float, found: Stamps) -> tuple[dict[NodeState, float], float]:
        """Return the seconds of a round by kind, and the moment until which it has trained.

        Training ends with the last step where the round ended early: what came after this step is lost.
        """
        until = now if one.over is None else min(now, one.over)
        if one.over is not None and found.last is not None:
            until = min(now, found.last)
        until = max(one.began, until)
        steps_come = self._stamped and until - one.began < PATIENCE + PATIENCE_TIMES * self._longest_start
        first = found.first if found.first is not None else until if steps_come or one.started is None else one.started
        first = min(max(one.began, first), until)
        caught_up = first
        if self.farthest and found.at:
            caught_up = until if found.caught_up is None else min(max(first, found.caught_up), until)
        saving = min(found.saving if one.over is None else one.saved, until - caught_up)
        parts = {
            NodeState.STARTING: first - one.began,
            NodeState.REPEATED: caught_up - first,
            NodeState.SAVING: saving,
            NodeState.RUNNING: until - caught_up - saving,
        }
        return parts, until

    def _tell_parts(self, one: _Round, parts: Mapping[NodeState, float], ended: bool = False) -> None:
        """Tell into what the time since the start of a round is divided, if that is news, or all that is to be told of it."""
        known = [kind for kind, seconds in parts.items() if seconds > 0], round(parts[NodeState.STARTING], 1)
        if known == one.told and not ended:
            return
        one.told, at = known, one.began
        for kind, seconds in parts.items():
            if seconds > 0:
                self._tell(StateChange(kind, at, one.cause))
            at += seconds

    def _become(self, kind: NodeState, cause: str, now: float) -> None:
        self._spent[self._kind, self._cause] += now - self._since
        if self._kind is NodeState.RESTARTING:
            self._ended[self._cause] += 1
        elif kind is NodeState.RESTARTING:
            self._restarting_since = now
        if (kind, cause) != (self._kind, self._cause):
            self._tell(StateChange(kind, now, cause))
        self._kind, self._cause, self._since, self._certain = kind, cause, now, False


def _charged(kind: NodeState, cause: str) -> str:
    """Return the cause that is charged with a round's seconds of this kind: that of the round's start, or none."""
    return cause if kind in (NodeState.STARTING, NodeState.REPEATED) else ""


# -- in words ------------------------------------------------------------------------------------------------------------------

_TITLES = {words.spent: words.title for words in WORDS.values() if words.spent}


def lines(node: str, totals: Totals) -> list[str]:
    """Return the account in three lines for people. ``node``: the host name."""
    known = {_TITLES[kind]: seconds for kind, seconds in totals.seconds.items()}
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

"""Whether the next round can be formed, from whom, and if not, why not: one pure decision with its reason in words."""

from __future__ import annotations

import re
import signal
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from elastirun.rendezvous.codec import clip
from elastirun.rendezvous.ranks import choose, member
from elastirun.rendezvous.records import Broken, Cause, Closed, ExitRecord, Member, NodeRow, RoundRecord, Status, Verdict

PROGRESS = 30.0  # seconds; a round that ran for so long has made some
MOST_NAMES = 3  # nodes that a line names; it is said every 10 s
QUICK = 10.0  # seconds; a round that failed sooner may do so again and again
EARLY = 60.0  # seconds; a round that lost a node sooner may do so again and again
FREE_LOSSES = 2  # so many early losses in a row delay nothing
SHORTEST_HOLD, LONGEST_HOLD = 10.0, 300.0  # seconds; see ``hold``


@dataclass(frozen=True)
class Rules:
    """What the job asks of its rounds. Times in seconds; see ``elastirun.config.Timing`` for their meaning."""

    min_nodes: int
    max_nodes: int
    max_restarts: int = 0
    restart_window: float = 0.0  # a round that ran for so long makes the failures before it forgiven; 0: none ever is
    fail_fast: bool = False  # the same failure twice with no progress between is final
    restart_pause: float = 10.0  # the longest pause before a restart when rounds fail quickly; 0: never any
    fixed_ranks: bool = False
    private: bool = False  # no other agent can reach the store
    lasting: bool = False  # the store outlives its jobs
    hosted: bool = False  # one of the job's agents should serve the store
    join_timeout: float = 600.0
    last_call: float = 5.0
    debounce: float = 1.0
    beat: float = 0.5
    expire: float = 5.0
    store_grace: float = 60.0
    new_store_id: str = "store"  # the name this node gives to a store it finds empty

    @property
    def longest_alone(self) -> float:
        """Seconds after which no member of a round that lost the store can still work, whatever the difference of the clocks."""
        return 1.25 * (self.store_grace + 2 * self.expire)

    @cached_property
    def settings(self) -> tuple[str, ...]:
        """What every node of a job must be started with, as options: whoever writes the record decides by its own."""
        return (
            f"--nnodes={self.min_nodes}:{self.max_nodes}",
            f"--rdzv-backend={'static' if self.fixed_ranks else 'etcd' if self.lasting else 'c10d'}",
            f"--max-restarts={self.max_restarts}",
            f"--restart-window={self.restart_window:g}",
            f"--restart-pause={self.restart_pause:g}",
            f"--expire={self.expire:g}",  # a node that is lost must have stopped by its own clock before the others replace it
            f"--store-grace={self.store_grace:g}",
            "--fail-fast" if self.fail_fast else "no --fail-fast",
        )


@dataclass(frozen=True)
class Forming:
    """The decision: ``record`` to be written now, or None and ``reason`` says for what is waited."""

    record: RoundRecord | None
    reason: str
    leader: str = ""  # id of the node that should write it; the others only when it does not
    check_again: float | None = None  # when time alone may change the answer
    news: bool = False  # ``reason`` is worth a line at once


def is_over(m: Member, record: RoundRecord, rows: dict[str, NodeRow], silent: Callable[[str], bool]) -> bool:
    """The member will never again run the record's round, or has fallen silent."""
    return is_lost(m, record, silent) or _has_said_over(m, record, rows)


def _has_said_over(m: Member, record: RoundRecord, rows: dict[str, NodeRow]) -> bool:
    row = rows.get(m.id)
    return row is not None and (row.status is Status.LEFT or row.done_round >= record.round)


def is_lost(m: Member, record: RoundRecord, silent: Callable[[str], bool]) -> bool:
    """The member has fallen silent, as this node or whoever broke the round found."""
    return silent(m.id) or (record.broken is not None and m.id in record.broken.lost)


def has_succeeded(m: Member, record: RoundRecord, rows: dict[str, NodeRow]) -> bool:
    """All workers of the member succeeded in the record's round."""
    row = rows.get(m.id)
    return row is not None and row.succeeded == record.round


def candidates(record: RoundRecord, rows: dict[str, NodeRow], silent: Callable[[str], bool]) -> list[NodeRow]:
    """The nodes that can take part in the next round."""
    members = {m.id for m in record.members}
    return [
        row
        for row in rows.values()
        if row.status is Status.JOINING and not silent(row.id) and (row.id not in members or row.done_round >= record.round)
    ]


def names(rows: Sequence[NodeRow | Member]) -> str:
    """Who, for people; of a long list only ``MOST_NAMES``."""
    shown = [f"{r.name} {r.address}" for r in sorted(rows, key=lambda r: (r.name, r.address))[:MOST_NAMES]]
    return ", ".join(shown) + (f", and {len(rows) - MOST_NAMES} more" if len(rows) > MOST_NAMES else "")


def form(
    rules: Rules,
    record: RoundRecord,
    rows: dict[str, NodeRow],
    silent: Callable[[str], bool],
    now: float,
    unchanged_since: float,
    over_since: float,
    quiet: Callable[[str], float],
) -> Forming:
    """Decide on the round after ``record``, which is broken or the empty round 0.

    ``unchanged_since``: when this node last saw the set of candidates change; ``over_since``: when it first saw that
    the round is over; ``quiet``: seconds since its last sign of life, by id. Seconds of its own clock.
    """
    active = [m for m in record.members if not is_over(m, record, rows, silent)]
    if active:
        return Forming(None, f"waiting for {names(active)} to stop the workers of round {record.round}")
    lost = [m for m in record.members if is_lost(m, record, silent)]
    left = may_still_work(rules, record, rows, quiet)
    if left > 0:
        reason = f"nothing is heard of {names(lost)}: they may be cut off together, and then stop by themselves within {left:.0f} s"
        return Forming(None, reason, check_again=now + left)
    record, causes = _count(rules, _count_loss(record, lost), rows, lost)
    if causes and (record.failures > rules.max_restarts or (rules.fail_fast and record.repeats > 1)):
        return _give_up(rules, record, causes)
    ready, held = _who_may(rules, record, candidates(record, rows, silent))
    waiting = _without_host(rules, record, rows, ready, silent, now, over_since)
    if waiting is not None:
        return waiting
    chosen = choose(record.members, ready, rules.max_nodes, rules.fixed_ranks)
    missing = _missing(rules, chosen, ready)
    if missing:
        return Forming(None, missing)
    pause = pause_before(rules, record) if causes else min(rules.restart_pause, held)
    if now < over_since + pause:
        why = f"{record.quick} rounds in a row failed within {QUICK:g} s of their start" if causes else why_held(record)
        return Forming(None, f"{why}; the next one starts after {pause:.1f} s", check_again=over_since + pause, news=True)
    first = record.round == 0
    if first and len(chosen) < rules.max_nodes and now < unchanged_since + rules.last_call:
        until = unchanged_since + rules.last_call
        reason = f"{len(chosen)} of at most {rules.max_nodes} nodes joined ({names(chosen)}); last call for more"
        return Forming(None, reason, check_again=until)
    following = replace(
        record,
        version=record.version + 1,
        round=record.round + 1,
        members=tuple(member(row) for row in chosen),
        reason=_why(record, lost, causes),
        broken=None,
    )
    return Forming(following, following.reason, leader=chosen[0].id)


def _who_may(rules: Rules, record: RoundRecord, ready: list[NodeRow]) -> tuple[list[NodeRow], float]:
    """The candidates without newcomers that have to wait; where the round cannot do without them, with them, and the seconds to wait."""
    held = hold(record) if record.broken is not None and record.broken.cause is not Cause.JOIN else 0.0
    survivors = [row for row in ready if record.index(row.id) is not None or row.hosts]
    if held and len(survivors) >= rules.min_nodes:
        return survivors, 0.0
    return ready, held


def why_over(record: RoundRecord | None, number: int) -> tuple[bool, str]:
    """Whether there is time for a checkpoint, and why round ``number`` is over, by the ``record`` found."""
    if record is None or record.open or record.round != number:
        return False, f"round {number} went on without this node"
    if record.closed:
        return False, record.closed.reason
    assert record.broken is not None
    return record.broken.cause in (Cause.JOIN, Cause.LEAVE), record.broken.reason


def may_still_work(rules: Rules, record: RoundRecord, rows: dict[str, NodeRow], quiet: Callable[[str], float]) -> float:
    """Seconds for which the round may go on in a place that the store cannot be reached from.

    One member that has said that it is over ends the round for all: none of its steps can be finished without it. A round
    of one is gone before it can be found silent (``LONE_LIMIT`` in machine.py).
    """
    if record.broken is not None and record.broken.over:
        return 0.0
    if len(record.members) < 2 or any(_has_said_over(m, record, rows) for m in record.members):
        return 0.0
    return rules.longest_alone - min(quiet(m.id) for m in record.members)


def _without_host(
    rules: Rules,
    record: RoundRecord,
    rows: dict[str, NodeRow],
    ready: list[NodeRow],
    silent: Callable[[str], bool],
    now: float,
    over_since: float,
) -> Forming | None:
    """The decision to wait for the node whose agent serves the store; None when it can take part, or no node says that it is the host.

    Every round includes the store's host, so no round goes on once its store is gone: see docs/decisions/0009.
    """
    hosts = [row for row in rows.values() if row.hosts]
    if not hosts:
        until = over_since + rules.expire
        first = rules.hosted and not rules.private and record.round == 0
        return Forming(None, "waiting for the node that hosts the store", check_again=until) if first and now < until else None
    if any(row in ready for row in hosts):
        return None
    host = hosts[0]
    state = "has left" if host.status is Status.LEFT else "is silent" if silent(host.id) else "is not ready yet"
    return Forming(None, f"waiting for {names([host])}, which hosts the store and {state}")


def _missing(rules: Rules, chosen: list[NodeRow], ready: list[NodeRow]) -> str:
    """For whom is waited; empty when nobody is missing."""
    if len(chosen) >= rules.min_nodes:
        return ""
    joined = f"{len(chosen)} of {rules.min_nodes} nodes joined" + (f" ({names(chosen)})" if chosen else "")
    if rules.fixed_ranks:
        absent = sorted(set(range(rules.max_nodes)) - {row.node_rank for row in chosen})
        twins = [row for row in ready if row not in chosen]
        same = f"; {names(twins)} says --node-rank={twins[0].node_rank}, which is taken: give each node its own" if twins else ""
        return f"{joined}, waiting for node rank {', '.join(map(str, absent[:16]))}{same}"
    return f"{joined}, waiting for {rules.min_nodes - len(chosen)} more"


def _why(record: RoundRecord, lost: list[Member], causes: tuple[ExitRecord, ...]) -> str:
    if record.broken is None:
        return "the first round"
    if causes:
        return describe(causes[0])
    if lost and record.broken.cause is Cause.FAILURE:
        return clip(f"{names(lost)} was lost; {record.broken.reason}")
    return record.broken.reason


def _count(rules: Rules, record: RoundRecord, rows: dict[str, NodeRow], lost: list[Member]) -> tuple[RoundRecord, tuple[ExitRecord, ...]]:
    """The record with the broken round's failure counted, and its causes, most likely first; none when it was no failure."""
    if record.broken is None or record.broken.cause is not Cause.FAILURE or lost:
        return record, ()
    causes = root_cause(f for m in record.members if m.id in rows for f in rows[m.id].failures)
    if not causes:  # the node that saw it has left since, and took its words with it
        causes = (ExitRecord("a node that has left", -1, -1, 0, 1, 0, 0.0),)
    ran, mark = causes[0].after, signature(causes[0])
    before = 0 if rules.restart_window and ran >= rules.restart_window else record.failures
    again = mark == record.signature and ran < PROGRESS
    repeats, quick = record.repeats + 1 if again else 1, record.quick + 1 if ran < QUICK else 0
    return replace(record, failures=before + 1, signature=mark, repeats=repeats, quick=quick), causes


def _count_loss(record: RoundRecord, lost: list[Member]) -> RoundRecord:
    """The record with the broken round counted if it lost a node early. A round that newcomers ended says nothing of them yet."""
    broken = record.broken
    if broken is None or (broken.cause is Cause.JOIN and not lost):
        return record
    return replace(record, losses=0 if broken.ran >= EARLY else record.losses + bool(lost))


def hold(record: RoundRecord) -> float:
    """Seconds for which newcomers wait beside a new round: 0, and 10, 20, 40, ... after the third early loss in a row.

    A node that is started, killed and started again, over and over, would else end each round before it gets anywhere.
    The times are those after which Kubernetes starts a crashing container again.
    """
    if record.losses <= FREE_LOSSES:
        return 0.0
    return min(LONGEST_HOLD, SHORTEST_HOLD * 2.0 ** min(record.losses - FREE_LOSSES - 1, 16))


def why_held(record: RoundRecord) -> str:
    """Why newcomers have to wait, in words."""
    return f"{record.losses} rounds in a row lost a node within {EARLY:g} s of their start"


def pause_before(rules: Rules, record: RoundRecord) -> float:
    """Seconds until the round after a failed one: the first restart is at once, then 1, 2, 4, ..., each give or take a quarter.

    The jitter is the same for all nodes of the job: it keeps many jobs that lost the same file server from coming back as one.
    """
    if record.quick < 2:
        return 0.0
    jitter = 0.75 + zlib.crc32(record.fence.encode()) / 2**33
    return min(rules.restart_pause, 2.0 ** min(record.quick - 2, 16)) * jitter


def disagreement(rules: Rules, record: RoundRecord) -> str:
    """How this node's settings differ from the job's, in words; empty when they do not."""
    if rules.settings == record.settings:
        return ""
    pairs = [pair for pair in zip(rules.settings, record.settings, strict=False) if pair[0] != pair[1]]
    ours, theirs = (", ".join(pair[i] for pair in pairs) for i in (0, 1))
    again = f", or try again in {rules.expire:g} s if that job was just killed" if rules.lasting else ""
    return f"this node was started with {ours}, the job runs with {theirs}; start all nodes with the same{again}" if pairs else ""


def untrue(rules: Rules, record: RoundRecord, row: NodeRow) -> str:
    """What no honest node of this job would write, in words; empty when nothing is. ``row``: what this node says of itself."""
    most = rules.max_nodes
    if len(record.members) > most and not disagreement(rules, record):
        return f"it names {len(record.members)} nodes, and --nnodes allows {most}"
    closed = record.closed
    if closed and closed.verdict is Verdict.SUCCEEDED and record.index(row.id) is not None and row.succeeded != record.round:
        return f"it says that all workers of round {record.round} succeeded, but those of this node have not"
    return ""


def holder(rules: Rules, record: RoundRecord, row: NodeRow) -> Member | None:
    """Who has the fixed place of ``row`` in a round that runs without it."""
    rank = row.node_rank
    return record.members[rank] if rules.fixed_ranks and rank is not None and rank < len(record.members) else None


def _give_up(rules: Rules, record: RoundRecord, causes: tuple[ExitRecord, ...]) -> Forming:
    times = "a worker failed" if record.failures == 1 else f"a worker failed in {record.failures} rounds"
    why = f"--max-restarts={rules.max_restarts} is spent" if record.failures > rules.max_restarts else "--fail-fast"
    same = f"; it was the same failure {record.repeats} times in a row" if record.repeats > 1 else ""
    reason = clip(f"{times}, {why}: {describe(causes[0])}{same}")
    closed = Closed(Verdict.FAILED, reason, record.broken.by if record.broken else "", causes[:16])
    leader = record.members[0].id if record.members else ""
    return Forming(replace(record, version=record.version + 1, closed=closed), reason, leader)


def describe(failure: ExitRecord) -> str:
    """A failure in one line, for people."""
    how = f"exit code {failure.code}" if failure.code >= 0 else signal_name(-failure.code)
    perhaps = ", perhaps for having lost its peers" if failure.blame > 4 else ""  # see ExitRecord.blame
    note = f", {failure.note.partition(' (')[0]}" if failure.note else ""
    return clip(f"rank {failure.rank} on {failure.node} failed ({how}{note}){perhaps}")


def signal_name(number: int) -> str:
    """``SIGSEGV``; ``signal 40`` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def signature(failure: ExitRecord) -> str:
    """What is the same when the same thing fails again: how it ended and its last words, without the numbers in them."""
    last = failure.lines[-1] if failure.lines else ""
    return clip(f"{failure.code} {re.sub(r'0x[0-9a-fA-F]+|[0-9]+', '0', last)}", 200)


def root_cause(failures: Iterable[ExitRecord]) -> tuple[ExitRecord, ...]:
    """The failures, most likely cause first: by class of blame, then by time since the round's start."""
    return tuple(sorted(failures, key=lambda f: (f.blame, f.after, f.rank)))


def break_up(record: RoundRecord, cause: Cause, reason: str, by: str, ran: float, lost: tuple[str, ...] = ()) -> RoundRecord:
    """The record with its round marked as over."""
    return replace(record, version=record.version + 1, broken=Broken(cause, clip(reason), by, lost, ran=round(max(0.0, ran), 3)))


def lose(record: RoundRecord, m: Member, row: NodeRow | None, silent: bool, expire: float, by: str, ran: float) -> RoundRecord:
    """The record with its round over because the member ``m`` is gone: silent for ``expire`` seconds, left, or stopped."""
    who, note = f"{m.name} {m.address}", row.note if row else ""
    if row is not None and row.status is Status.LEFT:
        return break_up(record, Cause.LEAVE, f"{who} left: {note}", by, ran)
    if not silent:
        return break_up(record, Cause.LEAVE, f"{who} stopped: {note}", by, ran)
    return break_up(record, Cause.LOST, f"{who} silent for {expire:g} s", by, ran, (m.id,))


def mark_over(record: RoundRecord, row: NodeRow) -> RoundRecord | None:
    """The broken record with the word of ``row``'s leaving node that it has stopped its workers; None when that is not needed.

    The node's row vanishes with its lease, the record stays: whoever comes later need not wait for the round to end.
    """
    broken = record.broken
    if broken is None or broken.over or record.closed or record.index(row.id) is None or row.done_round < record.round:
        return None
    return replace(record, version=record.version + 1, broken=replace(broken, over=True))


def share_losses(record: RoundRecord, silent: Callable[[str], bool]) -> RoundRecord | None:
    """The broken record with the silent members that it does not name yet; None when it names them all."""
    broken = record.broken
    more = tuple(m.id for m in record.members if broken and silent(m.id) and m.id not in broken.lost)
    if broken is None or not more:
        return None
    return replace(record, version=record.version + 1, broken=replace(broken, lost=broken.lost + more))


def succeed(record: RoundRecord, by: str) -> RoundRecord:
    """The record with the job closed: every worker of the round succeeded."""
    closed = Closed(Verdict.SUCCEEDED, f"all {record.world_size} workers of round {record.round} succeeded", by)
    return replace(record, version=record.version + 1, closed=closed)

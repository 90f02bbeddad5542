"""Whether the next round can be formed, from whom, and if not, why not: one pure decision with its reason in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from elastirun.rendezvous.codec import clip
from elastirun.rendezvous.ranks import choose, member
from elastirun.rendezvous.records import Broken, Cause, Closed, ExitRecord, Member, NodeRow, RoundRecord, Status, Verdict


@dataclass(frozen=True)
class Rules:
    """What the job asks of its rounds. Times in seconds; see ``elastirun.config.Timing`` for their meaning."""

    min_nodes: int
    max_nodes: int
    max_restarts: int = 0
    fixed_ranks: bool = False
    private: bool = False  # no other agent can reach the store
    join_timeout: float = 600.0
    last_call: float = 5.0
    debounce: float = 1.0
    beat: float = 0.5
    expire: float = 5.0
    store_grace: float = 60.0
    new_store_id: str = "store"  # the name this node gives to a store it finds empty


@dataclass(frozen=True)
class Forming:
    """The decision: ``record`` to be written now, or None and ``reason`` says for what is waited."""

    record: RoundRecord | None
    reason: str
    leader: str = ""  # id of the node that should write it; the others only when it does not
    check_again: float | None = None  # when time alone may change the answer


def is_over(m: Member, record: RoundRecord, rows: dict[str, NodeRow], silent: Callable[[str], bool]) -> bool:
    """The member will never again run the record's round, or has fallen silent."""
    row = rows.get(m.id)
    return is_lost(m, record, silent) or (row is not None and (row.status is Status.LEFT or row.done_round >= record.round))


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
    """Who, for people; a long list is cut."""
    shown = [f"{r.name} {r.address}" for r in sorted(rows, key=lambda r: (r.name, r.address))[:8]]
    return ", ".join(shown) + (f", and {len(rows) - 8} more" if len(rows) > 8 else "")


def form(
    rules: Rules,
    record: RoundRecord,
    rows: dict[str, NodeRow],
    silent: Callable[[str], bool],
    now: float,
    unchanged_since: float,
) -> Forming:
    """Decide on the round after ``record``, which is broken or the empty round 0.

    ``unchanged_since``: when this node last saw the set of candidates change, seconds of its own clock.
    """
    active = [m for m in record.members if not is_over(m, record, rows, silent)]
    if active:
        return Forming(None, f"waiting for {names(active)} to stop the workers of round {record.round}")
    lost = [m for m in record.members if is_lost(m, record, silent)]
    cost = int(record.broken is not None and record.broken.cause is Cause.FAILURE and not lost)
    if record.failures + cost > rules.max_restarts:
        return _give_up(rules, record, rows, cost)
    ready = candidates(record, rows, silent)
    chosen = choose(record.members, ready, rules.max_nodes, rules.fixed_ranks)
    missing = _missing(rules, chosen)
    if missing:
        return Forming(None, missing)
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
        reason=_why(record, lost),
        failures=record.failures + cost,
        broken=None,
    )
    return Forming(following, following.reason, leader=chosen[0].id)


def _missing(rules: Rules, chosen: list[NodeRow]) -> str:
    """For whom is waited; empty when nobody is missing."""
    if len(chosen) >= rules.min_nodes:
        return ""
    joined = f"{len(chosen)} of {rules.min_nodes} nodes joined" + (f" ({names(chosen)})" if chosen else "")
    if rules.fixed_ranks:
        absent = sorted(set(range(rules.max_nodes)) - {row.node_rank for row in chosen})
        return f"{joined}, waiting for node rank {', '.join(map(str, absent[:16]))}"
    return f"{joined}, waiting for {rules.min_nodes - len(chosen)} more"


def _why(record: RoundRecord, lost: list[Member]) -> str:
    if record.broken is None:
        return "the first round"
    if lost and record.broken.cause is Cause.FAILURE:
        return clip(f"{names(lost)} was lost; {record.broken.reason}")
    return record.broken.reason


def _give_up(rules: Rules, record: RoundRecord, rows: dict[str, NodeRow], cost: int) -> Forming:
    failures = root_cause(f for m in record.members if m.id in rows for f in rows[m.id].failures)
    total = record.failures + cost
    reason = clip(f"{_times(total)}, --max-restarts={rules.max_restarts} is spent: {record.broken.reason if record.broken else ''}")
    closed = Closed(Verdict.FAILED, reason, record.broken.by if record.broken else "", failures[:16])
    leader = record.members[0].id if record.members else ""
    return Forming(replace(record, version=record.version + 1, failures=total, closed=closed), reason, leader)


def _times(count: int) -> str:
    return "a worker failed" if count == 1 else f"a worker failed in {count} rounds"


def root_cause(failures: Iterable[ExitRecord]) -> tuple[ExitRecord, ...]:
    """The failures, most likely cause first: by class of blame, then by time since the round's start."""
    return tuple(sorted(failures, key=lambda f: (f.blame, f.after, f.rank)))


def break_up(record: RoundRecord, cause: Cause, reason: str, by: str, lost: tuple[str, ...] = ()) -> RoundRecord:
    """The record with its round marked as over."""
    return replace(record, version=record.version + 1, broken=Broken(cause, clip(reason), by, lost))


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

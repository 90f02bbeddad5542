"""Strikes: the rounds in which this node did harm, and whether it sits out for them. Pure. See docs/running.md#strikes.

A node has a strike for each round that ended by a failure of which one of its workers was the cause (a hang is such a failure), and for
each round in which one of its workers was named as a straggler. The cause is the one that the reason of the next round names, which is
the same on all nodes, so no two nodes have a strike for one failure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from elastirun.rendezvous.failures import describe, root_cause
from elastirun.rendezvous.records import Blame, ExitRecord, NodeRow, RoundRecord, Status


@dataclass(frozen=True)
class Suspicion:
    """A failure of a worker of this node, which may be the cause of the end of its round."""

    round: int
    failure: ExitRecord

    def holds(self, found: RoundRecord) -> bool | None:
        """Return whether it was the cause, by a round record that was read later; None: the record does not tell yet."""
        if found.round <= self.round:
            return None
        return found.round == self.round + 1 and found.reason == describe(self.failure)


def suspect(round: int, failures: Iterable[ExitRecord]) -> Suspicion | None:
    """Return the suspicion that follows from the failures of this node's workers in a round; None: they lost their peers, or are well."""
    first = next(iter(root_cause(failures)), None)
    return Suspicion(round, first) if first is not None and first.blame == Blame.OWN_FAULT else None


def sits_out(row: NodeRow) -> bool:
    """Return whether the node of ``row`` sits out: it has stopped its workers, and does not join the next round."""
    return row.status is Status.DRAINING and 0 < row.round <= row.done_round


def others(record: RoundRecord, rows: Mapping[str, NodeRow], me: str) -> int:
    """Return how many other nodes the next round can have. ``rows``: of all nodes. A spare counts although it may have died."""
    lost = set(record.broken.lost) if record.broken else set()
    members = {m.id for m in record.members} - lost
    gone = {row.id for row in rows.values() if row.status is Status.LEFT or sits_out(row)}
    spares = {row.id for row in rows.values() if row.status is Status.JOINING} - lost
    return len((members | spares) - gone - {me})


def why_never(fixed_ranks: bool, standalone: bool) -> str:
    """Return in words why no node of a job like this one can sit out; empty: it can."""
    if standalone:
        return "it is the only node of its job"
    return "its rank is fixed, so no other node can take its place" if fixed_ranks else ""


def why_stays(hosts_store: bool, left: int | None, least: int) -> str:
    """Return in words why this node does not sit out now although it has had its strikes; empty: it sits out.

    ``left``: other nodes that the next round can have; None: not known. ``least``: --nnodes' minimum.
    """
    if hosts_store:
        return "it hosts the store, and each round includes that node"
    if left is None:
        return "the store does not say how many other nodes there are"
    return f"the job needs {least} nodes, and there are {left} others" if left < least else ""


@dataclass(frozen=True)
class Limits:
    """Limits of the time for which a node sits out, in seconds."""

    cooldown: float
    no_round: float  # without a round the others are too few
    no_store: float


def why_back(limits: Limits, out: float, broken: float, silent: float, record: RoundRecord | None, cause: bool | None) -> str:
    """Return in words why this node joins again; empty: it goes on sitting out.

    Seconds: ``out`` since it sits out, ``broken`` since the last round ended (0: one is on), ``silent`` since the store last answered.
    ``cause``: see ``Suspicion.holds``; None, too, where it sits out for something else.
    """
    if record is not None and record.closed is not None:
        return "the job is decided"
    if cause is False:
        return "another node was the cause of the failure"
    if out >= limits.cooldown:
        return "its time is over"
    if broken >= limits.no_round:
        return "the others have formed no round without it"
    return "the store does not answer" if silent >= limits.no_store else ""

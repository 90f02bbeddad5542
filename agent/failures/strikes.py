"""Strikes: the rounds in which this node did harm, and whether it sits out for them. Pure. See docs/running.md#strikes.

A node has a strike for each round that ended by a failure of which one of its workers was the cause (a hang is such a failure), and for
each round in which one of its workers was named as a straggler. The cause is the one that the reason of the next round names, which is
the same on all nodes, so no two nodes have a strike for one failure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from elastirun.rendezvous.failures import describe, root_cause
from elastirun.rendezvous.peers import quorum
from elastirun.rendezvous.wire.records import Blame, ExitRecord, NodeRow, RoundRecord, Status

HOSTS = "it hosts the store, and each round includes that node"


@dataclass(frozen=True)
class Suspicion:
    """A failure of a worker of this node, which may be the cause of the end of its round."""

    round: int
    failure: ExitRecord

    def holds(self, found: RoundRecord) -> bool | None:
        """Return whether it was the cause, by a round record that was read later; None: only that of the next round tells."""
        return found.reason == describe(self.failure) if found.round == self.round + 1 else None


def suspect(round: int, failures: Iterable[ExitRecord]) -> Suspicion | None:
    """Return the suspicion that follows from the failures of this node's workers in a round; None: they lost their peers, or are well."""
    first = next(iter(root_cause(failures)), None)
    return Suspicion(round, first) if first is not None and first.blame < Blame.VICTIM else None


def sits_out(row: NodeRow) -> bool:
    """Return whether the node of ``row`` sits out: it has stopped its workers, and does not join the next round."""
    return row.status is Status.DRAINING and 0 < row.round <= row.done_round


def others(record: RoundRecord, rows: Mapping[str, NodeRow], me: str) -> frozenset[str]:
    """Return the ids of the other nodes that the next round can have. ``rows``: of all nodes. A spare counts although it may have died."""
    lost = set(record.broken.lost) if record.broken else set()
    members = {m.id for m in record.members} - lost
    gone = {row.id for row in rows.values() if row.status is Status.LEFT or sits_out(row)}
    spares = {row.id for row in rows.values() if row.status is Status.JOINING} - lost
    return frozenset((members | spares) - gone - {me})


def may_go_on(record: RoundRecord, rows: Mapping[str, NodeRow], here: Collection[str]) -> bool:
    """Return whether the nodes ``here`` are enough of the last round to form the next one where the store may move by a majority."""
    return all(quorum.is_met(one, here, quorum.left(rows.values())) for one in quorum.asked(record, rows))


def why_never(fixed_ranks: bool, standalone: bool) -> str:
    """Return in words why no node of a job like this one can sit out; empty: it can."""
    if standalone:
        return "it is the only node of its job"
    return "its rank is fixed, so no other node can take its place" if fixed_ranks else ""


def why_stays(hosts_store: bool, left: int | None, least: int, outvoted: bool = False) -> str:
    """Return in words why this node does not sit out now although it has had its strikes; empty: it sits out.

    ``left``: number of other nodes that the next round can have; None: not known. ``least``: --nnodes' minimum. ``outvoted``: the others
    are too few of the last round to form the next one.
    """
    if hosts_store:
        return HOSTS
    if left is None:
        return "the store does not say how many other nodes there are"
    if left < least:
        return f"the job needs {least} nodes, and there are {left} others"
    return "too few of the last round's nodes would be left to form a round" if outvoted else ""


@dataclass(frozen=True)
class Limits:
    """Limits of the time for which a node sits out, in seconds."""

    cooldown: float
    no_round: float  # without a round the others are too few
    no_store: float


@dataclass(frozen=True)
class Out:
    """The state of a node that sits out. Times in seconds."""

    out: float  # since it began to
    broken: float  # since the last round ended; 0: one is on
    silent: float  # since the store last answered
    decided: bool  # the job has ended
    hosts_store: bool  # the store has moved to this node
    cause: bool | None  # see ``Suspicion.holds``; None, too, where it sits out for something else


def why_back(limits: Limits, now: Out) -> str:
    """Return in words why this node joins again; empty: it goes on sitting out."""
    reasons = (
        (now.decided, "the job is decided"),
        (now.hosts_store, "it hosts the store now, and each round includes that node"),
        (now.cause is False, "another node was the cause of the failure"),
        (now.out >= limits.cooldown, "its time is over"),
        (now.broken >= limits.no_round, "the others have formed no round without it"),
        (now.silent >= limits.no_store, "the store does not answer"),
    )
    return next((why for holds, why in reasons if holds), "")

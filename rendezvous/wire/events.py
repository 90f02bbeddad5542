"""The events of a node's machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastirun.rendezvous.wire.records import ExitRecord, NodeRow, Place, RoundRecord, Vote


@dataclass(frozen=True)
class Event:
    """Something that happened at ``now``, seconds of this node's monotonic clock."""

    now: float


class Tick(Event):
    """The machine's ``wake`` time was reached."""


@dataclass(frozen=True)
class Synced(Event):
    """The answer to a ``Sync``: what the store held when it was read."""

    started: float  # when the exchange began
    round: RoundRecord | None
    rows: Mapping[str, NodeRow]  # by id; all rows, or those that were asked for
    row: NodeRow | None = None  # this node's own row as stored; None: there is none
    hosting: bool = False  # this agent hosts the store
    ignored: tuple[str, ...] = field(default=())  # what was unreadable, and why
    kept_alive: bool = False  # the lease of this node's row was renewed, and the row is there
    votes: tuple[Vote, ...] = ()  # those that were asked for and are there


@dataclass(frozen=True)
class SyncFailed(Event):
    """The lack of an answer to a ``Sync``; whether its writes were applied is not known."""

    why: str
    refused: bool = False  # the store denies access: waiting does not help
    unreadable: bool = False  # there is a round record, but this node cannot read it
    moved: Place | None = None  # where the store of this job is, which was looked for where the job was started
    overtaken: bool = False  # the round record was replaced while it was read: the store answers, and its next answer counts


class Changed(Event):
    """The store says by itself that the round record may have changed."""


class Prepared(Event):
    """Workers can start on this node from now on. Without this event they can from the beginning, see ``Machine.begin``."""


class WorkersSucceeded(Event):
    """Every worker of this node exited with 0."""


@dataclass(frozen=True)
class WorkersFailed(Event):
    """A worker exited badly, or could not be started. Others of this node may still run."""

    failures: tuple[ExitRecord, ...]


@dataclass(frozen=True)
class WorkersStopped(Event):
    """No worker of this node runs any more after a ``Stop``. ``failures``: of the workers that failed by themselves.

    ``kept``: some are parked with their state, and go on in the next round.
    """

    failures: tuple[ExitRecord, ...] = ()
    kept: bool = False


@dataclass(frozen=True)
class SitsOut(Event):
    """No worker of this node runs any more, and none is to start before ``WorkersStopped``: the others go on without it.

    ``why`` is for people.
    """

    why: str
    failures: tuple[ExitRecord, ...] = ()


@dataclass(frozen=True)
class Gathered(Event):
    """All workers of the running ``round`` train together, in a live job. Until then those that have kept their state may train alone."""

    round: int


@dataclass(frozen=True)
class FoundAtStart(Event):
    """The round record of a store where the job was started, before this node said there that the store has moved here."""

    round: RoundRecord | None


@dataclass(frozen=True)
class Leave(Event):
    """A request that this node leaves, usually from a signal."""

    reason: str


class Close(Event):
    """The job is to be closed as failed, for every node and for good."""


@dataclass(frozen=True)
class StoodStill(Event):
    """The agent did not run for ``seconds`` (stopped, suspended, starved). ``workers_ended``: the guard has ended the workers meanwhile."""

    seconds: float
    workers_ended: bool


@dataclass(frozen=True)
class Reachable(Event):
    """The address by which other nodes reach this one, a port held for the workers' store, and the port of the standby store (0: none)."""

    address: str
    port: int
    standby: int = 0

"""What can happen to a node's machine. Every event carries ``now``, seconds of this node's monotonic clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastirun.rendezvous.records import ExitRecord, NodeRow, RoundRecord


@dataclass(frozen=True)
class Tick:
    """Time has passed; the machine's ``wake`` time was reached."""

    now: float


@dataclass(frozen=True)
class Synced:
    """A ``Sync`` was carried out: this is what the store held when it was read."""

    now: float
    started: float  # when the store was first asked, seconds
    round: RoundRecord | None
    rows: Mapping[str, NodeRow]  # by id: all rows, or those asked for
    row: NodeRow | None = None  # this node's own row as stored; None: there is none
    hosting: bool = False  # this agent hosts the store
    ignored: tuple[str, ...] = field(default=())  # what was unreadable, and why
    kept_alive: bool = False  # the lease of this node's row was renewed, and the row is there


@dataclass(frozen=True)
class SyncFailed:
    """A ``Sync`` got no answer; whether its writes were applied is not known."""

    now: float
    why: str
    refused: bool = False  # waiting does not help
    unreadable: bool = False  # there is a round record, which this node cannot read


@dataclass(frozen=True)
class Changed:
    """The round record may have changed: the store says so by itself."""

    now: float


@dataclass(frozen=True)
class WorkersSucceeded:
    """Every worker of this node exited with 0."""

    now: float


@dataclass(frozen=True)
class WorkersFailed:
    """A worker exited badly, or could not be started. Others of this node may still run."""

    now: float
    failures: tuple[ExitRecord, ...]


@dataclass(frozen=True)
class WorkersStopped:
    """After a ``Stop``: no worker of this node runs any more. ``failures``: those that failed by themselves."""

    now: float
    failures: tuple[ExitRecord, ...] = ()


@dataclass(frozen=True)
class Leave:
    """This node is told to go (a signal, usually)."""

    now: float
    reason: str


@dataclass(frozen=True)
class Close:
    """The job is to be closed as failed, for every node and for good."""

    now: float


@dataclass(frozen=True)
class StoodStill:
    """The agent did not run for ``seconds`` (stopped, suspended, starved). ``workers_ended``: so long that the guard has ended them."""

    now: float
    seconds: float
    workers_ended: bool


@dataclass(frozen=True)
class Reachable:
    """The address the other nodes reach this one by, and a port it holds for the workers' store, are known or have changed."""

    now: float
    address: str
    port: int


Event = Tick | Synced | SyncFailed | Changed | WorkersSucceeded | WorkersFailed | WorkersStopped | Leave | Close | Reachable | StoodStill

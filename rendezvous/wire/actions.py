"""The actions that the machine asks for. The agent performs them and returns their outcome as events."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from elastirun.rendezvous.wire.records import Closed, NodeRow, Place, RoundRecord, Vote


@dataclass(frozen=True)
class Put:
    """Write this node's row over ``base``, as it was last read there (None: nothing)."""

    base: NodeRow | None
    row: NodeRow


@dataclass(frozen=True)
class Change:
    """Write the round record by compare-and-set over ``base`` (None: there is none yet)."""

    base: RoundRecord | None
    record: RoundRecord


@dataclass(frozen=True)
class Sync:
    """Make one exchange with the store, in this order: ``keep_alive``, ``put``, ``change``, read the round, read ``rows`` (None: all).

    ``keep_alive``: renew the lease of this node's row; only in a store that has leases.
    ``fresh``: clear the store of all keys but the agents' before the row is written.
    ``at``: the standby store that this is about; None: the store that the job was started with. ``look``: it is not the one in use.
    ``votes``: write these before the row. ``voters``: the nodes whose votes are read, if no round is on.
    The answer is exactly one ``Synced`` or ``SyncFailed``; there is never a second exchange beside one under way.
    """

    put: Put | None = None
    change: Change | None = None
    rows: tuple[str, ...] | None = None
    fresh: bool = False
    keep_alive: bool = False
    at: Place | None = None
    look: bool = False
    votes: tuple[Vote, ...] = ()
    voters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reconnect:
    """Drop the connection: the store behind it belongs to a job that is over; a fresh one may appear."""


@dataclass(frozen=True)
class Start:
    """Start this node's workers for ``record``. ``node_rank``: this node's index in it."""

    record: RoundRecord
    node_rank: int


@dataclass(frozen=True)
class Stop:
    """Stop this node's workers. ``planned``: with the long grace, because a checkpoint can still be written."""

    planned: bool
    reason: str
    within: float | None = None  # seconds; no worker may run after that, whatever the grace is
    victim: bool = False  # the worker that failed has probably lost its peers: others, here or elsewhere, may be the cause


@dataclass(frozen=True)
class Say:
    """Print one line for people."""

    text: str


class Outcome(str, Enum):
    """The end of the job for this node."""

    SUCCEEDED = "succeeded"  # the job is closed: every worker succeeded
    FAILED = "failed"  # the job is closed: it failed
    LEFT = "left"  # this node was told to leave
    TIMEOUT = "timeout"  # no round within the join timeout
    STORE_LOST = "store lost"  # the store was away for longer than the store grace, or was replaced
    DISAGREES = "disagrees"  # this node was started with other settings than the job
    EXCLUDED = "excluded"  # another node holds the fixed rank of this one


@dataclass(frozen=True)
class Finish:
    """End this node's part: the machine is at its end and no worker of this node runs any more."""

    outcome: Outcome
    reason: str
    closed: Closed | None = None


Action = Sync | Reconnect | Start | Stop | Say | Finish

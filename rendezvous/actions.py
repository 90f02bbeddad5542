"""What the machine can ask for. The agent performs it and returns the outcome as an event."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from elastirun.rendezvous.records import Closed, NodeRow, RoundRecord


@dataclass(frozen=True)
class Put:
    """Write this node's row over ``base``, what it last saw there (None: nothing)."""

    base: NodeRow | None
    row: NodeRow


@dataclass(frozen=True)
class Change:
    """Write the round record by compare-and-set over ``base`` (None: there is none yet)."""

    base: RoundRecord | None
    record: RoundRecord


@dataclass(frozen=True)
class Sync:
    """One exchange with the store, in this order: ``keep_alive``, ``put``, ``change``, read the round, read ``rows`` (None: all).

    ``keep_alive``: renew the lease of this node's row; only in a store that has leases.

    ``fresh``: the store is cleared of all keys but the agents' before the row is written.
    Answered by exactly one ``Synced`` or ``SyncFailed``; never asked for while another is under way.
    """

    put: Put | None = None
    change: Change | None = None
    rows: tuple[str, ...] | None = None
    fresh: bool = False
    keep_alive: bool = False


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
    """Stop this node's workers. ``planned``: with the long grace, for a checkpoint can still be written."""

    planned: bool
    reason: str
    within: float | None = None  # seconds; whatever the grace is, nothing may run after that


@dataclass(frozen=True)
class Say:
    """One line for people."""

    text: str


class Outcome(str, Enum):
    """How it ended for this node."""

    SUCCEEDED = "succeeded"  # the job is closed: every worker succeeded
    FAILED = "failed"  # the job is closed: for good
    LEFT = "left"  # this node was told to leave
    TIMEOUT = "timeout"  # no round within the join timeout
    STORE_LOST = "store lost"  # the store was away for longer than the store grace, or was replaced
    DISAGREES = "disagrees"  # this node was started with other settings than the job
    EXCLUDED = "excluded"  # another node holds this one's fixed place


@dataclass(frozen=True)
class Finish:
    """The machine is at its end; nothing of this node runs any more."""

    outcome: Outcome
    reason: str
    closed: Closed | None = None


Action = Sync | Reconnect | Start | Stop | Say | Finish

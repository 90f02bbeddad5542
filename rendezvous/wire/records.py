"""The records in the store: one row per node, written by that node alone, and one round record, written by
compare-and-set by whichever node comes first.

The members of a round are stored beside its record, since they are long and do not change while it lasts.
All are immutable values; ``codec.py`` turns them into bytes and back. No field is a date: clocks of different machines
are never compared (durations only).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from enum import Enum, IntEnum


class Status(str, Enum):
    """The state of a node, as its row says it."""

    JOINING = "joining"  # wants to be in the next round
    READY = "ready"  # has seen the round that names it, and waits until the other members have seen it
    RUNNING = "running"  # its workers run
    DONE = "done"  # its workers of this round all succeeded
    DRAINING = "draining"  # its workers are being stopped
    LEFT = "left"  # gone for good; none of its workers runs any more


class Cause(str, Enum):
    """The reason why a round ended before its work was done."""

    FAILURE = "failure"  # a worker failed: costs one of --max-restarts
    LOST = "lost"  # a node fell silent
    LEAVE = "leave"  # a node left, or stopped its workers
    JOIN = "join"  # newcomers are to become members


class Verdict(str, Enum):
    """The outcome of a job, for all nodes."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"


class Blame(IntEnum):
    """The kind of a worker's failure. The failure with the lowest value is the root cause. Stored as a number."""

    FINAL = -1  # a refusal that each restart would meet again
    OWN_FAULT = 0  # an exception, exit code or signal of the worker's own, or a signal from outside such as the OOM killer's
    SUSPECT = 3  # stopped by its agent after it had shown an exception of its own
    VICTIM = 5  # failed because it lost its peers
    KILLED_BY_US = 9  # still well when its agent stopped it


@dataclass(frozen=True)
class ExitRecord:
    """The failure of one worker, as its agent saw it."""

    node: str  # name of the node, for people
    rank: int
    local_rank: int
    pid: int
    code: int  # exit status; minus the signal number when a signal ended it
    blame: int  # a value of ``Blame``
    after: float  # seconds from the start of the workers to this exit, on this node
    lines: tuple[str, ...] = ()  # the last lines of its stderr
    note: str = ""  # what else its agent knows, such as the kernel's word that it ended the worker


@dataclass(frozen=True)
class NodeRow:
    """One node's row, under ``node/<id>``. Every write raises ``seq``, so each write is a keep-alive."""

    id: str  # one incarnation of one agent
    name: str  # host name, for people
    address: str  # by which the other nodes reach it
    port: int  # held for the workers' store of the next round
    slots: int  # workers that the node starts
    role: str = "default"
    node_rank: int | None = None  # the place that it asks for
    seq: int = 1
    status: Status = Status.JOINING
    round: int = 0  # the round that ``status`` is about; 0: none yet
    done_round: int = 0  # the node will never again run this round or an earlier one
    succeeded: int = 0  # the round in which all its workers succeeded
    note: str = ""  # why it leaves or drains, for people
    failures: tuple[ExitRecord, ...] = ()  # in the last round of which it was a member
    hosts: bool = False  # its agent serves the store, so every round includes it, see docs/decisions/0009
    standby: int = 0  # the port of its standby store, which takes over when the store's host has died (docs/decisions/0020); 0: it has none
    started: int = 0  # the last round whose workers it has started
    kept: int = 0  # the last round whose end cost no progress: workers of this node were parked with their state (docs/elastic.md)


@dataclass(frozen=True)
class Member:
    """A node's place in a round. Its index in ``RoundRecord.members`` is its node rank."""

    id: str
    name: str
    address: str
    port: int
    slots: int  # workers that it starts: as in its row, or those of them that a mesh uses
    role: str = "default"
    standby: int = 0  # as in its row
    block: int = 0  # of a mesh: the number of the smallest run of nodes with whole replicas to which it belongs, see seats.py
    phase: int = 0  # the place of its first cell in that block


@dataclass(frozen=True)
class Quorum:
    """Nodes of which enough must be among the members of the next round, see quorum.py."""

    ids: tuple[str, ...]
    tie: str = ""  # with this node half of them are enough; empty: none
    ended: tuple[str, ...] = ()  # those of which nothing runs any more, as far as it was known when the store moved


@dataclass(frozen=True)
class MemberList:
    """The members of a round and its quorums, under ``members/<digest>``. Written once; the name is the SHA-256 of the bytes."""

    members: tuple[Member, ...]
    quorums: tuple[Quorum, ...] = ()


@dataclass(frozen=True)
class Broken:
    """The end of a round before its work is done. Every node stops its workers and joins the next round."""

    cause: Cause
    reason: str  # one line for people
    by: str  # id of the node that noticed
    lost: tuple[str, ...] = ()  # ids of members that some node has found silent; the other nodes need not wait until they find the same
    over: bool = False  # a member has stopped its workers and left, so the other members cannot finish a step any more
    ended: tuple[str, ...] = ()  # ids of members of which nothing runs any more, by their own word, or that of their guards
    ran: float = 0.0  # seconds for which the node that noticed had known the round
    victim: bool = False  # the worker that failed has probably lost its peers: others may be the cause

    @property
    def died(self) -> tuple[str, ...]:
        """The ``lost`` members that have not said before that they leave, as the host of a store that moves may have."""
        return tuple(i for i in self.lost if self.cause is not Cause.LEAVE or i != self.by)


@dataclass(frozen=True)
class Closed:
    """The verdict on the job. Final."""

    verdict: Verdict
    reason: str
    by: str
    failures: tuple[ExitRecord, ...] = ()  # most likely cause first


@dataclass(frozen=True)
class Place:
    """A standby store: that of the node ``id``, at ``address``:``port``. Who gives up its own serves another one, at another port."""

    id: str
    address: str
    port: int
    run: str = field(default="", compare=False)  # where a job's store is said to be: its name, as in the round record

    @property
    def name(self) -> str:
        """The name of this store, which no other one ever has."""
        return f"{self.id}:{self.port}"


@dataclass(frozen=True)
class RoundRecord:
    """The one agreement, under ``round``. Written by compare-and-set only; ``version`` rises with every write."""

    store_id: str  # name of this store; a store with another name is a different rendezvous
    version: int = 1
    round: int = 0  # 0: none formed yet
    members: tuple[Member, ...] = ()
    reason: str = ""  # why this round was formed, for people and workers
    failures: int = 0  # rounds that ended by a worker's failure and are not forgiven
    broken: Broken | None = None
    closed: Closed | None = None
    signature: str = ""  # of the last failure; the same failure again has the same signature
    repeats: int = 0  # times that failure happened in a row, with no progress between
    quick: int = 0  # rounds in a row that failed soon after their start
    losses: int = 0  # rounds in a row that lost a node soon after their start
    came: tuple[str, ...] = ()  # ids of members that the round before did not have; empty in the first round
    settings: tuple[str, ...] = ()  # the options that every node must have been started with
    members_digest: str = ""  # in the store only, in place of ``members`` and ``quorums``: the digest of their ``MemberList``
    host: str = ""  # id of the node whose agent serves this store; empty: no agent of this job does, or it is not known yet
    term: int = 0  # rises each time that another node's store takes over, see docs/decisions/0020
    quorums: tuple[Quorum, ...] = ()  # of the rounds that may have started, this one last; empty: the store never moves
    moved: Place | None = None  # where the store of this job is instead, if no round has formed here
    wanted: int = 0  # nodes that ``elastirun scale`` has asked for; 0: as many as --nnodes allows

    @property
    def open(self) -> bool:
        """Return whether a round is formed and neither broken nor closed."""
        return self.round > 0 and self.broken is None and self.closed is None

    @property
    def world_size(self) -> int:
        """The number of workers in the round, over all nodes."""
        return sum(m.slots for m in self.members)

    def index(self, node_id: str) -> int | None:
        """Return the node rank of ``node_id`` in this round; None when that node is no member."""
        return self._ranks.get(node_id)

    @functools.cached_property
    def ids(self) -> tuple[str, ...]:
        """The ids of the members in rank order. Kept, because a large job asks with each event."""
        return tuple(member.id for member in self.members)

    @functools.cached_property
    def _ranks(self) -> dict[str, int]:
        """The node rank of each member, by id. Kept, because a large job asks for each of its nodes."""
        return {member_id: rank for rank, member_id in enumerate(self.ids)}

    @property
    def fence(self) -> str:
        """The fence token: a checkpoint or a success may be published only while the store still holds this round."""
        return f"{self.store_id}:{self.round}"


@dataclass(frozen=True)
class Vote:
    """The word that a node, or the guard of a dead agent, brings to a standby store, under ``vote/<id>``. Newer ones replace it.

    ``record`` is the newest round record that the node ``id`` knew. ``gone``: the nodes whose end is proven, because they have left or
    their guards have told of it, besides those that the record names as such; a guard's vote names its own node.
    """

    id: str
    record: RoundRecord
    gone: tuple[str, ...] = ()

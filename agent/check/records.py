"""Records of a check. They travel through the store by the codec of the rendezvous, which limits and signs them. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One GPU, as the driver shows it. Memory is in MiB."""

    name: str
    total: int
    free: int
    uncorrected: int  # ECC errors that could not be corrected, since the driver was loaded; 0 also where there is no ECC


@dataclass(frozen=True)
class SharedFolder:
    """A folder that all nodes should share."""

    path: str
    error: str  # why this node cannot write there; empty: it can


@dataclass(frozen=True)
class Facts:
    """Values that a node finds about itself. An empty text: there is no such thing here. -1: unlimited, or unknown."""

    elastirun: str
    python: str
    torch: str
    cuda: str
    nccl: str
    cpus: int
    loop: float  # CPU time of a fixed loop of Python, in milliseconds
    gpus: tuple[Gpu, ...]
    gpu_error: str  # why the driver does not answer
    shm: int  # free bytes of /dev/shm
    descriptors: int  # that a process may open at most
    processes: int  # that may still be started
    log_error: str  # why nothing can be written to the log folder
    interfaces: tuple[str, ...]  # NAME=VALUE of variables that name interfaces which are not there, or lead to no other node
    folders: tuple[SharedFolder, ...]


@dataclass(frozen=True)
class Arrival:
    """A node that takes part in the check."""

    id: str
    name: str
    rank: int | None  # of --node-rank
    host: str  # host name
    address: str  # by which the other nodes reach this one
    addresses: tuple[str, ...]  # all that this machine has
    ports: tuple[int, ...]  # where this node listens, as it will in the job
    meet: int  # port at which other nodes meet this one for an all-reduce of torch; 0: torch is not used
    slots: int
    hosting: bool  # this node serves the store
    facts: Facts


@dataclass(frozen=True)
class Roster:
    """The nodes of a check, by their ids, once all have come. ``secret``: what the nodes say to each other first, in hexadecimal."""

    ids: tuple[str, ...]
    secret: str
    meet: tuple[str, ...] = ()  # those that reduce with neighbours
    hosted: bool = False  # one of them serves the store


@dataclass(frozen=True)
class Turn:
    """The nodes that begin a turn of all-reduces together."""

    ids: tuple[str, ...]


@dataclass(frozen=True)
class Link:
    """One node's measurement of the way to a port of another node. Without ``error`` all numbers are there."""

    peer: str  # id
    port: int
    error: str
    round_trip: float = 0.0  # milliseconds, median
    rate: float = 0.0  # MB/s over TCP; 0: not measured
    offset: float = 0.0  # seconds by which the peer's clock is ahead of ours
    precision: float = 0.0  # seconds; half of the round trip in which the offset was measured
    sent: int = 0  # small messages, both ways
    lost: int = 0  # of these, sent again by TCP


@dataclass(frozen=True)
class WrongName:
    """A peer's host name that has other addresses here than the peer has."""

    peer: str  # id
    found: tuple[str, ...]


@dataclass(frozen=True)
class Unseen:
    """Peers whose file in a shared folder this node does not see."""

    path: str
    peers: tuple[str, ...]


@dataclass(frozen=True)
class Collective:
    """One all-reduce of torch, and a product of two matrices before it, on one core or a GPU. Times are in milliseconds."""

    peer: str  # id of the other node; empty: among the workers of this node
    error: str
    took: float = 0.0
    matmul: float = 0.0


@dataclass(frozen=True)
class Measured:
    """All that one node has measured of others."""

    id: str
    links: tuple[Link, ...]
    names: tuple[WrongName, ...]
    unseen: tuple[Unseen, ...]
    collectives: tuple[Collective, ...] = ()


@dataclass(frozen=True)
class Finding:
    """Something wrong with a node, or with the way between two nodes. ``nodes``: their names."""

    kind: str
    nodes: tuple[str, ...]
    text: str
    advice: str
    bad: bool = True  # a job with these nodes is bound to fail; False: it may run, but look at it


@dataclass(frozen=True)
class NodeReport:
    """One row of the table."""

    id: str
    name: str
    address: str
    verdict: str  # "ok", "warning", "bad": it should not take part
    facts: Facts
    round_trip: float  # milliseconds, median over the links of this node
    rate: float  # MB/s, the same
    offset: float  # seconds by which this node's clock is ahead of the first node's
    matmul: float  # milliseconds of a product of two matrices of torch; 0: not measured


@dataclass(frozen=True)
class Result:
    """The outcome of a check, the same on all nodes."""

    nodes: tuple[NodeReport, ...]
    findings: tuple[Finding, ...]

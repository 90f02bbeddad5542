"""The whole configuration of one agent: frozen values, made once from argv and the environment.

A new option is a field here, one line in ``cli.py``, and is used in one pure function.
All times are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntFlag
from pathlib import Path


class Std(IntFlag):
    """Which of a worker's streams, with torchrun's numbers."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


@dataclass(frozen=True)
class StdMap:
    """A ``Std`` for each local rank: ``--redirects 3`` or ``--tee 0:1,11:3``."""

    default: Std = Std.NONE
    by_rank: tuple[tuple[int, Std], ...] = ()

    def of(self, local_rank: int) -> Std:
        return dict(self.by_rank).get(local_rank, self.default)


@dataclass(frozen=True)
class Endpoint:
    """Where the rendezvous store listens. ``host`` is a name or a numeric address; IPv6 without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Etcd:
    """An etcd cluster to meet at, by version 3 of its API. The files are PEM."""

    endpoints: tuple[Endpoint, ...]  # its members, or some of them; none: a private server that the agent starts
    tls: bool = False
    ca_cert: str | None = None  # None: the authorities this machine trusts
    cert: str | None = None  # ours, with ``key``, where etcd asks for one
    key: str | None = None
    user: str | None = None
    password_file: str | None = None
    prefix: str = "/elastirun/"  # of every key


@dataclass(frozen=True)
class Command:
    """What each worker runs. ``${local_rank}`` in ``args`` is replaced per worker."""

    script: str
    args: tuple[str, ...] = ()
    module: bool = False  # python -m script
    no_python: bool = False  # exec script itself
    run_path: bool = False  # through runpy.run_path


@dataclass(frozen=True)
class Timing:
    """Durations in seconds. ``beat`` and ``expire`` decide how fast a lost node is noticed."""

    join_timeout: float = 600.0  # how long to wait for a round before giving up
    last_call: float = 5.0  # the first round may wait this long after the latest join for more nodes
    debounce: float = 1.0  # newcomers to a running round are taken in together when none came for so long
    beat: float = 0.5  # how often an agent writes its row and looks at the round
    expire: float = 5.0  # a node whose row did not change for so long is lost
    store_grace: float = 60.0  # how long workers go on while the store cannot be reached
    grace: float = 30.0  # SIGTERM to SIGKILL on a planned stop: resize, drain, signal
    failure_grace: float = 5.0  # the same when a worker has failed somewhere, so that the collectives are dead anyway
    restart_pause: float = 10.0  # the longest pause before a restart when rounds fail quickly one after the other


@dataclass(frozen=True)
class LogPolicy:
    """Where the workers' output goes. ``log_dir`` None: nothing is kept."""

    log_dir: Path | None = None
    redirects: StdMap = field(default_factory=StdMap)
    tee: StdMap = field(default_factory=StdMap)
    local_ranks: frozenset[int] | None = None  # these alone reach the console; None: all
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()
    prefix_template: str | None = None  # string.Template over role_name, rank, local_rank
    event_log: str = "null"  # "null", "console", "jsonl"
    show: tuple[tuple[int, int], ...] | None = None  # first and last of the global ranks that reach the console; below 0: from the end
    limit: int = 0  # bytes beyond which no log file grows; 0: none
    mode: int = 0o600  # permissions of log files; folders can be entered by those who may read

    def shows(self, local_rank: int, rank: int, world_size: int) -> bool:
        """Whether this worker's output reaches the console."""
        here = self.local_ranks is None or local_rank in self.local_ranks
        return here and (self.show is None or any(low <= r <= high for low, high in self.show for r in (rank, rank - world_size)))


@dataclass(frozen=True)
class LaunchConfig:
    command: Command
    min_nodes: int
    max_nodes: int
    nproc: int  # workers on this node
    run_id: str
    endpoint: Endpoint | None  # of the store that one of the agents serves; without it and etcd: a private one inside this agent
    etcd: Etcd | None = None
    endpoint_option: str = "--rdzv-endpoint"  # with which the port of ``endpoint`` was given
    is_host: bool | None = None  # None: host the store when an address of the endpoint is ours
    meet_at_endpoint: bool = False  # the workers' MASTER_PORT is the endpoint's port, as with torchrun's static backend
    fixed_ranks: bool = False  # the static backend: node rank r is the node started with --node-rank r
    node_rank: int | None = None  # a wish, binding with fixed_ranks
    local_addr: str | None = None
    role: str = "default"
    max_restarts: int = 0
    restart_window: float = 0.0  # seconds; a round that ran for so long makes earlier failures forgiven; 0: none ever is
    fail_fast: bool = False  # the same failure twice with no progress between is final
    exit_code_from_worker: bool = False  # a failed job ends with the code of the worker that is to blame
    timing: Timing = field(default_factory=Timing)
    logs: LogPolicy = field(default_factory=LogPolicy)
    token: bytes | None = field(default=None, repr=False)  # signs what is in the store
    signals: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    forward_signals: tuple[str, ...] = ()  # passed on to the workers; training goes on
    numa_binding: str | None = None
    virtual_local_rank: bool = False

    @property
    def standalone(self) -> bool:
        """Nobody but this agent can reach the store: one node, without an endpoint or with the static backend's."""
        if self.etcd is not None:
            return not self.etcd.endpoints
        return self.endpoint is None or (self.fixed_ranks and self.max_nodes == 1 and self.is_host is True)

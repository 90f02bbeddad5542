"""The whole configuration of one agent: frozen values, made once from argv and the environment by ``elastirun/cli/resolve.py``.

A new option is a line in ``elastirun/cli/options.py`` and a field here, and one pure function uses it. All times are in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntFlag
from pathlib import Path

from elastirun.mesh import Mesh
from elastirun.rendezvous.timing import Timing as Timing

NO_FILES = Path("/dev/null")  # as --log-dir: nothing is written to files


class Std(IntFlag):
    """A choice among a worker's output streams, with torchrun's numbers."""

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
        """Return the streams chosen for ``local_rank``."""
        return dict(self.by_rank).get(local_rank, self.default)


@dataclass(frozen=True)
class Endpoint:
    """The address of a rendezvous store. ``host`` is a name or a numeric address; IPv6 without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Etcd:
    """An etcd cluster where the nodes meet, and the credentials for it. It needs version 3 of etcd's API."""

    endpoints: tuple[Endpoint, ...]  # the cluster's members, or some of them
    tls: bool = False
    ca_cert: str | None = None  # PEM file with the CA of etcd's certificate; None: the CAs that this machine trusts
    cert: str | None = None  # PEM file with the client certificate, where etcd asks for one
    key: str | None = None  # PEM file with the private key of ``cert``
    user: str | None = None
    password_file: str | None = None
    prefix: str = "/elastirun/"  # put in front of every key


@dataclass(frozen=True)
class Command:
    """The command of each worker. ``${local_rank}`` in ``args`` is replaced per worker."""

    script: str
    args: tuple[str, ...] = ()
    module: bool = False  # run as python -m script
    no_python: bool = False  # execute the script itself, without python
    run_path: bool = False  # run through runpy.run_path


@dataclass(frozen=True)
class Preload:
    """Modules that a fork server imports for the workers, if there are any."""

    modules: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()  # imported after ``modules``, unless forks cannot share them
    why: str = ""  # these are preloaded, or none is
    keep_warm: float = 0.0  # seconds for which a fork server stays after the job, for the next command; 0: it ends with the job


@dataclass(frozen=True)
class LogPolicy:
    """Routes of the workers' output, to files and to the console."""

    log_dir: Path | None = None  # None: a temporary folder, kept only if a stream is redirected or teed; NO_FILES: no log files
    redirects: StdMap = field(default_factory=StdMap)
    tee: StdMap = field(default_factory=StdMap)
    local_ranks: frozenset[int] | None = None  # local ranks that reach the console; None: all
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()
    prefix_template: str | None = None  # string.Template over role_name, rank, local_rank, hostname
    event_log: str = "null"  # "null", "console", "jsonl"
    show: tuple[tuple[int, int], ...] | None = None  # ranges of global ranks that reach the console; negative: from the end
    limit: int = 0  # largest size of a log file in bytes; 0: unlimited
    specs: str = ""  # the plug-in that decides where the workers' output goes; empty: none
    mode: int = 0o600  # permissions of log files; whoever may read a file may also enter its folder
    format: str = "text"  # of the agent's own lines: "text", "json"

    def shows(self, local_rank: int, rank: int, world_size: int) -> bool:
        """Tell whether this worker's output reaches the console."""
        here = self.local_ranks is None or local_rank in self.local_ranks
        return here and (self.show is None or any(low <= r <= high for low, high in self.show for r in (rank, rank - world_size)))


@dataclass(frozen=True, kw_only=True)
class RendezvousConfig:
    """The meeting of the nodes: where, how many, and in which order."""

    min_nodes: int
    max_nodes: int
    run_id: str
    endpoint: Endpoint | None  # of the store that one of the agents hosts; None without etcd: a store inside this agent
    other_endpoints: tuple[Endpoint, ...] = ()  # where the store may be once it has moved, see decision 0021; only with ``succession``
    etcd: Etcd | None = None
    endpoint_option: str = "--rdzv-endpoint"  # name of the option that gave the port of ``endpoint``, for messages
    is_host: bool | None = None  # None: host the store if the endpoint is an address of this machine
    meet_at_endpoint: bool = False  # the workers' MASTER_PORT is the endpoint's port, as with torchrun's static backend
    fixed_ranks: bool = False  # the static backend: node rank r is the node that was started with --node-rank r
    node_rank: int | None = None  # the rank with fixed_ranks, else a preference
    store_succession: str = "off"  # or "proof", "majority": see ``Rules``

    @property
    def succession(self) -> bool:
        """Whether another node takes over the store when its host is gone."""
        return self.store_succession != "off"


@dataclass(frozen=True, kw_only=True)
class LaunchConfig(RendezvousConfig):
    """The configuration of one agent."""

    command: Command
    nproc: int  # workers on this node
    node_name: str = ""  # empty: the host name
    local_addr: str | None = None
    port_range: tuple[int, int] | None = None  # first and last port that the agent may choose to listen on; None: any free one
    role: str = "default"
    max_restarts: int = 0
    restart_window: float = 0.0  # seconds; a round that ran this long resets the count of failures; 0: never
    fail_fast: bool = False  # the same failure twice without progress in between ends the job
    exit_code_from_worker: bool = False  # a failed job exits with the code of the worker that caused it
    timing: Timing = field(default_factory=Timing)
    hang_timeout: float | None = None  # seconds without a step after which workers hang; 0: learned (``auto``); None: off
    strikes: int = 0  # rounds in which this node did harm before it sits out; 0: it never does
    strikes_cooldown: float = 600.0  # seconds for which it sits out at most
    first_step_timeout: float | None = None  # seconds without a first step of a round after which workers hang; None: off
    stacks: bool = True  # Python workers write their stacks at a signal, from their start on
    logs: LogPolicy = field(default_factory=LogPolicy)
    token: bytes | None = field(default=None, repr=False)  # the secret that signs every record in the store
    signals: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")  # these stop this node
    forward_signals: tuple[str, ...] = ()  # these are passed on to the workers while training goes on
    preload: Preload = field(default_factory=Preload)
    numa_binding: str | None = None
    check: bool = False  # check this node and its network before it joins
    virtual_local_rank: bool = False
    mesh: str = ""  # that the workers of each round form, as in dp=auto,pp=2,tp=4; empty: none
    node_unit: int = 1  # the number of nodes of a round is a multiple of it
    health: Endpoint | None = None  # where to serve the health port; an empty host: on every interface; None: nowhere
    health_optional: bool = False  # go on without it when another process has the port

    @property
    def mesh_of_rounds(self) -> str:
        """Return the mesh that decides which nodes form a round; empty: there is none."""
        return self.mesh or (str(Mesh.of_nodes(self.node_unit, self.nproc)) if self.node_unit > 1 else "")

    @property
    def standalone(self) -> bool:
        """Return whether no other agent can reach the store: it is private, or the static backend's for a single node."""
        alone = self.fixed_ranks and self.max_nodes == 1 and self.is_host is True
        return self.etcd is None and (self.endpoint is None or alone)

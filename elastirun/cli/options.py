"""Every option of the command line in one table. See docs/torchrun.md."""

from __future__ import annotations

from dataclasses import dataclass

from elastirun.config import Timing


@dataclass(frozen=True)
class Option:
    """One option. Its value is text wherever it comes from (command line, environment, default) until ``resolve`` parses it."""

    dest: str
    metavar: str  # name of the value in the help; empty: the option is a flag
    default: str | None
    help: str
    short: str | None = None  # one letter
    new: bool = False  # True: torchrun lacks this option
    in_environment: bool = True  # whether a variable sets it
    key: bool = False  # True: a key of --set, not an option

    @property
    def flag(self) -> bool:
        """Return whether the option takes no value."""
        return not self.metavar

    @property
    def name(self) -> str:
        """The option as it is written: ``--nproc-per-node``, or ``--set restart-pause``."""
        return ("--set " if self.key else "--") + self.dest.replace("_", "-")

    @property
    def env(self) -> str | None:
        """The variable that sets the option: ``PET_NPROC_PER_NODE``, or ``PET_SET restart-pause``."""
        if self.key:
            return self.name.replace("--set", "PET_SET")
        return f"PET_{self.dest.upper()}" if self.in_environment else None


def _key(dest: str, metavar: str, default: str, help: str) -> Option:
    return Option(dest, metavar, default, help, new=True, key=True)


_BACKEND_RULE = "static: fixed node ranks. Not given: c10d for MIN:MAX or an endpoint without --node-rank."
_LIST_RULE = "etcd: HOST:2379,HOST:2379,... c10d: a list says where the store may be later."
_DETECT_RULE = "if no endpoint is given, take it and what else is missing from a Slurm step or a Kubernetes Job."
_PRELOAD = "Import these once, and fork workers from there. auto: torch, if the text of SCRIPT imports it."
_KEEP_WARM = "What is preloaded stays for TIME after the job (10m), and your next command with the same environment starts with it."
_MESH = "Rounds of whole replicas: dp=auto,pp=2,tp=4, outermost first; what is over waits as a spare."
_SUCCESSION = "Another node takes over the store. proof: when its host has died or left; majority: or is silent."
_JOIN, _LAST, _EXPIRE, _STORE, _GRACE, _PAUSE = (
    f"{time:g}" for time in (Timing.join_timeout, Timing.last_call, Timing.expire, Timing.store_grace, Timing.grace, Timing.restart_pause)
)

RUN = "What to run"
FROM_TORCHRUN = "From torchrun"
GROUPS = {
    RUN: (
        Option("module", "", None, "SCRIPT is a module name: run it as python -m does.", "m"),
        Option("no_python", "", None, "SCRIPT is a program: run it without python in front."),
        Option("preload", "auto|off|MODULES", "auto", _PRELOAD, new=True),
        Option("keep_warm", "off|TIME", "off", _KEEP_WARM, new=True),
        Option("check", "", None, "First check the nodes and the network between them; see elastirun check --help.", new=True),
        Option("dry_run", "", None, "Show what would be run, and where each value came from; start nothing.", new=True),
        Option("version", "", None, "Show the version.", new=True, in_environment=False),
        Option("help_all", "", None, "Show every option.", new=True, in_environment=False),
        Option("print_completion", "bash|zsh|tcsh", None, "Print a script that completes options in this shell.", in_environment=False),
    ),
    "Nodes and workers": (
        Option("nnodes", "N|MIN:MAX", "1:1", "Number of nodes, or the minimum and the maximum."),
        Option("nproc_per_node", "N|auto|gpu|cpu", "1", "Workers on this node. auto: one per GPU, without GPUs one per usable CPU."),
        Option("mesh", "NAME=SIZE,...", "", _MESH, new=True),
        Option("node_unit", "N", "1", "A round has a multiple of N nodes; for scripts with a mesh of their own.", new=True),
        Option("standalone", "", None, "Run on this node alone, on a free port. The default for one node without an endpoint."),
        Option("node_name", "NAME", "", "What people read for this node; the host name if not given.", new=True),
        Option("node_rank", "N", "0", "This node's rank, from 0: fixed with static, a preference with c10d."),
    ),
    "Rendezvous": (
        Option("rdzv_endpoint", "HOST[:PORT]", "", f"Where the nodes meet. PORT: 29400, static: 29500; {_LIST_RULE}"),
        Option("rdzv_id", "NAME", "none", "The job's name, the same on every node; another job must have another."),
        Option("rdzv_backend", "c10d|static|etcd", "static", f"etcd: separate etcd servers. {_BACKEND_RULE}"),
        Option("master_addr", "HOST", "127.0.0.1", "The address of node 0, where the nodes meet; --rdzv-endpoint takes precedence."),
        Option("master_port", "PORT", None, "The port that goes with --master-addr; 29500 if not given."),
        Option("local_addr", "HOST", None, "The address at which other nodes reach this node; detected if not given."),
        Option("port_range", "FIRST:LAST", None, "Ports that this node chooses from to listen on; MASTER_PORT is one of them.", new=True),
        Option("join_timeout", "SECONDS", _JOIN, "How long to wait until MIN nodes have joined. static: 900.", new=True),
        Option("last_call", "SECONDS", _LAST, "How long the first round waits for more nodes after the latest one has joined.", new=True),
        Option("expire", "SECONDS", _EXPIRE, "A node that is silent for this long is lost: the others go on without it.", new=True),
        Option("store_grace", "SECONDS", _STORE, "How long workers go on while the rendezvous store cannot be reached.", new=True),
        Option("store_succession", "proof|majority|off", "majority", _SUCCESSION, new=True),
        Option("token_file", "FILE", None, "A secret of 16 bytes or more; only nodes that have it can take part.", new=True),
        Option("rdzv_conf", "KEY=VALUE,...", "", "torchrun's settings: join_timeout, last_call_timeout, is_host, ..."),
        Option("detect", "auto|off", "auto", f"auto: {_DETECT_RULE}", new=True),
    ),
    "Failures and stopping": (
        Option("max_restarts", "N", "0", "How often all workers may be restarted because one of them failed."),
        Option("restart_window", "SECONDS", "0", "A round that runs this long resets the count of restarts; 0: never.", new=True),
        Option("fail_fast", "", None, "End the job when the same failure occurs twice without progress in between.", new=True),
        Option("hang_timeout", "off|auto|SECONDS", "off", "Restart when no worker of this node has made a step for so long.", new=True),
        Option("stacks", "on|off", "on", "Whether Python workers can write their stacks at a signal of their agent.", new=True),
        Option("strikes", "N", "0", "A node that fails or straggles in N rounds sits out, a spare takes its place; 0: never.", new=True),
        Option("exit_code_from_worker", "", None, "Exit with the failed worker's exit code instead of 1.", new=True),
        Option("grace", "SECONDS", _GRACE, "Time from SIGTERM to SIGKILL when workers are stopped.", new=True),
        Option("failure_grace", "SECONDS", None, "The same after a worker failed: 5, or --grace if that is given.", new=True),
        Option("signals_to_handle", "NAMES", "SIGTERM,SIGINT,SIGHUP,SIGQUIT", "Signals that make this node stop its workers and leave."),
        Option("forward_signals", "NAMES", "", "Signals passed on to each worker while training goes on: USR1,USR2.", new=True),
    ),
    "Output": (
        Option("log_dir", "FOLDER", None, "For the workers' logs; /dev/null: no files. Default: a temporary folder if -r or -t needs it."),
        Option("redirects", "N|RANK:N,...", "0", "Write to files: 1 stdout, 2 stderr, 3 both; by local rank: 0:3,1:2.", "r"),
        Option("tee", "N|RANK:N,...", "0", "Write to files and to the console; values as for --redirects.", "t"),
        Option("show", "RANKS", "", "Only these ranks of the whole job reach the console: 0,-1 (the last), 0-3.", new=True),
        Option("log_limit", "BYTES", None, "Upper limit of a log file, such as 10M; one older part is kept as stdout.log.1.", new=True),
        Option("log_format", "text|json", "text", "The form of the agent's own lines on stderr.", new=True),
        Option("event_log_handler", "null|console|jsonl", "null", "Where events go; with --log-dir always to events.jsonl there."),
        Option("health_port", "[HOST:]PORT", None, "Serve /healthz, /status, /metrics by HTTP; PORT alone: on every interface.", new=True),
    ),
    "For experts": (
        Option("set", "KEY=VALUE,...", "", "Settings that few jobs need, by the keys below; may be repeated.", new=True),
        _key("first_step_timeout", "off|SECONDS", "off", "As --hang-timeout, before the first step of a round."),
        _key("strikes_cooldown", "SECONDS", "600", "For how long a node with too many --strikes sits out."),
        _key("restart_pause", "SECONDS", _PAUSE, "Longest pause before a restart; pauses grow when rounds fail quickly."),
        _key("log_mode", "MODE", "600", "Permissions of log files, as for chmod: 640 lets the folder's group read them."),
    ),
    FROM_TORCHRUN: (
        Option("run_path", "", None, "Run SCRIPT as a file through runpy.run_path. Wins over --module and --no-python."),
        Option("role", "NAME", "default", "A name for the workers: ROLE_NAME in their environment."),
        Option("shutdown_timeout", "SECONDS", None, "torchrun's name for --grace."),
        Option("log_line_prefix_template", "TEXT", "", "Begins teed lines. Filled in: ${rank}, ${local_rank}, ${role_name}, ${hostname}."),
        Option("local_ranks_filter", "RANKS", "", "Only these local ranks reach the console, such as 0 or 0,1."),
        Option("duplicate_stdout_filters", "TEXT,...", "", "Teed lines with one of these go to filtered_stdout.log, too; ,, is a comma."),
        Option("duplicate_stderr_filters", "TEXT,...", "", "The same for stderr and filtered_stderr.log."),
        Option("numa_binding", "MODE", None, "CPUs near each worker's GPU: node, socket, exclusive or core-complex."),
        Option("virtual_local_rank", "", None, "LOCAL_RANK is 0 for every worker, and each worker sees only its own GPU."),
        Option("monitor_interval", "SECONDS", "0.1", "No effect: a worker's exit is seen at once."),
        Option("start_method", "spawn|fork|forkserver", "spawn", "No effect."),
        Option("logs_specs", "NAME", None, "A plug-in of the entry point group torchrun.logs_specs that decides where output goes."),
    ),
}
BY_DEST = {option.dest: option for group in GROUPS.values() for option in group}
OPTIONS = tuple(option for option in BY_DEST.values() if not option.key)
KEYS = {option.dest.replace("_", "-"): option for option in BY_DEST.values() if option.key}  # those of --set, as they are written

# The options that a person needs first, for --help; --help-all shows the others.
FIRST = (
    *("module", "dry_run", "version", "help_all"),
    *("nnodes", "nproc_per_node", "node_rank"),
    *("rdzv_endpoint", "rdzv_id", "master_addr"),
    *("max_restarts", "hang_timeout", "grace"),
    *("log_dir", "redirects", "tee"),
)

"""Every option of the command line in one table, and the pure pass over argv that writes their names in full.

torchrun's users write ``--nproc_per_node``, ``--nproc-per-node`` or ``--nproc``; after ``normalise`` there is one spelling,
``--nproc-per-node=VALUE``, so that nothing behind it has to know.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from elastirun.cli.parse import nearest, quote
from elastirun.config import Timing
from elastirun.errors import UsageError


@dataclass(frozen=True)
class Option:
    """One option. Its value is text here, on the command line, in the environment and as default alike; ``resolve`` parses it."""

    dest: str
    metavar: str  # what the help calls the value; empty: a flag
    default: str | None
    help: str
    short: str | None = None
    new: bool = False  # torchrun does not have it
    in_environment: bool = True

    @property
    def flag(self) -> bool:
        return not self.metavar

    @property
    def name(self) -> str:
        return "--" + self.dest.replace("_", "-")

    @property
    def env(self) -> str | None:
        return f"PET_{self.dest.upper()}" if self.in_environment else None


_BACKEND_RULE = "static: fixed node ranks. Not given: c10d for MIN:MAX or an endpoint without --node-rank."
_JOIN, _LAST, _EXPIRE, _STORE, _GRACE, _PAUSE = (
    f"{time:g}" for time in (Timing.join_timeout, Timing.last_call, Timing.expire, Timing.store_grace, Timing.grace, Timing.restart_pause)
)

RUN = "What to run"
GROUPS = {
    RUN: (
        Option("module", "", None, "SCRIPT is a module name: run it as python -m does.", "m"),
        Option("no_python", "", None, "SCRIPT is a program: run it without python in front."),
        Option("run_path", "", None, "Run SCRIPT as a file through runpy.run_path. Wins over the two above."),
        Option("dry_run", "", None, "Show what would be run, and where each value that is no default came from; start nothing.", new=True),
        Option("version", "", None, "Show the version.", new=True, in_environment=False),
    ),
    "Nodes and workers": (
        Option("nnodes", "N|MIN:MAX", "1:1", "Number of nodes, or the fewest and the most to run on."),
        Option("nproc_per_node", "N|auto|gpu|cpu", "1", "Workers on this node. auto: one per GPU, without GPUs one per usable CPU."),
        Option("standalone", "", None, "This node alone, on a free port. The default for one node without an endpoint."),
        Option("node_rank", "N", "0", "This node's place, from 0: binding with static, a wish with c10d."),
        Option("role", "NAME", "default", "A name for the workers: ROLE_NAME in their environment."),
    ),
    "Rendezvous": (
        Option("rdzv_endpoint", "HOST[:PORT]", "", "Where the nodes meet. PORT: 29400, static: 29500; etcd: HOST:2379,HOST:2379,..."),
        Option("rdzv_id", "NAME", "none", "The job's name, the same on every node; another job must have another."),
        Option("rdzv_backend", "c10d|static|etcd", "static", f"etcd: at servers of their own. {_BACKEND_RULE}"),
        Option("master_addr", "HOST", "127.0.0.1", "The address of node 0, where the nodes meet; --rdzv-endpoint goes before it."),
        Option("master_port", "PORT", None, "The port that goes with --master-addr; 29500 if not given."),
        Option("local_addr", "HOST", None, "The address by which the others reach this node, if not the one it finds itself."),
        Option("join_timeout", "SECONDS", _JOIN, "How long to wait until there are enough nodes. static: 900.", new=True),
        Option("last_call", "SECONDS", _LAST, "How long the first round waits for more nodes once there are MIN.", new=True),
        Option("expire", "SECONDS", _EXPIRE, "A node silent for so long is lost: the others go on without it.", new=True),
        Option("store_grace", "SECONDS", _STORE, "How long workers go on while the rendezvous cannot be reached.", new=True),
        Option("token_file", "FILE", None, "A secret of 16 bytes or more; only nodes that have it can take part.", new=True),
        Option("rdzv_conf", "KEY=VALUE,...", "", "torchrun's settings: join_timeout, last_call_timeout, is_host, ..."),
    ),
    "Failures and stopping": (
        Option("max_restarts", "N", "0", "How often all workers may be started anew because one of them failed."),
        Option("restart_window", "SECONDS", "0", "Failures before a round that ran for so long are forgiven; 0: never.", new=True),
        Option("fail_fast", "", None, "The same failure twice, with no progress between, ends the job.", new=True),
        Option("restart_pause", "SECONDS", _PAUSE, "The longest pause before a restart, when rounds fail quickly.", new=True),
        Option("exit_code_from_worker", "", None, "A failed job ends with its worker's exit code, not with 1.", new=True),
        Option("grace", "SECONDS", _GRACE, "From SIGTERM to SIGKILL when workers are to stop.", new=True),
        Option("failure_grace", "SECONDS", None, "The same when a worker failed: 5, or --grace if that is given.", new=True),
        Option("shutdown_timeout", "SECONDS", None, "torchrun's name for --grace."),
        Option("signals_to_handle", "NAMES", "SIGTERM,SIGINT,SIGHUP,SIGQUIT", "Signals at which this node stops its workers and leaves."),
        Option("forward_signals", "NAMES", "", "Signals passed on to each worker, while training goes on: USR1,USR2.", new=True),
    ),
    "Output": (
        Option("log_dir", "FOLDER", None, "For the workers' logs; /dev/null: no files. Not given: a temporary one, if -r or -t needs it."),
        Option("redirects", "N|RANK:N,...", "0", "To files: 1 stdout, 2 stderr, 3 both; by local rank: 0:3,1:2.", "r"),
        Option("tee", "N|RANK:N,...", "0", "To files and to the console, in the same way.", "t"),
        Option("local_ranks_filter", "RANKS", "", "Only these local ranks reach the console, such as 0 or 0,1."),
        Option("show", "RANKS", "", "Only these ranks of the whole job reach the console: 0,-1 (the last), 0-3.", new=True),
        Option("log_limit", "BYTES", None, "No log file grows beyond this, such as 10M; one older part is kept as stdout.log.1.", new=True),
        Option("log_mode", "MODE", "600", "Who may read log files, as for chmod: 640 lets the folder's group read them.", new=True),
        Option("duplicate_stdout_filters", "TEXT,...", "", "Teed lines with one of these go to filtered_stdout.log too; ,, is a comma."),
        Option("duplicate_stderr_filters", "TEXT,...", "", "The same for stderr and filtered_stderr.log."),
        Option("event_log_handler", "null|console|jsonl", "null", "Where events go; with --log-dir always to events.jsonl there."),
    ),
    "Placement": (
        Option("numa_binding", "MODE", None, "CPUs near each worker's GPU: node, socket, exclusive or core-complex."),
        Option("virtual_local_rank", "", None, "LOCAL_RANK is 0 for every worker, and each sees one GPU alone."),
    ),
    "torchrun compatibility": (
        Option("monitor_interval", "SECONDS", "0.1", "No effect: a worker's exit is seen at once."),
        Option("start_method", "spawn|fork|forkserver", "spawn", "No effect."),
        Option("logs_specs", "NAME", None, "Not supported."),
    ),
}
OPTIONS = tuple(option for group in GROUPS.values() for option in group)
BY_DEST = {option.dest: option for option in OPTIONS}
_BY_NAME = {option.name: option for option in OPTIONS}
_BY_SHORT = {option.short: option for option in OPTIONS if option.short}
_HELP = ("--help", "-h")


def normalise(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split argv into our options, each as ``--full-name`` or ``--full-name=value``, and the script with its arguments, untouched.

    Raises ``UsageError`` for an option that does not exist, that could be several, or that lacks its value or has one too many.
    """
    options: list[str] = []
    rest = list(argv)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        token = rest.pop(0)
        if token == "--":
            break
        options += _long(token, rest) if token.startswith("--") else _short(token, rest)
    return options, rest


def _long(token: str, rest: list[str]) -> list[str]:
    """``--rdzv_id=a`` -> ``--rdzv-id=a``; takes a value that stands by itself off ``rest``."""
    typed, equals, value = token.partition("=")
    name = _full_name(typed)
    if name == "--help":
        return [name]
    if _BY_NAME[name].flag:
        if equals:
            raise UsageError(f"{name}: it is a flag and takes no value; leave out {quote(equals + value)}")
        return [name]
    return [f"{name}={value if equals else _value(name, rest)}"]


def _short(token: str, rest: list[str]) -> list[str]:
    """``-r3``, ``-r=3``, ``-r 3``, and flags in one word with what follows: ``-mr3``."""
    if token in _HELP:
        return ["--help"]
    option = _BY_SHORT.get(token[1])
    if option is None:
        raise UsageError(f"no option {quote(token)}{_long_for(token)}; see elastirun --help")
    tail = token[2:]
    if not option.flag:
        return [f"{option.name}={tail.removeprefix('=') if tail else _value(option.name, rest)}"]
    if tail and tail[0] not in _BY_SHORT:
        raise UsageError(f"no option {quote(token)}{_long_for(token)}; -{option.short} is a flag and takes no value")
    return [option.name, *(_short("-" + tail, rest) if tail else [])]


def _long_for(token: str) -> str:
    """``-nnodes=2`` was perhaps meant to be ``--nnodes``."""
    return nearest("-" + token.partition("=")[0].replace("_", "-"), _BY_NAME)


def _value(name: str, rest: list[str]) -> str:
    """The value of ``name``, which is the next word unless that looks like an option."""
    following = rest[0] if rest else "--"
    if following.startswith("-") and following != "-" and " " not in following and not re.fullmatch(r"-[0-9.][0-9.,-]*", following):
        raise UsageError(f"{name}: the value is missing; write {name}={_BY_NAME[name].metavar}")
    return rest.pop(0)


def _full_name(typed: str) -> str:
    """The one option that ``typed`` is, or begins. torchrun's go first: a new one of ours never makes its prefixes ambiguous."""
    name = typed.replace("_", "-")
    if name in _BY_NAME or name in _HELP:
        return name
    begun = [option for option in OPTIONS if option.name.startswith(name) and name != "--"]
    names = [option.name for option in begun if not option.new] or [option.name for option in begun]
    if "--help".startswith(name) and name != "--":
        names.append("--help")
    if len(names) == 1:
        return names[0]
    if names:
        raise UsageError(f"{typed} could be any of {', '.join(names)}; write it in full")
    raise UsageError(f"no option {quote(typed)}{_close_to(name)}; options of the script go after the script")


def _close_to(name: str) -> str:
    """`` (did you mean X?)``: the one option that begins like ``name`` without its last letter, as ``--nprocs``, else the most similar."""
    begun = [option for option in _BY_NAME if option.startswith(name[:-1])]
    return nearest(name, begun if len(begun) == 1 else _BY_NAME, 0.0 if len(begun) == 1 else 0.6)

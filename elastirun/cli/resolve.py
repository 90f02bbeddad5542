"""Resolves the given options into a ``LaunchConfig`` by torchrun's rules. Pure: questions to this machine go through ``MachineFacts``.

A command line that works under torchrun works here. What torchrun ignores silently gives a warning. What cannot work gives a
``UsageError`` that names the option, or the variable when the value came from there.

See docs/torchrun.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from elastirun.cli import parse
from elastirun.cli.given_options import GivenOptions, MachineFacts, Origin
from elastirun.cli.options import BY_DEST, KEYS, OPTIONS
from elastirun.cli.rendezvous_options import reads_timeout, resolve_rendezvous
from elastirun.config import NO_FILES, Command, Endpoint, LaunchConfig, LogPolicy, Preload, RendezvousConfig, StdMap, Timing
from elastirun.errors import StartError, UsageError
from elastirun.mesh import Mesh

STATIC_JOIN_TIMEOUT = 900.0  # seconds; torchrun's default for its static backend
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # torchrun's variable for --shutdown-timeout
MOST_WORKERS = 4096  # on one node; far above any machine's devices, so more is a typing mistake
LEAST_LOG_LIMIT = 1 << 16  # bytes; the longest line that is kept in one piece
MOVE = 3.0  # seconds within which the rendezvous store has moved, once its host is given up
# Options that elastirun warns of where they stand after the script: few scripts have options with these names.
WARNED_AFTER_SCRIPT = ("nnodes", "nproc_per_node", "standalone", "rdzv_endpoint", "rdzv_id", "max_restarts")
STARTED_ONCE = "the job's only worker is never started again (one node, --max-restarts=0)"
OTHER_VARIABLES = {  # of torchrun's agent, and what to write here
    "TORCHELASTIC_HEALTH_CHECK_PORT": "write --health-port",
    "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "a worker that SIGKILL does not end makes its node leave the job",
}
SHORTEST_EXPIRE = 1.0  # seconds; below this a busy node is taken for a lost one


def resolve(options: GivenOptions, script: Sequence[str], facts: MachineFacts) -> LaunchConfig:
    """Return the configuration for ``script``, the program and its arguments.

    Raises ``UsageError`` or ``StartError``; adds warnings to ``options``.
    """
    command = _command(options, script)
    conf = options.read("rdzv_conf", parse.rdzv_conf)
    rendezvous = resolve_rendezvous(options, conf, facts)
    timing = _timing(options, conf, rendezvous.fixed_ranks)
    if rendezvous.store_succession == "majority" and rendezvous.max_nodes > 2 and timing.store_grace <= timing.doubt + MOVE:
        given = f"{options.label('store_grace')}={timing.store_grace:g}"
        why = f"a silent host of the store is given up only after twice --expire ({timing.doubt:g} s)"
        options.warn(f"{given} is too short: {why}, and the nodes end before that; make it longer")
    logs = _logs(options)
    _warn_of_late_options(options, script)
    options.read("monitor_interval", parse.seconds(0.0, above=True))
    options.read("start_method", parse.choice("spawn", "fork", "forkserver"))
    signals, forward_signals = _signals(options, "signals_to_handle"), _signals(options, "forward_signals")
    twice = sorted({*signals} & {*forward_signals})
    if twice:
        both = f"{options.label('forward_signals')} and {options.label('signals_to_handle')}"
        raise UsageError(f"{both} contradict each other on {twice[0]}; name it in one of them")
    config = LaunchConfig(
        command=command,
        nproc=1,
        node_name=options.read("node_name", parse.node_name) if options.text("node_name") else "",
        local_addr=options.optional("local_addr", parse.host) if options.text("local_addr") else None,
        port_range=_port_range(options, rendezvous),
        role=options.read("role", parse.name),
        max_restarts=options.read("max_restarts", parse.integer(0)),
        restart_window=options.read("restart_window", parse.seconds(0.0)),
        fail_fast=options.flag("fail_fast"),
        exit_code_from_worker=options.flag("exit_code_from_worker"),
        timing=timing,
        hang_timeout=options.read("hang_timeout", parse.seconds_or(off=None, auto=0.0)),
        first_step_timeout=options.read("first_step_timeout", parse.seconds_or(off=None)),
        stacks=options.read("stacks", parse.choice("on", "off")) == "on",
        strikes=options.read("strikes", parse.integer(0)),
        strikes_cooldown=options.read("strikes_cooldown", parse.seconds(0.0, above=True)),
        logs=logs,
        signals=signals,
        forward_signals=forward_signals,
        numa_binding=options.optional("numa_binding", parse.choice("node", "socket", "exclusive", "core-complex")),
        virtual_local_rank=options.flag("virtual_local_rank"),
        check=options.flag("check"),
        health=_health(options),
        health_optional=_is_beside_another_agent(options),
        **vars(rendezvous),
    )
    _warn_of_variables(options)
    named, keep_warm = _modules(options), options.read("keep_warm", parse.duration)
    nproc = _workers(options, facts)  # after everything else that may be wrong, because it may be slow
    _check_ranks(options, logs, nproc, alone=rendezvous.max_nodes == 1)
    _check_gpus(options, nproc, facts)
    config = _with_mesh(options, replace(config, nproc=nproc))
    preload = _preload(options, named, replace(config, preload=Preload(keep_warm=keep_warm)), facts)
    return replace(config, preload=replace(preload, keep_warm=keep_warm if preload.modules else 0.0))


def _with_mesh(options: GivenOptions, config: LaunchConfig) -> LaunchConfig:
    """Return ``config`` with --mesh or --node-unit. Raises ``UsageError`` where no round could ever form with nodes like this one."""
    mesh = options.read("mesh", Mesh.parse) if options.text("mesh") else None
    unit, label = options.read("node_unit", parse.integer(1)), options.label("mesh" if mesh else "node_unit")
    if mesh is None and unit == 1:
        return config
    if mesh is not None and unit > 1:
        raise UsageError(f"{label} and {options.label('node_unit')} exclude each other; leave one of them out")
    if config.fixed_ranks and config.max_nodes > 1:
        raise UsageError(f"{label} chooses the nodes of a round and their ranks, and static fixes them; give --rdzv-backend=c10d")
    count = f"{config.max_nodes} node{'s' * (config.max_nodes > 1)}"
    config = replace(config, mesh=str(mesh or ""), node_unit=unit)
    from elastirun.agent.workers import spec

    try:
        why, idle = spec.check_mesh(config)
    except ValueError as error:
        raise UsageError(f"{label}: {error}") from None
    if why:
        raise UsageError(f"{label}: {count} like this one, the most that {options.label('nnodes')} allows, form no round: {why}")
    if idle:
        options.warn(f"{label}: {idle} of the workers of {count} like this one are never started, because they make no replica")
    return config


def _command(options: GivenOptions, script: Sequence[str]) -> Command:
    if not script:
        raise UsageError("no script is given; usage: elastirun [OPTIONS] SCRIPT [ARGS]..., see elastirun --help")
    module, no_python, run_path = options.flag("module"), options.flag("no_python"), options.flag("run_path")
    if run_path:
        for dest, given in (("module", module), ("no_python", no_python)):
            if given:
                options.warn(f"{options.label(dest)} is ignored: {options.label('run_path')} goes before it")
    elif module and no_python:
        both = f"{options.label('module')} and {options.label('no_python')}"
        raise UsageError(f"{both} contradict each other (a module needs python); leave one out")
    return Command(script[0], tuple(script[1:]), module and not run_path, no_python and not run_path, run_path)


def _modules(options: GivenOptions) -> tuple[str, ...]:
    """Return the names in --preload, of which "auto" may be one; none: it is off."""
    return () if (options.text("preload") or "").strip() == "off" else options.read("preload", parse.modules)


def _preload(options: GivenOptions, named: tuple[str, ...], config: LaunchConfig, facts: MachineFacts) -> Preload:
    """Return what to preload. Nothing where workers cannot be forks of a Python with the same settings; a warning if it was asked for."""
    command = config.command
    against = [options.label("no_python")] if command.no_python else [options.label("run_path")] if command.run_path else []
    against += [options.label("numa_binding")] if options.is_given("numa_binding") else []
    against += [options.label("virtual_local_rank")] if options.flag("virtual_local_rank") else []
    against += ["PYTHON_EXEC"] if options.environ.get("PYTHON_EXEC") else []
    if not named:
        return Preload()
    if against:
        why = f"with {against[0]} workers are executed"
        if options.is_given("preload"):
            options.warn(f"{options.label('preload')} has no effect: {why}")
        found = Preload(why=why)
    elif "auto" in named:
        found = Preload(why=STARTED_ONCE) if is_started_once(config) else facts.imports(command)
        named = tuple(name for name in named if name != "auto")
        found = replace(found, modules=tuple(dict.fromkeys((*named, *found.modules))))
    else:
        return Preload(named)
    tried = f"; if possible also {', '.join(found.tried)}" if found.tried else ""
    options.derive("preload", ", ".join(found.modules) + tried if found.modules else "off", found.why)
    return found


def is_started_once(config: LaunchConfig) -> bool:
    """Return whether the job has one worker, which is never started again: a fork server costs memory and time, and saves neither.

    With several workers the imports are done once for all of them. With a restart, or other nodes that may be lost or join, a worker
    is started again. With --keep-warm the next job needs them.
    """
    return config.nproc == 1 and config.max_nodes == 1 and config.max_restarts == 0 and not config.preload.keep_warm


def _port_range(options: GivenOptions, rendezvous: RendezvousConfig) -> tuple[int, int] | None:
    """Return --port-range; warn where the workers meet at a given port, so that the agent chooses none."""
    ports = options.optional("port_range", parse.port_range) if options.has_text("port_range") else None
    if ports and rendezvous.endpoint and (rendezvous.meet_at_endpoint or rendezvous.max_nodes == 1 and rendezvous.fixed_ranks):
        options.warn(f"{options.label('port_range')} has no effect: the workers meet at the port of {rendezvous.endpoint_option}")
    return ports


@dataclass(frozen=True)
class _Candidate:
    """A value for a duration, from one of the options that set it."""

    label: str
    origin: Origin
    value: float  # seconds


def _choose(
    options: GivenOptions, dest: str, default: float, *others: _Candidate, why: str = "", low: float = 0.0, above: bool = False
) -> float:
    """Return the seconds from ``dest`` or ``others``: the command line takes precedence over the environment.

    Raises ``UsageError`` when two candidates of the same origin differ. ``default`` is for when none is given; ``why`` is the reason for it
    where it is not the option's own default. ``low`` and ``above`` are the limits as in ``parse.seconds``.
    """
    own = _Candidate(options.label(dest), options.origin(dest), options.read(dest, parse.seconds(low, above=above)))
    given = [candidate for candidate in (own, *others) if candidate.origin > Origin.DEFAULT]
    if not given:
        if why:
            options.derive(dest, f"{default:g}", why)
        return default
    best = max(given, key=lambda candidate: candidate.origin)
    for other in given:
        if other.origin == best.origin and other.value != best.value:
            both = f"{best.label} and {other.label} contradict each other ({best.value:g} and {other.value:g} s)"
            raise UsageError(f"{both}; give one of them")
    if best is not own:
        options.derive(dest, f"{best.value:g}", best.label)
    return best.value


def _timing(options: GivenOptions, conf: parse.RdzvConf, static: bool) -> Timing:
    def in_conf(key: str, value: float | None) -> list[_Candidate]:
        return [] if value is None else [_Candidate(f"{options.label('rdzv_conf')} {key}", options.origin("rdzv_conf"), value)]

    join, why = (STATIC_JOIN_TIMEOUT, "the static backend") if static else (Timing.join_timeout, "")
    in_conf_join = in_conf("join_timeout", conf.join_timeout)
    if not in_conf_join and reads_timeout(options):
        in_conf_join = in_conf("timeout", conf.timeout)
    expire = _choose(options, "expire", Timing.expire, *in_conf("keep_alive", _expire_of_torchrun(options, conf)), low=SHORTEST_EXPIRE)
    grace = _grace(options)
    timing = Timing(
        join_timeout=_choose(options, "join_timeout", join, *in_conf_join, why=why, above=True),
        last_call=_choose(options, "last_call", Timing.last_call, *in_conf("last_call_timeout", conf.last_call)),
        beat=min(Timing.beat, expire / 4, conf.keep_alive_interval or Timing.beat),
        expire=expire,
        store_grace=_choose(options, "store_grace", Timing.store_grace),
        grace=grace,
        failure_grace=_failure_grace(options, grace),
        restart_pause=_choose(options, "restart_pause", Timing.restart_pause),
    )
    timing.validate()
    return timing


def _expire_of_torchrun(options: GivenOptions, conf: parse.RdzvConf) -> float | None:
    """Return the silence after which torchrun loses a node: keep_alive_interval times keep_alive_max_attempt; None: neither is given."""
    interval, attempts = conf.keep_alive_interval, conf.keep_alive_max_attempt
    if interval is None and attempts is None:
        return None
    silence = (5.0 if interval is None else interval) * (3 if attempts is None else attempts)  # torchrun's defaults
    if not SHORTEST_EXPIRE <= silence <= parse.LONGEST_TIME:
        why = f"a node would be lost after {silence:g} seconds; keep the product of the two between {SHORTEST_EXPIRE:g} and a year"
        raise UsageError(f"{options.label('rdzv_conf')}: keep_alive_interval and keep_alive_max_attempt: {why}")
    return silence


def _grace(options: GivenOptions) -> float:
    """Return --grace, or its torchrun names: --shutdown-timeout, and the variable ``SHUTDOWN_TIMEOUT`` when no option is given."""
    timeout = options.optional("shutdown_timeout", parse.seconds())
    if timeout is not None:
        same = _Candidate(options.label("shutdown_timeout"), options.origin("shutdown_timeout"), timeout)
        return _choose(options, "grace", Timing.grace, same)
    if SHUTDOWN_TIMEOUT not in options.environ or options.is_given("grace"):
        return _choose(options, "grace", Timing.grace)
    seconds = parse.value_of(SHUTDOWN_TIMEOUT, options.environ[SHUTDOWN_TIMEOUT], parse.seconds())
    return _choose(options, "grace", seconds, why=SHUTDOWN_TIMEOUT)


def _failure_grace(options: GivenOptions, grace: float) -> float:
    """Return --failure-grace. It is short unless a grace was asked for: workers that wait for a dead peer have nothing to save."""
    if options.is_given("failure_grace"):
        return options.read("failure_grace", parse.seconds())
    given = [options.label(dest) for dest in ("grace", "shutdown_timeout") if options.is_given(dest)]
    given += [SHUTDOWN_TIMEOUT] if SHUTDOWN_TIMEOUT in options.environ else []
    seconds = grace if given else Timing.failure_grace
    options.derive("failure_grace", f"{seconds:g}", given[0] if given else "no --grace is given")
    return seconds


def _logs(options: GivenOptions) -> LogPolicy:
    template = options.text("log_line_prefix_template") or options.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
    logs = LogPolicy(
        log_dir=Path(options.text("log_dir") or "") if options.text("log_dir") else None,
        redirects=options.read("redirects", parse.std_map),
        tee=options.read("tee", parse.std_map),
        local_ranks=options.read("local_ranks_filter", parse.local_ranks),
        stdout_filters=options.read("duplicate_stdout_filters", parse.needles),
        stderr_filters=options.read("duplicate_stderr_filters", parse.needles),
        prefix_template=template or None,
        format=options.read("log_format", parse.choice("text", "json")),
        event_log=options.read("event_log_handler", parse.choice("null", "console", "jsonl")),
        show=options.read("show", parse.ranks),
        specs="" if options.text("logs_specs") in (None, "default") else options.read("logs_specs", parse.name),
        limit=options.optional("log_limit", parse.byte_size(LEAST_LOG_LIMIT)) or 0,
        mode=options.read("log_mode", parse.file_mode),
    )
    if logs.event_log == "jsonl" and logs.log_dir in (None, NO_FILES):
        why = "jsonl writes events.jsonl to the log folder"
        raise UsageError(f"{options.label('event_log_handler')}: {why}; give one with --log-dir=FOLDER")
    _warn_of_log_options(options, logs)
    return logs


def _warn_of_log_options(options: GivenOptions, logs: LogPolicy) -> None:
    """Warn of options for log files where none are written, and of options for teed lines where none are teed."""
    no_files, no_tee, no_redirects = logs.log_dir == NO_FILES, logs.tee == StdMap(), logs.redirects == StdMap()
    teed, nothing = "teed lines; add --tee=3", "no output goes to files; add --redirects=3 or --tee=3"
    for dest, given, idle, why in (
        ("redirects", not no_redirects, no_files, f"is ignored: {options.label('log_dir')}=/dev/null keeps no files"),
        ("duplicate_stdout_filters", logs.stdout_filters, no_tee, f"has no effect: it copies {teed}"),
        ("duplicate_stderr_filters", logs.stderr_filters, no_tee, f"has no effect: it copies {teed}"),
        ("log_line_prefix_template", options.text("log_line_prefix_template"), no_tee, f"has no effect: it is for {teed}"),
        ("log_limit", logs.limit, no_files or no_redirects and no_tee, f"has no effect: {nothing}"),
    ):
        if given and idle:
            options.warn(f"{options.label(dest)} {why}")


def _health(options: GivenOptions) -> Endpoint | None:
    """Return where to serve the health port; None: nowhere."""
    if not options.has_text("health_port"):
        return None
    if options.origin("health_port") == Origin.ENVIRONMENT and options.environ.get("ELASTIRUN_AGENT"):
        options.warn(f"{options.label('health_port')} is ignored: the agent whose worker started this launcher serves that port")
        return None
    return options.read("health_port", parse.port_to_serve)


def _is_beside_another_agent(options: GivenOptions) -> bool:
    """Tell whether this may be a second agent in a container (``kubectl exec``), which has the variables of the first."""
    origins = (options.origin("standalone"), options.origin("health_port"))
    return options.flag("standalone") and origins == (Origin.COMMAND_LINE, Origin.ENVIRONMENT)


def _signals(options: GivenOptions, dest: str) -> tuple[str, ...]:
    """Return the names of the signals, in full. A name that this system lacks is warned of and left out, as by torchrun."""
    known, unknown = options.read(dest, parse.signals)
    for name in unknown:
        options.warn(f"{options.label(dest)}: no signal {parse.quote(name)} on this system; it is left out")
    return known


def _workers(options: GivenOptions, facts: MachineFacts) -> int:
    """Return the number of workers on this node. A kind of device is counted, which may take a second."""
    kinds = ("auto", "gpu", "cpu", "xpu")

    def count(text: str) -> int:
        word = text.strip()
        if re.fullmatch(r"[+-]?[0-9]+", word):
            return parse.integer(1, MOST_WORKERS)(word)
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", word):
            raise ValueError(f"{parse.quote(text)} is not a number of workers; give one, or one of {', '.join(kinds)}")
        found = facts.cpus() if word == "cpu" else _devices(options, "nproc_per_node", word, facts)
        what = "usable CPUs" if word == "cpu" else f"devices of kind {word}"
        if word == "auto":
            what = "accelerators" if found else "usable CPUs, as there is no accelerator"
            found = found or facts.cpus()
        if found is None:
            raise ValueError(f"torch knows no kind of device {parse.quote(word)}; give a number, or one of {', '.join(kinds)}")
        if not found:
            label = options.label("nproc_per_node")
            raise StartError(f"{label}: torch can use no {word} here; give a number, or cpu")
        options.derive("nproc_per_node", found, what)
        return found

    return options.read("nproc_per_node", count)


def _warn_of_variables(options: GivenOptions) -> None:
    """Warn of variables of torchrun's agent without effect, and of those that look like an option's and are none: typing errors."""
    for name in OTHER_VARIABLES.keys() & options.environ.keys():
        options.warn(f"{name} has no effect: {OTHER_VARIABLES[name]}")
    known = [option.env.removeprefix("PET_") for option in OPTIONS if option.env]
    for name in sorted(name.removeprefix("PET_") for name in options.environ if name.startswith("PET_")):
        if (key := name.lower().replace("_", "-")) in KEYS:
            options.warn(f"PET_{name} has no effect: {key} is a key of --set; write PET_SET={key}={KEYS[key].metavar}")
        elif name not in known:
            hint = parse.nearest(name, known).replace("mean ", "mean PET_")
            options.warn(f"PET_{name} has no effect: no option has this variable{hint}")


def _warn_of_late_options(options: GivenOptions, script: Sequence[str]) -> None:
    """Warn of options after the script. One that elastirun was given as well is left out: the script then has an option of that name."""
    words = script[1 : script.index("--") if "--" in script else None]
    names = {word.partition("=")[0].replace("_", "-") for word in words}
    for option in (BY_DEST[dest] for dest in WARNED_AFTER_SCRIPT):
        if option.name in names and not options.is_given(option.dest):
            where = f"stands after {parse.quote(script[0])}, so the script gets it and elastirun does not"
            options.warn(f"{option.name} {where}; put it before the script")


def _devices(options: GivenOptions, dest: str, kind: str, facts: MachineFacts) -> int | None:
    """Return the number of devices for ``dest``. Raises StartError when torch does not answer here."""
    try:
        return facts.devices(kind)
    except ValueError as error:
        raise StartError(f"{options.label(dest)}: {error}") from None


def _check_ranks(options: GivenOptions, logs: LogPolicy, nproc: int, alone: bool) -> None:
    """Warn of ranks that are named but do not exist; torchrun ignores them. ``alone``: there is no other node."""
    among = f"among {nproc} worker{'s' * (nproc > 1)}"
    named = {"redirects": dict(logs.redirects.by_rank), "tee": dict(logs.tee.by_rank)}
    for dest, ranks in {**named, "local_ranks_filter": logs.local_ranks or ()}.items():
        beyond = [str(rank) for rank in sorted(ranks) if rank >= nproc]
        if beyond:
            options.warn(f"{options.label(dest)}: there is no local rank {', '.join(beyond)} {among}")
    outside = [str(low) for low, _ in logs.show or () if alone and not -nproc <= low < nproc]
    if outside:
        options.warn(f"{options.label('show')}: there is no rank {', '.join(outside)} {among}")


def _check_gpus(options: GivenOptions, nproc: int, facts: MachineFacts) -> None:
    """Refuse virtual local ranks with fewer GPUs than workers. Without any visible GPU the workers run on CPUs."""
    label = options.label("virtual_local_rank")
    if not options.flag("virtual_local_rank"):
        return
    visible = options.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        count, given = len(visible.split(",")) if visible else 0, "CUDA_VISIBLE_DEVICES lists"
    elif nproc == 1 or options.text("nproc_per_node") in ("gpu", "auto"):
        return
    else:
        count, given = _devices(options, "virtual_local_rank", "gpu", facts) or 0, "this node has"
    if 0 < count < nproc:
        wrong = StartError if visible is None else UsageError
        raise wrong(f"{label}: {nproc} workers need a GPU each, {given} {count}; lower --nproc-per-node")

"""What was asked for -> ``LaunchConfig``: torchrun's rules, its traps answered in words. Pure: the machine is asked through ``Facts``.

A command line that works under torchrun works here. What torchrun ignores silently gives a warning; what cannot work gives a
``UsageError`` that names the option, or the variable when the value came from there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from elastirun.cli import parse
from elastirun.cli.given_options import Facts, Reading
from elastirun.cli.rendezvous_options import meeting
from elastirun.config import Command, LaunchConfig, LogPolicy, StdMap, Timing
from elastirun.errors import UsageError

STATIC_JOIN_TIMEOUT = 900.0  # torchrun's
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # torchrun's variable for --shutdown-timeout
MOST_WORKERS = 4096
LEAST_LOG_LIMIT = 1 << 16  # bytes; the longest line that is kept in one piece
SHORTEST_EXPIRE = 1.0  # below this a busy node is taken for a lost one


def resolve(r: Reading, script: Sequence[str], facts: Facts) -> LaunchConfig:
    """The configuration for ``script`` (the program and its arguments). Raises ``UsageError``; leaves its warnings in ``r``."""
    command = _command(r, script)
    conf = r.read("rdzv_conf", parse.rdzv_conf)
    met = meeting(r, conf, facts)
    timing = _timing(r, conf, met.static)
    logs = _logs(r)
    r.read("monitor_interval", parse.seconds(0.0, above=True))
    r.read("start_method", parse.choice("spawn", "fork", "forkserver"))
    if r.text("logs_specs"):
        raise UsageError(f"{r.label('logs_specs')}: another layout of the logs is not built yet in this version; leave it out")
    config = LaunchConfig(
        command=command,
        min_nodes=met.low,
        max_nodes=met.high,
        nproc=1,
        run_id=met.run_id,
        endpoint=met.endpoint,
        etcd=met.etcd,
        endpoint_option=met.endpoint_option,
        is_host=met.is_host,
        meet_at_endpoint=met.meet_at_endpoint,
        fixed_ranks=met.static,
        node_rank=met.node_rank,
        local_addr=r.optional("local_addr", parse.host) if r.text("local_addr") else None,
        role=r.read("role", parse.name),
        max_restarts=r.read("max_restarts", parse.integer(0)),
        restart_window=r.read("restart_window", parse.seconds(0.0)),
        fail_fast=r.flag("fail_fast"),
        exit_code_from_worker=r.flag("exit_code_from_worker"),
        timing=timing,
        logs=logs,
        signals=_signals(r, "signals_to_handle"),
        forward_signals=_signals(r, "forward_signals"),
        numa_binding=r.optional("numa_binding", parse.choice("node", "socket", "exclusive", "core-complex")),
        virtual_local_rank=r.flag("virtual_local_rank"),
    )
    twice = sorted({*config.signals} & {*config.forward_signals})
    if twice:
        both = f"{r.label('forward_signals')} and {r.label('signals_to_handle')}"
        raise UsageError(f"{both} contradict each other on {twice[0]}; name it in one of them")
    nproc = _workers(r, facts)  # last, because it may take a second
    _check_ranks(r, logs, nproc, alone=met.high == 1)
    _check_gpus(r, nproc, facts)
    return replace(config, nproc=nproc)


def _command(r: Reading, script: Sequence[str]) -> Command:
    if not script:
        raise UsageError("no script is given; usage: elastirun [OPTIONS] SCRIPT [ARGS]..., see elastirun --help")
    module, no_python, run_path = r.flag("module"), r.flag("no_python"), r.flag("run_path")
    if run_path:
        for dest, given in (("module", module), ("no_python", no_python)):
            if given:
                r.warn(f"{r.label(dest)} is ignored: {r.label('run_path')} goes before it")
    elif module and no_python:
        raise UsageError(f"{r.label('module')} and {r.label('no_python')} contradict each other (a module needs python); leave one out")
    return Command(script[0], tuple(script[1:]), module and not run_path, no_python and not run_path, run_path)


@dataclass(frozen=True)
class _Wish:
    """One of several ways to set the same thing."""

    label: str
    level: int
    value: float


def _choose(r: Reading, dest: str, default: tuple[float, str], *others: _Wish, low: float = 0.0, above: bool = False) -> float:
    """Seconds: what was given closest to the user, the command line before the environment; two as close must not differ.

    ``default`` comes with the reason for it, empty when it is the option's own.
    """
    own = _Wish(r.label(dest), r.level(dest), r.read(dest, parse.seconds(low, above=above)))
    given = [wish for wish in (own, *others) if wish.level]
    if not given:
        if default[1]:
            r.derive(dest, f"{default[0]:g}", default[1])
        return default[0]
    best = max(given, key=lambda wish: wish.level)
    for wish in given:
        if wish.level == best.level and wish.value != best.value:
            raise UsageError(f"{best.label} and {wish.label} contradict each other ({best.value:g} and {wish.value:g} s); give one of them")
    if best is not own:
        r.derive(dest, f"{best.value:g}", best.label)
    return best.value


def _timing(r: Reading, conf: parse.RdzvConf, static: bool) -> Timing:
    def in_conf(key: str, value: float | None) -> list[_Wish]:
        return [] if value is None else [_Wish(f"{r.label('rdzv_conf')} {key}", r.level("rdzv_conf"), value)]

    join = (STATIC_JOIN_TIMEOUT, "the static backend") if static else (Timing.join_timeout, "")
    expire = _choose(r, "expire", (Timing.expire, ""), *in_conf("keep_alive", _silence(r, conf)), low=SHORTEST_EXPIRE)
    grace = _grace(r)
    return Timing(
        join_timeout=_choose(r, "join_timeout", join, *in_conf("join_timeout", conf.join_timeout), above=True),
        last_call=_choose(r, "last_call", (Timing.last_call, ""), *in_conf("last_call_timeout", conf.last_call)),
        beat=min(Timing.beat, expire / 4, conf.keep_alive_interval or Timing.beat),
        expire=expire,
        store_grace=_choose(r, "store_grace", (Timing.store_grace, "")),
        grace=grace,
        failure_grace=_failure_grace(r, grace),
        restart_pause=_choose(r, "restart_pause", (Timing.restart_pause, "")),
    )


def _silence(r: Reading, conf: parse.RdzvConf) -> float | None:
    """torchrun loses a node after so many keep-alives; one of the two keys alone goes with torchrun's default of the other."""
    interval, attempts = conf.keep_alive_interval, conf.keep_alive_max_attempt
    if interval is None and attempts is None:
        return None
    silence = (5.0 if interval is None else interval) * (3 if attempts is None else attempts)
    if not SHORTEST_EXPIRE <= silence <= parse.LONGEST_TIME:
        why = f"a node would be lost after {silence:g} seconds; keep the product of the two between {SHORTEST_EXPIRE:g} and a year"
        raise UsageError(f"{r.label('rdzv_conf')}: keep_alive_interval and keep_alive_max_attempt: {why}")
    return silence


def _grace(r: Reading) -> float:
    timeout = r.optional("shutdown_timeout", parse.seconds())
    default = (Timing.grace, "")
    if SHUTDOWN_TIMEOUT in r.environ and not r.level("grace") and timeout is None:
        try:
            default = (parse.seconds()(r.environ[SHUTDOWN_TIMEOUT]), SHUTDOWN_TIMEOUT)
        except ValueError as error:
            raise UsageError(f"{SHUTDOWN_TIMEOUT}: {error}") from None
    same = [] if timeout is None else [_Wish(r.label("shutdown_timeout"), r.level("shutdown_timeout"), timeout)]
    return _choose(r, "grace", default, *same)


def _failure_grace(r: Reading, grace: float) -> float:
    """Short unless somebody has asked for a grace: workers that wait for a dead peer have nothing to save."""
    if r.level("failure_grace"):
        return r.read("failure_grace", parse.seconds())
    given = [r.label(dest) for dest in ("grace", "shutdown_timeout") if r.level(dest)]
    given += [SHUTDOWN_TIMEOUT] if SHUTDOWN_TIMEOUT in r.environ else []
    seconds = grace if given else Timing.failure_grace
    r.derive("failure_grace", f"{seconds:g}", given[0] if given else "no --grace is given")
    return seconds


def _logs(r: Reading) -> LogPolicy:
    log_dir = Path(r.text("log_dir") or "") if r.text("log_dir") else None
    redirects, tee = r.read("redirects", parse.std_map), r.read("tee", parse.std_map)
    if log_dir == Path("/dev/null") and redirects != StdMap():
        r.warn(f"{r.label('redirects')} is ignored: {r.label('log_dir')}=/dev/null keeps no files")
    needles = {dest: r.read(dest, parse.needles) for dest in ("duplicate_stdout_filters", "duplicate_stderr_filters")}
    for dest, texts in needles.items():
        if texts and tee == StdMap():
            r.warn(f"{r.label(dest)} has no effect: it copies teed lines; add --tee=3")
    limit = r.optional("log_limit", parse.byte_size(LEAST_LOG_LIMIT)) or 0
    if limit and (log_dir == Path("/dev/null") or redirects == tee == StdMap()):
        r.warn(f"{r.label('log_limit')} has no effect: no output goes to files; add --redirects=3 or --tee=3")
    event_log = r.read("event_log_handler", parse.choice("null", "console", "jsonl"))
    if event_log == "jsonl" and log_dir in (None, Path("/dev/null")):
        raise UsageError(f"{r.label('event_log_handler')}: jsonl writes events.jsonl to the log folder; give one with --log-dir=FOLDER")
    return LogPolicy(
        log_dir=log_dir,
        redirects=redirects,
        tee=tee,
        local_ranks=r.read("local_ranks_filter", parse.local_ranks),
        stdout_filters=needles["duplicate_stdout_filters"],
        stderr_filters=needles["duplicate_stderr_filters"],
        prefix_template=r.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        event_log=event_log,
        show=r.read("show", parse.ranks),
        limit=limit,
        mode=r.read("log_mode", parse.file_mode),
    )


def _signals(r: Reading, dest: str) -> tuple[str, ...]:
    known, unknown = r.read(dest, parse.signals)
    for name in unknown:
        r.warn(f"{r.label(dest)}: no signal {parse.quote(name)} on this system; it is left out")
    return known


def _workers(r: Reading, facts: Facts) -> int:
    kinds = ("auto", "gpu", "cpu", "xpu")

    def count(text: str) -> int:
        word = text.strip()
        if re.fullmatch(r"[+-]?[0-9]+", word):
            return parse.integer(1, MOST_WORKERS)(word)
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", word):
            raise ValueError(f"{parse.quote(text)} is not a number of workers; give one, or one of {', '.join(kinds)}")
        found = facts.cpus() if word == "cpu" else facts.devices(word)
        what = "usable CPUs" if word == "cpu" else f"devices of kind {word}"
        if word == "auto":
            what = "accelerators" if found else "usable CPUs, as there is no accelerator"
            found = found or facts.cpus()
        if found is None:
            raise ValueError(f"torch knows no kind of device {parse.quote(word)}; give a number, or one of {', '.join(kinds)}")
        if not found:
            raise ValueError(f"torch can use no {word} here; give a number, or cpu")
        r.derive("nproc_per_node", found, what)
        return found

    return r.read("nproc_per_node", count)


def _check_ranks(r: Reading, logs: LogPolicy, nproc: int, alone: bool) -> None:
    """Ranks that are named but do not exist, of which torchrun says nothing. ``alone``: there is no other node."""
    among = f"among {nproc} worker{'s' * (nproc > 1)}"
    named = {"redirects": dict(logs.redirects.by_rank), "tee": dict(logs.tee.by_rank)}
    for dest, ranks in {**named, "local_ranks_filter": logs.local_ranks or ()}.items():
        beyond = [str(rank) for rank in sorted(ranks) if rank >= nproc]
        if beyond:
            r.warn(f"{r.label(dest)}: there is no local rank {', '.join(beyond)} {among}")
    outside = [str(low) for low, _ in logs.show or () if alone and not -nproc <= low < nproc]
    if outside:
        r.warn(f"{r.label('show')}: there is no rank {', '.join(outside)} {among}")


def _check_gpus(r: Reading, nproc: int, facts: Facts) -> None:
    """With virtual local ranks each worker needs a GPU; where there is none at all, or all are hidden, they run on CPUs."""
    label = r.label("virtual_local_rank")
    if not r.flag("virtual_local_rank"):
        return
    visible = r.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        count, given = len(visible.split(",")) if visible else 0, "CUDA_VISIBLE_DEVICES lists"
    elif nproc == 1 or r.text("nproc_per_node") in ("gpu", "auto"):
        return
    else:
        try:
            count, given = facts.devices("gpu") or 0, "this node has"
        except ValueError as error:
            raise UsageError(f"{label}: {error}") from None
    if 0 < count < nproc:
        raise UsageError(f"{label}: {nproc} workers need a GPU each, {given} {count}; lower --nproc-per-node")

"""The command ``elastirun``: reads the command line and the environment, checks the files named there, and starts the agent.

Bad input costs one line on stderr and exit status 2; nothing was started then.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import traceback
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import click
from click.core import ParameterSource

from elastirun import __version__, early_signals, standard_streams
from elastirun.agent.exit_codes import ExitCode, help_text
from elastirun.agent.host.cpus import usable_cpus
from elastirun.cli.given_options import DEFAULT_SOURCE, Facts, Reading, Row
from elastirun.cli.options import GROUPS, OPTIONS, RUN, Option, normalise
from elastirun.cli.parse import quote
from elastirun.cli.resolve import resolve
from elastirun.config import Command, Etcd, LaunchConfig
from elastirun.errors import ElastirunError, StartError, UsageError
from elastirun.secret_files import advice, read_secret_file

TOKEN_BYTES = range(16, 4097)  # how long a secret may be

_EXAMPLES = """\
Starts SCRIPT as a set of workers on one or more nodes, with RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT in their environment. A drop-in for torchrun.

One node, one worker per GPU:
  elastirun --nproc-per-node=auto train.py --lr 0.1

One to three nodes, elastic; the same command on each node, whenever it comes up:
  elastirun --nnodes=1:3 --nproc-per-node=8 --rdzv-id=job7 --rdzv-endpoint=node0 train.py

Two nodes with fixed ranks; on the other node the same with --node-rank=1:
  elastirun --nnodes=2 --node-rank=0 --master-addr=node0 --nproc-per-node=8 train.py
"""
_NOTES = """\
Options come before SCRIPT. What follows SCRIPT is its own; ${local_rank} there becomes the worker's.
Names may be written with _ for - and cut short where that is clear. In [brackets]: the environment
variable that sets the same, and its default; the command line goes before it. --dry-run shows where
each value came from.
"""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one agent to its end, and exit with its status. ``argv``: without the program's name; None: this process' own."""
    prepared: LaunchConfig | int = ExitCode.OK
    try:
        prepared = _prepare(sys.argv[1:] if argv is None else argv)
        status = prepared if isinstance(prepared, int) else _launch(prepared)
    except ElastirunError as error:
        _say(str(error))
        status = ExitCode.USAGE if isinstance(error, UsageError) else ExitCode.ENVIRONMENT
    except KeyboardInterrupt:
        status = ExitCode.signalled(signal.SIGINT)
    except Exception:
        standard_streams.write("stderr", traceback.format_exc())
        _say("this is a bug in elastirun; please report it with the lines above")
        status = ExitCode.BUG
    if isinstance(prepared, LaunchConfig):
        # The interpreter's own way out would wait for, or abort on, threads that torch's store is still busy in.
        standard_streams.flush()
        os._exit(status)
    standard_streams.flush()
    sys.exit(status)


def _launch(config: LaunchConfig) -> int:
    from elastirun.agent.agent import run  # not before it is needed: --help should be quick

    early_signals.keep(config.signals)
    return run(config)


def _prepare(argv: Sequence[str]) -> LaunchConfig | int:
    """What is to be launched, or the exit status when something was only to be shown."""
    tokens, script = normalise(argv)
    context = _parse(tokens)
    if context.params["help"]:
        return _show(context.get_help())
    if context.params["version"]:
        return _show(f"elastirun {__version__}")
    try:
        os.getcwd()
    except OSError:
        raise UsageError("the working folder is gone; change to one that exists") from None
    reading = Reading(_given(context), dict(os.environ))
    config = resolve(reading, script, Facts(usable_cpus, count_devices, lambda: str(uuid.uuid4())))
    _check_command(config.command, os.environ.get("PYTHON_EXEC"))
    if importlib.util.find_spec("torch") is None:
        raise StartError(f"torch is not installed for {sys.executable}; pip install torch, or start elastirun with another Python")
    _check_log_dir(reading, config.logs.log_dir)
    config = replace(config, token=_token(reading))
    _check_secrets(reading, config.etcd)
    dry_run = reading.flag("dry_run")
    for warning in reading.warnings:
        _say(f"warning: {warning}")
    if dry_run:
        from elastirun.agent.host import listening
        from elastirun.agent.spec import command_line

        argv = command_line(config.command, reading.environ)
        return _show(report(config, reading.rows(), argv, listening.describe(config)))
    return config


def _say(text: str) -> None:
    standard_streams.write("stderr", f"elastirun: {' '.join(text.splitlines())}\n")


def _show(text: str) -> int:
    """Print what was asked for, and return the exit status."""
    error = standard_streams.write("stdout", f"{text}\n")
    if error is not None and not isinstance(error, BrokenPipeError):  # not elastirun --help | head
        _say(f"cannot write to stdout: {error.strerror}")
    return ExitCode.OK if error is None else ExitCode.FAILED


# --- click

_HELP_COLUMN = 32  # characters for an option and its value


class GroupedCommand(click.Command):
    """Its help begins with examples and shows the options by what they are for."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage("elastirun", "[OPTIONS] SCRIPT [ARGS]...")
        formatter.write(f"\n{_EXAMPLES}")
        for title, options in GROUPS.items():
            with formatter.section(title):
                own = [("-h, --help".ljust(_HELP_COLUMN), "Show this.")] if title == RUN else []
                formatter.write_dl([_help_of(option) for option in options] + own, col_max=_HELP_COLUMN)
        formatter.write(f"\n{_NOTES}\n{textwrap.fill(help_text(), 100)}\n")


def _help_of(option: Option) -> tuple[str, str]:
    names = f"-{option.short}, {option.name}" if option.short else option.name
    default = f"={option.default}" if option.default else ""
    text = f"{option.help} [{option.env}{default}]" if option.env else option.help
    return f"{names} {option.metavar}".ljust(_HELP_COLUMN), text


def _parse(tokens: Sequence[str]) -> click.Context:
    params: list[click.Parameter] = [click.Option(["--help"], is_flag=True)]
    params += [click.Option([option.name, option.dest], is_flag=True if option.flag else None) for option in OPTIONS]
    command = GroupedCommand("elastirun", params=params, add_help_option=False)
    return command.make_context("elastirun", list(tokens), max_content_width=100)


def _given(context: click.Context) -> dict[str, str]:
    """dest -> text of the options on the command line, a flag as "1"."""
    by_user = [option for option in OPTIONS if context.get_parameter_source(option.dest) is ParameterSource.COMMANDLINE]
    return {option.dest: "1" if option.flag else context.params[option.dest] for option in by_user}


# --- what is looked up on this machine


def _check_command(command: Command, python: str | None) -> None:
    script = command.script
    if python and not command.no_python and shutil.which(python) is None:
        raise StartError(f"PYTHON_EXEC: there is no program {quote(python)}; give the path of a Python interpreter")
    if command.module or "${local_rank}" in script or script == "-":
        return
    if command.no_python:
        if shutil.which(script) is None:
            if os.path.isfile(script):
                raise StartError(f"--no-python: {quote(script)} is not executable; chmod +x it, or give the path of a program")
            raise StartError(f"--no-python: there is no program {quote(script)}; give its path, or a name that is in PATH")
    elif os.path.isdir(script):
        if not os.path.isfile(os.path.join(script, "__main__.py")):
            raise StartError(f"SCRIPT: {quote(script)} is a folder without __main__.py; give a script")
    elif not os.path.exists(script):
        raise StartError(f"SCRIPT: there is no file {quote(script)} in {os.getcwd()}; give its path, or say --module or --no-python")
    elif not os.access(script, os.R_OK):
        raise StartError(f"SCRIPT: {quote(script)} cannot be read; change its permissions or its owner")


def _check_log_dir(reading: Reading, log_dir: Path | None) -> None:
    if log_dir is None or log_dir == Path(os.devnull):
        return
    label = reading.label("log_dir")
    existing = next(str(folder) for folder in (log_dir, *log_dir.absolute().parents) if os.path.lexists(folder))
    if not os.path.isdir(existing):
        raise UsageError(f"{label}: {quote(existing)} is not a folder; give another, or /dev/null for no files")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(f"{label}: {quote(existing)} cannot be written to; give another folder, or /dev/null for no files")


def _token(reading: Reading) -> bytes | None:
    """The secret in ``--token-file``, without white space around it. It is never shown."""
    path, label = reading.text("token_file"), reading.label("token_file")
    if path is None:
        return None
    try:
        file = read_secret_file(path, TOKEN_BYTES.stop + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a path"
        raise UsageError(f"{label}: {quote(path)} cannot be read ({reason}); give a file with a secret") from None
    token = file.content.strip()
    if len(token) not in TOKEN_BYTES:
        size = "too short" if len(token) < TOKEN_BYTES.start else "too long"
        limits = f"{TOKEN_BYTES.start} to {TOKEN_BYTES.stop - 1} bytes"
        raise UsageError(f"{label}: the secret in {quote(path)} is {size}; give one of {limits}, such as openssl rand -hex 32 makes")
    if file.advice:
        reading.warn(f"{label}: {quote(path)}: {file.advice}")
    return token


def _check_secrets(reading: Reading, etcd: Etcd | None) -> None:
    """Warn of secrets for etcd that others can read. They are read when they are needed; etcd's own word is said if they cannot be."""
    for name, path in {"password_file": etcd.password_file, "key": etcd.key}.items() if etcd else ():
        if path and (found := advice(path)):
            reading.warn(f"{reading.label('rdzv_conf')}: {name}={quote(path)}: {found}")


_PROBE = """
import ctypes, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: it does not outlive who asks
sys.path = [folder for folder in sys.path if folder]  # a torch.py in the working folder is not torch
import torch
kind = sys.argv[1]
if kind in ("gpu", "xpu", torch._C._get_privateuse1_backend_name()):
    devices = getattr(torch, {"gpu": "cuda"}.get(kind, kind), None)
else:
    devices = torch.accelerator if kind == "auto" else None
print("devices:", -1 if devices is None else devices.device_count() if devices.is_available() else 0)
"""


def count_devices(kind: str) -> int | None:
    """How many devices of ``kind`` ("gpu", "xpu", "auto" for any accelerator, or torch's name of another) torch can use here.

    None: torch knows no such kind. Raises ValueError when torch cannot be asked. It is asked in a process of its own: importing it takes
    a second and hundreds of megabytes, and counting may take hold of the devices.
    """
    command = [sys.executable, "-c", _PROBE, kind]
    try:
        answer = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"torch could not be asked for its devices ({type(error).__name__}); give a number") from None
    for line in answer.stdout.splitlines():
        if line.startswith("devices: "):
            count = int(line.removeprefix("devices: "))
            return None if count < 0 else count
    last = (answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"])[-1]
    raise ValueError(f"torch could not be asked for its devices ({last[:200]}); give a number, or cpu")


# --- --dry-run


def report(config: LaunchConfig, rows: Sequence[Row], argv: Sequence[str], listening: Sequence[str] = ()) -> str:
    """Return what was given or derived, where this node would listen and a worker's ``argv``, for people; no secret in it."""
    shown = [row for row in rows if row.option != "--dry-run" and row.source != DEFAULT_SOURCE]
    widths = [max((len(row.option) for row in shown), default=0), min(40, max((len(row.value) for row in shown), default=0))]
    groups = {option.name: title for title, options in GROUPS.items() for option in options}
    lines = [f"elastirun {__version__}: what would be run, and where each value came from"]
    for row in shown:
        title = f"{groups[row.option]}:"
        if title not in lines:
            lines += ["", title]
        lines.append(f"  {row.option:{widths[0]}}  {row.value:{widths[1]}}  {row.source}")
    lines += ["", "Every other option has its default; elastirun --help shows them."]
    lines += [f"listens: {line}" for line in listening]
    each = "1 worker would run" if config.nproc == 1 else f"{config.nproc} workers would each run"
    return "\n".join([*lines, f"{each}: {shlex.join(argv)}", "Nothing was started."])

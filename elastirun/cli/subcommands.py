"""Runs ``elastirun check``, ``status``, ``scale``, ``report``, ``chaos``, ``checkpoint``, ``takeover``, ``warm`` and ``help``.

A script with such a name is started as by torchrun.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from elastirun import standard_streams
from elastirun.agent.failures.exit_codes import ExitCode
from elastirun.cli.options import BY_DEST
from elastirun.cli.parse import nearest, quote
from elastirun.errors import NothingFound, StartError, UsageError

MODULES = {  # each has a function ``main``, see ``run``
    "check": "elastirun.cli.check.command",
    "status": "elastirun.cli.status_command",
    "scale": "elastirun.cli.scale.command",
    "report": "elastirun.cli.report_command",
    "chaos": "elastirun.chaos.command",
    "checkpoint": "elastirun.checkpoint.__main__",
    "takeover": "elastirun.takeover",
    "warm": "elastirun.cli.warm_command",
}
HELP = {"": ["--help"], "launch": ["--help-all"], **{name: [name, "--help"] for name in MODULES}}  # by the words after ``help``
NOTHING_FOUND = 4  # exit code
CODES = {UsageError: ExitCode.USAGE, StartError: ExitCode.ENVIRONMENT, NothingFound: NOTHING_FOUND}


def asked_for(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the name of the command that the command line asks for; empty: it starts a script."""
    name = argv[0] if argv else ""
    if name not in (*MODULES, "help") or os.path.isfile(name) or os.path.isfile(os.path.join(name, "__main__.py")):
        return ""
    if any(environ.get(str(BY_DEST[dest].env), "0").strip() not in ("", "0") for dest in ("module", "no_python")):
        return ""
    return name


def words_of_help(topics: Sequence[str]) -> list[str]:
    """Return the command line that shows what ``elastirun help`` with the words ``topics`` asks for. Raises UsageError."""
    topic = " ".join(topics)
    if topic not in HELP:
        raise UsageError(f"help: there is no help on {quote(topic)}{nearest(topic, HELP)}; there is for {', '.join(filter(None, HELP))}")
    return HELP[topic]


def run(name: str, argv: Sequence[str]) -> int:
    """Run a command with the words after its name. Return the exit code. What it raises of ``CODES`` is one line on stderr.

    The module is loaded here, because a launch does without its imports, which are slow. ``takeover`` becomes a process without our
    signal handlers: it runs other people's programs.
    """
    if name == "takeover":
        os.execv(sys.executable, [sys.executable, "-m", MODULES[name], *argv])
    try:
        code: int = importlib.import_module(MODULES[name]).main(argv)
        return code
    except tuple(CODES) as error:
        standard_streams.write("stderr", f"elastirun {name}: {' '.join(str(error).splitlines())}\n")
        return next(code for kind, code in CODES.items() if isinstance(error, kind))


def read_options(name: str, params: Sequence[click.Parameter], argv: Sequence[str], **settings: Any) -> dict[str, Any]:
    """Return the values of ``params`` and ``help`` in the words after a command's name. ``settings``: click's. Raises UsageError."""
    command = click.Command(name, params=[click.Option(["help", "-h", "--help"], is_flag=True), *params], add_help_option=False)
    try:
        return dict(command.make_context(name, list(argv), **settings).params)
    except click.UsageError as error:
        raise UsageError(f"{error.format_message()} (see elastirun {name} --help)") from None


def show(text: str) -> int:
    """Print ``text`` on stdout. Return the exit code. If it cannot be written, a line on stderr says why."""
    error = standard_streams.write("stdout", f"{text.rstrip()}\n")
    if error is not None and not isinstance(error, BrokenPipeError):  # not elastirun --help | head
        standard_streams.write("stderr", f"elastirun: cannot write to stdout: {error.strerror}\n")
    return ExitCode.OK if error is None else ExitCode.FAILED

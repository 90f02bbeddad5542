"""The event ``start``: which job this agent runs, with what command and versions."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from elastirun import __version__
from elastirun.agent.observe.events import Start
from elastirun.config import Command, LaunchConfig

MOST_COMMAND = 1000  # characters
MOST_VERSION = 4096  # bytes of torch's file that are read
_SECRET = re.compile(r"--?(?:.*[-_])?(?:key|token|secret|password|passwd)s?", re.IGNORECASE)  # option whose value is left out
_VERSION = re.compile(r"^__version__ *= *['\"]([^'\"\n]{1,40})['\"]", re.MULTILINE)


def start_event(config: LaunchConfig) -> Start:
    """Return the event for an agent of this job."""
    return Start(config.run_id, shown(config.command), __version__, ".".join(map(str, sys.version_info[:3])), torch_version())


def shown(command: Command) -> str:
    """Return the command of the workers in one line, without the values of options that are named like secrets. Pure."""
    words = [*(["-m"] if command.module else []), command.script, *without_secrets(command.args)]
    line = shlex.join(words)
    return line if len(line) <= MOST_COMMAND else f"{line[: MOST_COMMAND - 1]}…"


def without_secrets(args: Sequence[str]) -> list[str]:
    """Return the arguments with ``***`` for the value of each option whose name ends in key, token, secret or password. Pure."""
    found: list[str] = []
    hidden = False  # the option before has its value in this argument
    for arg in args:
        name, equals, _ = arg.partition("=")
        secret = _SECRET.fullmatch(name) is not None
        found.append(f"{name}=***" if secret and equals else "***" if hidden and not arg.startswith("-") else arg)
        hidden = secret and not equals
    return found


def torch_version() -> str:
    """Return the version of the torch that this Python would import, without importing it; empty: there is none."""
    try:
        spec = find_spec("torch")
        if spec is None or spec.origin is None:
            return ""
        with Path(spec.origin).with_name("version.py").open(errors="replace") as file:
            found = _VERSION.search(file.read(MOST_VERSION))
        return found[1] if found else ""
    except (OSError, ValueError, ImportError):
        return ""

"""The event ``start``: which job this agent runs, with what command and versions."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence

from elastirun import __version__
from elastirun.agent.observe.events import Start
from elastirun.config import Command, LaunchConfig
from elastirun.rendezvous.stores.torch_class import torch_version

MOST_COMMAND = 1000  # characters
_SECRET = re.compile(r"--?(?:.*[-_])?(?:key|token|secret|password|passwd)s?", re.IGNORECASE)  # option whose value is left out


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

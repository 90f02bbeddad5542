"""The answer of ``detect``: values for options that were not given, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastirun.cli import parse

PORT = 29400  # torchrun's default
FIRST_PORT, PORTS = 20000, 10000  # where jobs may share a node; below the ports that Linux gives to clients
LAST_CALL = 60  # seconds for the first round: the nodes are known, and may read their imports from one slow file system
OVERRIDE = "give --rdzv-endpoint and what else is missing, or --detect=off"


@dataclass(frozen=True)
class Host:
    """The names of this machine: its host name, and longer names that the files of this machine or DNS give it."""

    name: str
    full_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Detected:
    """The part of this process in a job of several nodes, as a scheduler has told it. ``where`` is empty when nothing was detected."""

    where: str = ""  # "a Slurm step"
    values: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # by dest: the text of the value, and its source
    is_host: bool | None = None  # whether this node is the one that the detected endpoint names
    why: str = ""  # what was found, or why nothing was, for --dry-run
    warning: str = ""  # nothing was detected, although a job of several nodes may have been meant


class UnclearError(Exception):
    """The variables of a scheduler do not say which job of several nodes this process belongs to. The text says why."""


def nothing(why: str, warn: bool = False) -> Detected:
    """Return the answer that nothing was detected."""
    return Detected(why=why, warning=f"{why}; this node runs alone" if warn else "")


def source(environ: Mapping[str, str], name: str) -> str:
    """Return ``NAME=value``, printable and short."""
    text = environ.get(name, "")
    return f"{name}={text}" if text.isprintable() and len(text) <= parse.LONGEST_QUOTE else f"{name}={parse.quote(text)}"


def number(environ: Mapping[str, str], name: str) -> int:
    """Return the whole number in a variable. Raises ``UnclearError``."""
    if name not in environ:
        raise UnclearError(f"{name} is not set")
    text = environ[name]
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise UnclearError(f"{source(environ, name)} is no number")
    return int(text)

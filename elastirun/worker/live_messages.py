"""Messages between an agent and a live worker (docs/elastic.md): one JSON object each, in one packet. Both ends parse with limits.

Agents also tell the workers of a round which of these have a state: in the workers' store, because it concerns those of all nodes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VARIABLE = "ELASTIRUN_LIVE"  # in a worker's environment: the name of its agent's abstract unix socket; empty: there is none
VERSION = 4
MAX_MESSAGE = 64 << 10  # bytes; the variables of a round take about one KiB
LARGEST = 1 << 53  # of a number: a round or a step


@dataclass(frozen=True)
class Hello:
    """A worker can be parked from now on."""

    version: int = VERSION


@dataclass(frozen=True)
class Park:
    """The agent asks the worker to leave ``round``."""

    round: int


@dataclass(frozen=True)
class Parked:
    """The worker promises that no step of ``round`` completes or publishes there any more. ``step``: its finished steps.

    ``settled``: the round in which the ranks agreed upon the state that the worker has; 0: it has none yet.
    """

    round: int
    step: int
    settled: int


@dataclass(frozen=True)
class AllTrain:
    """All workers of ``round`` train together from now on. Before, those that have a state may have trained without the others."""

    round: int


@dataclass(frozen=True)
class Lost:
    """The worker has lost peers in ``round``, and no agent has seen a failure. It keeps its state, and waits to be asked to park."""

    round: int


@dataclass(frozen=True)
class Resume:
    """The worker takes part in ``round``, with these variables in its environment."""

    round: int
    env: Mapping[str, str]


Message = Hello | Park | Parked | AllTrain | Lost | Resume
WORDS: dict[type[Message], str] = {Hello: "hello", Park: "park", Parked: "parked", AllTrain: "gathered", Lost: "lost", Resume: "resume"}


def store_prefix(round: int) -> str:
    """Return what the keys of a round begin with in the workers' store: what agents tell live workers there, and these tell each other."""
    return f"elastirun-live/{round}"


def encode(message: Message) -> bytes:
    """Return the packet of a message."""
    return json.dumps({"do": WORDS[type(message)], **vars(message)}, separators=(",", ":")).encode()


def decode(data: bytes) -> Message | None:
    """Return the message in a packet; None if it is none of this version, or out of bounds."""
    if len(data) > MAX_MESSAGE:
        return None
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    word = fields.pop("do", None)
    kind = next((kind for kind, known in WORDS.items() if known == word), None)
    if kind is None or [*fields] != [field.name for field in dataclasses.fields(kind)]:
        return None
    if not all(_is_environment(value) if name == "env" else _is_number(value) for name, value in fields.items()):
        return None
    return kind(**fields) if fields.get("version", VERSION) == VERSION else None


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def _is_environment(value: Any) -> bool:
    return isinstance(value, dict) and all(
        name.isidentifier() and isinstance(text, str) and "\0" not in text for name, text in value.items()
    )

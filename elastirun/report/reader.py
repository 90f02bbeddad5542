"""Reads the events of agents from log folders. The bytes may be anything: what cannot be read is counted and named, and is no error."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from elastirun import linux
from elastirun.errors import UsageError

NAME = "events.jsonl"
FORMAT = 1  # the version of the events that is read
DEEPEST = 3  # folders below a given one: DIR/<job>_<node>_<random>/events.jsonl is at 1
MAX_FILES = 4096  # files that are read; a job has one per agent
MAX_FOLDERS = 100_000  # folders that are looked into
MAX_BYTES = 512 << 20  # bytes of all files; a month of a node takes 10 MB
MAX_LINE = 1 << 20  # bytes; a hang of 256 workers with their stacks takes 400 KB
MAX_TEXT = 2000  # characters of one text that are kept
MAX_ITEMS = 4096  # items of one list that are kept
LATEST_TIME = 1e11  # seconds since the epoch; later dates cannot be drawn


@dataclass(frozen=True)
class Fields:
    """An object whose fields may be of any type and size."""

    fields: Mapping[str, Any]

    def number(self, name: str) -> float | None:
        """Return a field that is a finite number that is not negative; None if it is anything else."""
        value = self.fields.get(name)
        good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LATEST_TIME
        return float(value) if good and value is not None else None

    def seconds(self, name: str) -> float:
        """Return a duration; 0 where there is none."""
        return self.number(name) or 0.0

    def whole(self, name: str) -> int:
        """Return a whole number; 0 where there is none."""
        return int(self.number(name) or 0)

    def text(self, name: str) -> str:
        """Return a text; empty where there is none."""
        value = self.fields.get(name)
        return value[:MAX_TEXT] if isinstance(value, str) else ""

    def texts(self, name: str) -> tuple[str, ...]:
        """Return the texts of a list."""
        return tuple(one[:MAX_TEXT] for one in self._list(name) if isinstance(one, str))

    def items(self, name: str) -> tuple[Fields, ...]:
        """Return the objects of a list."""
        return tuple(Fields(one) for one in self._list(name) if isinstance(one, dict))

    def _list(self, name: str) -> list[Any]:
        value = self.fields.get(name)
        return value[:MAX_ITEMS] if isinstance(value, list) else []


@dataclass(frozen=True)
class EventLine(Fields):
    """One line of a file. ``time``: seconds since the epoch; ``mono``: seconds of that machine's monotonic clock."""

    time: float
    mono: float
    kind: str
    node: str  # id of the agent
    name: str  # of the node: its host name, unless it has another one


@dataclass
class EventFiles:
    """The events of all files, each in the order of its file, and what was left out, for people."""

    events: list[EventLine] = field(default_factory=list)
    files: int = 0
    left_out: list[str] = field(default_factory=list)


def read(paths: Sequence[str]) -> EventFiles:
    """Read the events files in and below the folders ``paths``, or these files. Errors: ``UsageError`` for a path that is not there."""
    found, left = EventFiles(), MAX_BYTES
    files = find(paths, found.left_out)
    for path in files[:MAX_FILES]:
        left -= _read_file(path, left, found)
    if len(files) > MAX_FILES:
        found.left_out.append(f"{len(files) - MAX_FILES} files beyond the first {MAX_FILES}")
    return found


def find(paths: Iterable[str], left_out: list[str]) -> list[str]:
    """Return the events files in and below ``paths``, each once. Adds folders that cannot be read to ``left_out``."""
    files: dict[str, None] = {}
    folders = 0
    for path in paths:
        if not os.path.isdir(path):
            if not os.path.exists(path):
                raise UsageError(f"there is no folder {path[:MAX_TEXT]!r}; give the folder of --log-dir, of one node or of all")
            files[os.path.abspath(path)] = None
            continue
        pending = [(os.path.abspath(path), 0)]
        while pending and folders < MAX_FOLDERS:
            folder, depth = pending.pop()
            folders += 1
            names, below = _entries(folder, left_out)
            if NAME in names:
                files[os.path.join(folder, NAME)] = None
            pending += [(os.path.join(folder, name), depth + 1) for name in below if depth < DEEPEST]
    if folders >= MAX_FOLDERS:
        left_out.append(f"folders beyond the first {MAX_FOLDERS}")
    return sorted(files)


def _entries(folder: str, left_out: list[str]) -> tuple[set[str], list[str]]:
    """Return the names of the files and of the folders in ``folder``. Hidden folders are left out: .latest leads to others once more."""
    names, below = set(), []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    below += [] if entry.name.startswith((".", "attempt_")) else [entry.name]
                else:
                    names.add(entry.name)
    except OSError as error:
        left_out.append(f"{folder}: {error.strerror}")
    return names, below


def _read_file(path: str, most: int, found: EventFiles) -> int:
    """Add the events of one file. Return how many bytes it has. ``most``: bytes that may be read."""
    bad: list[str] = []
    number = size = 0
    try:
        with linux.open_regular(path) as file:
            found.files += 1
            while size < most and (line := file.readline(MAX_LINE + 1)):
                number, size = number + 1, size + len(line)
                event = parse_line(line)
                if isinstance(event, EventLine):
                    found.events.append(event)
                else:
                    bad.append(f"line {number}: {event}")
            if size >= most:
                found.left_out.append(f"{path}: what comes after line {number}, because all files together are too large")
    except OSError as error:
        found.left_out.append(f"{path}: {error.strerror}")
    if bad:
        found.left_out.append(f"{path}: {len(bad)} line{'s' * (len(bad) > 1)} that cannot be read; {'; '.join(bad[:3])}")
    return size


def parse_line(line: bytes) -> EventLine | str:
    """Return the event of a line, or why it is none."""
    if len(line) > MAX_LINE:
        return f"a line of more than {MAX_LINE >> 10} KiB"
    if not line.endswith(b"\n"):
        return "its end is missing"
    try:
        data = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return "not JSON"
    if not isinstance(data, dict):
        return "not an object"
    if data.get("v") != FORMAT:
        return f"its version is not {FORMAT}"
    fields = Fields(data)
    kind, node = fields.text("event"), fields.text("node")
    name = fields.text("node_name") or fields.text("name")  # hosts with several nodes name each
    if not (kind and node and name):
        return "without event, node or name"
    time, mono = fields.number("time"), fields.number("mono")
    if time is None or mono is None:
        return "without a time"
    return EventLine(data, time, mono, kind, node, name)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")

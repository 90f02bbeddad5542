"""events.jsonl: what happened on this node, one JSON object a line, for programs and for the failover table.

Every line has ``v`` (format, 1), ``time`` (seconds since the epoch), ``mono`` (seconds of this machine's monotonic clock),
``event``, ``node`` (the row's id) and ``name`` (host name); the rest depends on the event.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress


class EventLog:
    """Appends to ``path`` (None: no file) and hands each line to ``also`` (the console, when asked for)."""

    def __init__(self, node: str, name: str, path: str | None = None, also: Callable[[str], None] | None = None) -> None:
        self._who = {"node": node, "name": name}
        self._also = also
        self._fd = None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, event: str, **fields: object) -> None:
        """One line; a full disk loses the line, not the job."""
        line = json.dumps({"v": 1, "time": time.time(), "mono": time.monotonic(), "event": event, **self._who, **fields})
        if self._fd is not None:
            with suppress(OSError):
                os.write(self._fd, line.encode() + b"\n")
        if self._also is not None:
            self._also(line)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

"""A worker's bytes as lines: the last ones kept, whole ones passed on."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Sequence

from elastirun import clock
from elastirun.agent.output.log_files import MAX_LINE, LogFile

LAST_LINES = 30
LAST_LINE_BYTES = 500
HOLD = 0.5  # seconds that the beginning of a line may wait for its end
_ESCAPES = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")


class LastLines:
    """The last ``LAST_LINES`` lines of a stream of bytes, each cut to ``LAST_LINE_BYTES``.

    Of a line that was overwritten with carriage returns (a progress bar) the last state is kept.
    """

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=LAST_LINES)
        self._open = b""  # the beginning of a line without its end yet

    def feed(self, data: bytes) -> None:
        *lines, rest = (self._open + data).split(b"\n")
        self._lines.extend(_last_state(line) for line in lines[-LAST_LINES:])
        self._open = _last_state(rest) + (b"\r" if rest.endswith(b"\r") else b"")

    def lines(self) -> tuple[str, ...]:
        """As text without escape sequences; bytes that are no UTF-8 as ``\\xNN``."""
        unfinished = [self._open.rstrip(b"\r")] if self._open else []
        raw = [*self._lines, *unfinished][-LAST_LINES:]
        return tuple(_ESCAPES.sub(b"", line).decode(errors="backslashreplace") for line in raw)


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2][:LAST_LINE_BYTES]


class WholeLines:
    """Passes bytes on as they are, but a line in one piece, so that what others write stays before or after it.

    What has no end yet waits for it, ``HOLD`` seconds at most. It does not wait when it draws over itself with carriage returns,
    as a progress bar does, or is longer than ``MAX_LINE``.
    """

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._open = b""
        self.due = math.inf  # on ``elastirun.clock``: when ``flush`` is to be called
        self.late = False  # was due at the last look

    def feed(self, data: bytes) -> None:
        data = self._open + data
        end = data.rfind(b"\n") + 1
        if len(data) - end >= MAX_LINE or b"\r" in data[end:]:
            end = len(data)
        if end:
            self._write(data[:end])
            self.due = math.inf
        self._open = data[end:]
        if self._open and self.due == math.inf:
            self.due = clock.now() + HOLD

    def flush(self) -> None:
        self._write(self._open)
        self._open, self.due = b"", math.inf


class PrefixedLines:
    """Cuts a stream of bytes into whole lines and passes each on behind ``prefix``; copies those with a needle.

    A line longer than ``MAX_LINE`` is passed on in pieces, each as a line of its own.
    """

    def __init__(self, prefix: bytes, write: Callable[[bytes], None], needles: Sequence[bytes] = (), copy: LogFile | None = None) -> None:
        self._prefix, self._write, self._needles, self._copy = prefix, write, needles, copy
        self._open = b""

    def feed(self, data: bytes) -> None:
        *lines, self._open = (self._open + data).split(b"\n")
        while len(self._open) > MAX_LINE:
            lines.append(self._open[:MAX_LINE])
            self._open = self._open[MAX_LINE:]
        self._emit(lines)

    def flush(self) -> None:
        """Pass on a last line without a newline, with one."""
        if self._open:
            self._emit([self._open])
            self._open = b""

    def _emit(self, lines: Sequence[bytes]) -> None:
        pieces = [line[i : i + MAX_LINE] for line in lines for i in range(0, len(line) or 1, MAX_LINE)]
        self._write(self._join(pieces))  # one write: what other ranks say stays before or after it
        if self._copy is not None:
            self._copy.write(self._join([piece for piece in pieces if any(needle in piece for needle in self._needles)]))

    def _join(self, pieces: Sequence[bytes]) -> bytes:
        return b"".join(self._prefix + piece + b"\n" for piece in pieces)

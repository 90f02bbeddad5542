"""Cuts worker output into lines: keeps the last lines, and writes whole lines to the console."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from elastirun import clock
from elastirun.agent.output.log_files import MAX_LINE, LogFile

LAST_LINES = 30  # lines of stderr that are kept for the failure report; a traceback has about as many
LAST_LINE_BYTES = 500  # bytes kept of each of them
PARTIAL_LINE_DELAY = 0.5  # seconds that the beginning of a line waits for its end before it is shown; a prompt must appear soon
PARTIAL_LINE_LIMIT = 5.0  # the same while other workers write, whose lines would tear it: on a busy machine its end may come late
PIECE_DELAY = 0.2  # seconds that a prefixed line that is only begun waits for its end
BAR_PAUSE = 1.0  # seconds between two states of a progress bar, of which each makes a line
_ESCAPES = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")  # terminal control sequences (ECMA-48 CSI)


class LastLines:
    """The last LAST_LINES lines of a stream of bytes, each cut to LAST_LINE_BYTES.

    If a line was overwritten with carriage returns (a progress bar), its last state is kept.
    """

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=LAST_LINES)
        self._partial = b""  # the beginning of a line whose end has not come yet

    def feed(self, data: bytes) -> None:
        """Take in the next bytes of the stream."""
        *lines, rest = (self._partial + data).split(b"\n")
        self._lines.extend(_last_state(line) for line in lines[-LAST_LINES:])
        self._partial = _last_state(rest) + (b"\r" if rest.endswith(b"\r") else b"")

    def lines(self) -> tuple[str, ...]:
        """Return the lines as text without control sequences; bytes that are not UTF-8 become ``\\xNN``."""
        partial = [self._partial.rstrip(b"\r")] if self._partial else []
        raw = [*self._lines, *partial][-LAST_LINES:]
        return tuple(_ESCAPES.sub(b"", line).decode(errors="backslashreplace") for line in raw)


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2][:LAST_LINE_BYTES]


class BegunLine:
    """The line of a stream of bytes that is only begun.

    ``due``: when to show it, on ``elastirun.clock``; infinity: not at all. ``was_due``: the owner has found it due once. ``begun``: when
    the line began; ``wrote``: when something was written last.
    """

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._partial = b""
        self.due = math.inf
        self.was_due = False
        self.begun = self.wrote = -math.inf


class WholeLines(BegunLine):
    """Writes a stream of bytes unchanged, but each line in one piece, so that output of other workers comes before or after it.

    The beginning of a line waits for its end, PARTIAL_LINE_DELAY seconds at most, or PARTIAL_LINE_LIMIT. It does not wait if it contains a
    carriage return (a progress bar) or is longer than MAX_LINE.

    ``due``: when to call ``flush``.
    """

    def feed(self, data: bytes) -> None:
        """Write the lines that ``data`` completes."""
        data = self._partial + data
        end = data.rfind(b"\n") + 1
        if len(data) - end >= MAX_LINE or b"\r" in data[end:]:
            end = len(data)
        now = clock.now()
        if end:
            self._write(data[:end])
            self.due, self.wrote = math.inf, now
        self._partial = data[end:]
        if self._partial and self.due == math.inf:
            self.begun, self.due = now, now + PARTIAL_LINE_DELAY

    def flush(self) -> None:
        """Write the beginning of a line without waiting for its end."""
        self._write(self._partial)
        self._partial, self.due = b"", math.inf


def may_tear(line: BegunLine, streams: Iterable[BegunLine], now: float) -> bool:
    """Return whether the line that is only begun in ``line`` waits longer for its end, because others of ``streams`` write.

    What they write would tear it; and where they write much, its worker may wait for a processor in the middle of a line.
    """
    return now < line.begun + PARTIAL_LINE_LIMIT and any(s is not line and now - s.wrote < PARTIAL_LINE_DELAY for s in streams)


def show_when_due(line: BegunLine, show: Callable[[], None], now: float, delay: float) -> None:
    """Call ``show`` for a line that is only begun, when it is found due a second time. ``delay``: seconds to wait instead; 0: none."""
    if now >= line.due and delay:
        line.due = now + delay
    elif now >= line.due and line.was_due:
        show()
    line.was_due = now >= line.due  # shown one turn later: the end may have come while the loop stood still


class PrefixedLines(BegunLine):
    """Writes each line of a stream of bytes behind ``prefix``, and copies the lines that contain one of ``needles`` to ``copy``.

    A line longer than MAX_LINE is written in pieces, each as a line of its own. What begins a line and is not ended within PIECE_DELAY
    (a prompt) is written as a line of its own, and the rest as another one. Of a line that is overwritten with carriage returns (a progress
    bar) the last state is written, once per BAR_PAUSE at most.

    ``due``: when to call ``show_begun``.
    """

    def __init__(self, prefix: bytes, write: Callable[[bytes], None], needles: Sequence[bytes] = (), copy: LogFile | None = None) -> None:
        super().__init__(write)
        self._prefix, self._needles, self._copy = prefix, needles, copy
        self._shown = b""  # what was written of ``_partial``

    @property
    def is_bar(self) -> bool:
        """Whether the line that is only begun is overwritten again and again."""
        return b"\r" in self._partial

    def feed(self, data: bytes) -> None:
        """Write the lines that ``data`` completes."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        while len(self._partial) > MAX_LINE:
            lines.append(self._partial[:MAX_LINE])
            self._partial = self._partial[MAX_LINE:]
        if lines:
            self._emit(lines)
        if not self._partial:
            self.due = math.inf
        elif self.due == math.inf:
            self.begun = clock.now()
            self.due = self.begun + (BAR_PAUSE if b"\r" in self._shown else PIECE_DELAY)

    def show_begun(self) -> None:
        """Write the beginning of a line, or the state of a progress bar, as a line of its own."""
        self.due = math.inf
        if text := self._rest(self._partial):
            self._write(self._join([text]))
        self._shown = self._partial

    def flush(self) -> None:
        """Write a last line that has no newline, and end it."""
        if self._partial:
            self._emit([self._partial])
            self._partial, self.due = b"", math.inf

    def _rest(self, line: bytes) -> bytes:
        """Return what the console has not seen yet of ``line``; of a progress bar its last state."""
        if b"\r" not in line.rstrip(b"\r"):
            return line[len(self._shown) :]
        return b"" if _last_state(line) == _last_state(self._shown) else _last_state(line)

    def _emit(self, lines: Sequence[bytes]) -> None:
        seen, pieces = [], [line[i : i + MAX_LINE] for line in lines for i in range(0, len(line) or 1, MAX_LINE)]
        for line in pieces:
            if (rest := self._rest(line)) or not self._shown:
                seen.append(rest)
            self._shown, self.due = b"", math.inf
        self._write(self._join(seen))
        self.wrote = clock.now()
        if self._copy is not None and (found := [piece for piece in pieces if any(needle in piece for needle in self._needles)]):
            self._copy.write(self._join(found))

    def _join(self, pieces: Sequence[bytes]) -> bytes:  # in one write, so that output of other ranks comes before or after it
        return b"".join(self._prefix + piece + b"\n" for piece in pieces)

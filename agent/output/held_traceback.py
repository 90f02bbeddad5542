"""Holds back what a worker writes to stderr from an uncaught exception on, until it is known whether it only lost its peers.

A node that is lost lets every other worker fail with dozens of lines. They go to a file or nowhere, so that the console shows the cause.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from elastirun import clock

HOLD = 3.0  # seconds from the first line to the end of the worker, which takes tens of milliseconds, on a busy machine seconds
HELD_LIMIT = 256 * 1024  # bytes; more is no traceback
# The first line of an uncaught exception (torch puts the rank in front), of an error of torch's C++ code, or of an abort by one.
_BEGINS = re.compile(
    rb"^Traceback \(most recent call last\):"
    rb"|\[rank\d+\]: ?Traceback \(most recent call last\):"  # also behind a progress bar
    rb"|^(?:\[rank\d+\]:)?\[[EF]\d{4} "
    rb"|^\[W\d{4} [^\n]*\b(?:recv|send)\w* failed"
    rb"|^terminate called ",
    re.MULTILINE,
)
_PYTHON = re.compile(rb"^(.*?)Traceback \(most recent call last\):", re.MULTILINE)
_OTHER_EXCEPTION = b"During handling of the above exception, another exception occurred"  # the one above may be the cause


def last_words(text: bytes) -> int:
    """Return where in ``text`` the last traceback begins, with the errors of torch's C++ code right before it."""
    begins = [found.start() for found in _BEGINS.finditer(text)] or [0]
    while len(begins) > 1 and _PYTHON.match(text, begins[-1]) is None and any(_PYTHON.match(text, at) for at in begins):
        begins.pop()  # torch's C++ code went on
    at = begins.pop()
    while begins and _PYTHON.match(text, begins[-1]) is None:
        at = begins.pop()
    return at


def is_the_end(text: bytes) -> bool:
    """Return whether the traceback at the beginning of ``text`` ended its process: no exception was caught, and nothing came after it."""
    prefix = found[1] if (found := _PYTHON.match(text)) else b""
    after = [line for line in text.split(b"\n")[1:] if line and not line.startswith((b" ", b"\t"))]
    return prefix.startswith(b"[rank") or len(after) <= 1


class HeldTraceback:
    """Passes the stderr of one worker on to ``write``, but for what may be its last words.

    What is held goes on to ``write`` after HOLD seconds if the worker has not ended, as after an exception that was only logged.
    ``due``: when to call ``show``, on ``elastirun.clock``; infinity: not by time.
    """

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._held = bytearray()
        self._line_begins = True  # the next byte is the first of a line
        self.due = math.inf

    @property
    def holds(self) -> bool:
        """Return whether anything is held."""
        return bool(self._held)

    def feed(self, data: bytes) -> None:
        """Take in the next bytes."""
        begins = None if self._held else self._first_line(data)
        if begins is not None:
            self._write(data[:begins])
            self.due = clock.now() + HOLD
            data = data[begins:]
        if self._held or begins is not None:
            self._held += data
            if len(self._held) > HELD_LIMIT:
                self.show()
        else:
            self._write(data)
        self._line_begins = data.endswith(b"\n") if data else self._line_begins

    def wait(self) -> None:
        """Hold on to it: the worker has lost its peers."""
        self.due = math.inf

    def show(self) -> None:
        """Pass on what is held."""
        self._write(self.take())

    def names_another_exception(self) -> bool:
        """Return whether what is held tells of an exception in whose handling another one was raised."""
        return _OTHER_EXCEPTION in self._held

    def is_the_end(self) -> bool:
        """Return whether the last traceback that is held ended the worker."""
        text = bytes(self._held)
        return is_the_end(text[last_words(text) :])

    def take_last_words(self) -> bytes:
        """Pass on what came before the last traceback. Return the traceback, and forget it."""
        text = self.take()
        at = last_words(text)
        self._write(text[:at])
        return text[at:]

    def take(self) -> bytes:
        """Return what is held, and forget it."""
        held, self._held, self.due = bytes(self._held), bytearray(), math.inf
        return held

    def _first_line(self, data: bytes) -> int | None:
        """Return where a line begins from which on to hold; None: nowhere."""
        found = _BEGINS.search(data)
        if found is not None and found.start() == 0 and not self._line_begins:
            found = _BEGINS.search(data, 1)
        return None if found is None else found.start()

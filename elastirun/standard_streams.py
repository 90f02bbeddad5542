"""Standard streams that may be closed, full or read by nobody: writing to them never fails, and never changes an exit status."""

from __future__ import annotations

import os
import sys
from typing import TextIO


def open_closed() -> None:
    """Open those of the descriptors 0 to 2 that are closed on /dev/null. To be called before any other descriptor is opened.

    Otherwise the next pipe or socket would get such a number, and whatever a library or a worker prints would go there.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number
            os.set_inheritable(opened, True)  # workers need them, too
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # Python found it closed
            _give_up(name)


def write(name: str, text: str) -> OSError | None:
    """Write ``text`` to the stream ``name`` ("stdout" or "stderr") and flush it. Returns why that failed; the stream is /dev/null then."""
    stream: TextIO = getattr(sys, name)
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:  # an argument that is no UTF-8, or a terminal that knows ASCII only
            encoding = stream.encoding
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except OSError as error:
        _give_up(name)
        return error
    return None


def flush() -> None:
    """Flush both, whatever comes of it."""
    for name in ("stdout", "stderr"):
        write(name, "")


def _give_up(name: str) -> None:
    """Nothing is to be flushed there once more at exit, which would turn the exit status into 120."""
    setattr(sys, name, open(os.devnull, "w"))

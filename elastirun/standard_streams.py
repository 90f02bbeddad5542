"""Safe writes to standard streams, which may be closed, full or without a reader: no write fails or changes the exit status."""

from __future__ import annotations

import os
import sys
from typing import TextIO


def open_closed() -> None:
    """Open /dev/null as each of the descriptors 0 to 2 that is closed. Call this before any other descriptor is opened.

    Otherwise the next pipe or socket would get that number, and output of a library or a worker would go there.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is ``fd``
            os.set_inheritable(opened, True)  # workers need it too
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the descriptor was closed when Python started
            _redirect_to_null(name)


def write(name: str, text: str) -> OSError | None:
    """Write ``text`` to the stream ``name`` ("stdout" or "stderr") and flush it.

    If that fails, redirect the stream to /dev/null and return the error.
    """
    stream: TextIO = getattr(sys, name)
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:  # an argument is not UTF-8, or the terminal takes only ASCII
            encoding = stream.encoding
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except OSError as error:
        _redirect_to_null(name)
        return error
    return None


def flush() -> None:
    """Flush stdout and stderr, and ignore errors."""
    for name in ("stdout", "stderr"):
        write(name, "")


def _redirect_to_null(name: str) -> None:
    """Redirect the stream to /dev/null. Otherwise Python would flush it once more at exit, fail, and exit with status 120."""
    setattr(sys, name, open(os.devnull, "w"))

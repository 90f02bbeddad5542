"""Lists the open descriptors of this process, for tests that nothing is left open."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from pathlib import Path


def descriptors() -> list[str]:
    """Return the target of each open descriptor by number, so that a failed comparison names what is left open.

    Where gRPC is loaded, its pollers are left out: it opens and closes them by itself, also long after the last channel was closed.
    """
    found: dict[int, str] = {}
    for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
        with suppress(OSError):  # the descriptor of the listing itself
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    pollers = _pollers(found) if "grpc" in sys.modules else set()
    return [f"{fd} -> {target}" for fd, target in found.items() if fd not in pollers]


def _pollers(found: dict[int, str]) -> set[int]:
    """Return the descriptors of gRPC's idle pollers: each is an epoll that watches one eventfd and nothing else."""
    pollers: set[int] = set()
    for fd in (fd for fd, target in found.items() if target == "anon_inode:[eventpoll]"):
        with suppress(OSError):
            watched = list(map(int, re.findall(r"^tfd: *(\d+)", Path(f"/proc/self/fdinfo/{fd}").read_text(), re.M)))
            if len(watched) == 1 and found.get(watched[0]) == "anon_inode:[eventfd]":
                pollers |= {fd, *watched}
    return pollers

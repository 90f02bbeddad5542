"""Lists the open descriptors of this process, for tests that nothing is left open."""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress

POLLERS = ("anon_inode:[eventpoll]", "anon_inode:[eventfd]")


def descriptors() -> list[str]:
    """Return the target of each open descriptor by number, so that a failed comparison names what is left open.

    Where gRPC is loaded, epolls and eventfds are left out: its pollers come and go by themselves, also long after the last channel was
    closed. Most runs have processes without it. A selector of an earlier test may be garbage that is not collected yet: it goes first.
    """
    gc.collect()
    found: dict[int, str] = {}
    for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
        with suppress(OSError):  # the descriptor of the listing itself
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    hidden = POLLERS if "grpc" in sys.modules else ()
    return [f"{fd} -> {target}" for fd, target in found.items() if target not in hidden]

"""Lists the open descriptors of this process, for tests that nothing is left open."""

from __future__ import annotations

import os
from contextlib import suppress


def descriptors() -> list[str]:
    """Return the target of each open descriptor by number, so that a failed comparison names what is left open."""
    found = []
    for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
        with suppress(OSError):  # the descriptor of the listing itself
            found.append(f"{fd} -> {os.readlink(f'/proc/self/fd/{fd}')}")
    return found

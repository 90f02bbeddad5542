"""The descriptors that this process has open, for tests that nothing is left open."""

from __future__ import annotations

import os
from contextlib import suppress


def descriptors() -> list[str]:
    """``number -> what it is`` of each, so that a failed comparison names the one that is left."""
    found = []
    for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
        with suppress(OSError):  # the listing's own
            found.append(f"{fd} -> {os.readlink(f'/proc/self/fd/{fd}')}")
    return found

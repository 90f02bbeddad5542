"""The child processes of a process, by the kernel's word."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def children(pid: int) -> set[int]:
    """Return the children of all threads of ``pid``."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):  # a thread that has ended meanwhile; its children are another thread's now
            found |= set(map(int, (task / "children").read_text().split()))
    return found

"""The child processes of a process, by the kernel's word."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path


def children(pid: int) -> set[int]:
    """Return the children of all threads of ``pid``."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):  # a thread that has ended meanwhile; its children are another thread's now
            found |= set(map(int, (task / "children").read_text().split()))
    return found


def guard_of(agent: subprocess.Popen[str]) -> int:
    """Return the pid of the agent's guard."""
    (guard,) = (pid for pid in children(agent.pid) if "/guard.py" in command_line(pid))
    return guard


def command_line(pid: int) -> str:
    """Return the arguments of a process, each with a null byte at its end; empty: it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    return ""

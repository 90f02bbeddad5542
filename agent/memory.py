"""Whether the kernel killed for want of memory: from its own counters, never guessed from a SIGKILL."""

from __future__ import annotations

from pathlib import Path

from elastirun.agent.cpus import Read, cgroup_folders

GIB = 1 << 30
UNLIMITED = 1 << 60  # version 1 writes "no limit" as a number near 2^63


def read_file(path: str) -> str:
    return Path(path).read_text()


def oom_kills(read: Read = read_file) -> int | None:
    """Processes of our control group that the kernel has killed for want of memory so far; None where it does not count.

    Version 2 counts in ``memory.events``, version 1 in ``memory.oom_control``; without a group the whole machine's count is taken.
    """
    own = [f"{folder}/{name}" for folder in _folders(read)[:1] for name in ("memory.events", "memory.oom_control")]
    for path in (*own, "/proc/vmstat"):
        found = _fields(path, read).get("oom_kill")
        if found is not None:
            return found
    return None


def explain(before: int | None, read: Read = read_file) -> str:
    """What to say of a worker that died of SIGKILL when ``before`` was counted at its start; empty: it was not for memory."""
    now = oom_kills(read)
    if before is None or now is None or now <= before:
        return ""
    limits = [(limit, peak) for folder in _folders(read) for limit, peak in [_limit_and_peak(folder, read)] if limit is not None]
    text = "out of memory: the kernel killed a process of this control group or machine"
    if not limits:
        return text
    limit, peak = min(limits)
    return f"out of memory: the kernel killed it; {peak / GIB:.1f} of {limit / GIB:.1f} GiB were used"


def _folders(read: Read) -> list[str]:
    try:
        return cgroup_folders(read("/proc/self/cgroup"), read("/proc/self/mountinfo"), "memory")
    except OSError:
        return []


def _limit_and_peak(folder: str, read: Read) -> tuple[int | None, int]:
    """In bytes; limit None: there is none."""
    for limit, peak in (("memory.max", "memory.peak"), ("memory.limit_in_bytes", "memory.max_usage_in_bytes")):
        try:
            size = int(read(f"{folder}/{limit}"))
            return (size, int(read(f"{folder}/{peak}"))) if size < UNLIMITED else (None, 0)
        except (OSError, ValueError):  # not there, or "max"
            continue
    return None, 0


def _fields(path: str, read: Read) -> dict[str, int]:
    try:
        pairs = [line.split() for line in read(path).splitlines()]
    except OSError:
        return {}
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}

"""Whether the kernel killed for want of memory: from its own counters, never guessed from a SIGKILL."""

from __future__ import annotations

from pathlib import Path

from elastirun.agent.host.cpus import Read, cgroup_folders

GIB = 1 << 30
UNLIMITED = 1 << 60  # version 1 writes "no limit" as a number near 2^63
NEAR = 0.9  # of its limit, a group's peak when that limit is what its process was killed for


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


def explain(before: int | None, read: Read = read_file) -> str | None:
    """What to say of a process that died of SIGKILL when ``before`` was counted at its start.

    Empty: it was not for memory; None: the kernel does not say.
    """
    now = oom_kills(read)
    if before is None or now is None:
        return None
    if now <= before:
        return ""
    groups = [found for folder in _folders(read) if (found := _peak_and_limit(folder, read))]
    peak, limit = max(groups, key=lambda group: group[0] / group[1], default=(0, 1))
    if peak < NEAR * limit:  # the machine's memory was spent, not a group's
        return "OOM-killed"
    return f"OOM-killed, {peak / GIB:.1f} of {limit / GIB:.1f} GiB"


def _folders(read: Read) -> list[str]:
    try:
        return cgroup_folders(read("/proc/self/cgroup"), read("/proc/self/mountinfo"), "memory")
    except OSError:
        return []


def _peak_and_limit(folder: str, read: Read) -> tuple[int, int] | None:
    """In bytes; None: there is no limit, or the kernel does not tell the peak (version 2 before Linux 5.19)."""
    for limit, peak in (("memory.max", "memory.peak"), ("memory.limit_in_bytes", "memory.max_usage_in_bytes")):
        try:
            size = int(read(f"{folder}/{limit}"))
            return (int(read(f"{folder}/{peak}")), size) if 0 < size < UNLIMITED else None
        except (OSError, ValueError):  # not there, or "max"
            continue
    return None


def _fields(path: str, read: Read) -> dict[str, int]:
    try:
        pairs = [line.split() for line in read(path).splitlines()]
    except OSError:
        return {}
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}

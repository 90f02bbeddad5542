"""Detection of out-of-memory kills by the kernel's own counters. A SIGKILL alone proves nothing."""

from __future__ import annotations

from elastirun.agent.host.cpus import Read, own_groups, read_file

GIB = 1 << 30
UNLIMITED = 1 << 60  # bytes; cgroup version 1 writes "no limit" as a number near 2^63
NEAR_LIMIT = 0.9  # fraction of a group's limit; a group whose peak is below it was not killed for that limit


def oom_kills(read: Read = read_file) -> int | None:
    """Return how many processes of our control group the kernel has killed for want of memory; None where the kernel does not count.

    Version 2 counts in ``memory.events``, version 1 in ``memory.oom_control``. Without a control group, return the machine's count.
    """
    own = [f"{folder}/{name}" for folder in own_groups("memory", read)[:1] for name in ("memory.events", "memory.oom_control")]
    for path in (*own, "/proc/vmstat"):
        found = _fields(path, read).get("oom_kill")
        if found is not None:
            return found
    return None


def explain(before: int | None, read: Read = read_file) -> str | None:
    """Return a note on a worker that died of SIGKILL. ``before``: the count (``oom_kills``) when the worker was started.

    Empty when the kernel has killed nothing since; None when the kernel does not count.
    """
    now = oom_kills(read)
    if before is None or now is None:
        return None
    if now <= before:
        return ""
    groups = [found for folder in own_groups("memory", read) if (found := _peak_and_limit(folder, read))]
    peak, limit = max(groups, key=lambda group: group[0] / group[1], default=(0, 1))
    if peak < NEAR_LIMIT * limit:  # the machine ran out of memory, not a group
        return "OOM-killed"
    return f"OOM-killed, {peak / GIB:.1f} of {limit / GIB:.1f} GiB"


def _peak_and_limit(folder: str, read: Read) -> tuple[int, int] | None:
    """Return a group's peak use and limit in bytes; None without a limit or without a record of the peak (version 2 before Linux 5.19)."""
    for limit, peak in (("memory.max", "memory.peak"), ("memory.limit_in_bytes", "memory.max_usage_in_bytes")):
        try:
            size = int(read(f"{folder}/{limit}"))
            return (int(read(f"{folder}/{peak}")), size) if 0 < size < UNLIMITED else None
        except (OSError, ValueError):  # no such file, or the word "max"
            continue
    return None


def _fields(path: str, read: Read) -> dict[str, int]:
    try:
        pairs = [line.split() for line in read(path).splitlines()]
    except OSError:
        return {}
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}

"""Detection of out-of-memory kills by the kernel's own counters. A SIGKILL alone proves nothing."""

from __future__ import annotations

from elastirun.agent.host.cpus import ReadFile, own_groups, read_file
from elastirun.agent.host.memory import fields, limit_and

GIB = 1 << 30
_PEAKS = "memory.peak", "memory.max_usage_in_bytes"  # of a control group, version 2 (since Linux 5.19) and 1
NEAR_LIMIT = 0.9  # fraction of a group's limit; a group whose peak is below it was not killed for that limit


def oom_kills(read: ReadFile = read_file) -> int | None:
    """Return how many processes of our control group the kernel has killed for want of memory; None where the kernel does not count.

    Version 2 counts in ``memory.events``, version 1 in ``memory.oom_control``. Without a control group, return the machine's count.
    """
    own = [f"{folder}/{name}" for folder in own_groups("memory", read)[:1] for name in ("memory.events", "memory.oom_control")]
    for path in (*own, "/proc/vmstat"):
        found = fields(path, read).get("oom_kill")
        if found is not None:
            return found
    return None


def explain(before: int | None, read: ReadFile = read_file) -> str | None:
    """Return a note on a worker that died of SIGKILL. ``before``: the count (``oom_kills``) when the worker was started.

    Empty when the kernel has killed nothing since; None when the kernel does not count.
    """
    now = oom_kills(read)
    if before is None or now is None:
        return None
    if now <= before:
        return ""
    groups = [found for folder in own_groups("memory", read) if (found := limit_and(_PEAKS, folder, read)) and found[0] > 0]
    limit, peak = max(groups, key=lambda group: group[1] / group[0], default=(1, 0))
    if peak < NEAR_LIMIT * limit:  # the machine ran out of memory, not a group
        return "OOM-killed"
    return f"OOM-killed, {peak / GIB:.1f} of {limit / GIB:.1f} GiB"

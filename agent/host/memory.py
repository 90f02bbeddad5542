"""Memory that is available to this process: the machine's, within the limits of its control groups. Both versions of those are read."""

from __future__ import annotations

from contextlib import suppress

from elastirun.agent.host.cpus import ReadFile, own_groups, read_file

UNLIMITED = 1 << 60  # bytes; cgroup version 1 writes "no limit" as a number near 2^63
_LIMITS = "memory.max", "memory.limit_in_bytes"  # files of a control group, in version 2 and in version 1
_USES = "memory.current", "memory.usage_in_bytes"


def available(read: ReadFile = read_file) -> int:
    """Return how many bytes can be allocated without swapping; 0 where /proc does not say."""
    machine = fields("/proc/meminfo", read).get("MemAvailable", 0) << 10
    return max(0, min([machine, *(room for folder in own_groups("memory", read) if (room := _room(folder, read)) is not None)]))


def _room(folder: str, read: ReadFile) -> int | None:
    """Return the bytes that a control group's limit leaves; None without a limit."""
    if (found := limit_and(_USES, folder, read)) is None:
        return None
    limit, use = found
    cache = fields(f"{folder}/memory.stat", read)  # the part of the page cache that can be dropped at once counts as free
    return limit - use + cache.get("total_inactive_file", cache.get("inactive_file", 0))  # total: in version 1, with the groups below


def limit_and(names: tuple[str, str], folder: str, read: ReadFile) -> tuple[int, int] | None:
    """Return a control group's limit in bytes, and the number in the file ``names`` (version 2, 1); None without a limit or that file."""
    for limit_file, name in zip(_LIMITS, names, strict=True):
        try:
            limit, number = int(read(f"{folder}/{limit_file}")), int(read(f"{folder}/{name}"))
        except (OSError, ValueError):  # no such file, or the word "max"
            continue
        return (limit, number) if limit < UNLIMITED else None
    return None


def fields(path: str, read: ReadFile) -> dict[str, int]:
    """Return the numbers of a file with lines like ``name 1`` or ``name: 1 kB``; empty when the file cannot be read."""
    with suppress(OSError):
        lines = [line.split() for line in read(path).splitlines()]
        return {line[0].rstrip(":"): int(line[1]) for line in lines if len(line) > 1 and line[1].isdecimal()}
    return {}

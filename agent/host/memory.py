"""Memory that is available to this process: the machine's, within the limits of its control groups."""

from __future__ import annotations

from elastirun.agent.host.cpus import Read, own_groups, read_file

UNLIMITED = 1 << 60  # bytes; cgroup version 1 writes "no limit" as a number near 2^63
_FILES = (  # of a control group: its limit, its use, and the line of memory.stat with the page cache that can be dropped at once
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # version 1
)


def available(read: Read = read_file) -> int:
    """Return how many bytes can be allocated without swapping; 0 where /proc does not say."""
    machine = _fields("/proc/meminfo", read).get("MemAvailable", 0) << 10
    return max(0, min([machine, *(room for folder in own_groups("memory", read) if (room := _room(folder, read)) is not None)]))


def _room(folder: str, read: Read) -> int | None:
    """Return the bytes that a control group's limit leaves; None without a limit."""
    for limit_file, use_file, cache in _FILES:
        try:
            limit, use = int(read(f"{folder}/{limit_file}")), int(read(f"{folder}/{use_file}"))
        except (OSError, ValueError):  # no such file, or the word "max"
            continue
        return limit - use + _fields(f"{folder}/memory.stat", read).get(cache, 0) if limit < UNLIMITED else None
    return None


def _fields(path: str, read: Read) -> dict[str, int]:
    """Return the numbers of a file with lines like ``name 1`` or ``name: 1 kB``; empty when the file cannot be read."""
    try:
        lines = [line.split() for line in read(path).splitlines()]
    except OSError:
        return {}
    return {line[0].rstrip(":"): int(line[1]) for line in lines if len(line) > 1 and line[1].isdecimal()}

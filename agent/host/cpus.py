"""Number of CPUs that this process may use: the smaller of its affinity and the CPU quota of its control group.

``os.cpu_count()`` returns the CPUs of the machine. In a container with a quota of two CPUs that number of workers or threads is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath

ReadFile = Callable[[str], str]
"""Returns the text of a file. Raises OSError when the file cannot be read."""


def read_file(path: str) -> str:
    """Return the text of a file of this machine; a ``ReadFile``."""
    return Path(path).read_text()


def usable_cpus() -> int:
    """Return how many CPUs this process can keep busy all the time, at least 1. A quota of 2.5 CPUs counts as 2."""
    quota = cpu_quota(read_file)
    allowed = len(os.sched_getaffinity(0))
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def cpu_quota(read: ReadFile) -> float | None:
    """Return the tightest quota, in CPUs, of this process' control group and the groups above it; None without a quota.

    Reads version 2 (``cpu.max``) and version 1 (``cpu.cfs_quota_us``). A missing or unreadable file counts as no quota.
    """
    quotas = [quota for folder in own_groups("cpu", read) if (quota := _quota_in(folder, read)) is not None]
    return min(quotas, default=None)


def own_groups(controller: str, read: ReadFile = read_file) -> list[str]:
    """Return ``cgroup_folders`` of this process; none when /proc does not say them."""
    with suppress(OSError):
        return cgroup_folders(read("/proc/self/cgroup"), read("/proc/self/mountinfo"), controller)
    return []


def cgroup_folders(cgroup: str, mountinfo: str, controller: str = "cpu") -> list[str]:
    """Return the folders that can limit this process' ``controller``: its own group's first, up to the mount point of the hierarchy.

    ``cgroup`` and ``mountinfo`` are the texts of ``/proc/self/cgroup`` and ``/proc/self/mountinfo``.
    """
    folders: list[str] = []
    for line in cgroup.splitlines():
        hierarchy, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        v2 = hierarchy == "0" and not controllers
        if not v2 and controller not in controllers.split(","):
            continue
        for root, mount_point in _mounts(mountinfo, v2, controller):
            # In a container the path may be the host's and lie outside the mount. Then the top of the mount is our group.
            below = PurePosixPath(path)
            inner = below.relative_to(root) if below.is_relative_to(root) else PurePosixPath()
            top = PurePosixPath(mount_point)
            folders += [str(top / part) for part in (inner, *inner.parents)]
    return list(dict.fromkeys(folders))


def _mounts(mountinfo: str, v2: bool, controller: str) -> list[tuple[str, str]]:
    """Return (root within the hierarchy, mount point) of each mount of version 2, or of each mount of version 1 that has ``controller``."""
    found = []
    for line in mountinfo.splitlines():
        mount, separator, file_system = line.partition(" - ")
        fields, kind = mount.split(), file_system.split()
        if not separator or len(fields) < 5 or len(kind) < 3:
            continue
        if (kind[0] == "cgroup2") if v2 else (kind[0] == "cgroup" and controller in kind[2].split(",")):
            found.append((fields[3], fields[4]))
    return found


def _quota_in(folder: str, read: ReadFile) -> float | None:
    """Return the quota that a group itself sets, in CPUs; None without a quota."""
    try:
        quota, period = read(f"{folder}/cpu.max").split()
    except (OSError, ValueError):
        try:
            quota, period = read(f"{folder}/cpu.cfs_quota_us"), read(f"{folder}/cpu.cfs_period_us")
        except OSError:
            return None
    with suppress(ValueError):  # the word "max": there is no limit
        limit, length = int(quota), int(period)
        return limit / length if limit > 0 and length > 0 else None
    return None

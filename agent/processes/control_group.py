"""Control groups (version 2) for workers: one per agent, named elastirun-MARK-JOB (see docs/decisions/0005).

Members are read from the group's own ``cgroup.procs``, never from a process, so another group of the same name cannot be mistaken for it.
"""

import errno
import os
import select
from contextlib import suppress

from elastirun import linux
from elastirun.agent.processes import proc

PREFIX = "elastirun-"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.25  # seconds between two tries to remove a group; doubled after each try


def name(mark: str, job: str) -> str:
    """Return the name of the group's folder. JOB is a digest by which the next agent of the job recognises leftovers of an earlier run."""
    return f"{PREFIX}{mark}-{digest(job)}"


def digest(job: str) -> str:
    """Return eight hexadecimal digits that stand for the job."""
    import hashlib  # slow to import, and the guard does not use this function

    return hashlib.sha256(os.fsencode(job)).hexdigest()[:8]


def members(group: str) -> list[int]:
    """Return the pids of the processes in the group and in the groups below it, as this pid namespace numbers them."""
    found: list[int] = []
    for folder, _, _ in os.walk(group):
        with suppress(OSError), open(f"{folder}/cgroup.procs", "rb") as file:  # else the group was removed, or has threads only
            found += [int(pid) for pid in file.read().split() if int(pid)]
    return found


def is_ours(group: str) -> bool:
    """Return whether our user owns the group. A group that another agent has just removed is nobody's."""
    with suppress(FileNotFoundError):
        return os.stat(group).st_uid == os.geteuid()
    return False


def is_empty(group: str) -> bool:
    """Return whether no process is in the group or in a group below it, also none that this pid namespace cannot see."""
    try:
        with open(f"{group}/cgroup.events", "rb") as file:
            return b"populated 1" not in file.read().splitlines()
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ENODEV)  # the group was removed; any other error shows nothing


def kill(group: str) -> None:
    """Kill all members at once, however fast they fork (``cgroup.kill``)."""
    with suppress(OSError), linux.Descriptor(os.open(f"{group}/cgroup.kill", os.O_WRONLY)) as fd:  # else the group was removed
        os.write(fd, b"1")


def kill_members(group: str, before: float) -> set[int]:
    """Kill the members that were started before ``before``, in clock ticks since boot. Returns their pids."""
    killed: set[int] = set()
    for process in filter(None, map(proc.look, members(group))):
        if process.alive and process.started <= before and process.pid in members(group) and proc.kill(process):
            killed.add(process.pid)
    return killed


def remove(group: str, timeout: float) -> bool:
    """Remove the group and the groups below it. Waits at most ``timeout`` seconds for killed members: freeing much memory takes long."""
    pause, waited = _FIRST_PAUSE, 0.0
    while True:
        for folder, _, _ in os.walk(group, topdown=False):
            with suppress(OSError):  # the kernel refuses while a process is in the group
                os.rmdir(folder)
        if not os.path.exists(group):
            return True
        if waited >= timeout:
            return False
        select.select([], [], [], pause)
        waited += pause
        pause = min(2 * pause, _LONGEST_PAUSE)

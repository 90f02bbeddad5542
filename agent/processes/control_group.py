"""Control groups (version 2) named elastirun-MARK-JOB, one for the workers of each agent.

Members are read from the group's own ``cgroup.procs``, so that a process counts by the whole path of its group.
"""

import os
import select

from elastirun.agent.processes import proc

PREFIX = "elastirun-"
_PAUSES = (0.005, 0.25)  # seconds between two tries to remove a group: first, longest


def name(mark: str, job: str) -> str:
    """The folder's name. JOB is a digest, so that the next agent of the job recognises what an earlier run left."""
    return f"{PREFIX}{mark}-{digest(job)}"


def digest(job: str) -> str:
    """Eight hexadecimal digits."""
    import hashlib  # slow to import, and the guard does not need it

    return hashlib.sha256(os.fsencode(job)).hexdigest()[:8]


def members(group: str) -> list[int]:
    """The pids in the group and below it, as they are in this pid namespace."""
    found: list[int] = []
    for folder, _, _ in os.walk(group):
        try:
            with open(f"{folder}/cgroup.procs", "rb") as file:
                found += [int(pid) for pid in file.read().split() if int(pid)]
        except OSError:  # removed, or of threads only
            pass
    return found


def kill(group: str) -> None:
    """SIGKILL to all members at once, however fast they fork."""
    try:
        fd = os.open(f"{group}/cgroup.kill", os.O_WRONLY)
    except OSError:  # it is not there any more
        return
    try:
        os.write(fd, b"1")
    except OSError:
        pass
    finally:
        os.close(fd)


def kill_members(group: str, before: float) -> set[int]:
    """SIGKILL to the members that were started before that time, in clock ticks since boot. Returns their pids."""
    hit: set[int] = set()
    for process in filter(None, map(proc.look, members(group))):
        if process.alive and process.started <= before and process.pid in members(group) and proc.kill(process):
            hit.add(process.pid)
    return hit


def remove(group: str, patience: float) -> bool:
    """Remove the group and those below it. ``patience``: seconds; a process with much memory takes that long to die of SIGKILL."""
    pause, waited = _PAUSES[0], 0.0
    while True:
        for folder, _, _ in os.walk(group, topdown=False):
            try:
                os.rmdir(folder)  # refused while anybody is in it
            except OSError:
                pass
        if not os.path.exists(group):
            return True
        if waited >= patience:
            return False
        select.select([], [], [], pause)
        waited += pause
        pause = min(2 * pause, _PAUSES[1])

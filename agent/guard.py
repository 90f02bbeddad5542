"""The dead-man's switch: a tiny process that ends everything an agent started, when the agent dies or stands still.

    python -I -S guard.py AGENT LEASE [GROUP]

AGENT is the value of ELASTIRUN_AGENT that the agent's workers, and whatever they start, carry in their environment. The
agent holds the other end of the guard's stdin and writes a byte now and then. End of file: the agent is gone, in whatever
way. No byte for LEASE seconds (0: never mind): it is frozen, and the other nodes have gone on without it. In both cases
every process with that environment gets SIGKILL: children, grandchildren, those in sessions of their own.

Lines among those bytes name temporary folders, which are removed at the end, or give a new lease, from now on.

The kernel's parent-death signal reaches the workers themselves sooner; this reaches the rest. GROUP is the control group
(version 2) that the workers are in, where one could be made: its processes are ended too, those with an emptied environment
and those that fork faster than one can look; without it they escape. Nothing is ever found by its name, nor killed by a
number alone: a pidfd is opened first, then the environment is read, so a reused pid is never hit.
"""

import os
import select
import signal
import sys
import time

VARIABLE = "ELASTIRUN_AGENT"
LEASE = b"\1"  # begins a line that changes the lease
PASSES = 40  # over /proc; a process may be forking while we look


def identity(pid: int, random: str) -> str:
    """The value of ELASTIRUN_AGENT for the agent ``pid``: with its start time, so that a later process is never taken for it."""
    return f"{pid}-{_start_time(pid)}-{random}"


def is_alive(agent: str) -> bool:
    """Whether the agent of that identity still runs, here in this pid namespace."""
    pid, _, rest = agent.partition("-")
    return pid.isdecimal() and _start_time(int(pid)) == rest.partition("-")[0]


def value_of(name: str, environ: bytes) -> str:
    """The variable ``name`` in the contents of a /proc/PID/environ; empty when it is not set."""
    start = name.encode() + b"="
    return next((os.fsdecode(entry[len(start) :]) for entry in environ.split(b"\0") if entry.startswith(start)), "")


def marks(environ: bytes) -> list[str]:
    """The agents that a process belongs to; an agent started by another one's worker comes after that one."""
    return [mark for mark in value_of(VARIABLE, environ).split(",") if mark]


def end_all(agent: str, group: str, before: float = float("inf")) -> int:
    """SIGKILL to every process that carries ``agent`` or is in ``group``, but not to this one, until there are none.

    ``before``: only to those that were started before that time, in clock ticks since boot. Returns how many it hit.
    """
    hit: set[int] = set()
    quiet = False
    for _ in range(PASSES):
        found = [pid for pid in _pids() if _kill_if(pid, agent, group, before)]
        hit.update(found)
        if group and before == float("inf"):
            _kill_group(group)  # at one blow, however fast they fork
        if not found and quiet:  # twice: in the middle of exec a process has no environment for a moment
            break
        quiet = not found
        select.select([], [], [], 0.005)  # the dead leave /proc when they are reaped or their kernel work is done
    return len(hit)


def others_of(job: str) -> list[str]:
    """The agents, no longer alive, of which processes with TORCHELASTIC_RUN_ID ``job`` are left here, of this user."""
    found: set[str] = set()
    for pid in _pids():
        environ = _read(pid, "environ")
        if value_of("TORCHELASTIC_RUN_ID", environ) == job:
            found.update(agent for agent in marks(environ)[-1:] if not is_alive(agent))
    return sorted(found)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]


def _read(pid: int, name: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read(1 << 20)
    except OSError:  # gone, or another user's
        return b""


def _kill_group(group: str) -> None:
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


def _belongs(pid: int, agent: str, group: str) -> bool:
    if agent in marks(_read(pid, "environ")):
        return True
    return bool(group) and os.path.basename(group).encode() in _read(pid, "cgroup").replace(b"\n", b"/").split(b"/")


def _kill_if(pid: int, agent: str, group: str, before: float) -> bool:
    if not _belongs(pid, agent, group):
        return False
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        started = _start_time(pid)
        if not started or float(started) > before or not _belongs(pid, agent, group):
            return False
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def _start_time(pid: int) -> str:
    """In clock ticks since boot; empty when there is no such process, or a dead one that nobody has reaped."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, *fields = file.read().rpartition(b")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if state in (b"Z", b"X") else fields[18].decode()


def _now() -> float:
    """As ``elastirun.clock.now``, which this program cannot import."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def remove(group: str) -> None:
    """The control group and those that workers have made in it. The last of the dead may still be leaving."""
    for _ in range(PASSES):
        for folder, _, _ in os.walk(group, topdown=False):
            try:
                os.rmdir(folder)
            except OSError:
                pass
        if not os.path.exists(group):
            return
        select.select([], [], [], 0.005)


def main(agent: str, lease: float, group: str = "") -> None:
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)  # the agent's business; the guard goes when the agent has gone
    os.write(1, b"\n")  # ready
    poller = select.poll()
    poller.register(0, select.POLLIN)
    folders: list[bytes] = []
    rest = b""
    deadline = _now() + lease if lease else None
    while True:
        if not poller.poll(None if deadline is None else max(0.0, deadline - _now()) * 1000):
            # An agent that stirs meanwhile may start new workers at once: those are not meant.
            end_all(agent, group, before=_now() * os.sysconf("SC_CLK_TCK"))
            poller.poll(None)  # until it stirs again, or dies
        data = os.read(0, 4096)
        if not data:
            break
        *lines, rest = (rest + data.replace(b"\0", b"")).split(b"\n")
        leases = [float(line[1:]) for line in lines if line.startswith(LEASE)]
        folders += [line for line in lines if not line.startswith(LEASE)]
        if leases or b"\0" in data:
            lease = leases[-1] if leases else lease
            deadline = _now() + lease if lease else None
    end_all(agent, group)
    remove(group)
    for folder in folders:
        import shutil  # slow to import, and seldom needed

        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), *sys.argv[3:])

"""Reads processes from /proc, and kills exactly the process that was read.

Imports little, and the standard library only, because the guard imports this module (psutil is not available to it).
"""

import _thread
import os
import signal

from elastirun import linux

ENVIRONMENT_LIMIT = 8 << 20  # bytes; the kernel allows 6 MiB of arguments and environment
ENVIRONMENT_TIMEOUT = 0.2  # seconds; the read waits for the memory lock of that process, which may never be released


class ProcessStat:
    """One process, as its stat file showed it. Two with the same pid and the same start time are the same process.

    ``started``: in clock ticks since boot. ``alive``: false for a zombie without living threads. ``exiting``: it has begun to exit
    (PF_EXITING in proc(5)'s flags), or has ended.
    """

    __slots__ = ("alive", "exiting", "parent", "pid", "session", "started")

    def __init__(self, pid: int, stat: bytes) -> None:
        state, *fields = stat.rpartition(b")")[2].split()
        self.pid = pid
        self.parent, self.session, self.started = int(fields[0]), int(fields[2]), int(fields[18])
        self.alive = state not in (b"Z", b"X") or int(fields[16]) > 1  # more than one thread: only the main thread has ended
        self.exiting = state in (b"Z", b"X") or bool(int(fields[5]) & 4)


def look(pid: int, certain: bool = False) -> ProcessStat | None:
    """Return the process ``pid``; None when there is none, or when it cannot be read.

    ``certain``: raise OSError when it cannot be read for want of descriptors or memory, because it may live. A process that the
    kernel hides from our user counts as none.
    """
    try:
        return ProcessStat(pid, _read(f"/proc/{pid}/stat"))
    except (FileNotFoundError, ProcessLookupError, PermissionError, ValueError, IndexError):
        return None
    except OSError:
        if certain:
            raise
        return None


def everything(certain: bool = False) -> dict[int, ProcessStat]:
    """Return all living processes of this pid namespace by pid, except this one. ``certain``: as for ``look``."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]
    return {process.pid: process for pid in pids if (process := look(pid, certain)) and process.alive}


def descendants(pid: int) -> dict[int, ProcessStat]:
    """Return the living processes below ``pid``, except this one. The cost depends on their number, not on the machine's processes.

    On a kernel that does not list children (without CONFIG_PROC_CHILDREN), return all processes.
    """
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return everything()
    found: dict[int, ProcessStat] = {}
    pending = children(pid)
    while pending:
        process = look(pending.pop())
        if process and process.alive and process.pid not in found and process.pid != os.getpid():
            found[process.pid] = process
            pending += children(process.pid)
    return found


def children(pid: int) -> list[int]:
    """Return the pids of the children of all threads of ``pid``. If some of them end meanwhile, others may be missed."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, _read(f"/proc/{pid}/task/{task}/children").split())
    except OSError:
        pass  # the process has ended
    return found


def ancestors(pid: int) -> list[ProcessStat]:
    """Return the process ``pid``, its parent and so on, up to the first that is not visible."""
    found: list[ProcessStat] = []
    while pid and (process := look(pid)):
        found.append(process)
        pid = process.parent
    return found


def name(pid: int) -> str:
    """Return the name of the program that ``pid`` runs, at most 15 characters; empty when there is no such process."""
    return content(f"/proc/{pid}/comm").rstrip("\n")


def kill(process: ProcessStat, signum: int = signal.SIGKILL) -> bool:
    """Send the signal, and return whether it was sent. A later process with the same pid is never hit."""
    try:
        with linux.Descriptor(linux.pidfd_open(process.pid)) as fd:
            now = look(process.pid)  # after the pidfd was opened, so that both are the same process
            if now is None or now.started != process.started or not now.alive:
                return False
            linux.pidfd_send_signal(fd, signum)
            return True
    except OSError:
        return False


def is_of_our_user(pid: int) -> bool:
    """Return whether the process has the real and the effective user of this one."""
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.geteuid():  # a quick check first: the owner is the effective user, or root
            return False
        status = _read(f"/proc/{pid}/status")
        real, effective = status.partition(b"\nUid:")[2].split(maxsplit=2)[:2]
        return (int(real), int(effective)) == (os.getuid(), os.geteuid())
    except (OSError, ValueError):
        return False


def may_be_of_our_user(pid: int) -> bool:
    """Return False when the process has another effective user, or has ended."""
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.geteuid()
    except OSError as error:
        return not isinstance(error, FileNotFoundError)


def pid_namespace(pid: int | str = "self") -> int:
    """Return the inode of the pid namespace of ``pid``; 0 when it cannot be read.

    0 for this process, too, when /proc numbers processes as another namespace does: then no number here means the process that it names.
    """
    try:
        if pid == "self" and os.readlink("/proc/self") != str(os.getpid()):
            return 0
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return 0


def environment(pid: int) -> bytes:
    """Return the environment of the process, entries separated by NUL; empty when it cannot be read in ENVIRONMENT_TIMEOUT seconds.

    If the main thread has ended, read it from another thread.
    """
    answer: list[bytes] = []
    done = _thread.allocate_lock()
    done.acquire()

    def read() -> None:
        try:
            answer.append(_environment(pid))
        except OSError:  # the process has ended, or belongs to another user
            pass
        finally:
            done.release()

    try:
        _thread.start_new_thread(read, ())
    except RuntimeError:  # no further thread can be started: better to wait without a limit than to miss the process
        read()
    return answer[0] if done.acquire(timeout=ENVIRONMENT_TIMEOUT) and answer else b""


def value_of(name: str, environment: bytes) -> str:
    """Return the variable ``name`` of an environment; empty when it is not set."""
    start = name.encode() + b"="
    if environment.startswith(start):
        return os.fsdecode(environment[len(start) :].partition(b"\0")[0])
    return os.fsdecode(environment.partition(b"\0" + start)[2].partition(b"\0")[0])


def _environment(pid: int) -> bytes:
    if found := _environ(f"/proc/{pid}"):
        return found
    return next(filter(None, (_environ(f"/proc/{pid}/task/{task}") for task in os.listdir(f"/proc/{pid}/task"))), b"")


def _environ(thread: str) -> bytes:
    try:
        return _read(f"{thread}/environ", ENVIRONMENT_LIMIT)
    except ProcessLookupError:  # the thread has ended; newer kernels raise this, older ones return nothing
        return b""


def content(path: str) -> str:
    """Return the first 64 KiB of a file; empty when it cannot be read."""
    try:
        return os.fsdecode(_read(path, 1 << 16))
    except OSError:
        return ""


def _read(path: str, limit: int = 1 << 20) -> bytes:
    with open(path, "rb") as file:
        return file.read(limit)

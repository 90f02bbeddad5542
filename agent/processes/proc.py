"""Processes as /proc shows them, and SIGKILL to exactly the process that was read.

Standard library only and few imports: the guard uses it, too.
"""

import _thread
import os
import signal

ENVIRONMENT_LIMIT = 8 << 20  # bytes; the kernel allows 6 MiB of arguments and environment
ENVIRONMENT_TIMEOUT = 0.2  # seconds; reading it waits for the memory lock of that process, which may be held for ever


class Process:
    """One process, as its stat file showed it. The same pid with the same start time is the same process.

    ``started``: in clock ticks since boot. ``alive``: false for a zombie without living threads.
    """

    __slots__ = ("alive", "parent", "pid", "session", "started")

    def __init__(self, pid: int, stat: bytes) -> None:
        state, *fields = stat.rpartition(b")")[2].split()
        self.pid = pid
        self.parent, self.session, self.started = int(fields[0]), int(fields[2]), int(fields[18])
        self.alive = state not in (b"Z", b"X") or int(fields[16]) > 1  # only its main thread may have ended


def look(pid: int) -> Process | None:
    """The process ``pid``; None when there is none."""
    try:
        return Process(pid, _read(f"/proc/{pid}/stat"))
    except (OSError, ValueError, IndexError):
        return None


def everything() -> dict[int, Process]:
    """All living processes of this pid namespace by pid, but for this one."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]
    return {process.pid: process for process in map(look, pids) if process and process.alive}


def descendants(pid: int) -> dict[int, Process]:
    """The living processes below ``pid``, but for this one. Its cost depends on their number alone where the kernel lists children."""
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):  # a kernel without CONFIG_PROC_CHILDREN
        return everything()
    found: dict[int, Process] = {}
    pending = children(pid)
    while pending:
        process = look(pending.pop())
        if process and process.alive and process.pid not in found and process.pid != os.getpid():
            found[process.pid] = process
            pending += children(process.pid)
    return found


def children(pid: int) -> list[int]:
    """The children of all threads of ``pid``. While some of them end, others may be missed."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, _read(f"/proc/{pid}/task/{task}/children").split())
    except OSError:
        pass  # it has ended
    return found


def ancestors(pid: int) -> list[Process]:
    """``pid`` itself, its parent and so on, as far as they are visible."""
    found: list[Process] = []
    while pid and (process := look(pid)):
        found.append(process)
        pid = process.parent
    return found


def is_exiting(pid: int) -> bool:
    """Whether the process has begun to exit, or is gone (PF_EXITING in proc(5)'s flags)."""
    try:
        state, *fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    except (OSError, ValueError):
        return True
    return state in (b"Z", b"X") or bool(int(fields[5]) & 4)


def name(pid: int) -> str:
    """The name of the program that ``pid`` runs, at most 15 characters; empty when there is no such process."""
    try:
        return _read(f"/proc/{pid}/comm").decode(errors="replace").rstrip("\n")
    except OSError:
        return ""


def kill(process: Process) -> bool:
    """SIGKILL. A later process with the same pid is never hit: the pidfd is opened first, then the start time is compared."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        now = look(process.pid)
        if now is None or now.started != process.started or not now.alive:
            return False
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def is_of_our_user(pid: int) -> bool:
    """Whether real and effective user of the process are this one's."""
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.geteuid():  # the quick look: the effective user, or root
            return False
        status = _read(f"/proc/{pid}/status")
        real, effective = status.partition(b"\nUid:")[2].split(maxsplit=2)[:2]
        return (int(real), int(effective)) == (os.getuid(), os.geteuid())
    except (OSError, ValueError):
        return False


def pid_namespace(pid: int | str = "self") -> int:
    """The inode of the pid namespace; 0 when it is not to be seen."""
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return 0


def environment(pid: int) -> bytes:
    """The process' environment, entries separated by NUL; empty when it cannot be read, also not in time.

    A process whose main thread has ended shows it at its other threads only.
    """
    answer: list[bytes] = []
    done = _thread.allocate_lock()
    done.acquire()

    def read() -> None:
        try:
            answer.append(_environment(pid))
        except OSError:  # gone, or another user's
            pass
        finally:
            done.release()

    try:
        _thread.start_new_thread(read, ())
    except RuntimeError:  # the limit of processes is reached; better to wait than to miss the process
        read()
    return answer[0] if done.acquire(timeout=ENVIRONMENT_TIMEOUT) and answer else b""


def value_of(name: str, environment: bytes) -> str:
    """The variable ``name``; empty when it is not set."""
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
    except ProcessLookupError:  # this thread has ended: newer kernels say so, older ones show nothing
        return b""


def _read(path: str, limit: int = 1 << 20) -> bytes:
    with open(path, "rb") as file:
        return file.read(limit)

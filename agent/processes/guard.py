"""The guard: a small process that kills the process tree of an agent when the agent dies or stands still.

    python -I -S guard.py MARK TIMER STRICT [GROUP]

The agent, the guard's parent, holds the other end of the guard's stdin and writes messages, each ended by NUL. TIMER is the descriptor of
a timer that the agent sets to the deadline of its workers, and sets again as long as it is well. That does not wake the guard.

- End of file: the agent has died, in whatever way.
- The timer has gone off: the agent is frozen, and the other nodes have gone on without it.

After the first, when all has ended, the guard writes the agent's death notice into the store, so that the other nodes go on at once.
In both cases the guard kills the workers and all that they started, also in other sessions; ``kills`` recognises these processes.
The kernel's parent-death signal reaches the workers sooner than the guard; the guard reaches the rest.

GROUP is the control group (version 2) of the workers, where one could be made. It is killed as a whole, with processes that
cannot be recognised and processes that fork faster than /proc can be read. MARK, STRICT (0 or 1) and GROUP: see ``kills.Traces``.

Moments are seconds on CLOCK_BOOTTIME, and so are those of the timer: it goes on while the machine is suspended.

See docs/agent.md.
"""

import _thread
import os
import select
import signal
import stat
import sys
from collections.abc import Callable
from contextlib import suppress

if __name__ == "__main__":  # started as a program, without the folders of the user's packages
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))))

from elastirun import clock
from elastirun.agent.processes import control_group, kills, marks

# Kinds of messages, with their fields.
LATE = b"L"  # SENT: at the moment SENT the deadline had passed, and the agent has set a later one; perhaps the guard stood still as well
WORKER = b"W"  # PID START: a worker was started
GONE = b"G"  # PID: a worker was reaped, and its session is empty
FOLDER = b"F"  # DEVICE INODE PATH: a temporary folder to remove at the end
NOTICE = b"N"  # JSON: where to write the agent's death notice, see death_notice.py; empty: nowhere

END_TIMEOUT = 10.0  # seconds for killed processes to end, beyond which no death notice is written: the others have found the silence
NOTICE_TIMEOUT = 15.0  # seconds for the death notice; later than that nobody waits for it
GROUP_TIMEOUT = 60.0  # seconds for killed members to leave the control group; the kernel frees the memory of a large worker slowly
FOLDER_PREFIXES = (b"elastirun_", b"elastirun-agent-")  # names of temporary folders that the agent makes begin so


def message(kind: bytes, *fields: object) -> bytes:
    """Return one message to the guard. No field contains NUL; only the last one may contain blanks."""
    return kind + b" ".join(field if isinstance(field, bytes) else str(field).encode() for field in fields) + b"\0"


def prepare_in_thread(notice: bytes) -> None:
    """Import what writes the notice, which takes 100 ms and 8 MB, so that the others need not wait for that when the agent has died.

    What fails here fails again when it is needed.
    """

    def prepare() -> None:
        with suppress(Exception):
            from elastirun.agent.processes import death_notice

            death_notice.prepare(notice)

    with suppress(RuntimeError):  # the limit of processes is reached
        _thread.start_new_thread(prepare, ())


class Guard:
    """The state that the agent's messages describe."""

    def __init__(self, evidence: kills.Traces) -> None:
        self.evidence = evidence
        self.folders: list[tuple[int, int, bytes]] = []
        self.notice = b""  # as in the last message of this kind
        self._unfinished = b""

    def receive(self, data: bytes) -> None:
        """Apply the messages in ``data``. Kills the workers if a message says that the agent stood still beyond its deadline."""
        *messages, self._unfinished = (self._unfinished + data).split(b"\0")
        for each in messages:
            kind, fields = each[:1], each[1:].split(b" ", 2)
            if kind == LATE:
                self.kill_workers(float(fields[0]))
            elif kind == WORKER:
                self.evidence.sessions[int(fields[0])] = int(fields[1])
            elif kind == GONE:
                self.evidence.sessions.pop(int(fields[0]), None)
            elif kind == FOLDER:
                self.folders.append((int(fields[0]), int(fields[1]), fields[2]))
            elif kind == NOTICE:
                if each[1:] and not self.notice:
                    prepare_in_thread(each[1:])
                self.notice = each[1:]

    def kill_workers(self, now: float) -> None:
        """Kill the workers: their deadline has passed at ``now``.

        Workers that were started after ``now`` are left alone: an agent that wakes up meanwhile may start new ones at once.
        """
        kills.kill_below_agent(self.evidence, before=now * os.sysconf("SC_CLK_TCK"))


def remove_folder(device: int, inode: int, path: bytes) -> None:
    """Remove a temporary folder if it is still the folder that the agent named, belongs to our user, and has a name of ours."""
    try:
        found = os.lstat(path)
    except OSError:
        return
    same = (found.st_dev, found.st_ino, found.st_uid) == (device, inode, os.geteuid())
    if same and stat.S_ISDIR(found.st_mode) and os.path.basename(path).startswith(FOLDER_PREFIXES):
        import shutil  # slow to import, and rarely used

        shutil.rmtree(path, ignore_errors=True)


def ignore_signals() -> None:
    """Ignore every signal that can be ignored but faults: the guard ends when the agent has ended, not before."""
    faults = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGSYS, signal.SIGTRAP}
    for signum in signal.valid_signals() - faults - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(signum, signal.SIG_IGN)


def has_ended(evidence: kills.Traces, timeout: float) -> bool:
    """Return whether the agent and all that its workers have started have ended; waits for that at most ``timeout`` seconds.

    A killed worker may need a while: the kernel frees its memory, or waits for a device.
    """
    until = clock.now() + timeout
    while not kills.all_ended(evidence):
        if clock.now() > until:
            return False
        select.select([], [], [], kills.PAUSE)
    return True


def begin_death_notice(guard: Guard, died: float) -> Callable[[float], object] | None:
    """Begin to write the death notice of the agent, which died at the moment ``died``. Returns a function that waits for it; None: none.

    No notice is written while the agent or anything of its workers is left: the others go on as soon as they read it.
    """
    if not guard.notice or not has_ended(guard.evidence, END_TIMEOUT):
        return None
    return write_in_thread(guard.notice, died)


def write_in_thread(notice: bytes, died: float) -> Callable[[float], object]:
    """Write the notice in a thread, so that a store that does not answer delays nothing else. Returns a function that waits for it."""
    import threading

    thread = threading.Thread(target=write_notice, args=(notice, died), daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the limit of processes is reached
        return lambda timeout: write_here(notice, died, timeout)
    return thread.join


def write_here(notice: bytes, died: float, timeout: float) -> None:
    """Write the notice as the last work of this process, which ends when that has taken ``timeout`` seconds."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, timeout)
    write_notice(notice, died)


def write_notice(notice: bytes, died: float) -> None:
    """Write the notice. What cannot be loaded, because the package was replaced meanwhile, fails here and stops nothing else."""
    from elastirun.agent.processes import death_notice

    death_notice.write(notice, died)


def main(mark: str, timer: int, strict: bool, group: str = "") -> None:
    """Read messages until end of file, then kill what is left and clean up."""
    ignore_signals()
    identity = marks.parse(mark)
    assert identity is not None
    guard = Guard(kills.Traces(identity, group, strict))
    guard.evidence.excluded.add(os.getpid())
    os.set_blocking(0, False)
    poller = select.poll()
    for descriptor in (0, timer):
        poller.register(descriptor, select.POLLIN)
    os.write(1, b"\n")  # tells the agent that the guard is ready
    while True:
        poller.poll()
        try:
            data = os.read(0, 65536)
        except BlockingIOError:  # all messages are read
            with suppress(BlockingIOError):  # the agent has set a later deadline meanwhile
                os.read(timer, 8)
                guard.kill_workers(clock.now())
            continue
        if not data:
            break
        guard.receive(data)
    died = clock.now()
    kills.kill_orphans(guard.evidence)
    wait_for_notice = begin_death_notice(guard, died)
    for folder in guard.folders:
        remove_folder(*folder)
    if group:
        control_group.remove(group, GROUP_TIMEOUT)
    if wait_for_notice:
        wait_for_notice(NOTICE_TIMEOUT)
        os._exit(0)  # the thread, and those of etcd's client, may still wait for a store that does not answer


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1", *sys.argv[4:])

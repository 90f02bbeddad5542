"""The guard: a small process that ends everything an agent started, when the agent dies or stands still.

    python -I -S guard.py MARK DEADLINE STRICT [GROUP]

The agent, our parent, holds the other end of our stdin and writes messages, each ended by NUL. End of file: the agent is gone, in
whatever way. A deadline has passed without a later one: it is frozen, and the other nodes have gone on without it. In both cases the
workers and what they started get SIGKILL, also what is in a session of its own; ``kills`` decides what that is.

The kernel's parent-death signal reaches the workers themselves sooner; this reaches the rest. GROUP is the control group (version 2)
that the workers are in, where one could be made: its processes are ended as a whole, also those that cannot be recognised and those
that fork faster than one can look. MARK, STRICT (0 or 1) and GROUP are those of ``kills.Evidence``.

Moments are on CLOCK_BOOTTIME, in seconds, which goes on while the machine is suspended. A poll's timeout does not, so none is long.
"""

import os
import select
import signal
import stat
import sys

if __name__ == "__main__":  # started as a program, without the folders of the user's packages
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))))

from elastirun import clock
from elastirun.agent.processes import control_group, kills, marks

ALIVE = b"A"  # SENT DEADLINE: the agent is well at the moment SENT; its workers may run until DEADLINE, 0: as long as it lives
WORKER = b"W"  # PID START: a worker was started
GONE = b"G"  # PID: a worker has ended, and nobody is left in its session
SPARED = b"S"  # PID: a child process of the agent that is no worker
FOLDER = b"F"  # DEVICE INODE PATH: a temporary folder to remove at the end

SLICE = 0.25  # seconds; how much later than due a deadline is noticed after a suspension
GROUP_PATIENCE = 60.0  # seconds; the kernel needs some to free the memory of a large worker
FOLDER_PREFIXES = (b"elastirun_", b"elastirun-agent-")  # of all temporary folders that are ours


def message(kind: bytes, *fields: object) -> bytes:
    """One message to the guard. Fields contain neither blank nor NUL, but for the last, which may contain blanks."""
    return kind + b" ".join(field if isinstance(field, bytes) else str(field).encode() for field in fields) + b"\0"


class Guard:
    """What the agent's messages say. ``deadline``: the moment at which the workers are to be ended; None: there is none."""

    def __init__(self, evidence: kills.Evidence, deadline: float) -> None:
        self.evidence = evidence
        self.deadline = deadline or None
        self.folders: list[tuple[int, int, bytes]] = []
        self._rest = b""

    def take(self, data: bytes) -> None:
        """Take in what was read. Ends the workers when it shows that the agent stood still beyond its deadline."""
        *messages, self._rest = (self._rest + data).split(b"\0")
        for each in messages:
            kind, fields = each[:1], each[1:].split(b" ", 2)
            if kind == ALIVE:
                self.look(float(fields[0]))
                self.deadline = float(fields[1]) or None
            elif kind == WORKER:
                self.evidence.sessions[int(fields[0])] = int(fields[1])
            elif kind == GONE:
                self.evidence.sessions.pop(int(fields[0]), None)
            elif kind == SPARED:
                self.evidence.spared.add(int(fields[0]))
            elif kind == FOLDER:
                self.folders.append((int(fields[0]), int(fields[1]), fields[2]))

    def look(self, now: float) -> None:
        """End the workers if the deadline has passed at ``now``, until the next one is set.

        An agent that stirs meanwhile may start new workers at once: those are not meant.
        """
        if self.deadline is not None and now >= self.deadline:
            self.deadline = None
            kills.end_below_agent(self.evidence, before=now * os.sysconf("SC_CLK_TCK"))


def remove_folder(device: int, inode: int, path: bytes) -> None:
    """Remove a temporary folder, if it is still the one that was named, ours, and named like one of ours."""
    try:
        found = os.lstat(path)
    except OSError:
        return
    same = (found.st_dev, found.st_ino, found.st_uid) == (device, inode, os.geteuid())
    if same and stat.S_ISDIR(found.st_mode) and os.path.basename(path).startswith(FOLDER_PREFIXES):
        import shutil  # slow to import, and seldom needed

        shutil.rmtree(path, ignore_errors=True)


def ignore_signals() -> None:
    """Signals are the agent's business; the guard goes when the agent has gone."""
    faults = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGSYS, signal.SIGTRAP}
    for signum in signal.valid_signals() - faults - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(signum, signal.SIG_IGN)


def main(mark: str, deadline: float, strict: bool, group: str = "") -> None:
    ignore_signals()
    identity = marks.parse(mark)
    assert identity is not None
    guard = Guard(kills.Evidence(identity, group, strict), deadline)
    os.set_blocking(0, False)
    poller = select.poll()
    poller.register(0, select.POLLIN)
    os.write(1, b"\n")  # ready
    while True:
        poller.poll(None if guard.deadline is None else 1000 * min(SLICE, max(0.0, guard.deadline - clock.now())))
        try:
            data = os.read(0, 65536)
        except BlockingIOError:  # all is read: had the agent been well until now, it would have said so
            guard.look(clock.now())
            continue
        if not data:
            break
        guard.take(data)
    kills.end_orphans(guard.evidence)
    for folder in guard.folders:
        remove_folder(*folder)
    if group:
        control_group.remove(group, GROUP_PATIENCE)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3] == "1", *sys.argv[4:])

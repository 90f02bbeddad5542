"""What keeps an agent and its processes together: the guard, the children that come to us, what an earlier run left."""

from __future__ import annotations

import ctypes
import os
import secrets
import selectors
import subprocess
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from elastirun import clock
from elastirun.agent import guard
from elastirun.agent.cpus import cgroup_folders
from elastirun.errors import StartError

PR_SET_CHILD_SUBREAPER = 36
RENEW_EVERY = 0.5  # seconds between two bytes to the guard


class Family:
    """Starts the guard, and makes this process the one to whom orphans below it come.

    ``lease``: seconds that the agent may stand still before its workers are ended; 0: for ever. ``say`` gets lines for people.
    """

    def __init__(self, job: str, lease: float, selector: selectors.BaseSelector, say: Callable[[str], None]) -> None:
        self.lease = lease
        self._selector = selector
        self._say = say
        self.renewed = clock.now()  # when the guard last heard that the agent is well
        self._held = 0.0  # the moment until which the workers may run, where the agent's being well is not enough
        self._folders: set[str] = set()
        self._own = guard.identity(os.getpid(), secrets.token_hex(8))
        self.mark = ",".join(filter(None, (os.environ.get(guard.VARIABLE), self._own)))  # ELASTIRUN_AGENT for the workers
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._sweep(job)
        self.group = _make_group(self._own)  # the control group for the workers; empty: there is none
        try:
            self._guard = self._start()
        except OSError as error:
            guard.remove(self.group)
            raise StartError(f"cannot start the guard, {sys.executable} {guard.__file__}: {error.strerror}") from None

    def renew(self, now: float) -> None:
        """Tell the guard that the agent is well. To be called each time the loop goes round."""
        if self._held:
            self._held, self.renewed = 0.0, now
            self._tell(guard.LEASE + f"{self.lease}\n".encode())
        elif now >= self.renewed + (min(RENEW_EVERY, self.lease / 8) if self.lease else RENEW_EVERY):
            self.renewed = now
            self._tell(b"\0")

    def hold_until(self, moment: float, now: float) -> None:
        """The guard ends the workers at ``moment`` unless it hears of a later one, instead of when the lease is over."""
        if moment != self._held:
            self._held = moment
            self._tell(guard.LEASE + f"{max(0.001, moment - now):.3f}\n".encode())

    def lease_is_over(self, now: float) -> bool:
        """The guard has ended the workers, or is about to."""
        if self._held:
            return now > self._held - 0.1
        return bool(self.lease) and now > self.renewed + self.lease - min(0.5, self.lease / 10)

    def remove_at_the_end(self, folder: str) -> None:
        """A temporary folder that must not stay should this process be killed."""
        if folder not in self._folders:
            self._folders.add(folder)
            self._tell(os.fsencode(folder) + b"\n")

    def end_leftovers(self) -> None:
        """No worker runs: what still carries our mark was left by one, in a session of its own."""
        count = guard.end_all(self._own, self.group)
        if count:
            self._say(f"ended {count} process{'es' if count > 1 else ''} that the workers had left behind")

    def reap(self, workers: Collection[int]) -> None:
        """Bury the orphans that have come to us; all children but ``workers``, which are reaped where they are watched."""
        with suppress(OSError):
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            for pid in {int(child) for child in children} - {self._guard.pid, *workers}:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def close(self) -> None:
        """Ends whatever is left, then the guard."""
        guard.end_all(self._own, self.group)
        self._selector.unregister(self._pidfd)
        os.close(self._pidfd)
        os.close(self._write)
        self._guard.wait()

    def _tell(self, data: bytes) -> None:
        with suppress(OSError):  # a guard that is gone is seen by its pidfd
            os.write(self._write, data)

    def _start(self) -> subprocess.Popen[bytes]:
        read, self._write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._write, False)
        command = [sys.executable, "-I", "-S", str(Path(guard.__file__)), self._own, str(self.lease), self.group]
        started = subprocess.Popen(command, stdin=read, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, cwd="/")
        os.close(read)
        assert started.stdout is not None
        started.stdout.read(1)  # it guards from here on
        started.stdout.close()
        self._pidfd = os.pidfd_open(started.pid)
        self._selector.register(self._pidfd, selectors.EVENT_READ, self._guard_died)
        return started

    def _guard_died(self, mask: int) -> None:
        self._selector.unregister(self._pidfd)
        os.close(self._pidfd)
        os.close(self._write)
        self._guard.wait()
        self._say("the guard was killed; another one is started")
        self._guard = self._start()
        for folder in self._folders:
            self._tell(os.fsencode(folder) + b"\n")

    def _sweep(self, job: str) -> None:
        """An agent and its guard may be killed together; the next agent of the job on this node finds what they left."""
        own = _own_group()
        for agent in guard.others_of(job):
            group = f"{own}/elastirun-{agent}" if own else ""
            count = guard.end_all(agent, group)
            guard.remove(group)
            self._say(f"ended {count} processes of an earlier run of this job; their agent, pid {agent.partition('-')[0]}, is gone")


def _own_group() -> Path | None:
    """The control group (version 2) that this process is in, so that every limit holds for those below it; None: not to be seen."""
    with suppress(OSError, IndexError):
        found = cgroup_folders(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text(), "version 2 alone")
        if str(os.getpid()) in Path(found[0], "cgroup.procs").read_text().split():
            return Path(found[0])
    return None


def _make_group(agent: str) -> str:
    """A control group for the workers, where this process may make one and the kernel (5.14) can end it as a whole. Else empty."""
    own = _own_group()
    with suppress(OSError):
        if own and os.access(own / "cgroup.procs", os.W_OK):
            group = own / f"elastirun-{agent}"
            group.mkdir()
            if (group / "cgroup.kill").exists():
                return str(group)
            group.rmdir()
    return ""

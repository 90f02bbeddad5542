"""Process-tree supervision: starts the guard, reaps adopted orphans, ends what workers leave behind, sweeps after dead agents."""

from __future__ import annotations

import ctypes
import math
import os
import select
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from elastirun import clock
from elastirun.agent.host.cpus import cgroup_folders
from elastirun.agent.processes import control_group, guard, kills, leftovers, marks, proc
from elastirun.errors import StartError

PR_SET_CHILD_SUBREAPER = 36
RENEW_EVERY = 0.5  # seconds between two signs of life to the guard
TRY_AGAIN = 10.0  # seconds until the start of a guard that failed is tried again
START_LIMIT = 60.0  # seconds for the first guard to start; the file system may be slow
RESTART_LIMIT = 5.0  # seconds for a later one: the loop waits for it
END_LIMIT = 1.0  # seconds that the agent waits for its guard at the end; the guard may need longer by itself


class Family:
    """Starts the guard, and makes this process the subreaper: orphans below it become its children.

    ``lease``: seconds that the agent may stand still before its workers are ended; 0: for ever. ``say`` gets lines for people.
    Any child process in a session of its own that is started from now on counts as a worker's, unless ``spare`` is called for it.
    """

    def __init__(self, job: str, lease: float, selector: selectors.BaseSelector, say: Callable[[str], None]) -> None:
        self.lease = lease
        self._selector = selector
        self._say = say
        self.renewed = clock.now()  # when the guard last heard that the agent is well
        self._held = 0.0  # the moment until which the workers may run, where the agent's being well is not enough
        self._folders: dict[str, bytes] = {}  # each with the message that names it
        inherited = os.environ.get(marks.VARIABLE, "")
        own = marks.own()
        self.mark = ",".join(map(str, [*marks.of(inherited)[-marks.DEEPEST :], own]))  # ELASTIRUN_AGENT for the workers
        strict = os.getpid() == 1 or bool(proc.children(os.getpid()))
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._sweep(job, inherited)
        self.group = _make_group(control_group.name(own.text, job))  # the control group for the workers; empty: there is none
        self._evidence = kills.Evidence(own, self.group, strict)
        self._guard: subprocess.Popen[bytes] | None = None
        self._guard_due = math.inf  # when to try again to start it
        try:
            self._start(START_LIMIT)
        except OSError as error:
            control_group.remove(self.group, 0.0)
            raise StartError(f"cannot start the guard, {sys.executable} {guard.__file__}: {error.strerror}") from None

    def renew(self, now: float) -> None:
        """Tell the guard that the agent is well. To be called each time the loop goes round."""
        if now >= self._guard_due:
            self._start_again()
        if self._held or (self.lease and now >= self.renewed + min(RENEW_EVERY, self.lease / 8)):
            self._held, self.renewed = 0.0, now
            self._tell(guard.message(guard.ALIVE, now, self._deadline))

    def hold_until(self, moment: float, now: float) -> None:
        """The guard ends the workers at ``moment`` unless it hears of a later one, instead of when the lease is over."""
        if now >= self._guard_due:
            self._start_again()
        if moment != self._held:
            self._held = moment
            self._tell(guard.message(guard.ALIVE, now, self._deadline))

    def lease_is_over(self, now: float) -> bool:
        """The guard has ended the workers, or is about to."""
        if self._held:
            return now > self._held - 0.1
        return bool(self.lease) and now > self.renewed + self.lease - min(0.5, self.lease / 10)

    def remove_at_the_end(self, folder: str) -> None:
        """A temporary folder that must not stay should this process be killed."""
        if folder not in self._folders:
            with suppress(OSError):
                found = os.lstat(folder)
                self._folders[folder] = guard.message(guard.FOLDER, found.st_dev, found.st_ino, os.fsencode(folder))
                self._tell(self._folders[folder])

    def watch(self, workers: Collection[int]) -> None:
        """The pids of workers that were just started and are not reaped: their sessions end with the agent."""
        for worker in filter(None, map(proc.look, workers)):
            self._evidence.sessions[worker.pid] = worker.started
            self._tell(guard.message(guard.WORKER, worker.pid, worker.started))

    def spare(self, pid: int) -> None:
        """A child process of the agent that is no worker, and in a session of its own."""
        self._evidence.spared.add(pid)
        self._tell(guard.message(guard.SPARED, pid))

    def worker_ended(self, worker: int) -> None:
        """That worker was reaped: another process may get its number as soon as nobody is in its session any more."""
        if all(process.session != worker for process in proc.descendants(os.getpid()).values()):
            self._forget(worker)

    def owns(self, pid: int) -> bool:
        """Whether a worker of this agent started that process, by itself or through others."""
        return pid in kills.select(self._evidence, proc.descendants(os.getpid()), os.getpid())

    def end_leftovers(self) -> None:
        """No worker runs: what is still below this process was left by one, in a session of its own."""
        count = kills.end_below_agent(self._evidence)
        if count:
            self._say(f"ended {count} process{'es' if count > 1 else ''} that the workers had left behind")
        for worker in list(self._evidence.sessions):
            self._forget(worker)

    def reap(self, workers: Collection[int]) -> None:
        """Reap adopted orphans: all children but ``workers`` and our own helpers, which are reaped where they are watched."""
        for pid in set(proc.children(os.getpid())) - {*self._evidence.spared, *workers}:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def close(self) -> None:
        """End whatever is left, then the guard, which goes on alone if that takes it long."""
        kills.end_below_agent(self._evidence)
        if self._guard is None:
            control_group.remove(self.group, END_LIMIT)
            return
        ended = self._drop_guard()
        with suppress(ProcessLookupError):
            self._guard.send_signal(signal.SIGCONT)  # somebody may have stopped it
        if _wait(ended, END_LIMIT):
            self._guard.wait()
        else:
            self._guard.returncode = 0  # nobody waits for it any more
        os.close(ended)

    @property
    def _deadline(self) -> float:
        """The moment at which the guard ends the workers; 0: never."""
        return self._held or (self.renewed + self.lease if self.lease else 0.0)

    def _forget(self, worker: int) -> None:
        if self._evidence.sessions.pop(worker, None) is not None:
            self._tell(guard.message(guard.GONE, worker))

    def _tell(self, data: bytes) -> None:
        if self._guard is None:
            return
        try:
            os.write(self._write, data)
        except BlockingIOError:
            self._guard.kill()  # it has not read for many minutes; its successor gets the whole state
        except OSError:
            pass  # a guard that is gone is seen by its pidfd

    def _start(self, limit: float) -> None:
        """Start a guard and tell it everything. Raises OSError when none can be started within ``limit`` seconds."""
        read, write = os.pipe2(os.O_CLOEXEC)
        try:
            command = [sys.executable, "-I", "-S", str(Path(guard.__file__)), self._evidence.mark.text, str(self._deadline)]
            command += [str(int(self._evidence.strict)), self.group]
            started = subprocess.Popen(
                command, stdin=read, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, cwd="/"
            )
            assert started.stdout is not None
            with started.stdout as ready:
                if not _wait(ready.fileno(), limit) or not ready.read(1):
                    started.kill()
                    started.wait()
                    raise OSError(0, f"it was not ready within {limit:.0f} s, or ended at once")
            self._pidfd = os.pidfd_open(started.pid)
        except OSError:
            os.close(write)
            raise
        finally:
            os.close(read)
        os.set_blocking(write, False)
        self._write, self._guard, self._guard_due = write, started, math.inf
        self._evidence.spared.add(started.pid)
        self._selector.register(self._pidfd, selectors.EVENT_READ, self._guard_died)
        for pid in self._evidence.spared:
            self._tell(guard.message(guard.SPARED, pid))
        for pid, began in self._evidence.sessions.items():
            self._tell(guard.message(guard.WORKER, pid, began))
        for data in self._folders.values():
            self._tell(data)

    def _drop_guard(self) -> int:
        """Let go of the guard. Returns its pidfd, for the caller to close."""
        assert self._guard is not None
        self._selector.unregister(self._pidfd)
        os.close(self._write)
        self._evidence.spared.discard(self._guard.pid)
        return self._pidfd

    def _guard_died(self, mask: int) -> None:
        assert self._guard is not None
        os.close(self._drop_guard())
        self._guard.wait()
        self._guard = None
        self._say("the guard was killed; another one is started")
        self._start_again()

    def _start_again(self) -> None:
        try:
            self._start(RESTART_LIMIT)
        except OSError as error:
            if self._guard_due == math.inf:
                self._say(
                    f"the guard cannot be started: {error.strerror}; this node goes on without it, and tries again every "
                    f"{TRY_AGAIN:.0f} s: should the agent be killed now, processes of its workers may be left"
                )
            self._guard_due = clock.now() + TRY_AGAIN
        else:
            self._guard_due = math.inf

    def _sweep(self, job: str, inherited: str) -> None:
        """An agent and its guard may be killed together; the next agent of the job on this node finds what they left."""
        found = leftovers.Sweep(job, inherited, _own_group())
        if found.count:
            agents = ", ".join(map(str, sorted(found.agents)))
            ended = f"{found.count} process{'es' * (found.count > 1)}"
            self._say(f"ended {ended} of an earlier run of this job, whose agent, pid {agents}, is gone")


def _wait(fd: int, seconds: float) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(1000 * seconds))


def _own_group() -> Path | None:
    """The control group (version 2) that this process is in, so that every limit holds for those below it; None: not to be seen."""
    with suppress(OSError, IndexError):
        found = cgroup_folders(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text(), "version 2 alone")
        if str(os.getpid()) in Path(found[0], "cgroup.procs").read_text().split():
            return Path(found[0])
    return None


def _make_group(name: str) -> str:
    """A control group for the workers, where this process may make one and the kernel (5.14) can end it as a whole. Else empty."""
    own = _own_group()
    with suppress(OSError):
        if own and os.access(own / "cgroup.procs", os.W_OK):
            group = own / name
            group.mkdir()
            if (group / "cgroup.kill").exists():
                return str(group)
            group.rmdir()
    return ""

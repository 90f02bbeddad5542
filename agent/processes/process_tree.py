"""Process-tree supervision: starts the guard, reaps orphans, kills what workers leave behind and the leftovers of dead agents.

See docs/agent.md.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from elastirun import clock, linux
from elastirun.agent.host import name_servers
from elastirun.agent.host.cpus import own_groups
from elastirun.agent.host.descriptors import ready
from elastirun.agent.processes import control_group, guard, kills, leftovers, marks, proc
from elastirun.agent.processes.preload.server_start import StartedServer
from elastirun.errors import StartError

PR_SET_CHILD_SUBREAPER = 36  # from <linux/prctl.h>
RENEW_EVERY = 0.5  # seconds between two renewals of the lease; the loop goes round more often
RENEWALS = 8  # in the time of a lease, at least
TOO_LATE = 0.5  # seconds before the end of the lease, at most a tenth of it: the guard may kill the workers before a renewal reaches it
TOO_LATE_FIXED = 0.1  # seconds, the same before a moment that no renewal moves
GUARD_RETRY = 10.0  # seconds until the start of a guard that failed is tried again
GUARD_START_LIMIT = 60.0  # seconds for the first guard to start; a network file system may be slow
GUARD_RESTART_LIMIT = 5.0  # seconds for a later guard to start; the loop waits meanwhile
LARGEST_PIPE = 1 << 20  # bytes; the kernel's limit for a user's pipe
GUARD_END_LIMIT = 1.0  # seconds that the agent waits for its guard at the end; the guard may go on alone


class ProcessTree:
    """The processes below this agent. Makes this process their subreaper, so that orphans become its children.

    ``lease``: seconds that the agent may stand still before the guard kills its workers; 0: no limit.
    ``say`` gets lines for people. ``given``: the fork server, if this process had one when it became the agent.

    Any child that is started from now on in a session of its own counts as a worker's, unless ``exclude`` names it.
    """

    def __init__(
        self, job: str, lease: float, selector: selectors.BaseSelector, say: Callable[[str], None], given: StartedServer | None = None
    ) -> None:
        self.lease = lease
        self._selector = selector
        self._say = say
        self.renewed = clock.now()  # when the lease was last renewed
        self._fixed_deadline = 0.0  # when the guard kills the workers of a single-node round, even if the agent is healthy; 0: none
        self._notice = guard.message(guard.NOTICE)  # where to write the death notice of this agent
        self._folders: dict[str, bytes] = {}  # by path: the message to the guard that names the folder
        inherited = os.environ.get(marks.VARIABLE, "")
        own = (given.mark if given else None) or marks.own()
        self.mark = marks.for_workers(inherited, own)
        strict = os.getpid() == 1 or bool(set(proc.children(os.getpid())) - {given.pid if given else 0})
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._timer = linux.timerfd_create()  # tells the guard that the deadline has passed; to set it wakes nobody
        self._set_timer(0.0, self.renewed)
        self._kill_leftovers(job, inherited)
        self.group = _make_group(control_group.name(own.text, job))  # the control group for the workers; empty: none can be made
        self._evidence = kills.Traces(own, self.group, strict)
        self._guard: subprocess.Popen[bytes] | None = None
        self._retry_at = math.inf  # when to try again to start a guard
        try:
            self._start_guard(GUARD_START_LIMIT)
        except OSError as error:
            os.close(self._timer)
            control_group.remove(self.group, 0.0)
            raise StartError(f"cannot start the guard, {sys.executable} {guard.__file__}: {error.strerror}") from None

    # -- the lease ----------------------------------------------------------------------------------------------------------

    def renew(self, now: float) -> None:
        """Renew the guard's lease: the agent is well. Call it each time the loop goes round."""
        if now >= self._retry_at:
            self._restart_guard()
        if self._fixed_deadline or (self.lease and now >= self.renewed + min(RENEW_EVERY, self.lease / RENEWALS)):
            before = self._deadline
            self._fixed_deadline, self.renewed = 0.0, now
            self._set_timer(before, now)

    def end_lease_at(self, moment: float, now: float) -> None:
        """Let the lease end at ``moment``, not ``lease`` seconds after the last renewal. ``renew`` or a later moment changes that.

        For single-node rounds, which another node may replace (see docs/decisions/0006).
        """
        if now >= self._retry_at:
            self._restart_guard()
        if moment != self._fixed_deadline:
            before, self._fixed_deadline = self._deadline, moment
            self._set_timer(before, now)

    def lease_is_over(self, now: float) -> bool:
        """Return whether the guard has killed the workers, or is about to."""
        if self._fixed_deadline:
            return now > self._fixed_deadline - TOO_LATE_FIXED
        return bool(self.lease) and now > self.renewed + self.lease - min(TOO_LATE, self.lease / 10)

    def _set_timer(self, before: float, now: float) -> None:
        """Let the guard's timer go off at the deadline. ``before``: the last deadline, which the guard may have missed if it has passed."""
        linux.timerfd_settime(self._timer, self._deadline)
        if 0 < before <= now:
            self._send(guard.message(guard.LATE, now))

    @property
    def _deadline(self) -> float:
        """The moment at which the guard kills the workers; 0: never."""
        return self._fixed_deadline or (self.renewed + self.lease if self.lease else 0.0)

    # -- the processes --------------------------------------------------------------------------------------------------------

    def add_workers(self, workers: Collection[int]) -> None:
        """Add the sessions of the workers with these pids, which were just started and are not reaped."""
        for worker in filter(None, map(proc.look, workers)):
            self._evidence.sessions[worker.pid] = worker.started
            self._send(guard.message(guard.WORKER, worker.pid, worker.started))

    def worker_reaped(self, worker: int) -> None:
        """Forget the worker's session unless a process is left in it: the kernel may now give the worker's pid to a stranger."""
        if all(process.session != worker for process in proc.descendants(os.getpid()).values()):
            self._forget(worker)

    def spare(self, session: int) -> None:
        """Leave the processes of a session alone as long as this agent lives. The guard kills them with everything else."""
        self._evidence.outside.add(session)

    def spare_no_longer(self, session: int) -> None:
        """Undo ``spare``. Call it when the session is empty, because a worker may then get its number."""
        self._evidence.outside.discard(session)

    def owns(self, pid: int) -> bool:
        """Return whether a worker of this agent started that process, directly or not."""
        return pid in kills.owned(self._evidence, proc.descendants(os.getpid()), os.getpid())

    def kill_left_behind(self, parked: Collection[int] = ()) -> None:
        """Kill all that workers left below this process in sessions of their own. Call it only when no worker runs.

        ``parked``: pids of workers that wait for the next round; these and what they have started are left alone.
        """
        outside = self._evidence.outside
        self._evidence.outside = outside | set(parked)
        count = kills.kill_below_agent(self._evidence, whole_group=not parked)
        self._evidence.outside = outside
        if count:
            self._say(f"ended {count} process{'es' if count > 1 else ''} that the workers had left behind")
        for worker in set(self._evidence.sessions) - set(parked):
            self._forget(worker)

    def reap_orphans(self, workers: Collection[int]) -> None:
        """Reap all children that have ended, except ``workers`` and the excluded ones, which are reaped where they are watched."""
        for pid in set(proc.children(os.getpid())) - {*self._evidence.excluded, *workers}:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def remove_folder_at_end(self, folder: str) -> None:
        """Have the guard remove this temporary folder at the end, even if the agent is killed."""
        if folder not in self._folders:
            with suppress(OSError):
                found = os.lstat(folder)
                self._folders[folder] = guard.message(guard.FOLDER, found.st_dev, found.st_ino, os.fsencode(folder))
                self._send(self._folders[folder])

    def write_notice_with(self, notice: bytes) -> None:
        """Have the guard write the death notice that ``notice`` describes (see death_notice.py) if this agent dies; empty: none."""
        message = guard.message(guard.NOTICE, notice)
        if message != self._notice:
            self._notice = message
            self._send_notice()

    def close(self) -> None:
        """Kill all that is left, then end the guard. The guard goes on alone if its last work takes longer than GUARD_END_LIMIT."""
        kills.kill_below_agent(self._evidence)
        os.close(self._timer)
        if self._guard is None:
            control_group.remove(self.group, GUARD_END_LIMIT)
            return
        pidfd = self._release_guard()
        with suppress(ProcessLookupError):
            self._guard.send_signal(signal.SIGCONT)  # it may have been stopped by a signal
        if ready([pidfd], GUARD_END_LIMIT):
            self._guard.wait()
        else:
            self._guard.returncode = 0  # nobody waits for it, so Popen must not warn
        os.close(pidfd)

    def _forget(self, worker: int) -> None:
        if self._evidence.sessions.pop(worker, None) is not None:
            self._send(guard.message(guard.GONE, worker))

    def _kill_leftovers(self, job: str, inherited: str) -> None:
        """Kill leftovers of an earlier run of this job on this machine whose agent and guard were killed together."""
        found = leftovers.Sweep(job, inherited, _own_group())
        if found.count:
            agents = ", ".join(map(str, sorted(found.agents)))
            ended = f"{found.count} process{'es' * (found.count > 1)}"
            self._say(f"ended {ended} of an earlier run of this job, whose agent, pid {agents}, is gone")

    # -- the guard --------------------------------------------------------------------------------------------------------------

    def _send(self, data: bytes) -> None:
        if self._guard is None:
            return
        try:
            written = os.write(self._write, data)
        except BlockingIOError:
            written = 0
        except OSError:
            return  # the guard has died, which its pidfd reports
        if written < len(data):
            self._guard.kill()  # it has not read for many minutes; the next guard gets the whole state

    def _start_guard(self, limit: float) -> None:
        """Start a guard and send it the whole state. Raises OSError when it cannot be started within ``limit`` seconds."""
        read, write = os.pipe2(os.O_CLOEXEC)
        started = None
        try:
            command = [sys.executable, "-I", "-S", str(Path(guard.__file__)), self._evidence.mark.text, str(self._timer)]
            command += [str(int(self._evidence.strict)), self.group]
            environ = {**os.environ, name_servers.OPTIONS: ""}  # other nodes' addresses may be names
            started = subprocess.Popen(
                command,
                stdin=read,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
                env=environ,
                pass_fds=[self._timer],
            )
            assert started.stdout is not None
            with started.stdout as output:
                if not ready([output.fileno()], limit) or not output.read(1):
                    raise OSError(0, f"it was not ready within {limit:.0f} s, or ended at once")
            self._pidfd = linux.pidfd_open(started.pid)
        except OSError:
            if started is not None:
                started.kill()  # before it sees the end of the pipe, which means to it that the agent has died
                started.wait()
            os.close(write)
            raise
        finally:
            os.close(read)
        os.set_blocking(write, False)
        self._write, self._guard, self._retry_at = write, started, math.inf
        self._evidence.excluded.add(started.pid)
        self._selector.register(self._pidfd, selectors.EVENT_READ, self._guard_died)
        for pid, began in self._evidence.sessions.items():
            self._send(guard.message(guard.WORKER, pid, began))
        for data in self._folders.values():
            self._send(data)
        self._send_notice()

    def _send_notice(self) -> None:
        """Send the notice. One that does not fit into the pipe twice, which that of a host of thousands of nodes may not, is left out."""
        if self._guard is not None:
            fits = _make_room(self._write, 2 * len(self._notice))
            self._send(self._notice if fits else guard.message(guard.NOTICE))

    def _release_guard(self) -> int:
        """Close the pipe to the guard and stop watching it. Returns its pidfd, which the caller closes."""
        assert self._guard is not None
        self._selector.unregister(self._pidfd)
        os.close(self._write)
        self._evidence.excluded.discard(self._guard.pid)
        return self._pidfd

    def _guard_died(self, mask: int) -> None:
        assert self._guard is not None
        os.close(self._release_guard())
        self._guard.wait()
        self._guard = None
        self._say("the guard was killed; another one is started")
        self._restart_guard()

    def _restart_guard(self) -> None:
        try:
            self._start_guard(GUARD_RESTART_LIMIT)
        except OSError as error:
            if self._retry_at == math.inf:
                self._say(
                    f"the guard cannot be started: {error.strerror}; this node goes on without it, and tries again every "
                    f"{GUARD_RETRY:.0f} s: should the agent be killed now, processes of its workers may be left"
                )
            self._retry_at = clock.now() + GUARD_RETRY


def _make_room(pipe: int, size: int) -> bool:
    """Let the pipe hold ``size`` bytes if the kernel allows that. Return whether it can."""
    if fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) < size <= LARGEST_PIPE:
        with suppress(OSError):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, min(2 * size, LARGEST_PIPE))
    return fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) >= size


def _own_group() -> Path | None:
    """Return the control group (version 2) that this process is in; None when it is not visible.

    A group below it has no controllers of its own, so every limit of this group holds for the workers too.
    """
    with suppress(OSError, IndexError):
        found = Path(own_groups("version 2 alone")[0])
        if str(os.getpid()) in (found / "cgroup.procs").read_text().split():
            return found
    return None


def _make_group(name: str) -> str:
    """Make a control group for the workers and return its path; empty when this process may not, or when the kernel is too old.

    The kernel can kill a group as a whole since Linux 5.14 (see docs/decisions/0005).
    """
    own = _own_group()
    with suppress(OSError):
        if own and os.access(own / "cgroup.procs", os.W_OK):
            group = own / name
            group.mkdir()
            if (group / "cgroup.kill").exists():
                return str(group)
            group.rmdir()
    return ""

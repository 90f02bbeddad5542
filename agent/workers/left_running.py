"""Processes that outlive the worker that started them: the agent finds, signals and awaits them.

A worker may be a wrapper (``run.sh``) with the training below it, or may leave an upload running. When a parent ends, its
children become children of the agent (their subreaper), one generation at a time. So every process below an ended worker
is either a child of the agent or below such a child, and it is enough to watch the children.
"""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from elastirun import clock, linux
from elastirun.agent.host.descriptors import ready
from elastirun.agent.processes import proc
from elastirun.agent.processes.process import Process


@dataclass
class _Watched:
    """A process that a worker left running."""

    pidfd: int
    session: int
    sent: int = 0  # the last signal that was sent to it


@dataclass(eq=False)
class LeftRunning:
    """The processes that ended workers have left running.

    An ended worker stays a zombie while its session has members, so that the kernel cannot give its pid, which is also the
    number of its process group, to a stranger.

    ``owns(pid)``: whether one of our workers started this child, which is in a session of its own. ``on_change`` is called
    when a watched process has ended, ``on_reaped`` when an ended worker was reaped.
    """

    _selector: selectors.BaseSelector
    _owns: Callable[[int], bool]
    _on_change: Callable[[], None]
    _on_reaped: Callable[[int], None]
    _workers: dict[int, Process] = field(default_factory=dict)  # by pid: workers that have ended and are not reaped
    _watched: dict[int, _Watched] = field(default_factory=dict)  # by pid
    _signum: int | None = None  # the signal for every watched process, also for those found later

    def __len__(self) -> int:
        return len(self._watched)

    @property
    def pids(self) -> tuple[int, ...]:
        """Pids of the watched processes."""
        return tuple(self._watched)

    @property
    def workers(self) -> tuple[int, ...]:
        """Pids of the ended workers that only this class may reap."""
        return tuple(self._workers)

    def worker_ended(self, worker: Process, alive: Collection[int]) -> None:
        """Take over a worker that has ended; reap it at once if it left nothing running. ``alive``: pids of the other workers."""
        self._workers[worker.pid] = worker
        self.find(alive)

    def find(self, alive: Collection[int]) -> None:
        """Watch the children that have come since the last call, and reap the workers that have nothing left running.

        A process in the session of a worker that is ``alive`` belongs to that worker. A child in a session of its own may
        belong to any worker, so it is watched only when all workers have ended.
        """
        for pid in proc.children(os.getpid()):
            if pid not in self._watched and pid not in self._workers and pid not in alive:
                with suppress(OSError):
                    session = os.getsid(pid)
                    if session in self._workers or (not alive and self._owns(pid)):
                        self._watch(pid, session)
        if self._signum is not None:
            self.send(self._signum)
        for pid in self._workers.keys() - {process.session for process in self._watched.values()}:
            self._workers.pop(pid).reap()
            self._on_reaped(pid)

    def send(self, signum: int) -> None:
        """Send ``signum`` to each watched process, and to each that is found later; never twice to the same one."""
        self._signum = signum
        for process in self._watched.values():
            if process.sent != signum:
                process.sent = signum
                with suppress(OSError):
                    linux.pidfd_send_signal(process.pidfd, signum)

    def kill(self) -> None:
        """Kill every watched process and the process groups of the ended workers."""
        for worker in self._workers.values():
            worker.kill_group()
        self.send(signal.SIGKILL)

    def forget(self) -> None:
        """Stop watching, and reap the ended workers. Processes found later get no signal before the next ``send``."""
        for pid in tuple(self._watched):
            self._drop(pid)
        for pid in tuple(self._workers):
            self._workers.pop(pid).reap()
            self._on_reaped(pid)
        self._signum = None

    def kill_and_wait(self, timeout: float, alive: Collection[int]) -> None:
        """Kill all and wait until they have ended, at most ``timeout`` seconds: a process may be stuck in the kernel.

        ``alive``: pids of workers that go on.
        """
        self.kill()
        end = clock.now() + timeout
        while self._watched and (rest := end - clock.now()) > 0:
            ended = ready([process.pidfd for process in self._watched.values()], rest)
            for pid in [pid for pid, process in self._watched.items() if process.pidfd in ended]:
                self._drop(pid)
            self.find(alive)
        self.forget()

    def _watch(self, pid: int, session: int) -> None:
        process = self._watched[pid] = _Watched(linux.pidfd_open(pid), session)
        self._selector.register(process.pidfd, selectors.EVENT_READ, partial(self._ended, pid))

    def _ended(self, pid: int, mask: int) -> None:
        if pid in self._watched:
            self._drop(pid)
            self._on_change()

    def _drop(self, pid: int) -> None:
        process = self._watched.pop(pid)
        self._selector.unregister(process.pidfd)
        os.close(process.pidfd)
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)

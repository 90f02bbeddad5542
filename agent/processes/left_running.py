"""Processes that outlive their worker: found, signalled and awaited by the agent, to which the kernel hands them.

A worker may be a wrapper (``run.sh``) with the training below it, or leave an upload running. When a parent ends, its
children become children of the agent (their subreaper), one generation at a time. So whoever runs below a worker that has
ended is either such a child or below one: this module watches the children, and they answer for what is below them.
"""

from __future__ import annotations

import os
import select
import selectors
import signal
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path

from elastirun import clock
from elastirun.agent.processes.process import Process


class LeftRunning:
    """What ended workers have left running. An ended worker stays a zombie while its session has members: so its number,
    which is that of its process group, cannot be given to a stranger.

    ``owns`` says of a child in a session of its own whether one of our workers started it. ``on_change`` is called when a
    leftover has ended, ``on_reaped`` when a worker that has ended was reaped.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        owns: Callable[[int], bool],
        on_change: Callable[[], None],
        on_reaped: Callable[[int], None],
    ) -> None:
        self._selector, self._owns, self._on_change, self._on_reaped = selector, owns, on_change, on_reaped
        self._workers: dict[int, Process] = {}  # ended, not reaped, by pid
        self._pidfds: dict[int, int] = {}  # of the processes found, by pid
        self._sessions: dict[int, int] = {}  # their sessions, by pid
        self._sent: dict[int, int] = {}  # the last signal that each was sent, by pid
        self._signum: int | None = None  # what is passed on to every leftover, also to those found later

    def __len__(self) -> int:
        return len(self._pidfds)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(self._pidfds)

    @property
    def workers(self) -> tuple[int, ...]:
        """Pids of the ended workers that only this class may reap."""
        return tuple(self._workers)

    def adopt(self, worker: Process, alive: Collection[int]) -> None:
        """``worker`` has ended; ``alive``: the pids of those that have not. Reaps it at once when it left nothing."""
        self._workers[worker.pid] = worker
        self.look(alive)

    def look(self, alive: Collection[int]) -> None:
        """Find the children that have come since the last look, and reap the workers of which nothing is left.

        What runs in the session of a worker that is ``alive`` serves that worker. A child in a session of its own may serve
        any worker, so it is no leftover before all of them have ended.
        """
        for pid in _children():
            if pid not in self._pidfds and pid not in self._workers and pid not in alive:
                with suppress(OSError):
                    session = os.getsid(pid)
                    if session in self._workers or (not alive and self._owns(pid)):
                        self._watch(pid, session)
        if self._signum is not None:
            self.pass_on(self._signum)
        for pid in self._workers.keys() - set(self._sessions.values()):
            self._workers.pop(pid).reap()
            self._on_reaped(pid)

    def pass_on(self, signum: int) -> None:
        """Send ``signum`` to each leftover, and to each that is found later; never twice to the same one."""
        self._signum = signum
        for pid, fd in self._pidfds.items():
            if self._sent.get(pid) != signum:
                self._sent[pid] = signum
                with suppress(OSError):
                    signal.pidfd_send_signal(fd, signum)

    def kill(self) -> None:
        """SIGKILL to every leftover and to the process groups of the ended workers."""
        for worker in self._workers.values():
            worker.kill_group()
        self.pass_on(signal.SIGKILL)

    def forget(self) -> None:
        """Watch none of them any longer; the next ones get no signal before ``pass_on``."""
        for pid in tuple(self._pidfds):
            self._drop(pid)
        for pid in tuple(self._workers):
            self._workers.pop(pid).reap()
            self._on_reaped(pid)
        self._signum = None

    def kill_and_wait(self, timeout: float) -> None:
        """End them here and now; ``timeout`` (seconds) bounds the wait for a process stuck in the kernel."""
        self.kill()
        end = clock.now() + timeout
        while self._pidfds and (rest := end - clock.now()) > 0:
            poller = select.poll()
            for fd in self._pidfds.values():
                poller.register(fd, select.POLLIN)
            ended = {fd for fd, _ in poller.poll(rest * 1000)}
            for pid in [pid for pid, fd in self._pidfds.items() if fd in ended]:
                self._drop(pid)
            self.look(())
        self.forget()

    def _watch(self, pid: int, session: int) -> None:
        self._pidfds[pid] = os.pidfd_open(pid)
        self._sessions[pid] = session
        self._selector.register(self._pidfds[pid], selectors.EVENT_READ, partial(self._ended, pid))

    def _ended(self, pid: int, mask: int) -> None:
        if pid in self._pidfds:
            self._drop(pid)
            self._on_change()

    def _drop(self, pid: int) -> None:
        fd = self._pidfds.pop(pid)
        self._selector.unregister(fd)
        os.close(fd)
        del self._sessions[pid]
        self._sent.pop(pid, None)
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _children() -> list[int]:
    """The children of this process; the loop's thread started them, and orphans come to it as well."""
    with suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return []

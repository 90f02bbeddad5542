"""One worker process: its own session, tied to the agent's life, watched and signalled through a pidfd."""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import InitVar, dataclass
from pathlib import Path

from elastirun import linux
from elastirun.agent.host.descriptors import ready
from elastirun.agent.processes.spawn import Starts, WorkerSpec, spawn
from elastirun.errors import StartError


def require_pidfds() -> None:
    """Raise StartError, in one line, where the kernel or a seccomp profile does not let processes be watched."""
    try:
        with linux.Descriptor(linux.pidfd_open(os.getpid())) as fd:
            linux.pidfd_send_signal(fd, 0)
            with suppress(ChildProcessError):
                os.waitid(linux.P_PIDFD, fd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError as error:
        raise StartError(
            f"processes cannot be watched here ({error.strerror}): elastirun needs Linux 5.4 or newer, and a sandbox (seccomp, gVisor) "
            "that allows pidfd_open, pidfd_send_signal and waitid"
        ) from None


@dataclass(eq=False)
class Process:
    """A worker that runs from the moment this object exists. ``on_exit(self, code)`` is called once, from the selector's loop.

    ``code`` is the exit status, or minus the number of the signal that ended the worker. For ``spec``, ``stdout``, ``stderr``, the
    thread to call from and OSError see ``spawn``. An ended worker stays a zombie until ``reap`` is called, so that no other process
    gets the number of its process group.
    """

    spec: WorkerSpec
    _selector: selectors.BaseSelector
    _on_exit: Callable[[Process, int], None]
    stdout: InitVar[int | None] = None
    stderr: InitVar[int | None] = None
    starts: InitVar[Starts] = spawn

    def __post_init__(self, stdout: int | None, stderr: int | None, starts: Starts) -> None:
        started = starts(self.spec, stdout, stderr)
        self.pid, self._pidfd = started.pid, started.pidfd
        self._reaped = False
        self._selector.register(self._pidfd, selectors.EVENT_READ, self._ready)

    @property
    def ended(self) -> bool:
        """Return whether the worker has ended. True from the moment the kernel knows it, which may be before ``on_exit``."""
        return self._reaped or self._exit_code() is not None

    def signal(self, signum: int) -> bool:
        """Send ``signum`` to the worker, not to its children. False when the worker has ended, or may not be signalled."""
        if self.ended:
            return False
        with suppress(ProcessLookupError, PermissionError):
            linux.pidfd_send_signal(self._pidfd, signum)
            return True
        return False

    def kill_group(self) -> None:
        """Send SIGKILL to the worker's process group. Does nothing once the worker is reaped."""
        if not self._reaped:  # the worker, alive or zombie, keeps the number of the group
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def kill_and_reap(self, timeout: float) -> None:
        """Kill the worker and wait for its end; ``on_exit`` is not called. ``timeout``, seconds, is for a process stuck in the kernel."""
        self._on_exit = lambda process, code: None
        self.kill_group()
        if ready([self._pidfd], timeout):
            self._ready()
            self.reap()

    def catches(self, signum: int) -> bool:
        """Return whether the worker has a handler for the signal, or had one when it ended. False once it is reaped."""
        with suppress(OSError, ValueError, IndexError):
            status = Path(f"/proc/{self.pid}/status").read_text(errors="replace")
            return not self._reaped and bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (signum - 1) & 1)
        return False

    def reap(self) -> None:
        """Kill what is left of the process group of an ended worker, then reap the worker. Does nothing while the worker runs."""
        if self._reaped or self._exit_code() is None:
            return
        self.kill_group()
        with suppress(ChildProcessError):
            os.waitid(linux.P_PIDFD, self._pidfd, os.WEXITED)
        os.close(self._pidfd)
        self._reaped = True

    def _exit_code(self) -> int | None:
        """Return the exit code of an ended worker without reaping it; None while it runs."""
        try:
            info = os.waitid(linux.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:  # it was given up, died later, and was reaped like any orphan
            return -signal.SIGKILL
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def _ready(self, mask: int = 0) -> None:
        if self._reaped or (code := self._exit_code()) is None:
            return
        self._selector.unregister(self._pidfd)
        self._on_exit(self, code)

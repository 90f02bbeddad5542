"""One worker process: its own session, tied to the agent's life, watched and signalled through a pidfd."""

from __future__ import annotations

import os
import select
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elastirun.errors import StartError

_SHIM = str(Path(__file__).with_name("exec_worker.py"))


@dataclass(frozen=True)
class WorkerSpec:
    """What to start as one worker."""

    local_rank: int
    rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]  # the complete environment, nothing is added
    cpus: frozenset[int] | None = None  # those it may run on; None: the agent's
    group: str = ""  # the control group it enters; empty: it stays in the agent's
    files: int | None = None  # its soft limit of open descriptors; None: the agent's


def require_pidfds() -> None:
    """Raise StartError, in one line, where the kernel, a seccomp profile or this Python does not let processes be watched."""
    try:
        fd = os.pidfd_open(os.getpid())
        try:
            signal.pidfd_send_signal(fd, 0)
            with suppress(ChildProcessError):
                os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        finally:
            os.close(fd)
    except (OSError, AttributeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"this Python was built without it: {error}"
        raise StartError(
            f"processes cannot be watched here ({why}): elastirun needs Linux 5.4 or newer, and a sandbox (seccomp, gVisor) that "
            "allows pidfd_open, pidfd_send_signal and waitid"
        ) from None


class Process:
    """A worker that runs from the moment this object exists; ``on_exit(self, code)`` is called once, from the selector's loop.

    ``code`` is the exit status, or minus the number of the signal that ended it. ``stdout`` and ``stderr`` are descriptors
    for the worker (None: the agent's own); the caller closes its copies. A worker that has ended stays a zombie, which
    keeps the number of its process group, until ``reap`` is called.

    Create it in the loop's own thread: the parent-death signal is tied to the *thread* that forked.
    Raises OSError when the process cannot be made; a command that cannot be run is the worker's exit code 126 or 127.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        selector: selectors.BaseSelector,
        on_exit: Callable[[Process, int], None],
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> None:
        self.spec = spec
        self._selector = selector
        self._on_exit = on_exit
        cpus = ",".join(map(str, sorted(spec.cpus))) if spec.cpus else "-"
        command = [sys.executable, "-I", "-S", _SHIM, str(os.getpid()), cpus, spec.group or "-"]
        command += ["-" if spec.files is None else str(spec.files), *spec.argv]
        self._popen = subprocess.Popen(command, env=dict(spec.env), stdout=stdout, stderr=stderr, start_new_session=True)
        self.pid = self._popen.pid
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:
            self._popen.kill()
            self._popen.wait()
            raise
        selector.register(self._pidfd, selectors.EVENT_READ, self._ready)

    @property
    def ended(self) -> bool:
        """True from the moment the kernel knows it, which may be before ``on_exit``."""
        return self._popen.returncode is not None or self._look() is not None

    def signal(self, signum: int) -> bool:
        """Send to the worker itself, not to its children. False when it has ended already, or may not be signalled."""
        if self.ended:
            return False
        try:
            signal.pidfd_send_signal(self._pidfd, signum)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def kill_group(self) -> None:
        """SIGKILL to the worker and everything in its process group. Does nothing once the worker is reaped."""
        if self._popen.returncode is None:  # so the number is still ours: a zombie holds it
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def kill_and_reap(self, timeout: float) -> None:
        """End it here and now, without ``on_exit``; ``timeout`` (seconds) bounds the wait for a process stuck in the kernel."""
        self._on_exit = _ignore
        self.kill_group()
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        if poller.poll(timeout * 1000):
            self._ready()
            self.reap()

    def catches(self, signum: int) -> bool:
        """Whether the worker has a handler for the signal, or had one when it ended. False once it is reaped."""
        with suppress(OSError, ValueError, IndexError):
            status = Path(f"/proc/{self.pid}/status").read_text(errors="replace")
            return self._popen.returncode is None and bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (signum - 1) & 1)
        return False

    def reap(self) -> None:
        """Kill what is left of the process group of an ended worker, and let its number go."""
        if self._popen.returncode is not None or (code := self._look()) is None:
            return
        self.kill_group()
        with suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        os.close(self._pidfd)
        self._popen.returncode = code  # so that Popen knows that there is nothing left to wait for

    def _look(self) -> int | None:
        """The exit code of an ended worker, which stays a zombie; None while it runs."""
        try:
            info = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:  # given up before, and buried as a stranger when it died after all
            return -signal.SIGKILL
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def _ready(self, mask: int = 0) -> None:
        if self._popen.returncode is not None or (code := self._look()) is None:
            return
        self._selector.unregister(self._pidfd)
        self._on_exit(self, code)


def _ignore(process: Process, code: int) -> None:
    pass

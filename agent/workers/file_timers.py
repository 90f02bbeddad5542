"""Torch's file timers: a worker writes into a named pipe how long a block of its code may take, and is ended if the block takes longer.

The workers' end is ``torch.distributed.elastic.timer`` with a ``FileTimerClient``. torchrun's server ends the agent as well; here only
the worker is ended, which counts as its failure.

All calls happen in the loop's thread; nothing blocks.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import InitVar, dataclass

from elastirun import clock
from elastirun.agent.part import NodeRound, Part, WorkerExit
from elastirun.agent.workers.workers import Workers
from elastirun.errors import StartError
from elastirun.rendezvous.failures import signal_name
from elastirun.rendezvous.wire.actions import Stop
from elastirun.rendezvous.wire.codec import clip

ENABLE, FILE = "TORCHELASTIC_ENABLE_FILE_TIMER", "TORCHELASTIC_TIMER_FILE"  # torchrun's variables
NAME = "timers"  # of the pipe, in the folder of the agent's socket
MAX_LINE = 4096  # bytes (PIPE_BUF); torch's client sends no longer line, because a longer one might be torn
READ_SIZE = 1 << 16  # bytes; the default capacity of a pipe
MAX_TIMERS = 4096  # at once; further ones are ignored
LONGEST_WAIT = 3600.0  # seconds until the next look; a timer may say any number, and epoll takes at most 24 days
MAX_SCOPE = 200  # characters of a scope in a message


@dataclass(frozen=True)
class TimerRequest:
    """One line of a client: a timer that begins or, with a negative ``expiration``, ends."""

    pid: int
    scope: str
    expiration: float  # seconds since the epoch
    signal: int  # sent to the process when the timer expires; 0 or less: none


def parse_request(line: bytes) -> TimerRequest | None:
    """Return the request in a line of JSON; None where there is none. Any process of the job's user may write lines."""
    with suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
        found = json.loads(line)
        request = TimerRequest(found["pid"], found["scope_id"], float(found["expiration_time"]), found["signal"])
        typed = type(request.pid) is int and type(request.signal) is int and isinstance(request.scope, str)
        return request if typed and request.pid > 1 and request.signal < signal.NSIG and math.isfinite(request.expiration) else None
    return None


@dataclass(eq=False)
class FileTimers(Part):
    """The timers of the workers here, from the start of their round until they are stopped.

    ``environ``: for the workers. ``owns`` tells whether a worker of this agent started that process. ``note(local_rank, text)``: this
    worker is about to end because of its timer.

    The pipe is made if ``environ`` asks for timers, in ``folder`` if it names no path. Raises StartError where that fails.
    """

    environ: Mapping[str, str]
    folder: InitVar[str]
    _selector: selectors.BaseSelector
    _owns: Callable[[int], bool]
    _note: Callable[[int, str], None]
    _say: Callable[[str], None]

    def __post_init__(self, folder: str) -> None:
        self.workers: Workers | None = None  # set before the first round
        self._timers: dict[tuple[int, str], tuple[float, int]] = {}  # by pid and scope: when it expires, on ``elastirun.clock``; signal
        self._received = b""
        self._path, self._fd = "", -1
        if self.environ.get(ENABLE) == "1":
            self._path = self.environ.get(FILE) or (f"{folder}/{NAME}" if folder else "")
            self._fd = _open_pipe(self._path)
            self.environ = {**self.environ, FILE: self._path}
            self._selector.register(self._fd, selectors.EVENT_READ, lambda mask: self._read())

    def round_starts(self, round: NodeRound) -> None:
        self._timers.clear()

    def worker_ended(self, end: WorkerExit) -> None:
        """Forget the timers of a process that is gone: its pid may be another's soon."""
        self._timers = {key: timer for key, timer in self._timers.items() if key[0] != end.pid}

    def round_stops(self, stop: Stop, grace: float) -> None:
        self._timers.clear()

    def tick(self, now: float) -> float:
        """End the processes whose timers have expired. Returns when the next timer does."""
        if now >= self._due:
            self._read()  # the end of the timer may be in the pipe, after a time in which this agent stood still
            expired = {key: timer[1] for key, timer in self._timers.items() if now >= timer[0]}
            for (pid, scope), signum in expired.items():
                del self._timers[pid, scope]
                if signum > 0:
                    self._end(pid, clip(scope, MAX_SCOPE), signum)
        return min(self._due, now + LONGEST_WAIT) if self._timers else math.inf

    def close(self) -> None:
        if self._fd >= 0:
            self._selector.unregister(self._fd)
            os.close(self._fd)
            self._fd = -1
            with suppress(OSError):
                os.unlink(self._path)

    @property
    def _due(self) -> float:
        return min((due for due, _ in self._timers.values()), default=math.inf)

    def _read(self) -> None:
        with suppress(BlockingIOError):
            while data := os.read(self._fd, READ_SIZE):
                *lines, self._received = (self._received + data).split(b"\n")
                self._received = self._received[-MAX_LINE - 1 :]
                for line in lines:
                    if len(line) <= MAX_LINE and (request := parse_request(line)):
                        self._take(request)

    def _take(self, request: TimerRequest) -> None:
        key = request.pid, request.scope
        if request.expiration < 0:
            self._timers.pop(key, None)
        elif key in self._timers or len(self._timers) < MAX_TIMERS:
            # Both sides read the wall clock within milliseconds of each other; a step of that clock later does not matter.
            self._timers[key] = clock.now() + request.expiration - time.time(), request.signal

    def _end(self, pid: int, scope: str, signum: int) -> None:
        """Send the signal to a worker, or to a process that a worker has started; any other process is left alone."""
        assert self.workers is not None
        for local_rank, process in self.workers.processes.items():
            if process.pid == pid:
                self._say(f"rank {process.spec.rank} (pid {pid}): its timer {scope} has expired; it gets {signal_name(signum)}")
                self._note(local_rank, f"its timer expired ({scope})")
                if signum == signal.SIGKILL:
                    self.workers.kill(local_rank)
                else:
                    process.signal(signum)
                return
        if self._owns(pid):
            self._say(f"process {pid} of a worker: its timer {scope} has expired; it gets {signal_name(signum)}")
            with suppress(OSError):
                os.kill(pid, signum)


def _open_pipe(path: str) -> int:
    """Return both ends of a new named pipe: with a writer here, there is no end of file. Replaces a pipe that an agent has left behind."""
    try:
        with suppress(FileNotFoundError):
            if stat.S_ISFIFO(os.lstat(path).st_mode):
                os.unlink(path)
        os.mkfifo(path, 0o600)
        return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        what = f"{ENABLE}: cannot make the pipe {path}" if path else f"{ENABLE}: there is no temporary folder for the pipe"
        raise StartError(f"{what}: {error.strerror}; set {FILE} to a new path in a folder that can be written") from None

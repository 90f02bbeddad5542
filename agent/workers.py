"""The set of workers of one round on this node: start it, stop it with a deadline, report its exits."""

from __future__ import annotations

import selectors
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastirun import clock
from elastirun.agent.logs import RoundLogs
from elastirun.agent.process import Process, WorkerSpec

DRAIN = 0.5  # seconds that a foreign process may hold a worker's pipe open after the last exit
GIVE_UP = 10.0  # seconds a process may take to die of SIGKILL


@dataclass(frozen=True)
class WorkerExit:
    """How one worker ended."""

    local_rank: int
    rank: int
    pid: int
    code: int  # exit status; minus the signal number when a signal ended it
    after: float  # seconds since the start of its set
    killed_by_us: bool  # it was still alive when we signalled it


class Workers:
    """At most one set of workers at a time. All calls and callbacks happen in the loop's thread.

    ``on_exit`` is called for each worker that ends, then ``on_idle`` once when all have ended and their output is read
    (or ``DRAIN`` seconds later, when some other process keeps a pipe open); a new set may be started from ``on_idle``.
    ``on_stuck`` gets a line for people about a worker that SIGKILL did not end; it then counts as ended with code -9.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        *,
        on_exit: Callable[[WorkerExit], None],
        on_idle: Callable[[], None],
        on_stuck: Callable[[str], None],
        clock: Callable[[], float] = clock.now,
    ) -> None:
        self._selector = selector
        self._on_exit, self._on_idle, self._on_stuck = on_exit, on_idle, on_stuck
        self._clock = clock
        self._logs: RoundLogs | None = None  # of the running set
        self._alive: dict[int, Process] = {}  # by local rank
        self._forget()

    def _forget(self) -> None:
        self._began = 0.0
        self._signalled: set[Process] = set()
        self._kill_at: float | None = None  # end of the grace period
        self._give_up_at: float | None = None  # set once SIGKILL is sent
        self._idle_at: float | None = None  # set once all have ended

    @property
    def running(self) -> bool:
        """A set was started and ``on_idle`` has not been called for it."""
        return self._logs is not None

    @property
    def alive(self) -> tuple[int, ...]:
        """Local ranks of the workers that have not ended."""
        return tuple(self._alive)

    @property
    def pids(self) -> tuple[int, ...]:
        """Pids of the workers that have not ended."""
        return tuple(process.pid for process in self._alive.values())

    @property
    def deadline(self) -> float | None:
        """When ``tick`` must be called next, on the clock given."""
        kill_at = None if self._give_up_at is not None else self._kill_at
        return min((t for t in (kill_at, self._give_up_at, self._idle_at) if t is not None), default=None)

    def start(self, specs: Sequence[WorkerSpec], logs: RoundLogs) -> None:
        """Start one worker for each spec. Raises OSError when one cannot be started; then none of them is left."""
        if self.running:
            raise RuntimeError("the workers of the last round have not ended")
        self._logs, self._began = logs, self._clock()
        logs.on_drained = self._look_idle
        try:
            for spec in specs:
                out, err = logs.descriptors(spec.local_rank)
                self._alive[spec.local_rank] = Process(spec, self._selector, self._ended, out, err)
        except OSError as exc:
            self._undo()
            among = f"{len(specs)} worker{'s' * (len(specs) > 1)}"
            raise OSError(exc.errno, f"cannot start local rank {spec.local_rank} of {among}: {exc.strerror}") from exc
        finally:
            logs.close_worker_ends()

    def forward(self, signum: int) -> None:
        """Send to each worker, not to its children; nothing else happens."""
        for process in self._alive.values():
            process.signal(signum)

    def stop(self, grace: float, signum: int = signal.SIGTERM) -> None:
        """Signal each worker (not its children); after ``grace`` seconds kill what is left with its process group.

        A further call can only bring the end nearer, and sends no second signal. Returns at once.
        """
        if not self._alive:
            return
        now = self._clock()
        if self._kill_at is None:
            self._signalled.update(p for p in self._alive.values() if p.signal(signum))
            self._kill_at = now + grace
        else:
            self._kill_at = min(self._kill_at, now + grace)
        self.tick(now)

    def tick(self, now: float) -> None:
        """Do what is due at ``now``; to be called when ``deadline`` has come."""
        if self._give_up_at is not None:
            if now >= self._give_up_at:
                self._give_up()
        elif self._kill_at is not None and now >= self._kill_at:
            self._signalled.update(p for p in self._alive.values() if not p.ended)
            for process in self._alive.values():
                process.kill_group()
            self._give_up_at = now + GIVE_UP
        self._look_idle()

    def _give_up(self) -> None:
        for process in list(self._alive.values()):
            spec = process.spec
            if self._alive.get(spec.local_rank) is not process:
                continue  # a callback below has dealt with it
            self._on_stuck(
                f"rank {spec.rank} (local rank {spec.local_rank}, pid {process.pid}) has not died of SIGKILL in {GIVE_UP:.0f} s: "
                "it hangs in the kernel and is left behind; this node should be checked"
            )
            self._ended(process, -signal.SIGKILL)

    def _ended(self, process: Process, code: int) -> None:
        spec = process.spec
        if self._logs is None or self._alive.get(spec.local_rank) is not process:
            return  # one that was given up has died after all
        del self._alive[spec.local_rank]
        now = self._clock()
        self._logs.worker_ended(spec.local_rank)
        self._on_exit(WorkerExit(spec.local_rank, spec.rank, process.pid, code, now - self._began, process in self._signalled))
        if not self._alive:
            self._kill_at = self._give_up_at = None
            self._idle_at = now + DRAIN
        self._look_idle()

    def _look_idle(self) -> None:
        if self._logs is None or self._idle_at is None or not (self._logs.drained or self._clock() >= self._idle_at):
            return
        self._logs.finish()
        self._logs = None
        self._forget()
        self._on_idle()

    def _undo(self) -> None:
        for process in self._alive.values():
            process.kill_group()  # all at once, then wait for each
        for process in self._alive.values():
            process.kill_and_reap(timeout=1.0)
        self._alive.clear()
        if self._logs is not None:
            self._logs.finish()
        self._logs = None
        self._forget()

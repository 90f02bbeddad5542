"""The set of workers of one round on this node: start it, stop it with a deadline, report its exits."""

from __future__ import annotations

import selectors
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastirun import clock
from elastirun.agent.output.logs import RoundLogs
from elastirun.agent.processes.left_running import LeftRunning
from elastirun.agent.processes.process import Process
from elastirun.agent.processes.spawn import WorkerSpec

DRAIN = 0.5  # seconds that a foreign process may hold a worker's pipe open after the last exit
GIVE_UP = 10.0  # seconds a process may take to die of SIGKILL
STOP_SIGNALS = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))  # what people and supervisors end programs with


def stopped_by_signal(code: int) -> bool:
    """Whether a worker ended by one of ``STOP_SIGNALS``, or with a shell's exit code for that."""
    return -code in STOP_SIGNALS or code - 128 in STOP_SIGNALS


@dataclass(frozen=True)
class WorkerExit:
    """How one worker ended."""

    local_rank: int
    rank: int
    pid: int
    code: int  # exit status; minus the signal number when a signal ended it
    after: float  # seconds since the start of its set
    killed_by_us: bool  # it was still alive when we signalled it
    catches_term: bool = False  # it failed with an exit code, and had a handler for SIGTERM


class Workers:
    """At most one set of workers at a time. All calls and callbacks happen in the loop's thread.

    ``on_exit`` is called for each worker that ends, then ``on_idle`` once when all have ended and their output is read
    (or ``DRAIN`` seconds later, when some other process keeps a pipe open); a new set may be started from ``on_idle``.
    ``on_stuck`` gets a line for people about a worker that SIGKILL did not end; it then counts as ended with code -9.

    What a worker leaves running (``owns`` says what is ours of that) is part of a set that is being stopped: it gets the
    signal when its worker has ended, and the rest of the grace. What a set leaves running that ended by itself goes on after
    ``on_idle`` (``left_running``), with its output, until ``stop`` or ``start``.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        on_exit: Callable[[WorkerExit], None],
        on_idle: Callable[[], None],
        on_stuck: Callable[[str], None],
        owns: Callable[[int], bool] = lambda pid: False,
        on_reaped: Callable[[int], None] = lambda pid: None,
        clock: Callable[[], float] = clock.now,
    ) -> None:
        self._selector = selector
        self._on_exit, self._on_idle, self._on_stuck = on_exit, on_idle, on_stuck
        self._clock = clock
        self._logs: RoundLogs | None = None  # of the running set
        self._alive: dict[int, Process] = {}  # by local rank
        self._left = LeftRunning(selector, owns, self._on_leftover_ended, on_reaped)
        self._forget()

    def _forget(self) -> None:
        self._began = 0.0
        self._signalled: set[Process] = set()
        self._kill_at: float | None = None  # end of the grace period
        self._give_up_at: float | None = None  # set once SIGKILL is sent
        self._idle_at: float | None = None  # set once all have ended
        self._told = False  # ``on_idle`` was called, and leftovers go on

    @property
    def running(self) -> bool:
        """A set was started and ``on_idle`` has not been called for it."""
        return self._logs is not None and not self._told

    @property
    def left_running(self) -> int:
        """How many processes the last set has left running."""
        return len(self._left)

    @property
    def alive(self) -> tuple[int, ...]:
        """Local ranks of the workers that have not ended."""
        return tuple(self._alive)

    @property
    def pids(self) -> tuple[int, ...]:
        """Pids of the workers that nobody else may reap: those that have not ended, and those that have left something running."""
        return self._alive_pids() + self._left.workers

    @property
    def deadline(self) -> float | None:
        """When ``tick`` must be called next, on the clock given."""
        if self._idle_at is not None:
            return self._idle_at
        return self._kill_at if self._give_up_at is None else self._give_up_at

    def start(self, specs: Sequence[WorkerSpec], logs: RoundLogs) -> None:
        """Start one worker for each spec. Raises OSError when one cannot be started; then none of them is left.

        Ends what the last set has left running.
        """
        if self.running:
            raise RuntimeError("the workers of the last round have not ended")
        self.end_left_running()
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
        """Signal each worker (not its children), or what the last set left running; after ``grace`` seconds kill all that is left.

        What outlives its worker gets the signal when that has ended. A further call can only bring the end nearer, and sends
        no second signal. Returns at once.
        """
        if not self._alive and not self._left:
            return
        now = self._clock()
        self._told, self._idle_at = False, None
        if self._kill_at is None:
            self._signalled.update(p for p in self._alive.values() if p.signal(signum))
            self._left.send(signum)
            self._kill_at = now + grace
        else:
            self._kill_at = min(self._kill_at, now + grace)
        self.tick(now)

    def end_left_running(self) -> int:
        """SIGKILL to what a set that ended by itself has left running; returns how many. Waits for them, at most ``DRAIN``."""
        count = len(self._left)
        if self._told:
            self._left.kill_and_wait(DRAIN)
            self._finish()
        return count

    def tick(self, now: float) -> None:
        """Do what is due at ``now``; to be called when ``deadline`` has come."""
        if self._idle_at is not None:
            pass  # all have ended
        elif self._give_up_at is not None:
            if now >= self._give_up_at:
                self._give_up()
        elif self._kill_at is not None and now >= self._kill_at:
            self._signalled.update(p for p in self._alive.values() if not p.ended)
            for process in self._alive.values():
                process.kill_group()
            self._left.kill()
            self._give_up_at = now + GIVE_UP
        self._look_idle()

    def _give_up(self) -> None:
        stuck = f"has not died of SIGKILL in {GIVE_UP:.0f} s: it hangs in the kernel and is left behind; this node should be checked"
        for process in list(self._alive.values()):
            spec = process.spec
            if self._alive.get(spec.local_rank) is not process:
                continue  # a callback below has dealt with it
            self._on_stuck(f"rank {spec.rank} (local rank {spec.local_rank}, pid {process.pid}) {stuck}")
            self._count_out(process, -signal.SIGKILL)
        for pid in self._left.pids:
            self._on_stuck(f"pid {pid}, which a worker started, {stuck}")
        self._left.forget()

    def _ended(self, process: Process, code: int) -> None:
        if self._logs is None or self._alive.get(process.spec.local_rank) is not process:
            process.reap()  # one that was given up has died after all
            return
        asked = self._kill_at is not None
        if code and not asked and not stopped_by_signal(code):
            process.kill_group()  # it crashed: what is below it has nothing to save, and may hold the GPU
        self._count_out(process, code)
        self._left.worker_ended(process, self._alive_pids())
        self._look_idle()

    def _count_out(self, process: Process, code: int) -> None:
        spec = process.spec
        assert self._logs is not None
        self._logs.worker_ended(spec.local_rank)
        del self._alive[spec.local_rank]  # only now: when the last pipe has ended the set is idle, and this exit must be reported before
        after, catches_term = self._clock() - self._began, code > 0 and process.catches(signal.SIGTERM)
        self._on_exit(WorkerExit(spec.local_rank, spec.rank, process.pid, code, after, process in self._signalled, catches_term))

    def _alive_pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._alive.values())

    def _on_leftover_ended(self) -> None:
        self._left.find(self._alive_pids())
        self._look_idle()

    def _look_idle(self) -> None:
        if self._logs is None or self._alive:
            return
        waits = bool(self._left) and (self._told or self._kill_at is not None)
        if waits:
            return
        if self._idle_at is None:
            self._idle_at = self._clock() + DRAIN
        if not (self._logs.drained or self._clock() >= self._idle_at):
            return
        told = self._told
        if self._left:
            self._told, self._idle_at = True, None  # its output goes on as well
        else:
            self._finish()
        if not told:
            self._on_idle()

    def _finish(self) -> None:
        if self._logs is not None:
            self._logs.finish()
        self._logs = None
        self._left.forget()
        self._forget()

    def _undo(self) -> None:
        for process in self._alive.values():
            process.kill_group()  # all at once, then wait for each
        for process in self._alive.values():
            process.kill_and_reap(timeout=1.0)
        self._alive.clear()
        self._finish()

"""The workers of one round on this node: start them, stop them with a deadline, report their exits.

See docs/agent.md.
"""

from __future__ import annotations

import selectors
import signal
from collections.abc import Callable, Collection, Mapping, Sequence

from elastirun import clock
from elastirun.agent.output.round_logs import RoundLogs
from elastirun.agent.part import WorkerExit
from elastirun.agent.processes.process import Process
from elastirun.agent.processes.spawn import Starts, WorkerSpec, spawn
from elastirun.agent.workers.left_running import LeftRunning

DRAIN = 0.5  # seconds to wait, after the last exit, for the end of a pipe that some other process may hold open
GIVE_UP = 10.0  # seconds for a process to die of SIGKILL; one that takes longer hangs in the kernel, usually in a driver
STOP_SIGNALS = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))  # with which people and supervisors end programs


def stopped_by_signal(code: int) -> bool:
    """Return whether exit code ``code`` means one of ``STOP_SIGNALS``, also in a shell's way: 128 + n."""
    return -code in STOP_SIGNALS or code - 128 in STOP_SIGNALS


class Workers:
    """The workers of at most one round at a time. All calls and callbacks happen in the loop's thread.

    ``on_exit`` is called for each worker that ends, then ``on_idle`` once when all have ended and their output is read
    (or ``DRAIN`` seconds later, when some other process keeps a pipe open); ``on_idle`` may start the next workers.
    ``on_stuck`` gets a line for people about a worker that SIGKILL did not end; that worker then counts as ended with code -9.

    A worker that was asked to park in place of a signal (``stop``) counts as ended from ``park`` on. ``start`` takes it into the next round
    as the worker of its place, with the streams that it has.

    A worker may leave processes running (``owns(pid)`` tells which children belong to workers). While the workers are being stopped,
    these get the signal when their worker has ended, and the rest of the grace. When the workers ended by themselves, they go on after
    ``on_idle`` (``left_running``), with their output, until ``stop`` or ``start``.

    ``starts`` starts one worker, as ``spawn`` does.
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
        starts: Starts = spawn,
    ) -> None:
        self._selector = selector
        self._on_exit, self._on_idle, self._on_stuck = on_exit, on_idle, on_stuck
        self._clock, self._starts = clock, starts
        self.finished: list[int] = []  # ranks of the last round's workers that have ended with 0 by themselves
        self._logs: RoundLogs | None = None  # of the running workers
        self._alive: dict[int, Process] = {}  # by local rank
        self._parked: dict[int, Process] = {}  # by local rank: workers that wait for the next round
        self._left_running = LeftRunning(selector, owns, self._on_left_running_ended, on_reaped)
        self._forget()

    def _forget(self) -> None:
        """Set what belongs to one round to its state before any."""
        self._began = 0.0
        self._signalled: set[Process] = set()
        self._kill_at: float | None = None  # end of the grace period
        self._give_up_at: float | None = None  # set once SIGKILL is sent
        self._idle_at: float | None = None  # set once all have ended
        self._idle_reported = False  # ``on_idle`` was called, and what the workers left running goes on

    @property
    def running(self) -> bool:
        """Workers were started, and ``on_idle`` has not been called for them."""
        return self._logs is not None and not self._idle_reported

    @property
    def left_running(self) -> int:
        """Number of processes that the last workers have left running."""
        return len(self._left_running)

    @property
    def alive(self) -> tuple[int, ...]:
        """Local ranks of the workers that have not ended."""
        return tuple(self._alive)

    @property
    def processes(self) -> Mapping[int, Process]:
        """The workers that have not ended, by local rank."""
        return self._alive

    @property
    def parked(self) -> Mapping[int, Process]:
        """The workers that are parked, by local rank."""
        return self._parked

    @property
    def pids(self) -> tuple[int, ...]:
        """Pids of the workers that nobody else may reap: those that run or are parked, and ended ones that have left something running."""
        return self._living_pids() + self._left_running.workers

    @property
    def deadline(self) -> float | None:
        """The moment at which ``tick`` must be called, on the clock given; None: not by time."""
        if self._idle_at is not None:
            return self._idle_at
        return self._kill_at if self._give_up_at is None else self._give_up_at

    def start(self, specs: Sequence[WorkerSpec], logs: RoundLogs, go_on: Callable[[], object] = lambda: None) -> None:
        """Start one worker for each spec whose place has no parked one, after ending what the last workers left running.

        ``go_on`` is called before any is started, when the parked ones count as workers of this round.
        Raises OSError when one cannot be started; then none of them is left.
        """
        if self.running:
            raise RuntimeError("the workers of the last round have not ended")
        if self._logs is not None:
            logs.adopt(self._logs, self._parked)
        self.end_left_running()
        self._logs, self._began = logs, self._clock()
        self.finished = []
        logs.on_drained = self._check_idle
        self._alive, self._parked = self._parked, {}
        try:
            for spec in specs:
                if spec.local_rank in self._alive:
                    self._alive[spec.local_rank].spec = spec
            go_on()
            for spec in [spec for spec in specs if spec.local_rank not in self._alive]:
                out, err = logs.descriptors(spec.local_rank)
                self._alive[spec.local_rank] = Process(spec, self._selector, self._ended, out, err, self._starts)
        except OSError as exc:
            self._kill_all()
            among = f"{len(specs)} worker{'s' * (len(specs) > 1)}"
            raise OSError(exc.errno, f"local rank {spec.local_rank} of {among}: {exc.strerror}") from exc
        finally:
            logs.close_worker_ends()

    def forward(self, signum: int) -> None:
        """Send ``signum`` to each worker, not to its children. This is no stop."""
        for process in self._alive.values():
            process.signal(signum)

    def stop(self, grace: float, signum: int = signal.SIGTERM, asked: Collection[int] = ()) -> None:
        """Signal each worker (not its children), or what the last workers left running; after ``grace`` seconds kill all that is left.

        A process that outlives its worker gets the signal when the worker has ended. A further call can only bring the end nearer, and
        sends no second signal. Returns at once. Workers whose pids are in ``asked`` get no signal: they were asked to park. Those that are
        parked from before are stopped like the others.
        """
        if not self._alive and not self._left_running and not self._parked:
            return
        now = self._clock()
        self._idle_reported, self._idle_at = False, None
        if self._kill_at is None:
            self._alive.update(self._parked)
            self._parked.clear()
            self._signalled.update(p for p in self._alive.values() if p.pid not in asked and p.signal(signum))
            self._left_running.send(signum)
            self._kill_at = now + grace
        else:
            self._kill_at = min(self._kill_at, now + grace)
        self.tick(now)

    def park(self, pid: int) -> None:
        """Count a worker as ended: it was asked to park, and has left its round."""
        for local_rank, process in list(self._alive.items()):
            if process.pid == pid and self._kill_at is not None:
                self._parked[local_rank] = self._alive.pop(local_rank)
        self._check_idle()

    def kill(self, local_rank: int) -> None:
        """Kill one worker and its process group. Does nothing if it has ended."""
        if process := self._alive.get(local_rank):
            process.kill_group()

    def end_by_kill(self, local_rank: int) -> WorkerExit | None:
        """Return the end that ``kill`` would give one worker now; None if it has ended already."""
        process = self._alive.get(local_rank)
        if process is None or process.ended:
            return None
        return WorkerExit(local_rank, process.spec.rank, process.pid, -signal.SIGKILL, self._clock() - self._began, killed_by_us=True)

    def end_left_running(self) -> int:
        """Kill what workers that ended by themselves have left running, and wait for at most ``DRAIN``. Returns how many there were."""
        count = len(self._left_running)
        if self._idle_reported:
            self._left_running.kill_and_wait(DRAIN, self._living_pids())
            self._finish()
        return count

    def tick(self, now: float) -> None:
        """Do what is due at ``now``. Call it when ``deadline`` has come."""
        if self._idle_at is not None:
            pass  # all have ended
        elif self._give_up_at is not None:
            if now >= self._give_up_at:
                self._give_up()
        elif self._kill_at is not None and now >= self._kill_at:
            self._signalled.update(p for p in self._alive.values() if not p.ended)
            for process in self._alive.values():
                process.kill_group()
            self._left_running.kill()
            self._give_up_at = now + GIVE_UP
        self._check_idle()

    def _give_up(self) -> None:
        stuck = f"has not died of SIGKILL in {GIVE_UP:.0f} s: it hangs in the kernel and is left behind; this node should be checked"
        for process in list(self._alive.values()):
            spec = process.spec
            if self._alive.get(spec.local_rank) is not process:
                continue  # a callback below has ended this round
            self._on_stuck(f"rank {spec.rank} (local rank {spec.local_rank}, pid {process.pid}) {stuck}")
            self._report_exit(process, -signal.SIGKILL)
        for pid in self._left_running.pids:
            self._on_stuck(f"pid {pid}, which a worker started, {stuck}")
        self._left_running.forget()

    def _ended(self, process: Process, code: int) -> None:
        if self._parked.get(process.spec.local_rank) is process:
            self._alive[process.spec.local_rank] = self._parked.pop(process.spec.local_rank)
        if self._logs is None or self._alive.get(process.spec.local_rank) is not process:
            process.reap()  # it was given up, and has died after all
            return
        stopping = self._kill_at is not None
        if code and not stopping and not stopped_by_signal(code):
            process.kill_group()  # it crashed: its children have nothing to save, and may hold the GPU
        self._report_exit(process, code)
        self._left_running.worker_ended(process, self._living_pids())
        self._check_idle()

    def _report_exit(self, process: Process, code: int) -> None:
        spec = process.spec
        assert self._logs is not None
        self._logs.worker_ended(spec.local_rank)
        del self._alive[spec.local_rank]  # not before worker_ended, which may call _check_idle: this exit comes first
        if code == 0 and process not in self._signalled:
            self.finished.append(spec.rank)
        after = max(0.0, self._clock() - self._began - spec.pause)
        catches_term = code > 0 and process.catches(signal.SIGTERM)
        self._on_exit(WorkerExit(spec.local_rank, spec.rank, process.pid, code, after, process in self._signalled, catches_term))

    def _living_pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in (*self._alive.values(), *self._parked.values()))

    def _on_left_running_ended(self) -> None:
        self._left_running.find(self._living_pids())
        self._check_idle()

    def _check_idle(self) -> None:
        if self._logs is None or self._alive:
            return
        waits = bool(self._left_running) and (self._idle_reported or self._kill_at is not None)
        if waits:
            return
        if self._idle_at is None:
            self._idle_at = self._clock() + DRAIN
        if not (self._logs.is_drained(self._parked) or self._clock() >= self._idle_at):
            return
        reported = self._idle_reported
        if self._left_running or self._parked:  # these may still write output
            self._idle_reported, self._idle_at, self._kill_at, self._give_up_at = True, None, None, None
        else:
            self._finish()
        if not reported:
            self._on_idle()

    def _finish(self) -> None:
        if self._logs is not None:
            self._logs.finish()
        self._logs = None
        self._left_running.forget()
        self._forget()

    def _kill_all(self) -> None:
        for process in self._alive.values():
            process.kill_group()  # all at once; then wait for each
        for process in self._alive.values():
            process.kill_and_reap(timeout=1.0)
        self._alive.clear()
        self._finish()

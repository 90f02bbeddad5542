"""Names workers that compute for longer than the others of the job (docs/running.md#stragglers). ``stragglers.py`` decides."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from elastirun import clock
from elastirun.agent.hangs.job_median import WORK, JobTimes
from elastirun.agent.hangs.stragglers import WINDOW, Straggler, Stragglers
from elastirun.agent.observe import events
from elastirun.agent.observe.progress_pages import ProgressPages
from elastirun.agent.observe.step_rates import StepRates, WorkerSteps
from elastirun.agent.part import NodeRound, Part
from elastirun.agent.store.node_reports import Meeting
from elastirun.agent.workers.workers import Workers


@dataclass(eq=False)
class StragglerWatch(Part):
    """Compares the workers' times once in a ``WINDOW``. ``meeting``, ``write``, ``say``: as in ``HangWatch``."""

    _workers: Workers
    _pages: ProgressPages
    _meeting: Callable[[NodeRound], Meeting]
    _write: Callable[[events.Event], None]
    _say: Callable[[str], None]

    def __post_init__(self) -> None:
        self.named: list[int] = []  # ranks of workers that were named in this round
        self._rates, self._stragglers = StepRates(), Stragglers()
        self._job_times = {False: JobTimes(), True: JobTimes(WORK)}  # by ``Stragglers.by_work``
        self._round: NodeRound | None = None
        self._compare_at = math.inf  # on ``elastirun.clock``; infinity: no workers run

    def workers_started(self, round: NodeRound) -> None:
        self._round = round
        self._stragglers.start_round()
        self.named.clear()
        self._compare_at = clock.now() + WINDOW

    def stop_watching(self) -> None:
        self._compare_at = math.inf

    def steps(self, now: float) -> tuple[WorkerSteps, ...]:
        """Return the steps of the workers here that stamp their pages."""
        ranks = {local_rank: process.spec.rank for local_rank, process in self._workers.processes.items()}
        found = self._rates.look(now, time.monotonic_ns(), self._pages.of(ranks), ranks)
        slow = {local_rank: one.factor for local_rank, one in self._stragglers.slow.items()}
        return tuple(replace(one, times_median=slow.get(one.local_rank)) for one in found)

    def tick(self, now: float) -> float:
        if now >= self._compare_at and self._round is not None:
            self._compare_at = now + WINDOW
            meeting = None if self._round.alone else self._meeting(self._round)
            median = self._job_times[self._stragglers.by_work].median(meeting.fence) if meeting else None  # as in the window before
            found = self._stragglers.look(self._pages.of(self._workers.processes), median)
            if meeting and self._stragglers.alone:
                self._job_times[self._stragglers.by_work].share(meeting, self._stragglers.alone)
            for one in found:
                self._name(one)
        return self._compare_at

    def _name(self, one: Straggler) -> None:
        spec = self._workers.processes[one.local_rank].spec
        device = device_of(spec.env, one.local_rank)
        self.named.append(spec.rank)
        self._write(events.Straggler(spec.rank, one.local_rank, device, one.factor, one.seconds, one.median))
        of_node = "" if one.of_job else " of this node"
        took = f"{one.seconds:.3g} s a step, the median rank{of_node} {one.median:.3g} s"
        self._say(f"rank {spec.rank} (local rank {one.local_rank}, {device}) is a straggler: it computes for {took}")


def device_of(env: Mapping[str, str], local_rank: int) -> str:
    """Return the device that a worker most likely uses, for people."""
    visible = env.get("CUDA_VISIBLE_DEVICES", "")
    if visible or os.path.exists("/dev/nvidia0"):
        names = visible.split(",") if visible else []
        return f"GPU {names[local_rank] if local_rank < len(names) else names[0] if len(names) == 1 else local_rank}"
    return "CPU"

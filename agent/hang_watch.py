"""Watches the workers' progress pages and ends the worker that hangs (``--hang-timeout``, see docs/decisions/0022).

All calls happen in the loop's thread; nothing blocks. ``hangs.py`` decides.
"""

from __future__ import annotations

import fcntl
import math
import os
import time
from collections.abc import Callable, Mapping

from elastirun import clock
from elastirun.agent import events, hangs
from elastirun.agent.events import Event
from elastirun.agent.processes import stuck
from elastirun.agent.processes.process import Process
from elastirun.agent.processes.workers import Workers
from elastirun.agent.step_rates import StepRates, WorkerSteps
from elastirun.progress_page import HEADER, MAGIC, SIZE, Page
from elastirun.rendezvous.records import Blame

STACKS_LIMIT = 1.0  # seconds for the workers to write their stacks, which takes milliseconds
_ADD_SEALS, _FIXED_SIZE = 1033, 1 | 2 | 4  # F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW; an old Python lacks the names


class ProgressPages:
    """The progress pages of a round's workers: memory without a file, which workers open through this process's descriptors."""

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}  # by local rank

    def renew(self, count: int) -> list[str]:
        """Make the pages of a new round. Return their paths by local rank; none where such memory cannot be had."""
        self.close()
        try:
            for local_rank in range(count):
                fd = self._fds[local_rank] = os.memfd_create("elastirun-progress", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                os.ftruncate(fd, SIZE)
                os.pwrite(fd, MAGIC, 0)
                fcntl.fcntl(fd, _ADD_SEALS, _FIXED_SIZE)
        except OSError:
            self.close()
        return [f"/proc/{os.getpid()}/fd/{fd}" for fd in self._fds.values()]

    def read(self, local_rank: int) -> Page | None:
        """Return the page of a worker that stamps it; None if it does not."""
        fd = self._fds.get(local_rank)
        page = Page.parse(os.pread(fd, HEADER, 0)) if fd is not None else None
        return page if page and page.pid else None

    def stacks(self, local_rank: int) -> str:
        """Return what the worker has written behind its page."""
        fd = self._fds.get(local_rank)
        data = os.pread(fd, SIZE - HEADER, HEADER) if fd is not None else b""
        return data.partition(b"\0")[0].decode(errors="backslashreplace")

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])


class HangWatch:
    """Looks for a hang between ``start`` and ``stop``. ``timeout``: as ``LaunchConfig.hang_timeout``.

    ``write`` gets events, ``say`` lines for people.
    ``on_hung(local_rank, blame, note, stack)``: end this worker, which counts as its failure.
    """

    def __init__(
        self,
        timeout: float | None,
        workers: Workers,
        write: Callable[[Event], None],
        say: Callable[[str], None],
        on_hung: Callable[[int, Blame, str, list[str]], None],
    ) -> None:
        self.pages = ProgressPages()
        self._rates = StepRates()
        self._detector = None if timeout is None else hangs.HangDetector(timeout)
        self._workers, self._write, self._say, self._on_hung = workers, write, say, on_hung
        self._look_at = math.inf  # when to take the next sample, on ``elastirun.clock``; infinity: the workers are not watched
        self._judge_at: float | None = None  # when the stacks that were asked for are there; None: no hang
        self._act_at: float | None = None  # when the workers in ``_verdict`` are ended; None: not judged yet
        self._alone = False
        self._forget()

    def _forget(self) -> None:
        self._judge_at = self._act_at = None
        self._verdict: hangs.Verdict | None = None
        self._observed: list[hangs.Observed] = []

    def start(self, alone: bool) -> None:
        """A round's workers were started. ``alone``: all of them run on this node, so no other node knows the cause better."""
        if self._detector is not None:
            self._alone = alone
            self._detector.start_round(clock.now())
            self._look_at = clock.now() + self._detector.interval

    def steps(self, now: float) -> tuple[WorkerSteps, ...]:
        """Return the steps of the workers here that stamp their pages."""
        processes = self._workers.processes
        pages = {local_rank: page for local_rank in processes if (page := self.pages.read(local_rank))}
        ranks = {local_rank: process.spec.rank for local_rank, process in processes.items()}
        return self._rates.look(now, time.monotonic_ns(), pages, ranks)

    def stop(self) -> None:
        """The round's workers are being stopped, or have ended."""
        self._look_at = math.inf
        self._forget()

    def close(self) -> None:
        self.stop()
        self.pages.close()

    def tick(self, now: float) -> float:
        """Do what is due. Returns when to be called next, on ``elastirun.clock``."""
        detector = self._detector
        if detector is None or self._look_at == math.inf:
            return math.inf
        if now >= self._due:
            self._look_at = now + detector.interval
            pages = {rank: page for rank in self._workers.processes if (page := self.pages.read(rank))}
            seconds = detector.look(now, pages)
            if seconds is None:
                if self._verdict is not None:
                    self._say("a worker has made a step again")
                self._forget()
            elif self._judge_at is None:
                self._ask_for_stacks(pages, now)
            elif self._act_at is None and now >= self._judge_at:
                self._judge(pages, seconds, now)
            if self._act_at is not None and now >= self._act_at and seconds is not None:
                self._act(seconds)
        return self._due

    @property
    def _due(self) -> float:
        stage = self._judge_at if self._act_at is None else self._act_at
        return min(self._look_at, self._look_at if stage is None else stage)

    def _ask_for_stacks(self, pages: Mapping[int, Page], now: float) -> None:
        """Begin with a hang, unless a debugger holds a worker: then nobody can tell."""
        assert self._detector is not None
        processes = self._workers.processes
        if any(stuck.state(process.pid).traced for process in processes.values()):
            self._detector.excuse(now)
            return
        for local_rank, page in pages.items():
            process = processes[local_rank]
            # The numbers are the worker's. A signal without a handler would end it.
            if page.pid == process.pid and 0 < page.signal <= 64 and process.catches(page.signal):
                process.signal(page.signal)
        self._judge_at = now + STACKS_LIMIT

    def _judge(self, pages: Mapping[int, Page], seconds: float, now: float) -> None:
        assert self._detector is not None
        limit = self._detector.limit
        self._observed = [self._observe(rank, process, pages.get(rank)) for rank, process in self._workers.processes.items()]
        self._verdict = verdict = hangs.judge(self._observed)
        named = {worker.rank for worker in self._observed if worker.local_rank in verdict.local_ranks}
        self._say(f"the workers here hang: no step for {seconds:.0f} s (limit {limit:.0f} s); where they are, innermost call first:")
        for worker in self._observed:
            self._say(f"  rank {worker.rank} (pid {worker.pid}, {worker.steps} steps): {hangs.describe(worker)}")
        workers = [
            {"rank": one.rank, "pid": one.pid, "steps": one.steps, "stack": hangs.traceback(one)} for one in self._observed
        ]
        self._write(events.Hang(round(seconds, 3), round(limit, 3), sorted(named), workers))
        self._act_at = now + (0.0 if self._alone else verdict.hold)

    def _observe(self, local_rank: int, process: Process, page: Page | None) -> hangs.Observed:
        state = stuck.state(process.pid)
        stack = hangs.main_stack(self.pages.stacks(local_rank))
        return hangs.Observed(
            local_rank, process.spec.rank, process.pid, page.steps if page else 0, state.stopped, stack, state.waits_in
        )

    def _act(self, seconds: float) -> None:
        """End the workers that are the cause, as far as known."""
        verdict, observed = self._verdict, self._observed
        assert verdict is not None
        blame = Blame.VICTIM if verdict.how == hangs.WAITING and not self._alone else Blame.OWN_FAULT
        self.stop()
        for worker in observed:
            if worker.local_rank in verdict.local_ranks:
                why = " (stopped by a signal)" if worker.stopped else ""
                self._on_hung(worker.local_rank, blame, f"hung: no step for {seconds:.0f} s{why}", hangs.traceback(worker))

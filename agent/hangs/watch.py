"""Watches the workers' progress pages: ends the worker that hangs (``--hang-timeout``, docs/decisions/0022).

All calls happen in the loop's thread; nothing blocks. ``hangs/detection.py`` and ``hangs/causes.py`` decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import InitVar, dataclass, replace
from functools import partial

from elastirun import clock
from elastirun.agent.hangs import causes, py_spy, stuck
from elastirun.agent.hangs.causes import HangVerdict, Observed
from elastirun.agent.hangs.detection import HangDetector
from elastirun.agent.hangs.reports import HangReports
from elastirun.agent.hangs.stacks import Stacks
from elastirun.agent.observe import events
from elastirun.agent.observe.events import Event
from elastirun.agent.observe.progress_pages import ProgressPages
from elastirun.agent.part import NodeRound, Part
from elastirun.agent.processes.process import Process
from elastirun.agent.store.node_reports import Meeting
from elastirun.agent.workers.workers import Workers
from elastirun.rendezvous.wire.records import Blame
from elastirun.worker.progress_page import Page

STACKS_LIMIT = 1.0  # seconds for the workers to write their stacks, which takes milliseconds
LISTEN = 0.25  # seconds between two looks for the verdict on all nodes' reports
SHARING = 2.0  # seconds until the nodes know each other's reports, once all of them have noticed the hang


@dataclass(eq=False)
class HangWatch(Part):
    """Looks for a hang between ``start`` and ``stop_watching``. ``timeout``, ``first_step``: as in ``LaunchConfig``.

    ``pages``: of the workers. ``meeting`` tells where the nodes of a round meet. ``write`` gets events, ``say`` lines for people.
    ``on_hung(local_rank, blame, note, stack, seconds)``: end this worker, which counts as its failure; it has made no step for ``seconds``.
    """

    timeout: InitVar[float | None]
    first_step: InitVar[float | None]
    _workers: Workers
    _pages: ProgressPages
    _meeting: Callable[[NodeRound], Meeting]
    _write: Callable[[Event], None]
    _say: Callable[[str], None]
    _on_hung: Callable[[int, Blame, str, list[str], float], None]

    def __post_init__(self, timeout: float | None, first_step: float | None) -> None:
        self.stacks = Stacks(self._workers, self._pages)
        self._detector = None if timeout is None and first_step is None else HangDetector(timeout, first_step)
        self._look_at = math.inf  # when to take the next sample, on ``elastirun.clock``; infinity: the workers are not watched
        self._judge_at: float | None = None  # when the stacks that were asked for are there; None: no hang
        self._act_at: float | None = None  # when the workers in ``_verdict`` are ended; None: not judged yet
        self._meet: Callable[[], Meeting] | None = None
        self._reports: HangReports | None = None  # this node's part in the verdict of all nodes, while a hang lasts
        self._listen_at = math.inf  # when to look for that verdict
        self._debugged: dict[int, int] = {}  # by local rank: the steps of workers that were seen in a debugger for Python
        # By local rank: what py-spy is asked about workers that have not written their stacks; None: py-spy was not asked.
        self._questions: dict[int, py_spy.StackQuestion] | None = None
        self.hangs = 0  # that were found, in all rounds
        self._forget()

    def _forget(self) -> None:
        self._judge_at = self._act_at = None
        self._verdict: HangVerdict | None = None
        self._observed: list[Observed] = []
        if self._reports is not None:
            self._reports.close()
        self._reports, self._heard = None, False
        for question in (self._questions or {}).values():
            question.end()
        self._questions = None

    def workers_started(self, round: NodeRound) -> None:
        self.start(None if round.alone else partial(self._meeting, round))

    def start(self, meet: Callable[[], Meeting] | None) -> None:
        """A round's workers were started. ``meet`` returns where the nodes meet; None: all workers run on this node."""
        self._meet = meet
        if self._detector is not None:
            self._debugged = {}
            self._detector.start_round(clock.now())
            self._look_at = clock.now() + self._detector.interval

    def stop_watching(self) -> None:
        self._look_at = math.inf
        self._forget()

    def close(self) -> None:
        self.stop_watching()

    def tick(self, now: float) -> float:
        detector = self._detector
        if detector is None or self._look_at == math.inf:
            return math.inf
        if now >= self._due:
            self._look_at = now + detector.interval
            pages = self._pages.of(self._workers.processes)
            seconds = detector.look(now, pages)
            if seconds is None:
                if self._verdict is not None:
                    self._say("a worker has made a step again")
                self._forget()
            elif self._judge_at is None:
                self._ask_for_stacks(pages, now)
            elif self._act_at is None and now >= self._judge_at:
                self._judge(seconds, now)
            self._listen(now)
            if self._act_at is not None and now >= self._act_at and seconds is not None:
                self._act(seconds)
        return self._due

    @property
    def _due(self) -> float:
        stage = self._judge_at if self._act_at is None else self._act_at
        listening = self._reports is not None and not self._heard
        return min(self._look_at, self._look_at if stage is None else stage, self._listen_at if listening else math.inf)

    def _ask_for_stacks(self, pages: Mapping[int, Page], now: float) -> None:
        """Begin with a hang, unless a debugger holds a worker: then nobody can tell."""
        assert self._detector is not None
        processes = self._workers.processes
        paused = any(page.steps == self._debugged.get(local_rank) for local_rank, page in pages.items())
        if paused or any(stuck.state(process.pid).traced for process in processes.values()):
            self._detector.excuse(now)
            return
        self.stacks.ask()
        self._judge_at = now + STACKS_LIMIT

    def _judge(self, seconds: float, now: float) -> None:
        assert self._detector is not None
        limit = self._detector.limit
        processes = self._workers.processes
        self._observed = [self._observe(local_rank, process) for local_rank, process in processes.items()]
        if self._ask_py_spy():
            self._judge_at = now + py_spy.LIMIT
            return
        if debugged := {one.local_rank: one.steps for one in self._observed if causes.in_debugger(one.stack)}:
            self._forget()
            self._debugged = debugged
            self._detector.excuse(now)
            return
        states = [worker.state for worker in self._observed]
        self._verdict = verdict = causes.judge(states)
        self._say(f"the workers here hang: no step for {seconds:.0f} s (limit {limit:.0f} s); where they are, innermost call first:")
        for worker in self._observed:
            self._say(f"  rank {worker.rank} (pid {worker.pid}, {worker.steps} steps): {causes.describe(worker)}")
        workers = [{"rank": one.rank, "pid": one.pid, "steps": one.steps, "stack": causes.traceback(one)} for one in self._observed]
        self._write(events.Hang(round(seconds, 3), round(limit, 3), sorted(verdict.ranks), workers))
        self.hangs += 1
        self._act_at = now
        if self._meet is not None and verdict.how != causes.STOPPED:
            self._reports, self._listen_at = HangReports(self._meet(), states), now
            self._act_at = now + self._detector.interval + SHARING + verdict.hold

    def _ask_py_spy(self) -> bool:
        """Ask for the stacks of the workers that have not written theirs. Return whether there will be answers; asks once in a hang."""
        silent = [one for one in self._observed if not one.stack and not one.stopped]
        if self._questions is not None or not silent or (path := py_spy.program()) is None:
            return False
        self._questions = {}
        for worker in silent:
            with suppress(OSError):
                self._questions[worker.local_rank] = py_spy.StackQuestion(path, worker.pid)
        return bool(self._questions)

    def _listen(self, now: float) -> None:
        """Take the verdict on the reports of all nodes in place of this node's own, once it is there."""
        if self._reports is None or self._heard or now < self._listen_at:
            return
        self._listen_at = now + LISTEN
        if (verdict := self._reports.verdict) is None:
            return
        self._heard = True
        named = tuple(worker.rank for worker in self._observed if worker.rank in verdict.ranks)
        many = "s" * (len(verdict.ranks) > 1)
        self._say(f"all nodes hang; the cause is rank{many} {', '.join(map(str, verdict.ranks))}: {causes.WORDS[verdict.how]}")
        if named:
            self._verdict, self._act_at = HangVerdict(named, verdict.how), now
        elif self._verdict is not None:  # another node ends the round, if it still can
            self._verdict = HangVerdict(self._verdict.ranks, causes.WAITING)
            self._act_at = now + self._verdict.hold

    def _observe(self, local_rank: int, process: Process) -> Observed:
        observed = self.stacks.observe(local_rank, process)
        question = (self._questions or {}).pop(local_rank, None)
        return replace(observed, stack=question.end()) if question else observed

    def _act(self, seconds: float) -> None:
        """End the workers that are the cause, as far as known."""
        verdict, observed = self._verdict, self._observed
        assert verdict is not None
        blame = Blame.VICTIM if verdict.how == causes.WAITING and self._meet else Blame.OWN_FAULT
        self.stop_watching()
        for worker in observed:
            if worker.rank in verdict.ranks:
                why = " (stopped by a signal)" if worker.stopped else ""
                note = f"hung: no step for {seconds:.0f} s{why}"
                self._on_hung(worker.local_rank, blame, note, causes.traceback(worker), seconds)

"""Goes through a plan of faults on the running job: does each when it is due, and watches until the job goes on."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elastirun.agent.failures.exit_codes import ExitCode
from elastirun.agent.processes.proc import ProcessStat
from elastirun.chaos import faults, watch
from elastirun.chaos.plan import FREEZE, OF_WORKERS, PlannedFault, all_train, choose, missing
from elastirun.chaos.recovery import PAUSE, Recovery, Terms, clock, is_gone, states
from elastirun.chaos.verdict import FaultOutcome
from elastirun.chaos.watch import RunningAgent


@dataclass
class Play:
    """One run of the command. ``stopped``: why it has ended before the end of the plan."""

    job: str
    terms: Terms
    say: Callable[[FaultOutcome], object]
    outcomes: list[FaultOutcome] = field(default_factory=list)
    stopped: str = ""
    last: Recovery | None = None  # of the last fault, whose loss is known better after some more steps
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)  # the agents that this command has started
    known: dict[int, ProcessStat] = field(default_factory=dict)  # agents, by pid

    def run(self, plan: Sequence[PlannedFault], lasts: float) -> None:
        """Do the faults of the plan until one goes wrong, or the job ends; ``lasts`` seconds, or longer where the job takes its time."""
        begun = time.monotonic()
        for fault in plan:
            agents = self._calm(begun + fault.after, whole=fault.kind not in OF_WORKERS)
            if not agents:
                return
            begun = max(begun, time.monotonic() - fault.after)  # after a fault that is late the others are as late
            self.outcomes.append(self._one(fault, agents))
            self.say(self.outcomes[-1])
            if self.outcomes[-1].trouble:
                return
        self._calm(begun + lasts)

    def look(self) -> tuple[RunningAgent, ...]:
        """Return the agents of the job here, and note their processes."""
        for child in self.started:
            child.poll()  # else it stays a zombie
        agents = watch.look(self.job, [child.pid for child in self.started])
        self.known |= {agent.process.pid: agent.process for agent in agents}
        return agents

    def _calm(self, until: float, whole: bool = False) -> tuple[RunningAgent, ...]:
        """Wait for the moment ``until``, then for a further step. Return the agents then; none: ``stopped`` or an outcome says why.

        ``whole``: wait also until the other nodes here are in the round again, but not longer than for a step.
        """
        stamp, limit = 0, 0.0
        for agents, now in self._looks():
            latest = watch.last_stamp(agents)
            if now >= until and not limit:
                stamp, limit = latest, now + self.terms.limit
            elif limit and latest > stamp and all_train(agents) and not (whole and missing(agents) and now < limit):
                return agents
            elif limit and now > limit:
                trouble = f"no further step within {self.terms.limit:g} s ({states(agents)})"
                self.stopped = "" if self._amend(trouble=trouble) else trouble
                break
        return ()

    def _looks(self) -> Iterator[tuple[tuple[RunningAgent, ...], float]]:
        """Yield the agents and the time of each look while the job goes on. Then ``stopped`` or an outcome says why it does not."""
        while True:
            agents, now = self.look(), time.monotonic()
            if self.last is not None:
                self.last.look(agents)
                self._amend(lost=self.last.step.lost if self.last.step else None)
            ended = [child.returncode or 0 for child in self.started]
            if failed := [code for code in ended if code > 0 and code != ExitCode.signalled(signal.SIGTERM)]:
                self._amend(trouble=f"an agent that was started again has ended with exit code {failed[-1]}")
                return
            yield agents, now
            if not self._any_lives():
                self.stopped = f"the job has ended at {clock()}"
                return
            time.sleep(self.last.pause if self.last else PAUSE)

    def _amend(self, **changes: Any) -> bool:
        """Correct the outcome of the last fault that was done. Return whether there is one."""
        done = [i for i, one in enumerate(self.outcomes) if not one.left_out]
        for i in done[-1:]:
            self.outcomes[i] = replace(self.outcomes[i], **changes)
        return bool(done)

    def _any_lives(self) -> bool:
        """Return whether one of the agents that were seen still runs."""
        return not all(map(is_gone, self.known.values()))

    def _one(self, fault: PlannedFault, before: tuple[RunningAgent, ...]) -> FaultOutcome:
        """Do a fault to one of the agents ``before``, and return what has come of it."""
        at = clock()
        victim = choose(fault, before, self.terms.comes_back)
        if isinstance(victim, str):
            return FaultOutcome(at, fault.kind, "-", left_out=victim)
        outcome = FaultOutcome(at, fault.kind, victim.name)
        try:
            restarts = self.terms.restart is not None and fault.kind not in OF_WORKERS
            launch = faults.Launch.of(victim.pid) if restarts else None
        except OSError as error:
            return replace(outcome, left_out=f"its command line cannot be read: {error.strerror}")
        since = time.monotonic_ns()
        hit = faults.do(fault.kind, victim)
        if not hit:
            if launch is not None:
                launch.close()
            return replace(outcome, left_out="it has ended by itself")
        recovery = self.last = Recovery(self.terms, outcome, victim, before, since, hit[0] if fault.kind == FREEZE else None, launch)
        try:
            return self._await(recovery)
        except KeyboardInterrupt:
            self.outcomes.append(replace(outcome, left_out="interrupted, and undone"))
            raise
        finally:
            recovery.finish()

    def _await(self, recovery: Recovery) -> FaultOutcome:
        """Wait until the job goes on, or does not within the limit."""
        while True:
            if child := recovery.act():
                self.started.append(child)
            if outcome := recovery.judge(self.look(), self._any_lives()):
                return outcome
            time.sleep(recovery.pause)

"""The time after one fault: the frozen worker is continued, the agent started again, the next step awaited."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastirun.agent.processes import proc
from elastirun.agent.processes.proc import ProcessStat
from elastirun.chaos import watch
from elastirun.chaos.faults import Launch
from elastirun.chaos.plan import FaultTarget
from elastirun.chaos.verdict import FaultOutcome
from elastirun.chaos.watch import RunningAgent, SeenStep
from elastirun.worker.progress_page import NS

PAUSE = 0.25  # seconds between two looks: what is measured are the stamps of the steps, whenever they are read


@dataclass(frozen=True)
class Terms:
    """Options for each fault, in seconds. ``restart``: until an agent that has ended is started again; None: this command does not."""

    freeze: float
    limit: float  # for the next step, and for an agent that comes back
    restart: float | None
    supervised: bool  # somebody else starts agents again

    @property
    def comes_back(self) -> bool:
        """Whether an agent that ends is started again."""
        return self.supervised or self.restart is not None


@dataclass
class Recovery:
    """The wait after one fault. ``before``: the agents when it began, at ``since`` on the clock of the stamps."""

    terms: Terms
    outcome: FaultOutcome
    victim: FaultTarget
    before: Sequence[RunningAgent]
    since: int
    frozen: ProcessStat | None  # the worker to continue
    launch: Launch | None  # of the agent to start again
    continued: int = 0  # when the frozen worker was continued, on the same clock
    child: subprocess.Popen[bytes] | None = None  # the agent that was started again
    step: SeenStep | None = None

    def __post_init__(self) -> None:
        self._gone_at: float | None = None  # when the agent was seen to have ended
        more = self.terms.freeze if self.frozen else self.terms.restart if self.launch else None
        self._deadline = self.since / NS + self.terms.limit + (more or 0.0)

    def act(self) -> subprocess.Popen[bytes] | None:
        """Do what is due. Return the agent that has been started now. Errors: OSError."""
        now = time.monotonic()
        if self.frozen and not self.continued and now >= self.since / NS + self.terms.freeze:
            self.thaw()
        if self.launch is None or self.child is not None or self.terms.restart is None:
            return None
        if self._gone_at is None and is_gone(self.victim.agent.process):
            self._gone_at = now
        if self._gone_at is None or now < self._gone_at + self.terms.restart:
            return None
        self._deadline = now + self.terms.limit
        self.child = self.launch.start()
        return self.child

    @property
    def pause(self) -> float:
        """Seconds until the next look: few where a page is to be seen at a certain moment.

        After a freeze nothing tells the first of the steps that the page has counted since. One step that seems lost is none if it was
        stamped and not yet numbered, as it is most of the time in a script that numbers its steps late.
        """
        closely = bool(self.continued) if self.step is None else self.step.lost == 1
        return PAUSE / 10 if closely else PAUSE

    def finish(self) -> None:
        """Undo what can be undone, also after Ctrl-C: continue the worker, start the agent that has ended. Errors: OSError."""
        self.thaw()
        if self.launch is not None and self.child is None:
            if is_gone(self.victim.agent.process):
                self.launch.start()
            else:
                self.launch.close()

    def thaw(self) -> None:
        """Continue the frozen worker. One that the agent has killed meanwhile gets no signal."""
        if self.frozen and not self.continued:
            self.continued = time.monotonic_ns()
            proc.kill(self.frozen, signal.SIGCONT)

    def look(self, agents: Sequence[RunningAgent]) -> None:
        """Note the next step, as the pages show it now."""
        thawed = (self.frozen.pid, self.continued) if self.frozen and self.continued else None
        self.step = better(self.step, watch.next_step(self.before, agents, self.since, thawed))

    def judge(self, agents: Sequence[RunningAgent], any_lives: bool) -> FaultOutcome | None:
        """Return the outcome by how the ``agents`` are now; None: it is not known yet. ``any_lives``: an agent that was seen still runs."""
        self.look(agents)
        step, trouble = self.step, self._trouble(agents, any_lives)
        if trouble is None:
            return None
        return replace(self.outcome, seconds=step.seconds if step else None, lost=step.lost if step else None, trouble=trouble)

    def _trouble(self, agents: Sequence[RunningAgent], any_lives: bool) -> str | None:
        """Return what is wrong; empty: nothing, the job goes on; None: it is not known yet."""
        comes_back = self.frozen is None and self.victim.pid == self.victim.agent.process.pid and self.terms.comes_back
        others = [agent for agent in agents if agent.process.pid != self.victim.pid]
        if self.step and (not comes_back or len(others) >= len(self.before)):
            late = self.step.seconds > self.terms.limit + ((self.terms.restart or 0.0) if self.child else 0.0)
            return f"the next step came later than {self.terms.limit:g} s" if late else ""
        if self.child is not None and self.child.returncode is not None:
            return f"the agent that was started again has ended with exit code {self.child.returncode}"
        if not comes_back and not any_lives:
            return "the job has ended"
        if time.monotonic() > self._deadline:
            return f"{'the agent has not come back' if self.step else 'no step'} within {self.terms.limit:g} s ({states(agents)})"
        return None


def states(agents: Sequence[RunningAgent]) -> str:
    """Return in words how the agents are here."""
    return ", ".join(f"{agent.node}: {agent.state}" for agent in agents) or "no agent of the job answers here"


def clock() -> str:
    """Return the time of the day."""
    return time.strftime("%H:%M:%S")


def is_gone(process: ProcessStat) -> bool:
    """Return whether the process has ended."""
    now = proc.look(process.pid)
    return now is None or not now.alive or now.started != process.started


def better(one: SeenStep | None, other: SeenStep | None) -> SeenStep | None:
    """Return the earlier step. Of the same step the smaller loss: a script may number a step long after its stamp, or never."""
    if one is None or other is None:
        return one or other
    if one.at != other.at:
        return min(one, other, key=lambda seen: seen.at)
    lost = [seen.lost for seen in (one, other) if seen.lost is not None]
    return replace(one, lost=min(lost, default=None))

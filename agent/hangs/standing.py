"""Says once in a round which workers have ended, step or wait, where that is odd: ``Standing``. The agent's loop calls all methods."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum

from elastirun import clock
from elastirun.agent.hangs import causes
from elastirun.agent.hangs.stacks import WAIT_LIMIT, Stacks
from elastirun.agent.part import NodeRound, Part
from elastirun.agent.workers.workers import Workers

PERIOD = 15.0  # seconds without a first step, or since a worker has ended, that are worth a line; most scripts begin to train sooner


class LineDue(Enum):
    """The part of a round in which its line is due."""

    FIRST_STEP = 1  # the first look of the round is still to come
    RUNNING = 2
    ASKED = 3  # the workers write their stacks
    OVER = 4  # the line was said, or no round runs


class Standing(Part):
    """Looks at the workers of a round each ``PERIOD``. ``expects_steps``: the command says that the script stamps its steps."""

    def __init__(self, workers: Workers, stacks: Stacks, expects_steps: bool, say: Callable[[str], None]) -> None:
        self._workers, self._stacks, self._expects_steps, self._say = workers, stacks, expects_steps, say
        self._phase, self._due = LineDue.OVER, math.inf
        self._finished = 0  # workers that had ended with 0 at the last look

    def workers_started(self, round: NodeRound) -> None:
        if round.record.world_size > 1:
            self.start(clock.now())

    def start(self, now: float) -> None:
        """Begin to look: the workers of a round were started at ``now``."""
        self._phase, self._due, self._finished = LineDue.FIRST_STEP, now + PERIOD, 0

    def stop_watching(self) -> None:
        self._phase, self._due = LineDue.OVER, math.inf

    def tick(self, now: float) -> float:
        """Do what is due. Return when to be called next."""
        if now < self._due:
            return self._due
        if self._phase is LineDue.ASKED:
            self._tell()
            self.stop_watching()
        elif self._is_odd():
            self._stacks.ask()
            self._phase, self._due = LineDue.ASKED, now + WAIT_LIMIT
        else:
            self._phase, self._due = LineDue.RUNNING, now + PERIOD
            self._finished = len(self._workers.finished)
        return self._due

    def _is_odd(self) -> bool:
        """Return whether others run on although a worker has ended some time ago, or have made no first step."""
        if not self._workers.processes:
            return False
        stepped = [self._stacks.steps(local_rank) > 0 for local_rank in self._workers.processes]
        late = self._phase is LineDue.FIRST_STEP and not all(stepped) and (self._expects_steps or any(stepped))
        early = self._phase is LineDue.FIRST_STEP and len(self._workers.finished) > 0
        return late or early or self._finished > 0

    def _tell(self) -> None:
        running = [self._stacks.observe(*one) for one in self._workers.processes.items()]
        if running:
            self._say(f"where the workers here are: {causes.standing(running, sorted(self._workers.finished))}")

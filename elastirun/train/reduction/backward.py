"""The phases of one backward, and all transitions between them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from torch import nn

from elastirun.train import autograd_engine


class BackwardPhase(str, Enum):
    """The phases of a backward."""

    STARTED = "the engine runs, and no gradient of the module is certain to come"
    KEEPING = "gradients are accumulated and stay local"
    COLLECTING = "gradients are accumulated and copied into buckets, and full buckets are launched"
    REDUCING = "the engine is done; the remaining buckets are launched, and all of them are awaited"
    DRAINING = "an exception ended the backward; this rank takes part in its reduction without data, because the others wait for it"
    DONE = "every gradient is in its place"
    EMPTY = "no gradient was accumulated, so this was no backward of the module"
    BROKEN = "an exception ended the reduction"


class BackwardTrigger(str, Enum):
    """The cause of a transition."""

    GRADIENT_TO_KEEP = "a gradient is accumulated in a backward that does not reduce"
    GRADIENT_TO_REDUCE = "a gradient is accumulated in a backward that reduces"
    GRAPH_DONE = "the engine has run the whole graph"
    INTERRUPTED = "an exception ended the run of the engine"
    NO_BACKWARD = "this rank has no data, or its gradients are there"
    REDUCED = "all buckets are reduced"
    FAILED = "an exception was raised within the reduction"


STARTED, KEEPING, COLLECTING, REDUCING, DRAINING, DONE, EMPTY, BROKEN = BackwardPhase

TRANSITIONS: dict[tuple[BackwardPhase, BackwardTrigger], BackwardPhase] = {
    (STARTED, BackwardTrigger.GRADIENT_TO_KEEP): KEEPING,
    (STARTED, BackwardTrigger.GRADIENT_TO_REDUCE): COLLECTING,
    (STARTED, BackwardTrigger.GRAPH_DONE): EMPTY,
    (STARTED, BackwardTrigger.INTERRUPTED): EMPTY,
    (STARTED, BackwardTrigger.NO_BACKWARD): REDUCING,
    (STARTED, BackwardTrigger.FAILED): BROKEN,
    (KEEPING, BackwardTrigger.GRAPH_DONE): DONE,
    (KEEPING, BackwardTrigger.INTERRUPTED): DONE,
    (COLLECTING, BackwardTrigger.GRAPH_DONE): REDUCING,
    (COLLECTING, BackwardTrigger.INTERRUPTED): DRAINING,
    (COLLECTING, BackwardTrigger.FAILED): BROKEN,
    (REDUCING, BackwardTrigger.REDUCED): DONE,
    (REDUCING, BackwardTrigger.FAILED): BROKEN,
    (DRAINING, BackwardTrigger.REDUCED): DONE,
    (DRAINING, BackwardTrigger.FAILED): BROKEN,
}


class Backward:
    """One backward of the module, from its first node in the graph to the end of its reduction.

    ``reduces``: whether its gradients are reduced, decided when it starts.
    """

    def __init__(self, reduces: bool) -> None:
        self.phase = STARTED
        self.task = autograd_engine.task()
        self.reduces = reduces
        self._versions: list[int | None] = []  # of the parameters' gradients when the backward started
        self._history: list[str] = []

    def advance(self, trigger: BackwardTrigger) -> BackwardPhase:
        """Enter the phase that follows and return it. An impossible transition is a bug; the error gives the transitions before it."""
        try:
            self.phase = TRANSITIONS[self.phase, trigger]
        except KeyError:
            history = " > ".join([STARTED.name, *self._history])
            what = f"{trigger.name} in phase {self.phase.name}"
            raise RuntimeError(f"impossible transition of a backward: {what}; history: {history}") from None
        self._history.append(f"{trigger.name} > {self.phase.name}")
        return self.phase

    def accumulate(self) -> None:
        """Enter the phase in which gradients are accumulated."""
        self.advance(BackwardTrigger.GRADIENT_TO_REDUCE if self.reduces else BackwardTrigger.GRADIENT_TO_KEEP)

    def remember(self, params: Sequence[nn.Parameter]) -> None:
        """Note the versions of the gradients, for ``has_accumulated``."""
        self._versions = _versions(params)

    def has_accumulated(self, params: Sequence[nn.Parameter]) -> bool:
        """Return whether any gradient was accumulated since ``remember``. Not every parameter has a hook that would tell."""
        return self._versions != _versions(params)


def _versions(params: Sequence[nn.Parameter]) -> list[int | None]:
    return [None if param.grad is None else param.grad._version for param in params]


class ReduceSchedule:
    """Counts backwards and decides which of them reduce: every n-th one, outside of ``no_sync()``."""

    def __init__(self) -> None:
        self.sync = True  # reduce at all
        self.every = 1  # reduce in each backward of this number
        self.backwards = 0  # so far

    def set_sync(self, sync: bool) -> bool:
        """Reduce from now on, or do not; return what held before."""
        before, self.sync = self.sync, sync
        return before

    @property
    def always_reduces(self) -> bool:
        """Whether every backward reduces."""
        return self.sync and self.every == 1

    def will_reduce(self) -> bool:
        """Return whether the next backward reduces."""
        return self.sync and (self.backwards + 1) % self.every == 0

    def count(self) -> bool:
        """Count a backward that begins; return whether it reduces."""
        reduces = self.will_reduce()
        self.backwards += 1
        return reduces

    def keep_requests(self, old: ReduceSchedule) -> None:
        """Do what the user has asked of ``old``."""
        self.sync, self.every = old.sync, old.every

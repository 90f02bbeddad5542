"""Rules for which saves go to the disk: those of every so-many-th step, or those after so much time. All ranks decide alike."""

from __future__ import annotations

import time
from datetime import timedelta

from elastirun.train.checkpoints.ranks import Ranks
from elastirun.train.errors import WrongUse

LOOK = 1_000_000  # microseconds from one exchange about the time to the next, about; an exchange takes a fraction of a millisecond


class EverySteps:
    """A save is due when its step is a multiple of ``steps``."""

    begun = 0  # when the last save to the disk began; nothing depends on it

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def is_due(self, step: int, ranks: Ranks) -> bool:
        """Return whether the save of ``step`` goes to the disk. Every rank calls it at the same point."""
        return step % self.steps == 0

    def begin(self) -> None:
        """Note that a save to the disk begins."""


class EveryPeriod:
    """A save is due when ``period`` has passed on rank 0's clock since the last save began, or since this object was made.

    The ranks must answer alike, so rank 0 tells the others its time. An exchange in each step would cost too much in short steps. Each
    exchange therefore settles on all ranks which call has the next one: as many calls later as take ``LOOK`` at the recent pace, or
    what is left of the period if that is less, and at most twice as many as last time.
    """

    def __init__(self, period: timedelta) -> None:
        self._period = period // timedelta(microseconds=1)
        self.begun = self._looked = _now()  # the former may be set to that of an earlier save, which another one of these saw begin
        self._calls = 0  # since the last exchange
        self._pause = 1  # calls from the last exchange to the next one

    def is_due(self, step: int, ranks: Ranks) -> bool:
        """Return whether the save of ``step`` goes to the disk. Every rank calls it at the same point."""
        self._calls += 1
        if self._calls < self._pause:
            return False
        now = _now()
        passed, recent = ranks.gather([now - self.begun, now - self._looked])[0]
        left = self._period - passed
        self._pause = max(1, min(min(left, LOOK) * self._calls // max(recent, 1), 2 * self._calls))
        self._looked, self._calls = now, 0
        return left <= 0

    def begin(self) -> None:
        """Note that a save to the disk begins."""
        self.begun = _now()


def due(every: int | timedelta) -> EverySteps | EveryPeriod:
    """Return the rule for ``every``. Raises TrainError for what is no number of steps and no time."""
    if isinstance(every, timedelta) and every > timedelta(0):
        return EveryPeriod(every)
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise WrongUse(f"every must be a whole number, 1 or more, or a timedelta above zero, not {every!r}")
    return EverySteps(every)


def _now() -> int:
    """Return microseconds of which only differences have a meaning."""
    return time.monotonic_ns() // 1000

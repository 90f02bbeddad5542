"""The checkpointer of the present world: each world has its own, which goes on from the last save of the one before."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from elastirun.progress import saving
from elastirun.train.arguments import verify_type
from elastirun.train.checkpoints.checkpointer import Checkpointer
from elastirun.train.checkpoints.ranks import begin_world
from elastirun.train.errors import CheckpointError
from elastirun.train.state.train_state import TrainState

LAST_SAVE = 1800.0  # seconds for ``publish``, more than the writers wait for the slowest rank's disk


class WorldCheckpoints:
    """Saves ``state`` in one world after the other. ``make``: returns the ``Checkpointer`` of the world that begins; None: none is made."""

    def __init__(self, state: TrainState, make: Callable[[], Checkpointer] | None) -> None:
        self._state, self._make = state, make
        self.current: Checkpointer | None = None  # of the present world
        self._last_save: tuple[int, int, int] | None = None  # in the worlds before this one
        self._failed = False  # the last save could not be made, for another reason than a lost peer as far as this rank knows

    def begin(self) -> None:
        """Make the checkpointer of a world."""
        if self._make is None:
            return
        begin_world()
        self.current = self._make()
        verify_type(self.current, Checkpointer, "what checkpoints() returns", "a Checkpointer")
        if self._last_save is not None:
            self.current.continue_from(self._last_save)  # or none would be due where worlds change more often

    def restore(self) -> None:
        """Restore the newest checkpoint, if there is one."""
        if self.current is not None:
            self.current.restore(self._state)

    def offer(self) -> None:
        """Save the state if that is due."""
        if self.current is not None and self.current.save(self._state.step, self._state):
            self._failed = False

    def publish(self) -> None:
        """Save the state, unless it comes from the newest checkpoint, and wait until it is published."""
        if self.current is None or self.current.restored == self._state.step:  # then nothing is opened for it either
            return
        self.current.save(self._state.step, self._state, now=True)
        with saving():
            self.current.wait(LAST_SAVE)
        self._failed = False

    def fails_again(self) -> bool:
        """Note that a save cannot be made. Return whether it is the second time in a row: another round would change nothing."""
        again, self._failed = self._failed, True
        return again

    def close(self) -> None:
        """Publish nothing more of this world."""
        if self.current is not None:
            self._last_save = self.current.last_save
            with suppress(CheckpointError):  # the next world saves again
                self.current.close(0.0)
            self.current = None

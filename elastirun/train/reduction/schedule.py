"""The decision which backwards reduce gradients: every n-th, and none within ``no_sync()``."""

from __future__ import annotations


class Schedule:
    """Counts backwards and decides which of them reduce: every n-th one, outside of ``no_sync()``."""

    def __init__(self) -> None:
        self.sync = True  # reduce at all
        self.every = 1  # reduce in each backward of this number
        self.backwards = 0  # so far

    def set_sync(self, sync: bool) -> bool:
        """Reduce from now on, or do not; return what held before."""
        before, self.sync = self.sync, sync
        return before

    def reduce_every(self, n: int) -> None:
        """Reduce in each ``n``-th backward from now on."""
        self.every, self.backwards = n, 0

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

    def take_back(self) -> None:
        """Undo ``count`` for a backward that has accumulated nothing."""
        self.backwards -= 1

    def keep_requests(self, old: Schedule) -> None:
        """Do what the user has asked of ``old``."""
        self.sync, self.every = old.sync, old.every

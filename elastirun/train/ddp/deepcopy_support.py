"""Copies of a module (``copy.deepcopy``, pickles): a copy gets its reducer in its own first backward."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from elastirun.train import autograd_engine

if TYPE_CHECKING:
    from elastirun.train.ddp.module import DistributedDataParallel

# Attributes that belong to one process and one group, so that a copy does not have them.
TIED = (
    "process_group",
    "device_mesh",
    "_made",
    "_first_backward",
    "_named",
    "_end_own_group",
    "_hook",
    "_optimizer",
    "_drops_failed_steps",
)


class FirstBackward:
    """Listens for the first backward of a copy, in which the copy gets its reducer."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)

    def backward_starts(self) -> None:
        """Give the copy its reducer, and let that begin the backward."""
        ddp = self._ddp()
        if ddp is not None and ddp._without_reducer and autograd_engine.accumulates():
            ddp._reducer.backward_starts()

    def gradient_ready(self, index: int) -> None:
        """Do nothing: no parameter has a hook yet."""

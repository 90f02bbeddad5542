"""Copies of a module (``copy.deepcopy``, pickles): a copy gets its reducer in its own first backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable

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
    """Listens for the first backward of a copy: ``begin`` gives the copy its reducer, and lets that begin the backward."""

    def __init__(self, begin: weakref.WeakMethod[Callable[[], None]]) -> None:
        self._begin = begin

    def backward_starts(self) -> None:
        if (begin := self._begin()) is not None:
            begin()

    def gradient_ready(self, index: int) -> None:
        """Do nothing: no parameter has a hook yet."""

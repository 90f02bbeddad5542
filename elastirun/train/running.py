"""Rank 0's running statistics (of normalizing layers) travel with the control words, so that they cost no collective of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .flat import make_views


class RunningStatistics:
    """``buffers`` of this rank (the ``first``, whose values count, or another), and rank 0's values as the last reduction brought them."""

    def __init__(self, buffers: Sequence[Tensor], first: bool) -> None:
        self._buffers, self._first = list(buffers), first
        self.numel = sum(buffer.numel() for buffer in buffers)
        self._tail = torch.empty(0)  # where they travel
        self._places: list[Tensor] = []  # … as views of it
        self._arrived: list[Tensor] = []
        self._factor = 1.0
        self._versions: list[int] = []  # of the buffers, when the values arrived

    def lay(self, tail: Tensor) -> None:
        """From now on they travel in ``tail``, ``numel`` elements; nothing lies in the former memory any more."""
        self._arrived = [value.clone() for value in self._arrived]
        self._tail, self._places = tail, make_views(self._buffers, tail)

    def go_on_from(self, old: RunningStatistics) -> None:
        if [*map(id, self._buffers)] == [*map(id, old._buffers)]:
            self._arrived, self._factor, self._versions = [value.clone() for value in old._arrived], old._factor, old._versions

    def write(self) -> None:
        if self._first and self._buffers:
            torch._foreach_copy_(self._places, self._buffers)
        else:
            self._tail.zero_()

    def arrive(self, factor: float) -> None:
        """A reduction has brought rank 0's values, divided by ``factor``."""
        self._arrived, self._factor, self._versions = self._places, factor, [buffer._version for buffer in self._buffers]

    def adopt(self) -> None:
        """Take them over, unless something else has written the buffers since: a checkpoint that was loaded, a recalibration."""
        if not self._first and self._arrived and self._versions == [buffer._version for buffer in self._buffers]:
            for buffer, value in zip(self._buffers, self._arrived, strict=True):
                buffer.copy_(value * self._factor)
            self._versions = [buffer._version for buffer in self._buffers]

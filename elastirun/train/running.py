"""Rank 0's running statistics (of normalizing layers) travel with the control words, so that they cost no collective of their own."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from .flat import make_views

EXACT = (torch.float32, torch.float16, torch.bfloat16)  # what float32, as which they travel, holds
Place = tuple[nn.Module, str]  # a layer, and the name of one of its buffers: the tensor there may be replaced


def places(module: nn.Module, ignored: Collection[str] = ()) -> list[Place]:
    """Where ``module`` has statistics that can travel. Counts of batches are exact up to 2**24."""
    layers = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.modules.batchnorm._NormBase)]
    return [
        (layer, buffer)
        for name, layer in layers
        for buffer in ("running_mean", "running_var", "num_batches_tracked")
        if (value := getattr(layer, buffer)) is not None and f"{name}.{buffer}".lstrip(".") not in ignored
        if value.dtype in EXACT or not value.is_floating_point()
    ]


class RunningStatistics:
    """Those at ``places`` of this rank (the ``first``, whose values count, or another), and rank 0's as the last reduction brought them."""

    def __init__(self, places: Sequence[Place], first: bool) -> None:
        self._places, self._first = list(places), first
        self._numels = [buffer.numel() for buffer in self.buffers]
        self.numel = sum(self._numels)
        self._tail = torch.empty(0, device="cpu")  # where they travel
        self._views: list[Tensor] = []  # … as views of it
        self._arrived: list[Tensor] = []
        self._factor = 1.0
        self._written: list[tuple[int, int]] = []  # what the buffers were when the values arrived

    @property
    def buffers(self) -> list[Tensor]:
        return [getattr(layer, name) for layer, name in self._places]

    @property
    def in_evaluation(self) -> bool:
        """Does a layer use its statistics, though the module is trained? A frozen one does."""
        return any(not layer.training for layer, _ in self._places)

    def lay(self, tail: Tensor) -> None:
        """From now on they travel in ``tail``, ``numel`` elements; nothing lies in the former memory any more."""
        self._arrived = [value.clone() for value in self._arrived]
        self._tail, self._views = tail, make_views(self.buffers, tail)

    def go_on_from(self, old: RunningStatistics) -> None:
        if self._places == old._places:
            self._arrived, self._factor, self._written = [value.clone() for value in old._arrived], old._factor, old._written

    def write(self) -> None:
        if self._first and self._places:
            torch._foreach_copy_(self._views, self.buffers)
        else:
            self._tail.zero_()

    def arrive(self, factor: float) -> None:
        """A reduction has brought rank 0's values, divided by ``factor``."""
        self._arrived, self._factor, self._written = self._views, factor, _versions(self.buffers)

    def adopt(self) -> None:
        """Take them over, unless something else has written the buffers since: a checkpoint that was loaded, a recalibration."""
        buffers = self.buffers
        if not self._first and self._arrived and self._written == _versions(buffers):
            for buffer, value in zip(buffers, self._arrived, strict=True):
                buffer.copy_(value * self._factor if buffer.is_floating_point() else (value * self._factor).round())
            self._written = _versions(buffers)


def _versions(buffers: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(id(buffer), buffer._version) for buffer in buffers]

"""Rank 0's running statistics (of normalizing layers) travel with the control words, so that they cost no collective of their own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from .autograd_engine import versions_kept
from .bucket_memory import make_views

EXACT = (torch.float32, torch.float16, torch.bfloat16)  # what float32, as which they travel, holds
Place = tuple[nn.Module, str]  # a layer, and the name of one of its buffers: the tensor there may be replaced


def places(module: nn.Module, ignored: Collection[str] = ()) -> list[Place]:
    """Where ``module`` has statistics that can travel. Counts of batches are exact up to 2**24."""
    layers = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.modules.batchnorm._NormBase)]
    return [
        (layer, buffer)
        for name, layer in layers
        for buffer in ("running_mean", "running_var", "num_batches_tracked")
        if (value := layer._buffers.get(buffer)) is not None and f"{name}.{buffer}".lstrip(".") not in ignored
        if value.dtype in EXACT or not value.is_floating_point()
    ]


class RunningStatistics:
    """The statistics at ``places`` of this rank; on ranks other than the ``first``, also rank 0's as the last reduction brought them.

    Ranks other than 0 take rank 0's values over when they arrive, and again where a forward has changed them since and they are about to be
    used (``adopt``, ``before_forward``), unless somebody else has written the buffers: a checkpoint that was loaded, a recalibration.
    """

    def __init__(self, places: Sequence[Place], first: bool) -> None:
        self._places, self._first = list(places), first
        self._layers = list(dict.fromkeys(layer for layer, _ in places))
        self.numel = sum(buffer.numel() for buffer in self.buffers)
        self.at_once = True  # take values over when they arrive
        self._tail = torch.empty(0, device="cpu")  # where they travel
        self._views: list[Tensor] = []  # of the tail: what rank 0 sends
        self._kept = self._tail  # what has arrived, in memory that no reduction writes to
        self._arrived: list[Tensor] = []  # views of it, one for each buffer
        self._counts: list[Tensor] = []  # those of whole numbers
        self._noted: list[tuple[int, int]] = []  # versions of the buffers, as reductions and forwards left them
        self._taken: list[tuple[int, int]] = []  # versions of the buffers when they were last rank 0's
        self._untouched = False  # when the present forward began, the buffers were as noted

    @property
    def buffers(self) -> list[Tensor]:
        return [cast(Tensor, layer._buffers[name]) for layer, name in self._places]  # nn.Module's own way takes 1 µs each

    def use_memory(self, tail: Tensor) -> None:
        """Let the values travel in ``tail``, ``numel`` elements, from now on."""
        self._tail, self._views = tail, make_views(self.buffers, tail)

    def continue_from(self, old: RunningStatistics) -> None:
        if self._places == old._places:
            self.at_once, self._kept, self._arrived, self._counts = old.at_once, old._kept, old._arrived, old._counts
            self._noted, self._taken, self._untouched = old._noted, old._taken, old._untouched

    def stop(self) -> None:
        """Leave the buffers alone from now on: a hook of the user takes care of them. The place in the tail stays."""
        self._places, self._layers, self._views, self._arrived = [], [], [], []

    def write(self) -> None:
        if self._first and self._places:
            torch._foreach_copy_(self._views, self.buffers)
        else:
            self._tail.zero_()

    def receive(self, factor: float) -> None:
        """Keep rank 0's values, which a reduction has brought divided by ``factor``, and take them over."""
        if self._first or not self._places:
            return
        buffers = self.buffers
        if not self._arrived:
            self._kept = torch.empty_like(self._tail)
            self._arrived = make_views(buffers, self._kept)
            self._counts = [value for buffer, value in zip(buffers, self._arrived, strict=True) if not buffer.is_floating_point()]
        torch.mul(self._tail, factor, out=self._kept)
        if factor != 1.0 and self._counts:
            torch._foreach_round_(self._counts)
        self._noted = _versions(buffers)
        if self.at_once:
            self._take_over(buffers)

    def adopt(self) -> None:
        """Take rank 0's values over once more where only forwards have written the buffers since they arrived."""
        buffers = self.buffers
        if self._arrived and self._noted == _versions(buffers) != self._taken:
            self._take_over(buffers)

    def before_forward(self, at_once: bool) -> None:
        """A layer in evaluation is about to use rank 0's values, as a frozen one does in training.

        ``at_once``: take over the values of the next reduction when they arrive.
        """
        self.at_once = at_once
        if self._arrived:
            if any(not layer.training for layer in self._layers):
                self.adopt()
            self._untouched = self._noted == _versions(self.buffers)

    def after_forward(self) -> None:
        """What the wrapped module's own forward has written is nobody else's write."""
        if self._arrived and self._untouched:
            self._noted = _versions(self.buffers)

    def forget(self) -> None:
        """The buffers have been made the same on all ranks: they are newer than what has arrived."""
        self._noted = []

    def _take_over(self, buffers: list[Tensor]) -> None:
        with torch.no_grad(), versions_kept(buffers):
            torch._foreach_copy_(buffers, self._arrived)
        self._taken = _versions(buffers)


def _versions(buffers: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(id(buffer), buffer._version) for buffer in buffers]

"""Running statistics of normalizing layers: rank 0's travel with the control words, so that they cost no collective of their own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from elastirun.train.autograd_engine import versions_kept
from elastirun.train.reduction.buckets.memory import make_views
from elastirun.train.sharded import is_sharded

EXACT = (torch.float32, torch.float16, torch.bfloat16)  # types that float32, in which statistics travel, holds exactly
LayerBuffer = tuple[nn.Module, str]  # a layer, and the name of one of its buffers: the tensor there may be replaced


def find_statistics(module: nn.Module, ignored: Collection[str] = ()) -> list[LayerBuffer]:
    """Return the statistics of ``module`` that can travel. Counts of batches are exact up to 2**24."""
    layers = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.modules.batchnorm._NormBase)]
    return [
        (layer, buffer)
        for name, layer in layers
        for buffer in ("running_mean", "running_var", "num_batches_tracked")
        if (value := layer._buffers.get(buffer)) is not None and f"{name}.{buffer}".lstrip(".") not in ignored
        if (value.dtype in EXACT or not value.is_floating_point()) and not is_sharded(value)
    ]


class RunningStatistics:
    """The statistics in ``places`` of this rank; on ranks other than the first, also rank 0's values of the last reduction.

    Ranks other than 0 take over rank 0's values when these arrive. They do so again before the statistics are used (``adopt``,
    ``before_forward``) if only forwards have changed the buffers since. What a loaded checkpoint or a recalibration has written stays.
    """

    def __init__(self, places: Sequence[LayerBuffer]) -> None:
        self._places = list(places)
        self._layers = list(dict.fromkeys(layer for layer, _ in places))
        self.numel = sum(buffer.numel() for buffer in self.buffers)
        self.at_once = True  # take values over when they arrive
        self._tail = torch.empty(0, device="cpu")  # the memory in which they travel
        self._views: list[Tensor] = []  # of the tail: rank 0 writes its values there
        self._kept = self._tail  # a copy of the values that have arrived: no reduction writes to it
        self._arrived: list[Tensor] = []  # views of this copy, one for each buffer
        self._counts: list[Tensor] = []  # the views that hold whole numbers
        self._noted: list[tuple[int, int]] = []  # versions of the buffers, as reductions and forwards left them
        self._taken: list[tuple[int, int]] = []  # versions of the buffers when they were last rank 0's
        self._untouched = False  # the buffers were as noted when the present forward began

    @property
    def buffers(self) -> list[Tensor]:
        return [cast(Tensor, layer._buffers[name]) for layer, name in self._places]  # nn.Module's attribute access takes 1 µs each

    def use_memory(self, tail: Tensor) -> None:
        """Let the values travel in ``tail``, ``numel`` elements, from now on."""
        self._tail, self._views = tail, make_views(self.buffers, tail)

    def continue_from(self, old: RunningStatistics) -> None:
        if self._places == old._places:
            self.at_once, self._kept, self._arrived, self._counts = old.at_once, old._kept, old._arrived, old._counts
            self._noted, self._taken, self._untouched = old._noted, old._taken, old._untouched

    def stop(self) -> None:
        """Leave the buffers to a hook of the user from now on. Their memory in the tail stays."""
        self._places, self._layers, self._views, self._arrived = [], [], [], []

    def write(self, rank: int) -> None:
        """Write rank 0's values into the tail; the other ranks write zeros."""
        if rank == 0 and self._places:
            torch._foreach_copy_(self._views, self.buffers)
        else:
            self._tail.zero_()

    def receive(self, rank: int, factor: float) -> None:
        """Keep and take over rank 0's values, which a reduction has brought divided by ``factor``."""
        if rank == 0 or not self._places:
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
        """Take over rank 0's values if a layer is in evaluation and so about to use them, as a frozen layer is in training.

        ``at_once``: take over the values of the next reduction when they arrive.
        """
        self.at_once = at_once
        if self._arrived:
            if any(not layer.training for layer in self._layers):
                self.adopt()
            self._untouched = self._noted == _versions(self.buffers)

    def after_forward(self) -> None:
        """Note the versions of the buffers that the wrapped module's own forward has written."""
        if self._arrived and self._untouched:
            self._noted = _versions(self.buffers)

    def forget(self) -> None:
        """Keep the buffers as they are: all ranks have just been given newer values than those that arrived."""
        self._noted = []

    def _take_over(self, buffers: list[Tensor]) -> None:
        """Copy the values that have arrived into ``buffers``."""
        with torch.no_grad(), versions_kept(buffers):
            torch._foreach_copy_(buffers, self._arrived)
        self._taken = _versions(buffers)


def _versions(buffers: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(id(buffer), buffer._version) for buffer in buffers]

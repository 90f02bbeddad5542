"""Compares the replicas after a change of the world, some parameters in each step, so that no step takes much longer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from elastirun.train.reduction.replica_check import verify_replicas
from elastirun.train.sharded import local_part

LEAST = 256 << 10  # bytes that are compared in a step at least: that takes as long as the words between the ranks
FLOW = 20_000_000  # bytes for each second that a step takes, a fiftieth of it where a checksum runs at 1 GB/s


class GradualCheck:
    """Compares ``tensors``, the same ones on every rank."""

    def __init__(self, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        self._names, self._tensors = names, tensors
        self._tensor = self._element = 0  # the next one to compare

    @property
    def done(self) -> bool:
        """Whether all is compared."""
        return self._tensor == len(self._tensors)

    def go_on(self, seconds: float, group: dist.ProcessGroup, device: torch.device) -> None:
        """Compare the next elements. Raises Diverged on every rank of ``group`` if they are not the same.

        ``seconds``: how long a step takes, the same number on every rank. All ranks call it at the same point.
        """
        names, parts, room = [], [], max(LEAST, int(FLOW * seconds))
        while room > 0 and not self.done:
            flat = local_part(self._tensors[self._tensor]).detach().reshape(-1)
            part = flat[self._element : self._element + max(1, room // flat.element_size())]
            names.append(self._names[self._tensor])
            parts.append(part)
            room -= part.nbytes
            self._element += len(part)
            if self._element == len(flat):
                self._tensor, self._element = self._tensor + 1, 0
        verify_replicas([names], [parts], group, device)

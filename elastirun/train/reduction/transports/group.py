"""Reductions by a torch process group."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from elastirun.train.groups.waits import finish
from elastirun.train.reduction.transports.base import ALIGNED, Storage, reduction_errors


class GroupWork:
    """A reduction by a process group."""

    def __init__(self, work: dist.Work, what: str, device: torch.device) -> None:
        self._work, self._what, self._device = work, what, device

    def done(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        with reduction_errors(self._what):
            finish(self._work, self._device)


class GroupArena:
    """Buckets in ordinary memory."""

    def __init__(self, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType, storages: Sequence[Storage]) -> None:
        self._group, self._op = group, op
        self.buffers = zeros(storages)

    def all_reduce(self, index: int) -> GroupWork:
        what = f"the reduction of bucket {index}"
        with reduction_errors(what):
            work = dist.all_reduce(self.buffers[index], self._op, self._group, async_op=True)
        assert work is not None
        return GroupWork(work, what, self.buffers[index].device)


class GroupTransport:
    """Any torch process group: NCCL, gloo and the others."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.averages = dist.get_backend(group) == "nccl"  # gloo's AVG is a sum and a division on top

    def allocate(self, storages: Sequence[Storage]) -> GroupArena:
        return GroupArena(self._group, dist.ReduceOp.AVG if self.averages else dist.ReduceOp.SUM, storages)

    def interrupt(self, why: str) -> None:
        """Do nothing: waits end with the group's connections."""

    def close(self) -> None:
        """Do nothing: the group belongs to the caller."""


def zeros(storages: Sequence[Storage]) -> list[Tensor]:
    """Return memory for buckets, in one piece as far as their types are the same.

    When there is a new plan, a large piece goes back to the system; small ones would stay in the heap.
    """
    buffers: list[Tensor] = []
    for (dtype, device), run in groupby(storages, lambda storage: (storage.dtype, storage.device)):
        sizes = [storage.numel for storage in run]
        padded = [-(-numel // ALIGNED) * ALIGNED for numel in sizes]
        parts = torch.split(torch.zeros(sum(padded), dtype=dtype, device=device), padded)
        buffers += [part[:numel] for part, numel in zip(parts, sizes, strict=True)]
    return buffers

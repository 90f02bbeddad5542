"""Collectives by a torch process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from elastirun.train.groups.waits import finish
from elastirun.train.reduction.transports.base import ALIGNED, Storage, part_of, reduction_errors


class GroupWork:
    """A collective of a process group."""

    def __init__(self, work: dist.Work, what: str, device: torch.device) -> None:
        self._work, self._what, self._device = work, what, device

    def done(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        with reduction_errors(self._what):
            finish(self._work, self._device)


class GroupArena:
    """Buckets in ordinary memory. ``_whole[i]`` has room for as many equal parts as there are ranks."""

    def __init__(self, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType, storages: Sequence[Storage]) -> None:
        self._group, self._op = group, op
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._whole = zeros(storages, self._ranks)
        self.buffers = [whole[: storage.numel] for whole, storage in zip(self._whole, storages, strict=True)]

    def all_reduce(self, index: int) -> GroupWork:
        return self._begin("the reduction", index, lambda: dist.all_reduce(self.buffers[index], self._op, self._group, async_op=True))

    def all_gather(self, index: int) -> GroupWork:
        whole, mine = self._whole[index], part_of(self._whole[index], self._rank, self._ranks)
        return self._begin("the gathering", index, lambda: dist.all_gather_into_tensor(whole, mine, self._group, async_op=True))

    def _begin(self, what: str, index: int, begin: Callable[[], dist.Work | None]) -> GroupWork:
        what = f"{what} of bucket {index}"
        with reduction_errors(what):
            work = begin()
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


def zeros(storages: Sequence[Storage], parts: int) -> list[Tensor]:
    """Return memory for buckets, in one piece as far as their types are the same. Each has room for so many equal ``parts``.

    When there is a new plan, a large piece goes back to the system; small ones would stay in the heap.
    """
    buffers: list[Tensor] = []
    for (dtype, device), run in groupby(storages, lambda storage: (storage.dtype, storage.device)):
        padded = [-(-storage.numel // (parts * ALIGNED)) * parts * ALIGNED for storage in run]
        buffers += torch.split(torch.zeros(sum(padded), dtype=dtype, device=device), padded)
    return buffers

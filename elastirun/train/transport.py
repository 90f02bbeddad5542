"""How buckets of gradients are added up over the ranks: by a torch process group, or through shared memory on one host."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import ReductionFailed, TrainError
from .flat import Storage, zeros

AGAIN = "Use set_group() with a new process group"
# Words in errors of backends that may come from the loss of a peer; an error without any of them is about something else (a dtype, memory).
OF_PEERS = re.compile(r"gloo/|nccl|timed? ?out|connect|socket|abort|peer|closed|closure|store|rank", re.IGNORECASE)


class Work(Protocol):
    """A reduction under way."""

    def done(self) -> bool:
        """Is the result there? Never waits; may push on what is pending."""

    def wait(self) -> None:
        """Return when the result is there (on a GPU: when the current stream waits for it).

        Raises PeerLost or ReductionFailed within a bounded time if it cannot come.
        """


class Arena(Protocol):
    """The memory of all buckets of one plan; ``buffers[i]`` is one-dimensional and starts at zero."""

    buffers: list[Tensor]

    def all_reduce(self, index: int) -> Work:
        """Begin to replace ``buffers[index]`` by its sum (the mean, if the transport averages) over the ranks.

        Every rank begins the same indices in the same order. The buffer belongs to the transport until the work is done.
        """


class Transport(Protocol):
    averages: bool  # reductions give the mean, not the sum

    def allocate(self, storages: Sequence[Storage]) -> Arena:
        """Memory for the buckets of a new plan; every rank calls it at the same point with equal arguments."""

    def close(self) -> None:
        """Give everything back; whoever waits for this rank learns that it is gone."""


@contextmanager
def reduction(what: str) -> Iterator[None]:
    """What backends raise (connection lost, timeout, aborted) is a ReductionFailed."""
    try:
        yield
    except TrainError:
        raise
    except (RuntimeError, ValueError) as error:
        first = (str(error).splitlines() or ["no reason given"])[0]
        lost = isinstance(error, dist.DistError) or OF_PEERS.search(first)
        raise ReductionFailed(f"{what} failed: {first}" + (f"; a peer may be gone. {AGAIN}" if lost else "")) from error


class GroupWork:
    def __init__(self, work: dist.Work, what: str) -> None:
        self._work, self._what = work, what

    def done(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        with reduction(self._what):
            self._work.wait()


class GroupArena:
    def __init__(self, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType, storages: Sequence[Storage]) -> None:
        self._group, self._op = group, op
        self.buffers = zeros(storages)

    def all_reduce(self, index: int) -> GroupWork:
        what = f"the reduction of bucket {index}"
        with reduction(what):
            work = dist.all_reduce(self.buffers[index], self._op, self._group, async_op=True)
        assert work is not None
        return GroupWork(work, what)


class ProcessGroup:
    """Any torch process group: NCCL, gloo and the others."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.averages = dist.get_backend(group) == "nccl"  # gloo's AVG is a sum and a division on top

    def allocate(self, storages: Sequence[Storage]) -> GroupArena:
        return GroupArena(self._group, dist.ReduceOp.AVG if self.averages else dist.ReduceOp.SUM, storages)

    def close(self) -> None:
        """The group is its owner's."""


def choose(group: dist.ProcessGroup, device: torch.device, wanted: str = "auto") -> Transport:
    """The transport for parameters on ``device``; all ranks call it at the same time and get the same.

    ``wanted``: "auto" takes shared memory where it can be had and the process group elsewhere, "shared memory" raises TrainError where it
    cannot be had, "group" takes the process group.
    """
    if wanted not in ("auto", "group", "shared memory"):
        raise TrainError(f"there is no transport {wanted!r}: auto, group or shared memory")
    from .shared_memory import SharedMemory  # which needs this module

    try:
        if device.type != "cpu" or dist.get_world_size(group) == 1:
            raise TrainError(f"not for {dist.get_world_size(group)} ranks with parameters on {device}")
        return SharedMemory(group, willing=wanted != "group", strict=wanted == "shared memory")
    except TrainError as error:
        if wanted == "shared memory" or isinstance(error, ReductionFailed):
            raise
    return ProcessGroup(group)

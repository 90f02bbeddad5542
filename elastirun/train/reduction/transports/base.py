"""Transports add up buckets over the ranks, or gather them: by a torch process group, or through shared memory on one host."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from elastirun.train.errors import ReductionFailed, TrainError

# Words in those errors of backends that the loss of a peer may cause. An error without any of them is about a dtype, memory or the like.
OF_PEERS = re.compile(r"gloo/|nccl|timed? ?out|connect|socket|abort|peer|closed|closure|store|rank", re.IGNORECASE)


ALIGNED = 64  # elements; buckets and slices of them begin at cache lines, whatever the dtype


@dataclass(frozen=True)
class Storage:
    """The memory of one bucket: ``numel`` elements of ``dtype`` on ``device``."""

    numel: int
    dtype: torch.dtype
    device: torch.device


def advice() -> str:
    """Return what to do when a reduction has failed for good, as a sentence without its end."""
    if "ELASTIRUN_ROUND" in os.environ:  # read late: a fork server imports this module before there is a round
        return "Let this exception end the process: its agent starts the next round"
    return "Use set_group() with a new process group"


def part_of(buffer: Tensor, rank: int, ranks: int) -> Tensor:
    """Return the part of ``buffer`` that belongs to ``rank``. The last parts may be shorter than the others, or empty."""
    step = -(-buffer.numel() // (ranks * ALIGNED)) * ALIGNED
    return buffer[rank * step :][:step]


class Work(Protocol):
    """One collective under way."""

    def done(self) -> bool:
        """Return whether the result is there. Never waits; may continue pending collectives."""

    def wait(self) -> None:
        """Wait for the result (on a GPU: let the current stream wait for it).

        Raises PeerLost or ReductionFailed within a bounded time if there cannot be a result.
        """


class Arena(Protocol):
    """The memory of all buckets of one plan; ``buffers[i]`` is one-dimensional and starts at zero.

    Every rank begins the same collectives of the same indices in the same order. Only the transport uses a buffer until the work is done.
    """

    buffers: list[Tensor]

    def all_reduce(self, index: int) -> Work:
        """Begin to replace ``buffers[index]`` by its sum (the mean, if the transport averages) over the ranks."""

    def all_gather(self, index: int) -> Work:
        """Begin to replace each part of ``buffers[index]`` by that of the rank it belongs to, see ``part_of``."""


class Transport(Protocol):
    """Allocates the buckets of a plan, and reduces or gathers them."""

    averages: bool  # reductions give the mean, not the sum

    def allocate(self, storages: Sequence[Storage]) -> Arena:
        """Return memory for the buckets of a new plan. Every rank calls it at the same point with equal arguments."""

    def interrupt(self, why: str) -> None:
        """Let waits that no connection ends fail from now on, for the reason ``why``. May be called in any thread."""

    def close(self) -> None:
        """Release all resources. Ranks that wait for this one get an error."""


@contextmanager
def reduction_errors(what: str) -> Iterator[None]:
    """Turn the exceptions of backends (connection lost, timeout, aborted) into ReductionFailed. ``what`` begins the message."""
    try:
        yield
    except TrainError:
        raise
    except (RuntimeError, ValueError) as error:
        first = (str(error).splitlines() or ["no reason given"])[0]
        lost = isinstance(error, dist.DistError) or OF_PEERS.search(first)
        raise ReductionFailed(f"{what} failed: {first}" + (f"; a peer may be gone. {advice()}" if lost else "")) from error

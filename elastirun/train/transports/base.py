"""How buckets of gradients are added up over the ranks: by a torch process group, or through shared memory on one host."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from ..bucket_memory import Storage
from ..errors import ReductionFailed, TrainError

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

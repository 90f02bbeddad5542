"""One global batch as a loop over this rank's micro-batches, whose accumulated gradients are the mean over all samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter
from typing import Any

import torch

from elastirun.train.arguments import named, shown
from elastirun.train.ddp.module import DistributedDataParallel
from elastirun.train.errors import TrainError, WrongUse


class Step:
    """One global batch. Iterate over the step once: it yields this rank's micro-batches, each for one forward and one backward.

    After the last backward every ``grad`` is the mean over the global batch. On a rank that has no sample of the batch the loop has no
    turn, and the gradients are those of the others.

    size      samples over all ranks; None for ``ElasticShards``, where nobody knows how many the other ranks have left
    samples   samples of this rank
    """

    def __init__(self, size: int | None, samples: int, batches: Iterable[Any], done: Callable[[], None]) -> None:
        self.size, self.samples = size, samples
        self._batches, self.done = batches, done

    def __iter__(self) -> Iterator[Any]:
        yield from self._batches
        self.done()


def verify_ranks(rank: int, world_size: int, ddp: DistributedDataParallel) -> None:
    """Raise WrongUse unless ``rank`` of ``world_size`` is that of this process in ``ddp``'s process group.

    Where several ranks share a replica (tensor parallelism, pipelines) that group is smaller than the world.
    """
    if not hasattr(ddp, "_reducer"):
        raise WrongUse(f"steps() needs elastirun.train.DistributedDataParallel(module), or DeterministicShards(module), not {named(ddp)}")
    world = ddp._reducer.world
    if (rank, world_size) != (world.rank, world.size):
        raise WrongUse(
            f"the data are those of rank {rank} of {world_size}, the module is rank {world.rank} of "
            f"{world.size}, so ranks that share a replica would get different samples: give the data the ranks of "
            "the module (rank=, world_size=; ElasticShards: process_group=)"
        )


def accumulate(
    ddp: DistributedDataParallel,
    sizes: Sequence[int],
    batches: Iterable[Any],
    work_of: Callable[[Any], float] | None = None,
    measure: Callable[[float, float], None] | None = None,
) -> Iterator[Any]:
    """Yield this rank's ``batches``, of ``sizes`` samples each, for one backward each. The last one reduces the mean over all samples.

    ``sizes`` may be empty. Every rank runs the loop. If the last batch has no backward, the rank takes part without data, so that the
    others need not wait for it. ``work_of`` a batch: default its samples. ``measure`` is called with the seconds of the loop, without the
    wait for the gradients of the others, and with the work in it.
    """
    if not ddp._reducer.schedule.always_reduces:
        raise TrainError("a step decides by itself which backward reduces: neither accumulate() nor no_sync() may be in force")
    begun, reductions = perf_counter(), ddp._reducer.step
    ddp.set_samples(sum(sizes), backwards=sum(sizes) / sizes[-1] if sizes else 1.0)
    work, before = 0.0, None
    for at, (size, batch) in enumerate(zip(sizes, batches, strict=True), 1):
        if before not in (None, size):
            _weigh(ddp, before / size)
        before = size
        work += size if work_of is None else _verified(work_of(batch))
        if work_of is not None:
            ddp._reducer.local_report.work = work  # before the backward that reduces
        sync = ddp._reducer.schedule.set_sync(at == len(sizes))
        try:
            yield batch
        finally:
            ddp._reducer.schedule.set_sync(sync)
    if ddp._reducer.step == reductions:
        ddp.skip()
    elif measure and ddp._reducer.last:
        measure(perf_counter() - begun - ddp._reducer.last.times.exposed, work)


def _verified(work: Any) -> float:
    """Return the work in a batch. Raises WrongUse if it is no number, or below 0."""
    try:
        number = float(work)
    except (TypeError, ValueError, RuntimeError):  # such as a tensor of several numbers
        number = -1.0
    if not 0 <= number < float("inf"):
        raise WrongUse(f"work must return a number for a batch, 0 or more, not {shown(work)}")
    return number


def _weigh(ddp: DistributedDataParallel, factor: float) -> None:
    """Multiply the gradients accumulated so far: each backward that follows is a mean over fewer samples."""
    with torch.no_grad():
        if grads := [param.grad for param in ddp._reducer.params if param.grad is not None]:
            torch._foreach_mul_(grads, factor)

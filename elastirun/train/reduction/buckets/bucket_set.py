"""The buckets of the present plan in memory. Control words and running statistics travel behind the last one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from elastirun.train.reduction.buckets.memory import Bucket, Portion
from elastirun.train.reduction.buckets.planner import Planner
from elastirun.train.reduction.control_words import ControlWords, LocalReport, PendingAgreement
from elastirun.train.reduction.running_stats import RunningStatistics
from elastirun.train.reduction.transports.base import Arena, Storage, Transport, Work


@dataclass(eq=False)
class BucketSet:
    """The memory of ``planner``'s plan, which ``transport`` reduces. Without a plan in memory there are no buckets."""

    _params: Sequence[nn.Parameter]
    _planner: Planner
    _transport: Transport
    _statistics: RunningStatistics
    _rank: int
    _world: int
    _in_use: bool = True  # the statistics travel in this memory

    def __post_init__(self) -> None:
        self.outdated = True  # the next reduction makes the memory anew, by a newer plan than the present one's
        self.words_apart = False  # the words travel in memory of their own, after the last bucket
        self._words = ControlWords(self._rank, self._world, 0, len(self._params))
        self.release()

    def release(self) -> None:
        """Give up the memory of the present plan. Gradients that lie in it keep their part of it alive."""
        self.buckets: list[Bucket] = []
        self.home: dict[int, tuple[Bucket, Portion]] = {}  # by parameter
        self._arena: Arena | None = None
        self._tail = torch.empty(0, device="cpu")  # of the arena: words and statistics
        self._place_statistics()

    def install(self, words_apart: bool) -> None:
        """Make the buckets of the planner's present plan. Every rank calls it at the same point.

        ``words_apart``: let the control words travel after all buckets. They do so, too, if the last bucket does not hold float32.
        """
        plan = self._planner.buckets
        self._words = words = ControlWords(self._rank, self._world, len(plan), len(self._params))
        grads = self._planner.gradients
        storages = [Storage(sum(grads[i].numel for i in bucket), grads[bucket[0]].dtype, grads[bucket[0]].device) for bucket in plan]
        self.words_apart = words_apart or not plan or storages[-1].dtype != torch.float32
        extra = words.size + self._statistics.numel
        if self.words_apart:
            sizes = [*storages, Storage(extra, torch.float32, self._planner.device)]
        else:
            sizes = [*storages[:-1], Storage(storages[-1].numel + extra, torch.float32, storages[-1].device)]
        self.release()
        self._arena = arena = self._transport.allocate(sizes)
        self._tail = arena.buffers[-1][-extra:]
        self._place_statistics()
        self.buckets = [
            Bucket(f"elastirun: bucket {at}", plan[at], [self._params[i] for i in plan[at]], arena.buffers[at][: storage.numel])
            for at, storage in enumerate(storages)
        ]
        self.home = {index: (bucket, part) for bucket in self.buckets for part in bucket.portions for index in part.indices}
        self.outdated = False

    def _place_statistics(self) -> None:
        """Let the running statistics travel behind the words, if there is memory."""
        if self._in_use:
            there = self._tail[self._words.size :] if len(self._tail) else torch.empty(self._statistics.numel, device="cpu")
            self._statistics.use_memory(there)

    def are_for(self, params: Sequence[nn.Parameter]) -> bool:
        """Return whether the buckets were made for exactly these parameters."""
        return len(params) == len(self._params) and all(mine is theirs for mine, theirs in zip(self._params, params, strict=True))

    def prepare(self, words_apart: bool) -> None:
        """Make the memory before this set is in use. Every rank calls it, in any thread; ``use`` comes later."""
        self.install(words_apart)
        for bucket in self.buckets:
            bucket.flat.zero_()  # the system gives the pages when they are written

    def use(self) -> None:
        """Let the running statistics travel in this memory from now on."""
        self._in_use = True
        self._place_statistics()

    def release_outdated(self) -> None:
        """Give up the memory of an old plan in the backward that follows a new plan: most of its gradients are gone by then.

        Nothing is launched before the end of this backward, where the new plan is installed: all ranks have to come there, and within a
        backward other modules may be in the way.
        """
        if self.outdated and self.buckets:
            self.release()

    def reset(self) -> None:
        """Prepare all buckets for the next backward."""
        for bucket in self.buckets:
            bucket.reset()

    def reduce(self, index: int) -> Work:
        """Begin the reduction of bucket ``index``; of the words that travel apart, if it is the number of buckets."""
        assert self._arena is not None
        return self._arena.all_reduce(index)

    def write_words(
        self, report: LocalReport, samples: float, zero_samples: float, seconds: float, late: Sequence[int], lacking: Sequence[int]
    ) -> None:
        """Write this rank's control words and rank 0's running statistics."""
        self._words.write(self._tail[: self._words.size], report, samples, seconds, late, lacking)
        if zero_samples:
            self._tail[0] += zero_samples
        self._statistics.write(self._rank)

    def read_words(self, step: int) -> PendingAgreement:
        """Begin to copy the reduced words of ``step`` to the host."""
        return PendingAgreement(self._words, self._tail[: self._words.size], step, self._factor)

    def receive_statistics(self) -> None:
        """Take rank 0's running statistics over, which have arrived with the words."""
        self._statistics.receive(self._rank, self._factor)

    @property
    def _factor(self) -> float:
        """The factor that turns a reduced number into the sum over the ranks."""
        return float(self._world) if self._transport.averages else 1.0

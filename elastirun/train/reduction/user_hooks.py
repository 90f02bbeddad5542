"""The user's extensions of a module: a communication hook, an optimizer that steps in the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elastirun.train.groups.collectives import verify_same
from elastirun.train.reduction.buckets.memory import Bucket
from elastirun.train.reduction.comm_hooks import GradBucket, Hook, HookWork
from elastirun.train.reduction.transports.base import reduction_errors

OptimizerStep = Callable[[Sequence[nn.Parameter]], None]


class Extensions:
    """A communication hook and the step of an optimizer, if there are any, and what a reduction does otherwise because of them."""

    def __init__(self, device: torch.device) -> None:
        self._hook: tuple[Hook, Any] | None = None  # and its state
        self.optimizer_step: OptimizerStep | None = None
        self._device = device
        self.compared = False  # with the other ranks', before the first reduction

    @property
    def hooked(self) -> bool:
        """Whether there is a communication hook, which may let replicas differ on purpose, or for a while."""
        return self._hook is not None

    def set_hook(self, hook: Hook | None, state: Any) -> None:
        self._hook = None if hook is None else (hook, state)

    def continue_from(self, old: Extensions) -> None:
        """Be as far as ``old``, whose place this one takes."""
        self.compared = old.compared

    @property
    def words_apart(self) -> bool:
        """Whether the control words travel apart from the gradients: a hook could compress them, and an optimizer needs them before the
        gradients of the last bucket."""
        return self.hooked or self.optimizer_step is not None

    @property
    def one_by_one(self) -> bool:
        """Whether a bucket is launched only when the backward is over and the bucket before has arrived.

        A hook of several collectives starts the second when the first is done. On CPUs that happens in threads, so that those of two
        buckets, or of a bucket and something else in the hook's group, would begin in another order on each rank.
        """
        return self._hook is not None and self._device.type == "cpu"

    def reduce(self, index: int, bucket: Bucket, last: bool) -> HookWork:
        """Let the hook reduce ``bucket``. A hook divides by the number of ranks itself, so the result is the mean."""
        assert self._hook is not None
        hook, state = self._hook
        future = hook(state, GradBucket(index, bucket.flat, bucket.views, bucket.params, last))
        return HookWork(future, bucket.flat, f"the communication hook of bucket {index}")

    def verify_same(self, group: dist.ProcessGroup) -> None:
        """Raise ModelMismatch, on every rank alike, unless all have a communication hook or none, and all step in the backward or none:
        it decides what travels where. Once, before the first reduction: who registers one later has to do so on every rank."""
        if not self.compared:
            lines = [
                f"{'no' if self._hook is None else 'a'} communication hook",
                f"{'no' if self.optimizer_step is None else 'an'} optimizer that steps in the backward",
            ]
            with reduction_errors("comparing hooks and optimizers"):
                verify_same(lines, "extensions", group, self._device)
            self.compared = True

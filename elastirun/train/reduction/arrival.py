"""Sets the gradients when the reduction of a bucket has arrived, and reduces those that have no bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from elastirun.train.groups.collectives import all_reduce
from elastirun.train.reduction.buckets.memory import Bucket
from elastirun.train.reduction.conclusion import Outcome
from elastirun.train.reduction.transports.base import reduction_errors
from elastirun.train.reduction.user_hooks import OptimizerStep
from elastirun.train.sharded import local_part, with_part


@dataclass(frozen=True)
class Arrival:
    """Sets gradients by the ``outcome`` of a reduction. ``scale``: the factor of this rank's gradients in a sum; 0 without data."""

    outcome: Outcome
    scale: float
    group: dist.ProcessGroup
    optimizer_step: OptimizerStep | None

    def set_gradients(self, bucket: Bucket, late: bool) -> None:
        """Make the values of ``bucket``, which has arrived, the gradients of its parameters. ``late``: some came after the launch."""
        outcome = self.outcome
        if late:
            extra = bucket.gather_late(self.scale)
            with reduction_errors("the reduction of late gradients"):
                all_reduce(extra, self.group)
            bucket.flat.add_(extra)
        if outcome.correction != 1.0:
            bucket.flat.mul_(outcome.correction)
        bucket.set_gradients(outcome.users)
        if outcome.agreed and outcome.users and outcome.mean_over_users:
            bucket.rescale_to_users(outcome.users, outcome.agreed.with_data)
        self._optimize(bucket.params)

    def reduce_sparse(self, params: Sequence[nn.Parameter], indices: Sequence[int]) -> None:
        """Replace the sparse gradients of ``params`` at ``indices`` by their means. gloo can add such tensors up."""
        users = self.outcome.users if self.outcome.common else None
        for index in indices:
            if users is None or users[index]:
                factor = self.outcome.correction if users is None else self.outcome.factor(users[index])
                self._reduce_sparse(params[index], self.scale * factor)
            self._optimize([params[index]])

    def _reduce_sparse(self, param: nn.Parameter, scale: float) -> None:
        """Replace a sparse gradient by its sum over the ranks, times ``scale``."""
        with reduction_errors("the reduction of a sparse gradient"):
            # 0 * NaN is NaN, so a rank with weight 0 sends zeros instead of its gradient.
            grad = param.grad if param.grad is not None and scale else torch.zeros_like(param).to_sparse(1)
            total = (grad.detach() if grad.is_sparse else grad.detach().to_sparse(1)).coalesce() * scale
            all_reduce(total, self.group)
            param.grad = total

    def reduce_unfrozen(self, params: Sequence[nn.Parameter], device: torch.device) -> None:
        """Reduce the gradients of ``params``, which are trained since this step and have no place in a bucket yet."""
        with reduction_errors("the reduction of parameters that are trained from now on"):
            had = torch.tensor([param.grad is not None and self.scale > 0 for param in params], dtype=torch.float32, device="cpu")
            users = had.to(device)
            all_reduce(users, self.group)
            for param, mine, theirs in zip(params, had.tolist(), users.tolist(), strict=True):
                before = param.grad if mine else None
                grad = torch.zeros_like(local_part(param)) if before is None else local_part(before)
                total = (grad.to_dense() if grad.is_sparse else grad).detach() * self.scale
                all_reduce(total, self.group)
                param.grad = with_part(param, total.mul_(self.outcome.factor(theirs))) if theirs else None
        self._optimize(params)

    def _optimize(self, params: Sequence[nn.Parameter]) -> None:
        """Step the optimizer that steps in the backward, if there is one."""
        if self.optimizer_step is not None and not self.outcome.failed:
            self.optimizer_step(params)

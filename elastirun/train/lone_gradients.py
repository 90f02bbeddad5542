"""Gradients that are reduced alone, outside of any bucket: sparse ones, and those of parameters that are trained since this step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from .transports.base import reduction_errors


def reduce_sparse(param: nn.Parameter, scale: float, group: dist.ProcessGroup) -> None:
    """Replace a sparse gradient by its sum over the ranks, times ``scale``. gloo can add such tensors up."""
    with reduction_errors("the reduction of a sparse gradient"):
        # 0 * NaN is NaN, so a rank with weight 0 sends zeros instead of its gradient.
        grad = param.grad if param.grad is not None and scale else torch.zeros_like(param).to_sparse(1)
        total = (grad.detach() if grad.is_sparse else grad.detach().to_sparse(1)).coalesce() * scale
        dist.all_reduce(total, group=group)
        param.grad = total


def reduce_newcomers(
    params: Sequence[nn.Parameter], scale: float, factor: Callable[[float], float], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Reduce the gradients of ``params``, which are trained since this step and have no place in a bucket yet.

    ``scale``: the weight of this rank's gradients, 0 without data.
    ``factor(users)``: the factor of a sum to which ``users`` ranks have added.
    """
    with reduction_errors("the reduction of parameters that are trained from now on"):
        had = torch.tensor([param.grad is not None and scale > 0 for param in params], dtype=torch.float32, device="cpu")
        users = had.to(device)
        dist.all_reduce(users, group=group)
        for param, mine, theirs in zip(params, had.tolist(), users.tolist(), strict=True):
            grad = param.grad if mine else None
            total = torch.zeros_like(param) if grad is None else (grad.to_dense() if grad.is_sparse else grad) * scale
            dist.all_reduce(total, group=group)
            param.grad = total.mul_(factor(theirs)) if theirs else None

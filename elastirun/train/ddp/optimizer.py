"""Optimizers that step in the backward, a bucket at a time."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn

from elastirun.train.arguments import named
from elastirun.train.errors import WrongUse
from elastirun.train.state.loading import ShardedState


def applied() -> tuple[int, int]:
    """Return numbers that change when ``torch.distributed.optim._apply_optimizer_in_backward`` gives any parameter an optimizer."""
    module = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    return (len(module.param_to_acc_grad_map), len(module.param_to_optim_hook_handle_map)) if module else (0, 0)


def take_over(params: Sequence[nn.Parameter]) -> bool:
    """Return whether ``torch.distributed.optim._apply_optimizer_in_backward`` has given ``params`` optimizers, and remove its hooks.

    The hooks would step with this rank's gradients, before the reduction.
    """
    ours = [param for param in params if hasattr(param, "_in_backward_optimizers")]
    if ours:
        from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

        for param in ours:
            for handle in param_to_optim_hook_handle_map.pop(param, []):  # type: ignore[no-untyped-call]
                handle.remove()
    return bool(ours)


def step_each(params: Sequence[nn.Parameter]) -> None:
    """Step the optimizers that ``take_over`` has found, and drop the gradients, as torch's class does."""
    for param in params:
        optimizers: list[torch.optim.Optimizer] = getattr(param, "_in_backward_optimizers", [])
        if param.grad is not None:
            for optimizer in optimizers:
                optimizer.step()
        if optimizers:
            param.grad = None


class BucketSteps:
    """Steps ``optimizer`` for some of its parameters only: during a step its groups hold only these.

    ``owned``: the module's parameters. Raises TrainError if the optimizer holds others.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, owned: Sequence[nn.Parameter]) -> None:
        if isinstance(optimizer, ShardedState):
            raise WrongUse("a ShardedOptimizer steps all parameters at once: it does not work with step_in_backward()")
        if not hasattr(optimizer, "param_groups"):
            raise WrongUse(f"step_in_backward() takes an optimizer, not {named(optimizer)}: make it before, of the module's parameters")
        ours = set(map(id, owned))
        if any(id(param) not in ours for group in optimizer.param_groups for param in group["params"]):
            raise WrongUse("the optimizer also holds parameters that the module does not; those would be stepped with each bucket")
        self._optimizer = optimizer

    def __call__(self, params: Sequence[nn.Parameter]) -> None:
        wanted = set(map(id, params))
        groups = self._optimizer.param_groups
        whole = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [param for param in group["params"] if id(param) in wanted]
            self._optimizer.step()
        finally:
            for group, all_of_it in zip(groups, whole, strict=True):
                group["params"] = all_of_it

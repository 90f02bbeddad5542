"""Gradients in flat memory: one tensor per bucket, and for each parameter a view of it that is the parameter's ``grad``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .transport import Work

LARGE = 16384  # elements: from here one operation per gradient costs less than another pass over the bucket


class Bucket:
    """Gradients that travel together. ``views[i]`` is the place of ``params[i]``'s gradient in ``flat``."""

    def __init__(self, label: str, indices: Sequence[int], params: Sequence[nn.Parameter], flat: Tensor) -> None:
        self.label, self.indices, self.params, self.flat = label, indices, params, flat
        self.views = make_views(params, flat)
        self.large = flat.numel() >= LARGE * max(len(params), 1)
        self.watched = 0  # how many of the parameters have a hook
        self.pending = 0  # of these, how many are still to fire in this backward
        self.lacking: list[int] = []  # positions that had no gradient when the bucket was launched
        self.work: Work | None = None

    def take(self, scale: float) -> None:
        """Gather the gradients, times ``scale``, in ``flat``."""
        if scale == 0.0:  # no data: not even a NaN
            self.lacking = list(range(len(self.params)))
            self.flat.zero_()
            for param in self.params:
                param.grad = None
            return
        self.lacking = []
        views, grads = [], []
        for at, (param, view) in enumerate(zip(self.params, self.views, strict=True)):
            grad = param.grad
            if grad is None:
                self.lacking.append(at)
                view.zero_()
            elif grad is not view:
                views.append(view)
                grads.append(grad.detach() if not grad.is_sparse else grad.to_dense())
            elif self.large and scale != 1.0:
                view.mul_(scale)
        if self.large and scale != 1.0:
            for view, grad in zip(views, grads, strict=True):
                torch.mul(grad, scale, out=view) if grad.dtype == view.dtype else view.copy_(grad).mul_(scale)
        elif grads:
            torch._foreach_copy_(views, grads)
        if not self.large and scale != 1.0:
            self.flat.mul_(scale)
        for param in self.params:
            param.grad = None

    def has_late(self) -> bool:
        """Did a gradient come after the launch?"""
        self.lacking = [at for at in self.lacking if self.params[at].grad is None]
        return any(param.grad is not None for param in self.params)

    def take_late(self, scale: float) -> Tensor:
        """The gradients that came after the launch, times ``scale``, as a tensor like ``flat``."""
        extra = torch.zeros_like(self.flat)
        for param, view in zip(self.params, make_views(self.params, extra), strict=True):
            if param.grad is not None:
                view.copy_(param.grad.to_dense() if param.grad.is_sparse else param.grad)
                param.grad = None
        return extra.mul_(scale)

    def land(self, users: Sequence[int] | None) -> None:
        """Make the reduced values the parameters' gradients. Where nobody had one (``users``, by parameter), there is none."""
        for param, view in zip(self.params, self.views, strict=True):
            param.grad = view
        for at in self.lacking:
            if users is not None and users[self.indices[at]] == 0:
                self.params[at].grad = None


def reduce_sparse(param: nn.Parameter, scale: float, group: dist.ProcessGroup) -> None:
    """Replace a sparse gradient by its sum over the ranks, times ``scale``. It travels by itself; gloo can add such tensors up."""
    grad = param.grad if param.grad is not None else torch.zeros_like(param).to_sparse(1)
    total = (grad.detach() if grad.is_sparse else grad.detach().to_sparse(1)).coalesce() * scale
    dist.all_reduce(total, group=group)
    param.grad = total


def make_views(params: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
    """A view of ``flat`` for each parameter, with its shape and, where it is dense, its strides.

    Each is a tensor with a version counter of its own (``.data``): what is done to one gradient is not held against the others.
    """
    views, at = [], 0
    for param in params:
        size = param.numel() * (2 if param.is_complex() else 1)
        part = flat[at : at + size]
        if param.is_complex():
            part = torch.view_as_complex(part.view(-1, 2))
        views.append((part.as_strided(param.shape, param.stride()) if is_dense(param) else part.view(param.shape)).data)
        at += size
    return views


def is_dense(tensor: Tensor) -> bool:
    """Do the strides fill memory without gap or overlap, in whatever order of dimensions?"""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True

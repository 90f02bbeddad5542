"""Gradients in flat memory: one tensor per bucket, and for each parameter a view of it that is the parameter's ``grad``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from elastirun.train.reduction.transports.base import Work
from elastirun.train.sharded import is_sharded, local_part, with_part

LARGE = 16384  # elements: from here one operation per gradient costs less than another pass over the bucket
PORTION = 1 << 20  # bytes: a core's cache still holds so many when the last of their gradients has come


class Portion:
    """Neighbours in a bucket, which are gathered as soon as all of them are accumulated.

    At that moment the gradients are still in the cache, and the memory that autograd allocated for them becomes free. ``first`` is the
    position of the first parameter in the bucket, ``indices[i]`` the number of ``params[i]``.
    """

    def __init__(self, first: int, indices: Sequence[int], params: Sequence[nn.Parameter], views: Sequence[Tensor], flat: Tensor) -> None:
        self.first, self.indices, self.params, self.views, self.flat = first, indices, params, list(views), flat
        self.large = flat.numel() >= LARGE * len(params)
        self.watched = 0  # how many of the parameters have a hook
        self.pending = 0  # how many of the watched parameters have not yet fired as often as expected
        self.gathered = False
        self.lacking: list[int] = []  # positions in the bucket that had no gradient
        self._sharded = any(map(is_sharded, params))

    def gather(self, scale: float) -> None:
        """Gather the gradients, times ``scale``, in ``flat``."""
        self.gathered, self.lacking = True, []
        grads = [param.grad for param in self.params]
        if self._sharded:
            grads = [None if grad is None else local_part(grad) for grad in grads]
        if self.large and scale != 1.0 or not self._copy(grads):
            self._copy_each(grads, scale)
        elif scale != 1.0:
            self.flat.mul_(scale)
        for param in self.params:
            param.grad = None

    def _copy(self, grads: Sequence[Tensor | None]) -> bool:
        """Copy all gradients in one call, the usual case: to check each gradient would cost more than to copy it.

        Return False if that is impossible.
        """
        with suppress(TypeError, RuntimeError):  # one is missing, or sparse
            torch._foreach_copy_(self.views, grads)  # type: ignore[arg-type]
            return True
        return False

    def _copy_each(self, grads: Sequence[Tensor | None], scale: float) -> None:
        for at, (grad, view) in enumerate(zip(grads, self.views, strict=True), self.first):
            if grad is None:
                self.lacking.append(at)
                view.zero_()
            elif grad is view:
                view.mul_(scale)
            elif grad.dtype == view.dtype and not grad.is_sparse:
                torch.mul(grad.detach(), scale, out=view)
            else:
                view.copy_(grad.to_dense() if grad.is_sparse else grad).mul_(scale)

    def add_rest(self, scale: float) -> None:
        """Add the gradients that came after ``gather``: from another use of a parameter, or later than their neighbours."""
        for at, (param, view) in enumerate(zip(self.params, self.views, strict=True), self.first):
            if param.grad is not None:
                grad = local_part(param.grad)
                view.add_(grad.to_dense() if grad.is_sparse else grad, alpha=scale)
                param.grad = None
                self.lacking = [other for other in self.lacking if other != at]


class Bucket:
    """Gradients that travel together. ``views[i]`` is the place of ``params[i]``'s gradient in ``flat``.

    ``grads[i]`` is that gradient: the view, or for a DTensor one whose part the view is.
    """

    def __init__(self, label: str, indices: Sequence[int], params: Sequence[nn.Parameter], flat: Tensor) -> None:
        self.label, self.indices, self.params, self.flat = label, indices, params, flat
        self.views = make_views(params, flat)
        self.grads = [with_part(param, view) for param, view in zip(params, self.views, strict=True)]
        self.portions: list[Portion] = []
        first = begun = at = 0
        for position, view in enumerate(self.views, 1):
            at += view.numel() * (2 if view.is_complex() else 1)
            full = (at - begun) * flat.element_size() >= PORTION and not flat.is_cuda  # there, what counts is the number of kernels
            if full or position == len(params):
                part = slice(first, position)
                self.portions.append(Portion(first, indices[part], params[part], self.views[part], flat[begun:at]))
                first, begun = position, at
        self.pending = 0  # portions that are not gathered yet
        self.lacking: list[int] = []  # positions that had no gradient when the bucket was launched
        self.work: Work | None = None

    def gather(self, scale: float) -> None:
        """Gather the gradients that are not in ``flat`` yet, times ``scale``."""
        if scale == 0.0:  # a rank without data sends zeros: 0 * NaN is NaN
            self.lacking = list(range(len(self.params)))
            self.flat.zero_()
            for param in self.params:
                param.grad = None
            return
        for portion in self.portions:
            portion.add_rest(scale) if portion.gathered else portion.gather(scale)
        self.lacking = [at for portion in self.portions for at in portion.lacking]

    def reset(self) -> None:
        """Prepare for the next backward."""
        self.work, self.pending = None, len(self.portions)
        for portion in self.portions:
            portion.pending, portion.gathered = portion.watched, False

    def has_late(self) -> bool:
        """Return whether a gradient came after the launch."""
        self.lacking = [at for at in self.lacking if self.params[at].grad is None]
        return any(param.grad is not None for param in self.params)

    def gather_late(self, scale: float) -> Tensor:
        """Return the gradients that came after the launch, times ``scale``, as a tensor like ``flat``."""
        extra = torch.zeros_like(self.flat)
        for param, view in zip(self.params, make_views(self.params, extra), strict=True):
            if param.grad is not None:
                grad = local_part(param.grad)
                view.copy_(grad.to_dense() if grad.is_sparse else grad)
                param.grad = None
        return extra.mul_(scale)

    def set_gradients(self, users: Sequence[int] | None) -> None:
        """Make the reduced values the parameters' gradients. A parameter whose number of ``users`` is 0 gets none."""
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad
        for at in self.lacking:
            if users is not None and users[self.indices[at]] == 0:
                self.params[at].grad = None

    def rescale_to_users(self, users: Sequence[int], with_data: int) -> None:
        """Turn means over all ranks into means over the ranks that used the parameter."""
        for index, view in zip(self.indices, self.views, strict=True):
            if 0 < users[index] < with_data:
                view.mul_(with_data / users[index])


def make_views(params: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
    """Return a view of ``flat`` for each parameter, with its shape and, where it is dense, its strides.

    Of a DTensor, this rank's part counts.

    Each view has a version counter of its own (``.data``), so that a change of one gradient does not count as a change of the others.
    """
    views, at = [], 0
    for param in map(local_part, params):
        size = param.numel() * (2 if param.is_complex() else 1)
        part = flat[at : at + size]
        if param.is_complex():
            part = torch.view_as_complex(part.view(-1, 2))
        views.append((part.as_strided(param.shape, param.stride()) if is_dense(param) else part.view(param.shape)).data)
        at += size
    return views


def is_dense(tensor: Tensor) -> bool:
    """Return whether the strides fill memory without gap or overlap, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True

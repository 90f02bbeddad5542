"""Tensors of which a rank has a part: DTensors, without importing them (which would take a second of each start), and ``TensorPart``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from elastirun.train.errors import TrainError


class TensorPart(Tensor):
    """A box of a tensor whose other boxes are on other ranks, as a sharded optimizer has it in its state.

    ``local``: its memory. ``shape``: of the whole tensor; ``offsets``: where the box begins in it. State dicts and checkpoints know it;
    no operation but ``detach()`` and ``clone()`` works on it.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    local: Tensor
    offsets: tuple[int, ...]

    def __new__(cls, local: Tensor, shape: Sequence[int], offsets: Sequence[int]) -> TensorPart:
        part: TensorPart = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=local.dtype, device=local.device)
        part.local, part.offsets = local, tuple(offsets)
        return part

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if function in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(function(args[0].local), args[0].shape, args[0].offsets)
        raise TrainError(f"{function} on a part of a tensor, whose other parts are on other ranks: use what its to_local() returns")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"TensorPart({list(self.local.shape)} at {list(self.offsets)} of {list(self.shape)}, {self.dtype})"

    def to_local(self) -> Tensor:
        """Return this rank's box, in its memory."""
        return self.local


@functools.cache
def is_sharded_type(kind: type) -> bool:
    """Return whether tensors of this type are DTensors, or ``TensorPart``."""
    return kind is TensorPart or any(
        base.__name__ == "DTensor" and base.__module__.startswith("torch.distributed") for base in kind.__mro__
    )


def is_sharded(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor, or a ``TensorPart``."""
    return is_sharded_type(type(tensor))


def local_part(tensor: Any) -> Tensor:
    """Return this rank's part of a sharded tensor, in its memory, or ``tensor`` itself."""
    if not is_sharded(tensor):
        return tensor  # type: ignore[no-any-return]
    with torch.no_grad():
        found: Tensor = tensor.to_local()
    return found


def with_part(like: Any, part: Tensor) -> Tensor:
    """Return a DTensor as ``like`` is, with this rank's ``part``; ``part`` itself for another tensor."""
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        return DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def placed_as(like: Any, grad: Any) -> Tensor:
    """Return ``grad`` where the parts of ``like`` are.

    A gradient whose parts are still to be added up needs all ranks of the mesh here.
    """
    found: Tensor = grad.redistribute(placements=like.placements) if is_sharded(grad) and grad.placements != like.placements else grad
    return found

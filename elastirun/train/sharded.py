"""Tells DTensors from other tensors without importing them, which would take a second of each start of a worker."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


@functools.cache
def is_sharded_type(kind: type) -> bool:
    """Return whether tensors of this type are DTensors."""
    return any(base.__name__ == "DTensor" and base.__module__.startswith("torch.distributed") for base in kind.__mro__)


def is_sharded(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor."""
    return is_sharded_type(type(tensor))


def local_part(tensor: Any) -> Tensor:
    """Return this rank's part of a DTensor, in its memory, or ``tensor`` itself."""
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

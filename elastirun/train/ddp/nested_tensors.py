"""Tensors in nested containers, such as the inputs and outputs of a module: finds and moves them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

DEPTH = 8  # levels of containers that are searched for tensors


def find_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in ``value`` that need a gradient: in lists, tuples, sets, dicts and data classes, as in torch's class.

    Other objects are not searched, because one may refer to a whole configuration. A backward from a tensor in such an object begins at
    a parameter.
    """
    found: list[Tensor] = []
    layer, seen = [value], {id(value)}
    for _ in range(DEPTH + 1):
        found += [part for part in layer if isinstance(part, Tensor) and part.requires_grad]
        inside = {id(part): part for whole in layer for part in _parts(whole)}
        layer = [part for number, part in inside.items() if number not in seen]
        seen |= inside.keys()
    return found


def _parts(value: Any) -> Sequence[Any]:
    if isinstance(value, (list, tuple, set)):
        return list(value)
    if isinstance(value, Mapping):
        return list(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return ()


def to_device(values: Any, device: torch.device | None) -> Any:
    """Return ``values`` with every tensor in them on ``device`` (None: as they are)."""
    return values if device is None else tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), values)

"""What goes into a module and comes out of it: finding tensors, moving them, and state dicts without a prefix."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

DEPTH = 8  # objects within objects that are looked into for tensors


def find_tensors(value: Any) -> list[Tensor]:
    """The tensors that need a gradient, anywhere in ``value``: in containers, data classes and other objects' attributes."""
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
    if isinstance(value, dict):
        return list(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    if hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module, ModuleType, Tensor)):
        return list(vars(value).values())
    return ()


def to_device(values: Any, device: torch.device | None) -> Any:
    """``values`` with every tensor in them on ``device`` (None: as they are)."""
    return values if device is None else tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), values)


def without_prefix(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """A state dict hook: the names of the wrapped module, as if it were not wrapped."""
    inner = prefix + "module."
    for keys in (state, getattr(state, "_metadata", {})):
        for key in list(keys):  # all are taken out and put back, so that their order stays
            value = keys.pop(key)
            keys[prefix + key[len(inner) :] if key.startswith(inner) else prefix[:-1] if key == inner[:-1] else key] = value


def with_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A hook before loading: both forms are taken, bare names and those that begin with ``module.``."""
    wrapped = module.get_submodule("module")
    bare = {name for name, _ in (*wrapped.named_parameters(remove_duplicate=False), *wrapped.named_buffers(remove_duplicate=False))}
    for key in list(state):
        name = key[len(prefix) :]
        if key.startswith(prefix) and (name in bare or not name.startswith("module.")):
            state[f"{prefix}module.{name}"] = state.pop(key)

"""What goes into a module and comes out of it: finding tensors, moving them, and state dicts without a prefix."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

DEPTH = 8  # objects within objects that are looked into for tensors


def find_tensors(value: Any, depth: int = DEPTH) -> list[Tensor]:
    """The tensors that need a gradient, anywhere in ``value``: in containers, data classes and other objects' attributes."""
    if isinstance(value, Tensor):
        return [value] if value.requires_grad else []
    inside: Iterable[Any] = ()
    if depth and isinstance(value, (list, tuple, set)):
        inside = value
    elif depth and isinstance(value, dict):
        inside = value.values()
    elif depth and dataclasses.is_dataclass(value) and not isinstance(value, type):
        inside = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    elif depth and hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
        inside = vars(value).values()
    return [tensor for part in inside for tensor in find_tensors(part, depth - 1)]


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

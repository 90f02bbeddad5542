"""Puts a checkpoint's values and tensors back into a state: which tensors are to be filled, then ``load_state_dict`` everywhere."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastirun.checkpoint.record import clip
from elastirun.errors import CheckpointError
from elastirun.train.state.gc_pause import no_collection
from elastirun.train.state.names import ParameterNames, plain_names
from elastirun.train.state.per_rank import PerRank, is_stateful
from elastirun.train.state.tree import holds_objects, names_in, optimizer_names, state_dict_of
from elastirun.train.state.values import TAG, Node, is_tensor, items_of, join, to_value

PREFIXES = ("module.", "_orig_mod.")  # of every name in state dicts that were saved from a wrapper


class Saved(Protocol):
    """The type and the shape of a tensor in a checkpoint."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> Sequence[int]: ...


@runtime_checkable
class ShardedState(Protocol):
    """An optimizer that has state for parts of its parameters, the other parts being on other ranks."""

    def parts(self) -> Mapping[Tensor, Mapping[str, Any]]:
        """Return the state by parameter, as far as this rank has it."""

    def has_part(self, param: Tensor) -> bool:
        """Return whether this rank keeps state for ``param``."""

    def empty_part(self, param: Tensor, dtype: torch.dtype) -> Tensor:
        """Return an empty tensor for the state of this rank's part of ``param``."""


def _sharded(optimizer: Optimizer) -> ShardedState | None:
    return optimizer if isinstance(optimizer, ShardedState) else None


def targets(
    state: Mapping[str, Any], tree: Mapping[str, Node], saved: Mapping[str, Saved], rank: int = 0, strict: bool = True
) -> dict[str, Tensor]:
    """Return the tensors that are to be filled from the checkpoint, by name: those of ``state`` itself where it has them.

    ``tree``, ``saved``: the checkpoint's values, and its tensors by name. A tensor that ``state`` does not have yet, such as those of an
    optimizer before its first step, is made as the checkpoint and the parameter have it. Raises ``CheckpointError`` with the first path
    that the checkpoint does not have, unless ``strict`` is false: then the state keeps what it has there.
    """
    work = _Targets(saved, rank, strict, _names_of(state))
    with no_collection():
        work.add(state, tree, "")
    for name, tensor in work.found.items():
        if tensor.device.type == "meta":
            raise CheckpointError(f"{name} is on the meta device, which has no memory: call to_empty() before the checkpoint is restored")
    return work.found


def load(
    state: Mapping[str, Any], tree: Mapping[str, Node], tensors: Mapping[str, Tensor], rank: int = 0, strict: bool = True
) -> dict[str, Any]:
    """Put the checkpoint into ``state``: the same arguments as for ``targets``, and ``tensors``, its result, filled.

    Modules, optimizers and other objects get their part by ``load_state_dict``. Plain values replace those in the dicts and lists of
    ``state``; what it holds then is also returned, as a dict.
    """
    with no_collection():
        return dict(_Load(tensors, rank, strict, _names_of(state)).put(state, tree, ""))


def unused(state: Mapping[str, Any], tree: Mapping[str, Node]) -> list[str]:
    """Return the paths in the checkpoint that ``state`` has no place for."""
    return list(_unused(state, tree, "", _names_of(state)))


# -- which node belongs to what -----------------------------------------------------------------------------------------------


def _is_container(value: Any, path: str) -> bool:
    """Return whether ``value`` is a dict or a list whose parts are loaded one by one, and not a value that is replaced as a whole."""
    return isinstance(value, Mapping) and not path or isinstance(value, (Mapping, list, tuple)) and holds_objects(value)


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items() if isinstance(value, Mapping) else enumerate(value))


def _children(value: Any, node: Node, path: str, strict: bool) -> Iterator[tuple[Any, Any, Node, str]]:
    """Yield (key, value, node, path) of what the container ``value`` has and the checkpoint, too."""
    items = items_of(node)
    for key, each in _pairs(value):
        if key in items:
            yield key, each, items[key], join(path, key)
        elif strict and not isinstance(each, PerRank):
            there = ", ".join(map(str, items)) or "nothing"
            raise CheckpointError(f"the checkpoint has no {clip(join(path, key))}; {path or 'it'} has {clip(there, 200)}")


def _module_items(node: Node, names: Sequence[str]) -> dict[str, tuple[str, Node]]:
    """Return (key, node) in a module's node by the plain name, one of ``names``; keys may have a wrapper's prefix."""
    items = {str(key): (str(key), each) for key, each in items_of(node).items()}
    known = {*names}
    while items and not known & items.keys():
        prefix = next((prefix for prefix in PREFIXES if all(name.startswith(prefix) for name in items)), "")
        if not prefix:
            break
        items = {name[len(prefix) :]: found for name, found in items.items()}
    return items


def _module_pairs(module: nn.Module, node: Node, path: str, strict: bool) -> Iterator[tuple[str, Any, Node, str]]:
    """Yield (key in the module's state dict, value, node, path) of what the module has and the checkpoint, too."""
    saved = state_dict_of(module)
    names = names_in(module, saved, path)
    items = _module_items(node, names)
    for name, (key, value) in zip(names, saved.items(), strict=True):
        if name in items:
            own, each = items[name]
            yield key, value, each, join(path, own)
        elif strict:
            raise CheckpointError(f"the checkpoint has no {clip(join(path, name))}, which the module has")


def _names_of(state: Mapping[str, Any]) -> ParameterNames:
    names = ParameterNames()
    for path, module in _modules(state, ""):
        saved = state_dict_of(module)
        names.add(path, module, names_in(module, saved, path), saved.values())
    return names


def _modules(value: Any, path: str) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(value, nn.Module):
        yield path, value
    elif _is_container(value, path):
        for key, each in _pairs(value):
            yield from _modules(each, join(path, key))


# -- optimizers ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Param:
    """A parameter of an optimizer, at ``index``, and what the checkpoint has for it (``state``: None if nothing)."""

    index: int
    param: Tensor
    group: dict[str, Node] | None  # the saved group that has this parameter
    group_path: str
    state: Node | None
    state_path: str


def _optimizer_params(optimizer: Optimizer, node: Node, path: str, names: ParameterNames, strict: bool) -> list[_Param]:
    """Return the optimizer's parameters in order, each with what the checkpoint has under its name."""
    parts = items_of(node)
    groups = [items_of(group) for group in items_of(parts.get("param_groups")).values()]
    if "state" not in parts or not groups or not all(type(group.get("params")) is list for group in groups):
        raise CheckpointError(f"{path}: the checkpoint has no optimizer here: no state, or no param_groups with params")
    saved = {name: at for at, group in enumerate(groups) for name in group["params"]}
    states = {str(key): each for key, each in items_of(parts["state"]).items()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    found, sharded = [], _sharded(optimizer)
    for index, (param, name) in enumerate(zip(params, _saved_names(params, saved, optimizer_names(optimizer, names), path), strict=True)):
        at = saved.get(name)
        if at is None and strict:
            raise CheckpointError(f"{path}: the checkpoint's optimizer has no parameter {clip(str(name))}")
        own = None if at is None or (sharded is not None and not sharded.has_part(param)) else states.get(str(name))
        group = None if at is None else groups[at]
        found.append(_Param(index, param, group, f"{path}.param_groups.{at}", own, f"{path}.state.{name}"))
    return found


def _saved_names(params: Sequence[Tensor], saved: Mapping[Any, int], names: list[Any], path: str) -> list[Any]:
    """Return the names that the checkpoint has for ``params``: ``names``, or what stands in their places where there are numbers."""
    if any(type(name) is int for name in (*saved, *names)):
        if len(saved) != len(params):
            raise CheckpointError(
                f"{path}: the checkpoint's optimizer has {len(saved)} parameters without names, this one has {len(params)}"
            )
        return list(saved)
    return [next((each for each in (name, *(prefix + name for prefix in PREFIXES)) if each in saved), name) for name in names]


def _optimizer_state(optimizer: Optimizer, node: Node, path: str, params: list[_Param], tensor: Callable[[str], Any]) -> dict[str, Any]:
    """Return the state dict for ``optimizer``. What the checkpoint does not have is as it is now."""
    state: dict[int, Any] = {}
    sharded = _sharded(optimizer)
    now = optimizer.state if sharded is None else sharded.parts()
    for param in params:
        if param.state is not None:
            state[param.index] = to_value(param.state, param.state_path, tensor)
        elif param.group is None and param.param in now:
            state[param.index] = now[param.param]
    groups, first = [], 0
    saved_groups = items_of(items_of(node).get("param_groups"))
    for at, group in enumerate(optimizer.param_groups):
        own = params[first : first + len(group["params"])]
        first += len(own)
        same_place = {}
        if not own and len(saved_groups) == len(optimizer.param_groups):  # the parameters may be on other ranks
            same_place = {f"{path}.param_groups.{at}": items_of(saved_groups[at])}
        options = _group_options(group, own, same_place, path, tensor)
        groups.append({**options, "params": [param.index for param in own]})
    others = {key: each for key, each in items_of(node).items() if key not in ("state", "param_groups")}
    return {**{key: to_value(each, join(path, key), tensor) for key, each in others.items()}, "state": state, "param_groups": groups}


def _group_options(
    group: Mapping[str, Any], own: list[_Param], same_place: Mapping[str, dict[str, Node]], path: str, tensor: Callable[[str], Any]
) -> dict[str, Any]:
    """Return the saved options of ``group``; its present options if the checkpoint has none of its parameters.

    ``same_place``: the saved group that counts where this one has no parameters, by its path; none otherwise.
    """
    there = same_place or {param.group_path: param.group for param in own if param.group is not None}
    saved = [(at, {key: each for key, each in one.items() if key not in ("params", "param_names")}) for at, one in there.items()]
    if any(options != saved[0][1] for _, options in saved):
        raise CheckpointError(
            f"{path}: parameters of one group are in groups of the checkpoint with other options: build the groups as before"
        )
    now = {key: value for key, value in group.items() if key != "params" and (key == "param_names" or not saved)}
    return {**{key: to_value(each, join(at, key), tensor) for at, options in saved[:1] for key, each in options.items()}, **now}


# -- tensors to fill ----------------------------------------------------------------------------------------------------------

_Make = Callable[[Saved], Tensor]


def _empty(saved: Saved) -> Tensor:
    return torch.empty(tuple(saved.shape), dtype=saved.dtype)


def _like(sharded: ShardedState | None, param: Tensor, saved: Saved) -> Tensor:
    """Return an empty tensor of an optimizer's state. If it has the shape of ``param``, it is sharded like it."""
    if tuple(saved.shape) != tuple(param.shape):
        return torch.empty(tuple(saved.shape), dtype=saved.dtype, device=param.device if len(saved.shape) else "cpu")
    if sharded is not None:
        return sharded.empty_part(param, saved.dtype)
    return torch.empty_like(param.detach(), dtype=saved.dtype)


@dataclass
class _Targets:
    """Collects the tensors to fill."""

    saved: Mapping[str, Saved]
    rank: int
    strict: bool
    names: ParameterNames
    found: dict[str, Tensor] = field(default_factory=dict)

    def add(self, value: Any, node: Node, path: str) -> None:
        """Add the tensors for ``value``."""
        if isinstance(value, nn.Module):
            for _, each, own, at in _module_pairs(value, node, path, self.strict):
                self.add_value(own, at, each, _empty)
        elif isinstance(value, Optimizer):
            self._add_optimizer(value, node, path)
        elif isinstance(value, PerRank):
            if (saved := self.saved.get(f"{path}@{self.rank}")) is not None:
                self.found[f"{path}@{self.rank}"] = _empty(saved)
        elif is_stateful(value):
            self.add_value(node, path, value.state_dict(), _empty, copy=True)
        elif _is_container(value, path):
            for _, each, own, at in _children(value, node, path, self.strict):
                self.add(each, own, at)
        else:
            self.add_value(node, path, value, _empty)

    def _add_optimizer(self, optimizer: Optimizer, node: Node, path: str) -> None:
        sharded = _sharded(optimizer)
        now = optimizer.state if sharded is None else sharded.parts()
        for param in _optimizer_params(optimizer, node, path, self.names, self.strict):
            if param.state is not None:
                self.add_value(param.state, param.state_path, now.get(param.param), partial(_like, sharded, param.param))
        for key, own in items_of(node).items():
            if key != "state":
                self.add_value(own, join(path, key), None, _empty)

    def add_value(self, node: Node, path: str, now: Any, make: _Make, copy: bool = False) -> None:
        """Add the tensors in ``node``: where ``now`` has one, that one (with ``copy``: one like it, if the shape is right)."""
        if is_tensor(node):
            if path not in self.saved:
                raise CheckpointError(f"the checkpoint has no tensor {clip(path)}, although its values refer to it")
            if isinstance(now, Tensor) and copy:
                now = torch.empty_like(now.detach()) if tuple(now.shape) == tuple(self.saved[path].shape) else None
            self.found[path] = now if isinstance(now, Tensor) else make(self.saved[path])
            return
        if isinstance(now, Tensor):
            raise CheckpointError(f"{clip(path)} is a tensor, and the checkpoint has another value there")
        there = dict(_pairs(now)) if isinstance(now, (Mapping, list, tuple)) else {}
        for key, each in items_of(node).items():
            self.add_value(each, join(path, key), there.get(key), make, copy)


# -- load ---------------------------------------------------------------------------------------------------------------------


@dataclass
class _Load:
    """Gives each object its part."""

    tensors: Mapping[str, Tensor]
    rank: int
    strict: bool
    names: ParameterNames

    def put(self, value: Any, node: Node, path: str) -> Any:
        """Load ``node`` into ``value``, and return what stands in its place then."""
        if isinstance(value, nn.Module):
            self._put_module(value, node, path)
        elif isinstance(value, Optimizer):
            params = _optimizer_params(value, node, path, self.names, self.strict)
            value.load_state_dict(_optimizer_state(value, node, path, params, self.tensors.__getitem__))
        elif isinstance(value, PerRank):
            if (own := self.tensors.get(f"{path}@{self.rank}")) is not None:
                value.take_tensor(path, own)
        elif is_stateful(value):
            value.load_state_dict(to_value(node, path, self.tensors.__getitem__))
        elif _is_container(value, path):
            return self._put_all(value, node, path)
        else:
            return to_value(node, path, self.tensors.__getitem__)
        return value

    def _put_all(self, value: Any, node: Node, path: str) -> Any:
        new = {key: self.put(each, own, at) for key, each, own, at in _children(value, node, path, self.strict)}
        changed = {key: each for key, each in new.items() if each is not value[key]}
        if isinstance(value, (MutableMapping, list)):
            for key, each in changed.items():
                value[key] = each
            return value
        whole = {**dict(_pairs(value)), **new}
        return whole if isinstance(value, Mapping) else tuple(whole.values())

    def _put_module(self, module: nn.Module, node: Node, path: str) -> None:
        now = state_dict_of(module)
        found = {key: to_value(own, at, self.tensors.__getitem__) for key, _, own, at in _module_pairs(module, node, path, self.strict)}
        if _is_loaded_by_copying(module) and len(found) == len(now) and all(found[key] is now[key] for key in now):
            return  # torch's load_state_dict would copy each tensor to itself, and take a second for a thousand layers
        loaded = OrderedDict(found)
        if (layers := getattr(now, "_metadata", None)) is not None:
            versions = node.get("versions", {}) if isinstance(node, dict) and node.get(TAG) == "module" else {}
            names = zip(layers, plain_names(module, list(layers)), strict=True)
            loaded._metadata = {key: {**layers[key], "version": versions.get(name, 1)} for key, name in names}  # type: ignore[attr-defined]
        with torch.no_grad():
            module.load_state_dict(loaded, strict=self.strict)


def _is_loaded_by_copying(module: nn.Module) -> bool:
    """Return whether ``load_state_dict`` of ``module`` does nothing but copy the tensors: no layer has a way or a hook of its own."""
    return all(
        type(layer)._load_from_state_dict in _COPYING
        and type(layer).load_state_dict is nn.Module.load_state_dict
        and "load_state_dict" not in vars(layer)
        and all(map(_is_for_names, (*layer._load_state_dict_pre_hooks.values(), *layer._load_state_dict_post_hooks.values())))
        for layer in module.modules()
    )


def _is_for_names(hook: Any) -> bool:
    """Return whether a hook is one of a wrapper, which leaves the wrapper's name out of the names."""
    return str(getattr(getattr(hook, "hook", hook), "__module__", "")) in _FOR_NAMES


_FOR_NAMES = ("elastirun.train.ddp.state_dicts", "torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
_COPYING = (nn.Module._load_from_state_dict, nn.BatchNorm1d._load_from_state_dict)  # the latter adds what old checkpoints lack


def _unused(value: Any, node: Node, path: str, names: ParameterNames) -> Iterator[str]:
    if isinstance(value, nn.Module):
        known = {*names_in(value, state_dict_of(value), path)}
        yield from (join(path, key) for name, (key, _) in _module_items(node, list(known)).items() if name not in known)
    elif isinstance(value, Optimizer):
        pairs = _optimizer_params(value, node, path, names, strict=False)
        known = {param.state_path for param in pairs}
        own = {f"{path}.state.{key}" for key in items_of(items_of(node).get("state"))}
        yield from sorted(own - known)
    elif _is_container(value, path) and not isinstance(value, PerRank):
        items, there = items_of(node), dict(_pairs(value))
        for key, each in items.items():
            if key in there:
                yield from _unused(there[key], each, join(path, key), names)
            else:
                yield join(path, key)

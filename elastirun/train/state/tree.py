"""Tensors by name and a tree of values for what a training run is: modules, optimizers, schedulers, tensors, plain values.

The names are those that ``torch.distributed.checkpoint`` gives to ``get_model_state_dict`` and ``get_optimizer_state_dict``: the path in
the state, joined with dots; parameters without the names of wrappers; optimizers by the names of their parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer

from elastirun.checkpoint.record import clip
from elastirun.errors import CheckpointError
from elastirun.train.sharded import is_sharded_type
from elastirun.train.state.names import ParameterNames, plain_names
from elastirun.train.state.per_rank import PerRank, is_stateful
from elastirun.train.state.stages import Stages
from elastirun.train.state.values import PER_RANK, PLAIN, TAG, TENSOR, Fixed, Node, join, to_node

NESTED = "a checkpoint cannot hold a nested tensor; save the list that its unbind() returns"
_TENSORS = {Tensor, nn.Parameter, nn.Buffer}  # the exact types of nearly all tensors, beside DTensor


@dataclass(frozen=True)
class Flat:
    """A state as tensors by name, in the state's order, the tree of everything else, and its modules.

    The tensors are those of the state, neither copied nor detached: read them under ``torch.no_grad()``.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    tree: dict[str, Node] = field(default_factory=dict)
    modules: list[nn.Module] = field(default_factory=list)


def flatten(state: Mapping[str, Any], rank: int = 0) -> Flat:
    """Return ``state`` as tensors and a tree. Raises ``CheckpointError`` for values that a checkpoint cannot hold, with their path."""
    work = _Flattening(rank)
    try:
        tree = work.node(state, "")
        work.add_optimizers()
    except RecursionError:
        raise CheckpointError("the state has too many containers within each other; does one contain itself?") from None
    if type(tree) is not dict or TAG in tree:
        raise CheckpointError("""the state must be a dict whose keys are texts, as {"model": model, "optimizer": optimizer} is""")
    return Flat(work.tensors, tree, work.names.modules)


class _Flattening:
    """One pass through a state. Optimizers come last: their parameters' names are known when all modules have been seen."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.tensors: dict[str, Tensor] = {}
        self.names = ParameterNames()
        self.optimizers: list[tuple[str, Optimizer, dict[str, Node]]] = []

    def node(self, value: Any, path: str) -> Node:
        """Return the node of ``value``, with the containers that may hold objects taken apart here."""
        if isinstance(value, Mapping) and type(value).__name__ != "Counter" and all(type(key) is str and key != TAG for key in value):
            return {key: self.node(each, join(path, key)) for key, each in value.items()}
        if type(value) in (list, tuple) and any(map(holds_objects, value)):
            if at := next((at for at, each in enumerate(value, 1) if isinstance(each, PerRank)), 0):
                raise CheckpointError(f"{join(path, at - 1)}: a PerRank has to be an entry of a dict, not of a {type(value).__name__}")
            items = [self.node(each, join(path, at)) for at, each in enumerate(value)]
            return items if type(value) is list else {TAG: "tuple", "items": items}
        if isinstance(value, nn.Module):
            return self._module(value, path)
        if isinstance(value, Optimizer):
            self.optimizers.append((path, value, {}))
            return self.optimizers[-1][2]
        if isinstance(value, PerRank):
            self.take(f"{path}@{self.rank}", value.as_tensor(path))
            return PER_RANK
        if is_stateful(value):
            value = value.state_dict()
        return to_node(value, path, self.take)

    def take(self, name: str, tensor: Tensor) -> None:
        """Add a tensor. Raises ``CheckpointError`` if its name is there already, as with {"a": {"b.c": …}, "a.b": {"c": …}}."""
        if tensor.is_nested:
            raise CheckpointError(f"{name}: {NESTED}")
        if self.tensors.setdefault(name, tensor) is not tensor:
            raise CheckpointError(f"two tensors of the state have the name {clip(name)}: give one of the dicts another key")

    def _module(self, module: nn.Module, path: str) -> Node:
        saved = state_dict_of(module)
        names = names_in(module, saved, path)
        self.names.add(path, module, names, saved.values())
        if _all_tensors(saved.values()):
            items: Node = self._take_all(module, path, [(name, None) for name in names], list(saved.values()))
        else:
            items = {name: to_node(value, join(path, name), self.take) for name, value in zip(names, saved.values(), strict=True)}
        versions = _versions(module, saved)
        return {TAG: "module", "versions": versions, "items": items} if versions else items

    def add_optimizers(self) -> None:
        """Fill the nodes of the optimizers."""
        for path, optimizer, node in self.optimizers:
            names = optimizer_names(optimizer, self.names)
            packed = optimizer.state_dict()
            states = {names[key] if type(key) is int else key: value for key, value in packed.pop("state").items()}
            groups = [{**group, "params": [names[at] for at in group["params"]]} for group in packed.pop("param_groups")]
            node["state"] = self._optimizer_states(optimizer, states, f"{path}.state")
            node["param_groups"] = to_node(groups, f"{path}.param_groups", self.take)
            node.update({key: to_node(value, join(path, key), self.take) for key, value in packed.items()})

    def _optimizer_states(self, optimizer: Optimizer, states: Mapping[Any, Any], path: str) -> Node:
        if all(type(name) is str and type(entry) is dict for name, entry in states.items()) and TAG not in states:
            shape: list[_Shape] = [(name, tuple(entry)) for name, entry in states.items()]
            keys = {key for inner in {inner for _, inner in shape} for key in inner or ()}
            tensors = [value for entry in states.values() for value in entry.values()]
            if all(type(key) is str and key != TAG for key in keys) and _all_tensors(tensors):
                return self._take_all(optimizer, path, shape, tensors)
        return to_node(states, path, self.take)

    def _take_all(self, owner: object, path: str, shape: list[_Shape], tensors: list[Tensor]) -> Node:
        """Add ``tensors``, whose names ``shape`` gives, and return their node: the same as for the last save, if the names are the same."""
        last = _LAST.get(owner)
        if last is None or last.path != path or last.shape != shape:
            _LAST[owner] = last = _Last(path, shape)
        before = len(self.tensors)
        self.tensors.update(zip(last.names, tensors, strict=True))
        if len(self.tensors) < before + len(tensors):
            raise CheckpointError(f"names of tensors in {path} are those of other tensors of the state: give it another key")
        return last.node


_Shape = tuple[str, "tuple[str, ...] | None"]  # a tensor's key, or a parameter's name and the keys of its state


class _Last:
    """The names of the tensors of a module or an optimizer in the last save, and their node."""

    def __init__(self, path: str, shape: list[_Shape]) -> None:
        self.path, self.shape = path, shape
        prefix = path and f"{path}."
        self.names = [
            name for key, inner in shape for name in ([prefix + key] if inner is None else [f"{prefix}{key}.{one}" for one in inner])
        ]
        nodes = {inner: dict.fromkeys(inner or (), TENSOR) for _, inner in shape}
        self.node = Fixed({key: TENSOR if inner is None else nodes[inner] for key, inner in shape})


_LAST: WeakKeyDictionary[object, _Last] = WeakKeyDictionary()


def _all_tensors(values: Iterable[object]) -> bool:
    return all(kind in _TENSORS or is_sharded_type(kind) for kind in {*map(type, values)})


def holds_objects(value: object) -> bool:
    """Return whether ``value`` is or contains something that is not a plain value: a module, an optimizer, …"""
    if type(value) in PLAIN:
        return False
    if isinstance(value, (list, tuple)):
        return any(map(holds_objects, value))
    if isinstance(value, Mapping):
        return any(map(holds_objects, value.values()))
    return isinstance(value, (nn.Module, Optimizer, PerRank)) or is_stateful(value)


def state_dict_of(module: nn.Module) -> Mapping[str, Any]:
    """Return the module's state dict with the parameters themselves, unless the class has a method of its own for it."""
    if getattr(module.state_dict, "__func__", None) in (nn.Module.state_dict, Stages.state_dict):
        return module.state_dict(keep_vars=True)
    return module.state_dict()


def names_in(module: nn.Module, saved: Mapping[str, Any], path: str) -> list[str]:
    """Return the plain names of what is in the module's state dict, in its order. Raises ``CheckpointError`` if two are the same."""
    names = plain_names(module, list(saved))
    if TAG in names or len({*names}) < len(names):
        raise CheckpointError(f"{path}: names in the module's state dict are not unique, or one is {TAG!r}")
    return names


def _versions(module: nn.Module, saved: Mapping[str, Any]) -> dict[str, int]:
    """Return the versions of the layers' state dicts by name, beyond the usual 1."""
    layers = getattr(saved, "_metadata", None) or {}
    versions = {name: entry.get("version", 1) for name, entry in layers.items()}
    odd = {name: version for name, version in versions.items() if type(version) is int and version != 1}
    return dict(zip(plain_names(module, list(odd)), odd.values(), strict=True)) if odd else {}


def optimizer_names(optimizer: Optimizer, names: ParameterNames) -> list[Any]:
    """Return the names of the optimizer's parameters, in order. Numbers, as torch has them, if they are not of the state's modules."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return names.of(params) or list(range(len(params)))

"""The names of a module's tensors as if nothing were wrapped: without ``module.`` of DDP, ``_orig_mod.`` of torch.compile and so on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from elastirun.errors import CheckpointError

_CHILDREN = ("_orig_mod", "_checkpoint_wrapped_module")  # of torch.compile, of activation checkpoints
_OLD_FSDP = "_fsdp_wrapped_module"


def wrapped_child(module: object) -> str:
    """Return the name of the only child of ``module`` if it is a wrapper, else an empty text."""
    if isinstance(module, (DistributedDataParallel, DataParallel)):
        return "module"
    if isinstance(module, nn.Module):
        return next((name for name in _CHILDREN if name in module._modules), "")
    return ""


def plain_names(module: nn.Module, names: Sequence[str]) -> list[str]:
    """Return ``names`` of tensors or layers below ``module`` without the names of wrappers. Raises ``CheckpointError`` for FSDP1."""
    cut, inner = "", module
    while child := wrapped_child(inner):
        cut, inner = f"{cut}{child}.", getattr(inner, child)
    text = "\n".join(names)
    if _OLD_FSDP in text or _OLD_FSDP in inner._modules:
        raise CheckpointError("a FullyShardedDataParallel module shards flat parameters: use torch.distributed.fsdp.fully_shard instead")
    if text.count("module.") + sum(map(text.count, _CHILDREN)) > len(names) * cut.count("."):
        return [_plain_name(module, name) for name in names]  # the word occurs within names: it may be a wrapper's, or not
    return [name[len(cut) :] if name.startswith(cut) else name for name in names] if cut else list(names)


def _plain_name(module: nn.Module, name: str) -> str:
    parts, at = [], module
    for part in name.split("."):
        if part != wrapped_child(at):
            parts.append(part)
        at = getattr(at, part, at)
    return ".".join(parts)


class ParameterNames:
    """Finds the name of a parameter by the object: of the modules in a state, in their order."""

    def __init__(self) -> None:
        self._modules: list[tuple[str, nn.Module, dict[int, str]]] = []

    @property
    def modules(self) -> list[nn.Module]:
        """Return the modules, in their order."""
        return [module for _, module, _ in self._modules]

    def add(self, path: str, module: nn.Module, names: Iterable[str], tensors: Iterable[Any]) -> None:
        """Add the ``tensors`` of the module at ``path``. A tensor with several names has the first."""
        found: dict[int, str] = {}
        for name, tensor in zip(names, tensors, strict=True):
            found.setdefault(id(tensor), name)
        self._modules.append((path, module, found))

    def of(self, params: Sequence[Tensor]) -> list[str] | None:
        """Return the names of ``params``. If they belong to several modules, each name begins with its module's path. None if a parameter
        belongs to no module.
        """
        for _, _, found in self._modules:
            if all(id(param) in found for param in params):
                return [found[id(param)] for param in params]
        for at, (path, module, found) in enumerate(self._modules):  # the state dict of a module may leave parameters out
            named = dict(module.named_parameters())
            names = plain_names(module, list(named))
            self._modules[at] = path, module, {**dict(zip(map(id, named.values()), names, strict=True)), **found}
        for _, _, found in self._modules:
            if all(id(param) in found for param in params):
                return [found[id(param)] for param in params]
        # A parameter that several modules share has the name that the first of them gives it.
        everywhere = {key: f"{path}.{name}" for path, _, found in reversed(self._modules) for key, name in found.items()}
        return [everywhere[id(param)] for param in params] if all(id(param) in everywhere for param in params) else None

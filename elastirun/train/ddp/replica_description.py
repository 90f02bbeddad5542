"""Describes what has to be the same on every rank, a line for each: everything that decides which reductions there are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from elastirun.train.errors import WrongUse
from elastirun.train.sharded import is_sharded, local_part


def describe(tensors: Iterable[tuple[str, Tensor]], sparse: Collection[str], options: Mapping[str, Any], trained: bool = True) -> list[str]:
    """Return a line for each of ``tensors``, of which ``sparse`` have sparse gradients, and for each option.

    ``trained``: the lines say which parameters are frozen.
    """
    lines = [
        f"{name} {tuple(t.shape)} {t.dtype}{strides(t)}{part(t)}{frozen(t) * trained}{' sparse' * (name in sparse)}" for name, t in tensors
    ]
    return lines + [f"{name}={value}" for name, value in options.items()]


def strides(tensor: Tensor) -> str:
    """Return " with strides (…)", empty for a contiguous tensor. Strides must match, because a gradient has those of its parameter."""
    return "" if tensor.is_contiguous() else f" with strides {tensor.stride()}"


def part(tensor: Any) -> str:
    """Return " (…) at […]" for a DTensor: the shape of this rank's part, and the rank's place; else empty."""
    if not is_sharded(tensor):
        return ""
    return f" {tuple(local_part(tensor).shape)} at {tensor.device_mesh.get_coordinate()}"


def frozen(tensor: Tensor) -> str:
    """Return " frozen" for a parameter that is not trained."""
    return "" if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else " frozen"


def sparse_names(module: nn.Module) -> set[str]:
    """Return the names of the parameters whose gradients are sparse."""
    return {
        f"{name}.weight" if name else "weight"
        for name, part in module.named_modules()
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse
    }


def check_reducible(named: Sequence[tuple[str, nn.Parameter]], group: dist.ProcessGroup | None) -> None:
    """Raise TrainError for parameters that cannot be reduced over ``group``. None: DTensors cannot."""
    reduced = set(() if group is None else dist.get_process_group_ranks(group))
    for name, param in named:
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise WrongUse("the module has lazy parameters without a shape: run a forward before wrapping it")
        if is_sharded(param) and (group is None or len(reduced & set(_ranks_of(param))) > 1):
            raise WrongUse(
                f"{name} is a DTensor, whose shards are not copies: give DistributedDataParallel "
                f"device_mesh=, a dimension of the mesh that {name} is not on, or use "
                "torch.distributed.fsdp.fully_shard"
            )


def _ranks_of(tensor: Any) -> list[int]:
    """Return the ranks that have parts of a DTensor."""
    ranks: list[int] = tensor.device_mesh.mesh.flatten().tolist()
    return ranks

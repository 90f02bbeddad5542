"""Copies the state of a run from one rank to the others, by collectives: parameters, buffers, optimizers, positions, plain values."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist

from .checkpoints.loading import load, targets
from .checkpoints.per_rank import PerRank
from .checkpoints.tree import flatten
from .checkpoints.values import DTYPES, decode_values, encode_values
from .collectives import copy_from, gather
from .train_state import TrainState

CPU = torch.device("cpu")


def copy_state(state: TrainState, source: int, receives: bool, group: dist.ProcessGroup) -> None:
    """Copy the state of rank ``source`` to the ranks that call this with ``receives``. Every rank of ``group`` calls it.

    A rank changes its state only when everything has come, so the loss of a peer meanwhile leaves it as it was. Values of which each rank
    has its own (``PerRank``) are not copied.
    """
    rank = dist.get_rank(group)
    shared: dict[str, Any] = {name: part for name, part in state.items() if not isinstance(part, PerRank)}
    text = ""
    tensors: list[torch.Tensor] = []
    if rank == source:
        flat = flatten(shared, rank)
        tensors = [tensor.detach().to(CPU) for tensor in flat.tensors.values()]
        shapes = [[name, _dtype(tensor), list(tensor.shape)] for name, tensor in flat.tensors.items()]
        text = json.dumps({"values": encode_values(flat.tree).decode("ascii"), "tensors": shapes})
    told = json.loads(_text_from(source, text, group))
    if rank != source:
        tensors = [torch.empty(shape, dtype=DTYPES[dtype], device=CPU) for _, dtype, shape in told["tensors"]]
    copy_from(source, tensors, group)
    if receives:
        came = {name: tensor for (name, _, _), tensor in zip(told["tensors"], tensors, strict=True)}
        _put(state, shared, told["values"].encode("ascii"), came, rank)


class StateKept:
    """A copy, in this process, of the parts ``names`` of a state, to be put back."""

    def __init__(self, state: TrainState, names: Collection[str]) -> None:
        self._names = names
        flat = flatten({name: state[name] for name in names})
        self._values = encode_values(flat.tree)
        self._tensors = {name: tensor.detach().clone() for name, tensor in flat.tensors.items()}

    def put_back(self, state: TrainState) -> None:
        """Bring the parts back to what they were."""
        _put(state, {name: state[name] for name in self._names}, self._values, self._tensors, 0)


def _put(state: TrainState, parts: dict[str, Any], values: bytes, tensors: Mapping[str, torch.Tensor], rank: int) -> None:
    """Put ``values`` and ``tensors``, as ``flatten`` has taken them apart, into ``parts`` of ``state``."""
    tree = decode_values(values)
    wanted = targets(parts, tree, tensors, rank)
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(tensors[name])
    state.update(load(parts, tree, wanted, rank))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _text_from(source: int, text: str, group: dist.ProcessGroup) -> str:
    """Return the ``text`` of rank ``source``."""
    data = bytearray(text.encode())
    [size] = gather([len(data)], group, CPU)[source]
    box = torch.frombuffer(data, dtype=torch.uint8) if dist.get_rank(group) == source else torch.empty(size, dtype=torch.uint8)
    copy_from(source, [box], group)
    return bytes(box.tolist()).decode()

"""Copies the state of a run from one rank to the others, by collectives: parameters, buffers, optimizers, positions, plain values."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist

from elastirun.train.errors import CheckpointError
from elastirun.train.groups.collectives import copy_from, gather
from elastirun.train.state.loading import load, targets
from elastirun.train.state.per_rank import PerRank
from elastirun.train.state.train_state import TrainState
from elastirun.train.state.tree import flatten
from elastirun.train.state.values import DTYPES, decode_values, encode_values

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
        shapes = [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in flat.tensors.items()]
        text = json.dumps({"values": encode_values(flat.tree).decode("ascii"), "tensors": shapes})
    told = json.loads(_text_from(source, text, group))
    if rank != source:
        tensors = [torch.empty(shape, dtype=DTYPES[dtype], device=CPU) for _, dtype, shape in told["tensors"]]
    copy_from(source, tensors, group)
    if receives:
        tree = decode_values(told["values"].encode("ascii"))
        came = {name: tensor for (name, _, _), tensor in zip(told["tensors"], tensors, strict=True)}
        wanted = targets(shared, tree, came, rank)
        with torch.no_grad():
            for name, tensor in wanted.items():
                tensor.copy_(came[name])
        state.update(load(shared, tree, wanted, rank))


class StateKept:
    """A copy of the parts ``names`` of a state, to be put back; its tensors stay on the devices of the originals.

    Raises CheckpointError for a part that a checkpoint cannot hold.
    """

    def __init__(self, state: TrainState, names: Collection[str]) -> None:
        self._names = names
        flat = flatten({name: state[name] for name in names})
        self._values = encode_values(flat.tree)
        self._tensors = {name: tensor.detach().clone() for name, tensor in flat.tensors.items()}

    def put_back(self, state: TrainState) -> None:
        """Bring the parts back to what they were: tensors in place, where they have the same form still."""
        parts = {name: state[name] for name in self._names}
        try:
            now = flatten(parts).tensors
        except CheckpointError:  # the script has put something there that cannot be saved
            now = {}
        back = {}
        for name, kept in self._tensors.items():
            here = now.get(name)
            fits = here is not None and (here.shape, here.dtype, here.device) == (kept.shape, kept.dtype, kept.device)
            back[name] = here.detach().copy_(kept) if here is not None and fits else kept.clone()
        state.update(load(parts, decode_values(self._values), back, 0))


def _text_from(source: int, text: str, group: dist.ProcessGroup) -> str:
    """Return the ``text`` of rank ``source``."""
    data = bytearray(text.encode())
    [size] = gather([len(data)], group, CPU)[source]
    box = torch.frombuffer(data, dtype=torch.uint8) if dist.get_rank(group) == source else torch.empty(size, dtype=torch.uint8)
    copy_from(source, [box], group)
    return bytes(box.tolist()).decode()

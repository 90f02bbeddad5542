"""Refuses a state in which ranks have other tensors than rank 0: a checkpoint holds one of them for all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from elastirun.errors import CheckpointError
from elastirun.train.checkpoints.ranks import Ranks, on_every_rank
from elastirun.train.groups.collectives import digest
from elastirun.train.sharded import is_sharded, local_part
from elastirun.train.state.tree import Flat

SAMPLE = 64  # elements of a tensor that are compared, evenly spaced
CLOSE = 0.02  # of the largest of them: whole layers beside split ones may differ in last bits between ranks
ADVICE = (
    "put what each rank has of its own into PerRank or DTensors, and save each stage of a pipeline with a "
    "Checkpointer of its own (another directory, and group=)"
)

Samples = Mapping[str, Sequence[float]]


def verify_same_tensors(flat: Flat, ranks: Ranks) -> None:
    """Raise CheckpointError on every rank if any has a tensor that rank 0 has not, or has with other values.

    Every rank calls it. Buffers of modules may differ, because forwards change them on each rank. Of a
    DTensor only the name counts.
    """
    own = samples(flat, ranks.rank)
    text = json.dumps(own)
    if len({theirs for (theirs,) in ranks.gather([digest(text)])}) > 1:
        first: Samples = json.loads(ranks.from_first(text))
        on_every_rank(ranks, lambda: compare(own, first))


def samples(flat: Flat, rank: int) -> dict[str, list[float]]:
    """Return some elements of each tensor that has to be a copy of rank 0's; none of buffers and DTensors."""
    loose = {local_part(buffer).data_ptr() for module in flat.modules for buffer in module.buffers()}
    return {
        name: [] if is_sharded(tensor) or tensor.data_ptr() in loose else _sample(tensor)
        for name, tensor in flat.tensors.items()
        if not name.endswith(f"@{rank}")
    }


def _sample(tensor: Tensor) -> list[float]:
    plain = tensor.detach()
    elements = (torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain).reshape(-1)
    try:
        found: list[float] = elements[:: max(1, elements.numel() // SAMPLE)][:SAMPLE].to(torch.float64).tolist()
    except (RuntimeError, NotImplementedError):  # packed bits, of which torch makes no numbers
        return []
    return found


def compare(own: Samples, first: Samples) -> None:
    """Raise CheckpointError unless the tensors in ``own`` are copies of those in ``first``."""
    for name, values in own.items():
        if name not in first:
            raise CheckpointError(f"{name} is not in the state of rank 0, so it could not be restored: {ADVICE}")
        close = CLOSE * max(map(abs, [*values, *first[name]]), default=0.0)
        if len(values) == len(first[name]) and any(abs(a - b) > close for a, b in zip(values, first[name], strict=True)):
            raise CheckpointError(f"{name} is another tensor than that of rank 0: {ADVICE}")

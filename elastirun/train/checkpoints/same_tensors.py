"""Compares the states of the ranks: what has one name has to be the same on all; what only some ranks have, the others learn of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from elastirun.errors import CheckpointError
from elastirun.train.checkpoints.ranks import Ranks, on_every_rank
from elastirun.train.groups.collectives import digest
from elastirun.train.sharded import is_sharded, local_part
from elastirun.train.state.layout import local_box
from elastirun.train.state.tree import Flat
from elastirun.train.state.union import Tree, Union, group_options, verify_same_options
from elastirun.train.state.values import decode_values

SAMPLE = 64  # elements of a tensor that are compared, evenly spaced
CLOSE = 0.02  # of the largest of them: whole layers beside split ones may differ in last bits between ranks
ADVICE = (
    "put what each rank has of its own into PerRank or DTensors, and let the stages of a pipeline keep the names that their "
    "layers have in the whole model (Stages)"
)

Samples = Mapping[str, Sequence[float]]


def kind_of(flat: Flat, rank: int) -> int:
    """Return a number that is the same on ranks that have the same names of tensors, those of ``PerRank`` aside."""
    return digest("\n".join(sorted(_shared_names(flat, rank))))


def _shared_names(flat: Flat, rank: int) -> list[str]:
    return [name for name in flat.tensors if not name.endswith(f"@{rank}")]


def verify_same_tensors(flat: Flat, ranks: Ranks) -> None:
    """Raise CheckpointError on every rank if two have tensors of one name, or parts of one box, with different values.

    Every rank calls it. Buffers of modules may differ, because forwards change them on each rank.
    """
    _verify(samples(flat, ranks.rank), ranks, among_all=True)
    _verify(part_samples(flat), ranks, among_all=False)


def _verify(own: Samples, ranks: Ranks, among_all: bool) -> None:
    """Compare ``own`` with what the first rank has that has the same names. ``among_all``: other ranks may have some of them, too."""
    key, text = digest("\n".join(sorted(own))), json.dumps(own)
    told = ranks.gather([key, digest(text)])
    values: dict[int, set[int]] = {}
    for names, theirs in told:
        values.setdefault(0 if among_all else names, set()).add(theirs)
    if not (odd := {names for names, found in values.items() if len(found) > 1}):
        return
    is_odd, first = among_all or key in odd, dict[str, tuple[int, Sequence[float]]]()
    for rank, spelled in ranks.from_first_of_each(key if is_odd else 0, text if is_odd else "{}").items():
        for name, found in json.loads(spelled).items():
            first.setdefault(name, (rank, found))
    on_every_rank(ranks, lambda: compare(own if is_odd else {}, first))


def samples(flat: Flat, rank: int) -> dict[str, list[float]]:
    """Return some elements of each tensor that has to be a copy of the other ranks'; none of buffers and parts."""
    loose = {local_part(buffer).data_ptr() for module in flat.modules for buffer in module.buffers()}
    return {
        name: [] if is_sharded(tensor) or tensor.data_ptr() in loose else _sample(tensor)
        for name in _shared_names(flat, rank)
        for tensor in (flat.tensors[name],)
    }


def part_samples(flat: Flat) -> dict[str, list[float]]:
    """Return some elements of each part of a tensor; the name has its box, too."""
    parts = [(name, *local_box(name, tensor)) for name, tensor in flat.tensors.items() if is_sharded(tensor)]
    return {f"{name} at {box.offsets} {box.sizes}": _sample(local) for name, box, local in parts}


def _sample(tensor: Tensor) -> list[float]:
    plain = tensor.detach()
    elements = (torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain).reshape(-1)
    found: list[float] = []
    with suppress(RuntimeError, NotImplementedError):  # packed bits, of which torch makes no numbers
        found = elements[:: max(1, elements.numel() // SAMPLE)][:SAMPLE].to(torch.float64).tolist()
    return found


def compare(own: Samples, first: Mapping[str, tuple[int, Sequence[float]]]) -> None:
    """Raise CheckpointError unless the tensors in ``own`` are copies of those in ``first``, each with the first rank that has it."""
    for name, values in own.items():
        rank, theirs = first[name]
        close = CLOSE * max(map(abs, [*values, *theirs]), default=0.0)
        if len(values) == len(theirs) and any(abs(a - b) > close for a, b in zip(values, theirs, strict=True)):
            raise CheckpointError(f"{name.partition(' at (')[0]} is another tensor than that of rank {rank}: {ADVICE}")


def union_of(ranks: Ranks, kind: int, values: bytes) -> Union | None:
    """Return what all ranks have together; None if all have the same tensors. Every rank calls it with its ``values``.

    ``kind``: see ``kind_of``; of ranks of one kind the first one counts.
    """
    if len({theirs for (theirs,) in ranks.gather([kind])}) == 1:
        return None
    firsts = ranks.from_first_of_each(kind, values.decode())
    trees = [decode_values(text.encode()) for text in firsts.values()]
    return Union(trees, list(firsts).index(ranks.rank) if ranks.rank in firsts else None, decode_values(values))


def verify_options(ranks: Ranks, tree: Tree) -> None:
    """Raise CheckpointError on every rank where the groups of an optimizer have other options on another one. Every rank calls it."""
    text = json.dumps(list(group_options(tree)))
    kind = digest(text)
    if len({theirs for (theirs,) in ranks.gather([kind])}) > 1:
        verify_same_options({rank: json.loads(theirs) for rank, theirs in ranks.from_first_of_each(kind, text).items()})

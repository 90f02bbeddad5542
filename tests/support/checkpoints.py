"""A checkpoint's files written without a writer process, for tests of what is in them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elastirun.train.checkpoints.reading import files_in, fill, tensors_in
from elastirun.train.state.layout import Plan, decode, encode, image_files, pieces, plan
from elastirun.train.state.loading import load, targets
from elastirun.train.state.tree import flatten
from elastirun.train.state.values import decode_values, encode_values


def write(folder: Path, state: Mapping[str, Any], nodes: tuple[int, ...] | None = None) -> Plan:
    """Write ``state`` into ``folder``, each rank of the group its files."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    flat = flatten(state, rank)
    own = encode(pieces(flat))
    texts = [own] * world
    if world > 1:
        dist.all_gather_object(texts, own)
    made = plan([decode(text) for text in texts], nodes or (0,) * world)
    image = image_files(made, rank)
    memory = bytearray(image.end)
    image.write_shells(memory)
    with torch.no_grad():
        for to, source in zip(image.destinations(memory), image.sources(flat), strict=True):
            to.copy_(source)
    for file in made.written_by(rank):
        at, size = image.files[file.name]
        (folder / file.name).write_bytes(memory[at : at + size])
    if rank == 0:
        (folder / "tensors.json").write_bytes(made.tensors_json())
        (folder / "values.json").write_bytes(encode_values(flat.tree))
    if world > 1:
        dist.barrier()
    return made


def read(folder: Path, state: Mapping[str, Any], strict: bool = True) -> dict[str, Any]:
    """Restore ``state`` from ``folder``."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    tree = decode_values((folder / "values.json").read_bytes())
    saved = tensors_in((folder / "tensors.json").read_bytes())
    found = targets(state, tree, saved, rank, strict)
    fill(saved, files_in(folder), found, strict)
    return load(state, tree, found, rank, strict)

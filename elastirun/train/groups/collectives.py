"""Small collectives, with tensors alone: neither numpy nor pickled objects."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, zip_longest

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from elastirun.train.errors import ModelMismatch
from elastirun.train.groups.waits import finish
from elastirun.train.sharded import local_part

MOST_NAMED = 8  # ranks in a message
CHUNK = 32 << 20  # bytes that are broadcast together; a copy of so many bytes is held meanwhile


def backends_of(name: str) -> Mapping[str, str]:
    """Return the backend for each type of device, by the ``name`` that was given for a group, such as "cpu:gloo,cuda:nccl"."""
    found: Mapping[str, str] = c10d.BackendConfig(c10d.Backend(name)).get_device_backend_map()
    return found


def exchanged_on(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Return where numbers lie that the ranks of ``group`` exchange: on the host if gloo is there, else on ``device``."""
    if device.type == "cpu":
        return device
    return torch.device("cpu") if backends_of(c10d._world.pg_map[group][0]).get("cpu") == "gloo" else device


def gather(values: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    """Return the ``values`` (64 bits each, equally many everywhere) of every rank, in rank order."""
    device = exchanged_on(group, device)
    mine = torch.tensor(values, dtype=torch.int64, device=device)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    finish(dist.all_gather(parts, mine, group, async_op=True), device)
    return [part.tolist() for part in parts]


def broadcast(values: Sequence[int], group: dist.ProcessGroup, device: torch.device, source: int = 0) -> list[int]:
    """Return the ``values`` of rank ``source``; the other ranks give equally many, whatever these are."""
    device = exchanged_on(group, device)
    box = torch.tensor(values, dtype=torch.int64, device=device)
    finish(dist.broadcast(box, dist.get_global_rank(group, source), group, async_op=True), device)
    numbers: list[int] = box.tolist()
    return numbers


def all_reduce(tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    """Replace ``tensor`` by its sum over the ranks, or by what ``op`` makes of it."""
    finish(dist.all_reduce(tensor, op, group, async_op=True), tensor.device)


def gather_text(text: str, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """Return the ``text`` of every rank, in rank order."""
    data = list(text.encode())
    sizes = [size for (size,) in gather([len(data)], group, device)]
    padded = gather(data + [0] * (max(sizes) - len(data)), group, device)
    return [bytes(codes[:size]).decode() for codes, size in zip(padded, sizes, strict=True)]


def digest(text: str) -> int:
    """Return 63 bits of ``text``'s SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def copy_from(source: int, tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Copy the values of rank ``source`` (of DTensors, its parts) to every rank, a chunk at a time."""
    first = dist.get_global_rank(group, source)
    with torch.no_grad():
        for _, same in groupby(sorted(map(local_part, tensors), key=_kind), key=_kind):
            chunk: list[Tensor] = []
            nbytes = 0
            for tensor in [*same, None]:
                if chunk and (tensor is None or nbytes + tensor.nbytes > CHUNK):
                    flat = torch.cat([t.reshape(-1) for t in chunk])
                    sent = torch.view_as_real(flat) if flat.is_complex() else flat  # gloo of torch 2.6: no complex
                    finish(dist.broadcast(sent, first, group, async_op=True), sent.device)
                    for t, part in zip(chunk, torch.split(flat, [t.numel() for t in chunk]), strict=True):
                        t.copy_(part.view(t.shape))
                    chunk, nbytes = [], 0
                if tensor is not None:
                    chunk.append(tensor)
                    nbytes += tensor.nbytes


def _kind(tensor: Tensor) -> tuple[str, str]:
    return str(tensor.dtype), str(tensor.device)


def verify_same(lines: Sequence[str], what: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise ModelMismatch on every rank unless ``lines`` are the same on all; the message shows the first difference."""
    digests = gather([digest("\n".join(lines))], group, device)
    if all(d == digests[0] for d in digests):
        return
    everyone = [text.split("\n") for text in gather_text("\n".join(lines), group, device)]
    for column in zip_longest(*everyone, fillvalue="nothing"):
        if len(set(column)) > 1:
            who = {text: ranks(r for r, c in enumerate(column) if c == text) for text in column}
            shown = "; ".join(f"{text or 'nothing'} on {where}" for text, where in who.items())
            raise ModelMismatch(f"the ranks do not have the same {what}: the first difference is {shown}")
    raise ModelMismatch(f"the ranks do not have the same {what}")


def ranks(numbers: Iterable[int]) -> str:
    """Return "rank 3" or "ranks 0, 1, 5 and 12 more"."""
    found = list(numbers)
    shown = ", ".join(map(str, found[:MOST_NAMED])) + (f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else "")
    return f"rank{'s' if len(found) != 1 else ''} {shown}"

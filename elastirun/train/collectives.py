"""Small collectives, with tensors alone: neither numpy nor pickled objects."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from .errors import ModelMismatch, TrainError

OWN = {"gloo", "nccl"}  # backends for which ``make_own_group`` makes a group
CHUNK = 32 << 20  # bytes that are broadcast together; a copy of so many bytes is held meanwhile


def find_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return ``group``, or the default one. Raises TrainError if there is none, or if this process is not a member."""
    if not dist.is_available() or (group is None and not dist.is_initialized()):
        raise TrainError("there is no process group: call torch.distributed.init_process_group() before, or give process_group=")
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup) or dist.get_rank(found) < 0:
        raise TrainError("this process is not a member of the process group that was given")
    return found


def make_own_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Return a group of the same ranks for the caller alone; every rank of ``group`` calls it at the same point.

    Collectives of others in ``group`` are then not in the way, in whatever order they run. ``torch.distributed.new_group`` does not do:
    either it needs all ranks of the world, or it makes the group's name from the number of groups of a rank, which may differ between
    ranks. With another backend than gloo or NCCL, the result is ``group`` itself.
    """
    backend = c10d._world.pg_map[group][0]
    if dist.get_world_size(group) == 1 or not set(c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map().values()) <= OWN:
        return group
    [number] = broadcast([time.time_ns()], group, device)
    members = dist.get_process_group_ranks(group)
    options = getattr(group._get_backend(device), "options", None)
    made: dist.ProcessGroup = c10d._new_process_group_helper(
        len(members),
        dist.get_rank(group),
        members,
        c10d.Backend(backend),
        c10d._get_process_group_store(group),
        cast(Any, f"elastirun {number}"),
        timeout=getattr(options, "_timeout", c10d.default_pg_timeout),
    )[0]
    c10d._world.pg_group_ranks[made] = {member: rank for rank, member in enumerate(members)}
    return made


def end_own_group(made: dist.ProcessGroup, group: dist.ProcessGroup) -> None:
    """End the group that ``make_own_group`` has made of ``group``, unless the program has ended all groups already.

    A rank need not wait for the others to call it. NCCL's groups could wait for them there, so they are aborted.
    """
    if made is not group and made in c10d._world.pg_map:
        end = c10d._abort_process_group if dist.get_backend(made) == "nccl" else dist.destroy_process_group
        end(made)


def gather(values: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    """Return the ``values`` (64 bits each, equally many everywhere) of every rank, in rank order."""
    mine = torch.tensor(values, dtype=torch.int64, device=device)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group)
    return [part.tolist() for part in parts]


def broadcast(values: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """Return rank 0's ``values``; the other ranks give equally many, whatever these are."""
    box = torch.tensor(values, dtype=torch.int64, device=device)
    dist.broadcast(box, dist.get_global_rank(group, 0), group)
    numbers: list[int] = box.tolist()
    return numbers


def gather_text(text: str, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """Return the ``text`` of every rank, in rank order."""
    data = list(text.encode())
    sizes = [size for (size,) in gather([len(data)], group, device)]
    padded = gather(data + [0] * (max(sizes) - len(data)), group, device)
    return [bytes(codes[:size]).decode() for codes, size in zip(padded, sizes, strict=True)]


def digest(text: str) -> int:
    """Return 63 bits of ``text``'s SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def copy_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Copy rank 0's values to every rank, a chunk at a time."""
    first = dist.get_global_rank(group, 0)
    with torch.no_grad():
        for _, same in groupby(sorted(tensors, key=_kind), key=_kind):
            chunk: list[Tensor] = []
            nbytes = 0
            for tensor in [*same, None]:
                if chunk and (tensor is None or nbytes + tensor.nbytes > CHUNK):
                    flat = torch.cat([t.reshape(-1) for t in chunk])
                    dist.broadcast(torch.view_as_real(flat) if flat.is_complex() else flat, first, group)  # gloo of torch 2.6: no complex
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
    longest = max(len(theirs) for theirs in everyone)
    for at in range(longest):
        column = [theirs[at] if at < len(theirs) else "nothing" for theirs in everyone]
        if len(set(column)) > 1:
            who = {text: ranks(r for r, c in enumerate(column) if c == text) for text in column}
            shown = "; ".join(f"{text or 'nothing'} on {where}" for text, where in who.items())
            raise ModelMismatch(f"the ranks do not have the same {what}: the first difference is {shown}")
    raise ModelMismatch(f"the ranks do not have the same {what}")


def ranks(numbers: Iterable[int], most: int = 8) -> str:
    """Return "rank 3" or "ranks 0, 1, 5 and 12 more"."""
    found = list(numbers)
    shown = ", ".join(map(str, found[:most])) + (f" and {len(found) - most} more" if len(found) > most else "")
    return f"rank{'s' if len(found) != 1 else ''} {shown}"

"""Small exchanges within a process group, with tensors alone: neither numpy nor pickled objects."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import ModelMismatch, TrainError

CHUNK = 32 << 20  # bytes that are broadcast together; a copy of so many is held meanwhile


def find(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """``group``, or the default one. Raises TrainError when there is none, or this process is not in it."""
    if not dist.is_available() or (group is None and not dist.is_initialized()):
        raise TrainError("there is no process group: call torch.distributed.init_process_group() before, or give process_group=")
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup) or dist.get_rank(found) < 0:
        raise TrainError("this process is not a member of the process group that was given")
    return found


def gather(values: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    """The ``values`` (64 bits each, equally many everywhere) of every rank, in rank order."""
    mine = torch.tensor(values, dtype=torch.int64, device=device)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group)
    return [part.tolist() for part in parts]


def broadcast(values: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """Rank 0's ``values``; the others give equally many, whatever they are."""
    box = torch.tensor(values, dtype=torch.int64, device=device)
    dist.broadcast(box, dist.get_global_rank(group, 0), group)
    numbers: list[int] = box.tolist()
    return numbers


def gather_text(text: str, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """The ``text`` of every rank, in rank order."""
    data = list(text.encode())
    sizes = [size for (size,) in gather([len(data)], group, device)]
    padded = gather(data + [0] * (max(sizes) - len(data)), group, device)
    return [bytes(codes[:size]).decode() for codes, size in zip(padded, sizes, strict=True)]


def digest(text: str) -> int:
    """63 bits of ``text``'s SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def copy_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Give every rank rank 0's values, a chunk at a time."""
    first = dist.get_global_rank(group, 0)
    with torch.no_grad():
        for _, same in groupby(sorted(tensors, key=_kind), key=_kind):
            chunk: list[Tensor] = []
            for tensor in [*same, None]:
                if chunk and (tensor is None or sum(t.nbytes for t in chunk) + tensor.nbytes > CHUNK):
                    flat = torch.cat([t.reshape(-1) for t in chunk])
                    dist.broadcast(flat, first, group)
                    for t, part in zip(chunk, torch.split(flat, [t.numel() for t in chunk]), strict=True):
                        t.copy_(part.view(t.shape))
                    chunk = []
                if tensor is not None:
                    chunk.append(tensor)


def _kind(tensor: Tensor) -> tuple[str, str]:
    return str(tensor.dtype), str(tensor.device)


def verify_same(lines: Sequence[str], what: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise ModelMismatch on every rank unless ``lines`` are the same on all; the message shows the first that is not."""
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
    """ "rank 3" or "ranks 0, 1, 5 and 12 more"."""
    found = list(numbers)
    shown = ", ".join(map(str, found[:most])) + (f" and {len(found) - most} more" if len(found) > most else "")
    return f"rank{'s' if len(found) != 1 else ''} {shown}"

"""Compares the replicas: a checksum of each bucket's parameters, compared in one tiny reduction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from elastirun.train.errors import Diverged
from elastirun.train.groups.collectives import all_reduce, exchanged_on, gather, ranks
from elastirun.train.sharded import local_part

LEAST = 256 << 10  # bytes that are compared in a step at least: that takes as long as the words between the ranks
FLOW = 20_000_000  # bytes for each second that a step takes, a fiftieth of it where a checksum runs at 1 GB/s

CHUNK = 1 << 16  # elements; each place in a chunk has its own random odd weight, and each chunk one of its own
MULTIPLIER = 0x5851F42D4C957F2D  # Knuth's, of MMIX: odd, so that no chunk is lost modulo 2**64
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensors: Sequence[Tensor]) -> Tensor:
    """Return 64 bits that depend on the tensors' bit patterns (so 0.0 and -0.0 differ): a sum with random weights modulo 2**64.

    Two inputs that differ in the ways in which replicas drift have the same sum with a chance of about 2**-60 or less (multilinear
    hashing: Carter and Wegman, 1979). The weights are fixed, so this is no defence against someone who wants a collision.
    """
    device = tensors[0].device
    random = torch.Generator("cpu").manual_seed(0)
    weights = (torch.randint(-(1 << 62), 1 << 62, (CHUNK,), generator=random, dtype=torch.int64, device="cpu") * 2 + 1).to(device)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in map(local_part, tensors):
        real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        for part in real.contiguous().view(-1).view(BITS[real.element_size()]).split(CHUNK):  # type: ignore[no-untyped-call]
            total = total * MULTIPLIER + (part.to(torch.int64) * weights[: part.numel()]).sum()
    return total


def verify_replicas(
    names: Sequence[Sequence[str]], tensors: Sequence[Sequence[Tensor]], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Raise Diverged on every rank if any of ``tensors`` (by bucket) differs between ranks. The message names it and the ranks.

    All ranks call it at the same point.
    """
    device = exchanged_on(group, device)
    sums = torch.stack([checksum(bucket).to(device) for bucket in tensors])
    both = torch.cat([sums, ~sums])  # the minimum of the complements is the complement of the maximum
    all_reduce(both, group, dist.ReduceOp.MIN)
    differ = (both[: len(sums)] != ~both[len(sums) :]).nonzero()
    if not len(differ):
        return
    bucket = int(differ[0])
    table = gather([int(checksum([tensor])) for tensor in tensors[bucket]], group, device)
    found = [at for at in range(len(names[bucket])) if len({row[at] for row in table}) > 1]
    column = [row[found[0]] for row in table]
    usual, count = Counter(column).most_common(1)[0]
    others = [rank for rank, value in enumerate(column) if value != usual]
    where = f"on {ranks(others)} it is not what the others have" if count > len(column) / 2 else "no two halves of the ranks agree"
    more = f" ({len(found) - 1} more in its bucket, {len(differ) - 1} more buckets)" if len(found) > 1 or len(differ) > 1 else ""
    raise Diverged(
        f"the replicas are no longer the same: {names[bucket][found[0]]}: {where}{more}. Something changed it outside the optimizer, or a "
        "machine computes wrongly. Load the last checkpoint, or copy one rank's parameters to the others"
    )


class GradualCheck:
    """Compares ``tensors``, the same ones on every rank."""

    def __init__(self, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        self._names, self._tensors = names, tensors
        self._tensor = self._element = 0  # the next one to compare

    @property
    def done(self) -> bool:
        """Whether all is compared."""
        return self._tensor == len(self._tensors)

    def go_on(self, seconds: float, group: dist.ProcessGroup, device: torch.device) -> None:
        """Compare the next elements. Raises Diverged on every rank of ``group`` if they are not the same.

        ``seconds``: how long a step takes, the same number on every rank. All ranks call it at the same point.
        """
        names, parts, room = [], [], max(LEAST, int(FLOW * seconds))
        while room > 0 and not self.done:
            flat = local_part(self._tensors[self._tensor]).detach().reshape(-1)
            part = flat[self._element : self._element + max(1, room // flat.element_size())]
            names.append(self._names[self._tensor])
            parts.append(part)
            room -= part.nbytes
            self._element += len(part)
            if self._element == len(flat):
                self._tensor, self._element = self._tensor + 1, 0
        verify_replicas([names], [parts], group, device)

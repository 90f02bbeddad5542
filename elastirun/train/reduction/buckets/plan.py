"""The plan: which gradients are reduced together, and in which order. Pure functions of sizes, times and a link.

To all-reduce each gradient alone would cost the link's latency thousands of times. To all-reduce everything at the end would overlap
nothing with the backward. The plan lies between the two: consecutive gradients, in the order of the backward, share a bucket. torch
closes a bucket at a fixed size. When the times of the gradients and the link are known, dynamic programming finds the best boundaries
(``planned``).

See docs/ddp.md.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

MIB = 1 << 20
FIRST_CAP = 1 * MIB  # bytes, as in torch: the first bucket is small, so that the link has something to do early
CAP = 25 * MIB  # bytes, as in torch
BLOCKS = 128  # the planner cuts a model into at most so many; the cost of planning grows with the square
MOST = 32  # buckets of one kind in a plan; the cost of planning grows with the number

Buckets = tuple[tuple[int, ...], ...]
Kind = tuple[torch.dtype, torch.device, bool]


@dataclass(frozen=True)
class Gradient:
    """The size and type of one parameter's gradient. A complex gradient counts as twice as many real numbers, in ``pairs``."""

    numel: int
    dtype: torch.dtype
    device: torch.device
    pairs: bool = False

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def kind(self) -> Kind:
        """The kind: only gradients of one kind can share a bucket."""
        return self.dtype, self.device, self.pairs


@dataclass(frozen=True)
class LinkSpeed:
    """The cost of an all-reduce: ``latency`` s, and ``per_byte`` s for each byte of the bucket; ``host`` s of computing are lost."""

    latency: float
    per_byte: float
    host: float = 0.0

    def seconds(self, nbytes: float) -> float:
        return self.latency + nbytes * self.per_byte


def fit(samples: Collection[tuple[int, float]]) -> LinkSpeed:
    """Return the link that explains (bytes, seconds) best, by least squares; neither part is ever negative."""
    n = len(samples)
    mean_x, mean_y = sum(x for x, _ in samples) / n, sum(y for _, y in samples) / n
    variance = sum((x - mean_x) ** 2 for x, _ in samples)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in samples) / variance if variance else 0.0
    slope = min(max(slope, 0.0), mean_y / mean_x if mean_x else 0.0)
    return LinkSpeed(max(mean_y - slope * mean_x, 0.0), slope)


def by_size(gradients: Sequence[Gradient], order: Sequence[int], cap: int = CAP, first_cap: int = FIRST_CAP) -> Buckets:
    """Return torch's plan: a bucket takes gradients of a kind in ``order`` until it holds ``cap`` bytes (the first one ``first_cap``).

    The buckets come in the order in which they are complete. A gradient larger than the cap completes the bucket that it joins.
    """
    position = {index: at for at, index in enumerate(order)}
    filling: dict[Kind, list[int]] = {}
    room: dict[Kind, int] = {}
    full: list[list[int]] = []
    for index in order:
        kind = gradients[index].kind
        filling.setdefault(kind, []).append(index)
        room[kind] = room.get(kind, first_cap) - gradients[index].nbytes
        if room[kind] <= 0:
            full.append(filling.pop(kind))
            room[kind] = cap
    full += filling.values()
    return words_last(gradients, tuple(sorted((tuple(bucket) for bucket in full), key=lambda bucket: position[bucket[-1]])))


def sum_bytes(gradients: Sequence[Gradient], bucket: Sequence[int]) -> int:
    return sum(gradients[index].nbytes for index in bucket)


def planned(
    gradients: Sequence[Gradient], order: Sequence[int], ready: Sequence[float], link: LinkSpeed, unsure: Collection[int] = ()
) -> Buckets:
    """Return the plan whose boundaries leave the least communication exposed.

    ``order``: the gradients in the order of the backward; ``ready[index]``: when gradient ``index`` is accumulated, in seconds since the
    backward began. Gradients in ``unsure`` do not come in every step. They go last, so that the others need not wait for them.
    """
    late = [index for index in order if index in unsure]
    sure = [index for index in order if index not in unsure]
    buckets: list[tuple[int, ...]] = []
    for kind in dict.fromkeys(gradients[index].kind for index in sure):
        mine = [index for index in sure if gradients[index].kind == kind]
        buckets += _cut(blocks(gradients, mine, ready), link)
    buckets.sort(key=lambda bucket: max(ready[index] for index in bucket))
    return words_last(gradients, (*buckets, *by_size(gradients, late, CAP, CAP)))


def words_last(gradients: Sequence[Gradient], plan: Buckets) -> Buckets:
    """Return ``plan`` with a bucket of float32 last, if there is one: the last bucket carries the control words, which need that type."""
    able = [at for at, bucket in enumerate(plan) if gradients[bucket[0]].dtype == torch.float32]
    if not able:
        return plan
    return plan[: able[-1]] + plan[able[-1] + 1 :] + (plan[able[-1]],)


@dataclass(frozen=True)
class Block:
    """Neighbouring gradients that the planner keeps together."""

    members: tuple[int, ...]
    nbytes: int
    ready: float


def blocks(gradients: Sequence[Gradient], order: Sequence[int], ready: Sequence[float]) -> list[Block]:
    """Return at most about ``BLOCKS`` blocks: gradients that are ready together stay together, unless they are large."""
    total, span = sum_bytes(gradients, order), max((ready[index] for index in order), default=0.0)
    made: list[list[int]] = []
    begun, nbytes = 0.0, 0
    for index in order:
        if not made or nbytes + gradients[index].nbytes > total / BLOCKS or ready[index] - begun > span / BLOCKS:
            made.append([])
            begun, nbytes = ready[index], 0
        made[-1].append(index)
        nbytes += gradients[index].nbytes
    return [Block(tuple(members), sum_bytes(gradients, members), ready[members[-1]]) for members in made]


def _cut(parts: Sequence[Block], link: LinkSpeed) -> list[tuple[int, ...]]:
    """Cut ``parts`` into buckets so that the last reduction ends as early as possible, by dynamic programming.

    ``ends[j]`` is the earliest moment at which the first ``j`` blocks can be reduced in ``count`` buckets. The bucket of blocks i…j-1
    starts when the link is free (``ends[i]``) and its last gradient is ready, which each earlier bucket has delayed by ``link.host``.
    Of plans that end equally early (within 1 % of a latency), the one with fewer buckets wins.
    """
    upto = list(accumulate((part.nbytes for part in parts), initial=0))
    ends = [0.0] + [float("inf")] * len(parts)
    totals: list[float] = []
    cuts: list[list[int]] = []
    for count in range(1, min(len(parts), MOST) + 1):
        before, ends, cut = ends, [float("inf")] * (len(parts) + 1), [0] * (len(parts) + 1)
        for j in range(count, len(parts) + 1):
            ready = parts[j - 1].ready + link.host * (count - 1)
            for i in range(count - 1, j):
                end = max(before[i], ready) + link.seconds(upto[j] - upto[i])
                if end < ends[j]:
                    ends[j], cut[j] = end, i
        totals.append(ends[-1])
        cuts.append(cut)
    best = next(at for at, total in enumerate(totals) if total <= min(totals) + 0.01 * link.latency)
    made: list[tuple[int, ...]] = []
    j = len(parts)
    for cut in cuts[best::-1]:
        made.append(tuple(index for part in parts[cut[j] : j] for index in part.members))
        j = cut[j]
    return made[::-1]


def encode(buckets: Buckets) -> list[int]:
    """Return ``buckets`` as two integers per gradient, for the other ranks: all indices in order, then which of them begin a bucket."""
    return [index for bucket in buckets for index in bucket] + [int(at == 0) for bucket in buckets for at in range(len(bucket))]


def decode(numbers: Sequence[int]) -> Buckets:
    """Return the plan that ``encode`` has made ``numbers`` of."""
    count = len(numbers) // 2
    made: list[list[int]] = []
    for index, begins in zip(numbers[:count], numbers[count:], strict=True):
        if begins:
            made.append([])
        made[-1].append(index)
    return tuple(map(tuple, made))

"""The arithmetic of a global batch: which samples a rank has, and its micro-batches. Pure functions of numbers."""

from __future__ import annotations

from collections.abc import Sequence


def share(size: int, rank: int, world_size: int, weights: Sequence[int] | None = None) -> range:
    """Return which of ``size`` samples ``rank`` has: neighbours, as many as on the other ranks or one more or fewer.

    ``weights``, by rank and above 0: as many as in proportion to these, or one more or fewer.
    """
    if weights is None:
        return range(rank * size // world_size, (rank + 1) * size // world_size)
    total, before = sum(weights), sum(weights[:rank])
    return range(before * size // total, (before + weights[rank]) * size // total)


def split(samples: range, most: int | None) -> list[range]:
    """Cut ``samples`` into as few micro-batches of at most ``most`` samples as possible (None: one micro-batch); none of them is empty.

    Their sizes differ by one at most, and the larger ones come first. So accumulated gradients change their weight once at most.
    """
    if not samples:
        return []
    number = 1 if most is None else -(-len(samples) // most)
    size, larger = divmod(len(samples), number)
    bounds = [samples.start + size * at + min(at, larger) for at in range(number + 1)]
    return [range(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]

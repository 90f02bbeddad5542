"""Shares of the global batch that follow the speeds of the ranks: ``ElasticDataLoader(balance=True)``. See docs/decisions/0041."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate
from statistics import median
from typing import Any

from elastirun.train.errors import TrainError

EVERY = 20  # steps from one decision to the next: the median of so many steps hardly moves by chance
ENOUGH = EVERY // 2  # measured steps of a rank: with fewer, as after a restart, the shares stay as they are
LEAST = 0.25  # of an even share: a rank that is slower than that is broken, and the others shall not do all of its work
WORTH = 0.1  # of the time of a step, which other shares have to save: ranks that are alike keep an even split
NEAR = 0.05  # an even split is preferred to shares that would make a step shorter by less than this part
_FLOAT, _WHOLE = struct.Struct("<d"), struct.Struct("<q")  # ranks tell each other paces as whole numbers with the bits of a float


def apportion(paces: Sequence[float], size: int) -> tuple[int, ...]:
    """Return the samples of each rank so that all are ready at the same time, as far as whole samples and ``LEAST`` allow.

    ``paces``: seconds for a sample, above 0, by rank. ``size``: samples of the global batch, at least one for each rank.
    """
    least = max(1, int(LEAST * size / len(paces)))
    free, rest, speed = list(range(len(paces))), size, 0.0
    while True:  # ends: of the ranks that are left, some get the mean or more
        speed = sum(1 / paces[rank] for rank in free)
        kept = [rank for rank in free if rest / paces[rank] >= least * speed]
        if len(kept) == len(free):
            break
        free, rest = kept, rest - least * (len(free) - len(kept))
    shares = [least] * len(paces)
    for rank in free:
        shares[rank] = int(rest / paces[rank] / speed)
    next_ready = [((shares[rank] + 1) * paces[rank], rank) for rank in free]  # when a rank would be ready with a sample more
    heapify(next_ready)
    for _ in range(size - sum(shares)):
        rank = next_ready[0][1]
        shares[rank] += 1
        heapreplace(next_ready, ((shares[rank] + 1) * paces[rank], rank))
    return tuple(shares)


def rebalance(paces: Sequence[float], size: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Return the weights by which a global batch of ``size`` samples is shared: ``weights``, as before, unless others are WORTH a change.

    ``paces``: seconds for a sample, by rank; 0: not known. Equal weights stand for an even split.
    """
    if min(paces) <= 0 or size < len(paces):
        return tuple(weights)

    def seconds(by: Sequence[int]) -> float:
        total = sum(by)
        cuts = [before * size // total for before in accumulate(by, initial=0)]  # as ``share`` has them
        return max((stop - start) * pace for start, stop, pace in zip(cuts, cuts[1:], paces, strict=False))

    even, found = (1,) * len(paces), apportion(paces, size)
    best = even if seconds(even) * (1 - NEAR) <= seconds(found) else found
    return best if seconds(best) < seconds(weights) * (1 - WORTH) else tuple(weights)


@dataclass(frozen=True)
class ShareChange:
    """Other weights of the ranks, from the step number ``step`` on."""

    step: int
    weights: tuple[int, ...]


class Balance:
    """The weights by which the ranks share each global batch, and this rank's times. All but the times is the same on every rank.

    ``world_size``: ranks. ``ahead``: parts of global batches that this rank's loader may have cut in advance.
    """

    def __init__(self, world_size: int, ahead: int) -> None:
        self.step = 0  # finished steps since the training began
        self.weights: tuple[int, ...] = (1,) * world_size
        self.change: ShareChange | None = None  # that is decided, and not in force yet
        self._ahead = ahead
        self._paces: deque[float] = deque(maxlen=EVERY)  # seconds for a unit of work in the last steps with these weights

    def weights_at(self, step: int) -> tuple[int, ...]:
        """Return the weights in the step of that number, which is not finished yet."""
        return self.change.weights if self.change and step >= self.change.step else self.weights

    def finish(self, step: int) -> None:
        """Count the step of that number as finished."""
        self.step = step + 1
        if self.change and self.step >= self.change.step:
            self.weights, self.change = self.change.weights, None
            self._paces.clear()

    def measure(self, seconds: float, work: float) -> None:
        """Take note of the time of a step on this rank, without waiting for others, and of the work in its share."""
        if work > 0:
            self._paces.append(seconds / work)

    @property
    def due(self) -> bool:
        """Whether the ranks decide about the weights now: at the same steps on each."""
        return self.change is None and self.step % EVERY == 0

    @property
    def told(self) -> list[int]:
        """Return the numbers that this rank tells the others for a decision."""
        pace = median(self._paces) if len(self._paces) >= ENOUGH else 0.0
        return [*_WHOLE.unpack(_FLOAT.pack(pace)), self._ahead]

    def decide(self, told: Sequence[Sequence[int]], size: int) -> None:
        """Decide about the weights for global batches of ``size`` samples. ``told``: by all ranks."""
        paces = [_FLOAT.unpack(_WHOLE.pack(pace))[0] for pace, _ in told]
        weights = rebalance(paces, size, self.weights)
        if weights != self.weights:
            # Later than every part that a rank has cut in advance. Each step has at least one part, the last one of an epoch may have none.
            self.change = ShareChange(self.step + max(ahead for _, ahead in told) + 2, weights)

    def state_dict(self) -> dict[str, Any]:
        """Return what decides how the global batches are shared."""
        change = self.change and {"step": self.change.step, "weights": list(self.change.weights)}
        return {"step": self.step, "weights": list(self.weights), "change": change}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the weights of ``state``; with an even split if it is of another number of ranks. Raises TrainError for other data."""
        self._paces.clear()
        even, change = (1,) * len(self.weights), None
        try:
            step, weights, later = int(state["step"]), _weights(state["weights"]), state["change"]
            if later is not None:
                change = ShareChange(int(later["step"]), _weights(later["weights"]))
            if step < 0:
                raise ValueError(f"step {step}")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise TrainError(f'the "balance" in the state of the loader cannot be read: {error!r}; delete it to share evenly') from None
        fits = len(weights) == len(even) and (change is None or len(change.weights) == len(even))
        self.step, self.weights, self.change = step, weights if fits else even, change if fits else None


def _weights(values: Any) -> tuple[int, ...]:
    """Return weights as they are in a state. Raises ValueError unless all are above 0."""
    weights = tuple(map(int, values))
    if min(weights) < 1:
        raise ValueError("a weight is below 1")
    return weights

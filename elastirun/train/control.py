"""The control words: a few numbers that ride at the end of the last bucket, so that all ranks know the same after each reduction.

A sum is all that a reduction gives, so each word is a count, or a place of its own for each rank::

    samples · ranks with data · ranks with more to come · ranks that lack a gradient · a request's askers, for each request
    seconds[rank] · status[rank] · late[bucket] · users[parameter]

They are float32: counts are exact up to 2**24.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

REQUESTS = ("checkpoint", "drain")
FAILED, NOT_FINITE = 1, 2  # bits of a rank's status
_FIXED = 4 + len(REQUESTS)


@dataclass
class Said:
    """What this rank says in its next reduction."""

    samples: float = 1.0  # how much its gradients count
    more: bool = False  # it has data for the reduction after this one
    requests: set[str] = field(default_factory=set)
    status: int = 0


@dataclass(frozen=True)
class Agreement:
    """What all ranks know after reduction number ``step``; the same on each of them."""

    step: int
    samples: float  # over all ranks
    with_data: int  # ranks
    more: int  # ranks that have data for the next reduction, too
    lacking: int  # ranks that had data, and parameters without a gradient
    requests: frozenset[str]  # of REQUESTS: what at least one rank asked for
    seconds: tuple[float, ...]  # by rank: from the start of its forward to the end of its backward, without waiting
    failed: tuple[int, ...]  # ranks whose backward ended with an exception
    not_finite: tuple[int, ...]  # ranks that had an infinite or undefined gradient; known with check_finite=True


class ControlWords:
    """Writes and reads the words of a group of ``world`` ranks, ``buckets`` and ``parameters``."""

    def __init__(self, rank: int, world: int, buckets: int, parameters: int) -> None:
        self._rank, self._world = rank, world
        self._late = _FIXED + 2 * world
        self._users = self._late + buckets
        self.size = self._users + parameters

    def write(self, tail: Tensor, said: Said, samples: float, seconds: float, late: Iterable[int], lacking: Sequence[int]) -> None:
        """``samples``: 0 without data; ``late``: buckets; ``lacking``: parameters without a gradient."""
        words = [0.0] * self._users
        words[:4] = [samples, float(samples > 0), float(said.more), float(bool(lacking) and samples > 0)]
        words[4:_FIXED] = [float(name in said.requests) for name in REQUESTS]
        words[_FIXED + self._rank] = seconds
        words[_FIXED + self._world + self._rank] = float(said.status)
        for bucket in late:
            words[self._late + bucket] = 1.0
        tail[: self._users].copy_(torch.tensor(words, dtype=tail.dtype))
        users = tail[self._users :]
        users.fill_(1.0)
        if lacking:
            users[torch.tensor(lacking, device=tail.device)] = 0.0

    def read(self, tail: Tensor, step: int, factor: float = 1.0) -> tuple[Agreement, list[int]]:
        """What was agreed, and the late buckets. ``factor`` undoes an average (the world size) or nothing (1)."""
        words = [word * factor for word in tail[: self._users].tolist()]
        status = [round(word) for word in words[_FIXED + self._world : self._late]]
        late = [bucket for bucket, word in enumerate(words[self._late :]) if round(word)]
        agreed = Agreement(
            step=step,
            samples=words[0],
            with_data=round(words[1]),
            more=round(words[2]),
            lacking=round(words[3]),
            requests=frozenset(name for name, word in zip(REQUESTS, words[4:], strict=False) if round(word)),
            seconds=tuple(words[_FIXED : _FIXED + self._world]),
            failed=tuple(rank for rank, bits in enumerate(status) if bits & FAILED),
            not_finite=tuple(rank for rank, bits in enumerate(status) if bits & NOT_FINITE),
        )
        return agreed, late

    def users(self, tail: Tensor, factor: float = 1.0) -> list[int]:
        """For each parameter, how many ranks had a gradient."""
        return [round(word * factor) for word in tail[self._users :].tolist()]

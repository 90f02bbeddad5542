"""The arithmetic of sharded data: which shards (files) a stream reads, and what is left of an epoch at another world size. Pure.

An epoch has the shards in one order, so a shard's *place* is its number in this order. What is left of an epoch is a ``Rest``: the places
from ``next_place`` on, and before these the ``open`` places, of which some samples may be read already. The streams (one for each rank and
each of its loading workers) share what is left like cards: stream ``s`` of ``n`` reads the numbers ``s``, ``s + n``, ``s + 2 n``, …
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count


@dataclass(frozen=True)
class Progress:
    """The progress of a stream in its part: the number of shards before its present one, and the samples read of that one."""

    shards: int = 0
    samples: int = 0


@dataclass(frozen=True)
class Rest:
    """The part of an epoch of ``shards`` shards that is left: (place, samples read of it) of the ``open`` ones, and all later places."""

    shards: int
    next_place: int = 0
    open: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return len(self.open) + self.shards - self.next_place

    def at(self, number: int) -> tuple[int, int]:
        """Return the ``number``-th place that is left, and how many samples of its shard have been read."""
        return self.open[number] if number < len(self.open) else (self.next_place + number - len(self.open), 0)

    def part(self, stream: int, streams: int, progress: Progress) -> Iterator[tuple[int, int, int]]:
        """Yield what is left for ``stream``, which has made ``progress``: shards before, place, samples read of it."""
        for before in count(progress.shards):
            number = stream + streams * before
            if number >= len(self):
                return
            place, samples = self.at(number)
            yield before, place, max(samples, progress.samples) if before == progress.shards else samples

    def after(self, progress: Sequence[Progress]) -> Rest:
        """Return what is left when each stream has made its ``progress``, in the order of the streams.

        Takes memory for the shards that the fastest stream is ahead of the slowest.
        """
        streams = len(progress)
        reached = [stream + streams * done.shards + (1 if done.samples else 1 - streams) for stream, done in enumerate(progress)]
        until = min(max(0, *reached), len(self))
        still = []
        for number in range(max(until, len(self.open))):
            before, done = number // streams, progress[number % streams]
            if before >= done.shards:
                place, samples = self.at(number)
                still.append((place, max(samples, done.samples) if before == done.shards else samples))
        return Rest(self.shards, self.next_place + max(until - len(self.open), 0), tuple(still))

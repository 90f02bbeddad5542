"""Decisions about the worlds of a live job: which workers of a round begin it, and whose state they go on with. Needs no torch.

See docs/elastic.md and docs/decisions/0027.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SHOWN = 80  # characters of a value that does not parse


@dataclass(frozen=True)
class LiveWorld:
    """Workers that train together. ``ranks``: their ranks in the round; the rank in the world is the index."""

    number: int
    ranks: tuple[int, ...]


def first_world(told: Sequence[Sequence[Sequence[int]]], size: int) -> LiveWorld:
    """Return world 0 of a round of ``size`` workers.

    ``told``: by node, its ranks that have a state, each with the round in which the ranks agreed upon that state. A state of an older
    round than another one's is that of a node that was cut off: its rank counts as new.
    """
    having = [(rank, settled) for node in told for rank, settled in node]
    newest = max((settled for _, settled in having), default=0)
    return LiveWorld(0, tuple(sorted(rank for rank, settled in having if settled == newest)) or tuple(range(size)))


def parse_states(value: Any, workers: int) -> list[tuple[int, int]]:
    """Return the ranks of a node that have a state, each with its round, from what the store says. Raises ValueError for anything else."""
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 and type(pair[1]) is int for pair in value):
        raise ValueError(f"no list of ranks and rounds: {str(value)[:SHOWN]!r}")
    return list(zip(parse_ranks([rank for rank, _ in value], workers), [settled for _, settled in value], strict=True))


def parse_ranks(value: Any, workers: int) -> tuple[int, ...]:
    """Return different ranks of a round of ``workers`` from what the store says. Raises ValueError for anything else."""
    if not isinstance(value, list) or not all(type(rank) is int and 0 <= rank < workers for rank in value) or len({*value}) < len(value):
        raise ValueError(f"no list of ranks below {workers}: {str(value)[:SHOWN]!r}")
    return tuple(value)


def late(places: Sequence[tuple[int, ...]]) -> list[int]:
    """Return the ranks that have not come as far in the script as another one. ``places``: by rank, how far it has come."""
    return [rank for rank, place in enumerate(places) if place < max(places)]


def furthest(everyone: Sequence[tuple[int, ...]]) -> tuple[int, list[int]]:
    """Return the rank whose state all ranks go on with, and the ranks that are to copy that state.

    ``everyone``: by rank, the round in which its state was agreed upon, its finished steps, its place in the script, and minus the number
    of dropped steps that have left something in its state. Where no rank has a state (round 0), all begin with that of rank 0, whatever
    steps a rank has made on the way to a state that did not come whole.
    """
    best = max(everyone)
    if best[0] == 0:
        return 0, list(range(1, len(everyone)))
    return everyone.index(best), [rank for rank, theirs in enumerate(everyone) if theirs != best]

"""A fixed binary tree over the shards of a global batch: the order in which their gradients are added up. Pure.

A sum along this tree has the same bits whoever computes its parts: each rank adds up the largest subtrees that lie within its own
neighbouring shards, and the rest of the tree is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")
Span = tuple[int, int]  # the shards from the first number to before the second


def halves(span: Span) -> tuple[Span, Span]:
    """Return the two children of ``span``, which has more than one shard."""
    start, stop = span
    middle = (start + stop) // 2
    return (start, middle), (middle, stop)


def subtrees(mine: range, span: Span) -> list[Span]:
    """Return the largest subtrees of that of ``span`` whose shards are all among ``mine``, in the order of the shards."""
    start, stop = max(span[0], mine.start), min(span[1], mine.stop)
    if start >= stop:
        return []
    if (start, stop) == span:
        return [span]
    left, right = halves(span)
    return subtrees(mine, left) + subtrees(mine, right)


def add_up(span: Span, known: Mapping[Span, T], add: Callable[[T, T], T]) -> T:
    """Return the sum of ``span``, where the sums of some subtrees that cover it are ``known``."""
    if span in known:
        return known[span]
    left, right = (add_up(half, known, add) for half in halves(span))
    return add(left, right)

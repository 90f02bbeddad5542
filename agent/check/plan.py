"""The plan of a check: which node measures the way to which others. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence

ALL_PAIRS = 16  # nodes; beyond that each node measures the ways to two others only, so that its connections stay few


def peers(ids: Sequence[str], seed: str) -> dict[str, tuple[str, ...]]:
    """Return the nodes to which each of ``ids`` measures the way; the same for all nodes with the same ``ids`` and ``seed``.

    Up to ALL_PAIRS nodes: all others. Beyond: the next one in the order of the ids, and the next one in a random order.
    """
    if len(ids) <= ALL_PAIRS:
        return {me: tuple(one for one in ids if one != me) for me in ids}
    shuffled = list(ids)
    random.Random(seed).shuffle(shuffled)
    after, after_shuffled = (dict(zip(order, [*order[1:], order[0]], strict=True)) for order in (ids, shuffled))
    return {me: tuple(dict.fromkeys((after[me], after_shuffled[me]))) for me in ids}


def turns(ids: Sequence[str], me: str) -> tuple[str | None, ...]:
    """Return the partner of ``me`` in each turn in which pairs of neighbours in the order of the ids meet; None: this node has none then.

    Two turns have all pairs, or three where the number of nodes is odd.
    """
    count, at = len(ids), ids.index(me)
    pairs = [(one, (one + 1) % count) for one in range(count if count > 2 else count - 1)]
    turn = [2 if count % 2 and pair == (count - 1, 0) else pair[0] % 2 for pair in pairs]
    partners: list[str | None] = [None] * (max(turn, default=-1) + 1)
    for pair, its in zip(pairs, turn, strict=True):
        if at in pair:
            partners[its] = ids[sum(pair) - at]
    return tuple(partners)

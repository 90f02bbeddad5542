"""The same program with our class and with torch's, on the same ranks."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
from torch import nn

from elastirun.train import DistributedDataParallel
from tests.support.worlds import run

Wrap = Callable[..., Any]  # a module, wrapped
Case = Callable[[int, Wrap], list[Any]]  # (rank, wrap) -> numbers in lists


# The name of the argument for copying buffers before each forward in the torch that is installed. torch 2.13 renamed it.
SYNCS = next(n for n in ("forward_sync_buffers", "broadcast_buffers") if n in signature(nn.parallel.DistributedDataParallel).parameters)


class Torchs(nn.parallel.DistributedDataParallel):
    """torch's class, with the argument ``forward_sync_buffers`` in every version."""

    def __init__(self, module: nn.Module, forward_sync_buffers: bool | None = None, **how: Any) -> None:
        super().__init__(module, **({} if forward_sync_buffers is None else {SYNCS: forward_sync_buffers}), **how)


def _both(rank: int, world: int, case: Case, options: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    return case(rank, lambda module, **how: DistributedDataParallel(module, **options, **how)), case(rank, Torchs)


def check(case: Case, within: float, world: int = 2, **options: Any) -> None:
    """Every number of ``case`` is on ``world`` ranks what it is with torch's class; ``options`` are of ours."""
    for ours, theirs in run(world, _both, case, options):
        assert flat(ours) == pytest.approx(flat(theirs), abs=within)


def flat(value: Any) -> list[float]:
    """The numbers in lists of lists."""
    return [float(value)] if isinstance(value, (int, float)) else [number for part in value for number in flat(part)]

"""The same program with our class and with torch's, on the same ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from elastirun.train import DistributedDataParallel
from tests.support.worlds import run

Torchs = nn.parallel.DistributedDataParallel
Wrap = Callable[..., Any]  # a module, wrapped
Case = Callable[[int, Wrap], list[Any]]  # (rank, wrap) -> numbers in lists


def _both(rank: int, world: int, case: Case, options: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    return case(rank, lambda module, **how: DistributedDataParallel(module, **options, **how)), case(rank, Torchs)


def check(case: Case, within: float, world: int = 2, **options: Any) -> None:
    """Every number of ``case`` is on ``world`` ranks what it is with torch's class; ``options`` are of ours."""
    for ours, theirs in run(world, _both, case, options):
        assert flat(ours) == pytest.approx(flat(theirs), abs=within)


def flat(value: Any) -> list[float]:
    """The numbers in lists of lists."""
    return [float(value)] if isinstance(value, (int, float)) else [number for part in value for number in flat(part)]

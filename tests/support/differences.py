"""Differences between tensors as numbers, of which NaN is never lost: ``max(1.0, nan)`` is 1.0."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def relative(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of an element, as a share of the largest of ``expected``; NaN if any element is NaN."""
    return float((found - expected).detach().abs().max() / expected.detach().abs().max())


def highest(values: Iterable[float]) -> float:
    """Return the highest value; NaN if any value is NaN."""
    return float(torch.tensor(list(values), dtype=torch.float64).max())

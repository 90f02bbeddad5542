"""For the scripts of ``tests.nightly.in_place``: puts our class in the place of torch's if IN_PLACE is 1, and reports losses.

Import it before any framework.
"""

from __future__ import annotations

import os
from typing import Any

import report
import torch

from elastirun.train import DistributedDataParallel

STEPS, EPOCH = report.STEPS, 10  # steps in all; those of an epoch, after which there is a checkpoint
RANKS, BATCH = 2, 4
IN_PLACE = os.environ["IN_PLACE"] == "1"
TORCHS = torch.nn.parallel.DistributedDataParallel
if IN_PLACE:
    torch.nn.parallel.DistributedDataParallel = DistributedDataParallel  # type: ignore[misc]
    torch.nn.parallel.distributed.DistributedDataParallel = DistributedDataParallel  # type: ignore[misc]
torch.manual_seed(0)


def data() -> torch.utils.data.TensorDataset:
    """The inputs of an epoch, for all ranks."""
    return torch.utils.data.TensorDataset(torch.randn(EPOCH * RANKS * BATCH, 4, generator=torch.Generator().manual_seed(1)))


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))


def wrapped(module: Any) -> None:
    """``module`` must be wrapped by the class that was asked for."""
    assert type(module) is (DistributedDataParallel if IN_PLACE else TORCHS), type(module)


def loss(step: int, value: float) -> None:
    """``value`` was the loss of step number ``step``, from 1 on."""
    report.say(f"LOSS {report.ROUND} {report.RANK} {step} {value!r}")
    report.step(step)

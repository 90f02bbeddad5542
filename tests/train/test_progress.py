"""The modules of ``elastirun.train`` stamp a step when they begin to reduce, before they wait for other ranks."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elastirun.agent.observe.progress_pages import ProgressPages
from elastirun.train import Checkpointer, DeterministicShards, DistributedDataParallel, ElasticDataLoader
from elastirun.worker.progress_page import NS, VARIABLE
from tests.support.worlds import run


def steps(rank: int, world: int) -> list[int]:
    """The steps on this rank's page after each backward."""
    pages = ProgressPages()
    (os.environ[VARIABLE],) = pages.renew(1)
    found = []
    ddp = DistributedDataParallel(nn.Linear(4, 1))
    for count in range(3):
        loss = ddp(torch.ones(2, 4)).sum()
        found.append(page.steps if (page := pages.read(0)) else 0)
        with ddp.no_sync() if count == 1 else torch.enable_grad():
            loss.backward()
    shards = DeterministicShards(nn.Linear(4, 1), shards=2)
    loader = ElasticDataLoader(torch.ones(8, 4), 4)  # type: ignore[arg-type]  # a tensor has a length and samples by index
    for step in loader.steps(shards):
        for batch in step:
            shards(batch).sum().backward()
    page = pages.read(0)
    assert page
    return [*found, page.steps]


class Slow(nn.Linear):
    """A layer whose forward takes 50 ms on rank 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05 * dist.get_rank())
        return super().forward(x)


def computing(rank: int, world: int) -> tuple[float, float]:
    """The times of computing on this rank's page: its own, and those of the median rank."""
    pages = ProgressPages()
    (os.environ[VARIABLE],) = pages.renew(1)
    ddp = DistributedDataParallel(Slow(4, 1))
    for _ in range(4):
        ddp(torch.ones(2, 4)).sum().backward()
    page = pages.read(0)
    assert page
    return page.busy / NS, page.median / NS


def test_the_agent_is_told_for_how_long_this_rank_and_the_median_rank_compute() -> None:
    (first, median), (second, the_same) = run(2, computing)
    assert median == pytest.approx(the_same) and median <= first * 1.01, "of two ranks the quicker one is the median"
    assert second >= 4 * 0.05


def test_each_backward_is_a_step_and_each_reduction_of_shards() -> None:
    assert run(2, steps) == [[0, 1, 2, 5]] * 2


def saves(rank: int, world: int, folder: Path) -> list[int]:
    """The step on the page, plus 1, after a step that is not due, a save, and a restore."""
    pages = ProgressPages()
    (os.environ[VARIABLE],) = pages.renew(1)
    state, found = {"values": torch.ones(4)}, []
    checkpoints = Checkpointer(folder, every=2)
    for step in (1, 2):
        checkpoints.save(step, state)
        page = pages.read(0)
        assert page and (page.saving > 0) == (step == 2) and page.steps == 0
        found.append(page.at)
    checkpoints.save(3, state)
    checkpoints.restore(state)
    page = pages.read(0)
    assert page
    return [*found, page.at]


def test_a_checkpointer_tells_the_step_and_how_long_saves_hold_training_up(tmp_path: Path) -> None:
    assert run(1, saves, tmp_path) == [[2, 3, 3]]

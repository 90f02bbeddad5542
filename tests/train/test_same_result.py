"""The same result whatever becomes of the world: with Checkpointer, ElasticDataLoader and Drain, in real processes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.train.schedules import MOMENTS, Leg, Result, perform, schedule

KILLED = [Leg(2, signal.SIGKILL, 1, 5, MOMENTS[0]), Leg(2, signal.SIGKILL, 0, 3, MOMENTS[2]), Leg(2)]
RESIZED = [Leg(1, signal.SIGTERM, 0, 4), Leg(3, signal.SIGTERM, 2, 9), Leg(2)]
DROPOUT = 0.3


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[float, Result]:
    """One undisturbed worker, with and without dropout."""
    return {dropout: perform(tmp_path_factory.mktemp("alone"), [Leg(1)], dropout=dropout) for dropout in (0.0, DROPOUT)}


@pytest.mark.daily(2)
@pytest.mark.parametrize("legs", [[Leg(2)], [Leg(4)], KILLED, RESIZED], ids=["2", "4", "killed", "1 to 3 to 2"])
def test_the_same_bits_undisturbed_killed_and_resized(tmp_path: Path, alone: dict[float, Result], legs: list[Leg]) -> None:
    result = perform(tmp_path, legs, dropout=DROPOUT)
    assert not result.differs(alone[DROPOUT], fast=False)
    if legs is RESIZED:
        assert result.begins == [0, 4, 13], "a planned stop loses no step"


@pytest.mark.daily(3)
@pytest.mark.parametrize("legs", [[Leg(2)], KILLED, RESIZED], ids=["2", "killed", "1 to 3 to 2"])
def test_the_fast_mode_ends_close_to_it(tmp_path: Path, alone: dict[float, Result], legs: list[Leg]) -> None:
    assert not perform(tmp_path, legs, fast=True).differs(alone[0.0], fast=True)


@pytest.mark.daily(5)
@pytest.mark.parametrize("seed", range(5))
def test_each_sample_counts_once_per_epoch_whatever_the_schedule(tmp_path: Path, alone: dict[float, Result], seed: int) -> None:
    """``python -m tests.train.schedules`` does more."""
    fast = seed % 2 == 1
    assert not perform(tmp_path, schedule(seed), fast).differs(alone[0.0], fast)

"""Random numbers by (seed, epoch, sample): the same augmentations and dropout whatever the world size, the workers and the process."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from elastirun.train import ElasticDataLoader, keyed_rng


class Noisy(Dataset[Tensor]):
    """Samples that draw from all three generators, also ones that keep a second number for the next call (normal numbers)."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, torch.randn(()).item(), random.gauss(0, 1), numpy.random.normal()], dtype=torch.float64)


def drawn(world: int = 1, epochs: int = 1, **options: Any) -> list[list[float]]:
    """Return the samples of the last epoch by their index."""
    found: list[list[float]] = []
    for rank in range(world):
        loader = ElasticDataLoader(Noisy(), 4, rank=rank, world_size=world, **options)
        for epoch in range(epochs):
            batches = [batch for batch in loader if batch is not None]
            found += [sample for batch in batches for sample in batch.tolist()] if epoch == epochs - 1 else []
    return sorted(found)


def test_augmentations_are_the_same_whatever_the_world_and_the_workers() -> None:
    first = drawn(keyed_rng=True)
    assert len({tuple(sample[1:]) for sample in first}) == 11 and drawn() != drawn()
    assert drawn(2, keyed_rng=True) == drawn(3, keyed_rng=True) == first
    assert drawn(keyed_rng=True, num_workers=2) == first
    later = drawn(epochs=2, keyed_rng=True)
    assert later == drawn(epochs=2, keyed_rng=True, num_workers=1, persistent_workers=True)
    assert not {tuple(sample[1:]) for sample in later} & {tuple(sample[1:]) for sample in first}
    assert drawn(keyed_rng=True, seed=1) != first


def numbers() -> list[float]:
    return [torch.rand(()).item(), random.random(), numpy.random.random()]


@pytest.mark.parametrize("fails", [False, True])
def test_what_the_program_draws_is_not_touched(fails: bool) -> None:
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(0)
    expected = [numbers() for _ in range(3)]
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(0)
    found = [numbers()]
    try:
        with keyed_rng(1, 2, 3):
            inside = numbers()
            assert not fails
    except AssertionError:
        pass
    found.append(numbers())
    drawn(keyed_rng=True)
    assert [*found, numbers()] == expected
    with keyed_rng(1, 2, 3):
        assert numbers() == inside
    with keyed_rng(1, 2, 4):
        assert not set(numbers()) & set(inside)


def test_dropout_by_key_is_the_same_again() -> None:
    drop = nn.Dropout()
    masks = []
    for key in (1, 2, 1):
        with keyed_rng(0, 5, key):
            masks.append(drop(torch.ones(64)))
    assert torch.equal(masks[0], masks[2]) and not torch.equal(masks[0], masks[1])


def test_the_numbers_of_a_key_stay_the_same_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is resumed with a later version of this code continues with the same augmentations; numpy need not be there."""
    with keyed_rng(7, 1, 2):
        assert [int(torch.randint(10**9, ())), random.randrange(10**9), numpy.random.randint(10**9)] == [454493085, 73787102, 205722964]
    monkeypatch.delitem(sys.modules, "numpy")
    with keyed_rng(7, 1, 2):
        assert [int(torch.randint(10**9, ())), random.randrange(10**9)] == [454493085, 73787102]

"""Each sample once per epoch: the order, the shares of the ranks, and loaders that are stopped and resized anywhere."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from elastirun.train import DistributedDataParallel, ElasticDataLoader, TrainError
from elastirun.train.data.permutation import Permutation
from elastirun.train.data.shares import share, split
from elastirun.train.reduction.backward import ReduceSchedule
from tests.support.worlds import run


class Numbers(Dataset[int]):
    """The samples 0 … n - 1."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


def loader(n: int, batch: int, rank: int = 0, world_size: int = 1, **options: Any) -> ElasticDataLoader:
    return ElasticDataLoader(Numbers(n), batch, rank=rank, world_size=world_size, **options)


def samples(batch: Tensor | None) -> list[int]:
    return [] if batch is None else batch.tolist()


# -- the order ----------------------------------------------------------------------------------------------------------


def test_an_order_has_every_number_once() -> None:
    for n in (*range(1, 70), 1000, 4096, 10_007):
        assert sorted(Permutation(n, 3, 1).at(torch.arange(n)).tolist()) == list(range(n))


def test_an_order_can_be_read_anywhere_also_where_it_is_long() -> None:
    order = Permutation(10**9, 3, 1)
    positions = torch.randint(10**9, (1000,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(order.at(positions)[500:], order.at(positions[500:]))
    assert len(set(order.at(torch.arange(100_000)).tolist())) == 100_000


def test_the_order_stays_the_same_for_good() -> None:
    """A job that is resumed with a later version of this code continues in the same order."""
    assert Permutation(10, 0, 0).at(torch.arange(10)).tolist() == [7, 8, 6, 4, 0, 2, 1, 3, 5, 9]
    assert Permutation(10**12, 7, 3).at(torch.tensor([0, 1, 10**12 - 1])).tolist() == [66192322263, 820577901354, 431330263557]


def test_an_order_is_as_random_as_it_looks() -> None:
    """Chi-squared of where each number stands, over 1,000 keys: within six standard deviations of what chance gives."""
    n, keys = 32, 1000
    counts = torch.zeros(n, n)
    for key in range(keys):
        counts[torch.arange(n), Permutation(n, key).at(torch.arange(n))] += 1
    chi, freedom = ((counts - keys / n) ** 2 / (keys / n)).sum().item(), (n - 1) ** 2
    assert abs(chi - freedom) < 6 * (2 * freedom) ** 0.5


# -- the shares ---------------------------------------------------------------------------------------------------------


def test_the_shares_of_all_ranks_are_the_whole_and_differ_by_one_at_most() -> None:
    for size in range(40):
        for world in range(1, 65):
            shares = [share(size, rank, world) for rank in range(world)]
            assert [at for part in shares for at in part] == list(range(size))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_micro_batches_are_few_and_the_larger_ones_come_first() -> None:
    for size in range(40):
        for most in range(1, 45):
            parts = [len(part) for part in split(range(7, 7 + size), most)]
            assert sum(parts) == size and len(parts) == -(-size // most) and parts == sorted(parts, reverse=True)
            assert not parts or 0 < parts[-1] and parts[0] <= min(parts[-1] + 1, most)


@pytest.mark.daily(4)
@pytest.mark.parametrize(("seed", "most"), [*((seed, 64) for seed in range(60)), *((seed, 4) for seed in range(60, 80))])
def test_each_sample_once_whatever_becomes_of_the_world(seed: int, most: int) -> None:
    """Worlds of up to 64 ranks are stopped after any step, and resized. Steps whose checkpoint was not written are done again.

    Every second job runs in micro-batches.
    """
    rng = random.Random(seed)
    n, batch = rng.randint(1, 300), rng.randint(1, 40)
    expected = [list(range(n))] * 3
    done: list[list[int]] = [[], [], []]
    state: dict[str, int] = {}
    while not state or state["epoch"] < 3:
        world = rng.randint(1, most)
        micro = rng.randint(1, 7) if seed % 2 else None
        ranks = [loader(n, batch, rank, world, seed=seed, micro_batch_size=micro) for rank in range(world)]
        for one in ranks if state else ():
            one.load_state_dict(state)
        epoch, pending = ranks[0].epoch, []
        for step in zip(*map(steps, ranks), strict=True):
            pending += [sample for part, _ in step for sample in part]
            saves, stops = rng.random() < 0.5, rng.random() < 0.15
            if saves:
                (state,) = {tuple(sorted(kept.items())): kept for _, kept in step}.values()
                done[epoch] += pending
                pending = []
            if stops:
                break
        else:
            state, done[epoch] = ranks[0].state_dict(), done[epoch] + pending
    assert [sorted(part) for part in done] == expected


def steps(one: ElasticDataLoader) -> Iterator[tuple[list[int], dict[str, int]]]:
    """Yield the samples of a rank's steps in one epoch, and the state after each."""
    if one.micro_batch_size is None:
        for batch in one:
            yield samples(batch), one.state_dict()
        return
    reducer = SimpleNamespace(schedule=ReduceSchedule(), params=[], step=0, world=SimpleNamespace(rank=one.rank, size=one.world_size))
    ddp: Any = SimpleNamespace(_reducer=reducer, set_samples=lambda *_, **__: None, skip=lambda: None)
    for step in one.steps(ddp):
        before = one.consumed
        found = [sample for batch in step for sample in samples(batch)]
        assert len(found) == step.samples and one.consumed - before == step.size
        yield found, one.state_dict()


def test_the_order_of_an_epoch_is_the_same_for_every_world_size() -> None:
    def order(world: int) -> list[int]:
        ranks = [loader(50, 8, rank, world) for rank in range(world)]
        return [sample for step in zip(*ranks, strict=True) for part in step for sample in samples(part)]

    first = order(1)
    assert sorted(first) == list(range(50)) != first
    assert all(order(world) == first for world in (2, 3, 7, 11))


def test_epochs_have_other_orders_and_follow_by_themselves() -> None:
    one = loader(20, 8)
    epochs = [[samples(batch) for batch in one] for _ in range(2)]
    assert [len(batch) for batch in epochs[0]] == [8, 8, 4]
    assert epochs[0] != epochs[1] and one.epoch == 2


def test_without_shuffling_the_order_is_that_of_the_dataset() -> None:
    assert [samples(batch) for batch in loader(5, 2, shuffle=False)] == [[0, 1], [2, 3], [4]]


def test_a_last_batch_that_is_smaller_can_be_dropped() -> None:
    one = loader(11, 4, drop_last=True)
    assert [len(samples(batch)) for batch in one] == [4, 4] and len(one) == 2 and len(loader(11, 4)) == 3


def test_a_rank_without_a_sample_gets_none_and_the_number_of_its_samples() -> None:
    """Also in the first batch of an iteration, before its loader was asked for anything."""
    one = loader(7, 2, rank=0, world_size=3, shuffle=False)
    found = [(samples(batch), one.samples) for batch in one]
    assert found == [([], 0), ([], 0), ([], 0), ([], 0)]
    one = loader(8, 5, rank=2, world_size=4, shuffle=False)
    assert [(samples(batch), one.samples) for batch in one] == [([2], 1), ([6], 1)]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_loaded_in_advance_does_not_count(workers: int) -> None:
    one = loader(40, 4, num_workers=workers, **({"prefetch_factor": 4} if workers else {}))
    iterator = iter(one)
    seen = [samples(next(iterator)) for _ in range(3)]
    state = one.state_dict()
    assert state["consumed"] == 12
    again = loader(40, 4, num_workers=workers)
    again.load_state_dict(state)
    assert sorted(sample for batch in [*seen, *map(samples, again)] for sample in batch) == list(range(40))


def test_after_the_last_batch_the_state_is_that_of_the_next_epoch() -> None:
    """Also if the loop was left there, or the rest is dropped."""
    for drop, last in ((False, 3), (True, 2)):
        one = loader(11, 4, drop_last=drop)
        states = [one.state_dict() for _ in islice(one, last)]
        assert [(state["epoch"], state["consumed"]) for state in states] == [(0, 4), (0, 8), (1, 0)][: last - 1] + [(1, 0)]


def test_the_global_batch_may_change_in_the_middle_of_an_epoch() -> None:
    one = loader(30, 7)
    seen = [samples(batch) for batch in islice(one, 2)]
    again = loader(30, 5)
    again.load_state_dict(one.state_dict())
    assert sorted(sample for batch in [*seen, *map(samples, again)] for sample in batch) == list(range(30))


def test_the_models_random_numbers_are_left_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    for _ in loader(10, 5):
        pass
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(("scale", "factors"), [("linear", [0.5, 1, 1.5, 2]), ("sqrt", [0.5**0.5, 1, 1.5**0.5, 2**0.5])])
def test_the_batch_grows_with_the_world_where_that_is_asked_for(scale: str, factors: list[float]) -> None:
    ones = [loader(100, 32, 0, world, scale=scale, base_world_size=4) for world in (2, 4, 6, 8)]
    assert [one.global_batch_size for one in ones] == [16, 32, 48, 64]
    assert [one.lr_factor for one in ones] == pytest.approx(factors)
    assert loader(100, 3, 0, 1, scale=scale, base_world_size=64).global_batch_size == 1 and loader(100, 32, 0, 3).lr_factor == 1


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: ElasticDataLoader(Stream(), 4), "samples by index"),
        (lambda: loader(10, 0), "global_batch_size must be a whole number, 1 or more, not 0"),
        (lambda: loader(10, 4, micro_batch_size=0), "micro_batch_size must be a whole number, 1 or more, not 0"),
        (lambda: loader(10, 4, scale="cubic", base_world_size=1), "scale must be one of linear, sqrt"),
        (lambda: loader(10, 4, scale="sqrt"), "scale needs base_world_size"),
        (lambda: loader(10, 4, base_world_size=2), "without it base_world_size has no meaning"),
        (lambda: loader(10, 4, batch_size=3), "batch_size is not an argument"),
        (lambda: loader(10, 4, sampler=[1]), "sampler is not an argument .* an order of its own"),
        (lambda: loader(10, 4, rank=3, world_size=3), "rank must be between 0 and 2"),
        (lambda: ElasticDataLoader(Numbers(3), 1, rank=0), "give both"),
        (lambda: loader(10, 4).load_state_dict(loader(11, 4).state_dict()), "a dataset of 11 samples, this one has 10"),
        (lambda: loader(10, 4).load_state_dict({"seed": 0, "epoch": 0, "consumed": 11, "length": 10}), "out of range"),
        (lambda: loader(10, 4).load_state_dict({"epoch": 0}), "not the state of an ElasticDataLoader"),
    ],
)
def test_wrong_use_is_one_clear_error(wrong: Any, said: str) -> None:
    with pytest.raises(TrainError, match=said):
        wrong()


# -- with the data-parallel module --------------------------------------------------------------------------------------


class Points(Dataset[Tensor]):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(3, generator=torch.Generator().manual_seed(index))


def weights(rank: int, world: int) -> list[float]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = ElasticDataLoader(Points(), 6)
    for _ in range(2):
        for batch in data:
            optimizer.zero_grad()
            ddp.set_samples(data.samples)
            if batch is None:
                ddp.skip()
            else:
                ddp(batch).pow(2).mean().backward()
            optimizer.step()
    return [value for param in model.parameters() for value in param.flatten().tolist()]


def test_the_same_training_at_any_world_size() -> None:
    """The global batch is the same, and each rank's gradient counts by its samples: also where a rank has none."""
    (alone,) = run(1, weights)
    for world in (2, 4, 7):
        for found in run(world, weights):
            assert found == pytest.approx(alone, abs=1e-6)


def step_gradients(rank: int, world: int, micro: int | None) -> list[list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    ddp = DistributedDataParallel(model)
    data = ElasticDataLoader(Points(), 10, micro_batch_size=micro)
    found = []
    for step in data.steps(ddp):
        model.zero_grad()
        for batch in step:
            assert micro is None or len(batch) <= micro
            ddp(batch).pow(2).mean().backward()
        found.append([value for param in model.parameters() for value in param.grad.flatten().tolist()])
        assert data.consumed == min(10 * len(found), 23)
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_a_step_has_the_mean_over_the_global_batch_whatever_its_micro_batches(world: int) -> None:
    """Also where ranks have different numbers of micro-batches, of different sizes, or none: the last step has three samples."""
    (alone,) = run(1, step_gradients, None)
    for micro in (1, 2, 3):
        for found in run(world, step_gradients, micro):
            assert [pytest.approx(part, abs=1e-6) for part in alone] == found


def cut_short(rank: int, world: int) -> list[Any]:
    """Rank 1 leaves out the last backward of the first step; rank 0 breaks off in the second step, on its own account."""
    model = nn.Linear(3, 1)
    ddp = DistributedDataParallel(model)
    data = ElasticDataLoader(Points(), 12, micro_batch_size=3)
    found: list[Any] = []
    for number, step in enumerate(data.steps(ddp)):
        for at, batch in enumerate(step):
            if (number, rank, at) == (0, 1, 1):
                continue
            if number == 1:
                assert ddp.require_backward_grad_sync == (at == 1)
                break
            ddp(batch).sum().backward()
        if number == 1:
            break
        found += [ddp.agreement.samples, ddp.agreement.with_data, data.consumed]
    return [*found, data.consumed, ddp.require_backward_grad_sync]


def test_a_step_that_is_not_finished_is_not_counted_and_holds_nobody_up() -> None:
    assert run(2, cut_short) == [[6.0, 1, 12, 12, True]] * 2


def undecided(rank: int, world: int) -> list[str]:
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    said = []
    data = ElasticDataLoader(Points(), 12)
    for prepare in (lambda: ddp.accumulate(2), lambda: ddp.set_samples(3, backwards=0), lambda: next(ddp.batches(data))):
        with pytest.raises(TrainError) as error:
            prepare()
            next(iter(next(data.steps(ddp))))
        said.append(str(error.value))
    return said


def test_a_step_alone_decides_which_backward_reduces() -> None:
    (said,) = run(1, undecided)
    assert "neither accumulate() nor no_sync()" in said[0] and "positive number of backwards" in said[1]
    assert "ElasticDataLoader would count as consumed" in said[2]

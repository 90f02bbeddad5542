"""Shares of the global batch that follow the speeds of the ranks: ``ElasticDataLoader(balance=True)``."""

from __future__ import annotations

import io
import json
import multiprocessing
import random
import time
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from elastirun.train import DeterministicShards, DistributedDataParallel, ElasticDataLoader, TrainError
from elastirun.train.data.balance import EVERY, LEAST, Balance, ShareChange, apportion, rebalance
from elastirun.train.data.shares import share
from tests.support.worlds import run

SEED = random.randrange(1 << 32)
GLOBAL, LENGTH, SLOW = 28, 28 * 70 + 5, 3
SAMPLE = 0.004  # seconds for a sample on a rank that is not slow, where time is measured
EVEN, BALANCED = (7, 7, 7, 7), (8, 8, 8, 4)  # where rank 3 takes twice as long


# -- the decision ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turn", range(100))
def test_shares_are_whole_and_are_done_at_the_same_time_as_far_as_samples_are_whole(turn: int) -> None:
    rng = random.Random(SEED + turn)
    world = rng.randint(1, 9)
    size, paces = rng.randint(world, 600), [rng.uniform(0.001, 1) ** rng.choice((1, 4)) for _ in range(world)]
    shares, least = apportion(paces, size), max(1, int(LEAST * size / world))
    assert sum(shares) == size and min(shares) >= least, (SEED + turn, paces, size)
    slowest = max((share * pace for share, pace in zip(shares, paces, strict=True) if share > least), default=0.0)
    # A sample of the last rank to be ready would make any other rank later still.
    assert all((share + 1) * other >= slowest * (1 - 1e-9) for share, other in zip(shares, paces, strict=True)), (SEED + turn, paces, size)


@pytest.mark.parametrize("turn", range(50))
def test_weights_share_each_size_without_gap_and_equal_ones_as_without_weights(turn: int) -> None:
    rng = random.Random(SEED + turn)
    weights = [rng.randint(1, 50) for _ in range(rng.randint(1, 9))]
    size, world = rng.randint(0, 200), len(weights)
    cut = [share(size, rank, world, weights) for rank in range(world)]
    assert [at for part in cut for at in part] == list(range(size)), SEED + turn
    assert all(abs(len(part) - size * weight / sum(weights)) < 1 for part, weight in zip(cut, weights, strict=True))
    assert [share(size, rank, world, [7] * world) for rank in range(world)] == [share(size, rank, world) for rank in range(world)]


ALIKE = (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("paces", "before", "expected"),
    [
        ((1, 1, 1, 2), ALIKE, (37, 37, 36, 18)),
        ((1, 1, 1, 1), ALIKE, ALIKE),
        ((1, 1.04, 0.97, 1.05), ALIKE, ALIKE),  # chance
        ((1, 1, 1, 1), (37, 37, 36, 18), ALIKE),  # the slow rank is as fast as the others again
        ((1, 1, 1, 2), (37, 37, 36, 18), (37, 37, 36, 18)),
        ((1, 1.05, 1, 1.9), (37, 37, 36, 18), (37, 37, 36, 18)),
        ((1, 1, 1, 100), ALIKE, (40, 40, 40, 8)),  # a quarter of an even share
        ((1, 1, 0, 2), ALIKE, ALIKE),  # of a rank nothing is known
    ],
)
def test_shares_change_only_where_a_step_becomes_much_shorter(paces: Any, before: Any, expected: Any) -> None:
    assert rebalance(paces, 128, before) == expected
    assert rebalance(paces, 3, before) == before, "a batch with fewer samples than ranks is not shared by speed"


def test_a_change_holds_from_a_step_that_no_loader_has_cut_yet() -> None:
    one = Balance(2, ahead=4)
    for step in range(EVERY):
        one.finish(step)
        one.measure(1.0, 8)
    slower = Balance(2, ahead=6)
    for _ in range(EVERY):
        slower.measure(2.0, 8)
    assert one.due and one.told[1] == 4
    one.decide([one.told, slower.told], 30)
    first = EVERY + 6 + 2
    assert [one.weights_at(step) for step in (EVERY, first - 1, first)] == [(1, 1), (1, 1), (20, 10)] and not one.due
    other = Balance(2, ahead=0)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert other.state_dict() == one.state_dict() and other.weights_at(first) == (20, 10)
    one.finish(first - 1)
    assert one.change is None and one.weights == (20, 10) and one.told[0] == 0, "times with the old shares are dropped"
    third = Balance(3, ahead=0)
    third.load_state_dict(other.state_dict())
    assert third.weights_at(first) == (1, 1, 1) and third.step == EVERY


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"step": 1, "weights": [1, 0], "change": None},
        {"step": 1, "weights": 3, "change": None},
        {"step": 1, "weights": [float("inf")], "change": None},
        {"step": -1, "weights": [1, 1], "change": None},
    ],
)
def test_a_state_that_cannot_be_read_is_one_clear_error(broken: dict[str, Any]) -> None:
    with pytest.raises(TrainError, match='the "balance" in the state of the loader cannot be read'):
        Balance(2, 0).load_state_dict(broken)


# -- with the data-parallel module ------------------------------------------------------------------------------------------


class Points(Dataset[Tensor]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        return torch.cat([torch.randn(3, generator=torch.Generator().manual_seed(index)), torch.tensor([float(index)])])


class Slowed(nn.Sequential):
    """A model in whose forward each sample takes ``seconds``."""

    seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds * len(x))
        result: Tensor = super().forward(x)
        return result


def train(
    rank: int, world: int, options: dict[str, Any], slow: int | None, state: Any, steps: int, measured: bool = False
) -> dict[str, Any]:
    """Make ``steps`` steps from ``state`` on; rank ``slow`` takes twice as long for each sample.

    Its time is ``measured``; else the loader is told.
    """
    multiprocessing.process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have loading workers
    torch.manual_seed(0)
    model = Slowed(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    pace = SAMPLE * (2 if rank == slow else 1)
    model.seconds = pace if measured else 0.0
    loader = ElasticDataLoader(Points(), GLOBAL, **options)
    if loader.balance and not measured:
        measure, chance = loader.balance.measure, (0.0 if slow is not None else 0.03) * (-1) ** rank
        loader.balance.measure = lambda seconds, work: measure(pace * work * (1 + chance), work)  # type: ignore[method-assign]
    if state is not None:
        loader.load_state_dict(state["data"])
        model.load_state_dict(torch.load(io.BytesIO(state["model"])))
        optimizer.load_state_dict(torch.load(io.BytesIO(state["optimizer"])))
    seen: list[list[int]] = []
    found: dict[str, Any] = {"seen": seen, "sizes": [], "seconds": [], "stragglers": []}
    begun = time.monotonic()
    while len(seen) < steps:
        for step in loader.steps(ddp):
            optimizer.zero_grad()
            seen.append([])
            for batch in step:
                seen[-1] += batch[:, 3].int().tolist()
                ddp(batch[:, :3]).pow(2).mean().backward()
            optimizer.step()
            found["sizes"].append(step.samples)
            found["stragglers"].append(sorted(ddp.stats()["stragglers"]))
            found["seconds"].append(time.monotonic() - begun)
            begun = time.monotonic()
            if len(seen) == steps:
                break
    found["weights"] = [value for param in model.parameters() for value in param.flatten().tolist()]
    found["state"] = {"data": json.loads(json.dumps(loader.state_dict())), "model": saved(model), "optimizer": saved(optimizer)}
    return found


def saved(part: Any) -> bytes:
    """Return the state of ``part`` as bytes: tensors that are sent to other processes would be in memory that these share."""
    file = io.BytesIO()
    torch.save(part.state_dict(), file)
    return file.getvalue()


def order(ranks: list[dict[str, Any]]) -> list[list[int]]:
    """Return the samples of each global batch, rank by rank."""
    return [[sample for part in parts for sample in part] for parts in zip(*(rank["seen"] for rank in ranks), strict=True)]


def test_a_slow_rank_gets_less_and_the_training_is_the_same_also_resumed_at_another_world_size() -> None:
    steps = 3 * EVERY
    (alone,) = run(1, train, {}, None, None, 2 * steps)
    first = run(4, train, {"balance": True, "micro_batch_size": 5}, SLOW, None, steps)
    assert list(zip(*(rank["sizes"] for rank in first), strict=True)) == [EVEN] * (EVERY + 2) + [BALANCED] * (2 * EVERY - 2)
    assert all(rank["state"]["data"] == first[0]["state"]["data"] for rank in first)
    same = run(4, train, {"balance": True}, SLOW, first[0]["state"], EVERY // 2)
    assert tuple(rank["sizes"][0] for rank in same) == BALANCED, "as recorded"
    three = run(3, train, {"balance": True}, None, first[0]["state"], steps)
    assert sorted(rank["sizes"][0] for rank in three) == [9, 9, 10]
    assert order(first) + order(three) == order([alone])
    for rank in three:
        assert rank["weights"] == pytest.approx(alone["weights"], abs=1e-6)


@pytest.mark.daily(3)
def test_each_sample_once_where_batches_are_loaded_in_advance() -> None:
    (alone,) = run(1, train, {}, None, None, 75)  # the epoch has 71 steps, the last one of 5 samples
    ranks = run(2, train, {"balance": True, "num_workers": 2}, 1, None, 75)
    assert order(ranks) == order([alone])
    assert list(zip(*(rank["sizes"] for rank in ranks), strict=True))[EVERY : EVERY + 7] == [(14, 14)] * 6 + [(19, 9)]


def test_ranks_that_are_alike_keep_an_even_split() -> None:
    ranks = run(4, train, {"balance": True}, None, None, 3 * EVERY)
    assert {size for rank in ranks for size in rank["sizes"]} == {GLOBAL // 4}


def test_a_slow_rank_costs_less_time_than_with_an_even_split() -> None:
    """``benchmarks.balance`` measures that 60 % of the lost time are won back; here other tests may keep the machine busy."""
    ranks = run(4, train, {"balance": True}, SLOW, None, 3 * EVERY, True)
    seconds, named = ranks[0]["seconds"], [SLOW in step for step in ranks[0]["stragglers"]]
    even, balanced = median(seconds[:EVERY]), median(seconds[-EVERY:])
    assert balanced < 0.85 * even, (seconds, [rank["sizes"] for rank in ranks])
    assert sum(named[-EVERY:]) > EVERY / 2, "judged by its samples it is a straggler still"


def told_work(rank: int, world: int) -> list[Any]:
    """Let each rank have batches of its own length, and take as long as that."""
    model = Slowed(nn.Linear(3, 1))
    ddp = DistributedDataParallel(model)
    found = []
    for work in (None, lambda batch: len(batch) * (rank + 1)):
        loader = ElasticDataLoader(Points(), GLOBAL, work=work)
        model.seconds = 2 * SAMPLE * (rank + 1)
        for number, step in enumerate(loader.steps(ddp)):
            for batch in step:
                ddp(batch[:, :3]).sum().backward()
            if number == 2:
                break
        found.append((ddp.agreement.work, sorted(ddp.stats()["stragglers"])))
    return found


def test_a_rank_is_judged_by_the_work_in_its_batches() -> None:
    plain, told = run(4, told_work)[0]
    assert plain[0] == (7.0, 7.0, 7.0, 7.0) and {2, 3} <= {*plain[1]}
    assert told[0] == (7.0, 14.0, 21.0, 28.0) and not {2, 3} & {*told[1]}


# -- wrong use ----------------------------------------------------------------------------------------------------------------


def wrong_uses(rank: int, world: int) -> list[str]:
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    balanced = ElasticDataLoader(Points(), 4, balance=True)
    said = []
    for wrong in (
        lambda: next(iter(balanced)),
        lambda: next(balanced.steps(DeterministicShards(nn.Linear(3, 1)))),
        lambda: balanced.set_world(0, 1),
        lambda: ElasticDataLoader(Points(), 4, work=3),  # type: ignore[arg-type]
        lambda: next(iter(next(ElasticDataLoader(Points(), 4, work=lambda batch: -1.0).steps(ddp)))),
        lambda: next(iter(next(ElasticDataLoader(Points(), 4, work=lambda batch: torch.ones(2)).steps(ddp)))),  # type: ignore[arg-type,return-value]
        lambda: ddp.set_samples(1, work=float("nan")),
    ):
        with pytest.raises(TrainError) as error:
            wrong()
        said.append(str(error.value))
    assert "deterministic" not in balanced.state_dict(), "what was refused has changed nothing"
    return said


def of_two_replicas(rank: int, world: int) -> str:
    """Return what is said where two ranks hold one replica each of two that nobody else has."""
    groups = [dist.new_group([one]) for one in range(world)]
    ddp = DistributedDataParallel(nn.Linear(3, 1), process_group=groups[rank])
    with pytest.raises(TrainError) as error:
        next(ElasticDataLoader(Points(), 4, balance=True, rank=0, world_size=1).steps(ddp))
    return str(error.value)


def test_ranks_that_share_a_replica_do_not_decide_apart() -> None:
    assert all("needs a replica on each rank" in said for said in run(2, of_two_replicas))


@pytest.mark.parametrize("unit", [1e-15, 1.0, 1e15])
def test_the_unit_of_work_is_any(unit: float) -> None:
    ranks = [Balance(2, 0), Balance(2, 0)]
    for rank, one in enumerate(ranks):
        for step in range(EVERY):
            one.finish(step)
            one.measure(1.0 + rank, 8 * unit)
    for one in ranks:
        one.decide([other.told for other in ranks], 30)
        assert one.change == ShareChange(EVERY + 2, (20, 10))


def test_wrong_use_is_one_clear_error() -> None:
    said = run(1, wrong_uses)[0]
    assert [text.count("\n") for text in said] == [0] * len(said)
    expected = ["needs the loop `for step in", "DeterministicShards has shards", "another world", "work must be callable"]
    for text, part in zip(said, [*expected, *["work must return a number"] * 2, "a work that is a number"], strict=True):
        assert part in text

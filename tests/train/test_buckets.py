"""Plans of buckets: pure, so checked against torch's, against every other plan, and on random models."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest
import torch
import torch.distributed as dist

from elastirun.train.reduction.buckets.plan import (
    CAP,
    FIRST_CAP,
    MIB,
    Buckets,
    Gradient,
    LinkSpeed,
    by_size,
    decode,
    encode,
    fit,
    planned,
    sum_bytes,
    words_last,
)

CPU = torch.device("cpu")
SEEDS = range(60)


def gradients(*numels: int, dtype: torch.dtype = torch.float32) -> list[Gradient]:
    return [Gradient(numel, dtype, CPU) for numel in numels]


def mixed(chance: random.Random, count: int) -> list[Gradient]:
    kinds = (torch.float32, torch.float64, torch.bfloat16)
    return [Gradient(chance.choice((1, 10, 1000, 100_000)), chance.choice(kinds), CPU) for _ in range(count)]


def shuffled(chance: random.Random, count: int) -> list[int]:
    return chance.sample(range(count), count)


def finish(gradients: Sequence[Gradient], buckets: Buckets, ready: Sequence[float], link: LinkSpeed) -> float:
    """When the last of ``buckets`` is reduced, in seconds since the backward began: what ``planned`` makes small."""
    free = 0.0
    for bucket in buckets:
        free = max(free, max(ready[index] for index in bucket)) + link.seconds(sum_bytes(gradients, bucket))
    return free


def is_partition(plan: Buckets, found: Sequence[Gradient]) -> bool:
    one_kind = all(len({found[index].kind for index in bucket}) == 1 for bucket in plan)
    return one_kind and sorted(index for bucket in plan for index in bucket) == list(range(len(found)))


# -- by size ----------------------------------------------------------------------------------------------------------


def torchs(found: Sequence[Gradient], order: Sequence[int], caps: list[int]) -> list[tuple[int, ...]]:
    tensors = [torch.empty(found[index].numel, dtype=found[index].dtype) for index in order]
    buckets, _ = dist._compute_bucket_assignment_by_size(tensors, caps, [False] * len(tensors), list(order))  # type: ignore[attr-defined]
    return [tuple(bucket) for bucket in buckets]


@pytest.mark.parametrize("seed", SEEDS)
def test_by_size_is_torchs_plan(seed: int) -> None:
    chance = random.Random(seed)
    found = gradients(*(chance.choice((1, 10, 1000, 100_000)) for _ in range(chance.randint(1, 40))))
    order, cap, first_cap = shuffled(chance, len(found)), chance.choice((1, 4000, 10**6, 10**9)), chance.choice((1, 4000, 10**6))
    assert list(by_size(found, order, cap, first_cap)) == torchs(found, order, [first_cap, cap])


@pytest.mark.parametrize("seed", SEEDS)
def test_by_size_keeps_types_apart_as_torch_does(seed: int) -> None:
    chance = random.Random(seed)
    found = mixed(chance, chance.randint(1, 40))
    order, cap, first_cap = shuffled(chance, len(found)), chance.choice((4000, 10**6)), chance.choice((1, 4000, 10**6))
    plan = by_size(found, order, cap, first_cap)
    assert is_partition(plan, found)
    assert sorted(plan) == sorted(torchs(found, order, [first_cap, cap]))  # torch's order of types is a hash map's


def test_buckets_come_in_the_order_in_which_they_are_complete() -> None:
    found = [*gradients(10, 10), *gradients(10, 10, dtype=torch.float64)]
    assert by_size(found, [0, 2, 3, 1], 80, 80) == ((2,), (3,), (0, 1))


def test_the_control_words_find_a_float32_bucket_at_the_end() -> None:
    found = [*gradients(10), *gradients(10, dtype=torch.bfloat16), *gradients(10, dtype=torch.float64)]
    assert words_last(found, ((0,), (1,), (2,))) == ((1,), (2,), (0,))
    assert words_last(found, ((1,), (2,))) == ((1,), (2,))
    assert by_size(found, [0, 1, 2])[-1] == (0,)
    assert planned(found, [0, 1, 2], [0.1, 0.2, 0.3], LinkSpeed(1e-3, 1e-9))[-1] == (0,)


# -- planned ----------------------------------------------------------------------------------------------------------


def cuts(order: Sequence[int]) -> Iterator[Buckets]:
    """Every way to cut ``order`` into buckets."""
    for count in range(len(order)):
        for ends in combinations(range(1, len(order)), count):
            edges = [0, *ends, len(order)]
            yield tuple(tuple(order[a:b]) for a, b in zip(edges, edges[1:], strict=False))


def instance(chance: random.Random, count: int) -> tuple[list[Gradient], list[int], list[float], LinkSpeed]:
    """Gradients, the order and the moments in which they come, and a link that carries them in about that time."""
    found = gradients(*(chance.choice((1, 300, 1_000_000, chance.randint(1, 5_000_000))) for _ in range(count)))
    order, ready, now = shuffled(chance, count), [0.0] * count, 0.0
    for index in order:
        now += chance.choice((0.0, 1e-5, chance.uniform(0, 0.02)))
        ready[index] = now
    per_byte = chance.uniform(0.1, 2) * max(now, 1e-3) / sum_bytes(found, order)
    return found, order, ready, LinkSpeed(chance.choice((0.0, 1e-4, chance.uniform(0, 0.01))), per_byte)


def slack(found: Sequence[Gradient], order: Sequence[int], ready: Sequence[float], link: LinkSpeed) -> float:
    """How much a plan may be behind the best: one of equal ends has fewer buckets, and the model is cut into 256 blocks at most."""
    return 0.01 * link.latency * len(order) + (sum_bytes(found, order) * link.per_byte + max(ready)) / 256 + 1e-9


@pytest.mark.parametrize("seed", SEEDS)
def test_no_other_boundaries_are_better(seed: int) -> None:
    chance = random.Random(seed)
    found, order, ready, link = instance(chance, chance.randint(1, 9))
    plan = planned(found, order, ready, link)
    assert is_partition(plan, found) and [index for bucket in plan for index in bucket] == order
    best = min(finish(found, other, ready, link) for other in cuts(order))
    assert finish(found, plan, ready, link) <= best + slack(found, order, ready, link)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_is_never_behind_one_of_a_fixed_size(seed: int) -> None:
    chance = random.Random(seed)
    found, order, ready, link = instance(chance, chance.choice((3, 50, 400)))
    plan = finish(found, planned(found, order, ready, link), ready, link)
    for cap in (CAP, 8 * MIB, 4 * MIB, MIB, 1):
        fixed = by_size(found, order, cap, min(cap, FIRST_CAP))
        assert plan <= finish(found, fixed, ready, link) + slack(found, order, ready, link)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_gradient_is_in_one_bucket_of_its_type(seed: int) -> None:
    chance = random.Random(seed)
    found = mixed(chance, chance.randint(1, 40))
    order = shuffled(chance, len(found))
    ready = [chance.random() for _ in found]
    unsure = set(chance.sample(order, chance.randint(0, len(order))))
    plan = planned(found, sorted(order, key=lambda index: ready[index]), ready, LinkSpeed(1e-3, 1e-8), unsure)
    assert is_partition(plan, found)
    assert all(set(bucket) <= unsure or not set(bucket) & unsure for bucket in plan)


def test_gradients_that_do_not_always_come_go_last() -> None:
    found, order, ready = gradients(10, 10, 10, 10), [0, 1, 2, 3], [0.1, 0.2, 0.3, 0.4]
    plan = planned(found, order, ready, LinkSpeed(1e-6, 1e-9), {0, 2})
    assert [index for bucket in plan for index in bucket] == [1, 3, 0, 2]


def test_on_a_link_of_great_latency_all_travel_together_and_on_one_of_none_nobody_waits() -> None:
    found, order, ready = gradients(*[250_000] * 8), list(range(8)), [0.01 * at for at in range(1, 9)]
    assert len(planned(found, order, ready, LinkSpeed(1.0, 1e-9))) == 1
    assert len(planned(found, order, ready, LinkSpeed(0.0, 1e-8))) == 8


# -- the link ---------------------------------------------------------------------------------------------------------


def test_a_link_is_found_again_from_what_it_costs() -> None:
    link = LinkSpeed(0.0004, 1.1e-9)
    found = fit([(nbytes, link.seconds(nbytes)) for nbytes in (65536, 4 * MIB, 32 * MIB)])
    assert found.latency == pytest.approx(link.latency) and found.per_byte == pytest.approx(link.per_byte)


@pytest.mark.parametrize("samples", [[(100, 1.0), (200, 0.5)], [(100, 1.0), (200, 4.0)], [(100, 1.0)], [(0, 1.0)], [(0, 0.0), (8, 0.0)]])
def test_neither_latency_nor_bytes_ever_cost_less_than_nothing(samples: list[tuple[int, float]]) -> None:
    found = fit(samples)
    assert found.latency >= 0 and found.per_byte >= 0
    middle = sum(nbytes for nbytes, _ in samples) / len(samples)
    assert found.seconds(middle) == pytest.approx(sum(seconds for _, seconds in samples) / len(samples))


# -- on its way to the other ranks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [(), ((0,),), ((2, 0), (1,)), ((0, 1, 2),), ((2,), (1,), (0,))])
def test_a_plan_survives_the_way_to_the_other_ranks(plan: Buckets) -> None:
    assert decode(encode(plan)) == plan
    assert len(encode(plan)) == 2 * sum(map(len, plan))  # known to those that wait for it


def test_what_a_bucket_costs_the_host_is_weighed() -> None:
    """2,000 small gradients in 30 ms: were launching free, dozens of buckets would end earliest. Over a fast link a few do in any case."""
    small = [Gradient(1024, torch.float32, torch.device("cpu"))] * 2000
    ready = [index * 15e-6 for index in range(2000)]
    free, dear, fast = LinkSpeed(30e-6, 3.5e-9), LinkSpeed(30e-6, 3.5e-9, host=5e-4), LinkSpeed(30e-6, 1e-10)
    many, few, least = (len(planned(small, range(2000), ready, link)) for link in (free, dear, fast))
    assert many > 2 * few and least <= 3

"""How much of the communication hides behind the backward: the whole module on a clock that only sleeping moves.

The link and the compute are benchmarks/ddp_schedule.py's, which sleeps in earnest beside torch's DistributedDataParallel.
"""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch

from benchmarks.ddp_schedule import ELASTIRUN, LINKS, PLAIN, Layout, backward, even, hidden, link_for, trained, uneven
from elastirun.train import DistributedDataParallel
from elastirun.train.reduction.buckets.plan import CAP, Gradient, LinkSpeed, by_size, sum_bytes
from tests.support.worlds import run
from tests.train.test_buckets import finish

STEPS = 7  # the plan is there after four


class Clock:
    """``time.perf_counter`` that only ``time.sleep`` moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def read(self) -> float:
        return self.now


def on_a_clock(rank: int, world: int, layout: Layout, link: LinkSpeed, cap: float | None) -> tuple[float, float, list[int]]:
    """Seconds of a backward alone and of one with its reductions, once all is planned, and the bytes of each bucket."""
    clock = Clock()
    with mock.patch.object(time, "perf_counter", clock.read), mock.patch.object(time, "sleep", clock.sleep):
        with trained(PLAIN, None, layout, link) as module:
            alone = backward(module)
        with trained(ELASTIRUN, cap, layout, link) as module:
            taken = [backward(module) for _ in range(STEPS)]
            assert isinstance(module, DistributedDataParallel)
            return alone, taken[-1], [bucket["bytes"] for bucket in module.stats()["buckets"]]


def of_a_fixed_size(layout: Layout, link: LinkSpeed, cap: int = CAP) -> float:
    """Seconds of a backward with torch's plan, were there no other cost than compute and the link."""
    found = [Gradient(nbytes // 4, torch.float32, torch.device("cpu")) for nbytes, _ in layout]
    order, ready, now = list(reversed(range(len(layout)))), [0.0] * len(layout), 0.0
    for index in order:
        now += layout[index][1]
        ready[index] = now
    return finish(found, by_size(found, order, cap), ready, link)


@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.5])
def test_nine_tenths_of_what_can_be_hidden_are_hidden_with_default_settings(ratio: float) -> None:
    layout = even()
    link = link_for(layout, 0.0002, ratio * sum(seconds for _, seconds in layout))
    [(alone, taken, _)] = run(1, on_a_clock, layout, link, None)
    communication = link.seconds(sum(nbytes for nbytes, _ in layout))
    assert hidden(taken, alone, communication) >= 0.9
    assert hidden(of_a_fixed_size(layout, link), alone, communication) <= 0.8  # what torch's sizes would do


@pytest.mark.parametrize("latency, seconds", LINKS)
def test_planned_buckets_are_near_the_bound_on_each_link(latency: float, seconds: float) -> None:
    layout = uneven()
    link = link_for(layout, latency, seconds)
    [(alone, taken, _)] = run(1, on_a_clock, layout, link, None)
    bound = alone + link.seconds(layout[0][0])  # the embedding's gradient comes last
    assert bound <= taken <= 1.07 * bound
    assert of_a_fixed_size(layout, link) >= 1.09 * bound  # torch's plan


def test_a_fixed_size_is_kept() -> None:
    layout = even()
    link = link_for(layout, 0.0002, 0.2)
    [(_, taken, sizes)] = run(1, on_a_clock, layout, link, 8.0)
    assert all(8 << 20 <= size <= (8 << 20) + layout[0][0] for size in sizes[:-1])
    assert taken == pytest.approx(of_a_fixed_size(layout, link, 8 << 20), rel=0.05)


def test_without_a_plan_nothing_hides() -> None:
    """The first backward learns the order: all is launched at its end. That what is measured here can be seen at all."""
    layout = even(layers=6)
    link = link_for(layout, 0.0, 0.06)
    [first] = run(1, first_on_a_clock, layout, link)
    found = [Gradient(nbytes // 4, torch.float32, torch.device("cpu")) for nbytes, _ in layout]
    assert first >= sum(seconds for _, seconds in layout) + link.per_byte * sum_bytes(found, range(len(found)))


def first_on_a_clock(rank: int, world: int, layout: Layout, link: LinkSpeed) -> float:
    clock = Clock()
    with mock.patch.object(time, "perf_counter", clock.read), mock.patch.object(time, "sleep", clock.sleep):
        with trained(ELASTIRUN, None, layout, link) as module:
            return backward(module)

"""Live workers in simulated histories: no step in a round that is over, no finished step lost, no abandoned state that wins."""

from __future__ import annotations

import itertools
import random
from functools import partial

import pytest

from elastirun.rendezvous.machine import CUT_OFF
from tests.sim import invariants
from tests.sim import live as played
from tests.sim.history import History, draw
from tests.sim.live import Live, Switching
from tests.sim.live_rounds import Training
from tests.sim.world import Node, World

WITHIN = 90.0  # seconds until all workers train in one world


def job(nodes: int, switching: Switching | None = None, seed: int = 0, slots: int = 2) -> World:
    """Return a world in which all workers of so many nodes train."""
    world = World(seed, min_nodes=1, max_nodes=nodes, max_restarts=100)
    world.graces = (30.0, 5.0)
    world.live = Live(world, switching or Switching(), random.Random(seed))
    invariants.install(world)
    for _ in range(nodes):
        world.add(slots=slots)
    assert world.run(WITHIN, lambda: trained(world, 5))
    return world


def trained(world: World, steps: int) -> bool:
    """Return whether all workers train in one world of the present round, which has made so many steps."""
    return live(world).rounds.all_train() and training(world).steps >= steps


def live(world: World) -> Live:
    assert world.live is not None
    return world.live


def training(world: World) -> Training:
    """Return the newest round of the workers."""
    return list(live(world).rounds.trainings.values())[-1]


def finished(world: World, node: Node) -> list[int]:
    """Return how many steps each worker of the node has finished."""
    return [worker.steps for worker in live(world).crew(node).running.values()]


@pytest.mark.daily(2)
def test_histories_of_live_jobs_hold() -> None:
    plans = itertools.islice((plan for plan in map(draw, itertools.count()) if plan.live is not None), 20)
    found = [(plan.seed, History(plan).run().violation) for plan in plans]
    assert [one for one in found if one[1] is not None] == []


@pytest.mark.parametrize("seed", [5000, 5004, 5023, 5042, 71_084_496, 73_068_433])
def test_histories_hold_in_which_a_rule_is_missed(seed: int) -> None:
    assert draw(seed).live is not None and History(draw(seed)).run().violation is None


def test_a_worker_dies_and_the_others_lose_no_step() -> None:
    world = job(2)
    before = max(finished(world, world.nodes[1]))
    world.nodes[0].fail()
    assert world.run(WITHIN, lambda: training(world).record.round == 2 and trained(world, 1))
    assert min(finished(world, world.nodes[0])) > before


def test_a_node_that_was_away_takes_the_state_of_those_that_went_on() -> None:
    world = job(3)
    away = world.nodes[2]
    away.cut = True
    assert world.run(WITHIN, lambda: training(world).record.round == 2 and trained(world, 5))
    steps = max(finished(world, world.nodes[0]))
    assert all(worker.state and worker.lives for worker in live(world).crew(away).running.values()), "its agent has not heard of the end"
    away.cut = False
    assert world.run(WITHIN, lambda: len(training(world).record.members) == 3 and trained(world, 1))
    assert min(finished(world, away)) > steps


def test_a_worker_that_hangs_is_killed_and_started_anew_without_a_state() -> None:
    world = job(2, Switching(hangs=1.0))
    pids = {worker.pid for worker in live(world).crew(world.nodes[0]).running.values()}
    world.nodes[1].fail()
    world.run(4.0)
    assert world.nodes[0].stopping
    live(world).calm = True
    assert world.run(WITHIN, lambda: training(world).record.round == 2 and trained(world, 1))
    assert not pids & {worker.pid for worker in live(world).crew(world.nodes[0]).running.values()}


def alone_in_its_round(monkeypatch: pytest.MonkeyPatch) -> World:
    """A job of two nodes in which the worker of the second one has died: that of the first one trains on until there is another one."""
    world = job(2, slots=1)
    monkeypatch.setattr(played, "IMPORTS", (20.0, 20.0))
    world.nodes[1].fail()
    assert world.run(WITHIN, lambda: training(world).record.round == 2 and training(world).steps > 5)
    assert {training(world).workers[rank].node for rank in training(world).ranks} == {world.nodes[0]}
    return world


@pytest.mark.parametrize("stands_still", [False, True])
def test_a_node_that_trains_before_the_others_has_stopped_before_these_go_on_without_it(
    monkeypatch: pytest.MonkeyPatch, stands_still: bool
) -> None:
    """At an outside store, which only the first node does not reach any more. Its guard stops the workers if the agent stands still."""
    world = alone_in_its_round(monkeypatch)
    first, second = world.nodes
    if stands_still:
        first.freeze()
    else:
        first.cut = True
    live(world).calm = True
    monkeypatch.setattr(played, "IMPORTS", (0.2, 0.2))
    assert world.run(WITHIN, lambda: training(world).record.round == 3 and training(world).steps > 5)
    assert [stop.reason for stop in first.stops[1:]] == ([] if stands_still else [CUT_OFF]), "before the guard had to do it"
    assert first.working is None and [member.id for member in training(world).record.members] == [second.id]


def test_it_bears_a_store_that_is_away_for_long_once_all_train_together(monkeypatch: pytest.MonkeyPatch) -> None:
    world = alone_in_its_round(monkeypatch)
    world.run(5.0)
    assert not world.nodes[0].stops[1:], "the store is there"
    assert world.run(WITHIN, lambda: live(world).rounds.all_train())
    world.run(0.1)
    world.store_up = False
    world.run(world.rules.store_grace - 1.0)
    assert world.nodes[0].working is not None and training(world).record.round == 2


def test_an_answer_that_comes_again_late_does_not_count_for_the_next_round() -> None:
    for seed in range(3):
        world = job(2, Switching(slow=0.5, repeats=1.0), seed)
        for _ in range(8):
            world.nodes[0].fail()
            assert world.run(WITHIN, partial(trained, world, 1))


def test_a_state_that_did_not_come_whole_begins_no_round() -> None:
    """The worker of a node that was away has an older state, which is overwritten when all others are lost."""
    world = job(3, slots=1)
    first, second, away = world.nodes
    away.cut = True
    assert world.run(WITHIN, lambda: training(world).record.round == 2 and trained(world, 5))
    [worker] = live(world).crew(away).running.values()
    assert worker.state is not None and not worker.rehearsed
    away.cut = False
    assert world.run(WITHIN, lambda: bool(training(world).joining))
    first.crash()
    second.crash()
    assert live(world).crew(away).running[0].state is None
    assert world.run(WITHIN, lambda: len(training(world).record.members) == 1 and trained(world, 1))
    assert worker.lives and worker.steps <= training(world).steps, "it has not begun anew"

"""A node whose workers cannot start yet, because their modules are imported: it joins, but ends no round, and starts none."""

from __future__ import annotations

from functools import partial

import pytest

from elastirun.rendezvous.wire.actions import Outcome
from elastirun.rendezvous.wire.events import Prepared
from elastirun.rendezvous.wire.records import Status
from tests.sim.world import Deaths, Node, World


def preparing(world: World) -> Node:
    """Add a node that prepares until ``prepared``."""
    world.prepares_within = 1e6
    node = world.add()
    world.prepares_within = 0.0
    return node


def prepared(node: Node) -> None:
    node.when_running(partial(node.post, Prepared))


def test_a_first_round_forms_meanwhile_and_starts_when_all_are_prepared() -> None:
    world = World(min_nodes=2, max_nodes=2)
    a, b = world.add(), preparing(world)
    assert world.run(5, lambda: a.working is not None)
    assert b.machine.state is Status.READY and not world.run(30, lambda: b.working is not None)
    assert any("round 1 is formed; the workers' modules are imported here (--preload)" in line for line in b.said)
    prepared(b)
    assert world.run(0.1, world.running(a, b)) and b.machine.record and b.machine.record.round == 1


def test_a_newcomer_ends_a_round_when_it_is_prepared_and_then_at_once() -> None:
    world = World(min_nodes=1, max_nodes=3, last_call=0.0)
    a = world.add()
    assert world.run(5, world.running(a))
    b = preparing(world)
    assert not world.run(20, lambda: len(a.starts) > 1)
    assert any("the workers' modules are imported here (--preload) before it joins round 1" in line for line in b.said)
    prepared(b)
    assert world.run(0.2, lambda: bool(world.record and world.record.broken)), "it has waited for other newcomers meanwhile"
    assert world.run(40, world.running(a, b))


def test_a_member_that_prepares_leaves_as_any_other() -> None:
    world = World(min_nodes=1, max_nodes=2, last_call=0.0)
    a, b = preparing(world), preparing(world)
    assert world.run(5, lambda: a.machine.state is b.machine.state is Status.READY)
    b.leave()
    assert world.run(5, lambda: bool(b.finish))
    prepared(a)
    assert world.run(10, world.running(a)) and not b.starts


@pytest.mark.parametrize("told", [0.0, 1.0])
def test_a_member_starts_although_another_one_has_succeeded_and_died_meanwhile(told: float) -> None:
    """Its workers were faster than the imports of this node, and its guard may have said that it has died."""
    world = World(min_nodes=2, max_nodes=2)
    world.deaths = Deaths(told=told)
    a, b = preparing(world), world.add()
    assert world.run(20, lambda: b.working is not None)
    b.succeed()
    world.run(1)
    b.crash()
    world.run(2 * world.rules.expire)
    prepared(a)
    assert world.run(1, lambda: a.working is not None)
    a.succeed()
    assert world.run(20, lambda: a.outcome is Outcome.SUCCEEDED)

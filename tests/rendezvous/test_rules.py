"""What the job's rules ask of its nodes: the same settings, one node for each fixed rank, patience after quick failures."""

from __future__ import annotations

from elastirun.rendezvous.rules import Rules
from elastirun.rendezvous.wire.actions import Outcome
from tests.rendezvous.test_machine import record, started
from tests.sim.world import World


def test_nodes_started_with_other_settings_are_told_so_and_change_nothing() -> None:
    world = started(2, max_restarts=3)
    odd = world.add(rules=Rules(2, 3, max_restarts=1))
    assert world.run(5, lambda: odd.finish is not None)
    assert odd.outcome is Outcome.DISAGREES and odd.finish
    assert odd.finish.reason == (
        "this node was started with --nnodes=2:3, --max-restarts=1, the job runs with --nnodes=1:2, --max-restarts=3; "
        "start all nodes with the same"
    )
    world.run(5)
    assert world.history == [(1, 2)] and not any(odd.id in key for key in world.data), "it has not even introduced itself"


def test_times_on_which_safety_depends_are_compared() -> None:
    """A node that waits longer than the others before it stops would go on beside the round that replaces its own."""
    for settings in ({"expire": 60.0}, {"store_grace": 600.0}):
        world = started(2)
        odd = world.add(rules=Rules(1, 2, **settings))  # type: ignore[arg-type]
        assert world.run(5, lambda odd=odd: odd.outcome is Outcome.DISAGREES)  # type: ignore[misc]


def test_a_second_node_with_a_fixed_rank_is_excluded_once_the_round_runs() -> None:
    world = World(min_nodes=2, max_nodes=2, fixed_ranks=True)
    a, b = world.add(node_rank=0), world.add(node_rank=1)
    assert world.run(10, world.running(a, b))
    twin = world.add("twin", node_rank=1)
    assert world.run(30, lambda: twin.finish is not None)
    assert twin.outcome is Outcome.EXCLUDED and twin.finish
    assert twin.finish.reason == "--node-rank=1 is held by n1 10.0.0.2 in round 1; give each node its own"
    assert world.running(a, b)()


def test_the_replacement_of_a_lost_node_with_a_fixed_rank_is_not_excluded() -> None:
    world = World(min_nodes=2, max_nodes=2, fixed_ranks=True)
    a, b = world.add(node_rank=0), world.add(node_rank=1)
    assert world.run(10, world.running(a, b))
    b.crash()
    again = world.add("again", node_rank=1)
    assert world.run(30, world.running(a, again))


def test_rounds_that_fail_quickly_one_after_the_other_wait_longer_and_longer() -> None:
    world = started(2, max_restarts=100, restart_pause=4.0)
    a, b = world.nodes
    pauses = []
    for i in range(7):
        failed, number = world.t, record(world).round
        a.fail(after=60.0 if i == 5 else 2.0)
        assert world.run(20, lambda number=number: record(world).round > number and world.running(a, b)())
        pauses.append(world.t - failed)
    at_once, one, two, four, most, progress, anew = pauses
    assert at_once < 0.75 <= one < 1.25 + 0.5 and 1.5 <= two < 2.5 + 0.5 and 3 <= four < 5.5 and 3 <= most < 5.5
    assert progress < 0.75 and anew < 0.75, "a round that ran for long is no quick failure"
    assert sum("rounds in a row failed within 10 s" in line for line in a.said) == 4


def test_a_round_of_one_whose_answers_are_lost_is_gone_before_another_forms_and_comes_back_as_another_round() -> None:
    world = World(min_nodes=1, max_nodes=1)
    host = world.add()
    assert world.run(5, world.running(host))
    alone = world.add()
    host.leave()
    assert world.run(5, world.running(alone))
    alone.cut = True
    alone.stop_time = 0.5
    assert world.run(5, lambda: not alone.working)
    (stop,) = alone.stops
    assert stop.within == 1.0 and "they could go on beside a new round" in stop.reason
    alone.cut = False
    assert world.run(10, world.running(alone)), "nobody else has broken its round, so it does"

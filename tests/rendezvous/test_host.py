"""The node whose agent serves the store takes part in every round, so no round outlives its store (docs/decisions/0009)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastirun.rendezvous.peers import ranks
from elastirun.rendezvous.transitions import JOINING, RUNNING
from elastirun.rendezvous.wire.records import NodeRow
from tests.sim import invariants
from tests.sim.world import World
from tests.support.stage import ME, Stage


def hosted(count: int, **rules: object) -> World:
    """A world of ``count`` nodes whose store is served by node 0, with the invariants watched."""
    world = World(hosted=True, **{"min_nodes": 1, "max_nodes": 1, **rules})
    invariants.install(world)
    for _ in range(count):
        world.add()
        world.run(1)
    return world


def hang(world: World) -> None:
    """The host's loop stands still; the threads that serve the store do not."""
    world.nodes[0].freeze()
    world.resume_store()


@pytest.mark.parametrize("spares", [1, 2])
def test_nobody_takes_the_place_of_a_silent_host(spares: int) -> None:
    """Seed 1001893: the host came back with an empty store, and formed round 1 beside the round that had gone on without it."""
    world = hosted(1 + spares)
    host, spare = world.nodes[:2]
    hang(world)
    world.run(14)
    assert not spare.starts and any("waiting for n0 10.0.0.1, which hosts the store and is silent" in line for line in spare.said)
    host.crash()
    world.run(0.3)
    again = world.add(host.name)
    assert world.run(3, lambda: again.working is not None)
    world.run(30)
    assert [n.name for n in world.nodes if n.working] == ["n0"]


def test_a_host_that_comes_to_takes_part_again() -> None:
    world = hosted(3, max_nodes=2)
    host, member, _ = world.nodes
    hang(world)
    assert world.run(8, lambda: member.working is None)
    world.run(3)
    host.thaw()
    assert world.run(5, world.running(host, member))
    assert world.history == [(1, 2), (2, 2)]


def row(i: str, **fields: object) -> NodeRow:
    return replace(NodeRow(i, i, f"10.0.0.{ord(i) - ord('a')}", 1000, 2), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("previous", "host", "limit", "expected"),
    [
        ("", "d", 2, "ad"),  # the first round: the last newcomer yields
        ("", "d", 1, "d"),
        ("abc", "d", 3, "abd"),  # nobody has gone: the last survivor yields
        ("bcd", "a", 4, "bcda"),
        ("abc", "b", 2, "ab"),
    ],
)
def test_the_host_has_a_place_in_a_full_round_too(previous: str, host: str, limit: int, expected: str) -> None:
    rows = [row(i, hosts=i == host) for i in "abcd"]
    members = [ranks.member(row(i)) for i in previous]
    assert "".join(r.id for r in ranks.choose(members, rows, limit, fixed=False)) == expected


def test_of_two_nodes_with_one_fixed_rank_the_host_has_it() -> None:
    rows = [row("a", node_rank=0), row("b", node_rank=0, hosts=True), row("c", node_rank=1)]
    assert [r.id for r in ranks.choose([], rows, 2, fixed=True)] == ["b", "c"]


def test_the_first_round_waits_for_the_row_of_the_host_and_not_for_ever() -> None:
    stage = Stage(max_nodes=1)
    stage.rules = replace(stage.rules, hosted=True)  # some agent should serve the store, and it is not ours
    stage.enter()
    assert not stage.run(4.8, lambda: stage.me.working is not None)
    assert stage.run(1.0, lambda: stage.me.working is not None), "whoever serves it has no part in this job"
    stage = Stage(max_nodes=1)
    stage.rules = replace(stage.rules, hosted=True)
    stage.enter()
    stage.run(4)
    stage.puppet("b", hosts=True)
    stage.run(2)
    assert [m.id for m in stage.record.members] == ["b"]


def test_a_host_that_comes_late_is_no_spare() -> None:
    late = Stage(hosted=True, max_nodes=1)
    late.puppet("b")
    late.enter()
    late.run(0.02)
    late.form("b")
    assert late.run(5, lambda: late.record.broken is not None), "the round goes on beside a new one if this agent dies"
    late.puppet("b", done_round=1, status=JOINING)
    assert late.run(5, lambda: [m.id for m in late.record.members] == [ME] and late.mine.status is RUNNING)

"""The rendezvous, behaviour by behaviour, in a simulated world: no processes, no waiting."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from elastirun.rendezvous.machine import CUT_OFF
from elastirun.rendezvous.rules import Rules
from elastirun.rendezvous.transitions import DONE, TRANSITIONS, Trigger
from elastirun.rendezvous.wire.actions import Outcome
from elastirun.rendezvous.wire.codec import Codec
from elastirun.rendezvous.wire.events import StoodStill
from elastirun.rendezvous.wire.records import Cause, NodeRow, RoundRecord, Status
from tests.sim.world import World


def record(world: World) -> RoundRecord:
    found = world.record
    assert found is not None
    return found


def started(count: int, **rules: object) -> World:
    """A world of ``count`` nodes that run round 1."""
    world = World(**{"min_nodes": 1, "max_nodes": count, **rules})
    for _ in range(count):
        world.add()
    assert world.run(20, world.running(*world.nodes))
    return world


def test_a_full_house_starts_at_once() -> None:
    world = World(min_nodes=1, max_nodes=3)
    nodes = [world.add() for _ in range(3)]
    assert world.run(1.0, world.running(*nodes))
    assert [n.starts for n in nodes] == [[(1, 0, 3)], [(1, 1, 3)], [(1, 2, 3)]]


def test_below_the_maximum_the_first_round_waits_for_a_last_call() -> None:
    world = World(min_nodes=1, max_nodes=3, last_call=5.0)
    a = world.add()
    world.run(3)
    b = world.add()  # the last call starts anew
    assert not world.run(4.8, lambda: bool(a.working))
    assert world.run(1.2, world.running(a, b))


def test_nodes_that_come_and_go_extend_the_last_call_to_five_times_at_most() -> None:
    world = World(min_nodes=2, max_nodes=5, last_call=5.0)
    a, b = world.add(), world.add()
    formed = False
    while not formed and world.t < 60:  # every 3 s one for 2 s
        comes = world.add()
        formed = world.run(2, lambda: bool(a.working and b.working))
        comes.leave()
        formed = formed or world.run(1, lambda: bool(a.working and b.working))
    assert 10 < world.t < 5 * 5.0 + 3


def test_the_last_call_is_not_over_when_there_are_enough_at_last() -> None:
    world = World(min_nodes=2, max_nodes=3, last_call=5.0)
    a = world.add()
    world.run(60)
    b = world.add()
    assert not world.run(4.8, lambda: bool(a.working))
    assert world.run(1.2, world.running(a, b))


def test_newcomers_that_crash_keep_a_sound_one_waiting_for_five_times_the_wait_at_most() -> None:
    world = World(min_nodes=1, max_nodes=20, debounce=1.0)
    first = world.add()
    assert world.run(20, world.running(first))
    sound, came = world.add(), world.t
    ended = False
    while not ended and world.t < came + 30:  # every 0.8 s one for 0.6 s
        comes = world.add()
        ended = world.run(0.6, lambda: bool(first.stops))
        comes.crash()
        ended = ended or world.run(0.2, lambda: bool(first.stops))
    assert 2 < world.t - came < 5 * 1.0 + 2
    assert world.run(20, world.running(first, sound))


def test_fewer_than_min_wait_and_say_for_whom() -> None:
    world = World(min_nodes=3, max_nodes=3, join_timeout=60.0)
    a, b = world.add(), world.add()
    world.run(59)
    assert not a.working and any("2 of 3 nodes joined (n0 10.0.0.1, n1 10.0.0.2), waiting for 1 more" in line for line in a.said)
    assert len(a.said) == 3  # after 10, 20 and 40 s; the same again after 80
    assert world.run(10, world.all_finished)
    assert a.outcome is b.outcome is Outcome.TIMEOUT
    assert any("waiting for 1 more" in str(n.finish) for n in (a, b))  # the other one may see it leave


@pytest.mark.parametrize("burst", [1, 2, 5])
def test_a_burst_of_joiners_costs_one_re_formation(burst: int) -> None:
    world = World(min_nodes=1, max_nodes=8)
    first = world.add()
    assert world.run(20, world.running(first))
    for _ in range(burst):
        world.add()
        world.run(0.3)
    assert world.run(10, world.running(*world.nodes))
    assert world.history == [(1, 1), (2, 1 + burst)]
    assert first.stops[0].planned and "joined" in first.stops[0].reason
    assert first.starts[-1][1] == 0, "the survivor keeps its rank"


def test_a_worker_failure_restarts_everyone_quickly_and_keeps_ranks() -> None:
    world = started(3, max_restarts=1)
    a, b, c = world.nodes
    b.fail()
    assert world.run(2.0, lambda: all(len(n.stops) == 1 for n in (a, b, c)))
    assert world.run(2.0, lambda: [n.starts[-1] for n in (a, b, c)] == [(2, 0, 3), (2, 1, 3), (2, 2, 3)])
    assert world.running(a, b, c)()
    assert record(world).failures == 1 and "rank 1 on n1 failed" in record(world).reason


def test_the_budget_is_the_jobs_and_its_end_reaches_every_node_with_the_root_cause() -> None:
    world = started(3, max_restarts=2)
    a, b, c = world.nodes
    for i in range(2):
        world.nodes[i].fail()
        assert world.run(5, lambda i=i: record(world).round == i + 2 and world.running(a, b, c)())
    b.fail(code=1, blame=5)
    c.fail(code=7, blame=0, after=1.2)
    assert world.run(10, world.all_finished)
    for node in (a, b, c):
        assert node.outcome is Outcome.FAILED
        assert node.finish and node.finish.closed and [f.code for f in node.finish.closed.failures] == [7, 1]
        assert "--max-restarts=2" in node.finish.reason


def test_a_round_that_ran_long_enough_makes_earlier_failures_forgiven() -> None:
    world = started(2, max_restarts=1, restart_window=100.0)
    a, b = world.nodes
    for after, counted in ((5.0, 1), (150.0, 1), (150.0, 1)):
        before = record(world).round
        a.fail(after=after)
        assert world.run(5, lambda before=before: record(world).round == before + 1 and world.running(a, b)())
        assert record(world).failures == counted
    b.fail(after=99.0)
    assert world.run(10, world.all_finished) and a.outcome is Outcome.FAILED


@pytest.mark.parametrize(("codes", "after", "final"), [((3, 3), 1.0, True), ((3, 4), 1.0, False), ((3, 3), 31.0, False)])
def test_fail_fast_ends_at_the_same_failure_twice_without_progress(codes: tuple[int, int], after: float, final: bool) -> None:
    world = started(2, max_restarts=10, fail_fast=True)
    a, b = world.nodes
    a.fail(code=codes[0])
    assert world.run(5, lambda: record(world).round == 2 and world.running(a, b)())
    a.fail(code=codes[1], after=after)
    assert world.run(5, lambda: bool(record(world).closed) or record(world).round == 3)
    assert bool(record(world).closed) == final
    if final:
        assert world.run(10, world.all_finished) and b.finish
        assert b.finish.reason.endswith("--fail-fast: rank 0 on n0 failed (exit code 3); it was the same failure 2 times in a row")


def test_the_reason_names_the_cause_and_not_who_was_seen_first() -> None:
    world = started(2, max_restarts=1)
    a, b = world.nodes
    a.fail(code=1, blame=5, after=1.0)
    b.fail(code=7, blame=0, after=1.1)
    assert world.run(5, lambda: record(world).round == 2)
    assert record(world).reason == "rank 1 on n1 failed (exit code 7)"


def test_a_lost_node_is_dropped_within_expire_and_two_seconds_and_costs_no_restart() -> None:
    world = started(3, max_restarts=0)
    a, b, c = world.nodes
    world.run(3)
    c.crash()
    a.fail(blame=5)  # its workers' connections were reset: a consequence, not the cause
    assert world.run(7.0, world.running(a, b))
    assert record(world).failures == 0 and not record(world).closed


def test_silence_alone_is_enough() -> None:
    world = started(4)
    a, b, c, d = world.nodes
    c.cut = True
    assert world.run(7.0, lambda: {n.starts[-1][2] for n in (a, b, d)} == {3})
    assert [n.starts[-1][1] for n in (a, b, d)] == [0, 1, 2]
    assert record(world).reason == "n2 10.0.0.3 silent for 5 s"
    c.cut = False
    assert world.run(10, world.running(a, b, c, d)), "the healed node comes back by itself"


def test_the_row_of_a_node_that_died_waiting_is_not_taken_for_a_node() -> None:
    world = World(min_nodes=2, max_nodes=2)
    dead = world.add()
    world.run(3)
    dead.crash()
    world.run(60)
    a, b = world.add(), world.add()
    assert world.run(3, world.running(a, b))
    assert world.history == [(1, 2)]


def test_what_one_node_knows_of_a_loss_all_know() -> None:
    """With 12 nodes a lost one is watched by three; the others must not wait for ``expire`` once more."""
    world = started(12)
    world.run(20)
    for gone in (5, 6, 7):
        world.nodes[gone].crash()
    left = [n for n in world.nodes if n.up]
    assert world.run(8.0, world.running(*left)), world.history
    assert world.history == [(1, 12), (2, 9)]


@pytest.mark.daily(4)
@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize(("nodes", "first", "last"), [(8, 2, 6), (16, 2, 6), (40, 0, 14), (90, 30, 62)])
def test_a_rack_that_is_lost_at_once_is_dropped_as_fast_as_one_node(nodes: int, first: int, last: int, lasting: bool) -> None:
    """Only three members watch a node: as soon as it is late, or its row is away, its neighbours are watched, too."""
    world = started(nodes, lasting=lasting)
    world.run(20)
    for node in world.nodes[first:last]:
        node.crash()
    left = [n for n in world.nodes if n.up]
    assert world.run(7.5, world.running(*left)), world.history
    assert world.history == [(1, nodes), (2, nodes - (last - first))]


def test_a_replacement_takes_the_hole() -> None:
    world = started(3)
    a, b, c = world.nodes
    b.crash()
    assert world.run(7.0, world.running(a, c))
    new = world.add()
    assert world.run(7.0, world.running(a, c, new))
    world2 = started(3)
    a, b, c = world2.nodes
    b.crash()
    new = world2.add()  # already there when the loss is noticed: it takes the very place
    assert world2.run(8.0, world2.running(a, c, new))
    assert [n.starts[-1][1] for n in (a, new, c)] == [0, 1, 2]
    assert world2.history == [(1, 3), (2, 3)]


def test_a_spare_waits_without_disturbing_and_steps_in() -> None:
    world = started(2, min_nodes=2)
    a, b = world.nodes
    spare = world.add()
    world.run(30)
    assert world.history == [(1, 2)] and any("spare" in line for line in spare.said)
    a.crash()
    assert world.run(7.0, world.running(b, spare))
    for n in (b, spare):
        n.succeed()
    assert world.run(10, world.all_finished) and spare.outcome is Outcome.SUCCEEDED


def test_a_spare_whose_store_is_away_says_only_that() -> None:
    world = started(2, min_nodes=2)
    spare = world.add()
    world.run(300)
    spare.cut = True
    assert world.run(15, lambda: "the rendezvous store is away" in spare.said[-1])
    spare.said.clear()
    world.run(40)
    assert len(spare.said) == 2 and all("the rendezvous store is away" in line for line in spare.said)
    spare.cut = False
    world.run(5)
    assert "the store is back after" in spare.said[2] and "spare" in spare.said[3]


def test_a_polite_leave_closes_nothing() -> None:
    world = started(3)
    a, b, c = world.nodes
    b.leave()
    assert world.run(3.0, world.running(a, c))
    assert b.outcome is Outcome.LEFT and b.stops[0].planned
    assert record(world).closed is None and record(world).failures == 0
    assert a.stops[0].planned and a.stops[0].reason.startswith("n1 10.0.0.2 leaves")


def test_success_needs_every_member_in_one_round() -> None:
    world = started(3, max_restarts=1)
    a, b, c = world.nodes
    a.succeed()
    b.succeed()
    world.run(20)
    assert a.machine.state is DONE and not a.finish
    newcomer = world.add()
    world.run(5)
    assert record(world).round == 1, "nobody is taken in while the round is finishing"
    c.fail()
    assert world.run(5, lambda: all(n.starts[-1][0] == 2 for n in (a, b, c))), "those that were done run again"
    for n in (a, b, c):
        n.succeed()
    assert world.run(15, world.all_finished)
    assert {n.outcome for n in (a, b, c, newcomer)} == {Outcome.SUCCEEDED}


def test_a_done_node_may_go_without_spoiling_the_success() -> None:
    world = started(2)
    a, b = world.nodes
    b.succeed()
    world.run(1)
    b.crash()
    world.run(20)
    assert record(world).open
    a.succeed()
    assert world.run(10, lambda: bool(a.finish)) and a.outcome is Outcome.SUCCEEDED


def test_the_stores_host_leaves_last() -> None:
    world = started(3, hosted=True)
    for node in world.nodes:
        node.succeed()
    host, others = world.nodes[0], world.nodes[1:]
    assert world.run(10, lambda: bool(host.finish))
    assert all(n.machine.state is Status.LEFT and Codec().decode(key, world.data[key], NodeRow).status is Status.LEFT
               for n in others for key in [f"job/node/{n.id}"])  # fmt: skip
    world.store_up = False
    assert world.run(10, world.all_finished) and {n.outcome for n in others} == {Outcome.SUCCEEDED}


def test_the_host_does_not_wait_for_a_node_that_was_lost_long_ago() -> None:
    world = started(3)
    world.nodes[2].crash()
    rest = world.nodes[:2]
    assert world.run(8, world.running(*rest))
    for node in rest:
        node.succeed()
    assert world.run(2.0, world.all_finished)


def test_where_the_store_outlives_the_job_its_name_can_be_used_again() -> None:
    world = started(2, lasting=True)
    for _ in range(3):
        before, run = record(world), world.nodes[-2:]
        for node in run:
            node.succeed()
        assert world.run(5, world.all_finished) and record(world).closed
        again = [world.add(node.name) for node in run]
        assert world.run(3, world.running(*again))
        assert record(world).store_id != before.store_id and record(world).round == 1
    assert sum("members/" in key for key in world.data) == 1, "what is not needed any more is gone"


def test_the_next_run_of_a_job_waits_until_the_last_one_has_heard_that_it_is_over() -> None:
    world = started(2, lasting=True)
    for node in world.nodes:
        node.succeed()
    assert world.run(5, lambda: bool(record(world).closed))
    (last,) = [node for node in world.nodes if node.id != record(world).closed.by]  # type: ignore[union-attr]
    last.freeze()
    again = [world.add("n0"), world.add("n1")]
    assert not world.run(1, world.running(*again)), "its row is there until its lease is over"
    last.thaw()
    assert world.run(3, world.running(*again))
    assert world.run(3, lambda: [node.outcome for node in world.nodes[:2]] == [Outcome.SUCCEEDED] * 2)


def test_a_node_that_died_when_its_job_was_over_does_not_keep_the_next_run_waiting() -> None:
    world = started(2, lasting=True)
    for node in world.nodes:
        node.succeed()
    assert world.run(5, lambda: bool(record(world).closed))
    for node in world.nodes:
        node.crash()
    again = [world.add("n0"), world.add("n1")]
    assert not world.run(2, world.running(*again)), "it may be alive"
    assert world.run(4, world.running(*again))


def test_a_store_blip_costs_no_restart_and_a_long_one_ends_with_a_clear_word() -> None:
    world = started(3, store_grace=60.0)
    world.store_up = False
    world.run(50)
    assert all(n.working and not n.stops for n in world.nodes)
    assert any("the workers go on for up to 60 s" in line for line in world.nodes[0].said)
    world.store_up = True
    world.run(20)
    assert world.history == [(1, 3)] and all(not n.stops for n in world.nodes)
    assert any("the store is back" in line for line in world.nodes[0].said)
    world.store_up = False
    assert world.run(75, world.all_finished)
    assert {n.outcome for n in world.nodes} == {Outcome.STORE_LOST}


def test_a_spare_gives_up_on_a_lost_store_like_any_other() -> None:
    world = started(2, store_grace=20.0)
    spare = world.add()
    world.run(3)
    assert spare.said == ["round 1 has its 2 nodes; this node is a spare"]
    world.store_up = False
    assert world.run(30, world.all_finished)
    assert {n.outcome for n in world.nodes} == {Outcome.STORE_LOST}


def test_ones_own_standstill_is_nobodys_absence() -> None:
    world = started(3, store_grace=20.0)
    a, b, c = world.nodes
    for node in world.nodes:  # the whole machine was suspended, the guard, too
        node.lease = 0.0
        node.freeze(workers_too=True)
    world.store_up = False
    world.run(100)
    for node in world.nodes:
        node.thaw()
    world.store_up = True
    world.run(10)
    assert world.history == [(1, 3)] and not any(n.stops for n in world.nodes)


def test_workers_that_the_guard_has_ended_cost_no_restart() -> None:
    world = started(2, max_restarts=0)
    a, b = world.nodes
    a.feed(lambda now: StoodStill(now, 13.0, True))
    a.fail(code=-9)
    assert world.run(10, lambda: record(world).round == 2 and world.running(a, b)())
    assert record(world).failures == 0 and record(world).reason == "n0 10.0.0.1 stood still for 13 s"


def test_a_round_of_one_cut_off_stops_before_others_may_take_over() -> None:
    world = World(min_nodes=1, max_nodes=1)
    world.add()  # hosts
    alone = world.nodes[0]
    assert world.run(5, world.running(alone))
    other = World(min_nodes=1, max_nodes=1)
    host = other.add()
    assert other.run(5, other.running(host))
    spare = other.add()
    other.run(2)
    host.leave()
    assert other.run(5, other.running(spare))
    spare.cut = True
    assert other.run(5.0, lambda: not spare.working)
    assert [stop.reason for stop in spare.stops] == [CUT_OFF], "before the guard had to do it"


def test_a_replaced_store_is_another_rendezvous() -> None:
    world = started(2)
    world.data.clear()
    assert world.run(5, world.all_finished)
    assert all(n.outcome is Outcome.STORE_LOST and n.finish and "lost this job" in n.finish.reason for n in world.nodes)


def test_fixed_ranks_follow_the_wish() -> None:
    world = World(min_nodes=3, max_nodes=3, fixed_ranks=True)
    nodes = [world.add(node_rank=r) for r in (2, 0, 1)]
    assert world.run(2, world.running(*nodes))
    assert [n.starts[-1][1] for n in nodes] == [2, 0, 1]
    waiting = World(min_nodes=3, max_nodes=3, fixed_ranks=True)
    a = [waiting.add(node_rank=r) for r in (2, 0)][0]
    twin = waiting.add(node_rank=0)
    waiting.run(15)
    assert not a.working and any("waiting for node rank 1" in line for line in a.said)
    waiting.add(node_rank=1)
    assert waiting.run(3, lambda: bool(a.working)) and not twin.working


def test_the_store_of_an_earlier_run_is_left_alone() -> None:
    world = started(1)
    world.nodes[0].succeed()
    assert world.run(5, world.all_finished)
    second = world.add()
    world.run(5)
    assert not second.finish and not second.starts
    world.data.clear()  # the old host has gone, a new one came
    assert world.run(10, world.running(second))


@pytest.mark.parametrize("offset", [-1e6, 1e6])
def test_clock_offsets_do_not_matter(offset: float) -> None:
    world = World(min_nodes=1, max_nodes=2)
    a, b = world.add(), world.add(offset=offset)
    assert world.run(2, world.running(a, b))
    world.run(60)
    assert world.history == [(1, 2)]
    b.crash()
    assert world.run(7, world.running(a))


def test_a_frozen_node_learns_that_it_was_left_out() -> None:
    world = started(3)
    a, b, c = world.nodes
    b.freeze(workers_too=True)
    assert world.run(8.0, lambda: {n.starts[-1][2] for n in (a, c)} == {2})
    b.thaw()
    assert world.run(8.0, world.running(a, b, c))
    assert "went on without this node" in b.stops[0].reason or "silent" in b.stops[0].reason


def test_leaving_while_waiting() -> None:
    world = World(min_nodes=2, max_nodes=2)
    a = world.add()
    world.run(1)
    a.leave()
    assert world.run(3, lambda: bool(a.finish)) and a.outcome is Outcome.LEFT
    b, c = world.add(), world.add()
    assert world.run(3, world.running(b, c))


def test_a_running_node_reads_three_rows_however_many_there_are() -> None:
    world = started(12)
    asked = []
    original = world.begin
    world.begin = lambda node, sync: (asked.append(sync.rows), original(node, sync))[1]  # type: ignore[method-assign,assignment]
    world.run(5)
    assert asked and all(rows is not None and len(rows) == 3 for rows in asked)
    assert 60 <= len(asked) <= 12 * 12


def test_every_transition_starts_from_a_state_and_every_state_is_reached() -> None:
    assert {s for s, _ in TRANSITIONS} == set(Status) - {Status.LEFT}
    assert set(TRANSITIONS.values()) == set(Status)
    assert {t for _, t in TRANSITIONS} == set(Trigger)


def test_an_impossible_transition_says_its_history() -> None:
    world = started(1)
    machine = world.nodes[0].machine
    with pytest.raises(RuntimeError) as bug:
        machine._go(Trigger.NAMED)
    assert "\n" not in str(bug.value)
    said = re.fullmatch(r"impossible transition: 'a round names this node' in state running; history: (.*)", str(bug.value))
    assert said and re.sub(r"[0-9.]+", "T", said[1]).split("; ") == [
        "Synced at T: a round names this node",
        "Synced at T: every member has seen the round",
        "Reachable at T",
    ]


@pytest.mark.daily(4)
@pytest.mark.parametrize("seed", range(40))
def test_random_histories_end_well(seed: int) -> None:
    """Faults of every kind, then quiet: everybody who is left works in one round, which then succeeds."""
    rng = random.Random(seed)
    world = World(seed, Rules(1, 4, max_restarts=1000, join_timeout=1e6, store_grace=1e6))
    for _ in range(3):
        world.add(offset=rng.uniform(-1e6, 1e6))
    for _ in range(25):
        world.run(rng.uniform(0.05, 6))
        node = rng.choice(world.nodes[1:])
        kind = rng.choice(["crash", "leave", "join", "join", "fail", "cut", "heal", "freeze", "slow", "store"])
        if kind == "crash":
            node.crash()
        elif kind == "leave":
            node.leave()
        elif kind == "join" and sum(n.up and not n.finish for n in world.nodes) < 6:
            world.add(offset=rng.uniform(-1e6, 1e6))
        elif kind == "fail" and node.working:
            node.fail(blame=rng.choice([0, 5]))
        elif kind in ("cut", "heal"):
            node.cut = kind == "cut"
        elif kind == "freeze":
            node.thaw() if node.frozen else node.freeze(workers_too=True)
        elif kind == "slow":
            node.stop_time = rng.choice([0.01, 3.0])
        elif kind == "store":
            world.store_up = not world.store_up
    world.store_up = True
    for node in world.nodes:
        node.cut = False
        node.thaw()
    world.run(10)  # goodbyes that were under way
    alive = [n for n in world.nodes if n.up and not n.finish]

    def settled() -> bool:
        working = [n for n in alive if n.working]
        rounds = {n.working.round for n in working if n.working}
        return len(working) == min(4, len(alive)) and len(rounds) == 1 and record(world).open

    assert world.run(60, settled), [(n.name, n.machine.state, n.starts[-1:]) for n in alive]
    for node in alive:
        if node.working:
            node.succeed()
    assert world.run(60, world.all_finished)
    assert {n.outcome for n in alive} == {Outcome.SUCCEEDED}
    assert record(world).broken is None or record(world).broken.cause in Cause


@pytest.mark.parametrize("pause", [0.5, 30.0])
def test_where_the_store_outlives_the_job_a_run_whose_nodes_have_left_binds_nobody(pause: float) -> None:
    """Neither its settings nor its failures: disagree only with the living."""
    world = started(2, lasting=True, max_restarts=5)
    world.nodes[0].fail()
    assert world.run(10, lambda: all(n.working and n.working.round == 2 for n in world.nodes))
    before = record(world)
    for node in world.nodes:
        node.leave()
    assert world.run(10, world.all_finished) and not record(world).closed
    world.run(pause)
    rules = replace(world.rules, max_restarts=3)
    again = [world.add(node.name, rules=rules) for node in world.nodes[:2]]
    assert world.run(5, world.running(*again)), again[0].said
    assert record(world).store_id != before.store_id and record(world).failures == 0 and record(world).round == 1


def test_where_the_store_outlives_the_job_a_run_with_other_settings_that_lives_is_not_replaced() -> None:
    world = started(2, lasting=True)
    stranger = world.add("n2", rules=replace(world.rules, max_restarts=7))
    assert world.run(5, lambda: stranger.outcome is Outcome.DISAGREES)
    assert all(n.working for n in world.nodes[:2])


def test_where_the_store_outlives_the_job_nodes_that_were_killed_are_waited_for() -> None:
    world = started(2, lasting=True)
    for node in world.nodes:
        node.crash()
    world.run(5)  # their rows vanish with their leases
    again = [world.add(node.name, rules=replace(world.rules, max_restarts=7)) for node in world.nodes[:2]]
    assert not world.run(world.rules.longest_alone - 3, world.running(*again))
    assert world.run(15, world.running(*again)) and record(world).round == 1

"""A node that is started, killed and started again, over and over: the others get on without it, until it has come to stay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastirun.rendezvous import rules
from elastirun.rendezvous.wire.records import Blame, Broken, Cause, ExitRecord, RoundRecord, Status
from tests.rendezvous.test_formation import RULES, after, chosen, form, row
from tests.sim import invariants
from tests.sim.world import World


@pytest.mark.parametrize(("losses", "seconds"), [(0, 0.0), (2, 0.0), (3, 10.0), (4, 20.0), (5, 40.0), (8, 300.0), (10**15, 300.0)])
def test_newcomers_wait_longer_with_each_early_loss(losses: int, seconds: float) -> None:
    assert rules.hold(after("ab", losses=losses)) == seconds


@pytest.mark.parametrize(
    ("cause", "lost", "ran", "losses"),
    [
        (Cause.LOST, ("c",), 5.0, 4),
        (Cause.FAILURE, ("c",), 5.0, 4),  # its peers failed before it was found silent
        (Cause.LOST, ("c",), rules.EARLY, 0),
        (Cause.FAILURE, (), 5.0, 3),
        (Cause.FAILURE, (), rules.EARLY, 0),
        (Cause.LEAVE, (), 5.0, 3),  # it had time for a checkpoint
        (Cause.JOIN, (), 500.0, 3),  # what the newcomers are worth has still to be seen
        (Cause.JOIN, ("c",), 5.0, 4),
    ],
)
def test_a_round_counts_when_it_lost_a_node_soon(cause: Cause, lost: tuple[str, ...], ran: float, losses: int) -> None:
    record = after("abc", losses=3, broken=Broken(cause, "r", "a", lost, ran=ran))
    decision = form(record, [row("a", 1), row("b", 1), *([] if lost else [row("c", 1)])], max_restarts=9)
    assert decision.record is not None and decision.record.losses == losses


@pytest.mark.parametrize(("lost", "losses"), [(("c",), 3), (("c", "b"), 4)])
def test_a_host_that_has_left_with_its_store_is_no_loss(lost: tuple[str, ...], losses: int) -> None:
    """Its row is gone with the store, so the record names it among those that nobody waits for."""
    record = after("abc", losses=3, broken=Broken(Cause.LEAVE, "r", "c", lost, over=True, ran=5.0))
    decision = form(record, [row("a", 1), *([row("b", 1)] if "b" not in lost else [])], max_restarts=9)
    assert decision.record is not None and decision.record.losses == losses


@pytest.mark.parametrize(("came", "losses"), [((), 3), (("c",), 4), (("b",), 3), (("b", "c"), 4)])
def test_a_node_that_leaves_the_round_in_which_it_came_is_a_loss(came: tuple[str, ...], losses: int) -> None:
    """The others that leave are upgraded one after the other, and nobody has to wait for those in their place."""
    record = after("abc", losses=3, came=came, broken=Broken(Cause.LEAVE, "r", "c", ran=5.0))
    left = row("c", 1, status=Status.LEFT)
    for rows in ([row("a", 1), row("b", 1), left], [row("a", 1), row("b", 1), left, row("d")]):
        decision = form(record, rows, max_restarts=9)
        assert decision.record is not None and decision.record.losses == losses


def test_a_record_names_who_was_not_there_before() -> None:
    """Of the first round nobody was, and where many come at once no single one comes again and again."""
    rows = [row("a", 1), row("b", 1), row("d")]
    for record, came in ((after("ab"), ("d",)), (replace(after("ab"), came=("b",)), ("d",)), (RoundRecord("store"), ())):
        decision = form(record, rows)
        assert decision.record is not None and decision.record.came == came


@pytest.mark.parametrize(("kept", "losses"), [(1, 3), (0, 4), (2, 4)])
def test_a_loss_does_not_count_where_workers_go_on_with_their_state(kept: int, losses: int) -> None:
    record = after("abc", losses=3, broken=Broken(Cause.LOST, "r", "a", ("c",), ran=5.0))
    decision = form(record, [row("a", 1), replace(row("b", 1), kept=kept)], max_restarts=9)
    assert decision.record is not None and decision.record.losses == losses


@pytest.mark.parametrize(("kept", "expected"), [(1, "ab"), (0, ""), (2, "")])
@pytest.mark.parametrize("cause", [Cause.FAILURE, Cause.LOST])
def test_no_round_waits_whose_workers_go_on_with_their_state(cause: Cause, kept: int, expected: str) -> None:
    """``LOST``: the survivors need the newcomer, which comes too often."""
    lost = ("c",) * (cause is Cause.LOST)
    record = after("ab" + "c" * len(lost), quick=4, losses=9, broken=Broken(cause, "r", "a", lost, ran=5.0))
    rows = [row("a", 1, failures=() if lost else (ExitRecord("a", 0, 0, 1, 1, 0, 1.0),)), replace(row("b", 1), kept=kept)]
    comes = [row("d")] * len(lost)
    decision = form(record, [*rows, *comes], now=0.5, min_nodes=2 + len(comes), max_restarts=9)
    assert chosen(decision) == (expected and "ab" + "d" * len(comes))


@pytest.mark.parametrize(("blame", "kept", "closes"), [(Blame.FINAL, 0, True), (Blame.OWN_FAULT, 0, False), (Blame.FINAL, 1, False)])
def test_a_refusal_that_each_restart_would_meet_again_ends_the_job_unless_others_train(blame: Blame, kept: int, closes: bool) -> None:
    """Where others go on with their state a newcomer was refused, which may have another script."""
    refused = ExitRecord("a", 0, 0, 1, 1, blame, 1.0, ("WrongUse: no",), "WrongUse: no")
    record = after("ab", broken=Broken(Cause.FAILURE, "r", "a", ran=5.0))
    decision = form(record, [row("a", 1, failures=(refused,)), replace(row("b", 1), kept=kept)], max_restarts=9)
    assert decision.record is not None and (decision.record.closed is not None) == closes
    if closes:
        assert decision.reason == "a worker failed, as it would after each restart: rank 0 on a failed (exit code 1, WrongUse: no)"


def test_only_the_new_worker_waits_where_others_go_on_with_their_state() -> None:
    world = World(min_nodes=2, max_nodes=2, max_restarts=9)
    world.keeps = True
    fails, goes_on = nodes = [world.add(), world.add()]
    pauses = []
    for number in range(1, 5):
        assert world.run(1, lambda n=number: all(node.working and node.working.round == n for node in nodes))  # type: ignore[misc]
        pauses.append(fails.machine.pause_of_new)
        assert goes_on.machine.pause_of_new == pauses[-1], "its agent knows that no worker has failed there"
        fails.fail(after=1.0)
    assert pauses[:2] == [0.0, 0.0] and 0.7 < pauses[2] < 1.3 < pauses[3]


@pytest.mark.parametrize(
    ("cause", "losses", "least", "expected"),
    [
        (Cause.LOST, 1, 1, "adb"),
        (Cause.LOST, 2, 1, "ab"),  # the third loss in a row: who came since has to wait
        (Cause.FAILURE, 2, 1, "ab"),
        (Cause.LOST, 2, 3, ""),  # it is needed, but not at once
        (Cause.JOIN, 9, 1, "adb"),  # the round was ended for it
    ],
)
def test_after_many_early_losses_the_survivors_go_on_by_themselves(cause: Cause, losses: int, least: int, expected: str) -> None:
    record = after("acb", losses=losses, broken=Broken(cause, "r", "a", ("c",), ran=5.0))
    decision = form(record, [row("a", 1), row("b", 1), row("d")], now=5.0, min_nodes=least, max_restarts=9)
    assert chosen(decision) == expected
    if not expected:
        assert decision.reason == "3 rounds in a row lost a node within 60 s of their start; the next one starts after 10.0 s"
        assert chosen(form(record, [row("a", 1), row("b", 1), row("d")], now=10.0, min_nodes=least)) == "adb"
        assert chosen(form(record, [row("a", 1), row("b", 1), row("d")], now=0.0, min_nodes=least, restart_pause=0.0)) == "adb"


@pytest.mark.daily(5)
@pytest.mark.parametrize(("told", "stop_time"), [(0.0, 0.05), (1.0, 0.05), (1.0, 4.9)])
@pytest.mark.parametrize("alive", [0.5, 1.0, 4.0, 12.0, 40.0])
def test_a_node_that_crashes_again_and_again_does_not_keep_the_others_from_their_work(alive: float, told: float, stop_time: float) -> None:
    """``stop_time``: seconds that the workers of the others take to stop. A node may be gone again before they have."""
    world = World(min_nodes=2, max_nodes=3)
    world.deaths = replace(world.deaths, told=told)
    invariants.install(world)
    stay, comes = [world.add(), world.add()], [world.add("x")]
    for node in stay:
        node.stop_time = stop_time
    assert world.run(30, world.running(*stay, *comes))

    def kill() -> None:
        comes[-1].crash()
        world.at(1.0, again)

    def again() -> None:
        comes.append(world.add("x"))
        if len(comes) < 300 / (alive + 1):
            world.at(alive, kill)

    world.at(alive, kill)
    world.run(300)
    assert 4 <= max(number for number, _ in world.history) <= 11, "59 when nobody has to wait"
    assert world.run(rules.LONGEST_HOLD + 20, world.running(*stay, comes[-1])), "when it has come to stay it is taken in"
    assert any("newcomers are taken in after" in said for node in comes for said in node.said)


@pytest.mark.daily(3)
@pytest.mark.parametrize("alive", [2.0, 4.0, 12.0])
def test_nor_does_one_that_comes_and_says_goodbye_again_and_again(alive: float) -> None:
    """As under a supervisor with a limit of time, or a probe that ends the pod."""
    world = World(min_nodes=2, max_nodes=3)
    invariants.install(world)
    stay, comes = [world.add(), world.add()], [world.add("x")]
    assert world.run(30, world.running(*stay, *comes))

    def leave() -> None:
        comes[-1].leave()
        world.at(1.0, again)

    def again() -> None:
        comes.append(world.add("x"))
        world.at(alive, leave)

    world.at(alive, leave)
    world.run(300)
    assert 4 <= max(number for number, _ in world.history) <= 11, "47 to 200 when nobody has to wait"


def test_nodes_that_are_upgraded_one_after_the_other_are_not_held_back() -> None:
    world = World(min_nodes=2, max_nodes=4)
    nodes = [world.add(str(i)) for i in range(4)]
    assert world.run(30, world.running(*nodes))
    for i in range(4):
        nodes[i].leave()
        world.run(10)
        nodes[i] = world.add(f"new {i}")
        assert world.run(15, world.running(*nodes)), nodes[i].said


def test_where_workers_keep_their_state_a_node_that_crashes_again_and_again_is_taken_in_each_time() -> None:
    world = World(min_nodes=2, max_nodes=3)
    world.keeps = True
    stay = [world.add(), world.add()]
    for _ in range(6):
        comes = world.add("x")
        assert world.run(20, world.running(*stay, comes)), comes.said
        comes.crash()
        assert world.run(20, world.running(*stay))
    assert world.history[-1][0] == 12 + (world.history[0][1] == 2)


def test_a_newcomer_with_a_slow_beat_is_taken_in_by_the_round_that_was_ended_for_it() -> None:
    """Its row may not have changed yet when the next round forms; that it wrote the record is proof enough."""
    world = World(min_nodes=1, max_nodes=3, beat=0.2)
    a, b = world.add(), world.add()
    assert world.run(30, world.running(a, b))
    c = world.add(rules=replace(world.rules, beat=2.0))
    assert world.run(10, world.running(a, b, c))
    assert world.history == [(1, 2), (2, 3)]


def test_a_round_that_was_ended_says_how_long_it_ran() -> None:
    world = World(min_nodes=1, max_nodes=3)
    a, b = world.add(), world.add()
    assert world.run(30, world.running(a, b))
    began = world.t
    world.run(20)
    b.crash()
    assert world.run(20, lambda: world.record is not None and world.record.broken is not None)
    broken = world.record.broken  # type: ignore[union-attr]
    assert broken is not None and broken.ran == pytest.approx(world.t - began, abs=1.0)


def test_other_settings_in_a_store_that_lasts_are_refused_with_a_word_about_a_job_just_killed() -> None:
    record = after("ab", settings=replace(RULES, max_restarts=7).settings)
    assert "try again" not in rules.disagreement(RULES, record)
    lasting = replace(RULES, lasting=True)
    record = replace(record, settings=replace(lasting, max_restarts=7).settings)
    told = rules.disagreement(lasting, record)
    assert told.endswith("start all nodes with the same, or try again in 5 s if that job was just killed")

"""When a node with strikes sits out, and which events its machine gets. Simple objects stand for the session and the read of all rows."""

from __future__ import annotations

import zlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from elastirun import clock
from elastirun.agent import quarantine as sit_out
from elastirun.agent.observe import events
from elastirun.agent.quarantine import AGAIN, CHECK, LOOK_LIMIT, Quarantine
from elastirun.rendezvous.failures import describe
from elastirun.rendezvous.peers.ranks import member
from elastirun.rendezvous.timing import Timing
from elastirun.rendezvous.wire.events import SitsOut, Synced, WorkersStopped
from elastirun.rendezvous.wire.records import Blame, Broken, Cause, ExitRecord, NodeRow, RoundRecord, Status
from tests.sim import world
from tests.sim.history import History, draw

OWN = ExitRecord("name-b", 1, 0, 77, 1, Blame.OWN_FAULT, 2.0, ("ValueError: 7",))
A, B = (NodeRow(i, f"name-{i}", "10.0.0.1", 1000, 1, status=Status.DRAINING, round=3) for i in "ab")
SPARE = NodeRow("c", "name-c", "10.0.0.1", 1000, 1)
ROUND = RoundRecord("store", 9, 3, (member(A), member(B)), broken=Broken(Cause.FAILURE, "rank 1 failed", "b"))
NEXT = RoundRecord("store", 10, 4, (member(A), member(SPARE)), describe(OWN))


class Node:
    """Node b of a round with node a. ``spares``: those that wait; ``answers``: the store answers to the look at all rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, strikes: int, *spares: NodeRow, answers: bool = True) -> None:
        rows = {row.id: row for row in (A, B, *spares)}
        self.found = Synced(0.0, 0.0, ROUND, rows) if answers else None
        self.looked, self.kept = 0, False
        monkeypatch.setattr(sit_out, "Look", self.look)
        self.machine: Any = SimpleNamespace(record=ROUND, row=B, hosting=False, store=SimpleNamespace(place=None, kept_alive=clock.now()))
        self.machine.rules = SimpleNamespace(majority=True)
        self.posted: list[object] = []
        self.lines: list[str] = []
        self.events: list[events.Event] = []
        access = SimpleNamespace(for_status=lambda place: {}, key_prefix="")
        session: Any = SimpleNamespace(machine=self.machine, access=access, post=self.post)
        config: Any = SimpleNamespace(
            strikes=strikes, strikes_cooldown=100.0, fixed_ranks=False, standalone=False, min_nodes=2, token=None, timing=Timing()
        )
        accounting: Any = SimpleNamespace(sit_out=lambda: None, join=lambda: None)
        self.sit_out = Quarantine(config, session, accounting, self.events.append, self.lines.append, lambda: None)

    def look(self, *_: object) -> Any:
        self.looked += 1
        return SimpleNamespace(found=self.found, done=self.found is not None)

    def post(self, event: object) -> None:
        """Keep the events that let the node join. The other one comes first, and without it the others would wait for this node."""
        if isinstance(event, SitsOut):
            self.machine.row = replace(self.machine.row, done_round=3, note=event.why, failures=event.failures)
        else:
            self.posted.append(event)

    def ends_round(self, *failures: ExitRecord, number: int = 3, stragglers: tuple[int, ...] = (), leaving: bool = False) -> list[object]:
        """End a round. Return the events that the machine gets immediately."""
        self.posted.clear()
        self.sit_out.workers_stopped(number, failures, self.kept, stragglers, leaving)
        self.sit_out.tick(clock.now())
        return list(self.posted)

    def told(self) -> list[tuple[ExitRecord, ...]]:
        return [event.failures for event in self.posted if isinstance(event, WorkersStopped)]


def test_it_sits_out_from_its_last_strike_on_and_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, 2, SPARE)
    assert len(node.ends_round(OWN, number=2)) == 1 and not node.looked
    node.sit_out.see(replace(ROUND, reason=describe(OWN)))
    assert node.sit_out.strikes == [describe(OWN)]
    assert node.ends_round(OWN) == [] and node.sit_out.out
    assert (node.machine.row.done_round, node.machine.row.failures) == (3, (OWN,))
    node.machine.record = NEXT
    now = clock.now()
    assert node.sit_out.tick(now) == pytest.approx(now + CHECK) and not node.posted
    node.machine.store.kept_alive = now + 101
    node.sit_out.tick(now + 101)
    assert node.told() == [(OWN,)] and not node.sit_out.out and node.sit_out.strikes == []
    assert [event.kind for event in node.events] == ["sits_out", "sat_out"]


def test_workers_that_keep_their_state_are_ended_when_their_node_sits_out(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, 2, SPARE)
    node.kept = True
    assert [event.kept for event in node.ends_round(OWN, number=2)] == [True]  # type: ignore[attr-defined]
    node.sit_out.see(replace(ROUND, reason=describe(OWN)))
    assert node.ends_round(OWN) == [] and node.sit_out.out
    node.sit_out.end()
    assert [event.kept for event in node.posted] == [False]  # type: ignore[attr-defined]


def test_without_strikes_nothing_is_counted_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, 0, SPARE)
    assert len(node.ends_round(OWN, stragglers=(1,))) == 1
    node.sit_out.see(NEXT)
    assert (node.sit_out.strikes, node.lines, node.looked) == ([], [], 0)


def test_a_failure_of_which_another_node_was_the_cause_is_no_strike(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, 2, SPARE)
    node.ends_round(OWN)
    node.sit_out.see(replace(NEXT, reason="rank 0 on name-a failed (exit code 1)"))
    assert node.sit_out.strikes == []


def test_a_node_that_was_not_the_cause_joins_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, 1, SPARE)
    assert node.ends_round(OWN) == []
    node.machine.record = replace(NEXT, reason="rank 0 on name-a failed (exit code 1)")
    node.sit_out.tick(clock.now())
    assert node.told() == [(OWN,)] and "another node was the cause" in node.lines[-1]


def test_a_later_round_does_not_bring_the_cause_back(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, 1, SPARE)
    node.ends_round(OWN)
    for record in (NEXT, replace(NEXT, round=5, reason="name-d joined")):
        node.machine.record = record
        node.sit_out.tick(clock.now())
        assert node.sit_out.out


def test_nodes_that_go_at_the_same_moment_join_again_where_the_rest_is_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, 1, SPARE)
    node.ends_round(OWN)
    assert node.found is not None
    node.found.rows["a"] = replace(A, done_round=3)
    now = clock.now()
    for at in (now, now + AGAIN / 2):
        node.sit_out.tick(at)
        assert node.sit_out.out and node.looked == 1
    node.sit_out.tick(now + AGAIN + CHECK)
    assert not node.sit_out.out and node.looked == 2 and "the job needs 2 nodes, and there are 1 others" in node.lines[-1]


def test_one_round_is_one_strike(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, 3, SPARE)
    node.ends_round(OWN, stragglers=(1,))
    node.sit_out.see(NEXT)
    assert node.sit_out.strikes == ["rank 1 was a straggler in round 3"]


def test_a_straggler_sits_out_whatever_has_ended_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, 1, SPARE)
    assert node.ends_round(stragglers=(1,)) == []
    node.machine.record = replace(NEXT, reason="name-d joined")
    node.sit_out.tick(clock.now())
    assert node.sit_out.out


def test_it_stays_where_it_is_needed_or_nobody_knows_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, 1)
    for _ in range(2):
        assert len(node.ends_round(OWN)) == 1
    assert [line for line in node.lines if "does not sit out" in line] == node.lines and len(node.lines) == 1
    node = Node(monkeypatch, 1, SPARE, answers=False)
    assert node.ends_round(OWN) == []
    node.sit_out.tick(clock.now() + LOOK_LIMIT)
    assert node.told() == [(OWN,)] and "the store does not say" in node.lines[-1]


@pytest.mark.parametrize("what", ["hosting", "fixed_ranks", "standalone"])
def test_where_no_other_node_can_take_its_place_nobody_waits_for_a_look(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    node = Node(monkeypatch, 1, SPARE)
    setattr(node.machine if what == "hosting" else node.sit_out._config, what, True)
    assert len(node.ends_round(OWN)) == 1 and not node.looked and len(node.lines) == 1


def test_a_node_that_leaves_sits_out_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, 1, SPARE)
    assert len(node.ends_round(OWN, leaving=True)) == 1
    assert node.ends_round(OWN) == []
    node.sit_out.end()
    assert node.told() == [(OWN,)]
    node.sit_out.end()
    assert len(node.posted) == 1


def test_the_others_have_time_for_their_next_round_from_its_end_on(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, 1, SPARE)
    node.sit_out._config.strikes_cooldown = 1000.0  # type: ignore[misc]
    node.ends_round(OWN)
    limit, now = Timing().grace + 2 * Timing().expire, clock.now()
    over = replace(NEXT, broken=ROUND.broken)
    for record, at, out in ((ROUND, 0, True), (NEXT, limit - 1, True), (over, 2 * limit, True), (over, 3 * limit, False)):
        node.machine.record, node.machine.store.kept_alive = record, now + at
        node.sit_out.tick(now + at)
        assert node.sit_out.out == out, (record, at)


def test_histories_in_which_nodes_sit_out_break_no_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The invariants of the simulated histories hold, and all of them come to an end, where four in ten stops make a node sit out."""
    outs = 0

    def stopped(node: world.Node, round_: int, kept: bool) -> None:
        nonlocal outs
        if not (node.up and node.stopping and len(node.began) == round_):
            return
        node.working, node.stopping, node.lone, node.ended_by_guard = None, False, False, False
        chance = zlib.crc32(f"{node.id} {round_}".encode()) % 100
        seconds = 0.0
        if chance < 40 and not node.machine.hosting and not node.world.rules.private and not node.world.rules.fixed_ranks:
            outs, seconds = outs + 1, 0.3 + chance / 5
            node.when_running(lambda: node.feed(lambda now: SitsOut(now, "strikes", node.machine.row.failures)))
        node.world.at(seconds, lambda: node.feed(lambda now: WorkersStopped(now, node.machine.row.failures, kept)))

    monkeypatch.setattr(world.Node, "stopped", stopped)
    for seed in range(20):
        assert (violation := History(draw(seed)).run().violation) is None, (seed, violation)
    assert outs > 10


def test_a_look_that_ends_at_once_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread may end before the call that started it has returned."""

    def ends_at_once(name: str, function: Any, *args: Any) -> object:
        function(*args)
        return function  # in place of the thread

    monkeypatch.setattr(sit_out, "start_thread", ends_at_once)
    nowhere = sit_out.Look({"kind": "tcp", "address": "127.0.0.1", "port": 1}, "job/", None)
    assert nowhere.done and nowhere.found is None

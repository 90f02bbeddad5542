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
from elastirun.agent.part import NodeRound
from elastirun.agent.quarantine import AGAIN, CHECK, LOOK_LIMIT, Quarantine
from elastirun.rendezvous.failures import describe
from elastirun.rendezvous.peers.ranks import member
from elastirun.rendezvous.rules import Rules
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
        self.looked = 0
        monkeypatch.setattr(sit_out, "Look", self.look)
        self.machine: Any = SimpleNamespace(record=ROUND, row=B, hosting=False, store=SimpleNamespace(place=None, kept_alive=clock.now()))
        self.machine.rules = SimpleNamespace(majority=True, mesh=None)
        self.lines: list[str] = []
        self.events: list[events.Event] = []
        access = SimpleNamespace(for_status=lambda place: {}, key_prefix="")
        session: Any = SimpleNamespace(machine=self.machine, access=access, post=self.post)
        config: Any = SimpleNamespace(
            strikes=strikes, strikes_cooldown=100.0, fixed_ranks=False, standalone=False, min_nodes=2, token=None, timing=Timing()
        )
        accounting: Any = SimpleNamespace(sit_out=lambda: None, join=lambda: None)
        self.tracker: Any = SimpleNamespace(stopped=True, failures=())
        self.stragglers: Any = SimpleNamespace(named=[])
        write = self.events.append, self.lines.append
        self.sit_out = Quarantine(config, session, accounting, self.tracker, self.stragglers, *write, lambda: None)

    def look(self, *_: object) -> Any:
        self.looked += 1
        return SimpleNamespace(found=self.found, done=self.found is not None)

    def post(self, event: object) -> None:
        assert isinstance(event, SitsOut)
        self.machine.row = replace(self.machine.row, done_round=3, note=event.why, failures=event.failures)

    def ends_round(self, *failures: ExitRecord, number: int = 3, stragglers: tuple[int, ...] = ()) -> bool:
        """End a round. Return whether the node may be in the next one."""
        self.tracker.failures, self.stragglers.named = failures, stragglers
        self.sit_out.round_starts(NodeRound(replace(ROUND, round=number), 0, {}))
        self.sit_out.idle()
        self.sit_out.tick(clock.now())
        return not self.sit_out.holds

    def sees(self, record: RoundRecord) -> None:
        self.sit_out.see(record, clock.now())


def test_it_sits_out_from_its_last_strike_on_and_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, 2, SPARE)
    assert node.ends_round(OWN, number=2) and not node.looked
    node.sees(replace(ROUND, reason=describe(OWN)))
    assert node.sit_out.strikes == [describe(OWN)]
    assert not node.ends_round(OWN) and node.sit_out.out
    assert (node.machine.row.done_round, node.machine.row.failures) == (3, (OWN,))
    node.machine.record = NEXT
    now = clock.now()
    assert node.sit_out.tick(now) == pytest.approx(now + CHECK) and node.sit_out.holds
    node.machine.store.kept_alive = now + 101
    node.sit_out.tick(now + 101)
    assert not node.sit_out.holds and not node.sit_out.out and node.sit_out.strikes == []
    assert [event.kind for event in node.events] == ["sits_out", "sat_out"]


def test_before_the_machine_hears_that_the_node_sits_out_nothing_ends_what_is_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent ends those that are parked: there is no next round for a while. One that stays keeps them."""
    node = Node(monkeypatch, 2, SPARE)
    order: list[str] = []
    monkeypatch.setattr(node, "post", lambda event: order.append("sits out"))
    node.sit_out._session.post = node.post  # type: ignore[method-assign]
    monkeypatch.setattr(node.sit_out, "_going_out", lambda: order.append("ends them"))
    assert node.ends_round(OWN, number=2) and not order
    node.sees(replace(ROUND, reason=describe(OWN)))
    assert not node.ends_round(OWN) and order == ["sits out", "ends them"]


def test_without_strikes_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, 0, SPARE)
    assert node.ends_round(OWN, stragglers=(1,))
    node.sees(NEXT)
    assert (node.sit_out.strikes, node.lines, node.looked) == ([], [], 0)


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_each_failure_that_this_node_caused_is_counted_once_with_and_without_strikes(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    node = Node(monkeypatch, limit, SPARE)
    node.ends_round(OWN, stragglers=(1,))  # one strike for both; with a limit of 1 the node sits out
    for _ in range(2):
        node.sees(NEXT)
    assert node.sit_out.failures_caused == 1
    node.ends_round(OWN, number=4)
    node.sees(replace(NEXT, round=5, reason="rank 0 on name-a failed (exit code 1)"))
    assert node.sit_out.failures_caused == 1, "another node was the cause"


def test_a_failure_of_which_another_node_was_the_cause_is_no_strike(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, 2, SPARE)
    node.ends_round(OWN)
    node.sees(replace(NEXT, reason="rank 0 on name-a failed (exit code 1)"))
    assert node.sit_out.strikes == []


def test_a_node_that_was_not_the_cause_joins_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, 1, SPARE)
    assert not node.ends_round(OWN)
    node.machine.record = replace(NEXT, reason="rank 0 on name-a failed (exit code 1)")
    node.sit_out.tick(clock.now())
    assert not node.sit_out.holds and "another node was the cause" in node.lines[-1]


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


def test_it_stays_where_the_others_do_not_fit_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two others are left. A replica of three stages needs one more."""
    for text, out in (("dp=auto,pp=3,tp=1", False), ("dp=auto,pp=2,tp=1", True)):
        node = Node(monkeypatch, 1, SPARE)
        node.machine.rules = replace(Rules(2, 3, mesh_text=text), store_succession="majority")
        node.ends_round(OWN)
        assert node.sit_out.out == out


def test_one_round_is_one_strike(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, 3, SPARE)
    node.ends_round(OWN, stragglers=(1,))
    node.sees(NEXT)
    assert node.sit_out.strikes == ["rank 1 was a straggler in round 3"]


def test_a_straggler_sits_out_whatever_has_ended_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, 1, SPARE)
    assert not node.ends_round(stragglers=(1,))
    node.machine.record = replace(NEXT, reason="name-d joined")
    node.sit_out.tick(clock.now())
    assert node.sit_out.out


def test_it_stays_where_it_is_needed_or_nobody_knows_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, 1)
    for _ in range(2):
        assert node.ends_round(OWN)
    assert [line for line in node.lines if "does not sit out" in line] == node.lines and len(node.lines) == 1
    node = Node(monkeypatch, 1, SPARE, answers=False)
    assert not node.ends_round(OWN)
    node.sit_out.tick(clock.now() + LOOK_LIMIT)
    assert not node.sit_out.holds and "the store does not say" in node.lines[-1]


@pytest.mark.parametrize("what", ["hosting", "fixed_ranks", "standalone"])
def test_where_no_other_node_can_take_its_place_nobody_waits_for_a_look(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    node = Node(monkeypatch, 1, SPARE)
    setattr(node.machine if what == "hosting" else node.sit_out._config, what, True)
    assert node.ends_round(OWN) and not node.looked and len(node.lines) == 1


def test_a_node_that_leaves_sits_out_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, 1, SPARE)
    assert not node.ends_round(OWN)
    node.sit_out.leaves()
    assert not node.sit_out.holds and "this node leaves" in node.lines[-1]
    assert node.ends_round(OWN)


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

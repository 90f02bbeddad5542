"""The death notice that a guard writes: the others go on at once, and a notice that is late, repeated, forged or of an earlier incarnation
changes nothing that is not its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from elastirun.errors import StoreError
from elastirun.rendezvous.death_notice import TRIES, mark_left, mark_lost, write_notice
from elastirun.rendezvous.peers.ranks import member
from elastirun.rendezvous.stores.memory import MemoryStore
from elastirun.rendezvous.wire.actions import Change, Put, Sync
from elastirun.rendezvous.wire.codec import Codec
from elastirun.rendezvous.wire.records import Broken, Cause, Closed, NodeRow, RoundRecord, Status, Verdict
from elastirun.rendezvous.wire.sync import SyncProtocol, execute
from tests.sim import invariants
from tests.sim.world import Deaths, Node, World
from tests.support.stage import Stage, running

A, B = (NodeRow(i, f"name-{i}", f"10.0.0.{i}", 1, 2, seq=7, status=Status.RUNNING, round=3, done_round=2) for i in "ab")
RUNS = RoundRecord("s", version=5, round=3, members=(member(A), member(B)))
BROKEN = replace(RUNS, version=6, broken=Broken(Cause.FAILURE, "boom", "a", ran=9.0))


def written(record: RoundRecord | None, *rows: NodeRow, codec: Codec | None = None) -> MemoryStore:
    """Return a store that holds the record and the rows."""
    store = MemoryStore()
    for row in rows:
        execute(SyncProtocol("job/", row.id, codec or Codec(), lambda: 0.0).steps(Sync(put=Put(None, row), rows=()), 0.0), store)
    if record is not None:
        execute(SyncProtocol("job/", "a", codec or Codec(), lambda: 0.0).steps(Sync(change=Change(None, record), rows=()), 0.0), store)
    return store


def read(store: MemoryStore, me: str = "b") -> tuple[RoundRecord | None, NodeRow | None]:
    answer = SyncProtocol("job/", me, Codec(), lambda: 0.0).carry_out(store, Sync(rows=()), 0.0)
    return answer.round, answer.row


def tell(store: Any, me: str = "b", codec: Codec | None = None, number: int = 3, ran: float = 50.0) -> bool:
    """Write the death notice of ``me``."""
    return bool(execute(write_notice(SyncProtocol("job/", me, codec or Codec(), lambda: 0.0), me, number, ran), store))


def test_a_member_that_runs_is_lost_and_its_row_says_that_it_has_left() -> None:
    store = written(RUNS, A, B)
    assert tell(store)
    record, row = read(store)
    assert record and record.broken and row
    assert (record.version, record.broken.cause, record.broken.lost, record.broken.over) == (6, Cause.LOST, ("b",), True)
    assert record.broken.ended == ("b",)
    assert record.broken.reason == "name-b 10.0.0.b was lost: its agent died, and its workers have ended" and record.broken.ran == 50.0
    assert (row.status, row.done_round, row.seq) == (Status.LEFT, 3, 8)


def test_the_loss_is_written_before_the_row() -> None:
    """Who saw the row first would take it for a planned leave, and give its workers the long grace for a checkpoint."""
    store, order = written(RUNS, A, B), []
    put_if = store.put_if
    store.put_if = lambda key, *values: order.append(key) or put_if(key, *values)  # type: ignore[func-returns-value, method-assign]
    assert tell(store) and order == ["job/round", "job/node/b"]


def test_a_round_that_is_broken_already_learns_of_the_loss() -> None:
    lost = mark_lost(BROKEN, B, 50.0)
    assert lost and lost.broken == replace(BROKEN.broken, lost=("b",), over=True, ended=("b",)) and lost.version == 7  # type: ignore[type-var]
    silent = replace(BROKEN, broken=Broken(Cause.LOST, "b silent", "a", ("b",), ran=9.0))
    known = mark_lost(silent, B, 50.0)
    assert known and known.broken and known.broken.lost == ("b",) and known.broken.over, "and for good, not only for a time"
    assert known.broken.ended == ("b",)


@pytest.mark.parametrize(
    ("record", "row", "why"),
    [
        (None, B, "no round was ever formed"),
        (replace(RUNS, members=(member(A),)), B, "it was no member"),
        (replace(RUNS, closed=Closed(Verdict.SUCCEEDED, "", "a")), B, "the job is over"),
        (RUNS, replace(B, status=Status.DONE, succeeded=3), "its workers have succeeded"),
        (RUNS, replace(B, status=Status.JOINING, done_round=3), "it had stopped its workers"),
        (mark_lost(RUNS, B, 0.0), B, "it is said already"),
    ],
)
def test_a_record_is_left_alone_where_nobody_waits_for_the_dead(record: RoundRecord | None, row: NodeRow, why: str) -> None:
    assert mark_lost(record, row, 0.0) is None, why


def test_a_round_that_is_over_names_the_end_of_who_had_stopped_before_and_does_not_call_it_lost() -> None:
    for row in (replace(B, status=Status.JOINING, done_round=3), replace(B, status=Status.DONE, succeeded=3)):
        record = mark_lost(BROKEN, row, 0.0)
        assert record and record.broken == replace(BROKEN.broken, over=True, ended=("b",)) and mark_lost(record, row, 0.0) is None  # type: ignore[type-var]


def test_a_row_that_says_left_is_left_alone() -> None:
    left = mark_left(B)
    assert left is not None and mark_left(left) is None


def test_a_notice_is_written_once_however_often_it_comes() -> None:
    store = written(RUNS, A, B)
    assert tell(store)
    after = dict(store._data)
    assert tell(store) and store._data == after


def test_a_notice_of_an_earlier_incarnation_changes_nothing_of_the_next() -> None:
    again = replace(B, id="b-again", round=4, done_round=3)
    store = written(replace(RUNS, version=8, round=4, members=(member(A), member(again))), A, B, again)
    before = store._data["job/round"], store._data["job/node/b-again"]
    assert tell(store) and (store._data["job/round"], store._data["job/node/b-again"]) == before
    assert read(store)[1] == mark_left(B)


def test_in_the_store_of_another_run_nothing_is_written() -> None:
    store = written(RUNS, A)
    before = dict(store._data)
    assert not tell(store), "the others wait in another store, which is to be told"
    assert store._data == before


def test_how_long_the_round_ran_is_known_of_the_round_that_the_agent_knew_alone() -> None:
    store = written(replace(RUNS, round=4, version=8), A, B)
    assert tell(store, number=3)
    record, _ = read(store)
    assert record and record.broken and record.broken.ran == 0.0


def test_with_a_token_a_guard_signs_and_a_stranger_cannot_write_a_notice() -> None:
    right, wrong = Codec(b"right"), Codec(b"wrong")
    store = written(RUNS, A, B, codec=right)
    before = dict(store._data)
    for stranger in (wrong, Codec()):
        with pytest.raises(StoreError, match="unreadable"):
            tell(store, codec=stranger)
    assert store._data == before
    lost = mark_lost(RUNS, B, 0.0)
    assert lost is not None
    store._data["job/round"] = wrong.encode("job/round", replace(lost, members=(), members_digest="0" * 64))
    with pytest.raises(StoreError, match="not signed with this node's token"):
        SyncProtocol("job/", "a", right, lambda: 0.0).carry_out(store, Sync(rows=()), 0.0)
    store._data.update(before)
    assert tell(store, codec=right) and store._data["job/round"] != before["job/round"]


def test_a_notice_is_tried_again_when_somebody_else_writes_at_the_same_moment() -> None:
    store, others = written(RUNS, A, B), 0
    put_if = store.put_if

    def busy(key: str, expected: bytes | None, value: bytes) -> bytes | None:
        nonlocal others
        if key == "job/round" and others < TRIES // 2:
            others += 1
            record, _ = read(store)
            assert record is not None
            other = replace(record, version=record.version + 1, reason=f"{others}")
            protocol = SyncProtocol("job/", "a", Codec(), lambda: 0.0)
            store.put_if = put_if  # type: ignore[method-assign]
            protocol.carry_out(store, Sync(change=Change(record, other), rows=()), 0.0)
            store.put_if = busy  # type: ignore[method-assign]
        return put_if(key, expected, value)

    store.put_if = busy  # type: ignore[method-assign]
    assert tell(store)
    record, row = read(store)
    assert record and record.broken and record.reason == f"{TRIES // 2}" and row and row.status is Status.LEFT


# -- in a simulated world


def world_of(nodes: int, told: float = 1.0, **rules: object) -> tuple[World, list[Node]]:
    world = World(0, **{"min_nodes": 1, "max_nodes": nodes, **rules})
    world.deaths = Deaths(told=told)
    world.graces = (30.0, 5.0)
    invariants.install(world)
    found = [world.add() for _ in range(nodes)]
    assert world.run(20, world.running(*found))
    return world, found


def seconds_until(world: World, done: Callable[[], bool]) -> float:
    began = world.t
    assert world.run(120, done)
    return world.t - began


@pytest.mark.parametrize("lasting", [False, True])
def test_the_others_form_the_next_round_at_once_and_it_costs_no_restart(lasting: bool) -> None:
    world, (a, b, c) = world_of(3, lasting=lasting, max_restarts=0)
    c.crash()
    assert seconds_until(world, world.running(a, b)) < 1.0
    assert world.record and world.record.failures == 0 and "its agent died" in world.record.reason
    assert not any(stop.planned for node in (a, b) for stop in node.stops)


@pytest.mark.parametrize("lasting", [False, True])
def test_a_death_that_is_not_told_is_found_by_silence_as_before(lasting: bool) -> None:
    world, (a, b, c) = world_of(3, told=0.0, lasting=lasting)
    c.crash()
    assert 4.5 < seconds_until(world, world.running(a, b)) < 7.0


@pytest.mark.parametrize("lasting", [False, True])
def test_a_spare_need_not_wait_for_a_round_all_of_whose_agents_have_died(lasting: bool) -> None:
    """By silence alone it waits for 88 s: the round could go on where the store is out of reach."""
    world, members = world_of(2, lasting=lasting)
    spare = world.add()
    world.run(5)
    for node in members:
        node.crash()
    assert seconds_until(world, world.running(spare)) < 2.0


def test_a_spare_that_dies_disturbs_nobody() -> None:
    world, members = world_of(2)
    spare = world.add()
    world.run(5)
    spare.crash()
    world.run(30)
    assert world.running(*members)() and not any(node.stops for node in members)


def test_a_member_that_has_succeeded_may_die() -> None:
    world, (a, b, c) = world_of(3)
    c.succeed()
    world.run(2)
    c.crash()
    world.run(30)
    assert world.record and world.record.open and not a.stops and not b.stops
    a.succeed()
    b.succeed()
    assert world.run(5, lambda: bool(world.record and world.record.closed))


def test_a_failure_beside_a_told_death_costs_no_restart() -> None:
    """Workers fail because they have lost their peers, and that may be noticed before the guard has spoken."""
    world, (a, b, c) = world_of(3, max_restarts=0)
    a.fail()
    c.crash()
    assert seconds_until(world, world.running(a, b)) < 1.5
    assert world.record and world.record.failures == 0


def test_whoever_sees_only_the_row_of_the_dead_goes_on_too() -> None:
    """The guard may have written the row before the round was formed with it."""
    stage: Stage = running("b", "c")
    stage.puppet("c", beats=False, status=Status.LEFT, done_round=0, round=0)
    assert stage.run(2, lambda: stage.record.broken is not None and bool(stage.me.stops))

"""Rules of the machine that show only when the others are in the test's hands: one real node among puppets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastirun.rendezvous import updates
from elastirun.rendezvous.wire.actions import Outcome, Reconnect, Sync
from elastirun.rendezvous.wire.events import Changed, Close, Leave, Reachable, SitsOut, SyncFailed, Tick, WorkersStopped
from elastirun.rendezvous.wire.records import Cause, Closed, RoundRecord, Status, Verdict
from tests.support.stage import ME, Stage, count, met, running, slow_answers


def failed(record: RoundRecord) -> RoundRecord:
    """The record with the job closed for good."""
    return replace(record, version=record.version + 1, closed=Closed(Verdict.FAILED, "the restarts are spent", "b"))


# -- how often, and never two at once -------------------------------------------------------------------------------------------


def test_a_node_asks_the_store_once_at_a_time_and_no_more_often_than_it_must() -> None:
    stage = met()
    assert 50 <= count(stage, lambda a: isinstance(a, Sync), 10) <= 110, "while a round forms: every 0.1 s"
    stage = running("b", "c")
    assert 18 <= count(stage, lambda a: isinstance(a, Sync), 10) <= 22, "while it runs: every beat"
    slow_answers(stage, 2.0)
    stage.run(1)
    for port in range(5):  # even when there is news to tell
        stage.me.feed(lambda now, port=port: Reachable(now, f"10.0.0.{port}", port))  # type: ignore[misc]
    stage.run(10)
    assert (stage.mine.address, stage.mine.port) == ("10.0.0.4", 4) and stage.most_under_way == 1


def test_a_row_is_written_every_beat_and_not_with_every_look() -> None:
    stage = met()
    puts = count(stage, lambda a: isinstance(a, Sync) and a.put is not None, 10)
    assert 15 <= puts <= 21
    stage = running("b", "c")
    assert 15 <= count(stage, lambda a: isinstance(a, Sync) and a.put is not None, 10) <= 21


def test_a_store_that_fails_at_once_is_not_hammered() -> None:
    stage = running("b", "c")
    stage.begin = lambda node, sync: stage.at(0.001, lambda: node.feed(lambda now: SyncFailed(now, "no")))  # type: ignore[method-assign]
    assert 5 <= count(stage, lambda a: isinstance(a, Sync), 10) <= 8, "after 0.5, 1, 2, 2, ... seconds"
    stage.begin = type(stage).begin.__get__(stage)  # type: ignore[method-assign]
    assert stage.run(2.1, lambda: not stage.me.machine.store._link.contact.trouble)


@pytest.mark.parametrize("state", ["joining", "running", "draining", "away"])
def test_the_machine_never_asks_to_be_woken_without_end(state: str) -> None:
    stage = running("b", "c") if state != "joining" else met()
    if state == "draining":
        stage.me.stop_time = 1e6
        stage.break_up(Cause.FAILURE)
    if state == "away":
        stage.store_up = False
    stage.run(1)
    ticks: list[object] = []
    step = stage.me.machine.step
    stage.me.machine.step = lambda event: (ticks.append(event), step(event))[1]  # type: ignore[method-assign]
    stage.run(10)
    assert len(ticks) <= (250 if state == "joining" else 60)
    assert stage.me.machine.wake > stage.me.now


def test_after_a_first_failure_the_machine_needs_no_further_one_to_give_the_store_up() -> None:
    """Its own clock wakes it, whether or not the driver gets an answer or a time-out out of the store."""
    stage = running("b", "c", store_grace=60.0)
    stage.store_up = False
    stage.run(4)
    stage.begin = lambda node, sync: None  # type: ignore[method-assign]
    stage.run(55)
    assert stage.me.working
    assert stage.run(3, lambda: stage.me.working is None)
    assert stage.run(5, lambda: stage.me.outcome is Outcome.STORE_LOST)


def test_when_it_is_over_nothing_moves_the_machine() -> None:
    stage = met()
    stage.me.leave()
    assert stage.run(5, lambda: stage.me.finish is not None)
    machine = stage.me.machine
    assert machine.step(Tick(1e6)) == machine.step(Leave(1e6, "again")) == []


def test_what_is_known_of_others_does_not_grow() -> None:
    stage = met()
    for i in range(200):
        stage.puppet(f"x{i}", beats=False)
        stage.run(0.2)
        del stage.data[f"job/node/x{i}"]
    stage.run(0.5)
    assert len(stage.me.machine.store._link.live._seen) <= 3 and len(stage.me.machine.store.rows) == 1


# -- the states ---------------------------------------------------------------------------------------------------------------------


def test_a_round_that_is_over_before_it_began_is_given_up_and_the_next_is_joined() -> None:
    stage = met(min_nodes=2)
    stage.puppet("b")
    stage.form(ME, "b")
    stage.puppet("b", status=Status.READY, round=1)
    stage.break_up(Cause.JOIN)
    assert stage.run(2, lambda: stage.mine.done_round == 1)
    assert stage.mine.status is Status.JOINING and not stage.me.starts
    stage.puppet("b", status=Status.JOINING, done_round=1)
    assert stage.run(3, lambda: stage.record.round == 2)


def test_the_reason_to_end_a_round_does_not_end_the_next_one() -> None:
    """A worker here loses its peers, the others end the round for the loss, and this node reads nothing before the next one."""
    stage = running("b", "c")
    stage.store_up = False
    stage.me.fail()
    stage.run(1)
    assert stage.me.machine.state is Status.JOINING and stage.record.open, "its workers have ended, and nobody has read why"
    stage.form(ME, "b", "c", number=2)
    stage.store_up = True
    assert stage.run(5, lambda: stage.me.starts[-1][0] == 2)
    stage.run(3)
    assert stage.record.open and stage.record.round == 2 and stage.mine.status is Status.RUNNING


def test_a_ready_node_whose_round_breaks_starts_nothing() -> None:
    stage = met(min_nodes=2)
    stage.puppet("b")
    stage.form(ME, "b")
    stage.puppet("b", status=Status.JOINING, round=0)  # has not seen it yet
    assert stage.run(2, lambda: stage.mine.status is Status.READY)
    stage.run(3)
    assert not stage.me.starts, "not before every member has seen it"
    stage.break_up(Cause.JOIN)
    assert stage.run(2, lambda: stage.mine.status is Status.JOINING)
    assert stage.mine.done_round == 1 and not stage.me.starts


def test_a_ready_node_that_is_told_to_leave_says_so_and_starts_nothing() -> None:
    stage = met(min_nodes=2)
    stage.puppet("b")
    stage.form(ME, "b")
    stage.puppet("b", status=Status.JOINING, round=0)
    assert stage.run(2, lambda: stage.mine.status is Status.READY)
    stage.me.leave()
    assert stage.run(3, lambda: stage.me.outcome is Outcome.LEFT)
    assert stage.mine.status is Status.LEFT and not stage.me.starts
    assert stage.record.broken and stage.record.broken.cause is Cause.LEAVE


def test_a_node_that_closes_the_job_ends_it_for_all() -> None:
    stage = running("b", "c")
    stage.puppet("b", status=Status.LEFT)  # the close goes before the end of the round that this node would write
    stage.me.feed(Close)
    assert stage.run(1, lambda: stage.record.closed is not None)
    assert stage.record.closed == Closed(Verdict.FAILED, "closed by n0 10.0.0.1", ME) and stage.record.broken is None
    assert stage.run(9, lambda: stage.me.outcome is Outcome.FAILED)


@pytest.mark.parametrize("trouble", ["no round", "no answer"])
def test_a_job_that_cannot_be_closed_at_once_is_closed_later(trouble: str) -> None:
    stage = Stage(min_nodes=2)
    stage.store_up = trouble == "no round"
    stage.enter()
    stage.me.feed(Close)
    stage.run(2)
    stage.store_up = True
    assert stage.run(5, lambda: stage.me.outcome is Outcome.FAILED)
    assert stage.record.closed and (stage.record.round, stage.record.closed.by) == (0, ME)


def test_a_verdict_is_not_replaced_by_a_close() -> None:
    stage = running("b", "c")
    stage.write(updates.succeed(stage.record, "b"))
    stage.me.machine.row = replace(stage.me.machine.row, succeeded=1)  # else the verdict is not believed
    stage.me.feed(Close)
    stage.run(10)
    assert stage.record.closed and stage.record.closed.verdict is Verdict.SUCCEEDED


def test_the_first_reason_to_end_stands() -> None:
    stage = running("b", "c")
    stage.me.stop_time = 3.0
    stage.me.leave()
    stage.run(1)
    assert (stage.mine.status, stage.mine.note) == (Status.DRAINING, "SIGTERM")
    stage.data.clear()  # and now the store is another one
    stage.write(RoundRecord("another"))
    assert stage.run(10, lambda: stage.me.finish is not None) and stage.me.outcome is Outcome.LEFT


def test_the_join_timeout_counts_anew_after_a_round() -> None:
    stage = running("b", "c", join_timeout=60.0)
    stage.run(300)
    stage.break_up(Cause.LEAVE)
    stage.puppet("b", status=Status.LEFT)
    stage.puppet("c", status=Status.LEFT)
    stage.run(55)
    assert stage.me.finish is None and stage.mine.status is Status.JOINING
    assert stage.run(10, lambda: stage.me.outcome is Outcome.TIMEOUT)


def test_the_time_of_a_spare_counts_from_when_it_is_needed() -> None:
    stage = met(min_nodes=2, max_nodes=2, join_timeout=60.0)
    for i in "bc":
        stage.puppet(i)
    stage.form("b", "c")
    stage.run(100)
    stage.break_up(Cause.LEAVE)
    for i in "bc":
        stage.puppet(i, status=Status.LEFT)
    stage.run(55)
    assert stage.me.finish is None
    assert stage.run(10, lambda: stage.me.outcome is Outcome.TIMEOUT)


def test_without_a_store_the_join_timeout_ends_the_wait_and_says_what_was_waited_for() -> None:
    stage = Stage(join_timeout=60.0)
    stage.store_up = False
    stage.enter()
    stage.run(59)
    assert stage.me.finish is None
    assert stage.run(5, lambda: stage.me.finish is not None)
    assert stage.me.finish and stage.me.finish.outcome is Outcome.TIMEOUT
    assert stage.me.finish.reason == "no round within 60 s: waiting for the rendezvous store: connection refused"


def test_what_is_waited_for_is_said_in_full_once_and_then_in_short() -> None:
    stage = Stage(join_timeout=60.0)
    stage.store_up = False
    me = stage.enter()
    fail = me.machine.step
    trouble = "connection refused; nobody hosts the store; start the node that owns the endpoint" + 100 * "."
    me.machine.step = lambda event: fail(replace(event, why=trouble) if isinstance(event, SyncFailed) else event)  # type: ignore[method-assign]
    stage.run(45)
    short = "waiting for the rendezvous store: connection refused"
    assert [line for line in me.said if "waiting" in line] == [f"waiting for the rendezvous store: {trouble}", short, short]


@pytest.mark.parametrize("most", [3, 4])  # with 3 the newcomer would fill the last place
def test_nobody_is_taken_in_while_a_round_is_finishing(most: int) -> None:
    stage = met(max_nodes=most)
    for i in "bc":
        stage.puppet(i)
    stage.form("b", "c")
    stage.puppet("b", status=Status.DONE, succeeded=1)
    stage.run(10)
    assert stage.record.open and stage.record.broken is None
    stage.puppet("b", status=Status.RUNNING, succeeded=0)
    assert stage.run(3, lambda: stage.record.broken is not None), "it is the finishing alone that holds it up"
    assert stage.record.broken and stage.record.broken.reason == "n0 10.0.0.1 joined"


def test_the_leader_writes_and_the_others_only_when_it_does_not() -> None:
    stage = met(min_nodes=2, max_nodes=2)
    stage.puppet("b", node_rank=0)  # it would be the first, so it is to write, and does not
    assert not stage.run(0.9, lambda: stage.record.round == 1)
    assert stage.run(2.0, lambda: stage.record.round == 1)
    assert [m.id for m in stage.record.members] == ["b", ME]
    alone = met(min_nodes=2, max_nodes=2)
    alone.puppet("b")
    alone.puppets["b"] = replace(alone.puppets["b"], address="10.0.9.9")
    assert alone.run(0.9, lambda: alone.record.round == 1), "the first itself does not wait"


def test_a_member_that_has_no_row_yet_is_waited_for() -> None:
    stage = met(min_nodes=2)
    stage.puppet("b")
    stage.form(ME, "b")
    del stage.data["job/node/b"]
    stage.silence("b")
    assert stage.run(2, lambda: stage.mine.status is Status.READY)
    stage.run(2)
    assert not stage.me.starts and stage.record.open


def beside_a_round(max_nodes: int) -> Stage:
    """A round of two other nodes, and this node, which has just come."""
    stage = Stage(max_nodes=max_nodes)
    stage.write(RoundRecord("s"))
    stage.puppet("b")
    stage.puppet("c")
    stage.enter()
    stage.form("b", "c")
    return stage


def test_a_running_round_is_not_broken_for_a_newcomer_before_it_is_clear_that_no_more_come() -> None:
    stage = beside_a_round(max_nodes=8)
    stage.run(0.9)  # the debounce is a second
    assert stage.record.open
    assert stage.run(1, lambda: not stage.record.open)
    assert stage.record.broken and stage.record.broken.reason == "n0 10.0.0.1 joined"


def test_a_newcomer_who_fills_the_last_place_of_a_running_round_waits_for_no_other() -> None:
    stage = beside_a_round(max_nodes=3)
    assert stage.run(0.5, lambda: not stage.record.open)


def test_a_member_that_has_succeeded_may_fall_silent() -> None:
    stage = running("b", min_nodes=1)
    stage.puppet("b", status=Status.DONE, succeeded=1)
    stage.run(1)
    stage.silence("b")
    stage.run(20)
    assert stage.record.open and stage.record.round == 1 and not stage.me.stops
    stage.me.succeed()
    assert stage.run(10, lambda: stage.me.outcome is Outcome.SUCCEEDED) and stage.record.round == 1


def test_a_done_node_may_leave() -> None:
    stage = running("b", min_nodes=1)
    stage.me.succeed()
    stage.run(1)
    stage.me.leave()
    assert stage.run(3, lambda: stage.me.outcome is Outcome.LEFT)
    assert stage.record.open and (stage.mine.status, stage.mine.succeeded, stage.mine.note) == (Status.LEFT, 1, "SIGTERM")


# -- the store goes, or is another ---------------------------------------------------------------------------------------------------


def test_a_store_that_answers_with_another_id_is_another_rendezvous() -> None:
    stage = running("b")
    stage.write(replace(stage.record, store_id="another"))
    assert stage.run(3, lambda: stage.me.outcome is Outcome.STORE_LOST)
    assert stage.me.finish and "replaced by another one" in stage.me.finish.reason


@pytest.mark.parametrize(("beside", "found"), [(False, None), (False, RoundRecord("another")), (True, RoundRecord("another"))])
def test_who_was_in_no_round_joins_the_job_that_is_in_the_store_now(beside: bool, found: RoundRecord | None) -> None:
    stage = beside_a_round(max_nodes=2) if beside else met()
    stage.run(1)
    stage.data.clear()
    if found is not None:
        stage.write(found)
    stage.puppets.clear()
    assert stage.run(3, lambda: f"job/node/{ME}" in stage.data) and stage.mine.status is Status.JOINING
    assert any("joins there" in line for line in stage.me.said) and stage.record.store_id != "s"
    stage.puppet("b")
    stage.form("b", ME)
    assert stage.run(3, lambda: stage.me.working is not None)


@pytest.mark.parametrize("how", ["a round may go on without its keys", "it leaves"])
def test_who_may_not_join_another_store_ends(how: str) -> None:
    stage = beside_a_round(max_nodes=2) if "round" in how else met()
    stage.run(1)
    if how == "it leaves":
        stage.me.leave()
    stage.data.clear()
    stage.puppets.clear()
    assert stage.run(3, lambda: stage.me.outcome is (Outcome.LEFT if how == "it leaves" else Outcome.STORE_LOST))
    assert not any("joins there" in line for line in stage.me.said) and "job/round" not in stage.data


@pytest.mark.parametrize("how", ["replaced", "answer lost"])
def test_a_node_offers_each_id_to_one_store(how: str) -> None:
    stage = Stage()
    offered: list[str] = []
    begin = stage.begin

    def watched(node: Any, sync: Sync) -> None:
        if sync.change is not None and sync.change.record.round == 0:
            offered.append(sync.change.record.store_id)
            if how == "answer lost" and len(offered) == 1:
                stage.at(0.01, lambda: node.feed(lambda now: SyncFailed(now, "lost")))
                return
        begin(node, sync)

    stage.begin = watched  # type: ignore[method-assign]
    stage.enter()
    if how == "replaced":
        assert stage.run(2, lambda: f"job/node/{ME}" in stage.data)
        stage.data.clear()
    assert stage.run(5, lambda: len(offered) > 1) and offered[0] != offered[1]
    assert stage.run(20, lambda: stage.me.working is not None) and stage.record.store_id in offered[1:]


def test_a_verdict_that_is_still_read_overrules_a_lost_store() -> None:
    stage = running("b", store_grace=10.0)
    stage.me.stop_time = 5.0
    stage.store_up = False
    assert stage.run(15, lambda: bool(stage.me.stops))
    stage.store_up = True
    stage.write(failed(stage.record))
    assert stage.run(15, lambda: stage.me.finish is not None) and stage.me.outcome is Outcome.FAILED


def test_before_its_first_round_a_node_waits_for_a_store_as_long_as_for_a_round() -> None:
    stage = met(join_timeout=300.0, store_grace=10.0)
    stage.store_up = False
    stage.run(100)
    assert stage.me.finish is None
    stage.store_up = True
    stage.puppet("b")
    stage.form(ME, "b")
    assert stage.run(5, lambda: stage.me.working is not None)


@pytest.mark.parametrize("private", [True, False])
def test_a_round_of_one_needs_nobody_where_nobody_else_can_come(private: bool) -> None:
    stage = running(private=private, min_nodes=1, max_nodes=1)
    stage.store_up = False
    stage.run(30)
    assert bool(stage.me.working) is private


def test_the_store_of_an_earlier_run_is_gone_before_it_matters() -> None:
    """A node that never wrote anything anywhere ends without a goodbye."""
    stage = Stage()
    stage.store_up = False
    stage.enter()
    stage.run(1)
    stage.me.leave()
    assert stage.me.outcome is Outcome.LEFT


@pytest.mark.parametrize(
    ("hosting", "silent", "least", "most"),
    [(True, False, 6.0, 8.0), (False, False, 0.0, 1.0), (True, True, 0.0, 1.0)],
)
def test_only_the_host_lingers_for_those_who_live_and_not_for_ever(hosting: bool, silent: bool, least: float, most: float) -> None:
    stage = Stage(hosting)
    stage.write(RoundRecord("s"))
    stage.puppet("b")  # it never says goodbye
    stage.enter()
    stage.run(1)
    stage.form(stage.me.id, "b")
    assert stage.run(5, lambda: stage.me.working is not None)
    if silent:
        stage.puppet("b", status=Status.DONE, succeeded=1)
        stage.silence("b")
        stage.run(10)
    stage.me.succeed()
    stage.run(1)
    stage.write(updates.succeed(stage.record, "b"))
    closed = stage.t
    assert stage.run(60, lambda: stage.me.finish is not None) and least <= stage.t - closed <= most


def test_when_all_is_said_a_store_that_is_gone_is_not_waited_for() -> None:
    stage = running("b")
    stage.me.succeed()
    stage.run(1)
    stage.write(updates.succeed(stage.record, "b"))
    assert stage.run(3, lambda: stage.me.machine.state is Status.LEFT)
    stage.me.feed(lambda now: SyncFailed(now, "connection reset"))
    assert stage.me.outcome is Outcome.SUCCEEDED


# -- the store of an earlier run -----------------------------------------------------------------------------------------------------


def test_into_the_store_of_a_job_that_is_over_nothing_is_written() -> None:
    stage = Stage(join_timeout=30.0)
    old = replace(RoundRecord("old"), round=3, members=())
    stage.write(updates.succeed(old, "x"))
    before = dict(stage.data)
    stage.enter()
    stage.run(12)
    assert stage.data == before
    reconnects = sum(isinstance(action, Reconnect) for action in stage.actions)
    assert 12 <= reconnects <= 25, "each beat it is looked whether another has come"
    assert any("it still belongs to an earlier run of this job, which succeeded" in line for line in stage.me.said)
    stage.run(25)
    assert stage.me.outcome is Outcome.TIMEOUT and stage.data == before


# -- words ------------------------------------------------------------------------------------------------------------------------------


def test_the_store_is_back_is_said_only_when_it_was_missed() -> None:
    stage = running("b", "c")
    for away, said in [(3.0, False), (12.0, True)]:
        stage.store_up = False
        stage.run(away)
        stage.store_up = True
        stage.run(8)
        assert any("the store is back" in line for line in stage.me.said) is said
    assert not stage.me.stops


@pytest.mark.parametrize(
    ("fields", "cause", "reason"),
    [
        ({"status": Status.LEFT, "note": "SIGTERM"}, Cause.LEAVE, "name-b 10.0.1.98 left: SIGTERM"),
        ({"status": Status.JOINING, "done_round": 1, "note": "cut off"}, Cause.LEAVE, "name-b 10.0.1.98 stopped: cut off"),
        (None, Cause.LOST, "name-b 10.0.1.98 silent for 5 s"),
    ],
)
def test_a_round_ends_with_a_word_about_who_is_gone(fields: dict[str, Any] | None, cause: Cause, reason: str) -> None:
    stage = running("b", "c", min_nodes=1)
    if fields is None:
        stage.silence("b")
    else:
        stage.puppet("b", **fields)
    assert stage.run(7, lambda: stage.record.broken is not None)
    broken = stage.record.broken
    assert broken and (broken.cause, broken.reason, broken.by) == (cause, reason, ME)
    assert broken.lost == (("b",) if cause is Cause.LOST else ())


@pytest.mark.parametrize(("code", "how"), [(3, "exit code 3"), (-11, "SIGSEGV")])
def test_a_failure_names_rank_node_and_how(code: int, how: str) -> None:
    stage = running("b", "c")
    stage.me.fail(code)
    assert stage.run(2, lambda: stage.record.broken is not None)
    assert stage.record.broken and stage.record.broken.reason == f"rank 0 on n0 failed ({how})"
    assert stage.me.stops[0].planned is False


def test_who_fails_while_a_node_is_being_stopped_is_reported_too() -> None:
    stage = running("b")
    stage.me.stop_time = 1e6
    stage.me.fail(1)
    first = stage.me.machine.row.failures[0]
    stage.run(1)
    assert (stage.mine.status, stage.mine.failures) == (Status.DRAINING, (first,))
    stage.me.working = None
    stage.me.feed(lambda now: WorkersStopped(now, (first, replace(first, local_rank=1))))
    assert stage.run(1, lambda: stage.mine.status is Status.JOINING)
    assert [f.local_rank for f in stage.mine.failures] == [0, 1] and stage.mine.done_round == 1


def test_a_node_that_sits_out_says_at_once_that_its_last_round_is_over_and_joins_no_other() -> None:
    stage = running("b")
    stage.me.stop_time = 1e6
    stage.me.fail(1)
    stage.run(1)
    failures = stage.me.machine.row.failures
    stage.me.working = None
    stage.me.feed(lambda now: SitsOut(now, "strike 2 of 2", failures))
    assert stage.run(1, lambda: stage.mine.done_round == 1)
    assert (stage.mine.status, stage.mine.failures, stage.mine.note) == (Status.DRAINING, failures, "strike 2 of 2")
    stage.me.feed(lambda now: WorkersStopped(now, failures))
    assert stage.run(1, lambda: stage.mine.status is Status.JOINING)
    before = stage.me.machine.row
    stage.me.feed(lambda now: SitsOut(now, "too late", ()))
    assert stage.me.machine.row == before


def test_the_verdict_is_the_reason_of_the_stop() -> None:
    stage = running("b", "c")
    stage.write(failed(stage.record))
    assert stage.run(2, lambda: bool(stage.me.stops))
    assert stage.me.stops[0].reason == "the restarts are spent"
    for i in "bc":
        stage.puppet(i, status=Status.LEFT)
    assert stage.run(5, lambda: stage.me.outcome is Outcome.FAILED)


def test_who_is_not_let_in_does_not_wait_but_who_was_in_does() -> None:
    stage = Stage()
    stage.begin = lambda node, sync: None  # type: ignore[method-assign]
    stage.enter()
    stage.me.feed(lambda now: SyncFailed(now, "wrong password", refused=True))
    assert stage.me.outcome is Outcome.TIMEOUT and stage.me.finish and stage.me.finish.reason == "wrong password"
    stage = running("b", "c")
    stage.begin = lambda node, sync: stage.at(0.1, lambda: node.feed(lambda now: SyncFailed(now, "revoked", refused=True)))  # type: ignore[method-assign]
    stage.run(50)
    assert not stage.me.stops
    assert stage.run(30, lambda: stage.me.outcome is Outcome.STORE_LOST)


def test_a_newcomer_that_can_never_read_the_round_gives_up_and_who_has_read_it_does_not() -> None:
    def unreadable(stage: Stage) -> None:
        fail = lambda now: SyncFailed(now, "not signed with our token", unreadable=True)  # noqa: E731
        stage.begin = lambda node, sync: stage.at(0.1, lambda: node.feed(fail))  # type: ignore[method-assign]

    stage = Stage(expire=5.0)
    unreadable(stage)
    stage.enter()
    stage.run(10)
    assert stage.me.outcome is None, "it may be the last breath of an earlier run"
    assert stage.run(5, lambda: stage.me.outcome is Outcome.DISAGREES)
    stage = running("b", "c", expire=5.0, store_grace=60.0)
    unreadable(stage)
    stage.run(50)
    assert stage.me.outcome is None and not stage.me.stops
    assert stage.run(30, lambda: stage.me.outcome is Outcome.STORE_LOST)


def test_a_node_that_hears_of_a_change_looks_at_once() -> None:
    stage = running("b", "c")
    stage.run(0.2)
    while stage.under_way:
        stage.run(0.01)
    asked = len([action for action in stage.actions if isinstance(action, Sync)])
    stage.break_up(Cause.LEAVE)
    stage.me.feed(Changed)
    assert len([action for action in stage.actions if isinstance(action, Sync)]) == asked + 1
    assert stage.run(0.1, lambda: bool(stage.me.stops))


def test_a_node_that_has_stopped_its_workers_soon_reads_the_others_rows_again() -> None:
    """The others stop theirs at about the same time, and the next round waits for the last of them."""
    stage = running("b", "c")
    stage.break_up(Cause.LEAVE)
    assert stage.run(2.0, lambda: stage.me.machine.state is Status.JOINING)
    assert 3 <= count(stage, lambda a: isinstance(a, Sync), 0.1) <= 8
    stage.run(2.0)
    assert count(stage, lambda a: isinstance(a, Sync), 0.5) <= 6


def test_what_is_ignored_is_told() -> None:
    stage = met()
    stage.data["job/node/x"] = b"garbage"
    stage.run(25)
    assert any(line.startswith("ignored: job/node/x: not JSON") for line in stage.me.said)


def test_a_member_that_is_ready_for_another_round_is_not_ready_for_this_one() -> None:
    stage = met(min_nodes=2)
    stage.puppet("b")
    stage.form(ME, "b", number=2)
    stage.puppet("b", status=Status.READY, round=1)
    stage.run(5)
    assert stage.mine.status is Status.READY and not stage.me.starts
    stage.puppet("b", round=2)
    assert stage.run(2, lambda: stage.me.starts == [(2, 0, 2)])


def test_a_node_that_is_named_with_other_slots_takes_no_part() -> None:
    stage = met(min_nodes=2)
    stage.puppet("b")
    stage.form(ME, "b")
    me, b = stage.record.members
    stage.write(replace(stage.record, members=(replace(me, slots=4096), b)))
    stage.run(5)
    assert not stage.me.starts and stage.mine.status is Status.JOINING


def test_a_verdict_does_not_overrule_that_this_node_leaves() -> None:
    stage = running("b", "c")
    stage.me.stop_time = 3.0
    stage.me.leave()
    stage.run(1)
    stage.write(failed(stage.record))
    assert stage.run(10, lambda: stage.me.finish is not None) and stage.me.outcome is Outcome.LEFT

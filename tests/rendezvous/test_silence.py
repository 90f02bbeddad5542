"""Silence and the node that it counts against: one real node among puppets that stop their keep-alives, or are cut off."""

from __future__ import annotations

import pytest

from elastirun.rendezvous.timing import RECONNECT_SPREAD
from elastirun.rendezvous.wire.events import StoodStill
from elastirun.rendezvous.wire.records import Cause, Status
from tests.support.stage import ME, met, running, slow_answers


def test_after_trouble_with_the_store_the_others_have_their_time_anew() -> None:
    """The store was away for everyone; those who come back a little later than we are not lost."""
    stage = running("b", "c")
    stage.store_up = False
    stage.run(20)
    beating = stage.puppets.pop("b"), stage.puppets.pop("c")
    stage.store_up = True
    stage.run(4)
    assert stage.record.open
    for row in beating:
        stage.puppets[row.id] = row
        stage.puppet(row.id)
        stage._beat(row.id)
    stage.run(20)
    assert stage.record.open and not stage.me.stops


@pytest.mark.parametrize("expire", [1.0, 5.0])
def test_at_a_store_that_outlives_the_job_the_last_may_find_it_back_seconds_after_the_first(expire: float) -> None:
    stage = running("b", "c", lasting=True, expire=expire)
    stage.run(10)
    late = stage.puppets["b"]
    stage.store_up = False
    stage.silence("b")
    stage.silence("c")
    stage.run(20)
    stage.store_up = True
    assert stage.run(3, lambda: not stage.me.machine.store._link.contact.trouble)
    stage.run(RECONNECT_SPREAD + 0.8 * expire)
    assert stage.record.open
    stage.puppets["b"] = late
    stage.puppet("b")
    stage._beat("b")
    assert stage.run(2 * expire, lambda: not stage.record.open), "and who never comes is lost"
    assert stage.record.broken and stage.record.broken.lost == ("c",)


@pytest.mark.parametrize(("hosted", "seconds", "spread"), [(True, 8.0, RECONNECT_SPREAD), (True, 1.0, 0.0), (False, 8.0, 0.0)])
def test_after_a_standstill_of_the_stores_host_the_others_have_some_seconds_to_find_the_store(
    hosted: bool, seconds: float, spread: float
) -> None:
    expire = 3.0
    stage = running("b", hosted=hosted, expire=expire)
    stage.run(10)
    stage.silence("b")
    stage.me.feed(lambda now: StoodStill(now, seconds, False))
    stage.run(spread + 0.8 * expire)
    assert stage.record.open
    assert stage.run(2 + 0.2 * expire, lambda: not stage.record.open), "and who never comes is lost"
    assert stage.record.broken and stage.record.broken.lost == ("b",)


@pytest.mark.parametrize(("expire", "within"), [(1.0, 3.5), (2.0, 4.0), (5.0, 7.0), (10.0, 12.0)])
def test_where_rows_have_leases_a_node_is_lost_between_expire_and_two_seconds_later(expire: float, within: float) -> None:
    stage = running("b", lasting=True, expire=expire)
    stage.run(3 * expire)
    assert stage.record.open, "a row that is there and does not change is a sign of life"
    stage.silence("b")
    stage.run(expire - 0.1)
    assert stage.record.open
    assert stage.run(within - expire + 0.1, lambda: not stage.record.open)


def test_a_row_that_is_away_for_a_moment_makes_nobody_lost() -> None:
    """A stopped leader of etcd that goes on may revoke the leases of the living: they write their rows anew."""
    stage = running("b", lasting=True)
    for _ in range(5):
        row = stage.data.pop("job/node/b")
        stage.run(1.4)
        stage.data["job/node/b"] = row
        stage.run(1.4)
    assert stage.record.open


@pytest.mark.parametrize("how", ["its lease is over", "it is not known under which lease it is"])
def test_a_node_writes_its_row_anew_when_its_lease_may_be_over(how: str) -> None:
    stage = running("b", lasting=True)
    stage.run(5)
    before = stage.mine
    if how == "its lease is over":
        stage.end_lease(stage.me.row_lease)
        assert "job/node/" + ME not in stage.data
    else:
        stage.me.row_lease = 0
    assert stage.run(1.1, lambda: stage.data.get("job/node/" + ME) not in (None, before) and stage.me.row_lease > 0)
    stage.run(0.1)
    again = stage.mine
    stage.run(20)
    assert stage.mine == again and stage.record.open, "and only once"


def test_where_rows_have_leases_a_node_that_has_nothing_new_to_say_writes_nothing() -> None:
    stage = running("b", lasting=True)
    stage.run(3)
    before = stage.mine, stage.me.machine.store.kept_alive
    stage.run(60)
    assert stage.mine == before[0]
    assert stage.me.machine.store.kept_alive > before[1] + 58


def test_after_an_answer_that_took_long_too() -> None:
    stage = running("b")
    begin = stage.begin
    stage.silence("b")
    stage.run(3)
    slow_answers(stage, 4.0)
    stage.run(0.6)
    stage.begin = begin  # type: ignore[method-assign]
    stage.run(7)
    assert stage.record.open, "10 s of silence, of which 4 were our own trouble and more than 5 before and after that nobody can tell"
    assert stage.run(3, lambda: not stage.record.open)


def test_a_member_without_a_row_is_lost_in_time() -> None:
    stage = running("b", "c")
    stage.break_up(Cause.FAILURE)
    stage.puppet("b", status=Status.JOINING, done_round=1)
    stage.silence("c")
    del stage.data["job/node/c"]
    assert stage.run(7, lambda: "c" in stage.record.broken.lost if stage.record.broken else False)


def test_a_loss_that_a_node_finds_while_it_waits_is_told_before_the_next_round() -> None:
    stage = running("b", "c", min_nodes=2, max_restarts=0)
    stage.silence("c")
    stage.run(4)
    stage.break_up(Cause.FAILURE)
    stage.puppet("b", status=Status.JOINING, done_round=1)
    assert stage.run(7, lambda: stage.record.broken is not None and stage.record.broken.lost == ("c",))
    assert stage.record.round == 1
    assert stage.run(3, lambda: stage.record.round == 2)
    assert stage.record.failures == 0 and [m.id for m in stage.record.members] == [ME, "b"]


def test_rows_that_vanish_with_their_leases_make_nobody_wait_longer() -> None:
    stage = met(min_nodes=1, max_nodes=2, lasting=True)
    for i in "bc":
        stage.puppet(i)
    stage.form("b", "c")
    stage.run(5)
    for i in "bc":
        stage.silence(i)
    stage.run(15)
    left = stage.me.machine.rules.longest_alone - 15
    stage.run(left + 2)
    assert stage.record.round == 1, "they may work on where nobody hears of them"
    assert stage.run(4, lambda: stage.record.round == 2)

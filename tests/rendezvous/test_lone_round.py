"""A round of one node, which goes on without anybody: its workers are gone before others may take the node for lost (decision 0006)."""

from __future__ import annotations

from elastirun.rendezvous.peers.own_row import OwnRow
from elastirun.rendezvous.wire.actions import Sync
from elastirun.rendezvous.wire.events import Synced
from elastirun.rendezvous.wire.records import Cause, NodeRow
from tests.sim.world import Node
from tests.support.stage import ME, Stage, met, slow_answers


def alone() -> Stage:
    stage = met(min_nodes=1)
    stage.form(ME)
    assert stage.run(5, lambda: stage.me.working is not None)
    stage.me.stop_time = 29.0
    return stage


def lose_the_store(stage: Stage) -> None:
    def nothing(node: Node, sync: Sync) -> None:
        """Neither the request nor a failure arrives."""

    stage.begin = nothing  # type: ignore[method-assign]


def test_its_time_counts_from_when_the_keep_alive_was_sent_not_answered() -> None:
    stage = alone()
    sent: list[float] = []
    slow_answers(stage, 2.5)
    slowly = stage.begin
    stage.begin = lambda node, sync: (sent.append(stage.t), slowly(node, sync))[1]  # type: ignore[method-assign,func-returns-value]
    assert stage.run(10, lambda: len(sent) == 2), "the first slow exchange was answered, the second one is under way"
    lose_the_store(stage)
    stage.run(sent[0] + stage.rules.lone_lease + 0.05 - stage.t)
    assert stage.me.working is None


def test_it_is_not_started_when_it_would_have_to_stop() -> None:
    stage = met(min_nodes=1)
    slow_answers(stage, stage.rules.lone_limit + 0.1)
    stage.form(ME)
    assert not stage.run(20, lambda: stage.me.working is not None), "each answer comes too late"
    del stage.begin
    assert stage.run(10, lambda: stage.me.working is not None)


def test_it_is_hurried_when_it_is_cut_off_while_it_drains() -> None:
    stage = alone()
    stage.break_up(Cause.JOIN)
    assert stage.run(2, lambda: stage.me.stopping)
    kept_alive = stage.t
    lose_the_store(stage)
    stage.run(stage.rules.lone_lease + 0.1)
    assert stage.me.working is None and stage.t - kept_alive < 5.0
    assert [stop.within for stop in stage.me.stops] == [None, 1.0]


def test_a_keep_alive_whose_answer_was_lost_does_not_count_when_it_is_read_later() -> None:
    """Others have read it long ago, so their time for this node began then."""
    row = NodeRow("me", "me", "", 0, 2)
    first, own = OwnRow(kept_alive=1.0, written_at=1.0).write(row, 2.0)
    again, own = own.write(row, 6.0)  # over what was read before, so it cannot be applied
    own = own.read(Synced(6.1, 6.0, None, {}, first.row), Sync(put=again), lasting=False)
    assert own.kept_alive == 1.0 and own.stored == first.row
    third, own = own.write(row, 6.2)
    assert own.read(Synced(6.3, 6.2, None, {}, third.row), Sync(put=third), lasting=False).kept_alive == 6.2
    assert own.read(Synced(6.3, 6.2, None, {}, first.row), Sync(rows=()), lasting=False).kept_alive == 1.0

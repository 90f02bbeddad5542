"""Old signed rows that somebody puts back, and records that no honest node writes: they neither revive a node nor stop workers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastirun.rendezvous import updates
from elastirun.rendezvous.wire.records import Broken, Cause, Member, Status
from tests.support.stage import ME, Stage, met, running


def put_back(stage: Stage, i: str, *seqs: int) -> None:
    """Write rows of puppet ``i`` with these ``seq`` in turn, twice a second, for ever."""
    row = stage.puppets[i]
    stage.silence(i)

    def again(at: int) -> None:
        stage.puppets[i] = replace(row, seq=seqs[at % len(seqs)] - 1)
        stage.puppet(i)
        del stage.puppets[i]
        stage.at(0.5, lambda: again(at + 1))

    again(0)


def test_old_rows_written_in_turn_keep_no_dead_node_alive() -> None:
    stage = running("b", "c")
    stage.run(10)
    put_back(stage, "c", 3, 4)
    assert stage.run(7, lambda: stage.record.broken is not None and stage.record.broken.lost == ("c",))
    assert any("it is an old one, somebody has put it back" in line for line in stage.me.said)


@pytest.mark.parametrize("left", [False, True])
def test_old_joining_rows_are_taken_into_no_round(left: bool) -> None:
    stage = met(min_nodes=2, max_nodes=2)
    stage.puppet("b")
    stage.run(0.2)
    for _ in range(4):
        stage.puppet("b", status=Status.DRAINING)  # it is there, and takes no part
        stage.run(0.3)
    if left:
        stage.puppet("b", status=Status.LEFT)
        stage.run(0.3)
    stage.puppets["b"] = replace(stage.puppets["b"], status=Status.JOINING)
    put_back(stage, "b", *((50, 51) if left else (2, 3)))
    stage.run(20)
    assert stage.record.round == 0


def test_a_node_whose_own_old_row_is_put_back_goes_on_above_its_newest() -> None:
    stage = running("b", "c")
    key = f"job/node/{ME}"
    old = stage.data[key]
    stage.run(5)
    newest = stage.mine.seq
    for _ in range(4):
        stage.data[key] = old
        assert stage.run(2, lambda newest=newest: stage.mine.seq > newest)  # type: ignore[misc]
        newest = stage.mine.seq
    assert stage.record.open and not stage.me.stops


def test_success_is_not_believed_while_own_workers_run() -> None:
    stage = running("b", "c", store_grace=20.0)
    honest = stage.record
    stage.write(updates.succeed(honest, "b"))
    stage.run(14)
    assert stage.me.working and not stage.me.stops
    assert any("says that all workers of round 1 succeeded, but those of this node have not" in line for line in stage.me.said)
    stage.write(replace(honest, version=honest.version + 2))
    stage.run(30)
    assert stage.me.working and not stage.me.stops and stage.record.open


def test_a_record_with_more_members_than_nnodes_allows_is_refused() -> None:
    stage = running("b", "c", store_grace=20.0)
    crowd = (*stage.record.members, Member("x", "x", "10.0.9.9", 1, 4096))
    broken = replace(stage.record, version=stage.record.version + 1, round=2, members=crowd, broken=Broken(Cause.JOIN, "x joined", "b"))
    stage.write(broken)
    stage.run(14)
    assert stage.me.working and not stage.me.stops
    assert any("it names 4 nodes, and --nnodes allows 3" in line for line in stage.me.said)

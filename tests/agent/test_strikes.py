"""Strikes: which failures are this node's, whether it sits out, and when it joins again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastirun.agent.failures.strikes import Limits, Out, Suspicion, may_go_on, others, sits_out, suspect, why_back, why_never, why_stays
from elastirun.rendezvous.failures import describe
from elastirun.rendezvous.peers.ranks import member
from elastirun.rendezvous.wire.records import Blame, Broken, Cause, ExitRecord, NodeRow, Quorum, RoundRecord, Status

OWN = ExitRecord("name-b", 1, 0, 77, 1, Blame.OWN_FAULT, 2.0, ("ValueError: 7",))
A, B, C, D = (NodeRow(i, f"name-{i}", "10.0.0.1", 1000, 1, status=Status.RUNNING, round=3) for i in "abcd")
ROUND = RoundRecord("store", 9, 3, (member(A), member(B)), broken=Broken(Cause.FAILURE, "rank 1 failed", "b"))
SPARE = replace(C, status=Status.JOINING, round=0)


def test_a_victim_of_others_and_a_worker_that_was_stopped_are_no_suspects() -> None:
    victim, stopped = replace(OWN, blame=Blame.VICTIM, after=0.5), replace(OWN, blame=Blame.KILLED_BY_US)
    assert suspect(3, ()) is suspect(3, (victim, stopped)) is None
    assert suspect(3, (victim, OWN)) == Suspicion(3, OWN)
    shown = replace(OWN, blame=Blame.SUSPECT)  # it had shown an exception of its own when it was stopped
    assert suspect(3, (victim, shown)) == Suspicion(3, shown)


@pytest.mark.parametrize(
    ("round", "reason", "holds"),
    [
        (3, describe(OWN), None),  # the next one has not formed
        (4, describe(OWN), True),
        (4, describe(replace(OWN, rank=0, node="name-a")), False),
        (4, f"name-a was lost; {describe(OWN)}", False),  # the failure is a consequence
        (5, "rank 0 on name-a failed (exit code 1)", None),  # of a later round, which tells nothing of that one
    ],
)
def test_the_cause_is_the_one_that_the_reason_of_the_next_round_names(round: int, reason: str, holds: bool | None) -> None:
    assert Suspicion(3, OWN).holds(replace(ROUND, round=round, reason=reason)) is holds


def test_who_sits_out_has_stopped_and_is_in_no_hurry() -> None:
    assert not any(map(sits_out, (A, SPARE, replace(B, status=Status.DRAINING), replace(B, status=Status.JOINING, done_round=3))))
    assert sits_out(replace(B, status=Status.DRAINING, done_round=3))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ((), 1),  # the members of the last round
        ((SPARE,), 2),
        ((SPARE, replace(A, status=Status.LEFT)), 1),
        ((SPARE, replace(A, status=Status.DRAINING)), 2),  # it stops its workers
        ((replace(A, status=Status.DRAINING, done_round=3),), 0),
        ((replace(C, status=Status.DRAINING, round=2, done_round=2), replace(D, status=Status.LEFT, round=2)), 1),
    ],
)
def test_the_others_are_the_members_and_the_spares_that_are_left(rows: tuple[NodeRow, ...], expected: int) -> None:
    assert len(others(ROUND, {row.id: row for row in rows}, "b")) == expected


def test_a_lost_member_is_no_other() -> None:
    assert others(replace(ROUND, broken=Broken(Cause.LOST, "a silent", "b", ("a",))), {"c": SPARE}, "b") == {"c"}


def test_the_others_go_on_only_as_a_quorum_of_the_last_round() -> None:
    three = replace(ROUND, members=(*ROUND.members, member(C)), quorums=(Quorum(("a", "b", "c"), "a"),))
    assert may_go_on(three, {}, ("a", "c")) and not may_go_on(three, {}, ("a", "d", "e"))
    assert may_go_on(three, {i: replace(row, status=Status.LEFT) for i, row in (("b", B), ("c", C))}, ("a",))


def test_a_node_sits_out_only_where_the_others_are_enough_without_it() -> None:
    assert why_stays(False, 2, 2) == why_never(False, False) == ""
    assert why_stays(False, 1, 2) == "the job needs 2 nodes, and there are 1 others"
    assert "too few of the last round" in why_stays(False, 2, 2, outvoted=True)
    assert "hosts the store" in why_stays(True, 9, 2)
    assert "does not say" in why_stays(False, None, 2)
    assert "fixed" in why_never(True, False) and "only node" in why_never(True, True)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, ""),
        ({"cause": True}, ""),
        ({"cause": False}, "another node was the cause of the failure"),
        ({"out": 600.0}, "its time is over"),
        ({"broken": 39.0}, ""),
        ({"broken": 40.0}, "the others have formed no round without it"),
        ({"silent": 59.0}, ""),
        ({"silent": 60.0}, "the store does not answer"),
        ({"hosts_store": True}, "it hosts the store now, and each round includes that node"),
        ({"decided": True, "cause": False}, "the job is decided"),
    ],
)
def test_when_it_joins_again(changed: dict[str, Any], why: str) -> None:
    now = Out(out=599.0, broken=0.0, silent=0.1, decided=False, hosts_store=False, cause=None)
    assert why_back(Limits(600.0, 40.0, 60.0), replace(now, **changed)) == why

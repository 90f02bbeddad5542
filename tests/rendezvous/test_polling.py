"""Which rows a node reads: few, and always those that matter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastirun.agent.status.job_status import QUIET
from elastirun.rendezvous.peers.polling import (
    ALL_PER_NODE,
    FORMING_POLL,
    PER_NODE,
    QUICKEST_POLL,
    ROWS_PER_SECOND,
    WIDE,
    PollPlan,
    first_in_line,
)
from elastirun.rendezvous.rules import Rules
from elastirun.rendezvous.updates import break_up
from elastirun.rendezvous.wire.records import Cause, Member, RoundRecord, Status

RULES = Rules(1, 6)
ROUND = RoundRecord("s", 2, 1, tuple(Member(i, i, "10.0.0.1", 1, 1) for i in "abcdef"))


def here(node_id: str) -> bool:
    return False


def look(me: str, record: RoundRecord | None, state: Status = Status.JOINING, now: float = 0.0, **more: object) -> tuple[str, ...] | None:
    options = {"away": here, "hosting": False, "own_store_id": "mine", **more}
    return PollPlan(RULES, me, 0.0).rows(state, record, now=now, **options)  # type: ignore[arg-type]


def over(cause: Cause = Cause.FAILURE, by: str = "a", lost: tuple[str, ...] = ()) -> RoundRecord:
    return break_up(ROUND, cause, "why", by, 0.0, lost)


@pytest.mark.parametrize(
    ("record", "away", "first"),
    [
        (over(), "", "ab"),
        (over(Cause.LOST, "c", ("a",)), "", "bc"),
        (over(Cause.LEAVE, "b"), "", "ac"),
        (over(), "ab", "cd"),
        (over(Cause.LOST, "f", ("c", "d")), "ab", "ef"),
        (over(), "abcdef", ""),
    ],
)
def test_the_lowest_ranks_that_are_still_there_are_first_in_line(record: RoundRecord, away: str, first: str) -> None:
    assert "".join(first_in_line(record, lambda i: i in away)) == first


def test_who_is_first_reads_all_and_the_others_watch_who_is() -> None:
    assert look("a", over()) is None is look("b", over())
    assert look("f", over()) == ("a", "b")
    away = {"away": lambda i: i in "ab"}
    assert look("c", over(), **away) is None
    assert look("f", over(), **away) == ("a", "b", "c", "d"), "those who are away may come back"


def test_while_a_round_runs_three_are_watched_and_while_it_begins_also_those_first_in_line() -> None:
    for state in (Status.RUNNING, Status.DRAINING):
        assert look("a", ROUND, state) == ("b", "c", "d") and look("e", ROUND, state) == ("f", "a", "b")
    assert set(look("d", ROUND, Status.READY) or ()) == {"a", "b", "e", "f"}


def test_before_the_first_round_whoever_found_the_store_empty_is_first() -> None:
    assert look("a", RoundRecord("mine")) is None
    assert look("a", RoundRecord("another")) == ()
    assert look("a", None) == ()


def test_now_and_then_everybody_reads_all() -> None:
    due = ALL_PER_NODE * len(ROUND.members)
    assert look("f", over(), now=0.49 * due) == ("a", "b") and look("f", over(), now=1.51 * due) is None


def of_many(nodes: int) -> RoundRecord:
    return replace(ROUND, members=tuple(Member(f"n{k}", "n", "10.0.0.1", 1, 1) for k in range(nodes)))


def test_a_thousand_nodes_do_that_more_seldom_as_long_as_somebody_is_first_in_line() -> None:
    record = break_up(of_many(1000), Cause.FAILURE, "why", "n0", 0.0, ())
    long, short = 1000**2 / ROWS_PER_SECOND, ALL_PER_NODE * 1000
    assert look("n999", record, now=0.49 * long) is not None and look("n999", record, now=1.51 * long) is None
    assert look("x", record, now=1.51 * short, away=lambda i: True) is None


def test_while_several_may_be_lost_many_are_watched_and_all_of_a_small_round() -> None:
    record = of_many(WIDE + 1)
    for state in (Status.RUNNING, Status.READY):
        assert set(look("n3", record, state, more_lost=True) or ()) >= {f"n{(3 + k) % (WIDE + 1)}" for k in range(1, WIDE + 1)}
        assert len(look("n3", of_many(500), state, more_lost=True) or ()) < WIDE + 8
        assert look("n3", of_many(WIDE), state, more_lost=True) is None
    over = break_up(of_many(500), Cause.LOST, "why", "n3", 0.0, ("n4",))
    assert look("n3", over, more_lost=True) is None, "who ends the round looks at all for the next one"


def test_a_thousand_nodes_that_begin_to_wait_together_do_not_all_read_all_rows_together() -> None:
    due, nodes = ALL_PER_NODE * len(ROUND.members), [f"n{k}" for k in range(1000)]
    for part in (0.75, 1.0, 1.25):
        reading = sum(look(node, over(), now=part * due) is None for node in nodes)
        assert abs(reading - 1000 * (part - 0.5)) < 100


def test_a_newcomer_beside_a_round_and_a_host_that_waits_to_go_read_all() -> None:
    assert look("x", ROUND) is None
    assert look("f", over(), Status.LEFT, hosting=True) is None and look("f", over(), Status.LEFT) == ("a", "b")


def test_a_running_node_looks_each_beat_and_at_a_store_that_tells_of_changes_every_other() -> None:
    assert PollPlan(RULES, "a", 0.0).interval(Status.RUNNING, ROUND) == RULES.beat
    lasting = replace(RULES, lasting=True)
    assert PollPlan(lasting, "a", 0.0).interval(Status.RUNNING, ROUND) == 2 * RULES.beat
    soon = PollPlan(replace(lasting, expire=2.0), "a", 0.0)
    assert soon.interval(Status.RUNNING, ROUND) == RULES.beat, "not so seldom that it seems lost"


OVER = over()


def forming(waited: float, took: float = 0.0, state: Status = Status.JOINING, record: RoundRecord = OVER) -> float:
    return PollPlan(RULES, "a", 0.0).interval(state, record, waited, took) - PER_NODE * len(record.members)


def test_a_node_that_has_just_taken_a_step_polls_quickly_and_ever_more_slowly_while_it_waits() -> None:
    times = [forming(waited) for waited in (0.0, 0.02, 0.1, 0.2, 0.3, 1.0, 600.0)]
    assert times == pytest.approx([QUICKEST_POLL, QUICKEST_POLL, 0.025, 0.05, 0.075, FORMING_POLL, FORMING_POLL])
    assert forming(0.1, state=Status.READY, record=ROUND) == forming(0.1)


def test_a_slow_store_is_not_polled_quickly() -> None:
    assert [forming(0.0, took) for took in (0.001, 0.02, 1.0)] == pytest.approx([QUICKEST_POLL, 0.04, FORMING_POLL])


def test_quick_polls_are_few_however_long_the_wait() -> None:
    now, polls = 0.0, 0
    while now < 0.5:
        now, polls = now + forming(now), polls + 1
    assert polls <= 20


def test_a_node_that_waits_for_the_end_of_a_round_polls_each_beat_however_short_the_wait() -> None:
    assert forming(0.0, state=Status.DONE) == forming(0.0, record=ROUND) == pytest.approx(RULES.beat)


def test_a_private_store_in_which_nobody_else_writes_is_asked_less_often() -> None:
    """``elastirun status`` calls a row quiet that has not changed for ``QUIET``."""
    shared, private = (PollPlan(replace(RULES, private=one), "a", 0.0) for one in (False, True))
    assert shared.interval(Status.RUNNING, ROUND) == RULES.beat < private.interval(Status.RUNNING, ROUND) < 0.7 * QUIET
    assert shared.interval(Status.JOINING, over()) == private.interval(Status.JOINING, over())

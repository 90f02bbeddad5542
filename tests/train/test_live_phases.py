"""The table of phases of live workers: each row is reached in a model of a job, and no state of it is without an exit."""

from __future__ import annotations

import pytest

from elastirun.train.elastic import Elastic
from elastirun.train.live.phases import GOES, NONE, OF_SCRIPT, ROWS, Fact, Phase, PhaseAction, PhaseEvent, Row, can, step
from tests.train.live_model import BEYOND, Plan, Table, Walk, walk

PLANS = {
    "two_losses_and_two_new_processes": Plan(losses=2, joins=2),
    "two_rounds_end": Plan(ends=2),
    "a_reduction_fails_on_one_rank": Plan(faults=1, breaks=3),
    "a_loop_is_left_in_the_last_step": Plan(losses=1, joins=1, breaks=1, saves=True),
    "a_loop_is_left_in_the_first_step": Plan(ends=1, breaks=0, saves=True),
    "a_loop_is_left_while_a_new_rank_joins": Plan(at_first=1, joins=1, losses=1, steps=4, epochs=1, breaks=2),
    "three_ranks_and_two_losses": Plan(ranks=3, at_first=3, losses=2),
    "three_ranks_a_loss_and_a_new_process": Plan(ranks=3, at_first=3, losses=1, joins=1, steps=1),
    "three_ranks_that_save_and_a_loss": Plan(ranks=3, at_first=3, losses=1, breaks=1, saves=True),
    "three_ranks_and_a_reduction_fails_on_one": Plan(ranks=3, at_first=3, faults=1),
}
SMALL = (Plan(faults=1, breaks=1, saves=True), Plan(ends=1), PLANS["a_loop_is_left_in_the_last_step"])
SMALL += (PLANS["a_loop_is_left_while_a_new_rank_joins"],)
# Without these a worker alone leaves its round an evaluation later, and new workers wait until training ends.
FOR_SPEED = ((Phase.TRAINING, Fact.ROUND_OVER | Fact.ALONE), (Phase.TRAINING, NONE))


def table_of(rows: list[Row]) -> Table:
    def table(phase: Phase, event: PhaseEvent, facts: Fact = NONE) -> tuple[Phase, tuple[PhaseAction, ...]]:
        for row in rows:
            if (row.phase, row.event) == (phase, event) and row.given in facts:
                return row.then, row.actions
        if event in OF_SCRIPT:
            return phase, ()
        raise LookupError(phase, event)

    return table


def is_known(plan: Plan, found: Walk, number: int) -> bool:
    """Return whether a new process, which has rehearsed, has come to ``number`` as all others were gone with the last checkpoint.

    It is in its loop, and trains on, though its script would not have begun that epoch. Others save, and both end with an error.
    """
    last = plan.epochs * plan.steps
    meet = {
        f"ranks of one world meet in {a} and {b}" for a, b in ((("reduce", last), ("leave", last)), (("leave", last), ("reduce", last)))
    }
    return found.states[number][5] == last and found.wrong[number] in {BEYOND, *meet}


@pytest.mark.daily(3)
@pytest.mark.parametrize("name", PLANS)
def test_no_state_is_without_an_exit_and_ranks_of_one_world_meet_in_the_same_collective(name: str) -> None:
    """An exit: all that live train in one world, or end. Neither a disturbance nor a wait of 10 s leads there."""
    found = walk(plan := PLANS[name], step)
    assert found.depth >= 6
    assert [found.way(number) for number in found.stuck[:1]] == []
    assert [(what, found.way(number)) for number, what in found.wrong.items() if not is_known(plan, found, number)][:1] == []


def test_each_row_is_reached() -> None:
    plans = SMALL + (Plan(losses=2, joins=1),)
    asked = set[tuple[Phase, PhaseEvent, Fact]]().union(*(walk(plan, step).asked for plan in plans))
    reached = {next((row for row in ROWS if (row.phase, row.event) == one[:2] and row.given in one[2]), None) for one in asked}
    assert [row for row in ROWS if row not in reached and row.phase is not Phase.FIXED] == []


@pytest.mark.daily(3)
def test_a_table_without_a_row_is_noticed() -> None:
    before = [{*(found := walk(plan, step)).wrong.values()} for plan in SMALL]
    missed = []
    for row in ROWS:
        try:
            for plan, known in zip(SMALL, before, strict=True):
                found = walk(plan, table_of([other for other in ROWS if other is not row]))
                if found.stuck or {*found.wrong.values()} - known:
                    break
            else:
                missed.append((row.phase, row.given))
        except LookupError:
            pass
    assert [one for one in missed if one[0] is not Phase.FIXED] == [*FOR_SPEED]


def test_a_late_rank_that_leaves_its_round_leaves_the_others_without_an_exit() -> None:
    """It did, where its script had left the loop in the failed step."""
    before = table_of([*ROWS, Row(Phase.LATE, PhaseEvent.STEP_ENDS, NONE, Phase.LEFT, GOES)])
    assert walk(Plan(ends=1, breaks=1, trains_late=True), before).stuck and not walk(Plan(ends=1, breaks=1), step).stuck


def test_an_event_that_cannot_come_is_an_error_and_the_script_may_do_anything_at_any_time() -> None:
    with pytest.raises(RuntimeError, match="impossible event of a live worker: AGREED in phase LATE"):
        step(Phase.LATE, PhaseEvent.AGREED)
    assert all(step(Phase.LEFT, event) == (Phase.LEFT, ()) for event in OF_SCRIPT)
    assert not can(Phase.LEFT, PhaseEvent.PEERS_LOST) and can(Phase.MEETING, PhaseEvent.PEERS_LOST)


def test_each_action_is_a_method() -> None:
    assert [action for action in PhaseAction if not callable(getattr(Elastic, f"_{action.name.lower()}", None))] == []

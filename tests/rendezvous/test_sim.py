"""Histories from seeds: the real machine in a world where nothing is reliable. ``python -m tests.sim`` runs many more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sim import history, invariants
from tests.sim.history import Fault, History, draw, shrink
from tests.sim.world import Violation, World

CHUNK = 50


@pytest.mark.parametrize("first", range(0, 200, CHUNK))
def test_nothing_that_must_never_happen_happens(first: int) -> None:
    for seed in range(first, first + CHUNK):
        violation = History(draw(seed)).run().violation
        assert violation is None, f"{violation}; the whole story: python -m tests.sim --replay {seed}"


@pytest.mark.parametrize("seed", [1519, 1001893, 1009739, 7001710, 9087004, 11003140])
def test_what_once_went_wrong_does_not(seed: int) -> None:
    """Found by seeds far from those above; what each was is in the commit that names it."""
    assert History(draw(seed)).run().violation is None


def test_the_same_seed_is_the_same_history() -> None:
    for seed in (3, 5, 8):
        first, second = (History(draw(seed)).run(transcript=True) for _ in range(2))
        assert first.transcript and first.transcript == second.transcript
    assert draw(3) != draw(4)


def test_a_plan_is_shortened_to_the_faults_that_matter() -> None:
    plan = replace(draw(1), faults=tuple(Fault(float(i), "crash", i % 2) for i in range(6)))
    assert [f.when for f in shrink(plan, lambda p: {2.0, 5.0} <= {f.when for f in p.faults}).faults] == [2.0, 5.0]


def test_a_violation_is_reported_and_ends_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(world: object) -> bool:
        raise Violation("on purpose")

    monkeypatch.setattr(history.invariants, "settled", never)
    assert History(draw(1)).run().violation == "on purpose"


def test_two_rounds_that_can_both_make_progress_are_noticed_when_the_workers_of_one_go_on() -> None:
    """P1 is checked after each event, not only at a start."""
    world = World(min_nodes=1, max_nodes=2)
    invariants.install(world)
    a, b = world.add(), world.add()
    assert world.run(10, world.running(a, b))
    a.freeze(workers_too=True)
    world.run(1)
    record = world.record
    assert record is not None
    a.working = replace(record, members=tuple(m for m in record.members if m.id == a.id))
    b.working = replace(record, round=2, members=tuple(m for m in record.members if m.id == b.id))  # a state that the rules never reach
    world.at(0.1, a.thaw)
    with pytest.raises(Violation, match="can both make progress"):
        world.run(1)


def test_some_histories_are_of_many_nodes_and_some_of_unlike_ones() -> None:
    plans = [draw(seed) for seed in range(500)]
    wide = [plan for plan in plans if plan.nodes > 5]
    assert {plan.nodes for plan in wide} >= {6, 7, 8, 9} and any(plan.sparse > 1 for plan in wide)
    assert any(len(set(plan.timings)) > 1 and len(set(plan.slots)) > 1 for plan in plans)

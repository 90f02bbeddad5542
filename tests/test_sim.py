"""Histories from seeds: the real machine in a world where nothing is reliable. ``python -m tests.sim`` runs many more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sim import history
from tests.sim.history import Fault, History, draw, shrink
from tests.sim.world import Violation

CHUNK = 125


@pytest.mark.parametrize("first", range(0, 2000, CHUNK))
def test_nothing_that_must_never_happen_happens(first: int) -> None:
    for seed in range(first, first + CHUNK):
        violation = History(draw(seed)).run().violation
        assert violation is None, f"{violation}; the whole story: python -m tests.sim --replay {seed}"


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

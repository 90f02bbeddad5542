"""All histories of small worlds, up to a number of states; ``python -m tests.sim.explore`` goes deeper."""

from __future__ import annotations

import pytest

from elastirun.rendezvous.view import View
from tests.sim.explore import WORLDS, explore


@pytest.mark.parametrize("name", WORLDS)
def test_nothing_that_must_never_happen_can_happen(name: str) -> None:
    found = explore(WORLDS[name](), seconds=1e9, most=1500)
    assert found.violation is None and found.states >= 1500


def test_it_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    world = WORLDS["a round of two runs"]()
    monkeypatch.setattr(View, "has_succeeded", lambda *_: True)
    violation = explore(world, seconds=1e9, most=20_000).violation
    assert violation and "success without" in violation and "after: " in violation


def test_a_state_seen_before_is_not_tried_again() -> None:
    world = WORLDS["a round of two runs"]()
    same = world.branch()
    assert world.key() == same.key()
    same.pass_time()
    assert world.key() != same.key() and world.t < same.t

"""All histories of small worlds, up to a number of states or of unusual events; ``python -m tests.sim.explore`` goes deeper."""

from __future__ import annotations

import pytest

from elastirun.rendezvous.succession import Moves
from elastirun.rendezvous.view import View
from tests.sim.explore import HOST_DIES, MESSAGES, WITH_SUCCESSION, WORLDS, deviate, explore


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


@pytest.mark.parametrize(("name", "among"), [*zip(WITH_SUCCESSION, [("",), MESSAGES], strict=True)])
def test_the_host_of_the_store_dies_at_every_point(name: str, among: tuple[str, ...]) -> None:
    """Told by its guard, with one more unusual event at every point: of two nodes any event, of three a message lost, late or overtaken."""
    found = deviate(WITH_SUCCESSION[name](), 1, HOST_DIES, among)
    assert found.violation is None and found.states > 5000


def test_a_job_that_ends_with_its_store_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    world = WITH_SUCCESSION["the store's host of two dies"]()
    monkeypatch.setattr(Moves, "take_over", lambda *_: None)
    violation = deviate(world, 0, HOST_DIES).violation
    assert violation and violation.startswith("the job ended with the store after: crash n0-0, ")


def test_a_world_shares_nothing_that_changes_with_its_copy() -> None:
    world = WITH_SUCCESSION["the store's host of three dies"]()
    world.fault("crash", world.nodes[0].id)
    before, other = world.key(), world.branch()
    while not other.nodes[1].starts[1:]:
        next(other.options())[1](other)
    assert world.key() == before

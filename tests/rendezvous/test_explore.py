"""All histories of small worlds, up to a number of states or of unusual events; ``python -m tests.sim.explore`` goes deeper."""

from __future__ import annotations

import pytest

from elastirun.rendezvous.failover import decide
from elastirun.rendezvous.peers.view import View
from tests.sim.explore import MESSAGES, WITH_SUCCESSION, WORLDS, deviate, explore


@pytest.mark.daily(4)
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


@pytest.mark.daily(4)
@pytest.mark.parametrize(
    ("name", "unusual", "among", "least"),
    [
        ("the store's host of two dies", 1, ("",), 9000),
        ("the store's host of three dies", 1, MESSAGES, 20_000),
        ("the store's host of three is cut off", 0, ("",), 2000),
    ],
)
def test_the_host_of_the_store_is_lost_at_every_point(name: str, unusual: int, among: tuple[str, ...], least: int) -> None:
    """Besides, one more ``unusual`` event at every point: of two nodes any one, of three a message that is lost, late or overtaken."""
    make, event = WITH_SUCCESSION[name]
    found = deviate(make(), unusual, event, among)
    assert found.violation is None and found.states >= least


def test_a_job_that_ends_with_its_store_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    make, event = WITH_SUCCESSION["the store's host of two dies"]
    world = make()
    monkeypatch.setattr(decide, "change", lambda *_: None)
    violation = deviate(world, 0, event).violation
    assert violation and violation.startswith("the job ended with the store after: crash n0-0, ")


def test_a_world_shares_nothing_that_changes_with_its_copy() -> None:
    world = WITH_SUCCESSION["the store's host of three dies"][0]()
    world.fault("crash", world.nodes[0].id)
    before, other = world.key(), world.branch()
    while not other.nodes[1].starts[1:]:
        next(other.options())[1](other)
    assert world.key() == before

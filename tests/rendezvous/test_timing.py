"""The order in which the durations must lie: every setting that the options allow keeps it, what breaks it is refused with a sentence."""

from __future__ import annotations

import pytest

from elastirun.errors import UsageError
from elastirun.rendezvous import timing
from elastirun.rendezvous.timing import EXCHANGE_LIMIT, Lease, Timing
from elastirun.rendezvous.wire.sync import CLEAR_LIMIT


@pytest.mark.parametrize("expire", [1.0, 2.0, 3.4, 5.0, 20.0, 365 * 86400.0])
@pytest.mark.parametrize("store_grace", [0.0, 60.0])
def test_what_the_options_allow_is_valid(expire: float, store_grace: float) -> None:
    assert refusal(Timing(expire=expire, beat=min(Timing.beat, expire / 4), store_grace=store_grace)) is None


def refusal(given: Timing) -> str | None:
    """Return the sentence with which durations are refused; None: they are not."""
    try:
        given.validate()
    except UsageError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"beat": 0.0}, "the time between two keep-alives (0 s) must be longer than 0 s; change --expire=5"),
        (
            {"beat": 4.0, "expire": 60.0},
            "the time between two keep-alives (4 s) must be shorter than the limit of an exchange with the store (3 s); change --expire=60",
        ),
        ({"beat": 2.5}, "2.5 times the time between two keep-alives (6.25 s) must be shorter than --expire (5 s); change --expire=5"),
        ({"expire": 1.0}, "2.5 times the time between two keep-alives (1.25 s) must be shorter than --expire (1 s); change --expire=1"),
    ],
)
def test_a_setting_that_breaks_the_order_is_refused_with_one_sentence(settings: dict[str, float], said: str) -> None:
    assert refusal(Timing(**settings)) == said


@pytest.mark.parametrize(
    ("factor", "value", "said"),
    [
        ("LONE_GRACE", 0.4, "the time in which a single-node round stops (5 s) must be shorter than --expire (5 s)"),
        ("LONE_LIMIT", 0.1, "(1 s) must be shorter than the time after which a single-node round stops (0.5 s)"),
        ("LEASE_TTL", 0.1, None),  # the shortest lease is long enough
        ("SURE", 0.2, "the time between two keep-alives at etcd (1 s) must be shorter than the safe part of a row's lease (0.6 s)"),
        ("CLOCK_DRIFT", 0.05, "--expire (5 s) must be shorter than the time in which a round that lost the store stops (3.5 s)"),
    ],
)
def test_a_factor_that_breaks_the_order_is_noticed(monkeypatch: pytest.MonkeyPatch, factor: str, value: float, said: str | None) -> None:
    monkeypatch.setattr(timing, factor, value)
    found = refusal(Timing())
    assert found is None if said is None else found is not None and said in found


@pytest.mark.parametrize("expire", [1.0, 2.0, 3.3, 5.0, 8.0, 60.0])
def test_a_row_vanishes_and_stays_away_for_no_less_than_expire(expire: float) -> None:
    lease = Lease.of(expire)
    assert lease.ttl + lease.absence >= expire and lease.absence > 0


def test_an_exchange_that_was_given_up_clears_nothing_any_more() -> None:
    assert CLEAR_LIMIT < EXCHANGE_LIMIT < Timing.expire

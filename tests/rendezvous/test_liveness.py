"""Who is silent: only durations on one's own clock, and only what one has seen oneself."""

from __future__ import annotations

import pytest

from elastirun.rendezvous.peers.liveness import Liveness, Newest, Since
from elastirun.rendezvous.timing import Lease
from elastirun.rendezvous.wire.records import NodeRow, Status


def silent_after(*reads: tuple[float, float, int], expire: float = 5.0) -> bool:
    """Whether node j is silent after reads of (started, received, seq)."""
    live = Liveness(expire)
    for started, received, seq in reads:
        live.observe({"j": seq}, started, received)
    return live.silent("j")


@pytest.mark.parametrize(
    ("reads", "expected"),
    [
        ([(0, 0, 1)], False),
        ([(0, 0, 1), (5, 5, 1)], False),  # exactly expire is not beyond it
        ([(0, 0, 1), (5.1, 5.1, 1)], True),
        ([(0, 0, 1), (5.1, 5.1, 2)], False),
        ([(0, 0, 1), (4, 9, 1)], False),  # the read came back late, but it started in time: my trouble, not j's
        ([(0, 4, 1), (5.1, 5.2, 1)], False),  # expire counts from when I received, not from when I asked
        ([(0, 4, 1), (9.1, 9.2, 1)], True),
        ([(0, 0, 1), (4, 4, 2), (8, 8, 2)], False),  # each change counts anew
        ([(0, 0, 9), (6, 6, 3)], True),  # an old row that is put back is no sign of life
        ([(0, 0, 1), (6, 6, 1), (7, 7, 2)], False),  # it is back
        ([(0, 0, 1), (6, 6, 1), (7, 7, 1)], True),
        ([(0, 0, -1), (5.1, 5.1, -1)], True),  # a row that is not there
        ([(0, 0, 1), (1, 1, -1), (5.0, 5.0, -1)], False),
        ([(0, 0, 1), (1, 1, -1), (5.1, 5.1, -1)], True),  # that it has vanished was no sign of life
        ([(0, 0, 1), (6, 6, 1), (7, 7, -1)], True),
        ([(0, 0, 1), (1, 1, -1), (5, 5, 1), (9, 9, 1)], True),  # nor that it is there again as it was
        ([(0, 0, 1), (1, 1, -1), (5, 5, 2), (9, 9, 2)], False),  # but written anew it is one
    ],
)
def test_silence_is_a_read_started_more_than_expire_after_the_last_change_was_received(
    reads: list[tuple[float, float, int]], expected: bool
) -> None:
    assert silent_after(*reads) is expected
    offset = [(started - 1e6, received - 1e6, seq) for started, received, seq in reads]
    assert silent_after(*offset) is expected, "no absolute time counts"


def test_an_excuse_starts_everybodys_time_anew_and_revives_nobody() -> None:
    live = Liveness(5.0)
    live.observe({"dead": 1, "quiet": 1}, 0, 0)
    live.observe({"dead": 1, "quiet": 2}, 6, 6)
    live.excuse(20.0)
    live.observe({"dead": 1, "quiet": 2}, 24, 24)
    assert live.silent("dead") and not live.silent("quiet")
    live.observe({"dead": 2, "quiet": 2}, 25.1, 25.1)
    assert live.silent("quiet") and not live.silent("dead")


def test_an_excuse_may_reach_beyond_a_change_and_is_not_taken_back() -> None:
    live = Liveness(5.0)
    live.observe({"a": 1}, 0, 0)
    live.excuse(20.0)
    live.excuse(12.0)
    live.observe({"a": 2}, 15, 15)  # written before the trouble, or after it: who knows
    assert live.quiet("a", 18.0) == 0.0 and live.quiet("a", 23.0) == 3.0
    live.observe({"a": 2}, 25, 25)
    assert not live.silent("a")
    live.observe({"a": 2}, 25.1, 25.1)
    assert live.silent("a")


def test_those_never_seen_are_not_silent_and_the_forgotten_begin_anew() -> None:
    live = Liveness(5.0)
    assert not live.silent("stranger")
    live.observe({"a": 1, "b": 1}, 0, 0)
    live.observe({"a": 1, "b": 1}, 6, 6)
    live.forget_unless({"b"}.__contains__)
    assert not live.silent("a") and live.silent("b")
    live.observe({"a": 1}, 7, 7)
    assert not live.silent("a")


@pytest.mark.parametrize(
    ("seqs", "proven"),
    [
        ([7], False),  # a row that was there before us may be a dead node's
        ([7, 7], False),
        ([7, 8], True),
        ([7, 8, 8], True),
        ([-1, 1], True),  # it has come before our eyes
        ([-1, 0], True),
        ([-1], False),
        ([7, -1], False),  # its row has vanished: no sign of life
        ([-1, -1], False),
    ],
)
def test_only_a_change_proves_that_a_node_lives(seqs: list[int], proven: bool) -> None:
    live = Liveness(5.0)
    for i, seq in enumerate(seqs):
        live.observe({"j": seq}, i, i)
    assert live.proven("j") is proven
    since = next(i for i, seq in enumerate(seqs) if set(seqs[i:]) <= {seq, -1})
    assert live.undecided("j", since + 0.9, 1.0) is not proven, "it has not been watched for long enough"
    assert not live.undecided("j", since + 1.0, 1.0)
    assert not live.proven("stranger") and not live.undecided("stranger", 0.0, 1.0)


def test_memory_does_not_grow_with_the_agents_that_ever_were() -> None:
    live = Liveness(5.0)
    for i in range(1000):
        live.observe({f"n{i}": 1}, i, i)
        live.forget_unless({f"n{i}"}.__contains__)
    assert len(live._seen) == 1


def test_old_rows_are_left_out_and_who_has_left_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    newest = Newest()

    def seen(seq: int, status: Status = Status.JOINING, i: str = "a") -> bool:
        return i in newest.without_old({i: NodeRow(i, i, "", 0, 1, seq=seq, status=status)}, "me")[0]

    assert [seen(seq) for seq in (3, 3, 2, 4, 3, 4)] == [True, True, False, True, False, True]
    assert seen(5, Status.LEFT) and seen(6, Status.LEFT) and not seen(7) and not seen(5, Status.LEFT)
    assert seen(9, i="me") and seen(8, i="me"), "what stands in the own row is written over, not left out"
    monkeypatch.setattr(Newest, "MOST", 10)
    for n in range(1000):
        seen(1, i=f"n{n}")
    assert len(newest._newest) == 10


def test_since_is_when_it_became_what_it_is() -> None:
    since = Since(0.0)
    assert [since.see(what, now) for now, what in enumerate("aabbba", 1)] == [1, 1, 3, 3, 3, 6]
    assert since.since == 6


def test_who_is_not_read_is_not_called_silent() -> None:
    live = Liveness(5.0)
    live.observe({"a": 1, "b": 1}, 0, 0)
    live.observe({"a": 1, "b": 1}, 6, 6)
    assert live.silent("a") and live.silent("b")
    live.observe({"b": 1}, 7, 7)
    assert not live.silent("a") and live.silent("b")


def absent_after(*reads: tuple[float, int]) -> bool:
    """Whether node j is silent after looks at (when, seq) in a store with leases of 3 s; -1: its row is away."""
    live = Liveness(5.0, Lease.of(5.0))
    for when, seq in reads:
        live.observe({"j": seq}, when, when)
    return live.silent("j")


@pytest.mark.parametrize(
    ("reads", "expected"),
    [
        ([(0, 1), (0.5, -1), (2.5, -1)], False),  # its lease was over at 0.5, and it is away for 2 s: not longer
        ([(0, 1), (0.5, -1), (2.6, -1)], True),
        ([(0, 1), (9, -1), (10.9, -1)], False),  # nobody knows since when it is away
        ([(0, 1), (9, -1), (11.1, -1)], True),
        ([(0, 1), (0.5, -1), (5.9, -1)], False),  # it may have been there from 0.6 to 5.8
        ([(0, 1), (0.5, -1), (5.9, -1), (7.8, -1)], False),
        ([(0, 1), (0.5, -1), (5.9, -1), (8.0, -1)], True),
        ([(0, 1), (0.5, -1), (2.6, -1), (2.7, 1)], False),  # it is back
    ],
)
def test_at_a_store_with_leases_a_row_must_stay_away_as_long_as_somebody_looks(reads: list[tuple[float, int]], expected: bool) -> None:
    assert absent_after(*reads) is expected

"""Changes of a round record: what is written, and that nothing else changes."""

from __future__ import annotations

import pytest

from elastirun.rendezvous import updates
from elastirun.rendezvous.wire.records import Broken, Cause, Status, Verdict
from tests.rendezvous.test_formation import after, row, rows, view


@pytest.mark.parametrize(
    ("known", "silent", "expected"),
    [
        ((), "", None),
        ((), "c", ("c",)),
        (("c",), "c", None),  # nothing new
        (("c",), "bc", ("c", "b")),
        (("c",), "", None),  # what one has found is not taken back
        ((), "x", None),  # no member
    ],
)
def test_losses_are_shared_once_each(known: tuple[str, ...], silent: str, expected: tuple[str, ...] | None) -> None:
    record = after("abc", broken=Broken(Cause.LOST, "r", "a", known))
    shared = updates.share_losses(view(record, silent=silent))
    assert (shared and shared.broken and shared.broken.lost) == expected
    if shared:
        assert (shared.version, shared.round, shared.members) == (record.version + 1, 1, record.members)
        assert shared.broken and shared.broken.reason == "r"
    assert updates.share_losses(view(after("abc", None), silent="abc")) is None, "a round that is on has no losses"


def test_what_is_written_raises_the_version_and_nothing_else() -> None:
    record = after("ab", None)
    broken = updates.break_up(record, Cause.LEAVE, "bye\n" + "x" * 5000, "a", 0.0)
    assert broken.broken and (broken.version, broken.round, broken.members) == (4, 1, record.members)
    assert broken.broken.reason.startswith("bye xxx") and len(broken.broken.reason) == 1024, "fit to be stored and shown"
    succeeded = updates.succeed(record, "b")
    closed = succeeded.closed
    assert (succeeded.version, succeeded.round, succeeded.members, succeeded.broken) == (4, 1, record.members, None)
    assert closed and (closed.verdict, closed.by) == (Verdict.SUCCEEDED, "b")
    assert closed.reason == "all 4 workers of round 1 succeeded"


def test_of_many_that_leave_at_once_one_names_the_others() -> None:
    record = after("abcd", broken=Broken(Cause.LEAVE, "r", "a", ended=("a",)), host="d")
    marked = updates.mark_over(record, row("b", done=1, status=Status.LEFT), {"a", "b", "c", "x"})
    assert marked is not None and marked.broken and marked.broken.ended == ("a", "b", "c")


@pytest.mark.parametrize(("host", "ended"), [("d", ("a", "b")), ("", None)])
def test_after_the_first_mark_a_hosted_record_names_the_next_that_leaves_too(host: str, ended: tuple[str, ...] | None) -> None:
    """Its row is gone with the host's store. In a store that lasts one mark says for all that the round is over."""
    record = after("abcd", broken=Broken(Cause.LEAVE, "r", "a", over=True, ended=("a",) if host else ()), host=host)
    marked = updates.mark_over(record, row("b", done=1, status=Status.LEFT))
    assert (marked and marked.broken and marked.broken.ended) == ended


def test_whose_end_the_record_names_is_no_candidate() -> None:
    record = after("abc", broken=Broken(Cause.LEAVE, "r", "a", ended=("b",)))
    present = rows(row(i, done=1) for i in "abc")
    assert [found.id for found in view(record, present).candidates()] == ["a", "c"]

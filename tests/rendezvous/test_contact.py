"""When a node whose store is away tries again, and when a node that waits says why."""

from __future__ import annotations

from elastirun.rendezvous.peers.contact import Contact
from elastirun.rendezvous.progress import Wait
from elastirun.rendezvous.timing import EXCHANGE_LIMIT, Timing

BEAT, GRACE = 0.5, 20.0


def attempts(contact: Contact, until: float) -> list[float]:
    """Return when the exchanges begin that all fail after ``EXCHANGE_LIMIT``, the first at 0."""
    found = [0.0]
    while True:
        failed_at = found[-1] + EXCHANGE_LIMIT
        contact = contact.failed(failed_at, "no answer", False)
        again = contact.retry_at(failed_at, BEAT, GRACE)
        if again >= until:
            return found
        found.append(again)


def test_the_time_between_two_attempts_doubles_twice() -> None:
    began = attempts(Contact(), 40.0)
    pauses = [later - earlier - EXCHANGE_LIMIT for earlier, later in zip(began, began[1:], strict=False)]
    assert pauses[:5] == [BEAT, 2 * BEAT, 4 * BEAT, 4 * BEAT, 4 * BEAT]


def test_a_store_that_is_back_in_time_is_found_before_the_grace_is_over() -> None:
    """Whenever the contact was lost, the last attempt begins less than one that fails and a beat before the node gives up."""
    for tenths in range(60):
        contact = Contact().answered(-tenths / 10, -tenths / 10)
        over = GRACE - tenths / 10
        assert attempts(contact, over)[-1] > over - EXCHANGE_LIMIT - BEAT - 1e-9


def test_several_slow_answers_in_a_row_are_worth_a_line() -> None:
    contact = Contact()
    for took, slow in ((2.0, 1), (2.0, 2), (1.0, 0), (2.0, 1), (2.0, 2), (2.0, 3), (2.0, 4), (2.0, 4)):
        contact = contact.answered(10.0, 10.0 - took, Timing().slow_answer)
        assert contact.slow == slow


def test_the_same_reason_to_wait_is_said_ever_less_often_and_a_new_one_within_ten_seconds() -> None:
    wait = Wait(0.0)
    assert [t for t in range(265) if wait.line("a spare", float(t), False)] == [10, 20, 40, 80, 140, 200, 260]
    assert wait.line("a spare, and more", 261.0, True) == "a spare, and more"
    assert [t for t in range(262, 340) if wait.line("the store is away", float(t), False)] == [271, 281, 301]
    assert [t for t in range(302, 340) if wait.line("a spare", float(t), False)] == [311, 321]

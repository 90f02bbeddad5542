"""This node's contact with the store: when the last exchange succeeded, why and how often exchanges have failed since, when to retry."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from elastirun.rendezvous.timing import EXCHANGE_LIMIT, Timing

SLOW_IN_A_ROW = 4  # slow answers that are worth a line for people: a machine that stood still for a moment has fewer
MOST_DOUBLINGS = 2  # of the time between two exchanges, as long as they fail: the store may be overloaded, but is wanted back soon


@dataclass(frozen=True)
class Contact:
    """The state of the contact with the store. Times in seconds of this node's clock."""

    last: float | None = None  # when the last answer came; None: the store of this job has never answered
    trouble: str = ""  # why the last exchange failed; empty: it did not
    failures: int = 0  # exchanges in a row that failed, up to ``MOST_DOUBLINGS`` + 1
    took: float = 0.0  # seconds that the last answered exchange took
    slow: int = 0  # answers in a row that took longer than ``Timing.slow_answer``, up to ``SLOW_IN_A_ROW``
    unreadable_since: float | None = None  # since when a newcomer's exchanges all failed because it cannot read the round record

    def answered(self, now: float, started: float, slow_answer: float = math.inf) -> Contact:
        """Return the state after an answer to an exchange that began at ``started``. ``slow_answer``: see ``Timing``."""
        slow = min(self.slow + 1, SLOW_IN_A_ROW) if now - started > slow_answer else 0
        return Contact(last=now, took=now - started, slow=slow)

    def failed(self, now: float, why: str, unreadable: bool) -> Contact:
        """Return the state after a failure."""
        since = self.unreadable_since or now if unreadable else None
        return replace(self, trouble=why, failures=min(self.failures + 1, MOST_DOUBLINGS + 1), unreadable_since=since)

    def suspended(self, now: float, seconds: float) -> Contact:
        """Return the state after this agent did not run for ``seconds``, which do not count as time without contact."""
        return self if self.last is None else replace(self, last=min(now, self.last + seconds))

    def retry_at(self, now: float, beat: float, store_grace: float) -> float:
        """Return when to try again after a failure: one beat later, then two, then four.

        The last attempt before this node gives up, ``store_grace`` after the last answer, begins early enough for its answer.
        """
        backoff = beat * 2.0 ** (self.failures - 1)
        if self.last is None:
            return now + backoff
        return min(now + backoff, max(now + beat, self.last + store_grace - EXCHANGE_LIMIT))


def slow_store(timing: Timing) -> str:
    """Return a line for people about a store that answers so slowly that nodes may be taken for lost."""
    slow = f"exchanges with the rendezvous store take more than {timing.slow_answer:.1f} s: the network is slow, or a machine is busy"
    return f"{slow}; --expire={4 * timing.expire:g} on every node gives nodes more time until they count as lost (now {timing.expire:g} s)"

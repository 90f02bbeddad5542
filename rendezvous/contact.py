"""This node's contact with the store: when the last exchange succeeded, why and how often exchanges have failed since, when to retry."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastirun.rendezvous.timing import EXCHANGE_LIMIT

MOST_DOUBLINGS = 2  # of the time between two exchanges, as long as they fail: the store may be overloaded, but is wanted back soon


@dataclass(frozen=True)
class Contact:
    """The state of the contact with the store. Times in seconds of this node's clock."""

    last: float | None = None  # when the last answer came; None: the store of this job has never answered
    trouble: str = ""  # why the last exchange failed; empty: it did not
    failures: int = 0  # exchanges in a row that failed, up to ``MOST_DOUBLINGS`` + 1
    took: float = 0.0  # seconds that the last answered exchange took
    unreadable_since: float | None = None  # since when a newcomer's exchanges all failed because it cannot read the round record

    def answered(self, now: float, started: float) -> Contact:
        """Return the state after an answer to an exchange that began at ``started``."""
        return Contact(last=now, took=now - started)

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

"""The protocol of a store: a small map from keys to bytes with compare-and-set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol


class Store(Protocol):
    """A connection to a store. Used by one thread at a time.

    Every operation returns an answer or raises ``StoreError``. After an error it is unknown whether a write was applied, and the caller
    gives the connection up. Keys are ASCII without line breaks, and values are not empty. Other clients of the store may have put any
    bytes there.

    In a store that outlives its jobs a row has a lease, and vanishes when nobody calls ``keep_alive`` for its key: there, silence is a row
    that is gone. In one that ends with its host, silence is a row that does not change.
    """

    hosting: bool
    """Whether this process serves the store, which then ends with it."""

    def get(self, keys: Iterable[str]) -> dict[str, bytes]:
        """Return the values of those ``keys`` that exist."""

    def has(self, key: str) -> bool:
        """Return whether ``key`` exists, without its value."""

    def put_if(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        """Set ``key`` to ``value`` if it holds ``expected`` (None: if it does not exist).

        Return the key's value afterwards: ``value`` when it was set, else the other value (None: no such key).
        """

    def put_if_and_get(self, key: str, expected: bytes | None, value: bytes, keys: Sequence[str]) -> tuple[bytes | None, dict[str, bytes]]:
        """Do what ``put_if`` does, then what ``get`` does, in one round trip where the store can. Others may write in between."""
        return self.put_if(key, expected, value), self.get(keys) if keys else {}

    def ask(self, key: str, expected: bytes | None, value: bytes, keys: Sequence[str]) -> int | None:
        """Begin ``put_if_and_get`` without waiting. Return the descriptor that is readable when ``answer`` may have something.

        None: nothing was begun, because that would have to wait. Until the answer is complete, nothing else is asked.
        """
        return None

    def answer(self) -> tuple[bytes | None, dict[str, bytes]] | None:
        """Return the answer to what was asked, without waiting; None: it is not complete yet.

        ``LargeAnswer``: it cannot be had so. Then this connection is of no use any more.
        """
        return None

    def keep_alive(self, key: str) -> bool:
        """Renew the lease under which this agent wrote ``key``, where a store has leases.

        False: the value may be gone before the end of another lease, so the caller should write it again.
        """

    def delete(self, key: str) -> None:
        """Remove ``key`` if it exists."""

    def under(self, prefix: str) -> dict[str, bytes]:
        """Return every key under ``prefix`` with its value. A key that is being created at this moment may be missing."""

    def watch(self, key: str, changed: Callable[[], None]) -> None:
        """Call ``changed`` when ``key`` has changed, until ``close``. A store that cannot push changes never calls it.

        ``changed`` is called from any thread, perhaps more often than needed. It must neither block nor raise.
        """

    def close(self) -> None:
        """Close the connection. Never raises."""

"""What a store is: a small map from keys to bytes with compare-and-set."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol


class Store(Protocol):
    """A connection to a store. Used by one thread at a time.

    Every operation either answers or raises ``StoreError``; after an error it is not known whether a write was applied,
    and the connection is not used again. Keys are ASCII without line breaks; values are not empty. What foreign hands put
    there may be any bytes.
    """

    hosting: bool
    """This process serves the store: it goes when we go."""

    def get(self, keys: Iterable[str]) -> dict[str, bytes]:
        """The values of those of ``keys`` that exist."""

    def put_if(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        """Set ``key`` to ``value`` if it holds ``expected`` (None: if it does not exist).

        Returns what the key holds afterwards: ``value`` when it was set, else the other value (None: no such key).
        """

    def keep_alive(self, key: str) -> bool:
        """Renew the lease under which this agent wrote ``key``, where a store has leases.

        False: it is not known that the value is there for the whole time of a lease from now on, and should be written again.
        """

    def delete(self, key: str) -> None:
        """What is under ``key``, if anything, is not needed any more."""

    def under(self, prefix: str) -> dict[str, bytes]:
        """Every key under ``prefix`` with its value. A key that is being created at this moment may be missing."""

    def watch(self, key: str, changed: Callable[[], None]) -> None:
        """Call ``changed`` when ``key`` has changed, until ``close``; a store that has no way to know never does.

        It is called from any thread, perhaps more often than needed, and must neither wait nor raise.
        """

    def close(self) -> None:
        """Give the connection up. Never raises."""

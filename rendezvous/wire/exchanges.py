"""One exchange with the store at a time, given up when it takes too long. No I/O here: a subclass executes the exchanges.

Each operation of an exchange has the same limit. An exchange with an operation that is not answered within the limit is abandoned
together with its connection, and a fresh connection takes over. What the abandoned connection still writes is harmless, because every
write is a compare-and-set. What it still answers reaches nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from elastirun.errors import ElastirunError, StoreMoved, StoreRefused, UnreadableMembers, UnreadableRound
from elastirun.rendezvous.wire.actions import Sync
from elastirun.rendezvous.wire.codec import clip
from elastirun.rendezvous.wire.events import Changed, Synced, SyncFailed
from elastirun.rendezvous.wire.records import Place
from elastirun.rendezvous.wire.sync import SyncProtocol

CONNECT_LIMIT = 20.0  # seconds to connect; names are resolved, torch is imported, the store is served in that time
CHECK_AGAIN = 1.0  # seconds; the limit of the connection may by then have become that of the exchange

Answer = Synced | SyncFailed | Changed


@dataclass(eq=False)
class Connection:
    """A connection to the store with its ``protocol``. Abandoned as a whole."""

    protocol: SyncProtocol
    answers: deque[Answer] = field(default_factory=deque)
    at: Place | None = None  # the store that it leads to, see ``Sync.at``
    connected: bool = False
    deadline: float | None = None  # of the operation under way, or of the connection that is being made for it


C = TypeVar("C", bound=Connection)


class Exchanges(Generic[C]):
    """Runs each exchange over a connection that ``new`` makes. A subclass has ``_execute``, ``_abandon`` and ``fileno``.

    ``now`` is the clock. Limits in seconds: ``time_limit`` for one operation, ``connect_limit`` for the connection that the exchange may
    need first.
    """

    def __init__(
        self, new: Callable[[SyncProtocol], C], protocol: SyncProtocol, now: Callable[[], float], time_limit: float, connect_limit: float
    ) -> None:
        self._new = new
        self._now = now
        self._time_limit = time_limit
        self._connect_limit = connect_limit
        self._pending = False
        self._connection = new(protocol)

    def _execute(self, connection: C, sync: Sync) -> None:
        """Have the exchange executed, without waiting: ``connection`` gets its ``deadline``, and in the end one answer."""
        raise NotImplementedError

    def _abandon(self, connection: C) -> None:
        """Close the connection once its exchange is done, if it ever is."""

    def fileno(self) -> int:
        """Return the descriptor that is readable when ``answers`` has something."""
        raise NotImplementedError

    def submit(self, sync: Sync) -> None:
        if sync.at != self._connection.at:
            self._connect_to(sync.at)
        self._pending = True
        self._execute(self._connection, sync)

    def answers(self) -> list[Answer]:
        """Return what has come back since the last call, without waiting."""
        found: list[Answer] = []
        while self._connection.answers:
            found.append(self._connection.answers.popleft())
            self._pending = self._pending and isinstance(found[-1], Changed)
        return found

    @property
    def deadline(self) -> float | None:
        """The time at which ``give_up`` is to be called; None while nothing is under way."""
        if not self._pending:
            return None
        check_again = self._now() + CHECK_AGAIN
        return min(self._connection.deadline or check_again, check_again)

    def give_up(self, now: float) -> list[SyncFailed]:
        """Abandon the exchange under way if it has exceeded its limit."""
        deadline = self._connection.deadline
        if not self._pending or deadline is None or now < deadline:
            return []
        why = f"no answer for {self._time_limit:g} s" if self._connection.connected else f"no connection within {self._connect_limit:g} s"
        self.reconnect()
        self._pending = False
        return [SyncFailed(now, why)]

    def reconnect(self) -> None:
        """Abandon the connection, so that the next exchange uses a fresh one."""
        self._connect_to(self._connection.at)

    def _connect_to(self, at: Place | None) -> None:
        self._abandon(self._connection)
        self._connection = self._new(self._connection.protocol.fresh(at.name if at else ""))
        self._connection.at = at

    def close(self) -> None:
        """Close the connection once its exchange is done."""
        self._abandon(self._connection)


def failure(error: Exception, now: float) -> SyncFailed:
    """Return the answer to an exchange that has failed with ``error``, whatever it was."""
    why = str(error) if isinstance(error, ElastirunError) else f"{type(error).__name__}: {error}"
    moved = error.place if isinstance(error, StoreMoved) else None
    refused, unreadable, overtaken = (isinstance(error, kind) for kind in (StoreRefused, UnreadableRound, UnreadableMembers))
    return SyncFailed(now, clip(why), refused, unreadable, moved, overtaken)

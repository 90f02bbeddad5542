"""A listening socket in the agent's loop, which pauses while the process has no descriptor left for a connection."""

from __future__ import annotations

import math
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from elastirun import clock

RETRY = 1.0  # seconds until connections are accepted again after no descriptor was left for one


@dataclass(eq=False)
class Accepting:
    """Passes each new connection of ``listening`` to ``take``. Owns the socket, which must not block.

    ``make_room``: called when no descriptor is left; returns whether it has closed a connection. If not, the socket, which would be
    readable for ever, is taken out of the selector for RETRY seconds.
    """

    _listening: socket.socket
    _selector: selectors.BaseSelector
    _take: Callable[[socket.socket], None]
    _make_room: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self._accept_at = math.inf  # when to accept again, on ``elastirun.clock``; infinity: the socket is registered
        self._selector.register(self._listening, selectors.EVENT_READ, self._accept)

    def tick(self, now: float) -> float:
        """Accept connections again when it is time. Returns when to be called next, on ``elastirun.clock``; infinity: not by time."""
        if now >= self._accept_at:
            self._accept_at = math.inf
            self._selector.register(self._listening, selectors.EVENT_READ, self._accept)
        return self._accept_at

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._accept_at = math.inf
        with suppress(KeyError, ValueError):  # not registered, or closed before
            self._selector.unregister(self._listening)
        self._listening.close()

    def _accept(self, mask: int) -> None:
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # no descriptor is left
            if not self._make_room():
                self._selector.unregister(self._listening)
                self._accept_at = clock.now() + RETRY
            return
        self._take(connection)

"""A connection to a TCPStore without torch's client: reads values, replaces them, and creates a few.

For the guard (``agent/processes/guard.py``) and ``elastirun status``, which must not load torch and speak to the store for a moment only.
The agent's connection adds what only an agent writes (tcp.py).
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from elastirun import clock
from elastirun.errors import StoreError
from elastirun.rendezvous.stores import tcp_wire
from elastirun.rendezvous.stores.tcp_index import index_of, keys_in
from elastirun.rendezvous.stores.tcp_watch import WATCHED, mark

ANSWER_LIMIT = 3.0  # seconds to connect, and for the answers to what is sent at once
AT_ONCE = 32_768  # bytes of requests sent before their answers are read, some 250 keys of ours: they fit into a connection's buffers


class PlainTcpStore:
    """A connection to the TCPStore at ``address:port``. Has the operations of ``stores.base.Store`` but those that wait.

    ``limit``: seconds to connect, and for the answers to what is sent at once. ``creates``: what the keys begin with that may be created.
    Such a key is not listed: who reads it must know its name. Errors: ``StoreError``.
    """

    hosting = False

    def __init__(self, address: str, port: int, limit: float | None = None, creates: tuple[str, ...] = ()) -> None:
        self._creates = creates
        self._limit = limit or ANSWER_LIMIT
        nonce = os.urandom(4)
        try:
            self._socket = socket.create_connection((address, port), self._limit)
        except (OSError, ValueError) as error:  # ValueError: not a host name (a label too long, a NUL)
            raise StoreError(f"cannot connect to the store at {address}:{port}: {error}") from None
        try:
            self._send(tcp_wire.hello(nonce))
            if self._received(lambda: tcp_wire.receive(self._socket, 4, self._until)) != nonce:
                raise StoreError(f"what listens at {address}:{port} is no TCPStore")
        except StoreError:
            self.close()
            raise

    def get(self, keys: Iterable[str]) -> dict[str, bytes]:
        wanted, never, found = deque(keys), os.urandom(16), {}
        while wanted:
            some = [wanted.popleft()]
            requests = tcp_wire.compare_set(some[0], never, never)
            while wanted and len(requests) + len(more := tcp_wire.compare_set(wanted[0], never, never)) <= AT_ONCE:
                some.append(wanted.popleft())
                requests += more
            self._send(requests)
            found.update({key: value for key in some if (value := self._value()) != never})
        return found

    def under(self, prefix: str) -> dict[str, bytes]:
        """See ``Store.under``. Only keys that a ``TcpStore`` has written are listed."""
        index = index_of(prefix)
        return self.get(sorted(keys_in(self.get([index]).get(index, b""), prefix)))

    def put_if(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        """Replace the value ``expected`` of ``key``, as in ``Store.put_if``. A guard creates no key but those in ``creates``."""
        if not expected:
            return self._compare_set(key, b"", value) if key.startswith(self._creates) else self.get([key]).get(key)
        now = self._compare_set(key, expected, value)
        if now == expected != value:  # a TCPStore answers with the expectation when the key is missing
            return self.get([key]).get(key)
        if now == value and key.endswith(WATCHED):
            self._send(tcp_wire.put(mark(key, expected), b"1"))
        return now

    def delete(self, key: str) -> None:
        """Do nothing: what is left over is deleted by the next agent that replaces it."""

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()

    def _compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        """Return the value of ``key`` after it was set to ``value`` if it held ``expected``; ``expected`` if there is no such key."""
        self._send(tcp_wire.compare_set(key, expected, value))
        return self._value()

    def _delete_key(self, key: str) -> None:
        self._send(tcp_wire.delete_key(key))
        self._received(lambda: tcp_wire.receive(self._socket, 8, self._until))  # the number of keys that were deleted

    def _send(self, data: bytes) -> None:
        self._until = clock.now() + self._limit + len(data) / tcp_wire.SLOWEST
        self._large = tcp_wire.LARGEST  # bytes of the answers that are given more time
        try:
            self._socket.settimeout(self._limit)
            self._socket.sendall(data)
        except OSError as error:
            raise StoreError(f"the store does not take a request: {error}") from None

    def _value(self) -> bytes:
        value = self._received(lambda: tcp_wire.receive_value(self._socket, self._until))
        more = min(len(value), self._large)
        self._large -= more
        self._until += more / tcp_wire.SLOWEST
        return value

    def _received(self, receive: Callable[[], bytes]) -> bytes:
        try:
            return receive()
        except (OSError, ValueError) as error:
            raise StoreError(f"no answer of the store: {error}") from None

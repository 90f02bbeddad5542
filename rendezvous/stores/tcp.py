"""The store over torch's ``TCPStore``.

How its operations behave (torch 2.13, measured), and what follows:

- ``set`` and ``append`` are not acknowledged, but ``compare_set`` is. So only ``compare_set`` writes values.
- ``get`` of a missing key blocks, and beyond its timeout when the server is silent. ``compare_set`` with an expectation that never holds
  answers at once with the present value. So that is how one key is read.
- Connecting to a stopped server blocks without limit: the server's kernel accepts, and nobody answers.
  Both sides also look up the other's name in DNS, for a log line, which takes seconds when a name server is silent.
- ``list_keys`` is slow with many keys. So an index holds the keys under each prefix, one line each, and ``append`` extends it without
  conflict. A key is written before it is indexed, so every indexed key exists, and ``multi_get`` of indexed keys does not block.
- The server listens on every interface unless it gets a bound socket.
- It pushes nothing by itself, but a client can wait for a key. So whoever replaces a value that others watch creates a key that says so.
  The waiting is in tcp_watch.py, the index in tcp_index.py.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from elastirun import clock
from elastirun.errors import StoreError
from elastirun.rendezvous.stores.tcp_index import index_of, is_listed, keys_in, line
from elastirun.rendezvous.stores.tcp_plain import PlainTcpStore
from elastirun.rendezvous.stores.tcp_watch import WATCHED, TcpWatch, mark
from elastirun.rendezvous.stores.torch_class import tcp_store_class

MISSING = secrets.token_hex(16)  # a random value that no key ever holds
ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # the address at which a store bound to every interface is reached from this machine
MANY = 16  # keys; so many are not read one by one. The owner of a store that takes over reads the votes of all nodes
KEPT_MARKS = 4  # of one connection; a watch waits for the newest, and a slow one soon reads the value again
CONNECT_TIMEOUT = 15.0  # seconds, for TCPStore's handshake and its DNS queries; the caller has probed the address before


def serve(listening: socket.socket) -> Any:
    """Serve a TCPStore on a bound, listening socket, which the server then owns. The server ends when the returned object is deleted."""
    host, port = listening.getsockname()[:2]
    store_class = tcp_store_class()
    return store_class(
        ANY.get(host, host),
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=CONNECT_TIMEOUT),
        master_listen_fd=listening.detach(),
    )


class ServedStore:
    """A TCPStore that this process serves on a bound, listening socket, until ``close``. Errors: ``StoreError``."""

    def __init__(self, listening: socket.socket) -> None:
        host, self.port = listening.getsockname()[:2]
        self._address = ANY.get(host, host)
        with _translated(f"cannot serve the store on {host}:{self.port}"):
            self._server = serve(listening)

    def connect(self) -> TcpStore:
        if self._server is None:
            raise StoreError("this agent has ended its store")
        return TcpStore(self._address, self.port, hosting=True)

    def close(self) -> None:
        """End the store, with the connections of its clients."""
        self._server = None


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Raise torch's errors as ``StoreError``. ``what``: the operation, for the message."""
    try:
        yield
    except (RuntimeError, OSError, ValueError) as error:  # torch's Dist*Error are RuntimeErrors
        raise StoreError(f"{what}: {str(error).splitlines()[0][:200] if str(error) else type(error).__name__}") from None


class TcpStore:
    """A connection to the TCPStore at ``address:port``. ``hosting``: this process serves that store."""

    def __init__(self, address: str, port: int, hosting: bool = False) -> None:
        self.hosting = hosting
        self._where = (address, port)
        with _translated(f"cannot use the store at {address}:{port}"):
            store_class = tcp_store_class()
            timeout = timedelta(seconds=CONNECT_TIMEOUT)
            self._store = store_class(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
        self._known: set[str] = set()  # keys that existed when they were read; multi_get does not block on them
        self._indexed: set[str] = set()  # keys that this connection has put into the index
        self._marks: deque[str] = deque()  # that this connection has created, the newest at the end
        self._watches: list[TcpWatch] = []
        self._side: PlainTcpStore | None = None  # a connection to read many keys at once, for which torch's client has no call

    def get(self, keys: Iterable[str]) -> dict[str, bytes]:
        with _translated("get"):
            wanted = list(keys)
            found = self._read_unknown([key for key in wanted if key not in self._known])
            known = [key for key in wanted if key in self._known and key not in found]
            found.update(self._read(known))
            self._known.update(key for key in found if is_listed(key))
            return found

    def put_if(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        with _translated("put"):
            now: bytes = self._store.compare_set(key, b"" if expected is None else expected, value)
            if now == expected:  # TCPStore answers with the expectation when the key is missing
                return self._read_one(key)
            # Once per connection, and also for another's value: that client's append may have been lost.
            if key not in self._indexed and is_listed(key):
                self._store.append(index_of(key), line(key))
                self._indexed.add(key)
            if now == value:
                self._mark_replaced(key, expected or b"")
            return now

    def keep_alive(self, key: str) -> bool:
        return False  # there are no leases

    def delete(self, key: str) -> None:
        with _translated("delete"):
            self._known.discard(key)
            value = self._read_one(key) if key.endswith(WATCHED) else None
            self._store.delete_key(key)
            if value is not None:
                self._mark_replaced(key, value)

    def clear(self, keep: str, limit: float) -> bool:
        """Delete every key that does not begin with ``keep``. Return False when that takes longer than ``limit`` seconds."""
        until = clock.now() + limit
        with _translated("clear"):
            for key in self._store.list_keys():
                if clock.now() > until:
                    return False
                if not key.startswith(keep):
                    self._store.delete_key(key)
        return clock.now() <= until

    def under(self, prefix: str) -> dict[str, bytes]:
        """See ``Store.under``. A prefix that ends with ``tcp_index.UNLISTED`` has no keys here."""
        with _translated("list"):
            keys = keys_in(self._read_one(index_of(prefix)) or b"", prefix)
            # A key of ours that is missing from the index was overwritten there; the next put appends it again.
            self._indexed -= {key for key in self._indexed if key.startswith(prefix)} - keys
            return self._read(sorted(keys))

    def watch(self, key: str, changed: Callable[[], None]) -> None:
        """See ``Store.watch``. ``changed`` is called from the watch's thread, the first time when the watch begins.

        Only a key that ends with WATCHED can be watched. A change by somebody else's client is noticed after a minute, and a value that
        the key had before may be noticed as late.
        """
        self._watches.append(TcpWatch(*self._where, key, changed))

    def close(self) -> None:
        self._store = None
        if self._side is not None:
            self._side.close()
        for watch in self._watches:
            watch.close()

    def _mark_replaced(self, key: str, value: bytes) -> None:
        """Tell those who watch ``key`` that ``value`` was replaced. Costs no answer of the server, so it is as fast as the network."""
        if key.endswith(WATCHED):
            self._marks.append(mark(key, value))
            self._store.set(self._marks[-1], b"1")
            if len(self._marks) > KEPT_MARKS:
                self._store.delete_key(self._marks.popleft())

    def _read(self, keys: list[str]) -> dict[str, bytes]:
        """Return the values of those keys that exist. The check keeps multi_get from blocking on keys that an intruder has indexed."""
        if not keys or self._store.check(keys):
            return dict(zip(keys, self._store.multi_get(keys), strict=True)) if keys else {}
        return {key: value for key in keys if (value := self._read_one(key)) is not None}

    def _read_unknown(self, keys: list[str]) -> dict[str, bytes]:
        """Return the values of those keys that exist. Many are read at once: one by one they may take longer than an exchange is given."""
        if len(keys) < MANY:
            return {key: value for key in keys if (value := self._read_one(key)) is not None}
        if self._side is None:
            self._side = PlainTcpStore(*self._where)
        return self._side.get(keys)

    def _read_one(self, key: str) -> bytes | None:
        """Return the value of a key without blocking; None: no such key."""
        value: bytes = self._store.compare_set(key, MISSING, MISSING)
        return None if value == MISSING.encode() else value


def connector(
    open_socket: Callable[[], socket.socket | None],
    resolve: Callable[[], tuple[str, int]],
    served: list[ServedStore] | None = None,
) -> Callable[[], TcpStore]:
    """Return a function that connects, and first serves the store if this agent is the store host.

    ``open_socket`` returns the bound socket if this machine is to host. ``resolve`` returns the numeric address to connect to. Both raise
    ``StoreError`` for what may pass (a name that does not resolve yet). An agent that has connected as a client never becomes the host:
    its store would be empty. The store that the agent serves is put into ``served``.
    """
    served = [] if served is None else served
    client_only: list[bool] = []
    one_serves = threading.Lock()  # an abandoned attempt may still run in its thread

    def connect() -> TcpStore:
        with one_serves:
            listening = None if served or client_only else open_socket()
            if listening is not None:
                served.append(ServedStore(listening))
        if served:
            return served[0].connect()
        store = TcpStore(*resolve())
        client_only.append(True)
        return store

    return connect

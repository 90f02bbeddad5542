"""The store over torch's ``TCPStore``, which one agent of the job serves.

How the server behaves (torch 2.6 to 2.14, measured), and what follows:

- Setting and appending are not acknowledged, but compare-and-set is. So only compare-and-set writes values.
- Reading a missing key blocks. Compare-and-set with an expectation that never holds answers at once with the present value. So that is
  how a key is read (tcp_plain.py).
- Listing keys is slow with many keys. So an index holds the keys under each prefix, one line each, and appending extends it without
  conflict. A key is written before it is indexed, so every indexed key exists (tcp_index.py).
- The server listens on every interface unless it gets a bound socket.
- It pushes nothing by itself, but a client can wait for a key. So whoever replaces a value that others watch creates a key that says so
  (tcp_watch.py).

Torch's own client only deletes the keys of an earlier round. Its calls cannot be interrupted, each key that it reads costs a round trip,
and it asks a name server.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

from elastirun import clock
from elastirun.errors import StoreError
from elastirun.rendezvous.stores import tcp_wire
from elastirun.rendezvous.stores.tcp_index import index_of, is_listed, keys_in, line
from elastirun.rendezvous.stores.tcp_plain import PlainTcpStore
from elastirun.rendezvous.stores.tcp_watch import WATCHED, TcpWatch, mark
from elastirun.rendezvous.stores.torch_class import tcp_store_class
from elastirun.rendezvous.timing import EXCHANGE_LIMIT

ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # the address at which a store bound to every interface is reached from this machine
KEPT_MARKS = 4  # of one connection; a watch waits for the newest, and a slow one soon reads the value again
TORCH_TIMEOUT = 15.0  # seconds, for the handshake of torch's client and its DNS queries
HANG_LIMIT = EXCHANGE_LIMIT + 1.0  # seconds for an answer; by then the exchange was given up, and its thread ends


def serve(listening: socket.socket) -> Any:
    """Serve a TCPStore on a bound, listening socket, which the server then owns. The server ends when the returned object is deleted."""
    host, port = listening.getsockname()[:2]
    begin = partial(
        tcp_store_class(),
        ANY.get(host, host),
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=TORCH_TIMEOUT),
        master_listen_fd=listening.detach(),
    )
    try:
        return begin()
    except RuntimeError as error:  # the newer server of an old torch, 2.6 among them, takes no bound socket; the older server does
        if "libuv" not in str(error):
            raise
        return begin(use_libuv=False)


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


class TcpStore(PlainTcpStore):
    """An agent's connection to the TCPStore at ``address:port``. ``hosting``: this process serves that store. Errors: ``StoreError``."""

    def __init__(self, address: str, port: int, hosting: bool = False) -> None:
        self.hosting = hosting
        self._where = (address, port)
        self._indexed: set[str] = set()  # keys that this connection has put into the index
        self._marks: deque[str] = deque()  # that this connection has created, the newest at the end
        self._watches: list[TcpWatch] = []
        super().__init__(address, port, HANG_LIMIT)

    def put_if(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        now = self._compare_set(key, expected or b"", value)
        if now == expected:  # the server answers with the expectation when the key is missing
            return self.get([key]).get(key)
        # Once per connection, and also for another's value: that client's line may have been lost.
        if key not in self._indexed and is_listed(key):
            self._send(tcp_wire.append(index_of(key), line(key).encode()))
            self._indexed.add(key)
        if now == value:
            self._mark_replaced(key, expected or b"")
        return now

    def keep_alive(self, key: str) -> bool:
        return False  # there are no leases

    def delete(self, key: str) -> None:
        value = self.get([key]).get(key) if key.endswith(WATCHED) else None
        self._delete_key(key)
        if value is not None:
            self._mark_replaced(key, value)

    def clear(self, keep: str, limit: float) -> bool:
        """Delete every key that does not begin with ``keep``. Return False when that takes longer than ``limit`` seconds."""
        until = clock.now() + limit
        with _translated("clear"):
            client = tcp_store_class()(*self._where, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=TORCH_TIMEOUT))
            keys = client.list_keys()
        for key in keys:
            if clock.now() > until:
                return False
            if not key.startswith(keep):
                self._delete_key(key)
        return clock.now() <= until

    def under(self, prefix: str) -> dict[str, bytes]:
        """See ``Store.under``. A prefix that ends with ``tcp_index.UNLISTED`` has no keys here."""
        index = index_of(prefix)
        keys = keys_in(self.get([index]).get(index, b""), prefix)
        # A key of ours that is missing from the index was overwritten there; the next put appends it again.
        self._indexed -= {key for key in self._indexed if key.startswith(prefix)} - keys
        return self.get(sorted(keys))

    def watch(self, key: str, changed: Callable[[], None]) -> None:
        """See ``Store.watch``. ``changed`` is called from the watch's thread, the first time when the watch begins.

        Only a key that ends with WATCHED can be watched. A change by somebody else's client is noticed after a minute, and a value that
        the key had before may be noticed as late.
        """
        self._watches.append(TcpWatch(*self._where, key, changed))

    def close(self) -> None:
        super().close()
        for watch in self._watches:
            watch.close()

    def __del__(self) -> None:
        # Like torch's client, whoever lets it go has closed it.
        if hasattr(self, "_socket"):  # else it could not connect
            self.close()

    def _mark_replaced(self, key: str, value: bytes) -> None:
        """Tell those who watch ``key`` that ``value`` was replaced. Costs no answer of the server, so it is as fast as the network."""
        if key.endswith(WATCHED):
            self._marks.append(mark(key, value))
            self._send(tcp_wire.put(self._marks[-1], b"1"))
            if len(self._marks) > KEPT_MARKS:
                self._delete_key(self._marks.popleft())


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

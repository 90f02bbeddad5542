"""The store over torch's ``TCPStore``.

What its operations really do (torch 2.13, tried out), and what follows:

- ``set`` and ``append`` are not acknowledged, ``compare_set`` is: only the latter is used to write values.
- ``get`` of a missing key blocks, and stays blocked beyond its timeout when the server is silent. ``compare_set`` of an
  impossible expectation answers at once with what is there: that is how we read one key.
- Connecting, too, is held up without limit by a server that is stopped: its kernel accepts, and then nobody answers.
  And both sides ask DNS for the other's name, for a line in a log, which takes seconds when a name server is silent.
- ``list_keys`` is slow with many keys, so the keys below a prefix are kept in an index, one line each, which ``append``
  extends without conflict. A key is written before it is indexed, so every indexed key exists and ``multi_get`` of
  indexed keys does not block.
- The server listens on every interface unless it is handed a bound socket.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from elastirun import clock
from elastirun.errors import StoreError
from elastirun.rendezvous.stores.torch_class import tcp_store_class

MISSING = secrets.token_hex(16)  # a value that nobody stores
LONGEST_KEY = 4096  # characters, of ASCII; TCPStore hangs up on whom names a longer one
MOST_KEYS = 32_768  # below one prefix, and 64 MiB of an index: more is not what nodes write, and would take too long to read
LONGEST_INDEX = 64 << 20
ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # bound to every interface, it is reached by this one
CONNECT_TIMEOUT = 15.0  # seconds, for TCPStore's own handshake and its questions to DNS; reachability was probed before


def serve(listening: socket.socket) -> Any:
    """Serve a TCPStore on a bound, listening socket, which it takes over. It ends when the returned object is dropped."""
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


@contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError, ValueError) as error:  # torch's Dist*Error are RuntimeErrors
        raise StoreError(f"{what}: {str(error).splitlines()[0][:200] if str(error) else type(error).__name__}") from None


class TcpStore:
    """A connection to the TCPStore at ``address:port``; ``hosting`` tells that this process serves it."""

    def __init__(self, address: str, port: int, hosting: bool = False) -> None:
        self.hosting = hosting
        with _translated(f"cannot use the store at {address}:{port}"):
            store_class = tcp_store_class()
            timeout = timedelta(seconds=CONNECT_TIMEOUT)
            self._store = store_class(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
        self._known: set[str] = set()  # keys seen to exist, as they do unless somebody deletes them
        self._indexed: set[str] = set()  # keys this connection has put into the index

    def get(self, keys: Iterable[str]) -> dict[str, bytes]:
        with _translated("get"):
            wanted = list(keys)
            found = {key: value for key in wanted if key not in self._known and (value := self._peek(key)) is not None}
            known = [key for key in wanted if key in self._known and key not in found]
            found.update(self._read(known))
            self._known.update(found)
            return found

    def put_if(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        with _translated("put"):
            now: bytes = self._store.compare_set(key, b"" if expected is None else expected, value)
            if now == expected:  # without such a key TCPStore answers with the expectation itself
                return self._peek(key)
            if key not in self._indexed:  # once per connection, and also for a value that is not ours: the line may have been lost
                self._store.append(_index_of(key), f"\n{key}\n")  # on a line of its own, whatever stands before it
                self._indexed.add(key)
            return now

    def keep_alive(self, key: str) -> bool:
        return False  # there are no leases

    def delete(self, key: str) -> None:
        with _translated("delete"):
            self._known.discard(key)
            self._store.delete_key(key)

    def clear(self, keep: str, limit: float) -> bool:
        """Delete every key that does not begin with ``keep``; False when that is not done within ``limit`` seconds."""
        until = clock.now() + limit
        with _translated("clear"):
            for key in self._store.list_keys():
                if clock.now() > until:
                    return False
                if not key.startswith(keep):
                    self._store.delete_key(key)
        return clock.now() <= until

    def under(self, prefix: str) -> dict[str, bytes]:
        with _translated("list"):
            index_key = _index_of(prefix)
            index = self._peek(index_key) or b""
            lines = index.decode("ascii", "replace").splitlines() if len(index) <= LONGEST_INDEX else []
            keys = {key for key in lines if key.startswith(prefix) and key != index_key and len(key) < LONGEST_KEY and key.isascii()}
            if len(index) > LONGEST_INDEX or len(keys) > MOST_KEYS:
                raise StoreError(f"{len(index)} bytes of keys below {prefix}: somebody floods the store")
            self._indexed -= {key for key in self._indexed if key.startswith(prefix)} - keys  # overwritten: the next put mends it
            return self._read(sorted(keys))

    def watch(self, key: str, changed: Callable[[], None]) -> None:
        pass

    def close(self) -> None:
        self._store = None

    def _read(self, keys: list[str]) -> dict[str, bytes]:
        """The values of keys that exist. An index that somebody else has filled with inventions must not block us."""
        if not keys or self._store.check(keys):
            return dict(zip(keys, self._store.multi_get(keys), strict=True)) if keys else {}
        return {key: value for key in keys if (value := self._peek(key)) is not None}

    def _peek(self, key: str) -> bytes | None:
        value: bytes = self._store.compare_set(key, MISSING, MISSING)
        return None if value == MISSING.encode() else value


def _index_of(key: str) -> str:
    return key[: key.rfind("/") + 1] + "~index"


def connector(
    open_socket: Callable[[], socket.socket | None],
    resolve: Callable[[], tuple[str, int]],
) -> Callable[[], TcpStore]:
    """A function that connects, serving the store first when it is ours to serve.

    ``open_socket`` returns the bound socket when this machine is to host, ``resolve`` the numeric address to connect to;
    both raise ``StoreError`` for what may still change (a name that does not resolve yet). Once connected as a client this
    agent never becomes the host: a store that comes back empty must not be ours.
    """
    served: list[tuple[Any, str, int]] = []
    client_only: list[bool] = []
    one_serves = threading.Lock()  # an attempt that was given up may still be under way in its thread

    def connect() -> TcpStore:
        with one_serves:
            listening = None if served or client_only else open_socket()
            if listening is not None:
                host, port = listening.getsockname()[:2]
                with _translated(f"cannot serve the store on {host}:{port}"):
                    served.append((serve(listening), ANY.get(host, host), port))
        address, port = served[0][1:] if served else resolve()
        store = TcpStore(address, port, hosting=bool(served))
        if not served:
            client_only.append(True)
        return store

    return connect

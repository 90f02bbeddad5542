"""The client of torch's ``TCPStore``, which one agent of the job serves (tcp_server.py). It loads nothing of torch.

How the server behaves (torch 2.6 to 2.14, measured), and what follows:

- Setting and appending are not acknowledged, but compare-and-set is. So only compare-and-set writes values.
- Reading a missing key blocks. Compare-and-set with an expectation that never holds answers at once with the present value. So that is
  how a key is read.
- Listing keys is slow with many keys. So an index holds the keys under each prefix, one line each, and appending extends it without
  conflict. A key is written before it is indexed, so every indexed key exists (tcp_index.py).
- It pushes nothing by itself, but a client can wait for a key. So whoever replaces the value of a watched key creates another key, the
  mark of the old value. A watch reads the value and waits for its mark, so it misses no change that happens between the two. Only a
  writer that dies between its two writes leaves no mark; then the watch notices the change after RECHECK seconds, and the polls of the
  agent notice it before.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress

from elastirun import clock
from elastirun.errors import StoreError
from elastirun.rendezvous.stores import tcp_wire
from elastirun.rendezvous.stores.tcp_index import index_of, is_listed, keys_in, line
from elastirun.rendezvous.timing import EXCHANGE_LIMIT
from elastirun.threads import start_thread

ANSWER_LIMIT = 3.0  # seconds to connect, and for the answers to what is sent at once, of a short visit
HANG_LIMIT = EXCHANGE_LIMIT + 1.0  # seconds, the same, of an agent: by then the exchange was given up, and its thread ends
ANY_KEY = ("",)  # the beginning of every key
KEPT_MARKS = 4  # of one connection; a watch waits for the newest, and a slow one soon reads the value again
WATCHED = "/round"  # keys that end with this can be watched; a mark for each keep-alive would be too many
WATCH_LIMIT = 5.0  # seconds to connect, and for every answer but that to a wait
RECHECK = 60.0  # seconds of waiting after which the value is read again; also finds that the server is gone without a word
PAUSE, LONGEST_PAUSE = 0.1, 30.0  # seconds before the next attempt: doubled after each that brought nothing; the polls go on meanwhile
BURST, BURST_TIME = 20, 1.0  # calls of ``changed`` within so many seconds, at most: a new round takes a few, an intruder writes without end


def connect(address: str, port: int) -> TcpStore:
    """Return the connection of an agent, which creates every key that it writes. Errors: ``StoreError``."""
    return TcpStore(address, port, HANG_LIMIT, ANY_KEY)


def mark(key: str, value: bytes) -> str:
    """Return the key that says that ``value`` is no longer the value of ``key``. An empty ``value``: ``key`` exists now."""
    return f"{key}~replaced/{hashlib.sha256(value).hexdigest()[:32]}"


class TcpStore:
    """A connection to the TCPStore at ``address:port``: a ``stores.base.Store``.

    ``limit``: seconds to connect, and for the answers to what is sent at once. ``creates``: what the keys begin with that may be created;
    ``put_if`` creates no other ones. Only those of an agent, ANY_KEY, are listed: who reads the others must know their names.
    Errors: ``StoreError``.
    """

    hosting = False

    def __init__(self, address: str, port: int, limit: float | None = None, creates: tuple[str, ...] = ()) -> None:
        self._where = (address, port)
        self._creates = creates
        self._indexed: set[str] = set()  # keys that this connection has put into the index
        self._marks: deque[str] = deque()  # that this connection has created, the newest at the end
        self._watches: list[_Watch] = []
        self._asked: _Beat | None = None  # by ``ask``
        with _translated(f"cannot connect to the store at {address}:{port}"):
            self._connection = tcp_wire.TcpConnection(address, port, limit or ANSWER_LIMIT)
        try:
            self._connection.greet()
        except (OSError, ValueError) as error:
            self.close()
            what = f"no answer of the store at {address}:{port}: {error}"
            raise StoreError(what if isinstance(error, OSError) else f"what listens at {address}:{port} is no TCPStore") from None

    def give_time(self, limit: float) -> None:
        """Wait for each further answer for ``limit`` seconds."""
        self._connection.limit = limit

    def get(self, keys: Iterable[str]) -> dict[str, bytes]:
        with _translated():
            return self._connection.get(keys)

    def has(self, key: str) -> bool:
        with _translated():
            return self._connection.has(key)

    def put_if(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        if not (expected or key.startswith(self._creates)):
            return self.get([key]).get(key)
        with _translated():
            self._connection.send(tcp_wire.compare_set(key, expected or b"", value))
            now = self._connection.value()
        if now == expected:  # the server answers with the expectation when the key is missing
            return self.get([key]).get(key)
        # Once per connection, and also for another's value: that client's line may have been lost.
        if self._creates == ANY_KEY and key not in self._indexed and is_listed(key):
            self._send(tcp_wire.append(index_of(key), line(key).encode()))
            self._indexed.add(key)
        if now == value:
            self._mark_replaced(key, expected or b"")
        return now

    def put_if_and_get(self, key: str, expected: bytes | None, value: bytes, keys: Sequence[str]) -> tuple[bytes | None, dict[str, bytes]]:
        if (beat := self._beat(key, expected, value, keys)) is None:
            return self.put_if(key, expected, value), self.get(keys) if keys else {}
        with _translated():
            return beat.answer(self._connection.values(beat.requests))

    def ask(self, key: str, expected: bytes | None, value: bytes, keys: Sequence[str]) -> int | None:
        self._asked = self._beat(key, expected, value, keys)
        if self._asked is None or sum(map(len, self._asked.requests)) > tcp_wire.NEVER_WAITS:
            return None
        with _translated():
            return self._connection.ask(b"".join(self._asked.requests))

    def answer(self) -> tuple[bytes | None, dict[str, bytes]] | None:
        assert self._asked is not None
        with _translated():
            values = self._connection.arrived(len(self._asked.requests))
        return None if values is None else self._asked.answer(values)

    def _beat(self, key: str, expected: bytes | None, value: bytes, keys: Sequence[str]) -> _Beat | None:
        """Return the requests that write ``key`` and read ``keys``; None where these do not suffice.

        They do not for the first write of a key, for one that is watched, and where no answer would tell that there is no such key.
        """
        if not expected or key not in self._indexed or key not in keys or key.endswith(WATCHED):
            return None
        return _Beat(key, expected, value, keys)

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
        with _translated():
            self._connection.send(tcp_wire.LIST_KEYS)
            keys = [self._connection.value().decode(errors="replace") for _ in range(self._connection.number())]
        for key in keys:
            if clock.now() > until:
                return False
            if key.startswith("/") and not key.startswith(f"/{keep}"):
                self._delete_key(key[1:])
        return clock.now() <= until

    def under(self, prefix: str) -> dict[str, bytes]:
        """See ``Store.under``. Only keys that agents have written are listed, and none under a prefix that ends with
        ``tcp_index.UNLISTED``.
        """
        index = index_of(prefix)
        keys = keys_in(self.get([index]).get(index, b""), prefix)
        # A key of ours that is missing from the index was overwritten there; the next put appends it again.
        self._indexed -= {key for key in self._indexed if key.startswith(prefix)} - keys
        return self.get(sorted(keys))

    def watch(self, key: str, changed: Callable[[], None]) -> None:
        """See ``Store.watch``. ``changed`` is called from a thread with a connection of its own: once when the watch begins, then after
        each change of ``key``, or after several, and when the connection is lost: the host of the store may have died, which the agent
        should find at once.

        Only a key that ends with WATCHED can be watched. A change by somebody else's client is noticed after a minute, and a value that
        the key had before may be noticed as late. A connection that is refused, reset, silent, or answered by another program is tried
        again after a pause.
        """
        self._watches.append(_Watch(self._where, key, changed))

    def close(self) -> None:
        self._connection.close()
        for watch in self._watches:
            watch.close()

    def __del__(self) -> None:
        if hasattr(self, "_connection"):  # else it could not connect
            self.close()

    def _send(self, request: bytes) -> None:
        """Send a ``request`` that is not answered."""
        with _translated():
            self._connection.send(request)

    def _delete_key(self, key: str) -> None:
        with _translated():
            self._connection.send(tcp_wire.delete_key(key))
            self._connection.number()

    def _mark_replaced(self, key: str, value: bytes) -> None:
        """Tell those who watch ``key`` that ``value`` was replaced. Costs no answer of the server, so it is as fast as the network."""
        if key.endswith(WATCHED):
            self._marks.append(mark(key, value))
            self._send(tcp_wire.put(self._marks[-1], b"1"))
            if len(self._marks) > KEPT_MARKS:
                self._delete_key(self._marks.popleft())


class _Beat:
    """The ``requests`` that write ``key``, which is one of ``keys``, and then read these; and what their answers mean."""

    def __init__(self, key: str, expected: bytes, value: bytes, keys: Sequence[str]) -> None:
        self._key, self._expected, self._keys, self._never = key, expected, keys, os.urandom(16)
        self.requests = [tcp_wire.compare_set(key, expected, value), *(tcp_wire.read(each, self._never) for each in keys)]

    def answer(self, values: list[bytes]) -> tuple[bytes | None, dict[str, bytes]]:
        now, *read = values
        found = {key: value for key, value in zip(self._keys, read, strict=True) if value != self._never}
        return (found.get(self._key) if now == self._expected else now), found  # the expectation is the answer when the key is missing


class _Watch:
    """The thread of ``TcpStore.watch``, with its connection. Nothing is raised."""

    def __init__(self, where: tuple[str, int], key: str, changed: Callable[[], None]) -> None:
        self._where = where
        self._key = key
        self._changed = changed
        self._seen: bytes | None = None  # the value of which ``changed`` has told; None: none yet
        self._fruitless = 0  # consecutive attempts without a change
        self._told: deque[float] = deque(maxlen=BURST)  # when ``changed`` was called last
        self._closed = threading.Event()
        self._lock = threading.Lock()  # the connection is not closed by the thread while ``close`` uses it
        self._connection: tcp_wire.TcpConnection | None = None
        start_thread("store watch", self._run)  # if none can be started, polls have to do

    def close(self) -> None:
        """End the watch and its connection, without waiting."""
        self._closed.set()
        with self._lock:
            if self._connection is not None:
                self._connection.interrupt()  # wakes the thread

    def _run(self) -> None:
        while not self._closed.is_set():
            with suppress(OSError, ValueError), closing(tcp_wire.TcpConnection(*self._where, WATCH_LIMIT)) as connection:
                self._hold(connection)
                try:
                    connection.greet()
                    self._follow(connection)
                finally:
                    self._hold(None)
            self._fruitless += 1
            pause = min(PAUSE * 2 ** min(self._fruitless - 1, 10), LONGEST_PAUSE)
            self._closed.wait(pause * random.uniform(0.5, 1.0))

    def _hold(self, connection: tcp_wire.TcpConnection | None) -> None:
        with self._lock:
            self._connection = connection

    def _follow(self, connection: tcp_wire.TcpConnection) -> None:
        """Watch over ``connection`` until it fails (OSError), or what answers there makes no sense (ValueError)."""
        try:
            self._tell_of_changes(connection)
        except OSError:
            if not self._closed.is_set():
                self._tell()
            raise

    def _tell_of_changes(self, connection: tcp_wire.TcpConnection) -> None:
        marked = False
        while not self._closed.is_set():
            self._pause_after_burst()
            value = connection.get([self._key]).get(self._key, b"")
            if value != self._seen:
                self._seen, self._fruitless = value, 0
                self._tell()
            elif marked:
                raise ValueError("the mark of the present value exists: an older value came back, or somebody else created the mark")
            marked = connection.wait(mark(self._key, value), RECHECK)

    def _tell(self) -> None:
        self._told.append(clock.now())
        self._changed()

    def _pause_after_burst(self) -> None:
        """Wait if ``changed`` was called too often. Before the value is read: no time may pass between that and the wait for its mark."""
        if len(self._told) == BURST:
            self._closed.wait(max(0.0, self._told[0] + BURST_TIME - clock.now()))


@contextmanager
def _translated(what: str = "no answer of the store") -> Iterator[None]:
    """Raise the errors of a ``tcp_wire.TcpConnection`` as ``StoreError``. ``what``: the failure, for the message."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise StoreError(f"{what}: {error}") from None

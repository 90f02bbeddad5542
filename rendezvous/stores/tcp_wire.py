"""The requests of torch's TCPStore, and a connection that makes them. Torch's own client cannot be interrupted, and looks names up.

As in TCPStore.cpp of torch 2.6 to 2.14: numbers are little-endian, a text follows its length, and torch puts "/" before each key.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

from elastirun import clock
from elastirun.errors import LargeAnswer

HELLO = b"\0" + struct.pack("<I", 0x3C85F7CE)  # the first bytes of every client; not answered
CANCEL_WAIT = b"\x0c"  # ends a wait; answered with ``CANCELED``
LIST_KEYS = b"\x11"  # answered with the number of keys, in eight bytes, and the keys; by that of torch 2.6 to 2.9 with a hang-up
CAME, CANCELED = b"\0", b"\1"  # answers to a wait: every key exists, and to its end
ABSENT = b"\1"  # answer to a check: ``CAME``, or this
LARGEST = 16 << 20  # bytes of a value; TCPStore's own limit is lower
AT_ONCE = 32_768  # bytes of requests sent before their answers are read, some 250 keys of ours, and of answers that are not waited for
NEVER_WAITS = 8192  # bytes that a connection takes without waiting when all before are answered; a send buffer has 16 KiB at first
SLOWEST = 1 << 20  # bytes per second of a network that is given time for large requests and answers


def numeric(sockaddr: tuple[str | int | bytes, ...]) -> str:
    """Return the address in a result of getaddrinfo or getsockname, with the scope that a link-local address needs."""
    address = str(sockaddr[0])
    scope = int(sockaddr[3]) if len(sockaddr) == 4 else 0
    return f"{address}%{socket.if_indextoname(scope)}" if scope and "%" not in address else address


def hello(nonce: bytes) -> bytes:
    """Return the beginning of a connection. The server answers with the ``nonce``, of four bytes."""
    return HELLO + b"\x0d" + nonce


def put(key: str, value: bytes) -> bytes:
    """Return the request to set ``key``. It is not answered."""
    return b"\x01" + _key(key) + _text(value)


def compare_set(key: str, expected: bytes, value: bytes) -> bytes:
    """Return the request to set ``key`` if it holds ``expected``. It is answered with the value of the key; without one, ``expected``."""
    return b"\x02" + _key(key) + _text(expected) + _text(value)


def read(key: str, never: bytes) -> bytes:
    """Return the request to read ``key``. It is answered with the value; without one, ``never``, which is no value of any key."""
    return compare_set(key, never, never)


def check(key: str) -> bytes:
    """Return the request to say whether ``key`` exists. It is answered with ``CAME`` or ``ABSENT``."""
    return b"\x05" + struct.pack("<Q", 1) + _key(key)


def delete_key(key: str) -> bytes:
    """Return the request to delete ``key``. It is answered with the number of keys that were deleted, in eight bytes."""
    return b"\x08" + _key(key)


def append(key: str, value: bytes) -> bytes:
    """Return the request to add ``value`` to the end of ``key``. It is not answered."""
    return b"\x09" + _key(key) + _text(value)


def wait(key: str) -> bytes:
    """Return the request to wait until ``key`` exists. It is answered with ``CAME`` then."""
    return b"\x06" + struct.pack("<Q", 1) + _key(key)


def _connect(address: str, port: int, limit: float) -> socket.socket:
    connected = socket.create_connection((address, port), limit)
    # Else a request after one that is not answered waits for the server's delayed acknowledgement, 40 ms.
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected


class TcpConnection:
    """A connection to what listens at ``address:port``.

    ``limit``: seconds to connect, and for the answers to what is sent at once; large ones have more.
    Errors of all methods: ``OSError``; ``ValueError`` for a name that is none, and for an answer that makes no sense.
    """

    def __init__(self, address: str, port: int, limit: float) -> None:
        self.limit = limit
        self._socket = _connect(address, port, limit)
        self._arrived = bytearray()  # of answers, and not taken yet
        self._until = clock.now() + limit  # when the answers must be there
        self._large = LARGEST  # bytes of the answers that are given more time

    def greet(self) -> None:
        """Begin to speak to the TCPStore that should listen there. ``ValueError``: it is none."""
        nonce = os.urandom(4)
        self.send(hello(nonce))
        if self.receive(4) != nonce:
            raise ValueError("what listens there is no TCPStore")

    def send(self, data: bytes) -> None:
        self._until = clock.now() + self.limit + len(data) / SLOWEST
        self._large = LARGEST
        self._socket.settimeout(self.limit)
        self._socket.sendall(data)

    def receive(self, length: int, until: float | None = None) -> bytes:
        """Return the next ``length`` bytes. ``until``: a moment of ``elastirun.clock``; None: as for any answer to what was sent.

        ``TimeoutError`` when that moment has passed: a peer may send a byte now and then for ever. What has arrived is taken at any
        time, because this process may have stood still.
        """
        until = self._until if until is None else until
        while len(self._arrived) < length:
            self._socket.settimeout(max(0.0 if self._arrived else 0.001, until - clock.now()))
            try:
                more = self._socket.recv(1 << 16)
            except BlockingIOError:
                raise TimeoutError("timed out") from None
            if not more:
                raise ConnectionError("the other side has hung up")
            self._arrived += more
        data = bytes(self._arrived[:length])
        del self._arrived[:length]
        return data

    def number(self) -> int:
        (number,) = struct.unpack("<Q", self.receive(8))
        return int(number)

    def value(self) -> bytes:
        """Return a value, the answer to a request. ``ValueError`` for one that no store holds."""
        length = self.number()
        if length > LARGEST:
            raise ValueError(f"a value of {length} bytes")
        value = self.receive(length, self._until + length / SLOWEST)
        more = min(length, self._large)
        self._large -= more
        self._until += more / SLOWEST
        return value

    def values(self, requests: Iterable[bytes]) -> list[bytes]:
        """Send ``requests`` that are answered with a value each, in as few pieces as possible. Return the values."""
        wanted, values = deque(requests), list[bytes]()
        while wanted:
            some, size = [wanted.popleft()], 0
            while wanted and (size := size + len(some[-1])) + len(wanted[0]) <= AT_ONCE:
                some.append(wanted.popleft())
            self.send(b"".join(some))
            values += [self.value() for _ in some]
        return values

    def get(self, keys: Iterable[str]) -> dict[str, bytes]:
        """Return the values of those ``keys`` that exist."""
        wanted, never = list(keys), os.urandom(16)
        values = self.values(read(key, never) for key in wanted)
        return {key: value for key, value in zip(wanted, values, strict=True) if value != never}

    def ask(self, data: bytes) -> int:
        """Send ``data``, NEVER_WAITS bytes at most, without waiting. Return the descriptor that is readable when answers have arrived."""
        self._until, self._large = clock.now() + self.limit, LARGEST
        self._socket.settimeout(0.0)
        if self._socket.send(data) < len(data):
            raise TimeoutError("what was sent before has not been taken")
        return self._socket.fileno()

    def arrived(self, count: int) -> list[bytes] | None:
        """Return the next ``count`` values, without waiting; None: they have not all arrived.

        Values that are larger than ``AT_ONCE`` together are a ``LargeAnswer``: this connection is of no use after it.
        """
        self._socket.settimeout(0.0)
        with suppress(BlockingIOError):
            if not (more := self._socket.recv(AT_ONCE)):
                raise ConnectionError("the other side has hung up")
            self._arrived += more
        values, at = list[bytes](), 0
        while len(values) < count:
            end = at + 8 + int.from_bytes(self._arrived[at : at + 8], "little")
            if end > AT_ONCE:
                raise LargeAnswer(f"an answer of {end} bytes")
            if len(self._arrived) < max(end, at + 8):
                return None
            values.append(bytes(self._arrived[at + 8 : end]))
            at = end
        del self._arrived[:at]
        return values

    def has(self, key: str) -> bool:
        """Return whether ``key`` exists."""
        self.send(check(key))
        if (answer := self.receive(1)) not in (CAME, ABSENT):
            raise ValueError("another answer than that to a check")
        return answer == CAME

    def wait(self, key: str, seconds: float) -> bool:
        """Wait until ``key`` exists, for ``seconds`` at most. Return whether it does."""
        self.send(wait(key))
        try:
            answer = self.receive(1, clock.now() + seconds)
        except TimeoutError:
            self.send(CANCEL_WAIT)
            answer = self.receive(1)
            if answer == CANCELED:
                return False
            if self.receive(1) != CANCELED:  # the key was created just before
                raise ValueError("another answer than that to the end of a wait") from None
        if answer != CAME:
            raise ValueError("another answer than that to a wait")
        return True

    def interrupt(self) -> None:
        """Make the method that waits in another thread fail."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()


def _key(key: str) -> bytes:
    return _text(b"/" + key.encode())


def _text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data

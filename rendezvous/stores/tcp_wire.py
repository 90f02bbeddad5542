"""The requests of torch's TCPStore that are made without torch's client, whose calls cannot be interrupted and which looks names up.

As in TCPStore.cpp of torch 2.6 to 2.14: numbers are little-endian, a text follows its length, and torch puts "/" before each key.
"""

from __future__ import annotations

import socket
import struct

from elastirun import clock

HELLO = b"\0" + struct.pack("<I", 0x3C85F7CE)  # the first bytes of every client; not answered
CANCEL_WAIT = b"\x0c"  # ends a wait; answered with ``CANCELED``
CAME, CANCELED = b"\0", b"\1"  # answers to a wait: every key exists, and to its end
LARGEST = 16 << 20  # bytes of a value; TCPStore's own limit is lower
SLOWEST = 1 << 20  # bytes per second of a network that is given time for large requests and answers


def hello(nonce: bytes) -> bytes:
    """Return the beginning of a connection. The server answers with the ``nonce``, of four bytes."""
    return HELLO + b"\x0d" + nonce


def put(key: str, value: bytes) -> bytes:
    """Return the request to set ``key``. It is not answered."""
    return b"\x01" + _key(key) + _text(value)


def compare_set(key: str, expected: bytes, value: bytes) -> bytes:
    """Return the request to set ``key`` if it holds ``expected``. It is answered with the value of the key; without one, ``expected``."""
    return b"\x02" + _key(key) + _text(expected) + _text(value)


def delete_key(key: str) -> bytes:
    """Return the request to delete ``key``. It is answered with the number of keys that were deleted, in eight bytes."""
    return b"\x08" + _key(key)


def append(key: str, value: bytes) -> bytes:
    """Return the request to add ``value`` to the end of ``key``. It is not answered."""
    return b"\x09" + _key(key) + _text(value)


def wait(key: str) -> bytes:
    """Return the request to wait until ``key`` exists. It is answered with ``CAME`` then."""
    return b"\x06" + struct.pack("<Q", 1) + _key(key)


def receive(connection: socket.socket, length: int, until: float | None = None) -> bytes:
    """Return the next ``length`` bytes. ``until``: a moment of ``elastirun.clock``; None: each part may take the timeout of the socket.

    Errors: ``OSError``, also when that moment has passed: a peer may send a byte now and then for ever. What has arrived is taken at any
    time, because this process may have stood still.
    """
    data = b""
    while len(data) < length:
        if until is not None:
            connection.settimeout(max(0.0 if data else 0.001, until - clock.now()))
        try:
            more = connection.recv(min(length - len(data), 1 << 16))
        except BlockingIOError:
            raise TimeoutError("timed out") from None
        if not more:
            raise ConnectionError("the other side has hung up")
        data += more
    return data


def receive_value(connection: socket.socket, until: float | None = None) -> bytes:
    """Return a value, the answer to a request. Errors: those of ``receive``; ``ValueError`` for a value that no store holds."""
    (length,) = struct.unpack("<Q", receive(connection, 8, until))
    if length > LARGEST:
        raise ValueError(f"a value of {length} bytes")
    return receive(connection, length, until and until + length / SLOWEST)


def _key(key: str) -> bytes:
    return _text(b"/" + key.encode())


def _text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data

"""Messages between a trainer and its writer over a unix socket: four bytes of length, then JSON; descriptors travel beside them."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from elastirun import linux
from elastirun.checkpoint.record import MAX_BYTES, parse
from elastirun.errors import CheckpointError

MAX_FDS = 8  # with one message
_LENGTH = 4  # bytes


def send(sock: socket.socket, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one message, and copies of the descriptors ``fds`` with it. Raises OSError when the other end has gone."""
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > MAX_BYTES or len(fds) > MAX_FDS:
        raise CheckpointError(f"a message of {len(data)} bytes and {len(fds)} descriptors is too long for the writer")
    start = len(data).to_bytes(_LENGTH, "big")
    sent = socket.send_fds(sock, [start], fds) if fds else 0
    sock.sendall(start[sent:] + data)


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Wait for the next message; return it with its descriptors, which the caller closes. None: the other end has closed the socket.

    Raises OSError, and ``CheckpointError`` for bytes that are no message; descriptors that came with them are closed.
    """
    fds: list[int] = []
    try:
        start, came, flags = linux.recv_fds(sock, _LENGTH, MAX_FDS)
        fds += came
        if flags & socket.MSG_CTRUNC:
            raise CheckpointError(f"a message came with more than {MAX_FDS} descriptors, or this process can have no more of them")
        if not start:
            return None
        start += _receive_rest(sock, _LENGTH - len(start))
        length = int.from_bytes(start, "big")
        if length > MAX_BYTES:
            raise CheckpointError(f"a message of {length} bytes is longer than {MAX_BYTES}")
        message = parse(_receive_rest(sock, length), MAX_BYTES)
    except BaseException:
        close_all(fds)
        raise
    return message, fds


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _receive_rest(sock: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        more = sock.recv(min(length - len(data), 1 << 20))
        if not more:
            raise CheckpointError("the other end of the socket closed it within a message")
        data += more
    return bytes(data)

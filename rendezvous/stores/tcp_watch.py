"""Watches a key of a TCPStore over a connection of its own, in place of polling.

Whoever replaces the value of a watched key then creates another key, the mark of the old value. A watch reads the value and waits for
its mark. So it misses no change that happens between the two. Only a writer that dies between its two writes leaves no mark; then the
watch notices the change after RECHECK seconds, and the polls of the agent notice it before.

This is not torch's client: see tcp_wire.py.
"""

from __future__ import annotations

import hashlib
import os
import random
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from elastirun import clock
from elastirun.rendezvous.stores import tcp_wire
from elastirun.threads import start_thread

WATCHED = "/round"  # keys that end with this can be watched; a mark for each keep-alive would be too many
ANSWER_LIMIT = 5.0  # seconds to connect, and for every answer but that to a wait
RECHECK = 60.0  # seconds of waiting after which the value is read again; also finds that the server is gone without a word
PAUSE, LONGEST_PAUSE = 0.1, 30.0  # seconds before the next attempt: doubled after each that brought nothing; the polls go on meanwhile
BURST, BURST_TIME = 20, 1.0  # calls of ``changed`` within so many seconds, at most: a new round takes a few, an intruder writes without end


def mark(key: str, value: bytes) -> str:
    """Return the key that says that ``value`` is no longer the value of ``key``. An empty ``value``: ``key`` exists now."""
    return f"{key}~replaced/{hashlib.sha256(value).hexdigest()[:32]}"


class TcpWatch:
    """Calls ``changed`` from its own thread: once when the watch begins, then after each change of ``key``, or after several, and when the
    connection is lost: the host of the store may have died, which the agent should find at once.

    A connection that is refused, reset, silent, or answered by another program is tried again after a pause. Nothing is raised.
    """

    def __init__(self, address: str, port: int, key: str, changed: Callable[[], None]) -> None:
        self._where = (address, port)
        self._key = key
        self._changed = changed
        self._seen: bytes | None = None  # the value of which ``changed`` has told; None: none yet
        self._fruitless = 0  # consecutive attempts without a change
        self._told: deque[float] = deque(maxlen=BURST)  # when ``changed`` was called last
        self._closed = threading.Event()
        self._lock = threading.Lock()  # the socket is not closed by the thread while ``close`` uses it
        self._socket: socket.socket | None = None
        start_thread("store watch", self._run)  # if none can be started, polls have to do

    def close(self) -> None:
        """End the watch and its connection, without waiting."""
        self._closed.set()
        with self._lock, suppress(OSError):
            if self._socket is not None:
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread

    def _run(self) -> None:
        while not self._closed.is_set():
            with suppress(OSError, ValueError):
                self._connect_and_follow()
            self._fruitless += 1
            pause = min(PAUSE * 2 ** min(self._fruitless - 1, 10), LONGEST_PAUSE)
            self._closed.wait(pause * random.uniform(0.5, 1.0))

    def _connect_and_follow(self) -> None:
        with socket.create_connection(self._where, ANSWER_LIMIT) as connection:
            with self._lock:
                self._socket = connection
            try:
                self._follow(connection)
            finally:
                with self._lock:
                    self._socket = None

    def _follow(self, connection: socket.socket) -> None:
        """Watch over ``connection`` until it fails (OSError), or what answers there makes no sense (ValueError)."""
        nonce = os.urandom(4)
        connection.sendall(tcp_wire.hello(nonce))
        if tcp_wire.receive(connection, 4, clock.now() + ANSWER_LIMIT) != nonce:
            raise ValueError("not a TCPStore")
        try:
            self._tell_of_changes(connection)
        except OSError:
            if not self._closed.is_set():
                self._tell()
            raise

    def _tell_of_changes(self, connection: socket.socket) -> None:
        marked = False
        while not self._closed.is_set():
            self._pause_after_burst()
            value = self._read(connection)
            if value != self._seen:
                self._seen, self._fruitless = value, 0
                self._tell()
            elif marked:
                raise ValueError("the mark of the present value exists: an older value came back, or somebody else created the mark")
            marked = _wait(connection, mark(self._key, value))

    def _tell(self) -> None:
        self._told.append(clock.now())
        self._changed()

    def _pause_after_burst(self) -> None:
        """Wait if ``changed`` was called too often. Before the value is read: no time may pass between that and the wait for its mark."""
        if len(self._told) == BURST:
            self._closed.wait(max(0.0, self._told[0] + BURST_TIME - clock.now()))

    def _read(self, connection: socket.socket) -> bytes:
        """Return the present value; empty if there is none. A comparison that never holds is answered with it at once."""
        never = os.urandom(16)
        connection.sendall(tcp_wire.compare_set(self._key, never, never))
        value = tcp_wire.receive_value(connection, clock.now() + ANSWER_LIMIT)
        return b"" if value == never else value


def _wait(connection: socket.socket, key: str) -> bool:
    """Wait until ``key`` exists, for RECHECK seconds at most. Return whether it does."""
    connection.sendall(tcp_wire.wait(key))
    try:
        connection.settimeout(RECHECK)
        answer = tcp_wire.receive(connection, 1)
    except TimeoutError:
        connection.settimeout(ANSWER_LIMIT)
        connection.sendall(tcp_wire.CANCEL_WAIT)
        answer = tcp_wire.receive(connection, 1)
        if answer == tcp_wire.CANCELED:
            return False
        if tcp_wire.receive(connection, 1) != tcp_wire.CANCELED:  # the key was created just before
            raise ValueError("another answer than that to the end of a wait") from None
    connection.settimeout(ANSWER_LIMIT)
    if answer != tcp_wire.CAME:
        raise ValueError("another answer than that to a wait")
    return True

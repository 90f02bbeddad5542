"""Serves torch's ``TCPStore``, and connects the agent that serves one: the only use of torch's class. See docs/decisions/0004.

The server listens on every interface unless it gets a bound socket.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from elastirun.errors import StoreError
from elastirun.rendezvous.stores import tcp, tcp_wire
from elastirun.rendezvous.stores.torch_class import tcp_store_class

ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # the address at which a store bound to every interface is reached from this machine
TORCH_TIMEOUT = 15.0  # seconds, for the handshake of torch's client, which connects to the server in the same process


def serve(listening: socket.socket) -> Any:
    """Serve a TCPStore on a bound, listening socket, which the server then owns. The server ends when the returned object is deleted."""
    host, port = tcp_wire.numeric(listening.getsockname()), listening.getsockname()[1]
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
        host, self.port = tcp_wire.numeric(listening.getsockname()), listening.getsockname()[1]
        self._address = ANY.get(host, host)
        try:
            self._server = serve(listening)
        except (RuntimeError, OSError, ValueError) as error:  # torch's Dist*Error are RuntimeErrors
            why = str(error).partition("\n")[0][:200] or type(error).__name__
            raise StoreError(f"cannot serve the store on {host}:{self.port}: {why}") from None

    def connect(self) -> tcp.TcpStore:
        if self._server is None:
            raise StoreError("this agent has ended its store")
        store = tcp.connect(self._address, self.port)
        store.hosting = True
        return store

    def close(self) -> None:
        """End the store, with the connections of its clients."""
        self._server = None


def connector(
    open_socket: Callable[[], socket.socket | None],
    resolve: Callable[[], tuple[str, int]],
    served: list[ServedStore] | None = None,
) -> Callable[[], tcp.TcpStore]:
    """Return a function that connects, and first serves the store if this agent is the store host.

    ``open_socket`` returns the bound socket if this machine is to host. ``resolve`` returns the numeric address to connect to. Both raise
    ``StoreError`` for what may pass (a name that does not resolve yet). An agent that has connected as a client never becomes the host:
    its store would be empty. The store that the agent serves is put into ``served``.
    """
    served = [] if served is None else served
    client_only: list[bool] = []
    one_serves = threading.Lock()  # an abandoned attempt may still run in its thread

    def connect() -> tcp.TcpStore:
        with one_serves:
            listening = None if served or client_only else open_socket()
            if listening is not None:
                served.append(ServedStore(listening))
        if served:
            return served[0].connect()
        store = tcp.connect(*resolve())
        client_only.append(True)
        return store

    return connect

"""The TCPStore on which the workers of a round meet (MASTER_ADDR, MASTER_PORT), hosted by the agent of node rank 0.

The agent holds a listening socket at all times, whose port stands in its row; so the round record can name the address
before anybody serves it, and no port is ever picked twice. Each round gets a server of its own: its key space is empty,
so a restart cannot meet the keys of the round before.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

from elastirun.agent import net
from elastirun.rendezvous.stores import tcp


class WorkerStore:
    """``address``: what the others reach this node by. ``on_error`` gets a line for people; it is called in another thread.

    Raises StartError when no socket can be bound.
    """

    def __init__(self, address: str, on_error: Callable[[str], None]) -> None:
        self._address = address
        self._on_error = on_error
        self._listening = net.listen_on(address)
        self._server: Any = None
        self._turn = 0

    @property
    def port(self) -> int:
        """The port held for the next round."""
        port: int = self._listening.getsockname()[1]
        return port

    def serve(self) -> None:
        """Serve a new, empty store on ``port``, and hold another port for the round after. Returns at once.

        Connections wait in the socket's backlog until torch is imported and the server is up.
        """
        self._server = None
        self._turn += 1
        current, self._listening = self._listening, net.listen_on(self._address)
        threading.Thread(target=self._serve, args=(current, self._turn), name="worker-store", daemon=True).start()

    def _serve(self, listening: socket.socket, turn: int) -> None:
        try:
            server = tcp.serve(listening)
        except Exception as error:  # torch raises of every kind here; whatever it is, the workers cannot meet
            self._on_error(f"cannot serve the workers' store on {self._address}: {error}")
            return
        if turn == self._turn:
            self._server = server

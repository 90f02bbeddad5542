"""The TCPStore on which the workers of a round meet (MASTER_ADDR, MASTER_PORT), hosted by the agent of node rank 0.

The agent holds a listening socket at all times, whose port stands in its row; so the round record can name the address
before anybody serves it, and no port is ever picked twice. Each round gets a server of its own: its key space is empty,
so a restart cannot meet the keys of the round before.

With --master-port and the static backend the port is given, as with torchrun. On one node each round's server listens on
the same socket. On several nodes the agents meet at that port, so workers share the agents' store: node 0 clears it of the
workers' keys before a round begins (``Sync.fresh``).
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

from elastirun.agent.host import net
from elastirun.errors import StartError
from elastirun.rendezvous.stores import tcp


class WorkerStore:
    """Serve the workers' store of each round on ``address``, or on the socket ``given``.

    ``on_error`` gets a line for people; it is called in another thread. ``avoid`` is a port that is not to be used.
    Raises StartError when no socket can be bound.
    """

    def __init__(
        self, address: str, on_error: Callable[[str], None], given: socket.socket | None = None, avoid: int = 0
    ) -> None:
        self._address = address
        self._on_error = on_error
        self._given = given
        self._avoid = avoid
        self._listening = given or self._listen()
        self._server: Any = None
        self._turn = 0

    @property
    def port(self) -> int:
        """The port held for the next round."""
        port: int = self._listening.getsockname()[1]
        return port

    @property
    def everywhere(self) -> bool:
        """Whether every interface is listened on."""
        return net.listens_everywhere(self._listening)

    def end_round(self) -> None:
        """End the server of the last round: the next round's workers may connect before their own server is up."""
        self._server = None
        self._turn += 1

    def serve(self) -> None:
        """Serve a new, empty store on ``port``. Hold another port for the round after, unless one is given. Returns at once.

        Connections wait in the socket's backlog until torch is imported and the server is up.
        """
        self.end_round()
        if self._given is not None:
            current = self._given.dup()
        else:
            current, self._listening = self._listening, self._listen()
        try:
            threading.Thread(target=self._serve, args=(current, self._turn), name="worker-store", daemon=True).start()
        except RuntimeError:  # the limit of processes and threads is reached
            current.close()
            raise StartError("cannot serve the workers' store: no thread can be started; raise this machine's limit of processes") from None

    def _listen(self) -> socket.socket:
        found = net.listen_on(self._address)
        if found.getsockname()[1] != self._avoid:
            return found
        with found:  # held meanwhile, so that another port is found
            return net.listen_on(self._address)

    def _serve(self, listening: socket.socket, turn: int) -> None:
        try:
            server = tcp.serve(listening)
        except Exception as error:  # torch raises of every kind here; whatever it is, the workers cannot meet
            self._on_error(f"cannot serve the workers' store on {self._address}: {error}")
            return
        if turn == self._turn:
            self._server = server


class SharedStore:
    """The workers' store where it is the rendezvous store, at the given ``port``: nothing has to be served."""

    everywhere = False  # said when the rendezvous store begins to listen

    def __init__(self, port: int) -> None:
        self.port = port

    def end_round(self) -> None:
        pass

    def serve(self) -> None:
        pass

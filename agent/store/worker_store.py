"""The workers' store: the TCPStore at MASTER_ADDR:MASTER_PORT, on which the workers of a round make their process groups.

The agent of node rank 0 serves it. Every agent holds a listening socket all the time and writes its port into its row, so the round
record can name the address before anybody serves it, and two rounds never compete for a port. Each round gets a server of its own
with an empty key space, so a restart cannot meet the keys of the round before.

With --port-range it takes these ports from that range. If no other one is free there when a round begins, both rounds use the same port.

With --master-port and the static backend the port is given, as with torchrun. On one node each round's server then listens on
the same socket. On several nodes the agents meet at that port, so the workers share the rendezvous store: the agent of node
rank 0 clears it of the workers' keys before a round begins (``Sync.fresh``).
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastirun.agent.host import net
from elastirun.errors import StartError
from elastirun.rendezvous.stores import tcp_server, torch_class
from elastirun.threads import NONE_LEFT, start_thread


@dataclass(eq=False)
class WorkerStore:
    """Serves the workers' store of each round on a port of ``address``, or on the socket ``given``.

    ``on_error`` gets a line for people; it is called in another thread. ``avoid`` is a port that must not be used, and ``ports`` are the
    first and the last that may be; None: any.
    Raises StartError when no socket can be bound.
    """

    address: str
    on_error: Callable[[str], None]
    given: socket.socket | None = None
    avoid: int = 0
    ports: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self._listening = self.given or self._listen()
        self._lock = threading.Lock()  # held while a server comes up, which takes milliseconds
        self._server: Any = None
        self._serving = 0  # rises with each server, so that one that would come up too late does not

    @property
    def port(self) -> int:
        """The port held for the next round."""
        port: int = self._listening.getsockname()[1]
        return port

    @property
    def everywhere(self) -> bool:
        """Return whether the socket listens on every interface."""
        return net.listens_everywhere(self._listening)

    def end_round(self) -> None:
        """End the server of the last round, so that workers of the next round, which may have the same port, cannot connect to it."""
        with self._lock:
            self._server = None
            self._serving += 1

    def serve(self) -> None:
        """Serve a new, empty store on ``port``, and hold another port for the round after, unless one is given. Returns at once.

        Connections wait in the socket's backlog until a thread has imported torch and the server is up.
        """
        self.end_round()
        if self.given is not None:
            current = self.given.dup()
        else:
            current, self._listening = self._listening, self._listen_for_next_round()
        if start_thread("worker-store", self._serve, current, self._serving) is None:
            current.close()
            raise StartError(f"cannot serve the workers' store: {NONE_LEFT}")

    def _listen(self) -> socket.socket:
        found = net.listen_on(self.address, self.ports)
        if found.getsockname()[1] != self.avoid:
            return found
        with found:  # keep this port busy, so that another one is found
            return net.listen_on(self.address, self.ports)

    def _listen_for_next_round(self) -> socket.socket:
        try:
            return self._listen()
        except StartError:
            if self.ports is None:
                raise
            return self._listening.dup()

    def _serve(self, listening: socket.socket, number: int) -> None:
        try:
            torch_class.tcp_store_class()  # takes long the first time
            with self._lock, listening:
                if number == self._serving:
                    self._server = tcp_server.serve(listening)
        except Exception as error:  # torch raises many kinds of error; with any of them the workers cannot meet
            self.on_error(f"cannot serve the workers' store on {self.address}: {error}")


class RendezvousStoreForWorkers:
    """Stands in for ``WorkerStore`` where the workers use the rendezvous store, at ``port``: there is nothing to serve."""

    def __init__(self, port: int) -> None:
        self.port = port

    def end_round(self) -> None:
        pass

    def serve(self) -> None:
        pass

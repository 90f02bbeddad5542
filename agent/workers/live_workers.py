"""The agent's end of the connections to live workers: they park in place of being ended, and go on in the next round (docs/elastic.md).

The socket is an abstract one. Anybody on this machine may connect, but only workers of this agent are served: the kernel says which
process has connected. All calls happen in the loop's thread; nothing blocks.
"""

from __future__ import annotations

import math
import os
import secrets
import selectors
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

from elastirun.agent.host.accepting import Accepting
from elastirun.agent.part import Part, WorkerExit
from elastirun.agent.workers import live_states
from elastirun.agent.workers.parking import Parking
from elastirun.linux import peer_of
from elastirun.worker.live_messages import MAX_MESSAGE, AllTrain, Hello, Lost, Message, Park, Parked, Resume, decode, encode

BACKLOG = 1024  # connections that wait for the loop: all workers of a large node may connect at once
PER_TURN = 64  # messages that are read of one connection at a time


@dataclass(eq=False)
class LiveWorkers(Part):
    """Asks live workers to park and to go on.

    ``is_worker(pid)``: whether this is a worker that runs here. ``on_parked(pid)``: a worker that was asked to park has left its round.
    ``on_lost(pid, round)``: a worker that was not asked has lost peers in that round, and waits to be asked.
    ``on_gathered(round)``: all workers of that round train together.
    ``runs(round)``: whether the workers of that round run here.
    Where no socket can be had, ``name`` is empty, and every worker is ended after its round.
    """

    _selector: selectors.BaseSelector
    _is_worker: Callable[[int], bool]
    _on_parked: Callable[[int], None]
    _on_lost: Callable[[int, int], None] = lambda pid, round: None
    _on_gathered: Callable[[int], None] = lambda round: None
    _runs: Callable[[int], bool] = lambda round: True

    def __post_init__(self) -> None:
        self._trains: dict[int, tuple[int, Mapping[str, str]]] = {}  # by pid: the round that it began with a state
        self._parking = Parking()
        self._connections: dict[int, socket.socket] = {}  # by pid
        self.name = f"elastirun-{os.getpid()}-{secrets.token_hex(8)}"
        self._accepting: Accepting | None = None
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            listening.bind("\0" + self.name)
            listening.listen(BACKLOG)
        except OSError:
            listening.close()
            self.name = ""
            return
        self._accepting = Accepting(listening, self._selector, self._take)

    def park(self, pids: Collection[int], round: int) -> list[int]:
        """Ask the live ones of the workers ``pids`` to leave ``round``. Return those that were asked; the others have to be ended."""
        return [pid for pid in self._parking.ask(pids, round) if self._send(pid, Park(round))]

    def resume(self, pid: int, round: int, env: Mapping[str, str]) -> bool:
        """Let a parked worker take part in ``round``. Return False if it cannot: it has to be ended."""
        if self.settled(pid):
            self._trains[pid] = round, env
        return self._parking.resume(pid) and self._send(pid, Resume(round, env))

    def is_live(self, pid: int) -> bool:
        """Return whether the worker can be parked."""
        return self._parking.is_live(pid)

    def settled(self, pid: int) -> int:
        """Return the round in which the ranks agreed upon the state of a parked worker; 0: it has none."""
        return self._parking.settled(pid)

    def tick(self, now: float) -> float:
        """Accept connections again when it is time."""
        return math.inf if self._accepting is None else self._accepting.tick(now)

    def worker_ended(self, end: WorkerExit) -> None:
        """Forget a worker. Its forks may hold the connection for longer.

        If it had a state and has succeeded, training has ended. Tell that to the workers that wait to be taken in.
        """
        self._drop(end.pid)
        round, env = self._trains.pop(end.pid, (0, {}))
        if round and end.code == 0:
            address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
            live_states.tell_over(address, port, round, partial(self._runs, round))

    def close(self) -> None:
        """Hang up: workers that are parked end by themselves."""
        for pid in list(self._connections):
            self._drop(pid)
        if self._accepting is not None:
            self._accepting.close()

    def _take(self, connection: socket.socket) -> None:
        pid, uid = peer_of(connection)
        if uid != os.geteuid() or not self._is_worker(pid):
            connection.close()
            return
        self._drop(pid)  # the worker has replaced itself (exec)
        connection.setblocking(False)
        self._connections[pid] = connection
        self._selector.register(connection, selectors.EVENT_READ, partial(self._read, pid))

    def _read(self, pid: int, mask: int) -> None:
        for _ in range(PER_TURN):
            connection = self._connections.get(pid)
            if connection is None:
                return
            try:
                data = connection.recv(MAX_MESSAGE + 1)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            message = decode(data) if data else None
            if isinstance(message, Hello):
                self._parking.hello(pid)
            elif isinstance(message, Parked):
                if self._parking.promise(pid, message.round, message.settled):
                    self._on_parked(pid)
            elif isinstance(message, AllTrain):
                self._on_gathered(message.round)
            elif isinstance(message, Lost):
                self._on_lost(pid, message.round)
            else:
                self._drop(pid)  # it has hung up, or follows another protocol

    def _send(self, pid: int, message: Message) -> bool:
        connection = self._connections.get(pid)
        if connection is None:
            return False
        try:
            connection.send(encode(message))
        except OSError:  # it has ended, or does not read: its grace runs
            self._drop(pid)
            return False
        return True

    def _drop(self, pid: int) -> None:
        self._parking.gone(pid)
        if (connection := self._connections.pop(pid, None)) is not None:
            self._selector.unregister(connection)
            connection.close()

"""The standby store that this agent serves: an empty TCPStore that takes over when the store's host is gone (docs/decisions/0020)."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress

from elastirun.agent.host import net
from elastirun.agent.store.discovery import Search
from elastirun.agent.store.listening import EVERYWHERE
from elastirun.config import Endpoint, LaunchConfig
from elastirun.errors import StartError, StoreError
from elastirun.rendezvous.stores.tcp import TcpStore
from elastirun.rendezvous.stores.tcp_server import ServedStore
from elastirun.rendezvous.wire.records import Place
from elastirun.rendezvous.wire.sync import OWNER


class StandbyStore:
    """One store at a time. After ``renew`` it is another one, at another port, so that its name is another one, see ``Place``.

    ``say`` gets lines for people.
    """

    def __init__(self, config: LaunchConfig, search: Search, say: Callable[[str], None]) -> None:
        self._config, self._search, self._say = config, search, say
        self._served: ServedStore | None = None
        self._ports: set[int] = set()  # of all that were served
        self._one_serves = threading.Lock()  # an abandoned attempt to connect may still run in its thread

    @property
    def port(self) -> int:
        """The port of the store; 0: there is none."""
        served = self._served
        return 0 if served is None else served.port

    def serve(self, me: str, number: str, hosting: bool) -> None:
        """Serve an empty store at the numeric address ``number``, if none is served yet. Errors: ``StoreError``.

        ``me``: the id of this agent's row. ``hosting``: this agent also serves the store where the job was started.
        """
        with self._one_serves:
            only_one = self._config.port_range is not None and self._config.port_range[0] == self._config.port_range[1]
            if self._served is not None or only_one:  # which the workers' store needs
                return
            try:
                listening = self._listen(number, hosting)
            except StartError as error:
                if self._ports:  # it was served before, and the job goes on without
                    return
                raise StoreError(str(error)) from None
            if net.listens_everywhere(listening):
                self._say(f"warning: the standby store listens on {EVERYWHERE}: {number} is no address of this machine")
            made = ServedStore(listening)
            with closing(made.connect()) as store:
                store.put_if(OWNER, None, Place(me, "", made.port).name.encode())
            self._ports.add(made.port)
            self._served = made

    def connect(self) -> TcpStore | None:
        """Open the store; None: there is none."""
        served = self._served
        return None if served is None else served.connect()

    def renew(self) -> None:
        """End the store, which this node has given up: nobody may wait there any more. ``serve`` serves another one."""
        with self._one_serves:
            self.end()
            self._served = None

    def end(self) -> None:
        """End the store that is served here."""
        if self._served is not None:
            self._served.close()

    def _listen(self, number: str, hosting: bool) -> socket.socket:
        """Return a socket at a port that no store of this agent had before. Errors: ``StartError``."""
        if not self._ports and (found := self._listen_at_endpoint(number, hosting)) is not None:
            return found
        with ExitStack() as had:
            while (other := net.listen_on(number, self._config.port_range)).getsockname()[1] in self._ports:
                had.enter_context(other)  # until another port is found
            return other

    def _listen_at_endpoint(self, number: str, hosting: bool) -> socket.socket | None:
        """Return a socket at the port of an endpoint where newcomers look; None: there is none, or it is taken.

        Not where the job was started: who serves the store there could not do so again.
        """
        for port, here in self._search.standby_ports(number):
            with suppress(StartError):
                return net.listen_on(number, (port, port))
            if here and not hosting:
                where = Endpoint(number, port)
                self._say(f"warning: another process has port {port}: newcomers that ask at {where} do not find this job")
        return None

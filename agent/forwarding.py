"""Says, in a store that appears where the job was started, that the job's store has moved. Else a second job would begin there.

The node that has taken over the store does this: the node that died, or a new one, may come up at the endpoint and serve an empty store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing, suppress

from elastirun.agent.host import net
from elastirun.config import Endpoint
from elastirun.errors import StoreError
from elastirun.rendezvous.records import Place, RoundRecord
from elastirun.rendezvous.stores.tcp_plain import PlainTcpStore
from elastirun.rendezvous.sync import SyncProtocol, execute

FORWARD_EVERY = 0.3  # seconds between two tries; a node that comes up there reads its store at least twice before it forms a round
FORWARD_LIMIT = 1.0  # seconds to connect, and for each answer; mostly nobody is there


class Forwarding:
    """A thread that writes ``place``, if there is one, into any store that it finds at ``endpoint``. Nothing is raised.

    ``found`` gets the round record that is there afterwards, when it is another one than before; it is called in the thread.
    """

    def __init__(self, endpoint: Endpoint, protocol: SyncProtocol, found: Callable[[RoundRecord], None]) -> None:
        self.place: Place | None = None  # where the store is; None: where the job was started
        self._endpoint = endpoint
        self._protocol = protocol
        self._found = found
        self._last: RoundRecord | None = None
        self._closed = threading.Event()
        with suppress(RuntimeError):  # the limit of processes is reached: who comes up there finds the job in no other way
            threading.Thread(target=self._run, name="forwarding", daemon=True).start()

    def close(self) -> None:
        """End the thread, without waiting."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(FORWARD_EVERY):
            for address in net.resolve(self._endpoint.host) if self.place else ():
                self._write_at(address)

    def _write_at(self, address: str) -> None:
        with suppress(StoreError), closing(PlainTcpStore(address, self._endpoint.port, FORWARD_LIMIT)) as store:
            if place := self.place:
                record = execute(self._protocol.fresh().put_moved(place), store)
                if record is not None and record != self._last:
                    self._last = record
                    self._found(record)

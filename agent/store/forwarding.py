"""Announces at every endpoint where a node may look for the job that the store has moved, so that no second run begins there.

The node that has taken over the store does this. The node that died, or a new one, may come up at the first endpoint and serve an empty
store there. At the other endpoints are standby stores, by which a node that comes finds the job when nobody answers at the first one.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from elastirun import clock
from elastirun.agent.host import net
from elastirun.agent.store.at_once import at_once
from elastirun.agent.store.discovery import MOST_ADDRESSES
from elastirun.config import Endpoint
from elastirun.errors import StoreError
from elastirun.rendezvous.stores.tcp import TcpStore
from elastirun.rendezvous.wire.records import Place, RoundRecord
from elastirun.rendezvous.wire.sync import SyncProtocol, execute
from elastirun.threads import NONE_LEFT, start_thread

FORWARD_EVERY = 0.3  # seconds between two tries; a node that comes up there reads its store at least twice before it forms a round
FORWARD_LIMIT = 1.0  # seconds to connect, and for each answer; mostly nobody is there
OTHERS_EVERY = 1.0  # seconds between two tries at the other endpoints, where no round can form first
SLOWER = 1.1  # the factor by which the time between two tries grows while they are of no use: in 4 s to 1 s, in 50 s to 5 s
SLOWEST_AT_FIRST = 1.0  # seconds; with FORWARD_EVERY less than ``formation.LOOK_BACK``, by which a first round waits
SLOWEST = 5.0  # seconds; the same at the other endpoints


class Forwarding:
    """Writes the place that is ``told``, if there is one, into each store that it finds at ``endpoints``. Nothing is raised.

    At the first endpoint it is written into the round record, in place of a first round; at the others beside the records of a standby
    store, or into the round record of one that has had the job before. Each endpoint has a thread of its own. ``found`` gets what stood
    there: the round record of the first endpoint, when it is another one than last time, and each other place, in a round record. It is
    called in the thread. ``own``: the standby store of this agent, which needs no telling.
    """

    def __init__(
        self, endpoints: tuple[Endpoint, ...], protocol: SyncProtocol, found: Callable[[RoundRecord], None], own: Endpoint | None = None
    ) -> None:
        self.told: tuple[Place, RoundRecord | None] | None = None  # where the store is, and the record there, see ``StoreTracker.forward``
        self._protocol = protocol
        self._found = found
        self._own = own
        self._last: RoundRecord | None = None
        self._closed = threading.Event()
        self._without_thread = list(enumerate(endpoints))
        self._said = False

    def start_threads(self) -> str:
        """Start the threads that do not run yet. Return a line for people when one cannot be started, the first time; else nothing."""
        while self._without_thread:
            number, endpoint = self._without_thread[0]
            if start_thread("forwarding", self._run, endpoint, number == 0) is None:  # for a while perhaps
                said, self._said = self._said, True
                return "" if said else f"warning: cannot yet tell nodes that come where the store of this job is: {NONE_LEFT}"
            self._without_thread.pop(0)
        return ""

    def close(self) -> None:
        """End the threads, without waiting."""
        self._closed.set()

    def _run(self, endpoint: Endpoint, first: bool) -> None:
        known: dict[str, _Address] = {}
        name = _Name(endpoint.host)
        while not self._closed.wait(FORWARD_EVERY if first else OTHERS_EVERY):
            if (told := self.told) is None:
                continue
            found = [a for a in name.addresses()[:MOST_ADDRESSES] if first or Endpoint(a, endpoint.port) != self._own]
            for absent in known.keys() - found:
                known.pop(absent).close()
            known = {address: known.get(address) or _Address(address, endpoint.port, first) for address in found}
            due = [one for one in known.values() if one.is_due(told[0])]
            at_once(lambda one, told=told: self._write_at(one, *told), due, 4 * FORWARD_LIMIT)  # type: ignore[misc]
        for one in known.values():
            one.close()

    def _write_at(self, one: _Address, place: Place, job: RoundRecord | None) -> None:
        record = one.write(place, self._protocol, job)
        if record is not None and (record != self._last or record.moved not in (None, place)):
            self._last = record
            self._found(record)


class _Name:
    """The addresses of a host by the last look-up that found any. A name server that is slow or gone holds up nobody."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._known: tuple[str, ...] = ()
        self._thread: threading.Thread | None = None  # the look-up under way

    def addresses(self) -> tuple[str, ...]:
        """Return the addresses known so far, and begin another look-up in a thread if none is under way."""
        if net.is_number(self._host):
            return net.resolve(self._host)
        if self._thread is None or not self._thread.is_alive():
            self._thread = start_thread("look-up", self._look_up)
            if self._thread is None:
                self._look_up()
        return self._known

    def _look_up(self) -> None:
        self._known = net.resolve(self._host) or self._known


class _Address:
    """One address of an endpoint: the connection to the store there, and the time of the next try.

    The connection is kept, because a TCPStore looks up the name of each client that connects, and answers nobody meanwhile.
    """

    def __init__(self, address: str, port: int, first: bool) -> None:
        self._where = (address, port)
        self._first = first
        self._store: TcpStore | None = None
        self._place: Place | None = None  # that of the last try
        self._useless = 0  # tries since something answered
        self._due = -math.inf  # the time of the next try on the clock of this node; infinity: one is under way

    def is_due(self, place: Place) -> bool:
        """Return whether to try now. A try that has not come back is not repeated."""
        return self._due < math.inf and (place != self._place or clock.now() >= self._due)

    def write(self, place: Place, protocol: SyncProtocol, job: RoundRecord | None) -> RoundRecord | None:
        """Write ``place`` into the store that is there. Return what stood there, see ``Forwarding``; None: nothing.

        ``job``: the round record at ``place``; None: another place that stands there is not written over.
        """
        began, self._due = clock.now(), math.inf
        self._useless, self._place = self._useless if place == self._place else 0, place
        record: RoundRecord | None = None
        try:
            if self._store is None:
                self._store = TcpStore(*self._where, FORWARD_LIMIT, (protocol.moved_key,))
            here = execute(protocol.here(), self._store)
            over = job is not None
            if self._first:
                record = execute(here.put_moved(place, job=job, over=over), self._store)
            elif (other := execute(here.put_place(place, job, over), self._store)) not in (None, place):
                record = RoundRecord("", moved=other)
            self._useless = 0
        except StoreError:
            self.close()
            self._useless += 1
        slowest = SLOWEST_AT_FIRST if self._first else SLOWEST
        self._due = began + min(FORWARD_EVERY * SLOWER ** min(self._useless, 100), slowest)
        return record

    def close(self) -> None:
        """Close the connection."""
        if self._store is not None:
            self._store.close()
            self._store = None

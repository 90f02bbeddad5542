"""Finds the store of a job that has moved, by the endpoints of ``--rdzv-endpoint=A,B,C``. See docs/decisions/0021.

The first endpoint is where the store is served when the job starts. At the others, and at all addresses of a name that has several, are
standby stores: each says where the store in use is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

from elastirun import clock
from elastirun.agent.host import net
from elastirun.agent.store import shared_store
from elastirun.agent.store.at_once import at_once
from elastirun.config import Endpoint, LaunchConfig
from elastirun.errors import StoreError, StoreRefused
from elastirun.rendezvous.stores.tcp import TcpStore
from elastirun.rendezvous.wire.codec import Codec
from elastirun.rendezvous.wire.records import Place
from elastirun.rendezvous.wire.sync import SyncProtocol, execute

MOST_ADDRESSES = 16  # of one name: in a service with a thousand pods the first few say as much as all of them
MOST_ASKED = 64  # addresses in all; each is asked in a thread of its own
ASK_LIMIT = 1.0  # seconds to connect, and for each answer; the first start of a job waits so long for machines that are down
NAMES_LIMIT = 2.0  # seconds to look names up, after which the others are asked
MOST_REMEMBERED = 16  # places; each is the store of a node that has taken over


@dataclass(frozen=True)
class _Word:
    """The word of one store about the job."""

    place: Place | None = None  # where the store in use is
    term: int = -1  # of the record of a round that has formed here; -1: there is none
    begins: bool = False  # the job is about to begin here


class Search:
    """The endpoints where newcomers look, and what the stores there say of the job. Looks names up and connects, so it may take seconds."""

    def __init__(self, config: LaunchConfig, first: Endpoint) -> None:
        self._config = config
        self._first = first
        self._sent: list[Place] = []  # the places that ``find`` has returned, the last one at the end

    @property
    def several(self) -> bool:
        """Return whether there are standby stores at ports where newcomers look."""
        return self._config.succession and (bool(self._config.other_endpoints) or len(net.resolve(self._first.host)) > 1)

    @property
    def is_shared(self) -> bool:
        """Return whether the first endpoint is the name of this machine and of others, so that it does not say which of them hosts."""
        found = net.resolve(self._first.host) if self._config.succession else ()
        return len({net.is_own(address) for address in found}) > 1

    def find(self, without: tuple[Endpoint, ...], hosting: bool) -> Place | None:
        """Return where the store of the job is, as the stores at the endpoints report it; None: none of them knows.

        ``without``: which are not asked, because this agent serves them or nobody listens there. ``hosting``: this agent serves the store
        where a job starts. When several places are named, return the one that was not returned for the longest time: a node that is dead
        may still be named somewhere.
        Raises StoreError when another agent is about to begin the same job elsewhere; StoreRefused when this one was, too.
        """
        if not self.several:
            return None
        known = self._addresses()
        first = () if hosting else [Endpoint(address, self._first.port) for address in known[self._first]]
        places = dict.fromkeys(Endpoint(a, one.port) for one, addresses in known.items() for a in addresses)
        words = at_once(self._ask, [one for one in places if one not in without][:MOST_ASKED], 4 * ASK_LIMIT)
        found = [word.place for word in sorted(words.values(), key=lambda word: -word.term) if word.place is not None]
        if found:
            place = min(found, key=lambda one: self._sent.index(one) if one in self._sent else -1)
            self._sent = [*(one for one in self._sent if one != place), place][-MOST_REMEMBERED:]
            return place
        for one in (one for one, word in words.items() if word.begins and one not in first):
            why = f"{one} serves a store for this job, too; give all nodes the same --rdzv-endpoint, in the same order"
            raise StoreRefused(why) if hosting else StoreError(why)
        return None

    def standby_ports(self, address: str) -> Iterator[tuple[int, bool]]:
        """Yield the ports for a standby store on ``address`` where newcomers look, each with whether an endpoint has that address.

        Ports of endpoints with other addresses come last: a name may not have the address of a new machine yet.
        """
        known = self._addresses() if self.several else {}
        first = known.get(self._first, ())
        if len(first) == 1:
            known.pop(self._first)
        here = dict.fromkeys(one.port for one, addresses in known.items() if address in addresses)
        for port in dict.fromkeys([*here, *(one.port for one in known)]):
            if (address, port) != (*first, self._first.port):
                yield port, port in here

    def _addresses(self) -> dict[Endpoint, tuple[str, ...]]:
        """Return the addresses of each endpoint, the first one first. All names are looked up at the same time."""
        endpoints = (self._first, *self._config.other_endpoints)
        hosts = list(dict.fromkeys(one.host for one in endpoints))
        if len(hosts) > 1:
            found = at_once(net.resolve, hosts, NAMES_LIMIT)
        else:  # without its addresses a newcomer would begin the job anew beside the one that runs; a slow name server is waited for
            found = {hosts[0]: net.resolve(hosts[0])}
        return {one: found.get(one.host, ())[:MOST_ADDRESSES] for one in endpoints}

    def _ask(self, one: Endpoint) -> _Word:
        """Return what the store at the address ``one`` says; nothing where no store of this job answers."""
        job = self._config.run_id
        protocol = SyncProtocol(shared_store.prefix(job), "", Codec(self._config.token), clock.now)
        try:
            with closing(TcpStore(one.host, one.port, ASK_LIMIT)) as store:
                record, place = execute(execute(protocol.here(), store).find_job(), store)
                if record is not None and record.moved is None and (record.round > 0 or record.closed is not None):
                    goes_on = record.closed is None and bool(record.host)
                    return _Word(Place(record.host, one.host, one.port, record.store_id), record.term) if goes_on else _Word()
                place = record.moved if record is not None and record.moved is not None else place  # also of a store that was given up
                return _Word(place, begins=place is None and shared_store.host_of(store, job) == job)
        except StoreError:
            return _Word()

"""The connection to a TCPStore where the nodes of a job meet: served at the endpoint by one of the agents, or moved to another node."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import closing
from typing import Any

from elastirun import clock
from elastirun.agent.host import net
from elastirun.agent.store import shared_store
from elastirun.agent.store.at_once import at_once
from elastirun.agent.store.discovery import MOST_ASKED, Search
from elastirun.agent.store.forwarding import Forwarding
from elastirun.agent.store.listening import EVERYWHERE
from elastirun.agent.store.standby_store import StandbyStore
from elastirun.agent.store.store_access import StoreAccess, new_store_id, rules
from elastirun.config import Endpoint, LaunchConfig
from elastirun.errors import StartError, StoreError, StoreMoved
from elastirun.rendezvous.stores.base import Store
from elastirun.rendezvous.stores.tcp import ANY_KEY, HANG_LIMIT, TcpStore
from elastirun.rendezvous.stores.tcp_server import ServedStore, connector
from elastirun.rendezvous.wire.codec import Codec
from elastirun.rendezvous.wire.records import Place, RoundRecord
from elastirun.rendezvous.wire.sync import OWNER, SyncProtocol, execute

ANSWER_LIMIT = 3.0  # seconds for the store to answer a first question
PROBE_LIMIT = 2.0  # seconds for each address of the endpoint to accept a connection
STANDBY_LIMIT = 1.0  # seconds for a standby store to accept a connection, and to answer; the next one in line may take over meanwhile


def why_everywhere(endpoint: Endpoint, found: tuple[str, ...]) -> str:
    """Return why the store does not listen on one address alone, and how to change that. ``found``: the endpoint's addresses."""
    if not found:
        return f"{endpoint.host} does not resolve here; give an address of this machine as the endpoint"
    if any(net.is_own(address) for address in found):
        return f"/etc/hosts hides {endpoint.host} behind a loopback address; give {found[0]} as the endpoint"
    return f"{endpoint.host} is no address of this machine (is_host=1); a firewall should let only the job's nodes in"


class EndpointAccess(StoreAccess):
    """A TCPStore at ``endpoint``, which the agent on that machine serves, or the standby store that has taken over from it."""

    def __init__(self, config: LaunchConfig, endpoint: Endpoint) -> None:
        super().__init__(config)
        self._endpoint = endpoint
        self._search = Search(config, endpoint)
        self._unreached: tuple[Endpoint, ...] = ()  # addresses of the endpoint where nobody listened when it was tried last
        self._own_names, self._own_addresses = net.own_names()
        self._known: tuple[str, ...] = ()  # the endpoint's addresses by the last lookup that found any; a later one may fail
        self._hosted_by = ""  # the job whose agent hosts the store, by the store's list of jobs
        self._served_at = ""  # the address on which this agent serves the store; empty for every interface
        self._served: list[ServedStore] = []  # at the endpoint
        self._standby = StandbyStore(config, self._search, self.notices.append)
        self._forwarding: Forwarding | None = None
        self._answered: Place | None = None  # the standby store that has answered last
        self._open = connector(self._open_socket, self._reach, self._served)

    def connect(self, at: Place | None) -> Store:
        if at is not None:
            return self._open_standby(at)
        store = self._open_or_search()
        self._register(store)
        if self.config.succession and self.serves_standby:
            self._serve_standby()
        if store.hosting and self.newcomer and (place := self._search.find(self._own_stores(), hosting=True)):
            first = RoundRecord(new_store_id(), settings=rules(self.config, self).settings)
            execute(self._protocol().put_moved(place, first), store)  # in place of a first round
        return store

    def _open_or_search(self) -> TcpStore:
        """Open the store where the job was started. Raises StoreMoved when that fails, and another endpoint says where the store is."""
        try:
            return self._open()
        except StoreError as error:
            if self.newcomer and (place := self._search.find((*self._own_stores(), *self._unreached), hosting=False)):
                raise StoreMoved(str(error), place) from None
            if self.newcomer and self.config.other_endpoints:
                raise StoreError(f"{error}; no other endpoint says where this job is") from None
            raise

    def _protocol(self) -> SyncProtocol:
        return SyncProtocol(self.key_prefix, "", Codec(self.config.token), clock.now)

    def for_status(self, at: Place | None) -> dict[str, Any]:
        if at is not None or not self._served:
            return super().for_status(at)
        return {"kind": "tcp", "address": self._served_at or "127.0.0.1", "port": self._endpoint.port}

    def forward(self, told: tuple[Place, RoundRecord | None] | None, found: Callable[[RoundRecord], None]) -> None:
        if told is not None and self._forwarding is None:
            own = Endpoint(self.node_address.number, self.standby_port)
            self._forwarding = Forwarding((self._endpoint, *self.config.other_endpoints), self._protocol(), found, own)
        if self._forwarding is not None:
            self._forwarding.told = told
            if told is not None and (line := self._forwarding.start_threads()):
                self.notices.append(line)

    def close(self) -> None:
        if self._forwarding is not None:
            self._forwarding.close()
        super().close()

    @property
    def serves_jobs(self) -> bool:
        return bool(self._served)

    @property
    def standby_port(self) -> int:
        return self._standby.port

    def renew_standby(self) -> None:
        self._standby.renew()

    def end_store(self) -> None:
        for store in self._served:
            store.close()
        self._standby.end()

    def _serve_standby(self) -> None:
        self._standby.serve(self.me, self.node_address.number, bool(self._served))

    def _own_stores(self) -> tuple[Endpoint, ...]:
        """Return where this agent serves stores by itself."""
        standby = [Endpoint(self.node_address.number, port)] if (port := self.standby_port) else []
        found = net.resolve(self._endpoint.host) if self._served else ()
        own = [address for address in found if net.is_own(address)] or found  # none is ours: they are translated to ours
        return (*standby, *(Endpoint(address, self._endpoint.port) for address in own))

    def _is_own(self, at: Place) -> bool:
        own = self._own_stores()
        return any(Endpoint(address, at.port) in own for address in net.resolve(at.address))

    def _open_standby(self, at: Place) -> Store:
        """Open the standby store ``at``, which may be this agent's own. Fails soon where nothing listens, or nothing has answered yet."""
        where = Endpoint(at.address, at.port)
        if (at.id, at.port) == (self.me, self.standby_port) and (own := self._standby.connect()) is not None:
            return own
        if at.port in (self.standby_port, self._endpoint.port) and self._is_own(at):
            raise StoreError(f"the node that served the standby store at {where} has ended; this agent listens there now")
        why = "the name does not resolve"
        for address in net.resolve(at.address):
            try:
                store = TcpStore(address, at.port, ANSWER_LIMIT if at == self._answered else STANDBY_LIMIT, ANY_KEY)
                owner = store.get([OWNER]).get(OWNER)
            except StoreError as error:
                why = str(error)
                continue
            if owner != at.name.encode():
                raise StoreError(f"the standby store at {where} is another agent's; the one that served it has ended")
            store.give_time(HANG_LIMIT)
            self._answered = at
            self._host_failed = None  # a newcomer needs no store of its own where the job was started
            self._find_node_address(address, at.port)
            self._serve_standby()
            return store
        raise StoreError(f"the standby store at {where}: {why}")

    def _reach(self) -> tuple[str, int]:
        """Return address and port of a TCPStore that answers at the endpoint. Errors: ``StoreError``."""
        endpoint = self._endpoint
        self._known = net.resolve(endpoint.host)[:MOST_ASKED] or self._known
        whys = at_once(lambda address: net.probe(address, endpoint.port, PROBE_LIMIT), self._known, PROBE_LIMIT + 0.5)
        listening = [address for address, why in whys.items() if why is None]
        self._unreached = tuple(Endpoint(address, endpoint.port) for address in self._known if address not in listening)
        strange = at_once(self._what_is_wrong_at, listening, 3 * ANSWER_LIMIT)
        for address, wrong in strange.items():
            if not wrong:
                self._reached = (address, endpoint.port)
                self._for_guard = {"kind": "tcp", "address": address, "port": endpoint.port}
                return self._reached
        if listening:
            raise StoreError(next(iter(strange.values()), f"{endpoint} accepts connections but has not answered in {3 * ANSWER_LIMIT:g} s"))
        why = next(iter(whys.values()), None) or "the name does not resolve"
        if self._reached:
            raise StoreError(f"{endpoint}: {why}; the agent that hosted the store there is gone or cut off")
        if hint := self._hint:
            raise StoreError(f"{why}{hint}")
        explained = net.explain_no_host(endpoint, self._own_names, self._own_addresses, self.config.endpoint_option)
        raise StoreError(f"{why}; {explained}" if whys else explained)

    def _what_is_wrong_at(self, address: str) -> str:
        """Return why the job cannot meet at what listens at this address of the endpoint; empty: it can.

        A standby store may listen there, with other nodes of the job in a list, or in a name of several addresses. In such a store no
        round may form first, and nobody has said that it is hosted for jobs.
        """
        endpoint = self._endpoint
        # A job that has moved only looks here, and a host that stands still must not hold it up for long.
        limit = STANDBY_LIMIT if self.has_moved else ANSWER_LIMIT
        if foreign := net.who_answers(address, endpoint.port, limit, again=self.newcomer):
            return f"what listens at {endpoint} {foreign}"
        if not self._search.several:
            return ""
        try:
            with closing(TcpStore(address, endpoint.port)) as store:
                hosted = shared_store.host_of(store, self.config.run_id)
        except StoreError as error:
            return str(error)
        return "" if hosted else f"no agent has said yet that it hosts the store at {Endpoint(address, endpoint.port)}{self._hint}"

    @property
    def _hint(self) -> str:
        """Advice for people when no node hosts the store because the endpoint names several machines; mostly empty."""
        option = self.config.endpoint_option
        how = f"put one of them before it in {option}, or give one of them --rdzv-conf=is_host=1"
        return f"; {self._endpoint.host} is the name of several machines: {how}" if self._search.is_shared else ""

    def _open_socket(self) -> socket.socket | None:
        """Return a listening socket for the rendezvous store if this node is its host. Errors: ``StoreError``."""
        endpoint = self._endpoint
        if self.config.is_host is None and self._search.is_shared:
            return None
        try:
            listening = net.open_host_socket(endpoint, self.config.is_host, self.config.endpoint_option)
        except StartError as error:
            self._host_failed = self._host_failed or (clock.now(), str(error))
            raise StoreError(str(error)) from None
        if listening is not None:
            found = net.resolve(endpoint.host)
            self._reached = (found[0] if found else "127.0.0.1", endpoint.port)
            self._served_at = "" if net.listens_everywhere(listening) else net.address_of(listening)
            if not self._served_at:
                self.notices.append(f"warning: the rendezvous store listens on {EVERYWHERE}: {why_everywhere(endpoint, found)}")
        return listening

    def _register(self, store: Store) -> None:
        """Put the job on the store's list of jobs. Its workers use the store too if that was asked for and no other job hosts it."""
        host, job = shared_store.register(store, self.config.run_id), self.config.run_id
        if self.config.meet_at_endpoint and not host and self._address is None:
            raise StoreError(f"no agent has said yet that it hosts the store at {self._endpoint}")
        if host not in ("", job, self._hosted_by):
            self.notices.append(f"warning: the store is hosted by the agent of job {host!r}: should that agent die, this job ends with it")
        self._hosted_by = host
        assert self._reached is not None
        self._find_node_address(*self._reached)
        if self.config.meet_at_endpoint and host == job:
            reached = self._reached[0] if self._reached and not store.hosting else self.node_address.number
            self.worker_endpoint = self._served_at or reached, self._endpoint.port

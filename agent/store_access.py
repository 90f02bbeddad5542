"""The part of this node in the rendezvous: its row, the rules of the job, and the connection to the store.

``store_access`` is the only place that chooses a store. Another kind of store is one more subclass of ``StoreAccess``.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import urllib.parse
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

from elastirun import clock
from elastirun.agent import shared_store
from elastirun.agent.at_once import at_once
from elastirun.agent.forwarding import Forwarding
from elastirun.agent.host import net
from elastirun.agent.host.listening import EVERYWHERE
from elastirun.agent.private_etcd import PrivateEtcd
from elastirun.agent.search import MOST_ASKED, Search
from elastirun.agent.standby_store import StandbyStore
from elastirun.agent.worker_store import RendezvousStoreForWorkers, WorkerStore
from elastirun.config import Endpoint, Etcd, LaunchConfig
from elastirun.errors import StartError, StoreError, StoreMoved
from elastirun.rendezvous.codec import Codec, clip
from elastirun.rendezvous.records import NodeRow, Place, RoundRecord
from elastirun.rendezvous.rules import Rules
from elastirun.rendezvous.stores import tcp, torch_class
from elastirun.rendezvous.stores.base import Store
from elastirun.rendezvous.stores.memory import MemoryStore
from elastirun.rendezvous.stores.tcp_plain import PlainTcpStore
from elastirun.rendezvous.sync import OWNER, SyncProtocol, execute
from elastirun.rendezvous.timing import ETCD_LIMIT, EXCHANGE_LIMIT

ANSWER_LIMIT = 3.0  # seconds for the store to answer a first question, before torch's client waits 15 s for it
PROBE_LIMIT = 2.0  # seconds for each address of the endpoint to accept a connection
HOST_TRIES = 5.0  # seconds to try for a port that an agent just ending may still hold
STANDBY_LIMIT = 1.0  # seconds for a standby store to accept a connection, and to answer; the next one in line may take over meanwhile


def new_row(config: LaunchConfig) -> NodeRow:
    """Return the row of a new incarnation of this node. Its address and port are set once the store was reached."""
    name = clip(socket.gethostname(), 128)
    incarnation = f"{urllib.parse.quote(name, safe='')}-{os.getpid()}-{secrets.token_hex(4)}"
    return NodeRow(incarnation, name, "", 0, config.nproc, config.role, config.node_rank)


def rules(config: LaunchConfig, access: StoreAccess) -> Rules:
    """Return the rules by which the rounds of this job form and end."""
    return Rules(
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        max_restarts=config.max_restarts,
        restart_window=config.restart_window,
        fail_fast=config.fail_fast,
        fixed_ranks=config.fixed_ranks,
        private=config.standalone,
        lasting=access.outlives_job,
        hosted=config.endpoint is not None and not access.outlives_job,
        store_succession=config.store_succession,
        **vars(config.timing),
    )


def new_store_id() -> str:
    """Return an id for a store that is found empty, which no other store has."""
    return secrets.token_hex(8)


_EVERYWHERE = f"listens on {EVERYWHERE}"


@dataclass(frozen=True)
class NodeAddress:
    """The address and the network interfaces of this node, as far as other nodes and the workers need them."""

    address: str  # for the other nodes; a name when --local-addr is one
    number: str  # the same as a number
    interface: str | None  # of ``number``
    loopback: str | None  # of 127.0.0.1


def why_everywhere(endpoint: Endpoint, found: tuple[str, ...]) -> str:
    """Return why the store does not listen on one address alone, and how to change that. ``found``: the endpoint's addresses."""
    if not found:
        return f"{endpoint.host} does not resolve here; give an address of this machine as the endpoint"
    if any(net.is_own(address) for address in found):
        return f"/etc/hosts hides {endpoint.host} behind a loopback address; give {found[0]} as the endpoint"
    return f"{endpoint.host} is no address of this machine (is_host=1); a firewall should let only the job's nodes in"


class StoreAccess:
    """The way of this node to the rendezvous store. Each subclass is for one kind of store, and has a method ``connect``.

    ``connect`` and what it sets belong to the store thread, which may resolve names and wait; ``worker_store`` and ``close`` are
    called in the agent's loop.
    """

    outlives_job = False  # the store, with the keys of the job, is still there when all nodes of the job have ended
    exchange_limit = EXCHANGE_LIMIT  # seconds for one exchange with the store
    me = ""  # the id of this agent's row
    newcomer = True  # no round of the job was seen yet, so its store may be anywhere
    has_moved = False  # this node uses another store than the one that the job was started with

    def __init__(self, config: LaunchConfig) -> None:
        self.config = config
        self.notices: deque[str] = deque()  # lines for people
        self.key_prefix = shared_store.prefix(config.run_id)  # of every key of this job
        self.private_etcd: PrivateEtcd | None = None
        self.worker_endpoint: tuple[str, int] | None = None  # address and port of the rendezvous store, if the workers use it too
        self._reached: tuple[str, int] | None = None  # address and port where the store was reached last
        self._address: NodeAddress | None = None
        self._worker_socket: socket.socket | None = None  # listens where the workers of a job of one node were told to meet
        self._host_failed: tuple[float, str] | None = None  # since when and why this node cannot serve the store, which it should
        self._for_guard: dict[str, Any] | None = None

    def connect(self, at: Place | None) -> Store:
        """Open the standby store ``at``; None: the store that the job was started with. Errors: ``StoreError``."""
        raise NotImplementedError

    def for_guard(self, at: Place | None) -> dict[str, Any] | None:
        """Return how the guard opens the store ``at`` when this agent has died (death_notice.py); None: not at all."""
        return {"kind": "tcp", "address": at.address, "port": at.port, "owner": at.name} if at else self._for_guard

    def for_status(self, at: Place | None) -> dict[str, Any]:
        """Return how ``elastirun status`` opens the store ``at`` on this machine (status_stores.py)."""
        return self.for_guard(at) or {"kind": "none"}

    def forward(self, told: tuple[Place, RoundRecord | None] | None, found: Callable[[RoundRecord], None]) -> None:
        """Say where the job was started, from now on, what is ``told``: ``JobStore.forward``; None: say nothing.

        ``found``: see ``Forwarding``.
        """

    @property
    def serves_jobs(self) -> bool:
        """Whether this agent serves the store at the endpoint, which other jobs may use, too."""
        return False

    @property
    def standby_port(self) -> int:
        """The port of the standby store that this agent serves; 0: it serves none."""
        return 0

    def renew_standby(self) -> None:
        """Serve another standby store from now on: the job has left that of this node. Its port is another one, see ``Place``."""

    def end_store(self) -> None:
        """End the store that this agent serves, if it does."""

    def close(self) -> None:
        if self.private_etcd:
            self.private_etcd.close()
        if self._worker_socket:
            self._worker_socket.close()

    @property
    def host_failure(self) -> str:
        """The reason why this node, which should serve the store, cannot; empty until it has tried for ``HOST_TRIES`` seconds."""
        if self._host_failed is None or self._reached is not None:
            return ""
        since, why = self._host_failed
        return why if clock.now() > since + HOST_TRIES else ""

    @property
    def node_address(self) -> NodeAddress:
        """This node's address. Known once the store was reached, because the route to the store decides it."""
        assert self._address is not None
        return self._address

    def worker_store(self, on_error: Callable[[str], None]) -> WorkerStore | RendezvousStoreForWorkers:
        """Make the store for the workers of this node's rounds. Raises StartError when no socket can be bound."""
        if self.worker_endpoint:
            return RendezvousStoreForWorkers(self.worker_endpoint[1])
        avoid = self.config.endpoint.port if self.config.endpoint else 0
        made = WorkerStore(self.node_address.number, on_error, self._worker_socket, avoid, self.config.port_range)
        if made.everywhere:
            self.notices.append(f"warning: the workers' store {_EVERYWHERE}: {self.node_address.address} is no address of this machine")
        return made

    def _find_node_address(self, store_address: str, store_port: int) -> None:
        """Set this node's address, once. Looks names up, which may take seconds."""
        if self._address is None:
            address = self._choose_address(store_address, store_port)
            number = next(iter(net.resolve(address)), address)
            self._address = NodeAddress(address, number, net.interface_of(number), net.interface_of("127.0.0.1"))

    def _choose_address(self, store_address: str, store_port: int) -> str:
        """Return the address by which the other nodes reach this one."""
        if self.config.local_addr:
            return self.config.local_addr
        return store_address if self.config.standalone else net.advertised_address(store_address, store_port)


class MemoryAccess(StoreAccess):
    """One node: the rendezvous store is in the agent's memory, and the workers meet at the endpoint, if there is one."""

    def __init__(self, config: LaunchConfig) -> None:
        super().__init__(config)
        self._data: dict[str, bytes] = {}

    def connect(self, at: Place | None) -> Store:
        if self.config.endpoint is not None and self._worker_socket is None:
            try:
                self._worker_socket = net.open_local_socket(self.config.endpoint, self.config.endpoint_option)
            except StartError as error:
                self._host_failed = self._host_failed or (clock.now(), str(error))
                raise StoreError(str(error)) from None
        self._reached = self._worker_socket.getsockname()[:2] if self._worker_socket else ("127.0.0.1", 0)
        self._find_node_address(*self._reached)
        return MemoryStore(self._data)

    def for_status(self, at: Place | None) -> dict[str, Any]:
        return {"kind": "memory", "data": {key: value.decode("ascii") for key, value in dict(self._data).items()}}

    def _choose_address(self, store_address: str, store_port: int) -> str:
        return store_address if self._worker_socket else super()._choose_address(store_address, store_port)


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
        self._served: list[tcp.ServedStore] = []  # at the endpoint
        self._standby = StandbyStore(config, self._search, self.notices.append)
        self._forwarding: Forwarding | None = None
        self._answered: Place | None = None  # the standby store that has answered last
        self._open = tcp.connector(self._open_socket, self._reach, self._served)

    def connect(self, at: Place | None) -> Store:
        if at is not None:
            return self._open_standby(at)
        store = self._open_or_search()
        self._register(store)
        if self.config.succession:
            self._serve_standby()
        if store.hosting and self.newcomer and (place := self._search.find(self._own_stores(), hosting=True)):
            first = RoundRecord(new_store_id(), settings=rules(self.config, self).settings)
            execute(self._protocol().put_moved(place, first), store)  # in place of a first round
        return store

    def _open_or_search(self) -> tcp.TcpStore:
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
                with closing(PlainTcpStore(address, at.port, ANSWER_LIMIT if at == self._answered else STANDBY_LIMIT)) as asked:
                    owner = asked.get([OWNER]).get(OWNER)
            except StoreError as error:
                why = str(error)
                continue
            if owner != at.name.encode():
                raise StoreError(f"the standby store at {where} is another agent's; the one that served it has ended")
            store = tcp.TcpStore(address, at.port)
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
            with closing(PlainTcpStore(address, endpoint.port)) as store:
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
            self._served_at = "" if net.listens_everywhere(listening) else listening.getsockname()[0]
            if not self._served_at:
                self.notices.append(f"warning: the rendezvous store {_EVERYWHERE}: {why_everywhere(endpoint, found)}")
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


class EtcdAccess(StoreAccess):
    """An etcd cluster, or an etcd server that the agent starts for itself."""

    outlives_job = True
    exchange_limit = ETCD_LIMIT

    def __init__(self, config: LaunchConfig, etcd: Etcd) -> None:
        super().__init__(config)
        from elastirun.rendezvous.stores.etcd import store
        from elastirun.rendezvous.stores.etcd.access import Access

        self._etcd = etcd
        self.private_etcd = None if etcd.endpoints else PrivateEtcd()
        access = Access(etcd.tls, etcd.ca_cert, etcd.cert, etcd.key, etcd.user, etcd.password_file)
        self._names = [self.private_etcd.endpoint] if self.private_etcd else [str(endpoint) for endpoint in etcd.endpoints]
        self._open = store.connector(self._names, access, etcd.prefix, config.timing.expire, say=self.notices.append)
        if not self.private_etcd:
            path = [os.path.abspath(folder) for folder in sys.path]
            more = {"prefix": etcd.prefix, "expire": config.timing.expire, "path": path}
            self._for_guard = {"kind": "etcd", "endpoints": self._names, "access": vars(access.anywhere()), **more}
        self.key_prefix = self.key_prefix.removeprefix(shared_store.JOBS)  # there is no list of jobs; etcd.prefix comes before it

    def connect(self, at: Place | None) -> Store:
        if self.private_etcd:
            self.private_etcd.check()
        made = self._open()
        if self.private_etcd:
            self._reached = ("127.0.0.1", 0)
        else:
            endpoint = self._etcd.endpoints[self._names.index(made.endpoint)]
            found = net.resolve(endpoint.host)
            self._reached = (found[0] if found else endpoint.host, endpoint.port)
        with suppress(ImportError):  # loading the class holds up the loop, so it is done before this node joins
            torch_class.tcp_store_class()
        self._find_node_address(*self._reached)
        return made


def store_access(config: LaunchConfig) -> StoreAccess:
    """Choose the store. Raises StartError when it needs a program that is not there."""
    if config.etcd is not None:
        return EtcdAccess(config, config.etcd)
    if config.endpoint is not None and not config.standalone:
        return EndpointAccess(config, config.endpoint)
    return MemoryAccess(config)

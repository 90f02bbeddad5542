"""The part of this node in the rendezvous: its row, the rules of the job, and the connection to the store.

Each kind of store is a subclass of ``StoreAccess``: a TCPStore in ``endpoint_access.py``, the others here. ``choose_store.py`` chooses one.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import urllib.parse
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from elastirun import clock
from elastirun.agent.host import net
from elastirun.agent.store import shared_store
from elastirun.agent.store.listening import EVERYWHERE
from elastirun.agent.store.worker_store import RendezvousStoreForWorkers, WorkerStore
from elastirun.config import Etcd, LaunchConfig
from elastirun.errors import StartError, StoreError
from elastirun.rendezvous.rules import Rules
from elastirun.rendezvous.stores import torch_class
from elastirun.rendezvous.stores.base import Store
from elastirun.rendezvous.stores.memory import MemoryStore
from elastirun.rendezvous.timing import ETCD_LIMIT, EXCHANGE_LIMIT
from elastirun.rendezvous.wire.records import NodeRow, Place, RoundRecord

HOST_TRIES = 5.0  # seconds to try for a port that an agent just ending may still hold


def new_row(config: LaunchConfig, name: str) -> NodeRow:
    """Return the row of a new incarnation of the node called ``name``. Its address and port are set once the store was reached."""
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
        mesh_text=config.mesh_of_rounds,
        node_unit=config.node_unit,
        **vars(config.timing),
    )


def new_store_id() -> str:
    """Return an id for a store that is found empty, which no other store has."""
    return secrets.token_hex(8)


@dataclass(frozen=True)
class NodeAddress:
    """The address and the network interfaces of this node, as far as other nodes and the workers need them."""

    address: str  # for the other nodes; a name when --local-addr is one
    number: str  # the same as a number
    interface: str | None  # of ``number``
    loopback: str | None  # of 127.0.0.1


class StoreAccess:
    """The way of this node to the rendezvous store. Each subclass is for one kind of store, and has a method ``connect``.

    ``connect`` and what it sets belong to the store thread, which may resolve names and wait; ``worker_store`` and ``close`` are
    called in the agent's loop.
    """

    outlives_job = False  # the store, with the keys of the job, is still there when all nodes of the job have ended
    exchange_limit = EXCHANGE_LIMIT  # seconds for one exchange with the store
    me = ""  # the id of this agent's row
    serves_standby = True  # this node serves a standby store, where its job may need one
    newcomer = True  # no round of the job was seen yet, so its store may be anywhere
    has_moved = False  # this node uses another store than the one that the job was started with

    def __init__(self, config: LaunchConfig) -> None:
        self.config = config
        self.notices: deque[str] = deque()  # lines for people
        self.key_prefix = shared_store.prefix(config.run_id)  # of every key of this job
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
        """Return how ``elastirun status`` opens the store ``at`` on this machine (locations.py)."""
        return self.for_guard(at) or {"kind": "none"}

    def forward(self, told: tuple[Place, RoundRecord | None] | None, found: Callable[[RoundRecord], None]) -> None:
        """Say where the job was started, from now on, what is ``told``: ``StoreTracker.forward``; None: say nothing.

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
            why = f"{self.node_address.address} is no address of this machine"
            self.notices.append(f"warning: the workers' store listens on {EVERYWHERE}: {why}")
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
        own = self._worker_socket
        self._reached = (net.address_of(own), own.getsockname()[1]) if own else ("127.0.0.1", 0)
        self._find_node_address(*self._reached)
        return MemoryStore(self._data)

    def for_status(self, at: Place | None) -> dict[str, Any]:
        return {"kind": "memory", "data": {key: value.decode("ascii") for key, value in dict(self._data).items()}}

    def _choose_address(self, store_address: str, store_port: int) -> str:
        return store_address if self._worker_socket else super()._choose_address(store_address, store_port)


class EtcdAccess(StoreAccess):
    """An etcd cluster."""

    outlives_job = True
    exchange_limit = ETCD_LIMIT

    def __init__(self, config: LaunchConfig, etcd: Etcd) -> None:
        super().__init__(config)
        from elastirun.rendezvous.stores.etcd import store
        from elastirun.rendezvous.stores.etcd.access import Access

        self._etcd = etcd
        access = Access(etcd.tls, etcd.ca_cert, etcd.cert, etcd.key, etcd.user, etcd.password_file)
        self._names = [str(endpoint) for endpoint in etcd.endpoints]
        self._open = store.connector(self._names, access, etcd.prefix, config.timing.expire, say=self.notices.append)
        path = [os.path.abspath(folder) for folder in sys.path]
        more = {"prefix": etcd.prefix, "expire": config.timing.expire, "path": path}
        self._for_guard = {"kind": "etcd", "endpoints": self._names, "access": vars(access.anywhere()), **more}
        self.key_prefix = self.key_prefix.removeprefix(shared_store.JOBS)  # there is no list of jobs; etcd.prefix comes before it

    def connect(self, at: Place | None) -> Store:
        made = self._open()
        endpoint = self._etcd.endpoints[self._names.index(made.endpoint)]
        found = net.resolve(endpoint.host)
        self._reached = (found[0] if found else endpoint.host, endpoint.port)
        with suppress(ImportError):  # loading the class holds up the loop, so it is done before this node joins
            torch_class.tcp_store_class()
        self._find_node_address(*self._reached)
        return made

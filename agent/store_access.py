"""Where and how this agent meets the others: what it says of itself, by which rules, how it reaches the store, and serves it if need be."""

from __future__ import annotations

import os
import secrets
import socket
import urllib.parse
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from elastirun import clock
from elastirun.agent import shared_store
from elastirun.agent.host import net
from elastirun.agent.host.listening import EVERYWHERE
from elastirun.agent.private_etcd import PrivateEtcd
from elastirun.agent.worker_store import SharedStore, WorkerStore
from elastirun.config import Endpoint, Etcd, LaunchConfig
from elastirun.errors import StartError, StoreError
from elastirun.rendezvous.codec import clip
from elastirun.rendezvous.records import NodeRow
from elastirun.rendezvous.rules import Rules
from elastirun.rendezvous.stores import tcp, torch_class
from elastirun.rendezvous.stores.base import Store
from elastirun.rendezvous.stores.memory import MemoryStore
from elastirun.rendezvous.timing import ETCD_LIMIT, EXCHANGE_LIMIT

ANSWER_LIMIT = 3.0  # seconds for the store to answer a first question, before torch's client waits 15 s for it
HOST_TRIES = 5.0  # seconds to try for a port that an agent just ending may still hold


def introduction(config: LaunchConfig) -> NodeRow:
    """The row of a new incarnation of this node. Its address and port are known once the store was reached."""
    name = clip(socket.gethostname(), 128)
    incarnation = f"{urllib.parse.quote(name, safe='')}-{os.getpid()}-{secrets.token_hex(4)}"
    return NodeRow(incarnation, name, "", 0, config.nproc, config.role, config.node_rank)


def rules(config: LaunchConfig) -> Rules:
    """What the job asks of its rounds."""
    return Rules(
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        max_restarts=config.max_restarts,
        restart_window=config.restart_window,
        fail_fast=config.fail_fast,
        fixed_ranks=config.fixed_ranks,
        private=config.standalone,
        lasting=config.etcd is not None,
        hosted=config.etcd is None and config.endpoint is not None,
        new_store_id=secrets.token_hex(8),
        **vars(config.timing),
    )


_EVERYWHERE = f"listens on {EVERYWHERE}"


@dataclass(frozen=True)
class Here:
    """This machine as the other nodes see it."""

    address: str  # what the others reach it by; a name when --local-addr is one
    number: str  # the same as a number
    interface: str | None  # of ``number``
    loopback: str | None  # of 127.0.0.1


def why_everywhere(endpoint: Endpoint, found: tuple[str, ...]) -> str:
    """Why the store does not listen on one address alone, and how to change that."""
    if not found:
        return f"{endpoint.host} does not resolve here; give an address of this machine as the endpoint"
    if any(net.is_own(address) for address in found):
        return f"/etc/hosts hides {endpoint.host} behind a loopback address; give {found[0]} as the endpoint"
    return f"{endpoint.host} is no address of this machine (is_host=1); a firewall should let only the job's nodes in"


class Place:
    """``connect`` opens the store; it is called in the driver's thread, which also sets ``reached`` and adds to ``notices``."""

    def __init__(self, config: LaunchConfig) -> None:
        self.config = config
        self.reached: tuple[str, int] | None = None  # address and port where the store was reached last
        self.notices: deque[str] = deque()  # lines for people
        self.exchange_limit = ETCD_LIMIT if config.etcd else EXCHANGE_LIMIT
        self.prefix = shared_store.prefix(config.run_id)  # of every key of this job
        self._cannot_host: tuple[float, str] | None = None  # since when and why the store that is ours to host cannot be served
        self.private: PrivateEtcd | None = None
        self.shared: tuple[str, int] | None = None  # where this node reaches the store, if the workers meet on it too
        self._listening: socket.socket | None = None  # at the endpoint, for the workers of a job of one node
        self._here: Here | None = None
        self._served_at = ""  # the address that the rendezvous store is served on here; empty for every interface
        if config.etcd is not None:
            self.private = None if config.etcd.endpoints else PrivateEtcd()
            self.connect = self._at_etcd(config.etcd)
        elif config.endpoint is not None and not config.standalone:
            self.connect = self._at_endpoint(config.endpoint)
        else:
            self.connect = self._alone(config.endpoint)

    def close(self) -> None:
        if self.private:
            self.private.close()
        if self._listening:
            self._listening.close()

    @property
    def hopeless(self) -> str:
        """Why the store that is ours to host will not be served; empty while there is hope."""
        tried = self._cannot_host is not None and self.reached is None and clock.now() > self._cannot_host[0] + HOST_TRIES
        return self._cannot_host[1] if tried and self._cannot_host else ""

    @property
    def here(self) -> Here:
        """This node's address and interfaces. Known once the store was reached."""
        assert self._here is not None
        return self._here

    def worker_store(self, on_error: Callable[[str], None]) -> WorkerStore | SharedStore:
        """The store on which the workers of this node's rounds meet. Raises StartError when no socket can be bound."""
        if self.shared:
            return SharedStore(self.shared[1])
        avoid = self.config.endpoint.port if self.config.endpoint else 0
        made = WorkerStore(self.here.number, on_error, self._listening, avoid)
        if made.everywhere:
            self.notices.append(f"warning: the workers' store {_EVERYWHERE}: {self.here.address} is no address of this machine")
        return made

    def _look_around(self) -> None:
        """Find out by which address and interface the others reach this node, once; names are resolved here, outside of the loop."""
        assert self.reached is not None
        if self._here is not None:
            return
        address, port = self.reached
        if self.config.local_addr and self._listening is None:
            address = self.config.local_addr
        elif not self.config.standalone:
            address = net.advertised_address((address,), port, None)
        number = next(iter(net.resolve(address)), address)
        self._here = Here(address, number, net.interface_of(number), net.interface_of("127.0.0.1"))

    def _alone(self, endpoint: Endpoint | None) -> Callable[[], Store]:
        """One node: the agent's store is in its memory, and the workers' at ``endpoint`` if there is one."""
        data: dict[str, bytes] = {}

        def connect() -> Store:
            if endpoint is not None and self._listening is None:
                try:
                    self._listening = net.open_local_socket(endpoint, self.config.endpoint_option)
                except StartError as error:
                    self._cannot_host = self._cannot_host or (clock.now(), str(error))
                    raise StoreError(str(error)) from None
            self.reached = self._listening.getsockname()[:2] if self._listening else ("127.0.0.1", 0)
            self._look_around()
            return MemoryStore(data)

        return connect

    def _at_etcd(self, etcd: Etcd) -> Callable[[], Store]:
        from elastirun.rendezvous.stores.etcd import store as store
        from elastirun.rendezvous.stores.etcd.access import Access

        access = Access(etcd.tls, etcd.ca_cert, etcd.cert, etcd.key, etcd.user, etcd.password_file)
        names = [self.private.endpoint] if self.private else [str(endpoint) for endpoint in etcd.endpoints]
        connect = store.connector(names, access, etcd.prefix, self.config.timing.expire, say=self.notices.append)

        self.prefix = self.prefix.removeprefix(shared_store.JOBS)  # at etcd there is no list of jobs, and its prefix comes before

        def connect_and_see_where() -> Store:
            if self.private:
                self.private.check()
            made = connect()
            if self.private:
                self.reached = ("127.0.0.1", 0)
            else:
                endpoint = etcd.endpoints[names.index(made.endpoint)]
                found = net.resolve(endpoint.host)
                self.reached = (found[0] if found else endpoint.host, endpoint.port)
            with suppress(ImportError):  # loading it holds up the agent: before it joins, not while its workers run
                torch_class.tcp_store_class()
            self._look_around()
            return made

        return connect_and_see_where

    def _at_endpoint(self, endpoint: Endpoint) -> Callable[[], Store]:
        names, addresses = net.own_names()
        known: list[str] = []  # the endpoint's addresses as the last successful lookup returned them; a later lookup may fail

        def resolve() -> tuple[str, int]:
            known[:] = net.resolve(endpoint.host) or known
            whys = {address: net.probe(address, endpoint.port, 2.0) for address in known}
            for address, why in whys.items():
                if why is None:
                    if foreign := net.who_answers(address, endpoint.port, ANSWER_LIMIT):
                        raise StoreError(f"what listens at {endpoint} {foreign}")
                    net.shorten_name_timeouts()
                    self.reached = (address, endpoint.port)
                    return self.reached
            why = next(iter(whys.values()), None) or "the name does not resolve"
            if self.reached:
                raise StoreError(f"{endpoint}: {why}; the agent that hosted the store there is gone or cut off")
            raise StoreError(f"{why}; {net.explain_no_host(endpoint, names, addresses, self.config.endpoint_option)}")

        connect = tcp.connector(lambda: self._open_socket(endpoint), resolve)

        def connect_and_register() -> Store:
            store = connect()
            self._register(store, endpoint)
            return store

        return connect_and_register

    def _open_socket(self, endpoint: Endpoint) -> socket.socket | None:
        """The socket for the rendezvous store, when it is ours to host."""
        try:
            listening = net.open_host_socket(endpoint, self.config.is_host, self.config.endpoint_option)
        except StartError as error:
            self._cannot_host = self._cannot_host or (clock.now(), str(error))
            raise StoreError(str(error)) from None
        if listening is not None:
            net.shorten_name_timeouts()
            found = net.resolve(endpoint.host)
            self.reached = (found[0] if found else "127.0.0.1", endpoint.port)
            self._served_at = "" if net.listens_everywhere(listening) else listening.getsockname()[0]
            if not self._served_at:
                self.notices.append(f"warning: the rendezvous store {_EVERYWHERE}: {why_everywhere(endpoint, found)}")
        return listening

    def _register(self, store: Store, endpoint: Endpoint) -> None:
        """Put the job on the store's list, and find out whether its workers may use the store too: only where it is the job's own."""
        host, job = shared_store.register(store, self.config.run_id), self.config.run_id
        if self.config.meet_at_endpoint and not host and self._here is None:
            raise StoreError(f"no agent has said yet that it hosts the store at {endpoint}")
        if host not in ("", job):
            known = f"the store is hosted by the agent of job {host!r}"
            self.notices.append(f"warning: {known}: should that agent die, this job ends with it")
        self._look_around()
        if self.config.meet_at_endpoint and host == job:
            reached = self.reached[0] if self.reached and not store.hosting else self.here.number
            self.shared = self._served_at or reached, endpoint.port

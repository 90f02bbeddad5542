"""Where and how this agent meets the others: what it says of itself, by which rules, how it reaches the store, and serves it if need be."""

from __future__ import annotations

import os
import secrets
import socket
import urllib.parse
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from elastirun import clock
from elastirun.agent import lodgers, net
from elastirun.agent.private_etcd import PrivateEtcd
from elastirun.config import Endpoint, Etcd, LaunchConfig
from elastirun.errors import StartError, StoreError
from elastirun.rendezvous.codec import clip
from elastirun.rendezvous.forming import Rules
from elastirun.rendezvous.records import NodeRow
from elastirun.rendezvous.stores import tcp
from elastirun.rendezvous.stores.base import Store
from elastirun.rendezvous.stores.memory import MemoryStore

EXCHANGE_LIMIT = 3.0  # seconds for one exchange with the store before it counts as failed
ETCD_LIMIT = 10.0  # the same where a change of the leader is waited for, and each endpoint is tried
HOST_TRIES = 5.0  # seconds to try for a port that an agent just ending may still hold


def introduction(config: LaunchConfig) -> NodeRow:
    """The row of a new incarnation of this node. Its address and port are known once the store was reached."""
    name = clip(socket.gethostname(), 128)
    incarnation = f"{urllib.parse.quote(name, safe='')}-{os.getpid()}-{secrets.token_hex(4)}"
    return NodeRow(incarnation, name, "", 0, config.nproc, config.role, config.node_rank)


def rules(config: LaunchConfig) -> Rules:
    """What the job asks of its rounds."""
    timing = config.timing
    return Rules(
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        max_restarts=config.max_restarts,
        restart_window=config.restart_window,
        fail_fast=config.fail_fast,
        restart_pause=timing.restart_pause,
        fixed_ranks=config.fixed_ranks,
        private=config.standalone,
        lasting=config.etcd is not None,
        hosted=config.etcd is None and config.endpoint is not None,
        join_timeout=timing.join_timeout,
        last_call=timing.last_call,
        debounce=timing.debounce,
        beat=timing.beat,
        expire=timing.expire,
        store_grace=timing.store_grace,
        new_store_id=secrets.token_hex(8),
    )


class Place:
    """``connect`` opens the store; it is called in the driver's thread, which also sets ``reached`` and adds to ``notices``."""

    def __init__(self, config: LaunchConfig) -> None:
        self.config = config
        self.reached: tuple[str, int] | None = None  # address and port where the store was reached last
        self.notices: deque[str] = deque()  # lines for people
        self.exchange_limit = ETCD_LIMIT if config.etcd else EXCHANGE_LIMIT
        self.prefix = lodgers.prefix(config.run_id)  # of every key of this job
        self._cannot_host: tuple[float, str] | None = None  # since when and why the store that is ours to host cannot be served
        self.private: PrivateEtcd | None = None
        if config.etcd is not None:
            self.private = None if config.etcd.endpoints else PrivateEtcd()
            self.connect = self._at_etcd(replace(config.etcd, endpoints=(self.private.endpoint,)) if self.private else config.etcd)
        elif config.endpoint is not None:
            self.connect = self._at_endpoint(config.endpoint)
        else:
            self.connect = self._alone()

    def close(self) -> None:
        if self.private:
            self.private.close()

    @property
    def hopeless(self) -> str:
        """Why the store that is ours to host will not be served; empty while there is hope."""
        tried = self._cannot_host is not None and self.reached is None and clock.now() > self._cannot_host[0] + HOST_TRIES
        return self._cannot_host[1] if tried and self._cannot_host else ""

    def own_address(self) -> str:
        """The address that the others reach this node by. To be asked once the store was reached."""
        assert self.reached is not None
        address, port = self.reached
        if self.config.local_addr:
            return self.config.local_addr
        return address if self.config.standalone else net.advertised_address((address,), port, None)

    def _alone(self) -> Callable[[], Store]:
        data: dict[str, bytes] = {}
        self.reached = ("127.0.0.1", 0)
        return lambda: MemoryStore(data)

    def _at_etcd(self, etcd: Etcd) -> Callable[[], Store]:
        from elastirun.rendezvous.stores import etcd as store
        from elastirun.rendezvous.stores.etcd_access import Access

        access = Access(etcd.tls, etcd.ca_cert, etcd.cert, etcd.key, etcd.user, etcd.password_file)
        names = [str(endpoint) for endpoint in etcd.endpoints]
        connect = store.connector(names, access, etcd.prefix, self.config.timing.expire, say=self.notices.append)

        self.prefix = self.prefix.removeprefix(lodgers.ROOT)  # etcd's has its own

        def connect_and_see_where() -> Store:
            if self.private:
                self.private.check()
            made = connect()
            endpoint = etcd.endpoints[names.index(made.endpoint)]
            found = net.resolve(endpoint.host)
            self.reached = (found[0] if found else endpoint.host, endpoint.port)
            return made

        return connect_and_see_where

    def _at_endpoint(self, endpoint: Endpoint) -> Callable[[], Store]:
        names, addresses = net.who_am_i()

        def resolve() -> tuple[str, int]:
            whys = {address: net.probe(address, endpoint.port, 2.0) for address in net.resolve(endpoint.host)}
            for address, why in whys.items():
                if why is None:
                    self.reached = (address, endpoint.port)
                    return self.reached
            why = next(iter(whys.values()), None) or "the name does not resolve"
            if self.reached:
                raise StoreError(f"{endpoint}: {why}; the agent that hosted the store there is gone or cut off")
            raise StoreError(f"{why}; {net.explain_no_host(endpoint, names, addresses)}")

        def open_socket() -> socket.socket | None:
            try:
                listening = net.open_host_socket(endpoint, self.config.is_host)
            except StartError as error:
                self._cannot_host = self._cannot_host or (clock.now(), str(error))
                raise StoreError(str(error)) from None
            if listening is not None:
                found = net.resolve(endpoint.host)
                self.reached = (found[0] if found else "127.0.0.1", endpoint.port)
            return listening

        connect = tcp.connector(open_socket, resolve)

        def connect_and_register() -> Store:
            store = connect()
            warning = lodgers.register(store, self.config.run_id)
            if warning:
                self.notices.append(f"warning: {warning}")
            return store

        return connect_and_register

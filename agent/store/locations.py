"""Locations of stores, for connections beside the agent's own: those of ``elastirun status``, of reports between nodes, of the quarantine.

A TCPStore, etcd, or the copy of a private store that an agent hands out.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from elastirun.agent.store import shared_store
from elastirun.config import Endpoint, Etcd
from elastirun.errors import StoreError
from elastirun.rendezvous.stores.etcd.messages import check_installed
from elastirun.rendezvous.stores.memory import MemoryStore
from elastirun.rendezvous.stores.tcp import TcpStore
from elastirun.rendezvous.wire.records import Place

ASK_LIMIT = 1.0  # seconds to connect to a TCPStore, and for each answer
ETCD_LIMIT = 3.0  # seconds for one operation, over all members of an etcd cluster
REPORT_LASTS = 60.0  # seconds for which a node's report (node_reports.py) stays at etcd: three windows of ``stragglers.py``


@dataclass(frozen=True)
class TcpAt:
    """A TCPStore. ``owner``: name of the standby store that it must be; empty: any TCPStore."""

    address: str
    port: int
    owner: str = ""

    lists_jobs = True
    rows_change = True  # each keep-alive changes a row

    def __str__(self) -> str:
        return str(Endpoint(self.address, self.port))

    def open(self) -> Any:
        return TcpStore(self.address, self.port, ASK_LIMIT)

    def prefix(self, job: str) -> str:
        return shared_store.prefix(job)


@dataclass(frozen=True)
class EtcdAt:
    """An etcd cluster. ``access``: the fields of ``stores.etcd.access.Access`` as pairs."""

    endpoints: tuple[str, ...]
    access: tuple[tuple[str, Any], ...]
    key_prefix: str

    owner = ""
    lists_jobs = False
    rows_change = False

    def __str__(self) -> str:
        return f"etcd at {', '.join(self.endpoints)}"

    def open(self) -> Any:
        from elastirun.rendezvous.stores.etcd.store import EtcdStore, NodeLease

        return EtcdStore(_cluster(self), NodeLease(REPORT_LASTS), self.key_prefix)

    def prefix(self, job: str) -> str:
        return shared_store.prefix(job).removeprefix(shared_store.JOBS)


@dataclass(frozen=True)
class CopyOf:
    """The records of a job of one node, as its agent has them in memory."""

    data: tuple[tuple[str, bytes], ...]

    owner = ""
    lists_jobs = False
    rows_change = True

    def __str__(self) -> str:
        return "in the memory of the agent on this machine"

    def open(self) -> Any:
        return MemoryStore(dict(self.data))

    def prefix(self, job: str) -> str:
        return shared_store.prefix(job)


StoreAt = TcpAt | EtcdAt | CopyOf


@functools.lru_cache(maxsize=1)  # a new one would log in again, which costs etcd a tenth of a second
def _cluster(at: EtcdAt) -> Any:
    """Return what connections to ``at`` share: the member in use, and the token of its user. Errors: ``StartError``."""
    from elastirun.rendezvous.stores.etcd.access import Access
    from elastirun.rendezvous.stores.etcd.client import Cluster

    check_installed()
    return Cluster(at.endpoints, Access(**dict(at.access)), ETCD_LIMIT)


def standby(place: Place) -> TcpAt:
    """Return the standby store ``place``."""
    return TcpAt(place.address, place.port, place.name)


def at_etcd(etcd: Etcd) -> EtcdAt:
    """Return the etcd cluster of a launch. Errors: ``StartError`` when a package is missing."""
    check_installed()
    access = {"tls": etcd.tls, "cacert": etcd.ca_cert, "cert": etcd.cert, "key": etcd.key, "user": etcd.user}
    return EtcdAt(tuple(map(str, etcd.endpoints)), (*access.items(), ("password_file", etcd.password_file)), etcd.prefix)


def described(store: dict[str, Any]) -> StoreAt:
    """Return the store that an agent describes with ``StoreAccess.for_status``. Errors: ``StoreError``."""
    try:
        if store["kind"] == "tcp":
            return TcpAt(str(store["address"]), int(store["port"]), str(store.get("owner", "")))
        if store["kind"] == "etcd":
            return EtcdAt(tuple(map(str, store["endpoints"])), tuple(dict(store["access"]).items()), str(store["prefix"]))
        if store["kind"] == "memory":
            return CopyOf(tuple((str(key), str(value).encode()) for key, value in dict(store["data"]).items()))
    except (KeyError, ValueError, TypeError):
        raise StoreError("the agent there is of another version") from None
    raise StoreError("the agent there has not reached its store yet")

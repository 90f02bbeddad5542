"""The store over etcd, version 3 of its API. The rendezvous survives the loss of any single machine.

Every operation is one transaction, so it is atomic. A write compares the ``mod_revision`` of what it replaces. After a write whose answer
was lost, the next attempt finds out whether it was applied, because no value is written twice.

A node's row is under a lease. The lease is renewed each beat, which makes no revision; the row itself is written only when it changes,
because etcd keeps every revision until somebody compacts. The row vanishes some seconds after its agent died.

See docs/etcd.md.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from elastirun.errors import StoreError
from elastirun.rendezvous.stores.base import Store
from elastirun.rendezvous.stores.etcd.access import Access
from elastirun.rendezvous.stores.etcd.client import DEADLINE, LARGEST, Client, Cluster, LeaseNotFound
from elastirun.rendezvous.stores.etcd.messages import check_installed
from elastirun.rendezvous.stores.etcd.watch import Watch
from elastirun.rendezvous.timing import Lease

PREFIX = "/elastirun/"
LEASED = "/node/"  # keys that contain this are node rows, which are written under the lease
MOST_RANGES = 128  # in one transaction; etcd's default for --max-txn-ops
PAGE = 1000  # keys in one answer, which keeps it far below LARGEST
MOST_CACHED = 16  # keys whose value and revision are cached; a node writes its row and the round often, other keys once
MOST_KEYS = 32_768  # under one prefix; nodes write far fewer, and reading more would take too long


@dataclass(frozen=True)
class Versioned:
    """The value of a key, with its revision."""

    value: bytes
    revision: int  # etcd's mod_revision


class NodeLease:
    """The lease of one agent's row. It outlives the agent's connections.

    ``ttl``: seconds. ``say`` gets a line when the lease expired although the agent lives: it was suspended or cut off.
    """

    def __init__(self, ttl: float, say: Callable[[str], None] = lambda line: None) -> None:
        self.ttl = ttl
        self._say = say
        self._id = 0  # of the newest lease; 0: there is none
        self._row_lease = 0  # id of the lease under which the row is; 0: unknown
        self._lock = threading.Lock()  # an abandoned connection may still use the lease in its thread

    def current(self, client: Client) -> int:
        """Return the id of the lease to write under; grants one if there is none. Errors: ``StoreError``."""
        with self._lock:
            lease_id = self._id
        if not lease_id:
            lease_id = int(client.call("Lease/LeaseGrant", client.messages.LeaseGrantRequest(TTL=math.ceil(self.ttl))).ID)
            with self._lock:
                self._id = lease_id
        return lease_id

    def keep_alive(self, client: Client) -> bool:
        """Renew the row's lease, without a new revision. False: it has expired, or the row may be under another. Errors: ``StoreError``."""
        with self._lock:
            lease_id = self._id
            if not lease_id or lease_id != self._row_lease:
                return False
        if client.call_stream("Lease/LeaseKeepAlive", client.messages.LeaseKeepAliveRequest(ID=lease_id)).TTL > 0:
            return True
        self.expired(lease_id)
        return False

    def writing_row(self, lease_id: int) -> None:
        """Note that a write of the row under ``lease_id`` begins: until it is done, the row may be under another lease."""
        with self._lock:
            if self._row_lease != lease_id:
                self._row_lease = 0

    def row_written(self, lease_id: int) -> None:
        """Note that the row is under ``lease_id``."""
        with self._lock:
            self._row_lease = lease_id

    def expired(self, lease_id: int) -> None:
        """Note that the lease has expired. The next write gets another one."""
        with self._lock:
            if self._id and self._id == lease_id:
                self._id = 0
                self._say("this node's lease at etcd expired, and its row was deleted with it; the row is written again under a new lease")


class EtcdStore(Store):
    """A connection to etcd. The constructor reads once, so that a wrong setting fails when the connection is made.

    ``prefix`` is put in front of every key at etcd; callers do not see it. Errors: ``StoreError``.
    """

    hosting = False

    def __init__(self, cluster: Cluster, lease: NodeLease, prefix: str = PREFIX) -> None:
        self._client = Client(cluster)
        self._lease = lease
        self._prefix = prefix.encode()
        self._cached: dict[str, Versioned] = {}  # of the keys that this connection wrote last, the newest at the end
        try:
            self._range(*_below(self._prefix), limit=1, keys_only=True)
        except StoreError:
            self._client.close()
            raise

    @property
    def endpoint(self) -> str:
        """The endpoint in use, for messages."""
        return self._client.endpoint

    def get(self, keys: Iterable[str]) -> dict[str, bytes]:
        wanted = list(dict.fromkeys(keys))
        found: dict[str, bytes] = {}
        for start in range(0, len(wanted), MOST_RANGES):
            some = wanted[start : start + MOST_RANGES]
            for key, now in zip(some, self._read(some), strict=True):
                if key in self._cached:
                    self._cache(key, now)
                if now is not None:
                    found[key] = now.value
        return found

    def has(self, key: str) -> bool:
        return bool(self._range(self._key(key), keys_only=True).kvs)

    def put_if(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        now = None if expected is None else self._cached.get(key)
        if expected is not None and (now is None or now.value != expected):
            (now,) = self._read([key])
        while (now.value if now else None) == expected:
            was_set, now = self._put(key, now.revision if now else 0, value)
            self._cache(key, now)
            if was_set:
                return value
        return now.value if now else None

    def keep_alive(self, key: str) -> bool:
        return self._lease.keep_alive(self._client)

    def delete(self, key: str) -> None:
        self._cached.pop(key, None)
        self._client.call("KV/DeleteRange", self._client.messages.DeleteRangeRequest(key=self._key(key)))

    def under(self, prefix: str) -> dict[str, bytes]:
        start, end = _below(self._key(prefix))
        found: dict[str, bytes] = {}
        count = size = 0
        more = True
        while more:
            answer = self._range(start, end, limit=PAGE)
            for kv in answer.kvs:
                count, size = count + 1, size + len(kv.value)
                if kv.key.isascii():
                    found[kv.key[len(self._prefix) :].decode()] = kv.value
            if count > MOST_KEYS or size > LARGEST:
                raise StoreError(f"{count} keys with {size} bytes below {prefix}: somebody floods the store")
            more = answer.more
            start = answer.kvs[-1].key + b"\0" if answer.kvs else end
        return found

    def watch(self, key: str, changed: Callable[[], None]) -> None:
        """See ``Store.watch``. ``changed`` is called from the watch's thread, the first time when the watch begins.

        It is not called while no member can be reached, but afterwards if the key changed meanwhile.
        """
        Watch(self._client, self._key(key), changed)

    def close(self) -> None:
        self._client.close()

    def _key(self, key: str) -> bytes:
        return self._prefix + key.encode()

    def _cache(self, key: str, now: Versioned | None) -> None:
        self._cached.pop(key, None)
        if now is not None:
            self._cached[key] = now
        if len(self._cached) > MOST_CACHED:
            del self._cached[next(iter(self._cached))]

    def _range(self, key: bytes, end: bytes = b"", **how: Any) -> Any:
        """Return etcd's answer for ``key``, or for the range from ``key`` to ``end``, which is excluded."""
        return self._client.call("KV/Range", self._client.messages.RangeRequest(key=key, range_end=end, **how))

    def _read(self, keys: list[str]) -> list[Versioned | None]:
        """Return the values of at most MOST_RANGES keys, all of the same moment."""
        if len(keys) == 1:
            return [_first(self._range(self._key(keys[0])))]
        messages = self._client.messages
        ranges = [messages.RequestOp(request_range=messages.RangeRequest(key=self._key(key))) for key in keys]
        answer = self._client.call("KV/Txn", messages.TxnRequest(success=ranges))
        return [_first(one.response_range) for one in answer.responses]

    def _put(self, key: str, revision: int, value: bytes, again: bool = True) -> tuple[bool, Versioned | None]:
        """Set ``key`` if it still has ``revision`` (0: if it does not exist). Return whether it was set, and its value now."""
        messages = self._client.messages
        name = self._key(key)
        lease_id = self._lease.current(self._client) if LEASED in key else 0
        request = messages.TxnRequest(
            compare=[messages.Compare(key=name, target=messages.Compare.MOD, result=messages.Compare.EQUAL, mod_revision=revision)],
            success=[messages.RequestOp(request_put=messages.PutRequest(key=name, value=value, lease=lease_id))],
            failure=[messages.RequestOp(request_range=messages.RangeRequest(key=name))],
        )
        if lease_id:
            self._lease.writing_row(lease_id)
        try:
            answer = self._client.call("KV/Txn", request)
        except LeaseNotFound:
            self._lease.expired(lease_id)
            if not again:
                raise
            return self._put(key, revision, value, again=False)
        if answer.succeeded:
            if lease_id:
                self._lease.row_written(lease_id)
            return True, Versioned(value, answer.header.revision)
        return False, _first(answer.responses[0].response_range)


def _first(answer: Any) -> Versioned | None:
    """Return the first key of a range's answer."""
    return Versioned(answer.kvs[0].value, answer.kvs[0].mod_revision) if answer.kvs else None


def _below(prefix: bytes) -> tuple[bytes, bytes]:
    """Return the range of all keys that begin with ``prefix``, which is ASCII. Two zero bytes are etcd's range of all keys."""
    return (prefix, prefix[:-1] + bytes([prefix[-1] + 1])) if prefix else (b"\0", b"\0")


def connector(
    endpoints: Sequence[str],
    access: Access | None = None,
    prefix: str = PREFIX,
    expire: float = 5.0,
    deadline: float = DEADLINE,
    say: Callable[[str], None] = lambda line: None,
) -> Callable[[], EtcdStore]:
    """Return a function that connects to the etcd cluster at ``endpoints``, each ``host:port``, IPv6 in brackets.

    Its connections share the endpoint in use, the token and one lease. The lease's duration follows from ``expire``, the seconds after
    which a silent node is lost. ``deadline``: seconds of one operation. The certificates are read at each connection, the password when a
    token is needed. The function raises ``StoreError``, and ``StoreRefused`` where only a person can help. ``say`` gets a line, in the
    store's thread, when the lease expired although the agent lives.

    Errors: ``BadCommand`` when a package is missing.
    """
    check_installed()
    cluster = Cluster(endpoints, access, deadline)
    lease = NodeLease(Lease.of(expire).ttl, say)
    return lambda: EtcdStore(cluster, lease, prefix)

"""The store over etcd, version 3 of its API: no single machine's loss takes the job's memory along.

Every operation is one transaction, so it happens at one moment. A write is bound to the ``mod_revision`` of what it
replaces; of a write whose answer was lost, the next try tells what became of it, because no value is written twice.

A node's row lives under a lease. The lease is renewed each beat, which makes no revision; the row is written only when it says something
new: etcd keeps every revision until somebody compacts. The row vanishes some seconds after its agent: so the others know.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from elastirun.errors import StoreError
from elastirun.rendezvous.stores.etcd.access import Access
from elastirun.rendezvous.stores.etcd.client import DEADLINE, LARGEST, Client, Cluster, LeaseNotFound
from elastirun.rendezvous.stores.etcd.messages import check_installed
from elastirun.rendezvous.stores.etcd.watch import Watch
from elastirun.rendezvous.timing import Lease

PREFIX = "/elastirun/"
LEASED = "/node/"  # keys with this in them are written under the lease
MOST_RANGES = 128  # in one transaction; etcd's limit
PAGE = 1000  # keys in one answer
MOST_HELD = 16  # keys whose revision is remembered; a node writes its row and the round again and again, others once
MOST_KEYS = 32_768  # below one prefix: more is not what nodes write, and would take too long to read


@dataclass(frozen=True)
class Held:
    """What a key holds."""

    value: bytes
    revision: int  # etcd's mod_revision


class Leases:
    """The lease of one agent, which outlives its connections. ``ttl`` in seconds; ``say`` gets lines for people."""

    def __init__(self, ttl: float, say: Callable[[str], None] = lambda line: None) -> None:
        self.ttl = ttl
        self._say = say
        self.lost = 0  # how many were over before their time: the agent stood still, or was cut off
        self._lease = 0  # the id of the newest one; 0: there is none
        self._row_under = 0  # the lease of the row as far as is known; 0: not known
        self._lock = threading.Lock()  # a connection that was given up may still be at it

    def current(self, client: Client) -> int:
        """The lease to write under, a new one if there is none. Errors: ``StoreError``."""
        with self._lock:
            lease = self._lease
        if not lease:
            lease = int(client.call("Lease/LeaseGrant", client.messages.LeaseGrantRequest(TTL=math.ceil(self.ttl))).ID)
            with self._lock:
                self._lease = lease
        return lease

    def keep_alive(self, client: Client) -> bool:
        """Renew the lease of the row, which makes no revision at etcd. False: it is over, or not known. Errors: ``StoreError``."""
        with self._lock:
            lease = self._lease
            if not lease or lease != self._row_under:
                return False
        if client.call_stream("Lease/LeaseKeepAlive", client.messages.LeaseKeepAliveRequest(ID=lease)).TTL > 0:
            return True
        self.forget(lease)
        return False

    def writing(self, lease_id: int, done: bool) -> None:
        """The row is being written under that lease; until that is ``done``, it may be under another one."""
        with self._lock:
            if done:
                self._row_under = lease_id
            elif self._row_under != lease_id:
                self._row_under = 0

    def forget(self, lease_id: int) -> None:
        """That lease is over."""
        with self._lock:
            if self._lease and self._lease == lease_id:
                self._lease = 0
                self.lost += 1
                self._say("this node's lease at etcd was over, and with it its row was gone; it is written anew under another")


class EtcdStore:
    """A connection to etcd. Its first question is asked here, so that what is wrong is said when it is opened.

    ``prefix`` stands before every key there, and nowhere here. Errors: ``StoreError``.
    """

    hosting = False

    def __init__(self, cluster: Cluster, leases: Leases, prefix: str = PREFIX) -> None:
        self._client = Client(cluster)
        self._leases = leases
        self._prefix = prefix.encode()
        self._held: dict[str, Held] = {}  # of the keys this connection has written last, the newest at the end
        try:
            self._range(*_below(self._prefix), limit=1, keys_only=True)
        except StoreError:
            self._client.close()
            raise

    @property
    def endpoint(self) -> str:
        """The endpoint in use."""
        return self._client.endpoint

    @property
    def leases_lost(self) -> int:
        """How often the agent's lease was over although it lives; its row was gone then, and has to be written anew."""
        return self._leases.lost

    def get(self, keys: Iterable[str]) -> dict[str, bytes]:
        wanted = list(dict.fromkeys(keys))
        found: dict[str, bytes] = {}
        for start in range(0, len(wanted), MOST_RANGES):
            some = wanted[start : start + MOST_RANGES]
            for key, held in zip(some, self._read(some), strict=True):
                if key in self._held:
                    self._note(key, held)
                if held is not None:
                    found[key] = held.value
        return found

    def put_if(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        held = None if expected is None else self._held.get(key)
        if expected is not None and (held is None or held.value != expected):
            (held,) = self._read([key])
        while (held.value if held else None) == expected:
            was_set, held = self._put(key, held.revision if held else 0, value)
            self._note(key, held)
            if was_set:
                return value
        return held.value if held else None

    def keep_alive(self, key: str) -> bool:
        return self._leases.keep_alive(self._client)

    def delete(self, key: str) -> None:
        self._held.pop(key, None)
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
        """As every store has it: ``changed`` is called from a thread of the watch, the first time when it begins.

        While no member can be reached it is not called, and afterwards for what has happened since.
        """
        Watch(self._client, self._key(key), changed)

    def close(self) -> None:
        self._client.close()

    def _key(self, key: str) -> bytes:
        return self._prefix + key.encode()

    def _note(self, key: str, held: Held | None) -> None:
        self._held.pop(key, None)
        if held is not None:
            self._held[key] = held
        if len(self._held) > MOST_HELD:
            del self._held[next(iter(self._held))]

    def _range(self, key: bytes, end: bytes = b"", **how: Any) -> Any:
        """etcd's answer about ``key``, or about those from it to before ``end``."""
        return self._client.call("KV/Range", self._client.messages.RangeRequest(key=key, range_end=end, **how))

    def _read(self, keys: list[str]) -> list[Held | None]:
        """What each of the keys holds at one moment; at most MOST_RANGES of them."""
        if len(keys) == 1:
            return [_held(self._range(self._key(keys[0])))]
        messages = self._client.messages
        ranges = [messages.RequestOp(request_range=messages.RangeRequest(key=self._key(key))) for key in keys]
        answer = self._client.call("KV/Txn", messages.TxnRequest(success=ranges))
        return [_held(one.response_range) for one in answer.responses]

    def _put(self, key: str, revision: int, value: bytes, again: bool = True) -> tuple[bool, Held | None]:
        """Set ``key`` if its revision is still that (0: if it does not exist). Returns whether it was, and what it holds now."""
        messages = self._client.messages
        name = self._key(key)
        lease = self._leases.current(self._client) if LEASED in key else 0
        request = messages.TxnRequest(
            compare=[messages.Compare(key=name, target=messages.Compare.MOD, result=messages.Compare.EQUAL, mod_revision=revision)],
            success=[messages.RequestOp(request_put=messages.PutRequest(key=name, value=value, lease=lease))],
            failure=[messages.RequestOp(request_range=messages.RangeRequest(key=name))],
        )
        if lease:
            self._leases.writing(lease, done=False)
        try:
            answer = self._client.call("KV/Txn", request)
        except LeaseNotFound:
            self._leases.forget(lease)
            if not again:
                raise
            return self._put(key, revision, value, again=False)
        if answer.succeeded:
            if lease:
                self._leases.writing(lease, done=True)
            return True, Held(value, answer.header.revision)
        return False, _held(answer.responses[0].response_range)


def _held(answer: Any) -> Held | None:
    return Held(answer.kvs[0].value, answer.kvs[0].mod_revision) if answer.kvs else None


def _below(prefix: bytes) -> tuple[bytes, bytes]:
    """The range of all keys that begin with ``prefix``, which is ASCII; as etcd names it, two zero bytes are all there are."""
    return (prefix, prefix[:-1] + bytes([prefix[-1] + 1])) if prefix else (b"\0", b"\0")


def connector(
    endpoints: Sequence[str],
    access: Access | None = None,
    prefix: str = PREFIX,
    expire: float = 5.0,
    deadline: float = DEADLINE,
    say: Callable[[str], None] = lambda line: None,
) -> Callable[[], EtcdStore]:
    """A function that connects to the etcd cluster at ``endpoints``, each ``host:port``, IPv6 in brackets.

    The connections it makes share what they learn of the endpoints, the token, and one lease, whose length follows from ``expire``, the
    seconds after which a silent node is lost. ``deadline``: seconds for one operation. Certificates are read each time it
    connects, the password when a token is needed. It raises ``StoreError``, and ``StoreRefused`` where only people can help.
    ``say`` gets a line, in the thread of the store, when the lease was over although the agent lives.

    Errors: ``StartError`` when a package is missing.
    """
    check_installed()
    cluster = Cluster(endpoints, access, deadline)
    leases = Leases(Lease.of(expire).ttl, say)
    return lambda: EtcdStore(cluster, leases, prefix)

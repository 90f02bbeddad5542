"""Who is silent, and since when things are as they are. Only durations on this node's own clock count, never another's.

A node is silent when a read that *started* more than ``expire`` after this node *received* its last change still shows
the old ``seq``. The idea is that of Kubernetes' leader election: time is what I observed locally.

In a store with leases (etcd) a keep-alive changes no row, it renews the lease of the row. There the row itself is the sign of life:
it vanishes with its lease, and its owner is silent when it has stayed away for ``Lease.absence`` (docs/decisions/0006).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from elastirun.rendezvous.records import NodeRow, Status
from elastirun.rendezvous.timing import SURE, Lease


@dataclass
class _Seen:
    seq: int
    changed: float  # when this node received the change to ``seq``, seconds of its monotonic clock; with leases: see ``_observe_leased``
    silent: bool = False
    proven: bool = False  # it has changed before our eyes
    looked: float = 0.0  # when this node received the last read of it
    away: float = 0.0  # since when it has been away at every look, no two of them too far apart
    judged: bool = False  # that has been long enough once


class Liveness:
    """What this node has observed of the others. ``expire`` in seconds; ``lease``: of the rows, in a store that has leases."""

    def __init__(self, expire: float, lease: Lease | None = None) -> None:
        self.expire = expire
        self._lease = lease
        self._seen: dict[str, _Seen] = {}
        self._excused = -math.inf  # nobody's silence until then counts

    def observe(self, seqs: Mapping[str, int], started: float, received: float) -> None:
        """Take in a read asked for at ``started`` and answered by ``received``. A row that is not there has seq -1."""
        for node_id, seq in seqs.items():
            seen = self._seen.get(node_id)
            if self._lease is not None:
                self._observe_leased(self._lease, node_id, seq, started, received)
                continue
            if seen is None or seq > seen.seq:  # an older row that is put back is no sign of life
                self._seen[node_id] = _Seen(seq, received, proven=seen is not None)
                continue
            if started - self._since(seen) > self.expire:
                seen.silent = True
        for node_id in self._seen.keys() - seqs.keys():
            self._seen[node_id].silent = False  # it may have come back; who is not read is not called silent

    def _observe_leased(self, lease: Lease, node_id: str, seq: int, started: float, received: float) -> None:
        """``changed`` is when the row was last seen to be there, or first seen to be away after that.

        Between two looks that are further apart than a lease lasts it may have been there again, and its absence begins anew.
        """
        seen = self._seen.get(node_id)
        if seq >= 0:
            self._seen[node_id] = _Seen(seq, received, proven=True, looked=received)
        elif seen is None or seen.seq >= 0:
            self._seen[node_id] = _Seen(seq, received, proven=seen is not None, looked=received, away=received)
        else:
            if started - seen.looked > SURE * lease.ttl:
                seen.away, seen.silent, seen.judged = received, False, False
            seen.silent = seen.silent or started > max(seen.away + lease.absence, self._excused + self.expire)
            seen.looked, seen.judged = received, seen.judged or seen.silent

    def next_look(self, now: float) -> float | None:
        """When a node whose row has vanished could be found silent, if all is well; None: no row is away, or nobody looked for too long."""
        if self._lease is None:
            return None
        patience, sure = self._lease.absence, SURE * self._lease.ttl
        pending = [seen for seen in self._seen.values() if seen.seq < 0 and not seen.judged and now <= seen.looked + sure]
        return min((max(seen.away + patience, self._excused + self.expire) for seen in pending), default=None)

    def absent(self, node_id: str) -> bool:
        """Return whether the node's row was away at the last look, in a store with leases."""
        seen = self._seen.get(node_id)
        return self._lease is not None and seen is not None and seen.seq < 0

    def excuse(self, until: float) -> None:
        """The store was in trouble here, perhaps for everyone: nobody's silence until then counts.

        That holds for a node, too, whose last change is only read after the trouble: it may have been written before.
        """
        self._excused = max(self._excused, until)

    def _since(self, seen: _Seen) -> float:
        """From when on its silence counts."""
        return max(seen.changed, self._excused)

    def silent(self, node_id: str) -> bool:
        seen = self._seen.get(node_id)
        return seen is not None and seen.silent

    def quiet(self, node_id: str, now: float) -> float:
        """Seconds since its last sign of life, or since it is watched again after trouble here."""
        seen = self._seen.get(node_id)
        return 0.0 if seen is None else max(0.0, now - self._since(seen))

    def proven(self, node_id: str) -> bool:
        """The node has been seen to be alive: its row may be of a dead one until it changes."""
        seen = self._seen.get(node_id)
        return seen is not None and seen.proven

    def undecided(self, node_id: str, now: float, patience: float) -> bool:
        """The node has not been watched for ``patience`` seconds yet, nor proven to be alive."""
        seen = self._seen.get(node_id)
        return seen is not None and not seen.proven and now < self._since(seen) + patience

    def forget_all_but(self, ids: set[str]) -> None:
        """Memory must not grow with the number of agents that ever were."""
        for node_id in self._seen.keys() - ids:
            del self._seen[node_id]


class Newest:
    """The highest ``seq`` seen of each incarnation of a node: a row below it is an old one that somebody has put back.

    ``LEFT`` is final: after it no other status is believed. Signatures do not help here, an old row is signed as well.
    """

    MOST = 20_000  # incarnations remembered, the most recently changed ones: memory must not grow without limit

    def __init__(self) -> None:
        self._newest: dict[str, tuple[int, bool]] = {}  # by id: its highest seq, and whether it has left

    def without_old(self, rows: Mapping[str, NodeRow], me: str) -> tuple[dict[str, NodeRow], list[str]]:
        """The rows that are not old, and a line on each that is. The own row ``me`` is judged by nobody."""
        current: dict[str, NodeRow] = {}
        notes: list[str] = []
        for node_id, row in rows.items():
            seq, left = self._newest.get(node_id, (-1, False))
            has_left = row.status is Status.LEFT
            if node_id != me and (row.seq < seq or (left and not has_left)):
                notes.append(f"the row of {row.name} {row.address}: it is an old one, somebody has put it back")
                continue
            current[node_id] = row
            if row.seq > seq:
                self._newest.pop(node_id, None)
                self._newest[node_id] = row.seq, has_left
        while len(self._newest) > self.MOST:
            del self._newest[next(iter(self._newest))]
        return current, notes


class Since:
    """The time since which this node has seen something to be the same. Seconds of its own clock."""

    def __init__(self, now: float) -> None:
        self._what: object = None
        self.since = now

    def see(self, what: object, now: float) -> float:
        """Note that it is ``what`` now. Return since when it is."""
        if what != self._what:
            self._what, self.since = what, now
        return self.since


class SameSince:
    """The times since which a node has seen things to be the same that its decisions wait for."""

    def __init__(self, now: float) -> None:
        self.round = Since(now)  # the round in the store, or that there is none
        self.over = Since(now)  # that the round is over
        self.candidates = Since(now)  # the candidates for the next round, beside the same round
        self.formable = Since(now)  # whether a round could be formed, if only by another node
        self.earlier = Since(now)  # the record of an earlier run

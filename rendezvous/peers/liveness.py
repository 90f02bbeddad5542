"""Silence of other nodes, and how long their rows have not changed. Only durations on this node's own clock count, never another's.

A node is silent when a read that *started* more than ``expire`` after this node *received* its last change still shows
the old ``seq``. The idea is that of Kubernetes' leader election: time is what I observed locally.

In a store with leases (etcd) a keep-alive changes no row; it renews the lease of the row. There the row itself is the sign of life:
the row vanishes with its lease, and its node is silent once the row has been absent for ``Lease.absence`` (docs/decisions/0006).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elastirun.rendezvous.timing import SURE, Lease
from elastirun.rendezvous.wire.records import NodeRow, Status

MOST_WAITS = 5  # waits for more candidates, counted from the first moment at which there were enough


@dataclass
class _Seen:
    """Observations of one other node. Times in seconds of this node's monotonic clock."""

    seq: int  # -1: the row is absent
    changed: float  # when this node received the change to ``seq``; with leases: see ``_observe_leased``
    proven: bool = False  # the row has changed since this node first read it, so its owner lives
    read_at: float = 0.0  # when this node received the last read of the row
    absent_since: float = 0.0  # since when the row has been absent in every read, no two reads too far apart
    judged: bool = False  # the row has once been absent long enough


class Liveness:
    """Decides from the observed rows which nodes are silent. ``expire`` in seconds; ``lease``: of the rows, in a store with leases."""

    def __init__(self, expire: float, lease: Lease | None = None) -> None:
        self.expire = expire
        self._lease = lease
        self._seen: dict[str, _Seen] = {}
        self.found_silent = frozenset[str]()  # nodes that have given no sign of life for ``expire``
        self._excused = -math.inf  # no silence until then counts

    def observe(self, seqs: Mapping[str, int], started: float, received: float) -> None:
        """Take in a read that was begun at ``started`` and answered at ``received``. An absent row has seq -1.

        A node whose row is not read is not called silent: its owner may have come back.
        """
        observe, before = self._observe_row if self._lease is None else self._observe_leased, self.found_silent
        self.found_silent = frozenset([i for i, seq in seqs.items() if observe(i, seq, i in before, started, received)])

    def _observe_row(self, node_id: str, seq: int, silent: bool, started: float, received: float) -> bool:
        """Take in one row of such a read. Return whether its node is silent. ``silent``: it was before."""
        seen = self._seen.get(node_id)
        if seen is None or seq > seen.seq:  # an older row that is put back is no sign of life
            self._seen[node_id] = _Seen(seq, received, proven=seen is not None)
            return False
        return silent or started - self._since(seen) > self.expire

    def _observe_leased(self, node_id: str, seq: int, silent: bool, started: float, received: float) -> bool:
        """The same in a store with leases. ``changed`` becomes the time of the last read with the row, or of the first one without it.

        Between two reads that are further apart than a lease lasts, the row may have been there again: its absence begins anew.
        """
        seen, lease = self._seen.get(node_id), self._lease
        assert lease is not None
        if seq >= 0:
            self._seen[node_id] = _Seen(seq, received, proven=True, read_at=received)
            return False
        if seen is None or seen.seq >= 0:
            self._seen[node_id] = _Seen(seq, received, proven=seen is not None, read_at=received, absent_since=received)
            return False
        if started - seen.read_at > SURE * lease.ttl:
            seen.absent_since, silent, seen.judged = received, False, False
        silent = silent or started > max(seen.absent_since + lease.absence, self._excused + self.expire)
        seen.read_at, seen.judged = received, seen.judged or silent
        return silent

    def next_verdict(self, now: float) -> float | None:
        """Return when the owner of an absent row can be found silent; None: no row is absent, or none was read for too long."""
        if self._lease is None:
            return None
        patience, sure = self._lease.absence, SURE * self._lease.ttl
        pending = [seen for seen in self._seen.values() if seen.seq < 0 and not seen.judged and now <= seen.read_at + sure]
        return min((max(seen.absent_since + patience, self._excused + self.expire) for seen in pending), default=None)

    def absent(self, node_id: str) -> bool:
        """Return whether the node's row was absent in the last read, in a store with leases."""
        seen = self._seen.get(node_id)
        return self._lease is not None and seen is not None and seen.seq < 0

    def excuse(self, until: float) -> None:
        """Let no silence before ``until`` count, because the exchanges of this node, perhaps of all nodes, were in trouble.

        This includes a node whose last change is read only after the trouble: the change may have been written before.
        """
        self._excused = max(self._excused, until)

    def _since(self, seen: _Seen) -> float:
        """Return from when on the node's silence counts."""
        return max(seen.changed, self._excused)

    def silent(self, node_id: str) -> bool:
        """Return whether the node has given no sign of life for ``expire``."""
        return node_id in self.found_silent

    def quiet(self, node_id: str, now: float) -> float:
        """Return the seconds since the node's last sign of life, or since the end of trouble here, if that was later."""
        seen = self._seen.get(node_id)
        return 0.0 if seen is None else max(0.0, now - self._since(seen))

    def proven(self, node_id: str) -> bool:
        """Return whether the node has shown that it lives. A row that has not changed yet may be that of a dead node."""
        seen = self._seen.get(node_id)
        return seen is not None and seen.proven

    def undecided(self, node_id: str, now: float, patience: float) -> bool:
        """Return whether the node has not shown that it lives, and has been watched for less than ``patience`` seconds."""
        seen = self._seen.get(node_id)
        return seen is not None and not seen.proven and now < self._since(seen) + patience

    def forget_unless(self, counts: Callable[[str], bool]) -> None:
        """Forget the nodes that do not count any more, so that memory does not grow with the number of agents that ever were."""
        for node_id in [i for i in self._seen if not counts(i)]:
            del self._seen[node_id]
        self.found_silent = self.found_silent.intersection(self._seen)


class Newest:
    """Remembers the highest ``seq`` of each incarnation of a node, to recognise old rows that somebody has put back.

    ``LEFT`` is final: after it no other status is believed. Signatures do not help here, because an old row is signed as well.
    """

    MOST = 20_000  # incarnations remembered, the most recently changed ones; memory must not grow without limit

    def __init__(self) -> None:
        self._newest: dict[str, tuple[int, bool]] = {}  # by id: its highest seq, and whether it has left

    def without_old(self, rows: Mapping[str, NodeRow], me: str) -> tuple[dict[str, NodeRow], list[str]]:
        """Return the rows that are not old, and a line about each old one. This node's own row ``me`` is never old."""
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
        self.enough = Since(now)  # whether they are enough to wait for no more than ``MOST_WAITS``
        self.formable = Since(now)  # whether a round could be formed, if only by another node
        self.earlier = Since(now)  # the record of an earlier run

    def settled_since(self, wait: float) -> float:
        """Return the moment from which a ``wait`` for more candidates counts.

        It is the last change of the candidates, but nodes that come and go do not extend the wait without end: see ``MOST_WAITS``.
        """
        return min(self.candidates.since, self.enough.since + (MOST_WAITS - 1) * wait)

"""Who is silent, and since when things are as they are. Only durations on this node's own clock count, never another's.

A node is silent when a read that *started* more than ``expire`` after this node *received* its last change still shows
the old ``seq``. The idea is that of Kubernetes' leader election: time is what I observed locally.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class _Seen:
    seq: int
    changed: float  # when this node received the change to ``seq``, seconds of its monotonic clock
    silent: bool = False
    proven: bool = False  # it has changed before our eyes


class Liveness:
    """What this node has observed of the others. ``expire`` in seconds."""

    def __init__(self, expire: float) -> None:
        self.expire = expire
        self._seen: dict[str, _Seen] = {}
        self._excused = -math.inf  # nobody's silence until then counts

    def observe(self, seqs: Mapping[str, int], started: float, received: float) -> None:
        """Take in a read asked for at ``started`` and answered by ``received``. A row that is not there has seq -1."""
        for node_id, seq in seqs.items():
            seen = self._seen.get(node_id)
            if seen is None or (seen.seq != seq and seq >= 0):
                self._seen[node_id] = _Seen(seq, received, proven=seen is not None)
                continue
            seen.seq = seq  # a row that vanishes is no sign of life: its lease is over
            if started - self._since(seen) > self.expire:
                seen.silent = True
        for node_id in self._seen.keys() - seqs.keys():
            self._seen[node_id].silent = False  # it may have come back; who is not read is not called silent

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


class Since:
    """Since when something is what it is, as far as this node has seen. Seconds of its own clock."""

    def __init__(self, now: float) -> None:
        self._what: object = None
        self.since = now

    def see(self, what: object, now: float) -> float:
        """It is ``what`` now. Returns since when."""
        if what != self._what:
            self._what, self.since = what, now
        return self.since

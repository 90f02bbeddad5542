"""This node's own row in the store: what was read there, what this node has written, and when its last keep-alive was acknowledged."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastirun.rendezvous.actions import Put
from elastirun.rendezvous.records import NodeRow


@dataclass(frozen=True)
class OwnRow:
    """The state of the own row. Times in seconds of this node's clock."""

    kept_alive: float  # when the last acknowledged keep-alive was sent
    written_at: float  # when the row was written last
    stored: NodeRow | None = None  # as it was read last; None: it was not there
    seq: int = 0  # as written last; it rises also when somebody has put an older row of this node back
    doubts: int = 0  # at etcd: exchanges in a row that did not renew the row's lease

    @property
    def introduced(self) -> bool:
        """Whether the row may stand in the store."""
        return self.seq > 0

    def read(self, row: NodeRow | None, started: float) -> OwnRow:
        """Return the state after an exchange that began at ``started`` has read ``row``. A row with a new ``seq`` is a keep-alive.

        Its time is that at which it was *sent*, no later than the exchange began.
        """
        acknowledged = row is not None and (self.stored is None or row.seq > self.stored.seq)
        return replace(self, stored=row, kept_alive=started if acknowledged else self.kept_alive)

    def read_leased(self, row: NodeRow | None, started: float, asked: bool, renewed: bool) -> OwnRow:
        """Return the state after an exchange with a store that has leases. ``asked``: the row's lease was to be ``renewed``."""
        doubts = self.doubts + 1 if asked and not renewed else 0
        return replace(self, stored=row, kept_alive=started if renewed else self.kept_alive, doubts=doubts)

    def says(self, row: NodeRow) -> bool:
        """Return whether the store holds what ``row`` says, in the newest row that this node has written."""
        stored = self.stored
        return stored is not None and stored.seq >= self.seq and replace(row, seq=stored.seq) == stored

    def put(self, row: NodeRow) -> Put:
        """Return the write of ``row`` over what was read last."""
        base = self.stored
        return Put(base, replace(row, seq=max(self.seq, base.seq if base else 0) + 1))

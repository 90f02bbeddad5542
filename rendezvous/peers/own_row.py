"""This node's own row in the store: what was read there, what this node has written, and when its last keep-alive was acknowledged."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastirun.rendezvous.rules import Rules
from elastirun.rendezvous.wire.actions import Put, Sync
from elastirun.rendezvous.wire.events import Synced
from elastirun.rendezvous.wire.records import NodeRow


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
        """Return whether the row may stand in the store."""
        return self.seq > 0

    def elsewhere(self) -> OwnRow:
        """Return the state in another store, where the row is not yet."""
        return replace(self, stored=None)

    def read(self, answer: Synced, asked: Sync, lasting: bool) -> OwnRow:
        """Return the state after the ``answer`` to an exchange, which asked to renew the row's lease if the store has leases.

        Without leases, a row that this exchange has written is a keep-alive, sent when the exchange began. One that an earlier exchange has
        written, whose answer was lost, is none: the others may have read it long ago.
        """
        row, put = answer.row, asked.put
        acknowledged = answer.kept_alive if lasting else row is not None and put is not None and row.seq >= put.row.seq
        doubts = self.doubts + 1 if asked.keep_alive and not answer.kept_alive else 0
        return replace(self, stored=row, kept_alive=answer.started if acknowledged else self.kept_alive, doubts=doubts)

    def says(self, row: NodeRow) -> bool:
        """Return whether the store holds what ``row`` says, in the newest row that this node has written."""
        stored = self.stored
        return stored is not None and stored.seq >= self.seq and replace(row, seq=stored.seq) == stored

    def write_is_due(self, row: NodeRow, now: float, asked: Sync, rules: Rules) -> bool:
        """Return whether ``row`` says something new, or must be written as a keep-alive. ``asked``: the last exchange.

        Without leases each beat writes the row. With leases a row is written anew when its lease may be over; one that was just
        written is under a new lease.
        """
        lease_is_over = self.doubts > (asked.put is not None)
        due = lease_is_over if rules.lasting else now - self.written_at >= rules.beat
        return due or not self.says(row)

    def write(self, row: NodeRow, now: float) -> tuple[Put, OwnRow]:
        """Return the write of ``row`` over what was read last, and the state after it."""
        seq = max(self.seq, self.stored.seq if self.stored else 0) + 1
        return Put(self.stored, replace(row, seq=seq)), replace(self, seq=seq, written_at=now)

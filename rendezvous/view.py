"""One node's view of a round: the record, the rows it has read, and which nodes are silent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elastirun.rendezvous.records import Member, NodeRow, RoundRecord, Status


@dataclass(frozen=True)
class View:
    """What a node knows when it decides about the round of ``record``. ``silent`` and ``quiet`` are those of ``Liveness``."""

    record: RoundRecord
    rows: Mapping[str, NodeRow]  # by id; not necessarily of all members
    silent: Callable[[str], bool]  # by id: the node has given no sign of life for ``expire``
    quiet: Callable[[str], float]  # by id: seconds since the node's last sign of life

    def is_over(self, m: Member) -> bool:
        """Return whether the member will never again run the round: it says so, or is lost."""
        return self.is_lost(m) or self.says_over(m)

    def says_over(self, m: Member) -> bool:
        """Return whether the member's own row says that it will never again run the round."""
        row = self.rows.get(m.id)
        return row is not None and (row.status is Status.LEFT or row.done_round >= self.record.round)

    def is_lost(self, m: Member) -> bool:
        """Return whether the member is silent, as this node or the node that broke the round found."""
        broken = self.record.broken
        return self.silent(m.id) or (broken is not None and m.id in broken.lost)

    def has_succeeded(self, m: Member) -> bool:
        """Return whether all workers of the member succeeded in this very round."""
        row = self.rows.get(m.id)
        return row is not None and row.succeeded == self.record.round

    def candidates(self) -> list[NodeRow]:
        """Return the rows of the nodes that can be members of the next round."""
        record = self.record
        members = {m.id for m in record.members}
        return [
            row
            for row in self.rows.values()
            if row.status is Status.JOINING and not self.silent(row.id) and (row.id not in members or row.done_round >= record.round)
        ]

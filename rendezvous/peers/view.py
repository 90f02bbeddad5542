"""One node's view of a round: the record, the rows it has read, and the signs of life of their nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from elastirun.rendezvous.peers import quorum
from elastirun.rendezvous.peers.liveness import Liveness
from elastirun.rendezvous.peers.ranks import own_rank, successors
from elastirun.rendezvous.wire.records import Member, NodeRow, RoundRecord, Status


@dataclass(frozen=True)
class View:
    """The knowledge of the node ``me`` when it decides about the round of ``record``."""

    me: str
    record: RoundRecord
    rows: Mapping[str, NodeRow]  # by id; not necessarily of all members
    live: Liveness
    now: float  # seconds of this node's clock
    gone: frozenset[str] = frozenset()  # ids of nodes whose end is proven, see ``Vote``

    @property
    def ended(self) -> frozenset[str]:
        """The ids of the nodes of which nothing runs any more."""
        return self.gone | quorum.left(self.rows.values())

    def silent(self, node_id: str) -> bool:
        """Return whether the node has given no sign of life for ``expire``."""
        return self.live.silent(node_id)

    def quiet(self, node_id: str) -> float:
        """Return the seconds since the node's last sign of life."""
        return self.live.quiet(node_id, self.now)

    def with_own(self, own: NodeRow) -> View:
        """Return the view with this node's ``own`` row as it is to be written, not as it was read last."""
        return replace(self, rows={**self.rows, self.me: own})

    # -- members of the round -----------------------------------------------------------------------------------------

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

    def seen_by_all(self, stored: NodeRow | None) -> bool:
        """Return whether every member has seen the round. ``stored``: this node's own row as it was read last.

        A member that runs has found so, which serves nodes that do not read all rows. So has one that has succeeded, and is gone since.
        """
        record = self.record
        found = {i: row for i, row in self.rows.items() if record.index(i) is not None}  # in a large job few rows are read
        if any(row.succeeded == record.round for row in found.values()):
            return True
        if stored is not None:
            found[self.me] = stored
        stand = [row.status for row in found.values() if row.round == record.round]
        all_ready = len(stand) == len(record.members) and set(stand) == {Status.READY}
        return Status.RUNNING in stand or Status.DONE in stand or all_ready

    def may_have_lost_more(self, own: NodeRow, late: float) -> bool:
        """Return whether a member that this node watches is absent or quiet for ``late`` seconds, or was found silent by this node.

        A whole rack may be lost at once, and each of its nodes must be watched for ``expire`` before it counts as lost.
        """
        record = self.record
        if record.broken is not None:
            return self.me == record.broken.by and bool(record.broken.lost)
        found = {i for i in successors(record, self.me) if self.live.absent(i) or self.quiet(i) > late}
        left = [i for i in found if (rank := record.index(i)) is None or not self.has_succeeded(record.members[rank])]
        return record.open and own_rank(record, own) is not None and bool(left)

    # -- nodes that come and go -----------------------------------------------------------------------------------------

    def candidates(self) -> list[NodeRow]:
        """Return the rows of the nodes that can be members of the next round."""
        record = self.record
        members = {m.id for m in record.members}
        ended = record.broken.ended if record.broken else ()  # a guard writes the record before the row
        return [
            row
            for row in self.rows.values()
            if row.status is Status.JOINING and not self.silent(row.id) and (row.id not in members or row.done_round >= record.round)
            if row.id not in ended
        ]

    def newcomers(self) -> list[NodeRow]:
        """Return the candidates that are no members of the round."""
        return [row for row in self.candidates() if self.record.index(row.id) is None]

    def undecided(self, row: NodeRow, proof: float) -> bool:
        """Return whether it is not clear yet that the node lives. Its next keep-alive, within ``proof`` seconds, will show."""
        return self.live.undecided(row.id, self.now, proof)

    def trusted(self, own: NodeRow) -> View:
        """Return the view with this node's ``own`` row, and without the nodes that have not shown that they live.

        An agent may have died while it waited. The store's host need not show that it lives, because its store answers. Nor need the
        node that ended the round, because it wrote the record, and its beat may be slow.
        """
        record = self.record
        members = {m.id for m in record.members} | {self.me} | ({record.broken.by} if record.broken else set())
        rows = self.with_own(own).rows
        return replace(self, rows={i: row for i, row in rows.items() if i in members or row.hosts or self.live.proven(i)})

    def others_have_left(self, proof: float) -> bool:
        """Return whether every other living node has left. A node outside of the round that died before is not waited for."""
        members = {m.id for m in self.record.members}
        stay = [row for i, row in self.rows.items() if i != self.me and row.status is not Status.LEFT and not self.silent(i)]
        return not any(row.id in members or self.live.proven(row.id) or self.undecided(row, proof) for row in stay)

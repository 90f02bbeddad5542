"""This node's link to one store: what it has asked and read there, what it has written, and which nodes have shown that they live. Pure.

Another store takes another link (``to_another_store``): nobody's silence in one store says anything about the other one.
"""

from __future__ import annotations

from elastirun.rendezvous.peers.contact import Contact
from elastirun.rendezvous.peers.liveness import Liveness, Newest, SameSince
from elastirun.rendezvous.peers.own_row import OwnRow
from elastirun.rendezvous.peers.polling import PollPlan, Schedule
from elastirun.rendezvous.peers.view import View
from elastirun.rendezvous.rules import Rules
from elastirun.rendezvous.timing import RECONNECT_SPREAD
from elastirun.rendezvous.wire.actions import Put
from elastirun.rendezvous.wire.events import Synced, SyncFailed
from elastirun.rendezvous.wire.records import NodeRow, RoundRecord, Status


class StoreLink:
    """The link of the node ``me`` to the store in use. Times in seconds of this node's clock."""

    def __init__(self, rules: Rules, me: str, now: float) -> None:
        self.rules = rules
        self.me = me
        self.rows: dict[str, NodeRow] = {}  # as they were read last, by node id
        self.live = Liveness(rules.expire, rules.row_lease if rules.lasting else None)
        self.same = SameSince(now)
        self.contact = Contact()
        self.own = OwnRow(kept_alive=now, written_at=now)
        self.schedule = Schedule(now)
        self.plan = PollPlan(rules, me, now)
        self._newest = Newest()

    def to_another_store(self, now: float) -> StoreLink:
        """Return the link to another store. The numbers of this node's row go on, so that a row of it is never taken for an older one."""
        link = StoreLink(self.rules, self.me, now)
        link.own = self.own.elsewhere()
        link.contact = link.contact.answered(now, now)
        return link

    # -- answers --------------------------------------------------------------------------------------------------------

    def answered(self, event: Synced) -> float:
        """Note that the store has answered. Return for how many seconds it had been away.

        After a failure or a slow answer, the silence of other nodes is counted from this answer.
        """
        before, self.contact = self.contact, self.contact.answered(event.now, event.started, self.rules.slow_answer)
        if before.trouble or self.contact.took > self.rules.slow_exchange:
            self.live.excuse(event.now + (RECONNECT_SPREAD if self.rules.lasting else 0.0))
        return event.now - before.last if before.trouble and before.last is not None else 0.0

    def failed(self, event: SyncFailed, newcomer: bool) -> None:
        """Note that an exchange has failed, and when the next one is due. ``newcomer``: this node has not read the round record yet."""
        self.contact = self.contact.failed(event.now, event.why, event.unreadable and newcomer)
        self.schedule.retry_at(self.contact.retry_at(event.now, self.rules.beat, self.rules.store_grace))

    def current(self, event: Synced) -> tuple[dict[str, NodeRow], list[str]]:
        """Return the rows that are not old, and a line about each old one."""
        return self._newest.without_old(event.rows, self.me)

    def take_in(self, event: Synced, rows: dict[str, NodeRow], running: bool) -> float | None:
        """Take in the ``rows`` of an answer: which were read, and which of those asked for are absent.

        Return when the owner of an absent row can be found silent; None: no time alone shows that.
        """
        asked = self.schedule.asked
        self.own = self.own.read(event, asked, self.rules.lasting)
        if self.own.doubts in (1, 2):  # at once, but not again and again
            self.schedule.soon()
        self.rows = rows
        self.plan.answered(asked.rows, len(rows))
        round = event.round
        members = round.ids if round and asked.rows is None else ()
        seqs = dict.fromkeys(members if asked.rows is None else asked.rows, -1) | {row.id: row.seq for row in rows.values()}
        seqs.pop(self.me, None)
        self.live.observe(seqs, event.started, event.now)
        if self.plan.sees_all or running:
            self.live.forget_unless(lambda i: i in seqs or (round is not None and round.index(i) is not None))
        return self.live.next_verdict(event.now)

    def stood_still(self, now: float, seconds: float, hosting: bool) -> None:
        """Note that this agent was suspended: that time does not count as silence of its peers, or of the store.

        A store that is served here (``hosting``) stood still as well, and its clients find it back at different times.
        """
        self.contact = self.contact.suspended(now, seconds)
        without_store = hosting and seconds > self.rules.slow_exchange
        self.live.excuse(now + (RECONNECT_SPREAD if without_store else 0.0))

    # -- what follows from them -------------------------------------------------------------------------------------------

    def view(self, record: RoundRecord, now: float, gone: frozenset[str] = frozenset()) -> View:
        """Return what this node knows of the round by the rows as they were read last. ``gone``: see ``View``."""
        return View(self.me, record, self.rows, self.live, now, gone)

    def away(self, node_id: str) -> bool:
        """Return whether another node has left or is silent."""
        row = self.rows.get(node_id)
        return self.live.silent(node_id) or (row is not None and row.status is Status.LEFT)

    def may_have_lost_more(self, record: RoundRecord | None, row: NodeRow, now: float) -> bool:
        """Return whether many rows are read because several members may be lost. The store is spared while it is slow."""
        slow = self.contact.trouble or self.contact.took > self.rules.beat
        return record is not None and not slow and self.view(record, now).may_have_lost_more(row, self.rules.late)

    def candidates(self, view: View, row: NodeRow) -> list[NodeRow]:
        """Return the candidates for the next round, and remember since when they are the same. ``row``: this node's, as it is to be."""
        found = view.trusted(row).candidates()
        round = view.record.round
        self.same.candidates.see((frozenset(one.id for one in found), round), view.now)
        self.same.enough.see((len(found) >= (1 if view.record.open else self.rules.min_nodes), round), view.now)
        return found

    def put(self, record: RoundRecord | None, row: NodeRow, now: float) -> Put | None:
        """Return the write of this node's ``row`` that is due. The store is read first: it may be that of a job that is over."""
        if self.contact.last is None or record is None or not self.own.write_is_due(row, now, self.schedule.asked, self.rules):
            return None
        put, self.own = self.own.write(row, now)
        return put

"""The store in which this node takes part in its job: which one that is, what was read there, and when to ask again. Pure.

The machine (machine.py) decides what this node does about rounds. It passes the outcome of each exchange in, reads what the store is known
to hold, and has the next exchange made. Nothing here calls the machine: a command returns a list of ``Effect`` for it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from elastirun.rendezvous import earlier_run, rules, updates
from elastirun.rendezvous.failover.decide import Move
from elastirun.rendezvous.failover.failover import Failover
from elastirun.rendezvous.failover.succession import another_run, host_of, lost_host, standbys
from elastirun.rendezvous.formation import Forming
from elastirun.rendezvous.peers import quorum
from elastirun.rendezvous.peers.contact import SLOW_IN_A_ROW, Contact, slow_store
from elastirun.rendezvous.peers.liveness import SameSince
from elastirun.rendezvous.peers.own_row import OwnRow
from elastirun.rendezvous.peers.view import View
from elastirun.rendezvous.progress import Notes
from elastirun.rendezvous.rules import Rules
from elastirun.rendezvous.store_link import StoreLink
from elastirun.rendezvous.timing import JUST_AFTER
from elastirun.rendezvous.transitions import JOINING, LEFT, RUNNING
from elastirun.rendezvous.wire.actions import Change, Outcome, Reconnect, Say, Sync
from elastirun.rendezvous.wire.events import Synced, SyncFailed
from elastirun.rendezvous.wire.records import Broken, Cause, NodeRow, Place, RoundRecord, Status, Vote

ASK_AGAIN = 2.0  # seconds for which a node that begins to doubt leaves the store in use alone, to meet the others at a standby store


@dataclass(frozen=True)
class Ends:
    """The end of this node's part in the job, because of what the store holds or because it does not answer."""

    outcome: Outcome
    reason: str


@dataclass(frozen=True)
class Wakes:
    """A time at which the machine wants a ``Tick``, seconds of this node's clock; None: none."""

    at: float | None


Effect = Say | Reconnect | Sync | Ends | Wakes


class StoreTracker:
    """The store in use, as one node knows it. Times in seconds of this node's clock.

    ``now`` is the time of the event that the machine handles, which sets it. ``row`` introduces the node; ``store_id``: see ``Machine``.
    """

    def __init__(self, rules: Rules, row: NodeRow, now: float, store_id: str) -> None:
        self.rules = rules
        self.me = row.id
        self.now = now
        self.record: RoundRecord | None = None  # of this job, from when it was first read on: its end is the end of this node, too
        self.hosting = False  # this agent hosts the store
        self._hosts = row.hosts  # what this node's row says about ``hosting``; a private store is in no row
        self._standby = row.standby  # the port of this node's standby store, as its row says it; 0: nobody is to look there
        self._own_store_id = store_id  # offered to one store only, see ``_take_another_store_id``
        self._earlier: RoundRecord | None = None  # the record of an earlier run, in a store that outlives its jobs
        self._link = StoreLink(rules, row.id, now)
        self._failover = Failover(row.id, rules)
        self._look_at: float | None = None  # the time of the next look at another store; None: none is needed
        self._notes = Notes(now)
        self._told_slow = False  # people were told that the store answers slowly

    # -- what is known of the store -----------------------------------------------------------------------------------

    @property
    def place(self) -> Place | None:
        """The place of the store in use; None: where the job was started."""
        return self._failover.evidence.at

    @property
    def undecided(self) -> bool:
        """Whether this node waits in a standby store that nobody has taken over yet."""
        return self._failover.evidence.undecided

    @property
    def waits(self) -> tuple[str, float] | None:
        """The reason in words why this node waits although the store in use answers, and since when; None: it does not wait."""
        return self._failover.waits

    @property
    def contact(self) -> Contact:
        """The contact with the store in use."""
        return self._link.contact

    @property
    def looking(self) -> bool:
        """Whether the exchange under way says nothing about the round of this node: it is with another store than the one in use, or with a
        standby store that nobody has taken over yet.
        """
        return self.undecided or (self._link.schedule.under_way and self._link.schedule.asked.look)

    @property
    def may_be_replaced(self) -> bool:
        """Whether the others may have gone on in another store: too few members of its round reach this node to rule that out."""
        record = self.record
        if record is None or not self.rules.majority:
            return False
        view = self.view(record)
        here = {m.id for m in record.members if not view.silent(m.id)}
        return not all(quorum.is_met(needed, here, view.ended) for needed in record.quorums[-1:])

    @property
    def forward(self) -> tuple[Place, RoundRecord | None] | None:
        """The word to be written into a store that appears where the job was started; None: none. See ``Failover.forward``."""
        return self._failover.forward(self.record)

    def last_words(self, row: NodeRow) -> tuple[tuple[Place, ...], Vote] | None:
        """Return the vote that this node or its guard writes when this agent ends, and the standby stores that get it; None: no vote.

        ``row``: of this node, as it is to be written.
        """
        stored, record = self._link.own.stored, self.record
        has_left = stored is not None and stored.status is LEFT and not self.hosting  # the store says so, and the others know
        vote = None if has_left and not (record and updates.mark_over(record, row)) else self._failover.notice(record)
        places = tuple(p for p in standbys(record) if p.id != self.me)
        return (places, vote) if vote is not None and places else None

    # -- what was read there --------------------------------------------------------------------------------------------

    @property
    def rows(self) -> dict[str, NodeRow]:
        """The rows as they were read last, by node id."""
        return self._link.rows

    @property
    def sees_all(self) -> bool:
        """Whether ``rows`` are those of all nodes, not only those that were asked for."""
        return self._link.plan.sees_all

    @property
    def own(self) -> OwnRow:
        """This node's own row in the store."""
        return self._link.own

    @property
    def kept_alive(self) -> float:
        """The time at which the last acknowledged keep-alive was sent, seconds of this node's clock."""
        return self._link.own.kept_alive

    @property
    def same(self) -> SameSince:
        """The times since which things have been the same in the store in use."""
        return self._link.same

    @property
    def round_known(self) -> tuple[int, float]:
        """The number of the round in the store (0: none), and since when this node has known it, seconds of this node's clock."""
        return self.record.round if self.record else 0, self._link.same.round.since

    @property
    def ran(self) -> float:
        """The seconds for which this node has known the round."""
        return self.now - self._link.same.round.since

    @property
    def formed(self) -> bool:
        """Whether a round of this job was seen, if only from beside it."""
        return self.record is not None and self.record.round > 0

    def quiet(self, node_id: str) -> float:
        """Return the seconds since the last sign of life of another node."""
        return self._link.live.quiet(node_id, self.now)

    def view(self, record: RoundRecord) -> View:
        """Return what this node knows of the round by the rows as they were read last."""
        return self._link.view(record, self.now, self._failover.evidence.gone)

    def candidates(self, view: View, row: NodeRow) -> list[NodeRow]:
        """Return the candidates for the next round, and remember since when they are the same. ``row``: this node's, as it is to be."""
        return self._link.candidates(view, row)

    def is_first(self, record: RoundRecord) -> bool:
        """Return whether this node is to take the next step."""
        return self._link.plan.is_first(record, self._link.away, self._own_store_id)

    def redirected_since(self, record: RoundRecord) -> float | None:
        """Return since when ``record`` has sent this node to the same place, where nobody has answered; None: it sends nobody."""
        return self._failover.redirected_since(record)

    def wait_for_earlier_run(self) -> Forming | None:
        """Return the decision to wait until an earlier run of this job has ended; None: there is none, or it has."""
        if self._earlier is None:
            return None
        return earlier_run.wait_for_end(self.rules, self.view(self._earlier), self.sees_all, self._link.same.earlier)

    def in_row(self, row: NodeRow) -> NodeRow:
        """Return this node's ``row`` with what it says about stores: whether this agent hosts the one in use, and its standby store."""
        as_it_is = (row.hosts, row.standby) == (self._hosts, self._standby)
        return row if as_it_is else replace(row, hosts=self._hosts, standby=self._standby)

    # -- what the machine notes -----------------------------------------------------------------------------------------

    def soon(self) -> None:
        """Make the next exchange as soon as none is under way: something has changed here or in the store."""
        self._link.schedule.soon()

    def serve_standby(self, port: int) -> None:
        """Note the port of the standby store that this agent serves now; 0: still the same one, or none."""
        self._standby = port or self._standby

    def stood_still(self, seconds: float) -> None:
        """Note that this agent was suspended for ``seconds``."""
        self._link.stood_still(self.now, seconds, self.hosting)
        self._failover.stood_still(self.now, seconds)

    def note_minority(self, minority: bool) -> None:
        """Note whether too few members of an earlier round are here to form the next one."""
        self._failover.note_minority(minority, self.now)

    # -- answers ----------------------------------------------------------------------------------------------------------

    def answered(self, event: Synced, row: NodeRow, stays: bool) -> list[Effect]:
        """Take in an answer, to an exchange with the store in use or to a look at another one.

        ``row``: of this node, as it is to be written. ``stays``: this node is not about to leave, and does not close the job.
        """
        self._link.schedule.done()
        if self._link.schedule.asked.at != self.place:
            return self._looked(event)
        if self.record and not self.undecided and (why := rules.another_store(self.record, event.round)):
            if self._failover.places(self.record) and not event.hosting and (event.round is None or event.round.round == 0):
                self._failover.replaced()  # its host is gone, and a standby store may take over
                return self.failed(SyncFailed(event.now, why))
        if (place := self._failover.is_sent(event.round, event.now)) is not None:
            if event.round is not None and event.round.round > 0 and self.record is not None and self.formed:
                return self._move(place, self.record, decided=True)
            return self._follow(place)
        if event.round is not None and (why := rules.untrue(self.rules, event.round, row)):
            return self.failed(SyncFailed(event.now, f"the round record is not true: {why}"))
        return self._take_in(event, row, stays)

    def _take_in(self, event: Synced, row: NodeRow, stays: bool) -> list[Effect]:
        """Take in what the store in use holds."""
        effects = self._note_contact(event)
        rows, old = self._link.current(event)
        effects += map(Say, self._notes.lines([*event.ignored, *old], event.now))
        found, all_rows = event.round, self._link.schedule.asked.rows is None
        self._failover.answered(self._link.schedule.asked, event, self.record)
        if self.record is not None and not self.undecided and (why := rules.another_store(self.record, found)):
            if stays and self._may_begin_again(self.record, event, row):
                return effects + self._begin_again(self.record)
            return [*effects, Ends(Outcome.STORE_LOST, why)]
        self._earlier = found if found and not self.record and earlier_run.may_be_earlier(self.rules, found, rows, all_rows) else None
        if self._earlier is not None and not self.rules.lasting:
            return effects + self._wait_for_another_store(self._earlier)
        effects += self._adopt(self.record if self.undecided else found if self._earlier is None else None)
        verdict = self._link.take_in(event, rows, row.status is RUNNING)
        if verdict is not None:
            if not (self._link.plan.sees_all or self._link.plan.wide) and self._may_have_lost_more(row):
                verdict = event.now  # to watch the other rows, too
            self._link.schedule.not_after(max(verdict, event.now) + JUST_AFTER)
        return effects

    def _note_contact(self, event: Synced) -> list[Effect]:
        """Note that the store has answered, and whether this agent hosts it."""
        away = self._link.answered(event)
        self.hosting = event.hosting
        self._hosts = event.hosting and not self.rules.private
        said: list[Effect] = [Say(f"the store is back after {away:.0f} s")] if away > self.rules.expire else []
        if self._link.contact.slow == SLOW_IN_A_ROW and not self._told_slow:
            self._told_slow = True
            said.append(Say(slow_store(self.rules)))
        return said

    def _adopt(self, found: RoundRecord | None) -> list[Effect]:
        """Adopt the record of this job; None: there is none yet."""
        how = rules.disagreement(self.rules, found) if found is not None else ""
        self.record = found
        self._link.same.round.see(found and found.fence, self.now)
        return [Ends(Outcome.DISAGREES, how)] if how else []

    def _looked(self, event: Synced) -> list[Effect]:
        """Take in what a standby store says while the store in use is lost. Give up the store in use if the other one takes over."""
        place, record = self._link.schedule.asked.at, self.record
        assert record is not None
        decision = self._failover.looked(place, event, record, self.rows)
        if isinstance(decision, Move) and decision.back:
            return self._go_back(record)
        if place is None:
            why = another_run(event.round, record)
            return [Ends(Outcome.STORE_LOST, why)] if why else []
        self.record = self._failover.evidence.verdict(record) or record
        return self._move(place, record, decision.decided) if isinstance(decision, Move) else []

    def failed(self, event: SyncFailed) -> list[Effect]:
        """Take in that an exchange has failed."""
        self._link.schedule.done()
        if (place := self._link.schedule.asked.at) != self.place:
            if not event.overtaken:
                self._failover.unanswered(place, event.now)
            return []
        sent = RoundRecord("", moved=event.moved) if event.moved is not None and place is None and not self.formed else None
        if (place := self._failover.is_sent(sent, event.now)) is not None:
            return self._follow(place)
        if self._link.schedule.asked.change is not None and self.record is None:
            self._take_another_store_id()  # the store may have accepted the first one
        self._link.failed(event, newcomer=self.record is None)
        if self.place is not None and self.record is None and event.now - (self._link.contact.last or 0.0) >= self.rules.expire:
            self.turn_back()
        effects: list[Effect] = []
        if event.refused and self._link.contact.last is None:
            effects.append(Ends(Outcome.TIMEOUT, event.why))
        since = self._link.contact.unreadable_since
        if since is not None and event.now - since >= self.rules.unreadable_limit:
            effects.append(Ends(Outcome.DISAGREES, event.why))  # a host of an earlier run would have ended by now
        return effects

    def found_at_start(self, found: RoundRecord | None, waits: bool) -> list[Effect]:
        """Process what this owner of the store in use ``found`` where the job was started. ``waits``: see ``Failover.found_at_start``."""
        if self.record is not None and (why := self._failover.found_at_start(found, self.record, waits, self.now)):
            return [Ends(Outcome.STORE_LOST, why)]
        return []

    # -- another store ----------------------------------------------------------------------------------------------------

    def _move(self, place: Place, record: RoundRecord, decided: bool) -> list[Effect]:
        """Give up the store in use for the standby store ``place``. The round is over here: its host has died, or is cut off."""
        effects = self._end_own_store()
        known = self._failover.move(place, record, self.rows, decided, self.now, self.ran)
        known = known if known.fence == record.fence else record
        reason = lost_host(known)
        if record.open:
            # the host may have said why before its store was gone
            broken = known.broken or Broken(Cause.LOST, reason, self.me, ran=self.ran)
            self.record = replace(record, broken=replace(broken, over=True))
        self._begin_at(place)
        return [*effects, Say(f"{reason}; the store moves to {place.address}")]

    def _go_back(self, record: RoundRecord) -> list[Effect]:
        """Go back to the store that this node has given up for an undecided one: its host lives, and can be reached again."""
        effects = self._end_own_store()
        self._begin_at(self._failover.go_back())
        return [*effects, Say(f"{host_of(record)} is back; this node joins there again")]

    def _end_own_store(self) -> list[Effect]:
        """End the store in use if it is this node's own, which it gives up. See ``Session.step``."""
        if self.place is None or self.place.id != self.me:
            return []
        self._standby = 0
        return [Reconnect()]  # another standby store is served with the next connection

    def _follow(self, place: Place) -> list[Effect]:
        """Join the job where its store is now. This node has read of no round, so it has taken part in none."""
        self.record = None
        self._take_another_store_id()
        self._failover.follow(place)
        self._begin_at(place)
        return [Say(f"the store of this job has moved to {place.address}")]

    def turn_back(self) -> None:
        """Ask again where the job was started: this newcomer was sent where nobody answers, or where there is no job."""
        self._failover.turn_back(self.now)
        self._link = self._link.to_another_store(self.now)
        self._link.contact = Contact()

    def _may_begin_again(self, record: RoundRecord, event: Synced, row: NodeRow) -> bool:
        """Return whether this node may join the job that is in the store now.

        No round that it has read names it, and the round of ``record`` cannot go on: its store has ended with the node that hosted it, or
        another job is in the store already.
        """
        in_no_round = not row.round and not row.done_round and self.place is None
        is_over = record.round == 0 or bool(record.host) or event.round is not None
        return in_no_round and is_over and not event.hosting

    def _begin_again(self, record: RoundRecord) -> list[Effect]:
        """Join the job that is in the store now, like an agent that has just been started."""
        effects: list[Effect] = [Say("the rendezvous store was replaced by another one; this node was in no round, and joins there")]
        if record.round:  # a later round may name this node: the others must not wait for it to take over in its old standby store
            self._standby = 0
            effects.append(Reconnect())  # another standby store is served with the next connection
        self.record, self._failover = None, Failover(self.me, self.rules)
        self._take_another_store_id()
        self._link = self._link.to_another_store(self.now)
        return effects

    def _take_another_store_id(self) -> None:
        """Offer another store id from now on. Nobody could distinguish two stores with one id."""
        self._own_store_id = hashlib.sha256(self._own_store_id.encode()).hexdigest()[:16]

    def _begin_at(self, place: Place | None) -> None:
        """Begin anew in another store: nothing is known of its rows, nor of what is there of this node."""
        self._hosts = place is not None and place.id == self.me
        self._link = self._link.to_another_store(self.now)

    def _wait_for_another_store(self, record: RoundRecord) -> list[Effect]:
        """Drop the connection to the store of a job that is over: its host is about to go, and that of the next run to come."""
        verdict = record.closed.verdict.value if record.closed else ""
        trouble = f"it still belongs to an earlier run of this job, which {verdict}"
        self._link.contact = replace(self._link.contact, last=None, trouble=trouble)
        self._link.schedule.pause_until(self.now + self.rules.beat)
        return [Reconnect()]

    def take_over(self) -> Change | None:
        """Return the write that makes the standby store of this node the one in use; None: it may not take over, or not yet."""
        return self._failover.take_over(self.rows, self.now)

    def begin_job(self) -> Change:
        """Return the write of the first record of this job, over that of an earlier run if there is one."""
        return Change(self._earlier, RoundRecord(store_id=self._own_store_id, settings=self.rules.settings))

    # -- the next exchange --------------------------------------------------------------------------------------------------

    def search(self, status: Status, stays: bool) -> list[Effect]:
        """Begin the search for another store, go on with it, or end it. ``stays``: this node is not about to leave.

        A node that begins to doubt that the host lives gives up the exchange with the host: the others look now, too.
        """
        contact, schedule, doubted = self._link.contact, self._link.schedule, self._failover.evidence.search.doubts
        silent_since = contact.last if contact.trouble and status is not LEFT else None
        self._look_at = self._failover.search(self.record, silent_since, self.rows, self.now, stays)
        effects: list[Effect] = [Wakes(self._look_at)]
        if silent_since is not None and self.rules.majority:
            effects.append(Wakes(silent_since + self.rules.doubt))
        if silent_since is not None and self._failover.evidence.search.doubts and not doubted:
            schedule.retry_at(self.now + ASK_AGAIN)
            if schedule.under_way:
                schedule.done()
                effects.append(Reconnect())
        return effects

    def ask_if_due(self, row: NodeRow, change: Change | None, waited: float, takes_over: bool) -> list[Effect]:
        """Begin the next exchange if one is due and none is under way: with the store in use, or a look at another one.

        ``row``, ``change``: what this node would write. ``waited``: seconds since its last step. ``takes_over``: ``change`` may make its
        standby store the one in use, which goes before a look.
        """
        schedule, record = self._link.schedule, self.record
        if schedule.under_way:
            return []
        # A look may hang for a second. A store in use that answers has its turn after each look; one that does not, after as many looks as
        # there are standby stores: its silence must not delay them.
        looks = max(1, len(self._failover.places(record))) if self._link.contact.trouble else 1
        starved = schedule.looks >= looks and self.now >= schedule.due
        if record is not None and self._look_at is not None and self.now >= self._look_at and not takes_over and not starved:
            schedule.begin_look(look := self._failover.look(record, self.now))
            return [look]
        if not schedule.urgent and change is None and self.now < schedule.due:
            return [Wakes(schedule.due)]
        status = JOINING if self.undecided else row.status
        due = self.now + self._link.plan.interval(status, record, waited, self._link.contact.took)
        asked = self._rows_to_read(row) if self._earlier is None else None
        put = self._link.put(record, row, self.now)
        sync = Sync(put, change, asked, keep_alive=self.rules.lasting and self._link.own.introduced)
        sync = self._failover.complete(sync, record, self.rows)
        schedule.begin(sync, due)
        return [sync]

    def _rows_to_read(self, row: NodeRow) -> tuple[str, ...] | None:
        """Return the ids of the rows that the next exchange reads; None: all rows."""
        more_lost = self._may_have_lost_more(row)
        return self._link.plan.rows(row.status, self.record, self._link.away, self.now, self.hosting, self._own_store_id, more_lost)

    def _may_have_lost_more(self, row: NodeRow) -> bool:
        """Return whether many rows are read because several members may be lost."""
        return self._link.may_have_lost_more(self.record, row, self.now)

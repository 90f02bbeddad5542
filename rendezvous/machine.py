"""The state machine of one node's rendezvous: ``step(event) -> [action]``, pure. No I/O, no clock, no thread, no logger.

Time comes in with the events, the outcome of every effect returns as an event, and every decision carries its reason in words.
The shape is that of etcd-io/raft's ``RawNode`` (step and ready) and of h11's state machine (all transitions in one table).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from elastirun.rendezvous import earlier_run, events, failures, formation, quorum, rules, updates
from elastirun.rendezvous.actions import Action, Change, Finish, Outcome, Reconnect, Say, Start, Stop, Sync
from elastirun.rendezvous.codec import clip
from elastirun.rendezvous.contact import Contact
from elastirun.rendezvous.link import Link
from elastirun.rendezvous.progress import Wait
from elastirun.rendezvous.ranks import own_rank
from elastirun.rendezvous.records import Broken, Cause, NodeRow, Place, RoundRecord, Status, Verdict, Vote
from elastirun.rendezvous.rules import Rules
from elastirun.rendezvous.succession import Moves, lost_host, standbys
from elastirun.rendezvous.timing import GOODBYE, JUST_AFTER, MARKING
from elastirun.rendezvous.transitions import DONE, DRAINING, JOINING, LEFT, READY, RUNNING, Trigger, following
from elastirun.rendezvous.view import View

CUT_OFF = "the store cannot be reached, and the workers here need no other node, so they could go on beside a new round"
PREPARES = "the workers' modules are imported here (--preload)"
ASK_AGAIN = 2.0  # seconds for which a node that begins to doubt leaves the store in use alone, to meet the others at a standby store
REMEMBERED = 8  # transitions that the error about an impossible one names


class Machine:
    """One node's part of the rendezvous.

    ``row`` introduces the node. ``store_id`` is the id that this node gives to a store it finds empty: each agent has another one.
    ``wake`` is when the machine wants the next ``Tick``. After ``Finish`` it does nothing any more.
    """

    def __init__(self, rules: Rules, row: NodeRow, now: float, store_id: str = "store") -> None:
        self.rules = rules
        self.row = row  # of this node, as it is to be written; ``seq`` is set then
        self.record: RoundRecord | None = None  # of this job, from when it was first read on: its end is the end of this node, too
        self.hosting = False  # this agent hosts the store
        self.finished = False
        self.wake = now
        self._event: events.Event = events.Tick(now)  # the one being handled, or the last one
        self._history: tuple[str, ...] = ()  # the last transitions, in words, for the error about an impossible one
        self._actions: list[Action] = []
        self._link = Link(rules, row.id, now)
        self._own_store_id = store_id  # offered to one store only, see ``_take_another_store_id``
        self._earlier: RoundRecord | None = None  # the record of an earlier run, in a store that outlives its jobs
        self._break: tuple[Cause, str] | None = None  # why this node wants its own round to end
        self._closing = False  # the job is to be closed, whatever else would be written
        self._wanted: Change | None = None  # what this node would write into the round record now
        self._outcome: tuple[Outcome, str] | None = None  # how this node ends, and why
        self._hurried = 0  # the round whose workers have got a ``Stop`` with the short grace of a node that is cut off
        self._waiting = Wait(now)  # for a round, or for the end of the goodbye
        self._moves = Moves(row.id, rules)
        self._prepares = False  # workers cannot start here yet
        self._kept = False  # some workers here kept their state when their last round ended
        self._gathered = False  # all workers of the running round train together

    @property
    def state(self) -> Status:
        """The state of this node, as its row says it."""
        return self.row.status

    @property
    def rows(self) -> dict[str, NodeRow]:
        """The rows as they were read last, by node id."""
        return self._link.rows

    @property
    def kept_alive(self) -> float:
        """The time at which the last acknowledged keep-alive was sent, seconds of this node's clock."""
        return self._link.own.kept_alive

    @property
    def trains_apart(self) -> bool:
        """Whether the workers here may train before those of all other nodes of their round take part (docs/elastic.md)."""
        return self._kept and not self._gathered

    @property
    def round_known(self) -> tuple[int, float]:
        """The number of the round in the store (0: none), and since when this node has known it, seconds of this node's clock."""
        return self.record.round if self.record else 0, self._link.same.round.since

    @property
    def last_words(self) -> tuple[tuple[Place, ...], Vote] | None:
        """The vote that this node or its guard writes when this agent ends, and the standby stores that get it; None: none is needed."""
        stored, record = self._link.own.stored, self.record
        has_left = stored is not None and stored.status is LEFT and not self.hosting  # the store says so, and the others know
        vote = None if has_left and not (record and updates.mark_over(record, self.row)) else self._moves.notice(record)
        places = tuple(p for p in standbys(self.record) if p.id != self.row.id)
        return (places, vote) if vote is not None and places else None

    @property
    def looking(self) -> bool:
        """Whether the exchange under way says nothing about the round of this node: it is with another store than the one in use, or with a
        standby store that nobody has taken over yet.
        """
        return self._moves.undecided or (self._link.schedule.under_way and self._link.schedule.asked.look)

    @property
    def may_be_replaced(self) -> bool:
        """Whether the others may have gone on in another store: too few members of its round reach this node to rule that out."""
        record = self.record
        if record is None or not self.rules.majority:
            return False
        view = self._view(record)
        here = {m.id for m in record.members if not view.silent(m.id)}
        return not all(quorum.is_met(needed, here, view.ended) for needed in record.quorums[-1:])

    @property
    def place(self) -> Place | None:
        """The place of the store in use; None: where the job was started."""
        return self._moves.at

    @property
    def forward(self) -> tuple[Place, RoundRecord | None] | None:
        """The word to be written into a store that appears where the job was started; None: none. See ``Moves.forward``."""
        return self._moves.forward(self.record)

    @property
    def _now(self) -> float:
        return self._event.now

    # -- events ---------------------------------------------------------------------------------------------------

    def begin(self, now: float, prepares: bool = False) -> None:
        """Begin to wait for a round. The time since this machine was made does not count: the agent may have imported modules.

        ``prepares``: workers cannot start here before the event ``Prepared``. Until then this node does not end a round that runs
        without it, and starts no round that it is a member of.
        """
        self._waiting.restart(now)
        self._prepares = prepares

    def step(self, event: events.Event) -> list[Action]:
        """Handle one event. Return the actions to be performed, in order."""
        if self.finished:
            return []
        self._event = event
        self._actions = []
        self.wake = math.inf
        if event_handler := self._ON.get(type(event)):
            event_handler(self, event)
        # a Tick brings only the time; the end of workers that are being stopped is reported by WorkersStopped
        before: object = None
        while before != (self.state, self._outcome) and not self.finished:
            before = (self.state, self._outcome)
            self._wanted = self._change_to_own_round() if not self._moves.undecided else self._take_over()
            self._check_store_grace()
            self._DECIDE[self.state](self)
        self._sync_if_due()
        return self._actions

    def _on_changed(self, event: events.Changed) -> None:
        self._link.schedule.soon()

    def _on_reachable(self, event: events.Reachable) -> None:
        self.row = replace(self.row, address=event.address, port=event.port, standby=event.standby or self.row.standby)
        self._link.schedule.soon()

    def _on_found_at_start(self, event: events.FoundAtStart) -> None:
        waits = self.state is JOINING and self.record is not None and not self.record.open
        if self.record is not None and (why := self._moves.found_at_start(event.round, self.record, waits, event.now)):
            self._end(Outcome.STORE_LOST, why)

    def _on_prepared(self, event: events.Prepared) -> None:
        self._prepares = False

    def _on_leave(self, event: events.Leave) -> None:
        self._end(Outcome.LEFT, event.reason)

    def _on_close(self, event: events.Close) -> None:
        self._closing = True
        self._link.schedule.soon()

    def _on_succeeded(self, event: events.WorkersSucceeded) -> None:
        if self.state is RUNNING:
            self._go(Trigger.SUCCEEDED, succeeded=self.row.round)

    def _on_stopped(self, event: events.WorkersStopped) -> None:
        if self.state is DRAINING:
            kept = self.row.round if event.kept else self.row.kept
            self._go(Trigger.STOPPED, done_round=self.row.round, failures=event.failures, kept=kept)
            self._kept, self._gathered = event.kept, False

    def _on_sits_out(self, event: events.SitsOut) -> None:
        if self.state is DRAINING:
            self.row = replace(self.row, done_round=self.row.round, failures=event.failures, note=clip(event.why))
            self._link.schedule.soon()

    def _on_gathered(self, event: events.Gathered) -> None:
        if event.round == self.row.round and self.state in (RUNNING, DRAINING):
            self._gathered = True

    def _on_synced(self, event: events.Synced) -> None:
        self._link.schedule.done()
        if self._link.schedule.asked.at != self._moves.at:
            self._on_looked(event)
            return
        if self.record and not self._moves.undecided and (why := rules.another_store(self.record, event.round)):
            if self._moves.places(self.record) and not event.hosting and (event.round is None or event.round.round == 0):
                self._moves.replaced()  # its host is gone, and a standby store may take over
                self._on_sync_failed(events.SyncFailed(event.now, why))
                return
        if (place := self._moves.is_sent(event.round, event.now)) is not None:
            if event.round is not None and event.round.round > 0 and self.record is not None and self._formed:
                self._move(place, self.record, decided=True)
            else:
                self._follow(place)
            return
        if event.round is not None and (why := rules.untrue(self.rules, event.round, self.row)):
            self._on_sync_failed(events.SyncFailed(event.now, f"the round record is not true: {why}"))
            return
        self._handle_answer(event)

    def _handle_answer(self, event: events.Synced) -> None:
        self._note_contact(event)
        rows, old = self._link.current(event)
        self._actions += map(Say, self._waiting.ignored([*event.ignored, *old], event.now))
        found, all_rows = event.round, self._link.schedule.asked.rows is None
        self._moves.answered(self._link.schedule.asked, event, self.record)
        if self.record is not None and not self._moves.undecided and (why := rules.another_store(self.record, found)):
            if self._may_begin_again(self.record, event):
                self._begin_again(self.record)
            else:
                self._end(Outcome.STORE_LOST, why)
            return
        self._earlier = found if found and not self.record and earlier_run.may_be_earlier(self.rules, found, rows, all_rows) else None
        if self._earlier is not None and not self.rules.lasting:
            self._wait_for_another_store(self._earlier)
            return
        self._adopt(self.record if self._moves.undecided else found if self._earlier is None else None)
        verdict = self._link.take_in(event, rows, self.state is RUNNING)
        if verdict is not None:
            if not (self._link.plan.sees_all or self._link.plan.wide) and self._may_have_lost_more():
                verdict = event.now  # to watch the other rows, too
            self._link.schedule.not_after(max(verdict, event.now) + JUST_AFTER)

    def _note_contact(self, event: events.Synced) -> None:
        """Note that the store has answered, and whether this agent hosts it."""
        away = self._link.answered(event)
        self.hosting = event.hosting
        if self.row.hosts != (hosts := event.hosting and not self.rules.private):
            self.row = replace(self.row, hosts=hosts)
        if away > self.rules.expire:
            self._say(f"the store is back after {away:.0f} s")

    def _adopt(self, found: RoundRecord | None) -> None:
        """Adopt the record of this job; None: there is none yet."""
        if found is not None and (how := rules.disagreement(self.rules, found)):
            self._end(Outcome.DISAGREES, how)
        self.record = found
        self._link.same.round.see(found and found.fence, self._now)

    def _on_looked(self, event: events.Synced) -> None:
        """Take in what a standby store says while the store in use is lost. Give up the store in use if the other one takes over."""
        place, record = self._link.schedule.asked.at, self.record
        assert record is not None
        if place is None:
            if why := self._moves.looked_at_start(event, record):
                self._end(Outcome.STORE_LOST, why)
            return
        follows = self._moves.should_follow(place, event, record)
        if (closed := self._moves.closed(record)) is not None:
            self.record = closed
        elif follows:
            self._move(place, record, decided=event.round is not None)

    def _move(self, place: Place, record: RoundRecord, decided: bool) -> None:
        """Give up the store in use for the standby store ``place``. The round is over here: its host has died, or is cut off."""
        if self.place is not None and self.place.id == self.row.id:
            self.row = replace(self.row, standby=0)  # who has given up its own standby store serves another one, see ``Session.step``
        known = self._moves.move(place, record, self.rows, decided, self._now, self._ran)
        known = known if known.fence == record.fence else record
        reason = lost_host(known)
        if record.open:
            # the host may have said why before its store was gone
            broken = known.broken or Broken(Cause.LOST, reason, self.row.id, ran=self._ran)
            self.record = replace(record, broken=replace(broken, lost=tuple(dict.fromkeys((*broken.lost, record.host))), over=True))
        self._say(f"{reason}; the store moves to {place.address}")
        self._begin_at(place)

    def _follow(self, place: Place) -> None:
        """Join the job where its store is now. This node has read of no round, so it has taken part in none."""
        self.record = None
        self._take_another_store_id()
        self._moves.at = place
        self._say(f"the store of this job has moved to {place.address}")
        self._begin_at(place)

    def _turn_back(self) -> None:
        """Ask again where the job was started: this newcomer was sent where nobody answers, or where there is no job."""
        self._moves.turn_back(self._now + 2 * self.rules.expire)
        self._link = self._link.to_another_store(self._now)
        self._link.contact = Contact()

    def _may_begin_again(self, record: RoundRecord, event: events.Synced) -> bool:
        """Return whether this node may join the job that is in the store now.

        No round that it has read names it, and the round of ``record`` cannot go on: its store has ended with the node that hosted it, or
        another job is in the store already.
        """
        in_no_round = not self.row.round and not self.row.done_round and self._moves.at is None
        is_over = record.round == 0 or bool(record.host) or event.round is not None
        return in_no_round and is_over and not event.hosting and self._outcome is None and not self._closing

    def _begin_again(self, record: RoundRecord) -> None:
        """Join the job that is in the store now, like an agent that has just been started."""
        self._say("the rendezvous store was replaced by another one; this node was in no round, and joins there")
        if record.round:  # a later round may name this node: the others must not wait for it to take over in its old standby store
            self.row = replace(self.row, standby=0)
            self._actions.append(Reconnect())  # another standby store is served with the next connection
        self.record, self._moves = None, Moves(self.row.id, self.rules)
        self._take_another_store_id()
        self._link = self._link.to_another_store(self._now)

    def _take_another_store_id(self) -> None:
        """Offer another store id from now on. Nobody could distinguish two stores with one id."""
        self._own_store_id = hashlib.sha256(self._own_store_id.encode()).hexdigest()[:16]

    def _begin_at(self, place: Place) -> None:
        """Begin anew in another store: nothing is known of its rows, and nothing of this node is there."""
        self.row = replace(self.row, hosts=place.id == self.row.id)
        self._link = self._link.to_another_store(self._now)

    def _take_over(self) -> Change | None:
        """Return the write that makes the standby store of this node the one in use; None: there is no reason to."""
        return self._moves.take_over(self.rows, self._now) if self._outcome is None else None

    def _wait_for_another_store(self, record: RoundRecord) -> None:
        """Drop the connection to the store of a job that is over: its host is about to go, and that of the next run to come."""
        verdict = record.closed.verdict.value if record.closed else ""
        trouble = f"it still belongs to an earlier run of this job, which {verdict}"
        self._link.contact = replace(self._link.contact, last=None, trouble=trouble)
        self._link.schedule.pause_until(self._now + self.rules.beat)
        self._actions.append(Reconnect())

    def _on_sync_failed(self, event: events.SyncFailed) -> None:
        self._link.schedule.done()
        if (place := self._link.schedule.asked.at) != self._moves.at:
            if not event.overtaken:
                self._moves.unanswered(place, event.now)
            return
        sent = RoundRecord("", moved=event.moved) if event.moved is not None and place is None and not self._formed else None
        if (place := self._moves.is_sent(sent, event.now)) is not None:
            self._follow(place)
            return
        if self._link.schedule.asked.change is not None and self.record is None:
            self._take_another_store_id()  # the store may have accepted the first one
        self._link.failed(event, newcomer=self.record is None)
        if self._moves.at is not None and self.record is None and event.now - (self._link.contact.last or 0.0) >= self.rules.expire:
            self._turn_back()
        if event.refused and self._link.contact.last is None:
            self._end(Outcome.TIMEOUT, event.why)
        since = self._link.contact.unreadable_since
        if since is not None and event.now - since >= self.rules.unreadable_limit:
            self._end(Outcome.DISAGREES, event.why)  # a host of an earlier run would have ended by now

    def _on_failed(self, event: events.WorkersFailed) -> None:
        if self.state is not RUNNING:
            return
        reason = failures.describe(failures.root_cause(event.failures)[0])
        self._break = (Cause.FAILURE, reason)
        self._stop(Trigger.FAILED, planned=False, reason=reason, failures=event.failures)

    def _on_stood_still(self, event: events.StoodStill) -> None:
        self._link.stood_still(event.now, event.seconds, self.hosting)
        self._moves.stood_still(event.now, event.seconds)
        if event.workers_ended and self.state is RUNNING:
            reason = f"{self.row.name} {self.row.address} stood still for {event.seconds:.0f} s"
            self._break = (Cause.LOST, reason)
            self._stop(Trigger.ROUND_OVER, planned=False, reason=reason)

    _ON: ClassVar[dict[type, Callable[[Machine, Any], None]]] = {
        events.Synced: _on_synced,
        events.SyncFailed: _on_sync_failed,
        events.StoodStill: _on_stood_still,
        events.Changed: _on_changed,
        events.Reachable: _on_reachable,
        events.FoundAtStart: _on_found_at_start,
        events.Prepared: _on_prepared,
        events.Leave: _on_leave,
        events.Close: _on_close,
        events.WorkersSucceeded: _on_succeeded,
        events.WorkersFailed: _on_failed,
        events.WorkersStopped: _on_stopped,
        events.SitsOut: _on_sits_out,
        events.Gathered: _on_gathered,
    }

    # -- the states: what this node decides from what it knows -----------------------------------------------------

    def _in_joining(self) -> None:
        record = self.record
        if record is not None and record.closed is not None:
            good = record.closed.verdict is Verdict.SUCCEEDED
            self._end(Outcome.SUCCEEDED if good else Outcome.FAILED, record.closed.reason, overrule=True)
        if self._outcome is not None:
            self._go(Trigger.ENDED, note=clip(self._outcome[1]))
            return
        if self._moves.undecided:
            self._wait("the host of the rendezvous store was lost; waiting until enough of the others have come")
            return
        if self._link.contact.last is None or (self._link.contact.trouble and not self._formed):
            self._wait(f"waiting for the rendezvous store: {self._link.contact.trouble or 'connecting'}")
        else:
            self._join(record)

    def _join(self, record: RoundRecord | None) -> None:
        """Enter the round that names this node, wait beside a round that does not, or form the next one. The store answers."""
        if record is not None and record.open:
            self._waiting.since = self._now
            self._moves.note_minority(False, self._now)
            if own_rank(record, self.row) is not None and record.round > self.row.done_round:
                self._go(Trigger.NAMED, round=record.round, note="", failures=())
            elif own_rank(record, self.row) is None and self._link.plan.sees_all:
                self._wait_beside(record)
        elif record is None and self._moves.at is not None:
            self._wait("waiting for the node that is to take over the store")
            self._wake_at(self._link.same.round.since + self.rules.expire)
            if self._now >= self._link.same.round.since + self.rules.expire:
                self._turn_back()  # the store is empty: its agent was started anew
        elif record is None:
            self._begin_job()
        else:
            if record.index(self.row.id) is not None and self.row.done_round < record.round:
                self.row = replace(self.row, done_round=record.round)  # the round was over before this node read it
                self._link.schedule.soon()
            if self._link.plan.sees_all:
                self._form(record)

    def _begin_job(self) -> None:
        """Write the first record of this job, once an earlier run of it has ended."""
        earlier = self._earlier
        wait = earlier and earlier_run.wait_for_end(self.rules, self._view(earlier), self._link.plan.sees_all, self._link.same.earlier)
        if wait:
            self._wait(wait.reason, check_again=wait.check_again)
        else:
            self._wanted = Change(earlier, RoundRecord(store_id=self._own_store_id, settings=self.rules.settings))

    def _wait_beside(self, record: RoundRecord) -> None:
        """Wait beside a round that runs without this node: end it, so that the next one includes the newcomers, or stay a spare."""
        view, began = self._view(record), self._link.same.round.since
        newcomers = [row for row in self._link.candidates(view, self.row) if record.index(row.id) is None]
        if self._prepares:
            self._progress(f"{PREPARES} before it joins round {record.round}")
            return
        decision = formation.take_in(self.rules, view, self.row, newcomers, began, self._link.same.candidates.since)
        if decision.excluded:
            self._end(Outcome.EXCLUDED, decision.reason)
        elif decision.record is None:
            if decision.reason:
                self._progress(decision.reason, decision.news)
            self._wake_at(decision.check_again)
        elif self._wanted is None:
            self._wanted = Change(record, decision.record)

    def _form(self, record: RoundRecord) -> None:
        """Form the next round if that is possible, else say what this node waits for."""
        view = self._view(record)
        standing = self._link.candidates(view, self.row)
        if shared := updates.share_losses(view):
            self._wanted = Change(record, shared)
            return
        if len(standing) < self.rules.max_nodes and any(view.undecided(row, self.rules.proof) for row in view.newcomers()):
            self._wake_at(self._now + self.rules.beat)
            return
        over = self._link.same.over.see(record.round, self._now)
        redirected = self._moves.redirected_since(record)
        decision = formation.form(self.rules, view.trusted(self.row), self._link.same.candidates.since, over, redirected)
        self._moves.note_minority(decision.minority, self._now)
        can_form = self._link.same.formable.see(decision.record is not None, self._now)
        if decision.record is None:
            self._wait(decision.reason, decision.news, decision.check_again)
            return
        mine = decision.leader == self.row.id or self._link.plan.is_first(record, self._link.away, self._own_store_id)
        if mine or self._now >= can_form + 2 * self.rules.beat:
            self._wanted = Change(record, decision.record)

    def _in_ready(self) -> None:
        record = self._own_round()
        if record is None or self._outcome:
            if record is not None:
                self._leave_round()
            self._go(Trigger.ROUND_OVER if record is None else Trigger.LEAVE, done_round=self.row.round)
        elif self._prepares:
            self._progress(f"round {record.round} is formed; {PREPARES}")
        elif self._view(record).seen_by_all(self._link.own.stored) and not self._may_not_run_alone(record):
            self._go(Trigger.ALL_READY, started=record.round)
            self._actions.append(Start(record, own_rank(record, self.row) or 0))
        else:
            self._progress(f"round {record.round} is formed; waiting until every member has seen it")

    def _in_running(self) -> None:
        record = self._own_round()
        if self._outcome is not None:
            if record is not None:
                self._leave_round()
            left = self._outcome[0] is Outcome.LEFT
            self._stop(Trigger.LEAVE, planned=left, reason=self._outcome[1], within=None if left else self.rules.expire)
        elif record is None:
            planned, reason = formation.why_over(self.record, self.row.round)
            self._stop(Trigger.ROUND_OVER, planned=planned, reason=reason)
        elif self._may_not_run_alone(record):
            self._break = (Cause.LEAVE, CUT_OFF)
            self._hurried = self.row.round
            self._stop(Trigger.ROUND_OVER, planned=False, reason=CUT_OFF, within=self.rules.lone_grace)

    def _in_done(self) -> None:
        record = self._own_round()
        if record is None:
            self._go(Trigger.ROUND_OVER)  # ``_join`` sets ``done_round`` before the next round
        elif self._outcome is not None:
            self._go(Trigger.LEAVE)
        else:
            view = self._view(record).with_own(self.row)
            missing = [m for m in record.members if not view.has_succeeded(m)]
            if not missing:
                self._wanted = Change(record, updates.succeed(record, self.row.id))
            elif self._link.plan.sees_all:
                self._progress(f"all workers here succeeded; waiting for {formation.names(missing)}")

    def _in_draining(self) -> None:
        """Wait for WorkersStopped. Workers that need no other node must stop at once if this one is cut off: see docs/decisions/0006."""
        record = self.record
        if record is not None and record.round == self.row.round != self._hurried and self._may_not_run_alone(record):
            self._hurried = self.row.round
            self._actions.append(Stop(False, CUT_OFF, self.rules.lone_grace))

    def _in_left(self) -> None:
        """Write that this node has left, for a limited time. The store's host goes last."""
        assert self._outcome is not None
        written = self._link.own.stored is not None and self._link.own.stored.status is LEFT
        limit = self.rules.host_lingers if self.hosting and written else GOODBYE
        record, closed = self.record, self.record.closed if self.record else None
        lingering = self.hosting and record and closed and not self._view(record).others_have_left(self.rules.proof)
        since = self._waiting.since
        over_time = self._now - since >= limit
        names_ends = self.rules.lasting or (self.rules.succession and not self._moves.undecided and self._now - since < MARKING)
        if names_ends and record and (marked := updates.mark_over(record, self.row, quorum.left(self.rows.values()))):
            self._wanted = Change(record, marked)
            self._wake_at(since + MARKING)
            written = False
        host_gone = self._link.contact.trouble and closed
        if over_time or host_gone or not self._link.own.introduced or (written and not lingering):
            self.finished = True
            self._actions.append(Finish(*self._outcome, closed))
        else:
            self._wake_at(since + limit)

    _DECIDE = {
        JOINING: _in_joining,
        READY: _in_ready,
        RUNNING: _in_running,
        DONE: _in_done,
        DRAINING: _in_draining,
        LEFT: _in_left,
    }

    # -- what the states have in common -------------------------------------------------------------------------------

    def quiet(self, node_id: str) -> float:
        """Return the seconds since the last sign of life of another node."""
        return self._link.live.quiet(node_id, self._now)

    def _view(self, record: RoundRecord) -> View:
        """Return what this node knows of the round by the rows as they were read last."""
        return self._link.view(record, self._now, self._moves.gone)

    @property
    def _ran(self) -> float:
        """The seconds for which this node has known the round."""
        return self._now - self._link.same.round.since

    @property
    def _formed(self) -> bool:
        """Return whether a round of this job was seen, if only from beside it."""
        return self.record is not None and self.record.round > 0

    def _own_round(self) -> RoundRecord | None:
        """Return the record while the round of this node is still on, else None."""
        record = self.record
        mine = record is not None and record.open and record.round == self.row.round and own_rank(record, self.row) is not None
        return record if mine else None

    def _leave_round(self) -> None:
        """Want the round to end because this node leaves."""
        assert self._outcome is not None
        self._break = (Cause.LEAVE, f"{self.row.name} {self.row.address} leaves: {self._outcome[1]}")

    def _may_not_run_alone(self, record: RoundRecord) -> bool:
        """Return whether workers that need no other node must not run now: they are gone before other nodes may consider this node lost.

        They are those of a single-node round, or train apart: see docs/decisions/0006. They are not started either when the
        answer that permits it arrives after that limit, for example after this agent stood still.
        """
        if self.rules.private or (len(record.members) > 1 and not self.trains_apart):
            return False
        limit = self.kept_alive + self.rules.lone_limit
        self._wake_at(limit)
        return self._now >= limit

    def _end(self, outcome: Outcome, reason: str, overrule: bool = False) -> None:
        """Decide how this node ends. The first reason stands, but a verdict on the whole job overrules it."""
        if self._outcome is None or (overrule and self._outcome[0] is not Outcome.LEFT):
            self._outcome = (outcome, reason)

    def _stop(self, trigger: Trigger, planned: bool, reason: str, within: float | None = None, **fields: object) -> None:
        self._actions.append(Stop(planned, reason, within))
        self._go(trigger, note=clip(reason), **fields)

    def _go(self, trigger: Trigger, **fields: object) -> None:
        """Change the state, and with it the row."""
        event = f"{type(self._event).__name__} at {self._now:.3f}"
        state = following(self.state, trigger, "; ".join((*self._history, event)))
        self._history = (*self._history[1 - REMEMBERED :], f"{event}: {trigger.value}")
        self.row = replace(self.row, status=state, **fields)  # type: ignore[arg-type]
        self._link.schedule.soon()
        self._waiting.restart(self._now)

    def _check_store_grace(self) -> None:
        """Give up on a store that is away, or of too few nodes, for longer than ``store_grace``; say before that it is."""
        trouble, last = self._link.contact.trouble, self._link.contact.last
        what = f"the rendezvous store is away ({trouble})"
        if self._moves.waits is not None:
            (trouble, last), what = self._moves.waits, self._moves.waits[0]
        if self._outcome is not None or not trouble or last is None or not self._formed:
            return  # while the job has not begun, the join timeout is a node's limit
        away = self._now - last
        if away >= self.rules.store_grace:
            self._end(Outcome.STORE_LOST, f"the rendezvous store was away for {away:.0f} s: {trouble}")
        elif away > self.rules.expire:
            goes_on = "the workers go on" if self.state is RUNNING else "waiting"
            self._progress(f"{what}; {goes_on} for up to {self.rules.store_grace:g} s")
        self._wake_at(last + self.rules.store_grace)

    # -- the exchange with the store ----------------------------------------------------------------------------------

    def _sync_if_due(self) -> None:
        """Ask for the next exchange with the store, or to be woken when it is due."""
        schedule = self._link.schedule
        look_at = self._search()
        self._wake_at(look_at)
        if self.finished or schedule.under_way:
            return
        takes_over = self._moves.undecided and self._wanted is not None
        if self.record is not None and look_at is not None and self._now >= look_at and not takes_over:
            self._look(self.record)
            return
        change = self._change()
        if not schedule.urgent and change is None and self._now < schedule.due:
            self._wake_at(schedule.due)
            return
        state = JOINING if self._moves.undecided else self.state
        due = self._now + self._link.plan.interval(state, self.record, self._now - self._waiting.since, self._link.contact.took)
        asked = self._rows_to_read() if self._earlier is None else None
        put = self._link.put(self.record, self.row, self._now)
        sync = Sync(put, change, asked, keep_alive=self.rules.lasting and self._link.own.introduced)
        sync = self._moves.complete(sync, self.record, self.rows)
        schedule.begin(sync, due)
        self._actions.append(sync)

    def _search(self) -> float | None:
        """Begin, go on with or end the search for another store. Return the time of the next look at one; None: none is needed.

        A node that begins to doubt that the host lives gives up the exchange with the host: the others look now, too.
        """
        contact, schedule, doubted = self._link.contact, self._link.schedule, self._moves.doubts
        silent_since = contact.last if contact.trouble and self.state is not LEFT else None
        due = self._moves.search(self.record, silent_since, self.rows, self._now, stays=self._outcome is None)
        if silent_since is not None and self.rules.majority:
            self._wake_at(silent_since + self.rules.doubt)
        if silent_since is not None and self._moves.doubts and not doubted:
            schedule.retry_at(self._now + ASK_AGAIN)
            if schedule.under_way:
                schedule.done()
                self._actions.append(Reconnect())
        return due

    def _look(self, record: RoundRecord) -> None:
        """Look at another store."""
        self._link.schedule.begin_look(sync := self._moves.look(record, self._now))
        self._actions.append(sync)

    def _change(self) -> Change | None:
        """Return the write of the round record that is due; None before the store was read and while it is in trouble."""
        if self._link.contact.last is None or self._link.contact.trouble:
            return None
        record = self.record
        if self._closing and record is not None and record.closed is None:
            return Change(record, updates.close(record, self.row))
        return self._wanted

    def _rows_to_read(self) -> tuple[str, ...] | None:
        """Return the ids of the rows that the next exchange reads; None: all rows."""
        more_lost = self._may_have_lost_more()
        return self._link.plan.rows(self.state, self.record, self._link.away, self._now, self.hosting, self._own_store_id, more_lost)

    def _may_have_lost_more(self) -> bool:
        """Return whether many rows are read because several members may be lost."""
        return self._link.may_have_lost_more(self.record, self.row, self._now)

    def _change_to_own_round(self) -> Change | None:
        """Return the write that breaks the running round, for this node's own reason or because a member is gone; None: no reason."""
        record = self.record
        if record is None or not record.open:
            self._break = None
            return None
        if record.round != self.row.round:
            self._break = None  # this node has not read that its own round is over, only the next one
        if self._break is not None:
            return Change(record, updates.break_up(record, *self._break, self.row.id, self._ran))
        lost = updates.lose_member(self._view(record), self.rules.expire, self._ran)
        return Change(record, lost) if lost else None

    # -- lines for people -----------------------------------------------------------------------------------------------

    def _wait(self, why: str, at_once: bool = False, check_again: float | None = None) -> None:
        """Wait in JOINING, with lines about the progress, and not longer than the join timeout."""
        self._wake_at(check_again)
        if self._outcome is None and self._now >= self._waiting.since + self.rules.join_timeout:
            missing = not self._formed and not self._link.contact.trouble
            hint = "; start the other nodes with the same --rdzv-id and --rdzv-endpoint" if missing else ""
            self._end(Outcome.TIMEOUT, f"no round within {self.rules.join_timeout:g} s: {why}{hint}")
        else:
            self._progress(why, at_once)
            self._wake_at(self._waiting.since + self.rules.join_timeout)

    def _progress(self, text: str, at_once: bool = False) -> None:
        """Say why this node waits, once the wait has lasted, or ``at_once`` when the text is new."""
        if line := self._waiting.line(text, self._now, at_once):
            self._say(line)

    def _say(self, text: str) -> None:
        self._actions.append(Say(text))

    def _wake_at(self, when: float | None) -> None:
        if when is not None and when > self._now:
            self.wake = min(self.wake, when)

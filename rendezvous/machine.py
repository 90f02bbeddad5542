"""The state machine of one node's rendezvous: ``step(event) -> [action]``, pure. No I/O, no clock, no thread, no logger.

Time comes in with the events, the outcome of every effect returns as an event, and every decision carries its reason in words.
The shape is that of etcd-io/raft's ``RawNode`` (step and ready) and of h11's state machine (all transitions in one table).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from elastirun.rendezvous import events, failures, formation, rules, updates
from elastirun.rendezvous.actions import Action, Change, Finish, Outcome, Put, Reconnect, Say, Start, Stop, Sync
from elastirun.rendezvous.codec import clip
from elastirun.rendezvous.contact import Contact
from elastirun.rendezvous.liveness import Liveness, Newest, SameSince
from elastirun.rendezvous.own_row import OwnRow
from elastirun.rendezvous.polling import PollPlan, Schedule
from elastirun.rendezvous.progress import ProgressLines
from elastirun.rendezvous.ranks import successors
from elastirun.rendezvous.records import Broken, Cause, Closed, NodeRow, RoundRecord, Verdict
from elastirun.rendezvous.rules import Rules
from elastirun.rendezvous.timing import GOODBYE, JUST_AFTER, RECONNECT_SPREAD
from elastirun.rendezvous.transitions import DONE, DRAINING, JOINING, LEFT, READY, RUNNING, Trigger, following
from elastirun.rendezvous.view import View

CUT_OFF = "the store cannot be reached, and a round of one node could go on beside a new one"
REMEMBERED = 8  # transitions that the error about an impossible one names


class Machine:
    """One node's part of the rendezvous.

    ``row`` introduces the node. ``wake`` is when the machine wants the next ``Tick``. After ``Finish`` it does nothing any more.
    """

    def __init__(self, rules: Rules, row: NodeRow, now: float) -> None:
        self.rules = rules
        self.state = JOINING
        self.row = row  # of this node, as it is to be written; ``seq`` is set then
        self.record: RoundRecord | None = None
        self.rows: dict[str, NodeRow] = {}
        self.hosting = False  # this agent hosts the store
        self.finished = False
        self.wake = now
        self._event: events.Event = events.Tick(now)  # the one being handled, or the last one
        self._history: tuple[str, ...] = ()  # the last transitions, in words, for the error about an impossible one
        self._actions: list[Action] = []
        self._live = Liveness(rules.expire, rules.row_lease if rules.lasting else None)
        self._newest = Newest()
        self._same = SameSince(now)
        self._contact = Contact()
        self._own = OwnRow(kept_alive=now, written_at=now)
        self._schedule = Schedule(now)
        self._plan = PollPlan(rules, row.id, now)
        self._sees_all = False  # ``rows`` are all rows, not only those of the watched members
        self._met = False  # this store was read while its job was open, so the end of that job is the end of ours
        self._earlier: RoundRecord | None = None  # the record of an earlier run, in a store that outlives its jobs
        self._break: Broken | None = None  # how this node wants its own round to end
        self._closing = False  # the job is to be closed, whatever else would be written
        self._wanted: Change | None = None  # what this node would write into the round record now
        self._outcome: tuple[Outcome, str] | None = None  # how this node ends, and why
        self._hurried = 0  # the round whose workers were told to stop at once
        self._waiting_since = now  # when the wait for a round began, or the goodbye
        self._lines = ProgressLines(now)

    @property
    def kept_alive(self) -> float:
        """The time at which the last acknowledged keep-alive was sent, seconds of this node's clock."""
        return self._own.kept_alive

    @property
    def _now(self) -> float:
        return self._event.now

    # -- events ---------------------------------------------------------------------------------------------------

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
            self._wanted = self._change_to_own_round()
            self._check_store_grace()
            self._DECIDE[self.state](self)
        self._sync_if_due()
        return self._actions

    def _on_changed(self, event: events.Changed) -> None:
        self._schedule.urgent = True

    def _on_reachable(self, event: events.Reachable) -> None:
        self.row = replace(self.row, address=event.address, port=event.port)
        self._schedule.urgent = True

    def _on_leave(self, event: events.Leave) -> None:
        self._end(Outcome.LEFT, event.reason)

    def _on_close(self, event: events.Close) -> None:
        self._closing = True
        self._schedule.urgent = True

    def _on_succeeded(self, event: events.WorkersSucceeded) -> None:
        if self.state is RUNNING:
            self._go(Trigger.SUCCEEDED, succeeded=self.row.round)

    def _on_stopped(self, event: events.WorkersStopped) -> None:
        if self.state is DRAINING:
            self._go(Trigger.STOPPED, done_round=self.row.round, failures=event.failures)

    def _on_synced(self, event: events.Synced) -> None:
        if event.round is not None and (lie := rules.untrue(self.rules, event.round, self.row)):
            self._on_sync_failed(events.SyncFailed(event.now, f"the round record is not true: {lie}"))
            return
        self._handle_answer(event)

    def _handle_answer(self, event: events.Synced) -> None:
        self._note_contact(event)
        rows, old = self._newest.without_old(event.rows, self.row.id)
        self._actions += map(Say, self._lines.ignored([*event.ignored, *old], event.now))
        if self.record is not None and (event.round is None or event.round.store_id != self.record.store_id):
            lost, other = "lost this job: it began anew, or its keys were deleted", "was replaced by another one; its rounds are not ours"
            self._end(Outcome.STORE_LOST, f"the rendezvous store {other if event.round else lost}")
            return
        self._earlier = event.round if event.round is not None and not self._met and self._may_be_earlier(event.round, rows) else None
        if self._earlier is not None and not self.rules.lasting:
            self._wait_for_another_store(self._earlier)
            return
        self._adopt(event.round if self._earlier is None else None)
        self._note_own_row(event)
        self.rows = rows
        self._observe(event)

    def _note_contact(self, event: events.Synced) -> None:
        """Note that the store has answered. If it was in trouble until now, no silence of other nodes before now counts."""
        before, self._contact = self._contact, self._contact.answered(event.now, event.started)
        self._schedule.under_way = False
        self.hosting = event.hosting
        if self.row.hosts != (hosts := event.hosting and not self.rules.private):
            self.row = replace(self.row, hosts=hosts)
        if before.trouble or self._contact.took > self.rules.slow_exchange:
            self._live.excuse(event.now + (RECONNECT_SPREAD if self.rules.lasting else 0.0))
        if before.trouble and before.last is not None and event.now - before.last > self.rules.expire:
            self._say(f"the store is back after {event.now - before.last:.0f} s")

    def _adopt(self, found: RoundRecord | None) -> None:
        """Adopt the record of this job; None: there is none yet."""
        self._met = self._met or found is not None
        if found is not None and (how := rules.disagreement(self.rules, found)):
            self._end(Outcome.DISAGREES, how)
        self.record = found
        self._same.round.see(found and found.fence, self._now)

    def _note_own_row(self, event: events.Synced) -> None:
        """Note what was read of this node's own row, and whether its keep-alive was acknowledged."""
        if self.rules.lasting:
            asked = self._schedule.asked.keep_alive
            self._own = self._own.read_leased(event.row, event.started, asked, event.kept_alive)
            self._schedule.urgent = self._schedule.urgent or self._own.doubts in (1, 2)  # at once, but not again and again
        else:
            self._own = self._own.read(event.row, event.started)

    def _observe(self, event: events.Synced) -> None:
        """Let ``Liveness`` know which rows were read and which of the rows asked for are absent."""
        asked = self._schedule.asked.rows
        self._sees_all = asked is None
        members = tuple(m.id for m in event.round.members) if event.round else ()
        seqs = dict.fromkeys(members if asked is None else asked, -1) | {row.id: row.seq for row in self.rows.values()}
        seqs.pop(self.row.id, None)
        self._live.observe(seqs, event.started, event.now)
        if self._sees_all:
            self._plan.crowd = len(self.rows)
        if self._sees_all or self.state is RUNNING:
            self._live.forget_all_but(seqs.keys() | set(members))
        if (when := self._live.next_verdict(event.now)) is not None:
            when = when if self._sees_all or not self._may_have_lost_more() else event.now  # start now to watch the other rows, too
            self._schedule.due = min(self._schedule.due, max(when, event.now) + JUST_AFTER)

    def _may_be_earlier(self, found: RoundRecord, rows: Mapping[str, NodeRow]) -> bool:
        """Return whether the record that this newcomer ``found`` is of a run that has ended, or of one no node of which was seen yet."""
        if found.closed is not None:
            return True
        if not self.rules.lasting or (found.round == 0 and not rules.disagreement(self.rules, found)):
            return False
        return self._schedule.asked.rows is not None or all(row.status is LEFT for row in rows.values())

    def _earlier_run_goes_on(self, record: RoundRecord) -> str:
        """Return why the next run cannot begin yet; empty when it can. Only a living node shows that the record is of this run."""
        if not self._sees_all or not self._all_have_left(record):
            return "an earlier run of this job is over; waiting for its nodes to leave"
        if record.closed is not None or (record.broken is not None and record.broken.over):
            return ""
        if record.members and all(m.id in self.rows for m in record.members):
            return ""  # all of them have left
        alone = formation.may_still_work(self.rules, self._view(record))
        wait = max(alone, self._same.earlier.see((record.store_id, record.version), self._now) + self.rules.expire - self._now)
        if wait <= 0:
            return ""
        self._wake_at(self._now + wait)
        return f"nothing is heard of an earlier run of this job; it can go on where the store is out of reach for another {wait:.0f} s"

    def _wait_for_another_store(self, record: RoundRecord) -> None:
        """Drop the connection to the store of a job that is over: its host is about to go, and that of the next run to come."""
        verdict = record.closed.verdict.value if record.closed else ""
        self._contact = replace(self._contact, last=None, trouble=f"it still belongs to an earlier run of this job, which {verdict}")
        self._schedule.due = self._now + self.rules.beat
        self._schedule.urgent = False
        self._actions.append(Reconnect())

    def _on_sync_failed(self, event: events.SyncFailed) -> None:
        self._schedule.under_way = False
        self._contact = self._contact.failed(event.now, event.why, event.unreadable and not self._met)
        self._schedule.due = event.now + self._contact.pause(self.rules.beat)
        if event.refused and self._contact.last is None:
            self._end(Outcome.TIMEOUT, event.why)
        since = self._contact.unreadable_since
        if since is not None and event.now - since >= self.rules.unreadable_limit:
            self._end(Outcome.DISAGREES, event.why)  # this newcomer has waited longer than the host of an earlier run lingers

    def _on_failed(self, event: events.WorkersFailed) -> None:
        if self.state is not RUNNING:
            return
        reason = failures.describe(failures.root_cause(event.failures)[0])
        self._break = Broken(Cause.FAILURE, reason, self.row.id)
        self._stop(Trigger.FAILED, planned=False, reason=reason, failures=event.failures)

    def _on_stood_still(self, event: events.StoodStill) -> None:
        """Note that this agent was suspended: that time does not count as silence of its peers, or of the store."""
        self._contact = self._contact.suspended(event.now, event.seconds)
        self._live.excuse(event.now)
        if event.workers_ended and self.state is RUNNING:
            reason = f"{self.row.name} {self.row.address} stood still for {event.seconds:.0f} s"
            self._break = Broken(Cause.LOST, reason, self.row.id)
            self._stop(Trigger.ROUND_OVER, planned=False, reason=reason)

    _ON: ClassVar[dict[type, Callable[[Machine, Any], None]]] = {
        events.Synced: _on_synced,
        events.SyncFailed: _on_sync_failed,
        events.StoodStill: _on_stood_still,
        events.Changed: _on_changed,
        events.Reachable: _on_reachable,
        events.Leave: _on_leave,
        events.Close: _on_close,
        events.WorkersSucceeded: _on_succeeded,
        events.WorkersFailed: _on_failed,
        events.WorkersStopped: _on_stopped,
    }

    # -- the states: what this node decides from what it knows -----------------------------------------------------

    def _in_joining(self) -> None:
        record = self.record
        if record is not None and record.closed is not None:
            self._end_with(record.closed)
        if self._outcome is not None:
            self._go(Trigger.ENDED, note=clip(self._outcome[1]))
            return
        if self._contact.last is None or (self._contact.trouble and not self._formed):
            self._wait(f"waiting for the rendezvous store: {self._contact.trouble or 'connecting'}")
        else:
            self._join(record)

    def _join(self, record: RoundRecord | None) -> None:
        """Enter the round that names this node, wait beside a round that does not, or form the next one. The store answers."""
        if record is not None and record.open:
            self._waiting_since = self._now
            if self._place(record) is not None and record.round > self.row.done_round:
                self._go(Trigger.NAMED, round=record.round, note="", failures=())
            elif self._place(record) is None and self._sees_all:
                self._wait_beside(record)
        elif self._earlier is not None and (why := self._earlier_run_goes_on(self._earlier)):
            self._wait(why)
        elif record is None:
            self._wanted = Change(self._earlier, RoundRecord(store_id=self.rules.new_store_id, settings=self.rules.settings))
        else:
            if record.index(self.row.id) is not None and self.row.done_round < record.round:
                self.row = replace(self.row, done_round=record.round)  # the round was over before this node read it
                self._schedule.urgent = True
            if self._sees_all:
                self._form(record)

    def _wait_beside(self, record: RoundRecord) -> None:
        """Wait beside a round that runs without this node: end it, so that the next one includes the newcomers, or stay a spare."""
        newcomers = [row for row in self._current_candidates() if record.index(row.id) is None]
        holder = rules.holder(self.rules, record, self.row)
        admitted_at = self._same.round.since + (0.0 if self.row.hosts else rules.hold(record))
        if holder is not None and self._now >= self._same.round.since + self.rules.replacement:
            place = f"--node-rank={self.row.node_rank} is held by {formation.names([holder])} in round {record.round}"
            self._end(Outcome.EXCLUDED, f"{place}; give each node its own")
        elif len(record.members) >= self.rules.max_nodes and not self.row.hosts:
            self._progress(f"round {record.round} has its {self.rules.max_nodes} nodes; this node is a spare", at_once=True)
        elif any(self._view(record).has_succeeded(m) for m in record.members):
            self._progress(f"round {record.round} is finishing; this node is a spare", at_once=True)
        elif self._now < admitted_at:
            self._progress(f"{rules.why_held(record)}; newcomers are taken in after {rules.hold(record):g} s", at_once=True)
            self._wake_at(admitted_at)
        elif self._now < self._same.candidates.since + self.rules.debounce:
            self._wake_at(self._same.candidates.since + self.rules.debounce)
        elif self._wanted is None:
            joined = updates.break_up(record, Cause.JOIN, f"{formation.names(newcomers)} joined", self.row.id, self._ran)
            self._wanted = Change(record, joined)

    def _form(self, record: RoundRecord) -> None:
        """Form the next round if that is possible, else say what this node waits for."""
        standing = self._current_candidates()
        shared = updates.share_losses(self._view(record))
        if shared is not None:
            self._wanted = Change(record, shared)
            return
        if len(standing) < self.rules.max_nodes and self._somebody_is_new(record):
            self._wake_at(self._now + self.rules.beat)
            return
        view, same = self._view(record, self._trusted_rows(record)), self._same.candidates.since
        over = self._same.over.see(record.round, self._now)
        decision = formation.form(self.rules, view, self._now, same, over)
        can_form = self._same.formable.see(decision.record is not None, self._now)
        if decision.record is None:
            self._wait(decision.reason, at_once=decision.news)
            self._wake_at(decision.check_again)
            return
        mine = decision.leader == self.row.id or self._plan.is_first(record, self._away)
        if mine or self._now >= can_form + 2 * self.rules.beat:
            self._wanted = Change(record, decision.record)

    def _in_ready(self) -> None:
        record = self._own_round()
        if record is None or self._outcome:
            if record is not None:
                self._leave_round()
            self._go(Trigger.ROUND_OVER if record is None else Trigger.LEAVE, done_round=self.row.round)
        elif self._all_have_seen(record) and not self._may_not_run_alone(record):
            self._go(Trigger.ALL_READY)
            self._actions.append(Start(record, self._place(record) or 0))
        else:
            self._progress(f"round {record.round} is formed; waiting until every member has seen it")

    def _all_have_seen(self, record: RoundRecord) -> bool:
        """Return whether every member has seen the round. One that runs has found so, which serves nodes that do not read all rows."""
        rows = [self._own.stored if m.id == self.row.id else self.rows.get(m.id) for m in record.members]
        stand = [row.status for row in rows if row is not None and row.round == record.round]
        return RUNNING in stand or DONE in stand or stand == [READY] * len(rows)

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
            self._break = Broken(Cause.LEAVE, CUT_OFF, self.row.id)
            self._hurried = self.row.round
            self._stop(Trigger.ROUND_OVER, planned=False, reason=CUT_OFF, within=self.rules.lone_grace)

    def _in_done(self) -> None:
        record = self._own_round()
        if record is None:
            self._go(Trigger.ROUND_OVER)  # ``_join`` sets ``done_round`` before the next round
        elif self._outcome is not None:
            self._go(Trigger.LEAVE)
        else:
            view = self._view(record, self._rows_with_own())
            missing = [m for m in record.members if not view.has_succeeded(m)]
            if not missing:
                self._wanted = Change(record, updates.succeed(record, self.row.id))
            elif self._sees_all:
                self._progress(f"all workers here succeeded; waiting for {formation.names(missing)}")

    def _in_draining(self) -> None:
        """Wait for WorkersStopped. A single-node round that is cut off meanwhile must stop at once: see docs/decisions/0006."""
        record = self.record
        if record is not None and record.round == self.row.round != self._hurried and self._may_not_run_alone(record):
            self._hurried = self.row.round
            self._actions.append(Stop(False, CUT_OFF, self.rules.lone_grace))

    def _in_left(self) -> None:
        """Write that this node has left, for a limited time. The store's host goes last."""
        assert self._outcome is not None
        written = self._own.stored is not None and self._own.stored.status is LEFT
        limit = self.rules.host_lingers if self.hosting and written else GOODBYE
        lingering = self.hosting and self.record is not None and self.record.closed is not None and not self._all_have_left(self.record)
        over_time = self._now - self._waiting_since >= limit
        if self.rules.lasting and self.record is not None and (marked := updates.mark_over(self.record, self.row)):
            self._wanted = Change(self.record, marked)
            written = False
        host_gone = bool(self._contact.trouble) and self.record is not None and self.record.closed is not None
        if over_time or host_gone or not self._own.introduced or (written and not lingering):
            self.finished = True
            self._actions.append(Finish(*self._outcome, closed=self.record.closed if self.record else None))
        else:
            self._wake_at(self._waiting_since + limit)

    def _all_have_left(self, record: RoundRecord) -> bool:
        """Return whether every living node has left. A node outside of the round that died before is not waited for."""
        members = {m.id for m in record.members}
        stay = [i for i, row in self.rows.items() if i != self.row.id and row.status is not LEFT and not self._live.silent(i)]
        return not any(i in members or self._live.proven(i) or self._live.undecided(i, self._now, self.rules.proof) for i in stay)

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
        return self._live.quiet(node_id, self._now)

    def _view(self, record: RoundRecord, rows: Mapping[str, NodeRow] | None = None) -> View:
        """Return what this node knows of the round, by ``rows`` or the rows as they were read last."""
        return View(record, self.rows if rows is None else rows, self._live.silent, self.quiet)

    @property
    def _ran(self) -> float:
        """The seconds for which this node has known the round."""
        return self._now - self._same.round.since

    @property
    def _formed(self) -> bool:
        """Whether a round of this job was seen, if only from beside it."""
        return self.record is not None and self.record.round > 0

    def _own_round(self) -> RoundRecord | None:
        """Return the record while the round of this node is still on, else None."""
        record = self.record
        mine = record is not None and record.open and record.round == self.row.round and self._place(record) is not None
        return record if mine else None

    def _place(self, record: RoundRecord) -> int | None:
        """Return this node's rank in the round; None: it is no member, or is named with a wrong number of slots."""
        place = record.index(self.row.id)
        return place if place is not None and record.members[place].slots == self.row.slots else None

    def _leave_round(self) -> None:
        """Want the round to end because this node leaves."""
        assert self._outcome is not None
        self._break = Broken(Cause.LEAVE, f"{self.row.name} {self.row.address} leaves: {self._outcome[1]}", self.row.id)

    def _may_not_run_alone(self, record: RoundRecord) -> bool:
        """Return whether a single-node round must not run now: its workers are gone before other nodes may consider this node lost.

        Such a round needs no other node to go on training: see docs/decisions/0006. Nor is it started when the answer that would let it
        start comes so late, such as after a standstill of this agent.
        """
        if self.rules.private or len(record.members) > 1:
            return False
        limit = self.kept_alive + self.rules.lone_limit
        self._wake_at(limit)
        return self._now >= limit

    def _end_with(self, closed: Closed) -> None:
        """End with the verdict on the job."""
        good = closed.verdict is Verdict.SUCCEEDED
        self._end(Outcome.SUCCEEDED if good else Outcome.FAILED, closed.reason, overrule=True)

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
        self.state = following(self.state, trigger, "; ".join((*self._history, event)))
        self._history = (*self._history[1 - REMEMBERED :], f"{event}: {trigger.value}")
        self.row = replace(self.row, status=self.state, **fields)  # type: ignore[arg-type]
        self._schedule.urgent = True
        self._lines.restart(self._now)
        if self.state in (JOINING, LEFT):
            self._waiting_since = self._now

    def _check_store_grace(self) -> None:
        """Give up on a store that is away for longer than ``store_grace``; say before that it is away."""
        trouble, last = self._contact.trouble, self._contact.last
        if self._outcome is not None or not trouble or last is None or not self._formed:
            return  # while the job has not begun, the join timeout is a node's limit
        away = self._now - last
        if away >= self.rules.store_grace:
            self._end(Outcome.STORE_LOST, f"the rendezvous store was away for {away:.0f} s: {trouble}")
        elif away > self.rules.expire:
            goes_on = "the workers go on" if self.state is RUNNING else "waiting"
            self._progress(f"the rendezvous store is away ({trouble}); {goes_on} for up to {self.rules.store_grace:g} s")
        self._wake_at(last + self.rules.store_grace)

    # -- the exchange with the store ----------------------------------------------------------------------------------

    def _sync_if_due(self) -> None:
        """Ask for the next exchange with the store, or to be woken when it is due."""
        schedule = self._schedule
        if self.finished or schedule.under_way:
            return
        change = self._change()
        if not schedule.urgent and change is None and self._now < schedule.due:
            self._wake_at(schedule.due)
            return
        due = self._now + self._plan.interval(self.state, self.record)
        everything = self._earlier is not None or self._may_have_lost_more()
        asked = None if everything else self._plan.rows(self.state, self.record, self._away, self._now, self.hosting)
        put = self._put()
        sync = Sync(put, change, asked, keep_alive=self.rules.lasting and self._own.introduced)
        self._schedule = Schedule(due, urgent=False, under_way=True, asked=sync)
        self._actions.append(sync)

    def _change(self) -> Change | None:
        """Return the write of the round record that is due; None before the store was read and while it is in trouble."""
        if self._contact.last is None or self._contact.trouble:
            return None
        record = self.record
        if self._closing and record is not None and record.closed is None:
            return Change(record, updates.close(record, self.row))
        return self._wanted

    def _may_have_lost_more(self) -> bool:
        """Return whether a watched member is late, or was found silent by this node: then all rows are read.

        A whole rack may be lost at once, and each of its nodes must be watched for ``expire`` before it counts as lost. While the store
        is slow the answer is no, because it has enough to do.
        """
        record = self.record
        if record is None or self._contact.trouble or self._contact.took > self.rules.beat:
            return False
        if record.broken is not None:
            return self.row.id == record.broken.by and bool(record.broken.lost)
        late = {i for i in successors(record, self.row.id) if self._live.absent(i) or self.quiet(i) > self.rules.late}
        late -= {m.id for m in record.members if late and self._view(record).has_succeeded(m)}
        return record.open and self._place(record) is not None and bool(late)

    def _put(self) -> Put | None:
        """Return the write of this node's row when it says something new or, without leases, when a keep-alive is due."""
        if self._contact.last is None or not self._met:
            return None  # read first: this may be the store of a job that is over
        own, asked = self._own, self._schedule.asked
        lease_is_over = own.doubts > (asked.put is not None)  # a row that was just written is under a new one
        due = lease_is_over if self.rules.lasting else self._now - own.written_at >= self.rules.beat
        if own.says(self.row) and not due:
            return None
        put = own.put(self.row)
        self._own = replace(own, seq=put.row.seq, written_at=self._now)
        return put

    def _away(self, node_id: str) -> bool:
        """Return whether another node has left or is silent."""
        row = self.rows.get(node_id)
        return self._live.silent(node_id) or (row is not None and row.status is LEFT)

    def _rows_with_own(self) -> dict[str, NodeRow]:
        """Return all rows, this node's own as it is to be written, not as it was read last."""
        return {**self.rows, self.row.id: self.row}

    def _trusted_rows(self, record: RoundRecord) -> dict[str, NodeRow]:
        """Return all rows but those of nodes that have not shown that they live: an agent may have died while it waited.

        The store's host need not show it, because its store answers. Nor need the node that ended the round, because it wrote the
        record, and its beat may be slow.
        """
        members = {m.id for m in record.members} | {self.row.id} | ({record.broken.by} if record.broken else set())
        return {i: row for i, row in self._rows_with_own().items() if i in members or row.hosts or self._live.proven(i)}

    def _somebody_is_new(self, record: RoundRecord) -> bool:
        """Return whether a newcomer waits of which this node does not know yet whether it lives. Its next keep-alive will show."""
        newcomers = [row for row in self._view(record).candidates() if record.index(row.id) is None]
        return any(self._live.undecided(row.id, self._now, self.rules.proof) for row in newcomers)

    def _current_candidates(self) -> list[NodeRow]:
        """Return the candidates for the next round, and remember since when they are the same."""
        record = self.record
        assert record is not None
        rows = self._view(record, self._trusted_rows(record)).candidates()
        self._same.candidates.see((frozenset(row.id for row in rows), record.round), self._now)
        return rows

    def _change_to_own_round(self) -> Change | None:
        """Return the write that breaks the running round, for this node's own reason or because a member is gone; None: no reason."""
        record = self.record
        if record is None or not record.open:
            self._break = None
            return None
        if self._break is not None and record.round == self.row.round:
            return Change(record, updates.break_up(record, self._break.cause, self._break.reason, self._break.by, self._ran))
        view = self._view(record)
        for m in record.members:
            if m.id not in self.rows and not view.silent(m.id):
                continue  # its row was not read, as those of most of a thousand members
            gone = m.id != self.row.id and view.is_over(m)
            if gone and not view.has_succeeded(m):
                return Change(record, updates.lose(view, m, self.rules.expire, self.row.id, self._ran))
        return None

    # -- lines for people -----------------------------------------------------------------------------------------------

    def _wait(self, why: str, at_once: bool = False) -> None:
        """Wait in JOINING, with lines about the progress, and not longer than the join timeout."""
        if self._outcome is None and self._now >= self._waiting_since + self.rules.join_timeout:
            self._end(Outcome.TIMEOUT, f"no round within {self.rules.join_timeout:g} s: {why}")
        else:
            self._progress(why, at_once)
            self._wake_at(self._waiting_since + self.rules.join_timeout)

    def _progress(self, text: str, at_once: bool = False) -> None:
        """Say why this node waits, once the wait has lasted, or ``at_once`` when the text is new."""
        if line := self._lines.waiting(text, self._now, at_once):
            self._say(line)

    def _say(self, text: str) -> None:
        self._actions.append(Say(text))

    def _wake_at(self, when: float | None) -> None:
        if when is not None and when > self._now:
            self.wake = min(self.wake, when)

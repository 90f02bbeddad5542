"""The state machine of one node's rendezvous: ``step(event) -> [action]``, pure. No I/O, no clock, no thread, no logger.

Time comes in with the events, the outcome of every effect returns as an event, and every decision carries its reason in words.
The shape is that of etcd-io/raft's ``RawNode`` (step and ready) and of h11's state machine (all transitions in one table).
The machine decides about rounds, and how this node ends. Which store it takes part in, and what was read there, is in store_tracker.py.

See docs/rendezvous.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from elastirun.rendezvous import failures, formation, updates
from elastirun.rendezvous.peers import quorum
from elastirun.rendezvous.peers.ranks import own_rank
from elastirun.rendezvous.progress import Wait
from elastirun.rendezvous.rules import Rules, keeps_state, most_nodes, pause_before
from elastirun.rendezvous.store_tracker import Effect, Ends, StoreTracker, Wakes
from elastirun.rendezvous.timing import GOODBYE, MARKING
from elastirun.rendezvous.transitions import DONE, DRAINING, JOINING, LEFT, READY, RUNNING, Trigger, following
from elastirun.rendezvous.wire import events
from elastirun.rendezvous.wire.actions import Action, Change, Finish, Outcome, Say, Start, Stop
from elastirun.rendezvous.wire.codec import clip
from elastirun.rendezvous.wire.records import Cause, NodeRow, Place, RoundRecord, Status, Verdict, Vote

CUT_OFF = "the store cannot be reached, and the workers here need no other node, so they could go on beside a new round"
PREPARES = "the workers' modules are imported here (--preload)"
REMEMBERED = 8  # transitions that the error about an impossible one names


class Machine:
    """One node's part of the rendezvous.

    ``row`` introduces the node. ``store_id`` is the id that this node gives to a store it finds empty: each agent has another one.
    ``wake`` is when the machine wants the next ``Tick``. After ``Finish`` it does nothing any more.
    """

    def __init__(self, rules: Rules, row: NodeRow, now: float, store_id: str = "store") -> None:
        self.rules = rules
        self.row = row  # of this node, as it is to be written; ``seq`` is set then
        self.store = StoreTracker(rules, row, now, store_id)
        self.finished = False
        self.wake = now
        self._event: events.Event = events.Tick(now)  # the one being handled, or the last one
        self._history: tuple[str, ...] = ()  # the last transitions, in words, for the error about an impossible one
        self._actions: list[Action] = []
        self._break: tuple[Cause, str, bool] | None = None  # why this node wants its own round to end: see ``Broken``, also for ``victim``
        self._closing = False  # the job is to be closed, whatever else would be written
        self._wanted: Change | None = None  # what this node would write into the round record now
        self._outcome: tuple[Outcome, str] | None = None  # how this node ends, and why
        self._hurried = 0  # the round whose workers have got a ``Stop`` with the short grace of a node that is cut off
        self._waiting = Wait(now)  # for a round, or for the end of the goodbye
        self._says_away = False  # the store is away, so that what is known of other waits may be old
        self._prepares = False  # workers cannot start here yet
        self._kept = False  # some workers here kept their state when their last round ended
        self._gathered = False  # all workers of the running round train together

    @property
    def state(self) -> Status:
        """The state of this node, as its row says it."""
        return self.row.status

    @property
    def record(self) -> RoundRecord | None:
        """The round record of this job, as it was read last; None: there is none yet."""
        return self.store.record

    @property
    def hosting(self) -> bool:
        """Whether this agent hosts the store in use."""
        return self.store.hosting

    @property
    def trains_apart(self) -> bool:
        """Whether the workers here may train before those of all other nodes of their round take part (docs/elastic.md)."""
        return self._kept and not self._gathered

    @property
    def pause_of_new(self) -> float:
        """The seconds for which workers in place of failed ones wait, while others go on with their state."""
        record = self._own_round()
        goes_on = record is not None and keeps_state(self.store.view(record).rows.values(), record.round - 1)
        return pause_before(self.rules, record) if record is not None and goes_on else 0.0

    @property
    def last_words(self) -> tuple[tuple[Place, ...], Vote] | None:
        """The vote that this node or its guard writes when this agent ends, and the standby stores that get it; None: none is needed."""
        return self.store.last_words(self.row)

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
        self.store.now = event.now
        self._actions = []
        self.wake = math.inf
        if event_handler := self._ON.get(type(event)):
            event_handler(self, event)
            self.row = self.store.in_row(self.row)
        # a Tick brings only the time; the end of workers that are being stopped is reported by WorkersStopped
        before: object = None
        while before != (self.state, self._outcome) and not self.finished:
            before = (self.state, self._outcome)
            self._wanted = self._change_to_own_round() if not self.store.undecided else self._take_over()
            self._check_store_grace()
            self._DECIDE[self.state](self)
        self._sync_if_due()
        return self._actions

    def _on_changed(self, event: events.Changed) -> None:
        self.store.soon()

    def _on_reachable(self, event: events.Reachable) -> None:
        self.row = replace(self.row, address=event.address, port=event.port)
        self.store.serve_standby(event.standby)
        self.store.soon()

    def _on_found_at_start(self, event: events.FoundAtStart) -> None:
        waits = self.state is JOINING and self.record is not None and not self.record.open
        self._carry_out(self.store.found_at_start(event.round, waits))

    def _on_prepared(self, event: events.Prepared) -> None:
        self._prepares = False

    def _on_leave(self, event: events.Leave) -> None:
        self._end(Outcome.LEFT, event.reason)

    def _on_close(self, event: events.Close) -> None:
        self._closing = True
        self.store.soon()

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
            self.store.soon()

    def _on_gathered(self, event: events.Gathered) -> None:
        if event.round == self.row.round and self.state in (RUNNING, DRAINING):
            self._gathered = True

    def _on_synced(self, event: events.Synced) -> None:
        stays = self._outcome is None and not self._closing
        self._carry_out(self.store.answered(event, self.row, stays))

    def _on_sync_failed(self, event: events.SyncFailed) -> None:
        self._carry_out(self.store.failed(event))

    def _on_failed(self, event: events.WorkersFailed) -> None:
        if self.state is not RUNNING:
            return
        first = failures.root_cause(event.failures)[0]
        reason, victim = failures.describe(first), failures.may_have_lost_peers(first)
        self._break = (Cause.FAILURE, reason, victim)
        self._stop(Trigger.FAILED, Stop(False, reason, victim=victim), failures=event.failures)

    def _on_stood_still(self, event: events.StoodStill) -> None:
        self.store.stood_still(event.seconds)
        if event.workers_ended and self.state is RUNNING:
            reason = f"{self.row.name} {self.row.address} stood still for {event.seconds:.0f} s"
            self._break = (Cause.LOST, reason, False)
            self._stop(Trigger.ROUND_OVER, Stop(False, reason))

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
        if self.store.undecided:
            self._wait("the host of the rendezvous store was lost; waiting until enough of the others have come")
            return
        if self.store.contact.last is None or (self.store.contact.trouble and not self.store.formed):
            self._wait(f"waiting for the rendezvous store: {self.store.contact.trouble or 'connecting'}")
        else:
            self._join(record)

    def _join(self, record: RoundRecord | None) -> None:
        """Enter the round that names this node, wait beside a round that does not, or form the next one. The store answers."""
        if record is not None and record.open:
            self._waiting.since = self._now
            self.store.note_minority(False)
            if own_rank(record, self.row) is not None and record.round > self.row.done_round:
                self._go(Trigger.NAMED, round=record.round, note="", failures=())
            elif own_rank(record, self.row) is None and self.store.sees_all:
                self._wait_beside(record)
        elif record is None and self.store.place is not None:
            self._wait("waiting for the node that is to take over the store")
            self._wake_at(self.store.same.round.since + self.rules.expire)
            if self._now >= self.store.same.round.since + self.rules.expire:
                self.store.turn_back()  # the store is empty: its agent was started anew
        elif record is None:
            self._begin_job()
        else:
            if record.index(self.row.id) is not None and self.row.done_round < record.round:
                self.row = replace(self.row, done_round=record.round)  # the round was over before this node read it
                self.store.soon()
            if self.store.sees_all:
                self._form(record)

    def _begin_job(self) -> None:
        """Write the first record of this job, once an earlier run of it has ended."""
        if wait := self.store.wait_for_earlier_run():
            self._wait(wait.reason, check_again=wait.check_again)
        else:
            self._wanted = self.store.begin_job()

    def _wait_beside(self, record: RoundRecord) -> None:
        """Wait beside a round that runs without this node: end it, so that the next one includes the newcomers, or stay a spare."""
        view, began = self.store.view(record), self.store.same.round.since
        newcomers = [row for row in self.store.candidates(view, self.row) if record.index(row.id) is None]
        if self._prepares:
            self._progress(f"{PREPARES} before it joins round {record.round}")
            return
        decision = formation.take_in(self.rules, view, self.row, newcomers, began, self.store.same.settled_since(self.rules.debounce))
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
        view = self.store.view(record)
        standing = self.store.candidates(view, self.row)
        if shared := updates.share_losses(view):
            self._wanted = Change(record, shared)
            return
        if len(standing) < most_nodes(self.rules, record) and any(view.undecided(row, self.rules.proof) for row in view.newcomers()):
            self._wake_at(self._now + self.rules.beat)
            return
        over = self.store.same.over.see(record.round, self._now)
        redirected = self.store.redirected_since(record)
        settled = self.store.same.settled_since(self.rules.last_call)
        decision = formation.form(self.rules, view.trusted(self.row), settled, over, redirected)
        self.store.note_minority(decision.minority)
        can_form = self.store.same.formable.see(decision.record is not None, self._now)
        if decision.record is None:
            self._wait(decision.reason, decision.news, decision.check_again)
            return
        mine = decision.leader == self.row.id or self.store.is_first(record)
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
        elif self.store.view(record).seen_by_all(self.store.own.stored) and not self._may_not_run_alone(record):
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
            self._stop(Trigger.LEAVE, Stop(left, self._outcome[1], None if left else self.rules.expire))
        elif record is None:
            self._stop(Trigger.ROUND_OVER, formation.stop(self.record, self.row.round))
        elif self._may_not_run_alone(record):
            self._break = (Cause.LEAVE, CUT_OFF, False)
            self._hurried = self.row.round
            self._stop(Trigger.ROUND_OVER, Stop(False, CUT_OFF, self.rules.lone_grace))

    def _in_done(self) -> None:
        record = self._own_round()
        if record is None:
            self._go(Trigger.ROUND_OVER)  # ``_join`` sets ``done_round`` before the next round
        elif self._outcome is not None:
            self._go(Trigger.LEAVE)
        else:
            view = self.store.view(record).with_own(self.row)
            missing = [m for m in record.members if not view.has_succeeded(m)]
            if not missing:
                self._wanted = Change(record, updates.succeed(record, self.row.id))
            elif self.store.sees_all:
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
        written = self.store.own.stored is not None and self.store.own.stored.status is LEFT
        limit = self.rules.host_lingers if self.hosting and written else GOODBYE
        record, closed = self.record, self.record.closed if self.record else None
        lingering = self.hosting and record and closed and not self.store.view(record).others_have_left(self.rules.proof)
        since = self._waiting.since
        over_time = self._now - since >= limit
        names_ends = self.rules.lasting or (self.rules.succession and not self.store.undecided and self._now - since < MARKING)
        if names_ends and record and (marked := updates.mark_over(record, self.row, quorum.left(self.store.rows.values()))):
            self._wanted = Change(record, marked)
            self._wake_at(since + MARKING)
            written = False
        host_gone = self.store.contact.trouble and closed
        if over_time or host_gone or not self.store.own.introduced or (written and not lingering):
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

    def _own_round(self) -> RoundRecord | None:
        """Return the record while the round of this node is still on, else None."""
        record = self.record
        mine = record is not None and record.open and record.round == self.row.round and own_rank(record, self.row) is not None
        return record if mine else None

    def _leave_round(self) -> None:
        """Want the round to end because this node leaves."""
        assert self._outcome is not None
        self._break = (Cause.LEAVE, f"{self.row.name} {self.row.address} leaves: {self._outcome[1]}", False)

    def _may_not_run_alone(self, record: RoundRecord) -> bool:
        """Return whether workers that need no other node must not run now: they are gone before other nodes may consider this node lost.

        They are those of a single-node round, or train apart: see docs/decisions/0006. They are not started either when the
        answer that permits it arrives after that limit, for example after this agent stood still.
        """
        if self.rules.private or (len(record.members) > 1 and not self.trains_apart):
            return False
        limit = self.store.kept_alive + self.rules.lone_limit
        self._wake_at(limit)
        return self._now >= limit

    def _end(self, outcome: Outcome, reason: str, overrule: bool = False) -> None:
        """Decide how this node ends. The first reason stands, but a verdict on the whole job overrules it."""
        if self._outcome is None or (overrule and self._outcome[0] is not Outcome.LEFT):
            self._outcome = (outcome, reason)

    def _carry_out(self, effects: list[Effect]) -> None:
        """Carry out what the store in use asks for, in order. Whoever drives the machine performs the actions."""
        for effect in effects:
            if isinstance(effect, Ends):
                self._end(effect.outcome, effect.reason)
            elif isinstance(effect, Wakes):
                self._wake_at(effect.at)
            else:
                self._actions.append(effect)

    def _stop(self, trigger: Trigger, stop: Stop, **fields: object) -> None:
        self._actions.append(stop)
        self._go(trigger, note=clip(stop.reason), **fields)

    def _go(self, trigger: Trigger, **fields: object) -> None:
        """Change the state, and with it the row."""
        event = f"{type(self._event).__name__} at {self._now:.3f}"
        state = following(self.state, trigger, "; ".join((*self._history, event)))
        self._history = (*self._history[1 - REMEMBERED :], f"{event}: {trigger.value}")
        self.row = replace(self.row, status=state, **fields)  # type: ignore[arg-type]
        self.store.soon()
        self._waiting.restart(self._now)

    def _check_store_grace(self) -> None:
        """Give up on a store that is away, or of too few nodes, for longer than ``store_grace``; say before that it is."""
        self._says_away = False
        trouble, last = self.store.contact.trouble, self.store.contact.last
        what = f"the rendezvous store is away ({trouble})"
        if self.store.waits is not None:
            (trouble, last), what = self.store.waits, self.store.waits[0]
        if self._outcome is not None or not trouble or last is None or not self.store.formed:
            return  # while the job has not begun, the join timeout is a node's limit
        away = self._now - last
        if away >= self.rules.store_grace:
            self._end(Outcome.STORE_LOST, f"the rendezvous store was away for {away:.0f} s: {trouble}")
        elif away > self.rules.expire:
            goes_on = "the workers go on" if self.state is RUNNING else "waiting"
            self._progress(f"{what}; {goes_on} for up to {self.rules.store_grace:g} s")
            self._says_away = True
        self._wake_at(last + self.rules.store_grace)

    # -- the exchange with the store ----------------------------------------------------------------------------------

    def _sync_if_due(self) -> None:
        """Ask for the next exchange with the store, or to be woken when it is due."""
        self._carry_out(self.store.search(self.state, stays=self._outcome is None))
        if not self.finished:
            takes_over = self.store.undecided and self._wanted is not None
            self._carry_out(self.store.ask_if_due(self.row, self._change(), self._now - self._waiting.since, takes_over))

    def _take_over(self) -> Change | None:
        """Return the write that makes the standby store of this node the one in use; None: there is no reason to."""
        return self.store.take_over() if self._outcome is None else None

    def _change(self) -> Change | None:
        """Return the write of the round record that is due; None before the store was read and while it is in trouble."""
        if self.store.contact.last is None or self.store.contact.trouble:
            return None
        record = self.record
        if self._closing and record is not None and record.closed is None:
            return Change(record, updates.close(record, self.row))
        return self._wanted

    def _change_to_own_round(self) -> Change | None:
        """Return the write that breaks the running round, for this node's own reason or because a member is gone; None: no reason."""
        record = self.record
        if record is None or not record.open:
            self._break = None
            return None
        if record.round != self.row.round:
            self._break = None  # this node has not read that its own round is over, only the next one
        if self._break is not None:
            cause, reason, victim = self._break
            return Change(record, updates.break_up(record, cause, reason, self.row.id, self.store.ran, victim=victim))
        lost = updates.lose_member(self.store.view(record), self.rules.expire, self.store.ran)
        if lost is None and self.state is RUNNING and self.store.is_first(record):
            lost = formation.scale_down(self.rules, record, self.row.id, self.store.ran)
        return Change(record, lost) if lost else None

    # -- lines for people -----------------------------------------------------------------------------------------------

    def _wait(self, why: str, at_once: bool = False, check_again: float | None = None) -> None:
        """Wait in JOINING, with lines about the progress, and not longer than the join timeout."""
        self._wake_at(check_again)
        if self._outcome is None and self._now >= self._waiting.since + self.rules.join_timeout:
            missing = not self.store.formed and not self.store.contact.trouble
            hint = "; start the other nodes with the same --rdzv-id and --rdzv-endpoint" if missing else ""
            self._end(Outcome.TIMEOUT, f"no round within {self.rules.join_timeout:g} s: {why}{hint}")
        else:
            self._progress(why, at_once)
            self._wake_at(self._waiting.since + self.rules.join_timeout)

    def _progress(self, text: str, at_once: bool = False) -> None:
        """Say why this node waits, once the wait has lasted, or ``at_once`` when the text is new."""
        if not self._says_away and (line := self._waiting.line(text, self._now, at_once)):
            self._actions.append(Say(line))

    def _wake_at(self, when: float | None) -> None:
        if when is not None and when > self._now:
            self.wake = min(self.wake, when)

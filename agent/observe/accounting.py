"""Keeps the account of this node: feeds ``account.py`` with the clock, the progress pages and the changes of the round record.

All calls happen in the loop's thread; nothing blocks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from elastirun import clock
from elastirun.agent.observe import account, events
from elastirun.agent.observe.account import Account, Stamps, StateChange, Totals
from elastirun.agent.observe.events import Event
from elastirun.agent.observe.node_states import NodeState
from elastirun.agent.observe.progress_pages import ProgressPages
from elastirun.agent.observe.round_ends import cause_of, lost_after_all
from elastirun.agent.part import NodeRound, Part
from elastirun.rendezvous.wire.actions import Stop
from elastirun.rendezvous.wire.records import Cause, RoundRecord
from elastirun.worker.progress_page import NS, Page

OFTEN, SELDOM = 10.0, 60.0  # seconds between two events with the steps: of a young round, and of one that lasts
YOUNG = 300.0  # seconds; so the file of a month has 45,000 such lines, and a short run is seen in detail


class Accounting(Part):
    """The account of this node, whose id is ``node``, from the start of its process on. ``write`` gets events."""

    def __init__(self, pages: ProgressPages, write: Callable[[Event], None], node: str) -> None:
        self._pages, self._write, self._node = pages, write, node
        self._broken: RoundRecord | None = None  # the record with the end of a round that was seen last
        self._over = 0  # the number of the last round whose end the account knows, whatever the cause
        self._number = 0  # of the round whose workers run here, or ran last
        self._began = 0.0  # when its workers were started
        self._steps_at = math.inf  # when to write the next event with the steps; infinity: no workers run
        self._shown: Page | None = None  # the page of the last such event
        self._account = Account(clock.STARTED, self._write_change)

    @property
    def farthest(self) -> int:
        """The highest number of a step that workers of earlier rounds have given, plus 1; 0: none."""
        return self._account.farthest

    def join(self) -> None:
        """The agent is ready to join."""
        self._account.join(clock.now())

    def sit_out(self) -> None:
        """This node begins to sit out. ``join`` ends that."""
        self._account.sit_out(clock.now())

    def round_starts(self, round: NodeRound) -> None:
        self._number, self._began = round.number, clock.now()
        self._over = round.number - 1  # a round of this number may have ended in a store that is gone
        self._account.start_round(self._began)

    def workers_started(self, round: NodeRound) -> None:
        self._account.workers_started(clock.now())
        self._steps_at, self._shown = clock.now() + OFTEN, None

    def tick(self, now: float) -> float:
        """Write the steps, and what they show, if it is time. Returns when to be called next, on ``elastirun.clock``."""
        if now >= self._steps_at:
            self._steps_at = now + (OFTEN if now - self._began < YOUNG else SELDOM)
            self._write_steps()
            self._account.look(now, self._stamps())
        return self._steps_at

    def see(self, record: RoundRecord | None, now: float) -> None:
        """Note the end of a round that the round record tells of.

        The end of one round may be told several times: with more lost nodes, or with another cause, by the node that has taken over the
        store.
        """
        if record is None or record.round < self._over:
            return
        known, cause = self._broken, cause_of(record)
        if cause is not None and (known is None or (known.round, known.broken) != (record.round, record.broken)):
            self._broken = record
            again, self._over = record.round <= self._over, max(self._over, record.round)
            self._account.end_early(cause.value, now, self._stamps(), again=again)
        elif known is not None and known.round == self._over and lost_after_all(known, record):
            self._broken = None
            self._account.end_early(Cause.LOST.value, now, self._stamps(), again=True)
        if cause is None and record.members and record.index(self._node) is None:
            self._account.wait_beside(now)

    def worker_failed(self) -> None:
        self._account.end_early(Cause.FAILURE.value, clock.now(), self._stamps(), certain=False)

    def round_stops(self, stop: Stop, grace: float) -> None:
        self._account.end_early(Cause.LEAVE.value, clock.now(), self._stamps(), certain=False)

    def idle(self) -> None:
        self._write_steps()
        self._steps_at = math.inf
        if spent := self._account.end_round(clock.now(), self._stamps()):
            self._write(events.RoundSpent(**vars(spent), round=self._number))

    def totals(self, now: float) -> Totals:
        """Return the account as of ``now`` on ``elastirun.clock``."""
        return self._account.totals(now, self._stamps())

    def end(self, decided: bool) -> Totals:
        """Return the account at the agent's end, and write it. ``decided``: the job is decided, or this node was to leave."""
        if decided:
            self._account.end_part(clock.now())
        totals = self.totals(clock.now())
        self._write(events.Account(**vars(totals)))
        return totals

    def _write_change(self, change: StateChange) -> None:
        """Write a change of state, with the round that has ended, or else whose workers run here or ran last."""
        over = change.state in (NodeState.STOPPING, NodeState.RESTARTING)
        number = max(self._number, self._over) if over else self._number
        ago = round(max(0.0, clock.now() - change.at), 3)
        self._write(events.State(change.state, ago, number, change.cause))

    def _write_steps(self) -> None:
        """Write the steps of the worker that has made most of them, unless they have been written."""
        page = max(self._pages.read_all(), key=lambda one: one.steps, default=None)
        before = self._shown
        if page is None or page.steps == (before.steps if before else 0):
            return
        self._shown = page
        steps, since = (before.steps, before.stamped) if before else (1, page.first or page.stamped)
        elapsed = (page.stamped - since) / NS
        rate = round((page.steps - steps) / elapsed, 3) if elapsed > 0 else None
        self._write(events.Steps(self._number, page.steps, page.at - 1 if page.at else None, rate))

    def _stamps(self) -> Stamps:
        return account.stamps(self._pages.read_all(), clock.now(), time.monotonic_ns())

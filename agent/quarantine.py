"""A node with ``--strikes`` strikes sits out: counts the strikes, takes the node out of the next round, and lets it join again.

While it sits out, or looks whether it may, this part holds back that the workers have stopped. So the machine stays in the state DRAINING:
its row says that it will not run its last round again (``SitsOut``), so the others go on without it, and that its workers are being
stopped, so no round includes it. It goes on reading the round record, and so learns the end of the job. ``strikes.py`` decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

from elastirun import clock
from elastirun.agent.failures import strikes
from elastirun.agent.failures.strikes import Limits, Out, Suspicion
from elastirun.agent.failures.tracker import FailureTracker
from elastirun.agent.hangs.straggler_watch import StragglerWatch
from elastirun.agent.observe import events
from elastirun.agent.observe.accounting import Accounting
from elastirun.agent.part import NodeRound, Part
from elastirun.agent.session import Session
from elastirun.agent.store.locations import ASK_LIMIT, TcpAt, described
from elastirun.config import LaunchConfig
from elastirun.errors import StartError, StoreError
from elastirun.rendezvous.failures import describe
from elastirun.rendezvous.formation import take_seats
from elastirun.rendezvous.stores.tcp import TcpStore
from elastirun.rendezvous.wire.actions import Sync
from elastirun.rendezvous.wire.codec import Codec
from elastirun.rendezvous.wire.events import SitsOut, Synced
from elastirun.rendezvous.wire.records import RoundRecord
from elastirun.rendezvous.wire.sync import SyncProtocol, execute
from elastirun.threads import start_thread

LOOK_LIMIT = 2.0  # seconds for the look at all rows, for which the next round waits; it takes milliseconds
GLANCE = 0.02  # seconds between two glances at whether that look is done
AGAIN = 2.0  # seconds without a round after which a node that sits out looks again: another one may have gone at the same moment
CHECK = 0.5  # seconds between two checks whether this node joins again


class Participation(Enum):
    """The part that this node takes in rounds."""

    IN = "in"  # it takes part
    LOOKING = "looking"  # it has had its strikes, and looks how many others there are
    OUT = "out"  # it sits out


class Look:
    """One read of all rows of the job, in a thread with a connection of its own: a running node reads those of its neighbours only."""

    def __init__(self, store: dict[str, Any], prefix: str, token: bytes | None) -> None:
        self.found: Synced | None = None  # None: not there, or not yet
        self.done = False
        if start_thread("strikes", self._run, store, prefix, Codec(token)) is None:
            self.done = True

    def _run(self, store: dict[str, Any], prefix: str, codec: Codec) -> None:
        with suppress(StoreError, StartError):
            at = described(store)
            with closing(TcpStore(at.address, at.port, ASK_LIMIT) if isinstance(at, TcpAt) else at.open()) as opened:
                protocol: SyncProtocol = execute(SyncProtocol(prefix, "", codec, clock.now).here(), opened)
                self.found = protocol.carry_out(opened, Sync(), clock.now())
        self.done = True


@dataclass(eq=False)
class Quarantine(Part):
    """This node's strikes, and its time out. All calls happen in the loop's thread; nothing blocks.

    ``tracker``, ``stragglers``: they know the failures and the stragglers of the round. ``write`` gets events, ``say`` lines for people.
    ``going_out()`` is called when this node begins to sit out.
    """

    _config: LaunchConfig
    _session: Session
    _accounting: Accounting
    _tracker: FailureTracker
    _stragglers: StragglerWatch
    _write: Callable[[events.Event], None]
    _say: Callable[[str], None]
    _going_out: Callable[[], None]

    def __post_init__(self) -> None:
        self.strikes: list[str] = []  # why this node has had each, the oldest first
        self.failures_caused = 0  # rounds that ended by a failure of this node's worker; counted without --strikes, too
        self._own_failure: Suspicion | None = None  # a failure that may be one of them
        self._phase = Participation.IN
        self._since = 0.0  # when the phase began
        self._suspicion: Suspicion | None = None  # a strike that this node may have had
        self._number = 0  # of the round whose workers run here, or ran last
        self._leaving = False  # this node leaves the job
        self._look: Look | None = None
        self._broken: tuple[str, float] | None = None  # the round that has ended while this node sits out, by its token, and when
        self._looked_after = ""  # the round, by its token, after which this node has looked again
        self._told = ""  # why this node stayed when that was said last

    @property
    def out(self) -> bool:
        """Return whether this node sits out."""
        return self._phase is Participation.OUT

    @property
    def holds(self) -> bool:
        return self._phase is not Participation.IN

    def round_starts(self, round: NodeRound) -> None:
        self._number = round.number

    def idle(self) -> None:
        if not self._tracker.stopped:
            return
        limit = self._config.strikes
        self._suspicion = self._own_failure = strikes.suspect(self._number, self._tracker.failures)
        if self._stragglers.named and limit:
            self._suspicion = None  # one round, one strike
            self._strike(f"rank {min(self._stragglers.named)} was a straggler in round {self._number}")
        if not limit or self._leaving or len(self.strikes) + (self._suspicion is not None) < limit:
            return
        if why := strikes.why_never(self._config.fixed_ranks, self._config.standalone):
            self._stay(why)
        elif self._session.machine.hosting:
            self._stay(strikes.HOSTS)
        else:
            self._begin_look()
            self._phase, self._since = Participation.LOOKING, clock.now()

    def see(self, record: RoundRecord | None, now: float) -> None:
        """Take in the round record: it tells whether a failure of this node was the cause of the end of its round."""
        if self._own_failure is not None and record is not None and (caused := self._own_failure.holds(record)) is not None:
            self.failures_caused += caused
            self._own_failure = None
        if self._suspicion is not None and self._phase is Participation.IN and record is not None:
            holds = self._suspicion.holds(record)
            if holds and self._config.strikes:
                self._strike(record.reason)
            if holds is not None:
                self._suspicion = None

    def leaves(self) -> None:
        self._leaving = True
        if self._phase is not Participation.IN:
            self._come_back("this node leaves", clock.now())

    def tick(self, now: float) -> float:
        if self._phase is Participation.LOOKING and self._look is not None:
            if not self._look.done and now < self._since + LOOK_LIMIT:
                return now + GLANCE
            self._decide(self._look.found, now)
        if self._phase is Participation.OUT:
            timing = self._config.timing
            limits = Limits(self._config.strikes_cooldown, timing.grace + 2 * timing.expire, timing.store_grace)
            if why := strikes.why_back(limits, self._state(now)) or self._why_needed(now):
                self._come_back(why, now)
            return min(now + CHECK, max(now, self._since + limits.cooldown))
        return math.inf

    def _state(self, now: float) -> Out:
        machine = self._session.machine
        record = machine.record
        cause = self._suspicion.holds(record) if self._suspicion and record else None
        decided = record is not None and record.closed is not None
        return Out(now - self._since, self._broken_for(record, now), now - machine.store.kept_alive, decided, machine.hosting, cause)

    def _begin_look(self) -> None:
        access, place = self._session.access, self._session.machine.store.place
        self._look = Look(access.for_status(place), access.key_prefix, self._config.token)

    def _why_needed(self, now: float) -> str:
        """Look again when a round has been over for ``AGAIN``. Return in words why the others need this node; empty: that is not known."""
        if self._broken is not None and self._broken[0] != self._looked_after and now >= self._broken[1] + AGAIN:
            self._looked_after = self._broken[0]
            self._begin_look()
        if self._look is None or not self._look.done:
            return ""
        found, self._look = self._look.found, None
        return self._why_stays(found) if found is not None and found.round is not None and not found.round.open else ""

    def _why_stays(self, found: Synced | None) -> str:
        """Return in words why this node may not sit out, by what the store holds; None: that is not known."""
        machine = self._session.machine
        if found is None or found.round is None:
            return strikes.why_stays(machine.hosting, None, self._config.min_nodes)
        here = strikes.others(found.round, found.rows, machine.row.id)
        outvoted = machine.rules.majority and not strikes.may_go_on(found.round, found.rows, here)
        if machine.rules.mesh is not None:  # who gets no seat does not count
            seats = take_seats(machine.rules, found.round, [row for row in found.rows.values() if row.id in here])
            here = frozenset(m.id for m in seats.members)
        return strikes.why_stays(machine.hosting, len(here), self._config.min_nodes, outvoted)

    def _broken_for(self, record: RoundRecord | None, now: float) -> float:
        """Return the seconds since this node has known that no round is on."""
        if record is None or record.open:
            self._broken = None
        elif self._broken is None or self._broken[0] != record.fence:
            self._broken = record.fence, now
        return now - self._broken[1] if self._broken is not None else 0.0

    def _strike(self, why: str) -> None:
        self.strikes.append(why)
        self._say(f"strike {len(self.strikes)} of {self._config.strikes} for this node: {why}")

    def _decide(self, found: Synced | None, now: float) -> None:
        """Sit out, or stay, by what the store holds; None: that is not known."""
        machine = self._session.machine
        self._look = None
        if why := self._why_stays(found):
            self._phase = Participation.IN
            self._stay(why)
            return
        whys = [*self.strikes, *([describe(self._suspicion.failure)] if self._suspicion else [])]
        cooldown = self._config.strikes_cooldown
        self._phase, self._since, self._broken, self._looked_after = Participation.OUT, now, None, ""
        self._say(f"this node sits out for {cooldown:g} s at most: strike {len(whys)} of {self._config.strikes}: {whys[-1]}")
        self._write(events.SitsOut(machine.row.round, whys, cooldown))
        self._accounting.sit_out()
        self._session.post(SitsOut(now, f"strike {len(whys)} of {self._config.strikes}: {whys[-1]}", self._tracker.failures))
        self._going_out()

    def _stay(self, why: str) -> None:
        """Take part in the next round although this node has had its strikes, and say so once."""
        if why != self._told:
            self._told = why
            count = self._config.strikes
            self._say(f"this node has had {count} strike{'s' * (count > 1)}, but does not sit out: {why}")

    def _come_back(self, why: str, now: float) -> None:
        """Join again, with a fresh count."""
        if self._phase is Participation.OUT:
            self._say(f"this node joins again after {now - self._since:.0f} s: {why}")
            self._write(events.SatOut(round(now - self._since, 3), why))
            self._accounting.join()
        self._phase, self._look, self._suspicion = Participation.IN, None, None
        self.strikes.clear()

"""The rows that a node reads, and how often: few and seldom enough that a thousand nodes can meet. Pure.

While a round runs, a node reads the rows of the members that it watches. Before and after, some node has to read all rows to
take the next step; if all of a thousand nodes did, each poll would read a million rows. So two members are first in line (before
the first round: the node that found the store empty) and read all rows with every poll. The others read the round record and the
rows of those two; when both are away, the next two are first. At longer intervals every node reads all rows.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from elastirun.rendezvous.peers.ranks import WATCHED, successors
from elastirun.rendezvous.rules import Rules
from elastirun.rendezvous.transitions import DONE, DRAINING, JOINING, LEFT, RUNNING
from elastirun.rendezvous.wire.actions import Sync
from elastirun.rendezvous.wire.records import Cause, RoundRecord, Status

FORMING_POLL = 0.1  # longest time in seconds between two polls while a round forms: short beside the start of workers
QUICKEST_POLL = 0.01  # shortest one, just after this node has taken a step: the others are about to take the same
POLLS_OF_WAIT = 0.25  # of the time waited since that step: a poll makes the wait no more than a quarter longer
PAUSE_OF_POLL = 2.0  # of the length of the last exchange: a store that is slow has half of the time for other nodes
PRIVATE_BEATS = 3.0  # between two polls of a round in a private store, in which nothing changes; ``elastirun status`` calls 2.5 s quiet
PER_NODE = 0.0005  # seconds more for each node, so that the load of the store grows less than their number; at most a beat, as in a round
ALL_PER_NODE = 0.03  # seconds for each node, on average, between two reads of all rows by a node that is not first in line
ROWS_PER_SECOND = 4000  # that all of these read together while somebody is first in line: they only make sure
FIRST = 2  # nodes first in line: one may die
WIDE = 64  # members that a node watches while several may be lost, as when a rack is: all if the round has no more

Away = Callable[[str], bool]  # by id: the node has left, or is silent


@dataclass
class Schedule:
    """The time of the next exchange with the store, and what the last one asked for."""

    due: float  # seconds of this node's clock
    urgent: bool = True  # something has changed here that the store should know at once
    under_way: bool = False  # the last one is not answered yet; there is never a second one beside it
    asked: Sync = Sync()
    looks: int = 0  # at other stores, since the store in use was asked last

    def soon(self) -> None:
        """Make the next exchange as soon as none is under way."""
        self.urgent = True

    def not_after(self, due: float) -> None:
        """Make the next exchange at ``due`` if it would come later."""
        self.due = min(self.due, due)

    def retry_at(self, due: float) -> None:
        """Make the next exchange at ``due``, or sooner when something is urgent."""
        self.due = due

    def pause_until(self, due: float) -> None:
        """Make the next exchange at ``due``, whatever was urgent until now."""
        self.due, self.urgent = due, False

    def begin(self, asked: Sync, next_due: float) -> None:
        """Note that the exchange ``asked`` is under way. The one after it is made at ``next_due``."""
        self.due, self.urgent, self.under_way, self.asked, self.looks = next_due, False, True, asked, 0

    def begin_look(self, asked: Sync) -> None:
        """Note that a look at another store is under way. It changes nothing about when the store in use is asked."""
        self.under_way, self.asked, self.looks = True, asked, self.looks + 1

    def done(self) -> None:
        """Note that no exchange is under way any more: it was answered, has failed, or was given up."""
        self.under_way = False


@dataclass
class PollPlan:
    """Decides which rows the node ``me`` reads."""

    rules: Rules
    me: str
    all_read: float  # when it last read all rows, or had no need to; seconds of its clock
    crowd: int = 0  # rows there were then
    sees_all: bool = False  # the rows read last are all rows, not only those asked for
    wide: bool = False  # many rows were asked for last, because several members may be lost

    def interval(self, state: Status, record: RoundRecord | None, waited: float = math.inf, took: float = 0.0) -> float:
        """Return the seconds until the next poll when nothing is urgent.

        ``waited``: since this node's last step. ``took``: the length of the last exchange with the store.
        """
        if state in (RUNNING, DRAINING):
            slow = PRIVATE_BEATS * self.rules.beat if self.rules.private else self.rules.beat
            return self.rules.lasting_beat if self.rules.lasting else slow
        if state is DONE or _beside(state, record):
            return self.rules.beat + PER_NODE * self._nodes(record)
        quick = max(QUICKEST_POLL, POLLS_OF_WAIT * waited, PAUSE_OF_POLL * took)
        return min(min(quick, FORMING_POLL) + PER_NODE * self._nodes(record), self.rules.beat)

    def rows(
        self, state: Status, record: RoundRecord | None, away: Away, now: float, hosting: bool, own_store_id: str, more_lost: bool = False
    ) -> tuple[str, ...] | None:
        """Return the ids of the rows to be read now; None: all rows.

        ``own_store_id``: see ``is_first``. ``more_lost``: several members may be lost.
        """
        self.wide = more_lost
        if record is None:
            return ()
        if more_lost and not (record.open and len(record.members) > WIDE):
            return None
        watched = successors(record, self.me, WIDE if more_lost else WATCHED)
        if state in (RUNNING, DRAINING):
            self.all_read = now  # when the round is over, the nodes first in line are to read all rows first
            return watched
        due = now >= self.all_read + self._all_interval(record, away) * self._own_factor
        if due or _beside(state, record) or (hosting and state is LEFT) or self.is_first(record, away, own_store_id):
            self.all_read = now
            return None
        first = first_in_line(record, away)
        before = itertools.takewhile(lambda i: i != first[-1], (m.id for m in record.members)) if first else ()
        return (*before, *first[-1:], *(watched if record.open else ()))

    def answered(self, asked: tuple[str, ...] | None, rows: int) -> None:
        """Note that the exchange that ``asked`` for rows has brought so many."""
        self.sees_all = asked is None
        if self.sees_all:
            self.crowd = rows

    def is_first(self, record: RoundRecord, away: Away, own_store_id: str) -> bool:
        """Return whether this node is to take the next step. ``own_store_id``: the id that it gives to a store it finds empty."""
        return self.me in first_in_line(record, away) if record.members else record.store_id == own_store_id

    def _all_interval(self, record: RoundRecord, away: Away) -> float:
        """Return the seconds, on average, between two reads of all rows while this node is not first in line."""
        nodes = self._nodes(record)
        shortest = ALL_PER_NODE * nodes
        return max(shortest, nodes**2 / ROWS_PER_SECOND) if first_in_line(record, away) else shortest

    @property
    def _own_factor(self) -> float:
        """Return the factor on the time between two reads of all rows, so that a thousand nodes that wait together do not read together."""
        return 0.5 + zlib.crc32(self.me.encode()) / 2**32

    def _nodes(self, record: RoundRecord | None) -> int:
        """Return the number of nodes, as far as known."""
        return max(self.crowd, self.rules.min_nodes, len(record.members) if record else 0)


def _beside(state: Status, record: RoundRecord | None) -> bool:
    """Return whether a node in ``state`` waits while a round runs without it."""
    return state is JOINING and record is not None and record.open


def first_in_line(record: RoundRecord, away: Away) -> tuple[str, ...]:
    """Return the ids of the members that take the next step: those with the lowest ranks that are still there."""
    broken = record.broken
    gone = (*broken.lost, broken.by) if broken and broken.cause is Cause.LEAVE else broken.lost if broken else ()
    return tuple(itertools.islice((m.id for m in record.members if m.id not in gone and not away(m.id)), FIRST))

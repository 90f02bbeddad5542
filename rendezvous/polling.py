"""Which rows a node reads, and how often: few and seldom enough that a thousand nodes can meet. Pure.

While a round runs a node reads the rows of those it watches. Before and after, somebody has to see all rows to take the
next step; if all nodes read all rows, that would be a million rows for a thousand nodes at every look. So two members are
first in line (before the first round: whoever found the store empty) and read all rows at every look. The others read the
round record and the rows of those two; when both are away the next two are first. Now and then everybody reads all rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from elastirun.rendezvous.actions import Sync
from elastirun.rendezvous.ranks import successors
from elastirun.rendezvous.records import Cause, RoundRecord, Status
from elastirun.rendezvous.rules import Rules
from elastirun.rendezvous.transitions import DONE, DRAINING, JOINING, LEFT, RUNNING

FORMING_POLL, PER_NODE = 0.1, 0.0005  # seconds between two looks at the store while a round forms; more with each node
ALL_PER_NODE = 0.03  # seconds, for each node, between two looks at all rows by those who are not first in line
FIRST = 2  # how many are first in line

Away = Callable[[str], bool]  # a node has left, or is silent


@dataclass
class Schedule:
    """When the next exchange with the store is due, and what the last one asked for."""

    due: float  # seconds of this node's clock
    urgent: bool = True  # something has changed here that the store should know at once
    under_way: bool = False  # the last one is not answered yet; there is never a second one beside it
    asked: Sync = Sync()


@dataclass
class PollPlan:
    """What the node ``me`` reads. ``all_read``: when it asked for all rows last or had no need to, seconds of its clock."""

    rules: Rules
    me: str
    all_read: float
    crowd: int = 0  # how many rows there were then

    def interval(self, state: Status, record: RoundRecord | None) -> float:
        """Seconds until the next look at the store when nothing urges."""
        if state in (RUNNING, DRAINING):  # a store that outlives its jobs tells of changes by itself, and is shared by many
            return self.rules.lasting_beat if self.rules.lasting else self.rules.beat
        waits = state is DONE or _beside(state, record)
        return (self.rules.beat if waits else FORMING_POLL) + PER_NODE * self._nodes(record)

    def rows(self, state: Status, record: RoundRecord | None, away: Away, now: float, hosting: bool) -> tuple[str, ...] | None:
        """The ids of the rows to be read now; None: all there are."""
        if record is None:
            return ()
        if state in (RUNNING, DRAINING):
            self.all_read = now  # when the round is over, those first in line are to have the first look
            return successors(record, self.me)
        due = now >= self.all_read + ALL_PER_NODE * self._nodes(record)
        if due or _beside(state, record) or (hosting and state is LEFT) or self.is_first(record, away):
            self.all_read = now
            return None
        first = first_in_line(record, away)
        before = itertools.takewhile(lambda i: i != first[-1], (m.id for m in record.members)) if first else ()
        return (*before, *first[-1:], *(successors(record, self.me) if record.open else ()))

    def is_first(self, record: RoundRecord, away: Away) -> bool:
        """This node is to take the next step."""
        return self.me in first_in_line(record, away) if record.members else record.store_id == self.rules.new_store_id

    def _nodes(self, record: RoundRecord | None) -> int:
        """How many nodes there are, as far as known."""
        return max(self.crowd, self.rules.min_nodes, len(record.members) if record else 0)


def _beside(state: Status, record: RoundRecord | None) -> bool:
    """It waits while a round runs without it."""
    return state is JOINING and record is not None and record.open


def first_in_line(record: RoundRecord, away: Away) -> tuple[str, ...]:
    """The ids of the members that take the next step: those with the lowest ranks that are still there."""
    broken = record.broken
    gone = (*broken.lost, broken.by) if broken and broken.cause is Cause.LEAVE else broken.lost if broken else ()
    return tuple(itertools.islice((m.id for m in record.members if m.id not in gone and not away(m.id)), FIRST))

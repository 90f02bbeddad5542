"""The rendezvous store survives its host: which standby store takes over when the host has died, and when it may. Pure.

Every agent serves a standby store, empty until the host of the store in use has died and its guard has told the others (``Vote``). Then the
others go to the standby store of the first member in rank order whose owner is there itself. The owner writes the round record anew when
enough of the members have come. See docs/decisions/0020 for the argument why no two stores can ever have running rounds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from elastirun.rendezvous.actions import Change, Sync
from elastirun.rendezvous.codec import clip
from elastirun.rendezvous.events import Synced
from elastirun.rendezvous.records import Broken, Cause, Member, NodeRow, Place, RoundRecord, Status, Vote

IN_LINE = 8  # standby stores that may take over: the guard tells these, and so many do not all die at once
QUICKEST_LOOK = 0.02  # seconds between two looks at standby stores, just after the store was lost: a guard needs about 0.1 s
PATIENCE = 1.0  # seconds in an undecided store before its nodes look elsewhere: the others come at about the same time
LOOKS_OF_WAIT = 0.1  # of the time since then, up to a beat


def standbys(record: RoundRecord | None) -> tuple[Place, ...]:
    """Return the standby stores that may take over from the store of ``record``, the first in line first. Its host's is not among them."""
    if record is None or not record.host or record.closed:
        return ()
    return tuple(Place(m.id, m.address, m.standby) for m in record.members if m.id != record.host and m.standby)[:IN_LINE]


def newest(record: RoundRecord, other: RoundRecord | None) -> RoundRecord:
    """Return the newer one of two records of a job."""
    return other if other is not None and (other.term, other.version) > (record.term, record.version) else record


def gone(votes: Iterable[Vote]) -> frozenset[str]:
    """Return the nodes whose end is proven."""
    return frozenset(i for vote in votes for i in vote.gone)


def enough(members: Iterable[Member], host: str, here: Collection[str], ended: Collection[str]) -> bool:
    """Return whether the nodes that are ``here`` may go on without the rest of the ``members`` of a round whose ``host`` has died.

    More than half of the others, or all of which no end is proven; of the latter at least one. The host does not count: that it has died
    is known to every node that has come.
    """
    others = {m.id for m in members} - {host}
    present = others & set(here)
    return bool(present) and (2 * len(present) > len(others) or others <= present | set(ended))


def another_run(found: RoundRecord | None, record: RoundRecord) -> str:
    """Return in words that another run of the job has begun where it was started; empty: none has. Nodes that come find only that one."""
    other = found is not None and found.round > 0 and found.store_id != record.store_id
    return "another run of this job has begun where it was started" if other else ""


def lost_host(record: RoundRecord) -> str:
    """Return in words that the host of the store of ``record`` has died."""
    host = next((f"{m.name} {m.address}" for m in record.members if m.id == record.host), record.host)
    return clip(f"{host}, which hosted the rendezvous store, was lost")


def take_over(record: RoundRecord, owner: str, now_gone: Collection[str]) -> RoundRecord:
    """Return the record as the node ``owner`` writes it into its standby store: the last round is over, because its host is lost."""
    lost = tuple(m.id for m in record.members if m.id in now_gone)
    before = record.broken
    if before is not None:  # it was over anyway, and for that reason
        broken = replace(before, lost=tuple(dict.fromkeys((*before.lost, *lost))), over=True)
    else:
        broken = Broken(Cause.LOST, lost_host(record), owner, lost, over=True)
    return replace(record, version=record.version + 1, term=record.term + 1, host=owner, broken=broken)


def _left(rows: Iterable[NodeRow]) -> set[str]:
    return {row.id for row in rows if row.status is Status.LEFT}


def _is_there(row: NodeRow | None) -> bool:
    return row is not None and row.status is not Status.LEFT


@dataclass
class Moves:
    """The place of the store that the node ``me`` uses, and its search for another one. ``on``: the store may move at all."""

    me: str
    on: bool
    at: Place | None = None  # the store in use; None: the one that the job was started with
    gone: frozenset[str] = frozenset()  # nodes whose end is proven
    vote: Vote | None = None  # to be written into the store in use; None: none is, or it is there
    undecided_since: float | None = None  # since when this node waits in a standby store that has no round record yet
    _vain: tuple[Place | None, float] = (None, 0.0)  # where this newcomer was sent, and nobody answered; until when it does not try again
    _searching_since: float | None = None
    _due: float = -math.inf  # the time of the next look, seconds of this node's clock
    _turn: int = 0
    _left: frozenset[str] = frozenset()  # owners of stores that this node has given up: what it has written there still stands
    _start: RoundRecord | None = None  # what a store where the job was started said last; None: nothing
    _known: RoundRecord | None = None  # the newest record that was read in any vote
    _word: RoundRecord | None = None  # the newest record that the guard of a dead host has brought: no later round of that host has started
    _claims: bool = False  # this node would take over, if no other run of the job has begun where it was started
    _start_is_clear: bool = False  # no other run of the job can form a round there any more, as far as it answers
    _silent_since: dict[str, float] = field(default_factory=dict)  # by owner: since when its store has not answered

    @property
    def undecided(self) -> bool:
        """Return whether this node waits in a standby store that nobody has taken over yet."""
        return self.undecided_since is not None

    def notice(self, record: RoundRecord | None) -> Vote | None:
        """Return what this node's guard tells the standby stores should this agent die; None: this node serves no store in use."""
        if record is None or not self.on or self.me != (self.at.id if self.at else record.host):
            return None
        return Vote(self.me, record, (*sorted(self.gone - {self.me}), self.me))

    # -- the search -----------------------------------------------------------------------------------------------------

    def places(self, record: RoundRecord | None) -> list[Place]:
        """Return the standby stores worth a look, the first in line first."""
        return [p for p in standbys(record) if p.id not in self.gone | self._left and p != self.at] if self.on else []

    def search(self, record: RoundRecord | None, lost: bool, rows: Collection[NodeRow], now: float) -> float | None:
        """Return the time of the next look at another store; None: none is needed. ``lost``: the store in use does not answer."""
        if not self.undecided and not (lost and self.places(record)):
            self._searching_since = None
            return None
        if self._searching_since is None:
            self._searching_since, self._due, self._turn = now, now + self.undecided * PATIENCE, 0
        self._claims = self._may_take_over(rows) and not self._start_is_clear
        return now if self._claims else self._due

    def look(self, record: RoundRecord, now: float, beat: float) -> Sync:
        """Return the exchange that looks at the next store. It asks for little: every node of a large job does it at once.

        A node that waits in an undecided store also looks where the job was started, where another run of it may have begun. The owner
        of the store does so before it takes over, and keeps such a run from forming its first round.
        """
        assert self._searching_since is not None
        place = None if self._claims else self._next_place(self.places(record))
        self._turn += 1
        self._due = now + min(max(QUICKEST_LOOK, LOOKS_OF_WAIT * (now - self._searching_since)), beat)
        if place is None:
            start = self._start
            if self._claims and start is not None and start.round == 0 and start.moved != self.at:
                return Sync(change=Change(start, replace(start, version=start.version + 1, moved=self.at)), rows=())
            return Sync(rows=())
        here = (self.at.id,) if self.at else ()
        return Sync(rows=(place.id, *here), voters=(record.host, *here), at=place)

    def _next_place(self, places: list[Place]) -> Place | None:
        """Return the place of the next look: mostly one of those up to the first that answers, every fourth time one of the others."""
        answering = [k for k, place in enumerate(places) if place.id not in self._silent_since]
        count = answering[0] + 1 if answering else len(places)
        near, others = places[:count], [*places[count:], *([None] if self.undecided else [])]
        if others and (not near or self._turn % 4 == 3):
            return others[self._turn // 4 % len(others)]
        return near[self._turn % len(near)]

    def unanswered(self, place: Place | None, now: float) -> None:
        """Note that a store was asked and did not answer; None: that where the job was started."""
        if place is None:
            self._start_is_clear = True
        else:
            self._silent_since = {place.id: now, **self._silent_since}

    def heard_from_start(self, answer: Synced, record: RoundRecord) -> str:
        """Take in what a store says where the job was started. Returns why this node gives up; empty: it does not."""
        self._start = found = answer.round
        self._start_is_clear = found is None or found.moved == self.at or found.store_id == record.store_id
        return another_run(found, record)

    def should_follow(self, place: Place, answer: Synced, record: RoundRecord, expire: float) -> bool:
        """Return whether this node gives up the store in use, and goes to that of ``place``, which has given this ``answer``.

        Never before the end of the host of the store in use is proven, or another store has been taken over. A node that is the owner of
        an undecided store gives it up only for one that is before its own in line, so that no two owners change places; whoever waits in
        such a store leaves it only when its owner has.
        """
        self._silent_since = {i: since for i, since in self._silent_since.items() if i != place.id}
        self._hear(answer.votes)
        found = answer.round
        if found is not None:
            return found.store_id == record.store_id and found.term > record.term
        if record.host not in self.gone:
            return False
        order = [p.id for p in standbys(record)]
        free = not self.undecided or self.at is None or self.at.id in self.gone
        if place.id == self.me:
            return free and all(self._is_away(i, answer.now, expire) for i in order[: order.index(self.me)])
        if not _is_there(answer.rows.get(place.id)):
            return False
        if free or self.at is None:
            return True
        if self.at.id == self.me:
            return order.index(place.id) < order.index(self.me)
        return _is_there(answer.rows.get(self.at.id))

    def _hear(self, votes: tuple[Vote, ...]) -> None:
        """Take in votes. Who says that a host has died knows the newest record that this host knew: its guard's word brings both."""
        self.gone |= gone(votes)
        for vote in votes:
            self._known = newest(vote.record, self._known)
            if vote.id == vote.record.host and vote.id in vote.gone:
                self._word = newest(vote.record, self._word)

    def _is_away(self, owner: str, now: float, expire: float) -> bool:
        return owner in self.gone or now - self._silent_since.get(owner, now) >= expire

    def forward(self, record: RoundRecord | None) -> Place | None:
        """Return where this node, which has taken over the store, has it; None: it has not, or not yet."""
        mine = self.at is not None and self.at.id == self.me and not self.undecided
        return self.at if mine and record is not None and not record.closed else None

    # -- in a standby store -----------------------------------------------------------------------------------------------

    def move(self, place: Place, record: RoundRecord, rows: Iterable[NodeRow], decided: bool, now: float) -> None:
        """Give up the store in use for that of ``place``. ``record``, ``rows``: what this node has read last in the store in use."""
        self.gone |= _left(rows)
        if not self.undecided or self._known is None:  # else ``record`` is not what stood in a store
            self._known = newest(record, self._known)
        self.vote = None if decided else Vote(self.me, self._known, tuple(sorted(self.gone)))
        self._left |= {self.at.id} if self.at else frozenset()
        self.at, self.undecided_since = place, None if decided else self.undecided_since or now
        self._searching_since = self._start = None
        self._start_is_clear = False
        self._silent_since = {}

    def turn_back(self, until: float) -> None:
        """Ask again where the job was started: nobody answers where this newcomer was sent. ``until``: when it may be sent there again."""
        self.at, self._vain = None, (self.at, until)

    def is_sent(self, found: RoundRecord | None, now: float) -> Place | None:
        """Return where the record ``found``, read where the job was started, sends this newcomer; None: nowhere."""
        if not self.on or found is None or found.round > 0 or found.moved is None or (found.moved == self._vain[0] and now < self._vain[1]):
            return None
        return found.moved

    def complete(self, sync: Sync, record: RoundRecord | None) -> Sync:
        """Return the exchange with the store in use. In an undecided store the owner reads all that the others bring, they read its row."""
        sync = replace(sync, at=self.at, vote=self.vote)
        if not self.undecided or self.at is None or record is None:
            return sync
        if self.at.id != self.me:
            return replace(sync, rows=(self.at.id,))
        brought = [found for found in (record, self._known, self._word) if found is not None]
        return replace(sync, rows=None, voters=tuple({m.id: None for found in brought for m in found.members}))

    def answered(self, asked: Sync, answer: Synced) -> None:
        """Take in the answer of the store in use to what it was ``asked``."""
        self._hear(answer.votes)
        self._start_is_clear = False
        self.vote = self.vote if asked.vote is None else None
        if answer.round is not None:
            self.undecided_since = None

    def take_over(self, rows: Collection[NodeRow]) -> RoundRecord | None:
        """Return the record that this node writes into its own standby store; None: it may not take over, or not yet."""
        if self._known is None or not self._start_is_clear or not self._may_take_over(rows):
            return None
        return take_over(self._known, self.me, self.gone | _left(rows))

    def _may_take_over(self, rows: Collection[NodeRow]) -> bool:
        """Return whether this node is the owner of the undecided store that it is in, and enough others have come.

        They are counted in the round that the host's guard has named, so that all owners count in the same one. Some nodes may know a
        newer round, which the host has never read; no worker of it has started.
        """
        word, known = self._word, self._known
        if not self.undecided or self.at is None or self.at.id != self.me or word is None or known is None or word.host != known.host:
            return False
        here = {row.id for row in rows if _is_there(row)}
        return self.me in here and enough(word.members, word.host, here, self.gone | _left(rows))

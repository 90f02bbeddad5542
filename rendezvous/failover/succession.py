"""The rendezvous store survives its host: which standby store takes over when the host has died, and when it may. Pure.

Every agent serves a standby store, empty until the host of the store in use has died and its guard has sent the others a ``Vote``, or,
with ``--store-succession=majority``, until the host has not answered more than half of the members for a while. Then they go to the
standby store of the first member in rank order whose owner is there itself. The owner writes the round record anew when enough of the
members have come. See docs/decisions/0020 for the argument why no two stores can ever have running rounds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from elastirun.rendezvous.peers import quorum
from elastirun.rendezvous.peers.liveness import Since
from elastirun.rendezvous.peers.polling import PER_NODE
from elastirun.rendezvous.rules import Rules
from elastirun.rendezvous.wire.actions import Change, Sync
from elastirun.rendezvous.wire.codec import clip
from elastirun.rendezvous.wire.events import Synced
from elastirun.rendezvous.wire.records import Broken, Cause, NodeRow, Place, Quorum, RoundRecord, Vote

IN_LINE = 8  # standby stores that may take over: the guard writes into these, and so many do not all die at once
QUICKEST_LOOK = 0.02  # seconds between two looks at standby stores, just after the store was lost: a guard needs about 0.1 s
LATE = 1.0  # seconds for which an owner without a guard's word waits for more nodes: the others doubt at about the same time
PATIENCE = 2.0  # seconds in an undecided store before its nodes look elsewhere, which may hang for a second
LOOKS_OF_WAIT = 0.1  # of the time since then, up to a beat
CLAIM_AGAIN = 0.3  # seconds between two looks where the job was started, while an owner waits for those that are about to come
OVERRULED_AGAIN = 5.0  # seconds at most from one word of another run to the next, of those that count together
SILENT_AGAIN = 2.0  # seconds between two looks at a store that did not answer: such a look may hang for a second


def standbys(record: RoundRecord | None) -> tuple[Place, ...]:
    """Return the standby stores that may take over from the store of ``record``, the first in line first. Its host's is not among them."""
    if record is None or not record.host:
        return ()
    others = (m for m in record.members if m.id != record.host and m.standby)
    return tuple(Place(m.id, m.address, m.standby) for m in itertools.islice(others, IN_LINE))


def newest(record: RoundRecord, other: RoundRecord | None) -> RoundRecord:
    """Return the newer one of two records of a job."""
    return other if other is not None and (other.term, other.version) > (record.term, record.version) else record


def gone(votes: Iterable[Vote]) -> frozenset[str]:
    """Return the nodes whose end is proven: by a vote itself, or by the record that it brings."""
    return frozenset(i for vote in votes for i in (*vote.gone, *(vote.record.broken.ended if vote.record.broken else ())))


def vote(me: str, record: RoundRecord, ended: Collection[str]) -> Vote:
    """Return the vote of the node ``me``. Of those that have ``ended`` it names those that ``record`` does: there are ever more others."""
    counted = {me, *(m.id for m in record.members), *(i for q in record.quorums for i in q.ids)}
    return Vote(me, record, tuple(sorted(counted.intersection(ended))))


def another_run(found: RoundRecord | None, record: RoundRecord) -> str:
    """Return in words that another run of the job has begun where it was started; empty: none has. Nodes that come find only that one."""
    other = found is not None and found.round > 0 and found.closed is None and found.store_id != record.store_id
    return "another run of this job has begun where it was started" if other else ""


def host_of(record: RoundRecord) -> str:
    """Return for people the name and address of the node that hosts the store of ``record``."""
    return next((f"{m.name} {m.address}" for m in record.members if m.id == record.host), record.host)


def lost_host(record: RoundRecord) -> str:
    """Return in words that the host of the store of ``record`` has died, or has left."""
    leaves = record.broken is not None and record.broken.cause is Cause.LEAVE and record.broken.by == record.host
    return clip(f"{host_of(record)}, which hosted the rendezvous store, {'has left' if leaves else 'was lost'}")


def take_over(
    record: RoundRecord, owner: str, lost: Collection[str], needed: tuple[Quorum, ...], turn: int = 1, ran: float = 0.0
) -> RoundRecord:
    """Return the record as the node ``owner`` writes it into its standby store: the last round is over, because its host is lost.

    ``lost``: the nodes that are not waited for. ``needed``: what the next round needs. ``turn``: the owner's place in line, from 1 on, so
    that two owners never take over with the same term. ``ran``: seconds for which the owner had known the round.
    """
    names = tuple(m.id for m in record.members if m.id in lost)
    before = record.broken
    if before is not None:  # it was over anyway, and for that reason
        broken = replace(before, lost=tuple(dict.fromkeys((*before.lost, *names))), over=True)
    else:
        broken = Broken(Cause.LOST, lost_host(record), owner, names, over=True, ran=round(max(0.0, ran), 3))
    return replace(record, version=record.version + 1, term=record.term + turn, host=owner, broken=broken, quorums=needed, moved=None)


@dataclass
class Failover:
    """The place of the store that the node ``me`` uses, and its search for another one."""

    me: str
    rules: Rules
    at: Place | None = None  # the store in use; None: the one that the job was started with
    gone: frozenset[str] = frozenset()  # nodes whose end is proven
    votes: tuple[Vote, ...] = ()  # to be written into the store in use; empty: none is, or they are there
    undecided_since: float | None = None  # since when this node waits in a standby store that has no round record yet
    _minority_since: float | None = None  # since when too few members of an earlier round are here to form the next one
    _unreachable_until: tuple[Place | None, float] = (None, 0.0)  # where nobody answered this newcomer; until when it does not try again
    _redirected: Since = field(default_factory=lambda: Since(-math.inf))  # where the record sends this newcomer
    _searching_since: float | None = None
    _ran: tuple[str, float] = ("", 0.0)  # of the round that this node has given up: the fence token, and for how many seconds it was known
    doubts: bool = False  # this node would give up the store without proof that its host has died
    _due: float = -math.inf  # the time of the next look, seconds of this node's clock
    _turn: int = 0
    _left: frozenset[str] = frozenset()  # names of the stores that this node has given up: what it has written there still stands
    _before: Place | None = None  # the last store in use that had a round record; None: where the job was started
    _unreached: bool = False  # that store did not answer when this node gave it up
    _host_seq: int | None = None  # of the row of its host, as it was read there last; None: it was not
    _start: RoundRecord | None = None  # what a store where the job was started said last; None: nothing
    _known: RoundRecord | None = None  # the newest record that was read in any vote
    _terms: dict[str, int] = field(default_factory=dict)  # by node: the term of the record in its vote, in the undecided store in use
    _word: Vote | None = None  # the newest that the guard of a dead host has brought: no later round of that host has started
    _claims: bool = False  # this node would take over, if no other run of the job has begun where it was started
    _start_is_clear: bool = False  # no other run of the job can form a round there any more, as far as it answers
    _was_suspended: bool = False  # since the last look began: what that has found may not be so any more
    _overruled: tuple[str, float, float] | None = None  # another run whose word stands where this one's should; found since, and last, when
    _is_replaced: bool = False  # a store without this job answers where the store in use was
    _silent_since: dict[str, float] = field(default_factory=dict)  # by the name of a store: since when it has not answered
    _looked_at: dict[str, float] = field(default_factory=dict)  # by name, "" where the job was started: when this node looked there last

    @property
    def undecided(self) -> bool:
        """Return whether this node waits in a standby store that nobody has taken over yet."""
        return self.undecided_since is not None

    @property
    def waits(self) -> tuple[str, float] | None:
        """Return in words what this node waits for although the store in use answers, and since when; None: for nothing."""
        if self.undecided_since is not None:
            return "too few nodes have come to the store that is to take over", self.undecided_since
        if self._minority_since is not None:
            return "too few nodes of the last round can be reached, and the others may go on without this node", self._minority_since
        return None

    def note_minority(self, minority: bool, now: float) -> None:
        """Note whether too few members of an earlier round are here to form the next one."""
        self._minority_since = (self._minority_since or now) if minority else None

    def notice(self, record: RoundRecord | None) -> Vote | None:
        """Return the vote that this node's guard writes into the standby stores when this agent has died; None: it writes none.

        The word of the store's host moves the store. That of another member counts where the store cannot be reached: both may have died.
        """
        known = self._known if self.undecided and self._known is not None else record
        serves = record is not None and self.me == (self.at.id if self.at else record.host)
        if known is None or not self.rules.succession or not (serves or known.index(self.me) is not None):
            return None
        return vote(self.me, known, self.gone | {self.me})

    def stood_still(self, now: float, seconds: float) -> None:
        """Note that this agent was suspended: that time is no time of waiting, and other stores may have stood still as well."""

        def later(since: float | None) -> float | None:
            return None if since is None else min(now, since + seconds)

        self.undecided_since = later(self.undecided_since)
        self._minority_since = later(self._minority_since)
        self._searching_since = later(self._searching_since)
        self._silent_since, self._overruled = {}, None
        self._was_suspended, self._start_is_clear = True, False  # another run may have begun there meanwhile

    # -- the search -----------------------------------------------------------------------------------------------------

    def _line(self, record: RoundRecord | None) -> tuple[Place, ...]:
        """Return the standby stores in line: those of the round that the host's guard has named, then those of the round in ``record``.

        Whoever has read a round that the host has not, or has not read its last one, so finds those that have.
        """
        word = self._word.record if self._word is not None else None
        if record is None or word is None or word.host != record.host:
            return standbys(record)
        return tuple(dict.fromkeys((*standbys(word), *standbys(record))))

    def places(self, record: RoundRecord | None) -> list[Place]:
        """Return the standby stores worth a look, the first in line first."""
        line = self._line(record) if self.rules.succession and record is not None and not record.closed else ()
        return [place for place in line if place.id not in self.gone and place.name not in self._left and place != self.at]

    def search(
        self, record: RoundRecord | None, silent_since: float | None, rows: Mapping[str, NodeRow], now: float, stays: bool = True
    ) -> float | None:
        """Begin the search for another store, go on with it, or end it. Return the time of the next look; None: none is needed.

        ``silent_since``: when the store in use answered last; None: it answers. ``rows``: as they were read last there. ``stays``: this
        node is not about to leave. One that is, and that is alone, sends no newcomer to its store: it takes none over.
        """
        since = self._minority_since if silent_since is None else silent_since
        self._unreached = self._unreached if self.undecided else silent_since is not None
        if not self.undecided and (since is None or not self.places(record)):
            self._searching_since, self.doubts = None, False
            return None
        if self._searching_since is None:
            self._searching_since, self._due, self._turn = now, now + self.undecided * PATIENCE, 0
        patience = 0.0 if self._is_replaced else self.rules.doubt if silent_since is not None else self.rules.expire
        doubted, self.doubts = self.doubts, self.rules.majority and since is not None and now - since >= patience
        if self.doubts and not doubted:
            self._searching_since, self._due, self._turn = now, now, 0  # the others look now, too
        alone = not any(quorum.is_there(row) for row in rows.values() if row.id != self.me)
        self._claims = (stays or not alone) and not self._start_is_clear and self._needed(rows) is not None
        if not self._claims:
            return self._due
        return self._looked_at.get("", now) + CLAIM_AGAIN if self._waits_for_more(rows, now) else now

    def look(self, record: RoundRecord, now: float) -> Sync:
        """Return the exchange that looks at the next store. It asks for little: every node of a large job does it at once.

        A node that waits in an undecided store also looks where the job was started, where another run of it may have begun. The owner
        of the store does so before it takes over, and keeps such a run from forming its first round.
        """
        assert self._searching_since is not None
        place = None if self._claims else self._next_place(self.places(record), now)
        self._turn += 1
        self._looked_at[place.name if place else ""] = now
        quickest = QUICKEST_LOOK + PER_NODE * len(record.members)
        self._due = now + min(max(quickest, LOOKS_OF_WAIT * (now - self._searching_since)), max(quickest, self.rules.beat))
        self._was_suspended = False
        here = (self.at.id,) if self.at else ()
        host = (self._known or record).host
        if place is None:
            start = self._start
            if self._claims and start is not None and start.round == 0 and start.moved != self.at:
                said = replace(self.at, run=record.store_id) if self.at else None
                return Sync(change=Change(start, replace(start, version=start.version + 1, moved=said)), rows=(), look=True)
            return Sync(rows=tuple(dict.fromkeys((host, *here))), look=True)
        few = dict.fromkeys((record.host, *here, *(p.id for p in self._line(record))))  # those in line may have died with the host
        voters = tuple(m.id for m in record.members) if self.doubts and place.id == self.me else tuple(few)
        votes = (Vote(self.me, record),) if self.doubts and not self.undecided else ()
        return Sync(rows=(place.id, *here), voters=voters, votes=votes, at=place, look=True)

    def _next_place(self, places: list[Place], now: float) -> Place | None:
        """Return the place of the next look: mostly one of those up to the first that answers, every fourth time one of the others."""
        answering = [k for k, place in enumerate(places) if place.name not in self._silent_since]
        count = answering[0] + 1 if answering else len(places)
        near, others = places[:count], [*places[count:], *dict.fromkeys([None, self._before] if self.undecided else [])]
        near = [place for place in near if self._is_worth_a_look(place, now)] or near
        others = [place for place in others if self._is_worth_a_look(place, now)]
        if others and (not near or self._turn % 4 == 3):
            return others[self._turn // 4 % len(others)]
        return near[self._turn % len(near)] if near else None

    def _is_worth_a_look(self, place: Place | None, now: float) -> bool:
        silent = self._start_is_clear if place is None else place.name in self._silent_since
        return not silent or now >= self._looked_at.get(place.name if place else "", -math.inf) + SILENT_AGAIN

    def replaced(self) -> None:
        """Note that the store in use is gone: an empty one answers in its place, where a first round may form soon."""
        self._is_replaced = True

    def unanswered(self, place: Place | None, now: float) -> None:
        """Note that a store was asked and did not answer; None: that where the job was started."""
        if place is None:
            self._start_is_clear = not self._was_suspended
        else:
            self._silent_since = {place.name: now, **self._silent_since}

    def looked_at_start(self, answer: Synced, record: RoundRecord) -> str:
        """Take in the answer to a look where the job was started. Return why this node gives up; empty: it does not."""
        self._start = found = answer.round
        clear = found is None or found.moved == self.at or found.store_id == record.store_id
        self._start_is_clear = clear and not self._was_suspended
        return another_run(found, record)

    def closed(self, record: RoundRecord) -> RoundRecord | None:
        """Return the record of the job of ``record`` with its verdict, which the host's guard has brought; None: there is none."""
        known = self._known
        return known if known is not None and known.closed is not None and known.store_id == record.store_id else None

    def should_follow(self, place: Place, answer: Synced, record: RoundRecord) -> bool:
        """Return whether this node gives up the store in use, and goes to that of ``place``, which has given this ``answer``.

        Never before the end of the host of the store in use is proven, or another store has been taken over, or, with a majority, the
        owner of the other store and this node both doubt that the host lives. A node that is the owner of an undecided store gives it up
        only for one that is before its own in line, so that no two owners change places; whoever waits in such a store leaves it only
        when its owner has.
        """
        self._silent_since = {name: since for name, since in self._silent_since.items() if name != place.name}
        self._take_votes(answer.votes, record)
        found = answer.round
        if found is not None:
            return found.store_id == record.store_id and found.term > record.term
        proven = record.host in self.gone
        if not (proven or self.doubts or self.undecided):
            return False
        order = [one for one in self._line(record) if one.name not in self._left]
        before = order[: order.index(place)] if place in order else order
        free = not self.undecided or self.at is None or self.at.id in self.gone
        if place.id == self.me:
            enough = proven or self.undecided or self._others_doubt(answer.votes, record)
            return free and enough and all(self._is_away(one, answer.now) for one in before)
        if not quorum.is_there(answer.rows.get(place.id)):
            return False
        if free or self.at is None:
            return True
        if self.at.id == self.me:
            return self.at not in before
        return quorum.is_there(answer.rows.get(self.at.id)) and self._is_ended(self.at, answer)

    def should_go_back(self, place: Place | None, answer: Synced, record: RoundRecord, rows: Mapping[str, NodeRow]) -> bool:
        """Return whether this node goes back to the store of ``place``, whose host it has given up: the host has written there since.

        Only from an undecided store that can decide nothing any more: from its own, where too few have come, and which it ends so, or from
        that of another node whose row says that it has ended it. ``rows``: as they were read last in that store. Who gave up a host that
        did answer, because too few could reach it, goes back when a round has formed there.
        """
        found, known = answer.round, self._known
        if self.at is None or not self.undecided or place != self._before or found is None or known is None or known.host in self.gone:
            return False
        if place is not None and place.id == self.me:  # it has ended that one
            return False
        host = answer.rows.get(known.host)
        before, self._host_seq = self._host_seq, host.seq if host is not None else self._host_seq
        lives = host is not None and before is not None and host.seq > before
        same = found.store_id == record.store_id and found.term == known.term and found.moved is None
        if not (lives and same and found.version >= record.version and (self._unreached or found.round > record.round)):
            return False
        if self.at.id == self.me:
            return self._needed(rows) is None
        return self._is_ended(self.at, answer)

    @staticmethod
    def _is_ended(place: Place, answer: Synced) -> bool:
        """Return whether the owner of the undecided store ``place`` has ended it, by its row in another store.

        A row that names ``place`` was written before the owner came there.
        """
        owner = answer.rows.get(place.id)
        return owner is not None and owner.standby != place.port

    def go_back(self) -> Place | None:
        """Give up the undecided store in use for the one before it. Return that one's place."""
        self.votes = ()
        self._use(self._before, None)
        self._left -= {self._before.name} if self._before else frozenset()
        return self.at

    def _others_doubt(self, votes: tuple[Vote, ...], record: RoundRecord) -> bool:
        """Return whether enough nodes to go on have voted for the round of ``record``, so that none gives up the store alone.

        Or for the one before: the host may be lost while it forms a round, which some have read. The last word of a node that leaves is no
        doubt, and counts only as its end.
        This is the vote before the vote of Raft (Ongaro 2014, section 9.6).
        """
        recent = [v for v in votes if v.id not in v.gone and v.record.term == record.term and v.record.round >= record.round - 1]
        same = {vote.id for vote in recent} | {self.me}
        return bool(record.quorums) and all(quorum.is_met(q, same, self.gone) for q in record.quorums[-1:])

    def _take_votes(self, found: tuple[Vote, ...], record: RoundRecord | None) -> None:
        """Take in votes about the job of ``record``, and none of another run of it.

        Who says that a host has died knows the newest record that this host knew: its guard's word brings both.
        """
        votes = [vote for vote in found if record is not None and vote.record.store_id == record.store_id]
        self.gone |= gone(votes)
        for vote in votes:
            self._known = newest(vote.record, self._known)
            if vote.id == vote.record.host and vote.id in vote.gone:
                self._word = vote if self._word is None or newest(vote.record, self._word.record) is vote.record else self._word

    def _is_away(self, place: Place, now: float) -> bool:
        return place.id in self.gone or now - self._silent_since.get(place.name, now) >= self.rules.expire

    def forward(self, record: RoundRecord | None) -> tuple[Place, RoundRecord | None] | None:
        """Return where this node, which has taken over the store, has it, and the record there; None: it has not, or not yet.

        Without the record: too few nodes are there, and another node may have taken over as well, whose word is not written over.
        """
        if self.at is None or self.at.id != self.me or self.undecided or record is None or record.closed:
            return None
        return replace(self.at, run=record.store_id), record if self.waits is None else None

    def found_at_start(self, found: RoundRecord | None, record: RoundRecord, waits: bool, now: float) -> str:
        """Process what this owner found where it says where the store is. Return why it gives up; empty: it does not.

        If the word of another run of the job stands there again and again, that run has moved, too, and nodes that come are sent to the one
        or the other. An owner that waits for nodes (``waits``) then gives up; if both wait, that of one run waits for twice as long.
        """
        other = found.moved if found is not None else None
        if not waits:
            self._overruled = None
        elif other is not None and other.run not in ("", record.store_id):
            run, since, last = self._overruled or (other.run, now, now)
            since = since if run == other.run and now - last <= OVERRULED_AGAIN else now
            self._overruled = other.run, since, now
            if now - since >= self.rules.store_grace * (1 if record.store_id < other.run else 2):
                return f"another run of this job has moved, to {other.address}, and nodes that come are sent there"
        return another_run(found, record)

    # -- in a standby store -----------------------------------------------------------------------------------------------

    def move(
        self, place: Place, record: RoundRecord, rows: Mapping[str, NodeRow], decided: bool, now: float, ran: float = 0.0
    ) -> RoundRecord:
        """Give up the store in use for that of ``place``. Return the newest record that was read anywhere.

        ``record``, ``rows``: as this node has read them last in the store in use. ``ran``: seconds for which it has known the round.
        """
        if record.open:
            self._ran = record.fence, ran
        self.gone |= quorum.left(rows.values())
        if not self.undecided or self._known is None:  # else ``record`` is not what stood in a store
            self._known = newest(record, self._known)
        self._terms = {}
        self.votes = () if decided else self._words(self._known)
        if not self.undecided:
            host = rows.get(record.host)
            self._before, self._host_seq = self.at, host.seq if host is not None else None
        self._use(place, None if decided else self.undecided_since or now)
        return self._known

    def _use(self, place: Place | None, undecided_since: float | None) -> None:
        """Give up the store in use for that of ``place``. ``undecided_since``: see there."""
        self._left |= {self.at.name} if self.at else frozenset()
        self.at, self.undecided_since = place, undecided_since
        self._searching_since = self._start = self._minority_since = None
        self._start_is_clear = self.doubts = self._is_replaced = False
        self._silent_since, self._overruled = {}, None

    def _words(self, known: RoundRecord) -> tuple[Vote, ...]:
        """Return what this node writes into an undecided store: a vote with the newest record, ``known``, and the word of the guard."""
        own = vote(self.me, known, self.gone)
        return (own,) if self._word is None else (self._word, own)

    def turn_back(self, until: float) -> None:
        """Ask again where the job was started: there is no job where this newcomer was sent. ``until``: when it may be sent there again."""
        self.at, self._unreachable_until = None, (self.at, until)

    def is_sent(self, found: RoundRecord | None, now: float) -> Place | None:
        """Return where the record ``found``, read where the job was started, sends this node; None: nowhere.

        It sends a newcomer if no round has formed there, and all others if their job has gone on elsewhere without its host.
        """
        if not self.rules.succession or found is None or found.moved in (None, self.at):
            return None
        self._redirected.see(found.moved, now)
        place, until = self._unreachable_until
        return None if found.moved == place and now < until else found.moved

    def redirected_since(self, record: RoundRecord) -> float | None:
        """Return since when ``record`` has sent this node to the same place, where nobody has answered; None: it sends nobody."""
        return self._redirected.since if record.moved is not None else None

    def complete(self, sync: Sync, record: RoundRecord | None, rows: Mapping[str, NodeRow]) -> Sync:
        """Return the exchange with the store in use, in which ``rows`` were read last.

        In an undecided store the owner reads all that the others bring, they read its row and vote. When it has taken over, and too few are
        there to go on, it reads the words of guards, which may have come late.
        """
        sync = replace(sync, at=self.at, votes=self.votes)
        if self.at is None or record is None:
            return sync
        if self.at.id != self.me:
            return replace(sync, rows=(self.at.id,), voters=(self.at.id,)) if self.undecided else sync
        if not self.undecided:
            few = self._minority_since is not None
            away = {i: None for q in record.quorums if few for i in q.ids if i not in rows and i not in self.gone}
            return replace(sync, voters=tuple(away))
        brought = [record, *([self._known] if self._known else []), *([self._word.record] if self._word else [])]
        return replace(sync, rows=None, voters=tuple({m.id: None for found in brought for m in found.members}))

    def answered(self, asked: Sync, answer: Synced, record: RoundRecord | None) -> None:
        """Take in the answer of the store in use to what it was ``asked``. ``record``: of the job, as this node has known it.

        Who reads of a newer term in an undecided store votes again: it counts only for the term that it knew while it was there.
        """
        known = self._known
        self._take_votes(answer.votes, record)
        self._terms |= {vote.id: vote.record.term for vote in answer.votes}
        self._start_is_clear = self._is_replaced = False
        self.votes = () if asked.votes == self.votes else self.votes
        if answer.round is not None:
            self.undecided_since = None
        elif self.undecided and self._known is not None and (known is None or self._known.term > known.term):
            self.votes = self._words(self._known)

    def take_over(self, rows: Mapping[str, NodeRow], now: float) -> Change | None:
        """Return the write that makes this node's own standby store the one in use; None: it may not take over, or not yet."""
        needed, known = self._needed(rows), self._known
        if known is None or needed is None or not self._start_is_clear or self._waits_for_more(rows, now):
            return None
        ended = self.gone | quorum.left(rows.values())
        absent = {m.id for m in known.members} - self._here(rows, known)
        lost = ended if known.host in self.gone else absent
        turn = next((k for k, place in enumerate(self._line(known), 1) if place.id == self.me), IN_LINE + 1)
        ran = self._ran[1] if self._ran[0] == known.fence else 0.0
        return Change(None, take_over(known, self.me, lost, quorum.noted(needed, ended), turn, ran))

    def _waits_for_more(self, rows: Mapping[str, NodeRow], now: float) -> bool:
        """Return whether the owner waits for those that are about to come. A node that has no proof of an end cannot know who that is."""
        if self._known is None or self._known.host in self.gone or now >= (self.undecided_since or 0.0) + LATE:
            return False
        here = {row.id for row in rows.values() if quorum.is_there(row)}
        return not {m.id for m in self._known.members} <= here | self.gone | {self._known.host}

    def _here(self, rows: Mapping[str, NodeRow], known: RoundRecord) -> set[str]:
        """Return the nodes that count in this node's own undecided store, for the store that ``known`` is of.

        Not those that voted about an earlier one: they may have gone on to ``known``'s store, and count in another undecided one by now.
        """
        there = {row.id for row in rows.values() if quorum.is_there(row) and row.id not in self.gone}
        return {i for i in there if i == self.me or self._terms.get(i) == known.term}

    def _needed(self, rows: Mapping[str, NodeRow]) -> tuple[Quorum, ...] | None:
        """Return what the next round in this node's own standby store needs; None: it may not take over that store, or not yet.

        When the guard of the host has written that the host has ended, the members of the round that it has named are counted without the
        host, so that all owners count in the same round. Some nodes may know a newer round, which the host has never read; no worker of
        it has started. Without such a word only a majority may go on, and not if all of it has succeeded: the host may say that the job
        has.
        """
        known, word = self._known, self._word.record if self._word is not None else None
        if self.undecided_since is None or self.at is None or self.at.id != self.me or known is None:
            return None
        here = self._here(rows, known)
        if self.me not in here:
            return None
        ended = self.gone | quorum.left(rows.values())
        if word is not None and word.host == known.host:
            asked = quorum.asked(word, rows) if self.rules.majority else word.quorums[-1:]
            needed = (*asked[:-1], *(quorum.without(last, word.host) for last in asked[-1:]))
        elif self.rules.majority:
            needed = quorum.asked(known, rows)
        else:
            return None
        proven = word is not None and word.host == known.host
        some = any(i in here and (proven or rows[i].succeeded != known.round) for q in needed[-1:] for i in q.ids)
        return needed if some and all(quorum.is_met(q, here, ended) for q in needed) else None

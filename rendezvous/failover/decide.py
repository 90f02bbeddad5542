"""The rules by which a node keeps to the store of its job, looks at another one, moves there, or takes over. Pure.

``decide`` is the list of the rules, ``Facts`` has the conditions that they name. See docs/decisions/0020.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from elastirun.rendezvous.failover.evidence import START, Evidence, Search
from elastirun.rendezvous.failover.succession import IN_LINE, take_over
from elastirun.rendezvous.peers import quorum
from elastirun.rendezvous.rules import Rules
from elastirun.rendezvous.wire.actions import Change
from elastirun.rendezvous.wire.events import Synced
from elastirun.rendezvous.wire.records import NodeRow, Place, Quorum, RoundRecord

LATE = 1.0  # seconds for which an owner without a guard's word waits for more nodes: the others doubt at about the same time
PATIENCE = 2.0  # seconds in an undecided store before its nodes look elsewhere, which may hang for a second
CLAIM_AGAIN = 0.3  # seconds between two looks where the job was started, while an owner waits for those that are about to come
SILENT_AGAIN = 2.0  # seconds between two looks at a store that did not answer: such a look may hang for a second


@dataclass(frozen=True)
class Stay:
    """Keep to the store in use."""

    reason: str


@dataclass(frozen=True)
class Probe:
    """Look at the store of ``place``, when it is ``due``; None: where the job was started, and write ``word`` there if there is one."""

    reason: str
    place: Place | None
    due: float
    word: Change | None = None


@dataclass(frozen=True)
class Move:
    """Give up the store in use for that of ``place``. ``decided``: it has a round record. ``back``: this node had given it up before.

    ``place`` is None only on the way ``back`` to where the job was started.
    """

    reason: str
    place: Place | None
    decided: bool = False
    back: bool = False


@dataclass(frozen=True)
class TakeOver:
    """Write ``change`` into the standby store of this node, which makes it the one in use."""

    reason: str
    change: Change


Decision = Stay | Probe | Move | TakeOver


@dataclass(frozen=True)
class Found:
    """The ``answer`` to a look at the store of ``place``; None: where the job was started."""

    place: Place | None
    answer: Synced


@dataclass(frozen=True)
class StoreView:
    """The store in use as the node ``me`` sees it now.

    ``rows``: as they were read last there. ``silent_since``: when it answered last; None: it answers. ``stays``: this node is not about to
    leave. ``found``: the answer to a look at another store, if that is what has just happened.
    """

    me: str
    rules: Rules
    rows: Mapping[str, NodeRow]
    silent_since: float | None = None
    stays: bool = True
    found: Found | None = None


def decide(record: RoundRecord | None, evidence: Evidence, view: StoreView, now: float) -> Decision:
    """Return what this node does about its store, and why: the first of these rules whose condition is true decides.

    ``record``: of the job, as this node has known it. ``evidence``: without the answer that ``view`` has ``found``.
    """
    if record is None:
        return Stay("this node has read no round record yet, so it knows of no standby store")
    if view.found is None:
        facts = Facts(record, evidence, view, now)
        return (
            (facts.change and TakeOver("enough nodes have come to the store of this node, and no other run has begun", facts.change))
            or (not facts.searches and Stay("the store in use answers and has enough nodes, or no standby store is left"))
            or (facts.claims and Probe("no other run may begin where the job was started", None, facts.claim_due, facts.claim))
            or Probe("another store may have taken over, or may be about to", facts.next_place, evidence.search.due)
        )
    place, answer = view.found.place, view.found.answer
    if Facts(record, evidence, view, now).host_is_back(place, answer):
        return Move("the host that this node gave up has written its row since, and nothing can be decided here", place, back=True)
    if place is None:
        return Stay("no standby store takes over where the job was started")
    look = Look(record, evidence.looked(place, answer, record), view, now, place, answer)
    return (
        (look.evidence.verdict(record) and Stay("a guard has brought the verdict on the job"))
        or (look.has_taken_over and Move("that store has taken over: its record has a later term", place, decided=True))
        or (answer.round and Stay("that store has a record of another run, or no later one"))
        or (look.trusts_host and Stay("nothing shows that the host of the store in use has ended"))
        or (look.opens and Move("this node is the first in line, or those before it are away", place))
        or (look.is_own and Stay("a store before this one may take over, or too few nodes doubt that the host lives"))
        or (look.owner_is_absent and Stay("the owner of that store is not there"))
        or (look.is_free and Move("the owner of that store is there, before all others in line that answer", place))
        or (look.is_before_own and Move("the owner of that store is there, and is before this node in line", place))
        or (look.in_use_has_ended and Move("the owner of the undecided store in use has gone there", place))
        or Stay("the undecided store in use may still take over")
    )


@dataclass(frozen=True)
class Facts:
    """The conditions of the rules, each from the same values as ``decide`` gets."""

    record: RoundRecord
    evidence: Evidence
    view: StoreView
    now: float

    # -- the search ---------------------------------------------------------------------------------------------------------

    @property
    def searches(self) -> bool:
        """Return whether this node looks for another store: it waits in an undecided one, or the one in use is lost and there are others."""
        lost = self.view.silent_since is not None or self.evidence.minority_since is not None
        return self.evidence.undecided or (lost and bool(places(self.record, self.evidence, self.view.rules)))

    @property
    def doubts(self) -> bool:
        """Return whether this node would give up the store without proof that its host has died, if enough others would as well."""
        silent_since, rules = self.view.silent_since, self.view.rules
        since = self.evidence.minority_since if silent_since is None else silent_since
        patience = 0.0 if self.evidence.is_replaced else rules.doubt if silent_since is not None else rules.expire
        return rules.majority and since is not None and self.now - since >= patience

    @property
    def searched(self) -> Evidence:
        """The evidence with the search as it goes on now. Decide on that."""
        evidence = self.evidence
        unreached = evidence.unreached if evidence.undecided else self.view.silent_since is not None
        pause = PATIENCE if evidence.undecided else 0.0
        search = evidence.search.go_on(self.doubts, self.now, pause) if self.searches else Search()
        same = (unreached, search) == (evidence.unreached, evidence.search)
        return evidence if same else replace(evidence, unreached=unreached, search=search)

    @property
    def next_place(self) -> Place | None:
        """The place of the next look: mostly one of those up to the first that answers, every fourth time one of the others."""
        evidence, turn = self.evidence, self.evidence.search.turn
        line = places(self.record, evidence, self.view.rules)
        answering = [k for k, place in enumerate(line) if place.name not in evidence.silent_since]
        count = answering[0] + 1 if answering else len(line)
        near, others = line[:count], [*line[count:], *dict.fromkeys([None, evidence.before] if evidence.undecided else [])]
        near = [place for place in near if self._is_worth_a_look(place)] or near
        others = [place for place in others if self._is_worth_a_look(place)]
        if others and (not near or turn % 4 == 3):
            return others[turn // 4 % len(others)]
        return near[turn % len(near)] if near else None

    def _is_worth_a_look(self, place: Place | None) -> bool:
        evidence = self.evidence
        silent = evidence.start_is_clear if place is None else place.name in evidence.silent_since
        return not silent or self.now >= evidence.looked_at.get(place.name if place else START, -math.inf) + SILENT_AGAIN

    # -- the undecided store of this node -------------------------------------------------------------------------------------

    @cached_property
    def needed(self) -> tuple[Quorum, ...] | None:
        """What the next round in this node's own standby store needs; None: it may not take over that store, or not yet.

        When the guard of the host has written that the host has ended, the members of the round that it has named are counted without the
        host, so that all owners count in the same round. Some nodes may know a newer round, which the host has never read; no worker of
        it has started. Without such a word only a majority may go on, and not if all of it has succeeded: the host may say that the job
        has.
        """
        evidence, me, rules, rows = self.evidence, self.view.me, self.view.rules, self.view.rows
        known, word = evidence.known, evidence.word.record if evidence.word is not None else None
        if not evidence.undecided or evidence.at is None or evidence.at.id != me or known is None:
            return None
        here = self.counted
        if me not in here:
            return None
        proven = word is not None and word.host == known.host
        if word is not None and proven:
            asked = quorum.asked(word, rows) if rules.majority else word.quorums[-1:]
            needed = (*asked[:-1], *(quorum.without(last, word.host) for last in asked[-1:]))
        elif rules.majority:
            needed = quorum.asked(known, rows)
        else:
            return None
        ended = evidence.gone | quorum.left(rows.values())
        some = any(i in here and (proven or rows[i].succeeded != known.round) for q in needed[-1:] for i in q.ids)
        return needed if some and all(quorum.is_met(q, here, ended) for q in needed) else None

    @property
    def counted(self) -> set[str]:
        """The nodes that count in this node's own undecided store, for the store of the newest record that is known.

        Not those that voted about an earlier one: they may have gone on to that store, and count in another undecided one by now.
        """
        me, known, terms = self.view.me, self.evidence.known, self.evidence.terms
        there = {row.id for row in self.view.rows.values() if quorum.is_there(row) and row.id not in self.evidence.gone}
        return {i for i in there if i == me or (known is not None and terms.get(i) == known.term)}

    @property
    def waits_for_more(self) -> bool:
        """Return whether the owner waits for those that are about to come. A node that has no proof of an end cannot know who that is."""
        known, gone = self.evidence.known, self.evidence.gone
        if known is None or known.host in gone or self.now >= (self.evidence.undecided_since or 0.0) + LATE:
            return False
        here = {row.id for row in self.view.rows.values() if quorum.is_there(row)}
        return not {m.id for m in known.members} <= here | gone | {known.host}

    @property
    def claims(self) -> bool:
        """Return whether this node would take over, if no other run of the job has begun where it was started.

        A node that is about to leave, and that is alone, sends no newcomer to its store: it takes none over.
        """
        alone = not any(quorum.is_there(row) for row in self.view.rows.values() if row.id != self.view.me)
        return (self.view.stays or not alone) and not self.evidence.start_is_clear and self.needed is not None

    @property
    def claim_due(self) -> float:
        """The time of the next look where the job was started."""
        return self.evidence.looked_at.get(START, self.now) + CLAIM_AGAIN if self.waits_for_more else self.now

    @property
    def claim(self) -> Change | None:
        """The write that keeps another run from forming its first round where the job was started; None: no run is about to."""
        start, at = self.evidence.start, self.evidence.at
        if start is None or at is None or start.round > 0 or start.moved == at:
            return None
        return Change(start, replace(start, version=start.version + 1, moved=replace(at, run=self.record.store_id)))

    @property
    def change(self) -> Change | None:
        """The write that makes this node's own standby store the one in use; None: it may not take over, or not yet."""
        evidence, known, needed = self.evidence, self.evidence.known, self.needed
        if known is None or needed is None or not (self.view.stays and evidence.start_is_clear) or self.waits_for_more:
            return None
        ended = evidence.gone | quorum.left(self.view.rows.values())
        lost = ended if known.host in evidence.gone else {m.id for m in known.members} - self.counted
        turn = next((k for k, place in enumerate(evidence.line(known), 1) if place.id == self.view.me), IN_LINE + 1)
        ran = evidence.ran[1] if evidence.ran[0] == known.fence else 0.0
        return Change(None, take_over(known, self.view.me, lost, quorum.noted(needed, ended), turn, ran))

    # -- the store before -----------------------------------------------------------------------------------------------------

    def host_is_back(self, place: Place | None, answer: Synced) -> bool:
        """Return whether the host that this node has given up has written in its store, that of ``place``, since.

        Only from an undecided store that can decide nothing any more: from its own, where too few have come, and which it ends so, or from
        that of another node whose row says that it has ended it. Who gave up a host that did answer, because too few could reach it, goes
        back when a round has formed there.
        """
        evidence, found, known, at = self.evidence, answer.round, self.evidence.known, self.evidence.at
        if (
            not evidence.undecided
            or at is None
            or place != evidence.before
            or found is None
            or known is None
            or known.host in evidence.gone
        ):
            return False
        if place is not None and place.id == self.view.me:  # it has ended that one
            return False
        host, before = answer.rows.get(known.host), evidence.host_seq
        lives = host is not None and before is not None and host.seq > before
        same = found.store_id == self.record.store_id and found.term == known.term and found.moved is None
        goes_on = found.version >= self.record.version and (evidence.unreached or found.round > self.record.round)
        if not (lives and same and goes_on):
            return False
        return self.needed is None if at.id == self.view.me else has_ended(at, answer)


@dataclass(frozen=True)
class Look(Facts):
    """The conditions of the rules about the standby store of ``place``, which has given this ``answer``. It is in ``evidence``.

    A node never gives up the store in use before the end of its host is proven, or another store has taken over, or, with a majority, the
    owner of the other store and this node both doubt that the host lives. A node that is the owner of an undecided store gives it up only
    for one that is before its own in line, so that no two owners change places; whoever waits in such a store leaves it only when its
    owner has.
    """

    place: Place
    answer: Synced

    @property
    def has_taken_over(self) -> bool:
        """Return whether that store has the job of this node, in a later term."""
        found = self.answer.round
        return found is not None and found.store_id == self.record.store_id and found.term > self.record.term

    @property
    def is_proven(self) -> bool:
        """Return whether the end of the host of the store in use is proven."""
        return self.record.host in self.evidence.gone

    @property
    def trusts_host(self) -> bool:
        """Return whether this node has no reason to give up the host of the store in use."""
        return not (self.is_proven or self.evidence.search.doubts or self.evidence.undecided)

    @property
    def before(self) -> list[Place]:
        """The stores before that one in line; all of them if it is not in line. This node waits for none that it has left."""
        order = [place for place in self.evidence.line(self.record) if place.name not in self.evidence.left]
        return order[: order.index(self.place)] if self.place in order else order

    @property
    def is_free(self) -> bool:
        """Return whether this node waits in no undecided store whose owner lives."""
        at = self.evidence.at
        return not self.evidence.undecided or at is None or at.id in self.evidence.gone

    @property
    def is_own(self) -> bool:
        """Return whether that store is the one that this node serves."""
        return self.place.id == self.view.me

    @property
    def opens(self) -> bool:
        """Return whether this node opens that store, its own: no store before it in line can take over, and it is not alone with its doubt."""
        enough = self.is_proven or self.evidence.undecided or self.others_doubt
        return self.is_own and self.is_free and enough and all(map(self._is_away, self.before))

    def _is_away(self, place: Place) -> bool:
        silent_since = self.evidence.silent_since.get(place.name, self.now)
        return place.id in self.evidence.gone or self.now - silent_since >= self.view.rules.expire

    @property
    def others_doubt(self) -> bool:
        """Return whether enough nodes to go on have voted for the round of ``record``, so that none gives up the store alone.

        Or for the one before: the host may be lost while it forms a round, which some have read. The last word of a node that leaves is no
        doubt, and counts only as its end.
        This is the vote before the vote of Raft (Ongaro 2014, section 9.6).
        """
        record, votes = self.record, self.answer.votes
        recent = [v for v in votes if v.id not in v.gone and v.record.term == record.term and v.record.round >= record.round - 1]
        same = {vote.id for vote in recent} | {self.view.me}
        return bool(record.quorums) and all(quorum.is_met(q, same, self.evidence.gone) for q in record.quorums[-1:])

    @property
    def owner_is_absent(self) -> bool:
        """Return whether the owner of that store does not take part in the rendezvous there."""
        return not quorum.is_there(self.answer.rows.get(self.place.id))

    @property
    def is_before_own(self) -> bool:
        """Return whether this node waits in its own store, and that one is before it in line."""
        at = self.evidence.at
        return at is not None and at.id == self.view.me and at not in self.before

    @property
    def in_use_has_ended(self) -> bool:
        """Return whether this node waits in the store of another node, which has come to that one."""
        at = self.evidence.at
        if at is None or at.id == self.view.me:
            return False
        return quorum.is_there(self.answer.rows.get(at.id)) and has_ended(at, self.answer)


def has_ended(place: Place, answer: Synced) -> bool:
    """Return whether the owner of the undecided store ``place`` has ended it, by its row in another store.

    A row that names ``place`` was written before the owner came there.
    """
    owner = answer.rows.get(place.id)
    return owner is not None and owner.standby != place.port


def places(record: RoundRecord | None, evidence: Evidence, rules: Rules) -> list[Place]:
    """Return the standby stores worth a look, the first in line first."""
    line = evidence.line(record) if rules.succession and record is not None and not record.closed else ()
    return [place for place in line if place.id not in evidence.gone and place.name not in evidence.left and place != evidence.at]

"""The rules by which a node keeps to the store of its job, looks at another one, moves there, or takes over. Pure.

``decide`` is the list of the rules; the functions below it are their conditions and what they need. See docs/decisions/0020.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from elastirun.rendezvous.failover.evidence import Evidence, StoreSearch
from elastirun.rendezvous.failover.succession import IN_LINE, take_over
from elastirun.rendezvous.peers import quorum
from elastirun.rendezvous.rules import Rules
from elastirun.rendezvous.wire.actions import Change
from elastirun.rendezvous.wire.events import Synced
from elastirun.rendezvous.wire.records import NodeRow, Place, Quorum, RoundRecord, Vote

LATE = 1.0  # seconds for which an owner without a guard's word waits for more nodes: the others doubt at about the same time
PATIENCE = 2.0  # seconds in an undecided store before its nodes look elsewhere, which may hang for a second
CLAIM_AGAIN = 0.3  # seconds between two looks where the job was started, while an owner waits for those that are about to come
SILENT_AGAIN = 2.0  # seconds between two looks at a store that did not answer: such a look may hang for a second
Rows = Mapping[str, NodeRow]  # by node id


@dataclass(frozen=True)
class Stay:
    """Keep to the store in use."""

    reason: str


@dataclass(frozen=True)
class Probe:
    """Look at the store of ``place`` at the time ``due``.

    ``place`` None: look where the job was started, and write ``claim`` there if there is one.
    """

    reason: str
    place: Place | None
    due: float
    claim: Change | None = None


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
class StoreView:
    """The stores as the node ``me`` sees them now.

    ``rows``: as they were read last in the store in use. ``silent_since``: when that one answered last; None: it answers. ``stays``: this
    node is not about to leave. ``answer``: to a look at the store of ``place`` (None: where the job was started), if it has just come.
    """

    me: str
    rules: Rules
    rows: Rows
    silent_since: float | None = None
    stays: bool = True
    place: Place | None = None
    answer: Synced | None = None


@dataclass(frozen=True)
class Case:
    """The values that the conditions of the rules are made of: the arguments of ``decide``."""

    record: RoundRecord
    evidence: Evidence
    view: StoreView
    now: float


def decide(record: RoundRecord | None, evidence: Evidence, view: StoreView, now: float) -> Decision:
    """Return what this node does about its store, and why: the first of these rules whose condition is true decides.

    ``record``: of the job, as this node has known it. ``evidence``: as it was before the ``answer`` in ``view``. An answer is a reason to
    move or to stay; without one this node looks at other stores, or takes over.

    A node gives up the store in use only when the end of its host is proven, when another store has taken over, or, with a majority, when
    the owner of the other store and this node both doubt that the host lives. The owner of an undecided store gives it up only for one
    that is before its own in line, so that no two owners change places. Whoever waits in such a store leaves it only after its owner.
    """
    if record is None:
        return Stay("this node has read no round record yet, so it knows of no standby store")
    case, place, answer = Case(record, evidence, view, now), view.place, view.answer
    if answer is None:
        return (
            ((write := change(case)) and TakeOver("enough nodes have come to the store of this node, and no other run has begun", write))
            or (not searches(case) and Stay("the store in use is not lost, or there is no other store to look at"))
            or (claims(case) and Probe("enough nodes have come, but another run may begin", None, claim_due(case), claim(case)))
            or Probe("the store in use is lost, and another one may have taken over", next_place(case), evidence.search.due)
        )
    if host_is_back(case, answer):
        return Move("the host that was given up writes again, and the undecided store in use can decide nothing", place, back=True)
    if place is None:
        return Stay("no store takes over where the job was started")
    case = replace(case, evidence=evidence.looked(place, answer, record))
    return (
        (case.evidence.verdict(record) and Stay("a guard has brought the verdict on the job"))
        or (is_later(answer.round, record) and Move("that store has taken over: its record has a later term", place, decided=True))
        or (answer.round is not None and Stay("the record in that store is of another run, or of no later term"))
        or (trusts_host(case) and Stay("nothing shows that the host of the store in use is lost"))
        or (opens(case, place, answer) and Move("the host is lost, and all before this node in line are away", place))
        or (place.id == view.me and Stay("a node before this one in line may take over, or too few doubt with it"))
        or (not quorum.is_there(answer.rows.get(place.id)) and Stay("the owner of that store is not there"))
        or (is_free(case) and Move("the host is lost, and the owner of that store is there", place))
        or (precedes_own(case, place) and Move("this node waits in its own store, and that one is before it in line", place))
        or (owner_has_come(case, answer) and Move("the owner of the undecided store in use has gone there", place))
        or Stay("the undecided store in use may still take over")
    )


# -- without an answer: look, or take over --------------------------------------------------------------------------------------


def searches(case: Case) -> bool:
    """Return whether this node looks for another store: it waits in an undecided one, or the one in use is lost and there are others."""
    evidence, lost = case.evidence, case.view.silent_since is not None or case.evidence.minority_since is not None
    return evidence.undecided or (lost and bool(places(case.record, evidence, case.view.rules)))


def doubts(case: Case) -> bool:
    """Return whether this node would give up the store without proof that its host has died, if enough others would as well."""
    rules, silent = case.view.rules, case.view.silent_since is not None
    since = case.view.silent_since if silent else case.evidence.minority_since
    patience = 0.0 if case.evidence.is_replaced else rules.doubt if silent else rules.expire
    return rules.majority and since is not None and case.now - since >= patience


def searched(case: Case) -> Evidence:
    """Return the evidence with the search as it is now: it has begun, goes on, or is over."""
    unreached = case.evidence.unreached if case.evidence.undecided else case.view.silent_since is not None
    search = case.evidence.search.go_on(doubts(case), case.now, PATIENCE * case.evidence.undecided) if searches(case) else StoreSearch()
    same = (unreached, search) == (case.evidence.unreached, case.evidence.search)
    return case.evidence if same else replace(case.evidence, unreached=unreached, search=search)


def places(record: RoundRecord | None, evidence: Evidence, rules: Rules) -> list[Place]:
    """Return the standby stores worth a look, the first in line first."""
    line = evidence.line(record) if rules.succession and record is not None and not record.closed else ()
    return [place for place in line if place.id not in evidence.gone and place.name not in evidence.left and place != evidence.at]


def next_place(case: Case) -> Place | None:
    """Return the place of the next look: mostly one of those up to the first that answers, every fourth time one of the others."""
    evidence, turn = case.evidence, case.evidence.search.turn
    line = places(case.record, evidence, case.view.rules)
    count = next((k for k, place in enumerate(line, 1) if place.name not in evidence.silent_since), len(line))
    near, others = line[:count], [*line[count:], *dict.fromkeys([None, evidence.before] if evidence.undecided else [])]
    near = [place for place in near if is_worth_a_look(case, place)] or near
    others = [place for place in others if is_worth_a_look(case, place)]
    if others and (not near or turn % 4 == 3):
        return others[turn // 4 % len(others)]
    return near[turn % len(near)] if near else None


def is_worth_a_look(case: Case, place: Place | None) -> bool:
    """Return whether a look at the store of ``place`` may find something: it answers, or was not asked for a while."""
    silent = case.evidence.start_is_clear if place is None else place.name in case.evidence.silent_since
    return not silent or case.now >= case.evidence.looked_at.get(place.name if place else "", -math.inf) + SILENT_AGAIN


def claims(case: Case) -> bool:
    """Return whether this node would take over, if no other run of the job has begun where it was started.

    A node that is about to leave, and that is alone, sends no newcomer to its store: it takes none over.
    """
    alone = not any(quorum.is_there(row) for row in case.view.rows.values() if row.id != case.view.me)
    return (case.view.stays or not alone) and not case.evidence.start_is_clear and needed(case) is not None


def claim_due(case: Case) -> float:
    """Return the time of the next look where the job was started."""
    return case.evidence.looked_at.get("", case.now) + CLAIM_AGAIN if waits_for_more(case) else case.now


def claim(case: Case) -> Change | None:
    """Return the write that keeps another run from forming its first round where the job was started; None: no run is about to."""
    start, at = case.evidence.start, case.evidence.at
    if start is None or at is None or start.round > 0 or start.moved == at:
        return None
    return Change(start, replace(start, version=start.version + 1, moved=replace(at, run=case.record.store_id)))


def needed(case: Case) -> tuple[Quorum, ...] | None:
    """Return what the next round in this node's own standby store needs; None: it may not take over that store, or not yet.

    When the guard of the host has written that the host has ended, the members of the round that it has named are counted without the
    host, so that all owners count in the same round. Some nodes may know a newer round, which the host has never read; no worker of
    it has started. Without such a word only a majority may go on, and not if all of it has succeeded: the host may say that the job
    has.
    """
    evidence, rules, rows, at = case.evidence, case.view.rules, case.view.rows, case.evidence.at
    known, word = evidence.known, evidence.word.record if evidence.word is not None else None
    if not evidence.undecided or at is None or at.id != case.view.me or known is None:
        return None
    here, proven = counted(case, known), word is not None and word.host == known.host
    if at.id not in here:
        return None
    if word is not None and proven:
        asked = quorum.asked(word, rows) if rules.majority else word.quorums[-1:]
        asked = (*asked[:-1], *(quorum.without(last, word.host) for last in asked[-1:]))
    elif rules.majority:
        asked = quorum.asked(known, rows)
    else:
        return None
    some = any(i in here and (proven or rows[i].succeeded != known.round) for q in asked[-1:] for i in q.ids)
    return asked if some and all(quorum.is_met(q, here, ended(case)) for q in asked) else None


def ended(case: Case) -> frozenset[str]:
    """Return the nodes that have ended: by proof, or by their rows in the store in use."""
    return case.evidence.gone | quorum.left(case.view.rows.values())


def counted(case: Case, known: RoundRecord) -> set[str]:
    """Return the nodes that count in this node's own undecided store, for the store that ``known`` is of.

    Not those that voted about an earlier one: they may have gone on to ``known``'s store, and count in another undecided one by now.
    """
    there = {row.id for row in case.view.rows.values() if quorum.is_there(row) and row.id not in case.evidence.gone}
    return {i for i in there if i == case.view.me or case.evidence.terms.get(i) == known.term}


def waits_for_more(case: Case) -> bool:
    """Return whether the owner waits for those that are about to come. A node that has no proof of an end cannot know who that is."""
    known, gone = case.evidence.known, case.evidence.gone
    if known is None or known.host in gone or case.now >= (case.evidence.undecided_since or 0.0) + LATE:
        return False
    here = {row.id for row in case.view.rows.values() if quorum.is_there(row)}
    return not {m.id for m in known.members} <= here | gone | {known.host}


def change(case: Case) -> Change | None:
    """Return the write that makes this node's own standby store the one in use; None: it may not take over, or not yet.

    Before it takes over, an owner has asked where the job was started.
    """
    evidence, me, known, needs = case.evidence, case.view.me, case.evidence.known, needed(case)
    if known is None or needs is None or not evidence.start_is_clear or not case.view.stays or waits_for_more(case):
        return None
    lost = ended(case) if known.host in evidence.gone else {m.id for m in known.members} - counted(case, known)
    turn = next((k for k, place in enumerate(evidence.line(known), 1) if place.id == me), IN_LINE + 1)
    ran = evidence.ran[1] if evidence.ran[0] == known.fence else 0.0
    return Change(None, take_over(known, me, lost, quorum.noted(needs, ended(case)), turn, ran))


# -- with the answer to a look: move, or stay ----------------------------------------------------------------------------------


def host_is_back(case: Case, answer: Synced) -> bool:
    """Return whether the host that this node has given up has written in its store since, where this look was.

    Only from an undecided store that can decide nothing any more: from its own, where too few have come, and which it ends so, or from
    that of another node whose row says that it has ended it. Who gave up a host that did answer, because too few could reach it, goes
    back when a round has formed there.
    """
    record, evidence, place, found = case.record, case.evidence, case.view.place, answer.round
    at, known, seq = evidence.at, evidence.known, evidence.host_seq
    if not evidence.undecided or at is None or place != evidence.before or found is None or known is None or known.host in evidence.gone:
        return False
    if place is not None and place.id == case.view.me:  # it has ended that one
        return False
    host = answer.rows.get(known.host)
    lives = host is not None and seq is not None and host.seq > seq
    same = found.store_id == record.store_id and found.term == known.term and found.moved is None
    newer = found.version >= record.version and (evidence.unreached or found.round > record.round)
    return lives and same and newer and (needed(case) is None if at.id == case.view.me else has_ended(at, answer))


def is_later(found: RoundRecord | None, record: RoundRecord) -> bool:
    """Return whether ``found`` is of the same run of the job as ``record``, and of a later term."""
    return found is not None and found.store_id == record.store_id and found.term > record.term


def trusts_host(case: Case) -> bool:
    """Return whether this node has no reason to give up the host of the store in use: neither proof of its end, nor doubt."""
    return not (case.record.host in case.evidence.gone or case.evidence.search.doubts or case.evidence.undecided)


def opens(case: Case, place: Place, answer: Synced) -> bool:
    """Return whether this node opens its own standby store: all before it in line are away, and it is not alone with its doubt."""
    enough = case.record.host in case.evidence.gone or case.evidence.undecided or others_doubt(case, answer.votes)
    return place.id == case.view.me and is_free(case) and enough and all(is_away(case, one) for one in before(case, place))


def before(case: Case, place: Place) -> list[Place]:
    """Return the stores before that of ``place`` in line; all if it is not in line. This node waits for none that it has left."""
    order = [one for one in case.evidence.line(case.record) if one.name not in case.evidence.left]
    return order[: order.index(place)] if place in order else order


def is_away(case: Case, place: Place) -> bool:
    """Return whether the owner of the store ``place`` is gone, or has not answered there for so long that nobody waits for it."""
    silent_since = case.evidence.silent_since.get(place.name, case.now)
    return place.id in case.evidence.gone or case.now - silent_since >= case.view.rules.expire


def others_doubt(case: Case, votes: tuple[Vote, ...]) -> bool:
    """Return whether enough nodes to go on have voted for the round of ``record``, so that none gives up the store alone.

    Or for the one before: the host may be lost while it forms a round, which some have read. The last word of a node that leaves is no
    doubt, and counts only as its end.
    This is the vote before the vote of Raft (Ongaro 2014, section 9.6).
    """
    record = case.record
    recent = [v for v in votes if v.id not in v.gone and v.record.term == record.term and v.record.round >= record.round - 1]
    same = {vote.id for vote in recent} | {case.view.me}
    return bool(record.quorums) and all(quorum.is_met(q, same, case.evidence.gone) for q in record.quorums[-1:])


def is_free(case: Case) -> bool:
    """Return whether this node waits in no undecided store whose owner may live."""
    at = case.evidence.at
    return not case.evidence.undecided or at is None or at.id in case.evidence.gone


def precedes_own(case: Case, place: Place) -> bool:
    """Return whether this node waits in its own store, and that of ``place`` is before it in line: no two owners change places."""
    at = case.evidence.at
    return at is not None and at.id == case.view.me and at not in before(case, place)


def owner_has_come(case: Case, answer: Synced) -> bool:
    """Return whether this node waits in the store of another node, which has ended it and is where this look was."""
    at = case.evidence.at
    return at is not None and at.id != case.view.me and quorum.is_there(answer.rows.get(at.id)) and has_ended(at, answer)


def has_ended(place: Place, answer: Synced) -> bool:
    """Return whether the owner of the undecided store ``place`` has ended it, by its row in another store.

    A row that names ``place`` was written before the owner came there.
    """
    owner = answer.rows.get(place.id)
    return owner is not None and owner.standby != place.port

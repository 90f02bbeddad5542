"""Failover: the place of the store that this node uses. It keeps the evidence, asks ``decide``, and makes the exchanges. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from elastirun.rendezvous.failover.decide import Case, Decision, Move, Probe, Rows, Stay, StoreView, TakeOver, decide, places, searched
from elastirun.rendezvous.failover.evidence import Evidence, StoreSearch
from elastirun.rendezvous.failover.succession import another_run, vote
from elastirun.rendezvous.peers.liveness import Since
from elastirun.rendezvous.peers.polling import PER_NODE
from elastirun.rendezvous.rules import Rules
from elastirun.rendezvous.wire.actions import Change, Sync
from elastirun.rendezvous.wire.events import Synced
from elastirun.rendezvous.wire.records import Place, RoundRecord, Vote

QUICKEST_LOOK = 0.02  # seconds between two looks at standby stores, just after the store was lost: a guard needs about 0.1 s
LOOKS_OF_WAIT = 0.1  # later, the time between two looks as a part of the time since the store was lost; at most a beat
OVERRULED_AGAIN = 5.0  # seconds at most from one word of another run to the next, of those that count together
TOO_FEW = "too few nodes of the last round can be reached, and the others may go on without this node"


@dataclass
class Failover:
    """The place of the store that the node ``me`` uses, and its search for another one."""

    me: str
    rules: Rules
    evidence: Evidence = Evidence()
    votes: tuple[Vote, ...] = ()  # to be written into the store in use; empty: none is, or they are there
    _probe: Probe | None = None  # the look that is due, or the next one
    _unreachable_until: tuple[Place | None, float] = (None, 0.0)  # where nobody answered this newcomer; until when it does not try again
    _redirected: Since = field(default_factory=lambda: Since(-math.inf))  # where the record sends this newcomer
    _overruled: tuple[str, float, float] | None = None  # another run whose word stands where this one's should; found since, and last, when

    @property
    def waits(self) -> tuple[str, float] | None:
        """Return in words what this node waits for although the store in use answers, and since when; None: for nothing."""
        if self.evidence.undecided_since is not None:
            return "too few nodes have come to the store that is to take over", self.evidence.undecided_since
        if self.evidence.minority_since is not None:
            return TOO_FEW, self.evidence.minority_since
        return None

    def note_minority(self, minority: bool, now: float) -> None:
        """Note whether too few members of an earlier round are here to form the next one."""
        self.evidence = replace(self.evidence, minority_since=(self.evidence.minority_since or now) if minority else None)

    def replaced(self) -> None:
        """Note that the store in use is gone: an empty one answers in its place, where a first round may form soon."""
        self.evidence = replace(self.evidence, is_replaced=True)

    def unanswered(self, place: Place | None, now: float) -> None:
        """Note that a store was asked and did not answer; None: that where the job was started."""
        self.evidence = self.evidence.unanswered(place, now)

    def stood_still(self, now: float, seconds: float) -> None:
        """Note that this agent was suspended."""
        self.evidence, self._overruled = self.evidence.suspended(now, seconds), None

    def notice(self, record: RoundRecord | None) -> Vote | None:
        """Return the vote that this node's guard writes into the standby stores when this agent has died; None: it writes none.

        The word of the store's host moves the store. That of another member counts where the store cannot be reached: both may have died.
        """
        at, known = self.evidence.at, self.evidence.known if self.evidence.undecided and self.evidence.known is not None else record
        serves = record is not None and self.me == (at.id if at else record.host)
        if known is None or not self.rules.succession or not (serves or known.index(self.me) is not None):
            return None
        return vote(self.me, known, self.evidence.gone | {self.me})

    def places(self, record: RoundRecord | None) -> list[Place]:
        """Return the standby stores worth a look, the first in line first."""
        return places(record, self.evidence, self.rules)

    # -- decisions --------------------------------------------------------------------------------------------------------

    def search(self, record: RoundRecord | None, silent_since: float | None, rows: Rows, now: float, stays: bool = True) -> float | None:
        """Begin the search for another store, go on with it, or end it. Return the time of the next look; None: none is needed."""
        view = StoreView(self.me, self.rules, rows, silent_since, stays)
        self.evidence = searched(Case(record, self.evidence, view, now)) if record else replace(self.evidence, search=StoreSearch())
        decision = decide(record, self.evidence, view, now)
        self._probe = decision if isinstance(decision, Probe) else None
        return None if isinstance(decision, Stay) else self._probe.due if self._probe else self.evidence.search.due

    def look(self, record: RoundRecord, now: float) -> Sync:
        """Return the exchange that looks at the next store. It asks for little: every node of a large job does it at once.

        A node that waits in an undecided store also looks where the job was started, where another run of it may have begun. The owner
        of the store does so before it takes over, and keeps such a run from forming its first round.
        """
        probe, evidence = self._probe, self.evidence
        assert probe is not None and evidence.search.since is not None
        quickest = QUICKEST_LOOK + PER_NODE * len(record.members)
        pause = min(max(quickest, LOOKS_OF_WAIT * (now - evidence.search.since)), self.rules.beat)
        self.evidence = evidence.looks(probe.place, now, now + pause)
        place, here = probe.place, (evidence.at.id,) if evidence.at else ()
        if probe.claim is not None:
            return Sync(change=probe.claim, rows=(), look=True)
        if place is None:
            return Sync(rows=tuple(dict.fromkeys(((evidence.known or record).host, *here))), look=True)
        few = dict.fromkeys((record.host, *here, *(p.id for p in evidence.line(record))))  # those in line may have died with the host
        voters = tuple(m.id for m in record.members) if evidence.search.doubts and place.id == self.me else tuple(few)
        votes = (Vote(self.me, record),) if evidence.search.doubts and not evidence.undecided else ()
        return Sync(rows=(place.id, *here), voters=voters, votes=votes, at=place, look=True)

    def looked(self, place: Place | None, answer: Synced, record: RoundRecord, rows: Rows) -> Decision:
        """Take in the ``answer`` to a look at the store of ``place``; None: where the job was started. Return whether this node moves.

        ``rows``: as they were read last in the store in use.
        """
        view = StoreView(self.me, self.rules, rows, place=place, answer=answer)
        decision = decide(record, self.evidence, view, answer.now)
        if not (isinstance(decision, Move) and decision.back):
            self.evidence = self.evidence.looked(place, answer, record)
        return decision

    def take_over(self, rows: Rows, now: float) -> Change | None:
        """Return the write that makes this node's own standby store the one in use; None: it may not take over, or not yet."""
        decision = decide(self.evidence.known, self.evidence, StoreView(self.me, self.rules, rows), now)
        return decision.change if isinstance(decision, TakeOver) else None

    # -- the next store -----------------------------------------------------------------------------------------------------

    def move(self, place: Place, record: RoundRecord, rows: Rows, decided: bool, now: float, ran: float = 0.0) -> RoundRecord:
        """Give up the store in use for that of ``place``. Return the newest record that was read anywhere.

        ``record``, ``rows``: as this node has read them last in the store in use. ``ran``: seconds for which it has known the round.
        """
        since = None if decided else self.evidence.undecided_since or now
        self.evidence, self._overruled = self.evidence.moved(place, since, record, rows, ran), None
        known = self.evidence.known or record
        self.votes = () if decided else self._words(known)
        return known

    def go_back(self) -> Place | None:
        """Give up the undecided store in use for the one before it. Return that one's place."""
        self.votes, self._overruled, self.evidence = (), None, self.evidence.went_back()
        return self.evidence.at

    def follow(self, place: Place) -> None:
        """Use the store of ``place``, where this newcomer was sent."""
        self.evidence = replace(self.evidence, at=place)

    def turn_back(self, now: float) -> None:
        """Ask again where the job was started: there is no job where this newcomer was sent. It is sent there again after a while.

        When a new run may begin without that place, it stays for long: nodes that come and go in turn would meet for no last call.
        """
        in_vain = now >= self._redirected.since + self.rules.longest_alone
        pause = self.rules.longest_alone if in_vain else 2 * self.rules.expire
        self.evidence, self._unreachable_until = replace(self.evidence, at=None), (self.evidence.at, now + pause)

    def is_sent(self, found: RoundRecord | None, now: float) -> Place | None:
        """Return where the record ``found``, read where the job was started, sends this node; None: nowhere.

        It sends a newcomer if no round has formed there, and all others if their job has gone on elsewhere without its host.
        """
        if not self.rules.succession or found is None or found.moved in (None, self.evidence.at):
            return None
        self._redirected.see(found.moved, now)
        place, until = self._unreachable_until
        return None if found.moved == place and now < until else found.moved

    def redirected_since(self, record: RoundRecord) -> float | None:
        """Return since when ``record`` has sent this node to the same place, where nobody has answered; None: it sends nobody."""
        return self._redirected.since if record.moved is not None else None

    # -- the store in use -----------------------------------------------------------------------------------------------------

    def complete(self, sync: Sync, record: RoundRecord | None, rows: Rows) -> Sync:
        """Return the exchange with the store in use, in which ``rows`` were read last.

        In an undecided store the owner reads all that the others bring, they read its row and vote. When it has taken over, and too few are
        there to go on, it reads the words of guards, which may have come late.
        """
        sync, evidence, at = replace(sync, at=self.evidence.at, votes=self.votes), self.evidence, self.evidence.at
        if at is None or record is None:
            return sync
        if at.id != self.me:
            return replace(sync, rows=(at.id,), voters=(at.id,)) if evidence.undecided else sync
        if not evidence.undecided:
            few = evidence.minority_since is not None
            away = {i: None for q in record.quorums if few for i in q.ids if i not in rows and i not in evidence.gone}
            return replace(sync, voters=tuple(away))
        brought = [record, *([evidence.known] if evidence.known else []), *([evidence.word.record] if evidence.word else [])]
        return replace(sync, rows=None, voters=tuple({m.id: None for found in brought for m in found.members}))

    def answered(self, asked: Sync, answer: Synced, record: RoundRecord | None) -> None:
        """Take in the answer of the store in use to what it was ``asked``. ``record``: of the job, as this node has known it.

        Who reads of a newer term in an undecided store votes again: it counts only for the term that it knew while it was there.
        """
        before = self.evidence.known
        self.evidence = self.evidence.answered(answer, record)
        known = self.evidence.known
        self.votes = () if asked.votes == self.votes else self.votes
        if self.evidence.undecided and known is not None and (before is None or known.term > before.term):
            self.votes = self._words(known)

    def _words(self, known: RoundRecord) -> tuple[Vote, ...]:
        """Return what this node writes into an undecided store: a vote with the newest record, ``known``, and the word of the guard."""
        own, word = vote(self.me, known, self.evidence.gone), self.evidence.word
        return (own,) if word is None else (word, own)

    def forward(self, record: RoundRecord | None) -> tuple[Place, RoundRecord | None] | None:
        """Return where this node, which has taken over the store, has it, and the record there; None: it has not, or not yet.

        Without the record: too few nodes are there, and another node may have taken over as well, whose word is not written over.
        """
        at = self.evidence.at
        if at is None or at.id != self.me or self.evidence.undecided or record is None or record.closed:
            return None
        return replace(at, run=record.store_id), record if self.waits is None else None

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

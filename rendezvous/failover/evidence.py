"""Evidence: what this node has seen of the stores that its job may be in. Frozen values; each observation returns the next one. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elastirun.rendezvous.failover.succession import newest, standbys
from elastirun.rendezvous.peers import quorum
from elastirun.rendezvous.wire.events import Synced
from elastirun.rendezvous.wire.records import NodeRow, Place, RoundRecord, Vote


@dataclass(frozen=True)
class StoreSearch:
    """The search for another store. Times in seconds of this node's clock."""

    since: float | None = None  # None: there is no search
    due: float = -math.inf  # the time of the next look
    turn: int = 0  # looks since the search began
    doubts: bool = False  # this node would give up the store without proof that its host has died

    def go_on(self, doubts: bool, now: float, pause: float) -> StoreSearch:
        """Return the search as it goes on, or begins ``pause`` seconds before its first look."""
        if doubts and not self.doubts:
            return StoreSearch(now, now, doubts=True)  # the others look now, too
        return StoreSearch(now, now + pause) if self.since is None else replace(self, doubts=doubts)


@dataclass(frozen=True)
class Evidence:
    """All that one node has seen that ``decide`` needs. Times in seconds of this node's clock."""

    # votes
    gone: frozenset[str] = frozenset()  # nodes whose end is proven
    known: RoundRecord | None = None  # the newest record that was read in any vote
    word: Vote | None = None  # the newest that the guard of a dead host has brought: no later round of that host has started
    terms: Mapping[str, int] = field(default_factory=dict)  # by node: the term of the record in its vote, in the undecided store in use
    # the store in use, and those before it
    at: Place | None = None  # the store in use; None: the one that the job was started with
    undecided_since: float | None = None  # since when this node waits in a standby store that has no round record yet
    minority_since: float | None = None  # since when too few members of an earlier round are here to form the next one
    is_replaced: bool = False  # a store without this job answers where the store in use was
    ran: tuple[str, float] = ("", 0.0)  # of the round that this node has given up: the fence token, and for how many seconds it was known
    left: frozenset[str] = frozenset()  # names of the stores that this node has given up: what it has written there still stands
    before: Place | None = None  # the last store in use that had a round record; None: where the job was started
    unreached: bool = False  # the store of ``before`` did not answer when this node gave it up
    host_seq: int | None = None  # ``seq`` of the row of that store's host, as it was read there last; None: no such row was read
    # looks at other stores
    search: StoreSearch = StoreSearch()
    silent_since: Mapping[str, float] = field(default_factory=dict)  # by the name of a store: since when it has not answered
    looked_at: Mapping[str, float] = field(default_factory=dict)  # by name, "" where the job was started: when this node looked there last
    start: RoundRecord | None = None  # what a store where the job was started said last; None: nothing
    start_is_clear: bool = False  # no other run of the job can form a round there any more, as far as it answers
    was_suspended: bool = False  # since the last look began: what that has found may not be so any more

    @property
    def undecided(self) -> bool:
        """Return whether this node waits in a standby store that nobody has taken over yet."""
        return self.undecided_since is not None

    def line(self, record: RoundRecord | None) -> tuple[Place, ...]:
        """Return the standby stores in line: those of the round that the host's guard has named, then those of the round in ``record``.

        Whoever has read a round that the host has not, or has not read its last one, so finds those that have.
        """
        if record is None or self.word is None or self.word.record.host != record.host:
            return standbys(record)
        return tuple(dict.fromkeys((*standbys(self.word.record), *standbys(record))))

    def verdict(self, record: RoundRecord) -> RoundRecord | None:
        """Return the record of the job of ``record`` with its verdict, which the host's guard has brought; None: there is none."""
        known = self.known
        return known if known is not None and known.closed is not None and known.store_id == record.store_id else None

    # -- answers ------------------------------------------------------------------------------------------------------------

    def heard(self, found: tuple[Vote, ...], record: RoundRecord | None) -> Evidence:
        """Take in votes about the job of ``record``, and none of another run of it. The record in a vote may name ended nodes, too.

        Who says that a host has died knows the newest record that this host knew: its guard's word brings both.
        """
        votes = [vote for vote in found if record is not None and vote.record.store_id == record.store_id]
        known, word = self.known, self.word
        for vote in votes:
            known = newest(vote.record, known)
            if vote.id == vote.record.host and vote.id in vote.gone:
                word = vote if word is None or newest(vote.record, word.record) is vote.record else word
        ended = {i for vote in votes for i in (*vote.gone, *(vote.record.broken.ended if vote.record.broken else ()))}
        return replace(self, gone=self.gone | ended, known=known, word=word) if votes else self

    def answered(self, answer: Synced, record: RoundRecord | None) -> Evidence:
        """Take in an ``answer`` of the store in use. What a look where the job was started has found counts for one exchange only."""
        terms = {**self.terms, **{vote.id: vote.record.term for vote in answer.votes}}
        since = self.undecided_since if answer.round is None else None
        return replace(self.heard(answer.votes, record), terms=terms, undecided_since=since, start_is_clear=False, is_replaced=False)

    def looked(self, place: Place | None, answer: Synced, record: RoundRecord) -> Evidence:
        """Take in the ``answer`` to a look at the store of ``place``; None: where the job was started."""
        seq, found, known = self.host_seq, answer.round, self.known
        if self.undecided and place == self.before and found is not None and known is not None and known.host not in self.gone:
            seq = answer.rows[known.host].seq if known.host in answer.rows else seq
        if place is None:
            clear = found is None or found.moved == self.at or found.store_id == record.store_id
            return replace(self, host_seq=seq, start=found, start_is_clear=clear and not self.was_suspended)
        silent = {name: since for name, since in self.silent_since.items() if name != place.name}
        return replace(self, host_seq=seq, silent_since=silent).heard(answer.votes, record)

    def unanswered(self, place: Place | None, now: float) -> Evidence:
        """Take in that a look at the store of ``place`` got no answer; None: that where the job was started."""
        if place is None:
            return replace(self, start_is_clear=not self.was_suspended)
        return replace(self, silent_since={place.name: now, **self.silent_since})

    # -- what this node does --------------------------------------------------------------------------------------------------

    def looks(self, place: Place | None, now: float, due: float) -> Evidence:
        """Note that a look at the store of ``place`` begins, and when the next one is ``due``."""
        looked_at = {**self.looked_at, place.name if place else "": now}
        search = replace(self.search, due=due, turn=self.search.turn + 1)
        return replace(self, search=search, looked_at=looked_at, was_suspended=False)

    def moved(self, place: Place, undecided_since: float | None, record: RoundRecord, rows: Mapping[str, NodeRow], ran: float) -> Evidence:
        """Note that this node gives up the store in use, where it has read ``record`` and ``rows`` last, for that of ``place``.

        ``ran``: seconds for which it has known the round.
        """
        known = self.known if self.undecided and self.known else newest(record, self.known)  # undecided: no store holds ``record``
        ended, given_up = self.gone | quorum.left(rows.values()), (record.fence, ran) if record.open else self.ran
        moved = replace(self, gone=ended, known=known, terms={}, ran=given_up).uses(place, undecided_since)
        host = rows.get(record.host)
        return moved if self.undecided else replace(moved, before=self.at, host_seq=host.seq if host is not None else None)

    def went_back(self) -> Evidence:
        """Note that this node gives up the undecided store in use for the one before it."""
        back = self.uses(self.before, None)
        return replace(back, left=back.left - {self.before.name}) if self.before else back

    def uses(self, place: Place | None, undecided_since: float | None) -> Evidence:
        """Note that the store of ``place`` is in use. ``undecided_since``: as the field of that name."""
        left = self.left | {self.at.name} if self.at else self.left
        moved = replace(self, at=place, undecided_since=undecided_since, left=left, minority_since=None, is_replaced=False)
        return replace(moved, search=StoreSearch(), silent_since={}, start=None, start_is_clear=False)

    def suspended(self, now: float, seconds: float) -> Evidence:
        """Note that this agent was suspended: that time is no time of waiting, and other stores may have stood still as well."""

        def later(since: float | None) -> float | None:
            return None if since is None else min(now, since + seconds)

        search = replace(self.search, since=later(self.search.since))
        waited = replace(self, undecided_since=later(self.undecided_since), minority_since=later(self.minority_since), search=search)
        return replace(waited, silent_since={}, was_suspended=True, start_is_clear=False)  # another run may have begun there meanwhile

"""The sync protocol: turns one ``Sync`` into store operations. See docs/rendezvous.md.

A generator yields the operations and the caller executes them, so the protocol itself does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from elastirun.errors import BadRecord, StoreError, UnreadableMembers, UnreadableRound
from elastirun.rendezvous.wire.actions import Change, Put, Sync
from elastirun.rendezvous.wire.codec import MAX_TEXT, Codec, clip
from elastirun.rendezvous.wire.events import Synced
from elastirun.rendezvous.wire.lists import MemberLists
from elastirun.rendezvous.wire.records import MemberList, NodeRow, Place, RoundRecord, Status, Vote

KEPT = "elastirun/"  # prefix of every key of the agents, in a store that workers share
OWNER = "elastirun/owner"  # in a standby store: its ``Place.name``; a later agent may serve another one at the same port
CLEAR_LIMIT = 1.5  # seconds; half of EXCHANGE_LIMIT, so that an exchange that was given up deletes nothing any more
MAX_ROW = 256 << 10  # bytes; enough for 30 stderr lines of each of eight failed workers


@dataclass(frozen=True)
class PutAndGet:
    """The only operation of most exchanges: write ``key``, then read ``keys``. See ``Store.put_if_and_get``."""

    key: str
    expected: bytes | None
    value: bytes
    keys: tuple[str, ...]

    def __call__(self, store: Any) -> Any:
        return store.put_if_and_get(self.key, self.expected, self.value, self.keys)


Operation = Callable[[Any], Any]  # of a ``stores.base.Store``
Steps = Generator[Operation, Any, Any]  # takes each operation's result, returns its own


def _get(keys: Sequence[str]) -> Operation:
    return lambda store: store.get(keys)


def _put_if(key: str, expected: bytes | None, value: bytes) -> Operation:
    return lambda store: store.put_if(key, expected, value)


def _delete(key: str) -> Operation:
    return lambda store: store.delete(key)


def _list(record: RoundRecord) -> MemberList:
    return MemberList(record.members, record.quorums)


def execute(steps: Steps, store: Any, answered: Callable[[], None] = lambda: None) -> Any:
    """Execute the operations of ``steps`` on ``store``, and return what ``steps`` returns. Errors: ``StoreError``.

    ``answered`` is called after each operation.
    """
    answer: Any = None
    while True:
        try:
            operation = steps.send(answer)
        except StopIteration as done:
            return done.value
        answer = operation(store)
        answered()


def _is_earlier(record: RoundRecord | None, job: RoundRecord | None) -> bool:
    """Return whether ``record`` is that of a store of ``job`` from which another node has taken over."""
    return record is not None and job is not None and record.store_id == job.store_id and record.term < job.term


class SyncProtocol:
    """Turns each ``Sync`` into store operations. ``job`` is the prefix of every key, ``me`` this node's id.

    What is signed for one store (``Codec.store``) means nothing in another one. Only lists of members hold everywhere, because a signed
    record has the digest of their bytes (lists.py).
    """

    def __init__(self, job: str, me: str, codec: Codec, clock: Callable[[], float]) -> None:
        self._job = job
        self.round_key = job + "round"
        self.moved_key = job + "moved"  # in a standby store: where the store in use is
        self.vote_keys = (f"{job}vote/", f"{job}members/")  # the keys that ``put_vote`` writes begin so
        self._me = me
        self._codec = codec
        self._lists = MemberLists(replace(codec, store=""), job + "members")
        self._clock = clock
        self._newest: RoundRecord | None = None  # record that was read
        self._voted: set[str] = set()  # digests of the lists that were written beside votes: no list is deleted while votes count
        self._whole: tuple[RoundRecord | None, RoundRecord | None] = None, None  # the record as stored, and the same with its members
        self._known: dict[str, tuple[bytes, Any]] = {}  # bytes and record by key: parsing 1,000 unchanged rows again would cost 50 ms

    def fresh(self, store: str = "") -> SyncProtocol:
        """Return a protocol for another connection, to the ``store`` that ``Codec.store`` describes.

        It knows the newest record and the lists of members, and shares no mutable state.
        """
        other = type(self)(self._job, self._me, replace(self._codec, store=store), self._clock)
        other._newest, other._lists = self._newest, self._lists.copy()
        return other

    def carry_out(self, store: Any, sync: Sync, started: float, answered: Callable[[], None] = lambda: None) -> Synced:
        """Execute the whole exchange on ``store``. ``answered``: see ``execute``. Errors: ``StoreError``."""
        synced: Synced = replace(execute(self.steps(sync, started), store, answered), hosting=store.hosting)
        return synced

    def steps(self, sync: Sync, started: float) -> Steps:
        """Yield the operations of the exchange in the order that ``Sync`` names; return the answer."""
        ignored: list[str] = []
        kept_alive = sync.keep_alive and (yield lambda store: store.keep_alive(self._key(self._me)))
        for vote in sync.votes:
            yield from self.put_vote(vote)
        key, everything, found = self.round_key, sync.rows is None, None
        keys = (key, *(self._key(i) for i in sorted({*(sync.rows or ()), self._me})))
        if sync.put is not None and sync.fresh:
            yield from self._put_fresh(sync.put)
        elif sync.put is not None:
            _, found = yield from self._put_row(sync.put, () if sync.change else keys)
        if sync.change is not None:
            yield from self._put_round(sync.change)
        if found is None or sync.change is not None:
            found = yield _get(keys)
        record = yield from self._parse_round(found.pop(key, None))
        if everything:
            found = yield lambda store: store.under(self._job + "node/")
        rows = self._parse_rows(found, everything, ignored)
        votes = (yield from self._read_votes(sync.voters, ignored)) if sync.voters and (record is None or record.broken) else ()
        row, last = rows.get(self._me), tuple(ignored[:4])
        return Synced(self._clock(), started, record, rows, row, False, last, kept_alive and row is not None, votes)

    def _put_fresh(self, put: Put) -> Steps:
        """Clear the store of keys that are not the agents', then write the row that says that this node is ready.

        No node may have started workers for the round yet. An earlier write of the same row, whose answer was lost, may still arrive;
        so another row is written first, over which it cannot be applied. If the earlier write has arrived already, nothing is cleared.
        Keys that are not cleared in time are left to the next exchange.
        """
        fence = replace(put.base or put.row, seq=put.row.seq, status=put.base.status if put.base else Status.JOINING)
        stands, _ = yield from self._put_row(Put(put.base, fence))
        if not stands:
            return
        if (yield lambda store: store.clear(KEPT, CLEAR_LIMIT)):
            yield from self._put_row(Put(fence, replace(put.row, seq=fence.seq + 1)))

    def _put_row(self, put: Put, keys: tuple[str, ...] = ()) -> Steps:
        """Write the row by compare-and-set, then read ``keys``. Return whether the row stands in the store now, and what was read."""
        key = self._key(self._me)
        expected = None if put.base is None else self._encode(key, put.base)
        value = self._encode(key, put.row)
        now, found = yield PutAndGet(key, expected, value, keys)
        if now is None or now == value:
            return now is not None, found
        try:
            self._parse_row(key, now)  # an earlier write of this node that was thought lost: the machine adopts it
        except BadRecord:
            now, found = yield PutAndGet(key, now, value, keys)  # somebody else has written into our row
            return now == value, found
        return False, found

    def _put_round(self, change: Change) -> Steps:
        """Write the record by compare-and-set. A new list of members is written before it, the old list is deleted after it."""
        key, base, record = self.round_key, change.base, change.record
        before = None if base is None else self._short(base)
        if record.members and (base is None or _list(base) != _list(record)):
            yield from self._put_members(_list(record))
        after = self._short(record)
        value = self._codec.encode(key, after)
        found = yield _put_if(key, None if before is None else self._encode(key, before), value)
        if found == value and before is not None and before.members_digest not in ("", after.members_digest):
            yield _delete(self._members_key(before.members_digest))
            if self._lists.any_large(before.members_digest):
                yield _delete(self._changes_key(before.members_digest))

    def scale(self, wanted: int) -> Steps:
        """Want ``wanted`` nodes from now on; 0: as many as --nnodes allows. Return the record as it was; None: there is none.

        Written is what the last read allows: if another write was first, the caller reads and tries again.
        """
        record = yield from self._read_round()
        if record is not None and record.closed is None and record.wanted != wanted:
            yield from self._put_round(Change(record, replace(record, version=record.version + 1, wanted=wanted)))
        return record

    def put_moved(self, place: Place, first: RoundRecord | None = None, job: RoundRecord | None = None, over: bool = True) -> Steps:
        """Say in a store in which no round has formed that the job's store is at ``place``. Return the record that stood there before.

        ``first``: what is written, with ``place``, where there is no record yet; None: nothing. ``job``: the record at ``place``; where an
        earlier store of that job still answers, because its host lives and was cut off, this is said in spite of its rounds. ``over``: also
        where another place stands.
        """
        record = yield from self._read_round()
        written = first if record is None else replace(record, version=record.version + 1)
        spoken_for = written is not None and written.round > 0 and not _is_earlier(record, job)
        if written is None or spoken_for or written.moved == place or (written.moved is not None and not over):
            return record
        yield from self._put_round(Change(record, replace(written, moved=place)))
        return record

    def put_place(self, place: Place, job: RoundRecord | None = None, over: bool = True) -> Steps:
        """Say in a standby store that the job's store is at ``place``: beside the records, which are for the node that takes over next.
        Return the place that stood there before.

        ``job``: the record at ``place``; where an earlier store of that job still answers, its own record says it, so that nodes that come,
        and those that are there, go on to ``place``. ``over``: also where another place stands.
        """
        record = yield from self._read_round()
        if record is not None and _is_earlier(record, job):
            if record.moved != place:
                yield from self._put_round(Change(record, replace(record, version=record.version + 1, moved=place)))
            return record.moved
        key = self.moved_key
        value = self._codec.encode(key, place)
        found = (yield _get([key])).get(key)
        if found is None or (over and found != value):
            yield _put_if(key, found, value)
        return self._place(found)

    def here(self) -> Steps:
        """Return a protocol for the store at the other end, whatever kind of store that is."""
        owner = (yield _get([OWNER])).get(OWNER, b"")
        return self.fresh(owner[:MAX_TEXT].decode("ascii", "replace"))

    def find_job(self) -> Steps:
        """Return what a store says of the job: the round record in it, and the place of the store in use. None: nothing."""
        record = yield from self._read_round()
        data = (yield _get([self.moved_key])).get(self.moved_key)
        return record, self._place(data)

    def _place(self, data: bytes | None) -> Place | None:
        """Return the place that is said in a standby store."""
        try:
            return None if data is None else self._codec.decode(self.moved_key, data, Place)
        except BadRecord as error:
            raise StoreError(f"unreadable: {error}") from None

    def _read_round(self) -> Steps:
        return (yield from self._parse_round((yield _get([self.round_key])).get(self.round_key)))

    def _put_members(self, members: MemberList) -> Steps:
        digest = self._lists.digest(members)
        key, data, changes = self._members_key(digest), self._lists.whole(digest), self._lists.changes(digest)
        found = yield _put_if(key, None, data)
        if found is not None and found != data:
            yield _put_if(key, found, data)  # somebody else has written there, or another version of zlib
        if changes:
            yield _put_if(self._changes_key(digest), None, changes)

    def put_vote(self, vote: Vote) -> Steps:
        """Write the vote over an older one of this node, with its members beside it: a thousand nodes vote for the same round.

        Return whether it stands in the store now, or a newer one: a guard's word is not lost to a doubt that arrives late.
        """
        short = self._short(vote.record)
        if vote.record.members and short.members_digest not in self._voted:
            listed = self._members_key(short.members_digest)
            if not (self._lists.any_large(short.members_digest) and (yield lambda store: store.has(listed))):
                yield from self._put_members(_list(vote.record))
            self._voted.add(short.members_digest)
        key = self._vote_key(vote.id)
        value = self._codec.encode(key, replace(vote, record=short))
        found = yield _put_if(key, None, value)
        if found is not None and found != value:
            with suppress(BadRecord):  # garbage is written over
                there = self._codec.decode(key, found, Vote)
                if (there.record.term, there.record.version) >= (vote.record.term, vote.record.version) and {*there.gone} >= {*vote.gone}:
                    return True
            found = yield _put_if(key, found, value)
        return found == value

    def _read_votes(self, voters: tuple[str, ...], ignored: list[str]) -> Steps:
        found = yield _get([self._vote_key(i) for i in voters])
        votes = []
        for key, data in found.items():
            try:
                vote = self._codec.decode(key, data, Vote)
                if self._vote_key(vote.id) != key:
                    raise BadRecord(f"{key}: the vote of another node")
                record = yield from self._whole_record(vote.record)
            except BadRecord as error:
                ignored.append(clip(str(error), 300))
                continue
            votes.append(replace(vote, record=record))
        return tuple(votes)

    def _parse_round(self, data: bytes | None) -> Steps:
        newest = self._newest
        try:
            record = None if data is None else self._decode(self.round_key, data, self._parse_short)
        except BadRecord as error:
            raise UnreadableRound(f"the round record is unreadable: {error}") from None
        try:
            old = record and newest and (record.term, record.version) < (newest.term, newest.version)
            if record and newest and old and record.store_id == newest.store_id:
                raise StoreError(f"somebody has put back an older round record: version {record.version} after {newest.version}")
            if record is not None and record.members_digest:
                if self._whole[0] is not record:
                    self._whole = record, (yield from self._whole_record(record))
                record = self._whole[1]
        except BadRecord as error:
            raise UnreadableMembers(f"the round record is unreadable: {error}") from None
        self._newest = record or newest  # a standby store, which is empty, makes nobody forget it
        return record

    def _whole_record(self, short: RoundRecord) -> Steps:
        """Return the record with the members and quorums that stand beside it. Errors: ``BadRecord``."""
        if not short.members_digest:
            return short
        found = yield from self._read_members(short.members_digest)
        return replace(short, members=found.members, quorums=found.quorums, members_digest="")

    def _read_members(self, digest: str) -> Steps:
        """Return the list: known, or made of a known one and what differs, or read whole."""
        if (known := self._lists.get(digest)) is not None:
            return known
        if self._lists.any_large():
            key = self._changes_key(digest)
            changes = (yield _get([key])).get(key)
            with suppress(BadRecord):  # somebody else has written there
                if changes and (found := self._lists.take_changes(digest, changes)) is not None:
                    return found
        key = self._members_key(digest)
        return self._lists.take(digest, (yield _get([key])).get(key, b""))

    def _short(self, record: RoundRecord) -> RoundRecord:
        """Return the record as it is stored, without the members: a thousand nodes read it twice a second."""
        if not record.members:
            return record
        return replace(record, members=(), quorums=(), members_digest=self._lists.digest(_list(record)))

    def _parse_rows(self, found: dict[str, bytes], everything: bool, ignored: list[str]) -> dict[str, NodeRow]:
        rows: dict[str, NodeRow] = {}
        for key, data in found.items():
            try:
                row = self._decode_row(key, data)
            except BadRecord as error:
                ignored.append(clip(str(error), 300))  # the key in it may be anybody's invention
                continue
            rows[row.id] = row
        if everything:
            self._known = {key: known for key, known in self._known.items() if key in found or key == self.round_key}
        return rows

    def _encode(self, key: str, record: Any) -> bytes:
        known = self._known.get(key)
        if known is None or known[1] != record:
            known = self._known[key] = (self._codec.encode(key, record), record)
        return known[0]

    def _decode_row(self, key: str, data: bytes) -> NodeRow:
        known = self._known.get(key)
        if known is not None and known[0] != data and len(data) <= MAX_ROW:
            row = self._codec.decode_again(key, data, *known)
            if row is not None:
                self._known[key] = (data, row)
        found: NodeRow = self._decode(key, data, self._parse_row)
        return found

    def _decode(self, key: str, data: bytes, parse: Callable[[str, bytes], Any]) -> Any:
        known = self._known.get(key)
        if known is None or known[0] != data:
            known = self._known[key] = (data, parse(key, data))
        return known[1]

    def _parse_short(self, key: str, data: bytes) -> RoundRecord:
        return self._codec.decode(key, data, RoundRecord)

    def _parse_row(self, key: str, data: bytes) -> NodeRow:
        if len(data) > MAX_ROW:
            raise BadRecord(f"{key}: {len(data)} bytes, more than {MAX_ROW}")
        row = self._codec.decode(key, data, NodeRow)
        if self._key(row.id) != key:
            raise BadRecord(f"{key}: the row of another node")
        return row

    def _key(self, node_id: str) -> str:
        return f"{self._job}node/{node_id}"

    def _vote_key(self, node_id: str) -> str:
        return f"{self._job}vote/{node_id}"

    def _members_key(self, digest: str) -> str:
        return f"{self._job}members/{digest}"

    def _changes_key(self, digest: str) -> str:
        return f"{self._job}members/{digest}-changes"

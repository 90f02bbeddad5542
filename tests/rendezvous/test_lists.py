"""Lists of members as bytes: compressed, as what differs from another list, and whatever somebody else may have written there."""

from __future__ import annotations

import json
import random
import zlib
from dataclasses import replace

import pytest

from elastirun.errors import BadRecord
from elastirun.rendezvous.wire import lists
from elastirun.rendezvous.wire.codec import MAX_BYTES, Codec
from elastirun.rendezvous.wire.lists import MemberLists, difference, patched
from elastirun.rendezvous.wire.records import Member, MemberList, Quorum

MEMBERS = tuple(Member(f"n{i}-{i * 7919 % 100_000}", f"n{i}", f"10.0.{i // 250}.{i % 250}", 30_000 + i, 8) for i in range(1000))


def a_list(members: tuple[Member, ...], host: str = "") -> MemberList:
    return MemberList(members, (Quorum(tuple(m.id for m in members), host),))


WHOLE = a_list(MEMBERS)
SMALLER = a_list((*MEMBERS[:500], *MEMBERS[501:]))


def known(*held: MemberList, token: bytes | None = None) -> MemberLists:
    made = MemberLists(Codec(token), "job/members")
    for one in held:
        made.digest(one)
    return made


def test_a_list_is_stored_compressed_and_read_again() -> None:
    writer, reader = known(WHOLE), known()
    digest = writer.digest(WHOLE)
    stored = writer.whole(digest)
    assert reader.take(digest, stored) == WHOLE and reader.get(digest) == WHOLE
    assert len(stored) < len(Codec().encode("", WHOLE)) / 3


@pytest.mark.parametrize("token", [None, b"a token of 16 bytes"])
def test_what_differs_is_a_thousandth_of_a_list_that_has_lost_a_member(token: bytes | None) -> None:
    writer, reader = known(WHOLE, SMALLER, token=token), known(WHOLE, token=token)
    digest = writer.digest(SMALLER)
    changes = writer.changes(digest)
    assert 0 < len(changes) < len(Codec().encode("", SMALLER)) / 500
    assert reader.take_changes(digest, changes) == SMALLER and reader.get(digest) == SMALLER


def test_what_differs_is_of_use_to_nodes_that_know_any_of_the_last_lists() -> None:
    """When the store moves, its new host writes two lists soon after each other, and most nodes read only the second."""
    smallest = a_list(MEMBERS[1:500])
    writer = known(WHOLE, SMALLER, smallest)
    digest = writer.digest(smallest)
    changes = writer.changes(digest)
    for one in (WHOLE, SMALLER):
        assert known(one).take_changes(digest, changes) == smallest
    assert known(a_list(MEMBERS[3:9])).take_changes(digest, changes) is None


def test_of_a_small_list_and_of_another_one_nothing_that_differs_is_written() -> None:
    small, other = a_list(MEMBERS[:10]), a_list(tuple(replace(m, id="x" + m.id, name="x", address="x") for m in MEMBERS))
    for writer, one in ((known(a_list(MEMBERS[:11]), small), small), (known(WHOLE), WHOLE), (known(WHOLE, other), other)):
        assert writer.changes(writer.digest(one)) == b""


def test_any_two_texts_differ_by_what_makes_one_of_the_other() -> None:
    rng = random.Random(48)
    for _ in range(300):
        pools = [[rng.choice(['"a"', '{"b":1}', "7", '"c","d"', "[]", "", "é"]) for _ in range(rng.randrange(12))] for _ in range(2)]
        old, new = (",".join(pool).encode("ascii", "ignore") for pool in pools)
        edits = json.loads(json.dumps(difference(old, new)))
        assert patched(old, edits) == new, (old, new, edits)


def test_only_the_last_lists_are_kept() -> None:
    made = known(*(a_list(MEMBERS[:n]) for n in range(1, 9)))
    assert [n for n in range(1, 9) if made.get(known().digest(a_list(MEMBERS[:n])))] == list(range(9 - lists.KEPT_LISTS, 9))


def test_a_list_that_is_used_again_is_kept() -> None:
    first = a_list(MEMBERS[:1])
    made = known(first, *(a_list(MEMBERS[:n]) for n in range(2, 5)), first, a_list(MEMBERS[:6]))
    assert made.get(known().digest(first)) == first


BOMB = zlib.compress(b" " * (MAX_BYTES + 1))
STORED = [b"", b"garbage", zlib.compress(b"other"), BOMB, zlib.compress(Codec().encode("", WHOLE))[:-1]]
STORED.append(zlib.compress(Codec().encode("", WHOLE)) + b"more")


@pytest.mark.parametrize("stored", STORED, ids=["nothing", "garbage", "another", "a bomb", "cut off", "with more"])
def test_what_is_no_list_is_refused(stored: bytes) -> None:
    with pytest.raises(BadRecord, match="the members are missing there, or others"):
        known().take(known().digest(WHOLE), stored)


def changes_of(edits: object) -> bytes:
    return zlib.compress(json.dumps({known().digest(WHOLE): edits}).encode())


WRONG = [b"", b"garbage", BOMB, zlib.compress(b"[1,2]"), zlib.compress(b"7"), zlib.compress(b"[" * 100_000), zlib.compress(b'{"a":')]
WRONG += [changes_of(edits) for edits in (7, None, {"a": 1}, [[0]], [[0, 0]], [[-5, 3]], [[0, "1"]], [[0.5, 1]], [[1 << 70, 1]], ["é"])]
WRONG += [changes_of([[0, 5], "text"]), changes_of([[0, 1 << 60]] * 1000), changes_of([[[0, 1]]]), changes_of([True])]


@pytest.mark.parametrize("stored", WRONG, ids=range(len(WRONG)))
def test_what_differs_is_never_believed_when_it_makes_another_list(stored: bytes) -> None:
    reader = known(WHOLE)
    with pytest.raises(BadRecord):
        reader.take_changes(known().digest(SMALLER), stored)
    assert reader.get(known().digest(SMALLER)) is None

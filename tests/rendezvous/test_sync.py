"""One exchange with the store: what is asked of it, in which order, and what becomes of what is found there."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from elastirun.errors import StoreError
from elastirun.rendezvous.stores.memory import MemoryStore
from elastirun.rendezvous.wire import lists
from elastirun.rendezvous.wire.actions import Change, Put, Sync
from elastirun.rendezvous.wire.codec import Codec
from elastirun.rendezvous.wire.events import Synced
from elastirun.rendezvous.wire.records import Broken, Cause, ExitRecord, Member, NodeRow, RoundRecord, Status
from elastirun.rendezvous.wire.sync import SyncProtocol
from tests.support.until import PATIENCE

JOB = "elastirun/job/"
CODEC = Codec()
MEMBER = Member("a", "name-a", "10.0.0.1", 1000, 2)


def row(i: str, seq: int = 1, **fields: Any) -> NodeRow:
    return NodeRow(i, f"name-{i}", "10.0.0.1", 1000, 2, seq=seq, **fields)


def key(i: str) -> str:
    return f"{JOB}node/{i}"


class Watched(MemoryStore):
    """A memory store that notes what is asked of it, and can be made to hang or fail."""

    def __init__(self, data: dict[str, bytes] | None = None) -> None:
        super().__init__(data)
        self.asked: list[str] = []
        self.closed = threading.Event()
        self.reached = threading.Event()  # an operation is under way
        self.go = threading.Event()  # operations hang until this is set
        self.go.set()
        self.fails: Exception | None = None

    def _note(self, what: str) -> None:
        self.asked.append(what)
        self.reached.set()
        assert self.go.wait(PATIENCE)
        if self.fails is not None:
            raise self.fails

    def get(self, keys: Iterable[str]) -> dict[str, bytes]:
        wanted = sorted(keys)
        self._note("get " + " ".join(k.removeprefix(JOB) for k in wanted))
        return super().get(wanted)

    def put_if(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        self._note("put " + key.removeprefix(JOB))
        return super().put_if(key, expected, value)

    def under(self, prefix: str) -> dict[str, bytes]:
        self._note("under " + prefix.removeprefix(JOB))
        return super().under(prefix)

    def close(self) -> None:
        self.closed.set()


def exchange(data: dict[str, bytes] | Watched, sync: Sync, me: str = "me", codec: Codec = CODEC) -> Synced:
    store = data if isinstance(data, Watched) else Watched(data)
    return SyncProtocol(JOB, me, codec, lambda: 7.0).carry_out(store, sync, 5.0)


def test_an_exchange_writes_before_it_reads_and_the_round_before_the_rows() -> None:
    store, empty = Watched(), RoundRecord("s")
    sync = Sync(Put(None, row("me")), Change(None, empty), ("a", "b"))
    assert exchange(store, sync) == Synced(7.0, 5.0, empty, {"me": row("me")}, row("me"), hosting=True)
    assert store.asked == ["put node/me", "put round", "get node/a node/b node/me round"]
    store.asked.clear()
    following = replace(empty, version=2)
    answer = exchange(store, Sync(Put(row("me"), row("me", 2)), Change(empty, following)))
    assert (answer.round, answer.row, answer.rows) == (following, row("me", 2), {"me": row("me", 2)})
    assert store.asked == ["put node/me", "put round", "get node/me round", "under node/"]
    store.asked.clear()
    assert exchange(store, Sync(rows=())).row == row("me", 2), "one's own row is always read"
    assert store.asked == ["get node/me round"]


def test_the_members_are_stored_once_beside_the_record_and_before_it() -> None:
    store, empty = Watched(), RoundRecord("s")
    exchange(store, Sync(change=Change(None, empty)))
    store.asked.clear()
    formed = replace(empty, version=2, round=1, members=(MEMBER, replace(MEMBER, id="b")))
    assert exchange(store, Sync(change=Change(empty, formed), rows=())).round == formed
    members, of_the_round, *_ = store.asked
    assert members.startswith("put members/") and of_the_round == "put round"
    store.asked.clear()
    broken = replace(formed, version=3, broken=Broken(Cause.JOIN, "b joined", "b"))
    node = SyncProtocol(JOB, "b", CODEC, lambda: 7.0)
    assert node.carry_out(store, Sync(change=Change(formed, broken), rows=()), 5.0).round == broken
    assert node.carry_out(store, Sync(rows=()), 5.0).round == broken
    assert store.asked == ["put round", "get node/b round", "get node/b round"], "known members are not read again"


def test_of_the_lists_of_members_only_the_last_is_kept() -> None:
    data: dict[str, bytes] = {}
    base: RoundRecord | None = None
    for number in range(1, 4):
        record = RoundRecord("s", number, number, members=(MEMBER, replace(MEMBER, id=f"b{number}")))
        assert exchange(data, Sync(change=Change(base, record))).round == record
        refused = replace(record, version=9, members=(MEMBER,))
        assert exchange(data, Sync(change=Change(RoundRecord("other"), refused))).round == record
        base = record
    lists = [key for key in data if "members/" in key]
    assert len(lists) == 2, "that of the round, and that of one that was refused"


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let lists of members count as large however few these are."""
    monkeypatch.setattr(lists, "LARGE", 0)
    monkeypatch.setattr(lists, "WORTH", 10.0)


FORMED = RoundRecord("s", round=1, members=tuple(replace(MEMBER, id=f"n{i}") for i in range(5)))
NEXT = replace(FORMED, version=2, round=2, members=FORMED.members[1:])


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("changes", ["there", "garbage", "gone", "of another list"])
def test_of_a_large_list_a_member_of_the_last_round_reads_what_differs_or_else_the_whole(changes: str) -> None:
    store = Watched()
    member, newcomer = (SyncProtocol(JOB, name, CODEC, lambda: 7.0) for name in ("n2", "n9"))
    exchange(store, Sync(change=Change(None, FORMED)))
    member.carry_out(store, Sync(rows=()), 5.0)
    exchange(store, Sync(change=Change(FORMED, NEXT)))
    (key,) = (key for key in store._data if key.endswith("-changes"))
    if changes == "gone":
        del store._data[key]
    elif changes != "there":
        store._data[key] = b"garbage" if changes == "garbage" else zlib.compress(b'{"other":[]}')
    for node, reads in ((member, 2 if changes == "there" else 3), (newcomer, 2)):
        store.asked.clear()
        assert node.carry_out(store, Sync(rows=()), 5.0).round == NEXT
        assert len(store.asked) == reads, store.asked


@pytest.mark.usefixtures("large")
def test_what_differs_is_deleted_with_its_list() -> None:
    data: dict[str, bytes] = {}
    writer = SyncProtocol(JOB, "n1", CODEC, lambda: 7.0)
    base: RoundRecord | None = None
    for number in range(1, 6):
        record = replace(FORMED, version=number, round=number, members=FORMED.members[:number])
        writer.carry_out(MemoryStore(data), Sync(change=Change(base, record)), 5.0)
        base = record
    assert sum("members/" in key for key in data) == 2, "the list of the round, and what differs"


@pytest.mark.parametrize("found", [b"garbage", None], ids=["altered", "gone"])
def test_a_list_of_members_that_is_not_the_one_named_is_not_believed(found: bytes | None) -> None:
    data: dict[str, bytes] = {}
    formed = RoundRecord("s", round=1, members=(MEMBER,))
    exchange(data, Sync(change=Change(None, formed)))
    (members_key,) = (key for key in data if "members/" in key)
    del data[members_key]
    if found is not None:
        data[members_key] = found
    with pytest.raises(StoreError, match="round record is unreadable: .*the members are missing there, or others"):
        exchange(data, Sync(), me="other")
    del data[JOB + "round"]
    assert exchange(data, Sync(change=Change(None, formed)), me="third").round == formed, "whoever forms it writes them anew"


def test_an_empty_store_is_seen_as_empty() -> None:
    answer = exchange({}, Sync())
    assert (answer.round, answer.row, dict(answer.rows), answer.ignored) == (None, None, {}, ())


def test_who_comes_second_sees_what_the_first_has_written() -> None:
    data: dict[str, bytes] = {}
    first, second = RoundRecord("first"), RoundRecord("second")
    assert exchange(data, Sync(change=Change(None, first))).round == first
    assert exchange(data, Sync(change=Change(None, second))).round == first
    assert exchange(data, Sync(change=Change(second, replace(second, version=2)))).round == first


def test_a_write_of_ours_that_was_thought_lost_is_adopted_not_written_over() -> None:
    data = {key("me"): CODEC.encode(key("me"), row("me", 5))}
    store = Watched(data)
    answer = exchange(store, Sync(Put(row("me", 4), row("me", 6, status=Status.LEFT))))
    assert answer.row == row("me", 5) and store.asked.count("put node/me") == 1


def test_a_row_that_has_vanished_is_not_written_as_if_it_had_not() -> None:
    data: dict[str, bytes] = {}
    assert exchange(data, Sync(Put(row("me"), row("me", 2)))).row is None and data == {}


def big_row(i: str) -> NodeRow:
    failure = ExitRecord("n", 0, 0, 1, 1, 0, 1.0, ("x" * 1000,) * 300)
    return row(i, failures=(failure,))


GARBAGE = {
    "no JSON": b"garbage",
    "not ASCII": b"\xff\xfe\x00",
    "another record": CODEC.encode(key("me"), RoundRecord("s")),
    "the row of another node": CODEC.encode(key("me"), row("a")),
    "signed": Codec(b"token").encode(key("me"), row("me")),
    "too large": CODEC.encode(key("me"), big_row("me")),
}


@pytest.mark.parametrize("base", [None, row("me", 3)])
@pytest.mark.parametrize("found", GARBAGE.values(), ids=GARBAGE)
def test_what_others_have_put_into_ones_own_row_is_written_over(found: bytes, base: NodeRow | None) -> None:
    data = {key("me"): found}
    answer = exchange(data, Sync(Put(base, row("me", 4)), rows=()))
    assert answer.row == row("me", 4) and answer.ignored == ()
    assert CODEC.decode(key("me"), data[key("me")], NodeRow) == row("me", 4)


@pytest.mark.parametrize("found", GARBAGE.values(), ids=GARBAGE)
def test_what_is_no_row_is_ignored_with_a_word(found: bytes) -> None:
    data = {key("me"): found, key("b"): CODEC.encode(key("b"), row("b"))}
    for sync in (Sync(), Sync(rows=("b", "c"))):
        answer = exchange(data, sync)
        assert dict(answer.rows) == {"b": row("b")} and answer.row is None
        (word,) = answer.ignored
        assert word.startswith(key("me")) and word.isprintable() and len(word) <= 300


def test_the_word_about_an_invented_key_is_fit_for_a_terminal() -> None:
    data = {f"{JOB}node/{i}\x1b[2J" + "x" * 5000: b"?" for i in range(50)}
    answer = exchange(data, Sync())
    assert len(answer.ignored) == 4 and all(word.isprintable() and len(word) <= 300 for word in answer.ignored)


def test_with_a_token_the_rows_and_the_round_of_strangers_do_not_count() -> None:
    signed = Codec(b"token")
    data = {key("b"): CODEC.encode(key("b"), row("b")), key("c"): signed.encode(key("c"), row("c"))}
    data[key("d")] = data[key("c")].replace(b"name-c", b"name-x")
    assert set(exchange(data, Sync(), codec=signed).rows) == {"c"}
    data[JOB + "round"] = CODEC.encode(JOB + "round", RoundRecord("s"))
    with pytest.raises(StoreError, match="the round record is unreadable: .*--token-file"):
        exchange(data, Sync(), codec=signed)


@pytest.mark.parametrize("found", [b"garbage", b"\xff", CODEC.encode("x", row("a")), b"x" * (5 << 20)], ids=lambda b: repr(b[:8]))
def test_an_unreadable_round_is_a_store_error_and_stays_as_it_is(found: bytes) -> None:
    data = {JOB + "round": found}
    with pytest.raises(StoreError, match="the round record is unreadable"):
        exchange(data, Sync(change=Change(None, RoundRecord("s"))))
    assert data[JOB + "round"] == found


class Counting(Codec):
    """Counts what it decodes."""

    decoded: list[str] = []

    def decode(self, key: str, data: bytes, cls: Any) -> Any:
        self.decoded.append(key.removeprefix(JOB))
        return super().decode(key, data, cls)


def test_an_unchanged_or_renewed_row_is_parsed_once_and_a_changed_one_anew() -> None:
    codec = Counting()
    codec.decoded.clear()
    data = {key(i): CODEC.encode(key(i), row(i)) for i in "abc"}
    exchanging, store = SyncProtocol(JOB, "a", codec, time.monotonic), MemoryStore(data)
    first = exchanging.carry_out(store, Sync(), 0.0)
    assert sorted(codec.decoded) == ["node/a", "node/b", "node/c"]
    for sync in (Sync(), Sync(rows=("b", "c"))):
        assert exchanging.carry_out(store, sync, 0.0).rows == first.rows
    assert len(codec.decoded) == 3
    for seq in (2, 10):
        data[key("b")] = CODEC.encode(key("b"), row("b", seq))
        assert exchanging.carry_out(store, Sync(rows=("b",)), 0.0).rows["b"] == row("b", seq)
    assert len(codec.decoded) == 3
    changed = replace(row("b", 2), note="changed")
    data[key("b")] = CODEC.encode(key("b"), changed)
    assert exchanging.carry_out(store, Sync(rows=("b",)), 0.0).rows["b"] == changed
    data[key("b")] = b"garbage"
    assert "b" not in exchanging.carry_out(store, Sync(rows=("b",)), 0.0).rows, "what was good before does not stand for it"
    data[key("b")] = CODEC.encode(key("b"), changed)
    assert exchanging.carry_out(store, Sync(rows=("b",)), 0.0).rows["b"] == changed
    assert codec.decoded[3:] == ["node/b", "node/b"]


def test_rows_that_are_gone_are_not_remembered() -> None:
    exchanging, data = SyncProtocol(JOB, "me", CODEC, time.monotonic), {}
    for i in range(100):
        data.clear()
        data[key(f"n{i}")] = CODEC.encode(key(f"n{i}"), row(f"n{i}"))
        exchanging.carry_out(MemoryStore(data), Sync(), 0.0)
    assert len(exchanging._known) == 1


# --- a round whose workers meet on the agents' store


class Clearable(Watched):
    """A store that can be cleared, in as many calls as ``parts``."""

    parts = 1

    def clear(self, keep: str, limit: float) -> bool:
        self._note(f"clear all but {keep}")
        self.parts -= 1
        return self.parts <= 0


BEFORE, READY = row("me", 4), row("me", 5, status=Status.READY, round=3)
FRESH = Sync(Put(BEFORE, READY), rows=(), fresh=True)


def test_a_store_is_cleared_before_the_node_says_that_it_is_ready() -> None:
    store = Clearable({key("me"): CODEC.encode(key("me"), BEFORE)})
    found = exchange(store, FRESH)
    assert store.asked[:3] == ["put node/me", "clear all but elastirun/", "put node/me"]
    assert found.row == replace(READY, seq=6)


def test_nothing_is_cleared_where_an_earlier_write_has_arrived_after_all() -> None:
    store = Clearable({key("me"): CODEC.encode(key("me"), READY)})
    assert exchange(store, FRESH).row == READY, "others may have started workers since"
    assert not [what for what in store.asked if what.startswith("clear")]


def test_an_earlier_write_cannot_arrive_while_the_store_is_cleared() -> None:
    data = {key("me"): CODEC.encode(key("me"), BEFORE)}
    store = Clearable(data)
    store.parts = 2
    found = exchange(store, FRESH).row
    assert found == replace(BEFORE, seq=5), "not ready: the clearing goes on in the next exchange"
    ready = CODEC.encode(key("me"), READY)
    assert store.put_if(key("me"), CODEC.encode(key("me"), BEFORE), ready) != ready
    again = exchange(store, Sync(Put(found, replace(READY, seq=6)), rows=(), fresh=True)).row
    assert again == replace(READY, seq=7)


def test_a_keep_alive_counts_only_with_its_row() -> None:
    class Leased(MemoryStore):
        def keep_alive(self, key: str) -> bool:
            return True

    data: dict[str, bytes] = {}
    node = SyncProtocol(JOB, "me", CODEC, lambda: 7.0)
    assert not node.carry_out(Leased(data), Sync(rows=(), keep_alive=True), 5.0).kept_alive
    assert node.carry_out(Leased(data), Sync(Put(None, row("me")), rows=(), keep_alive=True), 5.0).kept_alive
    assert not node.carry_out(Leased(data), Sync(rows=()), 5.0).kept_alive


def test_an_older_round_record_is_not_believed() -> None:
    data: dict[str, bytes] = {}
    store, node = Watched(data), SyncProtocol(JOB, "me", CODEC, lambda: 7.0)
    first = RoundRecord("s")
    node.carry_out(store, Sync(change=Change(None, first), rows=()), 5.0)
    old = data[JOB + "round"]
    node.carry_out(store, Sync(change=Change(first, replace(first, version=2)), rows=()), 5.0)
    data[JOB + "round"] = old
    with pytest.raises(StoreError, match="an older round record: version 1 after 2"):
        node.carry_out(store, Sync(rows=()), 5.0)


def test_the_list_of_the_members_stays_when_the_record_is_not_written() -> None:
    data: dict[str, bytes] = {}
    one = RoundRecord("s", 1, 1, members=(MEMBER,))
    exchange(data, Sync(change=Change(None, one)))
    two = replace(one, version=2, broken=Broken(Cause.JOIN, "b joined", "b"))
    exchange(data, Sync(change=Change(one, two)))
    late = replace(one, version=2, round=2, members=(replace(MEMBER, id="b"),))
    exchange(data, Sync(change=Change(one, late)))
    assert exchange(data, Sync()).round == two, "somebody was faster, and its record names the old list"

"""Hostile bytes: the first inputs of each target of tests/fuzz.py, the inputs that once broke a rule, and what the worst may cost."""

from __future__ import annotations

import dataclasses
import json
import random
import time
import tracemalloc
from typing import Any, cast

import pytest

from elastirun.agent.failures.classify import make_record
from elastirun.agent.failures.tracker import FailureTracker
from elastirun.agent.output.lines import MAX_LINE
from elastirun.agent.output.logs import RunLogs
from elastirun.agent.part import WorkerExit
from elastirun.errors import BadRecord, StoreError
from elastirun.rendezvous.stores import tcp_index
from elastirun.rendezvous.stores.etcd.client import LARGEST
from elastirun.rendezvous.stores.memory import MemoryStore
from elastirun.rendezvous.wire.actions import Sync
from elastirun.rendezvous.wire.codec import MAX_BYTES
from elastirun.rendezvous.wire.records import Closed, ExitRecord, NodeRow, RoundRecord, Verdict
from elastirun.rendezvous.wire.sync import MAX_ROW, SyncProtocol
from tests import fuzz
from tests.rendezvous.test_stores import Server, server  # noqa: F401
from tests.support.torch_client import torch_client

INPUTS = {"codec": 5000, "exchange": 1000, "parse": 12_000, "lines": 2500, "error_file": 1500, "report": 1000, "machine": 1200}
INPUTS |= {"checkpoint": 3000, "http": 3000, "live": 1000}


@pytest.mark.daily(3)
@pytest.mark.parametrize("target", INPUTS)
def test_no_input_breaks_the_rule(target: str) -> None:
    figures, before = fuzz.Figures(), fuzz.peak()
    fuzz.run(target, range(INPUTS[target]), figures)
    assert fuzz.peak() < before + 512
    assert figures.inputs == INPUTS[target]
    assert figures.taken > figures.inputs / 100, "the inputs are so bad that they do not get far"


def test_an_input_that_breaks_the_rule_is_told_with_its_seed_and_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(text: Any) -> bool:
        if "9" in text[1]:
            raise KeyError(text)
        return True

    monkeypatch.setitem(fuzz.TARGETS, "parse", dataclasses.replace(fuzz.TARGETS["parse"], check=check))
    found = []
    for _ in range(2):
        with pytest.raises(fuzz.Broken, match="python -m tests.fuzz --replay parse 7:") as caught:
            fuzz.run("parse", range(100_000), fuzz.Figures(), base=7)
        found.append(str(caught.value))
    assert found[0] == found[1]
    number = int(found[0].partition(" 7:")[2].partition(";")[0])
    with pytest.raises(fuzz.Broken):
        fuzz.run("parse", range(number, number + 1), fuzz.Figures(), base=7)


LATE = ExitRecord("n", 0, 0, 1, -(2**53), 0, 2.0**53, ("\ud800\x1b[2J",))
CASES: list[tuple[str, Any]] = [
    ("parse", ("endpoint", "\u202e://node0:1")),  # the message repeated the scheme as it was
    ("parse", ("endpoint", "[fe80::1%\n]:1")),  # a zone may be anything, says ipaddress
    ("parse", ("host", "fe80::1%\x1b[2J")),
    ("parse", ("host", "[fe80::1%\u202e]")),
    ("lines", (b"l" * MAX_LINE + b"\n", [b"l" * MAX_LINE, b"\n"])),  # an empty line came after it
    ("lines", (b"l" * 2 * MAX_LINE, [b"l" * MAX_LINE, b"l" * MAX_LINE])),
    ("report", RoundRecord("s", closed=Closed(Verdict.FAILED, "r", "n", (LATE,)))),  # year 285428805 is out of range
    ("report", RoundRecord("s", closed=Closed(Verdict.FAILED, "r", "n", (dataclasses.replace(LATE, after=-(2.0**53)),)))),
]


@pytest.mark.parametrize(("target", "given"), CASES, ids=lambda value: repr(value)[:30])
def test_inputs_that_once_broke_the_rule(target: str, given: Any) -> None:
    fuzz.TARGETS[target].check(given)


# -- the worst that fits into the limits ------------------------------------------------------------------------------------------

HALF = MAX_BYTES // 2
WORST = {
    "empty lists": b'{"v":3,"x":[' + b"[]," * (MAX_BYTES // 3 - 9) + b"0]}",
    "empty objects": b'{"v":3,"x":[' + b"{}," * (MAX_BYTES // 3 - 9) + b"0]}",
    "numbers": b'{"v":3,"x":[' + b"1," * (HALF - 20) + b"1]}",
    "keys": b'{"v":3,' + b",".join(b'"%d":0' % i for i in range(MAX_BYTES // 11)) + b"}",
    "nested": b'{"v":3,"x":' + b'{"a":' * 900 + b"0" + b"}" * 900 + b"}",
    "text beyond the BMP": b'{"v":3,"id":"' + b"\\ud83d\\ude00" * (MAX_BYTES // 12 - 9) + b'"}',
}


@pytest.mark.daily(4)
@pytest.mark.parametrize("data", WORST.values(), ids=WORST)
def test_the_largest_values_take_bounded_memory_and_time(data: bytes) -> None:
    assert len(data) < MAX_BYTES
    tracemalloc.start()
    began = time.thread_time()
    try:
        with pytest.raises(BadRecord):
            fuzz.PLAIN.decode(fuzz.KEY, data, RoundRecord)
        took, peak = time.thread_time() - began, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert took < 20 and peak < 64 * MAX_BYTES, (took, peak >> 20)


@pytest.mark.parametrize("character", ["x", "語", "🎉", '"', "\0", "\ud800"])
def test_a_row_with_all_the_failures_it_may_tell_of_can_be_read_by_the_others(character: str) -> None:
    """Where a character takes twelve bytes, three workers' last words once made a row that nobody could read: the node seemed lost."""
    said = [f"{i} {character * 600}" for i in range(40)] + ["ValueError: boom"]
    failures = tuple(make_record("n" * 128, WorkerExit(i, i, 1, 1, 1.0, False), said, note="y" * 200) for i in range(8))
    assert all(failure.lines[-1] == "ValueError: boom" and len(failure.lines) > 4 for failure in failures)
    data = fuzz.SIGNED.encode(fuzz.KEY, NodeRow("n" * 400, "n" * 128, "a", 1, 8, failures=failures))
    assert len(data) <= MAX_ROW
    fuzz.SIGNED.decode(fuzz.KEY, data, NodeRow)


@pytest.mark.parametrize("character", ["x", "🎉"])
def test_what_all_workers_of_a_thousand_nodes_said_last_fits_into_one_answer_of_etcd(character: str) -> None:
    said = [f"{i} {character * 600}" for i in range(40)] + [character * 600]
    tracker = FailureTracker("n" * 128, cast(RunLogs, None), print)
    for i in range(8):
        tracker.add(make_record("n" * 128, WorkerExit(i, i, 1, 1, float(i), False), said, note="y" * 200))
    first, *others = tracker.failures
    assert first == make_record("n" * 128, WorkerExit(0, 0, 1, 1, 0.0, False), said, note="y" * 200)
    assert len(others) == 7 and all(other.lines[-1] == character * 200 for other in others), "one line of each is shown"
    row = NodeRow("n" * 400, "n" * 128, "a", 1, 8, failures=tracker.failures)
    assert 1000 * len(fuzz.SIGNED.encode(fuzz.KEY, row)) < LARGEST


def test_a_round_record_that_goes_back_is_refused_and_the_newest_is_taken_again() -> None:
    data: dict[str, bytes] = {}
    exchange = SyncProtocol("elastirun/job/", "n1", fuzz.PLAIN, lambda: 0.0)

    def look(record: RoundRecord) -> RoundRecord | None:
        data[fuzz.ROUND_KEY] = fuzz.PLAIN.encode(fuzz.ROUND_KEY, record)
        return exchange.carry_out(MemoryStore(data), Sync(), 0.0).round

    first, second, other = RoundRecord("s", version=1), RoundRecord("s", version=2), RoundRecord("t", version=1)
    assert [look(first), look(second), look(second)] == [first, second, second]
    for _ in range(2):
        with pytest.raises(StoreError, match="older round record: version 1 after 2"):
            look(first)
    assert [look(second), look(other)] == [second, other], "another store's record is the machine's to judge"


# -- the index of a real TCPStore -------------------------------------------------------------------------------------------------


def test_whatever_stands_in_the_index_the_rows_are_found(server: Server) -> None:  # noqa: F811
    store, prefix = server.connect(), "index/node/"
    store.put_if(prefix + "a", None, b"1")
    good = f"\n{prefix}a\n".encode()
    rng, client = random.Random(4), torch_client(store)
    for number in range(150):
        line = prefix.encode() + b"b" if rng.random() < 0.5 else b""
        garbage = fuzz.mutated(rng, rng.choice([line, good, b"\n", rng.randbytes(50), json.dumps(fuzz.an_edge(rng)).encode()[:5000]]))
        client.set(prefix + "~index", garbage)
        client.append(prefix + "~index", good)
        client.check([prefix])  # an answer: both have arrived
        found = store.under(prefix)
        assert found == {prefix + "a": b"1"}, f"input {number}: {garbage[:300]!r}"


def test_a_row_whose_line_in_the_index_was_lost_is_found_again_by_whoever_tries_to_write_it(server: Server) -> None:  # noqa: F811
    """Its node does not see its own row in the list, so it takes it for missing, and what it expects there is never right."""
    store = server.connect()
    store.put_if("lost/a", None, b"1")
    server.foul("set", "lost/~index", "overwritten")
    assert store.under("lost/") == {}
    assert store.put_if("lost/a", None, b"2") == b"1"
    assert store.under("lost/") == server.connect().under("lost/") == {"lost/a": b"1"}


def test_a_long_line_of_other_than_ascii_in_the_index_is_no_key(server: Server) -> None:  # noqa: F811
    """Decoded, the line is shorter than its bytes. So TCPStore once closed the connection, and no node could list the rows."""
    store = server.connect()
    store.put_if("other/a", None, b"1")
    server.foul("append", "other/~index", b"\nother/" + b"\xff" * 4000 + b"\n")
    assert store.under("other/") == {"other/a": b"1"}


def test_an_index_that_somebody_floods_is_a_store_error(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    store = server.connect()
    store.put_if("flood/a", None, b"1")
    monkeypatch.setattr(tcp_index, "MOST_KEYS", 100)
    server.foul("append", "flood/~index", "".join(f"\nflood/{i}\n" for i in range(99)))
    assert store.under("flood/") == {"flood/a": b"1"}
    server.foul("append", "flood/~index", "\nflood/x\n")
    with pytest.raises(StoreError, match="below flood/: somebody floods the store"):
        store.under("flood/")
    monkeypatch.setattr(tcp_index, "LONGEST_INDEX", 100)
    with pytest.raises(StoreError, match="somebody floods the store"):
        store.under("flood/")

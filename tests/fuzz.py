"""Hostile bytes, made from good ones: each target makes an input from a seed and checks the one rule that every input must keep.

    python -m tests.fuzz --inputs 1000000                over all targets, by their weight
    python -m tests.fuzz --target codec --inputs 5000    one of them
    python -m tests.fuzz --replay codec 0:4711           one input again, shown

An input depends on nothing but its target and seed. tests/test_fuzz.py runs the first some ten thousand of them, and keeps
those that once failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from elastirun.agent.failures.classify import exit_code
from elastirun.agent.failures.report import read_error_file, report
from elastirun.agent.observe.events import changes
from elastirun.agent.output.lines import LAST_LINE_BYTES, LAST_LINES, MAX_LINE, LastLines, PrefixedLines, WholeLines
from elastirun.agent.status import http_port
from elastirun.checkpoint import record as commit_record
from elastirun.checkpoint.image import _AT_COMPLETE, _AT_PLACE, _COMPLETE, _PLACE, PAGE, Description, Image
from elastirun.checkpoint.record import Commit, FileSum
from elastirun.checkpoint.tensors import NAMES, decode_tensors
from elastirun.cli import parse
from elastirun.cli.detect import node_list
from elastirun.errors import BadRecord, BadSignature, CheckpointError, StoreError
from elastirun.rendezvous.failures import describe, signature
from elastirun.rendezvous.machine import Machine
from elastirun.rendezvous.rules import Rules
from elastirun.rendezvous.stores.memory import MemoryStore
from elastirun.rendezvous.wire import events
from elastirun.rendezvous.wire.actions import Put, Start, Sync
from elastirun.rendezvous.wire.codec import MAX_BYTES, MAX_TEXT, Codec
from elastirun.rendezvous.wire.records import Closed, Member, NodeRow, RoundRecord
from elastirun.rendezvous.wire.sync import MAX_ROW, SyncProtocol
from elastirun.worker import live_messages
from tests.rendezvous.test_codec import a_value

SLOWEST = 5.0  # seconds of CPU for one input; the longest takes a tenth of a second
KEY = "elastirun/job/node/n1"
ROUND_KEY = "elastirun/job/round"
PLAIN, SIGNED = Codec(), Codec(b"the job's token")

# -- mutations -----------------------------------------------------------------------------------------------------------------

NUMBERS = [0, -0.0, -1, 1, 255, 256, 4096, 4097, 65535, 65536, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53, 2**53 + 1, -(2**53) - 1]
NUMBERS += [2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 1.0, 0.1, 1e308, -1e308, 5e-324, 2.0**53, 2.0**54, 1e16]
TEXTS = ["", "\0", "\n", "\r", "\x1b[2J", "\x7f", "\x85", "\u2028", "\u202e", "\ud800", "\ude00", "\ud83d\ude00", "é", "語", "🎉", "\ufeff"]
TEXTS += ["__proto__", "__class__", "__reduce__", "null", "NaN", "-Infinity", "x" * MAX_TEXT, "x" * (MAX_TEXT + 1), "n1", "v", "../../x"]
BYTES = [b"\0", b"\n", b"\r", b'"', b"\\", b"\\u", b"\\ud800", b",", b":", b"{", b"}", b"[", b"]", b"-", b".", b"e", b"0", b"1e999", b"NaN"]
BYTES += [b"Infinity", b"true", b"null", b"\xff", b"\x80", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf", b" ", b"\t", b'"v":3,', b"\x1b["]
PICKLE = b"cos\nsystem\n(S'touch /dev/null'\ntR."


def mutated(rng: random.Random, data: bytes) -> bytes:
    """``data`` with one to four changes: bits, bytes, pieces taken out, doubled, moved, cut off, grown."""
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        i, j = sorted(rng.randrange(len(data) + 1) for _ in range(2))
        kind = rng.randrange(9)
        if kind == 0 and i < len(data):
            data = data[:i] + bytes([data[i] ^ 1 << rng.randrange(8)]) + data[i + 1 :]
        elif kind <= 2:
            data = data[:i] + rng.choice(BYTES) + data[i + (kind == 1) :]
        elif kind == 3:
            data = data[:i] + data[min(j, i + 20) :]
        elif kind == 4:
            data = data[:j] + data[i:j] + data[j:]
        elif kind == 5:
            data = data[:i] if rng.random() < 0.5 else data[i:]
        elif kind == 6:
            data = data[:i] + rng.randbytes(rng.choice([1, 4, 40])) + data[i:]
        elif kind == 7:
            data = data[:i] + rng.choice(BYTES) * rng.choice([2, 50, 3000]) + data[i:]
        else:
            k = rng.randrange(len(data) + 1)
            data = data[:i] + data[j:k] + data[i:j] + data[max(j, k) :]
    return data


def an_edge(rng: random.Random) -> Any:
    """Any JSON value, as far out as they come."""
    kind = rng.randrange(8)
    if kind <= 2:
        return rng.choice(NUMBERS)
    if kind <= 4:
        return rng.choice(TEXTS)
    if kind == 5:
        return rng.choice([None, True, False, [], {}, [[]], [None], {"": {}}])
    if kind == 6:
        nested: Any = rng.choice([0, "x", None])
        for _ in range(rng.choice([3, 50, 200])):
            nested = [nested] if rng.random() < 0.9 else {"v": nested}
        return nested
    return [rng.choice(NUMBERS + TEXTS[:16])] * rng.choice([1, 40, 2000])


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) below ``value``."""
    found = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(found):
        yield value, key
        yield from places(inner)


def mutated_tree(rng: random.Random, value: Any) -> Any:
    """A JSON object with one to three of its values replaced, dropped, renamed, swapped or repeated."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        spots = list(places(value))
        if not spots:
            break
        holder, key = rng.choice(spots)
        kind = rng.randrange(8)
        if kind <= 3:
            holder[key] = an_edge(rng)
        elif kind == 4:
            del holder[key]
        elif kind == 5:
            other, there = rng.choice(spots)
            if there in (other if isinstance(other, dict) else range(len(other))):
                holder[key] = json.loads(json.dumps(other[there]))
        elif isinstance(holder, list):
            holder.extend([holder[key]] * rng.choice([1, 30, 500] if len(spots) < 500 else [1]))  # else it grows to gigabytes
        else:
            holder[rng.choice(TEXTS)[:40]] = holder.pop(key) if kind == 6 else holder[key]
    return value


def spelled(rng: random.Random, value: Any) -> bytes:
    """As JSON, most often in the canonical spelling."""
    if rng.random() < 0.8:
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    text = json.dumps(value, sort_keys=rng.random() < 0.5, indent=rng.choice([None, None, 0]), ensure_ascii=rng.random() < 0.5)
    return text.encode(rng.choice(["utf-8", "utf-8", "utf-16", "utf-32"]), errors="surrogatepass")


@functools.cache
def _records(cls: type[Any]) -> list[Any]:
    rng = random.Random(cls.__name__)
    return [a_value(rng, cls) for _ in range(100)]


def a_record(rng: random.Random, cls: type[Any]) -> Any:
    """One of some hundred: to make one takes longer than to check it."""
    return rng.choice(_records(cls))


def hostile_record(rng: random.Random, key: str, cls: type[Any], codec: Codec) -> bytes:
    """What somebody might put where a record of ``cls`` is expected; signed properly now and then, to get further."""
    good = codec.encode(key, a_record(rng, cls))
    payload, newline, mac = good.partition(b"\n")
    kind = rng.randrange(10)
    if kind == 0:
        return rng.choice([rng.randbytes(rng.choice([0, 1, 50, 500])), PICKLE, b"", b"\n", good, mac])
    if kind <= 5:
        payload = spelled(rng, mutated_tree(rng, json.loads(payload)))
    if kind >= 4:
        payload = mutated(rng, payload)
    if codec.token is None:
        return payload
    sign = rng.random()
    return payload + b"\n" + codec._mac(key, payload) if sign < 0.7 else mutated(rng, payload + newline + mac)


# -- targets: the input, and what must hold for it -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    make: Callable[[random.Random], Any]
    check: Callable[[Any], bool]  # raises what it likes when the rule is broken; else: was it taken for good?
    weight: int


def one_line(text: str, limit: int = 4 * MAX_TEXT) -> None:
    assert text and text.isprintable() and len(text) < limit, f"not one printable line: {text[:300]!r}"


def make_codec(rng: random.Random) -> tuple[Codec, type[Any], bytes]:
    codec, cls = rng.choice([PLAIN, PLAIN, SIGNED]), rng.choice([NodeRow, RoundRecord])
    return codec, cls, hostile_record(rng, KEY, cls, codec)


def check_codec(given: tuple[Codec, type[Any], bytes]) -> bool:
    """Decode: either ``BadRecord``, or a record that encodes to the same bytes. With a token, only signed bytes are accepted."""
    codec, cls, data = given
    try:
        record = codec.decode(KEY, data, cls)
    except BadRecord as error:
        one_line(str(error))
        assert type(error) in (BadRecord, BadSignature)
        return False
    assert codec.encode(KEY, record) == data and len(data) <= MAX_BYTES
    payload, _, mac = data.partition(b"\n")
    assert codec.token is None or mac == codec._mac(KEY, payload)
    return True


def make_exchange(rng: random.Random) -> tuple[Codec, dict[str, bytes], Sync]:
    """A store with hostile values under every key of the job, and what a node asks of it."""
    codec = rng.choice([PLAIN, SIGNED])
    prefix = "elastirun/job/node/"
    data = {prefix + i: hostile_record(rng, prefix + i, NodeRow, codec) for i in rng.sample(["n1", "n2", "\x1b[2J", "x" * 5000, ""], 3)}
    if rng.random() < 0.7:
        good = codec.encode(ROUND_KEY, RoundRecord("s"))
        data[ROUND_KEY] = hostile_record(rng, ROUND_KEY, RoundRecord, codec) if rng.random() < 0.5 else good
    mine = NodeRow("n1", "n1", "127.0.0.1", 1, 1)
    put = rng.choice([None, Put(None, mine), Put(mine, replace(mine, seq=2))])
    return codec, data, Sync(put, None, rng.choice([None, ("n2",), ("n2", "n3")]))


def check_exchange(given: tuple[Codec, dict[str, bytes], Sync]) -> bool:
    codec, data, sync = given
    exchange = SyncProtocol("elastirun/job/", "n1", codec, lambda: 0.0)
    try:
        synced = exchange.carry_out(MemoryStore(dict(data)), sync, 0.0)
    except StoreError as error:
        one_line(str(error))
        return False
    for note in synced.ignored:
        one_line(note)
    assert len(synced.ignored) <= 4 and all(row.id == key for key, row in synced.rows.items())
    vanished = sync.put is not None and sync.put.base is not None and KEY not in data  # the machine begins anew
    assert sync.put is None or vanished or synced.row is not None, "whatever was in its row, its own word stands there in the end"
    return bool(synced.rows)


def make_error_file(rng: random.Random) -> bytes:
    trace = "".join(rng.choice([f"line {i} ", rng.choice(TEXTS), "\n"]) for i in range(rng.choice([3, 300])))
    good = {"message": {"message": trace[:99], "extraInfo": {"py_callstack": trace, "timestamp": "1"}, "errorCode": 1}}
    kind = rng.randrange(4)
    if kind == 0:
        long = rng.choice([b"[", b"9", b'{"message":', b" "]) * rng.choice([9, 9999, 99_999])
        return rng.choice([rng.randbytes(rng.choice([0, 9, 3000])), PICKLE, long])
    data = spelled(rng, mutated_tree(rng, good) if kind > 1 else {"message": trace})
    return mutated(rng, data) if rng.random() < 0.5 else data


def check_error_file(data: bytes) -> bool:
    """At most 30 lines of bounded length that fit into a record, or nothing."""
    with open(os.memfd_create("error.json"), "wb") as file:
        file.write(data)
        file.flush()
        lines = read_error_file(f"/proc/self/fd/{file.fileno()}")
    if lines is None:
        return False
    assert len(lines) <= 30 and all(len(line) <= 500 for line in lines)
    return True


def make_report(rng: random.Random) -> RoundRecord:
    return RoundRecord("s", closed=a_value(rng, Closed))


def check_report(record: RoundRecord) -> bool:
    """What anybody may have put into the verdict is printable in every line, and counts as an exit code."""
    records = record.closed.failures if record.closed else ()
    text = report("train.py", "why", records, 1, "0 of 1", 1.7e9, "logs")
    for line in text.splitlines():
        one_line(line, 20_000)
    assert type(exit_code(records)) is int
    for failure in records:
        one_line(describe(failure))
        assert signature(failure).isprintable()
    return bool(records)


PARSERS: dict[str, tuple[Callable[[str], Any], list[str]]] = {
    "endpoint": (lambda text: parse.endpoint(text, 29400), ["node0:29400", "[fd00::1]:1", "10.0.0.1", "[fe80::1%eth0]:80", ":0"]),
    "host": (parse.host, ["node0.example.org", "[::1]", "fe80::1%eth0", "127.0.0.1"]),
    "nodes": (parse.nodes, ["1:4", "2", "+3", " 1 : 3 "]),
    "rdzv_conf": (parse.rdzv_conf, ["join_timeout=300,is_host=1", "timeout=5,last_call_timeout=1.5,rank=0,store_type=tcp", "ca_cert=x"]),
    "std_map": (parse.std_map, ["3", "0:3,1:2", " 0:1 "]),
    "local_ranks": (parse.local_ranks, ["0,2", "", " 1 , 3"]),
    "ranks": (parse.ranks, ["0,4-7,-1", "", "3-3"]),
    "signals": (parse.signals, ["SIGTERM,USR1", "int", "SIGKILL", "SIGFOO"]),
    "seconds": (parse.seconds(0.0, above=True), ["1.5", "1e3", "inf", "nan", "0x1p3", "-1"]),
    "integer": (parse.integer(0, 65535), ["0", "65536", "-1", "+7", "1_0"]),
    "boolean": (parse.boolean, ["true", "0", "Yes", "-3"]),
    "name": (parse.name, ["job7", "", "a b/c", "x" * 200]),
    "needles": (parse.needles, ["a,b", ",,", "a,,b,"]),
    "byte_size": (parse.byte_size(1), ["500000", "10M", "2gib", "0"]),
    "choice": (parse.choice("c10d", "static"), ["c10d", "statc", "etcd"]),
    "port_range": (parse.port_range, ["29600:29699", " 1:65535 ", "7:7", "9:1"]),
    "port_to_serve": (parse.port_to_serve, ["8080", ":0", "127.0.0.1:80", "[::1]:80"]),
    "node_list": (node_list.expand, ["node[01-03,7],gpu-a[1-2]", "n1", "a[1-9][0-9],b[001-999]"]),
}
CHARACTERS = [*" \t,:;=-+._%/[]{}()0123456789abcxyzEK\0\n\r\x1b\x7f\x85\u2028\u202e\ud800é語🎉²Ⅷ１٣", "://", "%eth0\n", "fe80::", "0x"]


def make_parse(rng: random.Random) -> tuple[str, str]:
    name = rng.choice(list(PARSERS))
    text = rng.choice(PARSERS[name][1]) if rng.random() < 0.9 else ""
    for _ in range(rng.choice([0, 1, 1, 2, 4, 30])):
        i = rng.randrange(len(text) + 1)
        piece = rng.choice(CHARACTERS) * rng.choice([1, 1, 1, 2, 3] + [3000] * (rng.random() < 0.02))
        text = text[:i] + piece + text[i + rng.choice([0, 0, 1, len(piece)]) :]
    return name, text if rng.random() < 0.98 else text * rng.choice([2, 1000])


def check_parse(given: tuple[str, str]) -> bool:
    """``ValueError`` with one short printable line; what is taken for a name of something is printable."""
    name, text = given
    try:
        value = PARSERS[name][0](text)
    except ValueError as error:
        one_line(str(error), 1000)
        return False
    assert name not in ("endpoint", "host", "name", "port_to_serve") or str(value).isprintable(), f"{value!r} would be printed"
    return True


def make_lines(rng: random.Random) -> tuple[bytes, list[bytes]]:
    """A stream of a worker, and the same in pieces. Now and then with lines about as long as the longest."""
    parts = [b"\n", b"\r", b"\r\n", b"\r\r", b"x", b"word ", b"\xff", "é".encode(), b"\x1b[31m", b"\0", b"y" * 499, b"z" * 501]
    data = b"".join(rng.choices(parts, k=rng.choice([1, 5, 30, 200])))
    if rng.random() < 0.05:
        at = rng.choice([0, len(data)])
        line = b"l" * (MAX_LINE * rng.choice([1, 2]) + rng.choice([-1, 0, 1])) + rng.choice([b"", b"\n", b"\r\n"])
        data = data[:at] + line * rng.choice([1, 2]) + data[at:]
    cuts = [rng.randrange(len(data) + 1) for _ in range(rng.choice([1, 3, 40]))] + [MAX_LINE] * (len(data) > MAX_LINE)
    cuts = [0, *sorted(cuts), len(data)]
    return data, [data[i:j] for i, j in zip(cuts, cuts[1:], strict=False)]


def check_lines(given: tuple[bytes, list[bytes]]) -> bool:
    """However it was cut, the same is kept and shown, nothing more than that is held back, and nothing is lost."""
    data, pieces = given
    kept = []
    for feeds in ([data], pieces):
        last, raw, prefixed = LastLines(), bytearray(), bytearray()
        whole, lines = WholeLines(raw.extend), PrefixedLines(b"> ", prefixed.extend)
        for piece in feeds:
            for stream in (last, whole, lines):
                stream.feed(piece)
                assert len(stream._partial) <= MAX_LINE
            assert len(last._partial) <= LAST_LINE_BYTES + 1
        shown = last.lines()
        assert len(shown) <= LAST_LINES and all(len(line) <= 4 * LAST_LINE_BYTES for line in shown)
        whole.flush()
        lines.flush()
        assert raw == data and all(line.startswith(b"> ") for line in prefixed.split(b"\n")[:-1])
        kept.append((shown, bytes(prefixed)))
    assert kept[0] == kept[1], "what came in pieces is not what came at once"
    return True


# A counter above 2^53 would make the record unreadable, as good as garbage.
COUNTERS = {"version": 7, "failures": 1, "repeats": 0, "quick": 2, "losses": 3}
RULES = Rules(1, 3, restart_pause=1.0, last_call=0.5)
MESHES = ("", "dp=auto,pp=2,tp=1", "pp=2,dp=auto,tp=1", "dp=auto")


def make_machine(rng: random.Random) -> tuple[Rules, list[events.Event]]:
    """A life in which the store holds whatever can be decoded, with ids, rounds and members near enough to matter."""
    ids, now, life = ["me", "n1", "n2", ""], 0.0, list[events.Event]()
    rules, numbers = replace(RULES, mesh_text=rng.choice(MESHES)), (0, 0, 1, 2, -1, 2**53)
    for _ in range(rng.choice([3, 10, 25])):
        now += rng.choice([0.0, 0.1, 0.6, 6.0, 70.0])
        rows = {i: replace(a_record(rng, NodeRow), id=i, seq=rng.randrange(9)) for i in rng.sample(ids, rng.randrange(4))}
        if rng.random() < 0.7:
            rows = {i: replace(row, round=rng.randrange(4), done_round=rng.randrange(-1, 4)) for i, row in rows.items()}
        record: RoundRecord = replace(a_record(rng, RoundRecord), store_id="s" if rng.random() < 0.95 else "t", **COUNTERS)
        number = rng.choice([0, 1, 2, 3, 10**6, -1])
        members = tuple(Member(rng.choice(ids), "n", "a", 1, rng.choice([1, 2, 4096])) for _ in range(rng.randrange(5)))
        members = tuple(replace(m, block=rng.choice(numbers), phase=rng.choice(numbers)) for m in members)
        record = replace(record, round=number, members=members)
        if rng.random() < 0.8:
            record = replace(record, settings=rules.settings)
        if rng.random() < 0.6:
            record = replace(record, broken=None, closed=None)
        failures = a_record(rng, NodeRow).failures[:3]
        life += rng.choice(
            [
                [events.Synced(now, now, None if rng.random() < 0.1 else record, rows, rows.get("me"))] * 3,
                [events.SyncFailed(now, "why"), events.Tick(now)],
                [events.WorkersFailed(now, failures)] if failures else [events.WorkersSucceeded(now)],
                [events.WorkersStopped(now, failures)],
                [events.StoodStill(now, 20.0, rng.random() < 0.5)] if rng.random() < 0.2 else [],
                [events.Leave(now, "told to")] if rng.random() < 0.1 else [],
                [events.Close(now)] if rng.random() < 0.05 else [],
            ]
        )
    return rules, life


def check_machine(given: tuple[Rules, list[events.Event]]) -> bool:
    """It never raises, starts only its own place, and asks to write only what every node can read."""
    rules, life = given
    machine, syncing, told = Machine(rules, NodeRow("me", "me", "127.0.0.1", 1, 1), 0.0), False, None
    for event in [events.Tick(0.0), *life]:
        if isinstance(event, events.Synced | events.SyncFailed) and not syncing:
            continue
        syncing = syncing and not isinstance(event, events.Synced | events.SyncFailed)
        for action in machine.step(event):
            if isinstance(action, Sync):
                syncing = True
                written: list[Any] = [action.put.row] if action.put else []
                written += [action.change.record] if action.change else []
                for record in written:
                    data = PLAIN.encode(KEY, record)
                    assert PLAIN.decode(KEY, data, type(record)) == record and (isinstance(record, RoundRecord) or len(data) <= MAX_ROW)
            elif isinstance(action, Start):
                mine = action.record.members[action.node_rank]
                assert (mine.id, mine.slots) == ("me", machine.row.slots)
        if machine.record is not None:
            json.dumps([vars(event) for event in changes(told, machine.record)])
            told = machine.record
    return machine.record is not None


COMMIT = Commit(300, 7, "store:3", 3, 2, 1.5e9, {name: FileSum(9, "a" * 64, 7) for name in ("__0_0.distcp", ".metadata", "values.json")})
CHUNK = {"offsets": [0, 2], "sizes": [3, 2], "file": "__0_0.distcp", "at": 64, "nbytes": 24}
TENSORS = {name: {"dtype": "float32", "shape": [3, 4], "chunks": [{**CHUNK, "offsets": [0, 0]}, CHUNK]} for name in ("model.w", "b")}
FILES = {"a": (PAGE, 5), "b": (2 * PAGE, PAGE)}
DESCRIPTION = Description(save=1, step=10, fence="s:2", round=2, rank=1, world_size=2, files=FILES, write=("a", "b"))


def make_checkpoint(rng: random.Random) -> tuple[str, bytes]:
    """A commit record, a list of tensors or the description of an image; checksums are right now and then, to get further."""
    kind = rng.choice(["commit", "tensors", "image"])
    if kind == "commit":
        good = json.loads(commit_record.encode(COMMIT))
    else:
        good = json.loads(json.dumps(TENSORS if kind == "tensors" else dataclasses.asdict(DESCRIPTION)))
    plain = mutated_tree(rng, good)
    if kind == "commit" and isinstance(plain, dict) and rng.random() < 0.8:
        plain.pop("sha256", None)
        canonical = json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
        plain["sha256"] = hashlib.sha256(canonical).hexdigest()
    data = spelled(rng, plain)
    return kind, mutated(rng, data) if rng.random() < 0.3 else data


def check_checkpoint(given: tuple[str, bytes]) -> bool:
    """One line that says why not, or a value within its limits, which is written as it was read."""
    kind, data = given
    if kind == "image":
        return check_image(data)
    try:
        if kind == "tensors":
            for tensor in decode_tensors(data, NAMES).values():
                assert tensor.dtype.isidentifier() and all(commit_record.is_file_name(chunk.file) for chunk in tensor.chunks)
        else:
            commit = commit_record.decode(data)
            assert commit_record.decode(commit_record.encode(commit)) == commit
    except CheckpointError as error:
        one_line(str(error), 1000)
        return False
    return True


def check_image(data: bytes) -> bool:
    """A description of files within the image, or none."""
    image = Image.create(len(data) + 8 * PAGE)
    image.memory[4 * PAGE : 4 * PAGE + len(data)] = data
    _PLACE.pack_into(image.memory, _AT_PLACE, 4 * PAGE, len(data), hashlib.sha256(data).digest())
    _COMPLETE.pack_into(image.memory, _AT_COMPLETE, 1)
    found = image.description()
    image.close()
    if found is not None:
        assert all(PAGE <= at and size >= 0 and at + size <= image.size for at, size in found.files.values())
        assert set(found.write) <= set(found.files)
    return found is not None


PAGES = {"/healthz": None, "/metrics": None}
REQUESTS = [b"GET /healthz HTTP/1.1\r\nHost: node0:8080\r\nAccept: */*\r\n\r\n", b"HEAD http://h/metrics?x=1 HTTP/1.0\n\n"]
REQUESTS += [b"GET /metrics\r\n"]


def make_http(rng: random.Random) -> bytes:
    return mutated(rng, rng.choice(REQUESTS))


def check_http(data: bytes) -> bool:
    """A request for a page that exists, an answer in ASCII that refuses it, or nothing as long as more may come."""
    found = http_port.parse(data, PAGES)
    if isinstance(found, http_port.Response):
        assert 400 <= found.status < 600
        one_line(found.encode(False).decode("ascii").rpartition("\r\n")[2].removesuffix("\n"), 200)
    elif isinstance(found, http_port.Request):
        assert found.path in PAGES and b"\n" in data
    else:
        assert len(data) < http_port.MAX_REQUEST, "this client would be waited for"
    return isinstance(found, http_port.Request)


LIVE = [
    live_messages.Hello(),
    live_messages.Park(3),
    live_messages.Parked(3, 1000, 2),
    live_messages.AllTrain(3),
    live_messages.Resume(4, {"RANK": "1", "A": "b"}),
]


def make_live(rng: random.Random) -> bytes:
    data = live_messages.encode(rng.choice(LIVE))
    plain = spelled(rng, mutated_tree(rng, json.loads(data)))
    return plain if rng.random() < 0.5 else mutated(rng, data)


def check_live(data: bytes) -> bool:
    """A message that is written as it was read, or none."""
    found = live_messages.decode(data)
    assert found is None or live_messages.decode(live_messages.encode(found)) == found
    return found is not None


TARGETS = {
    "codec": Target(make_codec, check_codec, 400),
    "exchange": Target(make_exchange, check_exchange, 100),
    "parse": Target(make_parse, check_parse, 250),
    "lines": Target(make_lines, check_lines, 80),
    "error_file": Target(make_error_file, check_error_file, 100),
    "report": Target(make_report, check_report, 50),
    "machine": Target(make_machine, check_machine, 20),
    "checkpoint": Target(make_checkpoint, check_checkpoint, 100),
    "http": Target(make_http, check_http, 50),
    "live": Target(make_live, check_live, 20),
}


# -- running them ---------------------------------------------------------------------------------------------------------------


class Broken(AssertionError):
    """An input that breaks its target's rule."""


@dataclass
class Figures:
    inputs: int = 0
    taken: int = 0  # for good
    slowest: float = 0.0  # seconds
    seconds: float = 0.0


def run(name: str, seeds: range, figures: Figures, base: int = 0) -> None:
    """The inputs of these seeds. Raises ``Broken``, which says how to see the input again."""
    target = TARGETS[name]
    for number in seeds:
        seed = f"{base}:{number}"
        given = target.make(random.Random(f"{name} {seed}"))
        began = time.thread_time()
        try:
            taken = target.check(given)
            took = time.thread_time() - began
            assert took < SLOWEST, f"took {took:.1f} s"
        except Exception as error:
            again = f"again with: python -m tests.fuzz --replay {name} {seed}"
            raise Broken(f"{name}: {type(error).__name__}: {str(error)[:400]}; {again}; the input: {repr(given)[:2000]}") from error
        figures.inputs += 1
        figures.taken += taken
        figures.slowest = max(figures.slowest, took)
        figures.seconds += took


def shares(inputs: int, names: list[str]) -> Iterator[tuple[str, int]]:
    """How many of ``inputs`` each target gets."""
    total = sum(TARGETS[name].weight for name in names)
    ends = [inputs * weight // total for weight in accumulate(TARGETS[name].weight for name in names)]
    for name, first, end in zip(names, [0, *ends], ends, strict=False):
        yield name, end - first


def peak() -> int:
    """Most memory this process ever had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


@contextmanager
def told(name: str) -> Iterator[Figures]:
    figures, began = Figures(), time.monotonic()
    yield figures
    share, each = (value / max(1, figures.inputs) for value in (figures.taken, 1e6 * figures.seconds))
    line = f"{name:10} {figures.inputs:8} inputs, {share:4.0%} taken for good, {each:6.0f} µs each, slowest {1e3 * figures.slowest:6.1f} ms"
    print(f"{line}, {time.monotonic() - began:6.1f} s in all, peak {peak()} MiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--target", choices=TARGETS)
    parser.add_argument("--seed", type=int, default=0, help="another one gives other inputs")
    parser.add_argument("--replay", nargs=2, metavar=("TARGET", "SEED"))
    arguments = parser.parse_args()
    if arguments.replay:
        name, seed = arguments.replay
        base, number = map(int, seed.split(":"))
        print(repr(TARGETS[name].make(random.Random(f"{name} {seed}"))))
        run(name, range(number, number + 1), Figures(), base)
        return
    failed, began = False, time.monotonic()
    for name, count in shares(arguments.inputs, [arguments.target] if arguments.target else list(TARGETS)):
        try:
            with told(name) as figures:
                run(name, range(count), figures, arguments.seed)
        except Broken as error:
            failed = True
            print(error, flush=True)
    print(f"{arguments.inputs} inputs in {time.monotonic() - began:.0f} s, {'see above' if failed else 'every rule held'}")
    sys.exit(failed)


if __name__ == "__main__":
    main()

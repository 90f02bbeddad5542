"""The only parser of foreign bytes: one spelling per record, and ``BadRecord`` for everything else, whatever it is."""

from __future__ import annotations

import dataclasses
import enum
import json
import random
import string
import time
import types
import typing
import zlib
from typing import Any

import pytest

from elastirun.errors import BadRecord, BadSignature
from elastirun.rendezvous.wire import codec
from elastirun.rendezvous.wire.codec import MAX_BYTES, MAX_INT, MAX_ITEMS, MAX_TEXT, RANGES, Codec, clip
from elastirun.rendezvous.wire.records import Broken, Cause, Closed, ExitRecord, Member, NodeRow, RoundRecord, Status, Verdict

KEY = "elastirun/job/node/a"
PLAIN, SIGNED = Codec(), Codec(b"the job's token")
Record = NodeRow | RoundRecord

FAILURE = ExitRecord("n0", 3, 1, 4711, -9, 0, 12.5, ("Traceback:\n\x00\x1b[1m", "  boom ü…"))
ROW = NodeRow("n0-1", "n0", "10.0.0.1", 29500, 2, "trainer", 1, 7, Status.DONE, 4, 3, 4, "bye", (FAILURE,))
MEMBERS = (Member("n0-1", "n0", "10.0.0.1", 29500, 2), Member("n1-1", "n1", "fd00::1", 1, 1, "reader"))
ROUND = RoundRecord(
    "s", 9, 4, MEMBERS, "n1 joined", 1, Broken(Cause.LOST, "n1 silent", "n0-1"), Closed(Verdict.FAILED, "r", "n0-1", (FAILURE,))
)


def decode(data: bytes, cls: type[Any] = NodeRow, using: Codec = PLAIN) -> Any:
    """The record, or None for ``BadRecord``. Anything else that is raised fails the test; a record has no second spelling."""
    try:
        record = using.decode(KEY, data, cls)
    except BadRecord as error:
        assert "\n" not in str(error) and str(error).startswith(KEY), "one line that says where"
        return None
    assert using.encode(KEY, record) == data
    return record


def plain(record: Record = ROW, **changes: object) -> bytes:
    """Canonical bytes of ``record`` with fields changed as no dataclass would allow."""
    value = {**json.loads(PLAIN.encode(KEY, record)), **changes}
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


# -- there and back ----------------------------------------------------------------------------------------------------------


def a_value(rng: random.Random, kind: Any, name: str = "") -> Any:
    """Any value the type and the limits allow, edges more often than not."""
    if kind is int:
        allowed = RANGES.get(name, range(-MAX_INT, MAX_INT + 1))
        return rng.choice([allowed[0], allowed[-1], rng.choice(range(1, 4000)), allowed[0] + rng.randrange(allowed[-1] - allowed[0])])
    if kind is bool:
        return rng.random() < 0.5
    if kind is float:
        return rng.choice([0.0, -0.0, 0.1, 1e-300, -1.5, float(MAX_INT), rng.uniform(-1e9, 1e9), rng.random()])
    if kind is str:
        letters = string.ascii_letters + '"\\/ {}[]:,~éß→語🎉'
        return "".join(rng.choices(letters, k=rng.choice([0, 1, 5, 30, MAX_TEXT] if rng.random() < 0.1 else [0, 1, 5])))
    if isinstance(kind, types.UnionType):
        (inner,) = (k for k in typing.get_args(kind) if k is not types.NoneType)
        return rng.choice([None, a_value(rng, inner)])
    if typing.get_origin(kind) is tuple:
        return tuple(a_value(rng, typing.get_args(kind)[0]) for _ in range(rng.choice([0, 0, 1, 2, 5])))
    if issubclass(kind, enum.Enum):
        return rng.choice(list(kind))
    hints = typing.get_type_hints(kind)
    return kind(**{f.name: a_value(rng, hints[f.name], f.name) for f in dataclasses.fields(kind)})


@pytest.mark.daily(4)
@pytest.mark.parametrize("using", [PLAIN, SIGNED], ids=["plain", "signed"])
@pytest.mark.parametrize("cls", [NodeRow, RoundRecord])
def test_every_record_comes_back_as_it_was(cls: type[Any], using: Codec) -> None:
    rng = random.Random(cls.__name__)
    for _ in range(600):
        record = a_value(rng, cls)
        data = using.encode(KEY, record)
        assert data.isascii() and data.count(b"\n") == (using is SIGNED)
        assert decode(data, cls, using) == record


def test_the_spelling_is_what_other_versions_expect() -> None:
    """When this fails because a field was added or means something else, ``FORMAT`` must rise."""
    assert PLAIN.encode(KEY, NodeRow("i", "n", "a", 1, 2, node_rank=3)) == (
        b'{"address":"a","done_round":0,"failures":[],"hosts":false,"id":"i","kept":0,"name":"n","node_rank":3,"note":"","port":1,'
        b'"role":"default","round":0,"seq":1,"slots":2,"standby":0,"started":0,"status":"joining","succeeded":0,"v":14}'
    )
    record = dataclasses.replace(ROUND, members=MEMBERS[:1], broken=Broken(Cause.LOST, "é", "i", ("j",)), closed=None)
    assert PLAIN.encode("round", record) == (
        b'{"broken":{"by":"i","cause":"lost","ended":[],"lost":["j"],"over":false,"ran":0.0,"reason":"\\u00e9","victim":false},"came":[],"closed":null,"failures":1,"host":"","losses":0,'
        b'"members":[{"address":"10.0.0.1","block":0,"id":"n0-1","name":"n0","phase":0,"port":29500,"role":"default","slots":2,"standby":0}],'
        b'"members_digest":"","moved":null,"quick":0,"quorums":[],"reason":"n1 joined","repeats":0,"round":4,"settings":[],"signature":"",'
        b'"store_id":"s","term":0,"v":14,"version":9,"wanted":0}'
    )
    assert Codec(b"t").encode("k", MEMBERS[0]).endswith(b'"v":14}\n8c430c9dcbeec337d6eaedda7a6d8c3507e66d5281df4e70192d2d1ff0d516e5')


def test_a_record_of_another_version_is_refused_with_a_line_that_names_versions() -> None:
    other = PLAIN.encode(KEY, ROW).replace(b'"v":%d' % codec.FORMAT, b'"v":1')
    with pytest.raises(BadRecord, match="are all nodes on the same elastirun version"):
        PLAIN.decode(KEY, other, NodeRow)


# -- hostile bytes -------------------------------------------------------------------------------------------------------------

BYTES = [bytes([b]) for b in b'\x00\n "\\,:{[09-.eut\x7f\xff']


def mutations(data: bytes) -> typing.Iterator[bytes]:
    """Each byte replaced, dropped, doubled or preceded by another; each beginning and each end."""
    for i in range(len(data)):
        yield data[:i]
        yield data[i + 1 :]
        yield data[:i] + data[i + 1 :]
        for b in (*BYTES, bytes([data[i] ^ 1]), bytes([data[i] ^ 32])):
            yield data[:i] + b + data[i + 1 :]
            yield data[:i] + b + data[i:]


@pytest.mark.parametrize("record", [ROW, ROUND], ids=["row", "round"])
def test_a_changed_byte_gives_another_canonical_record_or_bad_record(record: Record) -> None:
    valid = PLAIN.encode(KEY, record)
    found = [decode(data, type(record)) for data in mutations(valid) if data != valid]
    others = [other for other in found if other is not None]
    assert record not in others, "two spellings of one record"
    assert 100 < len(others) < len(found) / 4  # another letter in a name is a valid record; most changes are not


@pytest.mark.parametrize("record", [ROW, ROUND], ids=["row", "round"])
def test_any_change_of_a_signed_record_is_a_bad_signature(record: Record) -> None:
    valid = SIGNED.encode(KEY, record)
    for data in mutations(valid):
        if data != valid:
            with pytest.raises(BadSignature):
                SIGNED.decode(KEY, data, type(record))


def test_a_signature_holds_for_one_key_one_token_and_nothing_unsigned() -> None:
    data = SIGNED.encode(KEY, ROW)
    assert SIGNED.decode(KEY, data, NodeRow) == ROW
    payload, mac = data.split(b"\n")
    for key, using, forged in [
        (KEY + "2", SIGNED, data),  # a row copied under another key
        (KEY.replace("job", "job2"), SIGNED, data),  # ... or into another job
        (KEY, Codec(b"another token"), data),
        (KEY, Codec(b"the job's token", "n1-1"), data),  # ... or into the standby store of a node
        (KEY, SIGNED, Codec(b"the job's token", "n1-1").encode(KEY, ROW)),
        (KEY, SIGNED, payload),
        (KEY, SIGNED, payload + b"\n"),
        (KEY, SIGNED, data + b"\n"),
        (KEY, SIGNED, payload + b"\n" + mac.upper()),
        (KEY, SIGNED, payload + b"\n" + mac[:-1]),
        (KEY, SIGNED, payload + b"\n" + mac.replace(mac[:1], b"\xff")),
        (KEY, SIGNED, b""),
        (KEY, SIGNED, b"\n"),
        (KEY, SIGNED, PLAIN.encode(KEY, ROW)),
    ]:
        with pytest.raises(BadSignature, match="--token-file"):
            using.decode(key, forged, NodeRow)
    with pytest.raises(BadRecord, match="this node has no token") as caught:
        PLAIN.decode(KEY, data, NodeRow)
    assert not isinstance(caught.value, BadSignature)


def test_a_well_signed_record_is_still_judged() -> None:
    for payload in [b"", b"{}", b"[]", plain(slots="2"), b"[" * 100_000]:
        with pytest.raises(BadRecord) as caught:
            SIGNED.decode(KEY, payload + b"\n" + SIGNED._mac(KEY, payload), NodeRow)
        assert not isinstance(caught.value, BadSignature)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"0",
        b'"v"',
        b"[]",
        b"{}",
        b'{"v":9}',
        b"[" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"v":' * 100_000,
        plain()[:-1] + b',"x":' + b"[" * 100_000,
        b"1" * 100_000,
        plain().replace(b'"seq":7', b'"seq":' + b"7" * 100_000),
        plain().replace(b'"seq":7', b'"seq":7,"seq":7'),
        plain().replace(b'"seq":7', b'"seq":07'),
        plain().replace(b'"seq":7', b'"seq":7.0'),
        plain().replace(b'"seq":7', b'"seq":7e0'),
        plain().replace(b'"seq":7', b'"seq":"7"'),
        plain().replace(b"12.5", b"NaN"),
        plain().replace(b"12.5", b"Infinity"),
        plain().replace(b"12.5", b"-Infinity"),
        plain().replace(b"12.5", b"1e999"),
        plain().replace(b"12.5", b"12.50"),
        plain().replace(b"12.5", b"12"),
        plain() + b" ",
        b" " + plain(),
        b"\xef\xbb\xbf" + plain(),
        plain().replace(b"bye", "bÿe".encode()),
        plain().replace(b"bye", b"\\u0062ye"),  # another spelling of the same text
        plain().decode().encode("utf-16"),
    ],
    ids=lambda data: repr(data[:20]),
)
def test_what_is_not_canonical_json_is_bad(data: bytes) -> None:
    assert decode(data) is None and decode(data, RoundRecord) is None


BIG = "x" * (MAX_TEXT + 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"v": 1},
        {"v": True},
        {"v": None},
        {"extra": 1},
        {"name": None},
        {"name": 1},
        {"name": ["n"]},
        {"name": BIG},
        {"name": "\u0000"},  # no environment takes it
        {"name": "\ud800"},  # nor any encoding
        {"name": "a\x1b[2J"},  # a terminal would obey
        {"address": "a\nb"},
        {"address": "a\u202eb"},
        {"id": "a\u2028"},
        {"note": "\t"},
        {"slots": True},
        {"slots": None},
        {"slots": 0},
        {"slots": -1},
        {"slots": 4097},
        {"slots": 2**53},  # nobody is to count that far
        {"port": -1},
        {"port": 65536},
        {"seq": None},
        {"seq": MAX_INT + 1},
        {"seq": -MAX_INT - 1},
        {"seq": 10**400},
        {"node_rank": "1"},
        {"node_rank": False},
        {"status": "gone"},
        {"status": "JOINING"},
        {"status": 1},
        {"status": None},
        {"status": ["joining"]},
        {"status": {}},
        {"failures": None},
        {"failures": {}},
        {"failures": "ab"},
        {"failures": [None]},
        {"failures": [[]]},
        {"failures": [{}]},
        {"failures": [1] * (MAX_ITEMS + 1)},
    ],
    ids=lambda changes: repr(changes)[:40],
)
def test_a_field_of_another_type_or_beyond_its_limit_is_bad(changes: dict[str, object]) -> None:
    assert decode(plain()) == ROW
    assert decode(plain(**changes)) is None


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(NodeRow)] + ["v"])
def test_every_field_must_be_there(name: str) -> None:
    value = json.loads(plain())
    del value[name]
    assert decode(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()) is None


@pytest.mark.parametrize(
    "after",
    [1, "1", None, True, 1e16, -1e16],
)
def test_a_number_with_a_point_stays_within_its_limits(after: object) -> None:
    failure = {**json.loads(plain())["failures"][0], "after": after}
    assert decode(plain(failures=[failure])) is None


def test_stderr_may_hold_anything_but_not_endlessly() -> None:
    for line, good in [("\x00\x1b\t\ud800", True), ("x" * MAX_TEXT, True), (BIG, False), (1, False), (None, False)]:
        failure = {**json.loads(plain())["failures"][0], "lines": [line]}
        assert (decode(plain(failures=[failure])) is not None) is good


def test_a_record_of_another_kind_is_bad() -> None:
    assert decode(PLAIN.encode(KEY, ROW), RoundRecord) is None
    assert decode(PLAIN.encode(KEY, ROUND), NodeRow) is None


def test_twenty_thousand_random_inputs_are_bad_and_quickly_so() -> None:
    rng = random.Random(20_000)
    alphabet = [*b'{}[]",:0123456789.eE-\\u"v"truefalsenull ', *range(256)]
    started = time.monotonic()
    for _ in range(20_000):
        size = rng.choice([0, 1, 2, 8, 64, 200])
        data = rng.randbytes(size) if rng.random() < 0.5 else bytes(rng.choices(alphabet, k=size))
        assert decode(data) is None
    assert time.monotonic() - started < 20  # takes half a second


@pytest.mark.parametrize(
    "data",
    [
        b"x" * (5 << 20),
        PLAIN.encode(KEY, ROW).ljust(5 << 20),
        b"[" * MAX_BYTES,
        b"9" * MAX_BYTES,
        b'"' + b"\\u0000" * (MAX_BYTES // 6 - 1) + b'"',
        b'{"v":9,"x":[' + b"1," * (MAX_BYTES // 2 - 20) + b"1]}",
        b"{" + b",".join(b'"%d":0' % i for i in range(300_000)) + b"}",
    ],
    ids=lambda data: repr(data[:12]),
)
def test_megabytes_of_it_are_bad_too_in_bounded_time(data: bytes) -> None:
    started = time.monotonic()
    assert decode(data) is None
    assert time.monotonic() - started < 10  # takes 0.2 s at most


def test_a_round_of_ten_thousand_nodes_fits() -> None:
    members = tuple(Member(f"host-{i:05}.cluster.example-1234567-0123abcd", f"host-{i:05}.cluster", f"10.1.{i >> 8}.{i & 255}", 65535, 8)
                    for i in range(10_000))  # fmt: skip
    record = RoundRecord("0123456789abcdef", 1, 1, members)
    assert SIGNED.decode("round", SIGNED.encode("round", record), RoundRecord) == record


@pytest.mark.parametrize("changes", [{"slots": True}, {"slots": 1.0}, {"slots": [1]}, {"standby": False}, {"standby": 0.0}, {"name": None}])
def test_a_member_that_was_read_before_admits_no_equal_value_of_another_type(changes: dict[str, object]) -> None:
    member = Member("n0-1", "n0", "10.0.0.1", 29500, 1)
    assert decode(PLAIN.encode(KEY, RoundRecord("s", members=(member,))), RoundRecord).members == (member,)
    value = {**json.loads(PLAIN.encode(KEY, member)), **changes}
    del value["v"]
    assert decode(plain(RoundRecord("s"), members=[value]), RoundRecord) is None


def test_a_record_that_is_good_but_for_its_size_is_bad() -> None:
    members = tuple(Member(f"{i}", "x" * 250, "a", 1, 1) for i in range(MAX_ITEMS))
    data = PLAIN.encode(KEY, RoundRecord("s", members=members))
    assert len(data) > MAX_BYTES and decode(data, RoundRecord) is None


def test_what_no_other_node_could_read_is_not_written() -> None:
    with pytest.raises(ValueError, match="JSON"):
        PLAIN.encode(KEY, dataclasses.replace(ROW, failures=(dataclasses.replace(FAILURE, after=float("nan")),)))


# -- texts ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("plain", 5, "plain"),
        ("longer", 5, "long…"),
        ("a\nb\tc\x1b[0m\x00\ud800", 99, "a b c [0m  "),
        ("é🎉", 99, "é🎉"),
        ("", 0, ""),
    ],
)
def test_clip_makes_any_text_fit_for_a_record(text: str, limit: int, expected: str) -> None:
    assert clip(text, limit) == expected


def test_a_clipped_text_is_always_accepted() -> None:
    rng = random.Random(1)
    for _ in range(300):
        text = clip("".join(chr(rng.randrange(0x3000)) for _ in range(rng.choice([3, 50, 2000]))))
        row = dataclasses.replace(ROW, name=text, note=text)
        assert decode(PLAIN.encode(KEY, row)) == row


def test_no_more_is_decompressed_than_a_record_may_have() -> None:
    assert codec.decompressed(zlib.compress(b" " * (MAX_BYTES + 1))) == b""
    whole = zlib.compress(b" " * MAX_BYTES)
    assert codec.decompressed(whole) == b" " * MAX_BYTES
    for stored in (b"", b"garbage", whole[:-1], whole + b"more"):
        assert codec.decompressed(stored) == b""


def test_limits_are_those_that_are_documented() -> None:
    assert (codec.FORMAT, MAX_TEXT, MAX_INT, MAX_ITEMS, MAX_BYTES) == (14, 1024, 2**53, 16384, 4 << 20)


# -- a row that was only renewed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("using", [PLAIN, SIGNED])
def test_a_renewed_row_is_read_as_any_other_and_whatever_else_is_not_read_quickly(using: Codec) -> None:
    said = dataclasses.replace(ROW, note='"seq":5, and "seq\\":6,', name='"seq":7')
    before = using.encode(KEY, said)
    for seq in (0, 1, 9, 10, 4711, MAX_INT):
        renewed = dataclasses.replace(said, seq=seq)
        assert using.decode_again(KEY, using.encode(KEY, renewed), before, said) == renewed
    more = dataclasses.replace(said, seq=8)
    for other in (dataclasses.replace(more, note="x"), dataclasses.replace(more, status=Status.LEFT), dataclasses.replace(more, kept=1)):
        assert using.decode_again(KEY, using.encode(KEY, other), before, said) is None
    rng, good = random.Random(1), using.encode(KEY, more)
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(rng.choice((1, 1, 2))):
            at = good.find(b'"seq":8') + rng.randrange(8) if rng.random() < 0.7 else rng.randrange(len(data))
            data[at : at + rng.randrange(2)] = rng.choice((b"", b"0", b"8", b"1", b"-", b".", b'"', b"\n", b" ", b"e", b"seq", b"9" * 16))
        quickly = using.decode_again(KEY, bytes(data), before, said)
        assert quickly is None or quickly == decode(bytes(data), NodeRow, using)


def test_a_row_is_not_read_quickly_without_its_signature() -> None:
    before, renewed = SIGNED.encode(KEY, ROW), dataclasses.replace(ROW, seq=ROW.seq + 1)
    others = (PLAIN, Codec(b"another token"), dataclasses.replace(SIGNED, store="n0-1"))
    assert [SIGNED.decode_again(KEY, one.encode(KEY, renewed), before, ROW) for one in others] == [None] * 3
    assert SIGNED.decode_again(KEY + "x", SIGNED.encode(KEY, renewed), before, ROW) is None
    assert PLAIN.decode_again(KEY, SIGNED.encode(KEY, renewed), PLAIN.encode(KEY, ROW), ROW) is None

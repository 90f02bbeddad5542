"""The codec of records: canonical JSON with limits, signed when there is a token. The only parser of foreign bytes.

``decode(encode(x)) == x`` and ``encode(decode(b)) == b``: a record has exactly one spelling, so compare-and-set can be
asked for with records instead of remembered bytes. Nothing is evaluated or unpickled; whatever is wrong with the bytes,
the one answer is ``BadRecord`` (or ``BadSignature``).

A signed value is the JSON, a newline, and the hexadecimal HMAC-SHA256 (RFC 2104) over the store's name, the key and the JSON, with a
zero byte after each of the first two: a row copied under another key, from another job, or into another store does not verify.

See SECURITY.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hmac
import json
import re
import types
import typing
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from elastirun.errors import BadRecord, BadSignature

FORMAT = 14  # raised when a field is added or changes its meaning
MAX_BYTES = 4 << 20  # a round of 10,000 nodes is 2 MB
MAX_TEXT = 1024  # characters of any one string; enough for a line of stderr or a reason
MAX_ITEMS = 16_384  # entries of any one list; more than the nodes of any job
KEPT = 2048  # members that are kept; each may be 16 KiB, by anybody who can write into a store without a token
MAX_INT = 2**53  # what every JSON implementation can hold
PORTS = range(1 << 16)
RANGES = {"slots": range(1, 4097), "port": PORTS, "standby": PORTS, "wanted": range(MAX_ITEMS + 1)}  # of fields that become such numbers

SEQ = re.compile(rb'"seq":(0|[1-9][0-9]{0,15})(?=[,}])')  # in no text: its quotes are escaped

T = TypeVar("T")


@dataclass(frozen=True)
class Codec:
    """Turns records into the bytes that are stored under their ``key``, and back. ``token`` None: unsigned.

    ``store``: the name of the standby store that holds them, see ``Place``; empty: they are where the job was started, or anywhere.
    """

    token: bytes | None = None
    store: str = ""

    def encode(self, key: str, record: Any) -> bytes:
        payload = _spell({"v": FORMAT, **_plain(record)})
        return payload + b"\n" + self._mac(key, payload) if self.token else payload

    def decode(self, key: str, data: bytes, cls: type[T]) -> T:
        """Return the record. Errors: ``BadRecord``; ``BadSignature`` when a token is set and the bytes were not signed with it."""
        if len(data) > MAX_BYTES:
            raise BadRecord(f"{key}: {len(data)} bytes, more than {MAX_BYTES}")
        payload, newline, mac = data.partition(b"\n")
        if self.token and not hmac.compare_digest(mac, self._mac(key, payload)):
            raise BadSignature(f"{key}: not signed with this node's token (is --token-file the same on every node?)")
        if newline and not self.token:
            raise BadRecord(f"{key}: signed, but this node has no token (give the job's --token-file)")
        try:
            plain = _DECODER.decode(payload.decode("ascii"))
            if not isinstance(plain, dict) or plain.pop("v", None) != FORMAT:
                raise BadRecord(f": not a record of format {FORMAT} (are all nodes on the same elastirun version?)")
            record: T = _builder(typing.cast(Any, cls))(plain)
            if _spell({**plain, "v": FORMAT}) != payload:
                raise BadRecord(": not in canonical form")
        except (ValueError, RecursionError) as error:
            raise BadRecord(f"{key}: not JSON: {type(error).__name__}") from None
        except BadRecord as error:
            raise BadRecord(f"{key}{error}") from None
        return record

    def decode_again(self, key: str, data: bytes, before: bytes, record: Any) -> Any:
        """Return what ``decode`` returns for ``data``, in a fifth of the time, if nothing differs from ``before`` but ``seq``; else None.

        ``record``: what ``before`` stands for. Of a thousand rows most are only renewed from one read to the next.
        """
        payload, newline, mac = data.partition(b"\n")
        if (newline and not self.token) or (self.token and not hmac.compare_digest(mac, self._mac(key, payload))):
            return None
        old_payload = before.partition(b"\n")[0]
        new, old = SEQ.search(payload), SEQ.search(old_payload)
        if new is None or old is None or int(new[1]) > MAX_INT:
            return None
        around, old_around = (payload[: new.start(1)], payload[new.end(1) :]), (old_payload[: old.start(1)], old_payload[old.end(1) :])
        return dataclasses.replace(record, seq=int(new[1])) if around == old_around else None

    def _mac(self, key: str, payload: bytes) -> bytes:
        assert self.token is not None
        return hmac.digest(self.token, f"{self.store}\0{key}\0".encode() + payload, "sha256").hex().encode("ascii")


def clip(text: str, limit: int = MAX_TEXT) -> str:
    """Return ``text`` as it may stand in a record: printable, no longer than ``limit`` characters."""
    clean = "".join(c if c.isprintable() else " " for c in text)
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def decompressed(stored: bytes) -> bytes:
    """Return what zlib has compressed to ``stored``; empty: nothing, or more than a record may have."""
    expander = zlib.decompressobj()
    with contextlib.suppress(zlib.error):
        data = expander.decompress(stored, MAX_BYTES)
        return data if expander.eof and not expander.unused_data else b""
    return b""


def _spell(plain: dict[str, Any]) -> bytes:
    return _ENCODER.encode(plain).encode("ascii")


def _no_constant(name: str) -> float:
    raise ValueError(name)


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False, check_circular=False)
_DECODER = json.JSONDecoder(parse_constant=_no_constant)

_PLAIN = frozenset((str, int, float, bool, types.NoneType))


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value + 0.0 if kind is float else value  # -0.0 becomes 0.0: one spelling of each value
    if kind is tuple:
        return [_plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    return {name: _plain(getattr(value, name)) for name in _field_names(typing.cast(Any, kind))}


@functools.cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


Build = Callable[[Any], Any]  # errors: ``BadRecord`` with the way to the field, from where it is called


@functools.cache
def _builder(kind: Any) -> Build:
    """Return the parser of a field's type: scalars, enums, ``X | None``, ``tuple[X, ...]`` and dataclasses."""
    if kind in _SCALARS:
        return _SCALARS[kind]
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        return _tuple_of(_line if item is str else _builder(item))
    if isinstance(kind, types.UnionType):
        (inner,) = (a for a in typing.get_args(kind) if a is not types.NoneType)
        build = _builder(inner)
        return lambda value: None if value is None else build(value)
    if issubclass(kind, enum.Enum):
        return _enum_of(kind)
    return _dataclass_of(kind)


def _scalar(kind: type[Any], is_good: Callable[[Any], bool], what: str) -> Build:
    def parse(value: Any) -> Any:
        if type(value) is not kind or not is_good(value):
            raise BadRecord(f": not {what}")
        return value

    return parse


def _int_in(allowed: range) -> Build:
    return _scalar(int, allowed.__contains__, f"within {allowed[0]} to {allowed[-1]}")


def _line(value: Any) -> Any:
    """Parse a line that a worker wrote to its stderr. It may hold anything; the code that shows it escapes it."""
    if type(value) is not str or len(value) > MAX_TEXT:
        raise BadRecord(f": not a string of at most {MAX_TEXT} characters")
    return value


def _text(value: Any) -> Any:
    """Parse a text. Printable, because it may go to a terminal or into an environment, which takes no NUL."""
    if type(value) is not str or len(value) > MAX_TEXT or not value.isprintable():
        raise BadRecord(f": not a string of at most {MAX_TEXT} printable characters")
    return value


_SCALARS: dict[Any, Build] = {
    str: _text,
    int: _scalar(int, lambda number: abs(number) <= MAX_INT, "an integer within ±2^53"),
    float: _scalar(float, lambda number: abs(number) <= MAX_INT and str(number) != "-0.0", "a number within ±2^53"),  # -0.0 equals 0.0
    bool: _scalar(bool, lambda flag: True, "true or false"),
}


def _tuple_of(build: Build) -> Build:
    def parse(value: Any) -> Any:
        if not isinstance(value, list) or len(value) > MAX_ITEMS:
            raise BadRecord(f": not a list of at most {MAX_ITEMS} entries")
        return tuple(build(item) for item in value)

    return parse


def _enum_of(kind: type[enum.Enum]) -> Build:
    def parse(value: Any) -> Any:
        try:
            return kind(value)
        except (ValueError, TypeError):
            raise BadRecord(f": not one of {', '.join(str(m.value) for m in kind)}") from None

    return parse


def _dataclass_of(kind: type[Any]) -> Build:
    hints = typing.get_type_hints(kind)
    names = [f.name for f in dataclasses.fields(kind)]
    builders = {name: _int_in(RANGES[name]) if name in RANGES else _builder(hints[name]) for name in names}

    def build(*values: Any) -> Any:
        fields, name = {}, ""
        try:
            for (name, parse), value in zip(builders.items(), values, strict=True):
                fields[name] = parse(value)
        except BadRecord as error:
            raise BadRecord(f".{name}{error}") from None
        return kind(**fields)

    # Most members of a round were members of the one before: they are built once. Typed, because True equals 1.
    built = functools.lru_cache(KEPT, typed=True)(build) if set(hints.values()) <= {str, int} else build

    def parse(value: Any) -> Any:
        if not isinstance(value, dict) or value.keys() != builders.keys():
            raise BadRecord(f": not the fields of a {kind.__name__}")
        values = [value[name] for name in names]
        try:
            return built(*values)
        except TypeError:  # unhashable: a list or an object
            return build(*values)

    return parse

"""Pure parsers of option values: text -> value.

Each raises ``ValueError``. The message says what is wrong and, after a semicolon, what to write instead; ``value_of`` puts the name
of the option or variable in front. ``quote`` keeps a message on one line whatever text was given.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import re
import signal
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from elastirun.config import Endpoint, Std, StdMap
from elastirun.errors import UsageError

T = TypeVar("T")

LONGEST_NAME = 200  # characters in a run id or role: they become file names (255 bytes at most) and keys
LONGEST_TIME = 365 * 24 * 3600.0  # seconds: a year; anything longer is a typing mistake, and timers would overflow
MOST_ENDPOINTS = 16  # each is one thread in the node that tells them where the store has moved
LONGEST_QUOTE = 80  # characters of a text in a message


def quote(text: str) -> str:
    """Return ``text`` in quotes: printable, on one line, cut to ``LONGEST_QUOTE``."""
    return repr(text if len(text) <= LONGEST_QUOTE else text[: LONGEST_QUOTE - 3] + "...")


def nearest(text: str, names: Iterable[str]) -> str:
    """Return `` (did you mean X?)`` for the closest of ``names``, or nothing when none is similar enough."""
    close = difflib.get_close_matches(text, list(names), 1)
    return f" (did you mean {close[0]}?)" if close else ""


def value_of(label: str, text: str, parser: Callable[[str], T]) -> T:
    """Return the parsed ``text``. Raises ``UsageError`` with the ``label`` of the option or variable when ``parser`` raises ValueError."""
    try:
        return parser(text)
    except ValueError as error:
        raise UsageError(f"{label}: {error}") from None


def _matched(pattern: str, text: str, wrong: str, flags: int = 0) -> re.Match[str]:
    """Return the match of the whole ``text``. Raises ValueError, which begins with ``text`` and goes on with what is ``wrong``."""
    match = re.fullmatch(pattern, text, flags)
    if match is None:
        raise ValueError(f"{quote(text)} {wrong}")
    return match


def integer(low: int, high: int = 10**9) -> Callable[[str], int]:
    """Return a parser of whole numbers from ``low`` to ``high``."""
    wanted = f"give a whole number of at least {low}" if high == 10**9 else f"give a whole number from {low} to {high}"

    def parse(text: str) -> int:
        value = int(_matched(r"\s*[+-]?[0-9]{1,18}\s*", text, f"is not a whole number; {wanted}")[0])
        if not low <= value <= high:
            raise ValueError(f"{value} is out of range; {wanted}")
        return value

    return parse


UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}  # seconds, see ``duration``


def seconds(low: float = 0.0, *, above: bool = False) -> Callable[[str], float]:
    """Return a parser of durations in seconds: at least ``low``, or more than ``low`` with ``above``."""
    wanted = f"give a number {'above' if above else 'of at least'} {low:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
            if math.isnan(value):
                raise ValueError
        except ValueError:
            raise ValueError(f"{quote(text)} is not a number of seconds; {wanted}") from None
        if value > LONGEST_TIME:
            raise ValueError(f"{quote(text)} seconds is more than a year; {wanted}")
        if value < low or (above and value == low):
            raise ValueError(f"{value:g} seconds is too short; {wanted}")
        return value

    return parse


def seconds_or(**words: float | None) -> Callable[[str], float | None]:
    """Return a parser of durations above 0 in seconds, and of ``words``, each with its value."""

    def parse(text: str) -> float | None:
        if text in words:
            return words[text]
        try:
            return seconds(0.0, above=True)(text)
        except ValueError as error:
            raise ValueError(f"{error}, or {'one of ' if len(words) > 1 else ''}{', '.join(words)}") from None

    return parse


def duration(text: str) -> float:
    """Return the seconds of a duration above 0, as in 90, 90s, 10m or 1.5h; "off" is 0."""
    if text == "off":
        return 0.0
    number, factor = (text[:-1], UNITS[text[-1]]) if text[-1:] in UNITS else (text, 1.0)
    try:
        return seconds(0.0, above=True)(number) * factor
    except ValueError:
        raise ValueError(f"{quote(text)} is not a duration; give a number of seconds, or one with a unit, such as 10m, or off") from None


def choice(*names: str) -> Callable[[str], str]:
    """Return a parser that accepts one of ``names``."""

    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"{quote(text)} is not one of {', '.join(names)}{nearest(text, names)}")
        return text

    return parse


def boolean(text: str) -> bool:
    """Parse ``1 0 true false t f yes no y n on off`` in any case; any other whole number is true, as with torchrun."""
    word = text.strip().lower()
    if re.fullmatch(r"[+-]?[0-9]{1,18}", word):
        return int(word) != 0
    if word in ("true", "t", "yes", "y", "on"):
        return True
    if word in ("false", "f", "no", "n", "off"):
        return False
    raise ValueError(f"{quote(text)} is neither true nor false; give 1 or 0")


def name(text: str) -> str:
    """Parse a run id or a role: printable text of at most ``LONGEST_NAME`` characters."""
    if not text.isprintable():
        raise ValueError(f"{quote(text)} holds control characters; give printable text")
    if len(text) > LONGEST_NAME:
        raise ValueError(f"{quote(text)} has {len(text)} characters; give at most {LONGEST_NAME}")
    return text


def nodes(text: str) -> tuple[int, int]:
    """Parse ``N`` or ``MIN:MAX`` nodes into (minimum, maximum)."""
    parts = [part.strip() for part in text.split(":")]
    if len(parts) > 2 or not all(re.fullmatch(r"\+?[0-9]{1,9}", part) for part in parts):
        raise ValueError(f"{quote(text)} is not a number of nodes; give N or MIN:MAX, such as 2 or 1:4")
    low, high = int(parts[0]), int(parts[-1])
    if low < 1:
        raise ValueError(f"{quote(text)} allows no node at all; give at least 1")
    if low > high:
        raise ValueError(f"{quote(text)} has the smaller number last; did you mean {high}:{low}?")
    return low, high


def node_name(text: str) -> str:
    """Parse a name for a node: letters, digits and ``. _ : @ -``, at most 120."""
    return _matched(r"[\w.:@-]{1,120}", text, "is no name for a node; give at most 120 letters, digits and . _ : @ -")[0]


def host(text: str) -> str:
    """Parse a host name or a numeric address. IPv6 may have brackets; the result has none."""
    stripped = text.strip()
    inner = stripped[1:-1] if stripped.startswith("[") and stripped.endswith("]") else stripped
    if _is_ipv6(inner):
        return inner
    if "://" in inner:
        raise ValueError(f"{quote(text)} is a URL; give the host alone")
    if ":" in inner:
        raise ValueError(f"{quote(text)} is not a host name or an address; if it ends in a port, give that separately")
    if inner != stripped or not re.fullmatch(r"[\w.-]+", inner):
        raise ValueError(f"{quote(text)} is not a host name or an address; give one such as node0.example.org, 10.0.0.1 or [fd00::1]")
    return inner


def endpoint(text: str, default_port: int) -> Endpoint:
    """Parse ``HOST``, ``HOST:PORT``, ``[IPV6]`` or ``[IPV6]:PORT``. Port 0 stands for any free port."""
    given = text.strip()
    if "," in given:
        raise ValueError(f"{quote(text)} names several endpoints; give one HOST:PORT, the same on every node")
    if "://" in given:
        scheme = re.match(r"[A-Za-z0-9+.-]{1,20}://", given)
        raise ValueError(f"{quote(text)} is a URL; give HOST:PORT{f' without {scheme[0]}' if scheme else ''}")
    if _is_ipv6(given):
        raise ValueError(f"{quote(text)} does not say where the address ends and the port begins; write [{given}]:{default_port}")
    where, colon, port = (given, "", "") if given.endswith("]") else given.rpartition(":")
    if not colon:
        return Endpoint(host(given), default_port)
    if re.fullmatch(r"[0-9]+", port) and (len(port) > 5 or int(port) > 65535):
        raise ValueError(f"{quote(text)}: there is no port {quote(port)[1:-1]}; give one from 1 to 65535")
    if not re.fullmatch(r"[0-9]{1,5}", port):
        raise ValueError(f"{quote(text)} has no port number after the colon; give HOST:PORT, such as node0:{default_port}")
    if not where:
        raise ValueError(f"{quote(text)} has no host; give HOST:PORT, such as node0:{port}")
    return Endpoint(host(where), int(port))


def endpoints(text: str, default_port: int) -> tuple[Endpoint, ...]:
    """Parse ``endpoint``s with commas between them. The first is where the store is served, the others are where it may be later."""
    items = [item.strip() for item in text.split(",")]
    if len(items) == 1:
        return (endpoint(text, default_port),)
    if not all(items):
        raise ValueError(f"{quote(text)} has an empty item; give HOST:PORT,HOST:PORT,... without a comma too many")
    if len(items) > MOST_ENDPOINTS:
        raise ValueError(f"{quote(text)} names {len(items)} endpoints; give at most {MOST_ENDPOINTS}: those of a few nodes are enough")
    found = tuple(endpoint(item, default_port) for item in items)
    for one in found:
        if found.count(one) > 1:
            raise ValueError(f"{quote(text)} names {one} twice; give each endpoint once")
        if one.port == 0:
            raise ValueError(f"{quote(text)}: port 0 is any free port, which the other nodes do not know; give each endpoint a port")
    return found


def port_range(text: str) -> tuple[int, int]:
    """Parse ``FIRST:LAST`` into two ports."""
    wrong = "is not a range of ports; give FIRST:LAST, such as 29600:29699"
    match = _matched(r"\s*([0-9]{1,5})\s*:\s*([0-9]{1,5})\s*", text, wrong, re.ASCII)
    first, last = int(match[1]), int(match[2])
    if not (1 <= first <= 65535 and 1 <= last <= 65535):
        raise ValueError(f"{quote(text)}: ports are from 1 to 65535")
    if first > last:
        raise ValueError(f"{quote(text)} has the smaller port last; did you mean {last}:{first}?")
    return first, last


def port_to_serve(text: str) -> Endpoint:
    """Parse ``PORT``, for every interface (the host is empty then), or ``HOST:PORT``. Port 0 stands for any free port."""
    wrong = "has no port; give PORT or HOST:PORT, such as 8080 or 127.0.0.1:8080"
    match = _matched(r"\s*(?:(.*):)?([0-9]+)\s*", text, wrong, re.ASCII | re.DOTALL)
    where, port = match[1] or "", match[2]
    if _is_ipv6(where):
        raise ValueError(f"{quote(text)} does not say where the address ends and the port begins; write [{where}]:{port}")
    if not _is_ipv6(text.strip()) and (len(port) > 9 or int(port) > 65535):
        raise ValueError(f"there is no port {quote(port)[1:-1]}; give one from 1 to 65535, or 0 for any free one")
    return endpoint(text, 8080) if where else Endpoint("", int(port))


def etcd_endpoints(text: str) -> tuple[bool | None, tuple[Endpoint, ...]]:
    """Parse ``a:2379,b:2379``, all with the same scheme or all without, into (whether it is https, the endpoints).

    None in place of whether it is https: there is no scheme.
    """
    schemes: set[str] = set()
    found: list[Endpoint] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        scheme, separator, rest = item.rpartition("://")
        if scheme.lower() not in ("", "http", "https") or (separator and not scheme):
            raise ValueError(f"{quote(item)}: etcd is reached by http:// or https://")
        schemes.add(scheme.lower())
        found.append(endpoint(rest.rstrip("/"), ETCD_PORT))
    if not found or any(one.port == 0 for one in found):
        raise ValueError(f"{quote(text)} names no etcd server; give HOST:{ETCD_PORT},HOST:{ETCD_PORT},...")
    if len(schemes) > 1:
        raise ValueError(f"{quote(text)} mixes http and https; give all servers with the same")
    return {"": None, "http": False, "https": True}[schemes.pop()], tuple(dict.fromkeys(found))


def _is_ipv6(text: str) -> bool:
    with suppress(ValueError):
        ipaddress.IPv6Address(text)
        return text.isprintable()  # IPv6Address accepts any characters in the scope id behind a %
    return False


def std_map(text: str) -> StdMap:
    """Parse ``3`` for every worker, or ``0:1,10:3`` by local rank. Local ranks that are not named get 0."""
    if re.fullmatch(r"[0-3]", text.strip()):
        return StdMap(Std(int(text)))
    by_rank: dict[int, Std] = {}
    for item in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})\s*:\s*([0-3])\s*", item)
        if match is None:
            meaning = "0 (nothing), 1 (stdout), 2 (stderr) or 3 (both)"
            raise ValueError(f"{quote(text)} is not understood; give {meaning}, or LOCAL_RANK:N,... such as 0:3,1:2")
        by_rank[int(match[1])] = Std(int(match[2]))
    return StdMap(Std.NONE, tuple(sorted(by_rank.items())))


def local_ranks(text: str) -> frozenset[int] | None:
    """Parse ``0,2`` into a set of local ranks. Empty text gives None: all of them."""
    if not text.strip():
        return None
    items = text.split(",")
    if not all(re.fullmatch(r"\s*[0-9]{1,9}\s*", item) for item in items):
        raise ValueError(f"{quote(text)} is not a list of local ranks; give whole numbers with commas, such as 0,1")
    return frozenset(int(item) for item in items)


def ranks(text: str) -> tuple[tuple[int, int], ...] | None:
    """Parse ``0,4-7,-1`` into (first, last) of each range; negative ranks count from the end of the world. Empty text gives None: all."""
    found: list[tuple[int, int]] = []
    for item in text.split(",") if text.strip() else []:
        match = re.fullmatch(r"\s*(-?[0-9]{1,9})(?:-([0-9]{1,9}))?\s*", item)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if last < first or first < 0 <= last:
            raise ValueError(f"{quote(text)} is not a list of ranks; give whole numbers with commas, such as 0,4-7,-1 (the last)")
        found.append((first, last))
    return tuple(found) or None


def byte_size(least: int) -> Callable[[str], int]:
    """Return a parser of ``500000`` or ``10M``. K, M, G and T are powers of 1024; a B or iB behind them changes nothing."""

    def parser(text: str) -> int:
        wrong = "is not a number of bytes; give one such as 500000, 10M or 2G"
        match = _matched(r"\s*([0-9]{1,15})\s*([KMGT]?)(i?B)?\s*", text, wrong, re.IGNORECASE)
        value = int(match[1]) << 10 * " KMGT".index(match[2].upper() or " ")
        if value < least:
            raise ValueError(f"{quote(text)} is too little; give {least} bytes or more")
        return value

    return parser


def file_mode(text: str) -> int:
    """Parse ``640`` into 0o640: permissions with which the owner can read and write, and nobody can execute."""
    wrong = "is not understood; give 600 (the owner alone), 640 (and the group) or 644 (everyone)"
    return int(_matched(r"\s*(?:0o?)?(6[0246]{2})\s*", text, wrong)[1], 8)


def needles(text: str) -> tuple[str, ...]:
    """Parse ``apple,orange`` into strings to search for; ``,,`` stands for one comma. Empty strings are dropped: they match every line."""
    parts = [part.replace("\0", ",") for part in text.replace(",,", "\0").split(",")]
    return tuple(part for part in parts if part)


def modules(text: str) -> tuple[str, ...]:
    """Parse ``torch,package.module`` into names of modules. Empty text gives none."""
    names = [item.strip() for item in text.split(",")] if text.strip() else []
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"{quote(name)} is no name of a module; give names with commas, such as torch,transformers")
    return tuple(dict.fromkeys(names))


def signals(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Parse ``SIGTERM,USR1`` into (names that this system knows, in full; names that it does not know)."""
    known: list[str] = []
    unknown: list[str] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        full = item.upper() if item.upper().startswith("SIG") else f"SIG{item.upper()}"
        if full in signal.Signals.__members__:
            known.append(full)
        else:
            unknown.append(item)
    for never in ("SIGKILL", "SIGSTOP"):
        if never in known:
            raise ValueError(f"{never} can be handled by no process; leave it out")
    return tuple(dict.fromkeys(known)), tuple(unknown)


@dataclass(frozen=True)
class RdzvConf:
    """The keys of ``--rdzv-conf`` that have an effect here. None: not given. Times are in seconds."""

    join_timeout: float | None = None
    timeout: float | None = None  # torchrun's name for the join timeout with its static and etcd backends
    last_call: float | None = None
    keep_alive_interval: float | None = None
    keep_alive_max_attempt: int | None = None
    is_host: bool | None = None
    rank: int | None = None
    etcd: tuple[tuple[str, str], ...] = ()  # (key, value) for the etcd backend, with keys of ``ETCD_KEYS``
    unknown: tuple[str, ...] = ()  # keys with no meaning here, each with a hint: ``'use_libuv'`` in quotes


ETCD_PORT = 2379  # etcd's default for clients
KEYS = ("join_timeout", "timeout", "last_call_timeout", "keep_alive_interval", "keep_alive_max_attempt", "is_host", "rank", "store_type")
KEYS_WITHOUT_EFFECT = ("close_timeout", "heartbeat_timeout", "heartbeat", "read_timeout")  # elastirun has no step that they would limit
ETCD_KEYS = ("protocol", "cacert", "cert", "key", "user", "password_file", "prefix")
ETCD_ALIASES = {"ca_cert": "cacert", "ssl_cert": "cert", "ssl_cert_key": "key", "etcd_prefix": "prefix"}  # torchrun's other names


def rdzv_conf(text: str) -> RdzvConf:
    """Parse ``key=value,key=value``, also within one pair of quotes. The last value counts when a key is given twice."""
    pairs = key_values(unquoted(text), "join_timeout=300,is_host=1")
    given = {ETCD_ALIASES.get(key, key): value for key, value in pairs.items()}
    if "password" in given:
        raise ValueError("a password on a command line can be read by everyone on this machine; give password_file=PATH instead")
    known = (*KEYS, *KEYS_WITHOUT_EFFECT, *ETCD_KEYS)

    def read(key: str, parser: Callable[[str], T]) -> T | None:
        try:
            return parser(given[key]) if key in given else None
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None

    positive = seconds(0.0, above=True)
    for key in KEYS_WITHOUT_EFFECT:
        read(key, positive)
    read("store_type", _store_type)
    return RdzvConf(
        join_timeout=read("join_timeout", positive),
        timeout=read("timeout", positive),
        last_call=read("last_call_timeout", seconds()),
        keep_alive_interval=read("keep_alive_interval", positive),
        keep_alive_max_attempt=read("keep_alive_max_attempt", integer(1)),
        is_host=read("is_host", boolean),
        rank=read("rank", integer(0)),
        etcd=tuple((key, value) for key, value in given.items() if key in ETCD_KEYS),
        unknown=tuple(quote(key) + nearest(key, known) for key in given if key not in known),
    )


def unquoted(text: str) -> str:
    """Return ``text`` without one pair of quotes around the whole: lists of arguments in YAML often keep the quotes of a shell."""
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def key_values(text: str, example: str) -> dict[str, str]:
    """Parse ``key=value,key=value`` into a dict, in the order of the values that count: the last one of each key."""
    given: dict[str, str] = {}
    for item in text.strip().split(",") if text.strip() else []:
        key, _, value = (part.strip() for part in item.partition("="))
        if not key or not value:
            raise ValueError(f"{quote(item)} is not KEY=VALUE; give KEY=VALUE,KEY=VALUE such as {example}")
        given.pop(key, None)  # the last spelling of a key comes last: ``log-mode=600,log_mode=640,log-mode=644`` is 644
        given[key] = value
    return given


def settings(text: str, known: Collection[str]) -> dict[str, str]:
    """Parse the keys and values of ``--set``. A key may be written with ``_`` for ``-``, as an option."""
    given = {key.replace("_", "-"): value for key, value in key_values(text, "restart-pause=0,log-mode=640").items()}
    for key in given:
        if key not in known:
            raise ValueError(f"no key {quote(key)}{nearest(key, known)}; the keys are {', '.join(known)}")
    return given


def _store_type(text: str) -> str:
    if text.lower() == "file":
        raise ValueError("file is not built yet in this version; leave it out to use tcp")
    if text.lower() != "tcp":
        raise ValueError(f"{quote(text)} is not known; leave it out to use tcp")
    return "tcp"

"""The parsers of option values: text in, a value or one helpful line out."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from elastirun.cli import parse
from elastirun.cli.parse import RdzvConf
from elastirun.config import Endpoint, Std, StdMap


def complaint(parser: Callable[[str], object], text: str) -> str:
    with pytest.raises(ValueError) as caught:
        parser(text)
    message = str(caught.value)
    assert message.isprintable() and len(message) < 250
    return message


@pytest.mark.parametrize(
    ("text", "expected"), [("1", (1, 1)), ("4", (4, 4)), ("1:4", (1, 4)), (" 2 : 3 ", (2, 3)), ("2:2", (2, 2)), ("+1:08", (1, 8))]
)
def test_nodes(text: str, expected: tuple[int, int]) -> None:
    assert parse.nodes(text) == expected


@pytest.mark.parametrize("text", ["", "a", "1:", ":2", "1:2:3", "1-2", "1.5", "-1", "²", "9" * 10, "1\n:x"])
def test_what_is_not_a_number_of_nodes(text: str) -> None:
    assert "give N or MIN:MAX" in complaint(parse.nodes, text)


def test_no_nodes_and_nodes_the_wrong_way_round() -> None:
    assert "at least 1" in complaint(parse.nodes, "0")
    assert "at least 1" in complaint(parse.nodes, "0:2")
    assert "did you mean 2:3?" in complaint(parse.nodes, "3:2")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node0", Endpoint("node0", 29400)),
        ("node0:1", Endpoint("node0", 1)),
        (" node0.example.org:29500 ", Endpoint("node0.example.org", 29500)),
        ("my_pod-0:65535", Endpoint("my_pod-0", 65535)),
        ("10.0.0.1:0", Endpoint("10.0.0.1", 0)),
        ("[fd00::1]", Endpoint("fd00::1", 29400)),
        ("[fd00::1]:5", Endpoint("fd00::1", 5)),
        ("[fe80::1%eth0]:5", Endpoint("fe80::1%eth0", 5)),
        ("::1:29400", Endpoint("::1", 29400)),  # five digits are no part of an address, so torchrun gets it right too
    ],
)
def test_endpoint(text: str, expected: Endpoint) -> None:
    assert parse.endpoint(text, 29400) == expected


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("node0:", "HOST:PORT"),
        ("node0:65536", "there is no port 65536; give one from 1 to 65535"),
        ("node0:http", "HOST:PORT"),
        ("node0:-1", "HOST:PORT"),
        (":29400", "no host"),
        ("tcp://node0:29400", "without tcp://"),
        ("a:1,b:2", "one HOST:PORT"),
        ("fd00::1", "[fd00::1]:29400"),
        ("fd00::1:2379", "[fd00::1:2379]:29400"),
        ("no de:1", "host name"),
        ("no\nde0:1", "host name"),
        ("[node0]:1", "host name"),
        ("a:b:1", "host name"),
        ("$HOST:1", "host name"),
    ],
)
def test_what_is_no_endpoint(text: str, hint: str) -> None:
    assert hint in complaint(lambda given: parse.endpoint(given, 29400), text)


def test_endpoints() -> None:
    assert parse.endpoints(" node0:7 ", 29400) == (Endpoint("node0", 7),)
    assert parse.endpoints("node0, node1:7,[fd00::1]:8", 29400) == (Endpoint("node0", 29400), Endpoint("node1", 7), Endpoint("fd00::1", 8))
    assert parse.endpoints("node0:0", 29400) == (Endpoint("node0", 0),), "alone it means a private store"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("a,,b", "an empty item"),
        ("a,b,", "a comma too many"),
        (",", "an empty item"),
        ("a:1,b:1,a:1", "names a:1 twice"),
        ("a,b,a:29400", "names a:29400 twice"),
        ("a:1,b:0", "port 0 is any free port"),
        ("a:1,tcp://b:1", "without tcp://"),
        (",".join(f"n{i}" for i in range(17)), "names 17 endpoints; give at most 16"),
    ],
)
def test_what_are_no_endpoints(text: str, hint: str) -> None:
    assert hint in complaint(lambda given: parse.endpoints(given, 29400), text)


@pytest.mark.parametrize(("text", "expected"), [("node0", "node0"), (" ::1 ", "::1"), ("[::1]", "::1"), ("127.0.0.1", "127.0.0.1")])
def test_host(text: str, expected: str) -> None:
    assert parse.host(text) == expected


@pytest.mark.parametrize("text", ["", "a b", "node0:29500", "http://node0", "[node0]", "a/b", "a,b"])
def test_what_is_no_host(text: str) -> None:
    assert complaint(parse.host, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", StdMap()),
        ("3", StdMap(Std.ALL)),
        ("0:3", StdMap(Std.NONE, ((0, Std.ALL),))),
        ("1:2,0:1", StdMap(Std.NONE, ((0, Std.OUT), (1, Std.ERR)))),
        ("0:1,10:3", StdMap(Std.NONE, ((0, Std.OUT), (10, Std.ALL)))),  # torchrun knows one digit only
        ("0:1, 0:2", StdMap(Std.NONE, ((0, Std.ERR),))),
    ],
)
def test_std_map(text: str, expected: StdMap) -> None:
    assert parse.std_map(text) == expected


@pytest.mark.parametrize("text", ["", "4", "33", "0:1,1", "0:4", ":1", "0:1,", "-1:1", "all", "0:1;1:2"])
def test_what_is_no_std_map(text: str) -> None:
    assert "1 (stdout)" in complaint(parse.std_map, text)


def test_local_ranks() -> None:
    assert parse.local_ranks("") is None
    assert parse.local_ranks(" 0, 12 ,3") == frozenset({0, 3, 12})
    for text in ("a", "0,", "-1", "0 1", ","):
        assert "whole numbers with commas" in complaint(parse.local_ranks, text)


def test_ranks() -> None:
    assert parse.ranks("") is None
    assert parse.ranks(" 0, 4-7 ,-1,3-3") == ((0, 0), (4, 7), (-1, -1), (3, 3))
    for text in ("a", "0,", "1-", "-", "7-4", "-3-5", "-3--1", "0 1", ",", "1.5"):
        assert "whole numbers with commas" in complaint(parse.ranks, text)


def test_byte_sizes() -> None:
    read = parse.byte_size(100)
    for text, value in {"100": 100, " 5K ": 5120, "10m": 10 << 20, "2GiB": 2 << 30, "1tb": 1 << 40, "300B": 300}.items():
        assert read(text) == value
    for text in ("", "M", "-5K", "1.5G", "10X", "1 0", "0x10", "10KM"):
        assert "such as 500000, 10M or 2G" in complaint(read, text)
    assert complaint(read, "99") == "'99' is too little; give 100 bytes or more"


def test_ports_to_serve() -> None:
    found = {" 8080 ": ("", 8080), ":0": ("", 0), "127.0.0.1:80": ("127.0.0.1", 80), "[::1]:80": ("::1", 80), "h:0": ("h", 0)}
    for text, endpoint in found.items():
        assert parse.port_to_serve(text) == Endpoint(*endpoint)
    for text in ("", "h", "h:", "127.0.0.1", "[::1]", "8080x", "-1", "1.5", "http://h"):
        assert "has no port; give PORT or HOST:PORT" in complaint(parse.port_to_serve, text)
    for text in ("65536", "99999999", "9" * 5000, "h:65536", "[::1]:70000"):
        assert "there is no port" in (message := complaint(parse.port_to_serve, text)) and message.endswith("or 0 for any free one")
    for text, right in {"::1": "[::1]:8080", "::1:80": "[::1]:80", "fd00::1:8080": "[fd00::1]:8080"}.items():
        assert complaint(parse.port_to_serve, text).endswith(f"write {right}")


def test_needles() -> None:
    assert parse.needles("") == ()
    assert parse.needles("apple,orange") == ("apple", "orange")
    assert parse.needles("a,,b,c") == ("a,b", "c")
    assert parse.needles("a,,,b") == ("a,", "b")
    assert parse.needles("a,") == ("a",)


def test_signals() -> None:
    assert parse.signals("SIGTERM,SIGUSR1") == (("SIGTERM", "SIGUSR1"), ())
    assert parse.signals(" term, SIGTERM,usr2") == (("SIGTERM", "SIGUSR2"), ())
    assert parse.signals("SIGFOO,SIGINT,SIG_DFL") == (("SIGINT",), ("SIGFOO", "SIG_DFL"))
    assert parse.signals("") == ((), ())
    assert "SIGKILL can be handled by no process" in complaint(parse.signals, "SIGTERM,SIGKILL")


@pytest.mark.parametrize("text", ["1", " 2 ", "true", "T", "yes", "Y", "on"])
def test_true(text: str) -> None:
    assert parse.boolean(text) is True


@pytest.mark.parametrize("text", ["0", "false", "f", "No", "n", "OFF", "00"])
def test_false(text: str) -> None:
    assert parse.boolean(text) is False


@pytest.mark.parametrize("text", ["", "maybe", "1.0", "yess", "None"])
def test_neither(text: str) -> None:
    assert "give 1 or 0" in complaint(parse.boolean, text)


def test_numbers() -> None:
    assert parse.integer(0)(" +3 ") == 3
    assert parse.seconds()("1.5") == 1.5
    assert parse.seconds()("0") == 0.0
    for text in ("", "x", "1.0", "0x1", "1_0", "٣"):
        assert "is not a whole number" in complaint(parse.integer(0), text)
    assert "at least 0" in complaint(parse.integer(0), "-1")
    assert "from 1 to 8" in complaint(parse.integer(1, 8), "9")
    for text in ("", "5s", "1:00", "nan"):
        assert "not a number of seconds" in complaint(parse.seconds(), text)
    for text in ("inf", "1e9"):
        assert "more than a year" in complaint(parse.seconds(), text)
    assert "too short" in complaint(parse.seconds(), "-inf")
    assert "above 0" in complaint(parse.seconds(0.0, above=True), "0")
    assert "at least 1" in complaint(parse.seconds(1.0), "0.9")


def test_names_become_files_and_keys() -> None:
    assert parse.name("job 7/é") == "job 7/é"
    assert "control characters" in complaint(parse.name, "a\nb")
    assert "at most 200" in complaint(parse.name, "x" * 201)


def test_choice_names_the_nearest() -> None:
    assert parse.choice("spawn", "fork")("fork") == "fork"
    assert "did you mean spawn?" in complaint(parse.choice("spawn", "fork"), "spwan")


def test_rdzv_conf() -> None:
    assert parse.rdzv_conf("") == parse.rdzv_conf("  ") == RdzvConf()
    text = "join_timeout=1.5, last_call_timeout = 0,keep_alive_interval=2,keep_alive_max_attempt=4,is_host=yes,rank=1,cert=/x=y"
    assert parse.rdzv_conf(text) == RdzvConf(1.5, None, 0.0, 2.0, 4, True, 1, (("cert", "/x=y"),))
    assert parse.rdzv_conf("close_timeout=1,heartbeat_timeout=2,heartbeat=2,read_timeout=3,store_type=TCP") == RdzvConf()
    assert parse.rdzv_conf("rank=1,rank=2").rank == 2
    assert parse.rdzv_conf("cacert=/1,ca_cert=/2,cacert=/3") == parse.rdzv_conf("cacert=/3")


def test_etcd_endpoints() -> None:
    a, b = Endpoint("a", 2379), Endpoint("fd00::1", 7)
    assert parse.etcd_endpoints("a") == (None, (a,))
    assert parse.etcd_endpoints(" a:2379, [fd00::1]:7,a ") == (None, (a, b))
    assert parse.etcd_endpoints("https://a/,HTTPS://[fd00::1]:7") == (True, (a, b))
    assert parse.etcd_endpoints("http://a:2379,") == (False, (a,))


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (",", "no etcd server"),
        ("a:0", "no etcd server"),
        ("http://a,b", "mixes http and https"),
        ("unix://a", "http:// or https://"),
        ("://a", "http:// or https://"),
        ("https://a/b", "a/b"),
        ("a:b", "no port number"),
    ],
)
def test_what_is_no_etcd(text: str, hint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(hint)):
        parse.etcd_endpoints(text)


@pytest.mark.parametrize("text", ["'join_timeout=7,timeout=9'", ' "timeout=9,join_timeout=7" ', "timeout=9,join_timeout=7"])
def test_one_pair_of_quotes_around_rdzv_conf_is_dropped(text: str) -> None:
    assert parse.rdzv_conf(text) == RdzvConf(join_timeout=7.0, timeout=9.0)


def test_unknown_keys_of_rdzv_conf_are_kept_for_a_warning() -> None:
    assert parse.rdzv_conf("use_libuv=0,join_timout=5") == RdzvConf(unknown=("'use_libuv'", "'join_timout' (did you mean join_timeout?)"))
    assert "password_file" in parse.rdzv_conf("passwordfile=p").unknown[0]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("a", "KEY=VALUE"),
        ("=1", "KEY=VALUE"),
        ("rank=", "KEY=VALUE"),
        ("rank=1,", "KEY=VALUE"),
        ("'", "KEY=VALUE"),
        ("user=a,password=secret", "password_file=PATH"),
        ("join_timeout=0", "join_timeout: 0 seconds"),
        ("timeout=soon", "timeout: 'soon'"),
        ("is_host=perhaps", "is_host: 'perhaps'"),
        ("rank=-1", "rank: -1"),
        ("keep_alive_max_attempt=1.5", "keep_alive_max_attempt: '1.5'"),
        ("read_timeout=x", "read_timeout: 'x'"),
        ("store_type=file", "not built yet"),
        ("store_type=redis", "'redis'"),
    ],
)
def test_what_is_no_rdzv_conf(text: str, hint: str) -> None:
    assert hint in complaint(parse.rdzv_conf, text)


def test_a_quoted_text_stays_on_one_line() -> None:
    assert parse.quote("a\nb\udcff") == r"'a\nb\udcff'"
    assert len(parse.quote("x" * 1000)) == 82


@pytest.mark.parametrize(("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("10m", 600.0), ("1.5h", 5400.0), ("off", 0.0)])
def test_a_duration_may_have_a_unit(text: str, seconds: float) -> None:
    assert parse.duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "0", "-1m", "10d", "nan", "1e999h", "ten"])
def test_a_duration_is_not(text: str) -> None:
    assert complaint(parse.duration, text).startswith(repr(text))

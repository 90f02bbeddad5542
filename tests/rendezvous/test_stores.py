"""The conformance suite that every store passes, and tests of the traps of torch's TCPStore."""

from __future__ import annotations

import itertools
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import pytest

from elastirun.errors import LargeAnswer, StoreError
from elastirun.rendezvous.stores import tcp, tcp_server, tcp_wire
from elastirun.rendezvous.stores.base import Store
from elastirun.rendezvous.stores.etcd.store import connector as etcd_connector
from elastirun.rendezvous.stores.memory import MemoryStore
from elastirun.rendezvous.stores.tcp import TcpStore, connect
from elastirun.rendezvous.stores.tcp_server import connector, serve, tcp_store_class
from elastirun.rendezvous.stores.tcp_wire import TcpConnection
from tests.support.etcd_server import Etcd, etcd
from tests.support.listener import Listener, count_up
from tests.support.relay import something_else
from tests.support.until import PATIENCE, until

T = TypeVar("T")


def listening(address: str = "127.0.0.1", port: int = 0) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((address, port))
    made.listen(128)
    return made


@dataclass
class Server:
    """A TCPStore in this process. Deleting ``served`` ends it.

    On 127.0.0.1, whose name is in /etc/hosts: TCPStore looks names up, and a name server may be slow.
    """

    address: str
    port: int
    served: Any

    def connect(self) -> TcpStore:
        return connect(self.address, self.port)

    def foul(self, operation: str, *key_and_values: object) -> Any:
        """Call ``set``, ``append``, ``delete_key`` ... as a hostile client would, and wait until the call has arrived."""
        client = tcp_store_class()(self.address, self.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
        answer = getattr(client, operation)(*key_and_values)
        client.check(["any"])
        return answer


def new_server() -> Server:
    open_socket = listening()
    address, port = open_socket.getsockname()
    return Server(address, port, serve(open_socket))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = new_server()
    yield made
    made.served = None


@dataclass
class Shelf:
    """The part of a store for one test. ``connect`` opens one more connection; every key begins with ``prefix``."""

    connect: Callable[[], Store]
    prefix: str

    def __call__(self, name: str) -> str:
        return self.prefix + name


@pytest.fixture(scope="module")
def etcd_server() -> Iterator[Etcd]:
    with etcd() as made:
        yield made


@pytest.fixture(params=["memory", "tcp", "etcd"])
def shelf(request: pytest.FixtureRequest) -> Shelf:
    prefix = f"elastirun/{abs(hash(request.node.name))}/"
    if request.param == "tcp":
        return Shelf(request.getfixturevalue("server").connect, prefix)
    if request.param == "etcd":
        return Shelf(etcd_connector(request.getfixturevalue("etcd_server").endpoints), prefix)
    data: dict[str, bytes] = {}
    lock = threading.Lock()
    return Shelf(lambda: MemoryStore(data, lock), prefix)


def in_threads(count: int, work: Callable[[int], T]) -> list[T]:
    """Run ``work(i)`` in ``count`` threads that begin together. Return the results in order."""
    results: dict[int, T] = {}
    together = threading.Barrier(count)

    def run(i: int) -> None:
        together.wait(PATIENCE)
        results[i] = work(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(results) == count, "a thread failed or hung"
    return [results[i] for i in range(count)]


# -- the contract of stores/base.py -------------------------------------------------------------------------------------------


CASES = [
    (None, None, b"1", b"1", b"1"),  # created
    (None, b"0", b"1", None, None),  # an expectation of what is not there
    (None, b"1", b"1", None, None),  # ... even when it is the new value itself
    (b"0", b"0", b"1", b"1", b"1"),  # updated
    (b"0", b"0", b"0", b"0", b"0"),
    (b"0", None, b"1", b"0", b"0"),  # another client was first
    (b"0", b"2", b"1", b"0", b"0"),  # another client has changed the value
    (b"1", b"0", b"1", b"1", b"1"),  # our own write, whose answer was lost
    (b"1", None, b"1", b"1", b"1"),
    (b"00", b"0", b"1", b"00", b"00"),  # the whole value counts
]


@pytest.mark.parametrize(("before", "expected", "value", "returned", "held"), CASES)
def test_put_if_sets_only_what_was_expected_and_tells_what_is_there(
    shelf: Shelf, before: bytes | None, expected: bytes | None, value: bytes, returned: bytes | None, held: bytes | None
) -> None:
    store = shelf.connect()
    if before is not None:
        assert store.put_if(shelf("k"), None, before) == before
    assert store.put_if(shelf("k"), expected, value) == returned
    assert store.get([shelf("k")]) == ({} if held is None else {shelf("k"): held})
    assert store.under(shelf.prefix) == ({} if held is None else {shelf("k"): held})


@pytest.mark.parametrize(("before", "expected", "value", "returned", "held"), CASES)
@pytest.mark.parametrize("polled", [False, True])
def test_a_write_and_what_is_read_after_it_may_go_together(
    shelf: Shelf, polled: bool, before: bytes | None, expected: bytes | None, value: bytes, returned: bytes | None, held: bytes | None
) -> None:
    store, key, other = shelf.connect(), shelf("k"), shelf("other")
    store.put_if(other, None, b"5")
    store.put_if(key, None, before or b"9")
    if before is None:
        shelf.connect().delete(key)
    keys = [shelf("none"), other, key]
    descriptor = store.ask(key, expected, value, keys) if polled else None
    if descriptor is None:
        found = store.put_if_and_get(key, expected, value, keys)
    else:
        while (answer := store.answer()) is None:
            assert select.select([descriptor], [], [], PATIENCE)[0]
        found = answer
    assert found == (returned, {other: b"5"} if held is None else {key: held, other: b"5"})
    assert shelf.connect().get(keys) == found[1]


def test_what_a_connection_may_not_take_at_once_is_not_asked_without_waiting(shelf: Shelf) -> None:
    store, key = shelf.connect(), shelf("k")
    for before, after in ((b"1", b"2"), (b"2", b"x" * 8192), (b"x" * 8192, b"3")):
        store.put_if(key, None, before)
        large = len(before) + len(after) > tcp_wire.NEVER_WAITS
        assert not large or store.ask(key, before, after, [key]) is None
        assert store.put_if_and_get(key, before, after, [key]) == (after, {key: after})


def has_arrived(connection: TcpConnection, length: int) -> bool:
    """Take what has arrived. Return whether that are ``length`` bytes of answers that are not complete."""
    if connection.arrived(3) is not None:
        return False
    return len(connection._arrived) == length


def test_an_answer_that_arrives_in_pieces_is_taken_as_a_whole() -> None:
    values = [b"", b"one", b"x" * 10_000]
    answers = b"".join(len(value).to_bytes(8, "little") + value for value in values)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        connection = TcpConnection("127.0.0.1", listening.getsockname()[1], PATIENCE)
        peer, _ = listening.accept()
        with closing(connection), peer:
            for begin, end in itertools.pairwise((0, 5, 8, 12, 18, 19, 7_000, len(answers) - 1)):
                peer.sendall(answers[begin:end])
                until(partial(has_arrived, connection, end), "the piece")
            peer.sendall(answers[-1:])
            assert until(lambda: connection.arrived(3), "the rest") == values
            peer.sendall(tcp_wire.AT_ONCE.to_bytes(8, "little"))
            with pytest.raises(LargeAnswer):
                until(lambda: connection.arrived(1), "an error")


def test_has_tells_whether_a_key_exists(shelf: Shelf) -> None:
    store, key = shelf.connect(), shelf("has/a")
    assert not store.has(key)
    store.put_if(key, None, b"1")
    assert store.has(key) and shelf.connect().has(key) and not store.has(shelf("has"))
    store.delete(key)
    assert not store.has(key) and not store.get([key])


def test_get_returns_those_that_exist(shelf: Shelf) -> None:
    store = shelf.connect()
    assert store.get([]) == {} == store.get([shelf("a"), shelf("b")])
    store.put_if(shelf("a"), None, b"1")
    store.put_if(shelf("c"), None, b"3")
    wanted = [shelf(name) for name in "abca"]
    assert store.get(wanted) == {shelf("a"): b"1", shelf("c"): b"3"}
    assert store.get(key for key in wanted) == {shelf("a"): b"1", shelf("c"): b"3"}, "any iterable, and a second time"
    store.put_if(shelf("b"), None, b"2")
    store.put_if(shelf("c"), b"3", b"4")
    assert store.get(wanted) == {shelf("a"): b"1", shelf("b"): b"2", shelf("c"): b"4"}


@pytest.mark.parametrize(
    "value", [b"\x00", bytes(range(256)), b"~", b"\n", b" ", "é".encode(), b"x" * (1 << 20)], ids=lambda v: repr(v[:4])
)
def test_a_value_is_any_bytes_up_to_a_megabyte(shelf: Shelf, value: bytes) -> None:
    store, second = shelf.connect(), shelf.connect()
    assert store.put_if(shelf("k"), None, b"0") == b"0"
    assert store.put_if(shelf("k"), b"0", value + b"!") == value + b"!"
    assert second.get([shelf("k")]) == second.under(shelf.prefix) == {shelf("k"): value + b"!"}
    assert second.put_if(shelf("k"), value, b"1") == value + b"!"
    assert second.put_if(shelf("k"), value + b"!", b"1") == b"1"


def test_under_knows_its_prefix(shelf: Shelf) -> None:
    store = shelf.connect()
    for name in ["node/a", "node/b", "node2/c", "nod/d", "round", "node/deep/e"]:
        store.put_if(shelf(name), None, name.encode())
    assert store.under(shelf("node/")).keys() >= {shelf("node/a"), shelf("node/b")}
    assert store.under(shelf("node/")).keys() <= {shelf("node/a"), shelf("node/b"), shelf("node/deep/e")}
    assert store.under(shelf("node2/")) == {shelf("node2/c"): b"node2/c"}
    assert store.under(shelf("none/")) == {}


def test_what_is_deleted_is_gone_and_can_be_created_again(shelf: Shelf) -> None:
    store, second = shelf.connect(), shelf.connect()
    store.delete(shelf("k"))
    store.put_if(shelf("k"), None, b"1")
    assert second.get([shelf("k")]) == {shelf("k"): b"1"}
    store.delete(shelf("k"))
    for reader in (store, second):
        assert reader.get([shelf("k")]) == reader.under(shelf.prefix) == {}
    assert second.put_if(shelf("k"), b"1", b"2") is None
    assert second.put_if(shelf("k"), None, b"2") == b"2" == store.get([shelf("k")])[shelf("k")]


def test_a_second_connection_sees_what_the_first_has_written(shelf: Shelf) -> None:
    first, second = shelf.connect(), shelf.connect()
    for i in range(20):
        assert first.put_if(shelf("k"), str(i - 1).encode() if i else None, str(i).encode()) == str(i).encode()
        assert second.get([shelf("k")]) == second.under(shelf.prefix) == {shelf("k"): str(i).encode()}


def test_nothing_is_lost_when_many_create_at_once(shelf: Shelf) -> None:
    def create(i: int) -> set[str]:
        store = shelf.connect()
        for j in range(25):
            store.put_if(shelf(f"{i}-{j}"), None, b"x")
        return set(store.under(shelf.prefix))

    seen = in_threads(4, create)
    everything = {shelf(f"{i}-{j}") for i in range(4) for j in range(25)}
    assert set(shelf.connect().under(shelf.prefix)) == everything
    for i in range(4):
        assert {shelf(f"{i}-{j}") for j in range(25)} <= seen[i] <= everything, "one's own are there at once"


def test_of_many_that_create_one_key_one_wins_and_all_learn_who(shelf: Shelf) -> None:
    stores = [shelf.connect() for _ in range(4)]
    keys = [shelf(str(turn)) for turn in range(25)]
    answers = in_threads(4, lambda i: [stores[i].put_if(key, None, b"by %d" % i) for key in keys])
    assert answers[0] == answers[1] == answers[2] == answers[3]
    assert dict(zip(keys, answers[0], strict=True)) == stores[0].under(shelf.prefix)


def test_a_counter_loses_no_increment(shelf: Shelf) -> None:
    """4 connections make 200 increments each by compare-and-set. Without linearizability some would be lost."""
    key = shelf("counter")
    shelf.connect().put_if(key, None, b"0")

    def count(i: int) -> None:
        store, now = shelf.connect(), b"0"
        for _ in range(200):
            while True:
                wish = f"{int(now.split()[0]) + 1} {i}".encode()  # unlike anybody else's
                found = store.put_if(key, now, wish)
                assert found is not None
                if found == wish:
                    now = wish
                    break
                now = found

    in_threads(4, count)
    assert int(shelf.connect().get([key])[key].split()[0]) == 800


@pytest.mark.parametrize("shelf", ["tcp", "etcd"], indirect=True)  # those that push; a store in memory serves one node
def test_each_change_of_a_watched_key_is_pushed_and_nothing_else(shelf: Shelf) -> None:
    key, other = shelf("round"), shelf("2/round")
    writers = [shelf.connect(), shelf.connect()]
    listeners = [Listener(shelf.connect(), key), Listener(shelf.connect(), key)]
    for i in range(2, 12):
        count_up(writers[i % 2], key)
        count_up(writers[0], other)
        writers[1].put_if(shelf(f"node/{i}"), None, b"1")
        writers[1].put_if(key, b"another expectation", b"1")
        assert all(one.hears(i) for one in listeners)
    writers[0].delete(key)
    assert all(one.hears(12) for one in listeners)
    listeners[0].store.close()
    writers[0].put_if(key, None, b"again")
    assert listeners[1].hears(13) and listeners[0].calls == 12
    listeners[1].store.close()


@pytest.mark.parametrize("shelf", ["tcp", "etcd"], indirect=True)
def test_who_wrote_a_watched_key_hears_of_it_like_all_others(shelf: Shelf) -> None:
    store = shelf.connect()
    listener = Listener(store, shelf("round"))
    for i in range(2, 7):
        count_up(store, shelf("round"))
        assert listener.hears(i)
    store.close()


def test_close_never_raises(shelf: Shelf) -> None:
    store = shelf.connect()
    store.close()
    store.close()
    assert shelf.connect().get([shelf("k")]) == {}, "the others do not care"


# -- TCPStore: when the server is gone ---------------------------------------------------------------------------------------


OPERATIONS: dict[str, Callable[[Store], object]] = {
    "get of a key known": lambda store: store.get(["a/known"]),
    "get of another": lambda store: store.get(["a/unknown"]),
    "under": lambda store: store.under("a/"),
    "put": lambda store: store.put_if("a/known", b"1", b"2"),
    "create": lambda store: store.put_if("a/new", None, b"2"),
}


def test_without_a_server_every_operation_is_a_store_error() -> None:
    server = new_server()
    stores = {what: server.connect() for what in OPERATIONS}
    for store in stores.values():
        store.put_if("a/known", None, b"1")
        assert store.get(["a/known"]) == {"a/known": b"1"}
    server.served = None
    for what, store in stores.items():
        with pytest.raises(StoreError) as caught:
            OPERATIONS[what](store)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300, "one line, without torch's stack trace"
        store.close()
    with pytest.raises(StoreError, match=f"cannot connect to the store at {server.address}:{server.port}"):
        server.connect()


@pytest.mark.parametrize("reply", [b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10, b""], ids=["another language", "hangs up"])
def test_what_is_not_a_store_is_a_store_error(reply: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "HANG_LIMIT", 0.2)
    with something_else(reply) as where, pytest.raises(StoreError):
        store = connect(*where)
        store.get(["a/b"])  # the first answer may still have looked like one
        store.get(["a/b"])


def test_where_torchs_newer_server_takes_no_bound_socket_the_older_one_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_torch_2_6(*_: object, use_libuv: bool = True, master_listen_fd: int, **__: object) -> str:
        if use_libuv:
            raise RuntimeError("The libuv TCPStore backend does not support initialization with an listen fd.")
        os.close(master_listen_fd)
        return "served"

    def of_any(*_: object, master_listen_fd: int, **__: object) -> str:
        os.close(master_listen_fd)
        raise RuntimeError("no memory is left")

    monkeypatch.setattr(tcp_server, "tcp_store_class", lambda: of_torch_2_6)
    assert tcp_server.serve(socket.create_server(("127.0.0.1", 0))) == "served"
    monkeypatch.setattr(tcp_server, "tcp_store_class", lambda: of_any)
    with pytest.raises(RuntimeError, match="no memory"):
        tcp_server.serve(socket.create_server(("127.0.0.1", 0)))


def test_a_store_too_large_a_value_is_refused_not_swallowed(server: Server) -> None:
    if not server.served.libuvBackend:
        pytest.skip("the server of an old torch, which takes values of any size")
    with pytest.raises(StoreError):
        store = server.connect()
        store.put_if("large/a", None, b"x" * (9 << 20))
        store.get(["large/a"])
    assert server.connect().under("large/") == {}, "the server lives"


# -- TCPStore: the index of keys ----------------------------------------------------------------------------------------------


def test_a_key_whose_creator_died_before_it_was_indexed_is_indexed_by_its_next_connection(server: Server) -> None:
    server.foul("compare_set", "died/a", "", "1")
    assert server.connect().under("died/") == {}
    again = server.connect()
    assert again.put_if("died/a", b"1", b"2") == b"2"
    assert server.connect().under("died/") == {"died/a": b"2"}


def test_many_keys_are_not_read_one_by_one(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = server.connect(), server.connect()
    there = {f"job/vote/{i}": b"%d" % i for i in range(0, 200, 2)}
    for key, value in there.items():
        writer.put_if(key, None, value)
    sent: list[bytes] = []
    send = TcpConnection.send
    monkeypatch.setattr(TcpConnection, "send", lambda self, data: (sent.append(data), send(self, data)))
    assert reader.get(f"job/vote/{i}" for i in range(200)) == there
    assert len(sent) == 1, "what belongs together travels in one request"
    late = {"job/vote/1": b"late"}
    monkeypatch.undo()
    writer.put_if("job/vote/1", None, b"late")
    assert reader.get(f"job/vote/{i}" for i in range(200)) == there | late
    for store in (writer, reader):
        store.close()


def test_the_index_grows_once_per_connection_not_with_writes(server: Server) -> None:
    store = server.connect()
    for i in range(50):
        for key in ("grow/round", "grow/node/a"):
            store.put_if(key, str(i - 1).encode() if i else None, str(i).encode())
        store.under("grow/node/")
    assert server.foul("get", "grow/~index").split() == [b"grow/round"]
    assert server.foul("get", "grow/node/~index").split() == [b"grow/node/a"]


def test_keys_that_each_round_has_anew_pile_up_neither_in_an_index_nor_in_a_connection(server: Server) -> None:
    """As the lists of members: one node writes the new one and deletes the old one, all others read it."""
    writer, reader = server.connect(), server.connect()
    folder, sizes = f"elastirun/job/{id(server)}/members/", []
    for i in range(20):
        writer.put_if(f"{folder}{i}", None, b"x")
        assert reader.get([f"{folder}{i}"]) == {f"{folder}{i}": b"x"}
        writer.delete(f"{folder}{i - 1}")
        sizes.append([server.foul("num_keys"), *(len(store._indexed) for store in (writer, reader))])
    assert sizes[-1] == sizes[1]


def test_a_job_may_have_the_name_of_that_folder(server: Server) -> None:
    row = "elastirun/job/members/node/a"
    server.connect().put_if(row, None, b"1")
    assert server.connect().under("elastirun/job/members/node/") == {row: b"1"}


GARBAGE = [
    b"no line end",
    b"\xff\xfe\x00\x1b[2J\r\n\x85\n",
    b"garbage/never-created\ngarbage/\n" * 50,
    b"garbage/~index\n",
    b"elsewhere/key\ngarbage\n",
    b"garbage/" + b"x" * 10_000 + b"\n",
    b"",
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda g: repr(g[:12]))
def test_garbage_in_the_index_neither_blocks_nor_hides_a_key(server: Server, garbage: bytes) -> None:
    store = server.connect()
    server.foul("append", "garbage/~index", garbage)
    server.foul("set", "elsewhere/key", "x")
    key = f"garbage/{GARBAGE.index(garbage)}"
    assert store.put_if(key, None, b"1") == b"1"
    for reader in (store, server.connect()):
        found = reader.under("garbage/")
        assert found[key] == b"1" and set(found.values()) == {b"1"}


def test_an_index_that_was_overwritten_is_mended_by_those_who_write(server: Server) -> None:
    stores = [server.connect(), server.connect()]
    for i, store in enumerate(stores):
        store.put_if(f"mend/{i}", None, b"0")
    server.foul("set", "mend/~index", "\n")
    for i, store in enumerate(stores):  # as in each exchange of a node that waits for a round: write, then read all
        assert len(store.under("mend/")) == i
        store.put_if(f"mend/{i}", b"0", b"1")
    assert server.connect().under("mend/") == {"mend/0": b"1", "mend/1": b"1"}


@pytest.mark.parametrize("garbage", [b"", b"~", b"\xff\xfe", b"\n\x00", b"x" * (2 << 20)], ids=lambda g: repr(g[:6]))
def test_garbage_in_a_row_is_read_as_it_is_and_can_be_written_over(server: Server, garbage: bytes) -> None:
    store, prefix = server.connect(), f"row{hash(garbage)}/"
    assert store.put_if(prefix + "a", None, b"1") == b"1"
    server.foul("set", prefix + "a", garbage)
    assert store.under(prefix) == store.get([prefix + "a"]) == {prefix + "a": garbage}
    found = store.put_if(prefix + "a", b"1", b"2")
    if found != b"2":  # an empty value is as good as none
        assert store.put_if(prefix + "a", found, b"2") == b"2"
    assert server.connect().get([prefix + "a"]) == {prefix + "a": b"2"}


def test_a_key_that_was_deleted_does_not_block(server: Server) -> None:
    store = server.connect()
    store.put_if("gone/a", None, b"1")
    store.put_if("gone/b", None, b"1")
    assert len(store.get(["gone/a", "gone/b"])) == 2
    server.foul("delete_key", "gone/a")
    assert store.get(["gone/a", "gone/b"]) == store.under("gone/") == {"gone/b": b"1"}


def test_what_is_not_kept_is_deleted_whoever_wrote_it(server: Server) -> None:
    if not hasattr(server.served, "list_keys"):
        pytest.skip("the server of an old torch, which lists no keys")
    store = server.connect()
    store.put_if("kept/a", None, b"1")
    kept = server.foul("num_keys")
    for key in ("of a worker", "kep", "elsewhere/kept/a", "é"):
        server.foul("set", key, "x")
    assert store.clear("", 60.0) and server.foul("num_keys") == kept + 4, "every key begins so"
    assert store.clear("k", 0.0) is False, "there is no time left"
    everything = {key.split("/")[0] for key in server.foul("list_keys")} - {"of a worker", "elsewhere", "é", "kep"}
    assert store.clear("kept/", 60.0) and store.get(["kept/a"]) == {"kept/a": b"1"}
    assert everything and {key for key in server.foul("list_keys") if not key.startswith("kept/")} == set()


# -- TCPStore: who serves --------------------------------------------------------------------------------------------------------


def test_the_host_serves_once_and_connects_to_itself() -> None:
    sockets = [listening()]
    connect = connector(sockets.pop, lambda: pytest.fail("the host knows where its store is"))
    first, second = connect(), connect()
    assert first.hosting and second.hosting and not sockets
    first.put_if("a/b", None, b"1")
    first.close()
    assert second.get(["a/b"]) == {"a/b": b"1"}, "a closed connection does not end the store"


@pytest.mark.parametrize("address", ["0.0.0.0", "127.0.0.1"])
def test_a_store_listens_where_its_socket_is_bound_and_nowhere_else(address: str) -> None:
    made = listening(address)
    port = made.getsockname()[1]
    connect = connector(lambda: made, lambda: ("", 0))
    connect().put_if("a/b", None, b"1")
    elsewhere = socket.socket()
    with elsewhere:
        assert (elsewhere.connect_ex(("127.0.0.4", port)) == 0) is (address == "0.0.0.0")


def test_a_client_never_becomes_the_host(server: Server) -> None:
    asked: list[None] = []
    connect = connector(lambda: asked.append(None), lambda: (server.address, server.port))
    assert not connect().hosting and not connect().hosting
    assert len(asked) == 1, "once connected as a client, hosting is out of the question: it would be an empty store"


def test_who_could_not_connect_yet_may_still_become_the_host() -> None:
    made = [None, listening()]

    def resolve() -> tuple[str, int]:
        raise StoreError("nobody there yet")

    connect = connector(lambda: made.pop(0), resolve)
    with pytest.raises(StoreError, match="nobody there yet"):
        connect()
    assert connect().hosting


def test_a_socket_that_cannot_be_served_is_a_store_error() -> None:
    broken = socket.socket(type=socket.SOCK_DGRAM)
    broken.bind(("127.0.0.1", 0))
    with pytest.raises(StoreError):
        connector(lambda: broken, lambda: ("127.0.0.1", 1))()


def test_two_attempts_at_once_serve_one_store() -> None:
    """The store thread abandons a slow attempt and starts another. The first one must not serve a second, empty store then."""
    offered: list[socket.socket] = []
    slow = threading.Event()

    def open_socket() -> socket.socket:
        offered.append(listening())
        slow.wait(0.2)
        return offered[-1]

    connect = connector(open_socket, lambda: ("", 0))
    stores = in_threads(2, lambda i: connect())
    assert len(offered) == 1 and all(store.hosting for store in stores)
    stores[0].put_if("a/b", None, b"1")
    assert stores[1].get(["a/b"]) == {"a/b": b"1"}


def test_a_server_that_is_dropped_gives_its_port_back() -> None:
    server = new_server()
    server.connect().put_if("a/b", None, b"1")
    server.served = None
    with listening(server.address, server.port) as again:
        assert again.getsockname()[1] == server.port, "else binding it is an OSError"

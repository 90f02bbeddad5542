"""Standby stores at the edge: who serves them and reaches them, and what the guard of a dead host writes there."""

from __future__ import annotations

import fcntl
import itertools
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastirun import clock
from elastirun.agent.guard_lease import GuardLease
from elastirun.agent.host import net
from elastirun.agent.processes import death_notice
from elastirun.agent.processes.death_notice import Notice, encode_vote, tell_standbys, write
from elastirun.agent.processes.process_tree import _make_room
from elastirun.agent.store import endpoint_access
from elastirun.agent.store import forwarding as forwarding_module
from elastirun.agent.store.choose_store import store_access
from elastirun.agent.store.endpoint_access import EndpointAccess
from elastirun.agent.store.forwarding import Forwarding
from elastirun.config import Endpoint
from elastirun.errors import StoreError
from elastirun.rendezvous.stores.tcp import TcpStore
from elastirun.rendezvous.stores.tcp_server import ServedStore, tcp_store_class
from elastirun.rendezvous.wire.actions import Change, Put, Sync
from elastirun.rendezvous.wire.codec import Codec
from elastirun.rendezvous.wire.events import Synced
from elastirun.rendezvous.wire.records import Member, NodeRow, Place, RoundRecord, Vote
from elastirun.rendezvous.wire.sync import SyncProtocol, execute
from tests.cli.test_resolve import config_of
from tests.rendezvous.test_stores import listening
from tests.support.cluster import PATIENCE, dies, free_port
from tests.support.listener import Listener
from tests.support.relay import something_else
from tests.support.torch_client import torch_client
from tests.support.until import until

JOB = "elastirun/job/test/"


# -- serving and reaching standby stores


@pytest.fixture
def port() -> int:
    return free_port()


@contextmanager
def access(i: int, port: int, option: str = "--store-succession=proof", job: str = "test") -> Iterator[EndpointAccess]:
    """The access of "node" 127.0.0.<i>. The first that connects serves the store at the endpoint."""
    where = f"--rdzv-endpoint=127.0.0.1:{port} --local-addr=127.0.0.{i}"
    made = store_access(config_of(f"--nnodes=1:3 --rdzv-id={job} {where} {option} t.py"))
    assert isinstance(made, EndpointAccess)
    made.me = f"n{i}"
    try:
        yield made
    finally:
        made.close()
        made.end_store()


def place(of: EndpointAccess) -> Place:
    return Place(of.me, of.node_address.address, of.standby_port)


def test_a_store_that_has_answered_is_given_more_time_when_it_is_reached_again(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the store of a large job moves, all nodes connect at once. A store that does not answer is given up soon, for the next one."""
    limits: list[float] = []

    def opened(address: str, port: int, limit: float, creates: tuple[str, ...]) -> TcpStore:
        limits.append(limit)
        return TcpStore(address, port, limit, creates)

    with access(1, port) as host, access(2, port) as other:
        for each in (host, other):
            each.connect(None).close()
        monkeypatch.setattr(endpoint_access, "TcpStore", opened)
        for _ in range(2):
            host.connect(place(other)).close()
    assert limits == [endpoint_access.STANDBY_LIMIT, endpoint_access.ANSWER_LIMIT]


def test_the_standby_store_of_a_later_agent_at_the_same_port_is_not_that_of_an_earlier_one(port: int) -> None:
    with access(1, port) as host, access(2, port) as other:
        for each in (host, other):
            each.connect(None).close()
        with pytest.raises(StoreError, match="is another agent's; the one that served it has ended"):
            host.connect(replace(place(other), id="an earlier agent's"))


def test_a_job_in_the_store_of_another_one_is_warned_once(port: int) -> None:
    with access(1, port) as host, access(2, port, job="other") as guest:
        host.connect(None).close()
        for _ in range(2):
            guest.connect(None).close()
        assert [line for line in guest.notices if "hosted by the agent of job 'test'" in line] == list(guest.notices)[:1]


def test_a_node_with_a_single_port_serves_no_standby_store(port: int) -> None:
    only = free_port()
    with access(1, port, f"--port-range={only}:{only}") as host:
        host.connect(None).close()
        assert host.standby_port == 0
        with closing(socket.create_server(("127.0.0.1", only))):
            pass  # it is free


def test_each_agent_serves_an_empty_standby_store_on_its_own_address(port: int) -> None:
    with access(1, port) as host, access(2, port) as other:
        stores = [each.connect(None) for each in (host, other)]
        assert [store.hosting for store in stores] == [True, False]
        assert {host.standby_port, other.standby_port, port, 0} == {host.standby_port, other.standby_port, port, 0} and host.standby_port
        for one in (host, other):
            for at in map(place, (host, other)):
                store = one.connect(at)
                assert store.hosting == (at == place(one)), "who serves it knows"
                assert store.under("elastirun/jobs/") == store.under("elastirun/job/") == {}, "no job is on a list there"
                store.close()
        before = other.standby_port
        other.connect(None).close()
        assert other.standby_port == before, "another connection serves no second one"


def test_what_one_writes_into_a_standby_store_the_others_read(port: int) -> None:
    with access(1, port) as host, access(2, port) as other:
        host.connect(None), other.connect(None)
        other.connect(place(other)).put_if("a/b", None, b"1")
        assert host.connect(place(other)).get(["a/b"]) == {"a/b": b"1"}
        assert host.connect(place(host)).get(["a/b"]) == host.connect(None).get(["a/b"]) == {}


def test_an_agent_without_the_option_serves_none(port: int) -> None:
    with access(1, port, "--store-succession=off") as host:
        host.connect(None).close()
        assert host.standby_port == 0


def test_who_has_moved_never_serves_the_endpoint(port: int) -> None:
    """Its store would be empty, and another round could begin there."""
    with access(1, port) as host, access(2, port) as other:
        host.connect(None), other.connect(None)
        host.end_store()
        for _ in range(2):
            other.connect(place(other)).close()
            with pytest.raises(StoreError, match="gone or cut off"):
                other.connect(None)
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)), "nobody listens there"
        with pytest.raises(StoreError, match="has ended its store"):
            host.connect(None)


@contextmanager
def full_backlog() -> Iterator[tuple[str, int]]:
    """A listening socket that takes no further connection: the kernel drops the attempts."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        clients = [socket.socket() for _ in range(4)]
        for client in clients:
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        try:
            yield full.getsockname()
        finally:
            for client in clients:
                client.close()


@contextmanager
def silent() -> Iterator[tuple[str, int]]:
    """Like an agent that stands still: the kernel accepts the connection, and nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made.getsockname()


@contextmanager
def refused() -> Iterator[tuple[str, int]]:
    yield "127.0.0.1", free_port()


@contextmanager
def nameless() -> Iterator[tuple[str, int]]:
    yield "a label of far more than sixty-three characters, which no name has, no, none.invalid", 1


def foreign() -> Any:
    return something_else(b"HTTP/1.1 400 no\r\n\r\n")


@pytest.mark.parametrize(
    ("dead", "why"),
    [(refused, "refused"), (silent, "no answer"), (full_backlog, "timed out"), (foreign, "no TCPStore"), (nameless, "resolve")],
)
def test_a_standby_store_that_is_no_use_is_given_up_soon_with_one_line(port: int, dead: Callable[[], Any], why: str) -> None:
    with access(1, port) as host, dead() as (address, number):
        host.connect(None).close()
        began = time.monotonic()
        with pytest.raises(StoreError, match=why) as caught:
            host.connect(Place("n9", address, number))
        assert time.monotonic() - began < 10 * 3 * endpoint_access.STANDBY_LIMIT
        assert "\n" not in str(caught.value) and address in str(caught.value)


def accepted(still: socket.socket) -> int:
    """Return how many clients have connected to a server that stands still."""
    still.setblocking(False)
    for count in itertools.count():
        try:
            still.accept()[0].close()
        except BlockingIOError:
            return count
    raise AssertionError


@pytest.mark.parametrize("newcomer", [False, True])
def test_a_store_that_stands_still_is_asked_once_and_by_a_newcomer_again(newcomer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_access, "ANSWER_LIMIT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as still, access(2, still.getsockname()[1]) as node:
        node.newcomer = newcomer
        with pytest.raises(StoreError, match="does not answer"):
            node.connect(None)
        assert accepted(still) == 1 + 1 + newcomer, "with the probe"
        with pytest.raises(StoreError, match="no answer"):
            node.connect(Place("n9", *still.getsockname()))
        assert accepted(still) == 1


def test_the_guard_is_sent_to_the_store_in_use(port: int) -> None:
    with access(1, port) as host, access(2, port) as other:
        host.connect(None), other.connect(None)
        assert other.for_guard(None) == {"kind": "tcp", "address": "127.0.0.1", "port": port}
        other.connect(place(host)).close()
        assert other.for_guard(place(host)) == {"kind": "tcp", "address": "127.0.0.1", "port": host.standby_port, "owner": place(host).name}
        assert other.for_guard(None) == {"kind": "tcp", "address": "127.0.0.1", "port": port}, "an answer that comes late changes nothing"


def test_a_node_that_has_given_up_its_standby_store_serves_another_one_at_another_port(port: int) -> None:
    with access(1, port) as host, access(2, port) as other:
        host.connect(None), other.connect(None)
        ports = []
        for _ in range(3):
            old = place(other)
            host.connect(old).close()
            other.renew_standby()
            assert other.standby_port == 0, "nobody can go there until it serves the next one"
            other.connect(None).close()
            ports.append(old.port)
            for node in (host, other):
                with pytest.raises(StoreError):
                    node.connect(old)
                node.connect(place(other)).close()
        assert len({*ports, other.standby_port}) == 4


def test_a_node_without_another_port_goes_on_without_a_standby_store(port: int) -> None:
    first, last = port + 1, port + 2
    with access(1, port) as host, access(2, port, f"--store-succession=proof --port-range={first}:{last}") as other:
        host.connect(None), other.connect(None)
        free = first + last - other.standby_port
        with socket.create_server(("127.0.0.2", free)):
            other.renew_standby()
            other.connect(None).close()
            assert other.standby_port == 0
        other.connect(None).close()
        assert other.standby_port == free


def test_a_status_is_sent_to_the_store_in_use_also_on_its_host(port: int) -> None:
    with access(1, port) as host, access(2, port) as other:
        assert host.for_status(None) == {"kind": "none"}, "it has not reached a store yet"
        host.connect(None), other.connect(None)
        assert host.for_status(None) == other.for_status(None) == {"kind": "tcp", "address": "127.0.0.1", "port": port}
        standby = {"kind": "tcp", "address": "127.0.0.2", "port": other.standby_port, "owner": place(other).name}
        assert host.for_status(place(other)) == other.for_status(place(other)) == standby


# -- who comes up where the job was started


HERE = Place("n1", "127.0.0.2", 4711)
EMPTY = RoundRecord("another run's")
MOVED = RoundRecord("the job that has moved", term=1)


def protocol(token: bytes | None = None) -> SyncProtocol:
    return SyncProtocol(JOB, "me", Codec(token), clock.now)


def put(store: ServedStore, record: RoundRecord, base: RoundRecord | None = None, token: bytes | None = None) -> None:
    """Write the record, as a node does that comes up there."""
    protocol(token).carry_out(store.connect(), Sync(change=Change(base, record)), 0.0)


def read(store: ServedStore, token: bytes | None = None) -> RoundRecord | None:
    synced: Synced = protocol(token).carry_out(store.connect(), Sync(rows=()), 0.0)
    return synced.round


def await_place(store: ServedStore, place: Place, token: bytes | None = None) -> None:
    """Wait until the store names the place. A watch could end before that, so this function polls."""
    until(lambda: (record := read(store, token)) is not None and record.moved == place, f"{place} in the store")


@contextmanager
def forwarding(
    port: int, found: Callable[[RoundRecord], None] = lambda record: None, token: bytes | None = None, others: tuple[Endpoint, ...] = ()
) -> Iterator[Forwarding]:
    made = Forwarding((Endpoint("127.0.0.1", port), *others), protocol(token), found)
    made.told = HERE, MOVED
    assert made.start_threads() == ""
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def appeared(port: int) -> Iterator[ServedStore]:
    made = ServedStore(listening(port=port))
    yield made
    made.close()


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when the thread has begun its fourth try, which comes soon."""
    tries: list[str] = []
    fourth = threading.Event()

    def resolve(host: str) -> tuple[str, ...]:
        tries.append(host)
        if len(tries) > 3:
            fourth.set()
        return ("127.0.0.1",)

    monkeypatch.setattr(forwarding_module, "FORWARD_EVERY", 0.01)
    monkeypatch.setattr(net, "resolve", resolve)
    return fourth


@pytest.mark.parametrize("token", [None, b"the token of this job"])
def test_a_store_that_appears_where_the_job_was_started_is_told_where_it_is_now(port: int, token: bytes | None) -> None:
    with forwarding(port, token=token) as made:
        store = ServedStore(listening(port=port))
        listener = Listener(store.connect(), protocol().round_key)
        put(store, EMPTY, token=token)
        await_place(store, HERE, token)
        assert listener.hears(3), "the node there is told at once: of its own record, and of this one"
        other = replace(HERE, port=4712)
        made.told = other, MOVED
        await_place(store, other, token)
        listener.store.close()
        store.close()


def test_who_has_too_few_nodes_overrules_no_other_word(appeared: ServedStore, looked: threading.Event) -> None:
    put(appeared, told := replace(EMPTY, moved=replace(HERE, port=4712)))
    with forwarding(appeared.port) as made:
        made.told = HERE, None
        assert looked.wait(PATIENCE)
    assert read(appeared) == told


def test_a_store_in_which_a_round_has_formed_is_left_alone(appeared: ServedStore) -> None:
    formed = replace(EMPTY, version=2, round=1, members=(Member("n9", "n9", "127.0.0.9", 1, 1),))
    put(appeared, formed)
    with closing(TcpStore("127.0.0.1", appeared.port)) as store:
        assert execute(protocol().put_moved(HERE), store) == formed == read(appeared)


def test_a_run_that_has_begun_where_the_job_was_started_is_reported_once(port: int, appeared: ServedStore, looked: threading.Event) -> None:
    formed = replace(EMPTY, version=2, round=1, members=(Member("n9", "n9", "127.0.0.9", 1, 1),))
    found: queue.Queue[RoundRecord] = queue.Queue()
    put(appeared, formed)
    with forwarding(port, found.put):
        assert found.get(timeout=PATIENCE) == formed and looked.wait(PATIENCE)
        put(appeared, broken := replace(formed, version=3, reason="another"), formed)
        assert found.get(timeout=PATIENCE) == broken, "not the same one twice"


@pytest.mark.parametrize("first", [True, False], ids=["at the first endpoint", "at another one"])
def test_the_word_of_another_run_is_reported_each_time_that_it_stands_there(port: int, first: bool, looked: threading.Event) -> None:
    other = replace(HERE, id="n9", port=4712, run="another run's")
    found: queue.Queue[RoundRecord] = queue.Queue()
    standby = ServedStore(listening())
    store, elsewhere = (ServedStore(listening(port=port)), ()) if first else (standby, (Endpoint("127.0.0.1", standby.port),))
    if first:
        put(store, EMPTY)
    told = protocol()
    try:
        with forwarding(port, found.put, others=elsewhere):
            for _ in range(2):
                with closing(TcpStore("127.0.0.1", store.port, 1.0, (told.moved_key,))) as client:
                    execute(told.put_moved(other) if first else told.put_place(other), client)
                while (word := found.get(timeout=PATIENCE).moved) != other:
                    pass
                assert word is not None and word.run == other.run
    finally:
        store.close()
        standby.close()


def test_nothing_is_written_where_nobody_has_begun(appeared: ServedStore) -> None:
    with closing(TcpStore("127.0.0.1", appeared.port)) as store:
        assert execute(protocol().put_moved(HERE), store) is None
    assert [key for key in torch_client(appeared.connect()).list_keys() if key.startswith("elastirun/")] == []


@pytest.mark.parametrize("what", ["nobody", "another program", "garbage", "a stranger's record"])
def test_whatever_else_is_there_does_not_end_the_tries(port: int, what: str, looked: threading.Event) -> None:
    with foreign() as (_, number), forwarding(number if what == "another program" else port, token=b"the token of this job"):
        if what in ("garbage", "a stranger's record"):
            store = ServedStore(listening(port=port))
            store.connect().put_if(protocol().round_key, None, b"\0" if what == "garbage" else Codec().encode("x", EMPTY))
        assert looked.wait(PATIENCE)
    if what in ("garbage", "a stranger's record"):
        store.close()


# -- the votes that the guard of a dead host writes


class Standbys:
    """``count`` standby stores of the members n1, n2, ... of a round whose host was n0."""

    def __init__(self, count: int) -> None:
        self.served = [ServedStore(listening()) for _ in range(count)]
        self.where = [("127.0.0.1", store.port) for store in self.served]

    def record(self, *others: tuple[str, int]) -> RoundRecord:
        """The round of the host, then ``others`` (standby stores that are none of ours), then our stores, in rank order."""
        members = [Member(f"n{i}", f"n{i}", *where, 1, standby=where[1]) for i, where in enumerate([*others, *self.where], 1)]
        return RoundRecord("s", 9, 3, (Member("n0", "n0", "127.0.0.1", 1, 1, standby=1), *members), host="n0")

    def notice(self, *others: tuple[str, int], token: bytes | None = None) -> Notice:
        vote = Vote("n0", self.record(*others), ("n0",))
        return Notice(None, JOB, "n0", token, 3, 12.5, encode_vote(vote, token))

    def told(self, token: bytes | None = None) -> list[tuple[Vote, ...]]:
        """The votes in each of our stores, as a node reads them."""
        sync = Sync(rows=(), voters=("n0",))
        names = [f"n{k}:{store.port}" for k, store in enumerate(self.served, 1)]
        stores = zip(names, self.served, strict=True)
        return [protocol(token).fresh(name).carry_out(store.connect(), sync, 0.0).votes for name, store in stores]

    def await_told(self) -> None:
        """Wait until each of our stores has a vote."""
        until(lambda: all(self.told()), "a vote in each store", state=self.told)

    def close(self) -> None:
        for store in self.served:
            store.close()


@pytest.fixture
def standbys() -> Iterator[Callable[[int], Standbys]]:
    made: list[Standbys] = []
    yield lambda count: made.append(Standbys(count)) or made[-1]  # type: ignore[func-returns-value]
    for each in made:
        each.close()


@pytest.mark.parametrize("token", [None, b"the token of this job"])
def test_each_member_finds_the_vote_of_the_dead_host_with_the_whole_round(standbys: Callable[[int], Standbys], token: bytes | None) -> None:
    stores = standbys(2)
    vote = Vote("n0", stores.record(), ("n0",))
    assert write(stores.notice(token=token).encode(), clock.now())
    assert stores.told(token) == [(vote,), (vote,)]
    assert stores.told(b"another") == [(), ()], "nobody else can forge it"
    assert write(stores.notice(token=token).encode(), clock.now()) and stores.told(token) == [(vote,), (vote,)], "as often as you like"


def test_the_vote_of_a_member_is_for_a_store_that_cannot_be_reached(standbys: Callable[[int], Standbys], port: int) -> None:
    stores, mine = standbys(1), {"kind": "tcp", "address": "127.0.0.1", "port": port}
    store = ServedStore(listening("127.0.0.1", port))
    notice = replace(stores.notice(), store=mine)
    here = SyncProtocol(JOB, "n0", Codec(None), clock.now)
    here.carry_out(store.connect(), Sync(put=Put(None, NodeRow("n0", "n0", "127.0.0.1", 1, 1))), 0.0)
    assert write(notice.encode(), clock.now()) and stores.told() == [()]
    store.close()
    assert write(notice.encode(), clock.now()) and stores.told() == [(Vote("n0", stores.record(), ("n0",)),)]


def test_in_an_empty_store_nobody_waits(standbys: Callable[[int], Standbys], port: int) -> None:
    stores, mine = standbys(1), {"kind": "tcp", "address": "127.0.0.1", "port": port}
    store = ServedStore(listening("127.0.0.1", port))
    assert write(replace(stores.notice(), store=mine).encode(), clock.now())
    assert stores.told() == [(Vote("n0", stores.record(), ("n0",)),)]
    store.close()


def test_nothing_else_is_written(standbys: Callable[[int], Standbys]) -> None:
    stores = standbys(1)
    assert write(stores.notice().encode(), clock.now())
    client = stores.served[0].connect()
    keys = {key for key in torch_client(client).list_keys() if key.startswith("elastirun/")}
    assert {key.rpartition("/")[0] for key in keys} == {f"{JOB}vote", f"{JOB}members"} and len(keys) == 2


@pytest.mark.parametrize("dead", [refused, silent, full_backlog, nameless, foreign])
def test_a_dead_store_delays_the_others_little(standbys: Callable[[int], Standbys], dead: Callable[[], Any]) -> None:
    stores = standbys(2)
    with dead() as where:
        notice, told = stores.notice(*[where] * 5), set[str]()
        began = time.monotonic()
        assert not tell_standbys(notice, told), "the guard tries those again"
        assert told == {"n6", "n7"} and time.monotonic() - began < 10 * death_notice.TELL_LIMIT
    assert all(stores.told())


def test_several_stores_are_asked_at_the_same_time(standbys: Callable[[int], Standbys], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes its time does not delay the next."""
    tcp_store_class()  # imported before anybody waits
    monkeypatch.setattr(death_notice, "STANDBY_LIMIT", 10.0)
    monkeypatch.setattr(death_notice, "TELL_LIMIT", PATIENCE)
    stores, slow = standbys(0), [listening() for _ in range(3)]
    stores.where = [one.getsockname() for one in slow]

    def serve() -> None:
        """Answer when each has been asked."""
        for one in slow:
            assert select.select([one], [], [], PATIENCE)[0]
        stores.served = [ServedStore(one) for one in slow]

    serving = threading.Thread(target=serve)
    serving.start()
    assert tell_standbys(stores.notice(), set())
    serving.join()
    assert all(stores.told())


def test_a_store_that_never_finishes_its_answer_is_left_behind(
    standbys: Callable[[int], Standbys], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its limit is that of all stores together, also where one has a longer one."""
    monkeypatch.setattr(death_notice, "TELL_LIMIT", 1.0)
    monkeypatch.setattr(death_notice, "STANDBY_LIMIT", 60.0)
    stores, end = standbys(1), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as slow:

        def drip() -> None:
            client, _ = slow.accept()
            with client:
                nonce = client.recv(64)[-4:]
                client.sendall(nonce + b"\xff\xff\0\0\0\0\0\0")
                while not end.wait(0.1):
                    client.sendall(b"x")

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            told: set[str] = set()
            began = time.monotonic()
            assert not tell_standbys(stores.notice(slow.getsockname()), told) and told == {"n2"}
            assert time.monotonic() - began < 10.0
        finally:
            end.set()
            dripping.join()


def test_garbage_where_the_vote_belongs_is_replaced(standbys: Callable[[int], Standbys]) -> None:
    stores = standbys(1)
    assert write(stores.notice().encode(), clock.now())
    client = torch_client(stores.served[0].connect())
    keys = [key for key in client.list_keys() if key.startswith("elastirun/")]
    for garbage in (b"\0\xff", b"x" * (7 << 20), b'{"v":3}'):
        for key in keys:
            client.set(key, garbage)
        client.check(keys)  # an answer: it has arrived
        assert stores.told() == [()]
        assert write(stores.notice().encode(), clock.now()) and all(stores.told())


def test_where_no_thread_can_be_started_one_is_told_after_the_other(
    standbys: Callable[[int], Standbys], monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = standbys(3)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert write(stores.notice().encode(), clock.now())
    assert all(stores.told())


def test_stores_that_did_not_answer_are_tried_again(standbys: Callable[[int], Standbys], monkeypatch: pytest.MonkeyPatch) -> None:
    stores, late = standbys(1), listening()
    where = late.getsockname()
    served: list[ServedStore] = []
    monkeypatch.setattr(death_notice, "STANDBY_LIMIT", 0.2)
    monkeypatch.setattr(death_notice.select, "select", lambda *args: served or served.append(ServedStore(late)))
    assert write(stores.notice(where).encode(), clock.now())
    found = protocol().carry_out(served[0].connect(), Sync(rows=(), voters=("n0",)), 0.0)
    assert len(found.votes) == 1
    served[0].close()


AGENT = """
import selectors, signal, subprocess, sys
from elastirun.agent.processes.process_tree import ProcessTree
tree = ProcessTree("test", 0.0, selectors.DefaultSelector(), lambda text: print("said:", text, flush=True))
worker = subprocess.Popen(["sleep", "1000"], start_new_session=True)
tree.add_workers([worker.pid])
for line in sys.stdin.buffer:
    tree.write_notice_with(line.rstrip())
    print(worker.pid, tree._guard.pid, flush=True)
signal.pause()
"""


@contextmanager
def agent() -> Iterator[tuple[subprocess.Popen[bytes], Callable[[bytes], list[int]]]]:
    """A process with a worker and a guard, and a function that briefs its guard and returns the pids of both."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", AGENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as made:
        assert made.stdin and made.stdout
        into, out = made.stdin, made.stdout

        def brief(notice: bytes) -> list[int]:
            into.write(notice + b"\n")
            into.flush()
            line = out.readline()
            return [] if line.startswith(b"said:") else list(map(int, line.split()))

        try:
            yield made, brief
        finally:
            made.kill()


@pytest.mark.parametrize("members", [2, 512])
def test_the_guard_of_a_killed_host_tells_the_others_when_nothing_is_left_of_it(standbys: Callable[[int], Standbys], members: int) -> None:
    stores = standbys(2)
    notice = stores.notice()
    if members > 2:
        with refused() as nowhere:
            record = stores.record()
            more = tuple(Member(f"node-{i}-12345-0123abcd", f"node-{i}", *nowhere, 8, standby=0) for i in range(members - 2))
            notice = replace(notice, vote=encode_vote(Vote("n0", replace(record, members=record.members + more), ("n0",)), None))
    with agent() as (host, brief):
        worker, guard = brief(notice.encode())
        assert stores.told() == [(), ()]
        host.send_signal(signal.SIGKILL)
        stores.await_told()
        assert dies(worker, 0), "the vote says that nothing of the host runs any more"
        assert dies(guard)
    assert len(stores.told()[0][0].record.members) == members + 1


def test_the_pipe_to_the_guard_grows_as_far_as_the_kernel_allows() -> None:
    read, write = os.pipe()
    try:
        before = fcntl.fcntl(write, fcntl.F_GETPIPE_SZ)
        assert _make_room(write, 100) and fcntl.fcntl(write, fcntl.F_GETPIPE_SZ) == before
        assert _make_room(write, 2 * before) and fcntl.fcntl(write, fcntl.F_GETPIPE_SZ) >= 2 * before
        assert not _make_room(write, 1 << 30)
    finally:
        os.close(read)
        os.close(write)


def test_who_hands_over_ends_its_store_before_it_tells_the_others(standbys: Callable[[int], Standbys]) -> None:
    """A node that gets the vote goes to another store immediately. Nodes without it would stay in the old store if that still answered."""
    stores = standbys(1)
    did: list[str] = []
    access = SimpleNamespace(end_store=lambda: did.append(f"ended, told: {len(stores.served) and stores.told()}"))
    session = SimpleNamespace(close=lambda: did.append("closed"), access=access)
    tree = SimpleNamespace(write_notice_with=lambda data: did.append(f"guard: {data!r}"))
    lease = GuardLease(cast(Any, None), cast(Any, tree), cast(Any, session))
    lease.hand_over(stores.notice())
    assert did == ["closed", "ended, told: [()]", "guard: b''"] and all(stores.told())
    notice = stores.notice()
    stores.close()
    stores.served.clear()
    did.clear()
    lease.hand_over(notice)
    assert did[-1].startswith("ended"), "the guard keeps what it was told, and tries again"


def test_a_notice_too_long_for_the_pipe_is_left_out_and_the_guard_stays(standbys: Callable[[int], Standbys]) -> None:
    stores = standbys(1)
    with agent() as (host, brief):
        _, guard = brief(stores.notice().encode())
        assert brief(b"x" * (3 << 20)) and not dies(guard, 1.0), "a guard whose pipe is full would be replaced, again and again"
        host.send_signal(signal.SIGKILL)
        assert dies(guard)
    assert stores.told() == [()], "a notice that is out of date tells nothing"


def test_a_guard_that_reads_nothing_does_not_hold_up_its_agent(standbys: Callable[[int], Standbys]) -> None:
    stores = standbys(1)
    with agent() as (host, brief):
        pids = brief(b"{}")
        os.kill(pids[1], signal.SIGSTOP)
        for i in range(40):  # 4 MB in all, far more than the pipe holds
            assert brief(b"%03d" % i * 33_000) in (pids, []), "the loop goes on"
        assert dies(pids[1]), "and a guard that does not read is replaced by one that does"
        host.send_signal(signal.SIGKILL)
    assert stores.told() == [()]


def test_who_gives_up_its_own_store_ends_it_at_once_and_serves_another_one_with_the_next_connection() -> None:
    """The look at the store that it goes back to has a connection already, which the exchanges after it would use."""
    with access(1, free_port(), "--store-succession=majority") as host:
        host.connect(None).close()
        with access(2, host._endpoint.port, "--store-succession=majority") as other:
            other.connect(None).close()
            ended = place(other)
            host.connect(ended).close()
            other.renew_standby()
            assert other.standby_port == 0
            with pytest.raises(StoreError):
                host.connect(ended)
            other.connect(None).close()
            assert other.standby_port not in (0, ended.port)

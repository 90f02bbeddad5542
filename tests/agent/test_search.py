"""Several endpoints, and names with several addresses: who listens there, and how a node that comes finds the job."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace

import pytest

from elastirun import clock
from elastirun.agent.host import net
from elastirun.agent.store import discovery as search
from elastirun.agent.store import endpoint_access, shared_store
from elastirun.agent.store import forwarding as forwarding_module
from elastirun.agent.store.at_once import at_once
from elastirun.agent.store.choose_store import store_access
from elastirun.agent.store.endpoint_access import EndpointAccess
from elastirun.agent.store.forwarding import Forwarding
from elastirun.config import Endpoint
from elastirun.errors import StoreError, StoreMoved, StoreRefused
from elastirun.rendezvous import formation
from elastirun.rendezvous.stores.tcp import TcpStore
from elastirun.rendezvous.stores.tcp_server import ServedStore
from elastirun.rendezvous.wire.actions import Change, Sync
from elastirun.rendezvous.wire.codec import Codec
from elastirun.rendezvous.wire.records import Closed, Member, Place, RoundRecord, Verdict
from elastirun.rendezvous.wire.sync import SyncProtocol, execute
from tests.agent.test_standby_stores import full_backlog, silent
from tests.cli.test_resolve import config_of
from tests.rendezvous.test_stores import listening
from tests.support.cluster import PATIENCE, free_port
from tests.support.relay import something_else
from tests.support.until import until

JOB = shared_store.prefix("test")
RECORD = RoundRecord("s", 4, 2, (Member("n2", "n2", "127.0.0.2", 1, 1),), host="n2", term=1)  # of a store that has taken over
X, Y = Place("n5", "127.0.0.5", 4711), Place("n6", "127.0.0.6", 4711)  # stores elsewhere; nobody listens there
MOVED = RoundRecord("the job that has moved", term=1)

Open = Callable[..., EndpointAccess]


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def node(port: int) -> Iterator[Open]:
    """Return a function that makes the access of "node" 127.0.0.<i>. ``hosts``: the list, as numbers of nodes; a host serves the first."""
    made: list[EndpointAccess] = []

    def open_access(
        i: int, hosts: tuple[int | str, ...] = (1, 2, 3), is_host: bool | None = None, options: str = "", token: bytes | None = None
    ) -> EndpointAccess:
        where = ",".join(f"127.0.0.{host}:{port}" if isinstance(host, int) else f"{host}:{port}" for host in hosts)
        conf = f"--rdzv-conf=is_host={int(i == hosts[0] if is_host is None else is_host)}"
        line = f"--nnodes=1:3 --rdzv-id=test --rdzv-endpoint={where} --local-addr=127.0.0.{i} {conf} --store-succession=proof"
        one = store_access(replace(config_of(f"{line} {options} t.py"), token=token))
        assert isinstance(one, EndpointAccess)
        one.me = f"n{i}"
        made.append(one)
        return one

    yield open_access
    for one in made:
        one.close()
        one.end_store()


def protocol(token: bytes | None = None) -> SyncProtocol:
    return SyncProtocol(JOB, "me", Codec(token), clock.now)


@contextmanager
def plain(i: int, port: int) -> Iterator[TcpStore]:
    with closing(TcpStore(f"127.0.0.{i}", port, creates=(JOB,))) as store:
        yield store


def tell(i: int, port: int, place: Place) -> None:
    """Write into the standby store of node ``i`` where the store of the job is."""
    with plain(i, port) as store:
        execute(protocol().put_place(place), store)


def put(access: EndpointAccess, record: RoundRecord) -> None:
    """Write the record into the standby store of the node, as it does that takes over."""
    store = access.connect(own(access))
    protocol().carry_out(store, Sync(change=Change(None, record), rows=()), 0.0)
    store.close()


def own(access: EndpointAccess) -> Place:
    return Place(access.me, access.node_address.address, access.standby_port)


def moved_to(access: EndpointAccess) -> Place:
    """Return where a newcomer is sent that finds nobody at the first endpoint."""
    with pytest.raises(StoreMoved) as caught:
        access.connect(None)
    place = caught.value.place
    assert isinstance(place, Place)
    return place


def without_first(node: Open, token: bytes | None = None) -> list[EndpointAccess]:
    """Start a job with nodes 1, 2 and 3, and end the store of node 1. Return the access of the other two."""
    host, *others = [node(i, token=token) for i in (1, 2, 3)]
    for one in (host, *others):
        one.connect(None).close()
    host.end_store()
    return others


# -- who listens where


def test_each_node_of_the_list_serves_its_standby_store_where_newcomers_look(node: Open, port: int) -> None:
    host, *others = [node(i) for i in (1, 2, 3)]
    for one in (host, *others):
        one.connect(None).close()
    assert [one.standby_port for one in others] == [port, port] and host.standby_port not in (0, port)
    assert not [line for one in (host, *others) for line in one.notices]


def test_a_node_whose_address_is_not_known_yet_takes_the_same_port(node: Open, port: int) -> None:
    """The name of a service has the address of a new machine some time later."""
    host, other = node(1), node(4)
    host.connect(None), other.connect(None)
    assert other.standby_port == port


def test_a_port_that_is_taken_is_told(node: Open, port: int) -> None:
    host, other = node(1), node(2)
    with closing(listening("127.0.0.2", port)):
        host.connect(None), other.connect(None)
    assert other.standby_port not in (0, port)
    assert [f"newcomers that ask at 127.0.0.2:{port} do not find this job" in line for line in other.notices] == [True]


def test_no_standby_store_is_where_the_job_is_started(node: Open, port: int) -> None:
    """Who serves the store there would find the port taken."""
    with closing(listening("127.0.0.9", port)):  # the host is on another machine as far as this agent sees
        host = node(1)
        host.connect(None)
        twin = node(1, is_host=False)
        twin.connect(None)
        host.end_store()
        third = node(1, is_host=False)
        assert [port for port, _ in third._search.standby_ports("127.0.0.1")] == []
        assert twin.standby_port not in (0, port)


def test_one_endpoint_is_as_ever(node: Open, port: int) -> None:
    host, other = node(1, (1,)), node(2, (1,))
    host.connect(None), other.connect(None)
    assert port not in (host.standby_port, other.standby_port)
    host.end_store()
    with pytest.raises(StoreError, match="gone or cut off") as caught:
        other.connect(None)
    assert not isinstance(caught.value, StoreMoved)


# -- the store to which a newcomer goes


@pytest.mark.parametrize("i", [2, 4])
def test_a_newcomer_is_sent_where_a_standby_store_says(node: Open, port: int, i: int) -> None:
    without_first(node)
    tell(3, port, X)
    assert moved_to(node(i, is_host=False)) == X


def test_a_newcomer_joins_the_store_in_which_it_finds_a_round(node: Open, port: int) -> None:
    _, third = without_first(node)
    tell(2, port, X)
    put(third, replace(RECORD, host="n3"))
    assert moved_to(node(4)) == Place("n3", "127.0.0.3", port), "which is surer than what another one says"


def test_of_two_stores_with_a_round_the_one_that_has_taken_over_last_is_the_job(node: Open, port: int) -> None:
    second, third = without_first(node)
    put(second, RECORD)
    put(third, replace(RECORD, host="n3", term=2))
    assert moved_to(node(4)) == Place("n3", "127.0.0.3", port)


def test_a_store_that_the_job_has_left_sends_a_newcomer_on(node: Open, port: int, often: None) -> None:
    """Its agent lives and serves a round that is long over: a newcomer would wait for that until its grace is over, again and again."""
    second, _ = without_first(node)
    put(second, RECORD)
    with forwarding(Endpoint("127.0.0.1", port), Endpoint("127.0.0.2", port)) as telling, plain(2, port) as store:
        telling.told = Y, replace(RECORD, version=9, term=2)
        here = execute(protocol().here(), store)
        until(lambda: execute(here.find_job(), store)[0].moved == Y, "the word of the node that has taken over")
        assert moved_to(node(4)) == Y


CLOSED = replace(RECORD, closed=Closed(Verdict.SUCCEEDED, "all workers succeeded", "n2"))


@pytest.mark.parametrize("record", [replace(RECORD, round=0), replace(RECORD, host=""), CLOSED])
def test_a_store_without_a_round_that_can_go_on_is_no_job(node: Open, record: RoundRecord) -> None:
    second, _ = without_first(node)
    put(second, record)
    with pytest.raises(StoreError, match="nobody hosts the store.*; no other endpoint says where this job is") as caught:
        node(4).connect(None)
    assert not isinstance(caught.value, StoreMoved), "it goes on waiting for the first one"


def test_a_word_that_is_not_signed_sends_nobody_anywhere(node: Open, port: int) -> None:
    without_first(node)
    tell(3, port, X)
    with pytest.raises(StoreError) as caught:
        node(4, token=b"the token of this job").connect(None)
    assert not isinstance(caught.value, StoreMoved)


def test_what_is_signed_for_one_standby_store_sends_nobody_from_another_one(node: Open, port: int) -> None:
    token = b"the token of this job"
    second, third = without_first(node, token)
    first, newcomer = Endpoint("127.0.0.1", port), node(4, token=token)
    telling = Forwarding((first, Endpoint("127.0.0.2", port)), protocol(token), lambda record: None)
    telling.told = X, MOVED
    assert telling.start_threads() == ""
    await_word(2, port, X, token)
    telling.close()
    assert moved_to(newcomer) == X
    key = protocol(token).moved_key
    with plain(2, port) as signed_there, plain(3, port) as copied_to:
        assert copied_to.put_if(key, None, signed_there.get([key])[key])
        assert signed_there.put_if(key, signed_there.get([key])[key], b"{}")
    with pytest.raises(StoreError) as caught:
        newcomer.connect(None)
    assert not isinstance(caught.value, StoreMoved)


def test_where_several_places_are_named_each_has_its_turn(node: Open, port: int) -> None:
    """One of them may be that of a node that died, where the newer word has not come yet."""
    without_first(node)
    tell(2, port, X)
    tell(3, port, Y)
    new = node(4)
    assert [moved_to(new) for _ in range(4)] == [X, Y, X, Y]


def test_a_member_looks_nowhere_else(node: Open, port: int) -> None:
    """It waits for proof that its host has died, and a look would only delay it."""
    second, _ = without_first(node)
    tell(3, port, X)
    second.newcomer = False
    with pytest.raises(StoreError, match="gone or cut off") as caught:
        second.connect(None)
    assert not isinstance(caught.value, StoreMoved)


def test_a_newcomer_that_was_sent_serves_a_standby_store_as_well(node: Open, port: int) -> None:
    second, _ = without_first(node)
    put(second, RECORD)
    new = node(4)
    new.connect(moved_to(new)).close()
    assert (new.node_address.address, new.standby_port) == ("127.0.0.4", port)


@pytest.mark.parametrize("dead", [silent, full_backlog])
def test_an_endpoint_that_is_silent_does_not_keep_a_newcomer_from_the_others(node: Open, port: int, dead: Callable[[], ...]) -> None:
    without_first(node)
    tell(3, port, X)
    with dead() as (address, number):
        new = node(4)
        new._search._config = replace(new.config, other_endpoints=(Endpoint(address, number), *new.config.other_endpoints))
        assert moved_to(new) == X


# -- the first endpoint


def test_who_serves_the_first_endpoint_says_there_what_the_others_say(node: Open, port: int) -> None:
    """Else a second job would begin there if the node with the store in use could not reach it."""
    without_first(node)
    tell(3, port, X)
    back = node(1)
    with closing(back.connect(None)) as store:
        record = execute(protocol().find_job(), store)[0]
        assert (record.round, record.moved) == (0, X) and "--store-succession=proof" in record.settings


def test_a_round_that_has_formed_at_the_first_endpoint_stays(node: Open, port: int) -> None:
    without_first(node)
    back = node(1)
    back.connect(None)
    with plain(1, port) as store:
        protocol().carry_out(store, Sync(change=Change(None, replace(RECORD, host="n1")), rows=()), 0.0)
    tell(3, port, X)
    with closing(back.connect(None)) as found:
        assert execute(protocol().find_job(), found)[0].moved is None


def test_a_standby_store_is_not_taken_for_the_one_where_a_job_starts(node: Open, port: int) -> None:
    """This node was given another order of the list, so it takes the standby store of node 2 for the first endpoint."""
    without_first(node)
    with pytest.raises(StoreError, match=f"no agent has said yet that it hosts the store at 127.0.0.2:{port}"):
        node(4, (2, 3)).connect(None)


def test_a_node_with_another_order_of_the_list_finds_a_job_that_has_moved_to_its_first_endpoint(node: Open, port: int) -> None:
    second, _ = without_first(node)
    put(second, RECORD)
    assert moved_to(node(4, (2, 1))) == Place("n2", "127.0.0.2", port)


@pytest.mark.parametrize(("moved", "limit"), [(False, endpoint_access.ANSWER_LIMIT), (True, endpoint_access.STANDBY_LIMIT)])
def test_who_looks_where_a_moved_job_was_started_waits_a_second_at_most(
    node: Open, port: int, monkeypatch: pytest.MonkeyPatch, moved: bool, limit: float
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(net, "who_answers", lambda address, port, timeout, again: asked.append(timeout))
    host = node(1)
    host.connect(None)
    member = node(2)
    member.newcomer, member.has_moved = False, moved
    member.connect(None)
    assert asked[-1] == limit


def test_who_was_found_silent_is_not_asked_again(node: Open, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    without_first(node)
    asked: list[Endpoint] = []
    new = node(4)
    monkeypatch.setattr(new._search, "_ask", lambda one: asked.append(one) or search._Word())  # type: ignore[func-returns-value]
    with pytest.raises(StoreError):
        new.connect(None)
    assert sorted(map(str, asked)) == [f"127.0.0.2:{port}", f"127.0.0.3:{port}"]


def test_two_orders_of_the_list_are_found(node: Open, port: int) -> None:
    host, other = node(1, (1, 2)), node(2, (2, 1))
    host.connect(None)
    with pytest.raises(StoreRefused, match=f"127.0.0.1:{port} serves a store for this job, too; give all nodes the same --rdzv-endpoint"):
        other.connect(None)
    with pytest.raises(StoreRefused, match=f"127.0.0.2:{port} serves a store for this job, too"):
        host.connect(None)
    other.end_store()
    with pytest.raises(StoreError, match=f"127.0.0.1:{port} serves a store for this job, too") as caught:
        node(3, (2, 1), is_host=False).connect(None)
    assert not isinstance(caught.value, StoreRefused), "the one that it waits for may come"


def test_the_store_of_an_earlier_run_stops_no_new_one(node: Open, port: int) -> None:
    """Its agent is about to end."""
    before = node(2, (2, 1))
    before.connect(None)
    with plain(2, port) as store:
        protocol().carry_out(store, Sync(change=Change(None, CLOSED), rows=()), 0.0)
    with closing(node(1, (1, 2)).connect(None)) as store:
        assert store.hosting


def test_another_job_at_one_of_the_endpoints_is_no_matter(node: Open, port: int) -> None:
    other_job = node(2, (2,), options="--rdzv-id=another")
    other_job.connect(None)
    with closing(node(1).connect(None)) as store:
        assert store.hosting


# -- names with several addresses


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, ...]]:
    """The addresses of made-up names."""
    found: dict[str, tuple[str, ...]] = {}
    look_up = net._look_up
    monkeypatch.setattr(net, "_look_up", lambda host: (found[host], False) if host in found else look_up(host))
    return found


def test_all_addresses_of_a_name_are_asked(node: Open, port: int, names: dict[str, tuple[str, ...]]) -> None:
    names["pods"] = ("127.0.0.2", "127.0.0.3", "127.0.0.7")
    without_first(node)
    tell(3, port, X)
    assert moved_to(node(4, (1, "pods"))) == X


def test_all_addresses_of_the_first_name_are_looked_at_for_the_store(node: Open, port: int, names: dict[str, tuple[str, ...]]) -> None:
    names["pods"] = ("127.0.0.2", "127.0.0.3", "127.0.0.1")
    host, second, third = node(1, ("pods",), is_host=False), node(2, ("pods",), is_host=True), node(3, ("pods",))
    names["pods"] = ("127.0.0.2",)
    second.connect(None)
    names["pods"] = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
    for one in (host, third):
        with closing(one.connect(None)) as store:
            assert not store.hosting and one.standby_port == port
    last = node(4, ("pods",))
    assert last._reach() == ("127.0.0.2", port), "not a standby store, although it comes first"


def test_a_name_of_several_machines_does_not_say_which_of_them_serves(
    node: Open, port: int, names: dict[str, tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    names["pods"] = ("127.0.0.1", "127.0.0.2")
    monkeypatch.setattr(net, "is_own", lambda address: address == "127.0.0.1")
    one = node(1, ("pods",))
    one.config = replace(one.config, is_host=None)
    with pytest.raises(StoreError, match="pods is the name of several machines: put one of them before it in --rdzv-endpoint"):
        one.connect(None)
    names["pods"] = ("127.0.0.1",)
    assert one.connect(None).hosting


def test_a_name_server_that_is_slow_is_waited_for_where_there_is_one_name(
    node: Open, port: int, names: dict[str, tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that does not find the store that has moved would begin the job anew."""
    names["pods"] = ("127.0.0.2", "127.0.0.3")
    without_first(node)
    tell(3, port, X)
    look_up = net.resolve
    monkeypatch.setattr(search, "NAMES_LIMIT", 0.05)
    monkeypatch.setattr(net, "resolve", lambda host: (time.sleep(0.3), look_up(host))[1])
    assert moved_to(node(4, ("pods",))) == X


def test_a_store_that_does_not_answer_in_time_is_no_name_that_does_not_resolve(
    node: Open, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_access, "ANSWER_LIMIT", 0.05)
    monkeypatch.setattr(EndpointAccess, "_what_is_wrong_at", lambda self, address: (time.sleep(0.5), "")[1])
    with socket.create_server(("127.0.0.1", port)), pytest.raises(StoreError, match="accepts connections but has not answered in 0.15 s"):
        node(2, (1,))._reach()


def test_several_are_asked_at_the_same_time() -> None:
    together = threading.Barrier(5)
    assert at_once(lambda item: together.wait(PATIENCE / 3) * 0 + item, range(5), PATIENCE) == {i: i for i in range(5)}


@pytest.mark.parametrize("items", [[0, 1, 2], [1]])
def test_one_that_never_answers_is_left_behind(items: list[int]) -> None:
    never = threading.Event()
    began = time.monotonic()
    assert at_once(lambda item: never.wait(PATIENCE) if item == 1 else item, items, 0.5) == {item: item for item in items if item != 1}
    assert time.monotonic() - began < PATIENCE / 2
    never.set()


def test_without_threads_all_are_asked_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("can't start new thread")))
    assert at_once(lambda item: item + 1, [1, 2], PATIENCE) == {1: 2, 2: 3}


# -- a place that was a node's own before


def test_a_node_that_has_taken_the_port_of_a_dead_one_is_not_taken_for_it(node: Open, port: int) -> None:
    without_first(node)
    new = node(4)
    second = node(5, (5, 4))
    second.connect(None)
    new = node(4, (5, 4))
    new.connect(None)
    with pytest.raises(StoreError, match=f"the node that served the standby store at 127.0.0.4:{port} has ended; this agent listens there"):
        new.connect(Place("n4 before", "127.0.0.4", port))
    assert new.connect(own(new)).hosting


# -- the word of the node that has taken over


def place_at(i: int, port: int, token: bytes | None = None) -> Place | None:
    with plain(i, port) as store:
        found: Place | None = execute(protocol(token).fresh(f"n{i}:{port}").find_job(), store)[1]
        return found


def await_word(i: int, port: int, place: Place, token: bytes | None = None) -> None:
    """Wait until the standby store of node ``i`` names the place."""
    until(lambda: place_at(i, port, token) == place, f"{place} in the standby store of node {i}")


@contextmanager
def forwarding(*endpoints: Endpoint, own: Endpoint | None = None) -> Iterator[Forwarding]:
    made = Forwarding(endpoints, protocol(), lambda record: None, own)
    made.told = X, MOVED
    assert made.start_threads() == ""
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    for pause in ("FORWARD_EVERY", "OTHERS_EVERY"):
        monkeypatch.setattr(forwarding_module, pause, 0.02)


def test_all_other_endpoints_are_told(often: None, port: int) -> None:
    with ExitStack() as stack:
        stores = {i: ServedStore(listening(f"127.0.0.{i}", port)) for i in (2, 3, 4)}
        for store in stores.values():
            stack.callback(store.close)
        others = [Endpoint(f"127.0.0.{i}", port) for i in stores]
        telling = stack.enter_context(forwarding(Endpoint("127.0.0.1", port), *others, own=others[2]))
        for i in (2, 3):
            await_word(i, port, X)
        telling.told = Y, MOVED
        for i in (2, 3):
            await_word(i, port, Y)
        assert place_at(4, port) is None, "its own store holds the record"
        with plain(2, port) as store:
            assert execute(protocol().find_job(), store)[0] is None, "the record is for the node that takes over"


def test_a_node_that_comes_back_to_its_endpoint_is_told_again(often: None, port: int) -> None:
    with forwarding(Endpoint("127.0.0.1", port), Endpoint("127.0.0.2", port)):
        for _ in range(2):
            store = ServedStore(listening("127.0.0.2", port))
            await_word(2, port, X)
            store.close()


@pytest.mark.parametrize("trouble", ["no answer", "slow"])
def test_a_name_server_that_is_gone_does_not_keep_a_node_from_being_told(
    often: None, port: int, names: dict[str, tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    names["node-a"] = ("127.0.0.1",)
    waits, go = threading.Event(), threading.Event()
    with forwarding(Endpoint("192.0.2.1", port), Endpoint("node-a", port)) as telling:
        store = ServedStore(listening("127.0.0.1", port))
        await_word(1, port, X)
        if trouble == "slow":
            look_up = net.resolve
            monkeypatch.setattr(net, "resolve", lambda host: look_up(host) if host != "node-a" else (waits.set(), go.wait(PATIENCE), ())[2])
            assert waits.wait(PATIENCE)
        else:
            names["node-a"] = ()
        telling.told = Y, MOVED
        await_word(1, port, Y)
        go.set()
        store.close()


def test_a_store_that_was_told_is_asked_over_the_same_connection(often: None, monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """A TCPStore looks up the name of each client that connects."""
    made: list[tuple[str, int]] = []
    writes, enough = [], threading.Event()

    class Counted(TcpStore):
        def __init__(self, *where: object) -> None:
            super().__init__(*where)  # type: ignore[arg-type]
            made.append(where[:2])  # type: ignore[arg-type]

        def get(self, keys: object) -> dict[str, bytes]:
            writes.append(keys)
            if len(writes) > 5:
                enough.set()
            return super().get(keys)  # type: ignore[arg-type]

    monkeypatch.setattr(forwarding_module, "TcpStore", Counted)
    store = ServedStore(listening("127.0.0.2", port))
    with forwarding(Endpoint("127.0.0.1", port), Endpoint("127.0.0.2", port)):
        assert enough.wait(PATIENCE)
    assert made == [("127.0.0.2", port)]
    store.close()


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The time on the clock of ``forwarding``, which the test moves."""
    now = [100.0]
    monkeypatch.setattr(forwarding_module.clock, "now", lambda: now[0])
    yield now


@pytest.mark.parametrize(("first", "slowest"), [(True, forwarding_module.SLOWEST_AT_FIRST), (False, forwarding_module.SLOWEST)])
def test_tries_that_are_of_no_use_become_rarer(paced: list[float], first: bool, slowest: float) -> None:
    with something_else(b"HTTP/1.1 400 no\r\n\r\n") as where:
        one = forwarding_module._Address(*where, first)
        pauses = []
        for _ in range(60):
            assert one.is_due(X)
            one.write(X, protocol(), None)
            began = paced[0]
            while not one.is_due(X):
                paced[0] += 0.05
            pauses.append(paced[0] - began)
        assert pauses[0] < 0.5 and max(pauses[:5]) < 0.6 and pauses[-1] == pytest.approx(slowest, abs=0.1)
        one.write(X, protocol(), None)
        assert one.is_due(Y), "news is told at once"
        one.write(Y, protocol(), None)
        assert one._useless == 1


def test_an_answer_makes_the_tries_frequent_again(paced: list[float], port: int) -> None:
    one = forwarding_module._Address("127.0.0.1", port, True)
    for _ in range(60):
        one.write(X, protocol(), None)
    store = ServedStore(listening(port=port))
    one.write(X, protocol(), None)
    paced[0] += forwarding_module.FORWARD_EVERY + 0.01
    assert one.is_due(X)
    one.close()
    store.close()


def test_a_first_round_waits_longer_than_the_rarest_tries() -> None:
    """Else a second job could begin where nobody has listened for long."""
    rarest = forwarding_module.SLOWEST_AT_FIRST + forwarding_module.FORWARD_EVERY
    assert formation.LOOK_BACK >= rarest + 0.5, "half a second to connect and to write"
    assert forwarding_module.FORWARD_LIMIT <= forwarding_module.SLOWEST_AT_FIRST, "a try that is not answered is over by then"


def test_a_thread_that_cannot_start_is_told_once_and_tried_again(node: Open, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    access = node(1)
    access.connect(None)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("can't start new thread")))
        for _ in range(3):
            access.forward((X, MOVED), lambda record: None)
    (line,) = access.notices
    assert "cannot yet tell nodes that come where the store of this job is: no thread can be started (see ulimit -u" in line
    standby = ServedStore(listening("127.0.0.3", port))
    access.forward((X, MOVED), lambda record: None)
    await_word(3, port, X)
    assert len(access.notices) == 1
    standby.close()

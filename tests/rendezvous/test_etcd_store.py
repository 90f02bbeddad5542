"""The etcd store beyond the contract of all stores: lease, pages, endpoints."""

from __future__ import annotations

import os
import re
import socket
import time

import pytest

from elastirun.errors import StoreError
from elastirun.rendezvous.stores.etcd import client
from elastirun.rendezvous.stores.etcd import store as etcd_store
from elastirun.rendezvous.stores.etcd.client import Cluster
from elastirun.rendezvous.stores.etcd.store import MOST_CACHED, MOST_RANGES, PREFIX, EtcdStore, NodeLease, connector
from tests.support.cluster import PATIENCE, free_port
from tests.support.etcd_server import Etcd, ask, etcd
from tests.support.relay import Relay
from tests.support.until import until


@pytest.fixture
def job() -> str:
    return f"elastirun/{os.urandom(4).hex()}/"


def lease_of(store: EtcdStore, key: str) -> int:
    (kv,) = store._range(store._key(key)).kvs
    return int(kv.lease)


# -- lease -------------------------------------------------------------------------------------------------------------------


def test_rows_are_under_one_lease_for_all_connections_of_an_agent_and_nothing_else_is(server: Etcd, job: str) -> None:
    connect = connector(server.endpoints, expire=7.5)
    first, second, other = connect(), connect(), connector(server.endpoints)()
    for store, name in ((first, "node/a"), (second, "node/b"), (other, "node/c"), (first, "round")):
        store.put_if(job + name, None, b"1")
    a, b, c, of_round = (lease_of(first, job + name) for name in ("node/a", "node/b", "node/c", "round"))
    assert a == b != 0 and c not in (0, a) and of_round == 0
    assert ask(first, "Lease/LeaseTimeToLive", ID=a).grantedTTL == 4, "0.6 x expire, rounded down: the rest is for the row's absence"
    assert ask(first, "Lease/LeaseTimeToLive", ID=c).grantedTTL == 3


def test_the_row_of_an_agent_that_is_no_more_vanishes_and_a_living_one_writes_its_own_anew(server: Etcd, job: str) -> None:
    key, said = job + "node/a", list[str]()
    store, other = EtcdStore(Cluster(server.endpoints), NodeLease(1.0, said.append)), connector(server.endpoints)()
    assert store.put_if(key, None, b"1") == b"1"
    until(lambda: not other.get([key]), "the end of the row")
    assert not said, "it does not know yet"
    assert store.put_if(key, b"1", b"2") is None, "the row is gone, and says so"
    assert not store.keep_alive(key) and len(said) == 1
    assert store.put_if(key, None, b"2") == b"2" and store.keep_alive(key)
    assert other.get([key]) == {key: b"2"} and len(said) == 1


def test_keep_alives_keep_the_row_and_make_no_revision(job: str) -> None:
    key = job + "node/a"
    with etcd() as own:
        store, other = EtcdStore(Cluster(own.endpoints), NodeLease(1.0)), connector(own.endpoints)()
        assert not store.keep_alive(key), "it was not written yet"
        store.put_if(key, None, b"0")
        lease, began = lease_of(store, key), time.monotonic()
        before = ask(other, "Maintenance/Status")
        while time.monotonic() < began + 4.5:  # its length, which etcd has made 2 s, more than twice
            assert store.keep_alive(key)
            time.sleep(0.05)
        after = ask(other, "Maintenance/Status")
        assert lease_of(other, key) == lease
        assert after.header.revision == before.header.revision and after.dbSize <= before.dbSize + (64 << 10)


def test_a_row_whose_lease_is_not_known_is_not_called_alive(server: Etcd, job: str) -> None:
    """Two connections of one agent may each have been granted a lease, or the answer to a write was lost."""
    key, lease = job + "node/a", NodeLease(10.0)
    store = EtcdStore(Cluster(server.endpoints), lease)
    store.put_if(key, None, b"1")
    assert store.keep_alive(key)
    lease.expired(lease_of(store, key))
    lease.current(store._client)
    assert not store.keep_alive(key), "the row is under another one than that"
    assert store.put_if(key, b"1", b"2") == b"2" and store.keep_alive(key)


def test_a_lease_that_is_found_lost_in_the_middle_of_a_write_is_replaced(server: Etcd, job: str) -> None:
    said: list[str] = []
    store = connector(server.endpoints, say=said.append)()
    store.put_if(job + "node/a", None, b"1")
    lost = lease_of(store, job + "node/a")
    ask(store, "Lease/LeaseRevoke", ID=lost)
    assert store.put_if(job + "node/b", None, b"1") == b"1"
    assert lease_of(store, job + "node/b") not in (0, lost)
    assert len(said) == 1 and store.get([job + "node/a"]) == {}


# -- keys and their number ------------------------------------------------------------------------------------------------------


def test_the_prefix_stands_before_every_key_and_is_never_seen(server: Etcd, job: str) -> None:
    one, two, everything = (connector(server.endpoints, prefix=prefix)() for prefix in ("/one/", "/two/", ""))
    assert one.put_if(job + "k", None, b"1") == b"1" and two.put_if(job + "k", None, b"2") == b"2"
    assert one.under(job) == one.get([job + "k"]) == {job + "k": b"1"}
    assert everything.get([f"/one/{job}k", f"/two/{job}k"]) == {f"/one/{job}k": b"1", f"/two/{job}k": b"2"}
    assert set(everything.under("")) >= {f"/one/{job}k", f"/two/{job}k"}
    assert PREFIX == "/elastirun/"


def test_more_keys_than_a_transaction_or_an_answer_may_hold(server: Etcd, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_store, "PAGE", 40)
    store = connector(server.endpoints)()
    names = [f"{job}{i:03}" for i in range(2 * MOST_RANGES + 4)]
    for name in names:
        assert store.put_if(name, None, name.encode()) == name.encode()
    everything = {name: name.encode() for name in names}
    assert store.get([*reversed(names), job + "none"]) == store.under(job) == everything
    assert len(store._cached) <= MOST_CACHED, "its memory does not grow with the keys it ever wrote"


def test_what_foreign_hands_put_there_is_bounded_and_harmless(server: Etcd, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_store, "PAGE", 4)
    monkeypatch.setattr(etcd_store, "MOST_KEYS", 20)
    store = connector(server.endpoints)()
    ask(store, "KV/Put", key=store._key(job) + b"\xff\n\x00", value=b"?")
    ask(store, "KV/Put", key=store._key(job) + b"empty", value=b"")
    assert store.under(job) == {job + "empty": b""}
    for i in range(20):
        store.put_if(f"{job}{i}", None, b"1")
    with pytest.raises(StoreError, match=rf"2[0-4] keys with \d+ bytes below {job}: somebody floods the store"):
        store.under(job)
    monkeypatch.setattr(etcd_store, "LARGEST", 10)
    with pytest.raises(StoreError, match="floods"):
        store.under(job)


def test_a_value_that_was_deleted_and_written_again_is_what_was_expected(server: Etcd, job: str) -> None:
    """Another client restored the value, so its revision differs; the contract is about values."""
    store = connector(server.endpoints)()
    store.put_if(job + "k", None, b"1")
    ask(store, "KV/DeleteRange", key=store._key(job + "k"))
    ask(store, "KV/Put", key=store._key(job + "k"), value=b"1")
    assert store.put_if(job + "k", b"1", b"2") == b"2"


def test_too_large_a_value_is_refused_at_once(server: Etcd, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAUSE", PATIENCE)
    monkeypatch.setattr(client, "LONGEST_PAUSE", PATIENCE)
    store = connector(server.endpoints)()
    for size in (17 << 16, 9 << 20):
        with pytest.raises(StoreError, match=f"etcd at {server.endpoints[0]}: .*(too large|larger than max)"):
            store.put_if(job + "k", None, b"x" * (size + (1 << 19)))
    assert store.get([job + "k"]) == {}


def test_a_full_database_is_said_with_what_to_do(job: str) -> None:
    with etcd(options=("--quota-backend-bytes=131072",)) as own:
        store, said = connector(own.endpoints)(), ""
        for i in range(10_000):  # etcd checks the size of its database only when it has written it, ten times a second
            try:
                store.put_if(f"{job}{i}", None, b"x" * 16384)
            except StoreError as error:
                said = str(error)
                if "timed out" not in said:  # a busy machine may be too slow for so many writes
                    break
    assert re.search(r"its database is full .*etcdctl compact.*defrag.*alarm disarm", said), said


# -- endpoints --------------------------------------------------------------------------------------------------------------------


def test_endpoints_that_do_not_answer_are_passed_over_wherever_it_begins(server: Etcd, job: str) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoints = [f"127.0.0.1:{free_port()}", f"127.0.0.1:{silent.getsockname()[1]}", server.endpoints[0]]
        for position in range(3):
            cluster = Cluster(endpoints)
            cluster.position = position
            store = EtcdStore(cluster, NodeLease(10.0))
            assert store.endpoint == server.endpoints[0]
            assert store.put_if(f"{job}{position}", None, b"1") == b"1"
            assert EtcdStore(cluster, NodeLease(10.0)).endpoint == server.endpoints[0], "what one has learnt they all know"
            store.close()


def test_a_server_that_was_away_is_found_again_by_the_same_connection(job: str) -> None:
    with etcd() as own:
        store = connector(own.endpoints)()
        assert store.put_if(job + "k", None, b"1") == b"1"
        own.stop()
        with pytest.raises(StoreError, match=f"^etcd at {own.endpoints[0]}: .*refused"):
            store.get([job + "k"])
        own.start()
        assert store.put_if(job + "k", b"1", b"2") == b"2"


def test_a_connection_that_fell_silent_is_replaced_though_there_is_no_other_endpoint(server: Etcd, job: str) -> None:
    with Relay(server.endpoints[0]) as relay:
        connect = connector([relay.endpoint])
        store = connect()
        relay.silence()
        other = connect()  # as the driver does, whose connection may hang in the middle of an exchange
        assert other.put_if(job + "other", None, b"1") == store.put_if(job + "k", None, b"1") == b"1"
        assert relay.connections == 3, "each has its own"
        store.close()
        other.close()


def test_an_endpoint_that_fell_silent_is_left_after_one_try(server: Etcd, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ATTEMPT", 0.1)
    for name in ("grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"):  # would find it too, later
        monkeypatch.setitem(client.OPTIONS, name, 10 * int(PATIENCE * 1000))
    with Relay(server.endpoints[0]) as relay:
        cluster = Cluster([relay.endpoint, server.endpoints[0]], deadline=PATIENCE)
        cluster.position = 0
        store = EtcdStore(cluster, NodeLease(10.0))
        assert store.endpoint == relay.endpoint
        relay.silence()
        began = time.monotonic()
        assert store.put_if(job + "k", None, b"1") == b"1"
        assert store.endpoint == server.endpoints[0] and time.monotonic() - began < PATIENCE / 2
        store.close()


def test_a_silent_server_costs_the_deadline_and_no_more(server: Etcd, job: str) -> None:
    with etcd() as own:
        store = connector(own.endpoints, deadline=0.3)()
        (member,) = own.members
        member.freeze()
        began = time.monotonic()
        with pytest.raises(StoreError, match=rf"^etcd at {own.endpoints[0]}: no answer within 0\.[0-9]+ s$"):
            store.put_if(job + "k", None, b"1")
        assert time.monotonic() - began < 10
        member.thaw()


def test_a_closed_connection_says_so_and_the_others_do_not_care(server: Etcd, job: str) -> None:
    connect = connector(server.endpoints)
    store, other = connect(), connect()
    store.close()
    with pytest.raises(StoreError, match="this connection is closed"):
        store.get([job + "k"])
    assert other.get([job + "k"]) == {}

"""The watch at etcd: no change is missed, whatever happens to connections and servers, and an idle watch makes no calls."""

from __future__ import annotations

import os
import threading
import time

import pytest

from elastirun.errors import StoreError
from elastirun.rendezvous.stores.etcd.client import OPTIONS, Cluster
from elastirun.rendezvous.stores.etcd.store import EtcdStore, NodeLease, connector
from tests.support.cluster import PATIENCE
from tests.support.etcd_server import Etcd, ask, etcd, skip_if_killing_loses_data
from tests.support.listener import Listener, count_up
from tests.support.relay import Relay

QUICK = ("--heartbeat-interval=50", "--election-timeout=500")


@pytest.fixture
def key() -> str:
    return f"elastirun/{os.urandom(4).hex()}/round"


def lose_connection(store: EtcdStore) -> None:
    store._client.abandon(store._client.channel())


def test_each_change_is_heard_of_and_nothing_else(server: Etcd, key: str) -> None:
    connect = connector(server.endpoints)
    listener, writer = Listener(connect(), key), connect()
    for i in range(2, 7):
        writer.put_if(f"{key}-{i}", None, b"another key, which this one begins")
        count_up(writer, key)
        assert listener.hears(i)
    writer.delete(key)
    assert listener.hears(7)
    listener.store.close()


def test_a_lost_connection_is_no_change_and_changes_without_one_are_heard_of_later(server: Etcd, key: str) -> None:
    listener, writer = Listener(connector(server.endpoints)(), key), connector(server.endpoints)()
    for i in (2, 3, 4):
        lose_connection(listener.store)
        count_up(writer, key)  # before or after it has connected again
        assert listener.hears(i)
    listener.store.close()


def test_a_store_works_as_before_when_its_watch_cannot_have_a_thread(server: Etcd, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    store = connector(server.endpoints)()
    store.get([key])  # gRPC has the threads that it needs
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        store.watch(key, lambda: None)
    count_up(store, key)
    store.close()


def test_nothing_is_missed_when_the_server_is_killed_and_comes_back(key: str) -> None:
    with etcd(3, options=QUICK) as cluster:
        skip_if_killing_loses_data()
        first, *others = cluster.members
        listener = Listener(connector([first.endpoint])(), key)
        writer = connector([member.endpoint for member in others])()
        first.kill()
        count_up(writer, key)
        assert listener.calls == 1
        cluster.start_one(first)
        assert listener.hears(2)
        count_up(writer, key)
        assert listener.hears(3)
        first.kill()
        cluster.start_one(first)
        first.wait_until_ready()
        count_up(writer, key)
        assert listener.hears(4)
        listener.store.close()


def test_a_stopped_member_is_left_as_soon_as_an_operation_finds_it(key: str) -> None:
    with etcd(3, options=QUICK) as cluster:
        listener = Listener(connector(cluster.endpoints)(), key)
        stopped = cluster.member(listener.store.endpoint)
        writer = connector([member.endpoint for member in cluster.members if member is not stopped])()
        stopped.freeze()
        count_up(writer, key)
        assert listener.store.get([key]) == {key: b"1"}
        assert listener.hears(2)
        stopped.thaw()
        listener.store.close()


def test_a_watch_alone_leaves_a_connection_that_fell_silent(server: Etcd, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No operation runs that would notice the loss. The keep-alive times are the product's, divided."""
    for name in ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"):
        monkeypatch.setitem(OPTIONS, name, OPTIONS[name] // 6)
    with Relay(server.endpoints[0]) as relay:
        listener = Listener(connector([relay.endpoint])(), key)
        relay.silence()
        count_up(connector(server.endpoints)(), key)
        assert listener.hears(2, patience=30.0), "without the ping's own limit it takes 60 s"
        listener.store.close()


def test_a_watch_alone_goes_to_another_endpoint_when_its_own_is_gone(server: Etcd, key: str) -> None:
    with Relay(server.endpoints[0]) as relay:
        cluster = Cluster([relay.endpoint, server.endpoints[0]])
        cluster.position = 0
        listener = Listener(EtcdStore(cluster, NodeLease(10.0)), key)
        assert listener.store.endpoint == relay.endpoint
    count_up(connector(server.endpoints)(), key)
    assert listener.hears(2)
    assert listener.store.endpoint == server.endpoints[0]
    listener.store.close()


def test_what_etcd_has_forgotten_counts_as_a_change(server: Etcd, key: str) -> None:
    listener, writer = Listener(connector(server.endpoints)(), key), connector(server.endpoints)()
    for _ in range(5):
        newest = count_up(writer, key + "-other")
    ask(writer, "KV/Compact", revision=writer._range(writer._key(key)).header.revision, physical=True)
    lose_connection(listener.store)
    assert listener.hears(2)
    lose_connection(listener.store)
    count_up(writer, key)
    assert listener.hears(3)
    assert newest == 5
    listener.store.close()


def test_while_the_server_is_away_it_is_asked_for_now_and_then(key: str) -> None:
    with etcd() as own:
        listener = Listener(connector(own.endpoints)(), key)
        own.stop()
        with pytest.raises(StoreError):
            listener.store.get([key])
        used, began = time.process_time(), time.monotonic()
        threading.Event().wait(2.0)
        share = (time.process_time() - used) / (time.monotonic() - began)
        print(f"\nCPU while the server is away: {share:.2%}")
        assert share < 0.1, "etcd3's own watch takes 40 %"
        own.start()
        count_up(connector(own.endpoints)(), key)
        assert listener.hears(2)
        listener.store.close()


def test_it_ends_with_its_connection(server: Etcd, key: str) -> None:
    before = set(threading.enumerate())
    listener = Listener(connector(server.endpoints)(), key)
    mine = set(threading.enumerate()) - before
    assert any(thread.name == "etcd watch" for thread in mine)
    listener.store.close()
    for thread in mine:
        thread.join(PATIENCE)
        assert not thread.is_alive(), thread.name
    count_up(connector(server.endpoints)(), key)
    assert listener.calls == 1

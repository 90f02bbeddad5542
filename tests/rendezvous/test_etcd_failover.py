"""Loss of one member of three: killed, stopped or restarted, while a client writes every 10 ms and watches its key."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from elastirun.errors import StoreError
from elastirun.rendezvous.stores.etcd.store import EtcdStore, connector
from tests.support.cluster import PATIENCE
from tests.support.etcd_server import Etcd, Member, etcd, skip_if_killing_loses_data

BEAT = 0.01
LONGEST = 30.0  # seconds without a write, ten times what it takes
EXPIRE = 2 * LONGEST  # the row's lease is longer than any gap, because the writer does not renew it
KEY = "elastirun/job/node/a"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Etcd]:
    with etcd(3) as made:
        yield made


class Writer:
    """A client that counts in ``KEY`` by compare-and-set. After a failed write it reconnects and reads, as the store thread does."""

    def __init__(self, connect: Callable[[], EtcdStore], key: str) -> None:
        self.connect = connect
        self.key = key
        self.set: list[int] = []  # what was set, in order
        self.times = [time.monotonic()]
        self.errors: list[str] = []
        self.doubtful: set[int] = set()  # writes that may or may not have been applied
        self.heard = 0
        self.ended_by: BaseException | None = None  # what ended the thread before its time
        self._progress = threading.Condition()
        self.store = self._connected()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._count()
        except BaseException as error:
            with self._progress:
                self.ended_by = error
                self._progress.notify_all()

    def _count(self) -> None:
        number = 0
        while not self._stop.wait(BEAT):
            number += 1
            try:
                found = self.store.put_if(self.key, self._last(), b"%d" % number)
            except StoreError as error:
                self.errors.append(str(error))
                self.doubtful.add(number)
                self._reconnect()
                continue
            assert found is not None
            if int(found) != number:
                assert int(found) in self.doubtful, f"{found!r} was found, {self.set[-1]} was set last"
            self._note(int(found))

    def _connected(self) -> EtcdStore:
        store = self.connect()
        store.watch(self.key, self._hear)
        return store

    def _hear(self) -> None:
        with self._progress:
            self.heard += 1
            self._progress.notify_all()

    def hears(self) -> None:
        """Write once, and wait until the watch has reported that change."""
        with self._progress:
            before = self.heard
        assert self.store.put_if(self.key, self._last(), b"0") == b"0"
        with self._progress:
            assert self._progress.wait_for(lambda: self.heard > before, PATIENCE)

    def _last(self) -> bytes | None:
        return b"%d" % self.set[-1] if self.set else None

    def _note(self, number: int) -> None:
        with self._progress:
            self.set.append(number)
            self.times.append(time.monotonic())
            self._progress.notify_all()

    def _reconnect(self) -> None:
        self.store.close()
        while not self._stop.is_set():
            try:
                self.store = self._connected()
                found = self.store.get([self.key]).get(self.key)
            except StoreError as error:
                self.errors.append(str(error))
            else:
                if found != self._last():
                    assert found is not None and int(found) in self.doubtful
                    self._note(int(found))
                return

    def writes(self, count: int) -> None:
        """Wait for ``count`` more writes."""
        with self._progress:
            wanted = len(self.set) + count
            in_time = self._progress.wait_for(lambda: len(self.set) >= wanted or self.ended_by is not None, PATIENCE)
            if self.ended_by is not None:
                raise self.ended_by
            assert in_time, self.errors[-3:]

    def end(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        if self.ended_by is not None:
            raise self.ended_by

    @property
    def longest_gap(self) -> float:
        return max(after - before for before, after in zip(self.times, self.times[1:], strict=False))


def version(store: EtcdStore, key: str) -> int:
    """Return how often the key was written, by etcd's own count."""
    answer = store._range(store._key(key))
    return int(answer.kvs[0].version)


def kill_and_restart(cluster: Etcd, member: Member, writer: Writer) -> None:
    skip_if_killing_loses_data()
    member.kill()
    writer.writes(20)
    cluster.start_one(member)
    member.wait_until_ready()


def freeze_and_thaw(cluster: Etcd, member: Member, writer: Writer) -> None:
    member.freeze()
    writer.writes(20)
    member.thaw()


def leader(cluster: Etcd, writer: Writer) -> Member:
    return cluster.leader()


def in_use(cluster: Etcd, writer: Writer) -> Member:
    """Return the member that the writer is connected to, which is not the leader."""
    while cluster.member(writer.store.endpoint) is cluster.leader():
        writer.store._client.abandon(writer.store._client.channel())
        writer.writes(1)
    return cluster.member(writer.store.endpoint)


@pytest.mark.parametrize(
    ("who", "fault"),
    [(leader, kill_and_restart), (leader, freeze_and_thaw), (in_use, freeze_and_thaw), (in_use, kill_and_restart)],
    ids=["leader killed", "leader stopped", "follower stopped", "follower killed"],
)
def test_no_write_is_lost_or_done_twice_when(
    cluster: Etcd,
    who: Callable[[Etcd, Writer], Member],
    fault: Callable[[Etcd, Member, Writer], None],
    request: pytest.FixtureRequest,
) -> None:
    key, said = f"{KEY}-{request.node.name}", list[str]()
    writer = Writer(connector(cluster.endpoints, expire=EXPIRE, say=said.append), key)
    try:
        writer.writes(20)
        fault(cluster, who(cluster, writer), writer)
        writer.writes(20)
    finally:
        writer.end()
    print(f"\n{request.node.name}: longest gap {writer.longest_gap:.1f} s, {len(writer.set)} writes, errors {writer.errors}")
    assert version(writer.store, key) == len(writer.set) == len(set(writer.set)), "as often as they were reported"
    assert writer.longest_gap < LONGEST
    writer.hears()
    assert not said, "no lease was lost"
    writer.store.close()


def test_a_cluster_that_is_started_anew_one_after_the_other_is_never_away(cluster: Etcd) -> None:
    key = f"{KEY}-rolling"
    writer = Writer(connector(cluster.endpoints, expire=EXPIRE), key)
    try:
        for member in cluster.members:
            writer.writes(20)
            member.kill(signal.SIGTERM)
            cluster.start_one(member)
            member.wait_until_ready()
        writer.writes(20)
    finally:
        writer.end()
    print(f"\nrolling restart: longest gap {writer.longest_gap:.1f} s, {len(writer.set)} writes, errors {writer.errors}")
    assert version(writer.store, key) == len(writer.set)
    assert writer.longest_gap < LONGEST
    writer.hears()
    writer.store.close()

"""A network whose round trips take long: the limit is for each answer, and what belongs together is read in one request."""

from __future__ import annotations

import threading
import time

import pytest

from elastirun import clock
from elastirun.rendezvous.actions import Put, Sync
from elastirun.rendezvous.codec import Codec
from elastirun.rendezvous.events import Synced
from elastirun.rendezvous.records import NodeRow
from elastirun.rendezvous.store_thread import StoreThread
from elastirun.rendezvous.stores.memory import MemoryStore
from elastirun.rendezvous.stores.tcp import TcpStore
from elastirun.rendezvous.sync import SyncProtocol
from tests.rendezvous.test_stores import Server, server  # noqa: F401 - a fixture
from tests.support.relay import Relay
from tests.support.until import until

JOB = "elastirun/slow/"
ROW = NodeRow("me", "name", "10.0.0.1", 1000, 1)
ROUND_TRIP = 0.5  # seconds


class Slow(MemoryStore):
    """Takes 0.4 s for each operation."""

    def _takes_long(self) -> None:
        threading.Event().wait(0.4)

    def get(self, keys):  # type: ignore[no-untyped-def]
        self._takes_long()
        return super().get(keys)

    def put_if(self, key, expected, value):  # type: ignore[no-untyped-def]
        self._takes_long()
        return super().put_if(key, expected, value)

    def under(self, prefix):  # type: ignore[no-untyped-def]
        self._takes_long()
        return super().under(prefix)


def test_an_exchange_may_take_longer_than_each_of_its_answers() -> None:
    thread = StoreThread(lambda at: Slow({}), SyncProtocol(JOB, "me", Codec(), time.monotonic), 1.0)
    try:
        thread.submit(Sync(put=Put(None, ROW)))
        answers = until(lambda: thread.answers() or thread.give_up(clock.now()), "the answer")
        assert isinstance(answers[0], Synced) and answers[0].rows == {"me": ROW}, answers
        assert answers[0].now - answers[0].started > 1.0
    finally:
        thread.close()


@pytest.mark.parametrize("nodes", [1, 200])
def test_an_exchange_takes_four_round_trips_whatever_the_number_of_nodes(server: Server, nodes: int) -> None:  # noqa: F811
    """Write the row, read the round with the own row, read the names of the rows, read the rows."""
    job = f"{JOB}{nodes}/"
    protocol = SyncProtocol(job, "me", Codec(), time.monotonic)
    near = server.connect()
    for i in range(nodes):
        near.put_if(f"{job}node/{i}", None, b"garbage")
    with Relay(f"{server.address}:{server.port}", ROUND_TRIP / 2) as relay:
        store = TcpStore("127.0.0.1", int(relay.endpoint.rpartition(":")[2]))
        began = time.monotonic()
        protocol.carry_out(store, Sync(put=Put(None, ROW)), 0.0)
        assert (time.monotonic() - began) / ROUND_TRIP < 4 + 2, "the machine may be busy for two more"
        store.close()

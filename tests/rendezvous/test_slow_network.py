"""A network whose round trips take long: the limit is for each answer, and what belongs together is read in one request."""

from __future__ import annotations

import threading
import time
from contextlib import closing

import pytest

from elastirun import clock
from elastirun.rendezvous.store_thread import StoreThread
from elastirun.rendezvous.stores import tcp_wire
from elastirun.rendezvous.stores.memory import MemoryStore
from elastirun.rendezvous.wire.actions import Put, Sync
from elastirun.rendezvous.wire.codec import Codec
from elastirun.rendezvous.wire.events import Synced
from elastirun.rendezvous.wire.records import NodeRow
from elastirun.rendezvous.wire.sync import SyncProtocol
from tests.rendezvous.test_stores import Server, server  # noqa: F401 - a fixture
from tests.support.until import until

JOB = "elastirun/slow/"
ROW = NodeRow("me", "name", "10.0.0.1", 1000, 1)


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


@pytest.mark.daily(2)
@pytest.mark.parametrize(("rows", "trips"), [(None, 4), ((), 2)], ids=["where a job begins", "else"])
@pytest.mark.parametrize("nodes", [1, 200])
def test_an_exchange_waits_as_often_for_an_answer_whatever_the_number_of_nodes(
    server: Server,  # noqa: F811
    nodes: int,
    rows: tuple[str, ...] | None,
    trips: int,
) -> None:
    """It writes the row, reads the round with the own row, and then the names of the rows, and the rows."""
    job = f"{JOB}{nodes}/"
    protocol = SyncProtocol(job, "me", Codec(), time.monotonic)
    with closing(server.connect()) as near, closing(server.connect()) as store:
        for i in range(nodes):
            near.put_if(f"{job}node/{i}", None, b"garbage")
        connection = store._connection
        send, sent = connection.send, list[bytes]()
        connection.send = lambda data: (sent.append(data), send(data))[1]  # type: ignore[method-assign]
        protocol.carry_out(store, Sync(put=Put(None, ROW), rows=rows), 0.0)
    answered = [data for data in sent if data.startswith(tcp_wire.compare_set("", b"", b"")[:1])]
    assert len(answered) == trips, [data[:60] for data in sent]

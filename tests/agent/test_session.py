"""A session without an agent: events in, actions out, with a real store, or with one that answers when the test says so."""

from __future__ import annotations

import math
import selectors
from collections.abc import Iterator
from dataclasses import replace

import pytest

from elastirun import clock
from elastirun.agent.session import STANDSTILL, Session
from elastirun.agent.store.choose_store import store_access
from elastirun.agent.store.store_access import new_row, rules
from elastirun.agent.store.worker_store import WorkerStore
from elastirun.rendezvous.machine import Machine
from elastirun.rendezvous.store_tracker import StoreTracker
from elastirun.rendezvous.wire.actions import Action, Start, Sync
from elastirun.rendezvous.wire.codec import Codec
from elastirun.rendezvous.wire.events import FoundAtStart, Leave, Reachable, StoodStill, Synced, SyncFailed, Tick
from elastirun.rendezvous.wire.exchanges import Connection, Exchanges
from elastirun.rendezvous.wire.records import Member, Place, RoundRecord
from elastirun.rendezvous.wire.sync import SyncProtocol
from tests.cli.test_resolve import config_of
from tests.sim.world import WorkerPorts
from tests.support.cluster import PATIENCE


@pytest.fixture
def session() -> Iterator[Session]:
    config = config_of("--standalone train.py")
    made = Session.of(config, new_row(config, "node-a"), worker_store_failed=pytest.fail)
    yield made
    made.close()
    if isinstance(made.worker_store, WorkerStore):
        made.worker_store._listening.close()


def test_one_node_gets_its_round_and_serves_its_workers(session: Session) -> None:
    selector = selectors.PollSelector()
    selector.register(session, selectors.EVENT_READ)
    actions: list[Action] = []
    session.begin()
    until = clock.now() + PATIENCE
    while not any(isinstance(action, Start) for action in actions):
        selector.select(max(0.0, min(session.due, until) - clock.now()))
        assert clock.now() < until and session.receive() == []
        session.check_time(clock.now())
        actions += session.actions()
    (start,) = (action for action in actions if isinstance(action, Start))
    assert session.worker_store is not None
    assert (start.node_rank, start.record.members[0].port) == (0, session.worker_store.port)


def test_a_standstill_comes_before_any_other_event(session: Session) -> None:
    session.begin()
    now = clock.now()
    session.post(Leave(now, "a signal"))
    assert session.check_standstill(now, waited=0.0) is None
    assert session.check_standstill(now + 60, waited=60 - STANDSTILL / 2) is None, "it meant to sleep so long"
    assert session.check_standstill(now + 70, waited=0.0) == pytest.approx(10)
    assert session.next_event() == StoodStill(now + 70, pytest.approx(10), workers_ended=False)
    assert session.check_standstill(now + 70, waited=0.0, workers_ended=True) == 0.0, "the guard's lease was over, if only just"


class Mute(Exchanges[Connection]):
    """A store that answers nothing. ``t`` is the time."""

    t = 0.0

    def __init__(self) -> None:
        self.opened: list[Connection] = []
        super().__init__(self._open, SyncProtocol("job/", "me", Codec(), lambda: self.t), lambda: self.t, 3.0, 20.0)

    def _open(self, protocol: SyncProtocol) -> Connection:
        self.opened.append(Connection(protocol))
        return self.opened[-1]

    def _execute(self, connection: Connection, sync: Sync) -> None:
        connection.connected, connection.deadline = True, self.t + 3.0


@pytest.fixture
def waiting() -> tuple[Session, Mute]:
    """A session whose first exchange is under way."""
    config, mute = config_of("--standalone train.py"), Mute()
    access = store_access(config)
    made = Session(Machine(rules(config, access), new_row(config, "node-a"), 0.0), mute, access, pytest.fail, lambda: mute.t)
    made.begin()
    assert list(made.actions()) == [] and len(mute.opened) == 1 and mute.opened[0].deadline == 3.0
    return made, mute


def test_the_time_before_the_loop_begins_counts_as_no_wait(waiting: tuple[Session, Mute]) -> None:
    """Modules are imported for the workers meanwhile."""
    session, mute = waiting
    mute.t = 3600.0
    session.begin()
    assert list(session.actions()) == [] and not session.machine.finished
    mute.t += session.machine.rules.join_timeout
    session.post(Tick(mute.t))
    assert list(session.actions()) and session.machine.finished


def test_the_machine_is_told_the_time_while_an_exchange_hangs(waiting: tuple[Session, Mute]) -> None:
    session, mute = waiting
    session.machine.wake = 0.7
    assert session.due == 0.7
    mute.t = 0.7
    session.check_time(0.7)
    assert (session.next_event(), session.next_event()) == (Tick(0.7), None)


def test_an_answer_after_the_limit_reaches_nobody(waiting: tuple[Session, Mute]) -> None:
    session, mute = waiting
    session.machine.wake = math.inf
    mute.t = 2.9
    session.check_time(2.9)
    assert session.next_event() is None and session.due == pytest.approx(3.0)
    mute.t = 3.0
    session.check_time(3.0)
    assert (session.next_event(), session.next_event()) == (SyncFailed(3.0, "no answer for 3 s"), None)
    late, fresh = mute.opened
    late.answers.append(SyncFailed(3.1, "late"))
    session.receive()
    assert session.next_event() is None and session.due == math.inf
    fresh.answers.append(SyncFailed(3.2, "of the connection that took over"))
    session.receive()
    assert session.next_event() == SyncFailed(3.2, "of the connection that took over")


def test_when_a_round_has_started_the_next_port_is_told(waiting: tuple[Session, Mute]) -> None:
    session, _ = waiting
    session.worker_store = WorkerPorts(1000)
    session.serve_workers()
    told = session.next_event()
    assert isinstance(told, Reachable) and told.port == 1001


def test_where_the_store_has_moved_is_said_after_each_answer(waiting: tuple[Session, Mute], monkeypatch: pytest.MonkeyPatch) -> None:
    session, mute = waiting
    said: list[Place | None] = []
    record = RoundRecord("another run's")
    session.worker_store = WorkerPorts(1000)
    monkeypatch.setattr(session.access, "forward", lambda told, found: (said.append(told and told[0]), found(record)))
    session.step(Tick(0.1))
    for place in (None, Place("n1", "10.0.0.1", 1)):
        monkeypatch.setattr(StoreTracker, "forward", place and (place, record))
        session.step(Synced(mute.t, mute.t, None, {}))
    assert said == [None, place]
    assert session.next_event() == FoundAtStart(mute.t, record), "what is found there is the machine's business"


def test_the_access_knows_the_standby_store_of_this_node_by_the_id_of_its_row(session: Session) -> None:
    assert session.access.me == session.machine.row.id


def test_a_node_is_a_newcomer_until_it_has_seen_a_round(waiting: tuple[Session, Mute]) -> None:
    """A newcomer looks for the job at all endpoints."""
    session, mute = waiting
    session.worker_store = WorkerPorts(1000)
    settings = session.machine.rules.settings
    session.step(Tick(0.1))
    for record in (None, RoundRecord("s", settings=settings)):
        session.step(Synced(mute.t, mute.t, record, {}))
        assert session.access.newcomer
    member = Member("n9", "n9", "127.0.0.9", 1, 1)
    session.step(Synced(mute.t, mute.t, RoundRecord("s", 2, 1, (member,), settings=settings), {}))
    assert not session.access.newcomer


def test_the_port_of_the_standby_store_is_told_with_the_address_and_with_each_new_port(
    waiting: tuple[Session, Mute], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, mute = waiting
    session.access.connect(None).close()
    monkeypatch.setattr(type(session.access), "standby_port", 4711)
    session.access.worker_store = lambda on_error: WorkerPorts(1000)  # type: ignore[method-assign, assignment, return-value]
    session.step(Synced(mute.t, mute.t, None, {}))
    assert session.machine.row.standby == 4711
    session.serve_workers()
    told = session.next_event()
    assert isinstance(told, Reachable) and told.standby == 4711


def test_who_gives_up_its_own_standby_store_serves_another_one(waiting: tuple[Session, Mute], monkeypatch: pytest.MonkeyPatch) -> None:
    session, mute = waiting
    renewed: list[bool] = []
    monkeypatch.setattr(session.access, "renew_standby", lambda: renewed.append(True))
    session.access.connect(None).close()
    session.worker_store = WorkerPorts(1000)
    monkeypatch.setattr(type(session.access), "standby_port", 4712)
    session.step(Synced(mute.t, mute.t, None, {}))
    assert session.machine.row.standby == 4712 and not renewed, "its port is told"
    monkeypatch.setattr(Machine, "step", lambda machine, event: setattr(machine, "row", replace(machine.row, standby=0)) or [])
    for _ in range(2):
        session.step(Tick(mute.t))
        assert renewed == [True], "once"


@pytest.mark.parametrize(
    ("options", "lasting", "hosted", "private"),
    [
        ("--standalone", False, False, True),
        ("--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:4711 --rdzv-id=x", False, True, False),
        ("--nnodes=2 --rdzv-backend=etcd --rdzv-endpoint=localhost:2379 --rdzv-id=x", True, False, False),
    ],
)
def test_the_store_says_whether_it_outlives_the_job(options: str, lasting: bool, hosted: bool, private: bool) -> None:
    config = config_of(f"{options} train.py")
    access = store_access(config)
    found = rules(config, access)
    access.close()
    assert (found.lasting, found.hosted, found.private) == (lasting, hosted, private)

"""A session without an agent: events in, actions out, with a real store."""

from __future__ import annotations

import selectors
from collections.abc import Iterator

import pytest

from elastirun import clock
from elastirun.agent.session import STANDSTILL, Session
from elastirun.agent.store_access import new_row, rules, store_access
from elastirun.agent.worker_store import WorkerStore
from elastirun.rendezvous.actions import Action, Start
from elastirun.rendezvous.events import Leave, StoodStill
from tests.cli.test_resolve import config_of
from tests.support.cluster import PATIENCE


@pytest.fixture
def session() -> Iterator[Session]:
    config = config_of("--standalone train.py")
    made = Session.of(config, new_row(config), worker_store_failed=pytest.fail)
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

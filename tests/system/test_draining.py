"""systemd, Slurm and docker stop signal every process of a node, the worker often before its agent: that node leaves, it has not failed."""

from __future__ import annotations

import math
import signal
import time
from typing import cast

import pytest

from elastirun import clock
from elastirun.agent.failures.classify import may_be_stopped_from_outside
from elastirun.agent.failures.tracker import SIGNAL_HOLD, VICTIM_HOLD, FailureTracker
from elastirun.agent.output.logs import RunLogs
from elastirun.agent.part import WorkerExit
from elastirun.agent.store import shared_store
from elastirun.rendezvous.stores.tcp import connect
from elastirun.rendezvous.wire.codec import Codec
from elastirun.rendezvous.wire.records import ExitRecord, NodeRow, Status
from tests.support.cluster import Cluster

WAYS = {  # what a worker does at SIGTERM
    "default": "pass",
    "exits with 143": "signal.signal(15, lambda *_: os._exit(143))",
    "exits with 1": "signal.signal(15, lambda *_: os._exit(1))",
    "is interrupted": "signal.signal(15, signal.default_int_handler)",
}
SCRIPT = """
import json, os, signal, socket, sys
{way}
s = socket.socket(socket.AF_UNIX)
s.connect(os.environ["TEST_SOCKET"])
s.sendall(json.dumps({{**os.environ, "pid": os.getpid()}}).encode() + b"\\n")
sys.exit(int(s.makefile().readline()))
"""


@pytest.mark.daily(2)
@pytest.mark.parametrize("way", WAYS)
def test_a_worker_that_is_signalled_10_ms_before_its_agent_has_left(nodes: Cluster, way: str) -> None:
    nodes.script.write_text(SCRIPT.format(way=WAYS[way]))
    a, b = nodes.agent(1, nnodes="1:2"), nodes.agent(2, nnodes="1:2")
    workers = nodes.round(2)
    drained = next(worker for worker in workers if worker.env["GROUP_RANK"] == workers[1].env["GROUP_RANK"])
    agent, other = (b, a) if f"rank {drained.rank} " in nodes.out(2) else (a, b)
    signal_both(drained.pid, agent.pid)
    assert nodes.ends(agent) == 143
    (worker,) = nodes.round(1, after=1)
    assert "left: SIGTERM" in worker.env["ELASTIRUN_ROUND_REASON"] or "leaves: SIGTERM" in worker.env["ELASTIRUN_ROUND_REASON"]
    worker.tell("0")
    assert nodes.ends(other) == 0, "--max-restarts=0"


def test_a_node_that_leaves_reports_no_failure(nodes: Cluster) -> None:
    """Should another node fail at the same moment, it would be taken for the cause."""
    nodes.script.write_text(SCRIPT.format(way=WAYS["default"]))
    host, agent = nodes.agent(1, nnodes="1:2"), nodes.agent(2, nnodes="1:2")
    workers = nodes.round(2)
    (drained,) = (worker for worker in workers if f"here rank {worker.rank} " in nodes.out(2))
    signal_both(drained.pid, agent.pid)
    assert nodes.ends(agent) == 143
    store = connect("127.0.0.1", nodes.port)
    rows = [Codec().decode(key, data, NodeRow) for key, data in store.under(f"{shared_store.prefix('test')}node/").items()]
    assert [row.failures for row in rows if row.status is Status.LEFT] == [()]
    (worker,) = nodes.round(1, after=1)
    worker.tell("0")
    assert nodes.ends(host) == 0


def signal_both(worker: int, agent: int) -> None:
    import os

    os.kill(worker, signal.SIGTERM)
    time.sleep(0.01)
    os.kill(agent, signal.SIGTERM)


def test_a_worker_that_alone_is_ended_by_a_signal_has_failed(nodes: Cluster) -> None:
    nodes.script.write_text(SCRIPT.format(way=WAYS["default"]))
    agent = nodes.launch(1, str(nodes.script))
    (worker,) = nodes.round(1)
    signal_at = time.monotonic()
    import os

    os.kill(worker.pid, signal.SIGTERM)
    assert nodes.ends(agent) == 1 and time.monotonic() >= signal_at + SIGNAL_HOLD
    assert "killed by SIGTERM (signal 15), sent from outside" in nodes.out(1)


def test_what_a_leave_takes_back() -> None:
    signalled, victim, own = (ExitRecord("n", rank, rank, 7, code, 0, 1.0) for rank, code in enumerate((-15, 1, 3)))
    tracker = FailureTracker("n", cast(RunLogs, None), print)
    tracker.add(signalled, SIGNAL_HOLD)
    tracker.add(victim, VICTIM_HOLD)
    assert tracker.report_at > clock.now() + VICTIM_HOLD, "the victim of one that was told to leave waits as long"
    tracker.agent_signalled()
    tracker.add(signalled, SIGNAL_HOLD)
    assert (tracker.failures, tracker.report_at) == ((), math.inf), "nobody has failed, also later on"
    tracker.start_round(1, False)
    tracker.add(own)
    tracker.add(signalled, SIGNAL_HOLD)
    tracker.agent_signalled()
    assert tracker.failures == (own,) and tracker.report_at <= clock.now()
    tracker.start_round(2, False)
    tracker.add(signalled, SIGNAL_HOLD)
    tracker.take_report()
    tracker.agent_signalled()
    assert tracker.failures == (signalled,), "what was told counts"


TRACEBACK = "Traceback (most recent call last):"


@pytest.mark.parametrize(
    ("code", "catches", "lines", "expected"),
    [
        (-15, False, (), True),
        (-2, False, (TRACEBACK, "KeyboardInterrupt"), True),
        (-1, False, (), True),
        (143, False, (), True),
        (130, False, (), True),
        (-9, False, (), False),
        (-11, True, (), False),
        (1, False, (), False),
        (1, True, ("INFO: saved",), True),
        (1, True, (TRACEBACK, "ValueError: x"), False),
        (1, True, (TRACEBACK, "lightning.pytorch.utilities.exceptions.SIGTERMException"), True),
    ],
)
def test_which_ends_may_come_of_a_signal(code: int, catches: bool, lines: tuple[str, ...], expected: bool) -> None:
    assert may_be_stopped_from_outside(WorkerExit(0, 0, 7, code, 1.0, False, catches), lines) is expected

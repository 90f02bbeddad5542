"""Stopping, on each of the four paths: told by a signal, a worker failed, a node joined, a bug of ours.

Every worker gets SIGTERM, itself alone, and has the whole grace; its children see nothing before the end.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable

import pytest

from elastirun.agent.processes.signals import REQUEST_WINDOW
from tests.support.cluster import Cluster, Worker, dies
from tests.system.test_endings import BUG, with_change

# A worker with four children, for which SIGTERM keeps its default action. It reports its own SIGTERM, and exits when the test sends a code.
SCRIPT = """
import json, os, signal, socket, sys, time
children = []
for _ in range(4):
    children.append(os.fork())
    if not children[-1]:
        signal.pause()
s = socket.socket(socket.AF_UNIX)
s.connect(os.environ["TEST_SOCKET"])
signal.signal(signal.SIGTERM, lambda *_: s.sendall(b"TERM"))
s.sendall(json.dumps({**os.environ, "pid": os.getpid(), "children": children}).encode() + b"\\n")
sys.exit(int(s.makefile().readline()))
"""


@pytest.fixture
def nodes(nodes: Cluster) -> Cluster:
    nodes.script.write_text(SCRIPT)
    return nodes


def by_signal(nodes: Cluster, *options: str) -> Worker:
    return signalled(nodes, *options)[1]


def signalled(nodes: Cluster, *options: str, change: str = "") -> tuple[subprocess.Popen[str], Worker]:
    """Return an agent that was told to stop, and its worker."""
    agent = nodes.launch(1, *options, str(nodes.script), program=with_change(change))
    (worker,) = nodes.round(1)
    agent.send_signal(signal.SIGTERM)
    return agent, worker


def by_failure(nodes: Cluster, *options: str) -> Worker:
    nodes.agent(1, "--max-restarts=1", *options, nnodes="2")
    nodes.agent(2, "--max-restarts=1", *options, nnodes="2")
    bad, good = nodes.round(2)
    bad.tell("1")
    return good


def by_joining(nodes: Cluster, *options: str) -> Worker:
    nodes.agent(1, "--last-call=0", *options, nnodes="1:2")
    (worker,) = nodes.round(1)
    nodes.agent(2, *options, nnodes="1:2")
    return worker


def by_a_bug(nodes: Cluster, *options: str) -> Worker:
    nodes.launch(1, "--nproc-per-node=2", *options, str(nodes.script), program=with_change(BUG))
    bad, good = nodes.round(2)
    bad.tell("1")
    return good


# The grace after a second signal becomes longer than any test waits, so what ends within a test has not waited for that grace.
LONG_SECOND_GRACE = "from elastirun.agent import agent\nagent.SECOND_SIGNAL_GRACE = 600.0"

Path_ = Callable[..., Worker]
LONG, SHORT = "--grace=60", "--failure-grace=0.5"


@pytest.mark.daily(4)
@pytest.mark.parametrize(
    ("path", "options"),
    [*((path, (LONG, SHORT)) for path in (by_signal, by_joining, by_a_bug)), (by_failure, ("--grace=0.5", "--failure-grace=60"))],
)
def test_a_worker_has_its_whole_grace_and_its_children_see_no_signal_before(nodes: Cluster, path: Path_, options: tuple[str, str]) -> None:
    worker = path(nodes, *options)
    assert worker.connection.recv(4) == b"TERM"
    assert not dies(worker.pid, 2.0), "four times the other grace"
    children = [int(pid) for pid in worker.env["children"]]
    assert not any(dies(pid, 0) for pid in children)
    worker.tell("0")
    worker.await_death()
    assert all(dies(pid) for pid in children)


@pytest.mark.daily(4)
@pytest.mark.parametrize("path", [by_signal, by_joining, by_failure, by_a_bug])
def test_a_worker_that_does_not_stop_is_killed_with_its_children_when_its_grace_is_over(nodes: Cluster, path: Path_) -> None:
    worker = path(nodes, "--grace=1")
    assert worker.connection.recv(4) == b"TERM"
    worker.await_death()
    assert all(dies(int(pid)) for pid in worker.env["children"])


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_workers_get_the_signal_that_their_agent_was_sent(nodes: Cluster, signum: signal.Signals) -> None:
    nodes.script.write_text(SCRIPT.replace("signal.SIGTERM", f"signal.{signum.name}"))
    agent = nodes.launch(1, str(nodes.script))
    (worker,) = nodes.round(1)
    agent.send_signal(signum)
    assert worker.connection.recv(4) == b"TERM"
    worker.tell("0")
    assert nodes.ends(agent) == 128 + signum


def test_a_second_signal_shortens_and_a_third_ends_everything_at_once(nodes: Cluster) -> None:
    agent, worker = signalled(nodes, "--grace=6000", change=LONG_SECOND_GRACE)
    assert worker.connection.recv(4) == b"TERM"
    assert not dies(worker.pid, REQUEST_WINDOW + 0.1)
    agent.send_signal(signal.SIGTERM)
    nodes.says(1, "SIGTERM: its workers have 600 s")
    assert not dies(worker.pid, REQUEST_WINDOW + 0.1)
    agent.send_signal(signal.SIGINT)
    assert nodes.ends(agent) == 143, "much sooner than after the 600 s"
    assert dies(worker.pid, 0) and all(dies(int(pid)) for pid in worker.env["children"])


def test_a_second_signal_starts_no_new_grace(nodes: Cluster) -> None:
    agent, worker = signalled(nodes, "--grace=3", change=LONG_SECOND_GRACE)
    assert worker.connection.recv(4) == b"TERM"
    assert not dies(worker.pid, REQUEST_WINDOW + 0.1)
    agent.send_signal(signal.SIGTERM)
    assert nodes.ends(agent) == 143, "much sooner than after the 600 s of a second signal"
    worker.await_death()

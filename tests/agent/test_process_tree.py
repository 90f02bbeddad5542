"""Nothing that an agent started outlives it, however it dies. Real processes, real kills."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.lab import ELASTIRUN
from benchmarks.orphans import MOMENTS, PHASES, Case, run
from elastirun.agent.processes.process_tree import _own_group
from elastirun.rendezvous.stores import tcp_server
from tests.support.children import guard_of
from tests.support.cluster import PATIENCE, Cluster, Worker, dies, kill
from tests.support.until import until

# A worker whose child has an empty environment, so that only the control group shows to which agent it belongs.
HIDDEN = """
import json, os, socket, subprocess, sys
child = subprocess.Popen(["sleep", "1000"], env={}, start_new_session=True)
s = socket.socket(socket.AF_UNIX)
s.connect(os.environ["TEST_SOCKET"])
s.sendall(json.dumps({**os.environ, "pid": os.getpid(), "who": "worker", "child": str(child.pid)}).encode() + b"\\n")
sys.exit(int(s.makefile().readline()))
"""

# A worker with two orphans in sessions of their own, one of them stopped.
SCRIPT = """
import json, os, signal, socket, subprocess, sys
CHILD = '''
import json, os, signal, socket, sys
s = socket.socket(socket.AF_UNIX)
s.connect(os.environ["TEST_SOCKET"])
s.sendall(json.dumps({**os.environ, "pid": os.getpid(), "who": sys.argv[1]}).encode() + bytes([10]))
if sys.argv[1] == "stopped":
    os.kill(os.getpid(), signal.SIGSTOP)
signal.pause()
'''
for who in ("daemon", "stopped"):
    if os.fork() == 0:
        os.setsid()
        subprocess.Popen([sys.executable, "-c", CHILD, who], start_new_session=True)
        os._exit(0)
    os.wait()
s = socket.socket(socket.AF_UNIX)
s.connect(os.environ["TEST_SOCKET"])
s.sendall(json.dumps({**os.environ, "pid": os.getpid(), "who": "worker"}).encode() + b"\\n")
sys.exit(int(s.makefile().readline()))
"""


# The agent's side of a guard that has died, and cannot be replaced.
UNWATCHED = """
import errno, os, selectors, signal, subprocess
from pathlib import Path
from elastirun.agent.processes.process_tree import ProcessTree
selector = selectors.DefaultSelector()
tree = ProcessTree("test", 0.0, selector, print)
worker = subprocess.Popen(["sleep", "1000"], start_new_session=True)
tree.add_workers([worker.pid])
def fails(pid):
    raise OSError(errno.EMFILE, "Too many open files")
os.kill(tree._guard.pid, signal.SIGKILL)
os.pidfd_open, real = fails, os.pidfd_open
for key, mask in selector.select():
    key.data(mask)
os.pidfd_open = real
children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
print(children == [str(worker.pid)], worker.poll())
worker.kill()
worker.wait()
"""


# An agent and a guard that stood still together for longer than the lease; the agent goes on first.
LATE = """
import os, selectors, signal, subprocess, sys
from elastirun import clock
from elastirun.agent.processes.process_tree import ProcessTree
later, limit = map(float, sys.argv[1:])
tree = ProcessTree("test", 10.0, selectors.DefaultSelector(), print)
worker = subprocess.Popen(["sleep", "1000"], start_new_session=True)
tree.add_workers([worker.pid])
os.kill(tree._guard.pid, signal.SIGSTOP)
os.waitid(os.P_PID, tree._guard.pid, os.WSTOPPED | os.WNOWAIT)
now = clock.now() + 1
tree.renew(now)
tree.renew(now + later)
os.kill(tree._guard.pid, signal.SIGCONT)
try:
    print(worker.wait(limit))
except subprocess.TimeoutExpired:
    print("lives")
tree.close()
"""


@pytest.fixture
def nodes(nodes: Cluster) -> Cluster:
    nodes.script.write_text(SCRIPT)
    return nodes


def everyone(nodes: Cluster) -> dict[str, Worker]:
    found = [nodes.worker() for _ in range(3)]
    return {w.env["who"]: w for w in found}


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV])
def test_the_agent_dies_and_nothing_is_left(nodes: Cluster, signum: int) -> None:
    agent = nodes.launch(1, str(nodes.script))
    tree = everyone(nodes)
    its_guard = guard_of(agent)
    agent.send_signal(signum)
    agent.wait()
    assert all(dies(w.pid) for w in tree.values())
    assert dies(its_guard)
    assert list(nodes.tmp_path.glob("elastirun_*")) == [], "the folder for error files is gone too"


@pytest.mark.daily(4)
@pytest.mark.parametrize("phase", list(PHASES))
def test_at_whatever_moment_the_agent_is_killed_nothing_is_left(phase: str) -> None:
    """A part of ``benchmarks/orphans.py``, which has more moments and four ways to die."""
    cases = [Case(ELASTIRUN, "kill -9", moment) for moment in MOMENTS if moment.phase == phase][::2]
    with ThreadPoolExecutor() as pool:
        for result in pool.map(lambda case: run(case, until_first_worker=1.5), cases):
            assert not result.stayed and not result.trouble, result


def test_what_a_worker_leaves_behind_ends_with_its_round(nodes: Cluster) -> None:
    agent = nodes.launch(1, "--grace=0.2", str(nodes.script))
    tree = everyone(nodes)
    tree["worker"].tell("0")
    assert nodes.ends(agent) == 0
    assert all(dies(w.pid, 0) for w in tree.values())
    assert "SIGTERM to 2 processes that the workers had left running" in nodes.out(1)


def test_a_frozen_agent_loses_its_workers_when_its_lease_ends(nodes: Cluster) -> None:
    agent = nodes.agent(1, "--last-call=0.1", "--grace=0.2", nnodes="1:2")
    tree = everyone(nodes)
    agent.send_signal(signal.SIGSTOP)
    assert all(dies(w.pid) for w in tree.values())
    agent.send_signal(signal.SIGCONT)
    again = everyone(nodes)["worker"]
    assert again.round == 2 and "stood still for" in again.env["ELASTIRUN_ROUND_REASON"], "and it costs no restart"
    again.tell("0")
    assert nodes.ends(agent) == 0


@pytest.mark.parametrize("port", [False, True], ids=["plain", "with a port"])
def test_a_frozen_agent_whose_place_nobody_can_take_keeps_its_workers(nodes: Cluster, port: bool) -> None:
    given = (f"--master-port={nodes.port}",) if port else ()
    agent = nodes.launch(1, *given, "--expire=1", "--grace=0.2", str(nodes.script))
    tree = everyone(nodes)
    agent.send_signal(signal.SIGSTOP)
    assert not dies(tree["worker"].pid, 2.5), "in 0.8 s it would be ended where others wait"
    agent.send_signal(signal.SIGCONT)
    tree["worker"].tell("0")
    assert nodes.ends(agent) == 0


@pytest.mark.daily(2)
@pytest.mark.parametrize("host", [1, 9], ids=["here", "elsewhere"])
def test_a_round_of_one_loses_its_workers_before_a_spare_may_start_its_own_wherever_its_store_is(nodes: Cluster, host: int) -> None:
    server = tcp_server.serve(socket.create_server(("127.0.0.9", nodes.port))) if host == 9 else None
    agent = nodes.agent(1, "--rdzv-backend=c10d", "--expire=2", "--grace=0.2", nnodes="1", host=host)
    tree = everyone(nodes)
    agent.send_signal(signal.SIGSTOP)
    assert all(dies(w.pid) for w in tree.values()), "on its own at a private store it would keep them for ever"
    agent.send_signal(signal.SIGCONT)
    again = everyone(nodes)["worker"]
    assert again.round == 2
    again.tell("0")
    assert nodes.ends(agent) == 0
    del server


def test_agent_and_guard_killed_together_the_next_run_sweeps(nodes: Cluster) -> None:
    agent = nodes.launch(1, "--rdzv-id=swept", "--standalone", str(nodes.script))
    tree = everyone(nodes)
    os.kill(guard_of(agent), signal.SIGSTOP)  # so that it cannot act between the two kills
    stopped = guard_of(agent)
    kill(agent)
    os.kill(stopped, signal.SIGKILL)
    assert not dies(tree["daemon"].pid, 0)
    again = nodes.launch(1, "--rdzv-id=swept", "--grace=0.2", "--standalone", str(nodes.script))
    assert dies(tree["daemon"].pid) and dies(tree["stopped"].pid)
    everyone(nodes)["worker"].tell("0")
    assert nodes.ends(again) == 0
    assert "of an earlier run of this job" in nodes.out(1)


def test_a_guard_that_cannot_be_watched_is_ended_and_kills_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", UNWATCHED], capture_output=True, text=True, timeout=PATIENCE)
    *said, found = done.stdout.splitlines()
    assert found == "True None", done
    assert "Too many open files" in said[-1]


@pytest.mark.parametrize(("later", "limit", "found"), [(9.9, 0.5, "lives"), (10.0, PATIENCE, "-9")], ids=["in time", "too late"])
def test_the_first_renewal_after_the_lease_ends_the_workers(later: float, limit: float, found: str) -> None:
    done = subprocess.run([sys.executable, "-c", LATE, str(later), str(limit)], capture_output=True, text=True, timeout=2 * PATIENCE)
    assert done.stdout.splitlines()[0] == found, done


def test_a_guard_that_is_killed_is_replaced(nodes: Cluster) -> None:
    agent = nodes.launch(1, str(nodes.script))
    tree = everyone(nodes)
    os.kill(guard_of(agent), signal.SIGKILL)
    nodes.says(1, "another one is started")
    kill(agent)
    assert all(dies(w.pid) for w in tree.values())


def test_another_job_and_other_processes_are_left_alone(nodes: Cluster) -> None:
    other = nodes.launch(2, "--grace=0.2", str(nodes.script))
    others = everyone(nodes)
    agent = nodes.launch(1, str(nodes.script))
    tree = everyone(nodes)
    kill(agent)
    assert all(dies(w.pid) for w in tree.values())
    assert not any(dies(w.pid, 0) for w in others.values())
    others["worker"].tell("0")
    assert nodes.ends(other) == 0


@pytest.fixture
def group() -> Path:
    """Return the control group below which this test's agents can make groups."""
    own = _own_group()
    if own is None:
        pytest.skip("no control group of version 2 here")
    tried = own / f"test-{os.getpid()}"
    try:
        tried.mkdir()
        can_be_ended = (tried / "cgroup.kill").exists()
        tried.rmdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    if not can_be_ended:
        pytest.skip("cgroup.kill came with Linux 5.14")
    return own


@pytest.mark.daily(3)
@pytest.mark.parametrize("way", ["killed", "frozen", "at the end of its round"])
def test_an_emptied_environment_hides_nothing_where_there_are_control_groups(nodes: Cluster, group: Path, way: str) -> None:
    nodes.script.write_text(HIDDEN)
    agent = nodes.agent(1, "--last-call=0.1", "--grace=0.2", nnodes="1:2")
    worker = nodes.worker()
    (own,) = group.glob(f"elastirun-{agent.pid}-*")
    if way == "killed":
        kill(agent)
    elif way == "frozen":
        agent.send_signal(signal.SIGSTOP)
    else:
        worker.tell("0")
    assert dies(int(worker.env["child"]))
    if way == "frozen":
        agent.send_signal(signal.SIGCONT)
        worker = nodes.worker()
        assert worker.round == 2
        worker.tell("0")
    assert way == "killed" or nodes.ends(agent) == 0
    until(lambda: not own.exists(), "the end of the control group")

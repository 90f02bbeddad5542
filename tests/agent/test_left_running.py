"""Processes that outlive their worker have the rest of the grace period when it was stopped, and a whole one after success."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, Worker, dies

# Run by a wrapper, or left in the background by a worker. Reports its signals, and ends when the test says so.
BELOW = """
import json, os, signal, socket, sys
s = socket.socket(socket.AF_UNIX)
s.connect(os.environ["TEST_SOCKET"])
for signum in (signal.SIGTERM, signal.SIGINT):
    signal.signal(signum, lambda signum, frame: s.sendall(signal.Signals(signum).name.encode() + b" "))
s.sendall(json.dumps({**os.environ, "pid": os.getpid()}).encode() + b"\\n")
if "TEST_RUNS" in os.environ:
    os.write(int(os.environ["TEST_RUNS"]), b"x")
command = s.makefile().readline()
print("saved", file=sys.stderr)
sys.exit(int(command))
"""
# Starts BELOW in its own process group or in a new session, waits until it runs, and ends.
STARTER = """
import os, subprocess, sys
ours, theirs = os.pipe()
os.environ["TEST_RUNS"] = str(theirs)
for i in range(int(sys.argv[2])):
    subprocess.Popen([sys.executable, sys.argv[1]], start_new_session=i % 2 == 1, pass_fds=[theirs])
for i in range(int(sys.argv[2])):
    os.read(ours, 1)
sys.exit(int(sys.argv[3]))
"""


@pytest.fixture
def nodes(nodes: Cluster, tmp_path: Path) -> Cluster:
    nodes.script.write_text(BELOW)
    nodes.starter = tmp_path / "starter.py"  # type: ignore[attr-defined]
    nodes.starter.write_text(STARTER)  # type: ignore[attr-defined]
    return nodes


def wrapped(nodes: Cluster, line: str, *options: str) -> tuple[subprocess.Popen[str], Worker]:
    wrapper = nodes.tmp_path / "run.sh"
    wrapper.write_text(f"#!/bin/bash\necho wrapper\n{line.format(python=sys.executable, script=nodes.script)}\necho done\n")
    wrapper.chmod(0o700)
    agent = nodes.launch(1, "--no-python", *options, str(wrapper))
    return agent, nodes.worker()


LINES = {
    "child": "{python} {script}",
    "own group": "timeout 1000 {python} {script}",
    "two wrappers": "bash -c '{python} {script}; true'",
    "background": "{python} {script} & wait",
    "own session": "setsid -w {python} {script}",
}


@pytest.mark.daily(5)
@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_what_runs_below_a_wrapper_is_signalled_once_and_has_its_grace(nodes: Cluster, line: str) -> None:
    agent, below = wrapped(nodes, line, "--grace=60")
    agent.send_signal(signal.SIGTERM)
    assert below.connection.recv(99) == b"SIGTERM "
    assert not dies(below.pid, 0.7), "the wrapper has ended, and all of the group would have been killed"
    below.tell("0")
    assert nodes.ends(agent) == 143
    assert below.connection.recv(99) == b"" and "saved" in nodes.out(1)


def test_nobody_is_signalled_again_when_another_has_ended(nodes: Cluster) -> None:
    agent, first = wrapped(nodes, "{python} {script} & {python} {script} & wait", "--grace=60")
    second = nodes.worker()
    agent.send_signal(signal.SIGTERM)
    assert [below.connection.recv(99) for below in (first, second)] == [b"SIGTERM ", b"SIGTERM "]
    first.tell("0")
    assert dies(first.pid) and not dies(second.pid, 0.5)
    second.tell("0")
    assert nodes.ends(agent) == 143 and second.connection.recv(99) == b""


def test_what_runs_below_a_wrapper_is_killed_when_the_grace_is_over(nodes: Cluster) -> None:
    agent, below = wrapped(nodes, LINES["own group"], "--grace=1")
    agent.send_signal(signal.SIGTERM)
    assert below.connection.recv(99) == b"SIGTERM "
    assert nodes.ends(agent) == 143 and dies(below.pid, 0)


def test_a_shell_that_waits_for_its_child_ends_by_ctrl_c_too(nodes: Cluster) -> None:
    """A shell waits for its child after SIGINT. So the shell gets SIGTERM, and its child gets it when the shell has ended."""
    agent, below = wrapped(nodes, LINES["child"], "--grace=60")
    agent.send_signal(signal.SIGINT)
    assert below.connection.recv(99) == b"SIGTERM "
    below.tell("0")
    assert nodes.ends(agent) == 130


def test_a_planned_stop_lets_what_runs_below_a_wrapper_save(nodes: Cluster) -> None:
    wrapper = nodes.tmp_path / "run.sh"
    wrapper.write_text(f"#!/bin/bash\n{sys.executable} {nodes.script}\necho done\n")
    wrapper.chmod(0o700)
    nodes.script = wrapper
    nodes.agent(1, "--no-python", "--last-call=0", nnodes="1:2")
    below = nodes.worker()
    nodes.agent(2, "--no-python", nnodes="1:2")
    assert below.connection.recv(99) == b"SIGTERM "
    below.tell("0")
    for worker in nodes.round(2, after=1):
        worker.tell("0")
    assert [nodes.ends(agent) for agent in nodes.agents] == [0, 0]
    assert nodes.out(1).count("saved") == 2


# -- after success


def left(nodes: Cluster, *options: str, count: int = 1, code: int = 0) -> tuple[subprocess.Popen[str], list[Worker]]:
    agent = nodes.launch(1, *options, str(nodes.starter), str(nodes.script), str(count), str(code))  # type: ignore[attr-defined]
    return agent, [nodes.worker() for _ in range(count)]


def test_what_a_worker_left_running_when_the_job_succeeded_may_finish(nodes: Cluster) -> None:
    agent, uploads = left(nodes, "--grace=60", count=2)
    nodes.says(1, "waiting up to 60 s for 2 processes that the workers left running")
    for upload in uploads:
        upload.tell("0")
    assert nodes.ends(agent) == 0
    assert [upload.connection.recv(99) for upload in uploads] == [b"", b""], "no signal"
    assert nodes.out(1).count("saved") == 2, "what they print at the end is shown"


def test_what_does_not_finish_in_the_grace_is_asked_to_stop_and_the_job_has_succeeded_all_the_same(nodes: Cluster) -> None:
    agent, (daemon,) = left(nodes, "--grace=2")
    assert daemon.connection.recv(99) == b"SIGTERM "
    nodes.says(1, "waiting up to 2 s for 1 process that the workers left running")
    nodes.says(1, "SIGTERM to 1 process that the workers had left running, SIGKILL after 2 s")
    daemon.tell("0")
    assert nodes.ends(agent) == 0


def test_a_signal_ends_the_wait(nodes: Cluster) -> None:
    agent, (upload,) = left(nodes, "--grace=600")
    nodes.says(1, "waiting up to 600 s")
    agent.send_signal(signal.SIGTERM)
    assert upload.connection.recv(99) == b"SIGTERM "
    upload.tell("0")
    assert nodes.ends(agent) == 0, "every worker had succeeded"


def test_it_ends_with_its_agent(nodes: Cluster) -> None:
    agent, uploads = left(nodes, "--grace=600", count=2)
    nodes.says(1, "waiting up to 600 s")
    agent.kill()
    assert all(dies(upload.pid) for upload in uploads)


def test_nothing_is_left_of_a_job_that_failed(nodes: Cluster) -> None:
    agent, uploads = left(nodes, "--failure-grace=1", count=2, code=3)
    began = time.monotonic()
    assert nodes.ends(agent) == 1 and time.monotonic() < began + 30
    assert all(dies(upload.pid, 0) for upload in uploads)


def test_what_a_worker_leaves_running_goes_on_while_other_workers_do(nodes: Cluster) -> None:
    nodes.starter.write_text('import os\nif os.environ["LOCAL_RANK"] == "1": os.execv(sys.executable, ["python", sys.argv[1]])\n' + STARTER)  # type: ignore[attr-defined]
    text = nodes.starter.read_text()  # type: ignore[attr-defined]
    nodes.starter.write_text("import sys\n" + text)  # type: ignore[attr-defined]
    agent = nodes.launch(1, "--nproc-per-node=2", "--grace=60", str(nodes.starter), str(nodes.script), "1", "0")  # type: ignore[attr-defined]
    both = {worker.env["LOCAL_RANK"]: worker for worker in (nodes.worker(), nodes.worker())}
    assert not dies(both["0"].pid, 0.7), "its worker has ended"
    both["1"].tell("0")
    nodes.says(1, "waiting up to 60 s for 1 process")
    both["0"].tell("0")
    assert nodes.ends(agent) == 0

"""Signals are obeyed from the first moment to the last, also by process 1 of a container: it hears none without a handler."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.support.cluster import PATIENCE, Cluster, dies
from tests.support.until import until

ROOT = Path(__file__).parents[2]
AS_PID_1 = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
contained = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare for a pid namespace")
WITHOUT = pytest.param((), id="plain")
INSIDE = pytest.param(AS_PID_1, id="process 1", marks=contained)
SHORT = 0.001  # seconds between two looks: the moment of a signal is to follow at once
FOREVER = "import signal\nwhile True: signal.pause()"


@pytest.fixture
def nodes(nodes: Cluster) -> Cluster:
    nodes.script.write_text(FOREVER)
    return nodes


def read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def children(pid: int) -> list[int]:
    return [int(child) for child in read(f"/proc/{pid}/task/{pid}/children").split()]


def left(nodes: Cluster) -> list[str]:
    """The command lines of the processes that this test has started, by a variable in their environment."""
    own = f"TEST_SOCKET={nodes.env['TEST_SOCKET']}"
    pids = [name for name in os.listdir("/proc") if name.isdecimal()]
    return [read(f"/proc/{pid}/cmdline") for pid in pids if own in read(f"/proc/{pid}/environ").split("\0")]


def heeds(pid: int, signum: int) -> bool:
    """Whether the process has a handler for the signal."""
    caught = read(f"/proc/{pid}/status").partition("SigCgt:\t")[2][:16]
    return bool(caught) and bool(int(caught, 16) >> (signum - 1) & 1)


def agent_of(started: subprocess.Popen[str], before: tuple[str, ...]) -> int:
    """The agent's pid as it is here, outside of its namespace."""
    return until(lambda: children(started.pid), "the agent", pause=SHORT)[0] if before else started.pid


# -- before the agent exists

SLOW_IMPORT = "import os, signal, sys\nos.kill(os.getpid(), signal.{})\nos._exit(77)"


@pytest.mark.parametrize("before", [WITHOUT, INSIDE])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_during_the_first_import_is_obeyed(nodes: Cluster, signum: signal.Signals, before: tuple[str, ...]) -> None:
    (nodes.tmp_path / "click.py").write_text(SLOW_IMPORT.format(signum.name))  # the first of the imports that take time
    nodes.env["PYTHONPATH"] = str(nodes.tmp_path)
    assert nodes.ends(nodes.launch(1, str(nodes.script), before=before)) == 128 + signum
    assert nodes.out(1) == ""


def test_nohup_holds_from_the_first_moment(nodes: Cluster) -> None:
    (nodes.tmp_path / "click.py").write_text(SLOW_IMPORT.format("SIGHUP"))
    nodes.env["PYTHONPATH"] = str(nodes.tmp_path)
    assert nodes.ends(nodes.launch(1, str(nodes.script), before=("sh", "-c", "trap '' HUP; exec \"$@\"", "sh"))) == 77


def test_a_signal_that_is_not_listed_is_not_obeyed_once_the_list_is_known(nodes: Cluster) -> None:
    agent = nodes.launch(1, "--signals-to-handle=SIGINT", str(nodes.script))
    until(lambda: len(children(agent.pid)) == 2, "the guard and a worker", pause=SHORT)
    assert heeds(agent.pid, signal.SIGINT) and not heeds(agent.pid, signal.SIGTERM) and not heeds(agent.pid, signal.SIGHUP)
    agent.terminate()
    assert nodes.ends(agent) == -signal.SIGTERM
    until(lambda: not left(nodes), "the end of all processes")


ASKED = """
import json, os, signal, socket
s = socket.socket(socket.AF_UNIX)
s.connect(os.environ["TEST_SOCKET"])
s.sendall(json.dumps({"pid": os.getpid()}).encode() + b"\\n")
while True: signal.pause()
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_torch_that_is_asked_for_its_devices_does_not_outlive_who_asks(nodes: Cluster, signum: signal.Signals) -> None:
    (nodes.tmp_path / "torch.py").write_text(ASKED)
    nodes.env["PYTHONPATH"] = str(nodes.tmp_path)
    agent = nodes.launch(1, "--nproc-per-node=gpu", str(nodes.script))
    asked = nodes.worker()
    agent.send_signal(signum)
    assert nodes.ends(agent) == (143 if signum == signal.SIGTERM else -signum)
    assert dies(asked.pid)


# -- while it comes up

DRIVER = """
import importlib, os, signal, sys
from elastirun import early_signals
early_signals.install()
from elastirun.cli.main import main
module, name, method, when = sys.argv.pop(1).split()
owner = getattr(importlib.import_module(f"elastirun.agent.{module}"), name)
original = getattr(owner, method)
def traced(*args, **kwargs):
    for moment in ("before", "after"):
        if moment == when:
            os.kill(os.getpid(), signal.SIGTERM)
        if moment == "before":
            result = original(*args, **kwargs)
    return result
setattr(owner, method, traced)
main()
"""
POINTS = [
    ("agent Agent __init__ before", False),
    ("assemble Signals __init__ before", False),
    ("assemble Signals __init__ after", True),
    ("processes.process_tree ProcessTree __init__ before", True),
    ("processes.process_tree ProcessTree _start_guard before", True),
    ("processes.process_tree ProcessTree _start_guard after", True),
    ("agent Agent __init__ after", True),
    ("agent Agent run before", True),
    ("agent Agent _start before", True),
    ("processes.process Process __init__ before", True),
    ("processes.process Process __init__ after", True),
    ("agent Agent _start after", True),
]


@pytest.mark.daily(4)
@pytest.mark.parametrize("before", [WITHOUT, INSIDE])
@pytest.mark.parametrize(("point", "by_the_loop"), POINTS, ids=[point for point, _ in POINTS])
def test_no_signal_is_lost_while_the_agent_comes_up(nodes: Cluster, point: str, by_the_loop: bool, before: tuple[str, ...]) -> None:
    command = [*before, sys.executable, "-c", DRIVER, point, str(nodes.script)]
    done = subprocess.run(command, cwd=ROOT, env=nodes.env, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert ("SIGTERM: this node leaves" in done.stderr) is by_the_loop and "Traceback" not in done.stderr
    until(lambda: not left(nodes), "the end of all processes")


@pytest.mark.parametrize("before", [WITHOUT, INSIDE])
def test_sigterm_is_obeyed_at_any_moment(nodes: Cluster, before: tuple[str, ...]) -> None:
    """From the moment that the handler is there; until then Python itself comes up, and process 1 cannot be told anything."""
    for delay in (0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8):
        started = nodes.launch(1, str(nodes.script), before=before)
        agent = agent_of(started, before)
        until(partial(heeds, agent, signal.SIGTERM), "the handler", pause=SHORT)
        time.sleep(delay)  # a moment, not a wait for something
        os.kill(agent, signal.SIGTERM)
        assert nodes.ends(started) == 128 + signal.SIGTERM, delay
    for count in (1, 2):  # the guard, then the worker
        started = nodes.launch(1, str(nodes.script), before=before)
        agent = agent_of(started, before)
        until(lambda pid=agent, n=count: len(children(pid)) >= n, f"{count} children", pause=SHORT)  # type: ignore[misc]
        os.kill(agent, signal.SIGTERM)
        assert nodes.ends(started) == 128 + signal.SIGTERM, count
    until(lambda: not left(nodes), "the end of all processes")
    assert "Traceback" not in nodes.out(1)


def test_before_python_is_up_sigterm_does_what_it_does_to_any_program(nodes: Cluster) -> None:
    for delay in (0, 0.005, 0.01, 0.015, 0.02):
        started = nodes.launch(1, str(nodes.script))
        time.sleep(delay)
        started.terminate()
        assert nodes.ends(started) in (-signal.SIGTERM, 128 + signal.SIGTERM)
    until(lambda: not left(nodes), "the end of all processes")


# -- strangers

MANY_STRANGERS = """
import os, sys, time
def stat(pid):
    try:
        return open(f"/proc/{pid}/stat").read()
    except OSError:  # reaped since the folder was read
        return ""
for _ in range(1000):  # orphans that come to process 1
    if os.fork() == 0:
        if os.fork() == 0:
            os._exit(0)
        os._exit(0)
    os.wait()
for _ in range(1000):
    zombies = sum(") Z " in stat(p) for p in os.listdir("/proc") if p.isdigit())
    if not zombies:
        sys.exit(0)
    time.sleep(0.02)
sys.exit(f"{zombies} zombies")
"""


@contained
def test_as_process_1_of_a_container_it_reaps_strangers(nodes: Cluster) -> None:
    nodes.script.write_text(MANY_STRANGERS)
    # Not forked: 2,000 forks of a process with torch in it take a minute.
    command = [*AS_PID_1, sys.executable, "-m", "elastirun", "--no-python", sys.executable, str(nodes.script)]
    done = subprocess.run(command, cwd=ROOT, env=nodes.env, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr

"""Torch's file timers: a worker whose timer has expired is ended, and nothing else is."""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastirun import clock
from elastirun.agent.workers.file_timers import ENABLE, FILE, LONGEST_WAIT, MAX_TIMERS, FileTimers, TimerRequest, parse_request
from tests.support.cluster import Cluster
from tests.support.until import PATIENCE

CLIENT = """
import json, os, signal, sys, time

def timer(scope, after, signum=signal.SIGKILL):
    with open(os.environ["TORCHELASTIC_TIMER_FILE"], "w") as pipe:
        end = time.time() + after if after else -1
        pipe.write(json.dumps({"version": 1, "pid": os.getpid(), "scope_id": scope, "expiration_time": end, "signal": signum}) + "\\n")

first = os.environ["ELASTIRUN_ROUND"] == "1"
"""
ENDED_BY_TIMER = """
if first and os.environ["RANK"] == "1":
    timer("released", 0.1)
    timer("released", 0)
    timer("without a signal", 0.1, 0)
    timer("slow step", 0.5, int(sys.argv[1]))
if first:
    signal.pause()
"""
WITH_TORCH = """
import os, signal
import torch.distributed.elastic.timer as timer
timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
with timer.expires(after=600, scope="fast"):
    pass
if os.environ["ELASTIRUN_ROUND"] == "1":
    with timer.expires(after=0.5, scope="slow"):
        signal.pause()
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_whose_timer_expires_is_ended_and_starts_again(nodes: Cluster, signum: signal.Signals) -> None:
    nodes.env[ENABLE] = "1"
    nodes.script.write_text(CLIENT + ENDED_BY_TIMER)
    assert nodes.ends(nodes.launch(1, "--nproc-per-node=2", "--max-restarts=1", str(nodes.script), str(int(signum)))) == 0
    said = nodes.out(1)
    assert f"its timer slow step has expired; it gets {signum.name}" in said and "released" not in said and "without" not in said
    assert f"rank 1 on {os.uname().nodename} failed ({signum.name}, its timer expired)" in said
    assert not list(nodes.tmp_path.glob("elastirun-agent-*")), "nothing is left"


@pytest.mark.parametrize("preload", ["off", "torch.distributed"])
def test_torch_s_own_client_ends_a_worker(nodes: Cluster, preload: str) -> None:
    nodes.env |= {ENABLE: "1", FILE: str(nodes.tmp_path / "pipe")}
    nodes.script.write_text(WITH_TORCH)
    assert nodes.ends(nodes.launch(1, f"--preload={preload}", "--max-restarts=1", str(nodes.script))) == 0
    assert "its timer slow has expired" in nodes.out(1) and not (nodes.tmp_path / "pipe").exists()


def test_without_being_asked_for_there_is_no_pipe(nodes: Cluster) -> None:
    nodes.script.write_text(f"import os, sys\nsys.exit({FILE!r} in os.environ)")
    assert nodes.ends(nodes.launch(1, str(nodes.script))) == 0


def test_a_pipe_that_cannot_be_made_is_one_line(nodes: Cluster) -> None:
    nodes.env |= {ENABLE: "1", FILE: str(nodes.script)}
    assert nodes.ends(nodes.launch(1, str(nodes.script))) == 202
    (line,) = nodes.out(1).splitlines()
    assert line.startswith(f"elastirun: {ENABLE}: cannot make the pipe {nodes.script}: File exists; set {FILE} to a new path")
    assert nodes.script.read_text(), "no file of the user is removed"


@pytest.fixture
def timers(tmp_path: Path) -> Iterator[FileTimers]:
    """Return timers of a node without workers, which owns no process."""
    os.mkfifo(tmp_path / "pipe")  # an agent that was killed has left it
    with selectors.DefaultSelector() as selector:
        made = FileTimers({ENABLE: "1", FILE: str(tmp_path / "pipe")}, "", selector, lambda pid: False, lambda rank, why: None, print)
        workers: Any = SimpleNamespace(processes={})
        made.workers = workers
        yield made
        made.close()
        assert not (tmp_path / "pipe").exists()


def write(timers: FileTimers, *requests: dict[str, object] | bytes) -> None:
    lines = [request if isinstance(request, bytes) else json.dumps(request).encode() for request in requests]
    with open(timers.environ[FILE], "wb", buffering=0) as pipe:
        for line in lines:
            pipe.write(line + b"\n")
            timers._read()


def request(pid: int, scope: str = "s", after: float = -10.0, signum: int = 9) -> dict[str, object]:
    return {"version": 1, "pid": pid, "scope_id": scope, "expiration_time": time.time() + after, "signal": signum}


def test_only_processes_of_this_agent_are_ended(timers: FileTimers, capsys: pytest.CaptureFixture[str]) -> None:
    process = subprocess.Popen(["sleep", "600"])
    write(timers, request(process.pid))
    assert timers.tick(clock.now()) == math.inf and capsys.readouterr().out == ""
    timers._owns = lambda pid: pid == process.pid
    write(timers, request(process.pid))
    timers.tick(clock.now())
    assert process.wait(PATIENCE) == -signal.SIGKILL


def test_the_end_of_a_timer_counts_that_is_still_in_the_pipe(timers: FileTimers) -> None:
    """The agent may have stood still for longer than the timer."""
    timers._owns = lambda pid: pytest.fail("the timer has ended")
    write(timers, request(12345, after=0.0))
    with open(timers.environ[FILE], "w") as pipe:
        pipe.write(json.dumps({**request(12345), "expiration_time": -1}) + "\n")
    assert timers.tick(clock.now() + 1) == math.inf


def test_what_else_comes_through_the_pipe_is_ignored(timers: FileTimers) -> None:
    write(timers, b"", b"\xff\x00", b"[" * 4000, b"{}", b"x" * 60_000, request(12345, scope="y" * 4096, after=60))
    assert timers.tick(clock.now()) == math.inf
    write(timers, *(request(12345, scope=str(i), after=60) for i in range(MAX_TIMERS + 10)))
    assert len(timers._timers) == MAX_TIMERS and timers.tick(clock.now()) < math.inf
    timers.worker_ended(SimpleNamespace(pid=12345))
    write(timers, request(54321, after=1e300))
    assert timers.tick(0.0) == LONGEST_WAIT, "epoll refuses to wait for so long"
    timers.worker_ended(SimpleNamespace(pid=54321))
    assert timers.tick(clock.now()) == math.inf


GOOD = {"version": 1, "pid": 7, "scope_id": "s", "expiration_time": 1.5, "signal": 9}


@pytest.mark.parametrize(
    "changed",
    [{"pid": 1}, {"pid": -7}, {"pid": True}, {"pid": "7"}, {"signal": 65}, {"signal": None}, {"scope_id": 1}]
    + [{"expiration_time": value} for value in ("soon", math.nan, math.inf, 10**400, None)],
)
def test_a_request_of_another_form_is_none(changed: dict[str, object]) -> None:
    assert parse_request(json.dumps(GOOD).encode()) == TimerRequest(7, "s", 1.5, 9)
    assert parse_request(json.dumps(GOOD | changed).encode()) is None

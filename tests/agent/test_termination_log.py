"""The termination message of Kubernetes: what it says, how long it is, and what happens when it cannot be written."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from elastirun import clock
from elastirun.agent import termination_log
from elastirun.agent.ending import Ending
from elastirun.agent.failures.exit_codes import ExitCode
from elastirun.agent.termination_log import DEFAULT, IN_POD, MAX_BYTES, VARIABLE, descends_from_first, encode, message, path, write
from elastirun.rendezvous.wire.actions import Finish, Outcome
from elastirun.rendezvous.wire.records import Blame, Closed, ExitRecord, Verdict
from tests.support.until import PATIENCE

TRACEBACK = ("Traceback (most recent call last):", '  File "train.py", line 3, in <module>', "ValueError: no data", "in two lines")
FIELDS = message("left", 143, "SIGTERM", 3, "node0")


def failed(code: int = 1, lines: tuple[str, ...] = TRACEBACK) -> ExitRecord:
    return ExitRecord("node1", 5, 1, 77, code, Blame.OWN_FAULT, 2.0, lines)


def ending(outcome: Outcome, signum: int = 0, sick: bool = False, took_part: bool = True, failures: tuple[ExitRecord, ...] = ()) -> Ending:
    closed = Closed(Verdict.FAILED, "no restart is left", "n1", failures) if outcome is Outcome.FAILED else None
    return Ending(Finish(outcome, "why", closed), None, None, signum, sick, True, took_part, "node0")


@pytest.mark.parametrize(
    ("end", "code", "verdict"),
    [
        (ending(Outcome.SUCCEEDED), 0, "succeeded"),
        (ending(Outcome.FAILED, failures=(failed(),)), 1, "failed"),
        (ending(Outcome.LEFT, signum=15), 143, "left"),
        (ending(Outcome.LEFT), 202, "sick"),
        (ending(Outcome.LEFT, sick=True), 202, "sick"),
        (ending(Outcome.FAILED, sick=True), 202, "sick"),
        (ending(Outcome.TIMEOUT), 200, "timeout"),
        (ending(Outcome.TIMEOUT, took_part=False), 201, "timeout"),
        (ending(Outcome.STORE_LOST), 201, "store_lost"),
        (ending(Outcome.DISAGREES), 3, "disagrees"),
        (ending(Outcome.EXCLUDED), 204, "excluded"),
    ],
)
def test_each_end_has_its_verdict(end: Ending, code: int, verdict: str) -> None:
    assert (found := end.exit_code(from_worker=False)) == code
    assert end.verdict(found) == verdict


def test_a_workers_own_code_is_no_verdict_on_this_node() -> None:
    end = ending(Outcome.FAILED, failures=(failed(202),))
    assert (end.exit_code(from_worker=True), end.verdict(202)) == (ExitCode.SICK, "failed")


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (TRACEBACK, "ValueError: no data"),
        (("CUDA error: out of memory", "  "), "CUDA error: out of memory"),
        ((), ""),
    ],
)
def test_a_failure_names_its_root_cause(lines: tuple[str, ...], error: str) -> None:
    victim = ExitRecord("node0", 0, 0, 7, 1, Blame.VICTIM, 1.0, ("connection reset",))
    found = message("failed", 1, "no restart is left", 2, "node0", (victim, failed(-11, lines)))
    expected = {"verdict": "failed", "exit_code": 1, "reason": "no restart is left", "round": 2, "node": "node0"}
    expected |= {"host": "node1", "rank": 5, "local_rank": 1, "code": -11, "signal": "SIGSEGV", "error": error}
    assert found == expected


@pytest.mark.parametrize("text", ["x", "é", "語", "🎉", "\0", "\x1b", '"', "\\", "\ud800", "a\n"])
@pytest.mark.parametrize("lengths", [(5, 5), (30_000, 5), (5, 30_000), (5_000, 5_000)])
def test_it_is_one_line_of_json_that_fits_and_begins_with_what_matters(text: str, lengths: tuple[int, int]) -> None:
    record = failed(lines=("Traceback (most recent call last):", f"ValueError: {text * lengths[1]}"))
    fields = message("failed", 1, text * lengths[0], 1, "node0", (record,))
    line = encode(fields)
    assert len(line) <= MAX_BYTES and line.count(b"\n") == 1
    found = json.loads(line.decode())  # valid UTF-8
    assert found.keys() == fields.keys()
    assert all(found[name] == value for name, value in fields.items() if isinstance(value, int))
    if max(lengths) == 30_000:
        assert len(line) > MAX_BYTES - 200, "no more is cut than must be"
    if max(lengths) == 5 and text != "\ud800":
        assert found == fields


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, None),
        ({IN_POD: "10.0.0.1"}, DEFAULT),
        ({IN_POD: "10.0.0.1", VARIABLE: ""}, None),
        ({VARIABLE: "/tmp/x"}, "/tmp/x"),
        ({IN_POD: "10.0.0.1", "ELASTIRUN_AGENT": "a:1"}, None),
        ({VARIABLE: "/tmp/x", "ELASTIRUN_AGENT": "a:1"}, None),
    ],
)
def test_it_is_written_in_a_pod_or_where_told_and_not_below_another_agent(
    environ: dict[str, str], found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(termination_log, "STARTED_BY_CONTAINER", True)
    assert path(environ) == found


def test_an_agent_that_kubectl_exec_has_started_writes_only_where_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(termination_log, "STARTED_BY_CONTAINER", False)
    assert path({IN_POD: "10.0.0.1"}) is None
    assert path({IN_POD: "10.0.0.1", VARIABLE: "/tmp/x"}) == "/tmp/x"


@pytest.mark.parametrize(
    ("parents", "descends"),
    [({}, True), ({9: 1}, True), ({9: 5, 5: 1}, True), ({9: 0}, False), ({9: 5, 5: 0}, False), ({9: 5, 5: -1}, True)],
    ids=["first", "child", "grandchild", "exec", "shell of exec", "hidden"],
)
def test_who_descends_from_the_first_process_of_the_container(parents: dict[int, int], descends: bool) -> None:
    def parent(pid: int) -> int:
        if parents[pid] < 0:
            raise FileNotFoundError
        return parents[pid]

    assert descends_from_first(max(parents, default=1), parent) == descends


def test_the_parent_of_this_process() -> None:
    assert termination_log.parent(os.getpid()) == os.getppid()


def test_a_signal_while_devices_are_counted_is_told(tmp_path: Path) -> None:
    (tmp_path / "t.py").touch()
    code = "import time; from elastirun import early_signals; early_signals.install(); from elastirun.cli import main\n"
    code += "main.count_devices = lambda kind: print('asked', flush=True) or time.sleep(600)\n"
    code += "main.main(['--nproc-per-node=auto', 't.py'])"
    environ = {**os.environ, VARIABLE: str(tmp_path / "log")}
    with subprocess.Popen([sys.executable, "-c", code], env=environ, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as agent:
        try:
            assert agent.stdout is not None and agent.stdout.readline() == "asked\n"
            agent.terminate()
            assert agent.wait(PATIENCE) == 143
        finally:
            agent.kill()  # else a failure above would wait for it without end
    found = json.loads((tmp_path / "log").read_text())
    assert (found["verdict"], found["exit_code"], found["reason"]) == ("left", 143, "SIGTERM before anything was started")


def test_the_last_message_stands_alone_in_the_file(tmp_path: Path) -> None:
    environ = {VARIABLE: str(tmp_path / "log")}
    assert write({"reason": "x" * 100}, environ) == write(FIELDS, environ) == ""
    assert json.loads((tmp_path / "log").read_text()) == FIELDS


def test_the_file_of_kubernetes_is_filled_and_never_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(termination_log, "STARTED_BY_CONTAINER", True)
    file = tmp_path / "log"
    monkeypatch.setattr(termination_log, "DEFAULT", str(file))
    assert write(FIELDS, {IN_POD: "1"}) == ""
    assert not file.exists()
    file.touch()
    assert write(FIELDS, {IN_POD: "1"}) == ""
    assert json.loads(file.read_text())["verdict"] == "left"


@pytest.mark.parametrize(
    ("to", "why"), [("/dev/full", "No space left"), ("/nowhere/log", "No such file"), ("/proc/self", "Is a directory"), ("a\0b", "null")]
)
def test_what_cannot_be_written_is_one_line(to: str, why: str) -> None:
    line = write(FIELDS, {VARIABLE: to})
    assert line.startswith(f"cannot write the termination message to {to}: ") and why in line


def test_a_file_that_takes_half_of_it_gets_nothing(tmp_path: Path) -> None:
    """As on a disk that has room for some bytes only."""
    code = "import resource, sys; from elastirun.agent import termination_log; resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20)); "
    code += "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); print(termination_log.write({'reason': 'x' * 100}))"
    file = tmp_path / "log"
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, VARIABLE: str(file)}, capture_output=True, text=True, timeout=PATIENCE
    )
    assert "No space left" in run.stdout, run.stderr
    assert file.read_bytes() == b""


def test_a_pipe_that_nobody_reads_does_not_hold_the_end_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "No such device" in write(FIELDS, {VARIABLE: str(tmp_path / "pipe")})


def test_a_file_that_hangs_delays_the_end_by_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full pipe stands for a file system that does not answer; only a blocking write hangs there."""
    monkeypatch.setattr(termination_log, "LIMIT", 0.1)
    reading, writing = os.pipe()
    try:
        os.set_blocking(writing, False)
        while True:
            try:
                os.write(writing, b"x" * 4096)
            except BlockingIOError:
                break
        os.set_blocking(writing, True)
        monkeypatch.setattr(os, "O_NONBLOCK", 0)
        began = clock.now()
        assert "longer than 0.1 s" in write(FIELDS, {VARIABLE: f"/proc/self/fd/{writing}"})
        assert clock.now() - began < 3
    finally:
        os.close(reading)  # ends the thread's write with EPIPE
        os.close(writing)


def test_only_the_owner_writes_the_file(tmp_path: Path) -> None:
    write(FIELDS, {VARIABLE: str(tmp_path / "log")})
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) & 0o022 == 0

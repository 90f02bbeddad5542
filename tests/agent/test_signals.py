"""Signals to the agent: which of them count as one request; no signal is lost."""

from __future__ import annotations

import os
import select
import selectors
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastirun.agent.processes import signals
from elastirun.agent.processes.signals import Signals
from tests.support.children import guard_of
from tests.support.cluster import PATIENCE, Cluster, dies
from tests.system.test_pid1 import SLOW_IMPORT
from tests.system.test_stopping import SCRIPT


class Heard:
    """Handle the signals of this process as the agent's loop does, with a clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(signals.clock, "now", lambda: self.now)
        self.selector = selectors.PollSelector()
        self.counted: list[tuple[int, int]] = []
        self.forwarded: list[int] = []
        self.signals = Signals(
            ("SIGTERM", "SIGHUP"), ("SIGUSR1",), self.selector, lambda *seen: self.counted.append(seen), self.forwarded.append, lambda: None
        )

    def send(self, at: float, *signums: int) -> list[tuple[int, int]]:
        """Return what is counted when these signals arrive at ``at``."""
        self.now, self.counted = at, []
        for signum in signums:
            os.kill(os.getpid(), signum)
        for key, mask in self.selector.select(0):
            key.data(mask)
        return self.counted


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Heard]:
    made = Heard(monkeypatch)
    yield made
    made.signals.close()
    made.selector.close()


TERM, HUP, USR1, CONT = signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCONT


def test_signals_within_a_second_are_one_request(heard: Heard) -> None:
    assert heard.send(100, TERM, CONT, TERM) == [(TERM, 1)], "GNU timeout"
    assert heard.send(100.9, HUP) == [], "systemd with SendSIGHUP"
    assert heard.send(101, TERM) == [(TERM, 2)], "a second after the one that counted, however many came between"
    assert heard.send(101.5, TERM) == []
    assert heard.send(102.1, HUP) == [(HUP, 3)]


def test_a_signal_is_forwarded_once_when_child_and_group_are_sent_it(heard: Heard) -> None:
    heard.send(100, USR1, USR1)
    heard.send(100.05, USR1)
    heard.send(100.2, USR1)
    assert heard.forwarded == [USR1, USR1] and heard.counted == []


def test_a_signal_ends_a_poll_although_no_python_code_has_run(heard: Heard) -> None:
    """While a thread holds the interpreter lock, Python's handler cannot run, but the descriptor becomes readable."""
    (key,) = heard.selector.get_map().values()
    code = f"import os, signal\nos.kill({os.getpid()}, signal.SIGTERM)"
    libc_wait = subprocess.Popen([sys.executable, "-c", code])
    assert select.select([key.fd], [], [], PATIENCE)[0]
    assert libc_wait.wait() == 0
    assert signal.set_wakeup_fd(heard.signals._write, warn_on_full_buffer=False) == heard.signals._write


@pytest.mark.skipif(not shutil.which("timeout"), reason="needs GNU timeout")
def test_gnu_timeout_does_not_shorten_the_grace(nodes: Cluster) -> None:
    nodes.script.write_text(SCRIPT)
    agent = nodes.launch(1, "--grace=60", str(nodes.script), before=("timeout", "1000"))
    (worker,) = nodes.round(1)
    agent.send_signal(signal.SIGTERM)  # timeout passes it on to its child and then to its group
    assert worker.connection.recv(4) == b"TERM"
    assert not dies(worker.pid, 6.0), "5 s are what a second signal leaves"
    assert "its workers have 5 s" not in nodes.out(1)
    worker.tell("0")
    nodes.ends(agent)


BLOCK = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
os.execv(sys.executable, sys.argv[1:])
"""
BLOCKED = (sys.executable, "-c", BLOCK)


def blocks(pid: int, signum: int) -> bool:
    mask = Path(f"/proc/{pid}/status").read_text().partition("SigBlk:")[2].split()[0]
    return bool(int(mask, 16) >> (signum - 1) & 1)


def test_a_signal_that_was_blocked_at_the_start_is_obeyed(nodes: Cluster) -> None:
    nodes.script.write_text(SCRIPT)
    agent = nodes.launch(1, "--forward-signals=SIGUSR1", str(nodes.script), before=BLOCKED)
    (worker,) = nodes.round(1)
    assert not blocks(worker.pid, signal.SIGTERM) and not blocks(agent.pid, signal.SIGUSR1)
    agent.send_signal(signal.SIGTERM)
    assert worker.connection.recv(4) == b"TERM"
    worker.tell("0")
    assert nodes.ends(agent) == 143


def test_a_signal_that_was_blocked_at_the_start_is_obeyed_during_the_first_import(nodes: Cluster) -> None:
    (nodes.tmp_path / "click.py").write_text(SLOW_IMPORT.format("SIGTERM"))
    nodes.env["PYTHONPATH"] = str(nodes.tmp_path)
    assert nodes.ends(nodes.launch(1, str(nodes.script), before=BLOCKED)) == 143


def test_no_signal_to_all_processes_of_a_step_ends_the_guard(nodes: Cluster) -> None:
    nodes.script.write_text(SCRIPT)
    agent = nodes.launch(1, "--grace=0.2", str(nodes.script))
    (worker,) = nodes.round(1)
    guard = guard_of(agent)
    for name in ("USR1", "USR2", "ALRM", "PROF", "IO", "PWR", "XCPU", "TERM", "INT", "HUP", "QUIT", "TSTP", "TTIN", "TTOU"):
        os.kill(guard, signal.Signals[f"SIG{name}"])
    assert not dies(guard, 0.3)
    worker.tell("0")
    assert nodes.ends(agent) == 0 and "the guard was killed" not in nodes.out(1)

"""A worker that was spawned belongs to whoever called: nobody else reaps it, and none is left of a failed start."""

from __future__ import annotations

import errno
import gc
import os
import select
import signal
import subprocess
import time
from dataclasses import replace

import pytest

from elastirun import linux
from elastirun.agent.processes.spawn import Spawned, WorkerSpec, spawn

SPEC = WorkerSpec(0, 0, ("true",), dict(os.environ))


def test_nobody_but_the_caller_reaps_it() -> None:
    started = spawn(SPEC)
    poller = select.poll()
    poller.register(started.pidfd, select.POLLIN)
    assert poller.poll(60_000)
    gc.collect()
    subprocess.run(["true"], check=True)  # here Popen reaps those whose objects are gone
    ended = os.waitid(linux.P_PIDFD, started.pidfd, os.WEXITED)
    os.close(started.pidfd)
    assert ended is not None and (ended.si_pid, ended.si_status) == (started.pid, 0)


def test_a_worker_that_has_to_wait_begins_later_and_is_ended_meanwhile_like_any_other() -> None:
    read, write = os.pipe()
    began = time.monotonic()
    started = spawn(replace(SPEC, argv=("echo", "begun"), pause=0.3), write)
    os.close(write)
    with open(read) as said:
        assert said.read() == "begun\n" and time.monotonic() - began >= 0.3
    assert end(started).si_status == 0
    started = spawn(replace(SPEC, pause=1000.0))
    linux.pidfd_send_signal(started.pidfd, signal.SIGTERM)
    assert end(started).si_status == signal.SIGTERM


def end(started: Spawned) -> os.waitid_result:
    found = os.waitid(linux.P_PIDFD, started.pidfd, os.WEXITED)
    os.close(started.pidfd)
    assert found is not None
    return found


def test_none_is_left_when_it_cannot_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []

    def refuse(pid: int) -> int:
        pids.append(pid)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        spawn(SPEC)
    with pytest.raises(ChildProcessError):
        os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOHANG)

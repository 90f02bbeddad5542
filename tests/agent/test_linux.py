"""System calls that this Python may lack. Each test runs with Python's own functions, and in a Python without them."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastirun import linux
from tests.support.until import PATIENCE

OLD_PYTHON = Path(__file__).parents[1] / "support" / "old_python"
SCRIPT = """
import os, signal, subprocess, sys
assert not hasattr(os, "pidfd_open") and not hasattr(os, "memfd_create") and not hasattr(signal, "pidfd_send_signal")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ["RANK"] == "0":
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        signal.pause()
    subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
os.write(1, f"rank {os.environ['RANK']} done\\n".encode())  # whole: print writes a line in two parts, and the file is shared
"""


@pytest.fixture(params=["Python's own", "none"])
def child(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    if request.param == "none":
        for module, name in [(os, "pidfd_open"), (os, "memfd_create"), (signal, "pidfd_send_signal")]:
            monkeypatch.delattr(module, name)
    with subprocess.Popen(["sleep", "600"]) as started:
        yield started
        started.kill()


def test_a_process_is_watched_and_signalled(child: subprocess.Popen[bytes]) -> None:
    fd = linux.pidfd_open(child.pid)
    try:
        assert not os.get_inheritable(fd)
        assert select.select([fd], [], [], 0) == ([], [], [])
        linux.pidfd_send_signal(fd, 0)
        linux.pidfd_send_signal(fd, signal.SIGTERM)
        assert select.select([fd], [], [], 60)[0] == [fd]
        ended = os.waitid(linux.P_PIDFD, fd, os.WEXITED | os.WNOWAIT)
        assert ended is not None and (ended.si_pid, ended.si_status) == (child.pid, signal.SIGTERM)
        assert child.wait() == -signal.SIGTERM
        with pytest.raises(ProcessLookupError):
            linux.pidfd_send_signal(fd, signal.SIGTERM)
    finally:
        os.close(fd)
    with pytest.raises(ProcessLookupError):
        linux.pidfd_open(child.pid)


@pytest.mark.usefixtures("child")
def test_memory_is_a_file_that_can_be_sealed() -> None:
    fd = linux.memfd_create("some-name", linux.MFD_CLOEXEC | linux.MFD_ALLOW_SEALING)
    try:
        assert "some-name" in os.readlink(f"/proc/self/fd/{fd}") and not os.get_inheritable(fd)
        os.ftruncate(fd, 4096)
        fcntl.fcntl(fd, linux.F_ADD_SEALS, linux.F_SEAL_SHRINK | linux.F_SEAL_GROW | linux.F_SEAL_SEAL)
        assert fcntl.fcntl(fd, linux.F_GET_SEALS) == linux.F_SEAL_SHRINK | linux.F_SEAL_GROW | linux.F_SEAL_SEAL
        for size in (0, 8192):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
    finally:
        os.close(fd)
    fd = linux.memfd_create("default")
    assert not os.get_inheritable(fd)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, linux.F_ADD_SEALS, linux.F_SEAL_GROW)
    os.close(fd)
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        linux.memfd_create("x" * 4096)


def test_the_constants_are_those_of_this_python() -> None:
    for module in (os, fcntl):
        for name in [name for name in vars(linux) if name.startswith(("P_", "MFD_", "F_"))]:
            assert getattr(module, name, getattr(linux, name)) == getattr(linux, name)


def test_a_job_runs_and_recovers_in_a_python_that_was_built_for_an_old_c_library(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "elastirun", "--standalone", "--nproc-per-node=2", "--max-restarts=1", "--grace=1"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(OLD_PYTHON), *filter(None, [os.environ.get("PYTHONPATH")])])}
    ended = subprocess.run([*command, str(tmp_path / "script.py")], env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["rank 0 done", "rank 1 done"]
    assert "Traceback" not in ended.stderr, ended.stderr

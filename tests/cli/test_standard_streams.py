"""Standard streams that are closed, full or without a reader: the exit status is the same, and no output goes to another file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.until import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
ELASTIRUN = f"{sys.executable} -m elastirun"
# Prints the file behind each of the descriptors 0 to 2 of a worker.
SHOWS = "import os, sys; open(sys.argv[1], 'w').write(' '.join(os.readlink(f'/proc/self/fd/{fd}') for fd in range(3)))"


def shell(command: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    return subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.daily(5)
@pytest.mark.parametrize(
    "closed", ["<&-", ">&-", "2>&-", "<&- >&-", "<&- 2>&-", ">&- 2>&-", "<&- >&- 2>&-", ">/dev/full", "2>/dev/full", ">/dev/full 2>&1"]
)
def test_a_job_succeeds_whatever_its_streams_are(tmp_path: Path, closed: str) -> None:
    """With the options --nnodes=1:4 --standalone the agent also writes a warning."""
    (tmp_path / "shows.py").write_text(SHOWS)
    done = shell(f"{ELASTIRUN} --nnodes=1:4 --standalone shows.py {tmp_path}/fds {closed}", tmp_path)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    streams = (tmp_path / "fds").read_text().split()
    for fd, redirection in enumerate(("<&-", ">&-")):
        assert (streams[fd] == "/dev/null") >= (redirection in closed.split()), "not one of the agent's own sockets or pipes"


@pytest.mark.daily(3)
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("--nonsense >&-", 2),
        ("--nonsense 2>&-", 2),
        ("--nonsense >&- 2>&-", 2),
        ("--nonsense 2>/dev/full", 2),
        ("--nonsense 2>&1 >/dev/null | true; exit ${PIPESTATUS[0]}", 2),
        ("--no-python no-such-program 2>/dev/full", 3),
        ("--version >&-", 0),
        ("--help 2>&-", 0),
        ("--no-python false 2>/dev/full", 1),
    ],
)
def test_every_exit_status_is_kept(tmp_path: Path, command: str, code: int) -> None:
    done = shell(f"{ELASTIRUN} {command}", tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr


def test_a_dry_run_with_arguments_that_are_no_utf8(tmp_path: Path) -> None:
    done = shell(f"PYTHONIOENCODING=utf-8:strict {ELASTIRUN} --dry-run --no-python true $'a\\xffb'", tmp_path)
    assert done.returncode == 0 and r"a\udcffb" in done.stdout, done

"""Causes that lie outside of the worker: nobody reads its output, or the disk of its logs is full."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from elastirun.agent.failures.classify import lost_its_stdout
from elastirun.agent.failures.tracker import full_disk
from tests.support.cluster import PATIENCE

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("program", ["python", "yes"])
def test_a_worker_whose_output_nobody_reads_any_more_is_no_victim(tmp_path: Path, program: str) -> None:
    script = tmp_path / "chatty.py"
    script.write_text("while True: print('step')")
    command = [sys.executable, "-m", "elastirun", *(("--no-python", "yes") if program == "yes" else (str(script),))]
    agent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert agent.stdout is not None and agent.stderr is not None
    agent.stdout.readline()
    agent.stdout.close()  # as head does
    said = agent.stderr.read()
    agent.stderr.close()
    assert agent.wait(PATIENCE) == 1
    assert "its stdout was closed: the program that read this launcher's output has ended" in said
    assert "lost its peers" not in said


@pytest.mark.parametrize(
    ("code", "lines", "expected"),
    [
        (-13, (), True),
        (1, ("Traceback (most recent call last):", "BrokenPipeError: [Errno 32] Broken pipe"), True),
        (120, ("Exception ignored in: <_io.TextIOWrapper name='<stdout>' mode='w'>", "BrokenPipeError: [Errno 32] Broken pipe"), True),
        (1, ("Traceback (most recent call last):", "ValueError: x"), False),
        (0, (), False),
    ],
)
def test_which_ends_may_come_of_a_closed_stdout(code: int, lines: tuple[str, ...], expected: bool) -> None:
    assert lost_its_stdout(code, lines) is expected


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare to mount a small disk")
def test_the_report_says_that_the_disk_of_the_logs_is_full(tmp_path: Path) -> None:
    """The worker's traceback would be on that disk."""
    script, small = tmp_path / "fills.py", tmp_path / "small"
    small.mkdir()
    script.write_text("import os\nwhile True: os.write(1, b'x' * 65536)")
    inside = f"mount -t tmpfs -o size=1m none {small} && exec {sys.executable} -m elastirun --log-dir={small} -r 3 {script}"
    done = subprocess.run(["unshare", "-m", "sh", "-c", inside], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert f"the file system of its logs has no space left ({small}" in done.stderr


def test_a_disk_with_room_and_a_folder_that_is_gone_are_not_full(tmp_path: Path) -> None:
    assert full_disk(str(tmp_path)) == full_disk(str(tmp_path / "gone")) == ""
    assert full_disk("/proc") == "", "a file system without blocks"

"""The limit of open descriptors: connections to a store that the agent serves must not be bounded by the usual 1024."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from tests.support.until import PATIENCE

SOFT, HARD = 200, 900

SCRIPT = """
import os, pathlib, resource
limits = pathlib.Path(f"/proc/{os.getppid()}/limits").read_text()
agent = next(line.split()[3:5] for line in limits.splitlines() if line.startswith("Max open files"))
print(*resource.getrlimit(resource.RLIMIT_NOFILE), *agent)
"""


def test_a_limit_that_is_too_low_is_named(tmp_path: Path) -> None:
    limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))  # noqa: E731
    command = [sys.executable, "-m", "elastirun", "--standalone", "--no-python", "/bin/true"]
    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr.count("\n")) == (202, 1) and "limit of open descriptors is 24" in done.stderr, done.stderr


def test_the_agent_raises_its_own_limit_and_not_that_of_its_workers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "elastirun", "--standalone", str(script)]
    limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, HARD))  # noqa: E731
    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout.split()) == (0, list(map(str, (SOFT, HARD, HARD, HARD)))), done.stderr

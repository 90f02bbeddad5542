"""Out-of-memory kills are distinguished from other kills from outside."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastirun.agent.failures import oom
from tests.support.cluster import Cluster
from tests.support.until import PATIENCE

V1 = "5:memory:/job\n0::/\n", "30 20 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
V2 = "0::/pod/job\n", "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
TOP1, TOP2 = "/sys/fs/cgroup/memory", "/sys/fs/cgroup"


def files(cgroup: tuple[str, str], more: dict[str, str]) -> oom.Read:
    known = {"/proc/self/cgroup": cgroup[0], "/proc/self/mountinfo": cgroup[1], **more}

    def read(path: str) -> str:
        if path not in known:
            raise FileNotFoundError(path)
        return known[path]

    return read


def test_the_count_is_that_of_our_own_group_or_of_the_machine() -> None:
    assert oom.oom_kills(files(V2, {f"{TOP2}/pod/job/memory.events": "low 0\noom 4\noom_kill 3\n", "/proc/vmstat": "oom_kill 9\n"})) == 3
    assert oom.oom_kills(files(V1, {f"{TOP1}/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"})) == 2
    assert oom.oom_kills(files(V2, {"/proc/vmstat": "nr_free 7\noom_kill 9\n"})) == 9
    assert oom.oom_kills(files(("", ""), {})) is None


def test_only_a_count_that_rose_explains_anything() -> None:
    events = {f"{TOP2}/pod/job/memory.events": "oom_kill 3\n"}
    assert oom.explain(3, files(V2, events)) == ""
    assert oom.explain(2, files(V2, events)) == "OOM-killed"
    assert oom.explain(None, files(V2, events)) is None is oom.explain(2, files(V2, {})), "nobody knows"


PEAK, FOUR = "4187593113\n", "4294967296\n"


@pytest.mark.parametrize(
    ("cgroup", "found", "words"),
    [
        # the limit belongs to a group above ours
        (V2, {f"{TOP2}/pod/job/memory.max": "max\n", f"{TOP2}/pod/memory.max": FOUR, f"{TOP2}/pod/memory.peak": PEAK}, ", 3.9 of 4.0 GiB"),
        (V2, {f"{TOP2}/pod/job/memory.max": FOUR}, ""),  # a kernel that does not record the peak
        (V2, {f"{TOP2}/pod/job/memory.max": FOUR, f"{TOP2}/pod/job/memory.peak": "1073741824\n"}, ""),  # the machine ran out of memory
        (V2, {f"{TOP2}/pod/job/memory.max": "0\n", f"{TOP2}/pod/job/memory.peak": "x\n"}, ""),
        (V1, {f"{TOP1}/job/memory.limit_in_bytes": FOUR, f"{TOP1}/job/memory.max_usage_in_bytes": PEAK}, ", 3.9 of 4.0 GiB"),
        (V1, {f"{TOP1}/job/memory.limit_in_bytes": "9223372036854771712\n", f"{TOP1}/job/memory.max_usage_in_bytes": PEAK}, ""),
    ],
)
def test_how_much_of_which_limit(cgroup: tuple[str, str], found: dict[str, str], words: str) -> None:
    counts = {f"{TOP2}/pod/job/memory.events": "oom_kill 3\n", f"{TOP1}/job/memory.oom_control": "oom_kill 3\n"}
    assert oom.explain(2, files(cgroup, counts | found)) == f"OOM-killed{words}"


LIMIT = 2 << 30  # room for the agent, so that the worker is the largest: torch's build for CUDA maps 0.6 GiB
GREEDY = """
import os, sys
if os.environ["RANK"] == "1":
    hog = []
    while True:
        hog.append(bytearray(b"x" * (1 << 20)))
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """Make a memory control group and return its folder."""
    parents = oom.own_groups("memory", oom.read_file)
    folder = Path(parents[0] if parents else "/nowhere") / f"elastirun-test-{secrets.token_hex(4)}"
    v2 = (folder.parent / "cgroup.subtree_control").exists()
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"needs a memory control group to make one in: {error}")
    try:
        (folder / ("memory.max" if v2 else "memory.limit_in_bytes")).write_text(str(LIMIT))
    except OSError as error:
        folder.rmdir()
        pytest.skip(f"needs a memory controller: {error}")
    yield folder
    folder.rmdir()


def test_the_report_names_the_kernels_kill(group: Path, tmp_path: Path) -> None:
    script = tmp_path / "greedy.py"
    script.write_text(GREEDY)
    command = f"echo $$ > {group}/cgroup.procs && exec {sys.executable} -m elastirun --nproc-per-node=2 {script}"
    done = subprocess.run(["sh", "-c", command], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1, done.stderr
    assert "  how       : killed by SIGKILL (signal 9), OOM-killed, 2.0 of 2.0 GiB\n" in done.stderr
    assert "failed (SIGKILL, OOM-killed, 2.0 of 2.0 GiB)" in done.stderr.splitlines()[-2], "the verdict says so too"


def test_a_plain_kill_is_not_called_that(nodes: Cluster) -> None:
    agent = nodes.launch(1, str(nodes.script))
    os.kill(nodes.worker().pid, signal.SIGKILL)
    assert nodes.ends(agent) == 1
    assert "  how       : killed by SIGKILL (signal 9), sent from outside (not by this agent" in nodes.out(1)
    assert "OOM-killed" not in nodes.out(1)

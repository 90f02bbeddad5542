"""The CPUs that this process can use: affinity and quotas of control groups, with made-up /proc and /sys trees."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastirun.agent.host.cpus import cgroup_folders, cpu_quota, usable_cpus

V2_MOUNT = "30 20 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1_MOUNT = """\
33 30 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
34 30 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
"""


def quota(files: dict[str, str]) -> float | None:
    def read(path: str) -> str:
        if path not in files:
            raise FileNotFoundError(path)
        return files[path]

    return cpu_quota(read)


def v2(path: str, limits: dict[str, str]) -> dict[str, str]:
    files = {"/proc/self/cgroup": f"0::{path}\n", "/proc/self/mountinfo": V2_MOUNT}
    return files | {f"/sys/fs/cgroup{where}/cpu.max": text for where, text in limits.items()}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (v2("/", {}), None),
        (v2("/", {"": "250000 100000\n"}), 2.5),
        (v2("/", {"": "max 100000\n"}), None),
        (v2("/a/b", {"/a/b": "400000 100000\n"}), 4.0),
        (v2("/a/b", {"/a/b": "400000 100000\n", "/a": "150000 100000\n"}), 1.5),  # the parent's quota is tighter
        (v2("/a", {"/a": "nonsense"}), None),
        (v2("/a", {"/a": "1 2 3"}), None),
    ],
)
def test_quota_of_version_2(files: dict[str, str], expected: float | None) -> None:
    assert quota(files) == expected


@pytest.mark.parametrize(("us", "expected"), [("300000\n", 3.0), ("-1\n", None), ("0\n", None), ("50000\n", 0.5), ("x", None)])
def test_quota_of_version_1(us: str, expected: float | None) -> None:
    folder = "/sys/fs/cgroup/cpu,cpuacct/job"
    files = {"/proc/self/cgroup": "4:memory:/other\n3:cpu,cpuacct:/job\n0::/\n", "/proc/self/mountinfo": V1_MOUNT}
    assert quota(files | {f"{folder}/cpu.cfs_quota_us": us, f"{folder}/cpu.cfs_period_us": "100000\n"}) == expected


def test_a_container_that_sees_the_hosts_path_looks_at_the_top_of_its_mount() -> None:
    mount = "33 30 0:29 /docker/abc /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    assert cgroup_folders("2:cpu:/docker/abc\n", mount) == ["/sys/fs/cgroup/cpu"]
    assert cgroup_folders("2:cpu:/docker/abc/x\n", mount) == ["/sys/fs/cgroup/cpu/x", "/sys/fs/cgroup/cpu"]
    assert cgroup_folders("2:cpu:/elsewhere\n", mount) == ["/sys/fs/cgroup/cpu"]


@pytest.mark.parametrize("garbage", ["", "\n", "::", "a", "0:", "1:cpu", " - ", "1 2 - cgroup2"])
def test_garbage_sets_no_quota(garbage: str) -> None:
    assert quota({"/proc/self/cgroup": garbage, "/proc/self/mountinfo": garbage}) is None


def test_affinity_counts() -> None:
    assert 1 <= usable_cpus() <= len(os.sched_getaffinity(0))
    one = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{one}]); from elastirun.agent.host.cpus import usable_cpus; print(usable_cpus())"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout == "1\n"

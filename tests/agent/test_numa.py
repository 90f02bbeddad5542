"""CPU binding, on made-up machines: sysfs trees in a temporary directory."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from elastirun.agent.host import numa
from elastirun.agent.host.numa import MODES, cpus_for, gpu_pci_ids, parse_cpulist, visible_gpus
from elastirun.errors import StartError

ALL = frozenset(range(16))
NODE0 = frozenset({0, 1, 2, 3, 8, 9, 10, 11})
NODE1 = ALL - NODE0
GPUS = ["0000:3b:00.0", "0000:5e:00.0", "0000:af:00.0", "0000:d8:00.0"]  # two on each node


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{value}\n")


def machine(root: Path, socket_of_node: dict[int, int], gpu_nodes: list[int], cores_per_node: int = 4) -> Path:
    """Make a sysfs tree: cores 0…n-1 in order over the nodes, hyperthread siblings n…2n-1, one cache for every two neighbouring cores."""
    cores = cores_per_node * len(socket_of_node)
    for node, socket in socket_of_node.items():
        first = node * cores_per_node
        write(root / f"devices/system/node/node{node}/cpulist", f"{first}-{first + 3},{cores + first}-{cores + first + 3}")
        for core in range(first, first + cores_per_node):
            for cpu in (core, core + cores):
                directory, pair = root / f"devices/system/cpu/cpu{cpu}", core - core % 2
                write(directory / "topology/physical_package_id", socket)
                write(directory / "topology/thread_siblings_list", f"{core},{core + cores}")
                l3 = f"{pair}-{pair + 1},{pair + cores}-{pair + cores + 1}"
                caches = [(1, "Data", core), (1, "Instruction", core), (3, "Unified", l3), (9, "Instruction", core)]
                for i, (level, kind, shared) in enumerate(caches):
                    write(directory / f"cache/index{i}/level", level)
                    write(directory / f"cache/index{i}/type", kind)
                    write(directory / f"cache/index{i}/shared_cpu_list", shared)
    for gpu, node in zip(GPUS, gpu_nodes, strict=False):
        write(root / "bus/pci/devices" / gpu / "numa_node", node)
    return root


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    return machine(tmp_path, {0: 0, 1: 1}, [0, 0, 1, 1])


def masks(mode: str, n: int, sysfs: Path, gpus: list[str], allowed: frozenset[int] = ALL) -> list[set[int]]:
    return [set(cpus_for(mode, rank, n, gpus, allowed, sysfs)) for rank in range(n)]


@pytest.mark.parametrize("mode", ["node", "socket"])
def test_whole_node_of_the_gpu(two_nodes: Path, mode: str) -> None:
    assert masks(mode, 4, two_nodes, GPUS) == [NODE0, NODE0, NODE1, NODE1]


def test_gpu_order_decides_not_the_rank(two_nodes: Path) -> None:
    assert masks("node", 2, two_nodes, GPUS[::-1]) == [NODE1, NODE1]


def test_socket_takes_every_node_of_the_socket(tmp_path: Path) -> None:
    sysfs = machine(tmp_path, {0: 0, 1: 0, 2: 1, 3: 1}, [1, 2])
    everything = frozenset(range(32))
    first, second = masks("socket", 2, sysfs, GPUS[:2], everything)
    assert first == {*range(8), *range(16, 24)} and second == everything - first


def test_exclusive_is_disjoint_whole_cores(two_nodes: Path) -> None:
    found = masks("exclusive", 4, two_nodes, GPUS)
    assert found == [{0, 1, 8, 9}, {2, 3, 10, 11}, {4, 5, 12, 13}, {6, 7, 14, 15}]


def test_exclusive_gives_spare_cores_to_the_first(tmp_path: Path) -> None:
    sysfs = machine(tmp_path, {0: 0}, [0, 0, 0])
    assert masks("exclusive", 3, sysfs, GPUS[:3], frozenset(range(8))) == [{0, 1, 4, 5}, {2, 6}, {3, 7}]


def test_exclusive_leaves_room_for_visible_gpus_without_a_worker(two_nodes: Path) -> None:
    assert masks("exclusive", 1, two_nodes, GPUS) == [{0, 1, 8, 9}]


def test_exclusive_counts_allowed_cores_only(two_nodes: Path) -> None:
    allowed = ALL - {0, 8, 9}
    assert masks("exclusive", 4, two_nodes, GPUS, allowed)[:2] == [{1, 2, 10}, {3, 11}]


def test_exclusive_with_too_few_cores_says_so(two_nodes: Path) -> None:
    with pytest.raises(StartError, match=r"NUMA node 0 has 1 usable cores for 2 workers"):
        cpus_for("exclusive", 0, 4, GPUS, frozenset({0, 8, 4}), two_nodes)


def test_more_workers_than_gpus_share_gpus_but_not_cores(two_nodes: Path) -> None:
    found = masks("exclusive", 8, two_nodes, GPUS)
    assert sorted(cpu for mask in found for cpu in mask) == sorted(ALL)
    assert all(mask <= (NODE0 if rank % 4 < 2 else NODE1) for rank, mask in enumerate(found))


def test_core_complex_is_another_one_for_each(two_nodes: Path) -> None:
    found = masks("core-complex", 4, two_nodes, GPUS)
    assert found == [{0, 1, 8, 9}, {2, 3, 10, 11}, {4, 5, 12, 13}, {6, 7, 14, 15}]


def test_core_complex_prefers_the_biggest_and_wraps(tmp_path: Path) -> None:
    sysfs = machine(tmp_path, {0: 0}, [0, 0, 0])
    found = masks("core-complex", 3, sysfs, GPUS[:3], frozenset(range(1, 8)))
    assert found == [{2, 3, 6, 7}, {1, 4, 5}, {2, 3, 6, 7}]


def test_without_gpus_ranks_spread_evenly_and_exclusively(two_nodes: Path) -> None:
    assert masks("node", 2, two_nodes, []) == [NODE0, NODE1]
    assert masks("node", 5, two_nodes, []) == [NODE0, NODE0, NODE0, NODE1, NODE1]
    found = masks("exclusive", 8, two_nodes, [])
    assert sorted(cpu for mask in found for cpu in mask) == sorted(ALL)


def test_ranks_spread_over_nodes_that_have_allowed_cpus(two_nodes: Path) -> None:
    assert masks("node", 2, two_nodes, [], frozenset({4, 5})) == [{4, 5}, {4, 5}]


@pytest.mark.parametrize("near", [[-1, -1], []], ids=["firmware silent", "not in sysfs"])
def test_gpus_of_unknown_nodes_count_as_none(tmp_path: Path, near: list[int]) -> None:
    sysfs = machine(tmp_path, {0: 0, 1: 1}, near)
    assert masks("node", 2, sysfs, GPUS[:2]) == [NODE0, NODE1]


def test_no_allowed_cpu_near_the_gpu_says_so(two_nodes: Path) -> None:
    with pytest.raises(StartError, match=r"numa-binding=node: no CPU of NUMA node 1, where local rank 2 belongs"):
        cpus_for("node", 2, 4, GPUS, frozenset({0, 1}), two_nodes)


@pytest.mark.parametrize("mode", MODES)
def test_a_system_that_tells_nothing(tmp_path: Path, mode: str) -> None:
    assert cpus_for(mode, 0, 1, [], {2, 3}, tmp_path) == {2, 3}


@pytest.mark.parametrize("mode", MODES)
def test_this_machine(mode: str) -> None:
    allowed = os.sched_getaffinity(0)
    mine = cpus_for(mode, 0, 1, [], allowed)
    assert mine and mine <= allowed


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8-11\n", {*range(4), *range(8, 12)}), ("5", {5}), ("", set()), ("\n", set()), ("0,2", {0, 2})]
)
def test_cpulist(text: str, cpus: set[int]) -> None:
    assert parse_cpulist(text) == cpus


SMI = "GPU-aaaa-1, 00000000:3B:00.0\nGPU-aabb-2, 00000000:5E:00.0\nGPU-cccc-3, 00010000:AF:00.0\n"
PCI = ["0000:3b:00.0", "0000:5e:00.0", "10000:af:00.0"]


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        ("", []),
        ("NoDevFiles", []),
        ("1,-1,0", [1]),
        ("0,7,1", [0]),
        ("GPU-cccc, 0", [2, 0]),
        ("GPU-aa", []),
        ("MIG-aaaa-1", []),
    ],
)
def test_visible_devices(visible: str | None, chosen: list[int]) -> None:
    assert visible_gpus(SMI, visible) == [PCI[i] for i in chosen]


@pytest.mark.parametrize(("status", "chosen"), [(0, PCI[1:2]), (9, [])])
def test_asks_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, chosen: list[str]) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\ncat <<'END'\n{SMI}END\nexit {status}\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert gpu_pci_ids({"CUDA_VISIBLE_DEVICES": "1"}) == chosen


def test_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_pci_ids({}) == []


def test_a_driver_that_hangs_is_not_waited_for_without_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi does not die of SIGKILL then."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 1000\n")
    (tmp_path / "nvidia-smi").chmod(0o700)
    started: list[subprocess.Popen[str]] = []
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(numa, "DRIVER_LIMIT", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "kill", lambda self: started.append(self))
        assert numa.gpu_pci_ids({}) == []
    (process,) = started
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()

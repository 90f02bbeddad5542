"""Which CPUs a worker should run on: torchrun's ``--numa-binding`` modes, read from sysfs.

    node          the CPUs of the NUMA node that the worker's GPU hangs on
    socket        the CPUs of all NUMA nodes of that node's socket
    exclusive     that node's physical cores divided evenly; no two workers share a core
    core-complex  the cores of that node that share one last-level cache, another one for each worker while there are enough

The GPU of a worker is the one whose index is its local rank. Without GPUs, or where the system does not know their
nodes, the local ranks are spread evenly over the NUMA nodes. The caller applies the result with ``os.sched_setaffinity``
before it executes the worker, so that every thread the worker ever starts has it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from elastirun.errors import StartError

Cpus = frozenset[int]
DRIVER_LIMIT = 30.0  # seconds that nvidia-smi may take


def cpus_for(
    mode: str, local_rank: int, local_world_size: int, gpus: Sequence[str], allowed: AbstractSet[int], sysfs: Path = Path("/sys")
) -> Cpus:
    """The CPUs for one worker; ``mode`` is one of ``MODES``.

    ``gpus`` are the PCI addresses of all visible GPUs in the order of their index (``gpu_pci_ids``; they are all needed
    because "exclusive" divides a node among its GPUs), ``allowed`` the CPUs this process may use (``os.sched_getaffinity(0)``).
    Raises StartError when no CPU is left for the worker.
    """
    nodes = _nodes(sysfs, frozenset(allowed))
    places = _places(local_world_size, gpus, nodes, sysfs)
    node = places[local_rank]
    if not nodes.get(node):
        raise StartError(
            f"--numa-binding={mode}: no CPU of NUMA node {node}, where local rank {local_rank} belongs, is among the "
            f"{len(allowed)} CPUs this process may use; widen its CPU set (cpuset, taskset) or leave --numa-binding out"
        )
    peers = [rank for rank, place in enumerate(places) if place == node]
    return _MODES[mode](_Place(node, peers.index(local_rank), len(peers)), nodes, sysfs)


def gpu_pci_ids(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The PCI addresses of the visible GPUs as sysfs writes them, in the order of their index; asks the driver, not torch.

    CUDA_VISIBLE_DEVICES is honoured when it lists numbers or GPU UUIDs. Empty without ``nvidia-smi``, when it fails or
    takes more than 30 s, and when the visible devices are parts of a GPU (MIG). The order is that of the PCI bus:
    on a node with different GPUs set CUDA_DEVICE_ORDER=PCI_BUS_ID, so that CUDA counts in the same way.
    """
    command = ["nvidia-smi", "--query-gpu=uuid,pci.bus_id", "--format=csv,noheader"]
    try:
        asked = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return []
    try:
        answer = asked.communicate(timeout=DRIVER_LIMIT)[0]
    except subprocess.TimeoutExpired:
        asked.kill()  # and not waited for: where the driver hangs, it does not die
        return []
    if asked.returncode:
        return []
    return visible_gpus(answer, environ.get("CUDA_VISIBLE_DEVICES"))


def visible_gpus(answer: str, visible: str | None) -> list[str]:
    """The PCI addresses in lines of "uuid, bus id", in the order and number that CUDA_VISIBLE_DEVICES (None: unset) leaves."""
    rows = [(uuid.strip(), _sysfs_pci(bus)) for uuid, comma, bus in (line.partition(",") for line in answer.splitlines()) if comma]
    if visible is None:
        return [pci for _, pci in rows]
    chosen = []
    for word in (w.strip() for w in visible.split(",")):
        if word.isdecimal():
            found = [pci for i, (_, pci) in enumerate(rows) if i == int(word)]
        else:
            found = [pci for uuid, pci in rows if word.startswith("GPU-") and uuid.startswith(word)]
        if len(found) != 1:
            break  # CUDA too takes the list up to its first unknown entry
        chosen += found
    return chosen


def parse_cpulist(text: str) -> Cpus:
    """The numbers in a kernel list such as "0-3,8-11"; empty text is no CPU. Raises ValueError for anything else."""
    cpus: set[int] = set()
    for part in filter(None, (p.strip() for p in text.split(","))):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


# --- the modes


@dataclass(frozen=True)
class _Place:
    node: int
    index: int  # among the workers on that node
    count: int  # workers on that node


def _node(place: _Place, nodes: Mapping[int, Cpus], sysfs: Path) -> Cpus:
    return nodes[place.node]


def _socket(place: _Place, nodes: Mapping[int, Cpus], sysfs: Path) -> Cpus:
    """A node belongs to the socket of its first CPU: where firmware joins two sockets in one node, all of it is taken."""
    sockets = {node: _read_int(_cpu(sysfs, min(cpus)) / "topology/physical_package_id") for node, cpus in nodes.items() if cpus}
    return frozenset().union(*(nodes[node] for node, socket in sockets.items() if socket == sockets[place.node]))


def _exclusive(place: _Place, nodes: Mapping[int, Cpus], sysfs: Path) -> Cpus:
    cores = _grouped(nodes[place.node], lambda cpu: _first(_cpu(sysfs, cpu) / "topology/thread_siblings_list", cpu))
    share, extra = divmod(len(cores), place.count)  # the first `extra` workers get one core more
    if share == 0:
        raise StartError(
            f"--numa-binding=exclusive: NUMA node {place.node} has {len(cores)} usable cores for {place.count} workers; "
            "use --numa-binding=node, or start fewer workers"
        )
    start = place.index * share + min(place.index, extra)
    mine = sorted(cores)[start : start + share + (place.index < extra)]
    return frozenset().union(*(cores[core] for core in mine))


def _core_complex(place: _Place, nodes: Mapping[int, Cpus], sysfs: Path) -> Cpus:
    """The biggest complexes first. Where the system does not tell its caches (in some virtual machines) the node is one complex."""
    complexes = _grouped(nodes[place.node], lambda cpu: _last_level_cache(_cpu(sysfs, cpu) / "cache"))
    order = sorted(complexes, key=lambda first: (-len(complexes[first]), first))
    return complexes[order[place.index % len(order)]]


_MODES: dict[str, Callable[[_Place, Mapping[int, Cpus], Path], Cpus]] = {
    "node": _node,
    "socket": _socket,
    "exclusive": _exclusive,
    "core-complex": _core_complex,
}
MODES = tuple(_MODES)


# --- what sysfs says


def _nodes(sysfs: Path, allowed: Cpus) -> dict[int, Cpus]:
    """NUMA node -> its allowed CPUs, also when none; one node with everything where the system has no notion of nodes."""
    lists = (sysfs / "devices/system/node").glob("node[0-9]*/cpulist")
    nodes = {int(path.parent.name[4:]): parse_cpulist(path.read_text()) & allowed for path in lists}
    return nodes or {0: allowed}


def _places(local_world_size: int, gpus: Sequence[str], nodes: Mapping[int, Cpus], sysfs: Path) -> list[int]:
    """The NUMA node of each local rank; of each GPU too when there are more of them, for a node is divided among its GPUs."""
    near = [_read_int(sysfs / "bus/pci/devices" / pci / "numa_node") for pci in gpus]
    if near and all(node in nodes for node in near):  # -1: the firmware does not say
        return [near[i % len(near)] for i in range(max(local_world_size, len(near)))]
    usable = sorted(node for node, cpus in nodes.items() if cpus) or [min(nodes)]
    return [usable[rank * len(usable) // local_world_size] for rank in range(local_world_size)]


def _last_level_cache(caches: Path) -> int:
    """The first CPU that shares the last-level data cache described in ``caches``; -1 when there is none."""
    levels = {
        _read_int(cache / "level"): _first(cache / "shared_cpu_list", -1)
        for cache in caches.glob("index[0-9]*")
        if _read(cache / "type") in ("Unified", "Data")
    }
    return levels[max(levels)] if levels else -1


def _grouped(cpus: Cpus, key: Callable[[int], int]) -> dict[int, Cpus]:
    keys = {cpu: key(cpu) for cpu in cpus}
    return {group: frozenset(cpu for cpu in cpus if keys[cpu] == group) for group in set(keys.values())}


def _cpu(sysfs: Path, cpu: int) -> Path:
    return sysfs / f"devices/system/cpu/cpu{cpu}"


def _first(path: Path, default: int) -> int:
    return min(parse_cpulist(_read(path)), default=default)


def _read_int(path: Path) -> int:
    return int(_read(path) or -1)


def _read(path: Path) -> str:
    """The stripped text; empty when there is no such file, as in containers and virtual machines that hide it."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _sysfs_pci(bus_id: str) -> str:
    """nvidia-smi's "00000000:3B:00.0" as sysfs writes it: "0000:3b:00.0"."""
    domain, _, rest = bus_id.strip().lower().partition(":")
    return f"{domain.lstrip('0'):0>4}:{rest}"

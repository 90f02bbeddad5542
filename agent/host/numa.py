"""Choice of CPUs for a worker: torchrun's ``--numa-binding`` modes, read from sysfs.

    node          the CPUs of the NUMA node to which the worker's GPU is attached
    socket        the CPUs of all NUMA nodes of that node's socket
    exclusive     a share of that node's physical cores; no two workers share a core
    core-complex  the cores of that node that share one last-level cache; as long as there are enough caches, each worker has its own

A worker's GPU is the one whose index is the local rank. Without GPUs, or if the system does not know their nodes, the local
ranks are spread evenly over the NUMA nodes. The caller applies the result with ``os.sched_setaffinity`` before it executes
the worker, so that every thread that the worker ever starts inherits it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elastirun.errors import StartError

Cpus = frozenset[int]
NO_PROGRAM = 127  # exit code of a shell
DRIVER_LIMIT = 30.0  # seconds for nvidia-smi; without persistence mode the driver initialises each GPU first


def cpus_for(
    mode: str, local_rank: int, local_world_size: int, gpus: Sequence[str], allowed: AbstractSet[int], sysfs: Path = Path("/sys")
) -> Cpus:
    """Return the CPUs for one worker. Raises StartError when no CPU is left for it.

    ``mode``: one of ``MODES``. ``gpus``: the PCI addresses of all visible GPUs by index (``gpu_pci_ids``); all are needed,
    because "exclusive" divides a node among its GPUs. ``allowed``: the CPUs that this process may use (``os.sched_getaffinity(0)``).
    """
    nodes = _nodes(sysfs, frozenset(allowed))
    node_of = _node_of_each_rank(local_world_size, gpus, nodes, sysfs)
    node = node_of[local_rank]
    if not nodes.get(node):
        raise StartError(
            f"--numa-binding={mode}: no CPU of NUMA node {node}, where local rank {local_rank} belongs, is among the "
            f"{len(allowed)} CPUs this process may use; widen its CPU set (cpuset, taskset) or leave --numa-binding out"
        )
    sharing = [rank for rank, other in enumerate(node_of) if other == node]
    return MODES[mode](_Share(node, sharing.index(local_rank), len(sharing)), nodes, sysfs)


def gpu_pci_ids(environ: Mapping[str, str]) -> list[str]:
    """Return the PCI addresses of the visible GPUs as sysfs writes them, by index. Asks the driver, so torch is not imported.

    Follows CUDA_VISIBLE_DEVICES if it lists numbers or GPU UUIDs. Empty without ``nvidia-smi``, if it fails or takes more than
    DRIVER_LIMIT seconds, and if the visible devices are parts of a GPU (MIG). The order is that of the PCI bus: on a node
    with different GPUs set CUDA_DEVICE_ORDER=PCI_BUS_ID, so that CUDA counts in the same way.
    """
    code, answer = ask_driver("uuid,pci.bus_id")
    return [] if code else visible_gpus(answer, environ.get("CUDA_VISIBLE_DEVICES"))


def ask_driver(fields: str) -> tuple[int, str]:
    """Return the exit code of ``nvidia-smi``, and its answer: a line for each GPU, with these fields. 127: there is no such program."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return NO_PROGRAM, ""
    try:
        answer = asked.communicate(timeout=DRIVER_LIMIT)[0]
        return asked.returncode, answer
    except subprocess.TimeoutExpired:
        asked.kill()  # do not wait for it: while the driver hangs, nvidia-smi does not die
        return -9, f"no answer within {DRIVER_LIMIT:g} s"


def visible_gpus(answer: str, visible: str | None) -> list[str]:
    """Return the PCI addresses of those GPUs that CUDA_VISIBLE_DEVICES (``visible``; None: unset) names, in its order.

    ``answer``: lines of "uuid, bus id".
    """
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
            break  # CUDA, too, reads the list up to its first unknown entry
        chosen += found
    return chosen


def parse_cpulist(text: str) -> Cpus:
    """Return the numbers in a kernel list such as "0-3,8-11"; no number for empty text. Raises ValueError for anything else."""
    cpus: set[int] = set()
    for part in filter(None, (p.strip() for p in text.split(","))):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


# --- the modes


@dataclass(frozen=True)
class _Share:
    """One worker's share of a NUMA node."""

    node: int
    index: int  # of the worker among the workers on that node
    count: int  # workers on that node


def _node(share: _Share, nodes: Mapping[int, Cpus], sysfs: Path) -> Cpus:
    return nodes[share.node]


def _socket(share: _Share, nodes: Mapping[int, Cpus], sysfs: Path) -> Cpus:
    """Return the CPUs of all nodes of the socket. A node that spans two sockets counts as part of its first CPU's socket."""
    sockets = {node: _read_int(_cpu(sysfs, min(cpus)) / "topology/physical_package_id") for node, cpus in nodes.items() if cpus}
    return frozenset().union(*(nodes[node] for node, socket in sockets.items() if socket == sockets[share.node]))


def _exclusive(share: _Share, nodes: Mapping[int, Cpus], sysfs: Path) -> Cpus:
    cores = _grouped(nodes[share.node], lambda cpu: _first(_cpu(sysfs, cpu) / "topology/thread_siblings_list", cpu))
    each, extra = divmod(len(cores), share.count)  # the first `extra` workers get one core more
    if each == 0:
        raise StartError(
            f"--numa-binding=exclusive: NUMA node {share.node} has {len(cores)} usable cores for {share.count} workers; "
            "use --numa-binding=node, or start fewer workers"
        )
    start = share.index * each + min(share.index, extra)
    mine = sorted(cores)[start : start + each + (share.index < extra)]
    return frozenset().union(*(cores[core] for core in mine))


def _core_complex(share: _Share, nodes: Mapping[int, Cpus], sysfs: Path) -> Cpus:
    """Return the cores of one last-level cache, the largest first; the whole node if the system hides its caches (virtual machines)."""
    complexes = _grouped(nodes[share.node], lambda cpu: _last_level_cache(_cpu(sysfs, cpu) / "cache"))
    order = sorted(complexes, key=lambda first: (-len(complexes[first]), first))
    return complexes[order[share.index % len(order)]]


MODES: dict[str, Callable[[_Share, Mapping[int, Cpus], Path], Cpus]] = {
    "node": _node,
    "socket": _socket,
    "exclusive": _exclusive,
    "core-complex": _core_complex,
}


# --- reading sysfs


def _nodes(sysfs: Path, allowed: Cpus) -> dict[int, Cpus]:
    """Return the allowed CPUs (perhaps none) of each NUMA node. If the system knows no nodes, return one node with all CPUs."""
    lists = (sysfs / "devices/system/node").glob("node[0-9]*/cpulist")
    nodes = {int(path.parent.name[4:]): parse_cpulist(path.read_text()) & allowed for path in lists}
    return nodes or {0: allowed}


def _node_of_each_rank(local_world_size: int, gpus: Sequence[str], nodes: Mapping[int, Cpus], sysfs: Path) -> list[int]:
    """Return the NUMA node of each local rank. If there are more GPUs than workers, also of the other GPUs: all share their nodes."""
    near = [_read_int(sysfs / "bus/pci/devices" / pci / "numa_node") for pci in gpus]
    if near and all(node in nodes for node in near):  # -1, which is no node: the firmware does not say
        return [near[i % len(near)] for i in range(max(local_world_size, len(near)))]
    usable = sorted(node for node, cpus in nodes.items() if cpus) or [min(nodes)]
    return [usable[rank * len(usable) // local_world_size] for rank in range(local_world_size)]


def _last_level_cache(caches: Path) -> int:
    """Return the first CPU that shares the last-level data cache described in ``caches``; -1 when there is none."""
    levels = {
        _read_int(cache / "level"): _first(cache / "shared_cpu_list", -1)
        for cache in caches.glob("index[0-9]*")
        if _read(cache / "type") in ("Unified", "Data")
    }
    return levels[max(levels)] if levels else -1


def _grouped(cpus: Cpus, key: Callable[[int], int]) -> dict[int, Cpus]:
    """Return the CPUs by their ``key``."""
    keys = {cpu: key(cpu) for cpu in cpus}
    return {group: frozenset(cpu for cpu in cpus if keys[cpu] == group) for group in set(keys.values())}


def _cpu(sysfs: Path, cpu: int) -> Path:
    return sysfs / f"devices/system/cpu/cpu{cpu}"


def _first(path: Path, default: int) -> int:
    return min(parse_cpulist(_read(path)), default=default)


def _read_int(path: Path) -> int:
    return int(_read(path) or -1)


def _read(path: Path) -> str:
    """Return the stripped text; empty when there is no such file: containers and virtual machines hide some."""
    with suppress(OSError):
        return path.read_text().strip()
    return ""


def _sysfs_pci(bus_id: str) -> str:
    """Return nvidia-smi's "00000000:3B:00.0" as sysfs writes it: "0000:3b:00.0"."""
    domain, _, rest = bus_id.strip().lower().partition(":")
    return f"{domain.lstrip('0'):0>4}:{rest}"

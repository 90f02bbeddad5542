"""CPU time, wake-ups and memory of running processes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import psutil


def process_tree(pid: int) -> dict[int, str]:
    """Return the process and its descendants: pid to command line. Zombies are left out."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    lines = {process.pid: Path(f"/proc/{process.pid}/cmdline").read_text(errors="replace").replace("\0", " ") for process in processes}
    return {each: line for each, line in lines.items() if line}


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time that the processes' living threads have taken. The kernel counts it in nanoseconds."""
    return sum(int(path.read_text().split()[0]) for path in _thread_files(pids, "schedstat")) / 1e9


def wake_ups(pids: Iterable[int]) -> int:
    """Return how often the processes' living threads have slept: each time something wakes them again."""
    texts = [path.read_text() for path in _thread_files(pids, "status")]
    return sum(int(text.split("\nvoluntary_ctxt_switches:")[1].split()[0]) for text in texts)


def memory(pids: Iterable[int]) -> float:
    """Return the processes' proportional set size in MiB: a page that several processes share counts as a fraction for each."""
    return float(sum(psutil.Process(pid).memory_full_info().pss for pid in pids)) / 2**20


def _thread_files(pids: Iterable[int], name: str) -> list[Path]:
    return [path for pid in pids for path in Path(f"/proc/{pid}/task").glob(f"*/{name}")]

"""Runs functions in worlds of real processes with a gloo group: ``run(3, function)`` calls a module-level function on three ranks.

``backend="cpu:gloo,cuda:nccl"`` makes the default group of both, and the ranks share one GPU (``tests/support/gpu.py``).

torch is imported once, by a fork server; a rank is a fork of it and costs milliseconds.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# Imported once by the fork server: importing torch takes seconds, a fork milliseconds. pytest is for the tests of mutants.
PRELOAD = ["torch", "torch.distributed", "elastirun.train", "torch.nn.parallel", "torch._dynamo", "pytest"]
TIMEOUT = float(os.environ.get("TEST_PATIENCE", "400"))  # seconds; less than the limit of a test in pyproject.toml
GROUP_TIMEOUT = float(os.environ.get("WORLD_TIMEOUT", "150"))  # seconds for a collective
STANDSTILL = float(os.environ.get("WORLD_STANDSTILL", "inf"))  # seconds after which ranks that all stand still are given up
STANDING = 0.25  # of that time; ranks that together run, or wait for a processor, for less stand still: waiting itself takes some


@dataclass(frozen=True)
class Died:
    """A rank that ended without a result."""

    code: int  # exit code; negative: the signal


def _rank_main(
    function: Callable[..., Any], rank: int, world: int, folder: str, out: Connection, args: tuple[Any, ...], backend: str
) -> None:
    import torch
    import torch.distributed as dist

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    warnings.resetwarnings()  # pytest's filters, where it forked this process itself
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        store = dist.FileStore(f"{folder}/store", world)
        if "nccl" in backend:
            from tests.support.gpu import share

            share(rank)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=GROUP_TIMEOUT))
        dist.all_reduce(torch.zeros(1))  # a rank that destroys its group at once would break off one that still connects
        out.send(("ok", function(rank, world, *args)))
    except BaseException:
        out.send(("error", traceback.format_exc()))
    out.close()
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])  # until run() kills this rank: gloo's connections stay for ranks that are slower
    os._exit(0)


def run(
    world: int, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT, died: bool = False, backend: str = "gloo"
) -> list[Any]:
    """Return the results of ``function(rank, world, *args)`` in rank order. Raises with the traceback of the first rank that raised.

    With ``died``, a rank may be killed: its place holds a ``Died``. After ``timeout`` seconds all are killed.
    """
    context = multiprocessing.get_context(os.environ.get("WORLD_START", "forkserver"))
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="elastirun-world-") as folder:
        ends, processes = [], []
        for rank in range(world):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(function, rank, world, folder, theirs, args, backend), daemon=True)
            process.start()
            theirs.close()
            ends.append(mine)
            processes.append(process)
        try:
            return _collect(ends, processes, time.monotonic() + timeout, died)
        finally:
            for process in processes:
                process.kill()
                process.join()
                process.close()
            for end in ends:
                end.close()


def _collect(ends: list[Connection], processes: list[Any], until: float, died: bool) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ends):
        waiting = [end for rank, end in enumerate(ends) if rank not in results]
        ready = _wait(waiting, [process.pid for process in processes], until)
        if not ready:
            raise TimeoutError(f"ranks {[rank for rank in range(len(ends)) if rank not in results]} did not end")
        for rank, end in enumerate(ends):
            if end not in ready:
                continue
            try:
                kind, value = end.recv()
            except EOFError:
                processes[rank].join()
                kind, value = ("ok" if died else "error"), Died(processes[rank].exitcode)
            if kind == "error":
                raise AssertionError(f"rank {rank}: {value}")
            results[rank] = value
    return [results[rank] for rank in range(len(ends))]


def _wait(ends: list[Connection], pids: list[int], until: float) -> list[Any]:
    """Return the ends at which something can be read; none at ``until``, or when the processes stand still."""
    while (left := until - time.monotonic()) > 0:
        before = used(pids) if STANDSTILL < left else {}
        if ready := wait(ends, timeout=min(left, STANDSTILL)):
            return ready
        if STANDSTILL < left and sum(seconds - before.get(thread, 0.0) for thread, seconds in used(pids).items()) < STANDING * STANDSTILL:
            break
    return []


def used(pids: list[int]) -> dict[int, float]:
    """Return the seconds for which each thread of these processes and their descendants has run or has waited for a processor."""
    found: dict[int, float] = {}
    pids = list(pids)
    for pid in pids:  # which grows on the way
        for task in Path(f"/proc/{pid}/task").glob("*"):
            try:
                found[int(task.name)] = sum(map(int, (task / "schedstat").read_text().split()[:2])) / 1e9
                pids += map(int, (task / "children").read_text().split())
            except OSError:
                pass  # the thread has just ended
    return found

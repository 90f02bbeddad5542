"""Compares elastirun's Checkpointer with torch.save and torch.distributed.checkpoint (DCP): how long training waits for a save or a load.

    python -m benchmarks.checkpoint [--mib 200 1024] [--rounds 7]

Two ranks with one thread each hold the same state and train on it: a matrix product, an all-reduce of a small gradient, and an update. Each
way to save has a world of its own, and the worlds take turns, round by round. A round saves twice:

before       elastirun only: seconds that ``restore`` and the first call of ``save``, in a step that is not due, take to prepare
first        seconds that the first save of the process blocks the loop: the longer of the two ranks
later        the same for the saves after it, the median
steps        the median time of a step while the checkpoint is being written, of that without a save
durable      seconds until everything is on the disk
load         seconds to bring the state back into tensors that are there, from files that no cache has

memory       elastirun only: seconds to bring it back from the copy in memory, in the round after a worker was killed

"of DCP" is the ratio to DCP's best asynchronous way. DCP needs NumPy for more than one rank.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks.lab import ROOT, machine, table
from tests.support import worlds

LIMIT = 600.0  # seconds for a world
MIB = 1 << 20
PIECE = 4 * MIB  # bytes of a tensor: 1,024 x 1,024 of float32
QUIET = 8  # steps without a save, before and between
SAVES = 3  # in each world; the first counts by itself

Save = Callable[[int, dict[str, Tensor]], Callable[[], None]]  # saves step, state; returns a function that waits until it is durable


# -- ways to save -----------------------------------------------------------------------------------------------------------


def torch_save(folder: str) -> tuple[Save, Callable[[dict[str, Tensor]], None]]:
    """Rank 0 writes one file with torch.save, and the others wait for it."""

    def save(step: int, state: dict[str, Tensor]) -> Callable[[], None]:
        if dist.get_rank() == 0:
            with open(f"{folder}/new", "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(f"{folder}/new", f"{folder}/state.pt")
        dist.barrier()
        return lambda: None

    def load(state: dict[str, Tensor]) -> None:
        saved = torch.load(f"{folder}/state.pt", weights_only=True, mmap=True)
        for name, tensor in state.items():
            tensor.copy_(saved[name])

    return save, load


def dcp_load(folder: str) -> Callable[[dict[str, Tensor]], None]:
    def load(state: dict[str, Tensor]) -> None:
        newest = max(os.listdir(folder), key=int)
        dcp.load(state, checkpoint_id=f"{folder}/{newest}")

    return load


def dcp_save(folder: str) -> tuple[Save, Callable[[dict[str, Tensor]], None]]:
    def save(step: int, state: dict[str, Tensor]) -> Callable[[], None]:
        dcp.save(state, checkpoint_id=f"{folder}/{step}")
        return lambda: None

    return save, dcp_load(folder)


def dcp_async(folder: str, cached: bool) -> tuple[Save, Callable[[dict[str, Tensor]], None]]:
    """DCP's asynchronous save, in a group of its own: with the training's group it may hang. ``cached``: memory of the stager is kept."""
    group = dist.new_group(backend="gloo")
    kept: dict[str, Any] = {}
    if cached:
        kept["async_stager"] = DefaultStager(StagingOptions(False, True, False, False))

    def save(step: int, state: dict[str, Tensor]) -> Callable[[], None]:
        future: Any = dcp.async_save(state, checkpoint_id=f"{folder}/{step}", process_group=group, **kept)
        return lambda: getattr(future, "upload_completion", future).result() and None

    return save, dcp_load(folder)


def elastirun(folder: str) -> tuple[Save, Callable[[dict[str, Tensor]], None]]:
    from elastirun.train import Checkpointer

    checkpoints = Checkpointer(folder, keep=2, every=1000)

    def save(step: int, state: dict[str, Tensor]) -> Callable[[], None]:
        if not step:  # before the loop, and its first step
            checkpoints.restore(state)
        checkpoints.save(1000 * step or 1, state)
        return checkpoints.wait

    def load(state: dict[str, Tensor]) -> None:
        if checkpoints.restore(state) is None:
            raise RuntimeError("nothing was restored")

    return save, load


OURS = "elastirun"
ASYNC = ("dcp.async_save", "dcp.async_save, cached")
WAYS: dict[str, Callable[[str], tuple[Save, Callable[[dict[str, Tensor]], None]]]] = {
    "torch.save": torch_save,
    "dcp.save": dcp_save,
    ASYNC[0]: partial(dcp_async, cached=False),
    ASYNC[1]: partial(dcp_async, cached=True),
    OURS: elastirun,
}


# -- on a rank ----------------------------------------------------------------------------------------------------------------


def make_state(mib: int, value: float) -> dict[str, Tensor]:
    """Return tensors of 4 MiB, ``mib`` in all, the same on each rank."""
    torch.manual_seed(0)
    return {f"layer{at:03d}.weight": torch.rand(PIECE // 4).mul_(value).view(1024, 1024) for at in range(mib * MIB // PIECE)}


class Loop:
    """A training step of about 15 ms that changes the whole state now and then, as an optimizer would."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.tensors = list(state.values())
        self.inputs, self.grad = torch.rand(256, 1024), torch.rand(1 << 16)
        self.number = 0

    def step(self) -> float:
        begun = time.perf_counter()
        for tensor in self.tensors[self.number % len(self.tensors) :][:2]:
            self.inputs = (self.inputs @ tensor).sigmoid_()
            tensor.add_(1e-3)
        dist.all_reduce(self.grad)
        self.grad.mul_(0.5)
        self.number += 1
        return time.perf_counter() - begun


def time_saves(rank: int, world: int, way: str, folder: str, mib: int) -> dict[str, Any]:
    state = make_state(mib, 1.0)
    loop = Loop(state)
    save, _ = WAYS[way](folder)
    found: dict[str, Any] = {"before": [0.0], "blocked": [], "durable": [], "quiet": [], "busy": []}
    if way == OURS:
        begun = time.perf_counter()
        save(0, state)
        found["before"] = [time.perf_counter() - begun]
    for number in range(SAVES):
        found["quiet"] += [loop.step() for _ in range(QUIET)][2:]
        dist.barrier()
        begun = time.perf_counter()
        wait = save(number + 1, state)
        found["blocked"].append(time.perf_counter() - begun)
        done: list[float] = []
        watch = threading.Thread(target=await_end, args=(wait, begun, done))
        watch.start()
        going = torch.ones(())
        while going:  # every rank steps as long as any rank's save goes on
            found["busy"].append(loop.step())
            going = torch.tensor(float(not done))
            dist.all_reduce(going)
        watch.join()
        found["durable"] += done
    return found


def await_end(wait: Callable[[], None], begun: float, done: list[float]) -> None:
    wait()
    done.append(time.perf_counter() - begun)


def time_load(rank: int, world: int, way: str, folder: str, mib: int) -> float:
    state = make_state(mib, 0.0)
    _, load = WAYS[way](folder)
    for path in Path(folder).rglob("*"):
        if path.is_file():
            forget(path)
    dist.barrier()
    begun = time.perf_counter()
    load(state)
    took = time.perf_counter() - begun
    if any(not float(tensor[0, 0]) for tensor in state.values()):
        raise RuntimeError(f"{way} did not load everything")
    return took


def forget(path: Path) -> None:
    """Ask the kernel to drop the file from its cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


RESTARTED = """
import os, sys, time
import torch, torch.distributed as dist
from benchmarks.checkpoint import make_state
from elastirun.train import Checkpointer

torch.set_num_threads(1)
dist.init_process_group("gloo")
first = os.environ["ELASTIRUN_ROUND"] == "1"
state = make_state(int(sys.argv[2]), float(first))
checkpoints = Checkpointer(sys.argv[1])
dist.barrier()
begun = time.perf_counter()
step = checkpoints.restore(state)
took = time.perf_counter() - begun
if first:
    checkpoints.save(1, state)
    dist.barrier()
    os.kill(os.getpid(), 9)
if step != 1 or not all(float(tensor[0, 0]) for tensor in state.values()):
    raise RuntimeError(f"step {step} was restored")
print(f"restored in {took} s", flush=True)
"""


def restart(mib: int, folder: str) -> float:
    """Return how long the slower of two ranks took to restore the state from memory; the checkpoint on the disk is damaged."""
    script = Path(folder) / "script.py"
    script.write_text(RESTARTED)
    launcher = [sys.executable, "-m", "elastirun", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    command = [*launcher, str(script), f"{folder}/c", str(mib)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT)
    found = [float(seconds) for seconds in re.findall("restored in ([0-9.e-]+) s", done.stdout)]
    if len(found) != 2:
        raise RuntimeError(done.stdout + done.stderr)
    return max(found)


# -- tables -------------------------------------------------------------------------------------------------------------------


def measure(way: str, mib: int, found: dict[str, dict[str, list[float]]]) -> None:
    """Run one world that saves and one that loads, and add what they report."""
    with tempfile.TemporaryDirectory(prefix="elastirun-bench-", dir=FOLDER) as folder:
        ranks = worlds.run(2, time_saves, way, folder, mib, timeout=LIMIT)
        mine = found.setdefault(way, {})
        before, blocked, durable = (list(map(max, *(rank[what] for rank in ranks))) for what in ("before", "blocked", "durable"))
        mine.setdefault("before", []).append(before[0])
        mine.setdefault("first", []).append(blocked[0])
        mine.setdefault("later", []).append(median(blocked[1:]))
        mine.setdefault("durable", []).append(median(durable))
        mine.setdefault("steps", []).append(median(ranks[0]["busy"]) / median(ranks[0]["quiet"]))
        mine.setdefault("load", []).append(max(worlds.run(2, time_load, way, folder, mib, timeout=LIMIT)))
        mine.setdefault("memory", []).append(restart(mib, folder) if way == OURS else 0.0)


def rows(found: dict[str, dict[str, list[float]]]) -> list[list[str]]:
    columns = ("before", "first", "later", "durable", "steps", "load", "memory")
    head = ["", *columns, "first of DCP", "later of DCP"]
    best = {what: min(median(found[way][what]) for way in ASYNC if way in found) for what in ("first", "later")}
    lines = [head]
    for way, values in found.items():
        cells = [f"{median(values[what]):.2f}" if what == "steps" else f"{1000 * median(values[what]):.0f} ms" for what in columns]
        lines.append([way, *cells, *(f"{median(values[what]) / best[what]:.2f}" for what in ("first", "later"))])
    return lines


FOLDER: str | None = None  # where to write; None: the folder for temporary files


def main(arguments: Sequence[str] | None = None) -> None:
    global FOLDER
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", default=[200, 1024], help="sizes of the state")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--folder", help="a folder on the disk to be measured; default: that for temporary files")
    args = parser.parse_args(arguments)
    FOLDER = args.folder
    print(machine())
    for mib in args.mib:
        found: dict[str, dict[str, list[float]]] = {}
        for number in range(args.rounds):
            for at in range(len(args.ways)):
                measure(args.ways[(at + number) % len(args.ways)], mib, found)
        print(f"\n{mib} MiB, 2 ranks, medians of {args.rounds} rounds\n\n{table(rows({way: found[way] for way in args.ways}))}", flush=True)


if __name__ == "__main__":
    main()

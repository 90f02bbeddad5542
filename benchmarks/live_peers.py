"""Compares live elasticity with torchft: a worker of three is killed and started again, and the other two train on.

    python -m benchmarks.live_peers --torchft PYTHON [--rounds 5] [--width 1024] [--json FILE]

PYTHON: an interpreter with torch and torchft, see benchmarks/README.md. Three workers train on CPUs over gloo, a step each 50 ms. The last
one is killed with SIGKILL. *Pause*: the longest time without a step that counts, from the kill until 2 s after all three train again.
*Back*: from the kill until the first step in which all three take part. Both take turns.

elastirun: one agent with three workers. torchft: its lighthouse, and a torchrun for each worker, which starts it again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.lab import ROOT
from tests.support.cluster import free_port

WORKER = ROOT / "benchmarks" / "live_worker.py"
PATIENCE = 120.0  # seconds for three workers to train together
BEFORE, AFTER = 3.0, 2.0  # seconds of steps before the kill, and after all train again
WORKERS = 3


@dataclass(frozen=True)
class Step:
    """A step that counts: when, by which worker, and how many took part."""

    at: float
    pid: int
    workers: int


@dataclass(frozen=True)
class Kill:
    """What one kill cost, in seconds."""

    pause: float  # the longest time without a step that counts
    back: float  # until all train together again


Start = Callable[[ExitStack, dict[str, str]], None]


def with_elastirun(stack: ExitStack, env: dict[str, str]) -> None:
    _launch(stack, [sys.executable, "-m", "elastirun", f"--nproc-per-node={WORKERS}", "--max-restarts=9", "--standalone", str(WORKER)], env)


def with_torchft(python: str, stack: ExitStack, env: dict[str, str]) -> None:
    port = free_port()
    lighthouse = [str(Path(python).parent / "torchft_lighthouse"), "--min_replicas", "1", "--bind", f"[::]:{port}"]
    _launch(stack, [*lighthouse, "--quorum_tick_ms", "100", "--join_timeout_ms", "100"], env)
    for number in range(WORKERS):
        words = [python, "-m", "torch.distributed.run", "--nproc-per-node=1", "--max-restarts=9", "--monitor-interval=0.1"]
        words += [f"--master-port={free_port()}", str(WORKER)]
        _launch(stack, words, {**env, "BENCH_REPLICA": str(number), "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"})


def _launch(stack: ExitStack, words: list[str], env: dict[str, str]) -> None:
    with open(env["BENCH_OUTPUT"], "ab") as output:
        process = subprocess.Popen(words, env={**os.environ, **env}, stdout=output, stderr=output, start_new_session=True, cwd=ROOT)
    stack.callback(_end, process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def job(peer: str, start: Start, width: int) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        steps = Path(folder) / "steps"
        steps.touch()
        env = {"BENCH_PEER": peer, "BENCH_STEPS": str(steps), "BENCH_WIDTH": str(width), "BENCH_OUTPUT": f"{folder}/output"}
        start(stack, env)
        try:
            yield steps
        except TimeoutError:
            print(Path(env["BENCH_OUTPUT"]).read_text()[-3000:], file=sys.stderr)
            raise


def read(steps: Path) -> list[Step]:
    lines = [line.split() for line in steps.read_text().splitlines()]
    return [Step(float(at), int(pid), int(workers)) for at, pid, workers in lines]


def all_train(steps: Path, since: float) -> float:
    """Wait until as many processes as there are workers have made a step together since then. Return when they had."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        time.sleep(0.1)
        found: dict[int, float] = {}
        for step in read(steps):
            if step.at > since and step.workers == WORKERS:
                found.setdefault(step.pid, step.at)
        if len(found) == WORKERS:
            return max(found.values())
    raise TimeoutError(f"not all of {WORKERS} workers have trained within {PATIENCE:g} s")


def kill(steps: Path) -> Kill:
    all_train(steps, 0.0)
    time.sleep(BEFORE)
    victim = max({step.pid for step in read(steps)})
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    back = all_train(steps, killed)
    time.sleep(AFTER)
    times = sorted(step.at for step in read(steps) if step.pid != victim)
    return Kill(max(after - before for before, after in pairwise(times) if after > killed), back - killed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchft", metavar="PYTHON", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    peers: dict[str, Start] = {"elastirun": with_elastirun, "torchft": lambda stack, env: with_torchft(given.torchft, stack, env)}
    kills: dict[str, list[Kill]] = {peer: [] for peer in peers}
    for number in range(given.rounds):
        for peer in list(peers)[:: 1 if number % 2 else -1]:
            with job(peer, peers[peer], given.width) as steps:
                kills[peer].append(one := kill(steps))
            print(f"{number + 1}/{given.rounds} {peer}: pause {one.pause:.3f} s, back after {one.back:.2f} s", flush=True)
    for peer, found in kills.items():
        pauses, back = [one.pause for one in found], statistics.median(one.back for one in found)
        middle = f"pause {statistics.median(pauses):.3f} s, back after {back:.2f} s"
        print(f"{peer}: medians of {len(found)}: {middle}; longest pause {max(pauses):.3f} s")
    if given.json:
        given.json.write_text(json.dumps({peer: [asdict(one) for one in found] for peer, found in kills.items()}))


if __name__ == "__main__":
    main()

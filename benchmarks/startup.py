"""Measures the cost of a launcher: seconds from the command to the workers' first line, and CPU time and memory of idle agents.

    python -m benchmarks.startup [--repeat 10] [--watch 10]

Start-up: an empty script on one node with 1 and 2 workers; the launchers take turns. Idle: two nodes with one sleeping worker each.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.lab import ELASTIRUN, ROOT, TORCHRUN, Bench, Launcher, machine, shown, table

EMPTY = 'import os, time\nos.write(1, b"%f\\n" % time.monotonic())\n'  # one write, so that two workers cannot mix their lines
SLEEPER = """
import json, os, socket, time
bench = socket.socket(socket.AF_UNIX)
bench.connect(os.environ["BENCH_SOCKET"])
who = dict(node=os.environ["BENCH_NODE"], pid=os.getpid(), rank=int(os.environ["RANK"]), world=int(os.environ["WORLD_SIZE"]), attempt="")
for fields in {"at": time.monotonic(), **who}, {"at": time.monotonic()}:
    bench.sendall(json.dumps(fields).encode() + b"\\n")
time.sleep(3600)
"""


def start_up(launcher: Launcher, workers: int, script: Path) -> tuple[float, float]:
    """Return the seconds from the command to the last worker's first line, and to the end of the command."""
    began = time.monotonic()
    command = launcher.command("--standalone", f"--nproc-per-node={workers}", str(script))
    lines = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    ended = time.monotonic()
    assert len(lines) == workers, lines
    return max(map(float, lines)) - began, ended - began


def idle_arguments(node: int, port: int | str, script: str) -> list[str]:
    where = [f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf=is_host={int(node == 1)}", f"--local-addr=127.0.0.{node}"]
    return ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=bench", *where, script]


def idle(launcher: Launcher, script: Path, watch: float) -> list[tuple[float, float, int]]:
    """Return for each agent: percent of one CPU over ``watch`` seconds, resident MiB, threads."""
    with Bench(launcher) as bench:
        for node in (1, 2):
            bench.agent(str(node), idle_arguments(node, bench.port, str(script)))
        if not bench.wait(lambda: bench.world(2) is not None, 120.0):
            raise SystemExit(f"{launcher.name}: two nodes did not come up\n{bench.tails()}")
        bench.wait(lambda: False, 2.0)  # the end of the start-up is not counted
        agents = [psutil.Process(agent.process.pid) for agent in bench.agents]
        before, began = [sum(agent.cpu_times()[:2]) for agent in agents], time.monotonic()
        bench.wait(lambda: False, watch)
        used, took = [sum(agent.cpu_times()[:2]) for agent in agents], time.monotonic() - began
        memory = [agent.memory_info().rss / 2**20 for agent in agents]
        return [((u - b) / took * 100, m, a.num_threads()) for u, b, m, a in zip(used, before, memory, agents, strict=True)]


def start_up_table(repeat: int, script: Path) -> str:
    rows = [["workers", "launcher", "first line, s: median (best)", "x elastirun", "whole command, s", "x elastirun"]]
    for workers in (1, 2):
        found: dict[Launcher, list[tuple[float, float]]] = {ELASTIRUN: [], TORCHRUN: []}
        for turn in range(repeat + 1):
            for launcher in found:
                took = start_up(launcher, workers, script)
                if turn:  # the first turn fills the caches
                    found[launcher].append(took)
                    print(f"{workers} {launcher.name}: first line {took[0]:.2f} s, end {took[1]:.2f} s", file=sys.stderr, flush=True)
        medians = {launcher: [statistics.median(column) for column in zip(*times, strict=True)] for launcher, times in found.items()}
        for launcher, (first, end) in medians.items():
            best = min(took[0] for took in found[launcher])
            ratios = [f"{own / ours:.1f}" for own, ours in zip((first, end), medians[ELASTIRUN], strict=True)]
            rows.append([str(workers), launcher.name, f"{first:.2f} ({best:.2f})", ratios[0], f"{end:.2f}", ratios[1]])
    return table(rows)


def idle_table(watch: float, script: Path) -> str:
    rows = [["launcher", "agent", f"CPU over {watch:g} s, % of one", "resident, MiB", "threads"]]
    for launcher in (ELASTIRUN, TORCHRUN):
        for who, (cpu, memory, threads) in zip(("host of the store", "other"), idle(launcher, script, watch), strict=True):
            rows.append([launcher.name, who, f"{cpu:.1f}", f"{memory:.0f}", str(threads)])
    return table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--watch", type=float, default=10.0, help="seconds to watch the idle agents")
    chosen = parser.parse_args()
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        empty, sleeper = Path(folder) / "empty.py", Path(folder) / "sleeper.py"
        empty.write_text(EMPTY)
        sleeper.write_text(SLEEPER)
        for launcher in (ELASTIRUN, TORCHRUN):
            print("    " + shown(launcher, ["--standalone", "--nproc-per-node=N", "empty.py"]))
        print("\n" + start_up_table(chosen.repeat, empty) + "\n", flush=True)
        for launcher in (ELASTIRUN, TORCHRUN):
            print("    " + shown(launcher, idle_arguments(1, "PORT", "sleeper.py")))
        print("\n" + idle_table(chosen.watch, sleeper), flush=True)


if __name__ == "__main__":
    main()

"""Kills one of four nodes with two workers each, with a mesh of 2 x 2 x 2 and without one: the time until the next world has stepped.

    python -m benchmarks.mesh_loss [--rounds 5]

With the mesh three nodes have place for one replica of four workers, and the third node waits as a spare; the first step comes after the
groups of the mesh are made. Without it six workers go on. The two take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time

from benchmarks.lab import ELASTIRUN, Bench, machine, meeting, table
from benchmarks.launcher import TRAINING, WORKER, outcome, settle

MESH = "--mesh=dp=auto,pp=2,tp=2"
KINDS = {"without a mesh": ((), 6), "dp=auto,pp=2,tp=2": ((MESH,), 4)}


def lose_node(options: tuple[str, ...], left: int) -> float:
    """Return the seconds from the kill of an agent and its workers to the first step of a world of ``left`` workers."""
    with Bench(ELASTIRUN) as bench:
        for node in (1, 2, 3, 4):
            ways = ["--nnodes=1:4", "--nproc-per-node=2", "--max-restarts=3", *meeting(node, bench.port), *options]
            bench.agent(str(node), [*ways, str(WORKER)], env=TRAINING)
        settle(bench, 8)
        since = time.monotonic()
        bench.kill(bench.agents[3], workers_too=True)
        found = outcome(bench, left, since, 120.0)
        assert found.value is not None, bench.tails()
        return found.value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print(machine(), flush=True)
    found: dict[str, list[float]] = {name: [] for name in KINDS}
    for turn in range(rounds):
        for name in list(KINDS)[:: 1 if turn % 2 else -1]:
            found[name].append(lose_node(*KINDS[name]))
            print(f"{turn + 1}/{rounds} {name}: {found[name][-1]:.3f}", flush=True)
    rows = [["", "kill -9 of a node -> first step, s: min / median / max"]]
    rows += [[name, " / ".join(f"{value:.2f}" for value in (min(own), statistics.median(own), max(own)))] for name, own in found.items()]
    print("\n" + table(rows))


if __name__ == "__main__":
    main()

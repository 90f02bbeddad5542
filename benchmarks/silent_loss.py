"""Measures how long the other nodes need for a new round after the link of one node went down.

    python -m benchmarks.silent_loss [--repeat 5] [--torchrun 1] [--cap 120]

Three hosts made of network namespaces (as root, with iproute2), with one gloo worker each. The link of a host other than the store host
goes down: no connection is closed. elastirun promises that the survivors' new workers start within expire + 2 s.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lab import ELASTIRUN, TORCHRUN, WORKER, Bench, Launcher, machine, seconds, shown, table
from tests.support import hosts

LOST = 2  # the host whose link goes down; host 0 is the store host
PATIENCE = 120.0  # seconds for the first start, which every launcher must manage; far above the usual 10 s, for a busy machine


@dataclass(frozen=True)
class Loss:
    """Seconds from the loss until all new workers of the survivors had started, and had made a step; None: never."""

    started: float | None
    stepped: float | None


def arguments(address: str) -> list[str]:
    return [
        "--nnodes=1:3",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=h0:29400",
        "--rdzv-id=bench",
        f"--local-addr={address}",
        str(WORKER),
    ]


def lose_one(launcher: Launcher, cap: float) -> Loss:
    with tempfile.TemporaryDirectory() as folder, hosts.made(3, Path(folder)) as made, Bench(launcher) as bench:
        for host in made.hosts:
            bench.agent(host.name, arguments(host.address), prefix=host.inside())
        if not bench.wait(lambda: bench.world(3, steps=3) is not None, PATIENCE):
            raise SystemExit(f"{launcher.name}: three hosts did not come up\n{bench.tails()}")
        since = time.monotonic()
        made.cut(LOST)
        stepped = bench.first_step(2, since, cap)
        started = [w.started for w in bench.workers if w.started > since and w.node != made[LOST].name]
        if launcher is ELASTIRUN and stepped is None:
            print(bench.tails())
        return Loss(max(started) - since if len(started) >= 2 else None, None if stepped is None else stepped - since)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="how often for elastirun")
    parser.add_argument("--torchrun", type=int, default=1, help="how often for torchrun")
    parser.add_argument("--cap", type=float, default=120.0, help="seconds after which something counts as never")
    chosen = parser.parse_args()
    if reason := hosts.missing():
        raise SystemExit(f"no network namespaces here: {reason}")
    print(machine(), flush=True)
    rows = [["launcher", "times", "new workers started, s: median (each)", "new world's first step, s", f"never in {chosen.cap:g} s"]]
    for launcher, times in ((ELASTIRUN, chosen.repeat), (TORCHRUN, chosen.torchrun)):
        print("    " + shown(launcher, arguments("ADDRESS")), flush=True)
        found = [lose_one(launcher, chosen.cap) for _ in range(times)]
        started = [loss.started for loss in found if loss.started is not None]
        stepped = [loss.stepped for loss in found if loss.stepped is not None]
        rows.append([launcher.name, str(times), seconds(started), seconds(stepped), f"{times - len(stepped)} of {times}"])
    print("\n" + table(rows))


if __name__ == "__main__":
    main()

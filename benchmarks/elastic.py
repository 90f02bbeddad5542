"""Compares the life of an elastic job under elastirun and torchrun: it grows, loses a worker, an agent and a node, and gets the node back.

    python -m benchmarks.elastic [--repeat 3] [--cap 120] [--only grow ...] [--launchers elastirun torchrun torchrun-unshared]

Three agents on loopback addresses, one gloo worker each, the same command line under each launcher. Every scenario is a job of
its own, repeated with the launchers taking turns. "torchrun, unshared" has TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which
torchrun 2.13 cannot grow.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.lab import ELASTIRUN, LAUNCHERS, WORKER, Bench, Launcher, machine, seconds, shown, table

PATIENCE = 120.0  # seconds for steps that every launcher must manage; far above the usual 10 s, for a busy machine


@dataclass(frozen=True)
class Result:
    """The outcome of a scenario. ``took``: seconds; None: it did not happen. ``note``: what happened, in words."""

    took: float | None
    note: str = ""


def arguments(node: int, port: int | str) -> list[str]:
    return [
        "--nnodes=1:3",
        "--nproc-per-node=1",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-id=bench",
        f"--rdzv-conf=is_host={int(node == 1)}",
        f"--local-addr=127.0.0.{node}",
        str(WORKER),
    ]


def start(bench: Bench, *nodes: int) -> None:
    for node in nodes:
        bench.agent(str(node), arguments(node, bench.port))


def whole_world(bench: Bench) -> float:
    """Start all three nodes at once, and return the moment at which all of them step."""
    start(bench, 1, 2, 3)
    if bench.first_step(3, 0.0, PATIENCE) is None:
        raise SystemExit(f"{bench.launcher.name}: three nodes at once did not come up\n{bench.tails()}")
    return time.monotonic()


def outcome(bench: Bench, size: int, since: float, cap: float) -> Result:
    """Return the time from ``since`` until a new world of ``size`` steps."""
    at = bench.first_step(size, since, cap)
    again = sum(w.node == "1" and w.started > since for w in bench.workers)
    if at is not None:
        return Result(at - since, "1 new round" if again == 1 else f"{again} new rounds")
    if bench.lost:
        return Result(None, f"job lost after {time.monotonic() - since:.0f} s")
    going = sorted({w.node for w in bench.workers if w.alive and w.started < since and w.last_step and w.last_step > since + 5})
    still = f"; the old workers of nodes {', '.join(going)} step on" if going else ""
    return Result(None, f"not within {cap:.0f} s{still}")


def first(bench: Bench, cap: float) -> Result:
    """Measure one node of 1:3 alone, from the command to its first step."""
    since = time.monotonic()
    start(bench, 1)
    return outcome(bench, 1, since, cap)


def grow(bench: Bench, cap: float) -> Result:
    """Start two more nodes while one steps."""
    start(bench, 1)
    bench.first_step(1, 0.0, PATIENCE)
    since = time.monotonic()
    start(bench, 2, 3)
    return outcome(bench, 3, since, cap)


def worker(bench: Bench, cap: float) -> Result:
    """Kill the worker of node 2 with SIGKILL."""
    since = whole_world(bench)
    bench.kill_workers(lambda w: w.node == "2")
    return outcome(bench, 3, since, cap)


def agent(bench: Bench, cap: float) -> Result:
    """Kill only the agent of node 3 with SIGKILL."""
    since = whole_world(bench)
    bench.kill(bench.agents[2], workers_too=False)
    return outcome(bench, 2, since, cap)


def node(bench: Bench, cap: float) -> Result:
    """Kill agent and worker of node 3 with SIGKILL, as when the machine dies."""
    since = whole_world(bench)
    bench.kill(bench.agents[2], workers_too=True)
    return outcome(bench, 2, since, cap)


def back(bench: Bench, cap: float) -> Result:
    """Start the lost node again once the others step without it."""
    lost = whole_world(bench)
    bench.kill(bench.agents[2], workers_too=True)
    if bench.first_step(2, lost, cap) is None:
        return Result(None, "the others did not go on without it")
    since = time.monotonic()
    start(bench, 3)
    return outcome(bench, 3, since, cap)


SCENARIOS: dict[str, tuple[str, Callable[[Bench, float], Result]]] = {
    "first": ("start one node of 1:3", first),
    "grow": ("(a) two more nodes in a burst", grow),
    "worker": ("(b) kill -9 of a worker", worker),
    "agent": ("(c) kill -9 of an agent alone", agent),
    "node": ("(c) kill -9 of agent and worker", node),
    "back": ("(d) the killed node comes back", back),
}


def measure(names: list[str], launchers: list[Launcher], repeat: int, cap: float) -> dict[tuple[str, str], list[Result]]:
    results: dict[tuple[str, str], list[Result]] = {}
    for name in names:
        for turn in range(repeat):
            for launcher in launchers:
                with Bench(launcher) as bench:
                    result = SCENARIOS[name][1](bench, cap)
                    results.setdefault((name, launcher.name), []).append(result)
                    took = "-" if result.took is None else f"{result.took:.2f} s"
                    print(f"{name} {turn + 1}/{repeat} {launcher.name}: {took} {result.note}", file=sys.stderr, flush=True)
                    if launcher is ELASTIRUN and result.took is None:
                        print(bench.tails(), file=sys.stderr, flush=True)
    return results


def report(results: dict[tuple[str, str], list[Result]], launchers: list[Launcher]) -> str:
    rows = [["scenario", "launcher", "seconds: median (each)", "x elastirun", "what happened"]]
    for name in dict.fromkeys(name for name, _ in results):
        medians = {}
        for launcher in launchers:
            found = results[name, launcher.name]
            took = [r.took for r in found if r.took is not None]
            medians[launcher.name] = statistics.median(took) if took else None
            own, ours = medians[launcher.name], medians.get(ELASTIRUN.name)
            ratio = f"{own / ours:.1f}" if own and ours else "-"
            count = "" if len(took) == len(found) else f"{len(took)} of {len(found)} times: "
            notes = ", ".join(dict.fromkeys(r.note for r in found))
            rows.append([SCENARIOS[name][0] if launcher is launchers[0] else "", launcher.name, seconds(took), ratio, count + notes])
    return table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--cap", type=float, default=120.0, help="seconds after which something counts as never")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS))
    chosen = parser.parse_args()
    launchers = [LAUNCHERS[name] for name in chosen.launchers]
    print(machine(), flush=True)
    for launcher in launchers:
        print("    " + shown(launcher, arguments(1, "PORT")), flush=True)
    print("    (nodes 2 and 3: is_host=0, their own --local-addr)\n", flush=True)
    print(report(measure(chosen.only, launchers, chosen.repeat, chosen.cap), launchers), flush=True)


if __name__ == "__main__":
    main()

"""Random histories of the rendezvous in a simulated world; the first that breaks a promise is shrunk.

    python -m tests.sim --seeds 0:2000          how many held, and the first that did not, shrunk
    python -m tests.sim --replay 1234           one seed, with its transcript
    python -m tests.sim --succession --seeds 0:2000
                                                of these seeds only those with --store-succession, about one in six: the store's
                                                host dies, the network is torn, loops and machines stand still (docs/decisions/0020)
    python -m tests.sim --meshed --seeds 0:2000
                                                of these seeds only those with --mesh, about one in seven
    python -m tests.sim --scaled --seeds 0:2000
                                                the same with more nodes and calls of `elastirun scale`
    python -m tests.sim --takeovers --seeds 0:2000
    python -m tests.sim --torn --seeds 0:2000
                                                the same in small worlds, soon and quickly: see tests/sim/takeovers.py

In those with odd seeds the lists of members count as large.

PyPy 3.11 runs them 1.6 times as fast after the first hundred, with the same transcripts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial

from tests.sim import history, takeovers
from tests.sim.history import History, Plan, shrink

WORLDS = {takeovers.TROUBLE: " --takeovers", takeovers.TORN_FOR: " --torn"}  # the option by the seconds of faults
Check = Callable[[int], tuple[int, str | None, int]]


def large(plan: Plan) -> Plan:
    """Let the lists of members count as large in every other history."""
    return replace(plan, large_lists=plan.seed % 2 == 1)


def check(draw: Callable[[int], Plan], seed: int) -> tuple[int, str | None, int]:
    result = History(large(draw(seed))).run()
    return seed, result.violation, result.rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:2000", metavar="FROM:TO")
    parser.add_argument("--replay", type=int, metavar="SEED")
    parser.add_argument("--succession", action="store_true", help="only those seeds in whose history another node may take over the store")
    parser.add_argument("--meshed", action="store_true", help="only those seeds in whose history the workers form a mesh")
    parser.add_argument("--scaled", action="store_true", help="elastirun scale is called meanwhile")
    parser.add_argument("--takeovers", action="store_true", help="small worlds in which the store's host dies soon")
    parser.add_argument("--torn", action="store_true", help="small worlds in which the network is torn for long")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--brief", action="store_true", help="one line about the first seed that fails")
    parser.add_argument("--keep-going", action="store_true", help="report every seed that fails, not only the first")
    arguments = parser.parse_args()
    draw = (
        history.scaled
        if arguments.scaled
        else takeovers.draw
        if arguments.takeovers
        else takeovers.torn
        if arguments.torn
        else history.draw
    )
    if arguments.replay is not None:
        sys.exit(replay(large(draw(arguments.replay))))
    first, last = map(int, arguments.seeds.split(":"))
    seeds = [seed for seed in range(first, last) if not arguments.succession or draw(seed).rules.succession]
    seeds = [seed for seed in seeds if not arguments.meshed or draw(seed).rules.mesh_text]
    began, bad, rounds = time.monotonic(), 0, 0
    for seed, violation, formed in results(partial(check, draw), seeds, arguments.jobs):
        rounds += formed
        if violation is not None:
            bad += 1
            print(f"seed {seed}: {violation}", flush=True)
            if arguments.brief:
                sys.exit(1)
            if not arguments.keep_going:
                sys.exit(replay(large(draw(seed)), quiet=True))
    print(f"{len(seeds)} histories, {rounds} rounds, {bad} violations in {time.monotonic() - began:.1f} s")
    sys.exit(bool(bad))


def results(check: Check, seeds: list[int], jobs: int) -> Iterable[tuple[int, str | None, int]]:
    if jobs == 1:
        yield from map(check, seeds)
    else:
        with ProcessPoolExecutor(jobs) as pool:
            yield from pool.map(check, seeds, chunksize=50)


def replay(plan: Plan, quiet: bool = False) -> int:
    result = History(plan).run(transcript=True)
    if result.violation is not None:
        plan = shrink(plan, lambda fewer: History(fewer).run().violation is not None)
        result = History(plan).run(transcript=True)
    show(plan)
    print("\n".join(result.transcript[-60:] if quiet else result.transcript))
    scaled = " --scaled" if any(fault.kind == "scale" for fault in plan.faults) else ""
    again = f"python -m tests.sim{WORLDS.get(plan.trouble, scaled)} --replay {plan.seed}"
    print(f"seed {plan.seed}: {result.violation or 'held'}; again with: {again}")
    return int(result.violation is not None)


def show(plan: Plan) -> None:
    rules = plan.rules
    print(f"{plan.nodes} nodes, {rules.settings}, store {'hosted by n0' if plan.hosted else 'outside'}, grace {rules.store_grace:g}")
    print("\n".join(f"  fault at {fault}" for fault in plan.faults) or "  no faults")


if __name__ == "__main__":
    main()

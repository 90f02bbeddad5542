"""Compares the life of a job under elastirun and torchrun: its start, the loss of a worker, an agent or a node, growth, and its end.

    python -m benchmarks.launcher [--rounds 10] [--rows ROW ...] [--launchers NAME ...] [--cap 120] [--json FILE] [--svg FILE] [--markdown]
    python -m benchmarks.launcher --read FILE ... [--svg FILE] [--markdown] [--publish]     # without a new run

Agents have loopback addresses, workers all-reduce one number over gloo and make a step of an optimizer; the same command line under
each launcher. Every job is repeated ``--rounds`` times, with the launchers taking turns in another order each time. A row in which a
launcher did not manage three jobs of three is not tried again with it.

"elastirun, kept warm" has --keep-warm, which concerns the start alone; each of its jobs runs once before it is measured.

"torchrun, unshared" has TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which torchrun 2.13 cannot grow. "elastirun, executed" has
--preload=off. ``--publish`` writes the tables of README.md and benchmarks/README.md, and docs/launcher.svg.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import costs
from benchmarks.lab import LAUNCHERS, ROOT, WARM, WORKER, Bench, Launcher, Worker, machine, meeting, shown
from benchmarks.launcher_report import ROWS, Result, Run, conditions, picture, results_table, write_page

PATIENCE = 120.0  # seconds for a job to come up where this is not measured; far above the usual 10 s, for a busy machine
WAITING = 10.0  # seconds until an agent that nobody needs yet waits as a spare, with what it has to import; far above the usual 4 s
SETTLE = 2.0  # seconds for which a job runs before something is done to it: what follows its start has ended by then
GIVE_UP = 3  # jobs in a row that a launcher did not manage, after which the row is not tried again
TRAINING = {"BENCH_OPTIMIZER": "1"}
IDLE = {"BENCH_OPTIMIZER": "1", "BENCH_IDLE": "1"}
OF_START = {"start-1", "first-line", "start-2", "exit", "start-4"}  # the rows that --keep-warm concerns
WARM_UP = "import torch._dynamo, torch.distributed.run, elastirun.agent.agent"


@dataclass(frozen=True)
class Settings:
    cap: float = 120.0  # seconds after which something counts as never
    watch: float = 30.0  # seconds to watch idle agents
    idle_workers: int = 8  # those whose memory is measured


class JobNotUp(Exception):
    """A job did not come up, so that nothing could be done to it."""


Rows = Iterator[tuple[str, Result]]  # name of a row and what was measured, in the order in which things happen to one job
Scenario = Callable[[Bench, Settings], Rows]


# -- jobs -------------------------------------------------------------------------------------------------------------


def on_one_node(workers: int | str) -> list[str]:
    return ["--standalone", f"--nproc-per-node={workers}", "--max-restarts=3", str(WORKER)]


def on_nodes(node: int, nodes: str, port: int | str) -> list[str]:
    return [f"--nnodes={nodes}", "--nproc-per-node=1", "--max-restarts=3", *meeting(node, port), str(WORKER)]


def start(bench: Bench, nodes: str, *which: int, env: dict[str, str] = TRAINING) -> None:
    for node in which:
        bench.agent(str(node), on_nodes(node, nodes, bench.port), env=env)


def settle(bench: Bench, size: int) -> None:
    """Wait until a world of ``size`` has stepped, and let the job run for a moment. Raises JobNotUp."""
    if bench.first_step(size, 0.0, PATIENCE) is None:
        raise JobNotUp(bench.tails())
    bench.wait(lambda: False, SETTLE)


def outcome(bench: Bench, size: int, since: float, cap: float) -> Result:
    """Return the time from ``since`` until a new world of ``size`` has stepped."""
    at = bench.first_step(size, since, cap)
    if at is not None:
        return Result(at - since)
    if bench.lost:
        return Result(None, "job lost", time.monotonic() - since)
    going = any(w.alive and w.started < since and w.last_step and w.last_step > since + 5 for w in bench.workers)
    return Result(None, f"not within {cap:g} s" + (", old workers step on" if going else ""))


# -- scenarios --------------------------------------------------------------------------------------------------------


def begin_and_end(workers: int, bench: Bench, settings: Settings) -> Rows:
    """Run a job of one node from its command to its end."""
    since = time.monotonic()
    agent = bench.agent("1", on_one_node(workers), env=TRAINING)
    yield f"start-{workers}", outcome(bench, workers, since, settings.cap)
    if workers == 1:
        yield "first-line", Result(bench.workers[0].started - since)
    bench.end_workers()
    deadline = time.monotonic() + settings.cap
    while agent.ended is None and time.monotonic() < deadline:
        bench.listen(0.1)
    took = agent.ended - max(w.ended or 0.0 for w in bench.workers) if agent.ended is not None else None
    yield "exit", Result(took, "" if took is not None else f"not within {settings.cap:g} s")


def lose_worker_of_a_node(bench: Bench, settings: Settings) -> Rows:
    """Kill one of the two workers of a node with SIGKILL."""
    bench.agent("1", on_one_node(2), env=TRAINING)
    settle(bench, 2)
    yield "kill", kill_worker(bench, settings)


def lose_worker_of_two_nodes(bench: Bench, settings: Settings) -> Rows:
    """Kill the worker of one of two nodes with SIGKILL."""
    start(bench, "2", 1, 2)
    settle(bench, 2)
    yield "kill-nodes", kill_worker(bench, settings)


def kill_worker(bench: Bench, settings: Settings) -> Result:
    """Kill rank 1 of a world of two."""
    since = time.monotonic()
    bench.kill_workers(lambda worker: worker.rank == 1)
    return outcome(bench, 2, since, settings.cap)


def lose_agent(bench: Bench, settings: Settings) -> Rows:
    """Kill only an agent with SIGKILL."""
    start(bench, "1:3", 1, 2, 3)
    settle(bench, 3)
    since = time.monotonic()
    bench.kill(bench.agents[2], workers_too=False)
    yield "agent", outcome(bench, 2, since, settings.cap)


def lose_and_replace_node(bench: Bench, settings: Settings) -> Rows:
    """Kill an agent and its worker with SIGKILL, as when the machine dies; then start the node again."""
    start(bench, "1:3", 1, 2, 3)
    settle(bench, 3)
    since = time.monotonic()
    bench.kill(bench.agents[2], workers_too=True)
    yield "node", outcome(bench, 2, since, settings.cap)
    bench.wait(lambda: False, SETTLE)
    since = time.monotonic()
    start(bench, "1:3", 3)
    yield "replaced", outcome(bench, 3, since, settings.cap)


def lose_node_beside_spare(bench: Bench, settings: Settings) -> Rows:
    """Kill an agent and its worker with SIGKILL while one more agent waits to take their place."""
    start(bench, "1:3", 1, 2, 3)
    settle(bench, 3)
    start(bench, "1:3", 4)
    bench.wait(lambda: False, WAITING)
    since = time.monotonic()
    bench.kill(bench.agents[2], workers_too=True)
    yield "spare", outcome(bench, 3, since, settings.cap)


def grow(bench: Bench, settings: Settings) -> Rows:
    """Start one node of two, and the other one while it trains."""
    since = time.monotonic()
    start(bench, "1:2", 1)
    yield "alone", outcome(bench, 1, since, settings.cap)
    bench.wait(lambda: False, SETTLE)
    since = time.monotonic()
    start(bench, "1:2", 2)
    yield "join", outcome(bench, 2, since, settings.cap)
    before = max(w.last_step or 0.0 for w in bench.workers if w.world == 1)
    after = min(w.first_step or 0.0 for w in bench.world(2, since) or () if w.node == "1")
    yield "stall", Result(after - before)


def leave(bench: Bench, settings: Settings) -> Rows:
    """Stop one of three agents with SIGTERM."""
    start(bench, "1:3", 1, 2, 3)
    settle(bench, 3)
    since = time.monotonic()
    bench.agents[2].process.terminate()
    yield "leave", outcome(bench, 2, since, settings.cap)


def idle_agents(bench: Bench, settings: Settings) -> Rows:
    """Watch two agents, their guards and fork servers while their workers sleep."""
    start(bench, "2", 1, 2, env=IDLE)
    settle(bench, 2)
    pids = [pid for agent in bench.agents for pid in launcher_processes(agent.process.pid, bench.workers)]
    began, cpu, woken = time.monotonic(), costs.cpu_seconds(pids), costs.wake_ups(pids)
    bench.wait(lambda: False, settings.watch)
    took = (time.monotonic() - began) * len(bench.agents)
    yield "idle-cpu", Result((costs.cpu_seconds(pids) - cpu) / took * 60)
    yield "idle-wake-ups", Result((costs.wake_ups(pids) - woken) / took)


def idle_workers(bench: Bench, settings: Settings) -> Rows:
    """Measure the memory of workers that have made a step and sleep, with that of their fork server; then the launcher's own."""
    agent = bench.agent("1", on_one_node(settings.idle_workers), env=IDLE)
    settle(bench, settings.idle_workers)
    own = launcher_processes(agent.process.pid, bench.workers)
    servers = {pid for pid, line in own.items() if "forkserver" in line}
    yield "memory", Result(costs.memory(servers | {w.pid for w in bench.workers if w.alive}))
    yield "memory-launcher", Result(costs.memory(own.keys() - servers))


def launcher_processes(agent: int, workers: Sequence[Worker]) -> dict[int, str]:
    """Return the agent and its descendants except the workers: pid to command line."""
    pids = {worker.pid for worker in workers}
    return {pid: line for pid, line in costs.process_tree(agent).items() if pid not in pids}


SCENARIOS: dict[tuple[str, ...], Scenario] = {  # by the rows that a scenario yields, in this order
    ("start-1", "first-line"): partial(begin_and_end, 1),
    ("start-2", "exit"): partial(begin_and_end, 2),
    ("start-4",): partial(begin_and_end, 4),
    ("kill",): lose_worker_of_a_node,
    ("kill-nodes",): lose_worker_of_two_nodes,
    ("agent",): lose_agent,
    ("node", "replaced"): lose_and_replace_node,
    ("spare",): lose_node_beside_spare,
    ("alone", "join", "stall"): grow,
    ("leave",): leave,
    ("idle-cpu", "idle-wake-ups"): idle_agents,
    ("memory", "memory-launcher"): idle_workers,
}


# -- a run ------------------------------------------------------------------------------------------------------------


@contextmanager
def kept_warm() -> Iterator[None]:
    """Keep the warm servers of this run in a folder of their own, and end them."""
    with tempfile.TemporaryDirectory(prefix="elastirun-bench-warm-") as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        try:
            yield
        finally:
            subprocess.run([sys.executable, "-m", "elastirun", "warm", "stop"], cwd=ROOT, capture_output=True)


def run_job(rows: Sequence[str], scenario: Scenario, launcher: Launcher, settings: Settings) -> dict[str, Result]:
    """Return what was measured for the ``rows``, the last of which ends the job. What did not come up ends it, too."""
    found: dict[str, Result] = {}
    otherwise = Result(None, "not reached")
    with Bench(launcher) as bench:
        try:
            for row, result in scenario(bench, settings):
                found[row] = result
                if result.note == "job lost":
                    otherwise = result
                if result.value is None or not set(rows) - found.keys():
                    break
        except JobNotUp as problem:
            print(f"{launcher.name}: the job did not come up\n{problem}", file=sys.stderr, flush=True)
        if launcher.module == "elastirun" and any(result.value is None for result in found.values()):
            print(bench.tails(), file=sys.stderr, flush=True)
    return {row: found.get(row, otherwise) for row in rows}


def given_up(results: Sequence[Result]) -> bool:
    return len(results) >= GIVE_UP and all(result.value is None for result in results)


def measure(run: Run, rows: Sequence[str], launchers: Sequence[Launcher], settings: Settings, rounds: int) -> Iterator[None]:
    """Add the results of ``rounds`` to the run. Yields after each scenario."""
    for turn in range(rounds):
        for all_rows, scenario in SCENARIOS.items():
            first = turn % len(launchers)
            for launcher in (*launchers[first:], *launchers[:first]):
                if launcher is WARM and not {*all_rows} <= OF_START:
                    continue
                if launcher is WARM and {*all_rows} & {*rows}:  # in each round: the last one may be longer ago than servers stay
                    run_job(all_rows, scenario, launcher, settings)
                wanted = [row for row in all_rows if row in rows and not given_up(run.of(row, launcher.name))]
                for row, result in run_job(wanted, scenario, launcher, settings).items() if wanted else ():
                    run.add(row, launcher.name, result)
                    print(f"{turn + 1}/{rounds} {row}, {launcher.name}: {result}", file=sys.stderr, flush=True)
            yield


def new_run(options: argparse.Namespace, launchers: Sequence[Launcher]) -> Run:
    """Describe the run before it begins."""
    ways = [on_one_node("N"), on_nodes(1, "MIN:MAX", "PORT")]
    commands = {launcher.name: [shown(launcher, way).replace(f"{ROOT}/", "") for way in ways] for launcher in launchers}
    return Run(machine(), time.strftime("%Y-%m-%d"), [launcher.name for launcher in launchers], commands, options.idle_workers)


def new_results(options: argparse.Namespace) -> Run:
    """Run what the options select. A run that SIGINT or SIGTERM ends returns what it has; ``--json`` is written after each scenario."""
    launchers = [LAUNCHERS[name] for name in options.launchers]
    run = new_run(options, launchers)
    settings = Settings(options.cap, options.watch, options.idle_workers)
    try:
        subprocess.run([sys.executable, "-c", WARM_UP], cwd=ROOT, check=True)  # what every start reads is in the page cache afterwards
        with kept_warm():
            for _ in measure(run, options.rows, launchers, settings, options.rounds):
                if options.json:
                    options.json.write_text(run.to_json())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    return run


def read(files: Sequence[Path]) -> Run:
    """Return the results of all ``files`` as one run, which has the date of the first."""
    run, *others = [Run.from_json(file.read_text()) for file in files]
    for other in others:
        run.take_in(other)
    return run


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS), metavar="NAME", help=", ".join(LAUNCHERS))
    parser.add_argument("--cap", type=float, default=Settings.cap, help="seconds after which something counts as never")
    parser.add_argument("--watch", type=float, default=Settings.watch, help="seconds to watch idle agents")
    parser.add_argument("--idle-workers", type=int, default=Settings.idle_workers, help="workers of the row memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every value, medians and ratios")
    parser.add_argument("--read", type=Path, nargs="+", metavar="FILE", help="take the values from files of --json, and run nothing")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the rows that are seconds")
    parser.add_argument("--markdown", action="store_true", help="print the table alone")
    parser.add_argument("--publish", action="store_true", help="write the tables of the pages, and docs/launcher.svg")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    run = read(options.read) if options.read else new_results(options)
    if options.svg:
        options.svg.write_text(picture(run))
    if options.publish:
        (ROOT / "docs" / "launcher.svg").write_text(picture(run))
        for page in (ROOT / "README.md", ROOT / "benchmarks" / "README.md"):
            write_page(page, run)
    if not options.markdown:
        print(conditions(run) + "\n")
        print("\n".join(f"    {command}" for commands in run.commands.values() for command in commands) + "\n")
    print(results_table(run, options.rows))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a run that is stopped ends its job, and reports what it has
    main()

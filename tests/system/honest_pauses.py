"""Run real jobs that pause for good reasons, under ``--hang-timeout=auto``. No hang may be reported, and no round may end.

    python -m tests.system.honest_pauses [--tries 10] [--seed 1] [--kinds stalls,debugger] [--at-once 5]

Times are a twentieth of those of a real training: the shortest limit of these agents is 3 s in place of 60 s (``hangs.LEAST_LIMIT``).
Each kind is a job of one agent with two workers, which step together. First comes a job that hangs, which must be noticed.
``--at-once``: jobs that run at the same time; with ``load``, which takes every processor, no other runs. Needs the right to trace other
processes of this user.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.cluster import Cluster, cluster
from tests.support.tries import parser, unless

LIMIT = 3.0  # seconds, in place of LEAST_LIMIT
ALARM = "the workers here hang"  # in the output of an agent
PATIENCE = 300.0  # seconds for a job, which takes 10 to 40
AGENT = f"""
from elastirun.agent import hangs
hangs.LEAST_LIMIT, hangs.LONGEST_INTERVAL = {LIMIT}, 0.25
from elastirun.__main__ import main
main()
"""
WORKER = """
import os, pdb, random, socket, sys, threading, time
from elastirun.progress import progress

folder, seed = sys.argv[1:]
rank = int(os.environ["RANK"])
chance = random.Random(seed)  # draws the same on both ranks
path = folder + "/meet" + os.environ["ELASTIRUN_ROUND"]
if rank == 0:
    server = socket.socket(socket.AF_UNIX)
    server.bind(path + ".new")
    server.listen()
    os.rename(path + ".new", path)
    peer = server.accept()[0]
else:
    peer = socket.socket(socket.AF_UNIX)
    while not os.path.exists(path):
        time.sleep(0.01)
    peer.connect(path)

def step(seconds, count=1):
    for _ in range(count):
        time.sleep(seconds * chance.uniform(0.9, 1.1))
        peer.sendall(b"s")
        assert peer.recv(1), "lost a peer"
        progress()

def alone(seconds):
    "The other rank waits for this one."
    if rank == 0:
        time.sleep(seconds)

def ask_for_trouble():
    "Let the test do its part, and step until it is done."
    step(0.05, 60)
    with open(f"{folder}/ready{rank}", "w") as file:
        file.write(str(os.getpid()))
    while True:
        done = os.path.exists(folder + "/done")
        peer.sendall(b"d" if done else b"s")
        if peer.recv(1) == b"d" and done:
            break
        progress()
        time.sleep(0.05)
    step(0.05, 20)

"""


@dataclass(frozen=True)
class Kind:
    """A reason to be slow. ``script``: what the workers do. ``trouble``: what is done to them, by the pids of the agent and its workers."""

    text: str
    script: str
    trouble: Callable[[int, list[int]], None] | None = None


def hold(agent: int, workers: list[int]) -> None:
    """Hold a worker as a debugger does."""
    libc = ctypes.CDLL(None, use_errno=True)
    seize, interrupt, detach, wall = 0x4206, 0x4207, 17, 0x40000000  # of <sys/ptrace.h> and <bits/waitflags.h>
    for request in (seize, interrupt):
        if libc.ptrace(request, workers[0], None, None):
            raise OSError(ctypes.get_errno(), "ptrace")
    os.waitpid(workers[0], wall)
    time.sleep(2 * LIMIT)
    libc.ptrace(detach, workers[0], None, None)


def suspend_all(agent: int, workers: list[int]) -> None:
    suspend(agent, *workers)


def suspend_agent(agent: int, workers: list[int]) -> None:
    """Suspend the agent, with the workers in a pause that is shorter than the limit at its end."""
    suspend(agent)


def suspend(*pids: int) -> None:
    for signum, seconds in ((signal.SIGSTOP, 2 * LIMIT), (signal.SIGCONT, 0.0)):
        for pid in pids:
            os.kill(pid, signum)
        time.sleep(seconds)


KINDS = {
    "evaluation": Kind(
        "an evaluation of 20 steps' time at the end of each epoch",
        "for _ in range(3):\n    step(0.15, 35)\n    time.sleep(3.0)\nstep(0.15)",
    ),
    "compile": Kind(
        "a first step, and one more, that take longer than the shortest limit",
        "time.sleep(6.0)\nstep(0.05, 10)\ntime.sleep(4.0)\nstep(0.05, 60)",
    ),
    "debugger": Kind("a debugger holds a worker for twice the shortest limit", "ask_for_trouble()", hold),
    "pdb": Kind(
        "Python's debugger waits in a worker for five times the shortest limit",
        """
step(0.05, 60)
if rank == 0:
    read, write = os.pipe()
    threading.Timer(15.0, os.write, (write, b"continue\\n")).start()
    with open(os.devnull, "w") as nobody, open(read) as person:
        pdb.Pdb(stdin=person, stdout=nobody).set_trace()
        step(0.05)
else:
    step(0.05)
step(0.05, 20)
""",
    ),
    "load": Kind("every processor is busy, four times over", "for _ in range(200):\n    sum(range(200000))\n    step(0.01)"),
    "checkpoint": Kind(
        "checkpoints that one rank saves, and that grow",
        "for seconds in (1.5, 2.8, 5.0, 9.0):\n    step(0.05, 40)\n    alone(seconds * chance.uniform(0.95, 1.0))\nstep(0.05, 20)",
    ),
    "stalls": Kind(
        "data stalls that grow",
        "for seconds in (0.3, 0.5, 0.9, 1.6, 2.9, 5.2, 9.4):\n    step(0.02, 30)\n    time.sleep(seconds)\nstep(0.02, 30)",
    ),
    "slowdown": Kind("steps that become slower and slower, by a factor of 100", "for i in range(95):\n    step(0.02 * 1.05**i)"),
    "suspended": Kind("agent and workers are suspended for twice the shortest limit", "ask_for_trouble()", suspend_all),
    "agent": Kind("the agent alone is suspended", "ask_for_trouble()", suspend_agent),
    "phases": Kind(
        "phases of the training whose steps take other times",
        "for seconds in (0.01, 0.3, 0.02, 1.5, 0.05, 2.6):\n    step(seconds, 12)\nstep(0.02, 30)",
    ),
    "announced": Kind(
        "pauses between epochs that are announced",
        "for _ in range(2):\n    step(0.05, 40)\n    progress(within=20)\n    time.sleep(8.0)\nstep(0.05, 20)",
    ),
}


HANG = Kind("a worker that never comes back", "step(0.05, 60)\nalone(PATIENCE)\nstep(0.05, 20)".replace("PATIENCE", str(PATIENCE)))


def run(kind: Kind, seed: int, busily: bool = False) -> list[str]:
    """Run a job; with ``busily`` other programs take every processor. Return what went wrong."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pauses-")))
        nodes = stack.enter_context(cluster(folder))
        nodes.script.write_text(WORKER + kind.script)
        if busily:
            busy(stack)
        options = ("--standalone", "--nproc-per-node=2", "--hang-timeout=auto")
        agent = nodes.launch(1, *options, str(nodes.script), str(folder), str(seed), program=("-c", AGENT))
        if kind.trouble:
            kind.trouble(agent.pid, await_workers(nodes, agent))
            (folder / "done").touch()
        code = nodes.ends(agent, PATIENCE)
        wrong = unless((code == 0, f"exit code {code}"), (ALARM not in nodes.out(1), "an alarm"))
        return [*wrong, nodes.everything()] if wrong else []


def await_workers(nodes: Cluster, agent: Any) -> list[int]:
    """Return the pids of the workers when both ask for trouble."""
    paths, deadline = [nodes.tmp_path / f"ready{rank}" for rank in (0, 1)], time.monotonic() + PATIENCE
    while not all(path.exists() and path.read_text() for path in paths):
        assert time.monotonic() < deadline and agent.poll() is None, nodes.everything()
        time.sleep(0.05)
    return [int(path.read_text()) for path in paths]


def busy(stack: ExitStack) -> None:
    """Take every processor, four times over, until ``stack`` is closed."""
    for _ in range(4 * (os.cpu_count() or 1)):
        process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        stack.callback(process.wait)
        stack.callback(process.kill)


def main() -> int:
    made = parser(__doc__, 10)
    made.add_argument("--kinds", default=",".join(KINDS), help="some of them, with commas")
    made.add_argument("--at-once", type=int, default=5, metavar="N")
    options = made.parse_args()
    kinds = options.kinds.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        made.error(f"no such kinds: {', '.join(unknown)}")
    chance, alarms = random.Random(options.seed), 0
    seeds = {kind: [chance.randrange(1 << 30) for _ in range(options.tries)] for kind in kinds}
    if "an alarm" not in run(HANG, options.seed):
        raise SystemExit(f"{HANG.text} was not noticed, so that the rest would prove nothing")
    with ThreadPoolExecutor(options.at_once) as beside, ThreadPoolExecutor(1) as by_itself:
        results = {kind: [beside.submit(run, KINDS[kind], seed) for seed in seeds[kind]] for kind in kinds if kind != "load"}
        for waiting in [one for several in results.values() for one in several]:
            waiting.result()
        results |= {kind: [by_itself.submit(run, KINDS[kind], seed, True) for seed in seeds[kind]] for kind in kinds if kind == "load"}
        for kind in kinds:
            wrong = [text for one in results[kind] for text in one.result()]
            failed = sum(bool(one.result()) for one in results[kind])
            text = f"{kind:<10} {KINDS[kind].text:<72} {failed} alarms in {options.tries} runs"
            print(text, *wrong, sep="\n", flush=True)
            alarms += failed
    return int(alarms > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Two nodes with two workers each train through ten faults: the account of each agent adds up, and the report has each fault with its cost.

    python -m tests.system.ten_faults [--keep FOLDER] [--calm 4]

The faults: workers that are killed, raise or exit, two at once, the workers of a node that are stopped (``--hang-timeout``), an agent that
is killed and one that is told to leave, each of them replaced. ``--calm``: seconds of training between two faults. ``--keep``: where the
logs and report.html stay.

The workers count steps, save the number of the last one now and then, and go on from there, so that steps are done again. The sum of each
account must be the time from the start of the agent's process to its end within 1 %, or 0.5 s. What is wrong is printed, and the exit
code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elastirun.report import clocks, reader, story, words
from tests.support.cluster import PATIENCE, free_port

WITHIN = 0.01  # of the time of the agent's process
OUTSIDE = 0.5  # seconds that are always allowed: the start and the end of the interpreter, which count in a life of a few seconds
WORKER = """
import os, signal, sys, time
from elastirun.progress import progress, saving
folder, rank, number = os.environ["TEST_FOLDER"], os.environ["RANK"], os.environ["ELASTIRUN_ROUND"]
saved = os.path.join(folder, "step")
step = int(open(saved).read()) if os.path.exists(saved) else 0
orders = os.path.join(folder, f"order-{number}-{rank}")
time.sleep(0.5)  # imports
while not os.path.exists(os.path.join(folder, "end")):
    step += 1
    time.sleep(0.02)
    progress(step=step)
    if step == 1 or step % 10 == 0:
        open(os.path.join(folder, f"at-{number}-{rank}"), "w").write(f"{os.getpid()} {step}")
    if step % 100 == 0:
        with saving():
            time.sleep(0.05)
            if rank == "0":
                open(saved + ".new", "w").write(str(step))
                os.replace(saved + ".new", saved)
    if os.path.exists(orders):
        order = open(orders).read()
        os.unlink(orders)
        if order == "raise":
            raise ValueError("no data")
        if order == "exit":
            sys.exit(3)
        os.kill(os.getpid(), int(order))
"""
EXPECTED = {"failure": 5, "hang": 1, "lost": 1, "leave": 1, "join": 2}


class Job:
    """Agents of two nodes on loopback addresses. ``folder``: logs, orders and what the agents say."""

    def __init__(self, folder: Path, calm: float) -> None:
        self.folder, self.calm, self.port = folder, calm, free_port()
        self.round = 0  # the newest one that is complete
        self.agents: list[tuple[subprocess.Popen[bytes], float]] = []  # each with the time of its start
        self.took: dict[int, float] = {}  # seconds from start to end by pid
        (folder / "worker.py").write_text(WORKER)

    def start(self, node: int) -> subprocess.Popen[bytes]:
        line = ["--nnodes=1:2", "--nproc-per-node=2", "--rdzv-id=faults", "--max-restarts=9", "--last-call=1", "--hang-timeout=3"]
        line += ["--grace=5", "--set=restart-pause=0"]
        line += [f"--rdzv-endpoint=127.0.0.1:{self.port}", f"--rdzv-conf=is_host={int(node == 0)}", f"--local-addr=127.0.0.{node + 1}"]
        command = [sys.executable, "-m", "elastirun", *line, f"--log-dir={self.folder}/logs", f"{self.folder}/worker.py"]
        began = time.monotonic()
        with open(self.folder / f"said{len(self.agents)}", "wb") as said:
            agent = subprocess.Popen(command, env={**os.environ, "TEST_FOLDER": str(self.folder)}, stdout=said, stderr=said)
        self.agents.append((agent, began))
        return agent

    def await_end(self, agent: subprocess.Popen[bytes]) -> int:
        code = agent.wait(PATIENCE)
        self.took[agent.pid] = time.monotonic() - next(began for one, began in self.agents if one is agent)
        return code

    def training(self, workers: int) -> dict[int, int]:
        """Wait until a newer round of so many workers makes steps, and for the calm. Return the pids by rank."""
        deadline = time.monotonic() + PATIENCE
        while True:
            found: dict[int, dict[int, int]] = {}
            for path in self.folder.glob("at-*"):
                number, rank = map(int, path.name.split("-")[1:])
                words = path.read_text().split()
                if number > self.round and words:
                    found.setdefault(number, {})[rank] = int(words[0])
            newest = max(found, default=0)
            if newest and len(found[newest]) == workers:
                self.round = newest
                time.sleep(self.calm)
                return found[newest]
            assert time.monotonic() < deadline, f"no round with {workers} workers after round {self.round}\n{self.said()}"
            time.sleep(0.05)

    def order(self, rank: int, what: str) -> None:
        path = self.folder / f"order-{self.round}-{rank}"
        Path(f"{path}.new").write_text(what)
        os.replace(f"{path}.new", path)

    def said(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("said*")))


def go_through(job: Job) -> None:
    """Run the job with its ten faults to its end."""
    first, second = job.start(0), job.start(1)
    job.training(4)
    for orders in ({1: "9"}, {2: "raise"}, {0: "exit"}, {1: "9", 3: "9"}, {2: "19", 3: "19"}, {3: "15"}):
        for rank, what in orders.items():
            job.order(rank, what)
        job.training(4)
    second.kill()
    second.wait()
    job.training(2)
    third = job.start(1)
    job.training(4)
    third.terminate()
    assert job.await_end(third) == 143
    job.training(2)
    fourth = job.start(1)
    job.training(4)
    (job.folder / "end").touch()
    assert [job.await_end(agent) for agent in (first, fourth)] == [0, 0], job.said()


@contextlib.contextmanager
def running(folder: Path, calm: float) -> Iterator[Job]:
    job = Job(folder, calm)
    try:
        yield job
    finally:
        for agent, _ in job.agents:
            if agent.poll() is None:
                agent.kill()
                agent.wait()


def accounts(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("logs/*/events.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        yield from (line for line in lines if line["event"] == "account")


def check_accounts(job: Job) -> list[str]:
    """Print each account. Return what is wrong."""
    wrong = []
    lives = sorted(job.took.values(), reverse=True)
    found = sorted(accounts(job.folder), key=lambda one: -one["total"])
    print(f"{'account':>10} {'process':>10} {'parts':>10}  off    seconds by kind")
    for account, life in zip(found, lives, strict=True):
        parts = sum(seconds or 0.0 for seconds in account["seconds"].values())
        off = abs(parts - life) / life
        kinds = ", ".join(f"{kind} {seconds}" for kind, seconds in account["seconds"].items())
        print(f"{account['total']:>10.3f} {life:>10.3f} {parts:>10.3f}  {100 * off:.2f} % {kinds}; lost {account['lost_seconds']}")
        if abs(parts - life) > max(WITHIN * life, OUTSIDE):
            wrong.append(f"an account of {parts:.3f} s of a process that took {life:.3f} s")
    return wrong


def check_report(folder: Path) -> list[str]:
    """Make the report and print its faults. Return what is wrong."""
    told = story.tell(clocks.align(reader.read([str(folder / "logs")]).events))
    print("\n" + "\n".join(words.summary(told)))
    for fault in told.faults:
        print("  ".join(words.fault_row(fault, told)))
    causes = {cause: sum(fault.cause == cause for fault in told.faults) for cause in EXPECTED}
    wrong = [] if causes == EXPECTED else [f"the report has {causes} faults, not {EXPECTED}"]
    wrong += [f"the fault of round {fault.round} has no cost" for fault in told.faults if fault.seconds <= 0]
    command = [sys.executable, "-m", "elastirun", "report", str(folder / "logs"), f"--out={folder}/report.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    return wrong + ([] if done.returncode == 0 else [done.stderr])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--calm", type=float, default=4.0)
    given = parser.parse_args()
    if given.keep and given.keep.exists() and any(given.keep.iterdir()):
        parser.error(f"--keep: {given.keep} is not empty")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            with running(folder, given.calm) as job:
                go_through(job)
                wrong = check_accounts(job)
            wrong += check_report(folder)
        finally:
            if given.keep:
                shutil.copytree(folder, given.keep, dirs_exist_ok=True, symlinks=True)
    print("\n".join(["", *wrong]) if wrong else "\nThe accounts add up, and each fault has its cost.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

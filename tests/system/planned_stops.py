"""Stop a real job as planned, again and again: all ranks must stop after the same step, and the next round goes on exactly there.

    python -m tests.system.planned_stops --tries 50 --seed 1 [--train deterministic|torch|fsdp]

Under torch's DistributedDataParallel and FSDP2 the Checkpointer saves.

A try is one of: SIGTERM to one worker, SIGTERM to an agent, SIGTERM to a worker and then to its agent, an agent that joins.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.cluster import PATIENCE, Cluster, Worker, cluster
from tests.support.tries import Try, parser, show, unless

SCRIPT = """
import itertools, json, os, random, socket, sys, time
import torch, torch.distributed as dist
from torch import nn
from elastirun.train import Checkpointer, DeterministicShards, DistributedDataParallel, Drain, TrainState

torch.set_num_threads(1)
dist.init_process_group("gloo")
module, batch = nn.Linear(8, 8), torch.ones(2, 8)
path, kind = os.path.join(sys.argv[1], "step"), sys.argv[2]
if kind in ("torch", "fsdp"):
    from torch.distributed.fsdp import fully_shard
    model = fully_shard(module) if kind == "fsdp" else nn.parallel.DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    drain, checkpoints, run = Drain(optimizer), Checkpointer(path + "s", every=10), TrainState(model=model, optimizer=optimizer)
    step = checkpoints.restore(run) or 0
else:
    model = DeterministicShards(module, shards=2) if kind == "deterministic" else DistributedDataParallel(module)
    drain, checkpoints = Drain(model), None
    step = int(open(path).read()) if os.path.exists(path) else 0
told = socket.socket(socket.AF_UNIX)
told.connect(os.environ["TEST_SOCKET"])
began = False
while True:
    for _ in model.run((step,), 4, itertools.repeat(batch)) if kind == "deterministic" else [batch]:
        model(batch).sum().backward()
    step += 1
    if checkpoints:
        optimizer.step()
        run.step = step
        checkpoints.save(step, run, now=drain.now)
    if not began:
        told.sendall(json.dumps({**os.environ, "pid": os.getpid(), "step": step - 1}).encode() + b"\\n")
        began = True
    if drain.now:
        break
    time.sleep(random.random() * 0.004)
save = random.random() * 0.3
if checkpoints:
    checkpoints.close(0.8 * drain.seconds_left)
elif dist.get_rank() == 0:
    time.sleep(save)
    with open(path + ".new", "w") as file:
        file.write(str(step))
    os.replace(path + ".new", path)
told.sendall(json.dumps({"stop": step, "left": drain.seconds_left}).encode() + b"\\n")
drain.leave()
"""
KINDS = ("ours", "deterministic", "torch", "fsdp")
WAYS = ("worker", "agent", "both", "join")
GRACE = 20.0


@dataclass
class Stopped:
    """What the workers of one round told when they stopped."""

    steps: list[int | None]  # by rank; None: it told nothing
    left: list[float]


class Story:
    """One job: agent 1, which hosts the store, has two workers; agents 2 and 3 come and go with one each."""

    def __init__(self, nodes: Cluster, seed: int, kind: str) -> None:
        self.nodes, self.random, self.kind = nodes, random.Random(seed), kind
        nodes.script.write_text(SCRIPT)
        self.others: dict[int, Any] = {}  # the agents 2 and 3, while they are there
        self.failures = 0  # restarts that have been paid for: workers that were ended by a signal alone
        self.first = self.start(1)
        self.workers = self.await_round()

    def start(self, i: int) -> Any:
        options = ("--max-restarts=1000", "--last-call=0.1", "--set=restart-pause=0", f"--grace={GRACE:g}")
        options += (f"--log-dir={self.nodes.tmp_path}/logs{i}",)
        where = [f"--rdzv-endpoint=127.0.0.1:{self.nodes.port}", "--rdzv-id=test", f"--rdzv-conf=is_host={int(i == 1)}"]
        size = ["--nnodes=1:3", f"--nproc-per-node={2 if i == 1 else 1}"]
        script = (str(self.nodes.script), str(self.nodes.tmp_path), self.kind)
        return self.nodes.launch(i, *size, *where, f"--local-addr=127.0.0.{i}", *options, *script)

    def await_round(self, after: int = 0) -> list[Worker]:
        return self.nodes.round(2 + len(self.others), after)

    def stop(self, way: str) -> Try:
        """Stop the job in one way; return what follows."""
        if way in ("agent", "both") and not self.others:
            way = "join"
        if way == "join" and len(self.others) == 2:
            way = "agent"
        time.sleep(self.random.random() * 0.2)
        self.to_blame: int | None = None
        target = getattr(self, way)()
        stopped = read(self.workers)
        number = self.workers[0].round
        self.workers = self.await_round(after=number)
        begun = {worker.env["step"] for worker in self.workers}
        restarts = [event["restarts"] for event in self.events(1) if event["event"] == "formed"][-1]
        broken = [event for event in self.events(1) if event["event"] == "broken"][-1]
        if self.to_blame is None:
            right = broken["cause"] in ("leave", "join")
        else:
            right = broken["cause"] == "failure" and f"rank {self.to_blame} " in broken["reason"]
        wrong = unless(
            (len(set(stopped.steps)) == 1 and None not in stopped.steps, f"not one step: {stopped}"),
            (all(GRACE / 2 < left <= GRACE for left in stopped.left), f"other seconds left than the grace: {stopped}"),
            (begun == {stopped.steps[0]}, f"stopped after {stopped.steps}, and went on after {begun}"),
            (restarts == self.failures, f"{restarts} restarts for {self.failures} failures"),
            (right, f"another reason: {broken}"),
        )
        text = f"round {number}: {way} {target}: all {len(stopped.steps)} ranks stopped after step {stopped.steps[0]}"
        return Try(text, [*wrong, self.nodes.everything()] if wrong else [])

    def worker(self) -> str:
        chosen = self.random.choice(self.workers)
        os.kill(chosen.pid, signal.SIGTERM)
        self.failures += 1
        self.to_blame = chosen.rank
        return f"rank {chosen.rank}"

    def agent(self) -> str:
        return self.dismiss(self.random.choice(sorted(self.others)))

    def dismiss(self, i: int) -> str:
        agent = self.others.pop(i)
        agent.send_signal(signal.SIGTERM)
        assert self.nodes.ends(agent) == 143
        return f"agent {i}"

    def both(self) -> str:
        i = self.random.choice(sorted(self.others))
        (rank,) = [event for event in self.events(i) if event["event"] == "round"][-1]["ranks"]
        os.kill(self.workers[rank].pid, signal.SIGTERM)
        time.sleep(0.01)
        return f"rank {rank}, then its {self.dismiss(i)}"

    def join(self) -> str:
        i = min({2, 3} - self.others.keys())
        self.others[i] = self.start(i)
        return f"of agent {i}"

    def end(self) -> list[str]:
        """Stop all agents; return what is wrong then: all workers should stop after the same step once more."""
        for agent in (*self.others.values(), self.first):
            agent.send_signal(signal.SIGTERM)
        codes, stopped = {self.nodes.ends(agent) for agent in (*self.others.values(), self.first)}, read(self.workers)
        return unless((codes == {143}, f"exit codes {codes}"), (len(set(stopped.steps)) == 1, f"not one step: {stopped}"))

    def events(self, i: int) -> list[dict[str, Any]]:
        (path,) = (self.nodes.tmp_path / f"logs{i}").glob(".latest/*/events.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()]


def read(workers: list[Worker]) -> Stopped:
    """Return what the workers tell until they have ended."""
    steps: list[int | None] = []
    left = []
    for worker in workers:
        worker.connection.settimeout(PATIENCE)
        with worker.connection.makefile() as lines:
            told = [json.loads(line) for line in lines]
        steps.append(told[0]["stop"] if told else None)
        left += [line["left"] for line in told]
    return Stopped(steps, left)


def main() -> int:
    options = parser(__doc__, tries=50)
    options.add_argument("--train", choices=KINDS, default=KINDS[0], help="with which module, or class of torch")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="stops-") as folder, cluster(Path(folder)) as nodes:
        story = Story(nodes, arguments.seed, arguments.train)
        for number in range(arguments.tries):
            show(number + 1, story.stop(story.random.choice(WAYS)))
        tries = arguments.tries
        show(tries, Try("the end", story.end()))
    print(f"{tries} of {tries} stops: the same step on all ranks, none replayed; {story.failures} restarts, for workers signalled alone")
    return 0


if __name__ == "__main__":
    sys.exit(main())

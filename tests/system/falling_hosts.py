"""Kill the node that hosts the rendezvous store, again and again, until one node is left, and start the killed ones again.

    python -m tests.system.falling_hosts [--nodes 5] [--tries 3] [--seed 1]

Each try is one job of real agents with ``--store-succession=proof``, a list of all endpoints, no restart, and one worker a node, which
trains under gloo with our data-parallel module, loader and Checkpointer. It stays one run of the job; nodes that go on keep their order,
and one that comes back is last; no restart is used; and of all steps that counted, in each epoch each sample was in one step once.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.support.cluster import Cluster, Worker, cluster, kill
from tests.support.tries import Try, parser, show, unless
from tests.system.test_succession import agent_pid, run_of

SAMPLES = 200
SCRIPT = f"""
import json, os, socket, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset
from elastirun.train import Checkpointer, DistributedDataParallel, ElasticDataLoader, TrainState

torch.set_num_threads(1)
dist.init_process_group("gloo")
folder = sys.argv[1]
module = nn.Linear(1, 1)
model, optimizer = DistributedDataParallel(module), torch.optim.SGD(module.parameters(), lr=1e-9)
loader = ElasticDataLoader(TensorDataset(torch.arange({SAMPLES})), global_batch_size=10)
run, checkpoints = TrainState(model=module, optimizer=optimizer, data=loader), Checkpointer(folder + "/checkpoints", every=7)
checkpoints.restore(run)
steps = open(f"{{folder}}/steps/{{os.environ['ELASTIRUN_ROUND']}}-{{dist.get_rank()}}", "a", buffering=1)
told = None
while True:
    epoch = loader.epoch
    for batches in loader.steps(model):
        seen = []
        optimizer.zero_grad()
        for (ids,) in batches:
            model(ids.float().unsqueeze(1)).sum().backward()
            seen += ids.tolist()
        optimizer.step()
        run.step += 1
        steps.write(json.dumps([run.step, epoch, seen]) + "\\n")
        checkpoints.save(run.step, run)
        if told is None:
            told = socket.socket(socket.AF_UNIX)
            told.connect(os.environ["TEST_SOCKET"])
            told.sendall(json.dumps({{**os.environ, "pid": os.getpid()}}).encode() + b"\\n")
        time.sleep(0.005)
    end = torch.tensor([os.path.exists(folder + "/end")], dtype=torch.float)
    dist.all_reduce(end)
    if end.item():
        break
checkpoints.close()
"""


def agent(nodes: Cluster, i: int, count: int) -> subprocess.Popen[str]:
    where = ",".join(f"127.0.0.{host}:{nodes.port}" for host in range(1, count + 1))
    options = ("--last-call=0.5", "--max-restarts=0", "--store-succession=proof", f"--rdzv-endpoint={where}", "--preload=torch")
    place = (f"--nnodes=1:{count}", "--nproc-per-node=1", "--rdzv-id=test", f"--local-addr=127.0.0.{i}")
    return nodes.launch(i, *place, f"--rdzv-conf=is_host={int(i == 1)}", *options, str(nodes.script), str(nodes.tmp_path))


def play(nodes: Cluster, count: int, chance: random.Random) -> Iterator[str]:
    """Run one job. Yield what was wrong."""
    nodes.script.write_text(SCRIPT)
    (nodes.tmp_path / "steps").mkdir()
    agents = {i: agent(nodes, i, count) for i in range(1, count + 1)}
    workers = nodes.round(count)
    name = run_of(workers)
    order = places(agents, workers)
    for left in range(count - 1, 0, -1):
        time.sleep(chance.uniform(0.0, 1.0))
        kill(agents.pop(order[0]))
        workers = nodes.round(left, after=workers[0].round)
        yield from unless((places(agents, workers) == order[1:], f"the nodes {order[1:]} have the order {places(agents, workers)} now"))
        order = places(agents, workers)
    for i in chance.sample([i for i in range(1, count + 1) if i not in agents], count - 1):
        time.sleep(chance.uniform(0.0, 1.0))
        agents[i] = agent(nodes, i, count)
        workers = nodes.round(len(agents), after=workers[0].round)
        yield from unless((places(agents, workers) == [*order, i], f"node {i} came to {order}, now {places(agents, workers)}"))
        order = places(agents, workers)
    yield from unless((run_of(workers) == name, "another run of the job has begun"))
    (nodes.tmp_path / "end").touch()
    codes = [nodes.ends(each) for each in agents.values()]
    yield from unless((codes == [0] * count, f"the agents ended with {codes}"))
    yield from samples(nodes.tmp_path / "steps")


def places(agents: dict[int, subprocess.Popen[str]], workers: list[Worker]) -> list[int]:
    """Return the numbers of the nodes in rank order."""
    numbers = {process.pid: i for i, process in agents.items()}
    return [numbers[agent_pid(worker)] for worker in workers]


def samples(folder: Path) -> Iterator[str]:
    """Say what is wrong with the samples of the steps that counted: a later round undoes the steps from its first one on."""
    rounds: dict[int, list[tuple[int, int, list[int]]]] = {}
    for path in folder.iterdir():
        lines = path.read_text().splitlines(keepends=True)
        rounds.setdefault(int(path.name.split("-")[0]), []).extend(json.loads(line) for line in lines if line.endswith("\n"))
    counted: dict[tuple[int, int], list[int]] = {}
    for _, steps in sorted(rounds.items()):
        first = min((step for step, _, _ in steps), default=sys.maxsize)
        counted = {at: ids for at, ids in counted.items() if at[0] < first}
        for step, epoch, ids in steps:
            counted.setdefault((step, epoch), []).extend(ids)
    numbers = sorted(step for step, _ in counted)
    if numbers != list(range(1, len(numbers) + 1)):
        yield "steps are missing, or a step was made in two epochs"
    for epoch in sorted({epoch for _, epoch in counted}):
        seen = Counter(i for (_, of), ids in counted.items() if of == epoch for i in ids)
        if seen != Counter(range(SAMPLES)):
            yield f"epoch {epoch}: {SAMPLES - len(seen)} samples lost, {sum(times > 1 for times in seen.values())} seen again"


def once(count: int, seed: int) -> Try:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, cluster(Path(folder)) as nodes:
        wrong = list(play(nodes, count, random.Random(seed)))
        took = f"in {time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.1f}"
        return Try(f"{count} nodes, {count - 1} hosts killed and started again, {took}", [*wrong, nodes.everything()] if wrong else [])


def main() -> None:
    options = parser(__doc__, tries=3)
    options.add_argument("--nodes", type=int, default=5)
    chosen = options.parse_args()
    for number in range(chosen.tries):
        show(number, once(chosen.nodes, chosen.seed + number))


if __name__ == "__main__":
    main()

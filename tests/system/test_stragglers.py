"""Agents name the slow ranks of a script that tells nothing itself, with ``--preload=torch`` and torch's DistributedDataParallel."""

from __future__ import annotations

import pytest

from tests.support.cluster import Cluster

WINDOWS = 4  # in which nobody is slow; three are enough to name a straggler
# Windows of 0.8 s instead of 20. Workers measure each of their steps. The agent says how many windows it has compared with the job.
LAUNCHER = """
import sys
from elastirun.__main__ import main
from elastirun.agent.hangs import straggler_watch
straggler_watch.WINDOW = 0.8
look, windows = straggler_watch.Stragglers.look, 0
def told(self, pages, job):
    global windows
    named = look(self, pages, job)
    windows += job is not None and job.ranks == 2 and len(self.alone) == 1
    print(f"window {windows} is over", flush=True)
    return named
straggler_watch.Stragglers.look = told
sys.exit(main())
"""
# The windows in which all four workers on the node have told their times. Its workers need no torch.
ON_ONE_NODE = LAUNCHER.replace("job is not None and job.ranks == 2 and len(self.alone) == 1", "len(self.alone) == 4").replace("0.8", "0.4")
VARYING = """
import os, random, sys, time
from pathlib import Path
from elastirun.progress import progress, sampled
rank, chance = int(os.environ["RANK"]), random.Random(f"{sys.argv[1]} {os.environ['RANK']}")
while True:
    length = chance.randint(32, 512) * (3 if rank == 1 else 1)
    time.sleep(0.005)
    sampled(1e-4 * length)
    progress(work=None if Path(__file__).with_name("untold").exists() else length)
"""
# The name of a file beside the script says where which rank is slow.
TRAIN = """
import time
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from elastirun.worker import optimizer_steps
optimizer_steps.PAUSE = 0.0

def wait(where):
    if Path(__file__).with_name(f"{where}{dist.get_rank()}").exists():
        time.sleep(0.06)

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()
    @staticmethod
    def backward(context, gradient):
        wait("backward")
        return gradient

class Model(nn.Sequential):
    def forward(self, x):
        time.sleep(0.03)
        return self[1](Slow.apply(self[0](x)))

dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(Model(nn.Linear(8, 8), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    wait("data")
    model(torch.ones(8, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_slow_rank_of_an_unmodified_script_is_named_by_its_agent_once(nodes: Cluster) -> None:
    launcher, data, backward = (nodes.tmp_path / name for name in ("launcher.py", "data1", "backward0"))
    launcher.write_text(LAUNCHER)
    nodes.script.write_text(TRAIN)
    where = ("--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{nodes.port}", "--rdzv-id=test")
    agents = []
    for i in (1, 2):
        own = (f"--rdzv-conf=is_host={int(i == 1)}", f"--local-addr=127.0.0.{i}", "--preload=torch", "--grace=2", str(nodes.script))
        agents.append(nodes.launch(i, *where, *own, program=(str(launcher),)))
    for i in (1, 2):
        nodes.says(i, f"window {WINDOWS} is over")
    assert "is a straggler" not in nodes.everything()
    data.touch()
    nodes.says(2, "rank 1 (local rank 0, CPU) is a straggler")
    assert "is a straggler" not in nodes.out(1)
    data.unlink()
    backward.touch()
    nodes.says(1, "rank 0 (local rank 0, CPU) is a straggler")
    for agent in agents:
        agent.terminate()
    for agent in agents:
        nodes.ends(agent)
    assert [nodes.out(i).count("is a straggler") for i in (1, 2)] == [1, 1], nodes.everything()


@pytest.mark.daily(10)
@pytest.mark.parametrize("seed", range(10))
def test_of_batches_that_vary_in_length_nobody_is_named_where_the_workers_tell_the_length(nodes: Cluster, seed: int) -> None:
    launcher = nodes.tmp_path / "launcher.py"
    launcher.write_text(ON_ONE_NODE)
    nodes.script.write_text(VARYING)
    own = ("--nnodes=1", "--nproc-per-node=4", "--preload=off", "--grace=2", str(nodes.script), str(seed))
    agent = nodes.launch(1, *own, program=(str(launcher),))
    nodes.says(1, f"window {WINDOWS + 2} is over")
    assert "is a straggler" not in nodes.out(1)
    (nodes.tmp_path / "untold").touch()
    nodes.says(1, "rank 1 (local rank 1, CPU) is a straggler")
    agent.terminate()
    nodes.ends(agent)
    assert nodes.out(1).count("is a straggler") == 1, nodes.everything()

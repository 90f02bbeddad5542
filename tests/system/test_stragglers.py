"""An agent names the slow rank of a script that tells nothing itself, with ``--preload=torch`` and torch's DistributedDataParallel."""

from __future__ import annotations

import pytest

from tests.support.cluster import Cluster

WINDOWS = 6
# Windows of 2 s instead of 20, so workers take samples ten times as often, too. The agent says when a window is over.
LAUNCHER = """
import sys
from elastirun.__main__ import main
from elastirun.agent import hang_watch
hang_watch.WINDOW = 2.0
look, windows = hang_watch.Stragglers.look, 0
def told(self, pages):
    global windows
    windows += len(pages) == 2 and min(page.sampled for page in pages.values()) > 0
    print(f"window {windows} is over", flush=True)
    return look(self, pages)
hang_watch.Stragglers.look = told
sys.exit(main())
"""
TRAIN = """
import sys, time
import torch, torch.distributed as dist
from torch import nn
from elastirun import optimizer_steps
optimizer_steps.PAUSE = 0.2

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()
    @staticmethod
    def backward(context, gradient):
        time.sleep(slow.get("backward", 0.0))
        return gradient

class Model(nn.Sequential):
    def forward(self, x):
        time.sleep(0.04)
        return self[1](Slow.apply(self[0](x)))

dist.init_process_group("gloo")
slow = {sys.argv[1]: 0.08 if dist.get_rank() == 1 else 0.0}
model = nn.parallel.DistributedDataParallel(Model(nn.Linear(8, 8), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    time.sleep(slow.get("data", 0.0))
    model(torch.ones(8, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("where", ["data", "backward", "nowhere"])
def test_a_slow_rank_of_an_unmodified_script_is_named_once(nodes: Cluster, where: str) -> None:
    launcher = nodes.tmp_path / "launcher.py"
    launcher.write_text(LAUNCHER)
    nodes.script.write_text(TRAIN)
    options = ("--preload=torch", "--nproc-per-node=2", "--standalone", "--grace=2")
    agent = nodes.launch(1, *options, str(nodes.script), where, program=(str(launcher),))
    nodes.says(1, "window 1 is over")
    nodes.says(1, f"window {WINDOWS} is over")
    agent.terminate()
    nodes.ends(agent)
    named = [line.partition(": it computes for ")[0] for line in nodes.out(1).splitlines() if "is a straggler" in line]
    assert named == ["elastirun: rank 1 (local rank 1, CPU) is a straggler"] * (where != "nowhere"), nodes.everything()

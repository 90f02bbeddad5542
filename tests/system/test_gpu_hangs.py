"""Hangs and stragglers of ranks that share a GPU over NCCL, under real agents.

``TEST_GPU=dry``: the same on the CPU, over gloo.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.system.hang_kinds import rank_in

pytest.importorskip("torch")

from tests.support.gpu import DEVICE, HERE, NCCL, figure, needs_gpu  # noqa: E402  it imports torch

pytestmark = needs_gpu

LIMIT = 2.0  # seconds; --hang-timeout
CULPRIT = 1  # the rank that hangs, or is slow
RANKS = 3  # in a job that hangs: two of three are a majority, which shows who is different
HEAD = f"""
import os, sys, time
rank, number = int(os.environ["RANK"]), int(os.environ["ELASTIRUN_ROUND"])
# NCCL refuses two ranks of one host on one GPU.
os.environ.update(NCCL_HOSTID=str(rank), NCCL_SOCKET_IFNAME="lo")
import torch, torch.distributed as dist
from elastirun.progress import progress
torch.set_num_threads(1)
device, backend, culprit = "{DEVICE}", "{NCCL}", rank == {CULPRIT}
gpu = device == "cuda"
if gpu:
    torch.cuda.set_device(0)
"""
# A step waits for the GPU at its end, as in a script that looks at its loss. The optimizer has stamped the step then.
# The first arguments are the kinds of the rounds. In a round without a kind nobody hangs, and the job succeeds.
HANGS = (
    HEAD
    + """
def write(name, value):
    with open(f"{folder}/{name}{number}-{rank}", "w") as file:
        file.write(str(value))

*kinds, folder = sys.argv[1:]
kind = kinds[number - 1] if number <= len(kinds) else ""
free, total = torch.cuda.mem_get_info() if gpu else (8 << 20, 8 << 20)
write("free", free)
write("held", total // 8)
dist.init_process_group(backend)
second = dist.new_group(backend=backend)
dist.broadcast(torch.zeros(1, device=device), 0, group=second)
memory = torch.empty(total // 8, dtype=torch.uint8, device=device)
model = torch.nn.Linear(256, 256, device=device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

for step in range(10):
    now = culprit and step == 6
    loss = model(torch.ones(8, 256, device=device)).square().mean()
    if now and kind.startswith("spins"):
        write("hung", time.monotonic())
        while not gpu:
            pass
        torch.cuda._sleep(1 << 40)  # cycles: ten minutes
        if kind == "spins, synchronize":
            torch.cuda.synchronize()
        loss.item()
    loss.backward()
    if now and kind == "broadcast":
        write("hung", time.monotonic())
    if not (now and kind in ("all_reduce", "broadcast")):
        dist.all_reduce(model.weight.grad)
    if kind == "broadcast":
        dist.broadcast(model.bias.grad, 0, group=second)
    optimizer.step()
    optimizer.zero_grad()
    loss.item()
    if step == 0:
        write("stepped", time.monotonic())
if culprit and kind == "all_reduce":
    write("hung", time.monotonic())
loss = loss.detach().clone()
dist.broadcast(loss, 0, group=second)
loss.item()
progress(within=30)  # the end takes longer than a step
dist.destroy_process_group()
"""
)
# Windows of 1.5 s instead of 20, of which three in a row are enough.
LAUNCHER = """
import sys
from elastirun.__main__ import main
from elastirun.agent.hangs import straggler_watch
straggler_watch.WINDOW = 1.5
sys.exit(main())
"""
# A forward computes for about 10 ms on a GPU, and 30 ms on the slow rank. The host waits for the GPU there, as for
# the rest at the end of a step.
STRAGGLES = (
    HEAD
    + """
from elastirun.train import DistributedDataParallel

class Model(torch.nn.Linear):
    def forward(self, x):
        times = 3 if culprit else 1
        if gpu:
            torch.cuda._sleep(times * 20_000_000)  # cycles
            torch.cuda.synchronize()
        else:
            time.sleep(times * 0.01)
        return super().forward(x)

dist.init_process_group(backend)
model = DistributedDataParallel(Model(64, 64, device=device))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
while True:
    loss = model(torch.ones(8, 64, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss.item()
    if gpu:
        torch.cuda.synchronize()
"""
)


def start(nodes: Cluster, script: str, *arguments: str, options: tuple[str, ...] = (), **more: Any) -> subprocess.Popen[str]:
    """Start an agent."""
    nodes.script.write_text(script)
    nodes.env["PYTHONPATH"] = str(Path(__file__).parents[2])
    common = ("--standalone", "--set=restart-pause=0", f"--log-dir={nodes.tmp_path}/logs")
    return nodes.launch(1, *common, *options, str(nodes.script), *arguments, **more)


def events(nodes: Cluster) -> list[dict[str, Any]]:
    (path,) = (nodes.tmp_path / "logs").glob("*/events.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@dataclass(frozen=True)
class Hang:
    """What became of a hang."""

    named: int | None  # the rank that the next round's reason names as hung
    after: float  # seconds from the limit to the end of the round
    stepped: float  # seconds from there to the next round's first step, which has waited for the GPU


def hang_in_each_round(nodes: Cluster, *kinds: str) -> dict[str, Hang]:
    """Run a job that hangs once in each kind and then succeeds. Returns what became of each."""
    options = (
        f"--nproc-per-node={RANKS}",
        "--preload=torch",
        f"--hang-timeout={LIMIT:g}",
        f"--max-restarts={len(kinds)}",
    )
    agent = start(nodes, HANGS, *kinds, str(nodes.tmp_path), options=options)
    assert nodes.ends(agent) == 0, nodes.everything()
    told = events(nodes)
    assert sum(event["event"] == "hang" for event in told) == len(kinds), nodes.everything()
    found = {}
    for number, kind in enumerate(kinds, 1):
        broken = next(event for event in told if event["event"] == "broken" and event["round"] == number)
        formed = next(event for event in told if event["event"] == "formed" and event["round"] == number + 1)
        after = broken["mono"] - written(nodes, "hung", number, CULPRIT) - LIMIT
        stepped = max(written(nodes, "stepped", number + 1, rank) for rank in range(RANKS))
        found[kind] = Hang(rank_in(formed["reason"]), after, stepped - broken["mono"])
    return found


def written(nodes: Cluster, name: str, number: int, rank: int) -> float:
    """Return the number that a rank has written in a round."""
    return float((nodes.tmp_path / f"{name}{number}-{rank}").read_text())


def tell(claim: str, found: dict[str, Hang], words: dict[str, str]) -> None:
    """Print the figure of hangs of some kinds."""
    texts = [
        f"{words[kind]}: rank {hang.named} named {hang.after:.1f} s after the limit, first step {hang.stepped:.1f} s later"
        for kind, hang in found.items()
    ]
    values = {"named_rightly": sum(hang.named == CULPRIT for hang in found.values()), "kinds": len(found)}
    longest = {
        "after_limit_s": max(hang.after for hang in found.values()),
        "step_s": max(hang.stepped for hang in found.values()),
    }
    text = f"rank {CULPRIT} of {RANKS} is the cause, limit {LIMIT:g} s. " + "; ".join(texts)
    figure(claim, text, **values, **{name: round(value, 3) for name, value in longest.items()})


def test_a_rank_that_leaves_out_a_collective_is_noticed_and_the_job_goes_on(nodes: Cluster) -> None:
    """All ranks then wait for the GPU: over NCCL another one than the cause may be named (docs/limits.md)."""
    found = hang_in_each_round(nodes, "all_reduce", "broadcast")
    assert HERE or [hang.named for hang in found.values()] == [CULPRIT] * 2
    tell(
        "hang-skipped",
        found,
        {"all_reduce": "goes on to the next step's", "broadcast": "goes on to a broadcast"},
    )


def test_a_rank_whose_kernel_never_ends_is_named_and_its_memory_is_free_again(nodes: Cluster) -> None:
    found = hang_in_each_round(nodes, "spins", "spins, synchronize")
    assert found["spins"].named == CULPRIT, nodes.everything()
    free, held = ([[written(nodes, name, number, rank) for rank in range(RANKS)] for number in (1, 2, 3)] for name in ("free", "held"))
    assert min(map(min, free)) > min(free[0]) - held[0][0] / 2, free
    tell(
        "hang-spins",
        found,
        {"spins": "the script waits in `item()`", "spins, synchronize": "in `torch.cuda.synchronize()`"},
    )


def test_a_rank_that_computes_for_longer_is_named_as_a_straggler(nodes: Cluster) -> None:
    launcher = nodes.tmp_path / "launcher.py"
    launcher.write_text(LAUNCHER)
    agent = start(nodes, STRAGGLES, options=("--nproc-per-node=2", "--grace=2"), program=(str(launcher),))
    nodes.says(1, "is a straggler")
    agent.terminate()
    nodes.ends(agent)
    (named,) = (event for event in events(nodes) if event["event"] == "straggler")
    assert named["rank"] == CULPRIT, nodes.everything()
    own, median = (f"{named[name] * 1e3:.0f} ms" for name in ("seconds", "median"))
    times = f"{own} a step beside {median} ({named['times_median']:.1f} times)"
    figure(
        "straggler",
        f"rank {CULPRIT} of 2 was named: computes for {times}",
        times_median=named["times_median"],
    )

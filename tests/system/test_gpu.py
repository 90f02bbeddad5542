"""Workers that hold a GPU over NCCL: whatever ends them, the next ones find its memory free. Skipped where there is no GPU."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest

from tests.support.cluster import PATIENCE, WORKER, Cluster, dies, kill

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

HELD = 1 << 30  # bytes that each worker holds
HOLDS = f"""
import os, torch, torch.distributed as dist
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
os.environ["FREE"] = str(torch.cuda.mem_get_info()[0])
dist.init_process_group("nccl")
held = torch.ones({HELD}, dtype=torch.uint8, device="cuda")
dist.all_reduce(held)
torch.cuda.synchronize()
{WORKER}
if command == "index":
    held[torch.tensor([{HELD} + 1], device="cuda")].sum().item()
"""


def on_gpus(nodes: Cluster, *options: str) -> subprocess.Popen[str]:
    nodes.script.write_text(HOLDS)
    return nodes.launch(1, "--standalone", "--nproc-per-node=gpu", *options, str(nodes.script))


def compute_pids() -> str:
    """Return the ids of the processes that use a GPU."""
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE).stdout


@pytest.mark.parametrize("end", [f"kill {signal.SIGKILL:d}", "exit 3", "index"])
def test_the_next_round_finds_the_memory_of_a_failed_one_free(nodes: Cluster, end: str) -> None:
    agent, count = on_gpus(nodes, "--max-restarts=1"), torch.cuda.device_count()
    first = nodes.round(count)
    first[0].tell(end)
    second = nodes.round(count, after=1)
    assert [int(b.env["FREE"]) > int(a.env["FREE"]) - HELD // 2 for a, b in zip(first, second, strict=True)] == [True] * count
    for worker in second:
        worker.tell("exit 0")
    assert nodes.ends(agent) == 0


def test_a_killed_agent_leaves_no_worker_on_a_gpu(nodes: Cluster) -> None:
    agent = on_gpus(nodes)
    workers = nodes.round(torch.cuda.device_count())
    kill(agent)
    assert [dies(worker.pid) for worker in workers] == [True] * len(workers)
    deadline = time.monotonic() + PATIENCE
    while any(str(worker.pid) in compute_pids().split() for worker in workers):
        assert time.monotonic() < deadline

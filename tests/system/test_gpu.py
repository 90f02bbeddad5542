"""Workers that hold a GPU over NCCL: whatever ends them, the next ones find its memory free.

``TEST_GPU=dry``: the same on the CPU, over gloo.
"""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.cluster import WORKER, Cluster, Worker, dies, kill
from tests.support.until import until

torch = pytest.importorskip("torch")

from tests.support.gpu import DEVICE, HERE, NCCL, figure, needs_gpu  # noqa: E402  it imports torch

pytestmark = needs_gpu

COUNT = torch.cuda.device_count() if HERE else 1
PRELOAD = "--preload=torch"
WAYS = pytest.mark.parametrize("way", ["--preload=off", PRELOAD], ids=["executed", "preload"])
NVIDIA = "/dev/nvidia"  # begins the name of each device file of the driver
# Each worker holds a fifth of its GPU. What other programs take or give back meanwhile is less than half of that.
MEMORY = """
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
free, total = torch.cuda.mem_get_info()
"""
STAND_IN = "free, total = 10 << 20, 10 << 20"
HOLDS = f"""
import os, sys, torch, torch.distributed as dist
{MEMORY if HERE else STAND_IN}
os.environ["FREE"], os.environ["HELD"] = str(free), str(total // 5)
outermost = sys._getframe()
while outermost.f_back:
    outermost = outermost.f_back
os.environ["FORKED"] = str(int(outermost.f_code.co_filename.endswith("forkserver.py")))
dist.init_process_group("{NCCL}")
held = torch.ones(total // 5, dtype=torch.uint8, device="{DEVICE}")
part = held[:{1 << 20}]
dist.all_reduce(part)
part[0].item()
{WORKER}
if command == "index":
    part[torch.tensor([part.numel() + 1], device="{DEVICE}")].sum().item()
"""


def on_gpus(nodes: Cluster, *options: str) -> subprocess.Popen[str]:
    nodes.script.write_text(HOLDS)
    nodes.env["PYTHONPATH"] = str(Path(__file__).parents[2])
    nodes.env.pop("PET_PRELOAD", None)
    count = f"--nproc-per-node={'gpu' if HERE else COUNT}"
    return nodes.launch(1, "--standalone", count, *options, str(nodes.script))


def finds_free(later: list[Worker], first: list[Worker]) -> bool:
    """Return whether the later workers found as much free as the first ones, which have held memory since."""
    pairs = zip(first, later, strict=True)
    return all(int(b.env["FREE"]) > int(a.env["FREE"]) - int(a.env["HELD"]) // 2 for a, b in pairs)


@WAYS
@pytest.mark.parametrize("end", [f"kill {signal.SIGKILL:d}", "exit 3", "index"])
def test_the_next_round_finds_the_memory_of_a_failed_one_free(nodes: Cluster, end: str, way: str) -> None:
    """An index out of range fails in a kernel on a GPU, and costs its context; on the CPU it is an exception."""
    agent = on_gpus(nodes, way, "--max-restarts=1")
    first = nodes.round(COUNT)
    first[0].tell(end)
    second = nodes.round(COUNT, after=1)
    forked = [worker.env["FORKED"] == "1" for worker in (*first, *second)]
    assert forked == [way == PRELOAD] * 2 * COUNT, nodes.everything()
    assert finds_free(second, first)
    for worker in second:
        worker.tell("exit 0")
    assert nodes.ends(agent) == 0


@WAYS
def test_a_killed_agent_leaves_no_worker_on_a_gpu(nodes: Cluster, way: str) -> None:
    agent = on_gpus(nodes, way)
    workers = nodes.round(COUNT)
    kill(agent)
    assert [dies(worker.pid) for worker in workers] == [True] * COUNT
    nodes.pending.clear()
    agent = on_gpus(nodes, way)
    later = nodes.round(COUNT)
    assert finds_free(later, workers)
    for worker in later:
        worker.tell("exit 0")
    assert nodes.ends(agent) == 0


def test_the_fork_server_has_nothing_of_cuda_while_its_workers_use_the_gpu(nodes: Cluster) -> None:
    """CUDA does not survive a fork: neither the server nor its parked forks may have begun with it."""
    agent = on_gpus(nodes, PRELOAD)
    workers = nodes.round(COUNT)
    started = {worker.pid for worker in workers}
    until(lambda: len(fork_servers(agent.pid, started)) == 1 + COUNT, "a parked fork for each worker")
    servers = fork_servers(agent.pid, started)
    threads = [len(os.listdir(f"/proc/{pid}/task")) for pid in servers]
    files = [device_files(pid) for pid in servers]
    used = [device_files(worker.pid) for worker in workers]
    assert files == [set()] * len(servers) and threads == [1] * len(servers)
    least = min(map(len, used))
    assert not HERE or least > 0, "the driver's files of a worker are seen"
    text = f"server and {COUNT} parked: no device file, 1 thread each; a worker: {least} device files"
    figure("fork-server", text, worker_files=least)
    for worker in workers:
        worker.tell("exit 0")
    assert nodes.ends(agent) == 0


def fork_servers(agent: int, workers: set[int]) -> list[int]:
    """Return the fork server of an agent and its forks that are not yet workers."""
    below = [process.pid for process in psutil.Process(agent).children(recursive=True)]
    candidates = [pid for pid in below if pid not in workers]
    return [pid for pid in candidates if "forkserver.py" in read(Path(f"/proc/{pid}/cmdline"))]


def device_files(pid: int) -> set[str]:
    """Return the device files of the driver that a process has open or mapped."""
    found = {line.split()[-1] for line in read(Path(f"/proc/{pid}/maps")).splitlines() if NVIDIA in line}
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        with suppress(OSError):
            found.add(os.readlink(link))
    return {name for name in found if name.startswith(NVIDIA)}


def read(path: Path) -> str:
    """Return the contents of a file of /proc; empty: the process has ended."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""

"""``--hang-timeout``: a rank that makes no step any more is named on every node, and the round is restarted as after its failure."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from elastirun.agent.observe.events import Hang
from tests.support.cluster import Cluster

STOPPED = """
import os, signal
from elastirun.progress import progress
for _ in range(5):
    progress()
if os.environ["RANK"] == "2":
    os.kill(os.getpid(), signal.SIGSTOP)
signal.pause()
"""
LOADER = """
import os, time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from elastirun.train import DistributedDataParallel

class Data(Dataset):
    def __len__(self):
        return 10
    def __getitem__(self, index):
        while index == 5 and (os.environ["RANK"], os.environ["ELASTIRUN_ROUND"]) == ("1", "1"):
            time.sleep(1)
        return torch.ones(4)

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
for batch in DataLoader(Data(), num_workers=1):
    model(batch).sum().backward()
dist.destroy_process_group()
"""

EXITING = """
import atexit, time
from elastirun.progress import progress
atexit.register(time.sleep, 6)  # called last, as what torch and CUDA do at the exit
for _ in range(5):
    progress()
"""


def test_a_slow_exit_of_the_interpreter_is_no_hang(nodes: Cluster) -> None:
    nodes.script.write_text(EXITING)
    agent = nodes.agent(1, "--hang-timeout=1", nnodes="1", nproc=2)
    assert nodes.ends(agent) == 0, nodes.everything()
    assert "hang" not in nodes.out(1)


def test_a_stopped_worker_is_named_on_every_node(nodes: Cluster) -> None:
    nodes.script.write_text(STOPPED)
    options = ("--hang-timeout=2", f"--log-dir={nodes.tmp_path}/logs")
    agents = [nodes.agent(1, *options[:1], nnodes="2", nproc=2), nodes.agent(2, *options, nnodes="2", nproc=2)]
    assert [nodes.ends(agent) for agent in agents] == [1, 1]
    for i in (1, 2):
        report = nodes.out(i).splitlines()[-40:]
        assert "  rank      : 2 (local_rank: 0)" in report and "    stopped by a signal" in report, nodes.everything()
        assert not any(line.startswith("Other failures") for line in report), "its end by our signal is no second failure"
        (how,) = (line for line in report if line.startswith("  how "))
        assert "killed by SIGKILL (signal 9), hung: no step for " in how and how.endswith("(stopped by a signal)")
    assert "the workers here hang: no step for" in nodes.out(2)
    found = [json.loads(line) for line in next(Path(nodes.tmp_path, "logs").glob("*/events.jsonl")).read_text().splitlines()]
    (hang,) = (event for event in found if event["event"] == "hang")
    assert hang.keys() >= {field.name for field in dataclasses.fields(Hang)} and hang["ranks"] == [2]


def test_a_rank_whose_data_loader_hangs_is_named_and_the_next_round_succeeds(nodes: Cluster) -> None:
    nodes.script.write_text(LOADER)
    agent = nodes.agent(1, "--hang-timeout=5", "--max-restarts=1", nnodes="1", nproc=2)
    assert nodes.ends(agent) == 0, nodes.everything()
    out = nodes.out(1)
    assert "(rank 1 on " in out and "failed (SIGKILL, hung: no step for " in out, out
    (waiting,) = (line for line in out.splitlines() if line.startswith("elastirun:   rank 0 "))
    (hanging,) = (line for line in out.splitlines() if line.startswith("elastirun:   rank 1 "))
    steps = [int(line.partition(" steps)")[0].rpartition(" ")[2]) for line in (waiting, hanging)]
    assert steps[0] == steps[1] + 1, "a rank that waits has stamped before"
    assert " in _wait" in waiting and " in wait" in hanging, "where each of them is"

"""Planned stops of real jobs with ``Drain``: no step is lost. ``python -m tests.system.planned_stops`` does many more."""

from __future__ import annotations

import json

import pytest

from tests.support.cluster import Cluster
from tests.system.planned_stops import Story

HANGS = """
import json, os, socket, sys, time
import torch, torch.distributed as dist
from elastirun.train import DistributedDataParallel, Drain

dist.init_process_group("gloo")
drain = Drain(DistributedDataParallel(torch.nn.Linear(4, 4)))
s = socket.socket(socket.AF_UNIX)
s.connect(os.environ["TEST_SOCKET"])
s.sendall(json.dumps({**os.environ, "pid": os.getpid()}).encode() + b"\\n")
if s.makefile().readline() == "fail\\n":
    sys.exit(3)
dist.barrier()
time.sleep(1000)
"""


@pytest.mark.daily(4)
@pytest.mark.parametrize(
    ("kind", "ways"),
    [("ours", ("join", "both")), ("deterministic", ("worker",)), ("torch", ("worker",)), ("fsdp", ("join",))],
)
def test_a_job_that_is_stopped_replays_no_step(nodes: Cluster, kind: str, ways: tuple[str, ...]) -> None:
    story = Story(nodes, 1, kind)
    assert [wrong for way in ways for wrong in story.stop(way).wrong] == []
    assert story.end() == []


def test_a_worker_that_waits_for_one_that_failed_does_not_take_the_grace(nodes: Cluster) -> None:
    """It has a handler for SIGTERM, and Python does not run the handler while the main thread hangs."""
    nodes.script.write_text(HANGS)
    agent = nodes.agent(1, "--failure-grace=50", f"--log-dir={nodes.tmp_path}/logs", nnodes="1", nproc=3)
    workers = nodes.round(3)
    workers[0].tell("wait")
    workers[1].tell("fail")
    assert nodes.ends(agent) == 1
    assert "rank 1" in nodes.out(1)
    (path,) = nodes.tmp_path.glob("logs/.latest/*/events.jsonl")
    (stopped,) = [event for event in map(json.loads, path.read_text().splitlines()) if event["event"] == "stopped"]
    assert stopped["after"] < 25

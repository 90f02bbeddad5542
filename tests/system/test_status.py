"""``elastirun status`` beside real agents: as they start, run, lose a node and move the store."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from tests.support.cluster import PATIENCE, Cluster, kill

ROOT = Path(__file__).resolve().parents[2]


def status(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "elastirun", "status", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)


def until(state: str, *options: str) -> dict[str, Any]:
    """Return the job as soon as it is in this state. The store says nothing by itself, so it is polled."""
    deadline = time.monotonic() + PATIENCE
    while True:
        began = time.monotonic()
        result = status(*options, "--json")
        now = time.monotonic()
        assert now - began < 5.0, "ten times what one look may take"
        assert now < deadline, result.stdout + result.stderr
        jobs = json.loads(result.stdout)["jobs"]
        assert result.returncode == (0 if jobs else 4)
        if jobs and jobs[0]["state"] == state:
            return dict(jobs[0])


def test_a_job_from_its_first_node_to_the_store_that_has_moved(nodes: Cluster) -> None:
    options = ("--last-call=60", "--max-restarts=0", "--expire=30", "--store-succession=proof")  # all three are in the first round
    everywhere = ",".join(f"127.0.0.{i}:{nodes.port}" for i in (1, 2, 3))
    first = f"--rdzv-endpoint=127.0.0.1:{nodes.port}"

    def start(i: int) -> subprocess.Popen[str]:
        where = [f"--rdzv-endpoint={everywhere}", "--rdzv-id=test", f"--rdzv-conf=is_host={int(i == 1)}", f"--local-addr=127.0.0.{i}"]
        return nodes.launch(i, "--nnodes=2:3", *where, *options, str(nodes.script))

    agents = [start(1)]
    found = until("forming", first)
    assert (found["job"], [node["state"] for node in found["nodes"]]) == ("test", ["joining"])
    assert found["waiting"] == "for more nodes: 1 of at least 2 are here"

    agents += [start(2), start(3)]
    workers = nodes.round(3)
    found = until("running", first)
    assert [node["address"] for node in found["nodes"]] == ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    assert [node["hosts_store"] for node in found["nodes"]] == [True, False, False] and found["world_size"] == 3
    screen = status("test", first).stdout
    assert screen.startswith("job       test: running\n") and "127.0.0.1 (store)" in screen

    kill(agents.pop(0))
    after = nodes.round(2, after=workers[0].round)
    found = until("running", "test", f"--rdzv-endpoint={everywhere}")
    assert found["round"] == after[0].round and "which hosted the rendezvous store, was lost" in found["reason"]
    assert [node["hosts_store"] for node in found["nodes"]].count(True) == 1
    assert found["store"] != f"127.0.0.1:{nodes.port}"
    for worker in after:
        worker.tell("exit 0")
    assert [nodes.ends(agent) for agent in agents] == [0, 0], nodes.everything()
    assert status("test", f"--rdzv-endpoint={everywhere}").returncode == 4


def test_on_a_node_of_the_job_nothing_need_be_named(nodes: Cluster) -> None:
    """Not even when the store has moved, and nobody answers at the one endpoint of the launch any more."""
    job = f"job-{uuid.uuid4()}"
    where = [f"--rdzv-endpoint=127.0.0.1:{nodes.port}", f"--rdzv-id={job}", "--nnodes=2:3", "--last-call=0.5", "--expire=30"]

    def start(i: int) -> subprocess.Popen[str]:
        own = [f"--rdzv-conf=is_host={int(i == 1)}", f"--local-addr=127.0.0.{i}", "--store-succession=proof"]
        return nodes.launch(i, *where, *own, str(nodes.script))

    agents = [start(i) for i in (1, 2, 3)]
    workers = nodes.round(3)
    assert until("running", job)["store"] == f"127.0.0.1:{nodes.port}"
    kill(agents.pop(0))
    after = nodes.round(2, after=workers[0].round)
    for options in ([job], [job, where[0]], [where[0]], [f"--rdzv-endpoint=localhost:{nodes.port}"]):
        found = until("running", *options)
        assert (found["job"], found["round"], len(found["nodes"])) == (job, after[0].round, 2)
    for worker in after:
        worker.tell("exit 0")
    assert [nodes.ends(agent) for agent in agents] == [0, 0], nodes.everything()


def test_a_job_of_one_node_is_found_by_its_agent(nodes: Cluster) -> None:
    job = f"job-{uuid.uuid4()}"
    nodes.script.write_text("from elastirun.progress import progress\nprogress(), progress()\n" + nodes.script.read_text())
    agent = nodes.launch(1, "--standalone", f"--rdzv-id={job}", "--nproc-per-node=2", str(nodes.script))
    workers = nodes.round(2)
    found = until("running", job)
    assert (found["world_size"], [node["state"] for node in found["nodes"]]) == (2, ["running"])
    assert [(one["rank"], one["steps"]) for one in found["steps"]] == [(0, 2), (1, 2)]
    for worker in workers:
        worker.tell("exit 0")
    assert nodes.ends(agent) == 0

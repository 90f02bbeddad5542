"""The account of real agents: in their events, at their health port, and in words at the end."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from elastirun.agent.observe.node_states import NodeState
from elastirun.report import clocks, reader, story
from tests.support.cluster import WORKER, Cluster, free_port, kill
from tests.system.test_health import metrics, status

STEPS = """
import sys, time
from elastirun.progress import progress, saving
for step in range(1, 21):
    time.sleep(0.01)
    progress(step=step)
with saving():
    time.sleep(0.01)
"""


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (next((folder / ".latest").iterdir()) / "events.jsonl").read_text().splitlines()]


def test_a_failure_costs_its_restart_and_the_steps_that_are_done_again(nodes: Cluster) -> None:
    port = free_port()
    nodes.script.write_text(STEPS + WORKER)
    a = nodes.agent(1, f"--health-port=127.0.0.1:{port}", "--max-restarts=1", f"--log-dir={nodes.tmp_path}/logs", nnodes="2")
    b = nodes.agent(2, "--max-restarts=1", nnodes="2")
    nodes.round(2)[1].tell("exit 3")
    workers = nodes.round(2, after=1)
    account = status(port, state="running", round=2)["account"]
    samples = metrics(port)
    assert samples[("elastirun_spent_seconds", "restarting")] == pytest.approx(account["seconds"]["restarting"], abs=0.001)
    assert samples[("elastirun_lost_seconds", "failure")] == account["lost_seconds"]["failure"]
    assert 0 < samples[("elastirun_goodput_ratio",)] < 1
    for worker in workers:
        worker.tell("exit 0")
    assert [nodes.ends(agent) for agent in (a, b)] == [0, 0]
    found = events(nodes.tmp_path / "logs")
    assert [event["event"] for event in found[-2:]] == ["account", "end"]
    last = found[-2]
    seconds = last["seconds"]
    assert sum(seconds.values()) == pytest.approx(last["total"], rel=0.001) and min(seconds.values()) >= 0
    assert last["steps_stamped"] and last["rounds_ended"] == {"failure": 1}
    assert seconds["repeated"] >= 0.19 and seconds["saving"] >= 0.01, "all steps were made twice; saves held up the second round"
    first, second = (event for event in found if event["event"] == "round_spent")
    assert (first["round"], first["cause"], first["repeated"]) == (1, "", 0) and (second["round"], second["cause"]) == (2, "failure")
    lost = second["restarting"] + second["starting"] + second["repeated"]
    assert last["lost_seconds"] == {"failure": pytest.approx(lost, abs=0.01)}
    steps = [event for event in found if event["event"] == "steps"]
    assert [(event["round"], event["steps"], event["step"]) for event in steps][-1] == (2, 20, 20)
    read = reader.read([str(nodes.tmp_path / "logs")])
    told = story.tell(clocks.align(read.events))
    assert read.left_out == [] and [(fault.round, fault.cause) for fault in told.faults] == [(1, "failure")]
    assert told.faults[0].seconds == pytest.approx(lost, abs=0.05) and told.total == pytest.approx(last["total"], abs=0.05)
    assert told.spent[NodeState.RUNNING] == pytest.approx(seconds["training"], abs=0.05)
    assert f"time of {os.uname().nodename}" in nodes.out(1) and "  lost by cause: failure " in nodes.out(1)
    assert "time of" not in nodes.out(2), "node 0 says it"


def test_workers_that_crash_for_the_loss_of_a_node_are_charged_to_the_loss(nodes: Cluster) -> None:
    port = free_port()
    one = nodes.agent(1, f"--health-port=127.0.0.1:{port}", "--max-restarts=0", "--expire=1", f"--log-dir={nodes.tmp_path}/logs")
    two = nodes.agent(2, "--expire=1")
    worker = nodes.round(2)[0]
    kill(two)
    worker.tell("exit 3")  # as NCCL does, seconds before anybody can know that the node is gone
    (again,) = nodes.round(1, after=1)
    assert metrics(port)[("elastirun_restarts_total", "lost")] == 1
    again.tell("exit 0")
    assert nodes.ends(one) == 0
    found = events(nodes.tmp_path / "logs")
    account = next(event for event in found if event["event"] == "account")
    assert account["rounds_ended"] == {"lost": 1} and account["lost_seconds"].keys() == {"lost"}
    assert {event["cause"] for event in found if event["event"] == "round_spent"} == {"", "lost"}
    told = story.tell(clocks.align(reader.read([str(nodes.tmp_path / "logs")]).events))
    assert [(fault.round, fault.cause) for fault in told.faults] == [(1, "lost")]

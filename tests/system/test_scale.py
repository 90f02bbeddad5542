"""``elastirun scale`` and real agents: a job begins, grows and shrinks at a word from outside."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastirun.agent.wanted_nodes import VARIABLE
from elastirun.cli.scale.command import main
from elastirun.errors import UsageError
from tests.support.annotation import Annotation
from tests.support.cluster import PATIENCE, Cluster, Worker

TEN_MINUTES = "--last-call=600"


def run(nodes: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "elastirun", *words, f"--rdzv-endpoint=127.0.0.1:{nodes.port}", "--rdzv-id=test"]
    return subprocess.run(command, env=nodes.env, capture_output=True, text=True, timeout=PATIENCE)


def scale(nodes: Cluster, count: str) -> str:
    done = run(nodes, "scale", count)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def status(nodes: Cluster) -> dict[str, Any]:
    (job,) = json.loads(run(nodes, "status", "--json").stdout)["jobs"]
    found: dict[str, Any] = job
    return found


def reason(workers: list[Worker]) -> str:
    return workers[0].env["ELASTIRUN_ROUND_REASON"]


def test_a_job_begins_grows_and_shrinks_as_it_is_told(nodes: Cluster) -> None:
    nodes.agent(1, TEN_MINUTES, nnodes="1:4")
    nodes.says(1, "1 of at most 4 nodes joined")
    assert scale(nodes, "2") == "job 'test': 2 nodes wanted, 1 joined"
    nodes.agent(2, TEN_MINUTES, nnodes="1:4")
    workers = nodes.round(2)
    assert reason(workers) == "the first round", "it waits no ten minutes for more"
    for i in (3, 4):
        nodes.agent(i, TEN_MINUTES, nnodes="1:4")
        nodes.says(i, "round 1 has its 2 nodes; this node is a spare")
    assert (status(nodes)["wanted"], status(nodes)["round"]) == (2, 1), "spares disturb nobody"
    scale(nodes, "4")
    workers = nodes.round(4, after=1)
    first = workers[0].env["MASTER_ADDR"]
    scale(nodes, "3")
    workers = nodes.round(3, after=workers[0].round)
    assert reason(workers) == "the job is scaled to 3 nodes" and workers[0].env["MASTER_ADDR"] == first
    scale(nodes, "max")
    workers = nodes.round(4, after=workers[0].round)
    assert status(nodes)["wanted"] == 0
    for worker in workers:
        worker.tell("exit 0")
    assert [nodes.ends(agent) for agent in nodes.agents] == [0, 0, 0, 0], nodes.everything()


@pytest.mark.daily(3)
@pytest.mark.parametrize("succession", ["majority", "proof", "off"])
def test_a_large_job_shrinks_to_one_node(nodes: Cluster, succession: str) -> None:
    """With a majority of the last round's members it may go on, so it is halved again and again; the host of the store stays."""
    for i in (1, 2, 3, 4):
        nodes.agent(i, f"--store-succession={succession}", nnodes="1:4")
    workers = nodes.round(4)
    scale(nodes, "1")
    (worker,) = nodes.round(1, after=workers[0].round)
    assert reason([worker]) == "the job is scaled to 1 node"
    worker.tell("exit 0")
    assert [nodes.ends(agent) for agent in nodes.agents] == [0, 0, 0, 0], nodes.everything()


def test_an_annotation_says_how_many_nodes_are_wanted(nodes: Cluster, tmp_path: Path) -> None:
    """As Kubernetes brings it: at the start of the job, and by a change; ``elastirun scale`` is not undone, a newcomer changes nothing."""
    (tmp_path / "etc").mkdir()
    annotation = Annotation(tmp_path / "etc", "2")
    nodes.env[VARIABLE] = str(annotation.path)
    for i in (1, 2):
        nodes.agent(i, TEN_MINUTES, nnodes="1:4")
    workers = nodes.round(2)
    assert reason(workers) == "the first round", "it waits no ten minutes for more"
    for i in (3, 4):
        nodes.agent(i, TEN_MINUTES, nnodes="1:4")
        nodes.says(i, "round 1 has its 2 nodes; this node is a spare")
    annotation.set("4")
    workers = nodes.round(4, after=1)
    scale(nodes, "3")
    workers = nodes.round(3, after=workers[0].round)
    assert reason(workers) == "the job is scaled to 3 nodes"
    nodes.agent(5, TEN_MINUTES, nnodes="1:4")
    nodes.says(5, "this node is a spare")
    annotation.set("5")
    nodes.says(1, f"{annotation.path}: 5 nodes: the job was started with --nnodes=1:4, which allows 1 to 4 nodes")
    now = status(nodes)
    assert (now["wanted"], now["round"]) == (3, workers[0].round), "neither the spare's old number nor the wrong one was written"
    annotation.set("max")
    workers = nodes.round(4, after=workers[0].round)
    assert status(nodes)["wanted"] == 0
    for worker in workers:
        worker.tell("exit 0")
    assert [nodes.ends(agent) for agent in nodes.agents] == [0] * 5, nodes.everything()
    written = [sum(f"{annotation.path}: {text} nodes wanted" in nodes.out(i) for i in (1, 2, 3, 4, 5)) for text in ("4", "max")]
    assert written == [1, 1] and not any("allows 1 to 4" in nodes.out(i) for i in (2, 3, 4, 5)), "rank 0 alone"


def test_an_annotation_reaches_the_store_wherever_it_is(anywhere: Cluster, tmp_path: Path) -> None:
    """At etcd, or where it has moved: rank 0, which hosted it, is lost. Records are signed."""
    (tmp_path / "etc").mkdir()
    annotation = Annotation(tmp_path / "etc")
    (tmp_path / "token").write_text("a token of sixteen or more")
    (tmp_path / "token").chmod(0o600)
    anywhere.env[VARIABLE] = str(annotation.path)
    for i in (1, 2, 3):
        anywhere.agent(i, f"--token-file={tmp_path / 'token'}", nnodes="1:3")
    anywhere.round(3)
    anywhere.agents[0].kill()
    workers = anywhere.round(2, after=1)
    annotation.set("1")
    (worker,) = anywhere.round(1, after=workers[0].round)
    assert reason([worker]) == "the job is scaled to 1 node"
    worker.tell("exit 0")
    assert [anywhere.ends(agent) for agent in anywhere.agents[1:]] == [0, 0], anywhere.everything()


def test_a_node_that_is_lost_is_replaced_by_a_spare_of_a_scaled_job(nodes: Cluster) -> None:
    for i in (1, 2, 3):
        nodes.agent(i, "--last-call=0.1", nnodes="1:3")
    nodes.round(3)
    scale(nodes, "2")
    workers = nodes.round(2, after=1)
    nodes.agents[1].kill()
    workers = nodes.round(2, after=workers[0].round)
    assert "was lost" in reason(workers) or "died" in reason(workers)
    assert status(nodes)["wanted"] == 2


def test_wrong_numbers_are_one_line(nodes: Cluster) -> None:
    nodes.agent(1, nnodes="1:2")
    nodes.round(1)
    wrong = run(nodes, "scale", "3")
    assert (wrong.returncode, wrong.stderr) == (
        2,
        "elastirun scale: 3 nodes: job 'test' was started with --nnodes=1:2, which allows 1 to 2 nodes\n",
    )
    assert status(nodes)["wanted"] == 0


@pytest.mark.parametrize("count", ["0", "two", "1.5", "²", "9" * 30])
def test_what_is_no_number_is_refused(count: str) -> None:
    with pytest.raises(UsageError, match="no number of nodes"):
        main([count])


def test_a_job_that_nobody_runs_is_not_scaled(nodes: Cluster) -> None:
    done = run(nodes, "scale", "2")
    assert done.returncode == 4 and done.stderr.startswith("elastirun scale: no job 'test' at 127.0.0.1:") and done.stderr.count("\n") == 1

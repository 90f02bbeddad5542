"""A job with a mesh: rounds have whole replicas, a spare takes the seat of a lost node, and who adds no replica ends no round."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.support.cluster import Cluster, Worker
from tests.support.until import until

MESH = ("--mesh=dp=auto,pp=2,tp=2", "--max-restarts=3", "--last-call=1")


def meshes(workers: list[Worker]) -> set[str]:
    return {worker.env["ELASTIRUN_MESH"] for worker in workers}


def finish(nodes: Cluster, workers: list[Worker], numbers: tuple[int, ...]) -> None:
    for worker in workers:
        worker.tell("exit 0")
    left = [agent for agent, number in zip(nodes.agents, nodes.numbers, strict=True) if number in numbers]
    assert [nodes.ends(agent) for agent in left] == [0] * len(numbers), nodes.everything()


def test_a_spare_takes_the_seat_of_a_lost_node_and_who_adds_no_replica_ends_no_round(nodes: Cluster) -> None:
    agents = nodes.agents_at_once((1, 2, 3), *MESH, nproc=2)
    first = nodes.round(4)
    assert meshes(first) == {"dp=1,pp=2,tp=2"}
    nodes.says(3, "2 of the 4 workers of the next replica of dp=auto,pp=2,tp=2 are here; this node is a spare")
    command = [sys.executable, "-m", "elastirun", "status", f"--rdzv-endpoint=127.0.0.1:{nodes.port}", "--rdzv-id=test"]
    (job,) = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)["jobs"]
    states = [(node["address"], node["state"]) for node in job["nodes"]]
    assert (job["mesh"], states[2]) == ("dp=1,pp=2,tp=2", ("127.0.0.3", "spare"))
    assert [cell.split(" on ")[0] for cell in job["cells"]] == ["dp 0, pp 0: ranks 0-1", "dp 0, pp 1: ranks 2-3"]
    agents[1].kill()
    second = nodes.round(4, after=first[0].round)
    assert meshes(second) == {"dp=1,pp=2,tp=2"} and second[0].round == first[0].round + 1
    nodes.says(3, "round 2: 2 nodes, 4 workers, dp=1,pp=2,tp=2; here ranks 2-3")
    finish(nodes, second, (1, 3))


def test_newcomers_that_make_a_replica_join_together(nodes: Cluster) -> None:
    nodes.agents_at_once((1, 2), *MESH, nnodes="1:4", nproc=2)
    first = nodes.round(4)
    nodes.agent(3, *MESH, nnodes="1:4", nproc=2)
    nodes.says(3, "this node is a spare")
    nodes.agent(4, *MESH, nnodes="1:4", nproc=2)
    second = nodes.round(8, after=first[0].round)
    assert meshes(second) == {"dp=2,pp=2,tp=2"} and second[0].round == first[0].round + 1
    finish(nodes, second, (1, 2, 3, 4))


def test_a_round_has_a_multiple_of_the_nodes_of_a_unit(nodes: Cluster) -> None:
    nodes.agents_at_once((1, 2, 3), "--node-unit=2", "--max-restarts=3", "--last-call=1", nproc=2)
    workers = nodes.round(4)
    assert not any("ELASTIRUN_MESH" in worker.env for worker in workers)
    until(lambda: "this node is a spare" in nodes.everything(), "a spare, whichever came last", state=nodes.everything, pause=0.05)
    finish(nodes, workers, (1, 2, 3))


def test_survivors_without_a_replica_wait_for_a_node_in_place_of_the_lost_one(nodes: Cluster) -> None:
    agents = nodes.agents_at_once((1, 2), *MESH, nproc=2)
    first = nodes.round(4)
    agents[1].kill()
    nodes.says(1, "1 node joined (")
    nodes.says(1, "one replica of dp=auto,pp=2,tp=2 needs 4 workers on nodes of at least 2, and 2 are here")
    nodes.agent(3, *MESH, nproc=2)
    second = nodes.round(4, after=first[0].round)
    waiting = nodes.out(1).partition("needs 4 workers")[2].partition("round 2")[0].splitlines()
    assert [line for line in waiting if "lost" in line and "127.0.0.2" not in line] == [], "nobody calls the host of the store lost"
    finish(nodes, second, (1, 3))

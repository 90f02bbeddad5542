"""The agent that hosts the rendezvous store dies or leaves, and the others go on: another node has taken over the store."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.cluster import PATIENCE, Cluster, Worker, dies, kill
from tests.system.test_pid1 import AS_PID_1, agent_of, contained

EXPIRE = 30.0  # seconds; far longer than a death notice takes
PROOF = (f"--expire={EXPIRE:g}", "--last-call=0.5", "--max-restarts=0", "--store-succession=proof")


def start(nodes: Cluster, count: int, *options: str, nnodes: str = "1:3") -> tuple[list[subprocess.Popen[str]], list[Worker]]:
    """Start ``count`` agents, the first of which hosts the store. Return them, and the workers of their first common round."""
    agents = [nodes.agent(i, *PROOF, *options, nnodes=nnodes) for i in range(1, count + 1)]
    return agents, nodes.round(count)


def come_back(nodes: Cluster, count: int) -> tuple[list[subprocess.Popen[str]], list[Worker]]:
    """Kill the host of ``count`` nodes, and start it again. Return all agents, and the workers of the job's first round with all."""
    agents, before = start(nodes, count)
    kill(agents[0])
    smaller = nodes.round(count - 1, after=before[0].round, timeout=EXPIRE - 5)
    agents[0] = nodes.agent(1, *PROOF, "--last-call=5")
    whole = nodes.round(count, after=smaller[0].round)
    assert run_of(whole) == run_of(before)
    return agents, whole


def agent_pid(worker: Worker) -> int:
    return int(worker.env["ELASTIRUN_AGENT"].split("-")[0])


def run_of(workers: list[Worker]) -> str:
    """Return the name of the run that the workers belong to: a second run of the job would have another one."""
    (name,) = {worker.env["ELASTIRUN_FENCE"].partition(":")[0] for worker in workers}
    return name


def finish(nodes: Cluster, agents: list[subprocess.Popen[str]], workers: list[Worker]) -> None:
    for worker in workers:
        worker.tell("exit 0")
    assert [nodes.ends(agent) for agent in agents] == [0] * len(agents), nodes.everything()
    assert "cannot look whether other jobs need this store" not in nodes.everything()


@pytest.mark.parametrize("token", [False, True])
def test_the_others_go_on_when_the_host_is_killed(nodes: Cluster, tmp_path: Path, token: bool) -> None:
    secret = tmp_path / "token"
    secret.write_text("the token of this job")
    secret.chmod(0o600)
    agents, before = start(nodes, 3, *([f"--token-file={secret}"] if token else []))
    kill(agents[0])
    after = nodes.round(2, after=before[0].round, timeout=EXPIRE - 5)
    assert dies(before[0].pid, 0), "nothing of the host runs any more"
    assert "which hosted the rendezvous store, was lost" in after[0].env["ELASTIRUN_ROUND_REASON"]
    finish(nodes, agents[1:], after)


def test_the_others_go_on_when_the_host_leaves(nodes: Cluster) -> None:
    agents, before = start(nodes, 3)
    agents[0].send_signal(signal.SIGTERM)
    after = nodes.round(2, after=before[0].round, timeout=EXPIRE - 5)
    assert nodes.ends(agents[0]) == 128 + signal.SIGTERM
    assert "was lost" not in nodes.everything(), "it has left"
    finish(nodes, agents[1:], after)


SLOW_TO_STOP = """
import os, signal, sys, time
if os.environ["GROUP_RANK"] == "2":
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(2), sys.exit(0)))
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_the_third_goes_on_when_another_node_and_then_the_host_go_while_it_stops_its_workers(nodes: Cluster, signum: int) -> None:
    nodes.script.write_text(SLOW_TO_STOP + nodes.script.read_text())
    agents, before = start(nodes, 3, "--node-rank=0")
    by_rank = {int(worker.env["GROUP_RANK"]): next(a for a in agents if a.pid == agent_pid(worker)) for worker in before}
    assert by_rank[0] is agents[0], "it hosts the store"
    by_rank[1].send_signal(signum)
    assert nodes.ends(by_rank[1]) in (128 + signum, -signum)
    agents[0].send_signal(signum)
    (last,) = nodes.round(1, after=before[0].round, timeout=EXPIRE - 5)
    finish(nodes, [by_rank[2]], [last])


def test_the_node_that_comes_back_where_a_moved_job_was_started_stays_for_another_job_there(nodes: Cluster) -> None:
    (back, agent), whole = come_back(nodes, 2)
    where = (f"--rdzv-endpoint=127.0.0.1:{nodes.port}", "--rdzv-conf=is_host=0", "--local-addr=127.0.0.3", "--rdzv-id=other")
    other = nodes.launch(3, "--nnodes=1", "--rdzv-backend=c10d", *where, str(nodes.script))
    (worker,) = nodes.round(1, after=0)
    for one in whole:
        one.tell("exit 0")
    nodes.says(1, "its store stays up for the nodes of job other")
    worker.tell("exit 0")
    assert [nodes.ends(one) for one in (other, back, agent)] == [0, 0, 0], nodes.everything()


@contained
def test_a_host_that_leaves_as_process_1_of_a_container_tells_the_others_by_itself(nodes: Cluster) -> None:
    """Its guard ends with it."""
    where = (f"--rdzv-endpoint=127.0.0.1:{nodes.port}", "--rdzv-id=test", "--rdzv-conf=is_host=1", "--local-addr=127.0.0.1")
    host = nodes.launch(1, "--nnodes=1:3", *where, *PROOF, str(nodes.script), before=AS_PID_1)
    others = [nodes.agent(i, *PROOF) for i in (2, 3)]
    before = nodes.round(3)
    os.kill(agent_of(host, AS_PID_1), signal.SIGTERM)
    after = nodes.round(2, after=before[0].round, timeout=EXPIRE - 5)
    assert nodes.ends(host) == 128 + signal.SIGTERM
    finish(nodes, others, after)


def test_of_two_nodes_the_other_goes_on_alone(nodes: Cluster) -> None:
    agents, before = start(nodes, 2, nnodes="1:2")
    kill(agents[0])
    after = nodes.round(1, after=before[0].round, timeout=EXPIRE - 5)
    assert run_of(after) == run_of(before)
    finish(nodes, agents[1:], after)


def test_hosts_are_killed_one_after_another_until_one_node_is_left(nodes: Cluster) -> None:
    agents, workers = start(nodes, 4, nnodes="1:4")
    for left in (3, 2, 1):
        host = next(i for i, agent in enumerate(agents) if agent.pid == agent_pid(workers[0]))
        kill(agents.pop(host))
        workers = nodes.round(left, after=workers[0].round, timeout=EXPIRE - 5)
        assert "which hosted the rendezvous store, was lost" in workers[0].env["ELASTIRUN_ROUND_REASON"]
    finish(nodes, agents, workers)


@pytest.mark.daily(2)
@pytest.mark.parametrize("left", [2, 1])
def test_the_host_is_killed_and_others_with_it(nodes: Cluster, left: int) -> None:
    agents, before = start(nodes, 4, nnodes="1:4")
    for agent in agents[:-left]:
        agent.kill()
    after = nodes.round(left, after=before[0].round, timeout=EXPIRE - 5)
    assert run_of(after) == run_of(before)
    finish(nodes, agents[-left:], after)


def test_the_host_is_killed_while_it_leaves(nodes: Cluster) -> None:
    agents, before = start(nodes, 3)
    agents[0].send_signal(signal.SIGTERM)
    nodes.says(2, "leaves: SIGTERM")
    kill(agents[0])
    after = nodes.round(2, after=before[0].round, timeout=EXPIRE - 5)
    assert run_of(after) == run_of(before)
    finish(nodes, agents[1:], after)


def test_the_node_that_hosted_the_store_comes_back_into_the_same_job(nodes: Cluster) -> None:
    agents, whole = come_back(nodes, 3)
    assert agents[0].pid in {agent_pid(worker) for worker in whole}
    finish(nodes, agents, whole)


def test_the_guard_of_a_node_that_has_moved_speaks_to_the_store_where_it_is(nodes: Cluster) -> None:
    agents, before = start(nodes, 3)
    kill(agents[0])
    smaller = nodes.round(2, after=before[0].round, timeout=EXPIRE - 5)
    victim = next(agent for agent in agents[1:] if agent.pid == int(smaller[1].env["ELASTIRUN_AGENT"].split("-")[0]))
    kill(victim)
    (alone,) = nodes.round(1, after=smaller[0].round, timeout=EXPIRE - 5)
    assert "its agent died" in alone.env["ELASTIRUN_ROUND_REASON"]
    finish(nodes, [agent for agent in agents[1:] if agent is not victim], [alone])


def test_where_it_is_switched_off_nobody_takes_over(nodes: Cluster) -> None:
    options = ("--expire=2", "--store-grace=3", "--last-call=0.5", "--store-succession=off")
    agents = [nodes.agent(i, *options, nnodes="1:2") for i in (1, 2)]
    nodes.round(2)
    kill(agents[0])
    assert nodes.ends(agents[1], PATIENCE) == 201


# -- a list of endpoints


def agent_of_list(nodes: Cluster, i: int, *options: str) -> subprocess.Popen[str]:
    """Start the agent of "node" 127.0.0.<i>; the list has the endpoints of nodes 1, 2 and 3."""
    where = ",".join(f"127.0.0.{host}:{nodes.port}" for host in (1, 2, 3))
    return nodes.agent(i, *PROOF, f"--rdzv-endpoint={where}", *options, nnodes="1:4")


def test_a_node_of_any_address_finds_the_job_while_nobody_is_at_the_first_endpoint(nodes: Cluster) -> None:
    agents = [agent_of_list(nodes, i) for i in (1, 2, 3)]
    before = nodes.round(3)
    kill(agents[0])
    smaller = nodes.round(2, after=before[0].round, timeout=EXPIRE - 5)
    new = agent_of_list(nodes, 4)
    larger = nodes.round(3, after=smaller[0].round, timeout=EXPIRE - 5)
    assert run_of(larger) == run_of(before) and new.pid in {agent_pid(worker) for worker in larger}
    finish(nodes, [*agents[1:], new], larger)


def test_a_node_of_the_list_that_was_killed_comes_back_to_its_place(nodes: Cluster) -> None:
    """The first endpoint is dead, and this node's own place in the list says nothing yet."""
    agents = [agent_of_list(nodes, i) for i in (1, 2, 3)]
    before = nodes.round(3)
    kill(agents[0])
    smaller = nodes.round(2, after=before[0].round, timeout=EXPIRE - 5)
    i = next(i for i, agent in enumerate(agents) if agent.pid == agent_pid(smaller[1]))
    kill(agents[i])
    nodes.round(1, after=smaller[0].round, timeout=EXPIRE - 5)
    agents[i] = agent_of_list(nodes, i + 1)
    again = nodes.round(2, after=smaller[0].round + 1, timeout=EXPIRE - 5)
    assert run_of(again) == run_of(before)
    finish(nodes, agents[1:], again)


def test_the_node_of_the_first_endpoint_comes_back_and_begins_no_second_job(nodes: Cluster) -> None:
    agents = [agent_of_list(nodes, i) for i in (1, 2, 3)]
    before = nodes.round(3)
    kill(agents[0])
    smaller = nodes.round(2, after=before[0].round, timeout=EXPIRE - 5)
    back = agent_of_list(nodes, 1, "--last-call=0")
    whole = nodes.round(3, after=smaller[0].round, timeout=EXPIRE - 5)
    assert run_of(whole) == run_of(before)
    finish(nodes, [*agents[1:], back], whole)


def test_all_nodes_of_the_list_that_start_from_nothing_begin_one_job(nodes: Cluster) -> None:
    agents = [agent_of_list(nodes, i) for i in (1, 2, 3)]
    before = nodes.round(3)
    kill(agents[0])
    nodes.round(2, after=before[0].round, timeout=EXPIRE - 5)
    for agent in agents[1:]:
        kill(agent)
    nodes.pending.clear()
    agents = [agent_of_list(nodes, i, "--last-call=2") for i in (3, 2, 1)]
    whole = nodes.round(3)
    assert run_of(whole) != run_of(before)
    finish(nodes, agents, whole)

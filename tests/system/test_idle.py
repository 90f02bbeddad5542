"""An agent costs next to nothing while its workers train."""

from __future__ import annotations

import time

from benchmarks import costs
from tests.support.cluster import Cluster, Worker
from tests.support.until import until

WINDOW = 3.0  # seconds in which wake-ups are counted: two beats of a job of one node


def wake_ups(agent: int, workers: list[Worker]) -> float:
    """Return the wake-ups per second of an agent, its guard, its fork server and its parked forks."""
    pids = costs.process_tree(agent).keys() - {worker.pid for worker in workers}
    began, before = time.monotonic(), costs.wake_ups(pids)
    time.sleep(WINDOW)
    return (costs.wake_ups(pids) - before) / (time.monotonic() - began)


def test_idle_agents_of_two_nodes_wake_up_a_few_times_a_second(nodes: Cluster) -> None:
    """For each beat the loop wakes to ask the store and to take its answer, and on the store's host the server wakes once for each node."""
    agents = [nodes.agent(i, nnodes="2") for i in (1, 2)]
    workers = nodes.round(2)
    for agent, most in zip(agents, (16.0, 8.0), strict=True):
        until(lambda agent=agent, most=most: wake_ups(agent.pid, workers) <= most, f"at most {most:g} wake-ups per second")
    for worker in workers:
        worker.tell("exit 0")
    assert [nodes.ends(agent) for agent in agents] == [0, 0]


def test_an_idle_agent_without_other_nodes_wakes_up_a_few_times_a_second(nodes: Cluster) -> None:
    agent = nodes.launch(1, "--standalone", str(nodes.script))
    workers = nodes.round(1)
    # The first window that holds counts: an agent of a busy machine may be late, and then it asks the store again.
    until(lambda: wake_ups(agent.pid, workers) <= 5.0, "at most 5 wake-ups per second")
    workers[0].tell("exit 0")
    assert nodes.ends(agent) == 0

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


def test_an_idle_agent_without_other_nodes_wakes_up_a_few_times_a_second(nodes: Cluster) -> None:
    agent = nodes.launch(1, "--standalone", str(nodes.script))
    workers = nodes.round(1)
    # The first window that holds counts: an agent of a busy machine may be late, and then it asks the store again.
    until(lambda: wake_ups(agent.pid, workers) <= 5.0, "at most 5 wake-ups per second")
    workers[0].tell("exit 0")
    assert nodes.ends(agent) == 0

"""MASTER_PORT is the given port, and what workers stored there in one round is gone in the next."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

import pytest

from elastirun.rendezvous.stores.tcp import TcpStore, connect
from tests.support.cluster import Cluster, Worker, free_port
from tests.system.test_endings import with_change

# The server of a round comes up a second after its workers.
LATE = """
import time
from elastirun.agent.store.worker_store import WorkerStore
serve = WorkerStore.serve
def late(self):
    time.sleep(1)
    serve(self)
WorkerStore.serve = late
"""


def start(nodes: Cluster, i: int, count: int, *options: str, change: str = "") -> None:
    options = (f"--master-port={nodes.port}", "--max-restarts=1", *options)
    nodes.launch(i, f"--nnodes={count}", *options, str(nodes.script), program=with_change(change))


def store_of(worker: Worker) -> TcpStore:
    return connect(worker.env["MASTER_ADDR"], int(worker.env["MASTER_PORT"]))


@dataclass
class TwoRounds:
    """What the workers of two rounds were told, which keys of the first the second one has, and how the agents ended."""

    ports: list[set[str]]
    kept: dict[str, bytes]
    codes: set[int]


def two_rounds(nodes: Cluster, size: int) -> TwoRounds:
    """Leave keys in the store of the first round, have a worker fail, and look into the store of the second."""
    first = nodes.round(size)
    keys = [f"default_pg/0//cpu//0/{i}" for i in range(20)]
    with closing(store_of(first[0])) as store:
        for key in keys:
            store.put_if(key, None, b"an address of the first round")
        assert len(store.get(keys)) == 20, "they were never there"
    first[-1].tell("exit 3")
    second = nodes.round(size, after=1)
    with closing(store_of(second[0])) as store:
        kept = store.get(keys)
    for worker in second:
        worker.tell("exit 0")
    ports = [{f"{w.env['MASTER_ADDR']}:{w.env['MASTER_PORT']}" for w in workers} for workers in (first, second)]
    return TwoRounds(ports, kept, {nodes.ends(agent) for agent in nodes.agents})


def the_port_and_no_old_key(nodes: Cluster) -> TwoRounds:
    return TwoRounds([{f"127.0.0.1:{nodes.port}"}] * 2, {}, {0})


@pytest.mark.parametrize("change", ["", LATE], ids=["", "before its server is up"])
def test_on_one_node(nodes: Cluster, change: str) -> None:
    start(nodes, 1, 1, "--nproc-per-node=2", change=change)
    assert two_rounds(nodes, 2) == the_port_and_no_old_key(nodes)


def test_on_two_nodes_with_fixed_ranks(nodes: Cluster) -> None:
    for rank in (1, 0):
        start(nodes, rank + 1, 2, f"--node-rank={rank}", "--master-addr=127.0.0.1")
    assert two_rounds(nodes, 2) == the_port_and_no_old_key(nodes)


def test_on_elastic_nodes(nodes: Cluster) -> None:
    for i in (1, 2):
        start(nodes, i, 2, "--rdzv-backend=c10d", "--rdzv-id=job", "--master-addr=127.0.0.1")
    assert two_rounds(nodes, 2) == the_port_and_no_old_key(nodes)


def test_a_port_of_their_own_on_request(nodes: Cluster) -> None:
    nodes.env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    for rank in (0, 1):
        start(nodes, rank + 1, 2, f"--node-rank={rank}", "--master-addr=127.0.0.1")
    workers = nodes.round(2)
    assert str(nodes.port) not in {w.env["MASTER_PORT"] for w in workers}


def test_another_jobs_store_is_not_used_by_our_workers(nodes: Cluster) -> None:
    where = ("--rdzv-backend=c10d", "--master-addr=127.0.0.1", "--expire=10")
    start(nodes, 1, 1, *where, "--rdzv-id=one", "--rdzv-conf=is_host=1", f"--rdzv-endpoint=127.0.0.1:{nodes.port}")
    (one,) = nodes.round(1)
    start(nodes, 2, 2, *where, "--rdzv-id=two")
    start(nodes, 3, 2, *where, "--rdzv-id=two")
    two = nodes.round(2)
    assert {w.env["MASTER_PORT"] for w in two}.isdisjoint({str(nodes.port), one.env["MASTER_PORT"]})
    for worker in (one, *two):
        worker.tell("exit 0")
    assert [nodes.ends(agent) for agent in nodes.agents] == [0, 0, 0], nodes.everything()


def test_a_port_that_is_taken_is_named(nodes: Cluster) -> None:
    start(nodes, 1, 1)
    (worker,) = nodes.round(1)
    start(nodes, 2, 1)
    assert nodes.ends(nodes.agents[1]) == 202
    assert f"127.0.0.1:{nodes.port}: another process has that port; end it, or choose another with --master-port" in nodes.out(2)
    worker.tell("exit 0")
    assert nodes.ends(nodes.agents[0]) == 0


def test_without_a_given_port_it_is_of_the_range_and_an_agent_that_finds_none_ends_with_one_line(nodes: Cluster) -> None:
    where = ("--nnodes=1:3", "--rdzv-backend=c10d", "--rdzv-id=job", f"--rdzv-endpoint=127.0.0.1:{nodes.port}", "--local-addr=127.0.0.1")
    ports = [free_port(), free_port()]
    for i, port in enumerate((*ports, ports[0]), 1):
        nodes.launch(i, *where, "--max-restarts=1", "--last-call=0.5", f"--port-range={port}:{port}", str(nodes.script))
        if i == 2:
            one = nodes.round(2)
    assert nodes.ends(nodes.agents[2]) == 202
    assert f"no port from {ports[0]} to {ports[0]} of 127.0.0.1 is free; widen --port-range" in nodes.out(3)
    one[-1].tell("exit 3")
    two = nodes.round(2, after=1)
    assert {int(w.env["MASTER_PORT"]) for w in (*one, *two)} <= {*ports}
    for worker in two:
        worker.tell("exit 0")
    assert [nodes.ends(agent) for agent in nodes.agents[:2]] == [0, 0]

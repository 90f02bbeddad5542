"""Real agents with ``--strikes``: a node whose worker fails again and again sits out, and a spare takes its place."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from elastirun.rendezvous.stores.etcd.store import connector
from tests.support.cluster import PATIENCE, Cluster, Worker, cluster
from tests.support.etcd_server import etcd, needs_etcd
from tests.support.until import until

OPTIONS = ("--max-restarts=9", "--set=restart-pause=0", "--event-log-handler=console")


def two_and_a_spare(c: Cluster, *options: str) -> list[Worker]:
    """Start nodes 1 and 2, with the store at node 1 and the strikes of node 2, and node 3 beside them. Return the workers of 1 and 2."""
    c.agent(1, *OPTIONS, nnodes="2")
    c.agent(2, *OPTIONS, *options, nnodes="2")
    workers = c.round(2)
    c.agent(3, *OPTIONS, nnodes="2")
    c.says(3, "this node is a spare")
    return workers


def succeed(workers: list[Worker]) -> None:
    for worker in workers:
        worker.tell("exit 0")


def test_a_node_that_fails_twice_sits_out_and_the_spare_takes_its_place(tmp_path: Path) -> None:
    with cluster(tmp_path) as c:
        first = two_and_a_spare(c, "--strikes=2")
        first[1].tell("raise first")
        second = c.round(2, after=1)
        c.says(2, "strike 1 of 2 for this node: rank 1")
        second[1].tell("raise second")
        third = c.round(2, after=second[0].round)
        assert third[0].round == 3  # no round beside
        c.says(2, "this node sits out for 600 s at most: strike 2 of 2: rank 1")
        c.says(3, "round 3: 2 nodes")
        succeed(third)
        assert [c.ends(agent) for agent in c.agents] == [0, 0, 0]
        said = c.out(2)
        assert "this node joins again" in said and "the job is decided" in said
        assert all(f'"name": "{kind}"' in said for kind in ("sits_out", "sat_out", "account")) and '"sitting_out": 0.0' not in said
        assert "sits out" not in c.out(1) + c.out(3)


@pytest.mark.daily(2)
def test_after_its_time_it_is_a_spare_with_a_fresh_count(tmp_path: Path) -> None:
    with cluster(tmp_path) as c:
        two_and_a_spare(c, "--strikes=1", "--set=strikes-cooldown=15")[1].tell("raise once")
        c.round(2, after=1)
        c.says(2, "s: its time is over")
        c.says(2, "round 2 has its 2 nodes; this node is a spare")
        c.agents[2].terminate()
        third = c.round(2, after=2)
        succeed(third)
        assert [c.ends(agent) for agent in c.agents[:2]] == [0, 0]


def test_a_node_that_is_needed_stays_and_says_so_once(tmp_path: Path) -> None:
    with cluster(tmp_path) as c:
        for i in (1, 2):
            c.agent(i, *OPTIONS, "--strikes=1", nnodes="2")
        for number in (1, 2):
            c.round(2, after=number - 1)[1].tell("raise again")
        succeed(c.round(2, after=2))
        assert [c.ends(agent) for agent in c.agents] == [0, 0]
        assert c.out(2).count("does not sit out: the job needs 2 nodes, and there are 1 others") == 1


def test_the_host_of_the_store_stays(tmp_path: Path) -> None:
    with cluster(tmp_path) as c:
        for i in (1, 2):
            c.agent(i, *OPTIONS, "--strikes=1", nnodes="1:2")
        c.round(2)[0].tell("raise at the host")
        succeed(c.round(2, after=1))
        assert [c.ends(agent) for agent in c.agents] == [0, 0]
        assert "does not sit out: it hosts the store" in c.out(1)


def test_a_signal_ends_a_node_that_sits_out(tmp_path: Path) -> None:
    with cluster(tmp_path) as c:
        two_and_a_spare(c, "--strikes=1")[1].tell("raise once")
        second = c.round(2, after=1)
        c.says(2, "this node sits out")
        c.agents[1].terminate()
        assert c.ends(c.agents[1]) == 128 + 15
        succeed(second)
        assert [c.ends(c.agents[i]) for i in (0, 2)] == [0, 0]


@needs_etcd
def test_at_etcd_the_node_with_rank_0_sits_out_like_any_other(tmp_path: Path) -> None:
    with etcd() as server, cluster(tmp_path) as c:
        c.etcd = server.endpoints
        for i in (1, 2):
            c.agent(i, *OPTIONS, "--strikes=1", nnodes="2")
        first = c.round(2)
        c.agent(3, *OPTIONS, nnodes="2")
        c.says(3, "this node is a spare")
        with closing(connector(server.endpoints, deadline=PATIENCE)()) as store:
            rows = f"{tmp_path.name}/node/"
            until(lambda: len(store.under(rows)) >= 3, "3 rows: a node may say so before its row is there", state=c.everything)
        first[0].tell("raise once")
        second = c.round(2, after=1)
        assert [sum("this node sits out" in c.out(i) for i in numbers) for numbers in ((1, 2), (3,))] == [1, 0]
        succeed(second)
        assert [c.ends(agent) for agent in c.agents] == [0, 0, 0]

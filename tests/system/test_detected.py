"""Whole agents that detect their part in an Indexed Job, which grows and shrinks. A pod is a process with a host name of its own."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from tests.support.cluster import Cluster, Worker

DOMAIN = "train.team.svc.localhost"  # names below .localhost may stand for loopback addresses

# Gives the agent the names of a pod: a host name, a full name in /etc/hosts, and a name server that knows all pods.
POD = f"""
import os, socket
own, look_up = "train-" + os.environ["JOB_COMPLETION_INDEX"], socket.getaddrinfo
def getaddrinfo(host, *rest, **more):
    name, _, domain = str(host).partition(".")
    return look_up(os.environ["TEST_NET"] + name[len("train-"):] if domain == "{DOMAIN}" else host, *rest, **more)
socket.gethostname, socket.getfqdn, socket.getaddrinfo = lambda: own, lambda name="": own + ".{DOMAIN}", getaddrinfo
from elastirun.cli.main import main
main()
"""


def pod(nodes: Cluster, index: int, *options: str) -> subprocess.Popen[str]:
    """Start the agent of a pod with the plain command. ``nodes.out(index)`` returns its output."""
    nodes.env |= {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "PET_NNODES": "1:3", "PET_LAST_CALL": "0.5", "JOB_COMPLETION_INDEX": str(index)}
    nodes.env.setdefault("TEST_NET", "127.{}.{}.1".format(*os.urandom(2)))  # addresses of this test alone, because the port is fixed
    return nodes.launch(index, *options, str(nodes.script), program=("-c", POD))


@pytest.mark.daily(2)
def test_an_indexed_job_is_followed_when_it_grows_and_shrinks_and_a_pod_is_replaced(nodes: Cluster) -> None:
    second = pod(nodes, 1)  # pods start in any order; this one has nobody to meet yet
    first = pod(nodes, 0)
    before = nodes.round(2)
    assert ranks(before) == [("0", "0"), ("1", "1")], "the node rank is the index"
    assert before[0].env["TORCHELASTIC_RUN_ID"] == "team.train"

    third, spare = pod(nodes, 2), pod(nodes, 3)
    grown = nodes.round(3, after=before[0].round)
    assert ranks(grown) in ([("0", "0"), ("1", "1"), ("2", "2")], [("0", "0"), ("1", "1"), ("2", "3")]), "one of the two is a spare"

    for agent in (third, spare):  # what a Job does that is made smaller
        agent.send_signal(signal.SIGTERM)
    assert [nodes.ends(agent) for agent in (third, spare)] == [128 + signal.SIGTERM] * 2
    assert "JOB_COMPLETION_INDEX=3: PET_NNODES allows 3 nodes; this one is a spare" in nodes.out(3)
    shrunk = nodes.round(2, after=grown[0].round)
    assert ranks(shrunk) == [("0", "0"), ("1", "1")]

    second.send_signal(signal.SIGTERM)  # an eviction
    assert nodes.ends(second) == 128 + signal.SIGTERM
    alone = nodes.round(1, after=shrunk[0].round)
    replacement = pod(nodes, 1)
    again = nodes.round(2, after=alone[0].round)
    assert ranks(again) == [("0", "0"), ("1", "1")]
    for worker in again:
        worker.tell("exit 0")
    assert [nodes.ends(first), nodes.ends(replacement)] == [0, 0]
    assert "every interface" not in nodes.out(0), "the host finds its own address before DNS knows its name"


def ranks(workers: list[Worker]) -> list[tuple[str, str]]:
    return [(worker.env["GROUP_RANK"], worker.env["JOB_COMPLETION_INDEX"]) for worker in workers]

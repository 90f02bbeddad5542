"""``elastirun check``, and ``--check`` before a job, by real processes. Broken clusters: tests/system/check_cases.py."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.cluster import Cluster, cluster
from tests.support.etcd_server import etcd, needs_etcd
from tests.support.until import PATIENCE, until
from tests.system import check_cases

ON_HOSTS = pytest.mark.skipif(bool(check_cases.missing()), reason=f"no broken clusters here: {check_cases.missing()}")


@ON_HOSTS
@pytest.mark.daily(6, "check-cases")
@pytest.mark.parametrize("name", check_cases.CASES)
def test_the_right_node_or_pair_is_named(name: str) -> None:
    assert check_cases.one_case(name, number=0).wrong == []


@ON_HOSTS
@pytest.mark.daily(4)
@pytest.mark.parametrize("number", [1, 3, 5, 9])
def test_a_sound_cluster_has_no_finding(number: int) -> None:
    assert check_cases.one_sound(number).wrong == []


def test_beyond_sixteen_nodes_each_measures_two_ways() -> None:
    """All of them are one machine's, so that the time says little of a cluster."""
    assert [line for line in check_cases.many(20).wrong if "more than" not in line] == []


def result(cluster: Cluster, i: int) -> dict[str, object]:
    (line,) = [line for line in cluster.out_path(i).read_text().splitlines() if line.startswith("{")]
    return dict(json.loads(line))


def test_a_node_alone_says_how_many_did_not_come_and_why_it_cannot_meet(nodes: Cluster) -> None:
    where = [f"--rdzv-endpoint=127.0.0.1:{nodes.port}", "--rdzv-id=job", "--torch=off", "--json"]
    alone = nodes.launch(1, "check", "--nnodes=3", *where, "--rdzv-conf=is_host=1", "--join-timeout=0.5")
    assert nodes.ends(alone) == 201
    (finding,) = result(nodes, 1)["findings"]  # type: ignore[misc]
    assert finding["text"].startswith("2 of 3 nodes have not come; here is "), finding
    lost = nodes.launch(2, "check", "--nnodes=3", *where, "--rdzv-conf=is_host=0", "--join-timeout=0.5")
    assert nodes.ends(lost) == 202
    (finding,) = result(nodes, 2)["findings"]  # type: ignore[misc]
    assert finding["kind"] == "store" and "connection refused" in finding["text"] and str(nodes.port) in finding["advice"]
    assert "Traceback" not in nodes.everything()


def test_a_node_without_a_token_or_with_another_one_is_told(nodes: Cluster) -> None:
    token = nodes.tmp_path / "token"
    token.write_bytes(b"0123456789abcdef")
    token.chmod(0o600)
    where = ["check", "--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{nodes.port}", "--rdzv-id=job", "--torch=off"]
    other = nodes.launch(2, *where, "--rdzv-conf=is_host=0", "--local-addr=127.0.0.2", "--join-timeout=20")
    nodes.says(2, "waits for the store")
    one = nodes.launch(1, *where, "--rdzv-conf=is_host=1", "--local-addr=127.0.0.1", "--join-timeout=5", f"--token-file={token}")
    assert (nodes.ends(one), nodes.ends(other)) == (201, 201)
    assert "signed" in nodes.out(1) and "signed, but this node has no token" in nodes.out(2)


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="prlimit is missing (Debian: util-linux)")
def test_before_a_job_a_bad_node_sits_out_and_the_others_go_on(nodes: Cluster) -> None:
    """The bad node has 80 descriptors, of which an agent could live."""
    for i in (1, 2, 3):
        where = [
            f"--rdzv-endpoint=127.0.0.1:{nodes.port}",
            "--rdzv-id=job",
            f"--rdzv-conf=is_host={int(i == 1)}",
            f"--local-addr=127.0.0.{i}",
        ]
        before = ("prlimit", "--nofile=80:80") if i == 2 else ()
        nodes.launch(i, "--check", "--nnodes=2:3", "--last-call=1", *where, str(nodes.script), before=before)
    assert nodes.ends(nodes.agents[1]) == 202
    assert "a process may open 80 files at most; raise the limit" in nodes.out(2) and "takes no part in the job" in nodes.out(2)
    for worker in nodes.round(2):
        worker.tell("exit 0")
    assert [nodes.ends(nodes.agents[i]) for i in (0, 2)] == [0, 0]
    assert "3 nodes checked in" in nodes.out(1), "all have met before"


def test_a_node_that_comes_to_a_job_that_runs_checks_itself_only(nodes: Cluster) -> None:
    first = nodes.agent(1, nnodes="1:2")
    (worker,) = nodes.round(1)
    second = nodes.agent(2, "--check", nnodes="1:2")
    nodes.says(2, "the job has begun already, so only this node is checked")
    worker.await_death()
    for one in nodes.round(2, after=worker.round):
        one.tell("exit 0")
    assert [nodes.ends(agent) for agent in (first, second)] == [0, 0]


@needs_etcd
def test_at_etcd_nodes_meet_and_leave_nothing_behind(tmp_path: Path) -> None:
    with etcd() as servers, cluster(tmp_path) as nodes:
        nodes.etcd = servers.endpoints
        where = ["--rdzv-backend=etcd", f"--rdzv-endpoint={','.join(nodes.etcd)}", "--rdzv-id=job", "--torch=off"]
        for _ in range(2):
            agents = [nodes.launch(i, "check", "--nnodes=2", *where, f"--local-addr=127.0.0.{i}") for i in (1, 2)]
            assert [nodes.ends(agent) for agent in agents] == [0, 0], nodes.everything()
        assert nodes.out(1).count("2 nodes checked in") == 2
        first = nodes.agent(1, nnodes="1:2")
        (worker,) = nodes.round(1)
        second = nodes.agent(2, "--check", nnodes="1:2")
        nodes.says(2, "the job has begun already, so only this node is checked")
        for one in nodes.round(2, after=worker.round):
            one.tell("exit 0")
        assert [nodes.ends(agent) for agent in (first, second)] == [0, 0]


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_check_that_is_stopped_leaves_nothing(tmp_path: Path, end: signal.Signals) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "elastirun", "check", "--nproc-per-node=2"]
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        until(lambda: children(process.pid, of="torch_probe"), "torch to be started")
        process.send_signal(end)
        assert process.wait(PATIENCE) != 0
    assert not [*tmp_path.iterdir()]


def children(pid: int, of: str) -> bool:
    with suppress(psutil.Error):  # one that has just ended
        return any(of in " ".join(one.cmdline()) for one in psutil.Process(pid).children(recursive=True))
    return False


def test_a_table_that_cannot_be_written_is_an_error() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "elastirun", "check", "--torch=off"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and "cannot write to stdout: No space left on device" in done.stderr


def test_strangers_learn_nothing_at_a_port_that_is_checked() -> None:
    code = """
import socket, sys
from elastirun.agent.check.probe_server import ProbeServer
listening = socket.create_server(("127.0.0.1", 0))
server = ProbeServer("the-node", [listening])
server.answer("secret")
print(listening.getsockname()[1], flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        port = int(process.stdout.readline())
        for said, answer in ((b"wrong!", b""), (b"GET / HTTP/1.0\r\n\r\n", b""), (b"secret", b"\x08\0the-node")):
            with socket.create_connection(("127.0.0.1", port), 10) as connection:
                connection.sendall(said)
                try:
                    assert connection.recv(100) == answer
                except ConnectionResetError:
                    assert not answer
        process.stdin.close()

"""The health port of real agents: every state over HTTP, a loop that stands still, strangers, and ports that cannot be had."""

from __future__ import annotations

import http.client
import json
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from elastirun.agent.host import descriptors
from elastirun.agent.status.http_port import MAX_CONNECTIONS
from tests.support.cluster import PATIENCE, WORKER, Cluster, free_port
from tests.support.until import until
from tests.system.test_endings import DEAF, with_change

QUICK = "--last-call=0.1"
has_ipv6 = pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="this machine has no IPv6")

# The agent, whose loop stands still when it is signalled.
STUCK = """
import time
from elastirun.agent.status import http_port
from elastirun.agent.workers.workers import Workers
http_port.LOOP_LIMIT = 0.5
Workers.forward = lambda self, signum: time.sleep(1000)
"""


def get(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    """Return status and body. Waits until the port is there."""
    deadline = time.monotonic() + PATIENCE
    while True:
        connection = http.client.HTTPConnection(host, port, timeout=PATIENCE)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "nobody listens there"
            time.sleep(0.02)
        finally:
            connection.close()


def status(port: int, **wanted: object) -> dict[str, Any]:
    """Return /status as soon as it says what is wanted."""
    deadline = time.monotonic() + PATIENCE
    while True:
        found: dict[str, Any] = json.loads(get(port, "/status")[1])
        if all(found[name] == value for name, value in wanted.items()):
            return found
        assert time.monotonic() < deadline, f"{wanted} never came: {found}"
        time.sleep(0.02)


def metrics(port: int) -> dict[tuple[str, ...], float]:
    """Return the samples of /metrics: (name, label values...) to value."""
    families = text_string_to_metric_families(get(port, "/metrics")[1])
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


def probes(port: int) -> tuple[int, int]:
    return get(port, "/healthz")[0], get(port, "/readyz")[0]


def test_an_agent_is_healthy_in_every_state_and_ready_while_a_round_runs(nodes: Cluster) -> None:
    first, second = free_port(), free_port()
    options = (QUICK, "--max-restarts=1", "--grace=60", "--failure-grace=0.1")
    a = nodes.agent(1, f"--health-port=127.0.0.1:{first}", *options, nnodes="2", nproc=2)
    found = status(first, state="joining", joins_waiting=1)
    assert (found["round"], found["world_size"], found["nodes"], found["seconds_since_round_start"]) == (0, 0, [], None)
    assert probes(first) == (200, 503)
    nodes.script.write_text(DEAF)
    b = nodes.agent(2, f"--health-port=127.0.0.1:{second}", *options, nnodes="2", nproc=2)
    workers = nodes.round(4)
    found = status(first, state="running", workers={"running": 2, "stopping": 0, "ended": 0})
    assert (found["round"], found["world_size"], len(found["nodes"]), found["node_rank"]) == (1, 4, 2, 0)
    assert status(second, state="running")["node_rank"] == 1
    assert probes(first) == probes(second) == (200, 200)

    workers[0].tell("exit 1")
    workers = nodes.round(4, after=1)
    status(first, state="running", round=2)
    samples = metrics(first)
    assert samples[("elastirun_restarts_total", "failure")] == 1
    assert (samples[("elastirun_round",)], samples[("elastirun_world_size",)], samples[("elastirun_nodes",)]) == (2, 4, 2)
    assert 0 <= samples[("elastirun_round_age_seconds",)] < PATIENCE

    for worker in workers[:2]:
        worker.tell("exit 0")
    status(first, state="finishing")
    assert probes(first) == (200, 503)

    workers[2].tell("exit 0")
    status(second, workers={"running": 1, "stopping": 0, "ended": 1})
    b.send_signal(signal.SIGTERM)  # its last worker does not listen
    status(second, state="stopping", workers={"running": 0, "stopping": 1, "ended": 1})
    assert probes(second) == (200, 503)
    workers[3].tell("exit 0")
    assert nodes.ends(b) == 143
    status(first, state="joining")
    a.send_signal(signal.SIGTERM)
    assert nodes.ends(a) == 143


def test_steps_are_shown_of_the_workers_that_stamp_them(nodes: Cluster) -> None:
    port = free_port()
    stamps = 'if os.environ["LOCAL_RANK"] == "1":\n    from elastirun.progress import progress\n    progress(); progress()\n'
    nodes.script.write_text(f"import os\n{stamps}{WORKER}")
    agent = nodes.agent(1, f"--health-port=127.0.0.1:{port}", QUICK, nnodes="1", nproc=2)
    workers = nodes.round(2)
    (found,) = status(port)["steps"]
    assert (found["rank"], found["local_rank"], found["steps"], found["steps_per_second"]) == (1, 1, 2, None)
    assert 0 <= found["seconds_since_step"] < PATIENCE
    samples = metrics(port)
    assert samples[("elastirun_worker_steps_total", "1")] == 2
    assert 0 <= samples[("elastirun_worker_step_age_seconds", "1")] < PATIENCE
    workers[1].tell("exit 0")
    status(port, steps=[])
    workers[0].tell("exit 0")
    assert nodes.ends(agent) == 0


def test_an_agent_that_stays_for_another_job_is_healthy(nodes: Cluster) -> None:
    port = free_port()
    where = ("--nnodes=1:2", QUICK, f"--rdzv-endpoint=127.0.0.1:{nodes.port}", "--local-addr=127.0.0.1")
    host = nodes.launch(1, *where, "--rdzv-id=a", "--rdzv-conf=is_host=1", f"--health-port=127.0.0.1:{port}", str(nodes.script))
    (first,) = nodes.round(1)
    other = nodes.launch(2, *where, "--rdzv-id=b", "--rdzv-conf=is_host=0", str(nodes.script))
    (second,) = nodes.round(1)
    first.tell("exit 0")
    nodes.says(1, "its store stays up for the nodes of job")
    assert get(port, "/healthz") == (200, "finishing\n")
    second.tell("exit 0")
    assert [nodes.ends(agent) for agent in (other, host)] == [0, 0]


def test_a_loop_that_stands_still_is_503(nodes: Cluster) -> None:
    port = free_port()
    options = (f"--health-port=127.0.0.1:{port}", "--forward-signals=USR1")
    agent = nodes.launch(1, *options, str(nodes.script), program=with_change(STUCK))
    nodes.round(1)
    assert get(port, "/healthz") == (200, "running\n")
    agent.send_signal(signal.SIGUSR1)
    code, text = until(lambda: found if (found := get(port, "/healthz"))[0] != 200 else None, "another answer than 200")
    assert code == 503 and text.startswith("the agent's loop has not answered for ")
    assert [get(port, path)[0] for path in ("/readyz", "/status", "/metrics")] == [503] * 3


def test_a_port_in_use_is_one_line_and_202_and_nothing_was_started(nodes: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        nodes.ask_for_messages = True
        agent = nodes.launch(1, f"--health-port=127.0.0.1:{port}", str(nodes.script))
        assert nodes.ends(agent) == 202
    line = f"cannot listen on 127.0.0.1:{port}: another process has that port; end it, or choose another with --health-port"
    assert nodes.out(1) == f"elastirun: {line}\n"
    assert (nodes.message(1)["verdict"], nodes.message(1)["reason"]) == ("sick", line)


def test_a_second_agent_in_a_container_runs_without_the_port_of_the_first(nodes: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        nodes.env["PET_HEALTH_PORT"] = f"127.0.0.1:{other.getsockname()[1]}"
        agent = nodes.launch(1, "--standalone", str(nodes.script))
        (worker,) = nodes.round(1)
        worker.tell("exit 0")
        assert nodes.ends(agent) == 0
    assert nodes.out(1).count("warning: PET_HEALTH_PORT is ignored with --standalone: cannot listen on 127.0.0.1:") == 1


@has_ipv6
@pytest.mark.parametrize("where", ["[::1]:{}", "{}"])
def test_it_listens_on_ipv6_and_on_every_interface(nodes: Cluster, where: str) -> None:
    port = free_port()
    agent = nodes.launch(1, f"--health-port={where.format(port)}", str(nodes.script))
    (worker,) = nodes.round(1)
    assert get(port, "/healthz", "::1") == (200, "running\n")
    if where == "{}":
        assert get(port, "/healthz", "127.0.0.1") == get(port, "/healthz", "127.0.0.2") == (200, "running\n")
    else:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
    said = f"port {port} of every interface of this machine" if where == "{}" else f"[::1]:{port}"
    assert f"elastirun: health port: {said}\n" in nodes.out(1)
    worker.tell("exit 0")
    assert nodes.ends(agent) == 0


def test_a_launcher_below_an_agent_leaves_the_variable_alone(nodes: Cluster) -> None:
    port = free_port()
    nodes.env["PET_HEALTH_PORT"] = f"127.0.0.1:{port}"
    inner = nodes.tmp_path / "inner.py"
    inner.write_text(WORKER)
    nodes.script.write_text(f"import subprocess, sys\nsys.exit(subprocess.call([sys.executable, '-m', 'elastirun', {str(inner)!r}]))")
    agent = nodes.launch(1, str(nodes.script))
    (worker,) = nodes.round(1)
    assert get(port, "/healthz")[0] == 200
    worker.tell("exit 0")
    assert nodes.ends(agent) == 0
    assert nodes.out(1).count("PET_HEALTH_PORT is ignored: the agent whose worker started this launcher serves that port") == 1


def connections(agent: subprocess.Popen[str], port: int) -> int:
    """Return how many connections at ``port`` the agent holds a descriptor of."""
    held = psutil.Process(agent.pid).net_connections()
    return sum(one.laddr.port == port and one.status != psutil.CONN_LISTEN for one in held)


@contextmanager
def thousand_connections(port: int) -> Iterator[None]:
    """Hold a thousand connections that send nothing."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors.raise_limit()
    held = []
    try:
        for _ in range(1000):
            held.append(socket.create_connection(("127.0.0.1", port), PATIENCE))
        yield
    finally:
        for client in held:
            client.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def disturb(port: int, rng: random.Random) -> None:
    """Do what a careless or hostile client does."""
    way = rng.randrange(6)
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as client:
        try:
            if way == 0:
                client.sendall(rng.randbytes(rng.randrange(1, 20_000)))
            elif way == 1:
                client.sendall(b"GET /healthz\r\n")
                client.recv(100)
            elif way == 2:
                client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
                client.shutdown(socket.SHUT_WR)
            elif way == 3:
                client.sendall(b"GET /status HTTP/1.1\r\n")
            elif way == 4:
                client.sendall(b"GET /status HTTP/1.1\r\n\r\n" * 100)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", rng.randrange(2), 0))
        except OSError:
            pass


def test_strangers_leave_nothing_behind_and_do_not_disturb_the_job(nodes: Cluster) -> None:
    port = free_port()
    agent = nodes.launch(1, f"--health-port=127.0.0.1:{port}", str(nodes.script))
    (worker,) = nodes.round(1)
    rng = random.Random(16)
    for _ in range(150):
        disturb(port, rng)
    with thousand_connections(port):
        assert get(port, "/healthz") == (200, "running\n")
        assert connections(agent, port) <= MAX_CONNECTIONS
    until(lambda: not connections(agent, port), "the end of all connections", pause=0.05)
    assert Path(f"/proc/{worker.pid}").exists()
    worker.tell("exit 0")
    assert nodes.ends(agent) == 0
    assert "Traceback" not in nodes.out(1)

"""A name server that takes 1.5 s is slow, not silent: it finds the endpoint. Neither the loop nor the store waits for name servers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.until import PATIENCE
from tests.system.test_endings import with_change

# In network and mount namespaces of its own: every name is 10.9.9.9, after a while. Then two agents. Prints what was asked.
SERVER = """
import os, socket, struct, subprocess, sys, threading, time
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
subprocess.run(["ip", "address", "add", "10.9.9.9/32", "dev", "lo"], check=True)
subprocess.run(["mount", "--bind", sys.argv[1], "/etc/resolv.conf"], check=True)
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))

def answer(question, asker):
    time.sleep(1.5)
    end = 12
    while question[end]:
        end += question[end] + 1
    print(question[12:end], flush=True)
    known = question[end + 1 : end + 3] == bytes([0, 1])
    record = bytes([0xC0, 12]) + struct.pack("!HHIH", 1, 1, 1, 4) + bytes([10, 9, 9, 9]) if known else b""
    head = question[:2] + bytes([0x81, 0x80]) + struct.pack("!4H", 1, known, 0, 0)
    server.sendto(head + question[12 : end + 5] + record, asker)

def serve():
    while True:
        threading.Thread(target=answer, args=server.recvfrom(600), daemon=True).start()

threading.Thread(target=serve, daemon=True).start()
agents = [subprocess.Popen(sys.argv[2:]) for _ in range(2)]
sys.exit(max(agent.wait() for agent in agents))
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("ip"), reason="needs root, unshare and ip")
def test_an_endpoint_is_found_by_a_slow_name_server_that_nobody_asks_for_names_of_clients(tmp_path: Path) -> None:
    (tmp_path / "resolv").write_text("nameserver 127.0.0.1\n")
    where = ["--nnodes=2", "--join-timeout=20", "--rdzv-id=j", "--rdzv-endpoint=slow.example:23456"]
    agent = [sys.executable, "-m", "elastirun", *where, "--no-python", "sh", "-c", 'test -z "$RES_OPTIONS"']  # which is the agent's alone
    environ = {name: value for name, value in os.environ.items() if name != "RES_OPTIONS"}
    command = ["unshare", "-m", "-n", sys.executable, "-c", SERVER, str(tmp_path / "resolv"), *agent]
    ended = subprocess.run(command, env=environ, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr
    assert "example" in ended.stdout and "in-addr" not in ended.stdout, ended.stdout


WATCHED = """
import socket, threading
real = socket.getaddrinfo
def watched(host, *args, **kwargs):
    if host == "localhost" and threading.current_thread() is threading.main_thread():
        print("looked up in the loop", flush=True)
    return real(host, *args, **kwargs)
socket.getaddrinfo = watched
"""


def test_a_local_address_is_looked_up_outside_of_the_loop(nodes: Cluster) -> None:
    where = (f"--rdzv-endpoint=127.0.0.1:{nodes.port}", "--rdzv-id=test", "--rdzv-conf=is_host=1", "--local-addr=localhost")
    options = ("--nnodes=1:2", *where, "--last-call=0.1", "--max-restarts=1", "--set=restart-pause=0")
    agent = nodes.launch(1, *options, str(nodes.script), program=with_change(WATCHED))
    (worker,) = nodes.round(1)
    worker.tell("exit 1")
    (again,) = nodes.round(1, after=1)
    assert again.env["MASTER_ADDR"] == "localhost"
    again.tell("exit 0")
    assert nodes.ends(agent) == 0 and "in the loop" not in nodes.out(1)

"""A hundred rounds in one agent: neither it nor its guard keeps anything of a round that is over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.children import children, guard_of
from tests.support.cluster import WORKER, Cluster

EARLY, LATE = 20, 110  # the rounds that are compared

# Every worker fails at once, but for those two rounds: there rank 0 reports and waits to be told.
SCRIPT = f"""#!/bin/sh
case $ELASTIRUN_ROUND in
{EARLY}|{LATE}) [ $RANK = 1 ] && exec sleep 1000; exec {sys.executable} "$0.py" ;;
esac
echo "rank $RANK fails"
exit 1
"""


@pytest.fixture
def nodes(nodes: Cluster) -> Cluster:
    nodes.script.write_text(SCRIPT)
    nodes.script.chmod(0o755)
    nodes.script.with_name(nodes.script.name + ".py").write_text(WORKER)
    return nodes


def status(pid: int) -> dict[str, int]:
    """What a process holds."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "KiB": int(fields["VmRSS"].split()[0]),
        "threads": int(fields["Threads"]),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "children": len(children(pid)),
    }


def held(nodes: Cluster, agent: subprocess.Popen[str]) -> dict[str, dict[str, int]]:
    guard = guard_of(agent)
    token = f"TEST_SOCKET={nodes.env['TEST_SOCKET']}".encode()
    files = sum(len(folders) + len(names) for top in nodes.tmp_path.glob("elastirun_*") for _, folders, names in os.walk(top))
    return {"agent": status(agent.pid), "guard": status(guard), "node": {"carriers": carriers(token), "temporary files": files}}


def carriers(token: bytes) -> int:
    count = 0
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            count += token in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            pass
    return count


ELASTIC = ("--nnodes=1:2", "--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=is_host=1", "--last-call=0.1", "--tee=3", "--log-dir={logs}")


@pytest.mark.daily(2)
@pytest.mark.parametrize("options", [(), ELASTIC], ids=["one node", "with a store and logs"])
def test_a_hundred_rounds_leave_nothing_in_the_agent(nodes: Cluster, options: tuple[str, ...]) -> None:
    more = [option.format(port=nodes.port, logs=nodes.tmp_path / "logs") for option in options]
    command = ("--max-restarts=1000", "--set=restart-pause=0", "--nproc-per-node=2", *more, "--no-python", str(nodes.script))
    agent = nodes.launch(1, *command)
    found = []
    for number in (EARLY, LATE):
        worker = nodes.worker(160)
        assert worker.round == number
        found.append(held(nodes, agent))
        worker.tell("exit 1" if number == EARLY else "exit 0")
    early, late = found
    for who, before in early.items():
        for what, count in before.items():
            more = late[who][what] - count
            # One may be on its way; what each round leaves would be there 90 times.
            allowed = 0.03 * count if what == "KiB" else 3
            assert more <= allowed, f"{who}: {more} {what} more in round {LATE} than the {count} in round {EARLY}"
    agent.terminate()
    assert nodes.ends(agent) == 128 + signal.SIGTERM

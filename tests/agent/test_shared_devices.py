"""Two agents of one job on one machine whose workers see the same GPUs are warned of."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastirun.agent.part import NodeRound
from elastirun.agent.status import own_agents, shared_devices
from elastirun.agent.status.own_agents import OwnAgent
from elastirun.agent.status.shared_devices import TwinWarning, devices, overlap
from elastirun.rendezvous.wire.records import Member, RoundRecord
from tests.support.cluster import PATIENCE, free_port

HERE, TWIN, ELSEWHERE = Member("a", "n", "10.0.0.1", 1, 2), Member("b", "n", "10.0.0.1", 2, 2), Member("c", "m", "10.0.0.2", 3, 2)
AGENT = """
import sys
from elastirun.agent.status import shared_devices
from elastirun.cli.main import main
shared_devices.GPU = "/dev/null"
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("some", "others", "both"),
    [
        *(("all", "all", True), ("all", "2", True), ("0,1", "1, 2", True), ("0,1", "2,3", False), ("GPU-a", "GPU-b", False)),
        *(("", "", False), ("", "all", False), ("-1", "-1", False), ("-1", "all", False)),  # on CPUs
    ],
)
def test_two_lists_of_devices_overlap_where_one_is_in_both(some: str, others: str, both: bool) -> None:
    assert overlap(some, others) == overlap(others, some) == both


def test_without_the_variable_workers_see_all_gpus_and_with_an_empty_one_none() -> None:
    assert overlap(devices({}), devices({})) and not overlap(devices({}), devices({"CUDA_VISIBLE_DEVICES": ""}))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pretend that this machine has a GPU and three sockets: this agent's, one that does not answer, and another agent's of the job."""
    other = OwnAgent("job", (), {}, devices="0,1")
    monkeypatch.setattr(shared_devices, "GPU", "/dev/null")
    monkeypatch.setattr(own_agents, "sockets", lambda: ["/own", "/silent", "/other"])
    monkeypatch.setattr(own_agents, "ask", {"/other": other, "/own": other, "/silent": None}.__getitem__)
    return []


def look(said: list[str], *members: Member, mine: str = "1", job: str = "job") -> None:
    warning = TwinWarning(job, "/own", mine, said.append)
    warning.round_starts(NodeRound(RoundRecord("s", round=1, members=members), 0, {}))
    for thread in threading.enumerate():
        if thread.name == "shared-devices":
            thread.join()


def test_an_agent_that_takes_the_same_ones_is_warned_of(said: list[str]) -> None:
    look(said, HERE, TWIN)
    assert len(said) == 1 and "CUDA_VISIBLE_DEVICES=0,1" in said[0]


def test_nothing_is_said_of_other_devices_other_jobs_or_other_machines(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    look(said, HERE, TWIN, mine="2,3")
    look(said, HERE, TWIN, job="another")
    look(said, HERE, ELSEWHERE)
    monkeypatch.setattr(own_agents, "sockets", lambda: ["/own"])
    look(said, HERE, TWIN)
    monkeypatch.undo()
    assert not said


def test_a_machine_without_gpus_has_none_to_share(said: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shared_devices, "GPU", str(tmp_path / "none"))
    look(said, HERE, TWIN)
    assert not said


def test_real_agents_find_each_other(tmp_path: Path) -> None:
    """Each hears of the other: which one came first says nothing."""
    script, port = tmp_path / "worker.py", free_port()
    script.write_text("import os, time\nwhile not os.path.exists('end'): time.sleep(0.05)\n")
    options = ["--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-backend=c10d", "--rdzv-id=test", "worker.py"]
    environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    with ExitStack() as stack:
        agents = []
        for _ in range(2):
            command = [sys.executable, "-u", "-c", AGENT, *options]
            agents.append(subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True))
            stack.enter_context(agents[-1])
            stack.callback(agents[-1].kill)
        for agent in agents:
            assert agent.stderr is not None
            assert any("starts its workers on the same GPUs" in line for line in agent.stderr)
        (tmp_path / "end").touch()
        for agent in agents:
            agent.communicate(timeout=PATIENCE)
            assert agent.returncode == 0

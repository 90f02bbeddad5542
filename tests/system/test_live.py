"""Live jobs: workers that are left keep their processes, and no step and no sample is lost or doubled. See also live_kills.py."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from tests.support import live_log
from tests.support.cluster import kill
from tests.system.live_kills import SAMPLES, Job, job, kill_worker


def pids(lines: list[live_log.Line]) -> set[int]:
    return {line["pid"] for line in lines}


def finish(running: Job, folder: Path) -> None:
    """End the job and judge its log."""
    running.close()
    lines, _ = live_log.read(folder / "log")
    assert live_log.violations(lines, SAMPLES) == []


@pytest.mark.parametrize("transport", ["auto", "group"])
def test_the_others_of_a_killed_worker_go_on_and_a_new_one_gets_their_state(tmp_path: Path, transport: str) -> None:
    """When all are killed at once, training goes on from the newest checkpoint."""
    env = {"TEST_PAUSE": "0.005", "TEST_TRANSPORT": transport, "TEST_CHECKPOINTS": str(tmp_path / "checkpoints"), "TEST_EVERY": "10"}
    with job(tmp_path, 1, 3, "--preload=torch", **env) as running:
        for _ in range(2):
            kill_worker(running, random.Random(transport))
        before = running.world(3)
        running.wait(lambda lines: max(live_log.steps(lines)) > 20)  # so there is a checkpoint
        for line in before:
            os.kill(line["pid"], signal.SIGKILL)
        after = running.world(3, before[0]["round"])
        assert not pids(before) & pids(after) and after[0]["step"] >= 10
        finish(running, tmp_path)


def test_the_others_of_a_lost_node_go_on_without_it_and_of_one_that_leaves_too(tmp_path: Path) -> None:
    with job(tmp_path, 3, 1, TEST_PAUSE="0.005") as running:
        first = running.world(3)
        children = {pid: node for node, agent in running.agents.items() for pid in pids(first) if parent(pid) == agent.pid}
        lost = next(pid for pid, node in children.items() if node == 3)
        kill(running.agents[3])
        second = running.world(2, first[0]["round"])
        assert pids(second) == pids(first) - {lost}
        running.agents[2].send_signal(signal.SIGTERM)
        third = running.world(1, second[0]["round"])
        assert pids(third) == {pid for pid, node in children.items() if node == 1}
        assert running.agents[2].wait(60) == 128 + signal.SIGTERM
        finish(running, tmp_path)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

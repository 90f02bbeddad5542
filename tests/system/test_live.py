"""Live jobs: workers that are left keep their processes, and no step and no sample is lost or doubled. See also live_kills.py."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastirun.agent.status import own_agents
from tests.support import live_log
from tests.support.cluster import PATIENCE, kill
from tests.support.gpu import DEVICE, needs_gpu
from tests.system.live_kills import SAMPLES, Job, job, kill_worker, next_step


def pids(lines: list[live_log.Line]) -> set[int]:
    return {line["pid"] for line in lines}


def finish(running: Job, folder: Path) -> None:
    """End the job and judge its log."""
    running.close()
    lines, _ = live_log.read(folder / "log")
    assert live_log.violations(lines, SAMPLES) == []


on_gpu = pytest.param(DEVICE, marks=needs_gpu, id="cuda")


@pytest.mark.daily(3)
@pytest.mark.parametrize("where", ["auto", "group", "buffers", on_gpu])
def test_the_others_of_a_killed_worker_go_on_and_a_new_one_gets_their_state(tmp_path: Path, where: str) -> None:
    """When all are killed at once, training goes on from the newest checkpoint."""
    env = {"TEST_DEVICE": where} if where == DEVICE else {"TEST_BUFFERS": ""} if where == "buffers" else {"TEST_TRANSPORT": where}
    env |= {"TEST_PAUSE": "0.005", "TEST_CHECKPOINTS": str(tmp_path / "checkpoints"), "TEST_EVERY": "10"}
    with job(tmp_path, 1, 3, "--preload=torch", **env) as running:
        for _ in range(2):
            kill_worker(running, random.Random(where))
        before = running.world(3)
        running.wait(lambda lines: max(live_log.steps(lines)) > 20)  # so there is a checkpoint
        for line in before:
            os.kill(line["pid"], signal.SIGKILL)
        after = running.world(3, before[0]["round"])
        assert not pids(before) & pids(after) and after[0]["step"] >= 10
        running.wait(lambda lines: max(live_log.steps(lines).items())[1] > before[0]["round"])  # steps after the checkpoint are made again
        finish(running, tmp_path)


@pytest.mark.daily(2)
@pytest.mark.parametrize("device", ["cpu", on_gpu])
def test_a_job_that_has_lost_a_worker_ends_as_it_should(tmp_path: Path, device: str) -> None:
    env = {"TEST_PAUSE": "0.005", "TEST_DEVICE": device, "TEST_EPOCHS": "12"}
    with job(tmp_path, 1, 3, "--preload=torch", **env) as running:
        kill_worker(running, random.Random(device))
        assert running.agents[1].wait(2 * PATIENCE) == 0, running.said()
        assert len(live_log.of(running.lines(), "over")) == 3
        finish(running, tmp_path)


@contextmanager
def held(folder: Path, **env: str) -> Iterator[tuple[Job, set[int], int]]:
    """A job of three workers of which one was killed; the new one in its place waits. Yields the survivors and the new one's pid, too."""
    os.mkfifo(folder / "hold")
    env |= {"TEST_PAUSE": "0.005", "TEST_HOLD": str(folder / "hold")}
    with job(folder, 1, 3, "--preload=torch", "--event-log-handler=console", **env) as running:
        before = running.world(3)
        os.kill(before[1]["pid"], signal.SIGKILL)
        running.world(2, before[0]["round"])
        running.wait(lambda lines: bool(list(folder.glob("hold.*"))))
        yield running, pids(before) - {before[1]["pid"]}, int(next(folder.glob("hold.*")).suffix[1:])


def test_the_others_train_on_while_a_new_worker_starts_and_take_it_in_when_it_is_ready(tmp_path: Path) -> None:
    with held(tmp_path) as (running, survivors, new):
        made = max(live_log.steps(running.lines()))
        running.wait(lambda lines: max(live_log.steps(lines)) > made + 3)
        here, _ = live_log.newest_round(running.lines())
        assert pids(here) == survivors
        (socket,) = (path for path in own_agents.sockets() if path.startswith(str(tmp_path)))
        agent = own_agents.ask(socket)
        assert agent is not None and len(agent.live) == 2, "the new one has not said yet that it is live"
        with open(tmp_path / "hold", "w"):
            assert pids(running.world(3)) == survivors | {new}
        agent = own_agents.ask(socket)
        assert agent is not None and agent.live == (0, 1, 2)
        said = (tmp_path / "agent1.out").read_text().splitlines()
        assert [json.loads(line[line.index("{") :])["metadata"]["kept"] for line in said if '"name": "round"' in line] == [[], [0, 2]]
        finish(running, tmp_path)


def test_a_new_worker_that_is_killed_before_it_is_ready_takes_nobody_with_it(tmp_path: Path) -> None:
    with held(tmp_path) as (running, survivors, new):
        here, _ = live_log.newest_round(running.lines())
        os.kill(new, signal.SIGKILL)
        assert pids(running.world(2, here[0]["round"])) == survivors
        running.wait(lambda lines: len(list(tmp_path.glob("hold.*"))) == 2)
        with open(tmp_path / "hold", "w"):
            assert survivors < pids(running.world(3))
        finish(running, tmp_path)


def test_a_new_worker_is_taken_in_although_the_others_have_lost_their_connections_to_the_store(tmp_path: Path) -> None:
    with held(tmp_path, TEST_CUTS="1") as (running, survivors, new):
        running.wait(lambda lines: pids(live_log.of(lines, "cut")) == survivors)
        with open(tmp_path / "hold", "w"):
            assert pids(running.world(3)) == survivors | {new}
        finish(running, tmp_path)


@pytest.mark.daily(2)
@pytest.mark.parametrize(("nodes", "nproc"), [(1, 3), (2, 1)])
def test_only_the_new_worker_waits_where_the_same_one_fails_again_and_again(tmp_path: Path, nodes: int, nproc: int) -> None:
    env = {"TEST_PAUSE": "0.005", "PET_SET": "restart-pause=10"}
    size = nodes * nproc
    with job(tmp_path, nodes, nproc, "--preload=torch", **env) as running:
        before = running.world(size)
        survivors, pauses, seen = pids(before[:-1]), list[float](), pids(before)
        for _ in range(8):  # on a busy machine a round may have lasted for too long to have failed soon
            last = next(line for line in before if line["pid"] not in survivors)
            killed_at = time.monotonic()
            os.kill(last["pid"], signal.SIGKILL)
            assert pids(running.world(size - 1, last["round"])) == survivors
            step = next_step(running.lines(), last["round"], survivors, killed_at)
            before = running.world(size, last["round"])
            [new] = [line for line in live_log.of(running.lines(), "begun") if line["pid"] not in seen]
            seen.add(new["pid"])
            said = [float(pause) for pause in re.findall(r"worker of rank \d starts after ([\d.]+) s", running.said())]
            if said[len(pauses) :]:
                pauses = said
                assert step < new["at"] - killed_at >= pauses[-1] - 0.1
            if len(pauses) == 2:
                break
        assert len(pauses) == 2 and "the next one starts after" not in running.said(), running.said()
        finish(running, tmp_path)


@pytest.mark.daily(3)
@pytest.mark.parametrize("env", [{}, {"TEST_CUTS": "1"}, {"TEST_EXITS": "1"}], ids=["", "without the store", "by os._exit"])
def test_a_job_ends_although_a_new_worker_was_not_ready_in_time(tmp_path: Path, env: dict[str, str]) -> None:
    with held(tmp_path, TEST_EPOCHS="1", **env) as (running, survivors, new):
        running.wait(lambda lines: pids(live_log.of(lines, "over")) == survivors)
        with open(tmp_path / "hold", "w"):
            assert running.agents[1].wait(PATIENCE) == 0
        finish(running, tmp_path)


def test_a_new_worker_of_another_node_hears_from_the_others_agent_that_they_have_ended(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hold")
    env = {"TEST_PAUSE": "0.005", "TEST_HOLD": str(tmp_path / "hold"), "TEST_EPOCHS": "1", "TEST_EXITS": "1"}
    with job(tmp_path, 2, 1, **env) as running:
        first = running.world(2)
        [victim] = [pid for pid in pids(first) if parent(pid) == running.agents[1].pid]
        os.kill(victim, signal.SIGKILL)
        running.wait(lambda lines: bool(live_log.of(lines, "over")) and bool(list(tmp_path.glob("hold.*"))))
        with open(tmp_path / "hold", "w"):
            assert [running.agents[node].wait(PATIENCE) for node in (1, 2)] == [0, 0], running.said()
        finish(running, tmp_path)


@pytest.mark.daily(2)
def test_who_trains_before_the_others_are_there_has_ended_when_these_go_on_without_it(tmp_path: Path) -> None:
    """Its agent stands still, and the other one takes its node for lost. The guard has ended the worker by then (decision 0006)."""
    os.mkfifo(tmp_path / "hold")
    with job(tmp_path, 2, 1, TEST_PAUSE="0.005", TEST_HOLD=str(tmp_path / "hold")) as running:
        first = running.world(2)
        [here] = [pid for pid in pids(first) if parent(pid) == running.agents[1].pid]
        os.kill(here, signal.SIGKILL)
        [alone] = running.world(1, first[0]["round"])
        running.wait(lambda lines: bool(list(tmp_path.glob("hold.*"))))  # the new worker, which waits
        running.agents[2].send_signal(signal.SIGSTOP)
        running.wait(lambda lines: len(list(tmp_path.glob("hold.*"))) == 2)  # that of the next round
        begun = max(line["at"] for line in live_log.of(running.lines(), "begun"))
        with open(tmp_path / "hold", "w"):
            [after] = running.world(1, alone["round"])
        assert alone["pid"] not in (here, after["pid"])
        assert max(line["at"] for line in live_log.of(running.lines(), "made") if line["pid"] == alone["pid"]) < begun


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
        assert running.agents[2].wait(PATIENCE) == 128 + signal.SIGTERM
        finish(running, tmp_path)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

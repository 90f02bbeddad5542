"""An agent is killed on a machine that goes on: its guard ends what is left of it and says so, and nobody waits for ``--expire``."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.children import guard_of
from tests.support.cluster import Cluster, dies, kill
from tests.support.left_behind import own_files
from tests.system.agent_kills import MOMENTS, TARGETS, one_kill

EXPIRE = 30.0  # seconds; far longer than a death notice takes
PATIENT = (f"--expire={EXPIRE:g}", "--last-call=0.5")


@pytest.mark.daily(4)
@pytest.mark.parametrize("what", ["the agent", "the agent and its workers"])
def test_survivors_of_a_killed_agent_go_on_long_before_it_could_be_found_silent(anywhere: Cluster, what: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("the token of this job")
    token.chmod(0o600)
    agents = [anywhere.agent(i, *PATIENT, f"--token-file={token}", "--max-restarts=0", nproc=2) for i in (1, 2, 3)]
    before = anywhere.round(6)
    guard = guard_of(agents[2])
    victims = [worker for worker in before if worker.env["ELASTIRUN_AGENT"].startswith(f"{agents[2].pid}-")]
    assert len(victims) == 2
    killed_at = time.monotonic()
    agents[2].kill()
    for worker in victims if "workers" in what else []:
        os.kill(worker.pid, signal.SIGKILL)
    smaller = anywhere.round(4, after=before[0].round, timeout=EXPIRE)
    assert time.monotonic() - killed_at < EXPIRE - 5
    assert all(dies(worker.pid, 0) for worker in victims) and dies(guard)
    assert "its agent died, and its workers have ended" in smaller[0].env["ELASTIRUN_ROUND_REASON"]
    for worker in smaller:
        worker.tell("exit 0")
    assert [anywhere.ends(agent) for agent in agents[:2]] == [0, 0], "it costs no restart"


def test_a_spare_takes_the_place_of_a_single_killed_node_at_once(nodes: Cluster, server: object) -> None:
    nodes.etcd = server.endpoints  # type: ignore[attr-defined]
    first = nodes.agent(1, *PATIENT, nnodes="1")
    (alone,) = nodes.round(1)
    second = nodes.agent(2, *PATIENT, nnodes="1")
    nodes.says(2, "this node is a spare")
    kill(first)
    (replaced,) = nodes.round(1, after=alone.round, timeout=EXPIRE - 5)
    assert dies(alone.pid, 0), "the first round is over before the second one begins"
    replaced.tell("exit 0")
    assert nodes.ends(second) == 0


@pytest.mark.daily(2)
def test_who_waits_for_others_waits_on_when_the_first_node_is_started_again(nodes: Cluster) -> None:
    first, waits = (nodes.agent(i, "--last-call=0.5", nnodes="3") for i in (1, 2))
    nodes.says(2, "2 of 3 nodes")
    kill(first)
    agents = [waits, *(nodes.agent(i, "--last-call=0.5", nnodes="3") for i in (1, 3))]
    for worker in nodes.round(3):
        worker.tell("exit 0")
    assert [nodes.ends(agent) for agent in agents] == [0, 0, 0]
    assert "this node was in no round, and joins there" in nodes.out(2)


def test_a_killed_agent_leaves_no_folder(nodes: Cluster) -> None:
    folder = nodes.tmp_path / "temporary"
    folder.mkdir()
    nodes.env["TMPDIR"] = str(folder)
    agent = nodes.launch(1, "--standalone", str(nodes.script))
    nodes.worker()
    guard = guard_of(agent)
    assert len(own_files(folder)) == 2, "that of its socket, and that of its logs"
    kill(agent)
    assert dies(guard) and not own_files(folder)


def test_a_guard_that_cannot_speak_leaves_the_others_to_find_the_silence(nodes: Cluster) -> None:
    agents = [nodes.agent(i, "--expire=2", "--last-call=0.5", nnodes="1:2") for i in (1, 2)]
    before = nodes.round(2)
    guard = guard_of(agents[1])
    os.kill(guard, signal.SIGSTOP)
    try:
        kill(agents[1])
        (rest,) = nodes.round(1, after=before[0].round)
        assert "silent for 2 s" in rest.env["ELASTIRUN_ROUND_REASON"]
    finally:
        os.kill(guard, signal.SIGCONT)
    assert dies(guard)
    rest.tell("exit 0")
    assert nodes.ends(agents[0]) == 0 and "its agent died" not in nodes.out(1), "a notice that comes late changes nothing"


def test_a_guard_that_took_the_place_of_another_speaks_too(nodes: Cluster) -> None:
    agents = [nodes.agent(i, *PATIENT, nnodes="1:2") for i in (1, 2)]
    before = nodes.round(2)
    os.kill(guard_of(agents[1]), signal.SIGKILL)
    nodes.says(2, "the guard was killed; another one is started")
    kill(agents[1])
    (rest,) = nodes.round(1, after=before[0].round, timeout=EXPIRE - 5)
    rest.tell("exit 0")
    assert nodes.ends(agents[0]) == 0


@pytest.mark.daily(3)
@pytest.mark.parametrize(("target", "moment"), list(zip(TARGETS, MOMENTS, strict=True)))
def test_nothing_is_left_of_an_agent_that_is_killed_at_any_moment(target: str, moment: str) -> None:
    """``tests/system/agent_kills.py`` does it hundreds of times. A node that waits to join has a folder for error files already."""
    result = one_kill(target, moment, 1.5)
    assert not result.wrong, result

"""The agents of this user on this machine are found by their sockets, and say where their jobs meet; a stranger's socket is not asked."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastirun.agent.observe.step_rates import WorkerSteps
from elastirun.agent.status import own_agents
from elastirun.agent.status.own_agents import OwnAgent
from elastirun.agent.workers.local_socket import FOLDER, NAME
from elastirun.agent.workers.round_check import STORE

STEPS = '{"rank": 3, "local_rank": 1, "steps": 70, "seconds_since_step": 0.5, "steps_per_second": null, "times_median": 1.75}'
ANSWER = f'{{"job": "job7", "endpoints": ["node0:29400"], "store": {{"kind": "none"}}, "steps": [{STEPS}], "live": [3]}}'


@contextmanager
def agent(tmp_path: Path, answer: str) -> Iterator[str]:
    """A stand-in for an agent, which answers one question. Yields the path of its socket."""
    folder = tmp_path / f"{FOLDER}x"
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path := str(folder / NAME))
        listening.listen()

        def serve() -> None:
            connection, _ = listening.accept()
            with connection, connection.makefile() as lines:
                if lines.readline() == f"{STORE}\n":
                    connection.sendall(answer.encode())

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield path
        finally:
            with socket.socket(socket.AF_UNIX) as last:  # ends the thread of an agent that was not asked
                last.connect(path)
            thread.join()


def test_an_agent_is_listed_and_says_where_its_job_meets(tmp_path: Path) -> None:
    with agent(tmp_path, ANSWER + "\n") as path:
        assert path in own_agents.sockets()
        asked = own_agents.ask(path)
        assert asked == OwnAgent("job7", ("node0:29400",), {"kind": "none"}, (WorkerSteps(3, 1, 70, 0.5, None, 1.75),), (3,))
        assert abs(asked.began - time.time()) < 600, "the age of the socket"
    assert own_agents.ask(path) is None, "it has ended"


@pytest.mark.parametrize(
    "answer", ["no", "", "[]", '{"job": 1}', ANSWER[:-2], ANSWER.replace('{"kind": "none"}', "7"), ANSWER.replace('"rank": 3, ', "")]
)
def test_an_answer_of_another_version_is_none(tmp_path: Path, answer: str) -> None:
    with agent(tmp_path, answer and f"{answer}\n") as path:
        assert own_agents.ask(path) is None


def test_the_folder_of_the_socket_must_be_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with agent(tmp_path, ANSWER) as path:
        os.chmod(os.path.dirname(path), 0o722)
        assert path not in own_agents.sockets()
        os.chmod(os.path.dirname(path), 0o700)
        assert path in own_agents.sockets()
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert path not in own_agents.sockets()


def test_a_worker_knows_the_socket_of_its_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIRUN_SOCKET", str(tmp_path / "agent"))
    assert str(tmp_path / "agent") in own_agents.sockets()
    monkeypatch.setenv("ELASTIRUN_SOCKET", str(tmp_path / "none" / "agent"))
    assert str(tmp_path / "none" / "agent") not in own_agents.sockets()


def test_other_sockets_are_no_agents(tmp_path: Path) -> None:
    row = "0000000000000000: 00000002 00000000 {} 0001 01 12345 {}\n"
    listed = f"/tmp/with a blank/{FOLDER}a/{NAME}"
    others = [f"@/tmp/{FOLDER}a/{NAME}", f"/tmp/{FOLDER}a/memory", f"/tmp/x/{NAME}", "", "\xff"]
    table = tmp_path / "unix"
    rows = [row.format("00010000", one) for one in (listed, *others)]
    table.write_text("".join(["Num RefCount\n", *rows, row.format("00000000", f"/tmp/{FOLDER}b/{NAME}")]))
    assert own_agents._listed(table) == [listed]
    assert own_agents._listed(tmp_path / "none") == []

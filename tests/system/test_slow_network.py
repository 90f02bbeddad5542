"""Three agents of which two reach the store over a long line."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.cluster import PATIENCE, free_port
from tests.support.relay import Relay

WORKER = "import os, time; print('started', os.environ['WORLD_SIZE'], flush=True); time.sleep(3)"


@pytest.mark.parametrize("round_trip", [0.3, pytest.param(1.0, marks=pytest.mark.long)])
def test_nodes_far_away_form_a_round_and_work(round_trip: float, tmp_path: Path) -> None:
    """At a second even ``--expire`` of 5 s is enough, but short of rest, and a line says so."""
    script, port = tmp_path / "worker.py", free_port()
    script.write_text(WORKER)
    common = ["--nnodes=3", "--rdzv-backend=c10d", "--rdzv-id=far", *(["--expire=20"] if round_trip >= 1 else [])]
    with ExitStack() as stack:
        relay = stack.enter_context(Relay(f"127.0.0.1:{port}", round_trip / 2))
        agents = []
        for number, endpoint in enumerate((f"127.0.0.1:{port}", relay.endpoint, relay.endpoint)):
            where = [f"--rdzv-endpoint={endpoint}", f"--rdzv-conf=is_host={int(number == 0)}"]
            command = [sys.executable, "-m", "elastirun", *common, *where, str(script)]
            agent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            agents.append(stack.enter_context(agent))
            stack.callback(agent.kill)
        said = [agent.communicate(timeout=3 * PATIENCE)[0] for agent in agents]
        assert [agent.returncode for agent in agents] == [0, 0, 0], said
        assert all(re.search(r"^started 3$", one, re.M) for one in said), said

"""The agent tells its parts of rounds; a part may hold back that the workers have stopped."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from elastirun.agent.agent import Agent
from elastirun.agent.part import NodeRound, Part
from elastirun.rendezvous.wire.events import WorkersStopped
from elastirun.rendezvous.wire.records import Member, RoundRecord
from tests.support.cluster import PATIENCE

OBSERVED = """
import sys
from dataclasses import replace
from elastirun.agent import agent
from elastirun.agent.part import Part
from elastirun.cli.main import main

class Observer(Part):
    pass

for name in ("round_starts", "workers_started", "worker_ended", "worker_failed", "round_stops", "idle", "leaves"):
    def note(self, *args, name=name):
        with open(sys.argv[1], "a") as told:
            told.write(name + "\\n")
    setattr(Observer, name, note)

def assemble(*args, made=agent.assemble):
    assembly = made(*args)
    return replace(assembly, parts=(*assembly.parts, Observer()))

agent.assemble = assemble
sys.exit(main(sys.argv[2:]))
"""


def test_an_observer_is_told_of_each_step_of_each_round(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text("import os, sys\nsys.exit(os.environ['ELASTIRUN_ROUND'] == '1')\n")
    told = tmp_path / "told"
    command = [sys.executable, "-c", OBSERVED, str(told), "--standalone", "--max-restarts=1", str(worker)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert ran.returncode == 0, ran.stderr
    first = ["round_starts", "workers_started", "worker_ended", "worker_failed", "idle", "round_stops", "idle"]
    assert told.read_text().split() == [*first, "round_starts", "workers_started", "worker_ended", "idle"]


def test_each_failure_is_reported_once(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text("import os, sys\nsys.exit(f'rank {os.environ[\"RANK\"]}')\n")
    command = [sys.executable, "-m", "elastirun", "--standalone", "--nproc-per-node=2", str(worker)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    report = ran.stderr.partition(" FAILED\n")[2]
    places = sorted(re.findall(r"local_rank:? ([01])", report))
    assert ran.returncode == 1 and "Root Cause" in report and len(places) == len(set(places)), report


def test_a_part_may_hold_back_that_the_workers_have_stopped() -> None:
    """Meanwhile what was parked may be ended: then no worker is kept."""
    posted: list[Any] = []
    part = SimpleNamespace(holds=True)
    agent: Any = SimpleNamespace(
        _parts=(Part(), part), _session=SimpleNamespace(post=posted.append), _stopped=WorkersStopped(1.0, (), True)
    )
    agent._workers = SimpleNamespace(parked={})
    Agent._tell_machine_of_stop(agent)
    assert not posted
    Agent.sits_out(agent)
    part.holds = False
    Agent._tell_machine_of_stop(agent)
    Agent._tell_machine_of_stop(agent)
    (event,) = posted
    assert event.kept is False and event.now > 1.0


def test_a_round_of_this_node_has_the_ranks_after_those_of_the_nodes_before() -> None:
    members = tuple(Member(name, name, "127.0.0.1", 1, slots) for name, slots in (("a", 2), ("b", 3), ("c", 1)))
    round = NodeRound(RoundRecord("s", round=2, members=members), 1, {2: 77, 0: 78})
    assert list(round.ranks) == [2, 3, 4] and round.kept == [2, 4] and not round.alone

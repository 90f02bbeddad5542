"""``elastirun chaos`` on real jobs: a job that goes on is held, and one that does not is named with the fault."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from elastirun.agent.processes import proc
from elastirun.chaos.watch import RunningAgent, last_stamp, look
from tests.support.cluster import PATIENCE, Cluster
from tests.support.until import until

ROOT = Path(__file__).resolve().parents[2]
STEPS = """
import os, sys, time
from elastirun.progress import progress
saved, rank, number = os.environ["TEST_SOCKET"] + ".step", os.environ["RANK"], os.environ["ELASTIRUN_ROUND"]
step = int(open(saved).read()) if os.path.exists(saved) else 0
while number == "1" or "stuck" not in sys.argv:
    step += 1
    progress(step=step)
    if rank == "0" and step % 10 == 0:
        open(saved + ".new", "w").write(str(step))
        os.replace(saved + ".new", saved)
    time.sleep(0.02)
time.sleep(1000)
"""


def start(nodes: Cluster, count: int, nnodes: str, *options: str, script: str = "") -> str:
    """Start a job of ``count`` nodes whose workers step. Return its name, when all of them do."""
    job = f"job-{uuid.uuid4()}"
    nodes.script.write_text(STEPS)
    everywhere = ",".join(f"127.0.0.{i}:{nodes.port}" for i in range(1, count + 1))
    for i in range(1, count + 1):
        where = [f"--rdzv-endpoint={everywhere}", f"--rdzv-id={job}", f"--rdzv-conf=is_host={int(i == 1)}", f"--local-addr=127.0.0.{i}"]
        line = [f"--nnodes={nnodes}", "--set=restart-pause=0", *where, *options, str(nodes.script), *script.split()]
        nodes.launch(i, *line)
    until(lambda: len(training(job)) == count, "all nodes to train", state=nodes.everything)
    return job


def training(job: str) -> list[RunningAgent]:
    return [agent for agent in look(job) if agent.training]


def chaos(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "elastirun", "chaos", *options]
    return subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=5 * PATIENCE)


def told(*options: str) -> tuple[int, dict[str, Any]]:
    done = chaos(*options, "--json", "--yes")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize(
    "kinds",
    ["freeze,worker,agent,node,host", "leave"],
    ids=["sudden", "planned"],
)
def test_a_job_that_goes_on_after_each_fault_is_held(nodes: Cluster, kinds: str) -> None:
    done = kinds.split(",")
    job = start(nodes, 2, "1:2", "--max-restarts=9", "--expire=4")
    options = (f"--kinds={kinds}", "--every=0.5s", f"--for={len(done) / 2}s", "--restart=0.1s", "--freeze=0.3s", f"--limit={PATIENCE:g}")
    try:
        code, found = told(job, *options)
        assert (code, found["held"]) == (0, True), f"{found}\n{nodes.everything()}"
        assert sorted(one["kind"] for one in found["faults"]) == sorted(done), found
        assert found["verdict"].startswith(f"held: {len(done)} of {len(done)} faults; next step after "), found
        assert all(one["seconds"] > 0 and one["lost"] is not None for one in found["faults"]), found
        assert len(look(job)) == 2, "each agent that was ended has been started again"
    finally:
        end(job)


def end(job: str) -> None:
    """Kill the agents that chaos has started, too; their guards end the rest."""
    for agent in look(job):
        proc.kill(agent.process)
    until(lambda: not look(job), "the agents to end")


@pytest.mark.parametrize(
    ("restarts", "script", "trouble"),
    [(0, "", "the job has ended, after the fault worker (rank "), (1, "stuck", "no step within 3 s (")],
    ids=["no_restart_left", "never_steps_again"],
)
def test_a_job_without_recovery_is_not_held_and_the_fault_is_named(nodes: Cluster, restarts: int, script: str, trouble: str) -> None:
    job = start(nodes, 1, "1", f"--max-restarts={restarts}", script=script)
    limit = 3 if script else PATIENCE
    code, found = told(job, "--every=1s", "--for=2s", "--kinds=worker", f"--limit={limit:g}")
    (fault,) = found["faults"]
    assert (code, found["held"], fault["kind"]) == (1, False, "worker")
    assert (
        found["verdict"].startswith(f"not held: {trouble}") and f"fault worker ({fault['victim']}) at {fault['time']}" in found["verdict"]
    )


def test_nothing_is_done_below_the_fewest_nodes_nor_without_a_yes(nodes: Cluster) -> None:
    job = start(nodes, 2, "2")
    before = training(job)
    done = chaos(job, "--kinds=agent,worker")
    assert done.returncode == 3 and done.stderr.endswith("there is no terminal to ask at; give --yes to do it\n"), done
    assert "SIGKILL to a worker: rank " in done.stdout and "warning: 10 workers are to be killed" in done.stdout
    code, found = told(job, "--kinds=agent,node,host,leave", "--every=0.1s", "--for=0.4s")
    assert (code, found["verdict"]) == (1, "not proven: each of the 4 faults was left out")
    assert {one["left_out"] for one in found["faults"]} == {"it would leave 1 of at least 2 nodes; see --restart and --supervised"}
    assert [agent.training for agent in training(job)] == [agent.training for agent in before], "the same workers"


def test_ctrl_c_leaves_no_worker_frozen_and_starts_the_agent_that_has_ended(nodes: Cluster) -> None:
    job = start(nodes, 1, "1")
    for kind, wait in (("freeze", "--freeze=1h"), ("agent", "--restart=1h")):
        before = training(job)
        command = [sys.executable, "-m", "elastirun", "chaos", job, f"--kinds={kind}", wait, "--yes", "--json"]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
            pid = before[0].training[0] if kind == "freeze" else before[0].process.pid
            until(lambda pid=pid: not (process := proc.look(pid)) or not process.alive or is_stopped(pid), f"{kind} of {pid}")
            run.send_signal(signal.SIGINT)
            assert run.stdout and run.wait(PATIENCE) == 130 and "SIGINT came" in run.stdout.read()
        until(lambda before=before: last_stamp(training(job)) > last_stamp(before), "the job to go on", state=nodes.everything)
    end(job)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"

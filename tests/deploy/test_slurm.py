"""deploy/slurm/elastirun.sbatch in a real Slurm: three nodes, each with a network, processes and a name of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.slurm_job import SCRIPT, Job, needs_slurm, say
from tests.support.cluster import Cluster
from tests.support.slurm import Slurm
from tests.support.until import until


def set_down(cluster: Slurm, node: str) -> None:
    cluster.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")


@pytest.mark.daily(3)
@needs_slurm
def test_a_job_runs_on_all_its_nodes_to_the_end(cluster: Slurm, nodes: Cluster) -> None:
    job = Job(cluster, nodes)
    workers = nodes.round(3)
    assert sorted(worker.env["SLURMD_NODENAME"] for worker in workers) == ["h0", "h1", "h2"]
    say(workers, "exit 0")
    assert job.ends() == ("COMPLETED", "0:0")


@pytest.mark.daily(3)
@needs_slurm
def test_the_plain_command_in_a_step_is_one_job(cluster: Slurm, nodes: Cluster) -> None:
    script = nodes.tmp_path / "plain.sh"
    script.write_text('#!/bin/bash\nexec srun --ntasks-per-node=1 elastirun "$@"\n')
    job = Job(cluster, nodes, script=script)
    workers = nodes.round(3)
    assert [worker.env["SLURMD_NODENAME"] for worker in workers] == ["h0", "h1", "h2"], "ranks are Slurm's"
    assert workers[0].env["TORCHELASTIC_RUN_ID"] == f"slurm-{job.number}.0"
    say(workers, "exit 0")
    assert job.ends() == ("COMPLETED", "0:0")


@pytest.mark.daily(3)
@needs_slurm
@pytest.mark.parametrize("how", ["the node dies", "slurmd and the agent are killed", "the node is set down"])
def test_a_job_goes_on_without_a_node(cluster: Slurm, nodes: Cluster, how: str) -> None:
    job = Job(cluster, nodes)
    nodes.round(3)
    if how == "the node dies":
        cluster.kill_node(2)
    elif how == "slurmd and the agent are killed":
        cluster.kill(2, "slurmd")
        cluster.kill(2, "elastirun")
    else:
        set_down(cluster, "h2")
    workers = nodes.round(2, after=1)
    if how != "the node is set down":
        set_down(cluster, "h2")  # Slurm does so itself after SlurmdTimeout
    say(workers, "exit 0")
    assert job.ends() == ("COMPLETED", "0:0"), job.out()
    assert job.has("Restarts") == "0"
    cluster.return_node(2)


@pytest.mark.daily(3)
@needs_slurm
def test_a_node_that_comes_when_the_job_has_succeeded_is_told_to_leave(cluster: Slurm, nodes: Cluster) -> None:
    late = nodes.tmp_path / "bin/elastirun"
    late.parent.mkdir()
    there = nodes.tmp_path / "over"
    wait = f'[ "$SLURMD_NODENAME" != h2 ] || until [ -e {there} ]; do sleep 0.1; done'
    late.write_text(f'#!/bin/bash\n{wait}\nexec {Path(sys.executable).parent}/elastirun "$@"\n')
    late.chmod(0o755)
    job = Job(cluster, nodes, PET_LAST_CALL="1", LATE_NODES="15", PATH=f"{late.parent}:{nodes.env['PATH']}")
    workers = nodes.round(2)
    say(workers, "exit 0")
    for worker in workers:
        worker.await_death()
    until(lambda: not cluster.pids(0, "elastirun"), "the host to end", state=job.explain)
    there.touch()
    assert job.ends() == ("COMPLETED", "0:0"), job.explain()
    assert "nodes that came too late are told to leave" in job.out()


@pytest.mark.daily(3)
@needs_slurm
@pytest.mark.parametrize("command", ["exit 0", "raise it"])
def test_a_job_ends_with_its_training_when_the_node_of_its_script_was_lost(cluster: Slurm, nodes: Cluster, command: str) -> None:
    """Slurm takes the node out of the job and lets it run on, with --no-kill."""
    job = Job(cluster, nodes, PET_MAX_RESTARTS="0", PET_FAILURE_GRACE="1")
    until(lambda: job.has("JobState") == "RUNNING", "the job to run", state=job.explain, pause=0.2)
    nodes.round(3)
    cluster.kill_node(0)
    workers = nodes.round(2, after=1)
    say(workers, command)
    for worker in workers:
        worker.await_death()
    assert job.has("JobState") == "RUNNING", "Slurm does not know it yet"
    set_down(cluster, "h0")
    state, _ = job.ends()
    assert state == "CANCELLED", job.explain()
    assert f"lost; the job ends with exit code {int(command != 'exit 0')}" in job.out()
    assert job.has("Restarts") == "0"
    cluster.return_node(0)


@pytest.mark.daily(3)
@needs_slurm
def test_a_job_that_is_told_to_stop_after_the_node_of_its_script_was_lost_is_queued_again(cluster: Slurm, nodes: Cluster) -> None:
    job = Job(cluster, nodes)
    nodes.round(3)
    cluster.kill_node(0)
    nodes.round(2, after=1)
    set_down(cluster, "h0")
    cluster.run("scancel", "--signal=TERM", job.number)
    until(lambda: job.has("Restarts") == "1", "the job to be queued again", state=job.explain, pause=0.1)
    assert "exit code 143: the job is queued again" in job.out()
    cluster.run("scancel", job.number)
    cluster.return_node(0)


@pytest.mark.daily(3)
@needs_slurm
@pytest.mark.parametrize(("command", "code"), [("raise it", 1), ("exit 150", 150)])
def test_a_job_that_has_failed_ends_with_the_agents_code(cluster: Slurm, nodes: Cluster, command: str, code: int) -> None:
    """From 128 on a job is queued again, up to MAX_REQUEUES times."""
    options = {"PET_MAX_RESTARTS": "0", "PET_EXIT_CODE_FROM_WORKER": "1", "PET_FAILURE_GRACE": "1", "MAX_REQUEUES": "0"}
    job = Job(cluster, nodes, **options)
    say(nodes.round(3)[1:2], command)
    assert job.ends() == ("FAILED", f"{code}:0")
    assert job.has("Restarts") == "0"
    assert ("the job has been queued again 0 times and ends" in job.out()) == (code >= 128)


def test_slurm_sees_every_option_of_the_script_and_bash_can_read_it() -> None:
    """sbatch reads its options up to the first command."""
    lines = SCRIPT.read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert len([line for line in lines[:first] if line.startswith("#SBATCH ")]) == sum("#SBATCH" in line for line in lines) == 8
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)

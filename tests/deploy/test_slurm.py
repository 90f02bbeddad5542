"""deploy/slurm/elastirun.sbatch in a real Slurm: three nodes, each with a network, processes and a name of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, Worker
from tests.support.slurm import Slurm, missing, slurm, wait

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy/slurm/elastirun.sbatch"
# The first run is slow enough to be stopped, the second one quick.
TRAINING = """
import os, runpy, sys
pause = 0 if "SLURM_RESTART_COUNT" in os.environ else 0.2
sys.argv[1:] = ["--checkpoint=saved", "--every=1000", "--epochs=6", f"--pause={{pause}}", "--device=cpu"]
runpy.run_path({script!r}, run_name="__main__")
"""
OVER = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")

reason = missing()
needs_slurm = pytest.mark.skipif(bool(reason), reason=reason)


class Job:
    """A job of the script. Its workers report to ``nodes``, see tests.support.cluster."""

    def __init__(self, cluster: Slurm, nodes: Cluster, *command: str, nnodes: int = 3, **variables: str) -> None:
        self.cluster, self.path = cluster, nodes.tmp_path / "job.out"
        wait(lambda: cluster.nodes_in("idle") == cluster.count, cluster.log)  # the node of an earlier test is back
        env = {**nodes.env, "PATH": f"{Path(sys.executable).parent}:{nodes.env['PATH']}", "PET_NPROC_PER_NODE": "1", **variables}
        command = command or (str(nodes.script),)
        where = (f"--nodes={nnodes}", f"--output={self.path}", f"--chdir={nodes.tmp_path}")
        self.number = cluster.submit(*where, str(SCRIPT), *command, env={**env, "SLURM_CONF": cluster.env["SLURM_CONF"]})

    def out(self) -> str:
        return self.path.read_text() if self.path.exists() else ""

    def says(self, text: str) -> str:
        wait(lambda: text in self.out(), self.explain)
        return self.out()

    def has(self, name: str) -> str:
        return self.cluster.job(self.number)[name]

    def ends(self) -> tuple[str, str]:
        """Wait for the end and return the state and exit code that Slurm has for the job."""
        wait(lambda: self.has("JobState") in OVER, self.explain)
        return self.has("JobState"), self.has("ExitCode")

    def explain(self) -> str:
        return f"{self.cluster.job(self.number)}\n{self.out()}\n{self.cluster.log()}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm")) as made:
        yield made


def say(workers: list[Worker], command: str) -> None:
    for worker in workers:
        worker.tell(command)


def set_down(cluster: Slurm, node: str) -> None:
    cluster.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")


@needs_slurm
def test_a_job_runs_on_all_its_nodes_to_the_end(cluster: Slurm, nodes: Cluster) -> None:
    job = Job(cluster, nodes)
    workers = nodes.round(3)
    assert sorted(worker.env["SLURMD_NODENAME"] for worker in workers) == ["h0", "h1", "h2"]
    say(workers, "exit 0")
    assert job.ends() == ("COMPLETED", "0:0")


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
    cluster.start_node(2)


@needs_slurm
def test_a_job_that_is_told_to_stop_is_queued_again_and_one_that_is_cancelled_is_not(cluster: Slurm, nodes: Cluster) -> None:
    job = Job(cluster, nodes)
    nodes.round(3)
    cluster.run("scancel", "--signal=USR1", "--batch", job.number)  # as before the time limit
    job.says("exit code 143: the job is queued again")
    nodes.pending.clear()
    workers = nodes.round(3)
    assert job.has("Restarts") == "1"
    assert {worker.env["TORCHELASTIC_RUN_ID"] for worker in workers} == {f"slurm-{job.number}.1"}
    cluster.run("scancel", job.number)
    for worker in workers:
        worker.await_death()
    assert job.ends()[0] == "CANCELLED"
    wait(lambda: cluster.nodes_in("idle") == cluster.count, cluster.log)
    assert job.has("JobState") == "CANCELLED" and job.has("Restarts") == "1"


@needs_slurm
def test_a_preempted_job_goes_on_where_it_stopped(cluster: Slurm, nodes: Cluster) -> None:
    nodes.script.write_text(TRAINING.format(script=str(ROOT / "examples/train.py")))
    job = Job(cluster, nodes, nnodes=2, OMP_NUM_THREADS="1")
    job.says("epoch   1/6")
    urgent = cluster.submit("--partition=urgent", "--nodes=3", f"--output={nodes.tmp_path}/urgent.out", "--wrap=true", env=cluster.env)
    stopped = re.search(r"all workers stop after step (\d+)", job.says("all workers stop after step"))
    wait(lambda: cluster.job(urgent)["JobState"] == "COMPLETED", job.explain)
    assert job.ends() == ("COMPLETED", "0:0"), job.out()
    assert job.has("Restarts") == "1"
    assert stopped and f"2 workers on cpu: going on after step {stopped[1]} of saved" in job.out()
    assert "epoch   6/6" in job.out() and "test accuracy" in job.out()


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

"""When deploy/slurm/elastirun.sbatch is queued again in a real Slurm, and that it then resumes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.deploy.slurm_job import ROOT, Job, needs_slurm
from tests.support.cluster import WORKER, Cluster
from tests.support.slurm import Slurm
from tests.support.until import until

# A worker that needs some time to save after SIGTERM.
SAVING = """
import os, signal, time
def save(*_):
    time.sleep(1)
    os.write(1, b"saved\\n")
    os._exit(143)
signal.signal(signal.SIGTERM, save)
"""
# The first run is slow enough to be stopped, the second one quick.
TRAINING = """
import os, runpy, sys
pause = 0 if "SLURM_RESTART_COUNT" in os.environ else 0.3
sys.argv[1:] = ["--checkpoint=saved", "--every=1000", "--epochs=4", f"--pause={{pause}}", "--device=cpu"]
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.daily(3)
@needs_slurm
def test_a_job_that_is_told_to_stop_is_queued_again_and_one_that_is_cancelled_is_not(cluster: Slurm, nodes: Cluster) -> None:
    nodes.script.write_text(SAVING + WORKER)
    job = Job(cluster, nodes, MAX_REQUEUES="1")
    nodes.round(3)
    cluster.run("scancel", "--signal=USR1", "--batch", job.number)  # as before the time limit
    assert job.says("exit code 143: the job is queued again").count("saved") == 3
    workers = nodes.round(3)
    assert job.has("Restarts") == "1"
    assert {worker.env["TORCHELASTIC_RUN_ID"] for worker in workers} == {f"slurm-{job.number}.0-restart1"}
    cluster.run("scancel", job.number)
    for worker in workers:
        worker.await_death()
    assert job.ends()[0] == "CANCELLED"
    cluster.await_idle()
    assert job.has("JobState") == "CANCELLED" and job.has("Restarts") == "1"


@pytest.mark.daily(3)
@needs_slurm
def test_a_job_whose_runs_are_too_short_is_not_queued_again_without_end(cluster: Slurm, nodes: Cluster) -> None:
    job = Job(cluster, nodes, MAX_REQUEUES="1")
    nodes.round(3)
    cluster.run("scancel", "--signal=USR1", "--batch", job.number)
    job.says("exit code 143: the job is queued again")
    nodes.round(3)
    cluster.run("scancel", "--signal=USR1", "--batch", job.number)
    assert job.ends() == ("FAILED", "143:0"), job.explain()
    assert "was told to stop within 600 s of its start 2 times in a row and ends" in job.out()
    assert not list(nodes.tmp_path.glob("**/.elastirun*"))


def test_the_runs_so_far_are_counted_also_if_slurm_ends_the_scripts_sleep_before_the_script(tmp_path: Path) -> None:
    """The script went on then, said that the job ends, and forgot the number, so that a job was queued again without end."""
    script = (ROOT / "deploy/slurm/elastirun.sbatch").read_text()
    functions = script[script.index("say() {") : script.index("# Waits until the node")]
    stubs = "squeue() { echo RUNNING; }; scontrol() { :; }; sleep() { return 143; }; max_requeues=1; short_run=600; short_runs=$PWD/runs"
    command = ["bash", "-uo", "pipefail", "-c", f"{stubs}\nSLURM_JOB_ID=1\n{functions}\nfinish 143"]
    first = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (first.returncode, (tmp_path / "runs").read_text()) == (143, "1\n")
    assert "is queued again" in first.stderr and "and ends" not in first.stderr
    second = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "2 times in a row and ends" in second.stderr and not (tmp_path / "runs").exists()


@pytest.mark.daily(3)
@needs_slurm
def test_a_preempted_job_goes_on_where_it_stopped(cluster: Slurm, nodes: Cluster) -> None:
    nodes.script.write_text(TRAINING.format(script=str(ROOT / "examples/train.py")))
    job = Job(cluster, nodes, nnodes=2, OMP_NUM_THREADS="1")
    job.says("epoch   1/4")
    urgent = cluster.submit("--partition=urgent", "--nodes=3", f"--output={nodes.tmp_path}/urgent.out", "--wrap=true", env=cluster.env)
    stopped = re.search(r"all workers stop after step (\d+)", job.says("all workers stop after step"))
    until(lambda: cluster.job(urgent)["JobState"] == "COMPLETED", "the end of the urgent job", state=job.explain, pause=0.1)
    assert job.ends() == ("COMPLETED", "0:0"), job.out()
    assert job.has("Restarts") == "1"
    assert stopped and f"2 workers on cpu: going on after step {stopped[1]} of saved" in job.out()
    assert "from scratch" in job.out(), "the output of the first run is gone"
    assert "epoch   4/4" in job.out() and "test accuracy" in job.out()

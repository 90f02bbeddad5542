"""A job of deploy/slurm/elastirun.sbatch in the tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, Worker
from tests.support.slurm import Slurm, missing
from tests.support.until import until

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy/slurm/elastirun.sbatch"
LONGEST = 150.0  # seconds; below the time after which pytest ends a test that hangs
OVER = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")

reason = missing()
needs_slurm = pytest.mark.skipif(bool(reason), reason=reason)


class Job:
    """A job of ``script``. Its workers report to ``nodes``, see tests.support.cluster."""

    def __init__(self, cluster: Slurm, nodes: Cluster, *command: str, nnodes: int = 3, script: Path = SCRIPT, **variables: str) -> None:
        self.cluster, self.path = cluster, nodes.tmp_path / "job.out"
        cluster.await_idle()  # the node of an earlier test is back
        env = {**nodes.env, "PATH": f"{Path(sys.executable).parent}:{nodes.env['PATH']}", "PET_NPROC_PER_NODE": "1", **variables}
        command = command or (str(nodes.script),)
        where = (f"--nodes={nnodes}", f"--output={self.path}", f"--chdir={nodes.tmp_path}")
        self.number = cluster.submit(*where, str(script), *command, env={**env, "SLURM_CONF": cluster.env["SLURM_CONF"]})

    def out(self) -> str:
        return self.path.read_text() if self.path.exists() else ""

    def says(self, text: str) -> str:
        until(lambda: text in self.out(), f"the job to say: {text}", LONGEST, state=self.explain)
        return self.out()

    def has(self, name: str) -> str:
        return self.cluster.job(self.number)[name]

    def ends(self) -> tuple[str, str]:
        """Wait for the end and return the state and exit code that Slurm has for the job."""
        until(lambda: self.has("JobState") in OVER, "the end of the job", LONGEST, state=self.explain, pause=0.1)
        return self.has("JobState"), self.has("ExitCode")

    def explain(self) -> str:
        return f"{self.cluster.job(self.number)}\n{self.out()}\n{self.cluster.log()}"


def say(workers: list[Worker], command: str) -> None:
    for worker in workers:
        worker.tell(command)

"""``elastirun scale`` on a job of four nodes in a real Slurm, from a machine outside of the allocation."""

from __future__ import annotations

import faulthandler
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.slurm_job import LONGEST, ROOT, Job, needs_slurm
from tests.support import live_log
from tests.support.cluster import Cluster
from tests.support.live_log import Line
from tests.support.slurm import Slurm, slurm
from tests.support.until import until

ELASTIRUN = str(Path(sys.executable).parent / "elastirun")
LAST_CALL = f"{10 * LONGEST:g}"  # so that no round here begins because the last call ends
SAMPLES, BATCH, EPOCHS = 320, 8, 20
STEPS = EPOCHS * SAMPLES // BATCH

# An agent begins when its node is let in: a node that boots, or pulls an image.
LATE = '#!/bin/bash\nuntil [ -e "{there}/$SLURMD_NODENAME" ]; do sleep 0.1; done\nexec {elastirun} "$@"\n'

# The training goes on slowly until a file is removed: what is to happen then happens during the training, however busy the machine is.
SLOWLY = """
import os, runpy, sys, time
sys.path.insert(0, {root!r})
sleep = time.sleep
time.sleep = lambda seconds: sleep(seconds) if seconds != 0.5 or os.path.exists({slow!r}) else None
runpy.run_module("tests.support.live_worker", run_name="__main__")
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm"), count=4) as made:
        yield made


class LiveJob(Job):
    """A job of four nodes whose workers are those of tests/support/live_worker.py. The agent of a node begins when ``let_in`` says so."""

    def __init__(self, cluster: Slurm, nodes: Cluster) -> None:
        self.folder = nodes.tmp_path
        self.slow, self.log = self.folder / "slow", self.folder / "log"
        self.slow.touch()
        nodes.script.write_text(SLOWLY.format(root=str(ROOT), slow=str(self.slow)))
        late = self.folder / "bin/elastirun"
        late.parent.mkdir()
        late.write_text(LATE.format(there=self.folder, elastirun=ELASTIRUN))
        late.chmod(0o755)
        training = {"TEST_LOG": str(self.log), "TEST_SAMPLES": str(SAMPLES), "TEST_BATCH": str(BATCH), "TEST_EPOCHS": str(EPOCHS)}
        settings = {"PET_LAST_CALL": LAST_CALL, "PET_PRELOAD": "torch", "TEST_PAUSE": "0.5", "OMP_NUM_THREADS": "1"}
        super().__init__(cluster, nodes, nnodes=4, PATH=f"{late.parent}:{nodes.env['PATH']}", **training, **settings)

    def let_in(self, *names: str) -> None:
        for name in names:
            (self.folder / name).touch()

    def scale(self, count: int, outside: bool = True) -> str:
        """Call `elastirun scale` on the controller's machine, or in a step of its own on a node of the job, and return what it prints."""
        if outside:
            where = f"--rdzv-endpoint=h0:{20000 + int(self.number) % 10000}"
            return self.cluster.run(ELASTIRUN, "scale", str(count), f"slurm-{self.number}.0", where).strip()
        step = (f"--jobid={self.number}", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist=h1")
        return self.cluster.run("srun", *step, ELASTIRUN, "scale", str(count)).strip()

    def lines(self) -> list[Line]:
        return live_log.read(self.log)[0]

    def trains(self, count: int, after: int = 0) -> int:
        """Wait until all of ``count`` workers have made a step later than step ``after`` of a round, and return its number."""

        def made() -> int:
            steps = Counter(line["step"] for line in live_log.of(self.lines(), "made"))
            worlds = {line["step"] for line in live_log.of(self.lines(), "world") if line["world"] == count}
            first = min((step for step in worlds if step >= after), default=None)
            return next((step for step in steps if first is not None and step > first and steps[step] == count), 0)

        return until(made, f"{count} workers that train", LONGEST, state=self.explain, pause=0.05)


@pytest.fixture(autouse=True)
def no_time_limit() -> None:
    """Take pytest's limit for a test off: four nodes import torch on a busy machine, and each wait here has a limit of its own."""
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.daily(3)
@needs_slurm
def test_a_job_begins_grows_and_shrinks_as_it_is_told_from_outside_and_loses_no_step(cluster: Slurm, nodes: Cluster) -> None:
    job = LiveJob(cluster, nodes)
    job.let_in("h0")
    job.says("1 of at most 4 nodes joined")
    assert job.scale(2) == f"job 'slurm-{job.number}.0': 2 nodes wanted, 1 joined"
    job.let_in("h1")
    step = job.trains(2)
    job.let_in("h2", "h3")
    until(lambda: job.out().count("round 1 has its 2 nodes; this node is a spare") == 2, "two spares", LONGEST, state=job.explain)
    for count, members, outside in ((4, 2, True), (3, 4, False)):
        called = time.monotonic()
        assert job.scale(count, outside).endswith(f"': {count} nodes wanted, {members} in the round")
        step = job.trains(count, after=step)
        print(f"scaled to {count}: all of them had trained a step {time.monotonic() - called:.1f} s after the call")
    job.slow.unlink()
    assert job.ends() == ("COMPLETED", "0:0"), job.explain()
    lines = job.lines()
    assert live_log.violations(lines, SAMPLES) == []
    assert len(live_log.of(lines, "begun")) == 4, "workers that stay keep their processes"
    rounds = {(line["step"], line["round"]) for line in live_log.of(lines, "made")}
    assert len(rounds) == STEPS, "each step was made in one round"
    assert {line["step"] for line in live_log.of(lines, "over")} == {STEPS}

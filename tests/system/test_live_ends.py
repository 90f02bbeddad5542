"""A worker is killed at the end of a live training, or in an evaluation between two epochs: the others go on, and save the last step."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.cluster import PATIENCE, free_port

ROOT = Path(__file__).parents[2]
STEPS = 5  # of an epoch
SCRIPT = '''
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from elastirun.train import Checkpointer, DistributedDataParallel, ElasticDataLoader, TrainState, elastic
from elastirun.train.errors import ReductionFailed

EPOCHS, LEFT_AT = 2, 8
folder, dies = sys.argv[1:]


def die(at, rank):
    """Kill this process if ``at`` and its rank are those of the test, and no other process has died.

    Between two epochs once another rank is in the evaluation: else that one may lose its peer before.
    """
    if (at, rank) == (dies[:-2], int(dies[-1])) and os.environ["ELASTIRUN_ROUND"] == "1":
        while at.startswith(("evaluation", "published")) and not os.path.exists(f"{folder}.evaluation {loader.epoch}"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


def be_late(what):
    """Let rank 2 lose its peer in ``what``, as if alone."""
    if dies.startswith(what) and os.environ["ELASTIRUN_ROUND"] == "1" and dist.get_rank() == 2:
        if what in ("reduction", "leaves"):
            model._reducer._broken = ReductionFailed("it has failed here alone")
            if what == "leaves":
                model._reducer.completed -= 1
                optimizer.zero_grad()
            return
        while not run._connection.asked:
            time.sleep(0.01)
        raise RuntimeError("a peer is lost")


def say(*words):
    os.write(1, (" ".join(map(str, [os.getpid(), *words])) + "\\n").encode())


torch.set_num_threads(1)
elastic.init_process_group()
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.Adam(model.parameters())
loader = ElasticDataLoader(torch.utils.data.TensorDataset(torch.randn(40, 4)), global_batch_size=8)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
state = TrainState(model=model, optimizer=optimizer, data=loader, scheduler=scheduler)
run = elastic.Elastic(state, lambda: Checkpointer(folder, every=3))
wait = Checkpointer.wait
Checkpointer.wait = lambda self, limit: (die("wait", dist.get_rank()), wait(self, limit), be_late("published"))
while loader.epoch < EPOCHS:
    for (inputs,) in run.batches():
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        if run.step == EPOCHS * 5 - 1:
            die("step", dist.get_rank())
        if run.step == LEFT_AT - 1:
            die("break", dist.get_rank())
        if run.step % 5 == 4:
            die(f"reduction {run.step // 5 + 1}", dist.get_rank())
            die(f"leaves {run.step // 5 + 1}", dist.get_rank())
            for what in "reduction", "leaves":
                if f"{what} {run.step // 5 + 1} 1" == dies:
                    be_late(what)
        optimizer.step()
        if dies.startswith("leaves") and model.failed and run.step == 4:
            break
        if dies.startswith("break") and run.step == LEFT_AT - 1:
            break
    if dies.startswith("break") and run.step >= LEFT_AT - 1:
        break
    scheduler.step()
    if dies.startswith("published"):
        run.save()
        die(f"published {loader.epoch}", dist.get_rank())
    total = torch.ones(1)
    die(f"evaluation {loader.epoch}", dist.get_rank())
    open(f"{folder}.evaluation {loader.epoch}", "w").close()
    try:
        dist.all_reduce(total)
        say("evaluated", loader.epoch, "with", int(total), "after step", run.step)
    except RuntimeError as lost:
        say("no evaluation", loader.epoch, lost)
die("save", dist.get_rank())
run.save()
say("saved", run.step, "at", scheduler.last_epoch, "of", sorted(name for name in os.listdir(folder) if name.startswith("step-"))[-1])
dist.destroy_process_group()
'''


@dataclass(frozen=True)
class Ended:
    code: int
    said: str

    def lines(self, what: str) -> dict[int, str]:
        """Return what each process has said that begins with ``what``, by pid."""
        return {int(pid): more for pid, more in re.findall(rf"(\d+) ({what}.*)", self.said)}


def launch(folder: Path, *options: str, dies: str, nproc: int = 3) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(SCRIPT)
    line = [sys.executable, "-m", "elastirun", f"--nproc-per-node={nproc}", "--preload=torch", "--max-restarts=1", *options]
    command = [*line, str(folder / "script.py"), str(folder / "checkpoints"), dies]
    env = {**os.environ, "TMPDIR": str(folder), "PET_SET": "restart-pause=0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def end(job: subprocess.Popen[str]) -> Ended:
    try:
        said, _ = job.communicate(timeout=3 * PATIENCE)
    finally:
        job.kill()
    return Ended(job.returncode, said)


@pytest.mark.daily(5)
@pytest.mark.parametrize("dies", ["step 1", "save 0", "save 2", "wait 0", "wait 1"])
def test_the_others_of_a_worker_that_is_killed_at_the_end_save_the_last_step(tmp_path: Path, dies: str) -> None:
    """It dies in the last step, before it saves, or when its part of the state is staged; rank 0 is the one that publishes."""
    job = end(launch(tmp_path, "--standalone", dies=dies))
    saved = job.lines("saved")
    assert job.code == 0 and len(saved) >= 2, job.said
    assert all(line.startswith(f"saved {2 * STEPS} at 2 of step-{2 * STEPS:08}") for line in saved.values()), job.said
    assert len(saved.keys() & job.lines("evaluated 1").keys()) == 2, job.said  # they were there before


@pytest.mark.daily(3)
@pytest.mark.parametrize("dies", ["break 0", "break 1", "break 2"])
def test_where_the_script_leaves_the_loop_as_a_worker_is_killed_the_others_save_one_state(tmp_path: Path, dies: str) -> None:
    """Some may have completed that step, and others not."""
    job = end(launch(tmp_path, "--standalone", dies=dies))
    saved = [line.removeprefix("saved ").split() for line in job.lines("saved").values()]
    assert job.code == 0 and len(saved) >= 2 and len({words[0] for words in saved}) == 1, job.said
    assert all(int(words[0]) in (7, 8) and words[-1] == f"step-{int(words[0]):08}" for words in saved), job.said


def test_of_two_nodes_none_ends_before_the_last_step_is_published_although_a_worker_is_killed(tmp_path: Path) -> None:
    here = ("--nnodes=2", "--rdzv-id=end", f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    jobs = [launch(tmp_path, *here, f"--node-rank={rank}", dies="wait 1", nproc=1) for rank in range(2)]
    ended = [end(job) for job in jobs]
    said = ended[0].said + ended[1].said
    assert [job.code for job in ended] == [0, 0] and Ended(0, said).lines("saved"), said


@pytest.mark.parametrize("epoch", [1, 2])
def test_who_catches_the_loss_of_a_peer_in_an_evaluation_keeps_its_state(tmp_path: Path, epoch: int) -> None:
    """After the last epoch there is no other step: the save is where the others go on."""
    job = end(launch(tmp_path, "--standalone", dies=f"evaluation {epoch} 1", nproc=2))
    without = job.lines(f"no evaluation {epoch}")
    assert len(without) == 1, job.said
    (survivor,) = without
    assert job.code == 0 and job.lines("saved")[survivor].startswith(f"saved {2 * STEPS} at 2 of step-{2 * STEPS:08}"), job.said
    if epoch == 1:
        assert job.lines("evaluated 2")[survivor].endswith(f"after step {2 * STEPS}"), job.said


@pytest.mark.daily(4)
@pytest.mark.parametrize("dies", ["reduction 1 1", "reduction 2 1", "published 1 1", "leaves 1 1"])
def test_who_is_late_at_the_end_of_an_epoch_comes_to_the_next_batch_without_the_others_evaluation(tmp_path: Path, dies: str) -> None:
    """The last reduction of the epoch fails on rank 2 alone, or it loses its peer when the others have seen the checkpoint published.

    Its script may leave the loop then, and comes back to it: the rest of the epoch has no batch.
    Its ``all_reduce`` would be one with the next reduction of the others, for ever.
    """
    job = end(launch(tmp_path, "--standalone", dies=dies))
    epoch, without = int(dies.split()[1]), job.lines("no evaluation")
    assert job.code == 0 and len(without) == 2 and all(line.startswith(f"no evaluation {epoch}") for line in without.values()), job.said
    saved = job.lines("saved")
    assert without.keys() <= saved.keys(), job.said
    assert all(line.startswith(f"saved {2 * STEPS} at 2 of step-{2 * STEPS:08}") for line in saved.values()), job.said


REFUSED = """
from torch import nn, optim
from elastirun.train import DistributedDataParallel, ElasticDataLoader, TrainState, elastic

elastic.init_process_group()
models = [DistributedDataParallel(nn.Linear(4, 2)) for _ in range(2)]
optimizer, loader = optim.SGD(models[0].parameters(), lr=0.1), ElasticDataLoader([1, 2, 3], global_batch_size=2)
elastic.Elastic(TrainState(model=models[0], optimizer=optimizer, data=loader, second=models[1]))
"""


def test_a_script_that_is_refused_ends_the_job_at_once_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(REFUSED)
    line = [sys.executable, "-m", "elastirun", "--standalone", "--nproc-per-node=2", "--max-restarts=3", str(tmp_path / "script.py")]
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=3 * PATIENCE)
    assert done.returncode == 1 and "round 2" not in done.stderr, done.stderr
    assert "a worker failed, as it would after each restart: rank" in done.stderr, done.stderr
    assert "exit code 1, Elastic needs a state with one DistributedDataParallel" in done.stderr, done.stderr

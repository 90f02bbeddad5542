"""What scripts do with their batches: real workers, of which one is lost, end right or with a clear error."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import PATIENCE

ROOT = Path(__file__).parents[2]
EPOCHS, BATCHES = 4, 20
ENDS = EPOCHS * BATCHES  # steps
SCRIPT = f"""
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from elastirun.train import Checkpointer, DistributedDataParallel, ElasticDataLoader, TrainState, elastic

how, folder = sys.argv[1:]
EVERY = 1 if how == "break" else 20
LIMIT = 70 if how == "count" else 1000  # batches, as the script counts them
torch.set_num_threads(1)
elastic.init_process_group()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn({8 * BATCHES}, 4))
loader = ElasticDataLoader(data, global_batch_size=8, micro_batch_size=3)
state = TrainState(model=model, optimizer=optimizer, data=loader)
run = elastic.Elastic(state, lambda: Checkpointer(folder, every=EVERY))


def say(*words):
    os.write(1, (" ".join(map(str, [os.getpid(), *words])) + "\\n").encode())


def disturb():
    if run.step == 5 and os.environ.get("ELASTIRUN_ROUND") == "1" and dist.get_rank() == 1:
        if how == "exception":
            raise ValueError("on purpose")
        os.kill(os.getpid(), signal.SIGKILL)
    if run.step > 5 and "ELASTIRUN_ROUND" in os.environ and dist.get_world_size() == 1:
        time.sleep(0.1)  # until the new worker is there


def compute(batch):
    disturb()
    model(batch[0]).square().mean().backward()


joined = begun = 0
while loader.epoch < {EPOCHS} and begun < LIMIT:
    for at, batch in enumerate(run.steps() if how == "steps" else run.batches()):
        begun += 1
        optimizer.zero_grad()
        try:
            for one in batch if how == "steps" else [batch]:
                compute(one)
        except ValueError:
            continue
        optimizer.step()
        joined += run.counts and dist.get_world_size() == 2
        if (how == "break" and at == 6) or begun == LIMIT:
            break
run.save()
weights = [round(param.double().square().sum().item(), 6) for param in model.parameters()]
say("ended at", run.step, "of", joined, "weights", *weights)
dist.destroy_process_group()
"""


def launch(folder: Path, how: str, *launcher: str) -> tuple[int, str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "TMPDIR": str(folder), "PET_SET": "restart-pause=0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *launcher, str(script), how, str(folder / f"checkpoints {len(launcher)}")]
    job = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said, _ = job.communicate(timeout=3 * PATIENCE)
    finally:
        job.kill()
    return job.returncode, said


LIVE = ("-m", "elastirun", "--standalone", "--nproc-per-node=2", "--preload=torch", "--max-restarts=1")


@pytest.mark.daily(3)
@pytest.mark.parametrize("how", ["steps", "exception", "break"])
def test_a_script_that_is_disturbed_ends_with_the_weights_of_one_that_is_not(tmp_path: Path, how: str) -> None:
    """It accumulates; or one rank passes over an exception, or leaves the loop by a count of its own."""
    code, said = launch(tmp_path, how, *LIVE)
    alone, told = launch(tmp_path, how)
    assert code == alone == 0, said + told
    ended = dict(re.findall(rf"(\d+) ended at {ENDS} of (\d+) weights", said))
    weights = set(re.findall(r"weights (.*)", said + told))
    assert len(ended) == 2 and all(map(int, ended.values())) and len(weights) == 1, said + told
    assert ("no reduction was made for the batch of step 6" in said) is (how == "exception"), said


def test_who_saves_while_another_is_in_the_loop_ends_with_a_line_that_says_why(tmp_path: Path) -> None:
    code, said = launch(tmp_path, "count", *LIVE)
    assert code != 0 and "TrainError: a rank has left the loop over the batches" in said, said

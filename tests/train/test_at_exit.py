"""The end of a script whose module lives until the interpreter's end: no thread of gloo is left that could abort it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.until import PATIENCE

ROOT = Path(__file__).resolve().parents[2]

# ``show`` is registered first, so it runs last. The optimizer imports torch.distributed.nn.functional, which must not keep the group.
SCRIPT = """
import atexit, os, sys

@atexit.register
def show():
    print({open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")})

import torch, torch.distributed as dist
from elastirun.train import DistributedDataParallel, Drain

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
drain, optimizer = Drain(model), torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(4, 4)).sum().backward()
optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.daily(3)
def test_no_thread_of_gloo_outlives_the_last_exit_handler(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(rank)], cwd=ROOT, stdout=subprocess.PIPE, text=True) for rank in range(2)]
    said = [rank.communicate(timeout=PATIENCE)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert all("python" in text and "gloo" not in text for text in said), said

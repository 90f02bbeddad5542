"""Runs jobs of four workers whose batches vary in length, and tells which ranks their agents take for stragglers: there should be none.

    python -m benchmarks.varying_lengths [--jobs 10] [--first-seed 0] [--window 2] [--untold]

The computation is a sleep for each token. Lengths are random (32 to 512), but each global batch is sorted by length, as samplers that
group samples of similar length do: so one rank always has the longest samples. The workers tell the tokens (``ElasticDataLoader(work=…)``;
``--untold``: they do not, and then that rank is named). Agents compare windows of ``--window`` seconds instead of 20, and name a rank
after three.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.lab import machine

LAUNCHER = """
import sys
from elastirun.__main__ import main
from elastirun.agent.hangs import straggler_watch
straggler_watch.WINDOW = float(sys.argv.pop(1))
sys.exit(main())
"""
TRAIN = """
import random, sys, time
import torch, torch.distributed as dist
from torch import nn
from elastirun.train import DistributedDataParallel, ElasticDataLoader
seed, seconds, told = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "told"
GLOBAL, TOKEN = 16, 2e-5  # samples; seconds

class Texts(torch.utils.data.Dataset):
    def __init__(self):
        rng = random.Random(seed)
        batches = [sorted(rng.randint(32, 512) for _ in range(GLOBAL)) for _ in range(4096)]
        self.lengths = [length for batch in batches for length in batch]
    def __len__(self):
        return len(self.lengths)
    def __getitem__(self, index):
        return torch.tensor(float(self.lengths[index]))

def tokens(batch):
    return batch.sum()

class Model(nn.Linear):
    def forward(self, lengths):
        time.sleep(TOKEN * float(lengths.sum()))
        return super().forward(lengths[:, None] / 512)

dist.init_process_group("gloo")
ddp = DistributedDataParallel(Model(1, 1))
loader = ElasticDataLoader(Texts(), GLOBAL, shuffle=False, work=tokens if told else None)
begun = time.monotonic()
for step in loader.steps(ddp):
    for batch in step:
        ddp(batch).mean().backward()
    if time.monotonic() - begun > seconds and dist.get_rank() == 0:
        ddp.request("drain")
    if ddp.drained:
        break
"""


def job(seed: int, window: float, told: bool) -> list[str]:
    """Return the lines about stragglers of a job that trains for six windows. Raises RuntimeError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        script, launcher = Path(folder, "train.py"), Path(folder, "launcher.py")
        script.write_text(TRAIN)
        launcher.write_text(LAUNCHER)
        arguments = [str(script), str(seed), str(6 * window), "told" if told else "untold"]
        command = [sys.executable, str(launcher), str(window), "--nnodes=1", "--nproc-per-node=4", *arguments]
        path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the job of seed {seed} ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return [line for line in (done.stdout + done.stderr).splitlines() if "is a straggler" in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--window", type=float, default=2.0, help="seconds (2)")
    parser.add_argument("--untold", action="store_true", help="the workers do not tell the tokens of their batches")
    options = parser.parse_args()
    print(machine(), flush=True)
    named = 0
    for seed in range(options.first_seed, options.first_seed + options.jobs):
        found = job(seed, options.window, not options.untold)
        named += bool(found)
        print(f"seed {seed}: {'; '.join(found) or 'nobody is named'}", flush=True)
    print(f"\n{options.jobs} jobs, in {named} of them a rank is named")
    sys.exit(named > 0 and not options.untold)


if __name__ == "__main__":
    main()

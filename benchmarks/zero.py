"""Measures a step with a sharded optimizer beside the optimizer alone, torch's ZeroRedundancyOptimizer and FSDP2: time, state, peak memory.

    python -m benchmarks.zero [--ranks 2] [--width 512] [--layers 8] [--rounds 8]

A transformer in float32 with AdamW (fused), one thread per rank. For times all variants are in one process and take turns, some steps each,
in another order each round; a step is forward, backward, reduction and the step of the optimizer, and a value is that of the slowest rank.
For memory each variant has processes of its own: the peak (VmHWM) beyond that before the model is made, and the state's tensors.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from benchmarks.lab import machine, table
from elastirun.train import DistributedDataParallel, ShardedOptimizer
from elastirun.train.sharded import local_part
from tests.support import worlds

PLAIN, SHARDED, TORCH = "DistributedDataParallel, AdamW", "DistributedDataParallel, ShardedOptimizer", "torch's, ZeroRedundancyOptimizer"
KEPT, RESHARDED = "FSDP2, reshard_after_forward=False (ZeRO-2)", "FSDP2 (ZeRO-3)"
VARIANTS = (PLAIN, SHARDED, TORCH, KEPT, RESHARDED)
STEPS = 3  # of a variant in its turn, the first of which is not counted
TOKENS, BATCH = 32, 8


def make(name: str, width: int, layers: int) -> tuple[nn.Module, Any, Any]:
    """Return the model, the wrapped one, and the optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True) for _ in range(layers)))
    options = {"lr": 1e-3, "fused": True}
    if name in (KEPT, RESHARDED):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*model, model):
            fully_shard(part, mesh=mesh, reshard_after_forward=name == RESHARDED)
        return model, model, torch.optim.AdamW(model.parameters(), **options)
    if name == TORCH:
        theirs = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        return model, theirs, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)
    ddp = DistributedDataParallel(model)
    return (
        model,
        ddp,
        ShardedOptimizer(ddp, torch.optim.AdamW, **options) if name == SHARDED else torch.optim.AdamW(ddp.parameters(), **options),
    )


def step(ddp: Any, optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    ddp(x).square().mean().backward()
    optimizer.step()


def times(rank: int, world: int, width: int, layers: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of the steps by variant."""
    made = {name: make(name, width, layers) for name in VARIANTS}
    found: dict[str, list[float]] = {name: [] for name in VARIANTS}
    x = torch.randn(BATCH, TOKENS, width)
    for turn in range(-1, rounds):
        for at in range(len(VARIANTS)):
            name = VARIANTS[(at + turn) % len(VARIANTS)]
            _, ddp, optimizer = made[name]
            for number in range(STEPS):
                dist.barrier()
                begun = time.perf_counter()
                step(ddp, optimizer, x)
                if turn >= 0 and number:
                    found[name].append(time.perf_counter() - begun)
    return found


def memory(rank: int, world: int, name: str, width: int, layers: int) -> tuple[int, int, int]:
    """Return bytes: of the parameters, of the optimizer's state, and of the peak beyond the beginning."""
    gc.collect()
    before = peak()
    model, ddp, optimizer = make(name, width, layers)
    x = torch.randn(BATCH, TOKENS, width)
    for _ in range(4):
        step(ddp, optimizer, x)
    own = {SHARDED: "_within", TORCH: "optim"}.get(name)
    states = (getattr(optimizer, own) if own else optimizer).state.values()
    state = sum(local_part(value).nbytes for each in states for value in each.values() if isinstance(value, Tensor) and value.dim())
    return sum(param.numel() * param.element_size() for param in model.parameters()), state, peak() - before


def peak() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("ranks", 2), ("width", 512), ("layers", 8), ("rounds", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    chosen = parser.parse_args()
    print(machine(), flush=True)
    size = chosen.width, chosen.layers
    ranks = worlds.run(chosen.ranks, times, *size, chosen.rounds, timeout=3600.0)
    slowest = {name: [max(each) for each in zip(*(rank[name] for rank in ranks), strict=True)] for name in VARIANTS}
    peaks = {name: worlds.run(chosen.ranks, memory, name, *size, timeout=3600.0) for name in VARIANTS}
    params = peaks[PLAIN][0][0]
    print(f"{params / 4e6:.1f} M parameters, {chosen.ranks} ranks\n")
    rows = [["", "step, ms: min / median / max", "of plain", "state, x parameters, largest", "peak, x parameters, largest"]]
    for name in VARIANTS:
        own = slowest[name]
        spread = " / ".join(f"{1e3 * value:.0f}" for value in (min(own), statistics.median(own), max(own)))
        ratio = statistics.median(own) / statistics.median(slowest[PLAIN])
        state, high = (max(each[at] for each in peaks[name]) / params for at in (1, 2))
        rows.append([name, spread, f"{ratio:.2f}", f"{state:.2f}", f"{high:.2f}"])
    print(table(rows), flush=True)


if __name__ == "__main__":
    main()

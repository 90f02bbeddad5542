"""Measures how much of the all-reduces' time is hidden behind the backward:

    python -m tests.gpu.overlap [--svg FILE]

Two ranks share the GPU over NCCL, which takes them for ranks of two hosts and sends by sockets. From
torch's profiler come the kernels of a few steps of our module and of torch's DistributedDataParallel.
Hidden is the part of the all-reduces' time in which kernels run that the backward started: nodes of
autograd, and hooks. Kernels that both modules start after the graph (copies, divisions) are not counted.

The sockets are slow beside the GPU. So the model computes in fp32, and the batch is as large as needed to
let the backward take about as long as the all-reduces: with much less to compute, hardly anything could be
hidden. The processes take turns on the GPU, and a kernel's time contains that of the other process. All of
that is the same for both.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from tests.gpu.models import COMPACT
from tests.gpu.steps import OURS, TORCH, Variant, events_of, highest, make_variant, profiler, together, wrap
from tests.gpu.timeline import STEP, Profile, contents, draw, length, profiles, union
from tests.support import worlds
from tests.support.gpu import BOTH, DEVICE, DRY, HERE, NCCL, NO_GPU, figure, synchronize

WARM_UP = 6  # steps; buckets are final after two, and three more are timed
STEPS = 5 if HERE else 2  # with the profiler
FEWEST, SLOW = 3, 1.0  # steps, where one takes more seconds
MOST_ROWS = 64 if HERE else 4  # samples: 20 GB of activations
# times the all-reduces' time that the backward is to take: a bucket is not sent before it is full
ENOUGH = 1.2
BUCKET = 25 << 20  # bytes: those of torch's buckets
SHORTFALL = 0.1  # of the hidden part, by which ours may be below torch's
LIMIT = 55.0  # seconds for the world: only a hang takes longer


@dataclass(frozen=True)
class Seen:
    """The profiles of one rank's steps by variant, and the number of samples in a batch."""

    rows: int
    seconds: dict[str, float]  # of a step without the profiler
    profiles: dict[str, list[Profile]]


def measure(rank: int, world: int) -> Seen:
    """Profile steps of our module and of torch's on one rank."""
    group = dist.new_group(backend=NCCL)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = COMPACT.build()
    rows = choose_rows(model, group)
    with torch.device(DEVICE):
        torch.manual_seed(1 + rank)
        batch = COMPACT.batch(rows)
    wrapped = {name: wrap(name, copy.deepcopy(model), group) for name in (OURS, TORCH)}
    found = Seen(rows, {}, {})
    for name, module in wrapped.items():
        variant = make_variant(module, COMPACT, batch, half=False)
        taken = [together(variant.step) for _ in range(WARM_UP)]
        found.seconds[name] = median(taken[-3:])
        found.profiles[name] = profile(variant, STEPS if found.seconds[name] < SLOW else FEWEST)
    return found


def choose_rows(model: nn.Module, group: dist.ProcessGroup) -> int:
    """Return the number of samples with which a backward takes about as long as the all-reduces.

    Both are measured on both ranks at once, and all ranks return the same.
    """
    with torch.device(DEVICE):
        batch = COMPACT.batch(COMPACT.rows)
        count = sum(param.nbytes for param in model.parameters())
        flats = [torch.zeros(BUCKET // 4) for _ in range(-(-count // BUCKET))]
    inputs, targets = batch

    def backward() -> float:
        loss = COMPACT.loss(model(inputs), targets)
        return together(loss.backward)

    def reduce() -> None:
        for flat in flats:
            dist.all_reduce(flat, group=group)

    reducing = min(together(reduce) for _ in range(3))
    computing = min(backward() for _ in range(3))
    model.zero_grad(set_to_none=True)
    return max(COMPACT.rows, min(MOST_ROWS, round(COMPACT.rows * ENOUGH * reducing / computing)))


def profile(variant: Variant, steps: int) -> list[Profile]:
    """Return the profiles of some steps. Both ranks begin each of them together."""
    with profiler() as recorded:
        for _ in range(1 + steps):
            synchronize()
            highest(0.0)  # waits for the other rank
            with record_function(STEP):
                variant.step()
                synchronize()
    events = events_of(recorded)
    counted = profiles(events)[1:]  # the first step starts the profiler
    found = [one for one in counted if one.reduce and one.backward]
    assert found, f"no step with an all-reduce and a backward in the trace; {contents(events)}"
    return found


# -- figures -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """Medians over the steps of all ranks; times are in ms."""

    hidden: float
    lowest: float
    highest: float
    all_reduces: int
    reducing: float
    computing: float
    exposed: float
    steps: int


def summarize(found: Sequence[Profile]) -> Summary:
    hidden = [one.hidden for one in found]
    return Summary(
        median(hidden),
        min(hidden),
        max(hidden),
        round(median(len(one.reduce) for one in found)),
        median(length(union(one.reduce)) for one in found) / 1e3,
        median(length(union(one.backward)) for one in found) / 1e3,
        median(one.exposed for one in found) / 1e3,
        len(found),
    )


def show(ours: Summary, torchs: Summary, seen: Seen) -> None:
    figure(
        "overlap",
        f"{ours.hidden:.0%} ({ours.lowest:.0%} to {ours.highest:.0%}) of the time of {ours.all_reduces} "
        f"all-reduces hidden, {torchs.hidden:.0%} ({torchs.lowest:.0%} to {torchs.highest:.0%}) of "
        f"{torchs.all_reduces} with torch; all-reduces {ours.reducing:.0f} ms beside {torchs.reducing:.0f}, "
        f"backward {ours.computing:.0f} beside {torchs.computing:.0f}, after its last kernel "
        f"{ours.exposed:.1f} beside {torchs.exposed:.1f}; medians of {ours.steps} steps of both ranks; "
        f"{COMPACT.label}, fp32, {seen.rows} rows, NCCL by sockets, the processes take turns on the GPU",
        **{name: round(value, 4) for name, value in values(ours, "").items()},
        **{name: round(value, 4) for name, value in values(torchs, "torch_").items()},
        step_ms=round(seen.seconds[OURS] * 1e3, 2),
        torch_step_ms=round(seen.seconds[TORCH] * 1e3, 2),
        rows=seen.rows,
    )


def values(summary: Summary, prefix: str) -> dict[str, float]:
    """Return the values of a summary by names for programs."""
    return {
        f"{prefix}hidden": summary.hidden,
        f"{prefix}all_reduces": summary.all_reduces,
        f"{prefix}all_reduce_ms": summary.reducing,
        f"{prefix}backward_ms": summary.computing,
        f"{prefix}exposed_ms": summary.exposed,
    }


def typical(found: Sequence[Profile]) -> Profile:
    """Return the step that hides as much as the median."""
    return sorted(found, key=lambda one: one.hidden)[len(found) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw a step of each module")
    parser.add_argument(
        "--date",
        default=f"{datetime.now(timezone.utc):%Y-%m-%d}",
        help="for the drawing's title; default: today",
    )
    chosen = parser.parse_args()
    if not HERE and not DRY:
        sys.exit(NO_GPU)
    ranks = worlds.run(2, measure, timeout=LIMIT, backend=BOTH)
    ours, torchs = (summarize([one for rank in ranks for one in rank.profiles[name]]) for name in (OURS, TORCH))
    show(ours, torchs, ranks[0])
    if chosen.svg is not None:
        machine = torch.cuda.get_device_name(0) if HERE else "a CPU in place of the GPU"
        title = f"One backward on rank 0 of 2 that share {machine}; {COMPACT.label}; {chosen.date}"
        drawn = [(name, typical(ranks[0].profiles[key])) for name, key in (("elastirun", OURS), ("torch", TORCH))]
        chosen.svg.write_text(draw(title, drawn))
    sys.exit(0 if DRY or ours.hidden >= torchs.hidden - SHORTFALL else 1)


if __name__ == "__main__":
    main()

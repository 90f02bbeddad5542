"""Measures a training step on a GPU beside torch's DistributedDataParallel and the plain model:

    python -m tests.gpu.steps

bf16 autocast, fp32 parameters, AdamW(fused=True). First in a world of one over NCCL, for a ResNet-50 and a
transformer: the time per step of ``RUN`` steps in a row with a batch that keeps the GPU busy, and, with a small
batch, the host's time until the calls of a step return. Then on two ranks that share the GPU over NCCL, for the
ResNet-50 with the small batch.

The variants take turns in one process, each round in another order. Figures are medians over the rounds;
"paired" ratios are medians of the rounds' ratios. Before, the gradients of one backward are compared with
those of torch's class. Fails if they differ, or if a figure is missing.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from elastirun.train import DistributedDataParallel
from tests.gpu.models import RESNET, TRANSFORMER, Batch, Case
from tests.gpu.timeline import BACKWARD, Event, count_kernels
from tests.support import worlds
from tests.support.gpu import BOTH, DEVICE, DRY, HERE, NCCL, NO_GPU, figure, synchronize

PLAIN, TORCH, VIEWS, OURS = "plain", "torch", "torch with views", "ours"
KINDS = ("kernels", "copies")
CASES = {"resnet": RESNET, "transformer": TRANSFORMER}
WARM_UP = 6  # steps; torch's buckets are final after two, ours after four
RUN = 5 if HERE else 2  # steps in a row
ROUNDS = 15 if HERE else 2
FEWEST, SHARED_FEWEST = (5, 3) if HERE else (2, 2)  # rounds, however long they take
# seconds for the rounds of a world of one, and of two: the whole has to fit into a minute and a half
SECONDS, SHARED_SECONDS = 18.0, 6.0
SAME = 0.02  # relative difference of gradients; bf16 has 8 bits
NOISE = 4.0  # times the difference of two backwards of the same model: kernels may add up in another order
LIMIT = 60.0  # seconds for a world: only a hang takes longer


# -- variants ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """A module, its backward with the small batch, and its step with the small and with the large one."""

    module: nn.Module
    backward: Callable[[], None]
    step: Callable[[], None]
    large: Callable[[], None]


def wrap(name: str, model: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    """Return ``model`` as the variant trains it."""
    if name == OURS:
        cap = None if HERE else 25  # a dry run takes buckets of a fixed size, as on a GPU
        return DistributedDataParallel(model, process_group=group, transport="group", bucket_cap_mb=cap)
    if name == PLAIN:
        return model
    return nn.parallel.DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=name == VIEWS)


def make_variant(module: nn.Module, case: Case, batch: Batch, large: Batch | None = None, half: bool = True) -> Variant:
    """Return the variant that trains ``module`` with ``batch``. ``half``: computes in bf16."""
    rate = 1e-7  # parameters stay near their values
    optimizer = torch.optim.AdamW(module.parameters(), lr=rate, fused=True)

    def backward(of: Batch) -> None:
        inputs, targets = of
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=half):
            loss = case.loss(module(inputs), targets)
        with record_function(BACKWARD):
            loss.backward()

    def step(of: Batch) -> None:
        backward(of)
        optimizer.step()

    return Variant(module, partial(backward, batch), partial(step, batch), partial(step, large or batch))


def make_variants(names: Iterable[str], case: Case, rank: int) -> dict[str, Variant]:
    """Return the variants of a model; all begin with the same parameters. Ranks have different data."""
    torch.backends.cudnn.benchmark = True
    group = dist.new_group(backend=NCCL)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = case.build()
        torch.manual_seed(1 + rank)
        small, large = case.batch(case.rows), case.batch(case.many)
    return {name: make_variant(wrap(name, copy.deepcopy(model), group), case, small, large) for name in names}


# -- gradients -----------------------------------------------------------------------------------------------


def gradients(variant: Variant) -> list[Tensor]:
    variant.backward()
    found = [param.grad for param in variant.module.parameters() if param.grad is not None]
    return [grad.detach().clone() for grad in found]


def difference(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return the largest relative difference of a gradient, or NaN if any is NaN.

    Differences of very small gradients count little.
    """
    norms = torch.stack([other.float().norm() for other in others])
    apart = torch.stack([(one - other).float().norm() for one, other in zip(some, others, strict=True)])
    return float((apart / (norms + 1e-3 * norms.max())).max())


@dataclass(frozen=True)
class Agreement:
    """The difference of our gradients from torch's, and the highest that rounding explains."""

    difference: float
    allowed: float

    def check(self) -> None:
        """Raise RuntimeError if the gradients do not agree, or if any is NaN."""
        if not self.difference <= self.allowed:  # NaN is not, either
            raise RuntimeError(f"gradients differ by {self.difference:.2%} from torch's, not at most {self.allowed:.2%}")


def compare_gradients(variants: dict[str, Variant]) -> Agreement:
    """Compare the gradients of one backward. Its result is checked after the measurements: none is lost."""
    theirs = gradients(variants[TORCH])
    found = difference(gradients(variants[OURS]), theirs)
    if PLAIN in variants:
        noise = difference(gradients(variants[PLAIN]), gradients(variants[PLAIN]))
    else:
        noise = difference(gradients(variants[VIEWS]), theirs)
    return Agreement(found, max(SAME, NOISE * noise))


# -- times ---------------------------------------------------------------------------------------------------


def order(names: Sequence[str], number: int) -> list[str]:
    """Return the order of the variants in a round: each begins in turn, in both directions."""
    at = number // 2 % len(names)
    turned = [*names[at:], *names[:at]]
    return turned[::-1] if number % 2 else turned


def turn(variant: Variant) -> tuple[float, float, float]:
    """Return the seconds of the host for one small step, of that step, and of a large one of several in a row.

    The first step of each kind is not counted: it takes the place of another variant's data in caches.
    """
    variant.step()
    synchronize()
    begun = time.perf_counter()
    variant.step()
    host = time.perf_counter() - begun
    synchronize()
    whole = time.perf_counter() - begun
    variant.large()
    synchronize()
    begun = time.perf_counter()
    for _ in range(RUN):
        variant.large()
    synchronize()
    return host, whole, (time.perf_counter() - begun) / RUN


def warm_up(variants: dict[str, Variant]) -> None:
    for variant in variants.values():
        for _ in range(WARM_UP):
            variant.step()


def alone(rank: int, world: int, key: str) -> None:
    """Measure the steps of a world of one, and print its figures.

    The profiler comes last: if it fails, times are printed all the same.
    """
    names = (PLAIN, TORCH, VIEWS, OURS)
    variants = make_variants(names, CASES[key], rank)
    agreement = compare_gradients(variants)
    warm_up(variants)
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    until = time.monotonic() + SECONDS
    for number in range(ROUNDS):
        for name in order(names, number):
            taken[name].append(turn(variants[name]))
        if number + 1 >= FEWEST and time.monotonic() > until:
            break
    host, whole, row = ({name: [values[which] for values in rounds] for name, rounds in taken.items()} for which in range(3))
    show_steps(key, row, agreement)
    show_host(key, host, whole, count_all(variants))
    agreement.check()


def shared(rank: int, world: int, key: str) -> tuple[dict[str, list[float]], Agreement]:
    """Return the seconds of each variant's steps on ranks that share the GPU, on the slower rank each."""
    names = (TORCH, VIEWS, OURS)
    variants = make_variants(names, CASES[key], rank)
    agreement = compare_gradients(variants)
    warm_up(variants)
    taken: dict[str, list[float]] = {name: [] for name in names}
    until = time.monotonic() + SHARED_SECONDS
    for number in range(ROUNDS):
        for name in order(names, number):
            variants[name].step()
            taken[name].append(together(variants[name].step))
        if number + 1 >= SHARED_FEWEST and highest(time.monotonic() - until) > 0:
            break
    return taken, agreement


def together(step: Callable[[], None]) -> float:
    """Return the seconds of a step, on the slowest rank."""
    synchronize()
    highest(0.0)  # waits for the others
    begun = time.perf_counter()
    step()
    synchronize()
    return highest(time.perf_counter() - begun)


def highest(value: float) -> float:
    """Return the highest value of all ranks. It goes over gloo, so that it starts no kernel."""
    held = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(held, dist.ReduceOp.MAX)
    return float(held)


# -- kernels -------------------------------------------------------------------------------------------------


def profiler() -> torch.profiler.profile:
    """Return a profiler of the host and of the GPU, if there is one."""
    activity = torch.profiler.ProfilerActivity
    return torch.profiler.profile(activities=[activity.CPU, activity.CUDA] if HERE else [activity.CPU], acc_events=True)


def events_of(profile: torch.profiler.profile) -> list[Event]:
    """Return the events of the Chrome trace of a profile, which has ended."""
    with tempfile.TemporaryDirectory(prefix="elastirun-trace-") as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events: list[Event] = json.loads(path.read_text())["traceEvents"]
    return events


def count_all(variants: dict[str, Variant]) -> dict[str, tuple[int, int]]:
    """Return the numbers of kernels and copies of a step of each variant, as far as the profiler works."""
    found = {}
    try:
        for name in (PLAIN, *variants):  # the first profile prepares the profiler, and may lack something
            synchronize()
            with profiler() as profile:
                variants[name].step()
                synchronize()
            found[name] = count_kernels(events_of(profile))
    except Exception:  # times are known, and not to be lost
        traceback.print_exc()
    return found


# -- figures -------------------------------------------------------------------------------------------------


def ms(values: Sequence[float]) -> str:
    return f"{median(values) * 1e3:.2f}"


def spread(values: Sequence[float]) -> str:
    return f"{min(values) * 1e3:.2f} to {max(values) * 1e3:.2f}"


def paired(mine: Sequence[float], theirs: Sequence[float]) -> float:
    return median(m / t for m, t in zip(mine, theirs, strict=True))


def beside(times: dict[str, list[float]]) -> str:
    """Return our time with its range, and those of the others with the paired ratios of ours to them."""
    ours = times[OURS]
    others = [f"{ms(values)} {name} ({paired(ours, values):.3f})" for name, values in times.items() if name != OURS]
    return f"{ms(ours)} ms ({spread(ours)}) beside {', '.join(others)}"


def values_of(times: dict[str, list[float]]) -> dict[str, float]:
    """Return the medians in ms, and the paired ratios of ours, by names for programs."""
    names = {name: name.replace(" ", "_") for name in times}
    found = {f"{names[name]}_ms": median(values) * 1e3 for name, values in times.items()}
    ratios = {f"of_{names[name]}": paired(times[OURS], values) for name, values in times.items() if name != OURS}
    return {name: round(value, 4) for name, value in (found | ratios).items()}


def more_kernels(kernels: dict[str, tuple[int, int]]) -> str:
    """Return the numbers of kernels and copies above those of the plain model in words."""
    if len(kernels) < 4:
        return "kernels not counted"
    plain = kernels[PLAIN]
    above = [f"{name} {found[0] - plain[0]:+} and {found[1] - plain[1]:+}" for name, found in kernels.items() if name != PLAIN]
    return f"kernels and copies above the plain model's {plain[0]} and {plain[1]}: {', '.join(above)}"


def show_steps(key: str, row: dict[str, list[float]], agreement: Agreement) -> None:
    rounds, case = len(row[OURS]), CASES[key]
    figure(
        f"step-{key}",
        f"{beside(row)}; per step of {RUN} in a row, median of {rounds} runs; {case.label}, {case.many} {case.unit}",
        **values_of(row),
        gradients_differ_by=round(agreement.difference, 6),
        rounds=rounds,
    )


def show_host(
    key: str,
    host: dict[str, list[float]],
    whole: dict[str, list[float]],
    kernels: dict[str, tuple[int, int]],
) -> None:
    rounds, case = len(host[OURS]), CASES[key]
    counts = {f"{kind}_{name.replace(' ', '_')}": n for name, both in kernels.items() for kind, n in zip(KINDS, both, strict=True)}
    figure(
        f"host-{key}",
        f"{beside(host)}; median of {rounds} steps, {case.rows} {case.unit}, until the GPU is done "
        f"{paired(whole[OURS], whole[TORCH]):.3f} of torch; {more_kernels(kernels)}",
        **values_of(host),
        **{f"done_{name}": value for name, value in values_of(whole).items()},
        **counts,
        rounds=rounds,
    )


def show_alone(key: str) -> None:
    worlds.run(1, alone, key, timeout=LIMIT, backend=BOTH)


def show_shared(key: str) -> None:
    ranks = worlds.run(2, shared, key, timeout=LIMIT, backend=BOTH)
    taken, agreement = ranks[0]  # times are those of the slower rank, on both
    rounds = len(taken[OURS])
    figure(
        "step-shared",
        f"{beside(taken)}; median of {rounds} steps; {CASES[key].label}, {CASES[key].rows} {CASES[key].unit} each, "
        "NCCL by sockets, the processes take turns on the GPU",
        **values_of(taken),
        gradients_differ_by=round(agreement.difference, 6),
        rounds=rounds,
    )
    for _, agreement in ranks:
        agreement.check()


def attempt(function: Callable[..., Any], *args: Any) -> bool:
    """Return whether ``function`` succeeded: after a failure the other figures are measured all the same."""
    try:
        function(*args)
    except Exception:
        traceback.print_exc()
        return False
    return True


def main() -> None:
    if not HERE and not DRY:
        sys.exit(NO_GPU)
    done = [attempt(show_alone, "transformer"), attempt(show_alone, "resnet"), attempt(show_shared, "resnet")]
    sys.exit(0 if all(done) else 1)


if __name__ == "__main__":
    main()

"""Measures how well reductions hide behind the backward. Sleeping simulates compute and the link, so a busy machine changes little.

    python -m benchmarks.ddp_schedule [--quick] [--rounds 7]

There is one rank. A layer's backward sleeps. Reductions take turns on one link, and each takes a latency and a time per byte. elastirun
gets the link as its transport and plans its buckets by its own measurements, as always; torch's DistributedDataParallel gets the link as a
communication hook. The variants take turns. A round's value is the better of two steps, and the tables show the median of the rounds.

overlap   24 layers of 4 MB and 10 ms: the part of the communication that was hidden, of what could have been,
          (no overlap - time) / (no overlap - the longer of compute and communication)
links     an embedding of 32 MB whose gradient comes last, 12 layers of 4 MB (12 ms each), 24 of 1 MB (5 ms), three links: how far
          above the bound, which is compute and then the embedding's own transfer
"""

from __future__ import annotations

import argparse
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.futures import Future

from benchmarks.lab import machine, table
from elastirun.train import DistributedDataParallel
from elastirun.train.reduction.buckets.plan import LinkSpeed
from elastirun.train.reduction.transports.base import Storage
from tests.support import worlds

MB = 1 << 20
WARM_UP = 5  # steps; elastirun's plan is final after four
LIMIT = 1800.0  # seconds for a world: only a hang takes longer


class Sleeps(torch.autograd.Function):
    """A layer whose backward takes ``seconds``, its gradient's memory included."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.shape, ctx.seconds = weight.shape, seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        until = time.perf_counter() + ctx.seconds
        weight_grad = torch.zeros(ctx.shape)
        time.sleep(max(0.0, until - time.perf_counter()))
        return grad, weight_grad, None


class Layers(nn.Module):
    """A model of ``layers``: (bytes, seconds) of each, in the order of the forward."""

    def __init__(self, layers: Sequence[tuple[int, float]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(nbytes // 4)) for nbytes, _ in layers])
        self.seconds = [seconds for _, seconds in layers]

    def forward(self, x: Tensor) -> Tensor:
        for weight, seconds in zip(self.weights, self.seconds, strict=True):
            x = Sleeps.apply(x, weight, seconds)  # type: ignore[no-untyped-call]
        return x


class SleepingLink:
    """A simulated link that carries one reduction at a time. The next begins when the link is free."""

    def __init__(self, link: LinkSpeed) -> None:
        self.link, self._free = link, 0.0

    def begin(self, nbytes: int) -> float:
        """Return when a reduction of ``nbytes`` will be done, by ``time.perf_counter``."""
        self._free = max(self._free, time.perf_counter()) + self.link.seconds(nbytes)
        return self._free


@dataclass
class Passing:
    """A reduction on the link."""

    until: float

    def done(self) -> bool:
        return time.perf_counter() >= self.until

    def wait(self) -> None:
        time.sleep(max(0.0, self.until - time.perf_counter()))


class LinkArena:
    def __init__(self, link: SleepingLink, storages: Sequence[Storage]) -> None:
        self._link = link
        self.buffers = [torch.zeros(s.numel, dtype=s.dtype) for s in storages]

    def part(self, index: int) -> Tensor:
        return self.buffers[index]

    def all_reduce(self, index: int) -> Passing:
        return Passing(self._link.begin(self.buffers[index].nbytes))

    all_gather = all_reduce


class LinkTransport:
    """elastirun's transport over the link. With one rank the sum is the value itself."""

    averages = False

    def __init__(self, link: SleepingLink) -> None:
        self._link = link

    def allocate(self, storages: Sequence[Storage]) -> LinkArena:
        return LinkArena(self._link, storages)

    def close(self) -> None:
        pass


class LinkHook:
    """torch's communication hook over the link. A thread completes each future when its reduction is done."""

    def __init__(self, link: SleepingLink) -> None:
        self._link = link
        self._passing: queue.SimpleQueue[tuple[float, Future[Tensor], Tensor] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._complete, daemon=True)
        self._thread.start()

    def _complete(self) -> None:
        while (passing := self._passing.get()) is not None:
            until, future, flat = passing
            time.sleep(max(0.0, until - time.perf_counter()))
            future.set_result(flat)

    def __call__(self, state: None, bucket: Any) -> Future[Tensor]:
        flat, future = bucket.buffer(), Future[Tensor]()
        self._passing.put((self._link.begin(flat.nbytes), future, flat))
        return future

    def close(self) -> None:
        self._passing.put(None)
        self._thread.join()


# -- on the rank ------------------------------------------------------------------------------------------------------

Layout = tuple[tuple[int, float], ...]
Times = dict[str, list[float]]
ELASTIRUN, TORCH = "elastirun", "torch"
PLAIN = "compute only"


@contextmanager
def trained(side: str, cap: float | None, layout: Layout, link: LinkSpeed) -> Iterator[nn.Module]:
    """Return the layers wrapped by ``side`` over the link, with buckets of ``cap`` MiB (None: its default)."""
    model, sleeping = Layers(layout), SleepingLink(link)
    if side == PLAIN:
        yield model
    elif side == ELASTIRUN:
        with mock.patch("elastirun.train.ddp.module.choose", lambda group, device, wanted: LinkTransport(sleeping)):
            yield DistributedDataParallel(model, bucket_cap_mb=cap)
    else:
        hook = LinkHook(sleeping)
        module = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=cap)
        module.register_comm_hook(None, _named(hook))
        yield module
        hook.close()


def _named(hook: LinkHook) -> Callable[..., Future[Tensor]]:
    """Return the hook as a plain function: torch checks a hook's name and annotations."""

    def passing(state: object, bucket: Any) -> Future[Tensor]:
        return hook(None, bucket)

    passing.__annotations__ = {}
    return passing


def time_rank(rank: int, world: int, sides: Sequence[tuple[str, float | None]], layout: Layout, link: LinkSpeed, rounds: int) -> Times:
    """Return the seconds of each step's backward. The sides take turns."""
    times: Times = {}
    for number in range(1 + rounds):
        for side, cap in sides:
            name = f"{side}, {cap:g} MiB" if cap else side
            with trained(side, cap, layout, link) as module:
                for _ in range(WARM_UP if side != PLAIN else 1):
                    backward(module)
                taken = [backward(module) for _ in range(2)]
            times.setdefault(name, [])
            if number:
                times[name].append(min(taken))
    return times


def backward(module: nn.Module) -> float:
    module.zero_grad(set_to_none=True)
    output = module(torch.ones(1, requires_grad=True))
    begun = time.perf_counter()
    output.backward()
    return time.perf_counter() - begun


# -- tables -----------------------------------------------------------------------------------------------------------

CAPS = (25.0, 8.0, 4.0)
LINKS = ((0.0002, 0.2), (0.004, 0.2), (0.002, 0.3))  # latency, and seconds for all bytes


def measure(layout: Layout, link: LinkSpeed, rounds: int, caps: Sequence[float]) -> Times:
    sides = [(PLAIN, None), (ELASTIRUN, None), (TORCH, None), *((TORCH, cap) for cap in caps), *((ELASTIRUN, cap) for cap in caps)]
    found: Times = worlds.run(1, time_rank, sides, layout, link, rounds, timeout=LIMIT)[0]
    return found


def even(layers: int = 24, nbytes: int = 4 * MB, seconds: float = 0.010) -> Layout:
    return ((nbytes, seconds),) * layers


def uneven() -> Layout:
    return ((32 * MB, 0.008),) + ((4 * MB, 0.012),) * 12 + ((1 * MB, 0.005),) * 24


def link_for(layout: Layout, latency: float, seconds: float) -> LinkSpeed:
    """Return a link that needs ``seconds`` for all bytes of ``layout``, without latencies."""
    return LinkSpeed(latency, seconds / sum(nbytes for nbytes, _ in layout))


def hidden(taken: float, compute: float, communication: float) -> float:
    return (compute + communication - taken) / (compute + communication - max(compute, communication))


def show_overlap(rounds: int, ratios: Sequence[float], caps: Sequence[float]) -> None:
    rows: list[list[str]] = []
    for ratio in ratios:
        layout = even()
        link = link_for(layout, 0.0002, ratio * sum(seconds for _, seconds in layout))
        times = measure(layout, link, rounds, caps)
        compute, communication = median(times.pop(PLAIN)), link.seconds(sum(nbytes for nbytes, _ in layout))
        rows = rows or [["communication / compute", *times]]
        middle = [median(t) for t in times.values()]
        rows.append([f"{ratio:g}", *(f"{hidden(t, compute, communication):.0%} ({t * 1e3:.0f} ms)" for t in middle)])
    print("\n" + table(rows), flush=True)


def show_links(rounds: int, caps: Sequence[float]) -> None:
    rows: list[list[str]] = []
    for latency, seconds in LINKS:
        layout = uneven()
        link = link_for(layout, latency, seconds)
        times = measure(layout, link, rounds, caps)
        bound = median(times.pop(PLAIN)) + link.seconds(layout[0][0])
        rows = rows or [["link", "bound, ms", *times]]
        over = (f"+{median(t) / bound - 1:.1%} ({median(t) * 1e3:.0f} ms)" for t in times.values())
        rows.append([f"{latency * 1e3:g} ms + {seconds * 1e3:.0f} ms for all bytes", f"{bound * 1e3:.0f}", *over])
    print("\n" + table(rows), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", choices=("overlap", "links"), default=["overlap", "links"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one round, default settings only")
    chosen = parser.parse_args()
    rounds, caps = (1, ()) if chosen.quick else (chosen.rounds, CAPS)
    print(machine(), flush=True)
    if "overlap" in chosen.what:
        show_overlap(rounds, (0.9,) if chosen.quick else (0.5, 0.9, 1.5), caps)
    if "links" in chosen.what:
        show_links(rounds, caps[1:] + (1.0,) if caps else ())


if __name__ == "__main__":
    main()

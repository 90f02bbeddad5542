"""Compares saves and restores of 1.2 GB on a GPU: ours, torch.save and torch.distributed.checkpoint (DCP).

    python -m tests.gpu.checkpoints

One rank trains 100 M parameters with AdamW. The state is the parameters and the two moments of each, in
tensors. In a round each way saves once: a save begins on an idle GPU and ends when the disk has it, and
training goes on meanwhile. A way that fails is left out, with a line. Fails if ours does, or if no figure stands
beside it: of plain tensors there must be those of ``torch.save`` and of a way of DCP.

blocked     from the call of the save until the state may change
first       of the way's first save, which may have to allocate memory. Ours has prepared it in a thread by
            then, from the first call of ``save`` on, in a step that is not due, beside PREPARE seconds of training
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import (
    AsyncStager,
    BlockingAsyncStager,
    DefaultStager,
    StagingOptions,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.checkpoint import await_end, dcp_load, forget, torch_save
from elastirun.train import Checkpointer
from tests.support.gpu import BOTH, DEVICE, HERE, figure, share, synchronize

WIDTH, LAYERS = (2048, 24) if HERE else (256, 6)  # on a GPU 100.7 M parameters: 1.21 GB of float32 with the moments
SAMPLES = 1024 if HERE else 8  # of a step
QUIET = 15  # steps before each save
PREPARE = 3.0 if HERE else 0.2  # seconds of training before the first save
ROUNDS, LOADS = 4, 3  # of saves, of which the first is not among the later ones; of restores
SECONDS, SHARDED_SECONDS, LOAD_SECONDS = 40.0, 14.0, 12.0  # later ours saves alone, and nothing is loaded again
ENOUGH = 60.0  # seconds after the start: later, FSDP2's state is saved in our way only
SCALE = 1e3 * 1e8  # divided by bytes: from seconds to milliseconds per 100 MB

State = dict[str, Tensor]
Waits = tuple[Callable[[], Any], Callable[[], Any]]  # until the state may change; until the disk has everything


class Way(Protocol):
    """A way to save. ``clear`` is called before the clock starts."""

    name: str
    folder: str

    def clear(self) -> None: ...
    def save(self, number: int, state: State) -> Waits: ...
    def load(self, state: State) -> None: ...
    def close(self) -> None: ...


def nothing() -> None:
    pass


class Ours:
    name = "Checkpointer"

    def __init__(self, folder: str, state: State) -> None:
        self.folder = folder
        self._checkpoints = Checkpointer(folder, keep=1, every=1000)
        self._checkpoints.restore(state)
        self._checkpoints.save(1, state)  # not due: prepares the memory

    def clear(self) -> None:
        pass

    def save(self, number: int, state: State) -> Waits:
        self._checkpoints.save(1000 * number, state)
        return nothing, self._checkpoints.wait

    def load(self, state: State) -> None:
        self._checkpoints.restore(state)
        if self._checkpoints.restored is None:
            raise RuntimeError("nothing was restored from the disk")

    def is_pinned(self) -> bool:
        return all(self._checkpoints._staging._pinned)

    def close(self) -> None:
        self._checkpoints.close()


class TorchSave:
    name = "torch.save"

    def __init__(self, folder: str) -> None:
        self.folder = folder
        os.mkdir(folder)
        self._save, self._load = torch_save(folder)

    def clear(self) -> None:
        pass

    def save(self, number: int, state: State) -> Waits:
        return nothing, self._save(number, state)

    def load(self, state: State) -> None:
        self._load(state)

    def close(self) -> None:
        pass


class Dcp:
    """``dcp.async_save`` with the stager that ``make`` returns.

    ``reused``: one stager serves all saves, with the memory that it has kept.
    """

    def __init__(self, name: str, folder: str, make: Callable[[], AsyncStager], reused: bool) -> None:
        self.name, self.folder, self._make, self._reused = name, folder, make, reused
        self._group = dist.new_group(backend="gloo")
        self._stager: AsyncStager | None = None

    def clear(self) -> None:
        """Delete the last checkpoint. Each save makes a folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.mkdir(self.folder)
        if not self._reused:
            self.close()
        self._stager = self._stager or self._make()

    def save(self, number: int, state: State) -> Waits:
        path = f"{self.folder}/{number}"
        done: Any = dcp.async_save(state, checkpoint_id=path, process_group=self._group, async_stager=self._stager)
        if hasattr(done, "staging_completion"):
            return done.staging_completion.result, done.upload_completion.result
        return nothing, done.result

    def load(self, state: State) -> None:
        dcp_load(self.folder)(state)

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()
        self._stager = None


def pinned() -> AsyncStager:
    # Not in shared memory: only DCP's process needs that, and /dev/shm is small in containers.
    return DefaultStager(StagingOptions(HERE, False, True, HERE))  # pinned, shared, in a thread, copies that do not wait


def cached() -> AsyncStager:
    return BlockingAsyncStager(cache_staged_state_dict=HERE)  # without a GPU there is no pinned memory


def ways(folder: str, state: State) -> list[Way]:
    return [Ours(f"{folder}/ours", state), TorchSave(f"{folder}/torch"), *dcp_ways(folder)]


def dcp_ways(folder: str) -> list[Dcp]:
    reusable = torch.__version__ >= "2.12"  # in 2.11 a DefaultStager raises KeyError the second time
    return [
        Dcp("dcp.async_save, DefaultStager", f"{folder}/pinned", pinned, reusable),
        Dcp("dcp.async_save, cached", f"{folder}/cached", cached, True),
    ]


class Training:
    """100 M parameters in linear layers, and AdamW.

    ``state`` holds the same tensors all the time: a step changes them in place.
    """

    def __init__(self, sharded: bool) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH, bias=False, device=DEVICE) for _ in range(LAYERS)]
        self._model = nn.Sequential(*[module for layer in layers for module in (layer, nn.Tanh())])
        if sharded:
            mesh = init_device_mesh(DEVICE, (1,), mesh_dim_names=("dp",))
            for layer in layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self._model, mesh=mesh)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        self._batch = torch.randn(SAMPLES, WIDTH, device=DEVICE)
        for _ in range(3):
            self.step()
        self.state: State = {}
        for name, param in self._model.named_parameters():
            moments = self._optimizer.state[param]
            self.state |= {
                name: param.detach(),
                f"{name}.first": moments["exp_avg"],
                f"{name}.second": moments["exp_avg_sq"],
            }

    def step(self) -> float:
        """Return the seconds that a step takes until the GPU has done it."""
        begun = time.perf_counter()
        self._optimizer.zero_grad()
        self._model(self._batch).square().mean().backward()
        self._optimizer.step()
        synchronize()
        return time.perf_counter() - begun


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def copied(state: State) -> list[Tensor]:
    return [local(tensor).clone() for tensor in state.values()]


class Times:
    """Seconds of one way. ``called``: until the call of the save has returned."""

    def __init__(self) -> None:
        self.blocked: list[float] = []
        self.called: list[float] = []
        self.durable: list[float] = []
        self.busy: list[float] = []  # steps while the checkpoint is written
        self.loads: list[float] = []
        self.saved: list[Tensor] = []  # a copy of the state that was saved last


def save_once(way: Way, number: int, training: Training, times: Times) -> list[float]:
    """Save, and train until the disk has it. Return the times of the steps before."""
    way.clear()
    quiet = [training.step() for _ in range(QUIET)][3:]
    times.saved = copied(training.state)
    synchronize()
    begun = time.perf_counter()
    may_change, durable = way.save(number, training.state)
    called = time.perf_counter()
    may_change()
    times.blocked.append(time.perf_counter() - begun)
    times.called.append(called - begun)
    done: list[float] = []
    watch = threading.Thread(target=await_end, args=(durable, begun, done))
    watch.start()
    while watch.is_alive():
        times.busy.append(training.step())
    watch.join()
    if not done:
        raise RuntimeError("the checkpoint was not written; a traceback is above")
    times.durable += done
    return quiet


def rounds(made: list[Way], training: Training, seconds: float) -> tuple[dict[str, Times], list[float]]:
    """Save in each way in turn; ours saves ``ROUNDS`` times, the others twice at least, and more often
    as long as a round of all ends within ``seconds``. Leaves out ways that fail.

    Return the times of each way, and those of steps without a save.
    """
    begun, longest = time.perf_counter(), 0.0
    times, quiet = {way.name: Times() for way in made}, []
    for number in range(1, ROUNDS + 1):
        at = time.perf_counter()
        late = number > 2 and at - begun + longest > seconds
        for way in [way for way in made if not late or way.name == Ours.name]:
            try:
                quiet += save_once(way, number, training, times[way.name])
            except Exception:
                print(f"{way.name}: left out\n{traceback.format_exc()}", flush=True)
                made.remove(way)
                del times[way.name]
        longest = max(longest, time.perf_counter() - at)
    return times, quiet


def time_loads(made: list[Way], state: State, times: dict[str, Times]) -> None:
    """Bring back what each way has saved last, from files that the page cache does not have.

    Raises where ours fails.
    """
    begun = time.perf_counter()
    for number in range(LOADS):
        if number and (time.perf_counter() - begun) * (number + 1) / number > LOAD_SECONDS:
            break
        for way in list(made):
            try:
                times[way.name].loads.append(load_once(way, state, times[way.name].saved))
            except Exception:
                if way.name == Ours.name:
                    raise
                print(f"{way.name}: left out\n{traceback.format_exc()}", flush=True)
                made.remove(way)


def load_once(way: Way, state: State, expected: Sequence[Tensor]) -> float:
    """Return how many seconds a restore takes. Raises RuntimeError where any bit is not what was saved."""
    for tensor in state.values():
        local(tensor).zero_()
    for path in Path(way.folder).rglob("*"):
        if path.is_file():
            forget(path)
    synchronize()
    begun = time.perf_counter()
    way.load(state)
    synchronize()
    took = time.perf_counter() - begun
    if not all(torch.equal(local(a), b) for a, b in zip(state.values(), expected, strict=True)):
        raise RuntimeError(f"{way.name}: what came back differs from what was saved")
    return took


# -- figures ---------------------------------------------------------------------------------------------


def spread(values: Sequence[float], scale: float = 1.0, digits: int = 1) -> str:
    low, middle, high = (f"{scale * value:.{digits}f}" for value in (min(values), median(values), max(values)))
    return f"{middle} ({low} to {high}, {len(values)})"


def print_times(times: dict[str, Times], quiet: Sequence[float], scale: float) -> None:
    """Print a line for each way: milliseconds per 100 MB, and the steps beside quiet ones."""
    print(f"quiet steps: {spread(quiet, 1e3)} ms; ms per 100 MB:")
    for name, of in times.items():
        steps = f"{median(of.busy) / median(quiet):.2f}" if of.busy else "none"
        print(f"  {name}: first {scale * of.blocked[0]:.1f}, later {spread(of.blocked[1:], scale)}", end=", ")
        print(
            f"the call alone {spread(of.called[1:], scale)}; on the disk after {spread(of.durable, digits=2)} s",
            end="; ",
        )
        print(f"steps meanwhile {steps} of quiet ones", flush=True)


def later(times: Times) -> float:
    return median(times.blocked[1:])


def best(times: dict[str, Times]) -> str:
    """Return the way of DCP that blocks least, after its first save; empty if each has failed."""
    return min((name for name in times if name.startswith("dcp")), key=lambda name: later(times[name]), default="")


def blocked_figure(claim: str, times: dict[str, Times], quiet: Sequence[float], scale: float, where: str = "") -> None:
    ours = times[Ours.name]
    values = {"ms_per_100_mb": scale * later(ours), "first_ms_per_100_mb": scale * ours.blocked[0]}
    text = f"{spread(ours.blocked[1:], scale)} ms per 100 MB, the first {scale * ours.blocked[0]:.1f}"
    if name := best(times):
        values["dcp_ms_per_100_mb"] = scale * later(times[name])
        values["dcp_call_ms_per_100_mb"] = scale * min(median(of.called[1:]) for key, of in times.items() if key.startswith("dcp"))
        text += f"; {name} {spread(times[name].blocked[1:], scale)}"
        text += f", the first {scale * times[name].blocked[0]:.1f}"
        if values["dcp_call_ms_per_100_mb"] < 0.9 * values["dcp_ms_per_100_mb"]:
            text += f" (shortest call: {values['dcp_call_ms_per_100_mb']:.1f}, the state may not change yet)"
    if TorchSave.name in times:
        values["torch_save_ms_per_100_mb"] = scale * later(times[TorchSave.name])
        text += f"; torch.save, until on the disk, {spread(times[TorchSave.name].blocked[1:], scale)}"
    if ours.busy:
        values["steps_ratio"] = median(ours.busy) / median(quiet)
        text += f"; steps while ours is written {values['steps_ratio']:.2f} of quiet ones"
    figure(claim, text + where, **values)


def restore_figure(times: dict[str, Times], nbytes: int) -> None:
    found = {name: of.loads for name, of in times.items() if of.loads}
    values = {f"{name.partition(',')[0].replace('.', '_')}_s": median(seconds) for name, seconds in found.items()}
    text = f"{spread(found.pop(Ours.name), digits=2)} s for {nbytes / 1e9:.2f} GB, no file cached, every bit equal"
    text += "".join(f"; {name.partition(',')[0]} {spread(seconds, digits=2)} s" for name, seconds in found.items())
    figure("checkpoint-restore", text, **values)


@contextmanager
def guarded(failed: list[str], what: str) -> Iterator[None]:
    """Print an exception, and go on with the other figures."""
    try:
        yield
    except Exception:
        print(f"{what}: failed\n{traceback.format_exc()}", flush=True)
        failed.append(what)


def plain(folder: str, failed: list[str]) -> None:
    training = Training(sharded=False)
    nbytes = sum(tensor.nbytes for tensor in training.state.values())
    with closed(ways(folder, training.state)) as made:
        prepare(training, made)
        times, quiet = rounds(made, training, SECONDS)
        print(f"{nbytes / 1e9:.2f} GB in tensors")
        print_times(times, quiet, SCALE / nbytes)
        with guarded(failed, "checkpoint-blocks"):
            pinned_ours = any(isinstance(way, Ours) and way.is_pinned() for way in made)
            where = "; ours is copied to pinned memory" if pinned_ours else ""
            blocked_figure("checkpoint-blocks", times, quiet, SCALE / nbytes, where)
            if TorchSave.name not in times or not best(times):
                raise RuntimeError("torch.save or all of DCP failed: nothing stands beside ours")
        with guarded(failed, "checkpoint-restore"):
            wanted = {Ours.name, TorchSave.name, best(times)}
            time_loads([way for way in made if way.name in wanted], training.state, times)
            restore_figure(times, nbytes)


def sharded(folder: str, theirs: bool) -> None:
    """Save FSDP2's state in our way and, if there is time for ``theirs``, in the pinned ones of DCP."""
    training = Training(sharded=True)
    scale = SCALE / sum(local(tensor).nbytes for tensor in training.state.values())
    made: list[Way] = [Ours(f"{folder}/ours", training.state)]
    made += dcp_ways(folder) if theirs else []
    with closed(made) as made:
        prepare(training, made)
        times, quiet = rounds(made, training, SHARDED_SECONDS)
        print("FSDP2, a mesh of one")
        print_times(times, quiet, scale)
        blocked_figure("checkpoint-fsdp2", times, quiet, scale, "; mesh of one rank")


@contextmanager
def closed(made: list[Way]) -> Iterator[list[Way]]:
    """Hand out a list of the ways, which may leave out some, and close all of them in the end."""
    try:
        yield list(made)
    finally:
        for way in made:
            way.close()


def prepare(training: Training, made: Sequence[Way]) -> None:
    """Train while ours prepares its memory in a thread."""
    until = time.perf_counter() + PREPARE
    while time.perf_counter() < until:
        training.step()
    print(f"memory of ours is pinned: {[way.is_pinned() for way in made if isinstance(way, Ours)]}")


def main() -> int:
    share(0)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the name of the machine may have no address
    dist.init_process_group(BOTH, store=dist.HashStore(), rank=0, world_size=1)
    dist.barrier()  # connects NCCL before any clock starts
    failed: list[str] = []
    begun = time.perf_counter()
    with guarded(failed, "plain tensors"), tempfile.TemporaryDirectory(prefix="elastirun-gpu-") as folder:
        plain(folder, failed)
    with guarded(failed, "FSDP2"), tempfile.TemporaryDirectory(prefix="elastirun-gpu-") as folder:
        sharded(folder, theirs=time.perf_counter() - begun < ENOUGH)
    dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

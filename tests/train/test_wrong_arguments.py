"""Wrong arguments of the public API: each is one line that names the mistake and the mend, where it is made and not later."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import elastirun
from elastirun.errors import TrainError, UsageError
from elastirun.progress import progress
from elastirun.train import (
    Checkpointer,
    DeterministicShards,
    DistributedDataParallel,
    Drain,
    ElasticDataLoader,
    ElasticShards,
    ShardedOptimizer,
    Stages,
    TrainState,
    build_mesh,
    clip_grad_norm_,
    elastic,
    keyed_rng,
    load_checkpoint,
)
from tests.support.until import PATIENCE

NUMBERS = list(range(8))
SGD = torch.optim.SGD


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(NUMBERS)


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """The default group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def layer() -> nn.Module:
    return nn.Linear(1, 1)


def ours() -> DistributedDataParallel:
    return DistributedDataParallel(layer())


def torchs() -> nn.Module:
    return nn.parallel.DistributedDataParallel(layer())


def data(**more: Any) -> ElasticDataLoader:
    return ElasticDataLoader(NUMBERS, 4, **more)  # type: ignore[arg-type]


def shards(**more: Any) -> ElasticShards:
    return ElasticShards(**{"shards": [1, 2], "read": lambda shard: [shard], "global_batch_size": 2, **more})


def state(**more: Any) -> TrainState:
    model = more.pop("model", None) or layer()
    return TrainState(**{"model": model, "optimizer": SGD(model.parameters(), lr=0.1), **more})


def live(*more: Any, **parts: Any) -> elastic.Elastic:
    return elastic.Elastic(state(**{"model": ours(), "data": data(), **parts}), *more)


def hooked(hook: Any) -> None:
    ddp = ours()
    ddp.register_comm_hook(None, hook)
    ddp(torch.ones(2, 1)).sum().backward()


def converted(ddp: DistributedDataParallel) -> None:
    ddp.to(torch.bfloat16)(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()


# One line each: what is wrong as the message has it, and the call. ``any``: no type checker is asked.
any: Any = lambda kind: kind  # noqa: E731
WRONG: dict[str, tuple[str, Callable[[], Any]]] = {
    # the data
    "steps of torch's class": (
        "DistributedDataParallel.module., .*not torch's DistributedDataParallel$",
        lambda: data().steps(any(torchs())),
    ),
    "steps of a module": ("elastirun.train.DistributedDataParallel.module., .* not torch's Linear$", lambda: data().steps(any(layer()))),
    "shards' steps of torch's class": (
        "DistributedDataParallel.module., .*not torch's DistributedDataParallel$",
        lambda: next(shards().steps(any(torchs()))),
    ),
    "batch_size": ("batch_size is not an argument .* give global_batch_size=", lambda: ElasticDataLoader(any(NUMBERS), batch_size=8)),
    "no batch size": ("global_batch_size must be a whole number, 1 or more, not None", lambda: ElasticDataLoader(any(NUMBERS))),
    "a text": ("global_batch_size must be .* not '8'", lambda: ElasticDataLoader(any(NUMBERS), any("8"))),
    "half a sample": ("global_batch_size must be .* not 8.5", lambda: ElasticDataLoader(any(NUMBERS), any(8.5))),
    "half a micro-batch": ("micro_batch_size must be .* not 2.5", lambda: data(micro_batch_size=2.5)),
    "a seed": ("seed must be a whole number, not 'a'", lambda: data(seed="a")),
    "base": ("base_world_size must be .* not '2'", lambda: data(scale="sqrt", base_world_size="2")),
    "empty": ("the dataset, a list, has no samples", lambda: ElasticDataLoader(any([]), 8)),
    "a stream": ("not a Stream: .* use ElasticShards", lambda: ElasticDataLoader(any(Stream()), 8)),
    "torch's loader": ("not torch's DataLoader: give its dataset", lambda: ElasticDataLoader(any(DataLoader(any(NUMBERS))), 8)),
    "splits": ("not a dict of 'train', 'test': give one", lambda: ElasticDataLoader(any({"train": [1], "test": [2]}), 8)),
    "no shards": (r"shards must be a sequence of one shard or more, .* not \[\]", lambda: shards(shards=[])),
    "a pattern": (r"such as a list of paths, not 'a/\*.tar'", lambda: shards(shards="a/*.tar")),
    "a generator": ("shards must be a sequence .* not a generator", lambda: shards(shards=(shard for shard in "ab"))),
    "no reader": (r"read must be callable, not 3: give .* read\(shard\)", lambda: shards(read=3)),
    "shards' size": ("global_batch_size must be .* not 2.5", lambda: shards(global_batch_size=2.5)),
    "an option of nobody": ("unexpected keyword argument 'nosuch'", lambda: shards(nosuch=1)),
    "a key": ("the key of keyed_rng.. must be a whole number, not 1.5", lambda: keyed_rng(any(1.5)).__enter__()),
    "no key": ("the key of keyed_rng.. must be a whole number, not None", lambda: keyed_rng().__enter__()),
    # the module
    "no module": ("the module of DistributedDataParallel must be a torch.nn.Module, not 'x'", lambda: DistributedDataParallel(any("x"))),
    "a class": ("must be a torch.nn.Module, not torch's class Linear", lambda: DistributedDataParallel(any(nn.Linear))),
    "wrapped": ("this is a DistributedDataParallel already: give its .module", lambda: DistributedDataParallel(ours())),
    "wrapped by torch": ("this is torch's DistributedDataParallel already", lambda: DistributedDataParallel(torchs())),
    "device_ids": ("device_ids must be None or a list of one device, not 0", lambda: DistributedDataParallel(layer(), any(0))),
    "bucket_cap_mb": ("must be a number above 0, not '25'", lambda: DistributedDataParallel(layer(), bucket_cap_mb=any("25"))),
    "check_replicas_every": ("0 or more, not -1", lambda: DistributedDataParallel(layer(), check_replicas_every=-1)),
    "a group": ("process_group must be .* not 'gloo'", lambda: DistributedDataParallel(layer(), process_group=any("gloo"))),
    "a mesh": ("device_mesh has to be a DeviceMesh", lambda: DistributedDataParallel(layer(), device_mesh="dp")),
    "accumulate": (r"n of accumulate\(\) must be .* not 2.5", lambda: ours().accumulate(any(2.5))),
    "set_samples": ("takes a number that is not negative, not '3'", lambda: ours().set_samples(any("3"))),
    "a request": ('no request .stop.: give "checkpoint" or "drain"$', lambda: ours().request("stop")),
    "no hook": ("a communication hook must be callable, not 3", lambda: ours().register_comm_hook(None, any(3))),
    "a hook of one": ("must take 2 arguments", lambda: ours().register_comm_hook(None, any(lambda bucket: None))),
    "a hook's tensor": ("returned torch's Tensor: return a torch.futures.Future", lambda: hooked(lambda _, bucket: bucket.buffer())),
    "a hook's None": ("hook of bucket 0 returned None: return a", lambda: hooked(lambda *_: None)),
    "an optimizer": ("takes an optimizer, not torch's Linear", lambda: ours().step_in_backward(any(layer()))),
    "converted": ("was converted to another type .*: do it before, or call set_group", lambda: converted(ours())),
    "deterministic": ("the module of DeterministicShards must be a torch.nn.Module, not 'x'", lambda: DeterministicShards(any("x"))),
    "deterministic twice": ("give its .module", lambda: DeterministicShards(ours())),
    "half a shard": ("shards must be .* not 2.5", lambda: DeterministicShards(layer(), any(2.5))),
    "sharding torch's": (
        "DistributedDataParallel.module., .*not torch's DistributedDataParallel$",
        lambda: ShardedOptimizer(any(torchs()), SGD),
    ),
    "sharding what is made": ("the class of an optimizer", lambda: ShardedOptimizer(d := ours(), any(SGD(d.parameters(), lr=0.1)))),
    "stages": (r"each part of Stages\(\*parts\) must be a torch.nn.Module, not \[", lambda: Stages(any([layer()]))),
    "no mesh": (r"build_mesh\(\{'dp': 2\}\): write a text", lambda: build_mesh(any({"dp": 2}))),
    "clipping": (r"takes parameters, not torch's Linear: give module.parameters\(\)", lambda: clip_grad_norm_(any(layer()), 1.0)),
    # the state
    "swapped": (
        "model must be a torch.nn.Module, not a generator",
        lambda: TrainState(any(ours().parameters()), any(layer())),
    ),
    "an optimizer's class": ("optimizer must have state_dict.* not be torch's class SGD", lambda: state(optimizer=SGD)),
    "no optimizer": ("optimizer must have state_dict.* not be None", lambda: state(optimizer=None)),
    "a scheduler": ("scheduler must have state_dict.* not be a str", lambda: state(scheduler="cosine")),
    "data": (
        "data must have state_dict.* an ElasticDataLoader has, not be torch's DataLoader",
        lambda: state(data=DataLoader(any(NUMBERS))),
    ),
    "a step": ("step must be a whole number, 0 or more, not 'x'", lambda: setattr(state(), "step", "x")),
    # live workers
    "no state": (r"state must be TrainState\(model=…, optimizer=…, data=…\), not Linear", lambda: elastic.Elastic(any(layer()))),
    "live torch": ("model is torch's DistributedDataParallel: give model=elastirun.train.Dist", lambda: live(model=torchs())),
    "live shards": (r"data is an ElasticShards: give data=elastirun.train.ElasticDataLoader\(", lambda: live(data=shards())),
    "no data": ("a state without data: give data=", lambda: live(data=None)),
    "a balance": ("shares the data evenly in each world: leave balance=True out", lambda: live(data=data(balance=True))),
    "two loaders": ("needs a state with one ElasticDataLoader, this one has 2", lambda: live(more=data())),
    "a checkpointer": (r"not a Checkpointer: give a function, such as lambda: Checkpointer\(", lambda: live(Checkpointer("runs/none"))),
    "no checkpointer": (r"what checkpoints\(\) returns must be a Checkpointer, not None", lambda: live(lambda: None)),
    "on_change": (r"on_change must take 2 arguments", lambda: live(None, lambda: None)),
    "mpi": ('this torch has no backend mpi: give "gloo"', lambda: elastic.init_process_group("mpi")),
    "a time": (r"timedelta\(minutes=5\), not 30", lambda: elastic.init_process_group("gloo", any(30))),
    # checkpoints and stops
    "no directory": ("directory must be a path, .* not None", lambda: Checkpointer(any(None))),
    "rare": ("memory_every=20 must not be more than every=10", lambda: Checkpointer("runs/none", every=10, memory_every=20)),
    "every": ("every must be a whole number, .* not True", lambda: Checkpointer("runs/none", every=True)),
    "of a step": ("not 'x'", lambda: Checkpointer("runs/none").restore(state(), any("x"))),
    "swapped save": ("step must be a whole number .* not a TrainState$", lambda: Checkpointer("runs/none").save(any(state()), any(3))),
    "a script": ("test_wrong_arguments.py: .* none that torch.save has written", lambda: load_checkpoint(__file__, state())),
    "no path": ("path must be that of a file or folder, not None", lambda: load_checkpoint(any(None), state())),
    "drain": ("^torch's DistributedDataParallel does not tell", lambda: Drain(any(torchs()))),
    "signals": ("no handler can be installed for 'SIGTERM'", lambda: Drain(ours(), any(["SIGTERM"]))),
    "within": (r"progress\(\): within must be seconds, 0 or more, not '10'", lambda: progress(any("10"))),
    "work": (r"progress\(\): work must be a number from 0 to 1e\+15, not -3", lambda: progress(work=-3)),
    "a number of steps": (r"progress\(\): total must be a whole number, not 1.5", lambda: progress(step=1, total=any(1.5))),
    "a step's number": (r"progress\(\): step must be a whole number, not '3'", lambda: progress(step=any("3"))),
    "launch": (r"no function; give the function itself", lambda: elastirun.launch(any("train.py"))),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_one_line_that_says_what_to_write(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, call = WRONG[name]
    monkeypatch.chdir(tmp_path)
    with pytest.raises((TrainError, TypeError, UsageError), match=said) as found:
        call()
    text = str(found.value)
    assert "\n" not in text and len(text) < 300
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", ["no hook", "no module", "a hook's None", "stages"])
def test_what_torch_refuses_as_a_type_is_a_type_error_here_too(wrong: str) -> None:
    with pytest.raises(TypeError):
        WRONG[wrong][1]()


def test_elastic_is_there_without_an_import_of_its_own() -> None:
    code = "import sys, elastirun.train as t; print('elastirun.train.elastic' in sys.modules, t.elastic.Elastic.__name__)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert found.stdout.split() == ["False", "Elastic"]
    with pytest.raises(AttributeError, match="module 'elastirun.train' has no attribute 'nosuch'"):
        any(elastirun.train).nosuch  # noqa: B018


def test_what_is_right_is_taken() -> None:
    """Whole numbers of any kind, hooks that are objects, states of several optimizers, times."""
    import numpy

    assert ElasticDataLoader(any(NUMBERS), any(numpy.int64(4)), seed=any(torch.tensor(-3))).global_batch_size == 4
    ours().set_samples(any(torch.tensor([2.0])))
    with keyed_rng(any(numpy.int64(3))):
        first = torch.rand(1)
    with keyed_rng(3):
        assert torch.equal(torch.rand(1), first)
    assert state(optimizer=any([SGD(layer().parameters(), lr=0.1)])).step == 0
    ddp = ours().to(torch.bfloat16)
    with torch.no_grad():
        ddp(torch.ones(1, 1, dtype=torch.bfloat16))
    ddp.set_group()
    ddp(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
    Checkpointer("runs/none", every=timedelta(minutes=1), memory_every=20).close()

"""``Checkpointer``, ``Drain`` and ``DeterministicShards`` on a GPU: over NCCL in a world of one, over gloo where ranks share the GPU."""

from __future__ import annotations

import hashlib
import os
import signal
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

from elastirun.train import Checkpointer, DeterministicShards, Drain, ElasticDataLoader, TrainState, load_checkpoint
from elastirun.train.state.tree import flatten
from tests.support.gpu import DEVICE, NCCL, needs_gpu, share
from tests.support.worlds import run
from tests.train.test_ckpt_dcp import ordered, theirs
from tests.train.test_ckpt_tree import same

pytestmark = needs_gpu

WIDTH = 37  # which no number of ranks divides
CASES = (  # kind and ranks of the world that saves, and of the one that loads
    *((("cuda-fsdp", 1), ("cuda-fsdp", 1)), (("cuda-fsdp", 1), ("cuda-ddp", 2)), (("cuda-ddp", 1), ("cpu-fsdp", 2))),
    *((("cuda-fsdp", 2), ("cuda-fsdp", 1)), (("cuda-fsdp", 2), ("cuda-fsdp", 3)), (("cpu-fsdp", 2), ("cuda-fsdp", 2))),
)


class Loaded(NamedTuple):
    """The tensors of each way back. ``of_dcp``: we read DCP's folder; ``by_dcp``: DCP read ours."""

    ours: dict[str, Tensor]
    of_dcp: dict[str, Tensor]
    by_dcp: dict[str, Tensor]


Both = tuple[list[dict[str, Tensor]], list[Loaded]]  # of each rank that saved, and of each that loaded


def make(kind: str, seed: int) -> TrainState:
    """Return a state that lies on the GPU (``cuda-``) or not, in FSDP2 or torch's data-parallel class."""
    device, how = kind.split("-")
    if device == "cuda":
        device = share(dist.get_rank()).type
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 3)).to(device)
    if how == "ddp":
        model = nn.parallel.DistributedDataParallel(model, process_group=group(device))
    else:
        mesh = DeviceMesh.from_group(group(device), device)
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1)))


def group(device: str) -> dist.ProcessGroup:
    """Return a group of all ranks. NCCL takes no two ranks on one GPU."""
    nccl = device == DEVICE and dist.get_world_size() == 1
    return dist.new_group(backend=NCCL) if nccl else dist.group.WORLD


def step(state: TrainState) -> None:
    batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(state.step))
    state["optimizer"].zero_grad()
    state["model"](batch.to(next(state["model"].parameters()).device)).square().mean().backward()
    state["optimizer"].step()
    state.step += 1


def for_dcp(state: TrainState) -> dict[str, Any]:
    return theirs({"model": state["model"], "optimizer": state["optimizer"]})


def content(state: TrainState) -> dict[str, Tensor]:
    """Return every tensor that is the same on all ranks, gathered on the host: ``full_tensor()`` over gloo ends a process with a GPU."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found: dict[str, Tensor] = {}
    for name, tensor in flatten(state).tensors.items():
        here = tensor.detach()
        if isinstance(here, DTensor):
            local = here.to_local().cpu()
            here = DTensor.from_local(local, mesh, here.placements, shape=here.shape, stride=here.stride()).full_tensor()
        if "@" not in name:
            found[name] = here.cpu().clone()
    return found


def saves(rank: int, world: int, folder: str, kind: str) -> dict[str, Tensor]:
    """Train to a planned stop, which all ranks reach after the same step, and save for us and for DCP."""
    state = make(kind, 1)
    checkpoints, drain = Checkpointer(f"{folder}/ours", every=2), Drain(state["optimizer"])
    assert checkpoints.restore(state) is None
    while not drain.now:
        if (rank, state.step) == (world - 1, 5):
            os.kill(os.getpid(), signal.SIGTERM)
        step(state)
        checkpoints.save(state.step, state, now=drain.now)
    found = content(state)  # of before the state changes
    step(state)
    checkpoints.close()
    drain.close()
    assert drain.step == 7
    state, checkpoints = make(kind, 1), Checkpointer(f"{folder}/ours")
    assert checkpoints.restore(state) == 7
    checkpoints.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(for_dcp(state), checkpoint_id=f"{folder}/theirs")
    return found


def loads(rank: int, world: int, folder: str, kind: str) -> Loaded:
    """Restore what we have saved; load the folder of DCP; let DCP load ours."""
    ours, of_dcp, by_dcp = (make(kind, 2) for _ in range(3))
    checkpoints = Checkpointer(f"{folder}/ours")
    assert checkpoints.restore(ours) == 7
    checkpoints.close()
    load_checkpoint(f"{folder}/theirs", of_dcp)
    found = for_dcp(by_dcp)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, checkpoint_id=f"{folder}/ours/step-00000007")
    set_model_state_dict(by_dcp["model"], found["model"])
    set_optimizer_state_dict(by_dcp["model"], by_dcp["optimizer"], found["optimizer"])
    assert {state["optimizer"].param_groups[0]["lr"] for state in (ours, of_dcp, by_dcp)} == {0.02}
    found_in = Loaded(*(content(state) for state in (ours, of_dcp, by_dcp)))  # of before the state changes
    step(ours)
    step(make(kind, 2))
    return found_in


@pytest.fixture(scope="module", params=CASES, ids=str)
def saved_and_loaded(request: pytest.FixtureRequest) -> Both:
    """What each rank had when it saved, and what each rank of the other world had when it had loaded that."""
    (saved, ranks), (loaded, others) = request.param
    with tempfile.TemporaryDirectory(prefix="elastirun-state-") as folder:
        return run(ranks, saves, folder, saved), run(others, loads, folder, loaded)


def test_a_state_on_a_gpu_comes_back_in_any_world(saved_and_loaded: Both) -> None:
    """Compare what we read of DCP's folder, and DCP of ours."""
    (before, *others), found = saved_and_loaded
    assert all(same(ordered(other), ordered(before)) for other in others)
    for rank in found:
        assert same(ordered(rank.of_dcp), ordered(before)) and same(ordered(rank.by_dcp), ordered(before))


def test_what_we_restore_in_another_world_has_the_same_bits(saved_and_loaded: Both) -> None:
    """Compare what ``Checkpointer.restore`` brings back: the weights and the optimizer's state."""
    (before, *others), found = saved_and_loaded
    assert before and all(same(ordered(other), ordered(before)) for other in others)
    for rank in found:
        assert same(ordered(rank.ours), ordered(before))


# --- deterministic mode


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((1, 8, 8), index / 50) + 0.1 * torch.randn(1, 8, 8)


def exact(rank: int, world: int, path: str = "", halt: int = 0) -> str:
    """Train two epochs on the GPU, from ``path`` on; or ``halt`` steps, saved there.

    Return a digest of all bits of the parameters and of the optimizer's state.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    device = share(rank)
    torch.manual_seed(0)
    convolution = nn.Conv2d(1, 8, 3)
    module = nn.Sequential(convolution, nn.GroupNorm(2, 8), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(288, 64), nn.Linear(64, 5))
    model = DeterministicShards(module.to(device), shards=6)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    loader = ElasticDataLoader(Numbers(), 16)
    state = TrainState(model=module, optimizer=optimizer, data=loader)
    checkpoints, drain = Checkpointer(path) if path else None, Drain(model)
    if checkpoints:
        checkpoints.restore(state)
    until = state.step + halt if halt else 1000
    while loader.epoch < 2 and state.step < until:
        for batches in loader.steps(model):
            optimizer.zero_grad()
            for batch in batches:
                model(batch.to(device)).square().mean().backward()
            optimizer.step()
            state.step += 1
            if state.step == until:
                break
    assert not drain.now
    if checkpoints:
        checkpoints.save(state.step, state, now=True)
        checkpoints.close()
    return digest([*module.parameters(), *moments(optimizer)])


def moments(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield all tensors of the optimizer's state: for each parameter its moments, and the count of steps."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            yield from (optimizer.state[param][name] for name in sorted(optimizer.state[param]))


def digest(tensors: list[Tensor]) -> str:
    """Return a digest of all bits. Raises AssertionError if a value is not finite: of NaNs all digests would agree."""
    assert all(bool(tensor.isfinite().all()) for tensor in tensors)
    return hashlib.sha256(repr([tensor.tolist() for tensor in tensors]).encode()).hexdigest()


def test_the_same_bits_at_any_number_of_ranks_that_share_a_gpu(tmp_path: Path) -> None:
    (alone,) = run(1, exact)
    for world in (2, 3):
        assert run(world, exact) == [alone] * world
    for world, halt in ((2, 3), (3, 2), (1, 0)):  # in the middle of an epoch of four steps, then in the next one
        found = run(world, exact, str(tmp_path / "c"), halt)
    assert found == [alone]

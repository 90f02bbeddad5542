"""Our class in the place of torch's: what scripts and frameworks ask of torch's class gives the same with ours."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from elastirun.train import DistributedDataParallel as DDP
from tests.train.test_ddp import WIDTH, batch, make
from tests.train.worlds import run

TORCHS = nn.parallel.DistributedDataParallel
Wrap = Callable[..., Any]


def on_group(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    return DDP(module, *args, transport="group", **kwargs)


def train(ddp: nn.Module, rank: int, steps: int, first: int = 0) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        ddp(batch(step, rank)).pow(2).mean().backward()
        optimizer.step()


def weights(module: nn.Module) -> list[float]:
    tensors = (*module.parameters(), *module.buffers())
    return [round(value, 5) for tensor in tensors for value in tensor.detach().double().reshape(-1).tolist()]


# -- state dicts -------------------------------------------------------------------------------------------------------


class Migrating(nn.Module):
    """A layer whose version 1 had other weights. It has a parameter of the same name as its child, as the module around it has."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("seen", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *args: Any) -> None:
        if metadata.get("version") != 2:
            state[prefix + "weight"] = state[prefix + "weight"] * 100
        super()._load_from_state_dict(state, prefix, metadata, *args)  # type: ignore[no-untyped-call]


class Outer(Migrating):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.module = nn.BatchNorm1d(WIDTH), Migrating()  # a name that is the wrapper's, too

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.module(self.norm(super().forward(x)))
        return out


def names(rank: int, world: int, wrap: Wrap) -> list[Any]:
    ddp = wrap(Outer())
    optimizer = torch.optim.AdamW(ddp.parameters())
    nested = nn.ModuleDict({"a": ddp, "b": nn.Linear(2, 2)})
    found: list[Any] = []
    for module in (ddp, nested):
        state = module.state_dict()
        found += [list(state), list(state._metadata.items()), [name for name, _ in module.named_parameters()]]
        found.append(list(get_model_state_dict(module)))
    model, optim = get_state_dict(ddp, optimizer)
    set_state_dict(ddp, optimizer, model_state_dict=model, optim_state_dict=optim)
    return [*found, list(model), [sorted(state) for state in optim["state"].values()]]


def resaved(rank: int, world: int, wrap: Wrap) -> list[Any]:
    """Weights that are saved and loaded in each form that torch's class can read."""
    found = []
    for nest in (False, True):
        saved = wrap(Outer()).eval()  # whose statistics they are after training is another matter
        train(saved, rank, 2)
        state = (nn.ModuleDict({"a": saved}) if nest else saved).state_dict()
        mine = wrap(Outer())
        target = nn.ModuleDict({"a": mine}) if nest else mine
        target.load_state_dict(state)
        found.append(weights(mine))
        mine = wrap(Outer())
        target = nn.ModuleDict({"a": mine}) if nest else mine
        set_model_state_dict(target, get_model_state_dict(nn.ModuleDict({"a": saved}) if nest else saved))
        found.append(weights(mine))
    plain = Outer()
    consume_prefix_in_state_dict_if_present(state := saved.state_dict(), "module.")
    plain.load_state_dict(state)
    found.append(weights(plain))
    plain = Outer()
    plain.load_state_dict({name[7:]: value for name, value in saved.state_dict().items()})  # the versions are lost: it migrates
    return [*found, weights(plain)]


def bare(rank: int, world: int) -> list[Any]:
    """State dicts of modules that were not wrapped, with all their versions; they are left as they were."""
    found = []
    for nest in (False, True):
        plain = Outer()
        with torch.no_grad():
            for number, tensor in enumerate((*plain.parameters(), *plain.buffers())):
                tensor.fill_(number)
        wrapped = DDP(Outer())
        state = nn.ModuleDict({"a": plain}).state_dict() if nest else plain.state_dict()
        before = list(state), copy.deepcopy(state._metadata)  # type: ignore[attr-defined]
        (nn.ModuleDict({"a": wrapped}) if nest else wrapped).load_state_dict(state)
        found += [weights(wrapped) == weights(plain), (list(state), state._metadata) == before]  # type: ignore[attr-defined]
    wrong = DDP(make()).load_state_dict({"nothing": torch.ones(1)}, strict=False)
    return [*found, "module.0.weight" in wrong.missing_keys, wrong.unexpected_keys == ["nothing"]]


def test_state_dicts_of_unwrapped_modules_load_with_their_versions() -> None:
    assert run(1, bare) == [[True] * 6]


# -- beside torch's class ----------------------------------------------------------------------------------------------


def beside(rank: int, world: int, case: Callable[..., Any], *wraps: Wrap) -> list[Any]:
    """What ``case`` returns with torch's class, with ours, and with ours on the group."""
    found = []
    for wrap in wraps or (TORCHS, DDP, on_group):
        torch.manual_seed(0)
        found.append(case(rank, world, wrap))
    return found


CASES: list[tuple[Callable[..., Any], int]] = [(names, 1), (resaved, 2)]


@pytest.mark.parametrize(("case", "world"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_the_same_as_with_torchs_class(case: Callable[..., Any], world: int) -> None:
    for theirs, *ours in run(world, beside, case):
        for mine in ours:
            assert mine == theirs

"""What users do around a step, beside torch's class in the same test: penalties, other optimizers, parameters put in place."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd

from elastirun.train import DistributedDataParallel, Diverged, TrainError
from tests.support.worlds import run
from tests.train.beside import Case, Torchs, Wrap, check, flat
from tests.train.test_ddp import batch, make


def grads(module: nn.Module) -> list[list[float]]:
    return [[] if p.grad is None else p.grad.flatten().tolist() for p in module.parameters()]


def penalty_afterwards(rank: int, wrap: Wrap) -> list[Any]:
    ddp, found = wrap(make()), []
    for step in range(6):
        ddp.zero_grad()
        ddp(batch(step, rank)).pow(2).mean().backward()
        sum(p.pow(2).sum() for p in ddp.parameters()).backward()
        found.append(grads(ddp))
    return found


def penalty(module: nn.Module) -> Tensor:
    return sum((p.pow(2).sum() for p in module.parameters()), torch.zeros(()))


def penalty_first(rank: int, wrap: Wrap) -> list[Any]:
    ddp, found = wrap(make()), []
    for step in range(6):
        ddp.zero_grad()
        penalty(ddp).backward()
        ddp(batch(step, rank)).pow(2).mean().backward()
        found.append(grads(ddp))
    return found


def penalty_in_a_step_of_its_own(rank: int, wrap: Wrap) -> list[Any]:
    ddp, found = wrap(make()), []
    for step in range(6):
        ddp.zero_grad()
        ddp(batch(step, rank)).pow(2).mean().backward()
        ddp.zero_grad()
        penalty(ddp).backward()
        found.append(grads(ddp))
    return found


def forward_alone(rank: int, wrap: Wrap) -> list[Any]:
    """A forward on rank 0, with gradients and without a backward, leaves nothing behind."""
    ddp, found = wrap(make()), []
    for step in range(6):
        if step in (2, 4) and rank == 0:
            ddp(batch(50, 0))
        ddp.zero_grad()
        ddp(batch(step, rank)).pow(2).mean().backward()
        penalty(ddp).backward()
        found.append(grads(ddp))
    return found


class Aside(nn.Module):
    """Leaves a loss on itself; ``first`` says which of the two layers' gradients come first."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out, self.aside = nn.Linear(4, 1), nn.Linear(4, 1)
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            out = self.out(x)
        self.loss = self.aside(x).pow(2).mean()
        return out if self.first else self.out(x)  # type: ignore[no-any-return]


def loss_left_aside(rank: int, wrap: Wrap) -> list[Any]:
    """Its backward comes after that of the outputs, when the order of gradients has been learnt in one backward."""
    found = []
    for module in (Aside(True), Aside(False)):
        ddp = wrap(module)
        for step in range(8):
            ddp.zero_grad()
            out = ddp(batch(step, rank)).pow(2).mean()
            if step < 6:
                (out + module.loss).backward()
            else:
                out.backward()
                module.loss.backward()
            found.append(grads(ddp))
    return found


def gradients_asked_for(rank: int, wrap: Wrap, zeroed: str = "before", to_none: bool = True) -> list[Any]:
    """``autograd.grad`` through the module fails on one rank, which goes on.

    ``zeroed``: whether the gradients are zeroed before it or after it.
    """
    ddp, found = wrap(make()), []
    for step in range(8):
        if zeroed == "before":
            ddp.zero_grad()
        if step in (1, 5):
            x = batch(step + 50, rank).requires_grad_()
            handle = ddp.module[1].register_forward_hook(fail_in_its_backward if rank == 1 else lambda *_: None)
            out = ddp(x)
            handle.remove()
            try:
                torch.autograd.grad(out.sum(), x)
            except ValueError:
                assert rank == 1
        if zeroed == "after":
            ddp.zero_grad(set_to_none=to_none)
        ddp(batch(step, rank)).pow(2).mean().backward()
        found.append(grads(ddp))
    return found


def gradients_asked_for_then_dropped(rank: int, wrap: Wrap) -> list[Any]:
    return gradients_asked_for(rank, wrap, "after")


def gradients_asked_for_then_zeroed(rank: int, wrap: Wrap) -> list[Any]:
    return gradients_asked_for(rank, wrap, "after", to_none=False)


def gradients_asked_for_between(rank: int, wrap: Wrap) -> list[Any]:
    """… between a forward and its backward: no other forward comes before that."""
    ddp, found = wrap(make()), []
    for step in range(8):
        ddp.zero_grad()
        x = batch(step, rank).requires_grad_()
        hooks: list[Any] = []

        def fail(module: nn.Module, inputs: Any, output: Tensor, to: list[Any] = hooks) -> None:
            to.append(output.register_hook(fails))

        handle = ddp.module[1].register_forward_hook(fail)
        out = ddp(x)
        handle.remove()
        if step in (1, 5) and rank == 1:
            try:
                torch.autograd.grad(out.sum(), x, retain_graph=True)
            except ValueError:
                pass
        hooks[0].remove()
        out.pow(2).mean().backward()
        found.append(grads(ddp))
    return found


def fail_in_its_backward(module: nn.Module, inputs: Any, output: Tensor) -> None:
    output.register_hook(fails)


def fails(_: Tensor) -> None:
    raise ValueError("on purpose")


def local_steps(rank: int, wrap: Wrap, hook: Any = local_sgd.post_localSGD_hook) -> list[Any]:
    """torch's post-local SGD: replicas differ on purpose."""
    ddp = wrap(make())
    subgroup, _ = dist.new_subgroups(group_size=1)
    ddp.register_comm_hook(local_sgd.PostLocalSGDState(None, subgroup, start_localSGD_iter=4), hook)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for step in range(12):
        optimizer.zero_grad()
        ddp(batch(step, rank)).pow(2).mean().backward()
        optimizer.step()
    return [p.flatten().tolist() for p in ddp.parameters()]


def local_steps_wrapped(rank: int, wrap: Wrap) -> list[Any]:
    """A hook within another one, as torch's fp16_compress_wrapper() makes it."""
    return local_steps(rank, wrap, lambda state, bucket: local_sgd.post_localSGD_hook(state, bucket))


def nothing_reduced(rank: int, wrap: Wrap) -> list[Any]:
    return local_steps(rank, wrap, debugging_hooks.noop_hook)


def optimizer_in_backward(rank: int, wrap: Wrap, later: bool = False) -> list[Any]:
    """torch's class has this with an accelerator only: there, the optimizer steps afterwards."""
    optim: Any = importlib.import_module("torch.distributed.optim")  # warns that it is old
    ours = wrap is not Torchs
    model = make()
    if ours and not later:
        optim._apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    ddp = wrap(model)
    if ours and later:
        optim._apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(6):
        ddp(batch(step, rank)).pow(2).mean().backward()
        if not ours:
            optimizer.step()
            optimizer.zero_grad()
    return [[p.flatten().tolist() for p in ddp.parameters()], [p.grad is None for p in ddp.parameters()]]


def optimizer_in_backward_later(rank: int, wrap: Wrap) -> list[Any]:
    return optimizer_in_backward(rank, wrap, later=True)


def optimizer_in_backward_much_later(rank: int, wrap: Wrap) -> list[Any]:
    """All parameters but the first get one between two steps."""
    optim: Any = importlib.import_module("torch.distributed.optim")
    model = make()
    ddp, stepped = wrap(model), list(model.parameters())[1:]
    optimizer = torch.optim.SGD(stepped, 0.1)
    for step in range(8):
        if step == 4 and wrap is not Torchs:
            optim._apply_optimizer_in_backward(torch.optim.SGD, stepped, {"lr": 0.1})
        ddp.zero_grad()
        ddp(batch(step, rank)).pow(2).mean().backward()
        if step >= 4 and wrap is Torchs:
            optimizer.step()
            optimizer.zero_grad()
    return [[p.flatten().tolist() for p in ddp.parameters()], [p.grad is None for p in ddp.parameters()]]


def wrapped_twice(rank: int, wrap: Wrap) -> list[Any]:
    """Parameters of two wrapped modules, which are called by turns; the second contains the first."""
    inner = wrap(make())
    outer, found = wrap(nn.Sequential(inner)), []
    for step in range(8):
        inner.zero_grad()
        (outer if step % 4 == 3 else inner)(batch(step, rank)).pow(2).mean().backward()
        found.append(grads(inner))
    return found


def half_of_it(rank: int, wrap: Wrap) -> list[Any]:
    """Some parameters of the second module are the first's."""
    trunk = make()
    first = wrap(trunk)
    second, found = wrap(nn.Sequential(trunk, nn.Linear(1, 2))), []
    for step in range(8):
        second.zero_grad()
        (second if step % 4 == 3 else first)(batch(step, rank)).pow(2).mean().backward()
        found.append(grads(trunk))
    return found


CASES = [
    penalty_afterwards,
    penalty_first,
    penalty_in_a_step_of_its_own,
    forward_alone,
    loss_left_aside,
    wrapped_twice,
    half_of_it,
    gradients_asked_for,
    gradients_asked_for_then_dropped,
    gradients_asked_for_then_zeroed,
    gradients_asked_for_between,
    local_steps,
    local_steps_wrapped,
    nothing_reduced,
    optimizer_in_backward,
    optimizer_in_backward_later,
    optimizer_in_backward_much_later,
]


@pytest.mark.daily(3)
@pytest.mark.parametrize("transport", ["shared memory", "group"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_same_as_with_torchs_class(case: Case, transport: str) -> None:
    for world in (2, 3):
        check(case, 1e-6, world, transport=transport, check_replicas_every=5)


class Hidden:
    """An object that nobody looks into."""

    def __init__(self, output: Tensor) -> None:
        self.output = output


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, skip: bool) -> Hidden:
        return Hidden(self.last(x if skip else self.first(x)))


def hidden_outputs(rank: int, world: int, transport: str) -> list[bool]:
    """When the order has been learnt, one rank leaves out a layer; the backward begins at any parameter."""
    ddp, same = DistributedDataParallel(Skips(), transport=transport), []
    for step in range(8):
        ddp.zero_grad()
        ddp(batch(step, rank), step == 6 and rank == 1).output.pow(2).mean().backward()
        alone = copy.deepcopy(ddp.module)
        alone.zero_grad()
        for other in range(world):
            (alone(batch(step, other), step == 6 and other == 1).output.pow(2).mean() / world).backward()
        same.append(flat(grads(ddp.module)) == pytest.approx(flat(grads(alone)), abs=1e-6))
    return same


@pytest.mark.parametrize("transport", ["shared memory", "group"])
def test_outputs_that_nobody_can_look_into(transport: str) -> None:
    assert run(2, hidden_outputs, transport) == [[True] * 8] * 2


def asked(rank: int, world: int) -> str:
    ddp = DistributedDataParallel(make())
    ddp.register_comm_hook(None, debugging_hooks.noop_hook)
    ddp(batch(0, rank)).pow(2).mean().backward()
    torch.optim.SGD(ddp.parameters(), 0.1).step()
    try:
        ddp.check_replicas()
    except Diverged as error:
        return str(error)
    return ""


def test_replicas_that_differ_because_of_a_hook_are_told_when_asked_for() -> None:
    assert all("no longer the same" in said for said in run(2, asked))


def twice(rank: int, world: int, transport: str) -> list[bool]:
    """Two backwards of one forward; the second one's graph begins at the parameters."""
    ddp, same = DistributedDataParallel(make(), transport=transport), []
    for step in range(6):
        ddp.zero_grad()
        out = ddp(batch(step, rank))
        out.pow(2).mean().backward(retain_graph=True)
        (out.mean() + sum(p.pow(2).sum() for p in ddp.parameters())).backward()
        alone = copy.deepcopy(ddp.module)
        alone.zero_grad()
        for other in range(world):
            out = alone(batch(step, other))
            ((out.pow(2).mean() + out.mean()) / world).backward()
        sum(p.pow(2).sum() for p in alone.parameters()).backward()  # type: ignore[union-attr]
        same.append(flat(grads(ddp.module)) == pytest.approx(flat(grads(alone)), abs=1e-6))
    return same


@pytest.mark.parametrize("transport", ["shared memory", "group"])
def test_a_second_backward_may_meet_a_parameter_first(transport: str) -> None:
    assert run(2, twice, transport) == [[True] * 6] * 2


def put_in_place(rank: int, world: int, how: str) -> str:
    ddp = DistributedDataParallel(make())
    try:
        if how == "assigned":
            ddp.module.load_state_dict(make(1).state_dict(), assign=True)
        else:
            ddp.module.add_module("adapter", nn.Linear(1, 1))
        if how == "compared":
            ddp.check_replicas()
        ddp(batch(0, rank)).pow(2).mean().backward()
    except TrainError as error:
        ddp.set_group()
        ddp(batch(0, rank)).pow(2).mean().backward()
        return str(error)
    return "nothing"


@pytest.mark.parametrize(("how", "name"), [("assigned", "0.weight"), ("added", "adapter.weight"), ("compared", "adapter.weight")])
def test_a_parameter_that_is_put_in_place_later_is_named(how: str, name: str) -> None:
    assert all(said.startswith(f"the parameter {name} was put in place after") for said in run(2, put_in_place, how))


def elsewhere(rank: int, world: int, transport: str) -> list[Any]:
    """Tensors without a device are made on one that has no memory."""
    model = make()
    x = batch(0, rank)
    with torch.device("meta"):
        torch.set_default_device("meta")
        try:
            ddp = DistributedDataParallel(model, transport=transport, check_replicas_every=2, find_unused_parameters=True)
            for step in range(7):
                ddp.zero_grad()
                model[0].bias.requires_grad_(step != 3)
                ddp(x).pow(2).mean().backward()
            ddp.check_replicas()
        finally:
            torch.set_default_device(None)
    return grads(model)


@pytest.mark.parametrize("transport", ["shared memory", "group"])
def test_the_default_device_does_not_matter(transport: str) -> None:
    first, second = run(2, elsewhere, transport)
    assert first == second and all(first)

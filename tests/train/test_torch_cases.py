"""What torch tests of its own class, tried with ours: the cases that no other test here covers. docs/ddp.md lists them all."""

from __future__ import annotations

import atexit
import collections
import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from elastirun.train import DistributedDataParallel as DDP
from elastirun.train import ModelMismatch, TrainError
from tests.support.worlds import run
from tests.train.test_ddp import WIDTH, alone, batch, close, grads, learn, make

Named = collections.namedtuple("Named", "first second")  # noqa: PYI024


@dataclass
class Data:
    first: Tensor
    note: str


class Opaque:
    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Wrapped(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.net, self.wrap = make(), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.net(x))


def same_as_alone(ddp: DDP, net: nn.Module, rank: int, world: int, loss: Callable[[Any], Tensor]) -> bool:
    found = []
    for step in range(6):
        ddp.zero_grad()
        loss(ddp(batch(step, rank))).pow(2).mean().backward()
        found.append(close(grads(net), alone(net, [(1, batch(step, r)) for r in range(world)])))
    return all(found)


def outputs(rank: int, world: int) -> bool:
    """Tuples, dicts, named tuples, data classes, lists within them, objects without any attribute to look at."""
    found = []
    forms: list[tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = [
        (lambda t: (None, [t]), lambda o: o[1][0]),
        (lambda t: {"a": {"b": t}, "c": 3}, lambda o: o["a"]["b"]),
        (lambda t: Named(t, 1), lambda o: o.first),
        (lambda t: Data(t, "n"), lambda o: o.first),
        (lambda t: (t.detach(), t), lambda o: o[1]),
        (Opaque, lambda o: o.tensor),
    ]
    for wrap, unwrap in forms:
        module = Wrapped(wrap)
        found.append(same_as_alone(DDP(module), module.net, rank, world, unwrap))
    return all(found)


def ignored_output(rank: int, world: int) -> bool:
    """An output that no loss is made of, and a forward without a backward."""
    module = Wrapped(lambda t: (t, t * 2))
    ddp = DDP(module)
    ddp(batch(9, rank))
    return same_as_alone(ddp, module.net, rank, world, lambda o: o[1] / 2)


def keyword_and_nested_inputs(rank: int, world: int) -> bool:
    class Inputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make()

        def forward(self, *, data: dict[str, Any]) -> Tensor:
            out: Tensor = self.net(data["x"][0])
            return out

    module = Inputs()
    ddp = DDP(module, device_ids=["cpu"])  # type: ignore[list-item]
    ddp(data={"x": [batch(0, rank)]}).pow(2).mean().backward()
    return close(grads(module), alone(module.net, [(1, batch(0, r)) for r in range(world)]))


def packed_sequence(rank: int, world: int) -> bool:
    lstm = nn.LSTM(WIDTH, WIDTH)
    torch.manual_seed(1)
    ddp, reference = DDP(lstm), copy.deepcopy(lstm)

    def loss(module: nn.Module, r: int) -> Tensor:
        out: tuple[PackedSequence, Any] = module(pack_sequence([batch(0, r, 4), batch(1, r, 2)]))
        return out[0].data.pow(2).mean()

    loss(ddp, rank).backward()
    for r in range(world):
        (loss(reference, r) / world).backward()
    return close(grads(lstm), [p.grad for p in reference.parameters()])  # type: ignore[misc]


def create_graph(rank: int, world: int) -> bool:
    """backward(create_graph=True): the gradients are right; they do not carry the graph of their reduction."""
    module = make()
    ddp = DDP(module)
    for step in range(5):
        ddp.zero_grad()
        ddp(batch(step, rank)).pow(2).mean().backward(create_graph=True)
    return close(grads(module), alone(module, [(1, batch(4, r)) for r in range(world)]))


def no_rows(rank: int, world: int) -> bool:
    """A layer without outputs, a batch without rows, a parameter without elements, one without dimensions."""

    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.none, self.scale = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 0), nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).sum() * self.scale + self.none(x).sum()

    ddp = DDP(Empty())
    for size in (0, 3):
        ddp.zero_grad()
        ddp(batch(0, rank, size)).backward()
    return ddp.module.none.weight.grad.shape == (0, WIDTH) and ddp.module.scale.grad.dim() == 0


def stateless(rank: int, world: int) -> bool:
    module = make()
    ddp = DDP(module)
    other = {f"module.{name}": (p.detach() + 1).requires_grad_() for name, p in module.named_parameters()}
    out = torch.func.functional_call(ddp, other, (batch(0, rank),))
    torch.autograd.grad(out.sum(), list(other.values()))
    ddp(batch(1, rank)).pow(2).mean().backward()
    return close(grads(module), alone(module, [(1, batch(1, r)) for r in range(world)]))


def users_hooks(rank: int, world: int) -> bool:
    """Hooks of the user's own, on modules, tensors and gradients, run as often as they do without the wrapper."""
    module, calls = make(), [0, 0, 0]
    ddp = DDP(module)

    def count(place: int) -> Any:
        def hook(*_: Any) -> None:
            calls[place] += 1

        return hook

    module.register_forward_hook(count(0))
    module[0].register_full_backward_hook(count(1))  # type: ignore[index]
    next(module.parameters()).register_hook(count(2))
    learn(ddp, rank, 6)
    return calls == [6, 6, 6]


def zero_redundancy(rank: int, world: int) -> bool:
    """torch's sharded optimizer on top."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # importing it warns

    module, plain = make(), make()
    ddp, reference = DDP(module), DDP(plain)
    sharded = ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01)
    usual = torch.optim.AdamW(reference.parameters(), lr=0.01)
    for step in range(4):
        for net, optimizer in ((ddp, sharded), (reference, usual)):
            optimizer.zero_grad()
            net(batch(step, rank)).pow(2).mean().backward()
            optimizer.step()
    return all(torch.allclose(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))


def strides_differ(rank: int, world: int) -> bool:
    net = nn.Conv2d(3, 4, 2)
    if rank == 1:
        net.to(memory_format=torch.channels_last)
    try:
        DDP(net)
    except ModelMismatch as error:
        return "weight (4, 3, 2, 2) torch.float32 with strides (12, 1, 6, 3) on rank 1" in str(error)
    return False


def nothing_to_train(rank: int, world: int) -> bool:
    told = []
    for module in (nn.ReLU(), nn.Linear(1, 1).requires_grad_(False), nn.LazyLinear(3)):
        try:
            DDP(module)
        except TrainError as error:
            told.append("\n" not in str(error))
    return told == [True] * 3


def ignored_parameters(rank: int, world: int) -> bool:
    module = make()
    module._ddp_params_and_buffers_to_ignore = ["0.weight", "2.bias"]  # type: ignore[assignment]
    ddp = DDP(module)
    learn(ddp, rank)
    ddp(batch(0, rank)).pow(2).mean().backward()
    mean, own = alone(module, [(1, batch(0, r)) for r in range(world)]), alone(module, [(1, batch(0, rank))])
    expected = [own[0], mean[1], mean[2], own[3], mean[4], mean[5]]
    return close(grads(module), expected)


def two_modules(rank: int, world: int) -> bool:
    """Two wrapped modules in one loss, and one inside the other's graph; a third that shares nothing."""
    first, second = make(), make()
    one, two = DDP(first), DDP(second)
    for step in range(6):
        one.zero_grad()
        two.zero_grad()
        x = batch(step, rank)
        (two(x * one(x)).pow(2).mean() + one(x).sum()).backward()
    a, b = make(), make()
    for r in range(world):
        x = batch(5, r)
        ((b(x * a(x)).pow(2).mean() + a(x).sum()) / world).backward()
    return close(grads(first), [p.grad for p in a.parameters()]) and close(grads(second), [p.grad for p in b.parameters()])  # type: ignore[misc]


def goes_away(rank: int, world: int) -> bool:
    """Nothing holds on to a module that is no longer used, not even until garbage is collected: it would hold the process group, and gloo's
    threads that live on may abort the interpreter at its end. The parameters go on without it."""
    module = make()
    ddp = DDP(module)
    learn(ddp, rank)
    out = ddp(batch(0, rank))
    parts = [weakref.ref(part) for part in (ddp, ddp._reducer, ddp._reducer.world.transport)]
    gc.disable()
    del ddp
    gone = all(part() is None for part in parts)
    gc.enable()
    out.sum().backward()  # local: the wrapper is gone
    module(batch(1, rank)).sum().backward()
    return gone


def lets_go_at_exit(rank: int, world: int) -> bool:
    """A module that lives until the interpreter's end holds the process group no longer than that."""
    ddp = DDP(make())
    learn(ddp, rank)
    parts = [weakref.ref(part) for part in (ddp._reducer, ddp._reducer.world.transport)]
    gc.disable()
    atexit._run_exitfuncs()
    gone = all(part() is None for part in parts)
    gc.enable()
    return gone and not hasattr(ddp, "process_group")


def after_an_error_in_the_forward(rank: int, world: int) -> bool:
    module = make()
    ddp = DDP(module)
    for step in range(6):
        ddp.zero_grad()
        try:
            ddp(torch.zeros(3, WIDTH + 1))
        except RuntimeError:
            pass
        ddp(batch(step, rank)).pow(2).mean().backward()
    return close(grads(module), alone(module, [(1, batch(5, r)) for r in range(world)]))


def inference(rank: int, world: int) -> bool:
    """A forward in evaluation, on one rank alone, in grad mode, no_grad and inference mode: nobody waits."""
    ddp = DDP(make())
    learn(ddp, rank)
    if rank == 0:
        ddp.eval()
        ddp(batch(0, rank))
        with torch.inference_mode():
            ddp(batch(0, rank))
    dist.barrier()
    return True


CASES = [
    *(outputs, ignored_output, keyword_and_nested_inputs, packed_sequence, create_graph, no_rows, stateless, users_hooks, zero_redundancy),
    *(
        strides_differ,
        nothing_to_train,
        ignored_parameters,
        two_modules,
        goes_away,
        lets_go_at_exit,
        after_an_error_in_the_forward,
        inference,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_case_of_torchs_own(case: Callable[[int, int], bool]) -> None:
    assert run(2, case) == [True, True]

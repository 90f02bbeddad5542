"""What goes wrong, and what is said then: one clear sentence, on every rank that it concerns, and the module can be used again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from elastirun.train import DistributedDataParallel as DDP
from elastirun.train import ModelMismatch, OutsideForward, ReductionFailed, TrainError
from tests.support.worlds import Died, run
from tests.train.test_ddp import WIDTH, alone, batch, close, grads, learn, make


class Faulty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad: Any) -> Any:
        raise MemoryError("on purpose")


def interrupted(rank: int, world: int, transport: str) -> list[Any]:
    ddp = DDP(make(), bucket_cap_mb=0.00001, transport=transport)
    learn(ddp, rank)
    told = []
    for step in range(3):
        ddp.zero_grad()
        hidden = ddp.module[0](batch(step, rank)) if rank == 1 and step == 1 else None  # type: ignore[index]
        try:
            if hidden is not None:
                handle = ddp.module[1].register_forward_hook(lambda m, i, o: Faulty.apply(o))  # type: ignore[index]
            loss = ddp(batch(step, rank)).pow(2).mean()
            if hidden is not None:
                handle.remove()
            loss.backward()
            told.append("")
        except MemoryError as error:
            told.append(str(error))
        except TrainError as error:
            told.append(str(error)[:50])
            assert all(p.grad is None for p in ddp.parameters())
    return [told, close(grads(ddp.module), alone(ddp.module, [(1, batch(2, r)) for r in range(world)]))]


@pytest.mark.parametrize("transport", ["group", "auto"])
def test_an_exception_in_a_backward_drops_the_step_everywhere(transport: str) -> None:
    results = run(2, interrupted, transport)
    assert results[0] == [["", "the backward of rank 1 ended with an exception, so", ""], True]
    assert results[1] == [["", "on purpose", ""], True]


AFTERWARDS: dict[str, Callable[[DDP], object]] = {
    "forward": lambda ddp: None,
    "construction": lambda ddp: DDP(make()),
    "set_group": lambda ddp: ddp.set_group(),
    "check_replicas": lambda ddp: ddp.check_replicas(),
    "sync_buffers": lambda ddp: ddp.sync_buffers(),
    "skip": lambda ddp: ddp.skip(),
}


def interrupted_in_two(rank: int, world: int, transport: str, then: str) -> list[str | bool]:
    """An exception ends rank 1's backward through two modules; the first that all ranks do after it is ``then``."""
    modules = [make(), make()]
    for module in modules:
        module.register_buffer("seen", torch.zeros(1), persistent=False)
    both = [DDP(module, transport=transport) for module in modules]
    x = batch(0, rank).requires_grad_()
    outputs = [ddp(x if rank == 1 else x.detach()) for ddp in both]
    if rank == 1:
        x.register_hook(Faulty.backward)
    told = []
    try:
        torch.stack([output.pow(2).mean() for output in outputs]).sum().backward()
    except (MemoryError, TrainError) as error:
        told.append(str(error)[:36])
    AFTERWARDS[then](both[1])
    for ddp in both:
        ddp.zero_grad()
        ddp(batch(1, rank)).pow(2).mean().backward()
        told.append(close(grads(ddp.module), alone(ddp.module, [(1, batch(1, r)) for r in range(world)])))
    return told


@pytest.mark.parametrize("transport", ["group", "auto"])
@pytest.mark.parametrize("then", AFTERWARDS)
def test_an_exception_in_a_backward_through_two_modules_holds_nobody_up(transport: str, then: str) -> None:
    zero, one = run(2, interrupted_in_two, transport, then)
    assert zero == ["the backward of rank 1 ended with an", True, True]
    assert one == ["on purpose", True, True]


def outside(rank: int, world: int) -> list[str]:
    ddp, told = DDP(make()), []
    learn(ddp, rank)
    for step in range(3):  # the first two might be penalties'
        ddp.zero_grad()
        try:
            ddp.module(batch(step, rank)).sum().backward()
        except OutsideForward as error:
            told.append(str(error))
    ddp.zero_grad()
    with ddp.no_sync():
        ddp.module(batch(0, rank)).sum().backward()
    ddp.zero_grad()
    ddp(batch(0, rank)).pow(2).mean().backward()
    assert close(grads(ddp.module), alone(ddp.module, [(1, batch(0, r)) for r in range(world)]))
    return told


def test_a_backward_outside_the_forward_is_one_clear_sentence() -> None:
    for (text,) in run(2, outside):
        assert "\n" not in text and "call the wrapped module, not .module" in text


def within(rank: int, world: int, transport: str, what: str) -> list[Any]:
    """A hook, or the optimizer, raises in the reduction of step 1."""
    ddp, step = DDP(make(), transport=transport), 0

    def hook(state: Any, bucket: Any) -> Any:
        if step == 1:
            raise MemoryError("on purpose")
        return default_hooks.allreduce_hook(state, bucket)

    if what == "hook":
        ddp.register_comm_hook(None, hook)
    else:
        ddp.step_in_backward(Raises(ddp.parameters(), lr=0.0))
    told = []
    for step in range(4):
        if step == 3:
            ddp.set_group()
        ddp.zero_grad()
        try:
            ddp(batch(step, rank)).pow(2).mean().backward()
        except (MemoryError, ReductionFailed) as error:
            told.append(str(error))
    return [told, close(grads(ddp.module), alone(ddp.module, [(1, batch(3, r)) for r in range(world)]))]


class Raises(torch.optim.SGD):
    """In its second step."""

    steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        if self.steps == 2:
            raise MemoryError("on purpose")


@pytest.mark.parametrize("transport", ["group", "auto"])
@pytest.mark.parametrize("what", ["hook", "optimizer"])
def test_an_exception_within_a_reduction_is_not_passed_over(transport: str, what: str) -> None:
    for told, right in run(2, within, transport, what):
        assert told == ["on purpose", "the reduction of step 2 was interrupted by MemoryError. Use set_group() with a new process group"]
        assert right


def interrupted_after(rank: int, world: int, transport: str) -> list[Any]:
    """Ctrl-C on rank 1 while the ranks compare their replicas, which follows the reduction of step 2."""
    ddp, told = DDP(make(), transport=transport, check_replicas_every=2), []
    compare = ddp._reducer.conclusion.check_replicas

    def interrupt(*world: Any) -> None:
        compare(*world)
        raise KeyboardInterrupt

    for step in range(3):
        if step == 1 and rank == 1:
            ddp._reducer.conclusion.check_replicas = interrupt  # type: ignore[method-assign]
        if step == 2 and rank == 0:
            continue  # rank 0 knows of nothing: it would wait for its peer
        ddp.zero_grad()
        try:
            ddp(batch(step, rank)).pow(2).mean().backward()
        except (KeyboardInterrupt, ReductionFailed) as error:
            told.append(f"{type(error).__name__}: {error}")
    ddp.set_group()
    ddp.zero_grad()
    ddp(batch(3, rank)).pow(2).mean().backward()
    return [told, close(grads(ddp.module), alone(ddp.module, [(1, batch(3, r)) for r in range(world)]))]


@pytest.mark.parametrize("transport", ["group", "auto"])
def test_an_interrupt_after_a_reduction_is_not_passed_over(transport: str) -> None:
    none, told = run(2, interrupted_after, transport)
    assert none == [[], True]
    broken = "ReductionFailed: the reduction of step 2 was interrupted by KeyboardInterrupt. Use set_group() with a new process group"
    assert told == [["KeyboardInterrupt: ", broken], True]


def mismatched(rank: int, world: int, kind: str) -> str:
    module = make()
    if kind == "shape" and rank == 1:
        module[2] = nn.Linear(WIDTH, WIDTH, bias=False)  # type: ignore[operator]
    if kind == "dtype" and rank == 1:
        module[2].double()  # type: ignore[index]
    try:
        DDP(module)
    except ModelMismatch as error:
        return str(error)
    return ""


def test_different_models_are_told_apart_by_name() -> None:
    for text in run(3, mismatched, "shape"):
        assert "2.bias (4,) torch.float32 on ranks 0, 2; 4.weight (1, 4) torch.float32 on rank 1" in text
    for text in run(2, mismatched, "dtype"):
        assert "2.weight (4, 4) torch.float32 on rank 0; 2.weight (4, 4) torch.float64 on rank 1" in text


def killed(rank: int, world: int, transport: str) -> list[Any]:
    group = dist.new_group(timeout=timedelta(seconds=5))  # gloo tells the peer's neighbours at once, the others after this
    ddp = DDP(make(), process_group=group, transport=transport)
    learn(ddp, rank)
    told = []
    others = dist.new_group([0, 2])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(2):
        try:
            ddp(batch(0, rank)).pow(2).mean().backward()
        except ReductionFailed as error:
            told.append((type(error).__name__, str(error)))
    ddp.set_group(others)
    ddp.zero_grad()
    ddp(batch(0, rank)).pow(2).mean().backward()
    return [told, close(grads(ddp.module), alone(ddp.module, [(1, batch(0, r)) for r in (0, 2)]))]


@pytest.mark.parametrize("transport", ["group", "auto"])
def test_after_a_peer_is_lost_the_module_lives_on_in_a_new_group(transport: str) -> None:
    first, gone, last = run(3, killed, transport, died=True)
    assert gone == Died(-signal.SIGKILL)
    for told, right in (first, last):
        assert right and len(told) == 2 and all("\n" not in text for _, text in told)
        if transport == "auto":
            assert all(name == "PeerLost" and "rank 1" in text for name, text in told)


def no_group(rank: int, world: int) -> list[str]:
    told = []
    subgroup = dist.new_group([0])
    if rank == 1:
        try:
            DDP(make(), process_group=subgroup)
        except TrainError as error:
            told.append(str(error))
    dist.destroy_process_group()
    for arguments in ({}, {"mean_over": "me"}, {"bucket_cap_mb": -1}, {"device_ids": [0, 1]}):
        try:
            DDP(make(), **arguments)  # type: ignore[arg-type]
        except TrainError as error:
            told.append(str(error))
    return told


def test_wrong_use_is_one_clear_sentence() -> None:
    zero, one = run(2, no_group)
    assert len(zero) == 4 and len(one) == 5 and all("\n" not in text for text in zero + one)
    assert zero[0].startswith("there is no process group")


def destroyed(rank: int, world: int) -> str:
    ddp = DDP(make(), transport="group")
    learn(ddp, rank)
    dist.destroy_process_group()
    try:
        ddp(batch(0, rank)).sum().backward()
    except ReductionFailed as error:
        return str(error)
    return ""


def test_a_destroyed_group_is_one_clear_sentence() -> None:
    assert all("set_group()" in text and "\n" not in text for text in run(2, destroyed))

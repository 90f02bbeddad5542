"""Around the reductions: buffers, state dicts, hooks, optimizers, compiled modules, other groups, figures."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from elastirun.train import DistributedDataParallel as DDP
from elastirun.train import Diverged, TrainError
from elastirun.train.ddp.world_switch import WorldSwitch
from elastirun.train.reduction import replica_check
from elastirun.train.reduction.replica_check import verify_replicas
from elastirun.train.reduction.step_times import stragglers
from tests.support.worlds import run
from tests.train.test_ddp import WIDTH, alone, batch, close, grads, learn, make


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.module = nn.Linear(WIDTH, 2)  # a name that is the wrapper's, too

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.module(self.norm(x))
        return out


def buffers(rank: int, world: int, each: bool | None) -> list[Any]:
    torch.manual_seed(rank)  # replicas that differ until they are made the same
    ddp = DDP(Normed(), broadcast_buffers=each)
    mean = ddp.module.norm.running_mean
    start = mean.clone()
    for step in range(2):
        (ddp(batch(step, rank)).pow(2).mean() + ddp(batch(step + 5, rank)).pow(2).mean()).backward()  # two forwards, one backward
    own = mean.clone()
    if rank == 0 and not each:
        ddp.eval()
        ddp(batch(0, 0))  # an evaluation on one rank alone waits for nobody where forwards copy no buffers
        ddp.train()
    ddp.sync_buffers()
    return [start.tolist(), own.tolist(), mean.tolist(), ddp.module.module.weight.tolist()]


@pytest.mark.parametrize("each", [None, False, True])
def test_buffers_are_rank_0s_when_asked_for(each: bool | None) -> None:
    (start, own, synced, weight), (start1, own1, synced1, weight1) = run(2, buffers, each)
    assert start == start1 and weight == weight1 and (own == own1) == (each is None) and synced == synced1 == own


def statistics(rank: int, world: int, steps: int) -> list[Any]:
    torch.manual_seed(rank)
    ddp, found = DDP(Normed()), []
    for step in range(steps):
        ddp.zero_grad()
        ddp(batch(step, rank)).pow(2).mean().backward()
        found += [ddp.module.norm.running_mean.tolist(), ddp.module.norm.running_var.tolist()]
    return found


def test_running_statistics_are_rank_0s_after_each_reduction() -> None:
    """They came with the gradients. After the steps that end with a new plan, too."""
    first, *others = run(3, statistics, 6)
    assert all(theirs == first for theirs in others) and first[0] != first[2]


# -- communication hooks -----------------------------------------------------------------------------------------------


def hooked(rank: int, world: int, which: str) -> float:
    """How far the sum of ten steps' gradients is from the exact one."""
    ddp = DDP(make(), bucket_cap_mb=0.0001)
    if which == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        ddp.register_comm_hook(None, getattr(default_hooks, which))
    mine, exact = [torch.zeros_like(p) for p in ddp.parameters()], [torch.zeros_like(p) for p in ddp.parameters()]
    for _ in range(10):
        ddp.zero_grad()
        ddp(batch(0, rank)).pow(2).mean().backward()  # the same batch: error feedback makes up over the steps for what is left out in one
        for total, g in zip(mine, grads(ddp.module), strict=True):
            assert g is not None
            total += g
        for total, g in zip(exact, alone(ddp.module, [(1, batch(0, r)) for r in range(world)]), strict=True):
            total += g
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(mine, exact, strict=True))


@pytest.mark.parametrize(
    ("which", "most"), [("allreduce_hook", 1e-6), ("fp16_compress_hook", 2e-3), ("bf16_compress_hook", 2e-2), ("powersgd", 0.4)]
)
def test_torchs_communication_hooks_can_be_used(which: str, most: float) -> None:
    for off in run(2, hooked, which):
        assert (0 if which == "allreduce_hook" else 1e-9) <= off <= most


def hook_misuse(rank: int, world: int) -> list[str]:
    ddp, told = DDP(make()), []
    for hook in (3, default_hooks.allreduce_hook, default_hooks.allreduce_hook):
        try:
            ddp.register_comm_hook(None, hook)  # type: ignore[arg-type]
        except TrainError as error:
            told.append(str(error))
    return told


def test_a_hook_is_callable_and_the_only_one() -> None:
    (told,) = run(1, hook_misuse)
    assert len(told) == 2


# -- optimizers, precision, compilers ----------------------------------------------------------------------------------


def stepped(rank: int, world: int) -> list[bool]:
    found = []
    for make_optimizer in (
        lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    ):
        one, two = make(), make()
        plain, bucketed = DDP(one, bucket_cap_mb=0.0001), DDP(two, bucket_cap_mb=0.0001)
        optimizer, second = make_optimizer(plain.parameters()), make_optimizer(bucketed.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(second, 0.9)
        other = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        bucketed.step_in_backward(second)
        for step in range(5):
            for ddp in (plain, bucketed):
                ddp.zero_grad()
                ddp(batch(step, rank)).pow(2).mean().backward()
            optimizer.step()
            scheduler.step()
            other.step()
        found.append(all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True)))
        found.append(len(second.state_dict()["state"]) == 6 or not second.state_dict()["state"])
    try:
        bucketed.step_in_backward(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1))
    except TrainError:
        found.append(True)
    return found


def test_stepping_in_the_backward_gives_the_same_bits() -> None:
    assert run(2, stepped) == [[True] * 5] * 2


def scaled(rank: int, world: int) -> list[bool]:
    """GradScaler sees an infinite gradient of one rank on every rank; clipping by norm sees the mean."""
    ddp = DDP(make(), check_finite=True)
    optimizer, scaler = torch.optim.SGD(ddp.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=256.0)
    found = []
    for step in range(6):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in ddp.parameters()]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = ddp(batch(step, rank)).float().pow(2).mean()
        if step == 4 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        same = all(torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
        found.append(same == (step == 4) and ddp.agreement.not_finite == ((1,) if step == 4 else ()))
    ddp.check_replicas()
    return found


def test_loss_scaling_and_clipping() -> None:
    assert run(2, scaled) == [[True] * 6] * 2


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def split(rank: int, world: int) -> list[Any]:
    graphs: list[int] = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(1)
        return graph.forward

    ddp = DDP(Layers(), bucket_cap_mb=1)
    model = torch.compile(ddp, backend=count)
    x = torch.randn(2, 512, generator=torch.Generator().manual_seed(rank))
    for _ in range(3):
        ddp.zero_grad()
        model(x).pow(2).mean().backward()
    return [len(graphs), len(ddp.stats()["buckets"])]


def test_a_compiled_module_is_split_where_buckets_end() -> None:
    """So that gradients come while the backward goes on; one graph would bring them all at its end."""
    for graphs, buckets in run(2, split):
        assert graphs == buckets == 4


def recompiled(rank: int, world: int) -> int:
    """Return the number of steps of a compiled module; after the first one nothing may be compiled again."""
    ddp, made = DDP(nn.Sequential(Layers(), nn.BatchNorm1d(512))), 0
    model = torch.compile(ddp, backend="eager")
    for step in range(12):
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            model(torch.randn(2, 512)).pow(2).mean().backward()
            ddp.zero_grad()
            made += 1
    return made


def test_nothing_of_the_wrapper_is_compiled_again_in_later_steps() -> None:
    assert run(2, recompiled) == [12, 12]


def compiled_in_worlds(rank: int, world: int, inner: bool) -> tuple[int, int]:
    """Graphs that were compiled in the first world, and in the two after it: the world shrinks, then grows while the old one is used."""
    graphs: list[int] = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(1)
        return graph.forward

    def compiled(module: nn.Module) -> nn.Module:
        made: nn.Module = torch.compile(module, backend=count)  # type: ignore[assignment]
        return made

    ddp = DDP(compiled(Layers()) if inner else Layers())
    model = ddp if inner else compiled(ddp)

    def train(steps: int) -> None:
        for step in range(steps):
            ddp.zero_grad()
            model(torch.randn(2, 512, generator=torch.Generator().manual_seed(10 * step + rank))).pow(2).mean().backward()

    train(7)
    first = len(graphs)
    ddp.set_group([dist.new_group([0]), dist.new_group([1])][rank])
    train(4)
    WorldSwitch(ddp).hold_plan(True)
    group = dist.group.WORLD
    assert group is not None
    WorldSwitch(ddp).enter(WorldSwitch(ddp).prepare(group))
    WorldSwitch(ddp).hold_plan(False)
    train(4)
    return first, len(graphs) - first


@pytest.mark.parametrize("inner", [False, True])
def test_nothing_is_compiled_again_when_the_world_changes(inner: bool) -> None:
    for first, later in run(2, compiled_in_worlds, inner):
        assert first > 0 and later == 0


# -- parameters on several devices -------------------------------------------------------------------------------------


class OnTwoDevices(nn.Module):
    """Stands for a module that is partly on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.here = nn.Linear(2, 2)
        self.there = nn.Linear(2, 2, device="meta")


def on_two_devices(rank: int, world: int) -> tuple[str, str, str]:
    ddp = DDP(OnTwoDevices(), init_sync=False)
    group = dist.new_group([0, 1])
    assert group is not None
    following = WorldSwitch(ddp).prepare(group)
    with pytest.raises(TrainError) as error:
        DDP(OnTwoDevices(), init_sync=False, transport="shared memory")
    return type(ddp._reducer.world.transport).__name__, type(following.transport).__name__, str(error.value)


def test_shared_memory_is_for_parameters_on_one_device_in_each_world() -> None:
    refused = "shared memory is for parameters on one device, not on cpu, meta"
    assert run(2, on_two_devices) == [("GroupTransport", "GroupTransport", refused)] * 2


# -- groups, replicas --------------------------------------------------------------------------------------------------


def regrouped(rank: int, world: int) -> list[bool]:
    """The world shrinks to two ranks and grows to three again; a rank that was away comes with other parameters."""
    two = dist.new_group([0, 2])
    ddp, found = DDP(make()), []
    learn(ddp, rank)
    if rank != 1:
        ddp.set_group(two)
        learn(ddp, rank)
        ddp(batch(0, rank)).pow(2).mean().backward()
        found.append(close(grads(ddp.module), alone(ddp.module, [(1, batch(0, r)) for r in (0, 2)])))
    else:
        with torch.no_grad():
            for p in ddp.parameters():
                p.zero_()
    ddp.set_group(dist.group.WORLD)
    learn(ddp, rank)
    ddp(batch(1, rank)).pow(2).mean().backward()
    found.append(close(grads(ddp.module), alone(ddp.module, [(1, batch(1, r)) for r in range(world)])))
    ddp.check_replicas()
    return [*found, any(p.detach().abs().sum() > 0 for p in ddp.parameters())]


def test_a_living_module_changes_its_world() -> None:
    assert all(map(all, run(3, regrouped)))


def drifted(rank: int, world: int, where: int) -> str:
    ddp = DDP(make(), check_replicas_every=3)
    for step in range(3):
        if rank == 1 and step == 2:
            with torch.no_grad():
                param = list(ddp.parameters())[where]
                param.view(-1)[0] = torch.nextafter(param.view(-1)[0], torch.tensor(9.0))  # one bit of one weight
        ddp.zero_grad()
        try:
            ddp(batch(step, rank)).pow(2).mean().backward()
        except Diverged as error:
            return f"{step}: {error}"
    return ""


@pytest.mark.parametrize(("where", "name"), [(0, "0.weight"), (5, "4.bias")])
def test_replicas_that_drift_apart_are_found_and_named(where: int, name: str) -> None:
    for text in run(3, drifted, where):
        assert text.startswith("2: ") and f"{name}: on rank 1 it is not what the others have" in text


def drifted_gradually(rank: int, world: int, where: int, element: int) -> tuple[list[int], str]:
    """The elements that were compared in each step, and the error."""
    compared: list[int] = []

    def verify(names: Any, parts: Any, *rest: Any) -> None:
        compared.append(sum(len(part) for bucket in parts for part in bucket))
        verify_replicas(names, parts, *rest)

    replica_check.verify_replicas = verify  # type: ignore[attr-defined]
    replica_check.LEAST, replica_check.FLOW = 120, 0  # thirty elements
    ddp = DDP(make())
    ddp.check_replicas(gradually=True)
    if rank == 1 and where >= 0:
        with torch.no_grad():
            list(ddp.parameters())[where].view(-1)[element] += 1.0
    for step in range(9):
        ddp.zero_grad()
        try:
            ddp(batch(step, rank)).pow(2).mean().backward()
        except Diverged as error:
            return compared, str(error)
    return compared, ""


def test_replicas_are_compared_gradually_each_element_once() -> None:
    every = sum(p.numel() for p in make().parameters())
    for compared, error in run(2, drifted_gradually, -1, 0):
        assert error == "" and sum(compared) == every and max(compared) == 30 and len(compared) == -(-every // 30)


@pytest.mark.parametrize(("where", "element", "name"), [(0, 0, "0.weight"), (2, -1, "2.weight"), (5, -1, "4.bias")])
def test_a_gradual_comparison_finds_and_names_what_differs(where: int, element: int, name: str) -> None:
    for compared, error in run(2, drifted_gradually, where, element):
        assert f" {name}: " in error, (compared, error)


def cancelling(rank: int, world: int) -> bool:
    """One weight is a bit more, another one a bit less: their plain sum stays."""
    ddp = DDP(make(), check_replicas_every=0)
    if rank == 1:
        bits = next(ddp.parameters()).detach().view(-1).view(torch.int32)
        bits[0] += 1
        bits[1] -= 1
    try:
        ddp.check_replicas()
    except Diverged:
        return True
    return False


def test_two_changes_that_cancel_in_a_sum_are_found() -> None:
    assert run(2, cancelling) == [True, True]


def requests(rank: int, world: int) -> list[Any]:
    ddp, told = DDP(make()), []
    for step in range(4):
        if step == 1 and rank == 1:
            ddp.request("checkpoint")
        if step == 2:
            ddp.request("drain")
        ddp.zero_grad()
        ddp(batch(step, rank)).pow(2).mean().backward()
        told.append(sorted(ddp.agreement.requests))
    return told


def test_a_request_of_one_rank_is_heard_by_all_in_the_same_step() -> None:
    assert run(2, requests) == [[[], ["checkpoint"], ["drain"], []]] * 2


def figures(rank: int, world: int, path: str) -> list[Any]:
    ddp = DDP(make(), bucket_cap_mb=0.0001)
    learn(ddp, rank)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ddp(batch(0, rank)).pow(2).mean().backward()
    profile.export_chrome_trace(f"{path}/{rank}.json")
    stats = ddp.stats()
    json.dumps(stats)
    return [
        stats["bytes"],
        len(stats["buckets"]),
        stats["steps"],
        len(stats["seconds_by_rank"]),
        stats["forward"] > 0,
        stats["exposed"] > 0,
    ]


def test_figures_for_people_and_a_trace_range_for_each_bucket(tmp_path: Path) -> None:
    for rank, found in enumerate(run(2, figures, str(tmp_path))):
        assert found == [4 * sum(p.numel() for p in make().parameters()), found[1], 6, 2, True, True] and found[1] > 1
        events = json.loads((tmp_path / f"{rank}.json").read_text())["traceEvents"]
        assert {f"elastirun: bucket {at}" for at in range(found[1])} <= {event["name"] for event in events}


def without_numpy(rank: int, world: int) -> bool:
    import sys

    sys.modules["numpy"] = None  # type: ignore[assignment]
    ddp = DDP(make())
    learn(ddp, rank)
    ddp.check_replicas()
    ddp.sync_buffers()
    return True


def test_numpy_is_not_needed() -> None:
    assert run(2, without_numpy) == [True, True]


def pipelined(rank: int, world: int) -> list[bool]:
    """Two stages of a pipeline on two replicas: torch's schedule runs a backward per micro-batch, one reduction is enough."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    replica, number = mesh["replica"].get_local_rank(), mesh["stage"].get_local_rank()
    part = slice(0, 2) if number == 0 else slice(2, 5)
    module = make()[part]  # type: ignore[index]
    ddp = DDP(module, process_group=mesh["replica"].get_group())
    stage = PipelineStage(ddp, number, 2, torch.device("cpu"), group=mesh["stage"].get_group())
    schedule = Schedule1F1B(stage, 3, loss_fn=lambda out, target: (out - target).pow(2).mean())
    ddp.accumulate(3)
    found = []
    for step in range(6):
        module.zero_grad()
        x = torch.cat([batch(3 * step + micro, replica) for micro in range(3)])
        schedule.step(x) if number == 0 else schedule.step(target=torch.zeros(9, 1))
        reference = make()
        for r in range(2):
            for micro in range(3):
                (reference(batch(3 * step + micro, r)).pow(2).mean() / 6).backward()
        found.append(close(grads(module), [p.grad for p in reference[part].parameters()]))  # type: ignore[index]
    return [*found, ddp.stats()["steps"] == 6]


def test_a_stage_of_a_pipeline_reduces_once_per_step() -> None:
    assert run(4, pipelined) == [[True] * 7] * 4


def unfrozen(rank: int, world: int) -> list[Any]:
    """What a module knows outlives that other parameters are trained: the step, the samples to come, the phase of an accumulation."""
    module = make()
    module[0].requires_grad_(False)  # type: ignore[index]
    ddp, steps = DDP(module), []
    for at, x in enumerate(ddp.batches([batch(step, rank) for step in range(6)])):
        module[0].requires_grad_(at != 0)  # type: ignore[index]
        ddp(x).pow(2).mean().backward()
        steps.append(ddp.agreement.step)
    ddp.accumulate(2)
    for frozen in (False, True, False, False):
        module[0].requires_grad_(not frozen)  # type: ignore[index]
        ddp(batch(0, rank)).pow(2).mean().backward()
        steps.append(ddp.agreement.step)
    return steps


def test_freezing_does_not_begin_anew() -> None:
    assert run(2, unfrozen) == [[1, 2, 3, 4, 5, 6, 6, 7, 7, 8]] * 2


class Table(nn.Module):
    """Nothing but a sparse parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(5, 2, sparse=True)

    def forward(self, used: bool) -> Tensor:
        out: Tensor = self.rows(torch.tensor([1])) if used else torch.ones(1, requires_grad=True) * 1
        return out.sum()


def sparsely(rank: int, world: int) -> list[Any]:
    module, found = Table(), []
    ddp = DDP(module, mean_over="users", check_finite=True, check_replicas_every=2)
    for step in range(4):
        ddp.zero_grad()
        (ddp(step != 3 or rank == 0) * (float("inf") if step == 2 and rank == 1 else 1.0)).backward()
        assert module.rows.weight.grad is not None
        found.append((ddp.agreement.not_finite, module.rows.weight.grad.to_dense()[1, 0].item()))
    ddp.zero_grad()
    with ddp.no_sync():
        (ddp(True) * (float("nan") if rank == 1 else 1.0)).backward()
    ddp.set_samples(1 - rank)  # rank 1 has no data: not even a NaN
    ddp(True).backward()
    assert module.rows.weight.grad is not None
    found.append((ddp.agreement.not_finite, module.rows.weight.grad.to_dense()[1, 0].item()))
    with torch.no_grad():
        module.rows.weight[3] += rank
    with pytest.raises(Diverged, match=r"rows\.weight"):
        ddp.check_replicas()
    return found


def test_sparse_parameters_are_looked_at_like_others() -> None:
    assert run(2, sparsely) == [[((), 1.0), ((), 1.0), ((1,), float("inf")), ((), 1.0), ((), 2.0)]] * 2


def wrapped_often(rank: int, world: int) -> int:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    DDP(make(), transport="shared memory")
    before = descriptors()
    for _ in range(5):
        DDP(make(), transport="shared memory")
    return descriptors() - before


def test_wrappers_leave_no_descriptors() -> None:
    assert run(2, wrapped_often) == [0, 0]


def test_who_computes_much_longer_than_the_median_is_named() -> None:
    alike = (3.0, 3.0, 3.0, 3.0)
    assert stragglers((1.0, 1.1, 1.0, 2.5), alike) == {3: 2.5}
    assert stragglers((1.0, 1.5), alike[:2]) == {1: 1.5}
    assert stragglers((1.0, 1.1), alike[:2]) == stragglers((2.0,), alike[:1]) == stragglers((0.0, 0.0), alike[:2]) == {}
    assert stragglers((1.0, 1.0, 1.0, 1.0), (4.0, 4.0, 4.0, 2.0)) == {3: 1.6}, "as long for half of the work"
    assert stragglers((1.0, 1.0, 1.0, 0.6), (4.0, 4.0, 4.0, 2.0)) == {}, "a part of a step is the same for less work"
    assert stragglers((1.0, 1.1, 1.0, 2.5), (4.0, 4.0, 4.0, 10.0)) == stragglers((0.1, 0.1), (0.0, 0.0)) == {}
    assert stragglers((1.0, 9.0), (4.0, 0.0)) == {}, "a rank without data"

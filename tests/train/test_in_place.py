"""Our class in the place of torch's: what scripts and frameworks ask of torch's class gives the same with ours."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.optim.swa_utils import AveragedModel

from elastirun.train import DistributedDataParallel as DDP
from elastirun.train import TrainError
from elastirun.train.ddp import torch_names
from tests.support.worlds import run
from tests.train.test_ddp import WIDTH, batch, close, grads, make
from tests.train.test_ddp import alone as alone_grads

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
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict  # a second to import

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
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

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


# -- uneven inputs -----------------------------------------------------------------------------------------------------


def uneven(rank: int, world: int, wrap: Wrap, **how: Any) -> list[Any]:
    """Ranks with 2, 5 and 4 batches."""
    ddp = wrap(nn.Sequential(make(), nn.Linear(1, 1)), forward_sync_buffers=True)
    ddp.register_buffer("count", torch.zeros(1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    found: list[Any] = []
    for context in (ddp.join(**how), Join([ddp], **how)):
        with context:
            for step in range((2, 5, 4)[rank]):
                ddp(batch(step, rank)).pow(2).mean().backward()
                found.append([param.grad.norm().item() for param in ddp.parameters()])
                optimizer.step()
                optimizer.zero_grad()
        found.append(weights(ddp))
    train(ddp, rank, 2)
    return [*found, weights(ddp)]


def uneven_mean_over_the_rest(rank: int, world: int, wrap: Wrap) -> list[Any]:
    return uneven(rank, world, wrap, divide_by_initial_world_size=False)


def uneven_normalized(rank: int, world: int, wrap: Wrap) -> list[Any]:
    """The buffers are those of the last rank that has inputs."""
    ddp = wrap(Outer(), forward_sync_buffers=True)
    with ddp.join():
        train(ddp, rank, (2, 4, 3)[rank])
    return weights(ddp)


def uneven_accumulated(rank: int, world: int, wrap: Wrap) -> list[Any]:
    ddp, optimizer = wrap(net := make()), torch.optim.SGD(net.parameters(), lr=0.1)
    with ddp.join():
        for step in range((2, 6, 4)[rank]):
            if step % 2 == 0:
                with ddp.no_sync():
                    ddp(batch(step, rank)).pow(2).mean().backward()
            else:
                ddp(batch(step, rank)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return weights(net)


def uneven_and_over(rank: int, world: int, wrap: Wrap) -> str:
    ddp = wrap(make())
    try:
        with ddp.join(throw_on_early_termination=True):
            train(ddp, rank, 2 + rank)
    except RuntimeError as error:
        return str(error)
    return ""


# -- copies ------------------------------------------------------------------------------------------------------------


def copied(rank: int, world: int, wrap: Wrap) -> list[Any]:
    ddp = wrap(make())
    train(ddp, rank, 2)
    averaged = AveragedModel(ddp, use_buffers=True)
    saved = io.BytesIO()
    torch.save(ddp, saved)
    saved.seek(0)
    copies = [copy.deepcopy(ddp), torch.load(saved, weights_only=False)]
    if rank == 0:
        for one in copies:
            one.eval()
            one(batch(0, rank))  # on one rank alone
            torch.autograd.grad(one(batch(0, rank)).sum(), list(one.parameters()))
            one.state_dict()
            one.train()
        teacher = copy.deepcopy(ddp).requires_grad_(False)
        teacher(batch(0, rank))
    for step in range(2):
        train(ddp, rank, 1, 2 + step)
        averaged.update_parameters(ddp)
        for one in copies:
            train(one, rank, 1, 4 + step)
    found = [weights(one) for one in (ddp, averaged.module, *copies)]
    try:
        copy.deepcopy(wrap(make(), process_group=dist.new_group()))
    except RuntimeError as error:
        found.append([str(error)])  # type: ignore[list-item]
    return found


# -- names -------------------------------------------------------------------------------------------------------------


def attributes(rank: int, world: int, wrap: Wrap) -> list[Any]:
    """As seen by frameworks; with 20 arguments by position."""
    module = Outer()
    TORCHS._set_params_and_buffers_to_ignore_for_model(module, ["norm.running_mean"])
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))  # type: ignore[attr-defined]
    places = (None, None, 0, None, True, None, 1, True, False, True, True, None, None, None, mesh, False, None, True, True)
    ddp, found = wrap(module, *places), []
    names = "device device_ids output_device dim find_unused_parameters static_graph gradient_as_bucket_view device_type"
    more = "parameters_to_ignore broadcast_buffers forward_sync_buffers require_forward_param_sync is_multi_device_module join_device"
    found += [getattr(ddp, name) for name in f"{names} {more} mixed_precision".split()]
    found += [ddp.process_group is ddp.join_process_group, ddp.process_group == mesh.get_group(), ddp._distributed_rank]
    found += [ddp.will_sync_module_buffers(), sorted(ddp.named_module_buffers), len(ddp.modules_buffers)]
    found += [ddp.require_backward_grad_sync, isinstance(ddp, TORCHS)]
    with ddp.no_sync():
        found.append(ddp.require_backward_grad_sync)
    ddp._set_static_graph()
    ddp._set_ddp_runtime_logging_sample_rate(1)
    ddp._check_reducer_finalized()
    train(ddp, rank, 2)
    data = ddp._get_ddp_logging_data()
    keys = "module_name world_size rank backend_name device_ids output_device broadcast_buffers bucket_cap_bytes find_unused_parameters"
    more = "gradient_as_bucket_view static_graph num_parameter_tensors total_parameter_size_bytes is_multi_device_module has_sync_bn"
    return [*found, {key: data[key] for key in f"{keys} {more}".split()}]


def within_the_forward(rank: int, world: int, wrap: Wrap) -> list[Any]:
    """As Lightning's manual optimization does: the backward runs within the wrapper's forward."""

    class Manual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make()

        def forward(self, x: Tensor) -> None:
            loss = self.net(x).pow(2).mean()
            ddp.reducer._rebuild_buckets()
            ddp.reducer.prepare_for_backward([])
            loss.backward()
            ddp.require_backward_grad_sync = False

    module = Manual()
    ddp, optimizer = wrap(module), torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        ddp(batch(step, rank))
        ddp.require_backward_grad_sync = True
        optimizer.step()
    return weights(module)


def late_decision(rank: int, world: int, wrap: Wrap) -> list[Any]:
    """As accelerate's ``trigger_sync_in_backward`` and torch's pipelining do: forwards within no_sync(), the last backward reduces."""
    ddp, optimizer = wrap(net := make()), torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        with ddp.no_sync():
            losses = [ddp(batch(3 * step + at, rank)).pow(2).mean() for at in range(2)]
            losses[0].backward()
            ddp.require_backward_grad_sync = True
            ddp.reducer.prepare_for_backward([losses[1]])
            losses[1].backward()
        optimizer.step()
    return [ddp.require_backward_grad_sync, weights(net)]


def delayed(rank: int, world: int, wrap: Wrap) -> list[Any]:
    net = make()
    named = list(net.named_parameters())
    how = {"delay_all_reduce_named_params": named[4:], "param_to_hook_all_reduce": named[0][1]}
    ddp = wrap(net, **({} if wrap is TORCHS else how))  # torch does not wait for that reduction, so its weights are not always these
    train(ddp, rank, 3)
    try:
        wrap(make(), delay_all_reduce_named_params=named)
    except (ValueError, RuntimeError) as error:
        return [weights(net), str(error)]
    return []


def kept_buffers(rank: int, world: int, wrap: Wrap) -> list[float]:
    found = []
    for how in ({"broadcast_buffers": False}, {"broadcast_buffers": False, "forward_sync_buffers": False}):
        module = Outer()
        module.seen.fill_(rank)
        found.append(wrap(module, **how).module.seen.item())
    return found


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + x.sum().detach().abs()  # another tensor each time
        out: Tensor = self.net(x) + self.count
        return out


def buffer_hook(rank: int, world: int, wrap: Wrap) -> list[Any]:
    def add(state: Any, buffers: dict[str, Tensor]) -> list[Any]:
        return [dist.all_reduce(buffer, group=state, async_op=True).get_future() for buffer in buffers.values()]  # type: ignore[union-attr]

    ddp = wrap(Counting())
    ddp._register_buffer_comm_hook(ddp.process_group, add)
    train(ddp, rank, 3)
    return weights(ddp)


def replaced_buffers(rank: int, world: int, wrap: Wrap) -> list[Any]:
    ddp = wrap(Counting(), forward_sync_buffers=True)
    train(ddp, rank, 3)
    return weights(ddp)


def other_hooks(rank: int, world: int, wrap: Wrap) -> list[Any]:
    ddp = wrap(make())
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)  # type: ignore[attr-defined]
    train(ddp, rank, 2)
    fused = wrap(make())
    fused._register_fused_optim(torch.optim.SGD, 0.1)
    for step in range(3):
        fused(batch(step, rank)).pow(2).mean().backward()
        fused.zero_grad()
    ddp._update_process_group(dist.new_group())
    train(ddp, rank, 1)
    return [weights(ddp), weights(fused)]


def tensor_parallel(rank: int, world: int, wrap: Wrap) -> list[Any]:
    """A module whose parameters are DTensors on another dimension of the mesh."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "model"))  # type: ignore[attr-defined]
    net = nn.Linear(WIDTH, WIDTH)
    for name, param in list(net.named_parameters()):
        net.register_parameter(name, nn.Parameter(distribute_tensor(param.detach(), mesh["model"], [Shard(0)])))
    ddp = wrap(net, device_mesh=mesh["data"])
    params = list(ddp.parameters())  # torch takes them out of the module in the forward
    for step in range(2):
        ddp(DTensor.from_local(batch(step, rank), mesh["model"])).to_local().pow(2).mean().backward()
    return [[param.shape, param.grad.norm().item()] for param in params]


# -- in the place of torch's -------------------------------------------------------------------------------------------


class Looks(nn.Module):
    """Notes which module torch.compile would find in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.found = make(), []

    def forward(self, x: Tensor) -> Tensor:
        self.found += [owner._get_active_ddp_module() for owner in (TORCHS, DDP, nn.parallel.distributed.DistributedDataParallel)]
        out: Tensor = self.net(x)
        return out


def put_in_place(rank: int, world: int) -> list[Any]:
    before = TORCHS(Looks())
    nn.parallel.DistributedDataParallel = nn.parallel.distributed.DistributedDataParallel = DDP  # type: ignore[misc]
    ours, torchs = nn.parallel.DistributedDataParallel(Looks()), before
    for _ in range(2):
        for ddp in (torchs, ours):
            ddp(batch(0, rank)).sum().backward()
    outside = [owner._get_active_ddp_module() for owner in (TORCHS, DDP)]
    again = importlib.reload(torch_names)  # as if it was imported after it had been put in place
    return [[one is ours for one in ours.module.found], outside, again.torchs is TORCHS]


def test_it_is_found_where_it_was_put_in_the_place_of_torchs() -> None:
    assert run(2, put_in_place) == [[[True] * 6, [None, None], True]] * 2


def pipelined(rank: int, world: int) -> list[bool]:
    """A stage of torch's pipelining, which looks at the type: it reduces in the last backward of a step only."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    alone = [dist.new_group([one]) for one in range(world)][rank]
    ddp = DDP(net := make())
    stage = PipelineStage(ddp, 0, 1, torch.device("cpu"), group=alone)
    found = []
    for number, schedule in enumerate((ScheduleGPipe, Schedule1F1B)):
        steps = schedule(stage, 4, loss_fn=lambda output, _: output.pow(2).mean())
        for step in range(5):
            ddp.zero_grad()
            steps.step(batch(step, rank, 8), target=torch.zeros(8, 1))
            found.append(close(grads(net), alone_grads(net, [(1, batch(step, one, 8)) for one in range(world)])))
            found.append(ddp.stats()["steps"] == 5 * number + step + 1)
    return found


def test_a_stage_of_torchs_pipelining_reduces_once_per_step() -> None:
    assert run(2, pipelined) == [[True] * 20] * 2


def test_it_has_all_that_torchs_class_has() -> None:
    """And inherits nothing that uses torch's reducer."""
    theirs, ours = (list(inspect.signature(one.__init__).parameters.values()) for one in (TORCHS, DDP))
    assert [(p.name, p.kind) for p in theirs] == [(p.name, p.kind) for p in ours[: len(theirs)]]
    assert all(hasattr(DDP, name) for name in dir(TORCHS))
    for name, value in vars(TORCHS).items():
        code = getattr(inspect.unwrap(getattr(value, "fget", None) or getattr(value, "__func__", value)), "__code__", None)
        if inspect.getattr_static(DDP, name) is value and code is not None and name != "_log_and_throw":
            assert not {"reducer", "logger"} & set(code.co_names) - PROVIDED.get(name, set()), name


PROVIDED = {"_sync_module_buffers": {"reducer"}}  # our ``reducer`` has what it calls


def test_the_page_tells_of_all_that_torch_documents() -> None:
    page = (Path(__file__).parents[2] / "docs" / "ddp.md").read_text()
    public = [name for name in vars(TORCHS) if not name.startswith("_") and name != "broadcast_buffers"]
    arguments = [name for name in inspect.signature(TORCHS).parameters if name != "module"]
    assert [name for name in (*public, *arguments) if f"`{name}" not in page] == []


def refusals(rank: int, world: int) -> list[str]:
    """Errors that have nothing to do with another rank do not say so."""
    from torch.distributed.tensor import distribute_tensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))  # type: ignore[attr-defined]
    sharded = nn.Linear(WIDTH, WIDTH)
    sharded.weight = nn.Parameter(distribute_tensor(sharded.weight.detach(), mesh))
    wrong = nn.Linear(WIDTH, WIDTH)
    wrong.register_buffer("bits", torch.zeros(4, dtype=torch.float8_e4m3fn))  # gloo cannot send it
    told = []
    for how in (
        lambda: DDP(sharded),
        lambda: DDP(wrong),
        lambda: DDP(make(), mixed_precision=1),
        lambda: DDP(make(), device_mesh=mesh, process_group=dist.group.WORLD),
        lambda: DDP(make())._ddp_init_helper(),
    ):
        try:
            how()
        except TrainError as error:
            told.append(str(error))
    return told


def test_refusals_are_true() -> None:
    for told in run(2, refusals):
        assert len(told) == 5 and not any("peer" in text or "\n" in text for text in told), told
        assert told[0].startswith("weight is a DTensor") and "_ddp_init_helper() is a part of torch's reducer" in told[-1]


# -- beside torch's class ----------------------------------------------------------------------------------------------


def beside(rank: int, world: int, case: Callable[..., Any], *wraps: Wrap) -> list[Any]:
    """What ``case`` returns with torch's class, with ours, and with ours on the group."""
    found = []
    for wrap in wraps or (TORCHS, DDP, on_group):
        torch.manual_seed(0)
        found.append(case(rank, world, wrap))
    return found


CASES: list[tuple[Callable[..., Any], int]] = [
    *((names, 1), (resaved, 2), (uneven, 2), (uneven, 3), (uneven_mean_over_the_rest, 3), (uneven_normalized, 3), (uneven_accumulated, 3)),
    *((uneven_and_over, 2), (copied, 2), (attributes, 2), (within_the_forward, 2), (late_decision, 2), (delayed, 2), (kept_buffers, 2)),
    *((buffer_hook, 2), (replaced_buffers, 2), (other_hooks, 2), (tensor_parallel, 2)),
]


@pytest.mark.daily(3)
@pytest.mark.parametrize(("case", "world"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_the_same_as_with_torchs_class(case: Callable[..., Any], world: int) -> None:
    for theirs, *ours in run(world, beside, case):
        for mine in ours:
            assert mine == pytest.approx(theirs, rel=1e-5) if isinstance(theirs, float) else close_to(mine, theirs)


def close_to(mine: Any, theirs: Any) -> bool:
    if isinstance(theirs, list):
        return len(mine) == len(theirs) and all(map(close_to, mine, theirs))
    return bool(mine == pytest.approx(theirs, rel=1e-4, abs=1e-5) if isinstance(theirs, float) else mine == theirs)

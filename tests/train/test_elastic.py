"""Live elasticity: cutting a group, copying a state, the loop in one world, and the rules by which ranks agree."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

from elastirun.agent.failures.classify import shows_own_failure
from elastirun.errors import CheckpointError
from elastirun.train import (
    Checkpointer,
    DistributedDataParallel,
    Diverged,
    ElasticDataLoader,
    ModelMismatch,
    ReductionFailed,
    TrainError,
    TrainState,
    elastic,
)
from elastirun.train.ddp.world_switch import WorldSwitch
from elastirun.train.errors import WrongUse
from elastirun.train.groups import process_groups, rank_prefix
from elastirun.train.groups.connections import _sockets, live_sockets
from elastirun.train.live import world_change
from elastirun.train.live.live_round import LiveRound
from elastirun.train.live.phases import Fact, Phase, PhaseEvent
from elastirun.train.live.start import check
from elastirun.train.live.state_copy import copy_state
from elastirun.train.live.step_snapshot import Rehearsal, StepSnapshot
from elastirun.train.live.world_change import WorldChange
from elastirun.train.live.world_checkpoints import WorldCheckpoints
from elastirun.train.reduction.control_words import ADMIT, SWITCH, WHOLE
from elastirun.worker.live_messages import VARIABLE
from elastirun.worker.live_worlds import LiveWorld
from tests.support.cluster import free_port
from tests.support.until import PATIENCE
from tests.support.worlds import run

SAMPLES, BATCH = 40, 8


class Numbers(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.full((4,), float(index))


def made(seed: int, **loading: Any) -> tuple[TrainState, DistributedDataParallel]:
    """A state with a module, an optimizer with a state of its own, a scheduler and a loader."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(nn.Linear(4, 2), **loading)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = ElasticDataLoader(Numbers(), global_batch_size=BATCH)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return TrainState(model=model, optimizer=optimizer, scheduler=scheduler, data=loader), model


def step(state: TrainState, model: DistributedDataParallel, batch: Any) -> list[int]:
    """One step as a script makes it; the samples of this rank."""
    state["optimizer"].zero_grad()
    model(batch[1]).square().mean().backward()
    state["optimizer"].step()
    state["scheduler"].step()
    return batch[0].tolist()


def values(state: TrainState) -> dict[str, Any]:
    """All that two ranks must have alike."""
    optimizer, loader, scheduler = state["optimizer"].state_dict(), state["data"].state_dict(), state["scheduler"].state_dict()
    found = [value for entry in optimizer["state"].values() for value in entry.values()]
    tensors = [*state["model"].parameters(), *found]
    return {"tensors": [t.detach().tolist() for t in tensors], "groups": optimizer["param_groups"], "data": loader, "rate": scheduler}


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, "RANK"):
        monkeypatch.delenv(name, raising=False)


def test_without_a_launcher_the_loop_is_a_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch)
    elastic.init_process_group()
    try:
        state, model = made(0)
        worlds: list[tuple[int, int]] = []
        training, seen = elastic.Elastic(state, on_change=lambda *world: worlds.append(world)), []
        while state["data"].epoch < 2:
            for batch in training.batches():
                seen += step(state, model, batch)
        assert sorted(seen) == sorted([*range(SAMPLES)] * 2)
        assert training.step == 2 * SAMPLES // BATCH and worlds == [(0, 1)]
    finally:
        dist.destroy_process_group()


class Stateful(torch.utils.data.DataLoader[Any]):
    """A loader that knows how far it is, such as torchdata's."""

    def state_dict(self) -> dict[str, Any]:
        return {}


def test_a_mesh_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIRUN_MESH", "dp=1")
    with pytest.raises(WrongUse, match="^a mesh .--mesh. has no live workers yet"):
        elastic.init_process_group()


def test_a_second_loader_with_a_position_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that does not count would not bring it back, nor set it for other ranks."""
    alone(monkeypatch)
    elastic.init_process_group()
    try:
        state, _ = made(0)
        state["layers"], state["more"] = nn.ModuleList(), Stateful(Numbers())
        with pytest.raises(WrongUse, match="^Elastic cannot bring back 'more', a loader with a position") as found:
            elastic.Elastic(state)
        assert "\n" not in str(found.value)
        del state["more"]
        elastic.Elastic(state)
    finally:
        dist.destroy_process_group()


def test_a_second_module_that_is_not_in_the_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its group ends with the first change of the world. A copy of the module, as an average has, reduces nothing."""
    alone(monkeypatch)
    elastic.init_process_group()
    try:
        state, model = made(0)
        second = DistributedDataParallel(nn.Linear(4, 2))
        elastic.Elastic(state)
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(WrongUse, match="^Elastic works with one DistributedDataParallel in a process"):
            elastic.Elastic(state)
        del second
        average = copy.deepcopy(model)
        check(model)
        assert average.training
    finally:
        dist.destroy_process_group()


def test_a_state_without_its_parts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch)
    elastic.init_process_group()
    try:
        state, _ = made(0)
        del state["data"]
        with pytest.raises(TrainError, match="ElasticDataLoader"):
            elastic.Elastic(state)
    finally:
        dist.destroy_process_group()


def test_an_agent_that_cannot_be_reached_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "elastirun-of-nobody")
    with pytest.raises(TrainError, match="elastirun-of-nobody"):
        elastic.init_process_group()


def test_a_step_in_the_backward_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch)
    elastic.init_process_group()
    try:
        state, model = made(0)
        model.step_in_backward(state["optimizer"])
        with pytest.raises(TrainError, match="step_in_backward"):
            elastic.Elastic(state)
    finally:
        dist.destroy_process_group()


def copied(rank: int, world: int) -> tuple[dict[str, Any], int]:
    state, model = made(rank, init_sync=False)
    group = dist.group.WORLD
    assert group is not None
    with model.no_sync():
        if rank == 1:
            for batch in [batch for _, batch in zip(range(2), state["data"], strict=False)]:
                step(state, model, batch)
            state.step = 2
    copy_state(state, 1, rank != 1, group)
    return values(state), state.step


def test_a_state_is_copied_whole() -> None:
    """Parameters, an optimizer's state that the others do not have yet, learning rate, position and step."""
    first, second, third = run(3, copied)
    assert first == second == third and first[1] == 2 and first[0]["data"]["consumed"] == 2 * BATCH


def cut(rank: int, world: int) -> str:
    """Rank 1 never comes to the reduction; rank 0 is cut off in a thread."""
    group = dist.group.WORLD
    assert group is not None
    live_sockets.begin()
    own = dist.new_group([0, 1])
    live_sockets.end()
    dist.barrier()
    if rank == 0:
        waits = threading.Timer(0.05, live_sockets.cut)
        waits.start()
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=own)
        waits.join()
    dist.barrier()  # the group that was there before still works
    return "ok"


def test_a_wait_for_a_peer_that_never_comes_is_cut_and_other_groups_go_on() -> None:
    assert run(2, cut) == ["ok", "ok"]


def interrupted(rank: int, world: int, transport: str) -> tuple[bool, bool, bool, bool]:
    """Rank 1 never comes to the last reduction; rank 0 is interrupted in a thread, and drops the step."""
    live_sockets.begin()
    state, model = made(0, transport=transport)
    live_sockets.end()
    WorldSwitch(model).drop_failed_steps()
    state["data"].set_world(0, 1)
    batch = next(iter(state["data"]))
    for _ in range(12):  # until nothing is learnt any more, and only gradients travel
        step(state, model, batch)
    before = [p.detach().clone() for p in model.parameters()]
    if rank == 0:

        def stop() -> None:
            live_sockets.cut()
            WorldSwitch(model).interrupt("a test")

        waits = threading.Timer(0.05, stop)
        waits.start()
        step(state, model, batch)
        waits.join()
    dist.barrier()  # until then rank 1 is there, and has closed nothing
    same = all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    none = all(p.grad is None for p in model.parameters()) or rank == 1
    still = True
    penalty = lambda: model.module.weight.sum().backward()  # noqa: E731
    for backward in (penalty, lambda: model(torch.ones(1, 4)).sum().backward(), penalty, model.skip) if rank == 0 else ():
        model.module.weight.grad = torch.ones(2, 4)
        backward()
        still = still and all(p.grad is None for p in model.parameters())
    return model.failed == (rank == 0), same, none, still


@pytest.mark.parametrize("transport", ["group", "shared memory"], ids=["group", "shared_memory"])
def test_a_step_whose_reduction_is_interrupted_changes_nothing(transport: str) -> None:
    """The backward returns, there is no gradient, the optimizer changes nothing, and so it is with what follows."""
    assert run(2, interrupted, transport) == [(True, True, True, True)] * 2


class Masked(nn.Module):
    """Has a buffer that is copied in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)
        self.register_buffer("mask", torch.ones(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs * self.mask)


def interrupted_in_the_forward(rank: int, world: int) -> tuple[bool, bool]:
    """Rank 0 never comes to the copy of the buffers; rank 1 is interrupted in a thread, and drops a step of two micro-batches."""
    live_sockets.begin()
    torch.manual_seed(0)
    model = DistributedDataParallel(Masked())
    live_sockets.end()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    WorldSwitch(model).drop_failed_steps()
    inputs, changed = torch.ones(1, 4), False
    for at in range(2):
        if at == 1 and rank == 0:
            break
        before = [p.detach().clone() for p in model.parameters()]
        if at == 1:
            waits = threading.Timer(0.05, live_sockets.cut)
            waits.start()
        optimizer.zero_grad()
        with model.no_sync():
            model(inputs).sum().backward()
        model(inputs).sum().backward()
        optimizer.step()
        changed = not all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    if rank == 1:
        waits.join()
    dist.barrier()  # until then rank 0 is there, and has closed nothing
    return model.failed, changed


def deep_copied(rank: int, world: int) -> bool:
    model = DistributedDataParallel(Masked())
    WorldSwitch(model).drop_failed_steps()
    frozen = copy.deepcopy(model).eval().requires_grad_(False)
    with torch.no_grad():
        return torch.equal(frozen(torch.ones(1, 4)), model(torch.ones(1, 4)))


def test_a_copy_of_a_live_model_can_be_used() -> None:
    assert run(1, deep_copied) == [True]


def test_a_step_whose_forward_loses_a_peer_changes_nothing() -> None:
    assert run(2, interrupted_in_the_forward) == [(False, True), (True, False)]


def left(rank: int, world: int) -> bool:
    """Rank 0 leaves its group after a reduction that was cut off."""
    gc.disable()
    before = len(_sockets())
    live_sockets.begin()
    state, model = made(0, transport="group")
    live_sockets.end()
    WorldSwitch(model).drop_failed_steps()
    state["data"].set_world(0, 1)
    batch = next(iter(state["data"]))
    dist.barrier()
    if rank == 0:
        waits = threading.Timer(0.05, live_sockets.cut)
        waits.start()
        step(state, model, batch)
        waits.join()
        assert model.failed and len(_sockets()) > before
        WorldSwitch(model).leave()
        before -= len(_sockets())
    dist.barrier()
    return rank == 1 or before == 0


def test_nothing_of_a_group_is_left_when_the_module_has_left_it() -> None:
    """Else its end, which takes some milliseconds, would come at any time, in the middle of a step."""
    assert run(2, left) == [True, True]


def concluded(rank: int, world: int) -> tuple[bool, bool]:
    """A peer is lost in what follows a reduction, when the gradients are there already."""
    state, model = made(0)
    WorldSwitch(model).drop_failed_steps()
    before = [p.detach().clone() for p in model.parameters()]

    def fail(*_: Any) -> bool:
        raise ReductionFailed("a test")

    model._reducer.conclusion.conclude = fail  # type: ignore[method-assign]
    step(state, model, next(iter(state["data"])))
    return model.failed, all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_gradients_that_are_there_when_a_peer_is_lost_are_dropped() -> None:
    assert run(1, concluded) == [(True, True)]


def joins(rank: int, world: int, port: int) -> bool:
    """Rank 0 could not make a group before, as a peer was lost."""
    dist.destroy_process_group()
    where = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in where.items()})
    c10d._world.group_count = 3 * (rank == 0)
    training = object.__new__(elastic.Elastic)
    training._model = SimpleNamespace(set_group=lambda init_sync: None)  # type: ignore[assignment]
    training._settle = lambda: None  # type: ignore[method-assign]
    training._live = None
    training._make_groups()
    dist.barrier()
    return dist.get_world_size() == world


def test_groups_are_made_by_the_same_names_after_one_that_could_not_be_made() -> None:
    assert run(2, joins, free_port()) == [True, True]


@pytest.mark.parametrize("over", [False, True])
def test_the_last_step_of_an_epoch_is_not_the_last_one_in_the_old_groups(over: bool) -> None:
    """Between two epochs all ranks of a world may meet, as for an evaluation. A new rank has only a part of the state then.

    If one step is left, all ranks say in it that they are done, and the new one is whole after it.
    """
    change, asked = object.__new__(WorldChange), list[str]()
    change._model = SimpleNamespace(agreement=SimpleNamespace(unanimous={SWITCH}), request=asked.append)  # type: ignore[assignment]
    change._stepped, change._error, change.world, change._prepared, change._work = 0.0, None, None, False, None
    switched: list[int] = []
    change._switch = switched.append  # type: ignore[method-assign]
    assert not change.after_step(1 - over) and (switched, asked) == (([], []) if over else ([1], [WHOLE]))


def test_no_rank_asks_for_the_switch_before_memory_for_the_state_was_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    change, asked = object.__new__(WorldChange), list[str]()
    model = SimpleNamespace(agreement=SimpleNamespace(unanimous=set()), request=asked.append, device=torch.device("cpu"), parameters=list)
    change._model, change._live = model, SimpleNamespace(rank=0, find_next=lambda: SimpleNamespace(ranks=[]))  # type: ignore[assignment]
    change._stepped, change._error, change.world, change._work, change._next = 0.0, None, None, None, None
    change._model_switch, change._prepared = SimpleNamespace(prepare=lambda default: None), False  # type: ignore[assignment]
    change._default_group = lambda world: None  # type: ignore[assignment,method-assign,return-value]
    monkeypatch.setattr(world_change, "offer", lambda *given: (change.after_step(9), list(asked)))
    change._prepare()
    assert change._offered[1] == [] and asked == [SWITCH] and change._error is None
    change.after_step(9)
    assert asked == [SWITCH, SWITCH]


def test_a_new_rank_that_does_not_fit_does_not_end_those_that_train() -> None:
    change = object.__new__(WorldChange)
    change._stepped, change._error = 0.0, ModelMismatch("a test")
    with pytest.raises(RuntimeError, match="a new rank cannot be taken in: a test") as raised:
        change.after_step(1)
    assert not isinstance(raised.value, TrainError)


def differs(rank: int, world: int, port: int) -> str:
    """What is said when the state of rank 1 is another one after a change of the world."""
    dist.destroy_process_group()
    where = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in where.items()})
    elastic.init_process_group()
    state, model = made(0)
    training = elastic.Elastic(state)
    with torch.no_grad():
        next(model.parameters())[0, rank] += 1.0
    try:
        for batch in training.batches():
            step(state, model, batch)
    except Diverged as error:
        return f"{training.step}: {error}"
    return ""


def test_replicas_are_compared_after_a_change_of_the_world() -> None:
    for told in run(2, differs, free_port()):
        assert told.startswith("0: the replicas are no longer the same: weight"), told


def saves(rank: int, world: int, port: int, folder: str) -> list[Any]:
    """Train one epoch of five steps, with a checkpoint at each third one, and save twice. Return the steps made, and what is published."""
    dist.destroy_process_group()
    where = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in where.items()})
    elastic.init_process_group()
    state, model = made(0)
    training, made_here = elastic.Elastic(state, lambda: Checkpointer(folder, every=3)), 0
    while state["data"].epoch < 1:
        for batch in training.batches():
            step(state, model, batch)
            made_here += 1
    found = []
    for _ in range(2):
        training.save()
        found.append(sorted(path.name for path in Path(folder).glob("step-*")))
    dist.barrier()
    assert training.checkpoints is not None
    training.checkpoints.close()
    return [made_here, *found]


def test_the_last_step_is_on_the_disk_when_save_returns_and_is_not_saved_again(tmp_path: Path) -> None:
    """The same command again, too, neither trains nor saves."""
    both = ["step-00000003", "step-00000005"]
    assert run(2, saves, free_port(), str(tmp_path)) == [[5, both, both]] * 2
    assert run(2, saves, free_port(), str(tmp_path)) == [[0, both, both]] * 2


def saving_loses_a_peer(whole: bool) -> list[str]:
    """Save in a round whose checkpoint is not published, as a peer is lost. Return what was done.

    ``whole``: this worker has a state in the next round, too.
    """
    done: list[str] = []

    def lose(limit: float) -> None:
        raise CheckpointError("not published")

    def checkpoints(name: str, wait: Callable[[float], None]) -> Any:
        return SimpleNamespace(restored=None, save=lambda step, state, now: done.append(f"{name} {step} {now}"), wait=wait)

    training = object.__new__(elastic.Elastic)

    def enter() -> None:
        training._checkpoints.current, training._round = checkpoints("second", lambda limit: None), 2
        training._phase = Phase.TRAINING if whole else Phase.JOINING

    training.state, training._live, training._phase = SimpleNamespace(step=7), SimpleNamespace(), Phase.TRAINING  # type: ignore[assignment]
    training._connection = SimpleNamespace(wait_until_asked=lambda *given: True, asked=False)  # type: ignore[assignment]
    training._model, training._round, training._settled = SimpleNamespace(failed=False), 1, 1  # type: ignore[assignment]
    training._checkpoints, training._leave_loop = WorldCheckpoints(training.state, None), lambda: None  # type: ignore[method-assign]
    training._checkpoints.current = checkpoints("first", lose)
    training._leave, training._wait_for_round = lambda: done.append("leaves"), enter  # type: ignore[assignment, method-assign]
    training.save()
    return done


def test_wrong_use_within_a_round_is_no_lost_peer() -> None:
    """The agent would be told of lost peers first, after ten seconds."""
    training = object.__new__(elastic.Elastic)
    training._phase = Phase.TRAINING
    training._connection = SimpleNamespace(wait_until_asked=lambda *given: pytest.fail("it asks"))  # type: ignore[assignment]

    def enters() -> None:
        raise WrongUse("a loader with scale= cannot go on in another world")

    training._publish = enters  # type: ignore[method-assign]
    with pytest.raises(WrongUse):
        training._happens(PhaseEvent.SAVES)


def test_a_save_that_loses_a_peer_is_made_in_the_next_round() -> None:
    assert saving_loses_a_peer(whole=True) == ["first 7 True", "leaves", "second 7 True"]


def test_a_worker_without_whom_the_others_have_gone_on_does_not_end_as_if_it_had_saved() -> None:
    with pytest.raises(TrainError, match="gone on without this one"):
        saving_loses_a_peer(whole=False)


def test_the_end_of_the_process_waits_for_the_threads_of_its_round() -> None:
    """A thread that is inside torch when the interpreter ends aborts the process, and the whole training would count as failed."""
    live = object.__new__(LiveRound)
    live._stopped, live._lock, live._threads = threading.Event(), threading.Lock(), []
    live._store, live._asked = SimpleNamespace(compare_set=lambda key, before, value: value), lambda: False
    looks = threading.Thread(target=lambda: (live._stopped.wait(), time.sleep(0.2)))
    live.start(looks)
    live._end_training()
    assert not looks.is_alive()


ENDS_A_GROUP = """
import os, threading, time
from elastirun.train.groups import process_groups

class Group:
    def __del__(self):
        ends.set()
        time.sleep(0.3)
        os.write(1, b"ended")

ends = threading.Event()
process_groups.end_beside([Group()])
ends.wait()
"""


def test_the_end_of_the_process_waits_for_the_end_of_a_group_that_is_under_way() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS_A_GROUP], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (0, "ended"), done.stderr


def asks(rank: int, world: int) -> tuple[list[str], bool]:
    """Rank 0 has asked for the next world of a round that then came to its end."""
    state, model = made(0)
    training = object.__new__(elastic.Elastic)
    training._model, training._settle = model, list  # type: ignore[method-assign]
    model.request(ADMIT)
    store = dist.HashStore()  # type: ignore[attr-defined]
    live = SimpleNamespace(
        rank=0, size=1, whole=False, present=LiveWorld(0, (0,)), store=lambda world: store, look_for_ready=lambda ask: None
    )
    live_sockets.begin()
    training._live = live  # type: ignore[assignment]
    training._make_groups()
    step(state, model, next(iter(state["data"])))
    return sorted(model.agreement.requests), model.failed


def comes_alone_again(rank: int, world: int) -> int:
    """A worker that had to leave a round before it had a state makes a step by itself, as before its first round."""
    state, model = made(0)
    training = object.__new__(elastic.Elastic)
    training._model = model
    dist.destroy_process_group()
    WorldSwitch(model).leave()
    training._be_alone()
    step(state, model, next(iter(state["data"])))
    return dist.get_world_size()


def test_who_has_left_a_round_without_a_state_is_alone_again() -> None:
    assert run(1, comes_alone_again) == [1]


def agree(rank: int, world: int) -> list[tuple[list[str], list[str]]]:
    """Rank 0 asks to switch in the first step, both ranks in the second one."""
    state, model = made(0)
    found = []
    for number, batch in zip(range(2), state["data"], strict=False):
        if rank <= number:
            model.request(SWITCH)
        step(state, model, batch)
        found.append((sorted(model.agreement.requests), sorted(model.agreement.unanimous)))
    return found


def test_ranks_know_what_one_asks_for_and_what_all_ask_for() -> None:
    assert run(2, agree) == [[(["switch"], []), (["switch"], ["switch"])]] * 2


def test_a_request_for_a_world_of_a_round_that_is_over_is_not_carried_into_the_next() -> None:
    assert run(1, asks) == [([], False)]


FAILS_LATE = """
import os
import torch.distributed as dist
from elastirun.train.groups import process_groups

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one of the script's own
for rank in range(3):
    os.environ["RANK"] = str(rank)
    dist.destroy_process_group()
    process_groups.init_default_group("gloo", dist.HashStore(), 0, 1, None)
raise ValueError("two\\n\\nlines: connection reset")
"""


def test_each_line_of_an_exception_has_one_prefix_with_the_rank_in_the_last_world() -> None:
    said = subprocess.run([sys.executable, "-c", FAILS_LATE], capture_output=True, text=True, timeout=PATIENCE).stderr.splitlines()
    assert said[-3:] == ["[rank2]: ValueError: two", "", "[rank2]: lines: connection reset"]
    assert said[0] == "[rank2]: Traceback (most recent call last):" and shows_own_failure(said, None)


def test_a_thousand_worlds_add_one_hook_for_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", print)
    monkeypatch.setattr(rank_prefix, "_installed", False)
    hooks = set()
    for _ in range(1000):
        with rank_prefix.one_prefix():
            pass
        hooks.add(sys.excepthook)
    assert len(hooks) == 1 and print not in hooks


def test_a_group_that_could_not_be_made_leaves_no_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", print)
    with pytest.raises(OSError, match="lost"), rank_prefix.one_prefix():
        sys.excepthook = repr  # torch's hook, which stays when the barrier behind it fails
        raise OSError("lost")
    assert sys.excepthook is print


def lonely(rank: int, world: int) -> list[float]:
    """Make a group whose other rank never comes, then one of this rank alone."""
    dist.destroy_process_group()
    begun = time.monotonic()
    with process_groups.connects_within(timedelta(seconds=0.5)):
        with pytest.raises(RuntimeError):
            process_groups.init_default_group("gloo", dist.HashStore(), 0, 2, None)  # type: ignore[attr-defined]
        took = time.monotonic() - begun
        c10d._world.group_count = 0
        process_groups.init_default_group("gloo", dist.HashStore(), 0, 1, timedelta(seconds=700))  # type: ignore[attr-defined]
    assert dist.group.WORLD is not None
    return [took, dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()]


def test_connections_of_a_group_are_not_waited_for_as_long_as_for_a_collective() -> None:
    [[took, timeout]] = run(1, lonely)
    assert took < PATIENCE and timeout == 700


def positions(rank: int, world: int) -> list[bool]:
    state, model = made(0)
    before = StepSnapshot(state, state["data"])
    batches = iter(state["data"])
    with model.no_sync():
        for at in range(3):
            batch = next(batches)
            step(state, model, batch)
            if at == 1:
                before.take()
                kept = values(state)
    before.restore()
    now = values(state)
    return [now["data"] == kept["data"], now["rate"] == kept["rate"], now["groups"] == kept["groups"]]


def test_a_dropped_step_moves_neither_loader_nor_scheduler() -> None:
    assert run(1, positions) == [[True, True, True]]


def test_what_a_script_does_between_two_epochs_is_not_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch)
    elastic.init_process_group()
    try:
        state, model = made(0)
        training = elastic.Elastic(state)
        for batch in training.batches():
            step(state, model, batch)
        state["scheduler"].step()
        now = state["scheduler"].last_epoch
        next(training.batches())
        training._before.restore()
        assert state["scheduler"].last_epoch == now and state["data"].epoch == 1
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("left", "failed", "same"), [(0, False, True), (0, True, False), (1, False, False)])
def test_what_comes_between_two_epochs_is_done_in_one_world(left: int, failed: bool, same: bool) -> None:
    """The others may be in an evaluation already, and wait for this rank there."""
    training = object.__new__(elastic.Elastic)
    said = SimpleNamespace(requests=())
    reducer = SimpleNamespace(completed=int(not failed))
    training._model = SimpleNamespace(failed=failed, _reducer=reducer, agreement=said)  # type: ignore[assignment]
    training._loader, training.state = SimpleNamespace(left=left, consumed=8), SimpleNamespace(step=1)  # type: ignore[assignment]
    training._before = SimpleNamespace(take=lambda: None, restore=lambda: None, others=[], changed=[], verify_groups=lambda: None)  # type: ignore[assignment]
    training._checkpoints, training._live = WorldCheckpoints(training.state, None), SimpleNamespace(size=2)  # type: ignore[assignment]
    training._connection, training._phase = SimpleNamespace(asked=True), Phase.TRAINING  # type: ignore[assignment]

    def enter() -> None:
        training._worlds += 1

    training._leave, training._wait_for_round = lambda: None, enter  # type: ignore[assignment, method-assign]
    assert training._end_step() is same


def weighed(rank: int, world: int) -> float:
    model = DistributedDataParallel(nn.Linear(4, 2))
    WorldSwitch(model).count_samples(rank == 0)
    model.set_samples(8)
    model(torch.ones(1, 4)).sum().backward()
    return model.agreement.samples


def test_a_rank_with_a_part_of_the_state_has_no_weight_whatever_the_script_says() -> None:
    assert run(2, weighed) == [8.0, 8.0]


def skipping(rank: int, world: int) -> list[list[float]]:
    """Rank 1 has no data in every other step. Rank 0's mask is another one in each."""
    model, found = DistributedDataParallel(Masked()), []
    for at in range(4):
        if rank == 0:
            model.module.mask.fill_(at)
        if at == 1:
            with torch.no_grad():
                model(torch.ones(1, 4))  # copies them for the step, too
        if rank == 1 and at % 2:
            model.skip()
        else:
            model(torch.ones(1, 4)).sum().backward()
        found.append(model.module.mask.tolist())
    return found


def test_a_rank_without_data_takes_part_in_the_copy_of_the_buffers() -> None:
    first, second = run(2, skipping)
    assert first == second == [[float(at)] * 4 for at in range(4)]


def test_a_hook_with_a_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch)
    elastic.init_process_group()
    try:
        state, model = made(0)
        model.register_comm_hook(dist.group.WORLD, lambda group, bucket: None)
        with pytest.raises(TrainError, match="communication hook with a state"):
            elastic.Elastic(state)
    finally:
        dist.destroy_process_group()


def test_learning_rates_that_are_tensors_and_schedulers_in_a_list_are_brought_back() -> None:
    rate = torch.tensor(1.0)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=rate)
    loader, warmup = ElasticDataLoader(Numbers(), global_batch_size=BATCH), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    position = StepSnapshot(TrainState(nn.Linear(1, 1), optimizer, data=loader, schedulers=[warmup]), loader)
    optimizer.step()
    warmup.step()
    position.restore()
    assert warmup.last_epoch == 0 and optimizer.param_groups[0]["lr"] is rate and rate.item() == 1.0


def test_every_scheduler_is_brought_back_and_other_parts_are_known_to_have_changed() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    loader = ElasticDataLoader(Numbers(), global_batch_size=BATCH)
    state = TrainState(nn.Linear(1, 1), optimizer, data=loader, warmup=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    position = StepSnapshot(state, loader)
    optimizer.step()
    state["warmup"].step()
    position.restore()
    assert (state["warmup"].last_epoch, optimizer.param_groups[0]["lr"], position.others) == (0, 1.0, [])
    state["average"] = nn.Linear(1, 1)
    assert StepSnapshot(state, loader).others == ["average"]


class Caching(nn.Module):
    """Has a buffer that grows in its forward, and one that is made there."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)
        self.register_buffer("cache", torch.zeros(0))
        self.register_buffer("made", None)
        self.register_buffer("kept", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.cache, self.made = torch.ones(len(inputs)), torch.ones(2)
        self.kept += 1
        result: torch.Tensor = self.inner(inputs)
        return result


def test_a_rehearsal_that_makes_buffers_is_undone_but_for_these() -> None:
    model = Caching()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = ElasticDataLoader(Numbers(), global_batch_size=BATCH)
    state = TrainState(model, optimizer, data=loader)
    before = [p.detach().clone() for p in model.parameters()]
    rehearsal = Rehearsal(state, model, loader)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    rehearsal.undo()
    model.inner.bias.requires_grad_(False)  # like the ranks that it was to join
    rehearsal.train_as_before()
    assert all(p.requires_grad for p in model.parameters())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert (len(model.cache), len(model.made), model.kept.item()) == (3, 2, 0.0)


def settling(rank: int, histories: list[tuple[int, ...]]) -> elastic.Elastic:
    """Return ranks that are to settle, whose state is of (round, step) ``histories[rank]``, after so many dropped steps that have left
    something in it.
    """
    for name in (VARIABLE, "RANK"):
        os.environ.pop(name, None)
    state, model = made(rank, init_sync=False)
    training = object.__new__(elastic.Elastic)
    training.state, training._model, training._loader = state, model, state["data"]
    training._checkpoints, training._on_change = WorldCheckpoints(state, None), lambda rank, world: None
    training._live = None
    training._before = StepSnapshot(state, state["data"])
    training._round, (training._settled, state.step, *tried) = 9, histories[rank]
    training._tried = sum(tried)
    with torch.no_grad():
        next(iter(model.parameters())).fill_(float(rank))
    return training


def settles(rank: int, world: int, histories: list[tuple[int, ...]]) -> tuple[dict[str, Any], int, int]:
    training = settling(rank, histories)
    assert not {Fact.BEHIND, Fact.AHEAD} & {training._settle()[1]}
    return values(training.state), training.state.step, round(float(next(iter(training._model.parameters()))[0, 0]))


def come(rank: int, world: int, settled: int, places: list[tuple[int, bool, int]]) -> tuple[str, float, int]:
    """Settle ranks that are at ``places``: the epoch, whether they are in ``save``, and for how many times they have been.

    Rank 2 has traces of a dropped step. Return what this rank finds out, whose state it has, and what counts against that.
    """
    training = settling(rank, [(settled, 7, int(r == 2)) for r in range(world)])
    epoch, training._saves, training._saves_done = places[rank]
    for _ in range(epoch):
        list(training._loader)
    assert training._loader.epoch == epoch
    _, fact = training._settle()
    return str(fact), next(iter(training._model.parameters()))[0, 0].item(), training._tried


@pytest.mark.parametrize(
    ("histories", "winner"),
    [
        (((0, 0), (0, 0), (0, 0)), 0),
        (((0, 0), (3, 10), (3, 11)), 2),
        (((3, 11), (3, 10), (0, 0)), 0),
        (((3, 90), (4, 11), (4, 10)), 1),
        (((0, 0), (0, 3), (0, 0)), 0),
        (((3, 10, 2), (3, 10, 1), (3, 9)), 1),
    ],
    ids=["new", "a_step_ahead", "a_new_rank", "an_older_history_does_not_count", "steps_without_a_state", "dropped_steps"],
)
def test_the_furthest_of_the_newest_round_wins(histories: tuple[tuple[int, ...], ...], winner: int) -> None:
    found = run(3, settles, list(histories))
    assert found[0] == found[1] == found[2]
    assert found[0][1:] == (histories[winner][1], winner)


@pytest.mark.parametrize(
    ("settled", "places", "expected"),
    [
        (3, [(0, False, 0), (0, False, 0), (1, False, 0)], [0, 1]),
        (3, [(1, True, 0), (1, True, 1), (1, False, 0)], [0, 1]),
        (3, [(1, False, 0), (0, False, 0), (1, True, 0)], [1, 2]),
        (3, [(1, True, 0), (1, True, 1), (1, True, 1)], [0]),
        (3, [(1, True, 0), (1, True, 0), (1, True, 0)], []),
        (0, [(1, False, 0), (0, False, 0), (0, True, 0)], []),
    ],
    ids=["an_older_epoch", "a_save", "an_older_epoch_than_that_of_a_save", "the_save_before", "all_save", "no_state"],
)
def test_who_has_not_come_as_far_in_the_script_as_others_is_late(
    settled: int, places: list[tuple[int, bool, int]], expected: list[int]
) -> None:
    """And has the state of the one that has come furthest, which counts for more, whatever has happened to it on the way."""
    found = run(3, come, settled, places)
    others = Fact.NEW if settled == 0 else Fact.AHEAD if expected else Fact(0)
    assert [fact for fact, _, _ in found] == [str(Fact.BEHIND if rank in expected else others) for rank in range(3)]
    states, tried = [state for _, state, _ in found], [against for *_, against in found]
    first = max(range(3), key=lambda rank: (places[rank][0], not places[rank][1], places[rank][2], -rank))
    assert {states[rank] for rank in expected} <= {float(first)}
    assert all(tried[rank] > max(against for other, against in enumerate(tried) if other not in expected) for rank in expected)


def late() -> tuple[elastic.Elastic, list[str]]:
    """Return a rank that is late, and what it does. The next time it enters a world all are there."""
    done: list[str] = []

    class Late(elastic.Elastic):
        _switch = SimpleNamespace(interrupt=lambda why: done.append("interrupted"))  # type: ignore[assignment]

    training = object.__new__(Late)
    training._before = SimpleNamespace(take=lambda with_others: done.append("notes"), restore=lambda: done.append("restores"))  # type: ignore[assignment]
    training._connection = SimpleNamespace(wait_until_asked=lambda *given: True, asked=False)  # type: ignore[assignment]
    training._live = SimpleNamespace(reconnect=lambda: None, repeat=lambda: done.append(f"meets, saves: {training._saves}"))  # type: ignore[assignment]
    training._phase, training._round, training._settled, training.state = Phase.MEETING, 1, 1, SimpleNamespace(step=1)  # type: ignore[assignment]
    training._make_groups = lambda: (PhaseEvent.AGREED, Fact(0))  # type: ignore[method-assign]
    training._begin = training._look_for_others = lambda: None  # type: ignore[method-assign, misc, assignment]
    training._leave = lambda: None  # type: ignore[method-assign]
    live_sockets.begin()
    training._happens(PhaseEvent.AGREED, Fact.BEHIND)
    return training, done


def test_what_comes_until_the_next_batch_does_not_count_for_one_who_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    cut: list[bool] = []
    monkeypatch.setattr(live_sockets, "cut", lambda: cut.append(True))
    training, done = late()
    assert (training._phase, training._worlds, cut, done) == (Phase.LATE, 1, [True], ["notes", "interrupted"])
    training._happens(PhaseEvent.COMES_BACK)
    training._happens(PhaseEvent.COMES_BACK)
    assert done[2:] == ["restores", "meets, saves: False"] and training._phase is Phase.TRAINING
    live_sockets.forget()


def test_who_is_late_when_it_saves_has_nothing_to_save_and_saves_the_next_time() -> None:
    training, done = late()
    published: list[bool] = []

    def publish() -> None:
        """Lose a peer in the first attempt."""
        published.append(training._saves)
        if len(published) == 1:
            raise RuntimeError("Connection closed by peer")

    def wait_for_round() -> None:
        """Be late in the next round."""
        training._round, training._phase = 2, Phase.LATE

    training._publish, training._wait_for_round = publish, wait_for_round  # type: ignore[assignment, method-assign]
    training.save()
    assert published == [True] and training._phase is Phase.LATE and done[2:] == ["restores", "meets, saves: True"]
    training.save()
    assert published == [True, True] and (training._phase, training._saves, training._saves_done) == (Phase.TRAINING, False, 2)
    live_sockets.forget()


def test_a_worker_that_is_being_given_the_state_of_the_others_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that was cut off comes back with an older state, and the others are lost before theirs has come whole: it has a mixture."""
    monkeypatch.setattr(elastic, "WorldChange", lambda *given: SimpleNamespace(sharing=2))
    monkeypatch.setattr(elastic.Elastic, "_be_alone", lambda self: None)
    monkeypatch.setattr(elastic, "Rehearsal", lambda *given: None)
    training = object.__new__(elastic.Elastic)
    training.state, training._model, training._settled = SimpleNamespace(step=0), None, 4  # type: ignore[assignment]
    training._loader = training._before = SimpleNamespace(set_world=lambda *given: None, take=lambda: None)  # type: ignore[assignment]
    training._live = SimpleNamespace(takes_in=LiveWorld(1, (0, 1)))  # type: ignore[assignment]
    training._join()
    promised: list[tuple[int, int]] = []
    training._checkpoints, training._change, training._live = WorldCheckpoints(training.state, None), None, None
    training._model = SimpleNamespace(_leave_group=lambda: None)  # type: ignore[assignment]
    training._connection = SimpleNamespace(leave=lambda *given: promised.append(given))  # type: ignore[assignment]
    training._leave()
    assert promised == [(0, 0)]


@pytest.mark.parametrize(("settled", "does"), [(0, "rehearses"), (4, "joins")])
def test_a_new_worker_rehearses_and_one_with_an_older_state_keeps_that_until_it_joins(
    monkeypatch: pytest.MonkeyPatch, settled: int, does: str
) -> None:
    """Its state may be the newest one that is left, if those who train are lost before."""
    live = SimpleNamespace(find_first=lambda: LiveWorld(0, (1,)), has=lambda world: False, enter=lambda: LiveWorld(1, (1, 0)))
    monkeypatch.setattr(elastic, "LiveRound", lambda *given: live)
    done: list[str] = []
    training = object.__new__(elastic.Elastic)
    training._round, training._settled, training._phase = 5, settled, Phase.LEFT
    training._connection = SimpleNamespace(asked=False)  # type: ignore[assignment]
    training._begin_rehearsal = lambda: done.append("rehearses")  # type: ignore[method-assign]
    training._join = lambda: done.append("joins")  # type: ignore[method-assign]
    training._happens(PhaseEvent.ROUND_BEGINS)
    live_sockets.forget()
    assert done == [does]

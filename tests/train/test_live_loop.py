"""What counts in the loop of a live worker when a peer is lost, a save fails, or the script leaves the loop."""

from __future__ import annotations

import copy
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

from elastirun.errors import CheckpointError
from elastirun.train import DistributedDataParallel, ReductionFailed, TrainError, elastic
from elastirun.train.ddp.world_switch import WorldSwitch
from elastirun.train.errors import WrongUse
from elastirun.train.groups import process_groups
from elastirun.train.groups.connections import live_sockets
from elastirun.train.groups.process_groups import end_beside, init_default_group, leave_groups
from elastirun.train.live.phases import Phase, PhaseEvent
from elastirun.train.live.state_copy import StateKept
from elastirun.train.live.step_snapshot import Rehearsal
from elastirun.train.reduction.control_words import ADMIT
from elastirun.worker.live_worlds import LiveWorld
from tests.support.cluster import free_port
from tests.support.until import PATIENCE
from tests.support.worlds import run
from tests.train.test_elastic import BATCH, SAMPLES, Masked, alone, made, step

Make = Callable[..., tuple[elastic.Elastic, "Peers"]]


class Peers:
    """The agent and the other ranks of a worker, as far as the loop asks. ``left``: the steps after which the worker has left its round."""

    def __init__(self, training: elastic.Elastic, size: int) -> None:
        self.asked, self.left = False, list[int]()
        self.wait_until_asked = lambda *given: True
        training._connection, training._live = self, SimpleNamespace(size=size, end_if_over=lambda limit: None)  # type: ignore[assignment]
        training._phase = Phase.TRAINING
        WorldSwitch(training._model).drop_failed_steps()
        training._change_world = lambda: None  # type: ignore[method-assign]
        training._leave = lambda: self.left.append(training.step)  # type: ignore[method-assign]
        training._wait_for_round = lambda: self.enter(training)  # type: ignore[assignment, method-assign]

    def enter(self, training: elastic.Elastic) -> None:
        training._model.set_group(init_sync=False)
        training._worlds += 1
        training._round += 1
        training._phase, self.asked = Phase.TRAINING, False


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make a live worker whose peers are pretended."""
    alone(monkeypatch)
    elastic.init_process_group()

    def make(size: int = 2, module: nn.Module | None = None, checkpoints: Any = None, **loading: Any) -> tuple[elastic.Elastic, Peers]:
        state, model = made(0)
        if module is not None:
            state["model"] = model = DistributedDataParallel(module)
            state["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
            state["scheduler"] = torch.optim.lr_scheduler.ConstantLR(state["optimizer"])
        training = elastic.Elastic(state, checkpoints)
        return training, Peers(training, size)

    yield make
    dist.destroy_process_group()


def lose_a_peer(training: elastic.Elastic) -> None:
    """Let the next backwards end without gradients."""
    training._model._reducer.drop_step(ReductionFailed("a peer was lost"))


def test_a_worker_whose_older_state_does_not_count_stays_in_the_loop(live: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes back when the others are in a later epoch, and gets their state in the next steps."""
    training, peers = live()
    loader = training._loader

    def change(*given: Any) -> Any:
        loader.load_state_dict({**loader.state_dict(), "epoch": 2, "consumed": 16})
        return SimpleNamespace(sharing=1)

    def enter(training: elastic.Elastic) -> None:
        training._model.set_group(init_sync=False)
        training._phase = Phase.JOINING
        training._live.takes_in = LiveWorld(1, (0, 1))  # type: ignore[union-attr]
        del training._live.size  # type: ignore[union-attr, misc]  # it is in no world before it has the state
        training._join()

    monkeypatch.setattr(elastic, "WorldChange", change)
    training._be_alone = lambda: None  # type: ignore[method-assign]
    peers.enter = enter  # type: ignore[method-assign]
    epochs = []
    for at, batch in enumerate(training.batches()):
        epochs.append(loader.epoch)
        if at == 1:
            lose_a_peer(training)
        step(training.state, training._model, batch)
    assert epochs == [0, 0, 2, 2, 2][: len(epochs)] and len(epochs) > 2 and training._phase is Phase.JOINING


def test_a_loader_that_is_replaced_or_has_another_global_batch_is_refused_before_the_next_epoch(live: Make) -> None:
    """A worker that comes later would have the first one: its ranks would cut the data otherwise (samples were lost, without a word)."""
    training, _ = live(size=1)
    loader = training._loader
    for batch in training.batches():
        step(training.state, training._model, batch)
    size, loader.global_batch_size = loader.global_batch_size, 2 * loader.global_batch_size
    with pytest.raises(WrongUse, match=f"global_batch_size was changed from {size} to {2 * size}"):
        next(iter(training.batches()))
    loader.global_batch_size = size
    name = next(name for name, part in training.state.items() if part is loader)
    training.state[name] = copy.copy(loader)
    with pytest.raises(WrongUse, match=f"'{name}' in the state was replaced"):
        next(iter(training.batches()))


def test_parameters_that_come_in_mid_training_are_refused_at_once(live: Make) -> None:
    """A worker that comes later would not have them: its state did not fit, again and again, and it never came in."""
    training, _ = live(size=1)
    optimizer, model = training.state["optimizer"], training._model
    with pytest.raises(WrongUse, match="Adam had 1 param_groups when .* and has 2 now"):
        for batch in training.batches():
            step(training.state, model, batch)
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    del optimizer.param_groups[1]
    model.module.later = torch.nn.Linear(2, 2, bias=False)
    with pytest.raises(WrongUse, match="the model had 2 parameters when .* and has 3 now"):
        next(iter(training.batches()))
    del model.module.later
    training.state["optimizer"] = copy.copy(optimizer)
    with pytest.raises(WrongUse, match="'optimizer' in the state was replaced"):
        next(iter(training.batches()))


def test_a_worker_alone_leaves_its_round_also_where_each_step_is_the_last_of_an_epoch(live: Make) -> None:
    training, peers = live(size=1)
    training._loader.load_state_dict({**training._loader.state_dict(), "consumed": 32})
    for batch in training.batches():
        step(training.state, training._model, batch)
        peers.asked = True
    assert peers.left == [1]


@pytest.mark.parametrize("fails", [False, True])
def test_the_step_in_which_the_script_leaves_the_loop_counts_if_its_reduction_was_made(live: Make, fails: bool) -> None:
    training, _ = live()
    seen = []
    for batch in training.batches():
        seen.append(batch[0].tolist())
        if fails and training.step == 1:
            lose_a_peer(training)
        step(training.state, training._model, batch)
        if training.step == 1:
            break
    assert training.step == (1 if fails else 2)
    again = next(training.batches())[0].tolist()
    assert (again == seen[1]) is fails


def test_a_script_that_leaves_the_loop_in_a_failed_step_leaves_its_round_when_it_comes_back(live: Make) -> None:
    """Else it would never get to the end of a step, where others leave."""
    training, peers = live()
    for batch in training.batches():
        lose_a_peer(training)
        step(training.state, training._model, batch)
        break
    assert peers.left == []
    step(training.state, training._model, next(training.batches()))
    assert peers.left == [0] and not training._model.failed


def test_a_script_that_left_the_loop_in_the_failed_last_step_gets_no_batch_of_the_epoch_that_the_others_are_in(live: Make) -> None:
    """They wait until it has done what they have done between the two epochs. It trained alone, lost its peers again, and waited 10 s."""
    training, peers = live()
    averaged = average(training.state)
    training._before, loader = elastic.StepSnapshot(training.state, training._loader), training._loader
    loader.load_state_dict({**loader.state_dict(), "consumed": 32})

    def enter(training: elastic.Elastic) -> None:
        """Get the state of the others, who are in the next epoch."""
        Peers.enter(peers, training)
        loader.load_state_dict({**loader.state_dict(), "epoch": 1, "consumed": 0})
        training._phase = Phase.LATE
        live_sockets.begin()
        training._be_late()
        live_sockets.forget()

    peers.enter = enter  # type: ignore[method-assign]
    for batch in training.batches():
        lose_a_peer(training)
        step(training.state, training._model, batch)
        break
    assert list(training.batches()) == [] and peers.left == [0]
    averaged.update_parameters(nn.Linear(4, 2))  # as the others have done
    training._live.reconnect = training._live.repeat = lambda: None  # type: ignore[method-assign, union-attr]
    training._make_groups = lambda: Peers.enter(peers, training)  # type: ignore[assignment, method-assign, return-value, func-returns-value]
    step(training.state, training._model, next(training.batches()))
    live_sockets.forget()
    assert averaged.n_averaged.item() == 0 and loader.epoch == 1 and peers.left == [0]


def test_a_new_worker_whose_script_leaves_the_loop_and_saves_ends_its_rehearsal_when_it_comes_back(live: Make) -> None:
    """It rehearsed for ever where the script left the loop after each first step."""
    training, _ = live()
    training._live, training._phase = None, Phase.REHEARSING
    ended: list[bool] = []
    training._end_rehearsal = lambda: ended.append(True)  # type: ignore[method-assign]
    for batch in training.batches():
        step(training.state, training._model, batch)
        break
    training.save()
    assert not ended
    next(training.batches())
    assert ended == [True] and training.step == 0


def test_a_step_counts_once_where_somebody_still_holds_the_loop(live: Make) -> None:
    """Such as a progress bar."""
    training, _ = live()
    held = training.batches()
    step(training.state, training._model, next(held))
    checkpoints = SimpleNamespace(restored=None, save=lambda number, state, now=False: None, wait=lambda limit: None)
    training._checkpoints.current = checkpoints  # type: ignore[assignment]
    training.save()
    assert training.step == 1
    again = training.batches()
    step(training.state, training._model, next(again))
    held.close()
    assert training.step == 1
    again.close()
    assert training.step == 2


def test_a_request_to_take_a_new_worker_in_is_made_again_where_the_script_leaves_the_loop(live: Make) -> None:
    training, _ = live()
    for batch in training.batches():
        training._model.request(ADMIT)
        step(training.state, training._model, batch)
        break
    step(training.state, training._model, next(training.batches()))
    assert ADMIT in training._model.agreement.requests


def test_a_script_that_leaves_the_loop_before_its_step_gets_the_batch_again(live: Make) -> None:
    training, _ = live()
    first = next(iter([batch[0].tolist() for batch in [next(training.batches())]]))
    assert training.step == 0 and next(training.batches())[0].tolist() == first


def test_a_step_counts_whose_gradients_were_used_before_a_peer_was_lost(live: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was lost in an evaluation within the loop, which copies the buffers."""
    training, peers = live(module=Masked())
    model, seen, counted = training._model, [], []

    def lose(*given: Any, **more: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    for batch in training.batches():
        seen.append(batch[0].tolist())
        step(training.state, model, batch)
        if len(seen) == 2:
            with monkeypatch.context() as patch, torch.no_grad():
                patch.setattr(model, "_distributed_broadcast_coalesced", lose)
                model(batch[1])
            assert model.failed
            counted.append(training.counts)
    assert peers.left == [2] and counted == [True] and training.step == len(seen) == 5
    assert len({number for numbers in seen for number in numbers}) == 40, "each sample once"


@pytest.mark.parametrize("last", [False, True], ids=["due", "last"])
def test_a_backward_that_an_exception_has_interrupted_is_made_before_a_save(live: Make, last: bool) -> None:
    """The others wait for it there, and come to the collectives of the save only then."""
    found: list[bool] = []
    training, _ = live()
    model = training._model

    def save(number: int, state: Any, **now: bool) -> bool:
        found.append(model._reducer.interrupted)
        return True

    training._checkpoints.current = SimpleNamespace(save=save, restored=None, wait=lambda limit: None)  # type: ignore[assignment]
    for batch in training.batches():
        with model.module.weight.register_hook(_raises), pytest.raises(ValueError, match="of the script"):
            step(training.state, model, batch)
        if last or training.step == 1:
            break
    if last:
        training.save()
    assert found == [False]


def test_a_worker_that_an_exception_ends_takes_part_in_no_reduction_on_its_way_out(live: Make) -> None:
    """Its peers would have to end as well, by the word that its backward has failed; so they lose a peer, and go on."""
    training, _ = live()
    with training._model.module.weight.register_hook(_raises), pytest.raises(ValueError, match="of the script"):
        for batch in training.batches():
            step(training.state, training._model, batch)
    assert training._model._reducer.interrupted


def _raises(*given: Any) -> None:
    raise ValueError("of the script")


@pytest.mark.parametrize(("errors", "ends"), [("fail fail", True), ("fail fine fail", False), ("lost lost", False), ("asked asked", False)])
def test_a_save_that_fails_twice_in_a_row_ends_the_worker_with_its_error(live: Make, errors: str, ends: bool) -> None:
    """Else each attempt costs a round and a failure, and nobody ever sees why."""
    training, peers = live()
    outcomes = iter(errors.split())

    def save(number: int, state: Any) -> bool:
        if (outcome := next(outcomes, "fine")) == "fine":
            return True
        peers.asked = outcome == "asked"
        raise RuntimeError("Connection closed by peer") if outcome == "lost" else CheckpointError("the state has a socket")

    training._checkpoints.current = SimpleNamespace(save=save)  # type: ignore[assignment]

    def train() -> None:
        for batch in training.batches():
            step(training.state, training._model, batch)

    if ends:
        with pytest.raises(CheckpointError, match="socket"):
            train()
    else:
        train()
        assert training.step == 5


def test_a_last_save_waits_for_a_step_that_this_rank_has_lost(live: Make) -> None:
    """Others may have completed it: each rank would write its part of another step."""
    training, peers = live()
    done = []

    def checkpoints(name: str) -> Any:
        return SimpleNamespace(restored=None, save=lambda number, state, now: done.append(name), wait=lambda limit: None)

    def enter(training: elastic.Elastic) -> None:
        Peers.enter(peers, training)
        training._checkpoints.current = checkpoints("after")

    training._checkpoints.current, peers.enter = checkpoints("before"), enter  # type: ignore[method-assign]
    lose_a_peer(training)
    training.save()
    assert done == ["after"] and peers.left == [0]


def test_without_an_agent_a_state_is_saved_after_an_interrupted_reduction(live: Make) -> None:
    """By Ctrl-C, for example: there is no other round to go on in."""
    training, _ = live()
    training._live, training._connection, training._phase = None, None, Phase.FIXED
    done: list[int] = []
    training._checkpoints.current = SimpleNamespace(
        restored=None, save=lambda number, state, now: done.append(number), wait=lambda limit: None
    )  # type: ignore[assignment]
    lose_a_peer(training)
    training.save()
    assert done == [0]


def test_a_restored_step_is_no_reason_to_end_for_a_rank_that_has_lost_the_one_after_it(live: Make) -> None:
    training, peers = live()
    done: list[int] = []
    training._checkpoints.current = SimpleNamespace(restored=0)

    def enter(training: elastic.Elastic) -> None:
        Peers.enter(peers, training)
        training.state.step = 1  # of another rank
        training._checkpoints.current = SimpleNamespace(
            restored=0, save=lambda number, *given, now: done.append(number), wait=lambda limit: None
        )  # type: ignore[assignment]

    peers.enter = enter  # type: ignore[method-assign]
    lose_a_peer(training)
    training.save()
    assert done == [1]


# -- one reduction for each batch


def accumulates(training: elastic.Elastic) -> None:
    """Reduce in each second batch, as scripts for torch do."""
    model = training._model
    for at, (_, data) in enumerate(training.batches()):
        with model.no_sync() if at % 2 == 0 else nullcontext():
            model(data).square().mean().backward()
        if at % 2:
            training.state["optimizer"].step()


def accumulates_by_number(training: elastic.Elastic) -> None:
    training._model.accumulate(2)
    for batch in training.batches():
        step(training.state, training._model, batch)


def looks_ahead(training: elastic.Elastic) -> None:
    batches = training.batches()
    before = next(batches)
    for batch in batches:
        step(training.state, training._model, before)
        before = batch


def goes_on_after_an_exception(training: elastic.Elastic) -> None:
    for at, (numbers, data) in enumerate(training.batches()):
        with suppress(RuntimeError):
            step(training.state, training._model, (numbers, data[:, :3] if at == 2 else data))


def makes_two_steps(training: elastic.Elastic) -> None:
    """As for the two networks of a GAN."""
    for batch in training.batches():
        step(training.state, training._model, batch)
        step(training.state, training._model, batch)


def calls_back(training: elastic.Elastic) -> None:
    """LBFGS computes the gradients as often as it likes."""
    model = training._model
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    for _, data in training.batches():

        def closure(data: Any = data) -> Any:
            optimizer.zero_grad()
            loss = model(data).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def saves_in_the_loop(training: elastic.Elastic) -> None:
    for batch in training.batches():
        step(training.state, training._model, batch)
        training.save()


SCRIPTS = {
    accumulates: ("no reduction was made for the batch of step 1: .*run.steps()", 0),
    accumulates_by_number: ("no reduction was made for the batch of step 1", 0),
    looks_ahead: ("no reduction was made for the batch of step 1", 0),
    goes_on_after_an_exception: ("no reduction was made for the batch of step 3", 2),
    makes_two_steps: ("2 reductions were made for the batch of step 1: .*no_sync()", 0),
    calls_back: ("[2-9] reductions were made for the batch of step 1", 0),
    saves_in_the_loop: ("within the loop over the batches", 1),
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
@pytest.mark.parametrize("by_itself", [False, True], ids=["live", "by_itself"])
def test_a_batch_without_one_reduction_of_its_own_is_an_error(live: Make, script: Callable[..., None], by_itself: bool) -> None:
    """Its step would count with other gradients as soon as a peer is lost; the script learns it before."""
    training, _ = live()
    if by_itself:
        training._live, training._connection, training._phase = None, None, Phase.FIXED
    error, steps = SCRIPTS[script]
    with pytest.raises(TrainError, match=error) as found:
        script(training)
    assert training.step == steps and "\n" not in str(found.value)


def test_a_batch_that_is_left_out_counts(live: Make) -> None:
    training, _ = live()
    for batch in training.batches():
        if training.step == 2:
            training._model.skip()
        else:
            step(training.state, training._model, batch)
    assert training.step == 5


def test_a_step_whose_second_reduction_fails_is_no_error(live: Make) -> None:
    """The first one was used, and the peer is lost; the script shows its mistake in the next batch."""
    training, peers = live()
    with pytest.raises(TrainError, match="2 reductions"):
        for batch in training.batches():
            step(training.state, training._model, batch)
            if training.step == 0:
                lose_a_peer(training)
            step(training.state, training._model, batch)
    assert peers.left == [1]


# -- steps of micro-batches


def by_steps(training: elastic.Elastic, loses: bool = False, leaves: bool = False) -> list[int]:
    """The samples of the steps that count.

    ``loses``: a peer is lost in the second step. ``leaves``: the script leaves each loop of micro-batches at its end.
    """
    state, model, seen = training.state, training._model, []
    training._loader.micro_batch_size = 3
    lost = False
    for one in training.steps():
        state["optimizer"].zero_grad()
        offered: list[int] = []
        for numbers, data in one:
            if loses and not lost and training.step == 1 and offered:
                lose_a_peer(training)
                lost = True
            model(data).square().mean().backward()
            offered += numbers.tolist()
            if leaves and len(offered) == BATCH:
                break
        state["optimizer"].step()
        state["scheduler"].step()
        seen += offered if training.counts else []
    return seen


HOW = {
    "undisturbed": {},
    "a_peer_is_lost": {"loses": True},
    "left_at_its_end": {"leaves": True},
    "left_at_its_end_then_a_peer_is_lost": {"leaves": True, "loses": True},
}


@pytest.mark.parametrize("name", HOW)
def test_steps_of_micro_batches_are_those_of_whole_batches(live: Make, name: str) -> None:
    training, peers = live()
    seen = by_steps(training, **(how := HOW[name]))
    assert training.step == 5 and sorted(seen) == list(range(SAMPLES))
    assert peers.left == [1] * how.get("loses", False)
    other, _ = live()
    for batch in other.batches():
        step(other.state, other._model, batch)
    for here, there in zip(training._model.parameters(), other._model.parameters(), strict=True):
        torch.testing.assert_close(here, there)


def test_a_step_that_was_left_before_its_last_micro_batch_is_an_error(live: Make) -> None:
    training, _ = live()
    training._loader.micro_batch_size = 3
    with pytest.raises(TrainError, match="no reduction"):
        for one in training.steps():
            for _, data in one:
                training._model(data).square().mean().backward()
                break


# -- the script leaves the loop in the middle of an epoch


class Together:
    """A checkpointer of two ranks that meet in each save, as where each step is due."""

    restored = None

    def __init__(self) -> None:
        self.saved: list[int] = []

    def save(self, number: int, state: Any, now: bool = False) -> bool:
        both = [torch.zeros(1), torch.zeros(1)]
        dist.all_gather(both, torch.tensor([float(number)]))
        assert both[0] == both[1] == number, both
        self.saved.append(number)
        return True

    def wait(self, limit: float) -> None:
        pass


def leaves(rank: int, world: int, port: int, batches: tuple[int, int], saves: bool, epochs: tuple[int, int] = (1, 1)) -> list[Any]:
    """A script that leaves the loop after so many ``batches``, and ends after so many ``epochs``, on each rank.

    Their agent is pretended.
    """
    dist.destroy_process_group()  # ``Elastic`` makes its own
    where = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in where.items()})
    elastic.init_process_group()
    training, saved = elastic.Elastic(made(rank)[0]), Together()
    training._checkpoints.current = saved  # type: ignore[assignment]
    Peers(training, 2)
    try:
        while training._loader.epoch < epochs[rank]:
            for at, batch in enumerate(training.batches()):
                step(training.state, training._model, batch)
                if at + 1 == batches[rank]:
                    break
            if saves:
                training.save()
        training.save()
    except TrainError as error:
        return [training.step, str(error)]
    return [training.step, saved.saved]


@pytest.mark.parametrize("batches", [(2, 2), (2, 3), (4, 1), (5, 9)])
def test_ranks_that_leave_the_loop_at_different_batches_and_come_back_make_the_same_saves(batches: tuple[int, int]) -> None:
    assert run(2, leaves, free_port(), batches, False) == [[5, [1, 2, 3, 4, 5, 5]]] * 2


@pytest.mark.parametrize("batches", [(2, 3), (4, 2), (2, 9)])
def test_a_rank_that_saves_while_another_one_is_in_the_loop_is_an_error_on_both(batches: tuple[int, int]) -> None:
    """They would wait for each other: the script counts the batches by itself, and one rank came later."""
    for _, error in run(2, leaves, free_port(), batches, True):
        assert error.startswith("a rank has left the loop"), error


def test_a_rank_that_saves_between_epochs_of_another_one_is_an_error_on_both() -> None:
    """The script counts the epochs by itself: none has left the loop in the middle of one."""
    for _, error in run(2, leaves, free_port(), (99, 99), False, (1, 2)):
        assert error.startswith("a rank has left the loop"), error


@pytest.mark.parametrize(("batches", "saved"), [((2, 2), [1, 2, 2, 3, 4, 4, 5, 5, 5]), ((5, 9), [1, 2, 3, 4, 5, 5, 5])])
def test_ranks_that_leave_the_loop_in_one_step_save_it(batches: tuple[int, int], saved: list[int]) -> None:
    """To leave it in the last step of an epoch is as to go on."""
    assert run(2, leaves, free_port(), batches, True) == [[5, saved]] * 2


# -- the state


def average(state: Any) -> AveragedModel:
    state["average"] = AveragedModel(nn.Linear(4, 2))
    found: AveragedModel = state["average"]
    return found


@pytest.mark.parametrize("guarded", [False, True])
def test_what_a_dropped_step_has_changed_beside_the_model_is_warned_of(live: Make, caplog: pytest.LogCaptureFixture, guarded: bool) -> None:
    """An average would count the step twice, in silence."""
    training, _ = live()
    state, model = training.state, training._model
    averaged, state["seen"], state["same"] = average(state), 0, [torch.zeros(1), nn.Linear(1, 1)]
    training._before = elastic.StepSnapshot(state, training._loader)
    for at, batch in enumerate(training.batches()):
        if at == 2:
            lose_a_peer(training)
        step(state, model, batch)
        if not guarded or not model.failed:
            averaged.update_parameters(model.module)
            state["seen"] += 1
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (not guarded), said
    assert guarded or said[0].startswith("the state's average, seen changed in step 3, which does not count")


def test_what_a_rehearsal_has_changed_beside_the_model_is_brought_back_for_a_run_that_begins(live: Make) -> None:
    training, _ = live()
    state = training.state
    averaged, state["seen"] = average(state), 0
    rehearsal = Rehearsal(state, training._model, training._loader)
    averaged.update_parameters(nn.Linear(4, 2))
    state["seen"] = 8
    rehearsal.undo()
    rehearsal.forget()
    assert (averaged.n_averaged.item(), state["seen"]) == (0, 0)


def test_what_a_late_rank_changes_until_it_has_caught_up_is_not_kept(live: Make) -> None:
    """All others may be lost just then."""
    training, _ = live()
    averaged = average(training.state)
    training._before = elastic.StepSnapshot(training.state, training._loader)
    live_sockets.begin()
    training._be_late()
    averaged.update_parameters(nn.Linear(4, 2))
    training._live.reconnect = lambda: None  # type: ignore[method-assign, union-attr]
    training._put_back()
    live_sockets.forget()
    assert averaged.n_averaged.item() == 0


def test_parts_of_a_state_are_put_back_in_place(live: Make) -> None:
    training, _ = live()
    state, weight = training.state, next(iter(average(training.state).parameters()))
    state["numbers"] = {"seen": 3, "mean": torch.ones(2)}
    mean, before = state["numbers"]["mean"], weight.detach().clone()
    kept = StateKept(state, ["average", "numbers"])
    with torch.no_grad():
        weight.zero_()
        mean.zero_()
    state["numbers"]["seen"] = 4
    kept.put_back(state)
    assert torch.equal(weight, before) and mean.tolist() == [1.0, 1.0] and state["numbers"]["seen"] == 3


@pytest.mark.parametrize("then", [torch.zeros(3), torch.zeros(1), [1], object()], ids=["tensor", "one_element", "list", "odd"])
def test_parts_that_have_become_something_else_are_put_back(live: Make, then: Any) -> None:
    training, _ = live()
    state = training.state
    state["loss"], state["history"], state["mean"] = 0.5, torch.ones(2), None
    kept = StateKept(state, ["loss", "history", "mean"])
    state["loss"] = state["history"] = state["mean"] = then
    kept.put_back(state)
    assert (state["loss"], state["history"].tolist(), state["mean"]) == (0.5, [1.0, 1.0], None)


def test_a_copy_of_the_model_computes_after_the_end_of_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch)
    elastic.init_process_group()
    copied = copy.deepcopy(DistributedDataParallel(nn.Linear(4, 2)))
    dist.destroy_process_group()
    with torch.no_grad():
        assert copied.eval()(torch.ones(1, 4)).shape == (1, 2)


def test_an_average_of_the_model_is_used_in_another_world_than_it_was_made_in(live: Make) -> None:
    training, _ = live(module=Masked())
    model = training._model
    averaged = AveragedModel(model)
    end_beside(leave_groups())
    init_default_group("gloo", dist.HashStore(), 0, 1, None)  # type: ignore[attr-defined]
    model.set_group(init_sync=False)
    with torch.no_grad():
        assert averaged.eval()(torch.ones(1, 4)).shape == (1, 2)
    averaged.update_parameters(model)
    copy.deepcopy(averaged)


# -- the group of the checkpoints


def test_what_the_checkpoints_of_a_later_world_wait_for_is_cut(live: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent may ask this worker to leave its round while a peer does not come to the group that the checkpoints make."""
    training, _ = live()
    training._change = SimpleNamespace(world=LiveWorld(1, (0, 1)))  # type: ignore[assignment]
    training._live = SimpleNamespace(begin=lambda world: None, rank=0, size=2)  # type: ignore[assignment]
    monkeypatch.setattr(training, "_look_for_others", live_sockets.end)
    heard = []

    def begin() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as waits:
            with server.accept()[0]:
                live_sockets.cut()
                waits.setblocking(False)
                with suppress(BlockingIOError):
                    heard.append(waits.recv(1))

    monkeypatch.setattr(training, "_begin", begin)
    try:
        training._happens(PhaseEvent.ALL_WHOLE)
    finally:
        live_sockets.forget()
    assert heard == [b""]


def waits(rank: int, world: int, comes: bool) -> tuple[float, float]:
    """Make the group of the checkpoints. Rank 1 comes, or it does not, and the connections of rank 0 are cut meanwhile."""
    default = dist.group.WORLD
    assert default is not None
    live_sockets.begin()
    group = process_groups.make_own_group(default, torch.device("cpu"))  # its connections can be cut
    live_sockets.end()
    begun, limit = time.monotonic(), 0.0
    with process_groups.connects_within(timedelta(seconds=PATIENCE)):
        if comes:
            limit = process_groups.make_gloo_group(group)._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        elif rank == 0:
            cuts = threading.Timer(0.1, live_sockets.cut)
            cuts.start()
            with pytest.raises(RuntimeError):
                process_groups.make_gloo_group(group)
            cuts.join()
    took = time.monotonic() - begun
    dist.barrier()
    return took, limit


def test_a_peer_that_never_comes_to_the_group_of_the_checkpoints_is_not_waited_for() -> None:
    (took, _), _ = run(2, waits, False)
    assert took < PATIENCE / 2


def test_the_group_of_the_checkpoints_has_the_time_limit_of_any_group() -> None:
    assert [limit for _, limit in run(2, waits, True)] == [1800.0] * 2

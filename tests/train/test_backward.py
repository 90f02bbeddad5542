"""The phases of a backward: every transition is in the table, and each of them is what happens to a real module."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from elastirun.train import DistributedDataParallel as DDP
from elastirun.train import ReductionFailed
from elastirun.train.reduction.backward import TRANSITIONS, Backward, BackwardPhase, BackwardTrigger
from tests.support.worlds import run
from tests.train.test_ddp import alone, batch, close, grads, learn, make
from tests.train.test_trouble import Faulty


def test_every_phase_is_reached_and_three_of_them_are_final() -> None:
    assert set(TRANSITIONS.values()) == set(BackwardPhase) - {BackwardPhase.STARTED}
    assert set(BackwardPhase) - {phase for phase, _ in TRANSITIONS} == {BackwardPhase.DONE, BackwardPhase.EMPTY, BackwardPhase.BROKEN}
    assert {trigger for _, trigger in TRANSITIONS} == set(BackwardTrigger)


@pytest.mark.parametrize("reduces", [True, False])
def test_a_backward_goes_through_the_phases_in_order(reduces: bool) -> None:
    backward = Backward(reduces)
    backward.accumulate()
    assert backward.phase is (BackwardPhase.COLLECTING if reduces else BackwardPhase.KEEPING)
    assert backward.advance(BackwardTrigger.GRAPH_DONE) is (BackwardPhase.REDUCING if reduces else BackwardPhase.DONE)


def test_an_impossible_transition_gives_its_history() -> None:
    backward = Backward(True)
    backward.accumulate()
    backward.advance(BackwardTrigger.GRAPH_DONE)
    with pytest.raises(RuntimeError) as error:
        backward.advance(BackwardTrigger.INTERRUPTED)
    assert str(error.value) == (
        "impossible transition of a backward: INTERRUPTED in phase REDUCING; "
        "history: STARTED > GRADIENT_TO_REDUCE > COLLECTING > GRAPH_DONE > REDUCING"
    )
    assert backward.phase is BackwardPhase.REDUCING


def test_gradients_are_found_by_their_versions() -> None:
    """Not every parameter has a hook."""
    module = make()
    backward = Backward(True)
    for _ in range(2):  # grad is None, then there is one
        backward.remember(list(module.parameters()))
        assert not backward.has_accumulated(list(module.parameters()))
        module(batch(0, 0)).sum().backward()
        assert backward.has_accumulated(list(module.parameters()))


def interrupted_within_no_sync(rank: int, world: int) -> list[Any]:
    """An exception ends a backward of rank 1 that reduces nothing; rank 0 knows nothing of it."""
    ddp = DDP(make())
    learn(ddp, rank)
    ddp.zero_grad()
    steps = ddp.stats()["steps"]
    if rank == 1:
        handle = ddp.module[1].register_forward_hook(lambda m, i, o: Faulty.apply(o))  # type: ignore[index]
        with ddp.no_sync(), pytest.raises(MemoryError):
            ddp(batch(0, rank)).pow(2).mean().backward()
        handle.remove()
        ddp.zero_grad()
    ddp(batch(1, rank)).pow(2).mean().backward()
    return [ddp.stats()["steps"] - steps, close(grads(ddp.module), alone(ddp.module, [(1, batch(1, r)) for r in range(world)]))]


def test_an_exception_within_no_sync_concerns_no_other_rank() -> None:
    assert run(2, interrupted_within_no_sync) == [[1, True]] * 2


def broken(rank: int, world: int) -> list[Any]:
    """The launch of the second bucket raises. Then a backward comes from a forward that was before."""
    ddp = DDP(make(), bucket_cap_mb=1e-5)
    learn(ddp, rank)
    launched: list[int] = []
    reduce = ddp._reducer.world.buckets.reduce

    def fail(index: int) -> Any:
        launched.append(index)
        if index == 1:
            raise MemoryError("on purpose")
        return reduce(index)

    ddp._reducer.world.buckets.reduce = fail  # type: ignore[method-assign]
    losses: list[Tensor] = [ddp(batch(step, rank)).pow(2).mean() for step in range(2)]
    told = []
    for loss in losses:
        try:
            loss.backward()
        except MemoryError as error:
            told.append(str(error))
    with pytest.raises(ReductionFailed, match="interrupted by MemoryError"):
        ddp(batch(2, rank))
    return [told, launched]


def test_nothing_more_is_launched_when_a_reduction_has_failed() -> None:
    assert run(1, broken) == [[["on purpose"], [0, 1]]]

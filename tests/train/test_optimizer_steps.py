"""How long a rank computes in a step, as torch's DistributedDataParallel tells it: which steps are sampled, and what counts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elastirun.worker import optimizer_steps
from elastirun.worker.optimizer_steps import FIRST_LOOK, MOST_LOOKS, MOST_READS, PAUSE, ComputeTimes, compute_seconds
from elastirun.worker.progress_page import NS
from tests.support.worlds import run

FORWARD, BACKWARD, WAIT, BETWEEN = 0.010, 0.020, 0.030, 0.005  # seconds
PERIOD = FORWARD + BACKWARD + WAIT + BETWEEN
COMPUTED = FORWARD + BACKWARD + BETWEEN


class Training:
    """A module that tells of its steps as torch's does: of a step that its rate names, once the forward of the next one has begun."""

    def __init__(self, device: str = "cpu") -> None:
        self.device_type, self.ints_map = device, dict.fromkeys(("iteration", "forward_compute_time_start"), 0)
        self.clock, self.iteration, self.rate = 10**18, 0, 100
        self.rates: list[int] = []
        self._timers: dict[str, int] = {}

    @property
    def logger(self) -> Training:
        return self

    def _get_ddp_logging_data(self) -> Training:
        return self

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        self.rate = rate
        self.rates.append(rate)

    def step(self, between: float = BETWEEN) -> None:
        self.clock += int(between * NS)
        self.micro_step()

    def micro_step(self) -> None:
        if self._timers and self._is_sampled():
            self.ints_map = {**self._timers, "iteration": self.iteration}
        self.iteration += 1
        times = [self.clock + int(seconds * NS) for seconds in (0, FORWARD, FORWARD + BACKWARD, FORWARD + BACKWARD + WAIT)]
        if self._is_sampled():
            self._timers = {
                "forward_compute_time_start": times[0],
                "forward_compute_time": times[1] - times[0],
                "backward_compute_time": times[2] - times[1],
                "backward_comm_time_end": times[3],
            }
        self.clock = times[3]

    def _is_sampled(self) -> bool:
        return self.iteration <= 10 or self.iteration % self.rate == 0


@pytest.fixture
def samples(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The samples that are stamped, in milliseconds."""
    found: list[float] = []
    monkeypatch.setattr(optimizer_steps, "sampled", lambda seconds: found.append(round(seconds * 1000, 3)))
    return found


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that lets a module make so many steps. It returns in how many of them something was to be done."""

    modules: list[Training] = []
    monkeypatch.setattr(optimizer_steps, "_modules", lambda: [*modules])
    monkeypatch.setattr(optimizer_steps, "time_ns", lambda: modules[0].clock)

    def play(module: Training, steps: int, times: ComputeTimes | None = None, step: Callable[[int], Any] | None = None) -> int:
        modules[:] = [module]
        times, left, looks = times or ComputeTimes(), FIRST_LOOK, 0
        for number in range(steps):
            step(number) if step else module.step()
            left -= 1
            if not left:
                left, looks = times.look(), looks + 1
        return looks

    return play


def test_a_sample_is_taken_every_two_seconds_and_is_the_time_without_the_wait(train: Any, samples: list[float]) -> None:
    module, seconds = Training(), 40 * PAUSE
    looks = train(module, int(seconds / PERIOD))
    assert 30 < len(samples) < 40 and {*samples} == {round(COMPUTED * 1000, 3)}
    assert looks < 5 * (len(samples) + 3)
    assert module.rates[:4] == [1, 100, 1, 100], "torch's own rate is set again"


def test_the_time_of_a_slow_loader_counts_and_a_pause_in_one_sample_does_not(train: Any, samples: list[float]) -> None:
    module = Training()
    train(module, 3000, step=lambda number: module.step(0.5 if number < 2000 and module.iteration % 7 else 0.1))
    assert samples[0] == samples[1] == round((FORWARD + BACKWARD + 0.5) * 1000, 3)
    assert samples[-1] == round((FORWARD + BACKWARD + 0.1) * 1000, 3)
    samples.clear()
    slow = Training()
    train(slow, 200, step=lambda number: slow.step(9.0 if number % 3 == 0 else 1.0))  # each step is a sample
    assert len(samples) > 150 and {*samples} == {round((FORWARD + BACKWARD + 1.0) * 1000, 3)}


def test_on_a_gpu_and_between_steps_with_communication_only_forward_and_backward_count(train: Any, samples: list[float]) -> None:
    times = {"forward_compute_time": 2 * NS, "backward_compute_time": 3 * NS, "backward_comm_time_end": 0}
    one, two, four = ({**times, "iteration": number, "forward_compute_time_start": number * 10 * NS} for number in (1, 2, 4))
    one["backward_comm_time_end"] = 16 * NS
    assert [compute_seconds(one, two, True), compute_seconds(one, two, False), compute_seconds(one, four, True)] == [9.0, 5.0, 5.0]
    module = Training()
    train(module, 1000, step=lambda number: [module.micro_step() for _ in range(4)])
    assert len(samples) > 10 and {*samples} == {round((FORWARD + BACKWARD) * 1000, 3)}


def test_a_module_that_reduces_nothing_any_more_is_seldom_looked_at(train: Any, samples: list[float]) -> None:
    module = Training()
    assert train(module, 1000, step=lambda number: module.step() if number < 15 else None) < MOST_READS + 5
    assert module.rates == [1, 100] and samples == []


@pytest.mark.parametrize("found", [[], [Training(), Training()]])
def test_no_module_or_several_are_looked_for_a_few_times(monkeypatch: pytest.MonkeyPatch, found: list[Training]) -> None:
    monkeypatch.setattr(optimizer_steps, "_modules", lambda: found)
    times = ComputeTimes()
    looks = [times.look() for _ in range(MOST_LOOKS)]
    assert looks == sorted(looks[:-1]) + [0] and all(looks[:-1]) and all(module.rates == [] for module in found)


def test_another_module_is_found_when_the_first_one_is_gone(train: Any, samples: list[float]) -> None:
    times = ComputeTimes()
    train(Training(), 100, times)
    before, second = len(samples), Training()
    train(second, 1000, times)
    assert len(samples) > before and second.rates


def test_an_interface_that_has_changed_is_no_error(train: Any, samples: list[float]) -> None:
    class Changed(Training):
        logger = None  # type: ignore[assignment]

    changed = Changed()
    assert train(changed, 1000) == 3 and samples == [] and changed.rates == [1, 100]


def test_nothing_is_read_in_another_thread_or_where_torch_would_log_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_steps, "_modules", lambda: [Training()])
    looks: list[int] = []
    thread = threading.Thread(target=lambda: looks.append(ComputeTimes().look()))
    thread.start()
    thread.join()
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    assert [*looks, ComputeTimes().look()] == [0, 0]


def looks_of_a_real_module(rank: int, world: int) -> tuple[list[int], list[int], int]:
    """What ``look`` returns inside of a backward, with the module's lock held, and behind it; and how many modules there are."""
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    times, inside, behind = ComputeTimes(), [], []

    def hook(group: object, bucket: Any) -> Any:
        done = dist.all_reduce(bucket.buffer(), async_op=True).get_future()  # type: ignore[union-attr]
        inside.append(ComputeTimes().look())
        return done.then(lambda future: future.value()[0])

    hook.__annotations__ = {}  # torch wants its own, and not as text
    ddp.register_comm_hook(None, hook)
    for _ in range(5):
        ddp(torch.ones(2, 4)).sum().backward()
        behind.append(times.look())
    return inside, behind, len(optimizer_steps._modules())


def test_nothing_is_read_inside_of_a_backward() -> None:
    ((inside, behind, modules),) = run(1, looks_of_a_real_module)
    assert {*inside} == {0} and all(behind) and modules == 1

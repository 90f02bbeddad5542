"""Which saves go to the disk: all ranks decide alike, whatever their clocks show, and seldom ask each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch

from elastirun.errors import TrainError
from elastirun.train import Checkpointer
from elastirun.train.checkpoints import due
from tests.support.worlds import run

PERIOD = 10.0  # seconds


class Lockstep:
    """Two ranks' exchanges, one after the other. Counts those of rank 0."""

    def __init__(self) -> None:
        self.rank = self.exchanges = 0
        self._first: list[int] | None = None

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        if self.rank == 0:
            self.exchanges += 1
            self._first = list(values)
            return [self._first, self._first]
        assert self._first is not None, "rank 1 waits for rank 0, which has gone on"
        return [self._first, list(values)]

    def forget(self) -> None:
        self._first = None


def saves(monkeypatch: pytest.MonkeyPatch, durations: Iterable[float], drift: float = 1.0) -> tuple[list[float], Lockstep]:
    """Return the times of the saves of two ranks whose steps take so many seconds; the second one's clock runs ``drift`` times as fast."""
    now, speed = 0.0, [1.0, drift]
    lockstep: Any = Lockstep()
    monkeypatch.setattr(due, "_now", lambda: int(now * 1e6 * speed[lockstep.rank]))
    rules, found = [due.due(timedelta(seconds=PERIOD)) for _ in speed], []
    for step, seconds in enumerate(durations):
        now += seconds
        answers = []
        lockstep.forget()
        for lockstep.rank, rule in enumerate(rules):  # noqa: B020
            answers.append(rule.is_due(step, lockstep))
            if answers[-1]:
                rule.begin()
        lockstep.rank = 0
        assert answers[0] == answers[1]
        if answers[0]:
            found.append(now)
    return found, lockstep


def test_a_period_is_kept_to_the_step_with_few_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    found, ranks = saves(monkeypatch, repeat(0.002, 16_000))
    assert found == pytest.approx([10.0, 20.0, 30.0], abs=0.01)
    assert ranks.exchanges < 100


def test_steps_that_become_slow_delay_a_save_by_few_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = saves(monkeypatch, [0.1] * 50 + [2.0] * 20)
    assert found[0] < PERIOD + 10 * 2.0


def test_calls_right_after_each_other_do_not_put_off_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = saves(monkeypatch, [1.0, 0.0] * 15)
    assert found == [10.0]


def test_a_call_that_comes_later_than_the_period_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    assert saves(monkeypatch, repeat(3600.0, 3))[0] == [3600.0, 7200.0, 10800.0]


@pytest.mark.parametrize("drift", [0.0, 7.0])
def test_the_clock_of_rank_0_decides_for_all(monkeypatch: pytest.MonkeyPatch, drift: float) -> None:
    found, _ = saves(monkeypatch, repeat(0.5, 50), drift)
    assert found == [10.0, 20.0]


@pytest.mark.parametrize("wrong", [timedelta(0), timedelta(seconds=-1), 0, 2.5, "1h"])
def test_what_is_no_time_is_refused(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(TrainError, match="every must be a whole number, 1 or more, or a timedelta above zero, not "):
        Checkpointer(tmp_path, every=wrong)


def save_by_time(rank: int, world: int, folder: str) -> list[int]:
    """Save on ranks of which only the first one's clock goes: a second per look at it, and one on which ``now`` was said."""
    seconds = 0

    def clock() -> int:
        nonlocal seconds
        seconds += 1 - rank
        return seconds * 1_000_000

    due._now = clock
    checkpoints, saved = Checkpointer(folder, every=timedelta(seconds=4), keep=9, memory_every=5), []
    for step in range(1, 13):
        if checkpoints.save(step, {"x": torch.ones(3)}, now=step == 6):
            saved.append(step)
        checkpoints.wait()
    checkpoints.close()
    return saved


def test_ranks_save_to_the_disk_by_the_clock_of_the_first(tmp_path: Path) -> None:
    first, second = run(2, save_by_time, str(tmp_path))
    on_disk = sorted(int(path.name[5:]) for path in tmp_path.glob("step-*"))
    assert first == second == sorted({*on_disk, 5, 10}) and 6 in on_disk and 2 <= len(on_disk) <= 4


def test_a_period_goes_on_in_the_next_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or no save would ever be due where worlds change more often than that."""
    now, lockstep = 0.0, Lockstep()
    ranks: Any = lockstep
    monkeypatch.setattr(due, "_now", lambda: int(now * 1e6))
    first = due.due(timedelta(seconds=PERIOD))
    now = PERIOD - 1.0
    following = due.due(timedelta(seconds=PERIOD))
    following.begun = first.begun
    assert not following.is_due(1, ranks)
    now = PERIOD
    assert any(following.is_due(step, ranks) for step in range(2, 20))

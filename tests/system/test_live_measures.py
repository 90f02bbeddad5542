"""What is measured of live jobs (live_switches.py, live_ettr.py), in short: nothing grows, and the loss is that of an undisturbed run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support import live_log, live_time
from tests.system.live_ettr import SEED, undisturbed
from tests.system.live_kills import BATCH, SAMPLES, job, storm
from tests.system.live_switches import switch, watch


@pytest.mark.long
def test_many_changes_of_the_world_leave_nothing_behind_and_the_loss_is_that_of_an_undisturbed_run(tmp_path: Path) -> None:
    with job(tmp_path, 1, 3, "--preload=torch", TEST_PAUSE="0.005", TEST_SEED=SEED) as running:
        (_, before), *_, (_, after) = watch(running, random.Random(1), switches=10, every=2)
    for name, held in after.items():
        grown = held - before[name]
        assert grown.threads <= 0 and grown.descriptors <= 4, f"{name} grew by {grown}"
    lines, _ = live_log.read(tmp_path / "log")
    assert live_log.violations(lines, SAMPLES) == []
    here = live_time.losses(lines, BATCH)
    alone = undisturbed(tmp_path, max(here))
    assert max(abs(loss - alone[step]) for step, loss in here.items()) < 1e-4
    begun, ended = (live_log.of(lines, "made")[at]["at"] for at in (0, -1))
    assert 0 < live_time.ettr(live_time.gaps(lines, begun, ended), ended - begun) < 1


def test_a_new_worker_is_there_in_what_all_do_after_an_epoch(tmp_path: Path) -> None:
    """Epochs have two steps, so that each other step is the last one of its epoch."""
    with job(tmp_path, 1, 3, "--preload=torch", TEST_PAUSE="0.005", TEST_SAMPLES="120", TEST_EVALUATES="1") as running:
        rng, kept = random.Random(3), set[int]()
        for _ in range(3):
            kept = switch(running, rng, kept)
        lines = running.wait(lambda lines: len({line["pid"] for line in live_log.of(lines[-50:], "evaluated")}) == 3)
    assert live_log.violations(lines, 120) == []


def line(step: int, at: float, world: int, pid: int = 1) -> live_log.Line:
    return {"what": "made", "step": step, "at": at, "round": world, "pid": pid}


def test_what_a_change_of_the_world_costs_is_the_time_beyond_a_usual_step_with_what_was_trained_in_vain() -> None:
    first = [line(step, at=step * 0.1, world=1000) for step in range(1, 11)]
    again = [line(step, at=1.5 + (step - 10) * 0.2, world=2000) for step in range(10, 15)]  # step 10 was made by one that was killed then
    found = live_time.gaps([*first, *again], 0.0, 10.0)
    [change] = [gap for gap in found if gap.changes]
    assert (change.step, round(change.seconds, 6), round(change.lost, 6)) == (10, 0.6, 0.4)
    assert round(live_time.ettr(found, 2.0), 6) == 0.8


def test_a_step_is_done_when_its_last_rank_has_made_it() -> None:
    lines = [line(1, 0.1, 1000), line(1, 0.3, 1000, pid=2), line(2, 0.35, 1000), line(2, 0.4, 1000, pid=2), line(3, 1.0, 1000)]
    assert live_time.done(lines) == {1: (0.3, 1000), 2: (0.4, 1000), 3: (1.0, 1000)}
    assert round(live_time.ettr(live_time.gaps(lines, 0.0, 1.0), 1.0, strict=True), 6) == 0.75


@pytest.mark.daily(2)
def test_workers_that_are_killed_while_the_state_travels_change_nothing_for_the_others(tmp_path: Path) -> None:
    with job(tmp_path, 1, 3, TEST_PAUSE="0.005", TEST_WIDTH="1024") as running:
        storm(running, random.Random(2), 4)
        lines = running.lines()
    assert live_log.violations(lines, SAMPLES) == []

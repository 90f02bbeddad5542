"""Workers that compute for longer than the median rank: which of them are named, and when."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from elastirun.agent.hangs.straggler_watch import device_of
from elastirun.agent.hangs.stragglers import LASTING, LEAST_SAMPLES, LEAST_STEPS, Median, Straggler, Stragglers
from elastirun.worker.progress_page import NS, PARTS, Page


class Round:
    """One worker's pages, a window after the other."""

    def __init__(self) -> None:
        self.stragglers = Stragglers()
        self.steps, self.busy, self.median = 100, 7 * NS, 3 * NS
        self.window(1.0, 1.0)  # the first sample is compared with none

    def window(self, seconds: float, median: float, steps: int = 50, pid: int = 1) -> list[Straggler]:
        """Let a window pass in which each step took so long on this rank, and on the median rank."""
        self.steps += steps
        self.busy += int(seconds * steps * NS)
        self.median += int(median * steps * NS)
        return self.stragglers.look({0: Page(pid, 0, self.steps, 0, 0, 0, busy=self.busy, median=self.median)}, None)


def named(windows: Sequence[tuple[float, ...]]) -> list[int]:
    """Return in which windows the worker is named."""
    one = Round()
    return [number for number, window in enumerate(windows) if one.window(*window[:2], *map(int, window[2:]))]


SLOW, USUAL = (0.2, 0.1), (0.12, 0.1)


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ([SLOW] * 6, [LASTING - 1]),
        ([USUAL] * 6, []),
        ([SLOW, SLOW, USUAL, SLOW, SLOW, USUAL], []),
        ([SLOW, SLOW, USUAL, SLOW, SLOW, SLOW, USUAL, SLOW, SLOW, SLOW], [5]),
        ([(0.0004, 0.0001)] * 6, []),  # too little to say anything
        ([(*SLOW, LEAST_STEPS - 1)] * 6, []),
        ([(0.0, 0.0)] * 6, []),  # a script that does not tell
    ],
)
def test_a_worker_that_is_slow_for_three_windows_is_named_once(windows: list[tuple[float, ...]], expected: list[int]) -> None:
    assert named(windows) == expected


def test_a_straggler_is_shown_while_it_is_one_and_named_again_in_another_round() -> None:
    one = Round()
    for _ in range(LASTING):
        one.window(*SLOW)
    assert one.stragglers.slow == {0: Straggler(0, 2.0, 0.2, 0.1)}
    one.window(*USUAL)
    assert one.stragglers.slow == {}
    one.stragglers.start_round()
    assert [bool(one.window(*SLOW)) for _ in range(LASTING + 1)] == [False] * LASTING + [True]


def test_another_process_is_not_compared() -> None:
    one = Round()
    assert [one.window(*SLOW, pid=number) for number in range(2, 9)] == [[]] * 7


@pytest.mark.parametrize(("visible", "local_rank", "device"), [("0,3", 1, "GPU 3"), ("GPU-5fe", 2, "GPU GPU-5fe"), ("4,5", 7, "GPU 7")])
def test_the_device_of_a_worker(visible: str, local_rank: int, device: str) -> None:
    assert device_of({"CUDA_VISIBLE_DEVICES": visible}, local_rank) == device


def sampled(windows: Sequence[dict[int, tuple[float, int]]], job: Median | None = None) -> list[dict[int, Straggler]]:
    """Return the stragglers of each window, of workers that tell so many samples of so many seconds each, by local rank."""
    stragglers, busy, samples = Stragglers(), dict.fromkeys(range(4), 0), dict.fromkeys(range(4), 1)
    found = []
    for window in [dict.fromkeys(windows[0], (1.0, 1)), *windows]:
        for local_rank, (seconds, count) in window.items():
            busy[local_rank] += int(seconds * count * NS)
            samples[local_rank] += count
        page = {rank: Page(1, 0, 1000 * samples[rank], 0, 0, 0, busy=busy[rank], sampled=samples[rank]) for rank in window}
        stragglers.look(page, job)
        found.append(stragglers.slow)
    return found[1:]


def test_workers_that_tell_of_some_steps_are_compared_with_the_median_of_their_node() -> None:
    slow = {0: (0.1, 6), 1: (0.11, 6), 2: (0.25, 6), 3: (0.1, 6)}
    expected = {2: Straggler(2, 2.5, 0.25, 0.1, of_job=False)}
    assert sampled([slow] * 4) == [{}] * (LASTING - 1) + [expected] * 2
    assert sampled([{0: (0.1, 6), 1: (0.2, 6)}] * LASTING)[-1] == {1: Straggler(1, 2.0, 0.2, 0.1, of_job=False)}
    assert sampled([{0: (0.1, 6), 1: (0.14, 6)}] * LASTING)[-1] == {}
    assert sampled([{2: (0.25, 6)}] * 6)[-1] == {}, "a worker alone is its own median"
    assert sampled([{0: (0.1, 6), 1: (0.2, LEAST_SAMPLES - 1)}] * 6)[-1] == {}


def test_workers_that_tell_of_some_steps_are_compared_with_the_median_of_more_ranks() -> None:
    alone = [{0: (0.2, 6)}] * LASTING
    assert sampled(alone, Median(0.1, 2))[-1] == {0: Straggler(0, 2.0, 0.2, 0.1)}
    assert sampled(alone, Median(0.19, 2))[-1] == {}
    assert sampled(alone, Median(0.1, 1))[-1] == {}, "the median of another worker alone"
    two = [{0: (0.1, 6), 1: (0.2, 6)}] * LASTING
    assert sampled(two, Median(0.01, 2))[-1] == {1: Straggler(1, 2.0, 0.2, 0.1, of_job=False)}
    assert sampled(two, Median(0.19, 3))[-1] == {}
    assert sampled(two, Median(0.0, 3))[-1] == {}


def judged(times: Sequence[tuple[float, float]], job: Median | None = None) -> tuple[dict[int, Straggler], tuple[float, ...]]:
    """Return the stragglers in the end among workers with so many seconds and units of work a step, and the times that they share."""
    stragglers = Stragglers()
    for window in range(LASTING + 1):
        pages = {}
        for rank, (seconds, work) in enumerate(times):
            steps, samples = 100 * window, 10 * window + 1
            pages[rank] = Page(
                1, 0, steps, 0, 0, 0, busy=int(samples * seconds * NS), sampled=samples, work=int((7000 + steps * work) * PARTS % 2**64)
            )
        stragglers.look(pages, job)
    return stragglers.slow, tuple(round(one, 9) for one in stragglers.alone)


def test_workers_that_tell_their_work_are_compared_by_their_time_for_a_unit_of_it() -> None:
    longer = [(0.1, 1000.0), (0.11, 1100.0), (0.3, 3000.0), (0.1, 1000.0)]
    assert judged(longer) == ({}, (0.0001,) * 4)
    assert set(judged([(seconds, 0.0) for seconds, _ in longer])[0]) == {2}, "whoever does not tell is judged by its steps"
    assert judged([*longer[:3], (0.1, 0.0)]) == judged([(seconds, 0.0) for seconds, _ in longer]), "as long as one does not tell"
    less = [(0.1, 1000.0), (0.1, 1000.0), (0.1, 1000.0), (0.1, 500.0)]
    assert judged(less)[0] == {3: Straggler(3, 1.6, 0.1, 0.0625, of_job=False)}, "as long for half of the work"
    assert judged([*less[:3], (0.08, 500.0)])[0] == {}, "a part of a step is the same for less work"
    assert judged(less[3:], Median(0.0001, 9))[0] == {0: Straggler(0, 2.0, 0.1, 0.05)}
    assert judged(less[2:3], Median(0.0001, 9))[0] == {}
    assert judged([(0.0009, 1000.0), (0.0009, 500.0)])[0] == {}, "too little to say anything"


def test_a_worker_that_knows_the_median_of_the_job_has_no_other() -> None:
    stragglers, found = Stragglers(), []
    for window in range(LASTING + 1):
        steps = 50 * window
        page = Page(1, 0, steps, 0, 0, 0, busy=steps * NS // 5, median=steps * NS // 10)
        found += stragglers.look({0: page}, Median(0.001, 9))
        assert stragglers.alone == ()
    assert found == [Straggler(0, 2.0, 0.2, 0.1)]

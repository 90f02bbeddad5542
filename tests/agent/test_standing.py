"""The line on where workers are, once in a round, when some have ended or have made no first step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastirun.agent.hangs.causes import Observed
from elastirun.agent.hangs.standing import PERIOD, Standing

BARRIER = (("/x/torch/distributed/distributed_c10d.py", "1", "barrier"), ("/t/t.py", "8", "<module>"))
READING = (("/t/t.py", "5", "read"), ("/t/t.py", "9", "<module>"))


class Node:
    """A node with a worker for each of ``steps``, by local rank; the first waits, the others read."""

    def __init__(self, *steps: int, finished: tuple[int, ...] = (), expects_steps: bool = False) -> None:
        self.said: list[str] = []
        self.asked = 0
        self.workers = SimpleNamespace(processes=dict(enumerate(steps)), finished=[*finished])
        stacks = SimpleNamespace(ask=self.ask, steps=lambda local_rank: steps[local_rank], observe=self.observe)
        self.standing = Standing(cast(Any, self.workers), cast(Any, stacks), expects_steps, self.said.append)
        self.standing.start(100.0)

    def ask(self) -> None:
        self.asked += 1

    def observe(self, local_rank: int, steps: int) -> Observed:
        return Observed(local_rank, local_rank, 100 + local_rank, steps, False, READING if local_rank else BARRIER)

    def run(self, seconds: float) -> None:
        while (due := self.standing.tick(0.0)) <= 100 + seconds:
            self.standing.tick(due)


@pytest.mark.parametrize(
    ("node", "asked"),
    [
        (Node(0, 0), 0),  # a script that stamps no steps gets no line, and no signal
        (Node(4, 4), 0),
        (Node(4, 4, expects_steps=True), 0),
        (Node(0, 0, expects_steps=True), 1),
        (Node(4, 0), 1),
        (Node(4, finished=(1,)), 1),
    ],
)
def test_the_line_comes_where_something_is_odd_and_once(node: Node, asked: int) -> None:
    node.run(PERIOD - 1)
    assert node.asked == 0
    node.run(10 * PERIOD)
    assert (node.asked, len(node.said)) == (asked, asked)


def test_the_line_says_who_has_ended_and_where_the_others_are() -> None:
    node = Node(3, 3, finished=(2,))
    node.run(PERIOD + 1)
    assert node.said == [
        "where the workers here are: rank 2: ended with 0; rank 0: 3 steps, waits for others (t.py:8 in <module>); "
        "rank 1: 3 steps, runs (t.py:5 in read)"
    ]


def test_a_worker_that_ends_later_gets_the_line_when_others_have_run_on_for_long() -> None:
    node = Node(3, 3)
    node.run(PERIOD)
    node.workers.finished.append(2)
    node.run(2 * PERIOD)
    assert node.said == []
    node.run(3 * PERIOD + 1)
    assert len(node.said) == 1


def test_a_round_that_is_over_gets_no_line() -> None:
    node = Node(4, 0)
    node.standing.stop_watching()
    node.run(10 * PERIOD)
    assert (node.asked, node.said) == (0, [])

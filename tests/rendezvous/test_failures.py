"""The order of failures by blame, and one line about each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastirun.rendezvous import failures
from elastirun.rendezvous.wire.records import ExitRecord
from tests.rendezvous.test_formation import failure


@pytest.mark.parametrize(
    ("failed", "text"),
    [
        (failure(2), "rank 2 on n failed (exit code 1)"),
        (replace(failure(2), code=-11), "rank 2 on n failed (SIGSEGV)"),
        (replace(failure(2), code=-40), "rank 2 on n failed (signal 40)"),
        (replace(failure(2), code=-9, note="OOM-killed, 3.9 of 4.0 GiB"), "rank 2 on n failed (SIGKILL, OOM-killed, 3.9 of 4.0 GiB)"),
        (replace(failure(2), code=-9, note="sent from outside (not by this agent)"), "rank 2 on n failed (SIGKILL, sent from outside)"),
        (failure(2, blame=3), "rank 2 on n failed (exit code 1)"),
        (
            replace(failure(2), lines=(" File", "[rank2]: a.b.OwnError: no\x1b[2J", "")),
            "rank 2 on n failed (exit code 1): OwnError: no [2J",
        ),
        (replace(failure(2), lines=("KeyError: " + "k" * 200,)), f"rank 2 on n failed (exit code 1): KeyError: {'k' * 109}…"),
        (replace(failure(2), lines=("The Error: of a log line",)), "rank 2 on n failed (exit code 1)"),
        (failure(2, blame=5), "rank 2 on n failed (exit code 1), perhaps for having lost its peers"),
    ],
)
def test_a_failure_in_one_line(failed: ExitRecord, text: str) -> None:
    assert failures.describe(failed) == text


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([failure(0, 5, 1.0), failure(1, 0, 9.0)], [1, 0]),  # blame before time
        ([failure(0, 0, 2.0), failure(1, 0, 1.0)], [1, 0]),  # then time
        ([failure(1), failure(0)], [0, 1]),  # then rank
        ([], []),
    ],
)
def test_root_cause_order(records: list[ExitRecord], expected: list[int]) -> None:
    assert [f.rank for f in failures.root_cause(records)] == expected

"""The search for wrong ends after the loss of the node that hosts the store (``tests/system/host_losses.py``), and one such loss."""

from __future__ import annotations

import json
from pathlib import Path

from tests.system.falling_hosts import samples
from tests.system.host_losses import Ran, disorder, one_loss


def test_a_step_of_a_round_after_the_first_one_of_a_later_round_is_found() -> None:
    old = [Ran("run", 1, rank, 2, rank, (0.0, 1.0, 2.0, 5.0 + rank)) for rank in (0, 1)]
    assert not list(disorder([*old, Ran("run", 2, 0, 1, 1, (4.0, 5.5, 6.0))])), "step 3 of round 1 was made at 5, as rank 0 says"
    (found,) = disorder([*old, Ran("run", 2, 0, 1, 1, (4.0, 4.5, 6.0))])
    assert found == "round 1 made a step 0.50 s after the first step of a later round"
    assert list(disorder([*old, Ran("run", 2, 0, 1, 1, (4.0, 4.5)), Ran("run", 3, 0, 1, 1, (5.0,))])) == [found], "round 3 made no step"


def test_two_rounds_of_one_number_are_found() -> None:
    assert list(disorder([Ran("run", 2, 0, 1, node, (0.0,)) for node in (0, 1)])) == ["two workers were rank 0 of round 2"]


def test_samples_that_are_lost_or_seen_again_are_found(tmp_path: Path) -> None:
    def rounds(*found: tuple[int, int]) -> list[str]:
        """Return what is wrong where round n makes steps from one number to another, of half of the samples each; two steps an epoch."""
        for number, (first, last) in enumerate(found, 1):
            for rank in (0, 1):
                halves = {step: range(step % 2 * 100 + rank, step % 2 * 100 + 100, 2) for step in range(first, last + 1)}
                lines = [json.dumps([step, (step - 1) // 2, list(ids)]) + "\n" for step, ids in halves.items()]
                (tmp_path / f"{number}-{rank}").write_text("".join(lines))
        return list(samples(tmp_path))

    assert rounds((1, 3), (3, 4)) == [] == rounds((1, 3), (2, 6))
    assert rounds((1, 3), (5, 6)) == ["steps are missing, or a step was made in two epochs", "epoch 1: 100 samples lost, 0 seen again"]
    (tmp_path / "2-1").unlink()
    assert rounds((1, 4))[0].startswith("epoch 2: ")


def test_workers_that_fail_as_the_host_is_killed_cost_no_restart() -> None:
    """The others' workers lose their peer before their agents know that the store is gone."""
    result = one_loss("kill", 3, expire=30.0, after=0.3, peers="fail")
    assert not result.wrong and result.took is not None and result.took < 25, result

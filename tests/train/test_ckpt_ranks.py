"""What ranks tell each other arrives whole, however long it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastirun.errors import CheckpointError
from elastirun.train import Checkpointer
from elastirun.train.checkpoints import restoring
from elastirun.train.checkpoints.ranks import SHORT, Ranks, on_every_rank
from tests.support import worlds

LENGTHS = [(0, 0), (1, 0), (SHORT - 8, 3), (SHORT - 7, SHORT - 8), (0, SHORT - 7), (2 * SHORT, 1), (70_000, SHORT)]  # of ranks 0 and 1


def text(rank: int, length: int) -> str:
    return ("xyé"[rank] * length).encode()[:length].decode(errors="ignore")


def tell(rank: int, world: int) -> list[list[str]]:
    ranks = Ranks()
    told = [ranks.gather_text(text(rank, (*lengths, 5)[rank])) for lengths in LENGTHS]
    ranks.close()
    return told


def test_texts_of_any_length_arrive_in_rank_order() -> None:
    expected = [[text(rank, length) for rank, length in enumerate((*lengths, 5))] for lengths in LENGTHS]
    assert worlds.run(3, tell) == [expected] * 3


def fail_on_some(rank: int, world: int) -> list[str]:
    ranks = Ranks()

    def work() -> str | None:
        if rank:
            raise CheckpointError(f"no {rank}")
        return "fine"

    told = []
    for each in (work, lambda: f"+-{rank}", lambda: None):
        try:
            told += on_every_rank(ranks, each)
        except CheckpointError as error:
            told.append(str(error))
    ranks.close()
    return told


def test_an_error_of_one_rank_is_that_of_all_and_results_are_shared() -> None:
    assert worlds.run(3, fail_on_some) == [["rank 1: no 1", "+-0", "+-1", "+-2", "", "", ""]] * 3


def test_the_writer_does_not_start_beside_a_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a processor for some ten milliseconds, in which a restore from memory could be over."""
    state = {"x": torch.ones(3)}
    first = Checkpointer(tmp_path)
    first.save(1, state)
    first.close()
    again = Checkpointer(tmp_path)
    started, put = [], restoring.put

    def watch(*args: Any) -> None:
        assert again._opened.publisher is not None
        started.append(again._opened.publisher._writer_started)
        return put(*args)

    monkeypatch.setattr(restoring, "put", watch)
    assert again.restore(state) == 1 and started == [False]
    again.save(2, state)
    again.wait()
    again.close()

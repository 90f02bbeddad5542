"""Rounds of real agents and the directory of their checkpoints."""

from __future__ import annotations

import signal

import pytest

from elastirun.checkpoint.directory import open_directory
from elastirun.errors import ClaimLost
from tests.agent.test_round_check import asks
from tests.checkpoint.saves import save, stage, yes
from tests.support.cluster import Cluster


def test_a_checkpoint_of_a_node_that_was_frozen_after_its_question_is_never_published(nodes: Cluster) -> None:
    for i in (1, 2):
        nodes.agent(i, "--expire=1", nnodes="1:2")
    both, frozen = nodes.round(2), nodes.agents[1]
    stale = next(worker for worker in both if worker.env["GROUP_RANK"] == "1")
    directory = open_directory(str(nodes.tmp_path / "checkpoints"))
    old = directory.claim(stale.env["ELASTIRUN_FENCE"], lambda: asks(stale))
    assert save(directory, old.name, 1, old.sequence, current=lambda: asks(stale)) == "step-00000001"
    commit = stage(directory, old.name, 2, old.sequence + 1)

    def current() -> bool:
        assert asks(stale)
        frozen.send_signal(signal.SIGSTOP)
        (alone,) = nodes.round(1, after=stale.round)
        new = directory.claim(alone.env["ELASTIRUN_FENCE"], lambda: asks(alone))
        assert [one.name for one in new.found] == ["step-00000001"]
        save(directory, new.name, 5, new.sequence, current=lambda: asks(alone))
        return True

    try:
        with pytest.raises(ClaimLost, match="another round or job has claimed"):
            directory.publish(old.name, commit, current)
        with pytest.raises(ClaimLost, match="a later round has claimed"):
            directory.claim(stale.env["ELASTIRUN_FENCE"], yes)
    finally:
        frozen.send_signal(signal.SIGCONT)
    with pytest.raises(ClaimLost, match="another round has taken the place of this one"):
        directory.claim(stale.env["ELASTIRUN_FENCE"], lambda: asks(stale))
    assert [one.name for one in directory.scan()] == ["step-00000005", "step-00000001"]

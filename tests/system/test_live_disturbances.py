"""The ways of live_disturbances.py in short: hangs, deaths, the store's host. The job goes on live, and nothing is lost or doubled."""

from __future__ import annotations

from pathlib import Path

from tests.system.live_disturbances import KINDS, Outcome, play

WAYS = {way.name: way for ways in KINDS.values() for way in ways}


def disturb(folder: Path, *names: str) -> None:
    outcome = Outcome()
    play(folder, [WAYS[name] for name in names], ["--preload=torch", "--failure-grace=1"], outcome)
    assert outcome.wrong == [] and outcome.ways == {"live": len(names)}


def test_deaths_while_the_world_changes_and_a_hang_that_no_agent_sees(tmp_path: Path) -> None:
    """There is no ``--hang-timeout``: the others tell their agent that they have lost a peer."""
    disturb(tmp_path, "rank 0 dies at: came next", "dies at: sent 3", "dies at: takes 3", "stopped at: came first")


def test_who_waits_for_a_checkpoint_is_interrupted_in_a_later_world_of_a_round_too(tmp_path: Path) -> None:
    disturb(tmp_path, "stopped in an agreement")


def test_the_host_of_the_store_dies_with_its_worker(tmp_path: Path) -> None:
    disturb(tmp_path, "in a step")

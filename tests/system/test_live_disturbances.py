"""Some ways of live_disturbances.py, in one job of one node: it goes on live, and no step and no sample is lost or doubled."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.live_disturbances import KINDS, Outcome, play

WAYS = {way.name: way for ways in KINDS.values() for way in ways}


def disturb(folder: Path, *names: str) -> None:
    outcome = Outcome()
    play(folder, [WAYS[name] for name in names], ["--preload=torch"], outcome)
    assert outcome.wrong == [] and outcome.ways == {"live": len(names)}


@pytest.mark.long
def test_after_deaths_and_hangs_in_a_change_of_the_world_the_others_go_on(tmp_path: Path) -> None:
    """There is no ``--hang-timeout``: of a worker that stops when groups are made, the others tell their agent that it is lost."""
    deaths = "rank 0 dies at: came next", "dies at: sent 3", "dies at: takes 3"
    disturb(tmp_path, *deaths, "stopped in an agreement", "stopped at: came first")


def test_the_points_at_which_a_live_job_is_disturbed_are_there(tmp_path: Path) -> None:
    install = "import sys; from pathlib import Path; from tests.support.live_traps import install; install(Path(sys.argv[1]), print, 1)"
    subprocess.run([sys.executable, "-c", install, str(tmp_path)], check=True, cwd=Path(__file__).parents[2])

"""The simulated histories in transcripts/ are unchanged. Rewrite: python -m tests.sim.transcript tests/rendezvous/transcripts/*.txt"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.transcript import told

STORIES = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_the_story_goes_as_it_is_told(path: Path) -> None:
    assert told(path.read_text()) == path.read_text()


def test_there_are_stories() -> None:
    assert len(STORIES) >= 20

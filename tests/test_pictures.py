"""The picture of README: its texts are in the picture, none lies over another one, and it has a title and a form for dark pages."""

from __future__ import annotations

import importlib
import re
import sys
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parent.parent
SVG = "{http://www.w3.org/2000/svg}"
CHARACTER = 6.4  # pixels of one at font-size 12, on average
Box = tuple[str, float, float, float]  # words, left, right, baseline


def texts(svg: str) -> list[Box]:
    found = []
    for text in ElementTree.fromstring(svg).iter(f"{SVG}text"):
        words, x = "".join(text.itertext()), float(text.attrib["x"])
        width = CHARACTER * len(words)
        left = x - width * {"end": 1.0, "middle": 0.5}.get(text.get("text-anchor", ""), 0.0)
        found.append((words, left, left + width, float(text.attrib["y"])))
    return found


def overlapping(svg: str) -> list[tuple[str, str]]:
    """Return the pairs of texts that lie over each other."""
    return [(a[0], b[0]) for a, b in combinations(texts(svg), 2) if abs(a[3] - b[3]) < 12 and a[1] < b[2] and b[1] < a[2]]


def outside(svg: str) -> list[str]:
    """Return the texts that the picture cuts off."""
    width = float(re.findall(r'viewBox="0 0 ([\d.]+) ', svg)[0])
    return [words for words, left, right, _ in texts(svg) if left < 0 or right > width]


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    yield importlib.import_module("failover_svg").draw
    del sys.modules["failover_svg"]


def event(at: float, node: int, name: str, **more: Any) -> tuple[float, int, dict[str, Any]]:
    return at, node, {"event": name, **more}


def test_events_at_one_moment_are_written_below_each_other(draw: Any) -> None:
    events = [event(0.0, 1, "start"), event(0.1, 2, "start"), event(30.0, 2, "worker_exit")]
    for number in range(1, 7):
        at = 27.0 + number / 2
        events += [event(at, 1, "round", round=number, nodes=3), event(at + 0.2, 1, "kill"), event(at + 0.25, 1, "start")]
    events += [event(30.4, 1, "round", round=6, nodes=3), event(30.5, 1, "worker_exit")]
    drawn = draw(events)
    assert len(texts(drawn)) > 20 and overlapping(drawn) == [] and outside(drawn) == []


def test_the_picture_of_readme_can_be_read() -> None:
    drawn = (ROOT / "docs" / "failover.svg").read_text()
    assert "<title>A run of examples/failover.py" in drawn and "prefers-color-scheme: dark" in drawn
    assert overlapping(drawn) == [] and outside(drawn) == []


def test_an_overlap_is_found() -> None:
    words = '<text x="1" y="9">kill -9 at</text><text x="30" y="15">joins</text>'
    drawn = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 50 9">{words}</svg>'
    assert overlapping(drawn) == [("kill -9 at", "joins")] and outside(drawn) == ["kill -9 at", "joins"]

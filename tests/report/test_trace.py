"""The trace for Perfetto: each state, mark and rate of the story, in the fields of the Trace Event Format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from elastirun.report import trace
from tests.report.events import Agent, two_nodes
from tests.report.test_story import told


def traced(folder: Path, agents: list[Agent]) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Return the events of the trace, and the names of its processes."""
    found = json.loads(trace.trace(told(folder, agents)))["traceEvents"]
    return found, {one["pid"]: one["args"]["name"] for one in found if one["ph"] == "M"}


def test_the_states_of_a_node_are_slices_one_after_the_other(tmp_path: Path) -> None:
    events, names = traced(tmp_path, two_nodes())
    assert names == {0: "job", 1: "a", 2: "b"}
    slices = [one for one in events if one["ph"] == "X" and one["pid"] == 1]
    assert [(one["name"], one["ts"], one["dur"]) for one in slices][:3] == [
        ("waiting for nodes", 0, 8_000_000),
        ("starting", 8_000_000, 5_000_000),
        ("training", 13_000_000, 33_000_000),
    ]
    assert slices[3]["args"] == {"round": 1, "state": "stopping"}
    assert all(one["ts"] + one["dur"] == after["ts"] for one, after in zip(slices, slices[1:], strict=False))


def test_marks_have_the_numbers_of_the_page_and_counters_the_sizes(tmp_path: Path) -> None:
    events, _ = traced(tmp_path, two_nodes())
    marks = {one["name"]: one["args"] for one in events if one["ph"] == "i"}
    assert marks["1: failure in round 1"] == {"reason": "rank 1 failed <b>here</b>"}
    assert [one["args"]["workers"] for one in events if one["ph"] == "C" and one["name"] == "workers"] == [4, 0, 4, 0, 2, 0, 4, 0]
    assert {one["args"]["steps a second"] for one in events if one["name"] == "steps a second"} == {5.0, 10.0}


def test_each_event_has_the_fields_of_its_kind_whatever_the_texts_are(tmp_path: Path) -> None:
    agents = two_nodes()
    for line in agents[0].lines:
        line.update({name: "\ud800\x00\u2028" + "x" * 5000 for name in ("reason", "name") if name in line})
    events, names = traced(tmp_path, agents)
    needed = {"X": {"pid", "tid", "ts", "dur"}, "i": {"pid", "tid", "ts", "s"}, "C": {"pid", "ts", "args"}, "M": {"pid", "args"}}
    for one in events:
        assert needed[one["ph"]] | {"name"} <= one.keys() and one["pid"] in names
        assert one["name"].isprintable() and len(one["name"]) <= 300
        assert all(isinstance(one[field], int) and one[field] >= 0 for field in ("ts", "dur", "pid", "tid") if field in one)

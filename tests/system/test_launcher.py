"""``benchmarks/launcher.py``: one short run of elastirun alone, and what is made of results."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import launcher
from benchmarks.lab import TORCHRUN, Bench
from benchmarks.launcher_report import ROWS, Result, Run, brief_table, cell, conditions, picture, results_table, write_page


@pytest.mark.daily(3)
def test_a_short_run_measures_and_writes_what_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "launcher.json"
    launcher.main(["--rounds=1", "--rows", "start-2", "exit", "--launchers", "elastirun", f"--json={path}", "--markdown"])
    printed = capsys.readouterr().out
    run = Run.from_json(path.read_text())
    step, end = (run.of(row, "elastirun")[0].value for row in ("start-2", "exit"))
    assert step and end and end < step
    assert printed.splitlines() == results_table(run, list(ROWS)).splitlines()


@pytest.fixture
def run() -> Run:
    made = Run("a machine", "2026-01-02", ["elastirun", "elastirun, executed", "torchrun", "torchrun, unshared"], {}, 8)
    kills = [
        ("elastirun", 2.0),
        ("elastirun", 1.0),
        ("elastirun", 3.0),
        ("elastirun, executed", 0.2),
        ("torchrun", 4.0),
        ("torchrun, unshared", 5.0),
    ]
    for name, value in kills:
        made.add("kill", name, Result(value))
    lost = [Result(None, "job lost", 65.2), Result(None, "job lost", 74.0), Result(None, "not within 120 s")]
    for result in [Result(60.0), *lost]:
        made.add("node", "torchrun", result)
    made.add("node", "elastirun", Result(6.0))
    made.add("memory", "elastirun", Result(910.4))
    return made


def test_ratios_are_those_of_medians_to_the_better_torchrun(run: Run) -> None:
    assert cell(run, "kill", "elastirun") == "2.00 (0.50)"
    assert cell(run, "kill", "elastirun, executed") == "0.200 (0.05)"
    assert cell(run, "kill", "torchrun, unshared") == "5.00"
    assert json.loads(run.to_json())["summary"]["kill"]["elastirun"] == {"n": 3, "happened": 3, "median": 2.0, "ratio": 0.5}


def test_runs_are_read_as_one_that_says_how_often_each_row_was_measured(run: Run, tmp_path: Path) -> None:
    other = Run("another machine", "2026-01-03", ["elastirun", "new"], {"new": ["elastirun --new"]}, 8)
    other.add("node", "new", Result(3.0))
    other.add("stall", "new", Result(1.0))
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, one in zip(files, (run, other), strict=True):
        file.write_text(one.to_json())
    both = launcher.read(files)
    assert both.launchers == [*run.launchers, "new"] and both.commands == other.commands
    assert both.of("node", "new") == [Result(3.0)] and both.of("kill", "elastirun") == run.of("kill", "elastirun")
    assert conditions(both) == (
        "Medians of 4, of 3 in `kill`, of 1 in `stall`, `memory`; launchers taking turns, 2026-01-02. "
        "a machine. Of 2026-01-03: another machine."
    )


def test_what_did_not_happen_counts_as_longer_than_everything_else(run: Run) -> None:
    assert cell(run, "node", "torchrun") == "job lost after 65–74 s, 2 of 4; not within 120 s, 1 of 4"
    assert cell(run, "node", "elastirun") == "6.00", "there is nothing to compare with"
    run.add("node", "torchrun", Result(50.0))
    run.add("node", "torchrun", Result(40.0))
    run.add("node", "torchrun", Result(45.0))
    assert cell(run, "node", "torchrun").startswith("60.0; job lost")
    assert cell(run, "node", "torchrun, unshared") == "-"


def test_a_page_gets_the_rows_that_it_names_and_keeps_the_rest(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- measured: conditions kill memory alone -->\nold\n<!-- end -->\nafter\n")
    write_page(page, run)
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after") and "old" not in lines
    rows = [line.split("|")[1].strip() for line in lines if line.startswith("| ")]
    assert rows[1:] == [ROWS["kill"].title, "memory (PSS) of 8 idle workers with torch, MiB"]


def test_a_brief_table_has_the_better_torchrun_of_each_row_and_ours(run: Run) -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in brief_table(run, ["kill", "node"]).splitlines()]
    assert rows[0] == ["seconds, unless said otherwise", "torchrun", "elastirun (of torchrun)"]
    assert rows[2:] == [[ROWS["kill"].title, "4.00", "2.00 (0.50)"], [ROWS["node"].title, cell(run, "node", "torchrun"), "6.00"]]


def test_the_picture_has_each_row_that_is_seconds_and_says_what_never_came(run: Run) -> None:
    drawn = "|".join(ElementTree.fromstring(picture(run)).itertext())
    assert ROWS["kill"].title.replace("`", "") in drawn and "PSS" not in drawn
    assert "|never|" in drawn and "|0.200|" in drawn


@pytest.mark.parametrize(("values", "expected"), [([None, None], False), ([None] * 3, True), ([1.0, None, None, None], False)])
def test_a_row_is_given_up_after_three_jobs_of_which_none_came_up(values: list[float | None], expected: bool) -> None:
    assert launcher.given_up([Result(value) for value in values]) is expected


def test_each_row_has_one_scenario() -> None:
    assert sorted(row for rows in launcher.SCENARIOS for row in rows) == sorted(ROWS)


def test_what_follows_in_a_lost_job_is_lost_with_it() -> None:
    def scenario(bench: Bench, settings: launcher.Settings) -> launcher.Rows:
        yield "alone", Result(1.0)
        yield "join", Result(None, "job lost", 67.0)
        raise AssertionError("the job has ended")

    found = launcher.run_job(("alone", "join", "stall"), scenario, TORCHRUN, launcher.Settings())
    assert list(map(str, found.values())) == ["1.00", "job lost after 67 s", "job lost after 67 s"]

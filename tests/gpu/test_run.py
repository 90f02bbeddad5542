"""``make gpu`` where there is no GPU: every part runs dry. And what its driver does with parts that fail, or are late."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.gpu import page
from tests.gpu.__main__ import LEAST, Machine, Run, count, left, summary
from tests.gpu.parts import NEVER_TRIED, PARTS, Claim, Part
from tests.support.until import until

HERE = Path(__file__).parent
MACHINE = Machine("", 2, "Python 3, torch 2", "abc")
HOLDS = "from tests.support.figures import figure; figure('c', '1 of 1', n=1)"
CLAIMS = (Claim("c", "It holds"),)


def part(code: str, name: str = "p", limit: float = 60.0, alone: bool = False) -> Part:
    return Part(name, limit, ("-c", code), CLAIMS, alone)


def runs(pid: int) -> bool:
    """Tell whether a process has not ended; a zombie, which its new parent has not reaped yet, has."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def make_run(folder: Path, seconds: float = 600.0, machine: Machine = MACHINE) -> Run:
    return Run(machine, folder, time.monotonic() + seconds, {})


# -- a dry run of all ---------------------------------------------------------------------------------------------------


class DryRun:
    """``run.sh`` with all parts, and a thread that reads its output, so that tests can wait for one part each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        env = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
        command = [str(HERE / "run.sh"), "--folder", str(folder), "--seconds", "2000"]  # other tests run beside it
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.said: list[str] = []
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        with self.process.stdout as lines:
            self.said.extend(lines)

    def part(self, name: str) -> dict[str, Any]:
        until(lambda: self.over or any(line.startswith(f"{name}: ") for line in list(self.said)), f"part {name}", 170, state=self.end)
        found: dict[str, Any] = json.loads((self.folder / "gpu.json").read_text())["parts"][name]
        return found

    @property
    def over(self) -> bool:
        return self.process.poll() is not None

    def end(self) -> str:
        return "".join(self.said[-20:])

    def close(self) -> None:
        if not self.over:
            for process in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
                process.kill()
        self.process.wait()
        self.reader.join()


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DryRun]:
    made = DryRun(tmp_path_factory.mktemp("gpu"))
    yield made
    made.close()


@pytest.mark.parametrize("name", [part.name for part in sorted(PARTS, key=lambda part: part.alone)])
def test_each_part_runs_dry_and_has_a_figure_for_each_claim(dry: DryRun, name: str) -> None:
    found = dry.part(name)
    (meant,) = (part for part in PARTS if part.name == name)
    assert (found["verdict"], found["dry"]) == ("passed", True), found["end"]
    assert {claim.name for claim in meant.claims} <= set(found["figures"])


def test_the_summary_comes_last_and_is_short(dry: DryRun) -> None:
    for part in PARTS:
        dry.part(part.name)
    assert dry.process.wait(60) == 0
    dry.reader.join()
    said = "".join(dry.said)
    assert dry.said[-1] == f"{len(PARTS)} passed\n" and len(said[said.index("\n\n") :]) < 4000
    assert page.merge({}, json.loads((dry.folder / "gpu.json").read_text())["parts"]) == {}  # a dry run shows nothing of GPUs


# -- the driver ---------------------------------------------------------------------------------------------------------


def test_a_part_that_fails_or_gives_no_figure_or_is_late_stops_no_other(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    pids = tmp_path / "pids"
    child = f"import os, sys, time; open({str(pids)!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
    late = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], start_new_session=True)"
    parts = [part("1 / 0", "broken"), part("pass", "silent"), part(late, "slow", 1.0), part(HOLDS, "good")]
    for one in parts:
        run.carry_out(one)
    verdicts = {name: found["verdict"] for name, found in run.results.items()}
    assert verdicts == {"broken": "failed", "silent": "failed", "slow": "late", "good": "passed"}
    assert "ZeroDivisionError" in run.results["broken"]["end"]
    assert not runs(int(pids.read_text()))
    assert json.loads(run.path.read_text())["parts"] == run.results
    assert summary(run, parts, 1.0).splitlines()[-1] == "1 passed, 2 failed, 1 late"


def test_no_part_begins_when_the_time_is_over(tmp_path: Path) -> None:
    run = make_run(tmp_path, LEAST - 1)
    run.carry_out(part(HOLDS))
    assert run.results["p"]["verdict"] == "skipped"


def test_the_summary_of_failures_is_short(tmp_path: Path) -> None:
    run, parts = make_run(tmp_path), [part(f"print('x ' * 9999); {n} / 0", f"p{n}") for n in range(5)]
    for one in parts:
        run.carry_out(one)
    text = summary(run, parts, 1.0)
    assert len(text) < 4000 and text.count("ZeroDivisionError") == 5


def test_what_has_passed_with_the_same_commit_and_machine_is_not_left() -> None:
    same = {"machine": MACHINE.name, "versions": MACHINE.versions, "commit": MACHINE.commit}
    results: dict[str, Any] = {one.name: {"verdict": "passed", **same} for one in PARTS}
    assert left(results, MACHINE) == []
    results["ddp"]["verdict"], results["state"]["commit"] = "late", "other"
    del results["agent"]
    assert [one.name for one in left(results, MACHINE)] == ["ddp", "state", "agent"]
    assert left(results, replace(MACHINE, gpu="a GPU")) == list(PARTS)


def test_tests_count_for_the_claim_that_names_them(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    cases = "<testcase name='test_a[1]'/><testcase name='test_a[2]'><failure/></testcase><testcase name='test_b'><skipped/></testcase>"
    report.write_text(f"<testsuites>{cases}</testsuites>")
    assert count(report, "test_a") == {"text": "1 of 2 tests; failed: test_a[2]", "values": {"passed": 1, "ran": 2}, "holds": False}
    assert count(report, "test_b") is None


def test_a_part_that_does_not_exist_is_a_mistake_of_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu", "--parts", "nonsense", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True)
    assert done.returncode == 2 and "there is no part 'nonsense'" in done.stderr.splitlines()[-1]


# -- the page -----------------------------------------------------------------------------------------------------------

FOUND = {"dry": False, "verdict": "passed", "machine": "G", "versions": "t", "date": "d", "commit": "c"}


def test_the_page_has_a_row_for_each_claim_first_those_that_were_never_tried() -> None:
    text = {"text": "5 ms", "values": {}}
    results = {
        "ddp": {**FOUND, "figures": {"gradients": {**text, "holds": True}, "no-wait": {**text, "holds": False}}},
        "state": {**FOUND, "verdict": "late", "figures": {}},
    }
    lines = page.page(results).splitlines()
    rows = [line for line in lines if line.startswith("| <a id=")]
    assert "1. G; t" in lines
    claims = [*NEVER_TRIED, *(claim for one in PARTS for claim in one.claims)]
    assert len(rows) == len(claims) == len({claim.name for claim in claims})
    kinds = ["never tried", "not tried yet", "missed", "no figure", "5 ms"]
    order = [next(at for at, kind in enumerate(kinds) if kind in row) // 2 for row in rows]
    assert order == sorted(order) and rows[-1].endswith("| 5 ms | [1](#machines) | d | c |") and "`gradients`" not in rows[-1]


def test_a_new_result_takes_the_place_of_an_older_one_unless_it_is_dry_or_was_skipped() -> None:
    old = {"ddp": {**FOUND, "date": "old"}}
    assert page.merge(old, {"ddp": {**FOUND, "verdict": "late"}})["ddp"]["verdict"] == "late"
    for no in ({"dry": True}, {"verdict": "skipped"}):
        assert page.merge(old, {"ddp": {**FOUND, **no}}) == old


def test_the_page_is_what_the_results_say() -> None:
    results = json.loads(page.RESULTS.read_text())["parts"]
    assert page.PAGE.read_text() == page.page(results), "python -m tests.gpu.page writes it anew"

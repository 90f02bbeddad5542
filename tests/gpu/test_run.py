"""``make gpu`` without a GPU: some of the parts run dry each day. And what its driver does with parts that fail, or are late."""

from __future__ import annotations

import json
import os
import re
import signal
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

from tests.gpu import page, results
from tests.gpu.__main__ import LEAST, NOT_INSTALLED, Run, left, summary
from tests.gpu.machine import UNKNOWN, Machine
from tests.gpu.parts import NEVER_TRIED, PARTS, PYTEST, Claim, Part
from tests.support import daily
from tests.support.until import PATIENCE, until

HERE = Path(__file__).parent
MACHINE = Machine("", 2, "Python 3, torch 2", "abc")
HOLDS = "from tests.support.figures import figure; figure('c', '1 of 1', n=1)"
CLAIMS = (Claim("c", "It holds"),)
SHARE = 6  # one of so many parts runs dry each day, others each day
DUE = daily.due(PARTS, SHARE)


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
    """``run.sh`` with the parts that are ``DUE``, and a thread that reads its output, so that tests can wait for one part each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        env = {**{k: v for k, v in os.environ.items() if k != "TEST_DAY"}, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
        names = [part.name for part in DUE]
        command = [str(HERE / "run.sh"), "--folder", str(folder), "--seconds", "2000", "--parts", *names]  # other tests run beside it
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


@pytest.mark.parametrize("name", [part.name for part in sorted(DUE, key=lambda part: part.alone)])
def test_each_part_runs_dry_and_has_a_figure_for_each_claim(dry: DryRun, name: str) -> None:
    found = dry.part(name)
    (meant,) = (part for part in PARTS if part.name == name)
    assert (found["verdict"], found["dry"]) in (("passed", True), ("missing", name == "frameworks")), found["end"]
    assert found["verdict"] == "missing" or all(found["figures"][claim.name]["holds"] for claim in meant.claims)


def test_the_summary_comes_last_and_is_short(dry: DryRun) -> None:
    for part in DUE:
        dry.part(part.name)
    assert dry.process.wait(PATIENCE) == 0
    dry.reader.join()
    said = "".join(dry.said)
    assert re.fullmatch(r"\d+ passed(, 1 missing)?\n", dry.said[-1]) and len(said[said.index("\n\n") :]) < 4000
    assert page.merge({}, json.loads((dry.folder / "gpu.json").read_text())["parts"]) == {}  # a dry run shows nothing of GPUs


# -- the driver ---------------------------------------------------------------------------------------------------------


def test_a_part_that_fails_or_gives_no_figure_or_is_late_stops_no_other(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    pids = tmp_path / "pids"
    child = f"import os, sys, time; open({str(pids)!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
    late = f"{HOLDS}; import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], start_new_session=True)"
    absent = f"raise SystemExit({NOT_INSTALLED})"
    codes = {"broken": f"{HOLDS}; 1 / 0", "silent": "pass", "absent": absent, "slow": late, "good": HOLDS}
    parts = [part(code, name, 1.0 if name == "slow" else 60.0) for name, code in codes.items()]
    for one in parts:
        run.carry_out(one)
    verdicts = {name: found["verdict"] for name, found in run.results.items()}
    assert verdicts == {"broken": "failed", "silent": "failed", "absent": "missing", "slow": "late", "good": "passed"}
    holds = {name: found["figures"]["c"]["holds"] for name, found in run.results.items() if found["figures"]}
    assert holds == {"broken": False, "slow": False, "good": True}  # a figure of a part that failed is not a claim that holds
    assert "ZeroDivisionError" in run.results["broken"]["end"]
    assert not runs(int(pids.read_text()))
    assert results.read(tmp_path / "gpu.json") == run.results
    assert summary(run, parts, 1.0).splitlines()[-1] == "1 passed, 2 failed, 1 late, 1 missing"


def test_no_part_begins_when_the_time_is_over_and_nothing_is_forgotten(tmp_path: Path) -> None:
    make_run(tmp_path).carry_out(part(HOLDS))
    known = results.read(tmp_path / "gpu.json")
    run = make_run(tmp_path, LEAST - 1)
    run.results = dict(known)
    run.carry_out(part(HOLDS))
    assert run.now["p"]["verdict"] == "skipped" and results.read(tmp_path / "gpu.json") == known


def test_a_dry_run_does_not_take_the_place_of_a_result_of_a_gpu() -> None:
    real, dry, skipped = {**FOUND, "date": "1"}, {**FOUND, "date": "2", "dry": True}, {**FOUND, "verdict": "skipped"}
    assert results.keep(real, dry) is results.keep(real, skipped) is real
    assert results.keep(dry, real) is results.keep(skipped, real) is results.keep(None, real) is real


def test_a_signal_ends_the_parts_and_the_summary_comes_all_the_same(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    waits = f"open({str(fifo)!r}, 'w').close(); import time; time.sleep(1000)"
    code = (
        "import sys; from tests.gpu import __main__ as driver; from tests.gpu.parts import Claim, Part;"
        f"driver.PARTS = [Part(n, 60, ('-c', {waits!r}), (Claim('c', ''),), True) for n in 'ab'];"
        f"sys.exit(driver.main(['--folder', {str(tmp_path)!r}]))"
    )
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=env, cwd=HERE.parents[1], stdout=subprocess.PIPE, text=True) as driver:
        with open(fifo):  # the first part runs
            other = subprocess.run(command, env=env, cwd=HERE.parents[1], stderr=subprocess.PIPE, text=True)
            assert other.returncode == 2 and "another run uses" in other.stderr.splitlines()[-1]
            driver.send_signal(signal.SIGTERM)
        said = driver.communicate(timeout=PATIENCE)[0]
    assert driver.returncode == 128 + signal.SIGTERM and said.splitlines()[-1] == "2 skipped"


def test_the_summary_of_failures_is_short(tmp_path: Path) -> None:
    run, parts = make_run(tmp_path), [part(f"print('x ' * 9999); {n} / 0", f"p{n}") for n in range(5)]
    for one in parts:
        run.carry_out(one)
    text = summary(run, parts, 1.0)
    assert len(text) < 4000 and text.count("ZeroDivisionError") == 5


def test_what_has_passed_with_the_same_commit_and_machine_is_not_left() -> None:
    same = {"machine": MACHINE.name, "versions": MACHINE.versions, "commit": MACHINE.commit}
    found: dict[str, Any] = {one.name: {"verdict": "passed", **same} for one in PARTS}
    assert left(found, MACHINE) == []
    found["ddp"]["verdict"], found["state"]["commit"] = "late", "other"
    del found["agent"]
    assert [one.name for one in left(found, MACHINE)] == ["ddp", "state", "agent"]
    assert left(found, replace(MACHINE, gpu="a GPU")) == list(PARTS)
    for one in found.values():
        one["commit"] = UNKNOWN
    assert left(found, replace(MACHINE, commit=UNKNOWN)) == list(PARTS)


def test_tests_count_for_the_claim_that_names_them(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    cases = "<testcase name='test_a[1]'/><testcase name='test_a[2]'><failure/></testcase><testcase name='test_b'><skipped/></testcase>"
    report.write_text(f"<testsuites>{cases}<testcase name='test_c'/></testsuites>")
    claims = tuple(Claim(name, "", f"test_{name}", count) for name, count in (("a", 2), ("b", 1), ("c", 2)))
    said = "".join(f'FIGURE {{"claim": "{name}", "text": "fine", "values": {{}}}}\n' for name in "abc")
    figures = results.figures_of(Part("p", 60, PYTEST, claims), said, report, "failed")
    assert figures["a"] == {"text": "1 of 2 tests; failed: test_a[2]", "values": {"passed": 1, "of": 2}, "holds": False}
    assert "b" not in figures  # a test that was skipped shows nothing, whatever was printed
    assert (figures["c"]["text"], figures["c"]["holds"]) == ("1 of 2 tests", False)  # one of them has gone
    report.write_text("<testsuites><testcase")
    assert results.figures_of(Part("p", 60, PYTEST, claims), said, report, "late") == {}


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--parts", "nonsense"], "there is no part 'nonsense'"),
        (["--parts", "ddp", "left"], "'left' stands alone"),
        (["--seconds", "nan"], "give a number of seconds"),
        (["--folder", "/dev/null"], "--folder: "),
        ([], "does not hold results"),
    ],
)
def test_a_mistake_is_answered_with_one_line(tmp_path: Path, options: list[str], line: str) -> None:
    if not options:
        (tmp_path / "gpu.json").write_text('{"parts": {"ddp": null}}')
    command = [sys.executable, "-m", "tests.gpu", "--folder", str(tmp_path), *options]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True)
    assert done.returncode == 2 and line in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


# -- the page -----------------------------------------------------------------------------------------------------------

FOUND = {"dry": False, "verdict": "passed", "machine": "G", "versions": "t", "date": "2026-01-02T03:04:05Z", "commit": "c", "end": ""}


def test_the_page_has_a_row_for_each_claim_first_those_that_were_never_tried() -> None:
    text = {"text": "5 |\n ms", "values": {}}
    found = {
        "ddp": {**FOUND, "figures": {"gradients": {**text, "holds": True}, "no-wait": {**text, "holds": False}}},
        "state": {**FOUND, "verdict": "late", "figures": {}},
        "compile": {**FOUND, "verdict": "failed", "figures": {"compile": {**text, "holds": False}}},
    }
    lines = page.page(found).splitlines()
    rows = [line for line in lines if line.startswith("| <a id=")]
    assert "1. G; t" in lines
    claims = [*NEVER_TRIED, *(claim for one in PARTS for claim in one.claims)]
    assert len(rows) == len(claims) == len({claim.name for claim in claims})
    kinds = ["never tried", "not tried yet", "**missed**", "**no figure** (the part state: late)", "5 \\| ms"]
    order = [next(at for at, kind in enumerate(kinds) if kind in row) // 2 for row in rows]
    assert order == sorted(order) and rows[-1].endswith("| 5 \\| ms | [1](#machines) | 2026-01-02 | c |")
    assert sum("**missed** (the part compile: failed): 5" in row for row in rows) == 1
    assert sum('id="sync-batchnorm"' in row and "not tried yet" in row for row in rows) == 1  # a claim that is newer than the result


def test_a_newer_result_takes_the_place_of_an_older_one_unless_it_is_dry_or_says_nothing() -> None:
    old = {"ddp": {**FOUND}}
    assert page.merge(old, {"ddp": {**FOUND, "verdict": "late"}})["ddp"]["verdict"] == "late"
    for no in ({"dry": True}, {"verdict": "skipped"}, {"verdict": "missing"}, {"date": "2025-12-31T00:00:00Z"}):
        assert page.merge(old, {"ddp": {**FOUND, **no}}) == old


def test_results_of_another_form_change_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = page.RESULTS.read_text(), page.PAGE.read_text()
    other = tmp_path / "gpu.json"
    other.write_text(json.dumps({"parts": {"ddp": {**FOUND, "figures": {"gradients": {"text": None, "holds": True}}}}}))
    assert page.main([str(other)]) == 2 and "does not hold results" in capsys.readouterr().err
    assert (page.RESULTS.read_text(), page.PAGE.read_text()) == before


def test_the_page_is_what_the_results_say() -> None:
    assert page.PAGE.read_text() == page.page(results.read(page.RESULTS)), "python -m tests.gpu.page writes it anew"

"""Runs the parts of tests/gpu/parts.py, each within its limit, all within 540 s, and writes what came of them to FOLDER/gpu.json.

A part that fails or is late does not stop the others. Parts that only test run side by side; those that measure run alone, after them.
Called again with ``--parts left``, only those run that have not passed yet with the same commit, machine and versions.
The summary comes last. The exit code is 0 if all parts passed, and 1 if one did not.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import psutil

from elastirun.agent.processes.process_tree import PR_SET_CHILD_SUBREAPER
from tests.gpu import parts
from tests.gpu.parts import PARTS, Part
from tests.support.figures import printed

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 540.0  # for everything
LEAST = 10.0  # seconds: a part is not begun with less left
GRACE = 5.0  # seconds between the two signals that end a part
DRY_LIMITS = 4  # times the limit of a part in a dry run, on a few cores that have other work, too
TOGETHER = 3  # parts side by side: their processes take turns on the GPU
SIZE = 3900  # characters of the summary: below 4,000
LOG_END = 3000  # characters of the output that gpu.json keeps of a part that did not pass
SPECIFICATION = """
import json, platform, torch
cuda = torch.cuda.is_available()
properties = torch.cuda.get_device_properties(0) if cuda else None
print(json.dumps({
    "gpu": f"{torch.cuda.device_count()} x {properties.name}, {properties.total_memory >> 30} GiB" if cuda else "",
    "versions": f"Python {platform.python_version()}, torch {torch.__version__}" + (
        f", CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if cuda else ""),
}))
"""


@dataclass(frozen=True)
class Machine:
    """The machine of a run. ``gpu``: empty where there is none, so that parts run dry."""

    gpu: str
    cores: int
    versions: str
    commit: str

    @property
    def name(self) -> str:
        return f"{self.gpu or 'no GPU'}, {self.cores} cores"


@dataclass
class Result:
    """What came of a part. ``figures``: by claim, {"text", "values", "holds"}. ``end``: of its output, unless it passed."""

    verdict: str  # "passed", "failed", "late" (ended at its limit) or "skipped" (no time was left)
    seconds: float
    dry: bool
    machine: str
    versions: str
    commit: str
    date: str
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    end: str = ""


@dataclass
class Run:
    """A run of some parts: what it needs to start one, and what came of those that have ended."""

    machine: Machine
    folder: Path
    until: float  # monotonic time at which everything has ended
    results: dict[str, dict[str, Any]]
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def path(self) -> Path:
        return self.folder / "gpu.json"

    def carry_out(self, part: Part) -> None:
        """Run a part, and write what came of it."""
        began = time.monotonic()
        left = self.until - began
        limit = min(part.limit * (1 if self.machine.gpu else DRY_LIMITS), left)
        if left < LEAST:
            verdict, output = "skipped", ""
        else:
            code, output = self.start(part, limit)
            verdict = "late" if code is None else "failed" if code else "passed"
        seconds = round(time.monotonic() - began, 1)
        figures = figures_of(part, output, self.folder / f"{part.name}.xml")
        if verdict == "passed" and any(claim.name not in figures for claim in part.claims):
            verdict = "failed"
        end = "" if verdict == "passed" else output[-LOG_END:]
        machine = self.machine
        found = Result(
            verdict,
            seconds,
            not machine.gpu,
            machine.name,
            machine.versions,
            machine.commit,
            date.today().isoformat(),
            figures,
            end,
        )
        with self.lock:
            self.results[part.name] = asdict(found)
            self.write()
        print(f"{part.name}: {verdict}, {seconds:.0f} s", flush=True)

    def start(self, part: Part, limit: float) -> tuple[int | None, str]:
        """Return the exit code of a part, or None if it was late, and its output."""
        log = self.folder / f"{part.name}.log"
        env = dict(os.environ) if self.machine.gpu else {**os.environ, "TEST_GPU": "dry"}
        with open(log, "wb") as out:
            process = subprocess.Popen(
                command(part, self.folder, not self.machine.gpu),
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
                end_tree(process)
        return code, log.read_text(errors="replace")

    def write(self) -> None:
        machine = self.machine
        content = {
            "machine": machine.name,
            "versions": machine.versions,
            "commit": machine.commit,
            "parts": self.results,
        }
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(content, indent=1) + "\n")
        new.replace(self.path)


# -- one part -----------------------------------------------------------------------------------------------------------------


def command(part: Part, folder: Path, dry: bool) -> list[str]:
    """Return the command of a part; in a dry run with small numbers."""
    values = {"folder": str(folder), "device": "cpu" if dry else "cuda"}
    made = [sys.executable]
    for argument in part.arguments:
        if argument.startswith("{") and ":" in argument:
            name, _, usual = argument[1:-1].partition(":")
            argument = {"few": "1", "width": "256"}[name] if dry else usual
        made.append(argument.format(**values))
    return [*made, f"--junitxml={folder / part.name}.xml"] if part.is_pytest else made


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """End a process by SIGTERM, and what it had started ``GRACE`` seconds later by SIGKILL."""
    below = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    for one in below:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.kill()
    process.wait()


def end_orphans() -> None:
    """Kill what ended parts have left: this process is the subreaper, so all of it is below this process."""
    while left_behind := psutil.Process().children(recursive=True):
        for one in left_behind:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        with suppress(ChildProcessError):
            while os.waitpid(-1, 0)[0]:
                pass


def figures_of(part: Part, output: str, report: Path) -> dict[str, dict[str, Any]]:
    """Return the figures that the part has printed, and a count of the tests of each claim that tests show."""
    figures = dict(printed(output))
    if part.is_pytest and report.exists():
        for claim in part.claims:
            if claim.tests and (counted := count(report, claim.tests)):
                figures.setdefault(claim.name, counted)
    return figures


def count(report: Path, beginning: str) -> dict[str, Any] | None:
    """Return the figure of the tests in pytest's XML whose names begin so; None if none of them ran."""
    cases = [
        case
        for case in ElementTree.parse(report).iter("testcase")
        if str(case.get("name")).startswith(beginning)
    ]
    ran = [case for case in cases if case.find("skipped") is None]
    if not ran:
        return None
    failed = [
        str(case.get("name"))
        for case in ran
        if case.find("failure") is not None or case.find("error") is not None
    ]
    text = f"{len(ran) - len(failed)} of {len(ran)} tests" + (
        f"; failed: {', '.join(failed)}" if failed else ""
    )
    return {"text": text, "values": {"passed": len(ran) - len(failed), "ran": len(ran)}, "holds": not failed}


# -- all parts ----------------------------------------------------------------------------------------------------------------


def look() -> Machine:
    """Return what is known of this machine. Raises SystemExit where torch cannot say it."""
    asked = subprocess.run([sys.executable, "-c", SPECIFICATION], capture_output=True, text=True)
    if asked.returncode:
        raise SystemExit(f"torch cannot be asked for GPUs:\n{asked.stderr}")
    said = json.loads(asked.stdout.splitlines()[-1])
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    commit = os.environ.get("GPU_COMMIT") or git.stdout.strip() or "unknown"
    return Machine(said["gpu"], len(os.sched_getaffinity(0)), said["versions"], commit)


def earlier(path: Path) -> dict[str, dict[str, Any]]:
    """Return the results of an earlier run that wrote to ``path``; empty if there is none."""
    try:
        return dict(json.loads(path.read_text())["parts"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def left(results: dict[str, dict[str, Any]], machine: Machine) -> list[Part]:
    """Return the parts that have not passed with this commit on this machine."""

    def passed(part: Part) -> bool:
        found = results.get(part.name, {})
        same = [found.get(what) for what in ("machine", "versions", "commit")] == [
            machine.name,
            machine.versions,
            machine.commit,
        ]
        return same and found.get("verdict") == "passed"

    return [part for part in PARTS if not passed(part)]


def summary(run: Run, chosen: Sequence[Part], seconds: float) -> str:
    """Return a line for each part, with its figures or the end of its output, in fewer than 4,000 characters."""
    machine = run.machine
    head = f"{machine.name}; {machine.versions}; {machine.commit}; {seconds:.0f} s" + (
        "" if machine.gpu else "; a dry run"
    )
    verdicts = [run.results[part.name]["verdict"] for part in chosen]
    end = ", ".join(
        f"{verdicts.count(one)} {one}" for one in ("passed", "failed", "late", "skipped") if one in verdicts
    )
    room = (SIZE - len(head) - len(end)) // len(chosen) - 1
    lines = [head]
    for part in chosen:
        found = run.results[part.name]
        figures = "; ".join(f"{claim}: {figure['text']}" for claim, figure in found["figures"].items())
        last = " ".join(found["end"].split())[-room // 2 :]
        line = f"{part.name:<12} {found['verdict']:<7} {found['seconds']:4.0f} s  {figures}"
        lines.append(line[:room] if not last else f"{line[: room - len(last) - 4]} ... {last}"[:room])
    return "\n".join([*lines, end])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tests/gpu/run.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(part.name for part in PARTS)
    parser.add_argument(
        "--parts", nargs="+", default=[], metavar="NAME", help=f"'left', or some of: {names}; default: all"
    )
    into = ROOT / "runs" / "gpu"
    parser.add_argument(
        "--folder", type=Path, default=into, help="for gpu.json and each part's output; default: runs/gpu"
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="for everything; default: %(default).0f"
    )
    chosen = parser.parse_args(arguments)
    began = time.monotonic()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    folder: Path = chosen.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    machine = look()
    run = Run(machine, folder, began + chosen.seconds - GRACE - 1, earlier(folder / "gpu.json"))
    try:
        wanted = (
            left(run.results, machine)
            if chosen.parts == ["left"]
            else parts.of(chosen.parts)
            if chosen.parts
            else list(PARTS)
        )
    except KeyError as error:
        parser.error(f"there is no part {error}; there are: {names}")
    print(f"{machine.name}; {machine.versions}; {machine.commit}", flush=True)
    width = max(2, min(TOGETHER, machine.cores // 4))
    for together, count in ((True, width), (False, 1)):
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(run.carry_out, [part for part in wanted if part.alone is not together]))
        end_orphans()
    if not wanted:
        print("no part is left")
        return 0
    print("\n" + summary(run, wanted, time.monotonic() - began), flush=True)
    return int(any(run.results[part.name]["verdict"] != "passed" for part in wanted))


if __name__ == "__main__":
    sys.exit(main())

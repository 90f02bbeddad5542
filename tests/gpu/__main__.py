"""Runs the parts of tests/gpu/parts.py, each within its limit, all within 540 s, and writes what came of them to FOLDER/gpu.json.

A part that fails or is late does not stop the others. Parts that only test run side by side; those that measure run alone, after
them. Called again with ``--parts left``, only those run that have not passed yet with the same commit, machine and versions.
The summary comes last. Exit code: 0 if no part failed (of one whose packages are missing nothing is known), 1 if one failed, was late
or was skipped, 2 for wrong use, 128 + n after signal n.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from json import dumps
from pathlib import Path
from types import FrameType

import psutil

from elastirun.agent.processes.process_tree import PR_SET_CHILD_SUBREAPER
from tests.gpu import parts
from tests.gpu.machine import ROOT, UNKNOWN, Machine, look
from tests.gpu.parts import PARTS, Part
from tests.gpu.results import (
    FAILED,
    LATE,
    MISSING,
    PASSED,
    SKIPPED,
    Result,
    Results,
    figures_of,
    keep,
    read,
    write,
)

SECONDS = 540.0  # for everything
LEAST = 10.0  # seconds: a part is not begun with less left
GRACE = 5.0  # seconds between the two signals that end a part
DRY_LIMITS = 4  # times the limit of a part in a dry run, on a few cores that have other work, too
TOGETHER = 3  # parts side by side: their processes take turns on the GPU
NOT_INSTALLED = 77  # exit code of a part that lacks packages
SIZE = 3900  # characters of the summary: below 4,000
LOG_END = 3000  # characters of the output that gpu.json keeps of a part that did not pass
UNWANTED = (
    "PYTEST_ADDOPTS",
    "PYTHONOPTIMIZE",
    "TEST_GPU",
)  # variables that would leave out tests or assertions, or the GPU


@dataclass
class Run:
    """A run of some parts: what it needs to start one, and what came of those that have ended."""

    machine: Machine
    folder: Path
    until: float  # monotonic time at which everything has ended
    results: Results
    signum: int = 0  # the signal that has ended it; 0: none
    now: Results = field(default_factory=dict)  # those of this run
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def carry_out(self, part: Part) -> None:
        """Run a part, and write what came of it."""
        began = time.monotonic()
        left = self.until - began
        usual = part.limit * (1 if self.machine.gpu else DRY_LIMITS)
        verdict, output = SKIPPED, ""
        report = self.folder / f"{part.name}.xml"
        if left >= LEAST and not self.signum:
            report.unlink(missing_ok=True)
            code, output = self.start(part, min(usual, left))
            verdict = self.judge(code, usual <= left)
        figures = figures_of(part, output, report, verdict)
        if verdict == PASSED and not all(figures.get(claim.name, {}).get("holds") for claim in part.claims):
            verdict = FAILED
        machine = self.machine
        seconds = round(time.monotonic() - began, 1)
        end = "" if verdict == PASSED else output[-LOG_END:]
        at = f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}"
        found = asdict(
            Result(
                verdict,
                seconds,
                not machine.gpu,
                machine.name,
                machine.versions,
                machine.commit,
                at,
                figures,
                end,
            )
        )
        with self.lock:
            self.now[part.name] = found
            self.results[part.name] = keep(self.results.get(part.name), found)
            self.write()
        say(f"{part.name}: {verdict}, {seconds:.0f} s")

    def judge(self, code: int | None, whole: bool) -> str:
        """Return the verdict of a part with this exit code; None: it was late. ``whole``: it had its whole limit."""
        if self.signum or (code is None and not whole):
            return SKIPPED
        return LATE if code is None else {0: PASSED, NOT_INSTALLED: MISSING}.get(code, FAILED)

    def start(self, part: Part, limit: float) -> tuple[int | None, str]:
        """Return the exit code of a part, or None if it was late, and its output."""
        log = self.folder / f"{part.name}.log"
        env = {name: value for name, value in os.environ.items() if name not in UNWANTED}
        env["TEST_GPU"] = "required" if self.machine.gpu else "dry"
        try:
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
            self.running.append(process)
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
                end_tree(process)
            return code, log.read_text(errors="replace")
        except OSError as error:
            return 1, f"{log}: {error}"

    def write(self) -> None:
        machine = self.machine
        content = {
            "machine": machine.name,
            "versions": machine.versions,
            "commit": machine.commit,
            "parts": self.results,
        }
        try:
            write(self.folder / "gpu.json", dumps(content, indent=1) + "\n")
        except OSError as error:
            say(f"gpu.json cannot be written: {error}")

    def stop(self, signum: int, _: FrameType | None) -> None:
        """End the parts that run; no other one begins. The summary says what is known."""
        self.signum = signum
        for process in self.running:
            if process.poll() is None:
                process.terminate()


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
    with suppress(subprocess.TimeoutExpired):  # a process that hangs in the driver cannot be waited for
        process.wait(GRACE)


def end_orphans() -> None:
    """Kill what ended parts have left: this process is the subreaper, so all of it is below this process."""
    until = time.monotonic() + GRACE
    while (left_behind := psutil.Process().children(recursive=True)) and time.monotonic() < until:
        for one in left_behind:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(left_behind, GRACE)


# -- all parts ----------------------------------------------------------------------------------------------------------------


def left(results: Results, machine: Machine) -> list[Part]:
    """Return the parts that have not passed with this commit on this machine."""
    here = [machine.name, machine.versions, machine.commit]

    def passed(part: Part) -> bool:
        found = results.get(part.name, {})
        same = [found.get(what) for what in ("machine", "versions", "commit")] == here and machine.commit != UNKNOWN
        return same and found["verdict"] == PASSED

    return [part for part in PARTS if not passed(part)]


def summary(run: Run, chosen: Sequence[Part], seconds: float) -> str:
    """Return a line for each part, with its figures or the end of its output, in fewer than 4,000 characters."""
    machine = run.machine
    head = f"{machine.name}; {machine.versions}; {machine.commit}; {seconds:.0f} s" + ("" if machine.gpu else "; a dry run")
    verdicts = [run.now[part.name]["verdict"] for part in chosen]
    kinds = (PASSED, FAILED, LATE, SKIPPED, MISSING)
    end = ", ".join(f"{verdicts.count(one)} {one}" for one in kinds if one in verdicts)
    room = (SIZE - len(head) - len(end)) // len(chosen) - 1
    lines = [head]
    for part in chosen:
        found = run.now[part.name]
        figures = "; ".join(f"{claim}: {figure['text']}" for claim, figure in found["figures"].items())
        last = " ".join(found["end"].split())[-room // 2 :]
        line = f"{part.name:<12} {found['verdict']:<7} {found['seconds']:4.0f} s  {figures}"
        lines.append(line[:room] if not last else f"{line[: room - len(last) - 4]} ... {last}"[:room])
    return "\n".join([*lines, end])


def say(text: str) -> None:
    """Print a line. Nobody need read it: results are in the file."""
    with suppress(BrokenPipeError):
        print(text, flush=True)


def choose(names: list[str], run: Run) -> list[Part]:
    """Return the parts with these names. Raises ValueError, with one line, for names that are none."""
    if names == ["left"]:
        return left(run.results, run.machine)
    if unknown := [name for name in names if name not in {part.name for part in PARTS}]:
        raise ValueError("'left' stands alone" if "left" in unknown else f"there is no part {unknown[0]!r}")
    return parts.of(names) if names else list(PARTS)


def hold(folder: Path) -> int:
    """Return a lock of ``folder``, for this process alone. Raises OSError where another run has it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests/gpu/run.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(part.name for part in PARTS)
    parser.add_argument("--parts", nargs="+", default=[], metavar="NAME", help=f"'left', or some of: {names}; default: all")
    into = ROOT / "runs" / "gpu"
    parser.add_argument("--folder", type=Path, default=into, help="for gpu.json and each part's output; default: runs/gpu")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything; default: %(default).0f")
    chosen = parser.parse_args(arguments)
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    began = time.monotonic()
    folder: Path = chosen.folder.resolve()
    if not 0 < chosen.seconds < float("inf"):
        parser.error("--seconds: give a number of seconds")
    machine = look()
    try:
        lock = hold(folder)
        old = read(folder / "gpu.json") if (folder / "gpu.json").exists() else {}
        run = Run(machine, folder, began + chosen.seconds - 2 * GRACE, old)
        wanted = choose(chosen.parts, run)
    except BlockingIOError:
        parser.error(f"--folder: another run uses {folder}; wait for its end, or give another folder")
    except (OSError, ValueError) as error:
        parser.error(f"{error}; parts are: {names}" if isinstance(error, ValueError) else f"--folder: {error}")
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, run.stop)
    say(f"{machine.name}; {machine.versions}; {machine.commit}")
    if not machine.gpu and Path("/dev/nvidia0").exists():
        say("torch sees no GPU, though there is one: is CUDA_VISIBLE_DEVICES set, and is this torch's CUDA that of the driver?")
    if not wanted:
        say("no part is left")
        return 0
    carry_out(run, wanted)
    say("\n" + summary(run, wanted, time.monotonic() - began))
    os.close(lock)
    bad = any(run.now[part.name]["verdict"] not in (PASSED, MISSING) for part in wanted)
    return 128 + run.signum if run.signum else int(bad)


def carry_out(run: Run, wanted: Sequence[Part]) -> None:
    """Run the parts: first those that can run side by side."""
    width = max(1, min(TOGETHER, run.machine.cores // 2))
    for together, count in ((True, width), (False, 1)):
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(run.carry_out, [part for part in wanted if part.alone is not together]))
        end_orphans()


if __name__ == "__main__":
    sys.exit(main())

"""The commands of elastirun besides a launch, by real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elastirun.cli import command_line
from tests.support.until import PATIENCE

KNOWN = "launch, check, status, scale, report, chaos, checkpoint, takeover, warm"


def run(folder: Path, *words: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-m", "elastirun", *words], cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "begins"),
    [
        (["help"], command_line.help_text()),
        (["help", "launch"], command_line.full_help_text()),
        (["help", "check"], "usage: elastirun check "),
        (["help", "status"], "usage: elastirun status "),
        (["help", "scale"], "usage: elastirun scale "),
        (["help", "report"], "usage: elastirun report "),
        (["help", "chaos"], "usage: elastirun chaos "),
        (["help", "checkpoint"], "Usage: elastirun checkpoint "),
        (["help", "takeover"], "usage: elastirun takeover "),
        (["help", "warm"], "usage: elastirun warm "),
        (["checkpoint", "ls", "--help"], "Usage: elastirun checkpoint ls "),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_each_command_shows_what_it_is_asked_for(tmp_path: Path, words: list[str], begins: str) -> None:
    code, out, err = run(tmp_path, *words)
    assert (code, err, out[: len(begins.rstrip())]) == (0, "", begins.rstrip())


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["help", "lunch"], 2, f"elastirun: help: there is no help on 'lunch' (did you mean launch?); there is for {KNOWN}\n"),
        (["check", "--shared="], 2, "elastirun check: --shared: it names no folder (is a variable unset?)\n"),
        (["scale"], 2, "elastirun scale: the number of nodes is missing; give one from 1 on, or max for as many as --nnodes allows\n"),
        (["check", "--shared=here"], 2, "elastirun check: --shared: 'here' is no absolute path; give one that is the same on all nodes\n"),
        (["check", "--torch=maybe"], 2, "elastirun check: --torch: 'maybe' is neither on nor off\n"),
        (["check", "--nnodes=2"], 2, "elastirun check: --nnodes: 2 nodes need a place to meet; "),
        (["checkpoint", "ls", "/gone"], 2, "elastirun checkpoint: /gone does not exist\n"),
        (["warm", "start"], 2, "elastirun warm: 'start' is not known here; the only word is stop (see elastirun warm --help)\n"),
        (["takeover", "nobody"], 2, "elastirun takeover: no package of "),
        (["statsu"], 3, "elastirun: SCRIPT: there is no file 'statsu' in "),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, words: list[str], code: int, line: str) -> None:
    found, out, err = run(tmp_path, *words)
    assert (found, out, err.count("\n")) == (code, "", 1) and err.startswith(line)


def test_a_misspelt_command_gets_a_hint(tmp_path: Path) -> None:
    assert run(tmp_path, "statsu")[2].endswith("(did you mean elastirun status?)\n")


@pytest.mark.parametrize("name", ["help", "check", "checkpoint", "takeover"])
def test_a_script_of_that_name_is_started(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("print('started')")
    assert run(tmp_path, name)[:2] == (0, "started\n")


def test_a_check_with_a_script_that_is_not_here_says_so(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, "check", "--torch=off", "nosuch.py")
    assert (code, out, err.count("\n")) == (3, "", 1) and f"there is no file 'nosuch.py' in {tmp_path}" in err

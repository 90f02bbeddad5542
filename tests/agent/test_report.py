"""The failure report, and error files in which anyone may have written anything."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from elastirun.agent.failures.report import read_error_file, report
from elastirun.rendezvous.wire.records import Blame, ExitRecord
from tests.support.descriptors import descriptors


def failure(rank: int, blame: int, after: float, code: int = 1, lines: tuple[str, ...] = ()) -> ExitRecord:
    return ExitRecord(f"n{rank // 2}", rank, rank % 2, 100 + rank, code, blame, after, lines)


def written(path: Path, content: Any) -> str:
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return str(path)


def test_what_torchs_record_writes(tmp_path: Path) -> None:
    stack = 'Traceback (most recent call last):\n  File "t.py", line 1\nValueError: boom\n'
    message = {"message": "ValueError: boom", "extraInfo": {"py_callstack": stack, "timestamp": "1700000000"}}
    assert read_error_file(written(tmp_path / "a", {"message": message})) == tuple(stack.splitlines())
    assert read_error_file(written(tmp_path / "b", {"message": "out of\nluck"})) == ("out of", "luck")
    assert read_error_file(written(tmp_path / "c", {"message": {"message": "just this"}})) == ("just this",)
    assert read_error_file(written(tmp_path / "d", {"message": {"message": "m", "extraInfo": {"py_callstack": 7}}})) == ("m",)
    long = read_error_file(written(tmp_path / "e", {"message": "\n".join("y" * 1000 for _ in range(99))}))
    assert long is not None and len(long) == 30 and len(long[0]) == 500


def test_torchs_record_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_errors = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    def main() -> None:
        raise ValueError("no such data")

    with pytest.raises(ValueError):
        torch_errors.record(main)()
    lines = read_error_file(str(tmp_path / "error.json"))
    assert lines is not None and lines[0] == "Traceback (most recent call last):" and lines[-1] == "ValueError: no such data"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"message": {"mess',
        b"\xff\xfe",
        b"[" * 100_000,
        b"[1]",
        b"null",
        b"1" * 10_000,
        {},
        {"message": None},
        {"message": ""},
        {"message": {}},
        {"message": {"message": ["x"], "extraInfo": [1]}},
        {"message": "x" * (1 << 20)},
    ],
)
def test_an_error_file_with_anything_else_in_it(tmp_path: Path, content: Any) -> None:
    assert read_error_file(written(tmp_path / "error.json", content)) is None


def test_an_error_file_that_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    before = descriptors()
    for path in ("", str(tmp_path), str(tmp_path / "none"), str(tmp_path / "fifo"), "/dev/zero", "a\0b"):
        assert read_error_file(path) is None
    assert descriptors() == before


# ---- the report


def test_the_report() -> None:
    records = [
        failure(0, Blame.VICTIM, 12.3, lines=("RuntimeError: Connection closed by peer",)),
        failure(3, Blame.OWN_FAULT, 12.4, code=-11, lines=("about to\tread", "Fatal Python error: Segmentation fault")),
        replace(failure(1, Blame.SUSPECT, 13, code=-15), note="stopped by its agent after all"),
    ]
    began = datetime(2026, 11, 20, 9, 8, 7).timestamp()
    expected = """\
================================================================================
train.py FAILED
--------------------------------------------------------------------------------
Other failures (2):
  rank 1 (n0, local_rank 1, pid 101): killed by SIGTERM (signal 15), stopped by its agent after all; 13.0 s after the start
  rank 0 (n0, local_rank 0, pid 100): exit code 1, probably for having lost its peers; 12.3 s after the start
--------------------------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-20_09:08:19
  host      : n1
  rank      : 3 (local_rank: 1)
  exitcode  : -11 (pid: 103) (SIGSEGV)
  how       : killed by SIGSEGV (signal 11)
  when      : 12.4 s after the start of round 4
  traceback : its last words (stderr, or what @record kept)
    about to    read
    Fatal Python error: Segmentation fault
--------------------------------------------------------------------------------
  logs      : /logs/job_1/attempt_0 (on this node)
  restarts used: 2 of 3
  reason    : a worker failed and no restart is left
================================================================================
"""
    text = report("train.py", "a worker failed and no restart is left", records, 4, "2 of 3", began, "/logs/job_1/attempt_0")
    assert text == expected


TORCHRUNS = re.compile(
    r"^(?P<script>[^\n]+) FAILED$.*"
    r"^Root Cause \(first observed failure\):\n"
    r"\[0\]:\n"
    r"  time      : (?P<time>\d{4}-\d\d-\d\d_\d\d:\d\d:\d\d)\n"
    r"  host      : (?P<host>[^\n]+)\n"
    r"  rank      : (?P<rank>\d+) \(local_rank: (?P<local>\d+)\)\n"
    r"  exitcode  : (?P<code>-?\d+) \(pid: (?P<pid>\d+)\) *(?:\((?P<signal>\w+)\))?$.*"
    r"^  traceback : ",
    re.MULTILINE | re.DOTALL,
)


@pytest.mark.parametrize("code", [1, -9])
def test_what_reads_torchruns_report_reads_ours(code: int) -> None:
    """Torchrun's own report must match the same pattern."""
    torch_errors = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    theirs = str(torch_errors.ChildFailedError("t.py", {3: torch_errors.ProcessFailure(1, 103, code, "/nowhere")}))
    ours = report("t.py", "r", [failure(3, Blame.OWN_FAULT, 2.5, code)], 1, "0 of 0", time.time() - 2.5)
    found, expected = TORCHRUNS.search(ours), TORCHRUNS.search(theirs)
    assert found and expected, theirs
    assert {**found.groupdict(), "time": "", "host": ""} == {**expected.groupdict(), "time": "", "host": ""}


def test_a_plain_exit_is_said_once() -> None:
    text = report("t.py", "r", [failure(0, Blame.OWN_FAULT, 1)])
    assert "  exitcode  : 1 (pid: 100)\n" in text and "exit code" not in text and "how  " not in text
    assert "    (nothing)\n" in text and "time  " not in text, "no round was started here"
    assert report("t.py", "r", []).splitlines()[1:-1] == ["t.py FAILED", "-" * 80, "  reason    : r"]


def test_ten_lines_tell_what_happened_and_forty_the_root_cause() -> None:
    words = tuple(f"line {i}" for i in range(30))
    records = [failure(rank, Blame.VICTIM, rank) for rank in range(40)] + [failure(41, Blame.OWN_FAULT, 0, -9, words)]
    lines = report("t.py", "because of rank 41", records, 1, "0 of 0", 0.0, "/logs").splitlines()
    assert "  reason    : because of rank 41" in lines[-10:] and "    line 29" in lines[-10:]
    assert "    line 0" in lines[-40:] and "  rank      : 41 (local_rank: 1)" in lines[-40:]


def test_the_report_of_a_big_job_is_short_and_carries_no_control_characters() -> None:
    records = [failure(rank, Blame.VICTIM, rank) for rank in range(1000)]
    text = report("t.py\x1b[2J", "r\n\x07", [*records, failure(1001, Blame.OWN_FAULT, 0, lines=("\x1b]0;x\x07\u00e9\udcff",))])
    assert len(text.splitlines()) < 50 and "  ... and 984 more\n" in text
    assert "    \\x1b]0;x\\x07\u00e9\\udcff\n" in text
    assert all(c.isprintable() or c == "\n" for c in text)
    assert max(len(line) for line in text.splitlines()) <= 120

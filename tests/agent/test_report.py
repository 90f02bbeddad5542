"""Who is to blame, in what words, and what is made of files and lines that anyone may have written."""

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

from elastirun.agent.failures.report import (
    KILLED_BY_US,
    OWN_FAULT,
    SUSPECT,
    VICTIM,
    classify,
    describe_code,
    exit_code,
    explain,
    has_failed,
    make_record,
    read_error_file,
    report,
)
from elastirun.agent.processes.workers import WorkerExit
from elastirun.rendezvous.records import ExitRecord

TRACEBACK = (
    "[rank2]: Traceback (most recent call last):",
    '[rank2]:   File "train.py", line 13, in <module>',
    "[rank2]:     dist.all_reduce(t)",
)
GLOO_CLOSED = "[rank2]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5343. This is"
GLOO_RESET = "[rank2]: RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:5343: Connection reset by peer. This is"
NCCL = (
    "[rank2]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2772, unhandled system error",
    "[rank2]: ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
    "[rank2]: Last error:",
    "[rank2]: socketProgress: Connection closed by remote peer host<34423>",
)
WATCHDOG = "[E ProcessGroupNCCL.cpp:632] [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE)"
WRAPPED = "The above exception was the direct cause of the following exception"
STORE = "[W TCPStore.cpp:138] [c10d] recvValueWithTimeout failed on Sock: Failed to recv, got 0 bytes. Connection was likely closed."


def ended(code: int, by_us: bool = False) -> WorkerExit:
    return WorkerExit(local_rank=1, rank=5, pid=77, code=code, after=12.3456, killed_by_us=by_us)


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        (3, ()),
        (1, (*TRACEBACK, "[rank2]: ValueError: boom")),
        (1, (*TRACEBACK, "torch.OutOfMemoryError: CUDA out of memory", "Connection closed by peer")),
        (1, (STORE, *TRACEBACK, "[rank2]: RuntimeError: CUDA error: an illegal memory access")),  # an old warning is no reason
        (1, (*TRACEBACK, GLOO_CLOSED, "During handling of the above exception:", *TRACEBACK, "KeyError: 'x'")),
        (1, (*TRACEBACK, "MyError: RuntimeError: Broken pipe")),
        (-6, (STORE, *TRACEBACK, "[rank2]: ValueError: boom", "terminate called without an active exception")),  # at interpreter exit
        (1, (*TRACEBACK, "[rank2]: KeyError: 'x'", WRAPPED, *TRACEBACK, f"RuntimeError: {GLOO_CLOSED}")),
        (127, ("elastirun: cannot run x: No such file or directory",)),
        (-11, (GLOO_CLOSED,)),
        (-7, ()),
        (-4, ()),
        (-8, ()),
        (-6, ("a.out: a.c:3: main: Assertion `0' failed.",)),
        (-9, (STORE,)),  # somebody killed it, perhaps the kernel for its memory
        (-15, ()),
        (1, (*TRACEBACK, "elastirun.train.errors.ReductionFailed: the process group has been destroyed: make one")),
        (1, (*TRACEBACK, "elastirun.train.errors.ModelMismatch: rank 1 has other parameters")),
    ],
)
def test_its_own_fault(code: int, lines: tuple[str, ...]) -> None:
    assert classify(ended(code), lines) == OWN_FAULT


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        (1, (*TRACEBACK, GLOO_CLOSED)),
        (1, (*TRACEBACK, GLOO_CLOSED, "", f"[rank2]: {WRAPPED}:", "", *TRACEBACK, "[rank2]: TrainingError: step 7 failed")),
        (-6, (*TRACEBACK, GLOO_CLOSED, "terminate called without an active exception")),
        (1, (*TRACEBACK, GLOO_RESET)),
        (1, (*TRACEBACK, *NCCL)),
        (1, (*TRACEBACK, "torch.distributed.DistStoreError: wait timeout after 1000ms, keys: /x")),
        (
            1,
            (
                *TRACEBACK,
                "torch.distributed.DistNetworkError: The client socket has timed out after 1000ms",
            ),
        ),
        (
            1,
            (
                *TRACEBACK,
                "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:84] Timed out waiting 1800000ms for recv operation",
            ),
        ),
        (1, (*TRACEBACK, "torch.distributed.DistStoreError: Socket Timeout")),
        (1, (*TRACEBACK, "[rank2]: elastirun.train.errors.PeerLost: rank 0: 3 of 4 ranks have added bucket 1 in 0.2 s")),
        (1, (*TRACEBACK, "elastirun.train.errors.ReductionFailed: the sum of bucket 1 failed: 3 of 4 ranks came in 1800 s")),
        (1, (*TRACEBACK, "RuntimeError: Gloo connectFullMesh failed with ...")),
        (1, (*TRACEBACK, "BrokenPipeError: [Errno 32] Broken pipe")),
        (1, (STORE,)),
        (-6, (WATCHDOG, "terminate called after throwing an instance of 'c10::DistBackendError'")),
        (-6, ("terminate called after throwing an instance of 'gloo::IoException'", "  what():  pair.cc:553] Connection closed by peer")),
        (-13, ()),
    ],
)
def test_a_victim(code: int, lines: tuple[str, ...]) -> None:
    assert classify(ended(code), lines) == VICTIM
    assert classify(ended(code, by_us=True), lines) == KILLED_BY_US


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "exit code 3"),
        (-11, "killed by SIGSEGV (signal 11)"),
        (-40, "killed by signal 40"),
        (127, "exit code 127: command not found"),
        (126, "exit code 126: command cannot be executed"),
        (139, "exit code 139: a shell's word for SIGSEGV (signal 11)"),
        (255, "exit code 255"),
    ],
)
def test_codes_in_words(code: int, words: str) -> None:
    assert describe_code(code) == words


OUTSIDE = "sent from outside (not by this agent"


@pytest.mark.parametrize(
    ("code", "lines", "killed", "words"),
    [
        (-9, (), "OOM-killed, 3.9 of 4.0 GiB", "OOM-killed, 3.9 of 4.0 GiB"),
        (-9, (), "", f"{OUTSIDE}, and the kernel counts no out-of-memory kill)"),
        (-9, (), None, f"{OUTSIDE}; the kernel's count of out-of-memory kills cannot be read)"),
        (-15, (), "OOM-killed", f"{OUTSIDE})"),
        (-10, (), "", ""),  # --forward-signals may have passed it on
        (-11, (), "OOM-killed", ""),
        (3, (), "OOM-killed", ""),
        (137, (), "OOM-killed", "a process of it was OOM-killed"),
        (137, (), "", ""),
        (1, ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. ",), "OOM-killed", "a process of it was OOM-killed"),
        (1, ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. ",), None, ""),
    ],
)
def test_what_is_said_of_an_end_that_was_not_at_our_hands(code: int, lines: tuple[str, ...], killed: str | None, words: str) -> None:
    assert explain(code, lines, killed) == words


@pytest.mark.parametrize(
    ("lines", "error", "expected"),
    [
        ((), None, False),
        (("all is well",), None, False),
        (("Traceback (most recent call last):", "ValueError: x"), None, True),
        (("Traceback (most recent call last):", "ValueError: x", "step 7"), None, False),  # somebody has caught it
        ((*TRACEBACK, "[rank2]: ValueError: x", "[rank2]:[W] destroy_process_group() was not called"), None, True),
        ((*TRACEBACK, GLOO_CLOSED), None, False),
        (("step 7",), ("Traceback (most recent call last):", "ValueError: x", "y"), True),
        (("step 7",), (*TRACEBACK, GLOO_CLOSED), False),
    ],
)
def test_who_is_about_to_fail(lines: tuple[str, ...], error: tuple[str, ...] | None, expected: bool) -> None:
    assert has_failed(lines, error) is expected


def test_who_had_failed_before_we_killed_it_comes_between_the_culprits_and_the_victims() -> None:
    record = make_record("n0", ended(-15, by_us=True), ())
    assert record.blame == SUSPECT and record.note.startswith("stopped by its agent after it had shown an exception")
    assert OWN_FAULT < SUSPECT < VICTIM


def test_a_record() -> None:
    lines = [f"{i}" + "x" * 1000 for i in range(40)]
    record = make_record("n0", ended(-9), lines)
    assert (record.node, record.rank, record.local_rank, record.pid, record.code, record.blame, record.after) == (
        "n0",
        5,
        1,
        77,
        -9,
        0,
        12.346,
    )
    assert len(record.lines) == 30 and {len(line) for line in record.lines} == {500}
    record = make_record("n0", ended(1), (STORE,), error=("Traceback (most recent call last):", "ValueError: x"))
    assert record.lines[-1] == "ValueError: x" and record.blame == OWN_FAULT


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
    for path in ("", str(tmp_path), str(tmp_path / "none"), str(tmp_path / "fifo"), "/dev/zero", "a\0b"):
        assert read_error_file(path) is None


# ---- the report


def test_the_report() -> None:
    records = [
        failure(0, VICTIM, 12.3, lines=("RuntimeError: Connection closed by peer",)),
        failure(3, OWN_FAULT, 12.4, code=-11, lines=("about to\tread", "Fatal Python error: Segmentation fault")),
        replace(failure(1, SUSPECT, 13, code=-15), note="stopped by its agent after all"),
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
    """The pattern is first held against torchrun's own words."""
    torch_errors = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    theirs = str(torch_errors.ChildFailedError("t.py", {3: torch_errors.ProcessFailure(1, 103, code, "/nowhere")}))
    ours = report("t.py", "r", [failure(3, OWN_FAULT, 2.5, code)], 1, "0 of 0", time.time() - 2.5)
    found, expected = TORCHRUNS.search(ours), TORCHRUNS.search(theirs)
    assert found and expected, theirs
    assert {**found.groupdict(), "time": "", "host": ""} == {**expected.groupdict(), "time": "", "host": ""}


def test_a_plain_exit_is_said_once() -> None:
    text = report("t.py", "r", [failure(0, OWN_FAULT, 1)])
    assert "  exitcode  : 1 (pid: 100)\n" in text and "exit code" not in text and "how  " not in text
    assert "    (nothing)\n" in text and "time  " not in text, "no round was started here"
    assert report("t.py", "r", []).splitlines()[1:-1] == ["t.py FAILED", "-" * 80, "  reason    : r"]


def test_ten_lines_tell_what_happened_and_forty_the_root_cause() -> None:
    words = tuple(f"line {i}" for i in range(30))
    records = [failure(rank, VICTIM, rank) for rank in range(40)] + [failure(41, OWN_FAULT, 0, -9, words)]
    lines = report("t.py", "because of rank 41", records, 1, "0 of 0", 0.0, "/logs").splitlines()
    assert "  reason    : because of rank 41" in lines[-10:] and "    line 29" in lines[-10:]
    assert "    line 0" in lines[-40:] and "  rank      : 41 (local_rank: 1)" in lines[-40:]


def test_the_report_of_a_big_job_is_short_and_carries_no_control_characters() -> None:
    records = [failure(rank, VICTIM, rank) for rank in range(1000)]
    text = report("t.py\x1b[2J", "r\n\x07", [*records, failure(1001, OWN_FAULT, 0, lines=("\x1b]0;x\x07\u00e9\udcff",))])
    assert len(text.splitlines()) < 50 and "  ... and 984 more\n" in text
    assert "    \\x1b]0;x\\x07\u00e9\\udcff\n" in text
    assert all(c.isprintable() or c == "\n" for c in text)
    assert max(len(line) for line in text.splitlines()) <= 120


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ([], 1),
        ([(3, OWN_FAULT)], 3),
        ([(-11, OWN_FAULT)], 139),
        ([(1, VICTIM), (7, OWN_FAULT)], 7),
        ([(-15, SUSPECT)], 1),  # that was our signal
        ([(-15, KILLED_BY_US)], 1),
        ([(-6, VICTIM)], 134),
    ],
)
def test_the_exit_code_from_the_worker_is_that_of_the_one_to_blame(ends: list[tuple[int, int]], code: int) -> None:
    assert exit_code(ExitRecord("n", i, i, 1, end, blame, 1.0) for i, (end, blame) in enumerate(ends)) == code

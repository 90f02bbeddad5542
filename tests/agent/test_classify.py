"""Which worker is to blame, and what its exit code and its last words mean."""

from __future__ import annotations

import pytest

from elastirun.agent.failures.classify import (
    classify,
    describe_code,
    exit_code,
    explain_signal,
    make_record,
    shows_own_failure,
)
from elastirun.agent.part import WorkerExit
from elastirun.rendezvous.wire.records import Blame, ExitRecord
from elastirun.train.errors import WrongType, WrongUse

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
        (1, (STORE, *TRACEBACK, "[rank2]: RuntimeError: CUDA error: an illegal memory access")),  # an older warning does not count
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
        (-9, (STORE,)),  # killed from outside, perhaps by the kernel for its memory
        (-15, ()),
        (1, (*TRACEBACK, "elastirun.train.errors.ReductionFailed: the process group has been destroyed: make one")),
        (1, (*TRACEBACK, "elastirun.train.errors.ModelMismatch: rank 1 has other parameters")),
    ],
)
def test_its_own_fault(code: int, lines: tuple[str, ...]) -> None:
    assert classify(ended(code), lines) == Blame.OWN_FAULT


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
    assert classify(ended(code), lines) == Blame.VICTIM
    assert classify(ended(code, by_us=True), lines) == Blame.KILLED_BY_US


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
    assert explain_signal(code, lines, killed) == words


@pytest.mark.parametrize(
    ("lines", "error", "expected"),
    [
        ((), None, False),
        (("all is well",), None, False),
        (("Traceback (most recent call last):", "ValueError: x"), None, True),
        (("Traceback (most recent call last):", "ValueError: x", "step 7"), None, False),  # the script has caught the exception
        ((*TRACEBACK, "[rank2]: ValueError: x", "[rank2]:[W] destroy_process_group() was not called"), None, True),
        ((*TRACEBACK, GLOO_CLOSED), None, False),
        (("step 7",), ("Traceback (most recent call last):", "ValueError: x", "y"), True),
        (("step 7",), (*TRACEBACK, GLOO_CLOSED), False),
    ],
)
def test_who_is_about_to_fail(lines: tuple[str, ...], error: tuple[str, ...] | None, expected: bool) -> None:
    assert shows_own_failure(lines, error) is expected


def test_who_had_failed_before_we_killed_it_comes_between_the_culprits_and_the_victims() -> None:
    record = make_record("n0", ended(-15, by_us=True), ())
    assert record.blame == Blame.SUSPECT and record.note.startswith("stopped by its agent after it had shown an exception")
    assert Blame.OWN_FAULT < Blame.SUSPECT < Blame.VICTIM


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
    assert record.lines[-1] == "ValueError: x" and record.blame == Blame.OWN_FAULT


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ([], 1),
        ([(3, Blame.OWN_FAULT)], 3),
        ([(-11, Blame.OWN_FAULT)], 139),
        ([(1, Blame.VICTIM), (7, Blame.OWN_FAULT)], 7),
        ([(-15, Blame.SUSPECT)], 1),  # the agent sent that signal
        ([(-15, Blame.KILLED_BY_US)], 1),
        ([(-6, Blame.VICTIM)], 134),
    ],
)
def test_the_exit_code_from_the_worker_is_that_of_the_one_to_blame(ends: list[tuple[int, int]], code: int) -> None:
    assert exit_code(ExitRecord("n", i, i, 1, end, blame, 1.0) for i, (end, blame) in enumerate(ends)) == code


WRONG_USE = "elastirun.train.errors.WrongUse: Elastic needs a state with one ElasticDataLoader, this one has 2"


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(
    ("code", "lines", "blame"),
    [
        (1, (*TRACEBACK, f"[rank2]: {WRONG_USE}"), Blame.FINAL),
        (1, (*TRACEBACK, WRONG_USE, WRAPPED, *TRACEBACK, "RuntimeError: cannot begin"), Blame.FINAL),
        (1, ("a warning", WRONG_USE), Blame.FINAL),
        (1, (WRONG_USE, "and then something else"), Blame.OWN_FAULT),
        (1, (*TRACEBACK, WRONG_USE.replace("WrongUse", "WrongType")), Blame.FINAL),
        (1, (*TRACEBACK, "mine.WrongUse: x"), Blame.OWN_FAULT),
        (1, (*TRACEBACK, WRONG_USE, "During handling of the above exception:", *TRACEBACK, "KeyError: 'x'"), Blame.OWN_FAULT),
        (-9, (*TRACEBACK, WRONG_USE), Blame.OWN_FAULT),
    ],
    ids=["refused", "wrapped", "without_frames", "earlier", "of_its_type", "of_the_script", "caught", "killed"],
)
def test_a_refusal_that_each_restart_would_meet_again_is_final(code: int, lines: tuple[str, ...], blame: Blame, alone: bool) -> None:
    record = make_record("n1", ended(code), lines, alone=alone)
    assert record.blame == blame and record.note == (WRONG_USE.partition(": ")[2] if blame is Blame.FINAL else "")


def test_it_is_known_by_the_name_that_python_shows() -> None:
    assert f"{WrongUse.__module__}.{WrongUse.__qualname__}" == WRONG_USE.partition(":")[0]
    assert f"{WrongType.__module__}.{WrongType.__qualname__}" == WRONG_USE.partition(":")[0].replace("WrongUse", "WrongType")

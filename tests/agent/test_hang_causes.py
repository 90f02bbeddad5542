"""The cause of a hang: which worker is named, by what is seen of all of them."""

from __future__ import annotations

import faulthandler
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastirun.agent.hangs import causes as hang_causes
from elastirun.agent.hangs.causes import BEHIND, ELSEWHERE, OUTSIDE, STOPPED, UNCLEAR, WAITING, Observed, judge, waits_for_peers
from tests.support.cluster import PATIENCE

SELECT = ("/usr/lib/python3.12/selectors.py", "415", "select")
TORCH = "/x/lib/python3.12/site-packages/torch"
LOADER = (SELECT, (f"{TORCH}/utils/data/dataloader.py", "1", "_get_data"), ("/t/t.py", "7", "<module>"))
BARRIER = tuple((f"{TORCH}/distributed/{file}.py", "1", "barrier") for file in ("distributed_c10d", "c10d_logger"))
BARRIER += (("/t/t.py", "8", "<module>"),)
BACKWARD = ((f"{TORCH}/autograd/graph.py", "979", "_engine_run_backward"), ("/t/t.py", "9", "<module>"))
OURS = (
    SELECT,
    ("/elastirun/train/reduction/transports/shared_memory.py", "273", "wait"),
    ("/elastirun/train/reduction/reducer.py", "1", "_wait"),
    *BACKWARD,
)
HOOK = (("/usr/lib/python3.12/threading.py", "324", "wait"), ("/t/t.py", "5", "hook"), *BACKWARD)
SCRIPT = (("/t/t.py", "5", "<module>"),)


def seen(rank: int, stack: Any = (), steps: int = 40, stopped: bool = False, waits_in: str = "") -> Observed:
    return Observed(rank, rank, 100 + rank, steps, stopped, stack, waits_in)


@pytest.mark.parametrize(
    ("workers", "named", "how"),
    [
        ([seen(0, BARRIER), seen(1, stopped=True), seen(2, LOADER)], (1,), STOPPED),
        ([seen(0, BACKWARD), seen(1, LOADER), seen(2, OURS, 41)], (1,), BEHIND),
        ([seen(0, BACKWARD), seen(1)], (1,), OUTSIDE),
        ([seen(0, BACKWARD), seen(1, steps=0)], (0,), WAITING),
        ([seen(0, LOADER), seen(1, LOADER, 39), seen(2, LOADER)], (1,), BEHIND),
        ([seen(0, BARRIER), seen(1, OURS, 39)], (1,), WAITING),
        ([seen(0, BARRIER), seen(1, BACKWARD)], (0,), WAITING),
        ([seen(0, LOADER), seen(1, LOADER)], (0,), UNCLEAR),
        ([seen(0, steps=0), seen(1)], (0,), UNCLEAR),
        ([seen(0, BACKWARD), seen(1, HOOK)], (1,), OUTSIDE),
        # More than half are at one place.
        ([seen(0, BACKWARD), seen(1, BACKWARD), seen(2, BARRIER), seen(3, BACKWARD)], (2,), ELSEWHERE),
        ([seen(0, BACKWARD), seen(1, BACKWARD), seen(2, BACKWARD, 41), seen(3, BACKWARD)], (2,), ELSEWHERE),
        ([seen(0, SCRIPT), seen(1, SCRIPT), seen(2, BARRIER), seen(3, SCRIPT)], (2,), ELSEWHERE),
        ([seen(0, SCRIPT), seen(1, LOADER), seen(2, SCRIPT), seen(3, SCRIPT)], (1,), OUTSIDE),
        ([seen(0, BARRIER), seen(1, LOADER), seen(2, BACKWARD), seen(3, BACKWARD), seen(4, BACKWARD)], (1,), OUTSIDE),
        ([seen(0, BARRIER), seen(1, BARRIER), seen(2, BACKWARD), seen(3, BACKWARD)], (0,), WAITING),
        ([seen(0, BACKWARD), seen(1, steps=0, waits_in="poll"), seen(2, BACKWARD)], (0,), WAITING),  # rank 1 makes no steps at all
        # Nobody has made a step, and there are no stacks.
        ([seen(i, steps=0, waits_in="nanosleep" if i == 2 else "poll") for i in range(4)], (2,), OUTSIDE),
    ],
)
def test_the_worker_that_is_not_where_the_others_wait_is_the_cause(workers: list[Observed], named: tuple[int, ...], how: int) -> None:
    verdict = judge([worker.state for worker in workers])
    assert (verdict.ranks, verdict.how) == (named, how)


@pytest.mark.parametrize(
    ("running", "victims", "named"),
    [
        ([seen(0, LOADER)], [(1, 40)], [0]),
        ([seen(0, LOADER)], [], [0]),  # the victims are on another node
        ([seen(0, BARRIER)], [(1, 40)], []),
        ([seen(0)], [(1, 40)], []),  # its stack is not known
        ([seen(0, stopped=True), seen(2, LOADER)], [(1, 40)], [0]),
        ([seen(0, LOADER), seen(2, BARRIER)], [(1, 40)], [0]),
        ([seen(i, LOADER) for i in range(4)], [(4, 40)], []),  # most are there: their peers did not wait for them
        ([seen(0, BARRIER), seen(1, BACKWARD), seen(2, BACKWARD), seen(3, BACKWARD)], [(4, 40)], [0]),
        ([], [(1, 40)], []),
    ],
)
def test_who_is_not_where_failed_peers_have_waited_is_missed(
    running: list[Observed], victims: list[tuple[int, int]], named: list[int]
) -> None:
    assert [worker.rank for worker in hang_causes.elsewhere(running, victims)] == named


def test_a_node_that_knows_the_cause_better_acts_first() -> None:
    holds = [hang_causes.HangVerdict((0,), how).hold for how in (STOPPED, BEHIND, OUTSIDE, ELSEWHERE, UNCLEAR, WAITING)]
    assert holds == sorted(holds) and holds[0] == 0 and len({*holds}) == len(hang_causes.WORDS) == 6


@pytest.mark.parametrize(
    ("stack", "waits"),
    [
        (BARRIER, True),
        (OURS, True),
        (((f"{TORCH}/_ops.py", "1", "__call__"), (f"{TORCH}/distributed/_functional_collectives.py", "1", "wait_tensor"), *SCRIPT), True),
        (LOADER, False),
        (((f"{TORCH}/utils/data/dataloader.py", "1", "_get_data"), ("/elastirun/train/data/loader.py", "1", "__iter__")), False),
        (HOOK, False),
        (((f"{TORCH}/distributed/checkpoint/filesystem.py", "1", "_write"), *BARRIER), False),
        (((f"{TORCH}/serialization.py", "1", "save"), *SCRIPT), False),
        (((f"{TORCH}/nn/modules/linear.py", "1", "forward"), (f"{TORCH}/nn/parallel/distributed.py", "1", "forward")), False),
        ((("/elastirun/train/checkpoints/staging.py", "1", "copy"), *SCRIPT), False),
        ((("/elastirun/train/checkpoints/missing_ranks.py", "1", "together"), *SCRIPT), True),
        ((SELECT,), False),
        ((), False),
    ],
)
def test_the_innermost_frame_that_tells_says_whether_a_worker_waits_for_others(stack: Any, waits: bool) -> None:
    assert waits_for_peers(stack) == waits


def test_files_of_the_training_core_in_which_nobody_waits_for_others_are_known_by_their_present_names() -> None:
    core = Path(__file__).parents[2] / "elastirun" / "train"
    files = {str(path.relative_to(core)) for path in core.rglob("*.py")}
    alone = {file for file in files if file.startswith(("state/", "checkpoints/"))} | {"data/loader.py", "data/sharded_data.py"}
    alone -= {f"checkpoints/{name}.py" for name in ("ranks", "missing_ranks", "publishing")}
    assert alone <= files and {file for file in files if not waits_for_peers(((f"/x/elastirun/train/{file}", "1", "f"),))} == alone


def test_two_ranks_in_the_same_call_are_at_the_same_place() -> None:
    assert seen(0, OURS).state.place == seen(1, BACKWARD).state.place == "t.py:9"
    assert (seen(0, BARRIER[:2]).state.place, seen(0, waits_in="pipe_read").state.place) == ("c10d_logger.py:1", "the kernel's pipe_read")


def test_the_main_thread_is_found_in_what_faulthandler_writes(tmp_path: Path) -> None:
    done, ready = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: (ready.set(), done.wait()))
    other.start()
    assert ready.wait(PATIENCE)
    with open(tmp_path / "stacks", "w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
    done.set()
    other.join()
    assert text.count("most recent call first") >= 2
    assert hang_causes.main_stack(text)[0][2] == "test_the_main_thread_is_found_in_what_faulthandler_writes"
    assert hang_causes.main_stack("x" * 5000 + '\n  File "a", line 1 in b\n') == (), "no thread has begun"


def test_a_stack_is_told_in_a_line_and_as_a_traceback() -> None:
    stack = tuple((f"/a/f{i}.py", str(i), "g") for i in range(9))
    assert hang_causes.describe(seen(0, stack)) == "f0.py:0 in g < f1.py:1 in g < f2.py:2 in g < ... < f7.py:7 in g < f8.py:8 in g"
    assert hang_causes.traceback(seen(0, stack))[1] == '  File "/a/f8.py", line 8, in g'
    assert hang_causes.traceback(seen(0, stopped=True)) == ["stopped by a signal"]
    assert hang_causes.describe(replace(seen(0), waits_in="nfs_wait")) == "in the kernel's nfs_wait"

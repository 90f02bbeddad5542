"""Hang detection: the page of a worker, when its steps are missed, and what the agent does then."""

from __future__ import annotations

import ctypes
import math
import os
import re
import selectors
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastirun import clock
from elastirun.agent.failures.tracker import FailureTracker
from elastirun.agent.hangs import watch as hang_watch
from elastirun.agent.hangs.causes import BEHIND, main_stack
from elastirun.agent.hangs.detection import AUTO, HangDetector
from elastirun.agent.hangs.job_median import JobTimes
from elastirun.agent.hangs.reports import SharedVerdict
from elastirun.agent.hangs.straggler_watch import StragglerWatch
from elastirun.agent.hangs.stragglers import Median
from elastirun.agent.hangs.watch import HangWatch
from elastirun.agent.observe import events
from elastirun.agent.observe.progress_pages import ProgressPages
from elastirun.agent.part import NodeRound, WorkerExit
from elastirun.agent.processes.process import Process
from elastirun.agent.processes.spawn import WorkerSpec
from elastirun.agent.store.node_reports import Meeting
from elastirun.progress import EXIT_LIMIT
from elastirun.rendezvous.wire.records import Blame, ExitRecord, Member, RoundRecord
from elastirun.worker.progress_page import FOREVER, MAGIC, NS, PARTS, VARIABLE, Page
from tests.support.cluster import PATIENCE
from tests.support.until import until

WORKER = """
import math, os, signal, sys
from elastirun.progress import progress
for within in eval(sys.argv[1]):
    progress(within)
print("stamped", flush=True)
while True:
    signal.pause()
"""


def page(steps: int, stamped: float = 0.0, longest: float = 0.0, within: float = 0.0) -> Page:
    """A page with durations in seconds."""
    return Page(1, 0, steps, int(stamped * NS), int(longest * NS), FOREVER if within == math.inf else int(within * NS))


# -- the page ------------------------------------------------------------------------------------------------------------------


def test_only_a_page_of_this_version_is_read() -> None:
    numbers = struct.pack("<17Q", 7, 60, 3, 5, 4, 0, *range(1, 12))
    assert Page.parse(MAGIC + numbers + b"more") == Page(7, 60, 3, 5, 4, 0, *range(1, 12))
    assert Page.parse(b"elastpg2" + numbers) is None
    assert Page.parse((MAGIC + numbers)[:-1]) is None and Page.parse(b"") is None


@pytest.fixture(autouse=True)
def no_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether py-spy is installed on this machine is no matter: with it the agent waits for an answer."""
    folders = os.environ["PATH"].split(os.pathsep)
    monkeypatch.setenv("PATH", os.pathsep.join(folder for folder in folders if not Path(folder, "py-spy").exists()))


@pytest.fixture
def pages() -> Iterator[ProgressPages]:
    made = ProgressPages()
    yield made
    made.close()


@pytest.fixture
def worker(pages: ProgressPages) -> Iterator[Any]:
    """``worker(calls)`` starts a worker that calls ``progress`` with each of ``calls`` and waits; the last page is its own."""
    started: list[Process] = []

    def start(calls: str = "[None, None]", script: str = WORKER, count: int = 1) -> Process:
        paths = pages.renew(count)
        read, write = os.pipe()
        env = {**os.environ, VARIABLE: paths[-1]}
        spec = WorkerSpec(count - 1, count + 6, (sys.executable, "-c", script, calls), env)
        started.append(Process(spec, selectors.DefaultSelector(), lambda process, code: None, write))
        os.close(write)
        with open(read) as out:
            assert out.readline() == "stamped\n"
        return started[-1]

    yield start
    for process in started:
        process.kill_and_reap(PATIENCE)


def test_a_worker_stamps_its_page_and_writes_its_stacks_at_a_signal(worker: Any, pages: ProgressPages) -> None:
    before = time.monotonic_ns()
    process = worker("[None, None, 5.0]", count=2)
    assert pages.read(0) is None, "nobody has opened it"
    found = pages.read(1)
    assert found and (found.pid, found.steps, found.within) == (process.pid, 3, 5 * NS)
    assert before < found.stamped < time.monotonic_ns() and 0 < found.longest < found.stamped - before
    assert process.catches(found.signal)
    process.signal(found.signal)
    ((file, _, function),) = await_stack(pages, 1)
    assert (file, function) == ("<string>", "<module>")


def await_stack(pages: ProgressPages, local_rank: int) -> Any:
    return until(lambda: main_stack(pages.stacks(local_rank)), f"the stack of the worker with local rank {local_rank}")


@pytest.mark.parametrize(("calls", "least"), [("[None]", EXIT_LIMIT * NS), ("[7]", EXIT_LIMIT * NS), ("[math.inf]", FOREVER)])
def test_a_worker_whose_interpreter_exits_has_time_for_it(worker: Any, pages: ProgressPages, calls: str, least: int) -> None:
    """An exit writes no stack, so nothing could tell which worker is the cause."""
    ends = "import atexit; atexit.register(lambda: (print('stamped', flush=True), signal.pause()))\n"
    worker(calls, ends + WORKER.partition("print(")[0])
    found = pages.read(0)
    assert found and found.steps == 1 and least <= found.within <= least + int(PATIENCE * NS)


def test_a_pause_that_was_announced_is_not_learned(worker: Any, pages: ProgressPages) -> None:
    worker(script=WORKER.replace("progress(within)", "progress(within); import time; time.sleep(0.2)"), calls="[math.inf, None]")
    found = pages.read(0)
    assert found and (found.steps, found.longest, found.within) == (2, 0, 0)


@pytest.mark.parametrize(("calls", "steps"), [("so", 2), ("sop", 3), ("sopo", 3), ("po", 1), ("wo", 2)])
def test_optimizers_stamp_until_the_script_stamps_its_own_steps(worker: Any, pages: ProgressPages, calls: str, steps: int) -> None:
    """o, s: a step of an optimizer; p: ``progress()``; w: the announcement of a pause, which does not mean that the script stamps."""
    script = WORKER.replace("import progress", "import progress, step_of_optimizer").replace("eval(sys.argv[1])", "sys.argv[1]")
    made = "{'p': progress, 'w': lambda: progress(600)}.get(within, step_of_optimizer)()"
    worker(calls, script.replace("progress(within)", made))
    found = pages.read(0)
    assert found and found.steps == steps


def test_a_worker_that_goes_on_in_another_round_stamps_the_page_of_that_round() -> None:
    pages = ProgressPages()
    code = "import os, sys\nfrom elastirun import progress\n"
    code += "progress.progress(); before = set(os.listdir('/proc/self/fd')); os.environ['ELASTIRUN_PROGRESS'] = sys.argv[1]\n"
    code += "progress.begin_round(); progress.progress(); progress.progress(); print(len(before ^ set(os.listdir('/proc/self/fd'))))\n"
    first, second = pages.renew(2)
    try:
        env = {**os.environ, "ELASTIRUN_PROGRESS": first}
        command, root = [sys.executable, "-c", code, second], Path(__file__).parents[2]
        said = subprocess.run(command, cwd=root, env=env, timeout=PATIENCE, check=True, capture_output=True)
        counts = [page.steps for page in pages.read_all()]
        assert counts == [1, 2] and said.stdout.split() == [b"0"]
    finally:
        pages.close()


def test_one_process_stamps_a_page(worker: Any, pages: ProgressPages) -> None:
    """Neither a fork of the worker nor another process below it, which has the same variable."""
    script = """
import os, subprocess, sys
from elastirun.progress import progress
progress()
if (child := os.fork()) == 0:
    progress()
    os._exit(0)
os.waitpid(child, 0)
subprocess.run([sys.executable, "-c", "from elastirun.progress import progress; progress()"], check=True)
print("stamped", flush=True)
os.read(0, 1)
"""
    process = worker(script=script)
    found = pages.read(0)
    assert found and (found.pid, found.steps) == (process.pid, 1)


@pytest.mark.parametrize("path", ["", "/no/such/page", "/dev/null", __file__])
def test_without_a_page_nothing_happens(worker: Any, pages: ProgressPages, path: str) -> None:
    worker(script=f"import os\nos.environ['{VARIABLE}'] = {path!r}\n{WORKER}")
    assert pages.read(0) is None


def test_nobody_can_make_a_page_smaller_so_that_another_reads_beyond_its_end(pages: ProgressPages) -> None:
    (path,) = pages.renew(1)
    with open(path, "r+b") as file, pytest.raises(OSError):
        file.truncate(0)


# -- the decision --------------------------------------------------------------------------------------------------------------


def first_hang(detector: HangDetector, samples: Iterable[tuple[float, dict[int, Page]]]) -> float | None:
    """The moment at which a hang is found."""
    return next((now for now, pages in samples if detector.look(now, pages) is not None), None)


def training(step: float, end: float, every: float = 5.0, steps_until: float = math.inf, longest: float = 0.0) -> Any:
    """Samples of a worker whose steps take ``step`` seconds, until it makes none from ``steps_until`` on."""
    for count in range(1, int(end / every) + 1):
        now = count * every
        steps = int(min(now, steps_until) / step)
        yield now, {0: page(steps, steps * step, max(step, longest))}


def test_a_hang_is_a_time_without_a_step_of_any_worker() -> None:
    detector = HangDetector(10.0)
    detector.start_round(0.0)
    assert detector.interval == 2.5
    for now in range(1, 30):
        assert detector.look(now, {0: page(5), 1: page(now // 8 + 1)}) is None, "one worker still makes steps"
    found = [detector.look(now, {0: page(5), 1: page(4)}) for now in range(30, 45)]
    assert found == [None] * 5 + list(range(11, 21)), "the last step was seen at 24"
    assert detector.look(45, {0: page(5), 1: page(5)}) is None, "it goes on"


def test_before_its_first_step_a_worker_does_not_hang() -> None:
    assert first_hang(HangDetector(10.0), [(now, {0: page(0)}) for now in range(600)]) is None


def test_a_worker_that_ended_does_not_count() -> None:
    detector = HangDetector(4.0)
    detector.start_round(0.0)
    for now in range(4):
        assert detector.look(now, {0: page(9), 1: page(now + 1)}) is None
    assert first_hang(detector, [(now, {0: page(9)}) for now in range(4, 20)]) == 5.0


def test_a_worker_may_ask_for_time() -> None:
    def announced(within: float) -> float | None:
        return first_hang(HangDetector(4.0), [(float(now), {0: page(9, within=within), 1: page(9)}) for now in range(100)])

    assert (announced(1), announced(50), announced(math.inf)) == (5.0, 51.0, None)


def test_the_exit_of_a_worker_before_the_first_step_is_no_late_first_step() -> None:
    pages = {0: page(0, within=600), 1: page(0)}
    assert first_hang(HangDetector(None, 20.0), [(float(now), pages) for now in range(100)]) is None


def test_the_time_of_a_standstill_does_not_count() -> None:
    detector = HangDetector(10.0)
    detector.start_round(0.0)
    for now in (2.0, 4.0, 6.0, 500.0, 502.0, 504.0, 506.0, 508.0, 510.0):
        assert detector.look(now, {0: page(9)}) is None, "the agent stood still until 500"
    assert detector.look(512.0, {0: page(9)}) == 12.0


def test_a_round_begins_anew() -> None:
    detector = HangDetector(10.0)
    for now in range(10):
        detector.look(now, {0: page(9)})
    detector.start_round(10.0)
    assert first_hang(detector, [(float(now), {0: page(9)}) for now in range(11, 40)]) == 22.0


def test_a_limit_for_the_first_step_is_one_of_its_own() -> None:
    both, first_alone = HangDetector(4.0, 20.0), HangDetector(None, 20.0)
    for detector in (both, first_alone):
        detector.start_round(0.0)
        assert first_hang(detector, [(float(now), {0: page(0)} if now > 5 else {}) for now in range(30)]) == 21.0
        assert (detector.interval, detector.limit) == (1.0 if detector is both else 5.0, 20.0)
        detector.start_round(30.0)
        assert first_hang(detector, [(float(now), {0: page(now > 45)}) for now in range(30, 50)]) is None, "the first step came in time"
    assert first_hang(both, [(50.0, {0: page(1)}), (51.0, {0: page(1)})]) == 51.0
    assert first_hang(first_alone, [(float(now), {0: page(1)}) for now in range(50, 500)]) is None


def test_time_in_which_the_agent_stood_still_does_not_count_before_the_first_step() -> None:
    detector = HangDetector(None, 20.0)
    detector.start_round(0.0)
    assert first_hang(detector, [(now, {}) for now in (5.0, 10.0, 500.0, 505.0, 510.0, 515.0, 520.0)]) is None
    assert detector.look(521.0, {}) == 21.0


def test_a_learned_limit_needs_some_dozen_steps() -> None:
    detector = HangDetector(AUTO)
    assert first_hang(detector, training(0.1, 3600, steps_until=2.9)) is None
    assert first_hang(HangDetector(AUTO), training(0.1, 3600, steps_until=3.0)) == pytest.approx(65, abs=5.1)


@pytest.mark.parametrize("step", [0.01, 1.0, 3.0, 10.0, 60.0])
def test_an_evaluation_as_long_as_twenty_steps_is_no_hang_by_the_learned_limit(step: float) -> None:
    detector, end = HangDetector(AUTO), 100 * step + 100
    assert first_hang(detector, training(step, end + 20 * step, steps_until=end)) is None
    found = first_hang(HangDetector(AUTO), training(step, end + 100 * step + 200, steps_until=end))
    assert found is not None and max(60, 30 * step) <= found - end + step <= max(60, 30 * step) + 2 * step + 15


def test_a_pause_may_be_twice_as_long_as_the_longest_before_also_in_another_round() -> None:
    detector = HangDetector(AUTO)
    assert first_hang(detector, training(0.1, 100, longest=300)) is None
    detector.start_round(0.0)
    assert detector.limit == 600
    assert first_hang(detector, training(0.1, 700, steps_until=100)) is None


# -- the agent's part ----------------------------------------------------------------------------------------------------------


MEETING = Meeting({"kind": "none"}, "job/", None, "run:1", 1, 2)  # there is no store, so that each node judges by itself


class Watched:
    """A watch of one process, and what it has said and done."""

    def __init__(
        self, process: Process, pages: ProgressPages, timeout: float | None = 4.0, alone: bool = False, first: float | None = None
    ) -> None:
        self.said: list[str] = []
        self.events: list[Any] = []
        self.ended: list[tuple[int, Blame, str, list[str]]] = []
        workers: Any = SimpleNamespace(processes={process.spec.local_rank: process}, finished=[])
        heard = self.events.append, self.said.append, lambda *end: self.ended.append(end[:4])
        self.watch = HangWatch(timeout, first, workers, pages, lambda round: MEETING, *heard)
        self.pages = pages
        self.local_rank = process.spec.local_rank
        self.watch.start(None if alone else lambda: MEETING)
        self.now = clock.now()

    def run(self, seconds: float) -> None:
        """Let time pass, by the watch's clock. Wait for the stacks when it has asked for them."""
        end = self.now + seconds
        while (due := self.watch.tick(self.now)) <= end:
            self.now = due
        self.now = end


def test_a_hang_is_told_with_stacks_and_the_worker_is_ended(worker: Any, pages: ProgressPages) -> None:
    process = worker()
    watched = Watched(process, pages)
    watched.run(6.5)
    await_stack(pages, 0)
    watched.run(1)
    rank = f"rank 7 (pid {process.pid}, 2 steps)"
    assert watched.said[0] == "the workers here hang: no step for 6 s (limit 4 s); where they are, innermost call first:"
    (line,) = watched.said[1:]
    assert re.fullmatch(rf"  {re.escape(rank)}: <string>:\d+ in <module>", line)
    (hang,) = watched.events
    assert isinstance(hang, events.Hang) and (hang.limit, hang.ranks, hang.workers[0]["pid"]) == (4.0, [7], process.pid)
    assert watched.ended == [], "another node may know better"
    watched.run(10)
    ((local_rank, blame, note, stack),) = watched.ended
    assert (local_rank, blame) == (0, Blame.OWN_FAULT) and note.startswith("hung: no step for 1") and stack[-1].endswith("in <module>")
    watched.run(60)
    assert len(watched.ended) == 1


def test_a_worker_that_is_stopped_is_ended_at_once(worker: Any, pages: ProgressPages) -> None:
    process = worker()
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    watched = Watched(process, pages)
    watched.run(7.5)
    ((_, blame, note, stack),) = watched.ended
    assert (blame, note, stack) == (Blame.OWN_FAULT, "hung: no step for 6 s (stopped by a signal)", ["stopped by a signal"])


class Shared:
    """Stands in for ``HangReports``: the verdict of all nodes is there at once."""

    verdict: SharedVerdict

    def __init__(self, meeting: Meeting, workers: Any) -> None:
        assert meeting is MEETING and [one.rank for one in workers] == [7]

    def close(self) -> None:
        pass


@pytest.mark.parametrize("ranks", [(7,), (3,)])
def test_the_verdict_of_all_nodes_takes_the_place_of_this_nodes_own(
    worker: Any, pages: ProgressPages, monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, ...]
) -> None:
    monkeypatch.setattr(hang_watch, "HangReports", Shared)
    Shared.verdict = SharedVerdict((), ranks, BEHIND)
    watched = Watched(worker(), pages)
    watched.run(7.5)
    assert watched.said[-1] == f"all nodes hang; the cause is rank {ranks[0]}: behind the others in steps"
    if ranks == (7,):
        assert [end[:2] for end in watched.ended] == [(0, Blame.OWN_FAULT)]
    else:
        watched.run(9)
        assert watched.ended == [], "another node ends the round"
        watched.run(2)
        assert [end[:2] for end in watched.ended] == [(0, Blame.VICTIM)], "that other node is lost"


def test_a_step_in_the_meantime_ends_the_alarm(worker: Any, pages: ProgressPages) -> None:
    watched = Watched(worker(), pages)
    watched.run(7.5)
    assert len(watched.said) == 2
    with open(f"/proc/{os.getpid()}/fd/{pages._fds[0]}", "r+b") as file:
        file.seek(3 * 8)
        file.write(struct.pack("<Q", 3))
    watched.run(4)
    assert watched.said[2:] == ["a worker has made a step again"]
    assert watched.ended == []


class Compared:
    """A watch for stragglers of one process, in a round with another node or without, and what it has said and done."""

    def __init__(self, process: Process, read: Callable[[int], Any], alone: bool = True) -> None:
        self.said: list[str] = []
        self.events: list[Any] = []
        workers: Any = SimpleNamespace(processes={process.spec.local_rank: process})
        pages: Any = SimpleNamespace(of=lambda local_ranks: {one: read(one) for one in local_ranks})
        self.watch = StragglerWatch(workers, pages, lambda round: MEETING, self.events.append, self.said.append)
        members = (Member("a", "a", "127.0.0.1", 1, 1), Member("b", "b", "127.0.0.1", 1, 1))
        self.watch.workers_started(NodeRound(RoundRecord("s", round=1, members=members[: 1 if alone else 2]), 0, {}))

    def run(self, seconds: float) -> None:
        """Let time pass, by the watch's clock."""
        end, now = clock.now() + seconds, -math.inf
        while (due := self.watch.tick(now)) <= end:
            now = due


def test_a_straggler_is_named_and_shown(worker: Any) -> None:
    looks = iter([200, 300, 400, 500])

    def read(local_rank: int) -> Any:
        steps = next(looks)
        return Page(1, 0, steps, 0, 0, 0, busy=steps * NS // 50, median=steps * NS // 100)

    watched = Compared(worker(), read)
    watched.run(81)
    (event,) = watched.events
    assert isinstance(event, events.Straggler) and (event.rank, event.times_median, event.seconds) == (7, 2.0, 0.02)
    assert watched.said == ["rank 7 (local rank 0, CPU) is a straggler: it computes for 0.02 s a step, the median rank 0.01 s"]
    looks = iter([600])
    (shown,) = watched.watch.steps(clock.now())
    assert shown.times_median == 2.0 and watched.watch.named == [7]


def test_a_worker_tells_how_long_it_has_computed_and_how_long_the_median_rank(worker: Any, pages: ProgressPages) -> None:
    told = "for _ in range(10):\n    computed(0.02, 0.01)\ncomputed(math.nan, 1.0)"
    worker(script=WORKER.replace("print(", f"from elastirun.progress import computed\n{told}\nprint("))
    found = pages.read(0)
    assert found and (found.busy, found.median) == (10 * NS // 50, 10 * NS // 100)


@pytest.mark.parametrize("alone", [False, True])
def test_a_worker_that_knows_its_own_time_only_is_compared_with_the_other_nodes(worker: Any, alone: bool) -> None:
    looks = iter(range(10, 60, 10))

    def read(local_rank: int) -> Any:
        samples = next(looks)
        return Page(1, 0, 100 * samples, 0, 0, 0, busy=samples * NS // 4, sampled=samples)

    watched, shared = Compared(worker(), read, alone), []
    times = cast(Any, SimpleNamespace(median=lambda fence: Median(0.1, 2), share=lambda *what: shared.append(what)))
    watched.watch._job_times = {False: times}
    watched.run(81)
    took = "it computes for 0.25 s a step, the median rank 0.1 s"
    assert watched.said == ([] if alone else [f"rank 7 (local rank 0, CPU) is a straggler: {took}"])
    assert shared == ([] if alone else [(MEETING, (0.25,))] * 3)


@pytest.mark.parametrize("usual", [0.0027, 0.0024])  # seconds for a unit of work
def test_a_worker_that_tells_its_work_is_compared_by_its_time_for_a_unit_of_it(worker: Any, usual: float) -> None:
    looks = iter(range(10, 60, 10))

    def read(local_rank: int) -> Any:
        samples = next(looks)
        return Page(1, 0, 100 * samples, 0, 0, 0, busy=samples * NS // 4, sampled=samples, work=100 * samples * 64 * PARTS)

    watched, shared = Compared(worker(), read, alone=False), []
    times = cast(Any, SimpleNamespace(median=lambda fence: Median(usual, 2), share=lambda *what: shared.append(what)))
    watched.watch._job_times = {False: JobTimes(), True: times}
    watched.run(101)
    took = "it computes for 0.25 s a step, the median rank 0.154 s"
    assert watched.said == ([] if usual == 0.0027 else [f"rank 7 (local rank 0, CPU) is a straggler: {took}"])
    assert shared == [(MEETING, (0.25 / 64,))] * 4


def test_a_worker_tells_the_work_in_its_steps(worker: Any, pages: ProgressPages) -> None:
    worker(script=WORKER.replace("progress(within)", "progress(work=2.5); progress(); progress(work=10**15); progress(work=True)"))
    found = pages.read(0)
    assert found and (found.steps, found.work) == (8, 2 * (10**15 + 3) * PARTS + 1000)


def test_off_or_stopped_nothing_is_watched(worker: Any, pages: ProgressPages) -> None:
    process = worker()
    off, stopped = Watched(process, pages, timeout=None), Watched(process, pages)
    stopped.watch.stop_watching()
    for watched in (off, stopped):
        watched.run(3600)
        assert watched.said == []


def test_a_worker_in_a_debugger_does_not_hang(worker: Any, pages: ProgressPages) -> None:
    process = worker()
    seize, detach = 0x4206, 17  # PTRACE_SEIZE and PTRACE_DETACH of <sys/ptrace.h>
    if ctypes.CDLL(None, use_errno=True).ptrace(seize, process.pid, 0, 0):
        pytest.skip(f"ptrace: {os.strerror(ctypes.get_errno())}")
    try:
        watched = Watched(process, pages)
        watched.run(60)
        assert watched.said == []
    finally:
        ctypes.CDLL(None).ptrace(detach, process.pid, 0, 0)


FAKE = """#!/bin/sh
echo '[{"os_thread_id": 1, "frames": []}, {"os_thread_id": '$5', "frames": [{"name": "wait", "filename": "/t.py", "line": 7}]}]'
exec sleep 60
"""


def test_py_spy_shows_the_stack_of_a_worker_that_does_not_write_it(
    worker: Any, pages: ProgressPages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "py-spy").write_text(FAKE)
    (tmp_path / "py-spy").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    process = worker(script="import signal\nprint('stamped', flush=True)\nsignal.pause()")
    watched = Watched(process, pages, timeout=None, first=4.0, alone=True)
    watched.run(6.5)
    assert watched.said == [], "it is asked"
    answer = watched.watch._questions[0]._answer
    until(lambda: os.pread(answer, 1, 0), "the answer of py-spy")
    watched.run(3.0)
    assert watched.said[1] == f"  rank 7 (pid {process.pid}, 0 steps): t.py:7 in wait"
    ((_, _, note, stack),) = watched.ended
    assert note.startswith("hung: no step for ") and stack[1] == '  File "/t.py", line 7, in wait'


DEBUGGED = """
import os, pdb
from elastirun.progress import progress
progress()

class Person:
    def readline(self):
        print("stamped", flush=True)
        os.read(os.pipe()[0], 1)

pdb.Pdb(stdin=Person(), stdout=open(os.devnull, "w")).set_trace()
progress()
"""


def test_a_program_in_pythons_debugger_does_not_hang(worker: Any, pages: ProgressPages) -> None:
    watched = Watched(worker(script=DEBUGGED), pages)
    watched.run(6.5)
    await_stack(pages, 0)
    signals: list[int] = []
    watched.run(1)
    pages.clear_stacks = signals.append  # type: ignore[method-assign]
    watched.run(60)
    assert (watched.said, watched.ended, signals) == ([], [], [])


def test_a_signal_that_the_worker_does_not_catch_is_not_sent(worker: Any, pages: ProgressPages) -> None:
    process = worker()
    found = pages.read(0)
    assert found
    with open(f"/proc/{os.getpid()}/fd/{pages._fds[0]}", "r+b") as file:
        file.seek(2 * 8)
        file.write(struct.pack("<Q", signal.SIGTERM))
    watched = Watched(process, pages, alone=True)
    watched.run(7.5)
    assert len(watched.ended) == 1
    process.signal(found.signal)
    while not main_stack(pages.stacks(0)):
        assert not process.ended
        time.sleep(0.01)


def test_the_failure_of_a_worker_that_hung_is_reported_before_its_end_which_adds_nothing() -> None:
    tracker = FailureTracker("n", cast(Any, SimpleNamespace(held=lambda local_rank: None)), print)
    tracker.start_round(0, alone=False)
    end = WorkerExit(1, 5, 99, -9, 70.0, killed_by_us=False)
    tracker.worker_hung(end, Blame.OWN_FAULT, "hung: no step for 60 s", ["where it hung"], 60.0)
    assert tracker.report_at <= clock.now()
    tracker.record_end(end)
    assert tracker.failures == (ExitRecord("n", 5, 1, 99, -9, Blame.OWN_FAULT, 10.0, ("where it hung",), "hung: no step for 60 s"),)
    assert tracker.hung == {1}

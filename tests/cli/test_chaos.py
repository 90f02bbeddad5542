"""``elastirun chaos`` without a job: the plan, the process that a fault hits, the next step in pages, the verdict, bad options."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import pytest

from elastirun.agent.processes import proc
from elastirun.agent.processes.proc import ProcessStat
from elastirun.chaos import command, faults, play, recovery, watch
from elastirun.chaos.plan import KINDS, FaultTarget, PlannedFault, all_train, choose, draw, missing
from elastirun.chaos.recovery import Terms, better
from elastirun.chaos.verdict import FaultOutcome, judge, table
from elastirun.chaos.watch import RunningAgent, SeenStep, next_step
from elastirun.errors import NothingFound, StartError, UsageError
from elastirun.worker.progress_page import NS, Page
from tests.support.until import PATIENCE

TERMS = Terms(freeze=0.0, limit=0.1, restart=None, supervised=False)


def page(pid: int, first: float, stamped: float, steps: int = 1, at: int = 0, farthest: int = 0) -> Page:
    """Times are in seconds."""
    return Page(pid, 0, steps, int(stamped * NS), 0, 0, int(first * NS), at, farthest)


def agent(node: str, pid: int, *pids: int, rank: int | None = 0, low: int = 1, hosts: bool = False, members: int = 2) -> RunningAgent:
    """An agent whose workers ``pids`` step."""
    process = ProcessStat(pid, b"1 (python) S " + b" ".join([b"1"] * 19))
    pages = {one: page(one, 1.0, 2.0) for one in pids}
    ranks = {one: 10 * pid + i for i, one in enumerate(pids)}
    return RunningAgent(process, "job", node, rank, "running", members, low, 2, 0, 0, hosts, ranks, pages)


HOST, OTHER = agent("a", 2, 21, 22, hosts=True), agent("b", 3, 31, rank=1)


# --- the plan


def test_each_kind_comes_before_one_comes_again_and_the_seed_decides() -> None:
    plan = draw(1, KINDS, 30.0, 600.0)
    assert [fault.after for fault in plan] == [30.0 * i for i in range(20)]
    assert all({fault.kind for fault in plan[i : i + 6]} == {*KINDS} for i in (0, 6, 12))
    assert draw(1, KINDS, 30.0, 600.0) == plan != draw(2, KINDS, 30.0, 600.0)


@pytest.mark.parametrize(
    ("kind", "draw", "agents", "comes_back", "pid", "name"),
    [
        ("worker", 0.0, (HOST, OTHER), False, 21, "rank 20 on a, pid 21"),
        ("freeze", 0.99, (HOST, OTHER), False, 31, "rank 30 on b, pid 31"),
        ("worker", 0.0, (replace(OTHER, ranks={}),), False, 31, "a worker on b, pid 31"),
        ("host", 0.99, (HOST, OTHER), False, 2, "the agent on a, pid 2"),
        ("agent", 0.0, (HOST, OTHER), False, 3, "the agent on b, pid 3"),
        ("leave", 0.0, (replace(HOST, members=1, max_nodes=1),), True, 2, "the agent on a, pid 2"),
        ("node", 0.0, (HOST, OTHER, agent("spare", 4, rank=None)), True, 3, "the agent on b, pid 3"),
    ],
)
def test_whom_a_fault_hits(kind: str, draw: float, agents: Sequence[RunningAgent], comes_back: bool, pid: int, name: str) -> None:
    found = choose(PlannedFault(0.0, kind, draw), agents, comes_back)
    assert isinstance(found, FaultTarget) and (found.pid, found.name) == (pid, name)


@pytest.mark.parametrize(
    ("kind", "agents", "comes_back", "why"),
    [
        ("worker", (agent("a", 2),), True, "no worker here has made a step in this round"),
        ("host", (OTHER,), True, "no agent here that trains hosts the store"),
        ("agent", (replace(HOST, min_nodes=2), replace(OTHER, min_nodes=2)), False, "it would leave 1 of at least 2 nodes; see --restart"),
        ("leave", (OTHER,), False, "no other agent of the job is here, whose steps could be seen"),
        ("node", (agent("c", 1, 11),), True, "the agent is process 1 of this container"),
        ("agent", (replace(OTHER, members=1), agent("late", 4, rank=None)), True, "late is not in a round yet"),
    ],
)
def test_why_a_fault_is_left_out(kind: str, agents: Sequence[RunningAgent], comes_back: bool, why: str) -> None:
    found = choose(PlannedFault(0.0, kind, 0.0), agents, comes_back)
    assert isinstance(found, str) and found.startswith(why)


def test_a_round_that_is_just_beginning_is_waited_for() -> None:
    assert [all_train(agents) for agents in ((HOST, OTHER), (HOST, agent("b", 3)), (HOST, agent("late", 4, rank=None)), ())] == [
        *(True, False, True, False)
    ]


def test_a_spare_beside_a_full_round_is_not_waited_for() -> None:
    assert (missing((HOST, OTHER, agent("spare", 4, rank=None))), missing((HOST, OTHER))) == ("", "")


# --- the processes


def test_a_process_that_is_not_below_the_agent_gets_no_signal() -> None:
    here = proc.look(os.getpid())
    assert here is not None
    with subprocess.Popen(["sleep", "1000"]) as child:
        try:
            other = ProcessStat(os.getpid(), b"1 (python) S " + b" ".join([b"1"] * 19))  # our pid, but another start
            assert faults.do("worker", FaultTarget(replace(OTHER, process=other), child.pid, "")) == [] and child.poll() is None
            (hit,) = faults.do("worker", FaultTarget(replace(OTHER, process=here), child.pid, ""))
            assert hit.pid == child.pid and child.wait(PATIENCE) == -signal.SIGKILL
        finally:
            child.kill()


@pytest.mark.parametrize(
    ("agents", "error", "line"),
    [
        ((), NothingFound, "no job 'x' on this machine: no agent of this user runs it"),
        ((HOST, replace(OTHER, job="other")), UsageError, "2 jobs run on this machine: 'job', 'other'; name one"),
        ((agent("a", 2),), StartError, "job 'job': no worker here has stamped a step yet"),
        ((agent("a", os.getpid(), 5),), StartError, "this command runs below an agent of the job"),
    ],
)
def test_why_nothing_is_done(monkeypatch: pytest.MonkeyPatch, agents: Sequence[RunningAgent], error: type[Exception], line: str) -> None:
    monkeypatch.setattr(watch, "look", lambda job: agents)
    with pytest.raises(error) as raised:
        watch.find("x")
    assert str(raised.value).startswith(line)


# --- the next step


def seen(*pages: Page, since: float = 10.0, thawed: tuple[int, float] | None = None) -> SeenStep | None:
    """Return the next step after a fault. The first of ``pages`` is as the fault found it; a later one of pid 1 is that page now."""
    before, *now = pages
    old, new = replace(HOST, pages={1: before}), replace(HOST, pages={one.pid: one for one in now})
    return next_step([old], [new], int(since * NS), None if thawed is None else (thawed[0], int(thawed[1] * NS)))


def test_the_first_step_of_a_new_round_is_the_next_one() -> None:
    before = page(1, 1.0, 9.9, at=100)
    assert seen(before) is None
    assert seen(before, page(1, 1.0, 10.1, at=101)) is None, "a step that was being made is none of the next round"
    assert seen(before, page(1, 0.0, 10.1)) is None, "nor where the page does not tell its first step"
    assert seen(before, page(2, 9.95, 10.1)) is None, "nor of a round that began just before the fault"
    assert seen(before, page(2, 0.0, 0.0, steps=0)) is None
    assert seen(before, page(2, 12.5, 14.0), page(3, 12.0, 14.0)) == SeenStep(int(12.0 * NS), 2.0, None)


def test_steps_that_are_made_again_are_counted() -> None:
    before = page(1, 1.0, 9.9, at=100, farthest=80)  # the last step has number 99
    assert seen(before, page(2, 12.0, 13.0, steps=3, at=91)) == SeenStep(int(12.0 * NS), 2.0, 12), "steps 88 to 99"
    assert seen(before, page(2, 12.0, 13.0, steps=1, at=101)) == SeenStep(int(12.0 * NS), 2.0, 0)
    assert seen(before, page(2, 12.0, 13.0, steps=1, at=101, farthest=103)) == SeenStep(int(12.0 * NS), 2.0, 3), "by the agent's word"


def test_a_worker_that_was_frozen_goes_on_in_its_round() -> None:
    before = page(1, 1.0, 9.9)
    assert seen(before, page(1, 1.0, 10.1)) is None
    assert seen(before, page(1, 1.0, 14.0), thawed=(1, 15.0)) is None
    assert seen(before, page(1, 1.0, 15.5), thawed=(1, 15.0)) == SeenStep(int(15.5 * NS), 0.5, 0)
    assert seen(before, page(1, 1.0, 15.5), thawed=(7, 15.0)) is None, "another worker's steps say nothing"


def test_a_step_may_be_numbered_long_after_its_stamp() -> None:
    first, later = SeenStep(5, 1.0, 3), SeenStep(5, 1.0, 2)
    assert better(first, later) == later == better(later, first)
    assert better(first, SeenStep(9, 2.0, 0)) == first and better(None, first) == first
    assert better(SeenStep(5, 1.0, None), first) == first


# --- the run and its verdict

GOOD = FaultOutcome("14:03:11", "worker", "rank 1 on a, pid 21", 0.25, 4)
LEFT = FaultOutcome("14:03:41", "host", "-", left_out="it is elsewhere")
BAD = FaultOutcome("14:04:11", "agent", "the agent on b, pid 3", trouble="no step within 60 s (b: joining)")


@pytest.mark.parametrize(
    ("outcomes", "stopped", "held", "text"),
    [
        (
            [GOOD, LEFT, replace(GOOD, seconds=2.0, lost=None)],
            "",
            True,
            "held: 2 of 3 faults, 1 left out; next step after 1.12 s (median), ",
        ),
        (
            [GOOD, replace(GOOD, lost=7)],
            "",
            True,
            "held: 2 of 3 faults; next step after 0.25 s (median), 0.25 s (longest); steps lost: 11, at most 7 by",
        ),
        ([GOOD, BAD], "", False, "not held: no step within 60 s (b: joining), after the fault agent (the agent on b, pid 3) at 14:04:11"),
        ([BAD], "SIGINT came", False, "not held: no step"),
        ([GOOD], "the job has ended", False, "not proven: the job has ended; 1 of 3 faults were done, and the job went on after each"),
        ([LEFT], "", False, "not proven: each of the 3 faults was left out"),
    ],
)
def test_the_verdict_can_fail(outcomes: list[FaultOutcome], stopped: str, held: bool, text: str) -> None:
    found = judge(outcomes, 3, stopped)
    assert found[0] == held and found[1].startswith(text), found


def test_the_table() -> None:
    assert table([GOOD, LEFT, BAD]).splitlines() == [
        "TIME      FAULT   TO                     NEXT STEP  STEPS LOST",
        "14:03:11  worker  rank 1 on a, pid 21    0.25 s     4",
        "14:03:41  host    -                      -          -           left out: it is elsewhere",
        "14:04:11  agent   the agent on b, pid 3  -          -           no step within 60 s (b: joining)",
    ]


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job whose workers have stamped their last step. A fault is done to nobody, and the job goes on after it at once."""
    monkeypatch.setattr(watch, "look", lambda job, also: (HOST, OTHER))
    monkeypatch.setattr(play, "is_gone", lambda process: False)
    monkeypatch.setattr(play, "PAUSE", 0.01)
    monkeypatch.setattr(recovery, "PAUSE", 0.01)
    monkeypatch.setattr(play.faults, "do", lambda kind, victim: [victim.agent.process])
    monkeypatch.setattr(recovery.watch, "next_step", lambda *_: SeenStep(int(time.monotonic() * NS), 0.1, 0))


@pytest.mark.usefixtures("still")
def test_a_job_that_makes_one_step_after_a_fault_and_no_other_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    run = play.Play("job", TERMS, lambda outcome: None)
    stamps = iter([1, 2])  # the job trains before the first fault, and not after it
    monkeypatch.setattr(watch, "last_stamp", lambda agents: next(stamps, 2))
    run.run([PlannedFault(0.0, "worker", 0.0), PlannedFault(0.1, "worker", 0.0)], 0.2)
    assert [outcome.trouble for outcome in run.outcomes] == ["no further step within 0.1 s (a: running, b: running)"]


@pytest.mark.usefixtures("still")
def test_no_fault_hits_a_round_that_is_just_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    run, stamps, looks = play.Play("job", replace(TERMS, limit=60.0), print), iter(range(1, 10_000)), iter([(HOST, agent("b", 3))] * 40)
    seen: list[tuple[Sequence[RunningAgent], float]] = []
    monkeypatch.setattr(watch, "last_stamp", lambda agents: next(stamps))
    monkeypatch.setattr(watch, "look", lambda job, also: next(looks, (HOST, OTHER)))
    monkeypatch.setattr(play, "choose", lambda fault, agents, comes_back: seen.append((agents, time.monotonic())) or "left out")
    run.run([PlannedFault(0.0, "worker", 0.0), PlannedFault(0.2, "worker", 0.0)], 0.0)
    (first, at), (second, later) = seen
    assert first == second == (HOST, OTHER)
    assert later - at >= 0.2, "a fault that is late makes those after it as late"


@pytest.mark.usefixtures("still")
def test_after_a_fault_that_nothing_follows_there_is_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    run = play.Play("job", TERMS, lambda outcome: None)
    stamps = iter(range(1, 10_000))  # somebody trains
    monkeypatch.setattr(watch, "last_stamp", lambda agents: next(stamps))
    monkeypatch.setattr(recovery.watch, "next_step", lambda *_: None)
    run.run([PlannedFault(0.0, "worker", 0.0), PlannedFault(0.0, "worker", 0.0)], 0.0)
    assert [outcome.trouble for outcome in run.outcomes] == ["no step within 0.1 s (a: running, b: running)"]


def recovers(terms: Terms, monkeypatch: pytest.MonkeyPatch, step: SeenStep | None) -> recovery.Recovery:
    """Return the wait after OTHER was killed. ``step``: the next one."""
    monkeypatch.setattr(recovery.watch, "next_step", lambda *_: step)
    outcome, target = FaultOutcome("14:03:11", "agent", "b"), FaultTarget(OTHER, OTHER.process.pid, "b")
    return recovery.Recovery(terms, outcome, target, (HOST, OTHER), time.monotonic_ns(), None, None)


def test_an_agent_that_somebody_starts_again_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    step, again = SeenStep(1, 0.5, 2), agent("b", 4, rank=None)
    wait = recovers(replace(TERMS, limit=60.0, supervised=True), monkeypatch, step)
    assert wait.judge((HOST,), True) is None and wait.judge((HOST, OTHER), True) is None, "not back, and not gone"
    assert wait.judge((), False) is None, "nor if all have ended meanwhile"
    assert wait.judge((HOST, again), True) == replace(wait.outcome, seconds=0.5, lost=2)
    alone = recovers(replace(TERMS, limit=60.0), monkeypatch, step)
    assert alone.judge((HOST,), True) == replace(wait.outcome, seconds=0.5, lost=2), "nobody starts it again"


def test_an_agent_that_does_not_come_back_or_ends_again_is_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    late = recovers(replace(TERMS, limit=0.0, supervised=True), monkeypatch, SeenStep(1, 0.5, 2)).judge((HOST,), True)
    assert late is not None and late.trouble == "the agent has not come back within 0 s (a: running)"
    wait = recovers(replace(TERMS, limit=60.0, restart=0.1), monkeypatch, SeenStep(1, 0.5, 2))
    with subprocess.Popen(["sh", "-c", "exit 201"]) as child:
        child.wait(PATIENCE)
    wait.child = child
    ended = wait.judge((HOST,), True)
    assert ended is not None and ended.trouble == "the agent that was started again has ended with exit code 201"


def test_a_step_after_the_limit_is_trouble_and_the_time_of_a_restart_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    late = recovers(replace(TERMS, limit=5.0), monkeypatch, SeenStep(1, 5.5, 0)).judge((HOST,), True)
    assert late is not None and late.trouble == "the next step came later than 5 s"
    wait = recovers(replace(TERMS, limit=5.0, restart=1.0), monkeypatch, SeenStep(1, 5.5, 0))
    with subprocess.Popen(["true"]) as wait.child:
        again = wait.judge((HOST, agent("b", 4)), True)
    assert again is not None and again.trouble == ""


@pytest.mark.usefixtures("still")
def test_a_fault_that_is_interrupted_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    run = play.Play("job", replace(TERMS, limit=60.0), lambda outcome: None)
    stamps = iter(range(1, 10_000))  # somebody trains
    monkeypatch.setattr(watch, "last_stamp", lambda agents: next(stamps))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(recovery.watch, "next_step", interrupt)
    with suppress(KeyboardInterrupt):
        run.run([PlannedFault(0.0, "worker", 0.0)], 0.0)
    assert [one.left_out for one in run.outcomes] == ["interrupted, and undone"]


@pytest.mark.usefixtures("still")
def test_an_agent_that_ends_again_later_is_trouble() -> None:
    run = play.Play("job", replace(TERMS, limit=60.0), lambda outcome: None)
    run.outcomes.append(GOOD)
    with subprocess.Popen(["sh", "-c", "exit 201"]) as child:
        child.wait(PATIENCE)
    run.started.append(child)
    run.run([PlannedFault(60.0, "worker", 0.0)], 60.0)
    assert [one.trouble for one in run.outcomes] == ["an agent that was started again has ended with exit code 201"]


@pytest.mark.usefixtures("still")
def test_a_job_that_does_not_train_gets_no_fault() -> None:
    run = play.Play("job", TERMS, lambda outcome: None)
    run.run([PlannedFault(0.0, "worker", 0.0)], 0.1)
    assert (run.outcomes, run.stopped) == ([], "no further step within 0.1 s (a: running, b: running)")


@pytest.mark.usefixtures("still")
def test_a_job_that_ends_between_two_faults_is_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    run = play.Play("job", TERMS, lambda outcome: None)
    monkeypatch.setattr(play, "is_gone", lambda process: True)
    run.run([PlannedFault(60.0, "worker", 0.0)], 60.0)
    assert run.outcomes == [] and run.stopped.startswith("the job has ended at ")


# --- the question and the options


def test_a_no_at_the_terminal_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(command.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(command.click, "confirm", lambda text: asked.append(text) or len(asked) > 1)
    with pytest.raises(StartError, match="nothing was done"):
        command._ask(yes=False)
    command._ask(yes=False)
    command._ask(yes=True)
    assert asked == ["Do it?"] * 2


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--every=0"], "--every: '0' is not a duration"),
        (["--limit=off"], "--limit: there is no off; give a time, such as 60s"),
        (["--kinds=worker,wroker"], "--kinds: 'wroker' is not one of worker, agent, node, freeze, host, leave (did you mean worker?)"),
        (["--seed=-1"], "--seed: -1 is out of range"),
        (["--restart=1s", "--supervised"], "--restart and --supervised: only one can start agents again; give one of them"),
        (["--json"], "--json: nobody can be asked; give --yes, too"),
        (["--evry=3"], "No such option"),
        (["a", "b"], "Got unexpected extra argument (b)"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], line: str) -> None:
    with pytest.raises(UsageError) as error:
        command.main(words)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)

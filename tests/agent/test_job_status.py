"""The status of a job, from the records in its store: its state, its nodes, and who is waited for; and the screen that shows it."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from elastirun.agent.observe.step_rates import WorkerSteps
from elastirun.agent.status.job_status import QUIET, JobStatus, judge
from elastirun.agent.status.screen import COLORS, MOST_NODES, WIDTH, painted, screen, watched
from elastirun.rendezvous.peers.liveness import Liveness
from elastirun.rendezvous.peers.ranks import member
from elastirun.rendezvous.peers.view import View
from elastirun.rendezvous.wire.records import Broken, Cause, Closed, ExitRecord, NodeRow, RoundRecord, Status, Verdict

SETTINGS = ("--nnodes=2:3", "--rdzv-backend=c10d", "--max-restarts=4")
A, B, C = (NodeRow(i, f"name-{i}", f"10.0.0.{n}", 1000, 2, status=Status.RUNNING, round=3) for n, i in enumerate("abc", 1))
ROUND = RoundRecord("store", 9, 3, (member(A), member(B)), "b joined", failures=1, settings=SETTINGS, host="a")
LATE = replace(C, status=Status.JOINING, round=0)


def status(record: RoundRecord | None, *rows: NodeRow, live: Liveness | None = None, now: float = 0.0) -> JobStatus:
    view = View("", record or RoundRecord(""), {row.id: row for row in rows}, live or Liveness(math.inf), now)
    return judge("job7", "10.0.0.1:29400", view)


def changed(row: NodeRow, **fields: Any) -> NodeRow:
    return replace(row, **fields)


def test_a_round_that_runs() -> None:
    found = status(ROUND, changed(A, hosts=True), B, LATE)
    assert (found.state, found.round, found.reason, found.world_size, found.waiting) == ("running", 3, "b joined", 4, "")
    assert (found.min_nodes, found.max_nodes, found.failures, found.max_restarts) == (2, 3, 1, 4)
    assert [(n.id, n.node_rank, n.first_rank, n.state, n.hosts_store) for n in found.nodes] == [
        ("a", 0, 0, "running", True),
        ("b", 1, 2, "running", False),
        ("c", None, None, "joining", False),
    ]


def test_a_node_that_sits_out_is_shown_with_its_strikes() -> None:
    out = changed(B, status=Status.DRAINING, done_round=3, note="strike 2 of 2: rank 2 failed")
    line = "name-b 10.0.0.2 sits out: strike 2 of 2: rank 2 failed"
    before = status(replace(ROUND, broken=Broken(Cause.FAILURE, "rank 2 failed", "b")), A, out)
    assert (before.nodes[1].state, before.events) == ("sitting_out", (line,))
    after = status(replace(ROUND, round=4, members=(member(A), member(C))), changed(A, round=4), out, changed(C, round=4))
    assert [(n.id, n.node_rank, n.state) for n in after.nodes] == [("a", 0, "running"), ("c", 1, "running"), ("b", None, "sitting_out")]
    assert after.events == (line,)


def test_beside_a_full_round_a_node_is_a_spare() -> None:
    assert status(replace(ROUND, settings=("--nnodes=1:2",)), A, B, LATE).nodes[2].state == "spare"


@pytest.mark.parametrize(
    ("a", "b", "state", "waiting"),
    [
        ({"status": Status.READY}, {"round": 2}, "starting", "for name-a 10.0.0.1, name-b 10.0.0.2 to start the workers of round 3"),
        ({}, {"status": Status.READY}, "starting", "for name-b 10.0.0.2 to start the workers of round 3"),
        ({"status": Status.DONE, "succeeded": 3}, {}, "finishing", "for name-b 10.0.0.2 to finish"),
        ({"status": Status.DONE, "succeeded": 3}, {"status": Status.DONE, "succeeded": 3}, "finishing", ""),
        ({"succeeded": 2}, {}, "running", ""),
    ],
)
def test_who_is_waited_for_while_a_round_runs(a: dict[str, Any], b: dict[str, Any], state: str, waiting: str) -> None:
    found = status(ROUND, changed(A, **a), changed(B, **b))
    assert (found.state, found.waiting) == (state, waiting)
    assert len(found.waiting_for) == waiting.count("10.0.0.")


BROKEN = replace(ROUND, broken=Broken(Cause.LOST, "name-b was lost", "a", lost=("b",)))
HERE = {"status": Status.JOINING, "done_round": 3}


@pytest.mark.parametrize(
    ("rows", "states", "waiting"),
    [
        ([A, B], ["running", "lost"], "for name-a 10.0.0.1 to stop the workers of round 3"),
        ([changed(A, status=Status.DRAINING), B], ["stopping", "lost"], "for name-a 10.0.0.1 to stop the workers of round 3"),
        ([changed(A, **HERE), B], ["joining", "lost"], "for more nodes: 1 of at least 2 are here"),
        ([changed(A, **HERE), B, LATE], ["joining", "lost", "joining"], "for a round to form; nodes here: 2, at least 2, at most 3"),
        ([changed(A, status=Status.LEFT)], ["left", "lost"], "for more nodes: 0 of at least 2 are here"),
    ],
)
def test_who_is_waited_for_between_two_rounds(rows: list[NodeRow], states: list[str], waiting: str) -> None:
    found = status(BROKEN, *rows)
    assert (found.state, found.ended, found.waiting) == ("restarting", "name-b was lost", waiting)
    assert [node.state for node in found.nodes] == states


@pytest.mark.parametrize(
    ("record", "newcomer", "waiting"),
    [
        ({"losses": 3}, {}, "newcomers join after 10 s (3 rounds in a row lost a node within 60 s of their start)"),
        ({"losses": 2}, {}, ""),
        ({"losses": 3}, {"status": Status.LEFT}, ""),
        ({"losses": 3}, {"hosts": True}, ""),
        ({"losses": 3, "settings": ("--nnodes=1:2",)}, {}, ""),
    ],
)
def test_newcomers_that_are_held_back_after_early_losses(record: dict[str, Any], newcomer: dict[str, Any], waiting: str) -> None:
    found = status(replace(ROUND, **record), A, B, changed(LATE, **newcomer))
    assert (found.state, found.waiting, found.waiting_for) == ("running", waiting, ())


def test_the_longest_line_about_newcomers_fits_on_the_screen() -> None:
    found = status(replace(ROUND, losses=99), A, B, LATE)
    assert f"\nwaiting   {found.waiting}\n" in screen([found])


def test_before_the_first_round() -> None:
    assert (status(None, LATE).state, status(None, LATE).waiting) == ("forming", "for a round to form; nodes here: 1")
    found = status(RoundRecord("store", settings=SETTINGS), LATE)
    assert (found.waiting, [node.state for node in found.nodes]) == ("for more nodes: 1 of at least 2 are here", ["joining"])


def test_a_member_without_a_row_is_absent() -> None:
    found = status(ROUND, A)
    assert [node.state for node in found.nodes] == ["running", "absent"] and found.state == "starting"


def test_a_job_that_is_over_waits_for_nobody_and_names_the_root_cause() -> None:
    failures = (ExitRecord("name-b", 2, 0, 100, 1, 0, 1.0), ExitRecord("name-a", 0, 0, 101, -9, 5, 2.0))
    found = status(replace(ROUND, closed=Closed(Verdict.FAILED, "rank 2 failed", "a", failures)), A, B)
    assert (found.state, found.ended, found.waiting) == ("failed", "rank 2 failed", "")
    assert found.events[0] == "rank 2 on name-b failed (exit code 1)" and len(found.events) == 2


def test_failures_of_this_round_and_nodes_that_left_are_told_the_newest_first() -> None:
    failure = ExitRecord("name-a", 1, 1, 100, -11, 0, 1.0)
    gone = [changed(C, id=f"c{n}", name=f"c{n}", status=Status.LEFT, round=n, note=f"note {n}") for n in range(1, 8)]
    found = status(BROKEN, changed(A, failures=(failure,)), changed(B, round=2, failures=(replace(failure, rank=3),)), *gone)
    assert found.events[0] == "rank 1 on name-a failed (SIGSEGV)"
    assert [line.partition(" ")[0] for line in found.events[1:]] == ["c7", "c6", "c5", "c4"]


def test_the_store_of_a_later_term_is_hosted_by_the_node_of_the_record() -> None:
    found = status(replace(ROUND, term=1, host="b"), changed(A, hosts=True), B)
    assert [node.hosts_store for node in found.nodes] == [False, True]


def test_a_node_whose_row_does_not_change_while_it_is_watched_is_silent() -> None:
    live = Liveness(math.inf)
    for seq, now in ((1, 0.0), (2, QUIET + 1)):
        live.observe({"a": seq, "b": 1}, now, now)
    found = status(ROUND, A, B, live=live, now=QUIET + 1)
    assert [node.quiet for node in found.nodes] == [0.0, QUIET + 1]
    assert "running, silent 4 s" in screen([found]) or "running, silent 3 s" in screen([found])


@pytest.mark.parametrize("text", ["--nnodes=", "--nnodes=1", "--nnodes=9999999999:1", "--nnodes=²:3", "x--nnodes=1:2"])
def test_settings_that_make_no_sense_are_unknown(text: str) -> None:
    found = status(replace(ROUND, settings=(text, "--max-restarts=many")), A, B)
    assert (found.min_nodes, found.max_nodes, found.max_restarts) == (None, None, None) and screen([found])


# --- the screen


def test_the_steps_of_the_workers_here_are_one_line() -> None:
    workers = [WorkerSteps(2, 0, 120, 0.26, None), WorkerSteps(3, 1, 121, 0.14, 2.5)]
    view = View("", ROUND, {"a": A, "b": B}, Liveness(1.0), 0.0)
    for some, line in (
        (workers, "120 to 121 here (rank 2 to 3), 2.5 a second, the last one 0.1 s ago"),
        (workers[:1], "120 here (rank 2), the last one 0.3 s ago"),
    ):
        assert f"\nsteps     {line}\n" in screen([judge("job7", "", view, (), tuple(some))])
    assert "steps" not in screen([judge("job7", "", view)])
    line = "2 here (rank 2 to 3), which keep their processes when others are lost"
    assert f"\nlive      {line}\n" in screen([judge("job7", "", view, live=(2, 3))])


def test_ranks_that_have_ended_with_0_are_shown() -> None:
    view = View("", ROUND, {}, Liveness(math.inf), 0.0)
    assert "\nfinished  rank 2, 3 here has ended with 0\n" in screen([judge("job7", "", view, finished=(2, 3))])
    slow = WorkerSteps(3, 1, 121, 0.14, 2.5, 1.75)
    assert "\nslow      rank 3 computes for 1.8 times as long as the median rank\n" in screen([judge("job7", "", view, (), (slow,))])


def test_the_screen_is_aligned() -> None:
    assert screen([status(BROKEN, changed(A, hosts=True), LATE)]) == (
        "job       job7: restarting\n"
        "store     10.0.0.1:29400\n"
        "round     3: b joined\n"
        "ended     name-b was lost\n"
        "nodes     2 in the round, 4 workers, 1 beside it (--nnodes=2:3)\n"
        "restarts  1 of 4 used\n"
        "waiting   for name-a 10.0.0.1 to stop the workers of round 3\n"
        "\n"
        "NODE  RANKS  STATE    HOST    ADDRESS\n"
        "0     0-1    running  name-a  10.0.0.1 (store)\n"
        "1     2-3    lost     name-b  10.0.0.2\n"
        "-     -      joining  name-c  10.0.0.3"
    )


def test_one_worker_is_said_as_one() -> None:
    alone = replace(A, slots=1)
    text = screen([status(replace(ROUND, members=(member(alone),)), alone)])
    assert "\nnodes     1 in the round, 1 worker (--nnodes=2:3)\n" in text


def test_of_a_large_job_the_nodes_that_differ_are_shown_and_the_others_counted() -> None:
    rows = [changed(A, id=f"n{n}", name=f"host-{n:03}", address=f"10.0.1.{n}") for n in range(250)]
    rows[200] = changed(rows[200], status=Status.READY)
    record = replace(ROUND, members=tuple(map(member, rows)), host="n107")
    rows[107] = changed(rows[107], hosts=True)
    text = screen([status(record, *rows)])
    assert text.endswith(f"\nand {250 - MOST_NODES} more: {250 - MOST_NODES} running (--json lists all)")
    assert "host-200" in text and "host-107" in text and "host-013" in text and "host-014" not in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_whatever_the_records_hold_the_screen_is_printable_and_no_wider() -> None:
    long = "x" * 500
    row = changed(A, name=long, address=long, note="\x1b[2J\n", status=Status.LEFT)
    text = screen([judge("\x1b]0;\x07", "\n", View("", replace(ROUND, reason=long + "\n"), {"a": row}, Liveness(1.0), 0.0), ("\x1b",))] * 2)
    assert all(line.isprintable() and len(line) <= WIDTH for line in text.splitlines())


# --- the screen again and again


def jobs(count: int) -> list[JobStatus]:
    """Jobs of 12 lines each, the newest first."""
    return [replace(status(BROKEN, changed(A, hosts=True), LATE), job=f"job{number}") for number in range(count)]


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("lines", [1, 2, 3, 5, 14, 15, 27, 28, 29, 40, 41, 42, 200])
@pytest.mark.parametrize("columns", [20, 100])
def test_the_screen_is_never_larger_than_the_terminal(count: int, lines: int, columns: int) -> None:
    found = watched(jobs(count), "12:00:00", columns, lines).split("\n")
    assert found[0] == "12:00:00", "the clock is always there"
    assert len(found) <= max(1, lines - 1) and max(map(len, found)) <= columns


@pytest.mark.parametrize(
    ("lines", "whole", "last"),
    [
        (200, 3, "1     2-3    lost     name-b  10.0.0.2"),
        (38, 3, "1     2-3    lost     name-b  10.0.0.2"),
        (37, 2, "and 1 more job: job2 restarting"),
        (28, 2, "and 1 more job: job2 restarting"),
        (27, 1, "and 2 more jobs: job1 restarting, job2 restarting"),
        (16, 1, "and 2 more jobs: job1 restarting, job2 restarting"),
        (15, 0, "and 2 more jobs: job1 restarting, job2 restarting"),
    ],
)
def test_the_first_jobs_are_shown_and_the_others_named(lines: int, whole: int, last: str) -> None:
    three = [replace(one, nodes=one.nodes[:2]) for one in jobs(3)]  # of 11 lines, and a blank one
    text = watched(three, "12:00:00", 100, lines)
    assert text.count("10.0.0.2\n") + text.endswith("10.0.0.2") == whole and text.split("\n")[-1] == last
    assert "job0: restarting" in text
    assert bool(whole) != ("more lines (a taller window shows more)" in text)


def test_colours_change_no_text_and_states_have_one_each() -> None:
    text = screen([status(BROKEN, changed(A, hosts=True), LATE), status(ROUND, A, B)])
    shown = painted(text)
    assert re.sub("\x1b\\[\\d+m", "", shown) == text
    assert "\x1b[1mjob7\x1b[0m: \x1b[33mrestarting\x1b[0m" in shown and "\x1b[1mjob7\x1b[0m: \x1b[32mrunning\x1b[0m" in shown
    assert "1     2-3    \x1b[31mlost\x1b[0m     name-b" in shown and "\n\x1b[2mround     \x1b[0m3: b joined\n" in shown
    assert {"running", "restarting", "failed", "succeeded", "lost", "spare", "sitting_out"} <= COLORS.keys()

"""The annotation for a number of nodes: when a change of its file counts. tests/system/test_scale.py has real agents."""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastirun.agent import termination_log
from elastirun.agent.wanted_nodes import FILE, LOOK_EVERY, NEWS, VARIABLE, WantedNodes, count_of
from elastirun.rendezvous.wire.records import Closed, Member, RoundRecord, Verdict
from tests.support.annotation import Annotation
from tests.support.until import PATIENCE

WAITING = RoundRecord("s")
RUNNING = RoundRecord("s", round=3, members=(Member("me", "me", "127.0.0.1", 1, 1), Member("you", "you", "127.0.0.2", 1, 1)))


class Recorded(WantedNodes):
    """The part, whose writes go to ``written``. ``fails``: the store does not answer."""

    def __init__(self, path: Path | None, config: Any, me: str = "me") -> None:
        machine = SimpleNamespace(record=None, row=SimpleNamespace(id=me), store=SimpleNamespace(place=None))
        self.access = SimpleNamespace(for_status=lambda place: {"kind": "none"}, notices=deque[str]())
        self.machine, self.said, self.warned, self.now = machine, list[str](), list[str](), 100.0
        self.written: list[int] = []
        self.fails = False
        session = cast(Any, SimpleNamespace(machine=machine, access=self.access))
        super().__init__(config, session, {VARIABLE: str(path or "")}, self.said.append, self.warned.append)

    def _write(self, wanted: int) -> None:
        if self.fails:
            super()._write(wanted)
        else:
            self.written.append(wanted)
            self._written = wanted

    def look(self, record: RoundRecord | None, after: float = LOOK_EVERY) -> list[int]:
        """Let the time pass, and return what has been written so far."""
        self.machine.record = record
        self.now += after
        self.tick(self.now)
        if self._thread is not None:
            self._thread.join(PATIENCE)
        return self.written


@pytest.fixture
def annotation(tmp_path: Path) -> Annotation:
    return Annotation(tmp_path)


def part(annotation: Annotation, low: int = 1, high: int = 8, me: str = "me") -> Recorded:
    return Recorded(annotation.path, SimpleNamespace(min_nodes=low, max_nodes=high, token=None), me)


@pytest.mark.parametrize(("text", "count"), [("1", 1), ("64", 64), ("max", 0), ("007", 7)])
def test_numbers_of_nodes(text: str, count: int) -> None:
    assert count_of(text) == count


@pytest.mark.parametrize("text", ["", "0", "00", "-1", "1.5", "two", "²", "٣", "1 2", "9" * 10, "MAX"])
def test_what_is_no_number_of_nodes(text: str) -> None:
    assert count_of(text) is None


def test_the_number_at_the_start_counts_until_a_round_has_formed_or_somebody_has_asked(annotation: Annotation) -> None:
    annotation.set("4")
    early = part(annotation)
    assert early.look(None) == [], "nothing is known of the job yet"
    assert early.look(WAITING) == [4] and early.said == [f"{annotation.path}: 4 nodes wanted"]
    assert early.look(WAITING) == [4] and early.look(replace(WAITING, wanted=4)) == [4], "it is written once"
    for late in (RUNNING, replace(WAITING, wanted=2), replace(RUNNING, wanted=2)):
        one = part(annotation)
        assert one.look(late) == one.look(late) == [] and not one.said


def test_a_change_right_after_the_start_counts(annotation: Annotation) -> None:
    one = part(annotation)
    one.look(None)
    one.see(RUNNING, one.now)
    assert one.look(RUNNING, 0.0) == []
    annotation.set("4")
    assert one.look(RUNNING) == [4]


def test_a_change_counts_and_is_not_repeated(annotation: Annotation) -> None:
    one = part(annotation)
    assert one.look(RUNNING) == []
    annotation.set("4\n")
    assert one.look(RUNNING, LOOK_EVERY / 2) == [] and one.look(RUNNING, LOOK_EVERY / 2) == [4]
    assert one.look(replace(RUNNING, wanted=3)) == [4], "somebody has scaled the job since"
    annotation.set("max")
    assert one.look(replace(RUNNING, wanted=3)) == [4, 0]
    annotation.set("2")
    assert one.look(replace(RUNNING, wanted=2)) == [4, 0], "the record says so already"


def test_no_file_and_no_annotation_say_nothing(annotation: Annotation) -> None:
    annotation.set("4")
    one = part(annotation)
    one.look(RUNNING)
    os.rename(annotation.path, away := annotation.path.with_name("away"))
    assert one.look(RUNNING) == []
    os.rename(away, annotation.path)
    assert one.look(RUNNING) == [], "it was away for a moment"
    annotation.set("")
    assert one.look(RUNNING) == []
    annotation.set("4")
    assert one.look(RUNNING) == [4], "the same number, set again"


def test_only_rank_0_of_a_round_writes_and_its_successor_does_for_a_while(annotation: Annotation) -> None:
    one = part(annotation, me="you")
    one.look(RUNNING)
    annotation.set("1")
    assert one.look(RUNNING) == []
    succeeded = replace(RUNNING, round=4, members=RUNNING.members[1:])
    assert one.look(succeeded) == [1]
    annotation.set("2")
    assert one.look(replace(RUNNING, wanted=2)) == one.look(succeeded) == [1], "rank 0 had done it before it was lost"
    annotation.set("1")
    one.look(RUNNING)
    assert one.look(succeeded, NEWS) == [1], "that was long ago"


def test_a_spare_writes_and_says_nothing(annotation: Annotation) -> None:
    one = part(annotation, me="spare")
    one.look(RUNNING)
    for text in ("1", "99"):
        annotation.set(text)
        assert one.look(RUNNING) == [] and not one.warned


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("9", "9 nodes: the job was started with --nnodes=2:8, which allows 2 to 8 nodes"),
        ("1", "1 node: the job was started with --nnodes=2:8, which allows 2 to 8 nodes"),
        ("zwölf\x1b[2J", "'zw"),
        ("x" * 5000, f"'{'x' * 64}' is no number of nodes"),
    ],
)
def test_a_wrong_number_is_one_line(annotation: Annotation, text: str, why: str) -> None:
    one = part(annotation, low=2)
    one.look(RUNNING)
    annotation.set(text)
    assert one.look(RUNNING) == one.look(RUNNING) == []
    (line,) = one.warned
    assert line.startswith(f"{annotation.path}: {why}") and line.isprintable()


def test_a_job_of_a_fixed_number_of_nodes_is_not_written_to(annotation: Annotation) -> None:
    annotation.set("2")
    one = part(annotation, low=2, high=2)
    assert one.look(WAITING) == [] and not one.warned


def test_a_store_that_does_not_answer_is_tried_again_for_a_while(annotation: Annotation) -> None:
    one = part(annotation)
    one.look(RUNNING)
    one.fails = True
    annotation.set("4")
    one.look(RUNNING)
    one.look(RUNNING)
    (line,) = one.access.notices
    assert line.startswith("warning: the wanted number of nodes cannot be written: ") and len(one.said) == 1
    one.fails = False
    assert one.look(RUNNING) == [4]
    annotation.set("5")
    one.fails = True
    one.look(RUNNING)
    one.fails = False
    assert one.look(RUNNING, NEWS) == [4]


def test_a_job_that_has_ended_is_left_alone(annotation: Annotation) -> None:
    annotation.set("4")
    assert part(annotation).look(replace(WAITING, closed=Closed(Verdict.SUCCEEDED, "", "me"))) == []


def test_a_fifo_holds_nothing_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "nodes")
    one = Recorded(tmp_path / "nodes", SimpleNamespace(min_nodes=1, max_nodes=8, token=None))
    looked = threading.Thread(target=one.look, args=(WAITING,), daemon=True)
    looked.start()
    looked.join(PATIENCE)
    assert not looked.is_alive() and one.written == []


def test_a_folder_in_the_place_of_the_file_costs_no_descriptor(tmp_path: Path) -> None:
    (tmp_path / "nodes").mkdir()
    one = Recorded(tmp_path / "nodes", SimpleNamespace(min_nodes=1, max_nodes=8, token=None))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        one._read()
    assert len(os.listdir("/proc/self/fd")) == before
    (line,) = one.warned
    assert (
        line == f"{VARIABLE}: there is no file {tmp_path}/nodes; correct the path, or make the file, from which a number of nodes is read"
    )


def test_without_a_file_nothing_is_due() -> None:
    one = Recorded(None, SimpleNamespace(min_nodes=1, max_nodes=8, token=None))
    assert one.tick(1.0) == float("inf")


def test_the_file_is_looked_for_in_pods_by_their_first_agent_alone() -> None:
    found = [
        termination_log.path_in_pod(environ, VARIABLE, FILE)
        for environ in ({}, {termination_log.IN_POD: "1"}, {VARIABLE: "/x"}, {VARIABLE: ""}, {VARIABLE: "/x", "ELASTIRUN_AGENT": "a:1"})
    ]
    assert found == [None, FILE if termination_log.STARTED_BY_CONTAINER else None, "/x", None, None]

"""The rules of ``decide``, one row each: what a node knows and sees, what it does about the store of its job, and why (0020).

The store of RECORD is that of h. The standby stores of a, b, c and d are in line for it, in this order; all nodes are members.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from elastirun.rendezvous.failover import decide as module
from elastirun.rendezvous.failover.decide import Decision, Move, Probe, Stay, StoreView, TakeOver, decide
from elastirun.rendezvous.failover.evidence import Evidence, StoreSearch
from elastirun.rendezvous.failover.succession import take_over
from elastirun.rendezvous.wire.actions import Change
from elastirun.rendezvous.wire.events import Synced
from elastirun.rendezvous.wire.records import Closed, NodeRow, Place, Quorum, RoundRecord, Verdict, Vote
from tests.rendezvous.test_majority import MAJORITY
from tests.rendezvous.test_succession import DEAD, PLACES, PROOF, RECORD, answer, rows
from tests.support import changes
from tests.support.changes import changed, instead_of, part_always, part_never

NOW = 20.0  # seconds
OF_A, OF_B, OF_C = PLACES[1:4]
LATER = replace(RECORD, version=9, term=1, host="a")
EMPTY = RoundRecord("another", version=1)  # no round has formed in that store yet
DOUBTING = Evidence(search=StoreSearch(since=10.0, due=NOW, doubts=True))
HEARD = Evidence(gone=frozenset("h"), known=RECORD, word=DEAD)  # the guard of h has told that h is gone
IN_OF_B = replace(HEARD, at=OF_B, undecided_since=10.0, left=frozenset({"h:2000"}))  # waits in the store of b, which nobody has taken over
COME = replace(IN_OF_B, terms=dict.fromkeys("bcd", RECORD.term))  # b, c and d have come there
CUT_OFF = Evidence(known=RECORD, at=OF_B, undecided_since=10.0, unreached=True, host_seq=5)  # has given up h, of which nobody knows more
TAKEN = Change(None, take_over(RECORD, "b", {"h"}, (Quorum(tuple("abcd")),), turn=2))
HERE = Change(EMPTY, replace(EMPTY, version=2, moved=replace(OF_B, run=RECORD.store_id)))


def sees(me: str, here: str = "", rules: Any = PROOF, place: Place | None = None, found: Synced | None = None, **more: Any) -> StoreView:
    """What the node ``me`` sees: the nodes ``here`` in the store in use, or what it has ``found`` in that of ``place``."""
    return StoreView(me, rules, rows(here), place=place, answer=found, **more)


def back(seq: int) -> Synced:
    """What the store of h says where h has written its row for the ``seq``-th time."""
    return Synced(NOW, NOW, RECORD, {"h": NodeRow("h", "h", "", 0, 2, seq=seq)})


@dataclass(frozen=True)
class Row:
    """With this ``evidence`` and ``view`` the node decides so. ``rule``: without that condition it decides otherwise."""

    about: str
    evidence: Evidence
    view: StoreView
    decision: Decision
    rule: changes.Change
    record: RoundRecord | None = RECORD


ROWS = [
    Row(
        "a newcomer knows no other store",
        Evidence(),
        sees("b"),
        Stay("this node has read no round record yet, so it knows of no standby store"),
        part_never("record is None"),
        record=None,
    ),
    # nothing was read in another store
    Row(
        "the owner of an undecided store to which enough have come takes over",
        replace(COME, start_is_clear=True),
        sees("b", "bcd"),
        TakeOver("enough nodes have come to the store of this node, and no other run has begun", TAKEN),
        part_never("change"),
    ),
    Row(
        "the store in use answers",
        Evidence(),
        sees("b"),
        Stay("the store in use is not lost, or there is no other store to look at"),
        part_never("not searches(case)"),
    ),
    Row(
        "the owner asks first where the job was started, and says there where the job is",
        replace(COME, start=EMPTY),
        sees("b", "bcd"),
        Probe("enough nodes have come, but another run may begin", None, NOW, HERE),
        part_never("claims"),
    ),
    Row(
        "the store in use does not answer",
        Evidence(search=StoreSearch(since=19.0, due=NOW + 0.5)),
        sees("b", silent_since=19.0),
        Probe("the store in use is lost, and another one may have taken over", OF_A, NOW + 0.5),
        instead_of("next_place", "None"),
    ),
    # a look at another store was answered
    Row(
        "h writes in its store, and too few have come to that of b, which has given up h",
        CUT_OFF,
        sees("b", "b", MAJORITY, None, back(6)),
        Move("the host that was given up writes again, and the undecided store in use can decide nothing", None, back=True),
        part_never("host_is_back"),
    ),
    Row(
        "nothing new where the job was started",
        CUT_OFF,
        sees("b", "b", MAJORITY, None, back(5)),
        Stay("no store takes over where the job was started"),
        part_never("place is None"),
    ),
    Row(
        "the job has ended before its host",
        HEARD,
        sees("b", place=OF_A, found=answer("a", votes=(Vote("h", replace(RECORD, closed=Closed(Verdict.SUCCEEDED, "", "h")), ("h",)),))),
        Stay("a guard has brought the verdict on the job"),
        part_never("evidence.verdict"),
    ),
    Row(
        "a has taken over, which needs no other proof",
        Evidence(),
        sees("b", place=OF_A, found=answer(found=LATER, votes=())),
        Move("that store has taken over: its record has a later term", OF_A, decided=True),
        part_never("is_later"),
    ),
    Row(
        "another run of the job is in the store of a",
        HEARD,
        sees("b", place=OF_A, found=answer("a", found=replace(LATER, store_id="another"))),
        Stay("the record in that store is of another run, or of no later term"),
        part_never("answer.round is not None"),
    ),
    Row(
        "a has given up h, but this node has heard nothing and does not doubt",
        Evidence(),
        sees("b", place=OF_A, found=answer("a", votes=())),
        Stay("nothing shows that the host of the store in use is lost"),
        part_never("trusts_host"),
    ),
    Row(
        "the first in line reads in its own store that h is gone",
        Evidence(),
        sees("a", place=OF_A, found=answer()),
        Move("the host is lost, and all before this node in line are away", OF_A),
        part_never("opens"),
    ),
    Row(
        "the first in line doubts, and so do enough others",
        DOUBTING,
        sees("a", "", MAJORITY, OF_A, answer(votes=(Vote("b", RECORD), Vote("c", RECORD)))),
        Move("the host is lost, and all before this node in line are away", OF_A),
        part_never("opens"),
    ),
    Row(
        "a may open its store before b does",
        Evidence(),
        sees("b", place=OF_B, found=answer("b")),
        Stay("a node before this one in line may take over, or too few doubt with it"),
        part_never("place.id == view.me"),
    ),
    Row(
        "the first in line is alone with its doubt",
        DOUBTING,
        sees("a", "", MAJORITY, OF_A, answer("a", votes=(Vote("b", RECORD),))),
        Stay("a node before this one in line may take over, or too few doubt with it"),
        part_never("place.id == view.me"),
    ),
    Row(
        "h is gone, but a has not opened its store yet",
        HEARD,
        sees("b", place=OF_A, found=answer("c")),
        Stay("the owner of that store is not there"),
        part_never("not quorum.is_there(answer.rows.get(place.id))"),
    ),
    Row(
        "a has opened its store",
        HEARD,
        sees("b", place=OF_A, found=answer("a")),
        Move("the host is lost, and the owner of that store is there", OF_A),
        part_never("is_free"),
    ),
    Row(
        "this node doubts, and a has opened its store",
        DOUBTING,
        sees("b", "", MAJORITY, OF_A, answer("a", votes=())),
        Move("the host is lost, and the owner of that store is there", OF_A),
        part_never("is_free"),
    ),
    Row(
        "a has opened its store as well, and is before b",
        IN_OF_B,
        sees("b", "b", place=OF_A, found=answer("a")),
        Move("this node waits in its own store, and that one is before it in line", OF_A),
        part_never("precedes_own"),
    ),
    Row(
        "b has gone from its store to that of a, and those who wait there follow",
        IN_OF_B,
        sees("c", "bc", place=OF_A, found=answer("a", "b")),
        Move("the owner of the undecided store in use has gone there", OF_A),
        part_never("owner_has_come"),
    ),
    Row(
        "b has opened its store and waits there, like this node",
        IN_OF_B,
        sees("c", "bc", place=OF_A, found=answer("a")),
        Stay("the undecided store in use may still take over"),
        part_always("owner_has_come"),
    ),
]
each_row = pytest.mark.parametrize("row", ROWS, ids=[row.about for row in ROWS])


@each_row
def test_what_a_node_does_and_why(row: Row) -> None:
    assert decide(row.record, row.evidence, row.view, NOW) == row.decision


@each_row
def test_without_its_rule_it_would_do_something_else(row: Row) -> None:
    source = Path(module.__file__).read_text()
    scope: dict[str, Any] = {"__name__": module.__name__}
    exec(compile(changed(source, "decide", [row.rule]), module.__file__, "exec", dont_inherit=True), scope)
    try:
        found = repr(scope["decide"](row.record, row.evidence, row.view, NOW))
    except AttributeError as error:  # a later rule has needed what this one makes sure of
        found = repr(error)
    assert found != repr(row.decision)


def test_every_rule_has_a_row() -> None:
    function = next(node for node in ast.parse(Path(module.__file__).read_text()).body if getattr(node, "name", "") == "decide")
    calls = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Stay", "Probe", "Move", "TakeOver")
    ]
    assert {ast.literal_eval(call.args[0]) for call in calls} == {row.decision.reason for row in ROWS} and len(calls) == 18

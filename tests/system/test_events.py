"""events.jsonl: every round, loss, stop and end, in the words of docs/events.md."""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastirun.agent.events import changes
from elastirun.rendezvous.records import Broken, Cause, Closed, Member, RoundRecord, Verdict
from tests.support.cluster import Cluster, kill

ALWAYS = {"v", "time", "mono", "event", "node", "name"}
EMPTY = RoundRecord("s")
FIRST = replace(EMPTY, round=1, members=(Member("a1", "a", "", 1, 2), Member("b1", "b", "", 1, 2)), reason="the first round")
BROKEN = replace(FIRST, broken=Broken(Cause.LOST, "b silent", "a1", ("b1",)))
SECOND = replace(FIRST, round=2, members=(Member("a1", "a", "", 1, 2), Member("c1", "c", "", 1, 2)), reason="b silent")
CLOSED = replace(SECOND, closed=Closed(Verdict.SUCCEEDED, "all well", "c1"))


def test_each_change_of_the_record_is_told_once() -> None:
    assert changes(None, EMPTY) == [] and changes(FIRST, FIRST) == [] and changes(BROKEN, BROKEN) == []
    assert changes(EMPTY, FIRST) == [
        (
            "formed",
            {"round": 1, "reason": "the first round", "nodes": ["a", "b"], "joined": ["a", "b"], "gone": []}
            | {"world_size": 4, "restarts": 0},
        )
    ]
    assert changes(FIRST, BROKEN) == [("broken", {"round": 1, "cause": "lost", "reason": "b silent", "by": "a", "lost": ["b"]})]
    ((_, formed),) = changes(BROKEN, SECOND)
    assert (formed["joined"], formed["gone"]) == (["c"], ["b"])
    assert changes(SECOND, CLOSED) == [("closed", {"round": 2, "verdict": "succeeded", "reason": "all well", "by": "c"})]
    assert [name for name, _ in changes(FIRST, replace(CLOSED, broken=BROKEN.broken))] == ["formed", "broken", "closed"]


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / ".latest" / os.uname().nodename / "events.jsonl").read_text().splitlines()]


def test_a_life_with_a_failure_a_loss_and_a_signal_as_the_page_describes_it(nodes: Cluster) -> None:
    options = ("--max-restarts=1", "--last-call=0.1", "--expire=3", f"--log-dir={nodes.tmp_path}/logs")
    a = nodes.agent(1, *options, nnodes="2:3")
    b = nodes.agent(2, *options[:-1], nnodes="2:3")
    c = nodes.agent(3, *options[:-1], nnodes="2:3")
    nodes.round(3)[1].tell("exit 3")
    nodes.round(3, after=1)
    kill(c)
    for worker in nodes.round(2, after=2):
        assert worker.round == 3
    a.send_signal(signal.SIGTERM)
    assert nodes.ends(a) == 143
    kill(b)
    found = events(nodes.tmp_path / "logs")
    assert found[-1]["event"] == "end"
    by = {e["event"]: e for e in found}
    failure, loss = (e for e in found if e["event"] == "broken" and e["cause"] in ("failure", "lost"))
    assert (failure["cause"], loss["cause"], len(loss["lost"])) == ("failure", "lost", 1)
    assert loss.get("detected_after", 3.0) >= 3.0, "not before it has expired"
    assert by["round"]["round"] == 3 and 0 < by["round"]["formed_after"] < 30
    assert (by["end"]["outcome"], by["end"]["code"], by["signal"]["signal"]) == ("left", 143, "SIGTERM")
    page = (Path(__file__).parents[2] / "docs" / "events.md").read_text()
    described = {m[1]: set(re.findall(r"`(\w+)`", m[2])) for m in re.finditer(r"^\| `(\w+)` \| [^|]* \| (.*) \|$", page, re.M)}
    for event in found:
        assert event.keys() - ALWAYS <= described[event["event"]], "docs/events.md describes every field"
    assert {e["event"] for e in found} >= described.keys() - {"stood_still", "closed"}, "and nothing that is not there"

"""events.jsonl: every round, loss, stop and end, in the words of docs/events.md."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from elastirun.agent.observe.events import Broken, BrokenByLoss, Closed, End, Event, EventLog, Formed, changes
from elastirun.rendezvous.wire import records
from elastirun.rendezvous.wire.records import Cause, Member, RoundRecord, Verdict
from tests.support.cluster import Cluster, kill
from tests.support.images import hold_memory
from tests.support.until import until

EVENTS = (*Event.__subclasses__(), BrokenByLoss)
ALWAYS = {"v", "time", "mono", "event", "node", "name"}
EMPTY = RoundRecord("s")
FIRST = replace(EMPTY, round=1, members=(Member("a1", "a", "", 1, 2), Member("b1", "b", "", 1, 2)), reason="the first round")
BROKEN = replace(FIRST, broken=records.Broken(Cause.LOST, "b silent", "a1", ("b1",)))
SECOND = replace(FIRST, round=2, members=(Member("a1", "a", "", 1, 2), Member("c1", "c", "", 1, 2)), reason="b silent")
CLOSED = replace(SECOND, closed=records.Closed(Verdict.SUCCEEDED, "all well", "c1"))


def test_each_change_of_the_record_is_told_once() -> None:
    assert changes(None, EMPTY) == [] and changes(FIRST, FIRST) == [] and changes(BROKEN, BROKEN) == []
    assert changes(EMPTY, FIRST) == [Formed(1, "the first round", ["a", "b"], joined=["a", "b"], gone=[], world_size=4, restarts=0)]
    assert changes(FIRST, BROKEN) == [Broken(1, "lost", "b silent", by="a", lost=["b"])]
    (formed,) = changes(BROKEN, SECOND)
    assert isinstance(formed, Formed) and (formed.joined, formed.gone) == (["c"], ["b"])
    assert changes(SECOND, CLOSED) == [Closed(2, "succeeded", "all well", by="c")]
    assert [type(event) for event in changes(FIRST, replace(CLOSED, broken=BROKEN.broken))] == [Formed, Broken, Closed]


def test_a_failure_that_comes_from_the_loss_of_a_node_is_told_once_more() -> None:
    failed = replace(FIRST, broken=records.Broken(Cause.FAILURE, "rank 0 failed", "a1"))
    with_loss = replace(failed, broken=records.Broken(Cause.FAILURE, "rank 0 failed", "a1", ("b1",)))
    again = Broken(1, "lost", "b was lost; rank 0 failed", by="a", lost=["b"])
    assert changes(FIRST, failed) == [Broken(1, "failure", "rank 0 failed", by="a", lost=[])]
    assert changes(failed, with_loss) == [again] and [type(event) for event in changes(with_loss, SECOND)] == [Formed]
    assert changes(failed, SECOND)[0] == again, "the record that names it was not read"
    assert [type(event) for event in changes(failed, replace(SECOND, failures=1))] == [Formed]


def test_who_goes_to_another_store_names_the_lost_host_of_the_last_one() -> None:
    hosted = replace(FIRST, host="b1")
    moved = replace(hosted, broken=records.Broken(Cause.LOST, "b was lost", "a1", over=True))
    assert changes(hosted, moved) == [Broken(1, "lost", "b was lost", by="a", lost=["b"])]


def test_the_page_and_the_code_have_the_same_events_and_fields() -> None:
    page = (Path(__file__).parents[2] / "docs" / "events.md").read_text().partition("\n## ")[0]
    fields: dict[str, set[str]] = {}
    for event in EVENTS:
        fields.setdefault(event.kind, set()).update(field.name for field in dataclasses.fields(event))
    cells = {m[1]: m[2] for m in re.finditer(r"^\| `(\w+)` \| [^|]* \| (.*) \|$", page, re.M)}
    assert cells.keys() == fields.keys()
    values = {*fields, *(member.value for member in (*Cause, *Verdict))}
    for name, cell in cells.items():
        named = set(re.findall(r"`(\w+)`", cell))
        assert fields[name] <= named <= fields[name] | values, name


def test_a_line_begins_with_the_same_fields_whatever_happened() -> None:
    kept: list[bytes] = []
    printed: list[str] = []
    file: Any = SimpleNamespace(write=kept.append)
    EventLog("n-1", "n", file, also=printed.append).write(End("left", "SIGTERM", 143))
    fields = r'"node": "n-1", "name": "n", "outcome": "left", "reason": "SIGTERM", "code": 143\}'
    assert re.fullmatch(r'\{"v": 1, "time": [\d.]+, "mono": [\d.]+, "event": "end", ' + fields + r"\n", kept[0].decode())
    assert re.fullmatch(r'\{"name": "end", "source": "AGENT", "timestamp": \d+, "metadata": \{' + fields + r"\}", printed[0])


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (sorted((folder / ".latest").iterdir())[0] / "events.jsonl").read_text().splitlines()]


def await_event(name: str, nodes: Cluster) -> None:
    until(lambda: name in {e["event"] for e in events(nodes.tmp_path / "logs")}, f"the event {name}", state=nodes.everything, pause=0.05)


def test_a_life_with_a_failure_a_loss_and_a_signal_as_the_page_describes_it(nodes: Cluster) -> None:
    options = ("--max-restarts=1", "--last-call=30", "--expire=3", f"--log-dir={nodes.tmp_path}/logs")
    a = nodes.agent(1, *options, nnodes="2:3")
    b = nodes.agent(2, *options[:-1], nnodes="2:3")
    c = nodes.agent(3, *options[:-1], nnodes="2:3")
    workers = nodes.round(3)
    for worker in workers:
        hold_memory(worker)
    await_event("checkpoints_held", nodes)
    workers[0].tell("exit 3")
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
    assert 0.0 <= loss.get("detected_after", 0.0) < 60
    assert by["round"]["round"] == 3 and 0 < by["round"]["formed_after"] < 30
    assert (by["end"]["outcome"], by["end"]["code"], by["signal"]["signal"]) == ("left", 143, "SIGTERM")
    fields = {event.kind: {field.name for field in dataclasses.fields(event)} for event in EVENTS}
    for event in found:
        assert event.keys() - ALWAYS - {"detected_after"} == fields[event["event"]] - {"detected_after"}
    assert {e["event"] for e in found} >= fields.keys() - {"stood_still", "closed", "hang", "steps", "straggler", "sits_out", "sat_out"}

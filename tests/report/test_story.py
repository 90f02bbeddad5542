"""What a report makes of events: lanes without gaps, faults with their costs, lost time by cause, clocks that differ."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from elastirun.agent.observe.node_states import WORDS, NodeState
from elastirun.errors import UsageError
from elastirun.report import clocks, page, reader, story, trace, words
from elastirun.report.story import Story
from tests.report.events import NOON, Agent, two_nodes

STOPPING, RESTARTING, STARTING = NodeState.STOPPING, NodeState.RESTARTING, NodeState.STARTING
JOINING, RUNNING, REPEATED, FINISHING = NodeState.JOINING, NodeState.RUNNING, NodeState.REPEATED, NodeState.FINISHING


def told(folder: Path, agents: list[Agent]) -> Story:
    for agent in agents:
        agent.save(folder)
    found = reader.read([str(folder)])
    assert found.left_out == []
    return story.tell(clocks.align(found.events))


def test_the_lane_of_an_agent_is_its_life_without_gaps(tmp_path: Path) -> None:
    found = told(tmp_path, two_nodes())
    for lane in found.lanes:
        assert (lane.segments[0].begin, lane.segments[-1].end) == (lane.begin, lane.end)
        assert all(one.end == after.begin for one, after in zip(lane.segments, lane.segments[1:], strict=False))
    a = next(lane for lane in found.lanes if lane.node == "a-1")
    assert a.begin == NOON + 2, "the agent was there before its first event"
    states = [(one.state, round(one.begin - NOON), round(one.end - NOON)) for one in a.segments][:7]
    assert states == [
        (JOINING, 2, 10),
        (STARTING, 10, 15),
        (RUNNING, 15, 48),
        (STOPPING, 48, 52),
        (RESTARTING, 52, 55),
        (STARTING, 55, 59),
        (REPEATED, 59, 62),
    ]
    assert a.segments[-1].state == FINISHING
    assert sum(found.spent.values()) == pytest.approx(found.total) == 130 + 80 + 43


def test_each_fault_has_the_cost_of_its_restart_its_start_and_the_steps_done_again(tmp_path: Path) -> None:
    found = told(tmp_path, two_nodes())
    faults = {fault.round: fault for fault in found.faults}
    assert [fault.cause for fault in found.faults] == ["failure", "lost", "join"]
    assert faults[1].cost == {STOPPING: 8.0, RESTARTING: 6.0, STARTING: 4.0, REPEATED: 3.0} and faults[1].nodes == 2
    assert (faults[2].seconds, faults[2].nodes) == (6.0, 1)
    by_cause = {loss.what: (loss.count, loss.seconds) for loss in found.losses}
    assert by_cause == {
        "a worker failed": (1, 21.0),
        "waiting for nodes": (3, 24.0),
        "first start": (3, 13.0),
        "a node was lost": (1, 6.0),
        "a node joined": (1, 5.0),
        "finishing": (2, 6.0),
    }
    assert found.losses == sorted(found.losses, key=lambda loss: -loss.seconds)
    assert [(fault.round, fault.number) for fault in found.faults] == [(1, 1), (2, 2), (3, 3)], "the costliest is 1"
    assert faults[1].until_end == 4.0, "2 s on each node"
    assert words.fault_row(faults[1], found)[4:] == ["21.0 s", "4.0 s", "10.0 s", "4.0 s", "3.0 s", "2"]
    days = told(tmp_path / "days", [*two_nodes(), Agent("z-1", "z").start(100_000, 9).spent(100_020, 9).end(100_021, 21)])
    assert words.fault_row(faults[1], days)[0] == "11-14 22:14:10", "with the day, if there are several"
    waited = next(loss for loss in found.losses if loss.what == "waiting for nodes").longest
    assert (waited.at, waited.seconds, waited.why, waited.number) == (NOON + 2, 8.0, "a", 0)


def hung(told_by: int = 0, round: int = 1) -> list[Agent]:
    """Two nodes whose workers hang at 48 s, which one of them notices after 5 s."""
    agents = [Agent(f"{name}-1", name).start(10, 1) for name in ("a", "b")]
    agents[told_by].number = round
    agents[told_by].at(53, "hang", seconds=5.0, limit=5.0, ranks=[1], workers=[{"rank": 1, "steps": 9, "stack": ["line 3"]}])
    for agent in agents:
        agent.number = 1
        agent.broken(54, 1, "failure", "rank 1 hangs").spent(55, 1, starting=5, training=33).start(57, 2).spent(
            90, 2, starting=3, training=30
        )
        agent.end(91, 89)
    return agents


def test_a_failure_is_a_loss_where_a_later_event_tells_so(tmp_path: Path) -> None:
    a = Agent("a-1", "a").start(10, 1).broken(50, 1, "failure", "rank 1 failed").broken(53, 1, "lost", "rank 1 failed", ("b",))
    (fault,) = told(tmp_path, [a.spent(54, 1, starting=5, training=35).start(55, 2).end(60, 60)]).faults
    assert (fault.cause, fault.reason) == ("lost", "rank 1 failed")


@pytest.mark.parametrize("told_by", [0, 1])
def test_a_hang_is_drawn_as_one_until_it_was_noticed(tmp_path: Path, told_by: int) -> None:
    found = told(tmp_path, hung(told_by))
    for lane in found.lanes:
        states = [(one.state, round(one.begin - NOON), round(one.end - NOON)) for one in lane.segments][3:6]
        assert states == [(NodeState.HANGING, 48, 54), (STOPPING, 54, 55), (RESTARTING, 55, 57)]
    (fault,) = found.faults
    assert (fault.cause, fault.until_end, fault.cost[NodeState.HANGING], fault.seconds) == ("hang", 12.0, 12.0, 24.0)
    (loss,) = (loss for loss in found.losses if loss.what == "workers hung")
    assert loss.parts == {NodeState.HANGING: 12.0, STOPPING: 2.0, RESTARTING: 4.0, STARTING: 6.0}
    assert sum(found.spent.values()) == pytest.approx(found.total)


def test_a_round_that_ended_by_something_else_than_its_hang_has_no_hang(tmp_path: Path) -> None:
    agents = hung()
    for agent in agents:
        next(line for line in agent.lines if line["event"] == "broken")["cause"] = "leave"
    assert [fault.cause for fault in told(tmp_path, agents).faults] == ["leave"]


def test_steps_are_those_of_the_training_or_of_all_rounds(tmp_path: Path) -> None:
    agents = two_nodes()
    assert told(tmp_path / "numbered", agents).steps == 100
    for agent in agents:
        for line in (line for line in agent.lines if line["event"] == "steps"):
            line["step"] = None
    assert told(tmp_path / "counted", agents).steps == 100 + 9 + 9 + 9
    for agent in agents:
        agent.lines = [line for line in agent.lines if line["event"] != "steps"]
    assert told(tmp_path / "none", agents).steps is None


def test_what_the_agents_run_is_named_and_what_differs_is_listed(tmp_path: Path) -> None:
    agents = two_nodes()
    for number, agent in enumerate(agents):
        agent.at(200, "start", job="job7", command="train.py", version="1.0", python=f"3.{number}", torch="")
    about = told(tmp_path, agents).about
    assert (about.job, about.command, about.versions) == ("job7", "train.py", (("elastirun", "1.0"), ("Python", "3.0, 3.1, 3.2")))
    assert told(tmp_path / "earlier", two_nodes()).about == story.About(), "agents of an earlier version"


def test_the_lane_of_a_killed_agent_ends_when_the_others_noticed_and_goes_on_with_the_next_agent(tmp_path: Path) -> None:
    found = told(tmp_path, two_nodes())
    lost, back = (lane for lane in found.lanes if lane.name == "b")
    assert (lost.outcome, lost.end, back.outcome) == ("", NOON + 82, "succeeded")
    assert "is not known: no event tells of it" in words.summary(found)[2]
    assert [(one.state, round(one.begin - NOON), round(one.end - NOON)) for one in lost.segments][-2:] == [
        (RESTARTING, 52, 55),
        (NodeState.UNKNOWN, 55, 82),
    ]
    assert (lost.number, back.number) == (0, 0), "one after the other, so in the same lane"


def test_agents_with_the_same_name_at_the_same_time_have_two_lanes(tmp_path: Path) -> None:
    agents = [Agent(f"n-{i}", "n").start(10, 1).spent(20, 1).end(21, 21) for i in range(2)]
    agents.append(Agent("n-2", "n").start(60, 2).spent(70, 2).end(71, 21))
    assert [lane.number for lane in told(tmp_path, agents).lanes] == [1, 2, 3], (
        "the third is no restart of the first: the host has several nodes"
    )


def test_an_agent_that_started_before_the_others_noticed_the_death_of_the_last_one_goes_on_in_its_lane(tmp_path: Path) -> None:
    a, b, b1 = two_nodes()
    b1.lines = Agent("b-2", "b").state(97, "joining", 62).start(97, 4).spent(130, 4, training=20).end(132, 70).lines
    found = told(tmp_path, [a, b, b1])  # the last event of b is at 55 s, and a notices at 82 s
    lost, back = (lane for lane in found.lanes if lane.name == "b")
    assert (lost.row, back.row) == (("b", 0), ("b", 0))
    assert lost.end == back.begin == NOON + 62, "no time of a node counts twice"
    assert lost.segments[-1].state is NodeState.UNKNOWN and lost.segments[-1].end == lost.end


def test_agents_of_one_host_that_name_their_nodes_have_these_names(tmp_path: Path) -> None:
    agents = [Agent(f"n-{i}", "host").start(10, 1).spent(20, 1).end(21, 21) for i in range(2)]
    for number, agent in enumerate(agents):
        for line in agent.lines:
            line["node_name"] = f"rack-{number}"
    assert [lane.row for lane in told(tmp_path, agents).lanes] == [("rack-0", 0), ("rack-1", 0)]


@pytest.mark.parametrize(("clock", "shift"), [(0.0, 0.0), (1.5, 0.0), (300.0, -300.0), (-4000.0, 4000.0)])
def test_a_clock_that_differs_is_told_from_the_start_of_shared_rounds(tmp_path: Path, clock: float, shift: float) -> None:
    found = told(tmp_path, two_nodes(clock))
    assert {lane.node: round(lane.shifted, 3) for lane in found.lanes} == {"a-1": 0.0, "b-1": shift, "b-2": shift}
    assert found.faults[0].at == pytest.approx(NOON + 50, abs=1.6)
    where = "behind" if clock < 0 else "ahead"
    assert bool(shift) == any(f"The clock of b is {abs(shift):.1f} s {where}; " in note for note in words.notes(found, []))


def test_agents_without_a_common_round_are_other_jobs(tmp_path: Path) -> None:
    other = Agent("c-1", "c", clock=1000)
    other.at(10, "round", round=1, fence="t:1", reason="", nodes=1, world_size=1).spent(20, 1).end(21, 21)
    found = told(tmp_path, [*two_nodes(), other])
    assert {lane.node: (lane.job, lane.shifted) for lane in found.lanes}["c-1"] == (1, 0.0)
    assert "2 jobs" in words.summary(found)[0]


def test_a_round_without_a_step_was_starting_where_steps_are_stamped(tmp_path: Path) -> None:
    a = Agent("a-1", "a").start(10, 1).broken(50, 1, "failure").spent(50, 1, starting=1, training=39, steps=0).start(50, 2)
    a.spent(90, 2, "failure", starting=10, training=30).end(90, 80)
    (lane,) = told(tmp_path, [a]).lanes
    states = [(one.state, round(one.seconds)) for one in lane.segments]
    assert states == [(JOINING, 8), (STARTING, 40), (STARTING, 10), (RUNNING, 30)]


def test_a_node_that_sits_out_has_a_state_of_its_own_and_costs_no_fault(tmp_path: Path) -> None:
    a = Agent("a-1", "a").start(10, 1).broken(50, 1, "failure").spent(52, 1, starting=2, training=38)
    a.at(52, "sits_out", round=1, strikes=["rank 0 failed"], cooldown=600.0).state(52, "sitting_out").broken(60, 2, "failure")
    a.state(70, "joining").at(70, "sat_out", seconds=18.0, reason="its time is over")
    a.over = ""
    a.start(75, 3).spent(90, 3, training=15).end(90, 80)
    found = told(tmp_path, [a])
    states = [(one.state, round(one.seconds), one.fault) for one in found.lanes[0].segments]
    assert states[4:] == [(NodeState.SITTING_OUT, 18, None), (JOINING, 5, None), (RUNNING, 15, None)]
    assert {loss.what: loss.seconds for loss in found.losses}["nodes that sat out for their strikes"] == 18
    assert [(one.title, one.lines) for one in found.failures][-1] == (
        "the node sits out for 600 s at most, for 1 strike:",
        ("rank 0 failed",),
    )


def test_failures_hangs_and_stragglers_are_told_in_order_with_their_stacks(tmp_path: Path) -> None:
    a = Agent("a-1", "a").start(10, 1)
    a.at(20, "straggler", rank=3, local_rank=1, device="GPU 1", times_median=2.5, seconds=0.5, median=0.2)
    stacks = [{"rank": 2, "steps": 7, "stack": ["in wait"]}, {"rank": 3, "stack": ["in load"]}]
    a.at(30, "hang", seconds=60, limit=60, ranks=[3], workers=stacks)
    a.at(31, "failure", round=1, rank=3, local_rank=1, pid=7, code=-9, blame="own_fault", note="hung", lines=["in load"])
    found = told(tmp_path, [a]).failures
    assert [(one.title, one.lines) for one in found[1:]] == [
        (
            "no step for 60 s, the limit is 60 s; where the workers were:",
            ("rank 2, 7 steps:", "in wait", "", "rank 3, 0 steps:", "in load", ""),
        ),
        ("round 1: rank 3 failed: killed by signal 9, hung (own fault)", ("in load",)),
    ]
    assert found[0].title == "rank 3 on GPU 1 is 2.5 times as slow as the median rank"


def test_the_summary_names_the_worst(tmp_path: Path) -> None:
    a = Agent("a-1", "a").start(10, 1).broken(50, 1, "failure", "rank 1 failed").spent(55, 1, starting=1, training=39)
    a.start(60, 2).spent(90, 2, "failure", starting=1, training=29)
    a.at(90, "closed", round=2, verdict="succeeded", reason="", by="a").end(90, 82)
    text = " ".join(words.summary(told(tmp_path, [a])))
    assert "The job succeeded." in text and "Most was lost because a worker failed, once: 11.0 s of the nodes' time (12.5 %)" in text
    assert "At most 77.3 % of the nodes' time" in text, "the steps have no numbers"


def test_a_round_that_never_came_is_lost_time_and_the_end_of_a_job_is_none(tmp_path: Path) -> None:
    for number, (outcome, state) in enumerate({"timeout": RESTARTING, "failed": FINISHING}.items()):
        a = Agent("a-1", "a").start(10, 1).broken(50, 1, "lost", "b is gone").spent(55, 1, training=35).end(100, 100, outcome)
        found = told(tmp_path / str(number), [a])
        assert found.lanes[0].segments[-1].state == state


def test_texts_are_printable_and_short() -> None:
    assert words.clean("a\x1b[2J\u202eb\nc") == "a [2J b c"
    assert words.clean("x" * 1000, 10) == "x" * 9 + "…"
    assert [words.seconds(value) for value in (0.04, 119.94, 312, 25500)] == ["0.0 s", "119.9 s", "5 min 12 s", "7 h 5 min"]


def test_a_state_that_is_told_again_is_one_bar(tmp_path: Path) -> None:
    a = Agent("a-1", "a").start(10, 1).state(20, "starting", since=10.001).state(20, "running", since=15)
    a.state(30, "running").end(40, 38, "timeout")
    (lane,) = told(tmp_path, [a]).lanes
    assert [(one.state, round(one.seconds)) for one in lane.segments][:3] == [(JOINING, 8), (STARTING, 5), (RUNNING, 25)]


def test_the_page_and_the_code_have_the_same_states() -> None:
    page = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
    rows = [
        f"| {its.title} | `{state}` | {f'`{its.spent}` ' if its.spent else ''}| {its.means} |" for state, its in WORDS.items() if its.color
    ]
    assert "\n".join(rows) in page


def test_lanes_of_agents_that_recorded_no_states_are_not_accounted(tmp_path: Path) -> None:
    agents = two_nodes()
    agents[0].lines = [line for line in agents[0].lines if line["event"] != "state"]
    found = told(tmp_path, agents)
    (old,) = (lane for lane in found.lanes if lane.node == "a-1")
    assert [(one.state, one.begin, one.end) for one in old.segments] == [(NodeState.UNKNOWN, NOON + 10, NOON + 132)]
    assert any("recorded no states" in note for note in words.notes(found, []))


# -- reading -------------------------------------------------------------------------------------------------------------------


def test_files_are_found_in_folders_and_below_and_read_once(tmp_path: Path) -> None:
    agents = two_nodes()
    folders = [agent.save(tmp_path / "logs" / "run") for agent in agents]
    (tmp_path / "logs" / ".latest").mkdir()
    (tmp_path / "logs" / ".latest" / "a").symlink_to(folders[0])
    (tmp_path / "logs" / "newest").symlink_to(folders[0])
    found = reader.read([str(tmp_path / "logs"), str(folders[0]), str(folders[1] / "events.jsonl")])
    assert (found.files, found.left_out, len(found.events)) == (3, [], sum(len(agent.lines) for agent in agents))
    with pytest.raises(UsageError, match="there is no folder"):
        reader.read([str(tmp_path / "no")])


GOOD = {"v": 1, "time": NOON, "mono": 1.0, "event": "end", "node": "n-1", "name": "n"}
BAD = {
    "not JSON": b"{",
    "not JSON, as a number that is none": b'{"v": NaN}',
    "not JSON, too deep": b"[" * 100_000,
    "not an object": b"[1]",
    "its version is not 1": json.dumps({**GOOD, "v": 2}).encode(),
    "without event, node or name": json.dumps({**GOOD, "name": 7}).encode(),
    "without a time": json.dumps({**GOOD, "time": -1}).encode(),
    "without a time, beyond all dates": json.dumps({**GOOD, "time": 1e300}).encode(),
}


@pytest.mark.parametrize("why", BAD)
def test_lines_that_cannot_be_read_are_counted_and_named(tmp_path: Path, why: str) -> None:
    good = json.dumps(GOOD).encode() + b"\n"
    (tmp_path / "events.jsonl").write_bytes(good + BAD[why] + b"\n" + good)
    found = reader.read([str(tmp_path)])
    assert len(found.events) == 2
    said = why if "event" in why else why.partition(",")[0]
    assert found.left_out == [f"{tmp_path}/events.jsonl: 1 line that cannot be read; line 2: {said}"]


def test_a_line_that_is_cut_off_or_too_long_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = json.dumps(GOOD).encode()
    monkeypatch.setattr(reader, "MAX_LINE", 1024)
    (tmp_path / "events.jsonl").write_bytes(good + b"\n" + b"x" * 1500 + b"\n" + good[:50])
    found = reader.read([str(tmp_path)])
    assert len(found.events) == 1
    (text,) = found.left_out
    assert "line 2: a line of more than 1 KiB" in text and "its end is missing" in text


def test_too_much_is_left_out_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for agent in two_nodes():
        agent.save(tmp_path)
    monkeypatch.setattr(reader, "MAX_BYTES", 500)
    found = reader.read([str(tmp_path)])
    assert "because all files together are too large" in found.left_out[0] and len(found.events) < 5
    monkeypatch.setattr(reader, "MAX_FILES", 2)
    assert reader.read([str(tmp_path)]).left_out[-1] == "1 files beyond the first 2"
    os.mkfifo(tmp_path / "pipe")
    assert reader.read([str(tmp_path / "pipe")]).left_out == [f"{tmp_path}/pipe: not a file"]


@pytest.mark.parametrize("seed", range(60))
def test_whatever_the_fields_are_there_is_a_story(seed: int) -> None:
    """Values of wrong types and sizes, events in any order: no exception, and lanes without gaps."""
    rng = random.Random(seed)
    odd = [None, True, -1, 0, 1e10, 9e10, 1e300, 10**4000, "", "x" * 5000, "\ud800\u202e<b>", [], [[]], {}]
    odd += [[{"rank": "x", "stack": [1, "y"]}]]
    lines = [line for agent in two_nodes() for line in agent.lines]
    rng.shuffle(lines)
    events = []
    for line in lines:
        changed = [name for name in line if name not in ("event", "node", "name", "v") and rng.random() < 0.3]
        fields = {**line, **{name: rng.choice(odd) for name in changed}}
        event = reader.parse_line((json.dumps(fields) + "\n").encode())
        if isinstance(event, reader.EventLine):
            events.append(event)
    found = story.tell(clocks.align(events))
    for lane in found.lanes:
        assert all(one.end == after.begin for one, after in zip(lane.segments, lane.segments[1:], strict=False))
        assert sum(one.seconds for one in lane.segments) == pytest.approx(lane.end - lane.begin, abs=0.01)
    texts = [*words.summary(found), *words.notes(found, []), *(cell for fault in found.faults for cell in words.fault_row(fault, found))]
    assert all(text.isprintable() for text in texts)
    assert len(page.page(found, [])) > 1000 and json.loads(trace.trace(found))["traceEvents"]

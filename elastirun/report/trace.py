"""The story of a job as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing: the Trace Event Format, in JSON. Pure."""

from __future__ import annotations

import json
from typing import Any

from elastirun.agent.observe.node_states import WORDS
from elastirun.report.story import Story
from elastirun.report.words import clean

MICROSECONDS = 1e6
JOB = 0  # the id of the process with what belongs to no node; those of the nodes follow


def trace(story: Story) -> str:
    """Return the file. Times count from the beginning of the job, of which ``otherData`` has the date."""

    def at(moment: float) -> int:
        return round((moment - story.begin) * MICROSECONDS)

    job = clean(story.about.job) or "job"
    events: list[dict[str, Any]] = [_name(JOB, job)]
    nodes = {row: number for number, row in enumerate(dict.fromkeys(lane.row for lane in story.lanes), JOB + 1)}
    events += [_name(nodes[lane.row], clean(lane.title)) for lane in story.lanes]
    for lane in story.lanes:
        where = {"pid": nodes[lane.row], "tid": 0, "cat": "state"}
        for one in lane.segments:
            begin = at(one.begin)
            spent = {"ts": begin, "dur": at(one.end) - begin, "args": {"round": one.round, "state": one.state.value}}
            events.append({"ph": "X", "name": WORDS[one.state].title, **where, **spent})
        events += [
            {"ph": "C", "name": "steps a second", "pid": nodes[lane.row], "ts": at(when), "args": {"steps a second": rate}}
            for when, rate in lane.rates
        ]
    for one_round in story.rounds:
        where = {"ph": "C", "name": f"workers{f' of job {one_round.job + 1}' if one_round.job else ''}", "pid": JOB}
        sizes = ((one_round.begin, one_round.world_size), (one_round.end, 0))
        events += [{**where, "ts": at(when), "args": {"workers": size}} for when, size in sizes]
    marks = [(fault.at, f"{fault.number}: {fault.cause} in round {fault.round}", {"reason": clean(fault.reason)}) for fault in story.faults]
    marks += [(one.at, f"{one.name}: {one.title}", {"lines": "\n".join(map(clean, one.lines))}) for one in story.failures]
    events += [{"ph": "i", "s": "g", "name": clean(name), "pid": JOB, "tid": 0, "ts": at(when), "args": args} for when, name, args in marks]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"began": story.begin, **dict(story.about.versions)}})


def _name(pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}

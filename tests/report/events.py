"""Events files as agents write them, made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NOON = 1_700_000_000.0  # seconds since the epoch


class Agent:
    """Writes the events of one agent. ``clock``: seconds by which its machine's clock is ahead."""

    def __init__(self, node: str, name: str, clock: float = 0.0, mono: float = 5000.0) -> None:
        self.node, self.name, self.clock, self.mono = node, name, clock, mono
        self.lines: list[dict[str, Any]] = []
        self.number, self.began, self.trained = 0, 0.0, 0.0  # the round, its start, and until when it has trained
        self.before = self.over = ""  # the causes of the end of the round before, and of this one

    def at(self, moment: float, event: str, /, **fields: Any) -> Agent:
        """Add an event, so many seconds after noon."""
        when = {"v": 1, "time": NOON + moment + self.clock, "mono": self.mono + moment}
        self.lines.append({**when, "event": event, "node": self.node, "name": self.name, **fields})
        return self

    def state(self, seconds: float, state: str, since: float | None = None, cause: str = "") -> Agent:
        """Add a change of state, which was noticed ``seconds`` after noon."""
        ago = 0.0 if since is None else seconds - since
        return self.at(seconds, "state", state=state, ago=ago, round=self.number, cause=cause)

    def start(self, seconds: float, number: int, world_size: int = 4) -> Agent:
        """Start the workers of a round. The agent has waited for 8 s before its first one."""
        if not self.lines:
            self.state(seconds, "joining", seconds - 8)
        self.number, self.began, self.before, self.over = number, seconds, self.over, ""
        self.state(seconds, "starting", cause=self.before)
        fields = {"reason": f"why {number}", "nodes": world_size // 2, "world_size": world_size, "node_rank": 0, "ranks": [0, 1]}
        return self.at(seconds, "round", round=number, fence=f"s:{number}", formed_after=None, **fields)

    def spent(
        self, at: float, number: int, cause: str = "", starting: float = 0, repeated: float = 0, training: float = 0, steps: int = 9
    ) -> Agent:
        if steps:
            self.at(at, "steps", round=number, steps=steps, step=None, steps_per_second=5.0)
        parts = {"restarting": 0.0, "starting": starting, "repeated": repeated, "saving": 0.0, "training": training}
        self.trained = self.began
        for state in ("starting", "repeated", "training"):
            if parts[state]:
                self.state(at, "running" if state == "training" else state, self.trained, self.before)
            self.trained += parts[state]
        if self.over:
            self.state(at, "stopping", self.trained, self.over).state(at, "restarting", cause=self.over)
        else:
            self.state(at, "finishing", self.trained)
        return self.at(at, "round_spent", round=number, cause=cause, **parts)

    def broken(self, seconds: float, number: int, cause: str, reason: str = "", lost: tuple[str, ...] = ()) -> Agent:
        self.over = cause if number == self.number else self.over
        return self.at(seconds, "broken", round=number, cause=cause, reason=reason, by="a", lost=lost)

    def end(self, seconds: float, total: float, outcome: str = "succeeded") -> Agent:
        if outcome in ("succeeded", "failed"):
            self.state(seconds, "finishing", self.trained)
        self.at(seconds, "account", total=total, goodput=0.5, seconds={}, lost_seconds={}, rounds_ended={}, steps_stamped=True)
        return self.at(seconds, "end", outcome=outcome, reason="all well", code=0)

    def save(self, folder: Path) -> Path:
        """Write the file as the agent does, into a folder of its own in the log folder. Return that."""
        own = folder / f"job_{self.name}_{self.node}"
        own.mkdir(parents=True)
        (own / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        return own


def two_nodes(clock: float = 0.0) -> list[Agent]:
    """A job of two nodes: a worker fails at 50 s, the node b is lost at 80 s, and b1 takes its place. b's machine's clock is ahead."""
    a, b, b1 = Agent("a-1", "a"), Agent("b-1", "b", clock), Agent("b-2", "b", clock)
    for agent in (a, b):
        agent.start(10, 1).at(20, "steps", round=1, steps=100, step=100, steps_per_second=10.0)
        agent.broken(50, 1, "failure", "rank 1 failed <b>here</b>")
        agent.at(51, "stop", round=1, planned=False, reason="why", grace=5.0)
        agent.spent(52, 1, starting=5, training=33).start(55, 2)
    said = ["Traceback", "<script>alert(1)</script>"]
    a.at(50, "failure", round=1, rank=1, local_rank=1, pid=7, code=1, blame="own_fault", note="", lines=said)
    a.broken(82, 2, "lost", "b is gone", ("b",)).spent(83, 2, "failure", starting=4, repeated=3, training=18).start(84, 3, 2)
    a.broken(95, 3, "join", "b came").spent(96, 3, "lost", starting=2, training=9).start(97, 4)
    b1.start(97, 4)
    for agent in (a, b1):
        agent.spent(130, 4, "join" if agent is a else "", starting=3, training=29)
        agent.at(131, "closed", round=4, verdict="succeeded", reason="ok", by="a")
    a.end(132, 130)
    b1.end(132, 45)
    return [a, b, b1]

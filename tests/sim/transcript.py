"""Transcripts: the commands given to a small world and what its nodes do then. They are documentation that is tested.

A transcript is a text file. Lines with ``#`` are for the reader, lines with ``>`` are commands, the other lines are what happened then.
Those are written anew with

    python -m tests.sim.transcript tests/rendezvous/transcripts/*.txt

Times are seconds of the simulated world, rounded.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from elastirun.rendezvous.rules import Rules
from tests.sim import invariants
from tests.sim.world import Deaths, Node, World

MESSAGE = 0.001  # seconds that each message takes in a transcript


class Story:
    def __init__(self) -> None:
        self.world = World(0)
        self.shown = 0
        self.other_rules: Rules | None = None

    def do(self, command: str) -> list[str]:
        """Carry out the command. Return what happened, in lines."""
        name, *words = command.split()
        getattr(self, f"_{name}")(*words)
        told = self.world.transcript or []
        lines = [self._told(line) for line in told[self.shown :]]
        self.shown = len(told)
        return lines

    def _told(self, line: str) -> str:
        when, rest = line.split(None, 1)
        return f"{float(when):8.1f} {rest}"

    def _world(self, *settings: str) -> None:
        """Make the world: ``world 1:3 hosted expire=2 ...``"""
        low, _, high = settings[0].partition(":")
        numbers = dict(setting.split("=") for setting in settings[1:] if "=" in setting)
        rules = Rules(int(low), int(high or low), **{key: type(getattr(Rules(1, 1), key))(float(value)) for key, value in numbers.items()})
        self.world = World(0, rules, "hosted" in settings)
        self.world.transcript = []
        invariants.install(self.world)

    def _world_of_another(self, nodes: str) -> None:
        """Give the nodes that are added from here on another --nnodes."""
        low, _, high = nodes.partition(":")
        self.other_rules = replace(self.world.rules, min_nodes=int(low), max_nodes=int(high or low))

    def _add(self, *names: str) -> None:
        for name in names:
            name, _, rank = name.partition("=")
            node = self.world.add(name, node_rank=int(rank) if rank else None, rules=self.other_rules)
            node.delay = (MESSAGE, MESSAGE)

    def _run(self, seconds: str) -> None:
        self.world.run(float(seconds))

    def _store(self, what: str) -> None:
        if what in ("down", "up"):
            self.world.store_up = what == "up"
        elif what == "empty":
            self.world.replace_store()
        else:
            {"pause": self.world.pause_store, "resume": self.world.resume_store}[what]()

    def _fail(self, name: str, code: str = "1", after: str = "60") -> None:
        self._node(name).fail(int(code), after=float(after))

    def _slow_to_stop(self, name: str, seconds: str) -> None:
        self._node(name).stop_time = float(seconds)

    def _succeed(self, *names: str) -> None:
        for name in names:
            self._node(name).succeed()

    def _leave(self, *names: str) -> None:
        for name in names:
            self._node(name).leave()

    def _crash(self, *names: str) -> None:
        for name in names:
            self._node(name).crash()

    def _kill_agent(self, *names: str) -> None:
        """Kill agents whose guards go on, and tell of it."""
        before, self.world.deaths = self.world.deaths, Deaths(told=1.0)
        self._crash(*names)
        self.world.deaths = before

    def _cut(self, *names: str) -> None:
        for name in names:
            self._node(name).cut = True

    def _join_up(self, *names: str) -> None:
        for name in names:
            self._node(name).cut = False

    def _freeze(self, name: str) -> None:
        self._node(name).freeze()

    def _thaw(self, name: str) -> None:
        self._node(name).thaw()

    def _node(self, name: str) -> Node:
        return next(node for node in reversed(self.world.nodes) if node.name == name)


def told(text: str) -> str:
    """Return the transcript as the world writes it now."""
    story = Story()
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(("#", ">")) or not line.strip():
            lines.append(line)
        if line.startswith(">"):
            lines += story.do(line[1:].strip())
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(told(path.read_text()))

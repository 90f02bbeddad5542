"""Tells of the workers of a round that failed only because they lost their peers: one line on the console in place of their tracebacks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastirun.agent.failures.classify import last_words
from elastirun.agent.output.logs import RunLogs
from elastirun.agent.part import WorkerExit
from elastirun.rendezvous.failures import exception
from elastirun.rendezvous.wire.codec import clip

MOST_RANKS = 16  # that the line names
LONGEST_WORDS = 100  # characters of an exception


@dataclass(frozen=True)
class Victim:
    """A worker that lost its peers. ``words``: its exception."""

    rank: int
    local_rank: int
    words: str


class Consequences:
    """The victims of one round after the other. Their tracebacks are in ``logs`` and reach the console only if ``tell`` shows them."""

    def __init__(self, logs: RunLogs, warn: Callable[[str], None]) -> None:
        self._logs, self._warn = logs, warn
        self._victims: list[Victim] = []

    def add(self, end: WorkerExit, lines: Sequence[str]) -> None:
        """Note a worker that ended because it lost its peers. ``lines``: of its traceback."""
        held = self._logs.held(end.local_rank)
        if held is None or not held.holds:
            return
        if held.names_another_exception() or end.killed_by_us and not held.is_the_end():
            held.show()
            return
        held.wait()
        words = (exception(lines) or last_words(lines)).partition(". ")[0]
        self._victims.append(Victim(end.rank, end.local_rank, clip(words, LONGEST_WORDS)))

    def show(self, local_rank: int) -> None:
        """Let the console have the traceback of a worker that ended in another way."""
        if (held := self._logs.held(local_rank)) is not None:
            held.show()

    def tell(self, cause_is_unknown: bool) -> None:
        """Say who lost its peers in this round. ``cause_is_unknown``: nobody has failed but victims, so the first one is shown in full."""
        victims, self._victims = self._victims, []
        if victims and cause_is_unknown:
            self.show(victims.pop(0).local_rank)
        victims.sort(key=lambda victim: victim.rank)
        paths = []
        for victim in victims:
            if (held := self._logs.held(victim.local_rank)) is not None:
                paths.append(self._logs.keep_traceback(victim.local_rank, held.take_last_words()))
        if victims:
            self._warn(line(victims, paths))


def line(victims: Sequence[Victim], paths: Sequence[str]) -> str:
    """Return the line on one or more ``victims``. ``paths``: of the files with their output, empty where there is none."""
    ranks = ", ".join(str(victim.rank) for victim in victims[:MOST_RANKS])
    if len(victims) > MOST_RANKS:
        ranks += f" and {len(victims) - MOST_RANKS} more"
    one = len(victims) == 1
    many = f"ranks {ranks} ended because they lost their peers; rank {victims[0].rank}"
    who = f"rank {ranks} ended because it lost its peers" if one else many
    its = "its" if one else "their"
    kept = [path for path in paths if path]
    where = os.path.commonpath(kept) if kept else ""
    output = f"{its} output: {where}" if where else f"--log-dir=FOLDER keeps {its} traceback{'' if one else 's'}"
    return f"{who}: {victims[0].words}; {output}"

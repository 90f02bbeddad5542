"""events.jsonl: what happened, one JSON object a line, for programs; docs/events.md describes every event and field."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping

from elastirun.agent.output.log_files import LogFile
from elastirun.rendezvous.records import RoundRecord

FORMAT = 1  # raised when a field changes its meaning


class EventLog:
    """Appends to ``file`` (None: no file) and hands each line to ``also`` (the console, when asked for)."""

    def __init__(self, node: str, name: str, file: LogFile | None = None, also: Callable[[str], None] | None = None) -> None:
        self._who = {"node": node, "name": name}
        self._file, self._also = file, also

    def write(self, event: str, **fields: object) -> None:
        """Write one line; a full or hanging disk loses the line, not the job."""
        line = json.dumps({"v": FORMAT, "time": time.time(), "mono": time.monotonic(), "event": event, **self._who, **fields})
        if self._file is not None:
            self._file.write(line.encode() + b"\n")
        if self._also is not None:
            self._also(line)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def changes(old: RoundRecord | None, new: RoundRecord) -> list[tuple[str, Mapping[str, object]]]:
    """What happened between two looks at the round record, as events with their fields. Pure."""
    found: list[tuple[str, Mapping[str, object]]] = []
    names = {m.id: m.name for m in (*(old.members if old else ()), *new.members)}
    before = {m.id for m in old.members} if old else set()
    now = {m.id for m in new.members}
    again = old is not None and old.round == new.round
    if new.round and not again:
        joined, gone = ([names[i] for i in sorted(ids, key=lambda i: names[i])] for ids in (now - before, before - now))
        fields = {"round": new.round, "reason": new.reason, "nodes": [m.name for m in new.members], "joined": joined, "gone": gone}
        found.append(("formed", {**fields, "world_size": new.world_size, "restarts": new.failures}))
    broken = new.broken
    if broken is not None and not (again and old and old.broken is not None):
        lost, by = [names.get(i, i) for i in broken.lost], names.get(broken.by, broken.by)
        found.append(("broken", {"round": new.round, "cause": broken.cause.value, "reason": broken.reason, "by": by, "lost": lost}))
    if new.closed is not None and not (old and old.closed):
        closed = new.closed
        by = names.get(closed.by, closed.by)
        found.append(("closed", {"round": new.round, "verdict": closed.verdict.value, "reason": closed.reason, "by": by}))
    return found

"""The form of the agent's own lines: with level, time and node, as text or as JSON. Pure but for the time zone of this machine."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum

WARNING = "warning: "  # a line that begins so is one, whoever says it


class Level(Enum):
    """The level of a line: its name in JSON. The first letter stands in text, as in glog."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


COLOURS = {Level.INFO: "\x1b[2m", Level.WARNING: "\x1b[33m", Level.ERROR: "\x1b[31m"}  # of what stands before the text: dim, yellow, red
_RESET = "\x1b[0m"


def shows_colours(fd: int, environ: Mapping[str, str]) -> bool:
    """Return whether ``fd`` is a terminal that shows colours, and NO_COLOR does not ask for none (https://no-color.org)."""
    return not environ.get("NO_COLOR") and environ.get("TERM") != "dumb" and os.isatty(fd)


@dataclass(frozen=True)
class LineFormat:
    """The form of the lines of one agent. ``kind``: "text" or "json", see ``--log-format``. ``coloured``: they go to a terminal."""

    node: str = ""  # empty: the lines have no time and no node
    job: str = ""
    kind: str = "text"
    coloured: bool = False

    def line(self, text: str, level: Level, seconds: float) -> str:
        """Return the line for ``text``, said ``seconds`` after the epoch: ``I1129 17:45:03 node-a elastirun: text``."""
        level = Level.WARNING if text.startswith(WARNING) and level is Level.INFO else level
        if self.kind == "json":
            return self.as_json(text.removeprefix(WARNING), level, seconds)
        if not self.node:
            return f"elastirun: {text}"
        head = f"{level.name[0]}{time.strftime('%m%d %H:%M:%S', time.localtime(seconds))} {self.node}"
        return f"{f'{COLOURS[level]}{head}{_RESET}' if self.coloured else head} elastirun: {text}"

    def as_json(self, text: str, level: Level, seconds: float) -> str:
        """Return the JSON object of a line: time in UTC, level, job, node, message."""
        moment = datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        fields = {"time": moment, "level": level.value, "job": self.job, "node": self.node, "message": text}
        return json.dumps(fields, ensure_ascii=False)

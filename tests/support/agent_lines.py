"""Reads the lines of agents."""

from __future__ import annotations

import re

HEAD = re.compile(r"^[IWE]\d{4} \d\d:\d\d:\d\d (\S+) (?=elastirun: )", re.MULTILINE)  # level, time and node


def without_heads(text: str) -> str:
    """Return ``text`` without level, time and node before the agent's own lines."""
    return HEAD.sub("", text)

"""Figures that the parts of tests/gpu print, and that its driver reads from their output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

MARK = "FIGURE "  # begins a figure in a line, behind whatever pytest has written there


def figure(claim: str, text: str, **values: float) -> None:
    """Print a figure for a claim of ``tests/gpu/parts.py``: as a text for people, and as values with their unit in the name."""
    print(MARK + json.dumps({"claim": claim, "text": text, "values": values}), flush=True)


def printed(output: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (claim, figure) of each figure in ``output``. Lines that are cut off, or are none of ``figure``, are left out."""
    for line in output.splitlines():
        if MARK in line:
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                said = json.loads(line.partition(MARK)[2])
                if isinstance(said["claim"], str) and isinstance(said["text"], str):
                    yield said["claim"], {"text": said["text"], "values": said["values"], "holds": True}

"""Slurm's short form of a list of nodes: ``node[01-03,7],gpu-a[1-2]`` -> their names. Pure."""

from __future__ import annotations

import itertools
import math
import re

LONGEST_LIST = 1 << 18  # characters; Slurm writes the nodes of the largest clusters in far fewer
MOST_NODES = 1 << 16  # as many as Slurm manages

_NAMES = re.compile(r"(?:[\w.-]|\[[0-9,-]+\])+", re.ASCII)  # what stands between two commas outside of brackets
_NUMBERS = re.compile(r"\[([0-9,-]+)\]")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def expand(text: str) -> list[str]:
    """Return the names in the order of the list. Raises ValueError for one that is malformed, beyond the limits or names a node twice."""
    if len(text) > LONGEST_LIST:
        raise ValueError(f"it has more than {LONGEST_LIST} characters")
    names: list[str] = []
    end = -1  # where the last item ended: a comma stands there, or the text ends
    while end < len(text):
        item = _NAMES.match(text, end + 1)
        if item is None or text[item.end() : item.end() + 1] not in ("", ","):
            raise ValueError("it is no list of nodes, such as node[01-03,7],gpu-a[1-2]")
        if item[0][0] in "-.":
            raise ValueError(f"it names {item[0][:40]}, and no node is named so")
        pieces = _NUMBERS.split(item[0])  # text, numbers, text, numbers, ..., text
        choices = [_numbers(piece) if i % 2 else [piece] for i, piece in enumerate(pieces)]
        if len(names) + math.prod(map(len, choices)) > MOST_NODES:
            raise ValueError(f"it names more than {MOST_NODES} nodes")
        names += map("".join, itertools.product(*choices))
        end = item.end()
    if len({*names}) < len(names):
        raise ValueError("it names a node twice")
    return names


def _numbers(text: str) -> list[str]:
    """Return the numbers of ``01-03,7``: 01, 02, 03, 7. The first number of a range says how wide all of them are."""
    found: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        low, high = (match[1], match[2] or match[1]) if match else ("1", "0")
        count = int(high) - int(low) + 1
        if count < 1:
            raise ValueError(f"[{part[:40]}] is no range of numbers")
        if len(found) + count > MOST_NODES:
            raise ValueError(f"it names more than {MOST_NODES} nodes")
        found += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return found

"""Results of parts: figures from a part's output and from pytest's report, and files of results."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.parts import Claim, Part
from tests.support.figures import printed

Results = dict[str, dict[str, Any]]  # by part, as ``Result`` has them
TEXTS = ("verdict", "machine", "versions", "commit", "date", "end")
PASSED, FAILED, LATE, SKIPPED, MISSING = "passed", "failed", "late", "skipped", "missing"
NOT_RUN = (SKIPPED, MISSING)  # no time was left, or what the part needs is not installed


@dataclass
class Result:
    """The result of one part.

    ``date``: UTC, in seconds. ``figures``: by claim, {"text", "values", "holds"}. ``end``: of its output, unless it passed.
    """

    verdict: str
    seconds: float
    dry: bool
    machine: str
    versions: str
    commit: str
    date: str
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    end: str = ""


def figures_of(part: Part, output: str, report: Path, verdict: str) -> dict[str, dict[str, Any]]:
    """Return the figures of a part that has ended with ``verdict``.

    A figure that it has printed holds if the tests of its claim have passed, or, without tests, if the part has.
    """
    figures = {claim: found for claim, found in printed(output) if claim in {one.name for one in part.claims}}
    for claim in part.claims:
        if part.is_pytest:
            counted = count(report, claim)
            if counted is None:
                figures.pop(claim.name, None)
            elif claim.name not in figures or not counted["holds"]:
                figures[claim.name] = counted
        elif claim.name in figures:
            figures[claim.name]["holds"] = verdict == PASSED
    return figures


def count(report: Path, claim: Claim) -> dict[str, Any] | None:
    """Return how many tests of ``claim`` passed, by pytest's XML; None if none of them ran."""
    try:
        cases = [one for one in ElementTree.parse(report).iter("testcase") if str(one.get("name")).startswith(claim.tests)]
    except (OSError, ElementTree.ParseError):  # pytest was ended before it wrote all of it
        return None
    ran = [one for one in cases if one.find("skipped") is None]
    if not ran:
        return None
    failed = [str(one.get("name")) for one in ran if one.find("failure") is not None or one.find("error") is not None]
    passed = len(ran) - len(failed)
    text = f"{passed} of {claim.count} tests" + (f"; failed: {', '.join(failed)}" if failed else "")
    return {"text": text, "values": {"passed": passed, "of": claim.count}, "holds": passed == claim.count}


def keep(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """Return which of two results of one part counts: the newer one, but never one that says less than the other."""

    def weight(found: Mapping[str, Any]) -> tuple[bool, bool]:
        return found["verdict"] not in NOT_RUN, not found["dry"]

    return old if old and weight(old) > weight(new) else new


def read(path: Path) -> Results:
    """Return the results in a file. Raises ValueError, with one line, if it holds something else, and OSError."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))["parts"]
        for found in results.values():
            figures = [*found["figures"].values()]
            texts = [*(found[name] for name in TEXTS), *(figure["text"] for figure in figures)]
            kinds = [*(isinstance(text, str) for text in texts), isinstance(found["dry"], bool)]
            if not all([*kinds, *(isinstance(figure["holds"], bool) for figure in figures)]):
                raise TypeError("a field of another kind")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} does not hold results of tests/gpu ({type(error).__name__}: {error})") from None
    return dict(results)


def write(path: Path, text: str) -> None:
    """Replace a file at once. Raises OSError."""
    new = path.with_suffix(".new")
    try:
        new.write_text(text, encoding="utf-8")
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        raise

"""Steps in a profiler's trace: the intervals of computing kernels and of all-reduces, the part of these
that is hidden, and a drawing.

Pure functions of the events of a Chrome trace, as torch's profiler exports them; all times are in µs. In a
trace without a GPU the nodes of autograd stand in for kernels, and gloo's ranges for those of NCCL.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

Event = dict[str, Any]
Interval = tuple[float, float]

STEP, BACKWARD = "measured step", "measured backward"  # ranges of the program
# begins the names of ranges in which the engine runs a node and its hooks
NODE = "autograd::engine::evaluate_function"
LAUNCHES = ("cuda_runtime", "cuda_driver")  # categories of the calls that start kernels
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
MERGED = 2000  # gaps of less than this part of the drawing are not drawn

LEFT, ACROSS, LANE = 170, 800, 34  # pixels
COLOURS = {
    "backward": "#8fbf8f",
    "reduce": "#c0605a",
    "finish": "#e0a030",
}  # as in benchmarks/ddp_timeline.py
NAMES = {"backward": "backward", "reduce": "all-reduce", "finish": "after the all-reduces"}


# -- intervals -----------------------------------------------------------------------------------------------


def union(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """Return disjoint intervals in order that cover the same times; those at most ``gap`` apart become
    one.
    """
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1] + gap:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def intersection(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the times that are in both of two lists of disjoint intervals in order."""
    found, at, other = [], 0, 0
    while at < len(some) and other < len(others):
        begin, end = max(some[at][0], others[other][0]), min(some[at][1], others[other][1])
        if begin < end:
            found.append((begin, end))
        if some[at][1] < others[other][1]:
            at += 1
        else:
            other += 1
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Return the length of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)


def contains(intervals: Sequence[Interval], at: float) -> bool:
    """Return whether ``at`` is in one of the disjoint intervals, which are in order."""
    index = bisect_right(intervals, (at, float("inf"))) - 1
    return index >= 0 and at <= intervals[index][1]


# -- the trace -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Profile:
    """One backward: the intervals of what autograd's nodes and hooks started, of the all-reduces, and of
    all that came after the graph.
    """

    backward: list[Interval]
    reduce: list[Interval]
    finish: list[Interval]

    @property
    def hidden(self) -> float:
        """The part of the all-reduces' time in which the backward computes."""
        reduces = union(self.reduce)
        return length(intersection(reduces, union(self.backward))) / length(reduces)

    @property
    def exposed(self) -> float:
        """The time from the end of the backward's last kernel to the end of the last all-reduce."""
        return max(0.0, max(end for _, end in self.reduce) - max(end for _, end in self.backward))

    @property
    def whole(self) -> Interval:
        """The time from the first kernel of the backward to the last of all."""
        everything = [*self.backward, *self.reduce, *self.finish]
        return min(begin for begin, _ in self.backward), max(end for _, end in everything)


def interval(event: Event) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def is_all_reduce(name: str) -> bool:
    """Return whether a kernel is an all-reduce of NCCL. Its generic kernel runs functions that have none
    of their own.
    """
    lower = name.lower()
    return "nccl" in lower and any(kind in lower for kind in ("allreduce", "all_reduce", "generic"))


def contents(events: Iterable[Event]) -> str:
    """Return the number of events of each category, and the names of NCCL's kernels: for an error message."""
    spans = [event for event in events if event.get("ph") == "X"]
    categories = Counter(str(event.get("cat")) for event in spans)
    names = Counter(event["name"] for event in spans if event.get("cat") == "kernel" and "nccl" in event["name"].lower())
    return f"events by category: {dict(categories)}; kernels of NCCL: {dict(names)}"


def count_kernels(events: Iterable[Event]) -> tuple[int, int]:
    """Return the numbers of kernels and of copies in a trace."""
    kinds = [event.get("cat") for event in events if event.get("ph") == "X" and event.get("cat") in ON_GPU]
    return kinds.count("kernel"), len(kinds) - kinds.count("kernel")


def profiles(events: Iterable[Event]) -> list[Profile]:
    """Return the profile of each measured step, in order."""
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    steps = sorted(interval(event) for event in spans if event["name"] == STEP and event.get("cat") == "user_annotation")
    backwards = sorted(interval(event) for event in spans if event["name"] == BACKWARD and event.get("cat") == "user_annotation")
    nodes = union(interval(event) for event in spans if event["name"].startswith(NODE) and event.get("cat") == "cpu_op")
    nodes = nodes or backwards  # a profiler that does not show nodes: all that the backward started
    kernels = [event for event in spans if event.get("cat") in ON_GPU]
    work = started(spans, kernels) if kernels else stand_ins(spans)
    return [part(work, backward, step, nodes) for step, backward in zip(steps, backwards, strict=True)]


def started(spans: Iterable[Event], kernels: Iterable[Event]) -> list[tuple[float, Interval, bool]]:
    """Return (time of the launch, interval, whether it is an all-reduce) of all kernels.

    A kernel that has no launch in the trace counts as launched when it begins.
    """
    launches = {correlation(event): event["ts"] for event in spans if event.get("cat") in LAUNCHES}
    launches.pop(None, None)
    return [(float(launches.get(correlation(event), event["ts"])), interval(event), is_all_reduce(event["name"])) for event in kernels]


def correlation(event: Event) -> int | None:
    """Return the number that a kernel and its launch have in common."""
    found: int | None = event.get("args", {}).get("correlation")
    return found


def stand_ins(spans: Iterable[Event]) -> list[tuple[float, Interval, bool]]:
    """Return as ``started`` does what there is in a trace without a GPU: nodes of autograd, and
    all-reduces over gloo.
    """
    reduces = [event for event in spans if event["name"] == "gloo:all_reduce"]
    nodes = [event for event in spans if event["name"].startswith(NODE)]
    return [(float(event["ts"]), interval(event), event["name"] == "gloo:all_reduce") for event in (*reduces, *nodes)]


def part(
    work: Iterable[tuple[float, Interval, bool]],
    backward: Interval,
    step: Interval,
    nodes: Sequence[Interval],
) -> Profile:
    """Return the profile of one step. All-reduces are those that begin between the begin of its backward
    and its end.

    An all-reduce is found by its begin on the GPU, not by its launch: not every version of the profiler
    has the launches of NCCL.
    """
    found = Profile([], [], [])
    for launched, (begin, end), reduces in work:
        if reduces and backward[0] <= begin <= step[1]:
            found.reduce.append((begin, end))
        elif not reduces and backward[0] <= launched <= backward[1]:
            (found.backward if contains(nodes, launched) else found.finish).append((begin, end))
    return found


# -- the drawing ---------------------------------------------------------------------------------------------


def draw(title: str, shown: Sequence[tuple[str, Profile]]) -> str:
    """Return an SVG of one step each, on one scale: a lane of computing kernels above one of all-reduces."""
    total = max(profile.whole[1] - profile.whole[0] for _, profile in shown)
    lanes = 1 + 2 * len(shown)
    width, height = LEFT + ACROSS + 30, LANE * (lanes + 2)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="10" y="22">{escape(title)}</text>',
    ]
    for at, (name, profile) in enumerate(shown):
        lane = 1 + 2 * at
        for below, kind in enumerate(("compute", "all-reduce")):
            out.append(f'<text x="10" y="{LANE * (lane + below) + 22}">{escape(name)}, {kind}</text>')
        for kind, down, intervals in (
            ("backward", 0, union(profile.backward, total / MERGED)),
            ("finish", 0, union(profile.finish, total / MERGED)),
            ("reduce", 1, apart(profile.reduce, total / ACROSS)),
        ):
            out += boxes(intervals, profile.whole[0], total, LANE * (lane + down), COLOURS[kind])
    for at in range(6):
        x = LEFT + at / 5 * ACROSS
        place = f'x="{x:.0f}" y="{LANE * lanes + 18}" text-anchor="middle"'
        out.append(f'<text {place} fill="#555555">{at / 5 * total / 1000:.0f} ms</text>')
    for at, (kind, name) in enumerate(NAMES.items()):
        x, y = LEFT + at * 160, LANE * (lanes + 1)
        out.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLOURS[kind]}"/>')
        out.append(f'<text x="{x + 16}" y="{y + 11}">{name}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def apart(intervals: Sequence[Interval], gap: float) -> list[Interval]:
    """Return ``intervals`` with their ends ``gap`` earlier, so that neighbours can be told apart."""
    return [(begin, max(end - gap, (begin + end) / 2)) for begin, end in intervals]


def boxes(intervals: Sequence[Interval], start: float, total: float, top: int, colour: str) -> list[str]:
    """Return rectangles for ``intervals``."""
    found = []
    for begin, end in intervals:
        x, width = LEFT + (begin - start) / total * ACROSS, max((end - begin) / total * ACROSS, 0.4)
        found.append(f'<rect x="{x:.1f}" y="{top + 4}" width="{width:.1f}" height="26" fill="{colour}"/>')
    return found

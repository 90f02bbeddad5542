"""The picture of a report: numbered marks, the number of workers, a lane per node, and step rates, over one time axis.

It is HTML and CSS without a script. A state is a box whose place and width are parts of the whole time, so zooming makes the axis wider,
and the page scrolls to the mark of a round by a link. See docs/decisions/0036.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape

from elastirun.agent.observe.node_states import WORDS, NodeState
from elastirun.report.story import Fault, Lane, Round, Segment, Story
from elastirun.report.words import clean, moment, point, seconds

ZOOMS = (1, 4, 16, 64)  # widths of the axis; a wider one is more than browsers draw
MOST_SEGMENTS = 4000  # boxes of states, of about 110 bytes each; with these limits the page stays below 1 MB
MOST_RATES = 5000  # points of step rates, of about 15 bytes each
MOST_LANES = 400  # lanes that are drawn
MOST_ROUNDS = 1000  # boxes for the number of workers
MOST_MARKS = 400  # numbered marks, and rows of the table that they lead to: the costliest rounds
MARK = 2.5  # percent of the width of a screen between two marks
TICKS = 7  # about so many on the width of a screen
STEPS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400)  # seconds between ticks


@dataclass(frozen=True)
class Axis:
    """The time of the picture, in seconds since the epoch."""

    begin: float
    end: float

    def percent(self, at: float) -> float:
        """Return where ``at`` is, from 0 to 100."""
        return min(100.0, max(0.0, 100 * (at - self.begin) / max(self.end - self.begin, 0.001)))


def draw(story: Story) -> tuple[str, list[str]]:
    """Return the picture as HTML, and what it leaves out, for people."""
    lanes, left_out = fitted(story.lanes)
    if len(story.rounds) > MOST_ROUNDS:
        left_out.append(f"The picture has the number of workers of the first {MOST_ROUNDS} of {len(story.rounds)} rounds.")
    axis, rows = Axis(story.begin, story.end), list(dict.fromkeys(lane.row for lane in lanes))
    zooms = "".join(
        f'<input type="radio" name="zoom" id="zoom{zoom}"{" checked" * (zoom == 1)}><label for="zoom{zoom}">{zoom}×</label> '
        for zoom in ZOOMS
    )
    parts = [
        _row("ticks plain", "UTC", _ticks(axis)),
        _row("marks plain", "ended early", _marks(story, axis)),
        _row("size", f"workers, up to {max((one.world_size for one in story.rounds), default=0)}", _sizes(story.rounds, axis)),
    ]
    parts += [_lane(number, [lane for lane in lanes if lane.row == row], axis) for number, row in enumerate(rows)]
    if any(lane.rates for lane in lanes):
        fastest = max(rate for lane in lanes for _, rate in lane.rates)
        parts.append(_row("rates", f"steps/s, up to {fastest:.3g}", _rates(lanes, rows, fastest, axis)))
    deep = len(rows) * 23 + 61  # pixels from a mark to the end of the lanes, see style.css
    rules = "".join(
        f"#zoom{z}:checked ~ .scroll .axis {{ --zoom: {z} }} #zoom{z}:checked ~ .scroll :is(.t{z}, "
        + ", ".join(f".k{lower}" for lower in ZOOMS if lower <= z)
        + ") { display: block } "
        for z in ZOOMS
    )
    body = "\n".join(parts)
    return (
        f'<style>{rules}</style><div class="picture" id="timeline">{zooms}'
        f'<div class="scroll" tabindex="0"><div class="axis" style="--deep: {deep}px">\n{body}\n</div></div></div>'
    ), left_out


def fitted(lanes: Sequence[Lane]) -> tuple[list[Lane], list[str]]:
    """Return the lanes as far as they fit into the limits, and what is left out, for people. Short states are merged."""
    found, left_out = [*lanes[:MOST_LANES]], list[str]()
    if len(lanes) > MOST_LANES:
        left_out.append(f"The picture shows the first {MOST_LANES} of {len(lanes)} agents; the tables have all.")
    shortest = sum(lane.end - lane.begin for lane in found) / MOST_SEGMENTS / 8
    while sum(len(lane.segments) for lane in found) > MOST_SEGMENTS:
        found = [replace(lane, segments=merged(lane.segments, shortest)) for lane in found]
        merges = f"The picture merges neighbouring states shorter than {seconds(shortest)}, into the longest of them; the tables have all."
        left_out, shortest = [*left_out[: len(lanes) > MOST_LANES], merges], 2 * shortest
    every = math.ceil(sum(len(lane.rates) for lane in found) / MOST_RATES)
    return [replace(lane, rates=lane.rates[::every]) if every > 1 else lane for lane in found], left_out


def merged(segments: Sequence[Segment], shortest: float) -> list[Segment]:
    """Return the segments, with neighbours below ``shortest`` seconds as one, in the state of the longest of them."""
    groups: list[list[Segment]] = []
    for one in segments:
        joins = groups and one.seconds < shortest and groups[-1][-1].seconds < shortest
        if joins and groups[-1][-1].end - groups[-1][0].begin < shortest:
            groups[-1].append(one)
        else:
            groups.append([one])
    return [replace(max(group, key=lambda one: one.seconds), begin=group[0].begin, end=group[-1].end) for group in groups]


def shown_from(faults: Sequence[Fault], axis: Axis) -> dict[int, int]:
    """Return from which zoom on the mark of each fault is shown, by its number: the costliest first, and none upon another."""
    found, places = dict[int, int](), list[float]()
    for zoom in ZOOMS:
        for fault in faults:
            place = axis.percent(fault.at)
            if fault.number not in found and all(abs(place - other) * zoom >= MARK for other in places):
                found[fault.number] = zoom
                places.append(place)
    return found


def color(number: int) -> str:
    """Return the colour of a lane's line and dot."""
    return f"hsl({number * 137 % 360} 65% 50%)"


def boxes(parts: Iterable[tuple[NodeState, float]], whole: float) -> str:
    """Return boxes side by side, of states with their seconds."""
    return "".join(f'<i class="{state}" style="width:{100 * part / whole:.2f}%"></i>' for state, part in parts if part > 0 and whole > 0)


def state_styles() -> str:
    """Return the rules for the colours of the states. A hang is striped, so that nobody takes it for a state with a similar colour."""
    rules = [f".{state} {{ background: {its.color} }}" for state, its in WORDS.items() if its.color]
    hang = f"repeating-linear-gradient(135deg, {WORDS[NodeState.HANGING].color} 0 4px, #c9a6e4 4px 7px)"
    return " ".join([*rules, f".{NodeState.HANGING} {{ background: {hang} }}"])


def _row(kind: str, name: str, content: str, dot: str = "") -> str:
    shown = escape(name)
    return f'<div class="row {kind}"><b title="{shown}">{dot}{shown}</b><div>{content}</div></div>'


def _box(kind: str, axis: Axis, begin: float, end: float, title: str, height: float | None = None) -> str:
    left, width = axis.percent(begin), axis.percent(end) - axis.percent(begin)
    tall = "" if height is None else f";height:{height:.0f}%"
    return f'<i class="{kind}" style="left:{left:.3f}%;width:{width:.3f}%{tall}" title="{escape(title)}"></i>'


def _lane(number: int, lanes: Sequence[Lane], axis: Axis) -> str:
    """Return the row of one node. ``lanes``: its agents, one after the other."""
    content = "".join(_state(one, axis) for lane in lanes for one in lane.segments)
    content += "".join(
        f'<i class="gone" style="left:{axis.percent(lane.end):.3f}%" title="no further event"></i>' for lane in lanes if not lane.outcome
    )
    dot = f'<span class="dot" style="background:{color(number)}"></span>' if any(lane.rates for lane in lanes) else ""
    return _row("lane", clean(lanes[0].title), content, dot)


def _state(one: Segment, axis: Axis) -> str:
    of_round = f", round {one.round}" if one.round else ""
    return _box(one.state, axis, one.begin, one.end, f"{WORDS[one.state].title} {seconds(one.seconds)}{of_round}")


def _marks(story: Story, axis: Axis) -> str:
    """Return a numbered mark for each round that ended early. Where two meet, the costlier one is shown, or that of a link."""
    worst = sorted(story.faults, key=lambda fault: fault.number)[:MOST_MARKS]
    zooms = shown_from(worst, axis)
    return "".join(
        f'<a class="k{zooms.get(one.number, 0)}" id="m{one.number}" href="#f{one.number}" style="left:{axis.percent(one.at):.3f}%" '
        f'title="{escape(clean(f"{point(one.at, story)} {one.cause}, cost {seconds(one.seconds)}: {one.reason}", 150))}">{one.number}</a>'
        for one in worst
    )


def _sizes(rounds: Sequence[Round], axis: Axis) -> str:
    most = max((one.world_size for one in rounds), default=0) or 1
    return "".join(
        _box("", axis, one.begin, one.end, f"round {one.number}: {one.world_size} workers, {one.nodes} nodes", 100 * one.world_size / most)
        for one in rounds[:MOST_ROUNDS]
    )


def _rates(lanes: Sequence[Lane], rows: Sequence[tuple[str, int]], fastest: float, axis: Axis) -> str:
    lines = [
        f'<polyline stroke="{color(rows.index(lane.row))}" points="'
        + " ".join(f"{axis.percent(at):.3f},{100 - 96 * rate / (fastest or 1):.1f}" for at, rate in lane.rates)
        + f'"><title>{escape(clean(lane.title))}</title></polyline>'
        for lane in lanes
        if lane.rates
    ]
    return f'<svg viewBox="0 0 100 100" preserveAspectRatio="none">{"".join(lines)}</svg>'


def _ticks(axis: Axis) -> str:
    """Return the ticks of all widths of the axis."""
    found = []
    for zoom in ZOOMS:
        for at, text in ticks(axis, TICKS * zoom):
            if (100 - axis.percent(at)) * zoom >= 6:  # percent of a screen that the text needs
                found.append(f'<i class="t{zoom}" style="left:{axis.percent(at):.3f}%">{text}</i>')
    return "".join(found)


def ticks(axis: Axis, count: int) -> list[tuple[float, str]]:
    """Return about ``count`` round times within the axis, each with its text."""
    took = axis.end - axis.begin
    step = next((one for one in STEPS if one * count >= took), math.ceil(took / count / 86400) * 86400)
    first = math.ceil(axis.begin / step)
    times = [number * step for number in range(first, first + 2 * count) if number * step <= axis.end]
    if step >= 86400:
        return [(at, moment(at)[:10]) for at in times]
    shown = slice(11, 16) if step >= 60 else slice(11, 19)
    return [(at, moment(at)[shown] + (f".{round(at % 1 * 10) % 10}" if step < 1 else "")) for at in times]

"""Draws a run of examples/failover.py as a time line for each node: python examples/failover.py --svg docs/failover.svg"""

from typing import Any
from xml.sax.saxutils import escape

LEFT, ACROSS, TOP, LANE, BAR = 70, 850, 46, 46, 24  # pixels
COLOURS = {1: "#7aa6d8", 2: "#8fbf8f", 3: "#e0a030", 4: "#b48ac8"}  # by round
RED, GREY = "#c02020", "#666666"

Event = tuple[float, int, dict[str, Any]]  # seconds since the begin, node, event


def draw(events: list[Event]) -> str:
    """The picture, as SVG. A node's worker is a bar: pale while it starts, full while it trains, with a line where an epoch ends."""
    events = sorted(events, key=lambda event: event[0])
    seconds = max(at for at, _, _ in events)
    nodes = sorted({node for _, node, _ in events})
    height = TOP + LANE * len(nodes) + 62

    def x(at: float) -> float:
        return LEFT + at / seconds * ACROSS

    def top(node: int) -> float:
        return TOP + LANE * nodes.index(node) + (LANE - BAR) / 2

    def text(at_x: float, y: float, words: str, more: str = "") -> None:
        out.append(f'<text x="{at_x:.1f}" y="{y:.1f}" {more}>{escape(words)}</text>')

    def box(begin: float, end: float, node: int, colour: str, opacity: float) -> None:
        width = max(x(end) - x(begin), 1.0)
        out.append(f'<rect x="{x(begin):.1f}" y="{top(node)}" width="{width:.1f}" height="{BAR}" fill="{colour}" opacity="{opacity}"/>')

    def line(x1: float, y1: float, x2: float, y2: float, style: str) -> None:
        out.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>')

    size = f'width="{LEFT + ACROSS + 30}" height="{height}"'
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">', f'<rect {size} fill="#ffffff"/>']
    for node in nodes:
        text(10, top(node) + 16, f"node {node}")
        times = [at for at, one, _ in events if one == node]
        line(x(times[0]), top(node) + BAR / 2, x(times[-1]), top(node) + BAR / 2, f'stroke="{GREY}"')

    titled: set[int] = set()
    for at, node, event in events:
        if event["event"] == "round":
            number = event["round"]
            end = next(t for t, one, e in events if one == node and t >= at and e["event"] in ("worker_exit", "kill"))
            trains = next((t for t, _, e in events if at < t < end and e["event"] == "training"), end)
            box(at, trains, node, COLOURS[number], 0.4)
            box(trains, end, node, COLOURS[number], 1.0)
            for t in (t for t, _, e in events if trains < t <= end and e["event"] == "epoch"):
                line(x(t), top(node), x(t), top(node) + BAR, 'stroke="#ffffff" stroke-width="1.5"')
            if number not in titled:
                titled.add(number)
                line(x(at), TOP - 12, x(at), TOP + LANE * len(nodes), f'stroke="{COLOURS[number]}" stroke-dasharray="3 3"')
                text(x(at) + 3, TOP - 24, f"round {number}", 'font-weight="bold"')
                text(x(at) + 3, TOP - 10, f"{event['nodes']} node{'s' * (event['nodes'] > 1)}")
        elif event["event"] == "start" and at > 1:
            text(x(at) - 4, top(node) + 16, f"joins at {at:.1f} s", f'text-anchor="end" fill="{GREY}"')
        elif event["event"] == "kill":
            middle, after = top(node) + BAR / 2, next(t for t, _, e in events if t > at and e["event"] == "round") - at
            for down in (5, -5):
                line(x(at) - 5, middle - down, x(at) + 5, middle + down, f'stroke="{RED}" stroke-width="3"')
            text(x(at) + 9, top(node) + 16, f"kill -9 at {at:.1f} s; next round after {after:.1f} s", f'fill="{RED}"')

    bottom = TOP + LANE * len(nodes)
    step = 10 if seconds > 30 else 5
    for at in range(0, int(seconds) + 1, step):
        line(x(at), bottom, x(at), bottom + 5, f'stroke="{GREY}"')
        text(x(at), bottom + 18, f"{at} s", f'text-anchor="middle" fill="{GREY}"')
    legend = "pale: the worker starts (import torch, load the checkpoint); full: it trains; a white line: an epoch is done"
    text(LEFT, bottom + 46, legend, f'fill="{GREY}"')
    return "\n".join([*out, "</svg>"]) + "\n"

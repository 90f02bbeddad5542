"""Draws a run of examples/failover.py as a time line for each node: python examples/failover.py --svg docs/failover.svg"""

from typing import Any
from xml.sax.saxutils import escape

LEFT, ACROSS, TOP, LANE, BAR = 70, 850, 46, 46, 24  # pixels
COLOURS = {1: "#7aa6d8", 2: "#8fbf8f", 3: "#e0a030", 4: "#b48ac8", 5: "#6fb5b0", 6: "#d08a7a"}  # by round
RED, GREY = "#c02020", "#666666"

Event = tuple[float, int, dict[str, Any]]  # seconds since the begin, node, event


def draw(events: list[Event]) -> str:
    """The picture, as SVG. A node's worker is a bar: pale while it starts, full while it trains, with a line where an epoch ends."""
    picture = Picture(sorted(events, key=lambda event: event[0]))
    for node in picture.nodes:
        picture.draw_node(node)
    titled: set[int] = set()
    for at, node, event in picture.events:
        if event["event"] == "round":
            picture.draw_round(at, node, event, titled=event["round"] in titled)
            titled.add(event["round"])
        elif event["event"] == "start" and at > 1:
            picture.text(picture.x(at) - 4, picture.top(node) + 16, f"joins at {at:.1f} s", f'text-anchor="end" fill="{GREY}"')
        elif event["event"] == "kill":
            picture.draw_kill(at, node)
    picture.draw_axis()
    return "\n".join([*picture.out, "</svg>"]) + "\n"


class Picture:
    """A lane for each node over an axis of seconds; ``out`` is what is drawn so far."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events
        self.seconds = max(at for at, _, _ in events)
        self.nodes = sorted({node for _, node, _ in events})
        self.bottom = TOP + LANE * len(self.nodes)
        size = f'width="{LEFT + ACROSS + 30}" height="{self.bottom + 62}"'
        self.out = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">']
        self.out.append(f'<rect {size} fill="#ffffff"/>')

    def x(self, at: float) -> float:
        return LEFT + at / self.seconds * ACROSS

    def top(self, node: int) -> float:
        return TOP + LANE * self.nodes.index(node) + (LANE - BAR) / 2

    def text(self, x: float, y: float, words: str, more: str = "") -> None:
        self.out.append(f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(words)}</text>')

    def box(self, begin: float, end: float, node: int, colour: str, opacity: float) -> None:
        x, width = self.x(begin), max(self.x(end) - self.x(begin), 1.0)
        where = f'x="{x:.1f}" y="{self.top(node)}" width="{width:.1f}" height="{BAR}"'
        self.out.append(f'<rect {where} fill="{colour}" opacity="{opacity}"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str) -> None:
        self.out.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>')

    def draw_node(self, node: int) -> None:
        """Its name, and a thin line while its agent runs."""
        times = [at for at, one, _ in self.events if one == node]
        middle = self.top(node) + BAR / 2
        self.text(10, self.top(node) + 16, f"node {node}")
        for begin in (at for at, one, e in self.events if one == node and e["event"] == "start"):
            end = next((at for at, one, e in self.events if one == node and at > begin and e["event"] == "kill"), times[-1])
            self.line(self.x(begin), middle, self.x(end), middle, f'stroke="{GREY}"')

    def draw_round(self, at: float, node: int, event: dict[str, Any], titled: bool) -> None:
        """The bar of the node's worker; above all lanes the round's title, unless another node has drawn it."""
        number = event["round"]
        end = next(t for t, one, e in self.events if one == node and t >= at and e["event"] in ("worker_exit", "kill"))
        trains = next((t for t, _, e in self.events if at < t < end and e["event"] == "training"), end)
        self.box(at, trains, node, COLOURS[number], 0.4)
        self.box(trains, end, node, COLOURS[number], 1.0)
        for t in (t for t, _, e in self.events if trains < t <= end and e["event"] == "epoch"):
            self.line(self.x(t), self.top(node), self.x(t), self.top(node) + BAR, 'stroke="#ffffff" stroke-width="1.5"')
        if not titled:
            self.line(self.x(at), TOP - 12, self.x(at), self.bottom, f'stroke="{COLOURS[number]}" stroke-dasharray="3 3"')
            self.text(self.x(at) + 3, TOP - 24, f"round {number}", 'font-weight="bold"')
            self.text(self.x(at) + 3, TOP - 10, f"{event['nodes']} node{'s' * (event['nodes'] > 1)}")

    def draw_kill(self, at: float, node: int) -> None:
        """A cross, and how long it took until the next round."""
        x, middle = self.x(at), self.top(node) + BAR / 2
        after = next(t for t, _, e in self.events if t > at and e["event"] == "round") - at
        for down in (5, -5):
            self.line(x - 5, middle - down, x + 5, middle + down, f'stroke="{RED}" stroke-width="3"')
        self.text(x + 9, self.top(node) + 16, f"kill -9 at {at:.1f} s; next round after {after:.1f} s", f'fill="{RED}"')

    def draw_axis(self) -> None:
        for at in range(0, int(self.seconds) + 1, 10 if self.seconds > 30 else 5):
            self.line(self.x(at), self.bottom, self.x(at), self.bottom + 5, f'stroke="{GREY}"')
            self.text(self.x(at), self.bottom + 18, f"{at} s", f'text-anchor="middle" fill="{GREY}"')
        legend = "pale: the worker starts (import torch, load the checkpoint); full: it trains; a white line: an epoch is done"
        self.text(LEFT, self.bottom + 46, legend, f'fill="{GREY}"')

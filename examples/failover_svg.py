"""Draws a run of examples/failover.py as a time line for each node: python examples/failover.py --svg docs/failover.svg"""

from typing import Any
from xml.sax.saxutils import escape

LEFT, ACROSS, RIGHT, BAR, ROW, MARGIN = 70, 850, 50, 24, 16, 8  # pixels; a lane has a bar, and below it rows of notes
WIDTH = LEFT + ACROSS + RIGHT
CHARACTER = 7  # pixels of one, at most
COLOURS = {1: "#7aa6d8", 2: "#8fbf8f", 3: "#e0a030", 4: "#b48ac8", 5: "#6fb5b0", 6: "#d08a7a"}  # by round
TITLE = "A run of examples/failover.py: what each node does over time, which node is killed, and when the next round begins"
STYLE = """
.page { fill: #ffffff } .gap { stroke: #ffffff; stroke-width: 1.5 }
text { fill: #1f2328; paint-order: stroke; stroke: #ffffff; stroke-width: 3px }
.grey { fill: #59636e } .red { fill: #c02020 } .rule { stroke: #818b98 } .cross { stroke: #c02020; stroke-width: 3 }
@media (prefers-color-scheme: dark) {
.page { fill: #0d1117 } .gap { stroke: #0d1117 } text { fill: #e6edf3; stroke: #0d1117 }
.grey { fill: #9198a1 } .red { fill: #ff7b72 } .cross { stroke: #ff7b72 }
}
"""

Event = tuple[float, int, dict[str, Any]]  # seconds since the begin, node, event


def draw(events: list[Event]) -> str:
    """The picture, as SVG. A node's worker is a bar: pale while it starts, full while it trains, with a gap where an epoch ends."""
    picture = Picture(sorted(events, key=lambda event: event[0]))
    for node in picture.nodes:
        picture.draw_node(node)
    titled: set[int] = set()
    for at, node, event in picture.events:
        if event["event"] == "round":
            picture.draw_round(at, node, event, titled=event["round"] in titled)
            titled.add(event["round"])
        elif event["event"] == "kill":
            picture.draw_kill(at, node)
    picture.draw_axis()
    return picture.svg()


class Rows:
    """Rows of texts, none of which lies over another one."""

    def __init__(self) -> None:
        self.ends: list[float] = []  # of the last text of each row

    def place(self, x: float, words: str) -> tuple[float, int]:
        """The place of a text that should begin at ``x``: where it begins, and its row. Texts come from left to right."""
        width = CHARACTER * len(words)
        x = max(min(x, WIDTH - MARGIN - width), MARGIN)
        row = next((row for row, end in enumerate(self.ends) if end + MARGIN <= x), len(self.ends))
        self.ends[row : row + 1] = [x + width]
        return x, row


class Picture:
    """A lane for each node over an axis of seconds; ``shapes`` and ``texts`` are what is drawn so far."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events
        self.seconds = max(at for at, _, _ in events)
        self.nodes = sorted({node for _, node, _ in events})
        self.shapes: list[str] = []
        self.texts: list[str] = []  # above all shapes
        self.notes = {node: self.notes_of(node) for node in self.nodes}
        self.titles = Rows()
        firsts = {event["round"]: (at, event) for at, _, event in reversed(events) if event["event"] == "round"}
        self.titles_at = {round_: self.titles.place(self.x(at) + 3, title(event)) for round_, (at, event) in sorted(firsts.items())}
        self.head = ROW * len(self.titles.ends) + 2 * MARGIN
        rows = max((row for notes in self.notes.values() for _, row, _, _ in notes), default=0) + 1
        self.lane = BAR + ROW * rows + MARGIN
        self.bottom = self.head + self.lane * len(self.nodes)

    def svg(self) -> str:
        size = f"0 0 {WIDTH} {self.bottom + 62}"
        begin = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img" font-family="sans-serif" font-size="12">'
        page = f'<rect class="page" width="{WIDTH}" height="{self.bottom + 62}"/>'
        head = [begin, f"<title>{escape(TITLE)}</title>", f"<style>{STYLE}</style>", page]
        return "\n".join([*head, *self.shapes, *self.texts, "</svg>"]) + "\n"

    def x(self, at: float) -> float:
        return LEFT + at / self.seconds * ACROSS

    def top(self, node: int) -> float:
        return self.head + self.lane * self.nodes.index(node)

    def text(self, x: float, y: float, words: str, more: str = "") -> None:
        self.texts.append(f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(words)}</text>')

    def notes_of(self, node: int) -> list[tuple[float, int, str, str]]:
        """What is written below the bar of ``node``: where it begins, its row, the words, their colour."""
        rows, found = Rows(), []
        for at, event in ((at, event) for at, one, event in self.events if one == node):
            if event["event"] == "start" and at > 1:
                words, colour = f"joins at {at:.1f} s", "grey"
            elif event["event"] == "kill":
                after = next(t for t, _, e in self.events if t > at and e["event"] == "round") - at
                words, colour = f"kill -9 at {at:.1f} s; next round after {after:.1f} s", "red"
            else:
                continue
            found.append((*rows.place(self.x(at), words), words, colour))
        return found

    def box(self, begin: float, end: float, node: int, colour: str, opacity: float) -> None:
        x, width = self.x(begin), max(self.x(end) - self.x(begin), 1.0)
        where = f'x="{x:.1f}" y="{self.top(node)}" width="{width:.1f}" height="{BAR}"'
        self.shapes.append(f'<rect {where} fill="{colour}" opacity="{opacity}"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str) -> None:
        self.shapes.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>')

    def draw_node(self, node: int) -> None:
        """Its name, notes, and a thin line while its agent runs."""
        times = [at for at, one, _ in self.events if one == node]
        middle = self.top(node) + BAR / 2
        self.text(10, self.top(node) + 16, f"node {node}")
        for x, row, words, colour in self.notes[node]:
            self.text(x, self.top(node) + BAR + ROW * (row + 1) - 2, words, f'class="{colour}"')
        for begin in (at for at, one, e in self.events if one == node and e["event"] == "start"):
            end = next((at for at, one, e in self.events if one == node and at > begin and e["event"] == "kill"), times[-1])
            self.line(self.x(begin), middle, self.x(end), middle, 'class="rule"')

    def draw_round(self, at: float, node: int, event: dict[str, Any], titled: bool) -> None:
        """The bar of the node's worker; above all lanes the round's title, unless another node has drawn it."""
        number = event["round"]
        end = next(t for t, one, e in self.events if one == node and t >= at and e["event"] in ("worker_exit", "kill"))
        trains = next((t for t, _, e in self.events if at < t < end and e["event"] == "training"), end)
        self.box(at, trains, node, COLOURS[number], 0.4)
        self.box(trains, end, node, COLOURS[number], 1.0)
        for t in (t for t, _, e in self.events if trains < t <= end and e["event"] == "epoch"):
            self.line(self.x(t), self.top(node), self.x(t), self.top(node) + BAR, 'class="gap"')
        if not titled:
            x, row = self.titles_at[number]
            y = MARGIN + ROW * row
            self.line(self.x(at), y, self.x(at), self.bottom, f'stroke="{COLOURS[number]}" stroke-dasharray="3 3"')
            self.text(x, y + 12, title(event), 'font-weight="bold"')

    def draw_kill(self, at: float, node: int) -> None:
        """A cross."""
        x, middle = self.x(at), self.top(node) + BAR / 2
        for down in (5, -5):
            self.line(x - 5, middle - down, x + 5, middle + down, 'class="cross"')

    def draw_axis(self) -> None:
        for at in range(0, int(self.seconds) + 1, 10 if self.seconds > 30 else 5):
            self.line(self.x(at), self.bottom, self.x(at), self.bottom + 5, 'class="rule"')
            self.text(self.x(at), self.bottom + 18, f"{at} s", 'text-anchor="middle" class="grey"')
        legend = "thin line: the agent runs; pale: the worker starts and loads the checkpoint; full: it trains; a gap: an epoch is done"
        self.text(LEFT, self.bottom + 46, legend, 'class="grey"')


def title(event: dict[str, Any]) -> str:
    """The title of a round."""
    return f"round {event['round']}: {event['nodes']} node{'s' * (event['nodes'] > 1)}"

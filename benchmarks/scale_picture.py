"""Draws docs/scale.svg from the figures of ``rendezvous_counts``: seconds and kilobytes by the number of nodes, on logarithmic scales.

python -m benchmarks.rendezvous_counts 10 100 1000 10000 --json scale.jsonl
python -m benchmarks.scale_picture scale.jsonl docs/scale.svg
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, TOP, SIDE, GAP = 880, 330, 50, 56, 340, 110  # pixels: of the picture, to the first panel, of a panel, between them
EVENTS = (  # the name in words, those of the seconds and of what was asked, and the colour
    ("first round", "formed", "forming", "#2a7ab8"),
    ("one node lost", "one", "losing_one", "#3a9a5c"),
    ("1 % of the nodes lost at once", "hundredth", "losing_hundredth", "#c7781f"),
    ("host of the store lost", "host", "losing_host", "#b5403a"),
)
STYLE = "text{font:12px sans-serif;fill:#333}.g{stroke:#ddd}@media(prefers-color-scheme:dark){text{fill:#ddd}.g{stroke:#444}}"


def draw(found: Sequence[dict[str, Any]]) -> str:
    """Return the picture of the figures, which are in the order of the number of nodes."""
    seconds = [(words, color, [one[name] for one in found]) for words, name, _, color in EVENTS]
    sizes = [(words, color, [one[name]["size"] / 1e3 for one in found]) for words, _, name, color in EVENTS]
    nodes = [one["nodes"] for one in found]
    parts = [_panel(LEFT, "seconds until all nodes train again", nodes, seconds)]
    parts.append(_panel(LEFT + SIDE + GAP, "kB per node for that", nodes, sizes))
    for i, (words, *_, color) in enumerate(EVENTS):
        x = LEFT + i * 205
        parts.append(f'<rect x="{x}" y="14" width="12" height="12" fill="{color}"/><text x="{x + 18}" y="24">{words}</text>')
    title = "Seconds and kilobytes of the rendezvous by the number of nodes"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}"><title>{title}</title>'
    return f"{head}<style>{STYLE}</style>{''.join(parts)}</svg>\n"


def _panel(left: int, title: str, nodes: Sequence[int], lines: Sequence[tuple[str, str, list[float]]]) -> str:
    values = [value for _, _, found in lines for value in found]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    first, last = math.log10(nodes[0]), math.log10(nodes[-1])
    bottom = HEIGHT - 40

    def x(count: float) -> float:
        return round(left + (math.log10(count) - first) / (last - first) * SIDE, 1)

    def y(value: float) -> float:
        return round(bottom - (math.log10(value) - low) / (high - low) * (bottom - TOP), 1)

    parts = [f'<text x="{left}" y="{TOP - 10}">{title}</text>']
    for power in range(low, high + 1):
        at = y(10.0**power)
        parts.append(
            f'<path class="g" d="M{left} {at}H{left + SIDE}"/><text x="{left - 6}" y="{at + 4}" text-anchor="end">{10.0**power:g}</text>'
        )
    for count in (count for count in nodes if math.log10(count).is_integer()):
        parts.append(f'<text x="{x(count)}" y="{bottom + 18}" text-anchor="middle">{count:,}</text>')
    parts.append(f'<text x="{left + SIDE / 2}" y="{bottom + 34}" text-anchor="middle">nodes</text>')
    for _, color, found in lines:
        points = " ".join(f"{x(count)},{y(value)}" for count, value in zip(nodes, found, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
    return "".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    options.picture.write_text(draw([json.loads(line) for line in options.figures.read_text().splitlines()]))


if __name__ == "__main__":
    main()

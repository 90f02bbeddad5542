"""Draws one step of the data-parallel module from a real trace: python -m benchmarks.ddp_timeline docs/ddp-step.svg

Two ranks over gloo; what rank 0's profiler saw of one step after the plan was made. Boxes are the trace's own ranges.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastirun.train import DistributedDataParallel
from tests.support import worlds

WIDTH, LAYERS, ROWS = 768, 8, 256
LEFT, ACROSS, LANE = 150, 800, 34  # pixels
COLOURS = {"forward": "#7aa6d8", "backward": "#8fbf8f", "take": "#e8c890", "launch": "#e0a030", "reduce": "#c0605a", "wait": "#999999"}
NAMES = {
    "forward": "forward",
    "backward": "backward",
    "take": "take gradients",
    "launch": "launch a bucket",
    "reduce": "all-reduce (gloo)",
    "wait": "wait",
}


def step(rank: int, world: int, path: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
    ddp = DistributedDataParallel(module, transport="group")
    x = torch.randn(ROWS, WIDTH)

    def once() -> None:
        ddp.zero_grad()
        ddp(x).pow(2).mean().backward()

    for _ in range(8):
        once()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        once()
    if rank == 0:
        profile.export_chrome_trace(path)


def ranges(events: list[dict[str, Any]]) -> list[tuple[str, int, float, float, str]]:
    """Return (kind, lane, begin, end, label) of everything to draw; times are in ms since the first."""
    spans = [event for event in events if event.get("ph") == "X"]
    main = next(event["tid"] for event in spans if event["name"].startswith("elastirun: bucket"))
    threads = sorted({event["tid"] for event in spans if event["name"] == "gloo:all_reduce"})
    arrivals = [(event["ts"], event["ts"] + event["dur"]) for event in spans if event["name"] == "torch::autograd::AccumulateGrad"]
    found, reduced = [], 0
    backward = min(event["ts"] for event in spans if "MeanBackward" in event["name"])
    for event in sorted(spans, key=lambda event: event["ts"]):
        begin, end, name = event["ts"], event["ts"] + event["dur"], event["name"]
        if name.startswith("elastirun: bucket"):
            found.append(("launch", 1, begin, end, name.split()[-1]))
        elif name in ("aten::mul", "aten::_foreach_copy_") and any(first <= begin <= last for first, last in arrivals):
            found.append(("take", 1, begin, end, ""))
        elif name.startswith("elastirun: wait") and event["dur"] > 20:
            found.append(("wait", 0, begin, end, ""))
        elif name == "gloo:all_reduce":
            found.append(("reduce", 2 + threads.index(event["tid"]), begin, end, str(reduced)))
            reduced += 1
        elif event["tid"] == main and name == "aten::linear" and begin < backward:
            found.append(("forward", 0, begin, end, ""))
        elif event["tid"] == main and name.startswith("autograd::engine::evaluate_function: Addmm"):
            found.append(("backward", 0, begin, end, ""))
    start = min(begin for _, _, begin, _, _ in found)
    return [(kind, lane, (begin - start) / 1000, (end - start) / 1000, label) for kind, lane, begin, end, label in found]


def draw(found: list[tuple[str, int, float, float, str]]) -> str:
    """Return the picture as SVG."""
    total, lanes = max(end for _, _, _, end, _ in found), 1 + max(lane for _, lane, _, _, _ in found)
    names = ["compute", "buckets", *(f"link {at + 1}" for at in range(lanes - 2))]
    height = LANE * (lanes + 2)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + ACROSS + 20}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{LEFT + ACROSS + 20}" height="{height}" fill="#ffffff"/>',
    ]
    out += [f'<text x="10" y="{LANE * lane + 24}">{name}</text>' for lane, name in enumerate(names)]
    for kind, lane, begin, end, label in found:
        x, width = LEFT + begin / total * ACROSS, max((end - begin) / total * ACROSS, 2)
        out.append(f'<rect x="{x:.1f}" y="{LANE * lane + 6}" width="{width:.1f}" height="24" fill="{COLOURS[kind]}" stroke="#ffffff"/>')
        if label:
            out.append(f'<text x="{x + width / 2:.1f}" y="{LANE * lane + 22}" text-anchor="middle">{label}</text>')
    for at in range(6):
        x = LEFT + at / 5 * ACROSS
        out.append(f'<text x="{x:.0f}" y="{LANE * lanes + 18}" text-anchor="middle" fill="#555555">{at / 5 * total:.0f} ms</text>')
    for at, (kind, name) in enumerate(NAMES.items()):
        x = LEFT + at * 140
        out.append(f'<rect x="{x}" y="{LANE * (lanes + 1)}" width="12" height="12" fill="{COLOURS[kind]}"/>')
        out.append(f'<text x="{x + 16}" y="{LANE * (lanes + 1) + 11}">{name}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        worlds.run(2, step, f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    Path(sys.argv[1]).write_text(draw(ranges(events)))


if __name__ == "__main__":
    main()

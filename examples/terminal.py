"""A node of three is killed while they train, and comes back: what the terminal of another node shows. Draws docs/terminal.svg.

    python examples/terminal.py [--svg PATH]

Three agents on this machine have a loopback address and a name each. All lines are those of a real run; lines with a # are this script's.
"""

import argparse
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRAINS = re.compile(r"epoch +\d+/\d+ .* world size (\d+)")
WIDTH, LINE = 112, 18  # characters, pixels
INDENT = " " * 6  # of the later rows of a line
STYLE = """
text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #24292f; white-space: pre }
.back { fill: #f6f8fa; stroke: #d0d7de } .head { fill: #57606a } .W { fill: #9a6700 } .us { fill: #0550ae }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .back { fill: #0d1117; stroke: #30363d } .head { fill: #7d8590 } .W { fill: #d29922 } .us { fill: #58a6ff }
}"""


class Node:
    """An agent and its worker, which run in ``folder``."""

    def __init__(self, name: str, address: str, port: int, folder: str) -> None:
        options = ["--nnodes=2:3", f"--node-name={name}", "--rdzv-id=digits", f"--rdzv-endpoint=127.0.0.1:{port}"]
        hidden = [f"--local-addr={address}", "--last-call=2"]
        script = [str(ROOT / "examples" / "train.py"), "--pause=0.02", "--epochs=14"]
        argv = [sys.executable, "-m", "elastirun", *options, *hidden, *script]
        self.process = subprocess.Popen(argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def lines(self) -> Iterator[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield line.rstrip()


def run() -> list[str]:
    """Return the lines of node-a's terminal. Prints them as they come."""
    shown: list[str] = []

    def show(line: str) -> None:
        shown.append(line)
        print(line, flush=True)

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        show("$ elastirun --nnodes=2:3 --rdzv-id=digits --rdzv-endpoint=node-a:29400 examples/train.py")
        nodes = {name: Node(name, f"127.0.0.{i}", port, folder) for i, name in enumerate(("node-a", "node-b", "node-c"), 1)}
        others = ("node-b", "node-c")
        seen, worlds = 0, iter((3, 2, 3))
        wanted = next(worlds)
        for line in nodes["node-a"].lines():
            if "time of node-a" in line:
                break
            if not (found := TRAINS.match(line)):
                show(line)
                continue
            if int(found[1]) == wanted and seen < 2:
                show(line)
                seen += 1
            if seen == 2 and wanted == 3 and len(nodes) == 3 and nodes["node-c"].process.poll() is None:
                show("# kill -9 of elastirun on node-c" + time.strftime(", %H:%M:%S"))
                nodes["node-c"].process.send_signal(signal.SIGKILL)
                seen, wanted = 0, next(worlds)
            elif seen == 2 and wanted == 2:
                show("# the same command on node-c again" + time.strftime(", %H:%M:%S"))
                nodes["again"] = Node("node-c", "127.0.0.3", port, folder)
                seen, wanted = 0, next(worlds)
        for name in (*others, "again", "node-a"):
            if name in nodes:
                nodes[name].process.communicate()
    return shown


def draw(lines: list[str]) -> str:
    """Return the picture of a terminal with ``lines``, as SVG for light and dark pages."""
    rows = [piece for line in lines for piece in wrapped(line)]
    width, height = WIDTH * 7.85 + 24, len(rows) * LINE + 24
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" viewBox="0 0 {width:.0f} {height}" role="img">',
        "<title>The terminal of a node: another one is killed, the others go on within a second, and it comes back</title>",
        f'<style>{STYLE}</style><rect class="back" x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1}" rx="6"/>',
    ]
    kind = ""
    for at, row in enumerate(rows):
        head = re.match(r"[IWE]\d{4} \S+ \S+ elastirun:", row)
        if not row.startswith(INDENT):
            kind = "us" if row.startswith(("#", "$")) else row[0] if head else ""
        text = f'<tspan class="head">{escape(head[0])}</tspan>{escape(row[head.end() :])}' if head else escape(row)
        out.append(f'<text x="12" y="{at * LINE + 26}" xml:space="preserve" class="{kind}">{text}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def wrapped(line: str) -> list[str]:
    """Return ``line`` in pieces that fit, the later ones indented."""
    pieces = []
    while len(line) > WIDTH:
        cut = line.rfind(" ", 0, WIDTH)
        pieces.append(line[:cut])
        line = INDENT + line[cut + 1 :]
    return [*pieces, line]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--svg", type=Path, help="draw the terminal there")
    path = parser.parse_args().svg
    lines = run()
    if path is not None:
        path.write_text(draw(lines))


if __name__ == "__main__":
    main()

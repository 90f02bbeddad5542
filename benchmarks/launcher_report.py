"""The results of ``launcher.py``: medians and ratios, as JSON, as a table, and as a picture."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.lab import LAUNCHERS, table

SECONDS = "s"


@dataclass(frozen=True)
class Row:
    title: str
    unit: str = SECONDS


ROWS = {
    "first-line": Row("command → first line of a worker"),
    "start-1": Row("command → first step, 1 worker"),
    "start-2": Row("command → first step, 2 workers"),
    "start-4": Row("command → first step, 4 workers"),
    "exit": Row("end of the last of 2 workers → end of the command"),
    "kill": Row("`kill -9` of a worker → first step, 1 node x 2 workers"),
    "kill-nodes": Row("`kill -9` of a worker → first step, 2 nodes x 1 worker"),
    "agent": Row("`kill -9` of an agent → first step of the other 2 nodes"),
    "node": Row("`kill -9` of an agent and its worker → first step of the other 2 nodes"),
    "replaced": Row("the killed node started again → first step of all 3"),
    "spare": Row("`kill -9` of an agent and its worker, a fourth agent waits → first step of all 3"),
    "alone": Row("one node of `--nnodes=1:2` alone: command → first step"),
    "join": Row("a second node joins: its command → first step of both"),
    "stall": Row("a second node joins: pause of the first one's steps"),
    "leave": Row("SIGTERM of an agent → next step of the other 2 nodes"),
    "idle-cpu": Row("idle agent and what it runs beside workers: CPU seconds per minute", "s/min"),
    "idle-wake-ups": Row("idle agent and what it runs beside workers: wake-ups per second", "1/s"),
    "memory": Row("memory (PSS) of {idle_workers} idle workers with torch, MiB", "MiB"),
    "memory-launcher": Row("memory (PSS) of the launcher of {idle_workers} idle workers, MiB", "MiB"),
}


@dataclass(frozen=True)
class Result:
    """A measured ``value``; None: it did not happen, ``note`` says what did, and ``after`` how many seconds later."""

    value: float | None
    note: str = ""
    after: float | None = None

    def __str__(self) -> str:
        if self.value is not None:
            return figure(self.value)
        return self.note + (f" after {self.after:.0f} s" if self.after is not None else "")


@dataclass
class Run:
    """The results of one run, by row and name of the launcher; its conditions, and each launcher's commands."""

    machine: str
    date: str
    launchers: list[str]
    commands: dict[str, list[str]]
    idle_workers: int
    results: dict[str, dict[str, list[Result]]] = field(default_factory=dict)

    def add(self, row: str, launcher: str, result: Result) -> None:
        self.results.setdefault(row, {}).setdefault(launcher, []).append(result)

    def take_in(self, other: Run) -> None:
        """Add the results of another run, and its conditions."""
        for row, by_launcher in other.results.items():
            for name, found in by_launcher.items():
                self.results.setdefault(row, {}).setdefault(name, []).extend(found)
        self.launchers += [name for name in other.launchers if name not in self.launchers]
        self.commands = {**other.commands, **self.commands}
        self.machine += f". Of {other.date}: {other.machine}"

    def of(self, row: str, launcher: str) -> list[Result]:
        return self.results.get(row, {}).get(launcher, [])

    def title(self, row: str) -> str:
        return ROWS[row].title.format(idle_workers=self.idle_workers)

    def median(self, row: str, launcher: str) -> float | None:
        """Return the median, in which something that did not happen counts as longer than everything else; None: most did not."""
        values = [math.inf if r.value is None else r.value for r in self.of(row, launcher)]
        middle = statistics.median(values) if values else math.inf
        return middle if math.isfinite(middle) else None

    def ratio(self, row: str, launcher: str) -> float | None:
        """Return the ratio of medians of one of ours to the better torchrun's; None: one of them has no median."""
        others = [self.median(row, name) for name in self.launchers if not is_ours(name)]
        best, own = min((m for m in others if m is not None), default=None), self.median(row, launcher)
        return own / best if own is not None and best and is_ours(launcher) else None

    def to_json(self) -> str:
        """Return everything, with medians and ratios for those who read the file."""
        pairs = [(row, name) for row, by_launcher in self.results.items() for name in by_launcher]
        summary: dict[str, dict[str, dict[str, float | int | None]]] = {}
        for row, name in pairs:
            happened = sum(result.value is not None for result in self.of(row, name))
            numbers = {"n": len(self.of(row, name)), "happened": happened, "median": self.median(row, name), "ratio": self.ratio(row, name)}
            summary.setdefault(row, {})[name] = numbers
        return json.dumps({**asdict(self), "summary": summary}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Run:
        fields = json.loads(text)
        del fields["summary"]
        results = fields.pop("results")
        run = cls(**fields)
        for row, by_launcher in results.items():
            for name, found in by_launcher.items():
                for one in found:
                    run.add(row, name, Result(**one))
        return run


def is_ours(launcher: str) -> bool:
    return launcher.startswith("elastirun")


# -- words ------------------------------------------------------------------------------------------------------------


def figure(value: float) -> str:
    """Return the number with three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")


def conditions(run: Run) -> str:
    """Return one sentence about the run."""
    rows: dict[int, list[str]] = {}
    for row in ROWS:
        if row in run.results:
            rows.setdefault(max(map(len, run.results[row].values())), []).append(f"`{row}`")
    most, *fewer = sorted(rows, reverse=True) or [0]
    but = "".join(f", of {count} in {', '.join(rows[count])}" for count in fewer)
    return f"Medians of {most}{but}; launchers taking turns, {run.date}. {run.machine}."


def cell(run: Run, row: str, launcher: str) -> str:
    """Return the median, in brackets its ratio, and what happened in jobs that did not come up."""
    found = run.of(row, launcher)
    median, ratio = run.median(row, launcher), run.ratio(row, launcher)
    of_torchrun = "" if ratio is None else f" ({ratio:.2f})" if ratio >= 0.01 else " (< 0.01)"
    parts = [figure(median) + of_torchrun] if median is not None else []
    missing = [result for result in found if result.value is None]
    for note in dict.fromkeys(result.note for result in missing):
        after = [result.after for result in missing if result.note == note and result.after is not None]
        when = f" after {'–'.join(dict.fromkeys((f'{min(after):.0f}', f'{max(after):.0f}')))} s" if after else ""
        parts.append(f"{note}{when}, {sum(result.note == note for result in missing)} of {len(found)}")
    return "; ".join(parts) or "-"


def results_table(run: Run, rows: Sequence[str]) -> str:
    """Return the table of those rows that the run has, in Markdown."""
    names = sorted(run.launchers, key=lambda name: (is_ours(name), run.launchers.index(name)))
    heads = [f"{name} (of torchrun)" if is_ours(name) and len(names) > 1 else name for name in names]
    body = [[run.title(row), *(cell(run, row, name) for name in names)] for row in ROWS if row in rows and row in run.results]
    return table([["seconds, unless said otherwise", *heads], *body])


def brief_table(run: Run, rows: Sequence[str]) -> str:
    """Return the table with one column for the better torchrun of each row and one for elastirun with its defaults."""
    ours = next(name for name in run.launchers if is_ours(name))
    body = []
    for row in (row for row in ROWS if row in rows and row in run.results):
        theirs = [name for name in run.launchers if not is_ours(name)]
        best = min(theirs, key=lambda name: run.median(row, name) or math.inf)
        body.append([run.title(row), cell(run, row, best), cell(run, row, ours)])
    return table([["seconds, unless said otherwise", "torchrun", f"{ours} (of torchrun)"], *body])


# -- pages ------------------------------------------------------------------------------------------------------------

BLOCK = re.compile(r"(<!-- measured: ([^>]*?) -->\n)(.*?)(<!-- end -->)", re.S)
LEGEND = (
    '"Unshared" is torchrun with `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, "executed" elastirun with `--preload=off`, '
    '"kept warm" a command after another with `--keep-warm`, which concerns the start alone. '
    "In brackets: ratios of medians to the better torchrun; -: not measured."
)
PICTURE = "![Seconds for each event under each launcher](../docs/launcher.svg)"


def write_page(page: Path, run: Run) -> None:
    """Replace what stands between ``<!-- measured: ROW ... -->`` and ``<!-- end -->``.

    ``conditions``, ``legend`` and ``picture`` among the rows add what they say; with ``brief`` the table has three columns.
    """
    page.write_text(BLOCK.sub(lambda found: found[1] + block(run, found[2].split()) + found[4], page.read_text()))


def block(run: Run, names: Sequence[str]) -> str:
    results = brief_table(run, names) if "brief" in names else results_table(run, names)
    parts = {"conditions": conditions(run), "legend": LEGEND, "": results, "picture": PICTURE}
    return "\n" + "\n\n".join(part for name, part in parts.items() if not name or name in names) + "\n\n"


# -- picture ----------------------------------------------------------------------------------------------------------

LEFT, ACROSS, TOP, LANE, MARGIN = 430, 480, 56, 14, 90  # pixels
COLOURS = dict(
    zip([launcher.name for launcher in LAUNCHERS.values()], ("#2f6fb0", "#2e9e5b", "#7a4fb5", "#c02020", "#e0a030"), strict=True)
)
GREY = "#666666"


def picture(run: Run) -> str:
    """Draw the rows that are seconds, on a logarithmic axis, as SVG: a dot for the median, a line from the fastest to the slowest.

    An arrow at the right border: most jobs of this launcher did not come up.
    """
    rows = [row for row in ROWS if row in run.results and ROWS[row].unit == SECONDS]
    values = [r.value for row in rows for name in run.launchers for r in run.of(row, name) if r.value]
    axis = Axis(min(values, default=0.1), max(values, default=10.0))
    band = LANE * len(run.launchers) + 10
    bottom = TOP + band * len(rows)
    size = f'width="{LEFT + ACROSS + MARGIN}" height="{bottom + 30}"'
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">', f'<rect {size} fill="#ffffff"/>']
    out += legend(run.launchers)
    for tick in axis.ticks:
        out.append(line(axis.x(tick), TOP - 6, axis.x(tick), bottom, f'stroke="{GREY}" opacity="0.25"'))
        out.append(text(axis.x(tick), bottom + 16, f"{tick:g} s", f'text-anchor="middle" fill="{GREY}"'))
    for at, row in enumerate(rows):
        top = TOP + band * at
        out.append(text(10, top + band / 2 + 1, run.title(row).replace("`", "")))
        out.append(line(10, top + band - 4, LEFT + ACROSS + MARGIN - 10, top + band - 4, f'stroke="{GREY}" opacity="0.25"'))
        for lane, name in enumerate(run.launchers):
            out += mark(axis, run, row, name, top + LANE * lane + LANE / 2)
    return "\n".join([*out, "</svg>"]) + "\n"


class Axis:
    """A logarithmic axis of seconds between two of its ticks."""

    def __init__(self, low: float, high: float) -> None:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        steps = [round(digit * 10.0**power, 6) for power in powers for digit in (1, 2, 5)]
        self.low = max(step for step in steps if step <= low)
        self.high = min(step for step in steps if step >= high and step > self.low)
        self.ticks = [step for step in steps if self.low <= step <= self.high]

    def x(self, seconds: float) -> float:
        return LEFT + math.log(seconds / self.low) / math.log(self.high / self.low) * ACROSS


def legend(launchers: Sequence[str]) -> list[str]:
    out = []
    for at, name in enumerate(launchers):
        x = 14 + at * 200
        out.append(f'<circle cx="{x}" cy="24" r="4.5" fill="{COLOURS[name]}"/>')
        out.append(text(x + 9, 28, name))
    return out


def mark(axis: Axis, run: Run, row: str, name: str, y: float) -> list[str]:
    """Draw the results of one launcher in one row."""
    colour, found = COLOURS[name], run.of(row, name)
    values = [result.value for result in found if result.value]
    median = run.median(row, name)
    out = [line(axis.x(min(values)), y, axis.x(max(values)), y, f'stroke="{colour}" stroke-width="2" opacity="0.5"')] if values else []
    if median:
        out.append(f'<circle cx="{axis.x(median):.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>')
        out.append(text(axis.x(max(values)) + 8, y + 4, figure(median), f'font-size="11" fill="{colour}"'))
    elif found:
        x = LEFT + ACROSS + 8
        out.append(f'<path d="M{x} {y - 5:.1f} L{x + 9} {y:.1f} L{x} {y + 5:.1f} z" fill="{colour}"/>')
        note = "lost" if sum(result.note == "job lost" for result in found) > len(found) / 2 else "never"
        out.append(text(x + 13, y + 4, note, f'font-size="11" fill="{colour}"'))
    return out


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'


def text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(words)}</text>'

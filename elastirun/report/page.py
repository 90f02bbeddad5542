"""The page of a report: a summary, the table of lost time, the picture, the faults, the failures with their stacks, and notes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from elastirun.report import picture, words
from elastirun.report.story import Failure, Story

MOST_FAULTS, MOST_FAILURES = 2000, 300  # rows and stacks; the costliest and the first
LONGEST_LINE = 500  # characters of a line of a stack

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; margin: 2em auto; max-width: 1200px; padding: 0 1em }
h1 { font-size: 1.4em } h2 { font-size: 1.15em; margin-top: 1.6em }
table { border-collapse: collapse } td, th { padding: .25em .8em; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top }
.numbers td:nth-child(n+2), .numbers th:nth-child(n+2) { text-align: right }
.numbers tr:first-child td { font-weight: 600 } .faults td:not(:nth-child(4)) { white-space: nowrap }
pre { background: #f6f6f6; padding: .8em; overflow-x: auto; font-size: 13px } summary { cursor: pointer; padding: .2em 0 }
.notes { color: #555; font-size: 13px }
"""


def page(story: Story, left_out: Sequence[str]) -> str:
    """Return the page. ``left_out``: what was not read, for people. Raises ImportError without plotly."""
    drawn, not_drawn = picture.draw(story)
    losses = [words.loss_row(loss, story) for loss in story.losses]
    costliest = sorted(story.faults, key=lambda fault: -fault.seconds)[:MOST_FAULTS]
    parts = [
        "<h1>elastirun report</h1>",
        f'<p id="summary">{" ".join(escape(one) for one in words.summary(story))}</p>',
        "<h2>Lost time, the largest first</h2>",
        _table(("lost to", "times", "time of all nodes", "share", "the costliest one"), losses, "numbers", "losses"),
        "<h2>What happened when (UTC)</h2>",
        drawn,
        "<h2>Rounds that ended early, the costliest first</h2>",
        _table(
            ("at", "round", "cause", "reason", "cost", "until the next start", "until the first step", "steps done again", "nodes"),
            [words.fault_row(fault) for fault in costliest],
            "faults",
            "faults",
        ),
        "<h2>Failures and stacks</h2>",
        *(_failure(one) for one in story.failures[:MOST_FAILURES]),
        "" if story.failures else "<p>None was written.</p>",
        '<h2>Notes</h2><ul class="notes">',
        *(f"<li>{escape(words.clean(one))}</li>" for one in (*words.notes(story, left_out), *not_drawn)),
        "</ul>",
    ]
    head = f'<meta charset="utf-8"><title>elastirun report</title><style>{_STYLE}</style>'
    body = "\n".join(parts)
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def _table(head: Iterable[str], rows: Iterable[Sequence[str]], style: str, name: str) -> str:
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    lines = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<table class="{style}" id="{name}"><thead><tr>{titles}</tr></thead><tbody>\n{lines}\n</tbody></table>'


def _failure(one: Failure) -> str:
    title = escape(words.clean(f"{words.moment(one.at)[11:]} {one.name}: {one.title}"))
    lines = "\n".join(escape(words.clean(line, LONGEST_LINE)) for line in one.lines)
    return f"<details><summary>{title}</summary><pre>{lines or 'nothing was written'}</pre></details>"

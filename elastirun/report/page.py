"""The page of a report: large numbers, the table of lost time, the picture, the rounds that ended early, stacks, and notes.

It has no script and loads nothing, and its policy forbids both, so a text in an event can become neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from elastirun.agent.observe.node_states import WORDS
from elastirun.report import picture, words
from elastirun.report.story import Loss, Story

MOST_FAILURES = 300  # stacks of the first failures
MOST_STACKS = 100_000  # characters of all stacks, so that the page stays below 1 MB
LONGEST_LINE = 500  # characters of a line of a stack
STYLE = Path(__file__).with_name("style.css")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(story: Story, left_out: Sequence[str]) -> str:
    """Return the page. ``left_out``: what was not read, for people."""
    drawn, not_drawn = picture.draw(story)
    title = words.clean(story.about.job) or "elastirun report"
    parts = [
        *_head(story, title),
        "<h2>Lost time, the largest first</h2>",
        _table(
            ("lost to", "", "time of all nodes", "share", "times", "the longest"),
            [("", _loss(one, story)) for one in story.losses],
            "losses",
        ),
        "<h2>What happened when</h2>",
        drawn,
        _legend(story),
        "<h2>Rounds that ended early, the costliest first</h2>",
        _faults(story),
        "<h2>Failures and stacks</h2>",
        *_failures(story),
        '<h2>Notes</h2><ul class="notes">',
        *(f"<li>{escape(words.clean(one))}</li>" for one in (*words.notes(story, left_out), *not_drawn, *_not_shown(story))),
        "</ul>",
    ]
    head = [
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        f'<meta name="viewport" content="width=device-width"><title>{escape(title)}: elastirun report</title>',
        f"<style>{STYLE.read_text()}{picture.state_styles()}</style>",
    ]
    lines = "\n".join(parts)
    return f'<!DOCTYPE html>\n<html lang="en"><head>{"".join(head)}</head><body>\n{lines}\n</body></html>\n'


def _head(story: Story, title: str) -> list[str]:
    """Return what the job was, how it ended, and the large numbers."""
    kind = "good" if "succeeded" in story.outcome else "bad" if "failed" in story.outcome else ""
    tiles = "".join(f"<div><b>{escape(number)}</b><span>{escape(label)}</span></div>" for number, label in words.numbers(story))
    verdict, colon, why = words.clean(story.outcome).partition(": ")
    command = escape(words.clean(story.about.command, words.MOST_COMMAND))
    versions = escape(" · ".join(words.clean(f"{name} {version}") for name, version in story.about.versions))
    states = [(state, story.spent.get(state, 0.0)) for state in WORDS]
    return [
        f"<h1>{escape(title)}</h1>",
        f'<p class="about"><b class="{kind}">{escape(verdict)}</b>{colon}{escape(why)} · {escape(words.when(story))}</p>',
        f'<p class="about"><code>{command}</code></p>' if command else "",
        f'<p class="about">{versions}</p>' if versions else "",
        f'<div class="numbers">{tiles}</div>',
        f'<p id="summary">{escape(words.worst(story))}</p>',
        f'<div class="bar whole">{picture.boxes(states, story.total)}</div>',
        _legend(story),
    ]


def _legend(story: Story) -> str:
    """Return the states that nodes were in, with their colours and times."""
    items = "".join(
        f'<li title="{escape(its.means)}"><i class="{state}"></i>{its.title} <span>{escape(words.seconds(story.spent[state]))}</span></li>'
        for state, its in WORDS.items()
        if story.spent.get(state)
    )
    return f'<ul class="legend">{items}</ul>'


def _loss(loss: Loss, story: Story) -> list[str]:
    """Return the cells of a loss: its bar has the colours of the picture, and the largest loss has the whole width."""
    most = max(one.seconds for one in story.losses)
    parts = [(state, loss.parts.get(state, 0.0)) for state in WORDS]

    what, *others, longest = map(escape, words.loss_row(loss, story))
    return [what, f'<div class="bar">{picture.boxes(parts, most)}</div>', *others, _number(loss.longest.number) + longest]


def _number(number: int) -> str:
    """Return the number of a round's mark as a link to the mark; empty for 0."""
    return f'<a class="number" href="#m{number}">{number}</a> ' if number else ""


def _faults(story: Story) -> str:
    costliest = sorted(story.faults, key=lambda fault: fault.number)[: picture.MOST_MARKS]
    head = ("", "at", "round", "cause", "reason", "cost", *words.COSTS, "nodes")
    rows = [(f' id="f{one.number}"', [_number(one.number), *map(escape, words.fault_row(one, story))]) for one in costliest]
    return _table(head, rows, "faults") if rows else "<p>None did.</p>"


def _not_shown(story: Story) -> list[str]:
    """Return what the tables leave out, for people."""
    limits = (
        (len(story.faults), picture.MOST_MARKS, "rounds that ended early, the costliest"),
        (len(story.failures), MOST_FAILURES, "failures, the first"),
    )
    return [f"The page has {most} of {count} {what} ones." for count, most, what in limits if count > most]


def _table(head: Iterable[str], rows: Iterable[tuple[str, Sequence[str]]], name: str) -> str:
    """Return a table of cells that are HTML. Each row has attributes of its own."""
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    lines = "\n".join(f"<tr{attributes}>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for attributes, row in rows)
    return f'<div class="wide"><table id="{name}"><thead><tr>{titles}</tr></thead><tbody>\n{lines}\n</tbody></table></div>'


def _failures(story: Story) -> list[str]:
    """Return the failures with their stacks, as many as the page has room for."""
    found, left = list[str](), MOST_STACKS
    for one in story.failures[:MOST_FAILURES]:
        title = escape(words.clean(f"{words.point(one.at, story)} {one.name}: {one.title}"))
        lines = "\n".join(words.clean(line, LONGEST_LINE) for line in one.lines)[:left]
        left -= len(lines)
        found.append(f"<details><summary>{title}</summary><pre>{escape(lines) or 'nothing was written'}</pre></details>")
    return found or ["<p>None was written.</p>"]

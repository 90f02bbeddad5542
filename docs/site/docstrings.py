"""Docstrings as Markdown: an indented block is an example in Python, or the arguments as a list of definitions."""

from __future__ import annotations

import re
import textwrap
from html import escape

import griffe

ARGUMENT = re.compile(r"\w+(, \w+)*\s{2,}(?=\S)")  # names at the beginning of a line, before at least two spaces

NAMES = re.compile(r"\w+(, \w+)*")  # a line of names alone
TREE = re.compile("[├└]")


class AsMarkdown(griffe.Extension):
    """Rewrites each docstring before it is rendered. The comment beside an attribute of a class is its docstring."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_attribute(self, *, attr: griffe.Attribute, **_: object) -> None:
        if attr.docstring is None and attr.parent.is_class and (comment := attr.source.partition("  # ")[2]):
            attr.docstring = griffe.Docstring(comment[0].upper() + comment[1:], parent=attr)


def as_markdown(text: str) -> str:
    """Return ``text`` with fenced examples and with lists of arguments."""
    return "\n\n".join(_block(part) for part in _joined(re.split(r"\n(?:[ \t]*\n)+", text)))


def _joined(parts: list[str]) -> list[str]:
    """Return ``parts`` with indented ones joined that follow each other."""
    found: list[str] = []
    for part in parts:
        if found and part.startswith("    ") and found[-1].startswith("    "):
            found[-1] += f"\n\n{part}"
        else:
            found.append(part)
    return found


def _block(part: str) -> str:
    code = textwrap.dedent(part)
    if part.startswith("    "):
        return f"```{'text' if TREE.search(code) else 'python'}\n{code}\n```"
    rows = part.split("\n")
    match = ARGUMENT.match(rows[0])
    column = match.end() if match else 0
    if not match or not all(NAMES.fullmatch(row) or row[column - 2 : column + 1].strip() == row[column : column + 1] for row in rows):
        return part
    return _definitions(rows, column)


def _definitions(rows: list[str], column: int) -> str:
    """Return rows of names and their meanings, which begin at ``column``, as a list of definitions."""
    found: list[tuple[str, list[str]]] = []
    for row in rows:
        long = NAMES.fullmatch(row)  # too long for a meaning beside them
        name, meaning = (row, "") if long else (row[:column].strip(), row[column:])
        if name:
            found.append((name, []))
        found[-1][1].append(meaning)
    items = [f"<dt>{escape(name)}</dt>\n<dd markdown>{' '.join(meaning).strip()}</dd>" for name, meaning in found]
    return '<dl class="arguments" markdown>\n' + "\n".join(items) + "\n</dl>"

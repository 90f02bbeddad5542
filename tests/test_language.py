"""Names, docstrings and comments are written in the words of the field; CONTRIBUTING says how."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest

from tests.test_layers import sources

# Pictures that the code once used, by what they stood for: see the glossary for the words in their place.
PICTURES = re.compile(r"\b(obey\w*|bury|buried|lodg\w*|cords?|bells?|hopeless|in vain|so-manieth)\b", re.IGNORECASE)
VAGUE_NAMES = {"obey", "land", "lay", "spread", "cord", "bell", "wish", "surroundings", "lodgers", "hurry", "relax", "said", "reading"}
# A docstring is a sentence with a verb or a noun phrase at its beginning, not a question or a clause without a noun.
CLAUSE = re.compile(r"(what|where|when|who|whom|whose|which|why|how|are|is|does|did|has|will|it|they|of)\b", re.IGNORECASE)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each docstring and each comment."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, *DEFINITIONS)) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def pictures(source: str) -> list[str]:
    """Return the words in ``source`` that stand for something else, as ``line: word``."""
    found = [f"{line}: {picture[0]}" for line, text in texts(source) for picture in PICTURES.finditer(text)]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DEFINITIONS) and VAGUE_NAMES & set(node.name.lower().split("_")):
            found.append(f"{node.lineno}: {node.name}")
    return found


def clauses(source: str) -> list[str]:
    """Return the docstrings in ``source`` that begin like a question or a clause, as ``line: word``."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Module, *DEFINITIONS)) and node.body]
    begun = [(node.body[0].lineno, CLAUSE.match(ast.get_docstring(node) or "")) for node in nodes]
    return [f"{line}: {match[0]}" for line, match in begun if match]


def test_names_and_texts_are_plain() -> None:
    assert [f"{path}:{found}" for _, path in sources() for found in pictures(path.read_text())] == []


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    assert [f"{path}:{found}" for _, path in sources() for found in clauses(path.read_text())] == []


@pytest.mark.parametrize(
    "source",
    [
        "x = 1  # the signal is obeyed",
        "def keep():\n    '''In vain.'''",
        "def lay_out(): ...",
        "class Said: ...",
    ],
)
def test_a_picture_is_found(source: str) -> None:
    assert len(pictures(source)) == 1


@pytest.mark.parametrize("source", ["def f():\n    '''Is it so?'''", "'''What keeps an agent together.'''"])
def test_a_clause_is_found(source: str) -> None:
    assert len(clauses(source)) == 1


def test_plain_words_are_not() -> None:
    source = "def layout():\n    '''Return a landmark.'''  # spread over the ranks"
    assert pictures(source) == clauses(source) == []

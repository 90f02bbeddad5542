"""Changes of a module that take out one rule. They name a function and a part of it, so that they fit when lines change.

A change that finds no such part, or several, raises ``NotFound``: names more of what stands in the part, or another form, make it clear.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

Function = ast.FunctionDef | ast.AsyncFunctionDef
Named = Function | ast.ClassDef
Node = TypeVar("Node", ast.expr, ast.stmt)


class NotFound(Exception):
    """A module has no such function, or the function not exactly one such part."""


@dataclass(frozen=True)
class Part:
    """An expression or a statement that becomes ``text``; with ``inserts`` the text goes before the statement, on a line of its own."""

    node: ast.expr | ast.stmt
    text: str
    inserts: bool = False


@dataclass(frozen=True)
class Change:
    """``parts`` finds what changes in the nodes of a module, a class or a function. ``name`` is the call that made the change."""

    name: str
    parts: Callable[[ast.AST], Iterable[Part]]


def returns(expression: str) -> Change:
    """The function returns ``expression``, which may use its parameters, at once."""

    def parts(scope: ast.AST) -> Iterator[Part]:
        if isinstance(scope, Function):
            has_text = ast.get_docstring(scope) is not None and len(scope.body) > 1
            yield Part(scope.body[1 if has_text else 0], f"return ({expression})", inserts=True)

    return Change(f"returns({expression!r})", parts)


def without(call: str) -> Change:
    """The call of ``call`` is not made; where its result is used, that is None."""
    return Change(f"without({call!r})", instead_of(call, "None").parts)


def instead_of(name: str, expression: str) -> Change:
    """The call of ``name`` becomes ``expression``, which may use local variables.

    If nothing calls ``name``, the reading of it, or what ``ast.unparse`` writes as ``name``.
    """

    def parts(scope: ast.AST) -> Iterator[Part]:
        nodes = [node for node in _nodes(scope) if isinstance(node, ast.expr)]
        calls = [node for node in nodes if isinstance(node, ast.Call) and _is(node.func, name)]
        reads = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Load) and _is(node, name)]
        return (Part(node, expression) for node in calls or reads or [node for node in nodes if _is(node, name)])

    return Change(f"instead_of({name!r}, {expression!r})", parts)


def skips(*names: str) -> Change:
    """The statement that mentions all ``names`` is left out."""

    def parts(scope: ast.AST) -> Iterator[Part]:
        found = [node for node in _nodes(scope) if isinstance(node, ast.stmt) and not isinstance(node, Named)]
        return (Part(node, "pass") for node in _outermost(found, names))

    return Change(f"skips{names}", parts)


def never(*names: str) -> Change:
    """The condition that mentions all ``names`` is false: of an ``if``, ``while`` or comprehension, or a part of an ``and`` or ``or``."""
    return Change(f"never{names}", lambda scope: (Part(node, "False") for node in _outermost(_conditions(scope), names)))


def always(*names: str) -> Change:
    """The condition that mentions all ``names`` is true, see ``never``."""
    return Change(f"always{names}", lambda scope: (Part(node, "True") for node in _outermost(_conditions(scope), names)))


def part_never(*names: str) -> Change:
    """The smallest part of a condition that mentions all ``names`` is false: an operand of ``and``, ``or`` or ``not``."""
    return Change(f"part_never{names}", lambda scope: (Part(node, "False") for node in _innermost(_conditions(scope), names)))


def part_always(*names: str) -> Change:
    """The smallest part of a condition that mentions all ``names`` is true, see ``part_never``."""
    return Change(f"part_always{names}", lambda scope: (Part(node, "True") for node in _innermost(_conditions(scope), names)))


def compares(operator: str, *names: str) -> Change:
    """The comparison that mentions all ``names`` is made with ``operator``."""

    def parts(scope: ast.AST) -> Iterator[Part]:
        found = [node for node in _nodes(scope) if isinstance(node, ast.Compare) and len(node.ops) == 1]
        for node in _outermost(found, names):
            assert isinstance(node, ast.Compare)
            yield Part(node, f"({ast.unparse(node.left)}) {operator} ({ast.unparse(node.comparators[0])})")

    return Change(f"compares({operator!r}, {names})", parts)


def gets(name: str, expression: str) -> Change:
    """What ``name`` gets is ``expression``: a variable, attribute, constant, default, argument by keyword, or key of a table."""

    def parts(scope: ast.AST) -> Iterator[Part]:
        return (Part(value, expression) for target, value in _bindings(scope) if _is(target, name))

    return Change(f"gets({name!r}, {expression!r})", parts)


def changed(source: str, name: str, changes: Sequence[Change]) -> str:
    """Return ``source`` with ``changes`` of what has the qualified ``name``, or of the module itself if that is empty. Lines stay."""
    scope = _find(ast.parse(source), name)
    found = source.encode()
    starts = [0, *accumulate(map(len, found.splitlines(keepends=True)))]
    for part in sorted((_only(scope, name, change) for change in changes), key=lambda part: part.node.lineno, reverse=True):
        node = part.node
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        if part.inserts:
            text = f"{part.text}\n{' ' * node.col_offset}".encode()
            found = found[:start] + text + found[start:]
        elif isinstance(node, ast.stmt):
            found = found[:start] + part.text.encode() + b"\n" * found[start:end].count(b"\n") + found[end:]
        else:
            if ast.dump(ast.parse(b"(" + found[start:end] + b")", mode="eval").body) != ast.dump(node):
                raise NotFound(f"{name}: {ast.unparse(node)} stands in an f-string, where Python 3.11 knows no positions")
            filled = "\n" * found[start:end].count(b"\n")  # as many lines as before
            found = found[:start] + f"({part.text}{filled})".encode() + found[end:]
    compile(found, name, "exec", dont_inherit=True)
    if ast.dump(ast.parse(found)) == ast.dump(ast.parse(source)):
        raise NotFound(f"{name}: nothing changes")
    return found.decode()


def _find(module: ast.Module, name: str) -> ast.AST:
    scope: ast.AST = module
    for part in filter(None, name.split(".")):
        found = [node for node in _within(scope) if isinstance(node, Named) and node.name == part]
        if len(found) != 1:
            raise NotFound(f"{len(found)} definitions of {part} of {name}")
        scope = found[0]
    return scope


def _only(scope: ast.AST, name: str, change: Change) -> Part:
    found = list(change.parts(scope))
    if len(found) != 1:
        where = ", ".join(f"line {part.node.lineno}: {ast.unparse(part.node)[:80]}" for part in found)
        raise NotFound(f"{change.name} finds {len(found)} parts of {name or 'the module'}: {where}")
    return found[0]


def _within(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below ``scope``, but not those within functions and classes in it."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, Named):
            yield from _within(node)


def _nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield what a change may look at: all of a function, or what a class or module does outside of its functions and classes."""
    return (node for node in ast.walk(scope) if node is not scope) if isinstance(scope, Function) else _within(scope)


def _is(node: ast.AST, name: str) -> bool:
    """Whether ``node`` is ``name``, or a name with dots that ends with it."""
    text = ast.unparse(node)
    return text == name or (isinstance(node, ast.Attribute) and text.endswith(f".{name}"))


def _outermost(nodes: Iterable[Node], names: Sequence[str]) -> Iterator[Node]:
    """Yield those of ``nodes`` that mention all ``names`` and are within no other such node."""
    found = [node for node in nodes if _mentions(node, names)]
    within = {id(one) for node in found for one in ast.walk(node) if one is not node}
    return (node for node in found if id(node) not in within)


def _innermost(nodes: Iterable[ast.expr], names: Sequence[str]) -> Iterator[ast.expr]:
    """Yield those of ``nodes`` that mention all ``names`` and have no other such node within them."""
    found = [node for node in nodes if _mentions(node, names)]
    ids = {id(node) for node in found}
    return (node for node in found if not any(id(one) in ids for one in ast.walk(node) if one is not node))


def _mentions(node: ast.expr, names: Sequence[str]) -> bool:
    return all(any(_is(one, name) for one in ast.walk(node)) for name in names)


def _conditions(scope: ast.AST) -> Iterator[ast.expr]:
    for node in _nodes(scope):
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.BoolOp):
            yield from node.values
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node.operand


def _bindings(scope: ast.AST) -> Iterator[tuple[ast.AST, ast.expr]]:
    """Yield the names, attributes and keys that get a value, each with the value."""
    for node in _nodes(scope):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    yield from zip(target.elts, node.value.elts, strict=True)
                else:
                    yield target, node.value
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
            yield node.target, node.value
        elif isinstance(node, ast.keyword) and node.arg is not None:
            yield ast.Name(node.arg), node.value
        elif isinstance(node, ast.Dict):
            yield from ((key, value) for key, value in zip(node.keys, node.values, strict=True) if key is not None)

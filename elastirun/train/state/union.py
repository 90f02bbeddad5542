"""The tree of a state of which ranks have different parts, such as the stages of a pipeline: each part from the first rank that has it.

Pure. Trees are those of ``state.values``; where two ranks have a value at the same place, the first one's counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

from elastirun.checkpoint.record import clip
from elastirun.errors import CheckpointError
from elastirun.train.state.values import TAG, Fixed, Node, is_tensor, join

Tree = dict[str, Node]
GROUPS, PARAMS = "param_groups", "params"  # of an optimizer


class Union:
    """The tree that all ranks have together. ``trees``: one of each kind, in the order of ranks, the same on all ranks.

    ``lent``: the number of the one that is this rank's, None if it is another rank's. ``own_tree``: this rank's.
    """

    def __init__(self, trees: Sequence[Tree], lent: int | None, own_tree: Tree) -> None:
        self._others: Tree = _lacking(own_tree, reduce(merged, trees)) or {}
        self._before: Tree = reduce(merged, trees[: lent or 0], {})
        own = None if lent is None else trees[lent]
        lacked = {path for tree in trees for path, _ in _beyond(own or {}, tree, "")}  # by at least one of the others
        self._shared = {path for path, _ in _beyond(own or {}, {}, "")} - lacked
        self._lent = None if own is None else self._lent_of(own)
        self._merged: dict[int, tuple[Fixed, Fixed]] = {}  # by the id of the first one, which never changes

    def is_for(self, tree: Tree) -> bool:
        """Return whether the values that other ranks have from this one are still those in ``tree``."""
        return self._lent is None or self._lent_of(tree) == self._lent

    def _lent_of(self, tree: Tree) -> list[tuple[str, Node]]:
        """Return the values that other ranks have from this one."""
        return [(path, node) for path, node in _beyond(tree, self._before, "") if path not in self._shared]

    def completed(self, tree: Tree) -> Tree:
        """Return this rank's ``tree`` with what the other ranks have beyond it."""
        return merged(tree, self._others, self._merged)  # type: ignore[no-any-return]


def merged(first: Node, other: Node, known: dict[int, tuple[Fixed, Fixed]] | None = None) -> Node:
    """Return ``first`` with what ``other`` has beyond it. ``known``: results of earlier calls with the same ``other``, by id.

    Raises CheckpointError for optimizers whose parameters have no names, or whose groups are not alike.
    """
    if not (_is_open(first) and _is_open(other)):
        return first
    if TAG in first or TAG in other:
        one, more = _module(first), _module(other)
        return {TAG: "module", **{key: merged(one[key], more[key], known) for key in ("versions", "items")}}
    if isinstance(first, Fixed) and known is not None:
        if id(first) not in known:
            known[id(first)] = first, Fixed({**first, **{key: each for key, each in other.items() if key not in first}})
        return known[id(first)][1]
    both = {key: merged(each, other[key], known) if key in other else each for key, each in first.items()}
    if _is_groups(first.get(GROUPS)) and _is_groups(other.get(GROUPS)):
        both[GROUPS] = _groups(first[GROUPS], other[GROUPS])
    return {**both, **{key: each for key, each in other.items() if key not in first}}


def _lacking(own: Node, whole: Node) -> Node:
    """Return what ``whole`` has beyond ``own``; None if that is nothing. Groups of optimizers stay as they are in ``whole``."""
    if not (_is_open(own) and _is_open(whole)):
        return None
    if TAG in own or TAG in whole:
        mine, theirs = _module(own), _module(whole)
        parts = {key: _lacking(mine[key], theirs[key]) for key in ("versions", "items")}
        return {TAG: "module", **{key: each or {} for key, each in parts.items()}} if any(parts.values()) else None
    beyond = {key: _lacking(own[key], each) if key in own and not _is_groups(each) else each for key, each in whole.items()}
    return {key: each for key, each in beyond.items() if each is not None or key not in own} or None


def _is_groups(node: Node) -> bool:
    """Return whether ``node`` are the groups of an optimizer."""
    return type(node) is list and bool(node) and all(isinstance(each, dict) and type(each.get(PARAMS)) is list for each in node)


def _is_open(node: Node) -> bool:
    """Return whether ranks may have different parts of ``node``: a dict, or the state dict of a module."""
    return isinstance(node, dict) and node.get(TAG, "module") == "module"


def _module(node: Node) -> Node:
    """Return the node of a module in its long form."""
    return node if node.get(TAG) == "module" else {TAG: "module", "versions": {}, "items": node}


def _groups(first: Sequence[Node], other: Sequence[Node]) -> list[Node]:
    """Return the groups of two optimizers: those at the same place are one."""
    if list(first) == list(other):
        return list(first)
    names = [{*map(type, group[PARAMS])} for group in (*first, *other) if group[PARAMS]]
    if any(kinds != {str} for kinds in names):
        raise CheckpointError(
            "an optimizer has parameters that are in no module of the state, so those of different ranks cannot be told apart: "
            "put the modules into the state, too"
        )
    there = {name for group in first for name in group[PARAMS]}
    result = [{**group, PARAMS: [*group[PARAMS], *(name for name in more if name not in there)]} for group, more in _pairs(first, other)]
    return result + list(other[len(first) :])


def _pairs(first: Sequence[Node], other: Sequence[Node]) -> Iterator[tuple[Node, Sequence[str]]]:
    for at, group in enumerate(first):
        yield group, other[at][PARAMS] if at < len(other) else ()


def _beyond(own: Node, before: Node, path: str) -> Iterator[tuple[str, Node]]:
    """Yield (path, node) of the values in ``own`` that ``before`` does not have. Tensors, and names of parameters, do not count."""
    if isinstance(own, Fixed):
        return
    if not _is_open(own):
        if before is None and not is_tensor(own):
            yield path, own
        return
    there = before if isinstance(before, dict) else {}
    for key, each in own.items():
        if key == GROUPS and _is_groups(each):
            yield from ((f"{join(path, key)}.{at}", each[at]) for at in range(len(there.get(key) or ()), len(each)))
        else:
            yield from _beyond(each, there.get(key), join(path, key))


def group_options(tree: Node, path: str = "") -> Iterator[tuple[str, int, Any]]:
    """Yield (path, index, options) of the groups of each optimizer in ``tree``: what ranks with different parts have to agree on."""
    if isinstance(tree, dict) and not isinstance(tree, Fixed):
        for key, each in tree.items():
            if key == GROUPS and _is_groups(each):
                for at, group in enumerate(each):
                    yield join(path, key), at, {name: value for name, value in group.items() if name != PARAMS}
            else:
                yield from group_options(each, join(path, key))


def verify_same_options(everyones: Mapping[int, Sequence[tuple[str, int, Any]]]) -> None:
    """Raise CheckpointError where a group has other options on two ranks. ``everyones``: what ``group_options`` yields, by rank."""
    seen: dict[tuple[str, int], tuple[int, Any]] = {}
    for rank, groups in everyones.items():
        for path, at, options in groups:
            first, theirs = seen.setdefault((path, at), (rank, options))
            if odd := sorted(key for key in {*options, *theirs} if options.get(key) != theirs.get(key)):
                raise CheckpointError(
                    f"{path}.{at} has another {clip(odd[0])} on rank {rank} than on rank {first}: ranks that have different parts "
                    "of the model need the same groups in the same order, with the same options"
                )

"""A tree of values as JSON, with tags for what JSON does not have, and a place for each tensor.

    null, true, 3, 0.5, "text", [...], {...}     as they are, if a dict has texts as keys, and none of them is "$"
    {"$": "tensor"}                              a tensor; its name is the path to this place, joined with dots
    {"$": "array"}                               a tensor that was a NumPy array
    {"$": "per_rank"}                            a value of which every rank has its own: the tensor ``<path>@<rank>`` holds it as JSON
    {"$": "dict", "type": …, "items": [[key, value], …]}      other dicts: "dict", "OrderedDict" or "Counter"
    {"$": "module", "versions": {…}, "items": {…}}            a module's state dict, with the versions of the layers that have one beyond 1
    {"$": "tuple" | "set" | "frozenset" | "size", "items": […]}
    {"$": "bytes" | "float" | "complex" | "dtype" | "device", "value": "…"}

The bytes are parsed with limits; nothing is unpickled.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from elastirun.checkpoint.record import clip, parse
from elastirun.errors import CheckpointError

MAX_BYTES = 512 << 20  # of a tree as JSON
MAX_DEPTH = 64  # containers within containers; Python's own limit of recursion would end a deeper tree without its path
TAG = "$"
TENSOR: Mapping[str, str] = {TAG: "tensor"}
ARRAY: Mapping[str, str] = {TAG: "array"}
PER_RANK: Mapping[str, str] = {TAG: "per_rank"}

Node = Any  # what json.loads gives
Take = Callable[[str, Tensor], None]  # is given each tensor with its name

PLAIN = (type(None), bool, int, str)
_MAPPINGS: dict[str, Callable[[dict[Any, Any]], Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset, "size": torch.Size}
_TAGS: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "size"}
DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def join(path: str, key: object) -> str:
    """Return the path to ``key`` in what stands at ``path``."""
    return f"{path}.{key}" if path else str(key)


def is_tensor(node: Node) -> bool:
    """Return whether ``node`` is the place of a tensor, or of an array."""
    return isinstance(node, dict) and node.get(TAG) in ("tensor", "array")


def items_of(node: Node) -> dict[Any, Node]:
    """Return the nodes within ``node`` by key; none if it is no container."""
    if type(node) is list:
        return dict(enumerate(node))
    if not isinstance(node, dict):
        return {}
    tag = node.get(TAG)
    if tag == "dict":
        return {to_value(key, "", _no_key): each for key, each in node["items"]}
    if tag in ("tuple", "module"):
        return items_of(node["items"])
    return dict(node) if tag is None else {}


# -- from values ----------------------------------------------------------------------------------------------------------


def to_node(value: Any, path: str, take: Take, depth: int = 0) -> Node:
    """Return ``value`` as JSON has it. Each tensor in it goes to ``take``. Raises ``CheckpointError`` for other types, with the path."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if depth > MAX_DEPTH:
        raise CheckpointError(f"{clip(path)}: more than {MAX_DEPTH} containers within each other; does one contain itself?")
    if kind is list:
        return _items(value, path, take, depth)
    if isinstance(value, Tensor):
        take(path, value)
        return TENSOR
    if isinstance(value, Mapping):
        return _mapping(value, path, take, depth)
    if kind is float and math.isfinite(value):
        return value
    if kind in _SPELLED:
        tag, spell = _SPELLED[kind]
        return {TAG: tag, "value": spell(value)}
    if kind in _TAGS:
        return {TAG: _TAGS[kind], "items": _items(list(value), path, take, depth)}
    if kind.__module__ == "numpy":
        return _numpy(value, path, take, depth)
    raise CheckpointError(f"{path or 'the state'}: a checkpoint cannot hold {kind.__module__}.{kind.__qualname__}; {_ADVICE}")


_FOREIGN_BYTES = "a checkpoint cannot hold a NumPy array of another byte order; save array.astype(array.dtype.newbyteorder('='))"
_ADVICE = "give it the methods state_dict and load_state_dict, or leave it out"


def _items(values: list[Any], path: str, take: Take, depth: int) -> list[Node]:
    if all(type(value) in PLAIN for value in values):
        return list(values)
    return [to_node(value, join(path, at), take, depth + 1) for at, value in enumerate(values)]


def _mapping(value: Mapping[Any, Any], path: str, take: Take, depth: int) -> Node:
    kind = type(value).__name__ if type(value) in (OrderedDict, Counter) else "dict"
    items = [(key, to_node(each, join(path, key), take, depth + 1)) for key, each in value.items()]
    if kind == "dict" and TAG not in value and all(type(key) is str for key, _ in items):
        return dict(items)
    return {TAG: "dict", "type": kind, "items": [[to_node(key, path, _no_tensor, depth + 1), node] for key, node in items]}


def _no_tensor(path: str, _: Tensor) -> None:
    raise CheckpointError(f"{path}: a tensor is the key of a dict; a checkpoint cannot hold that")


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


_SPELLED: dict[type, tuple[str, Callable[[Any], str]]] = {  # types whose values a text can hold: the tag, and what makes the text
    bytes: ("bytes", _base64),
    bytearray: ("bytes", _base64),
    float: ("float", str),  # infinite, or no number
    complex: ("complex", str),
    torch.dtype: ("dtype", lambda value: str(value).removeprefix("torch.")),
    torch.device: ("device", str),
}


def _numpy(value: Any, path: str, take: Take, depth: int) -> Node:
    """Return the node of an array, whose memory becomes a tensor's, or of a scalar, which becomes Python's."""
    try:
        if type(value).__name__ == "ndarray":
            if not value.dtype.isnative:
                raise CheckpointError(f"{path}: {_FOREIGN_BYTES}")
            take(path, torch.from_numpy(value if value.flags.writeable and value.flags.c_contiguous else value.copy("C")))
            return ARRAY
        plain = value.item()
    except (AttributeError, TypeError) as error:
        raise CheckpointError(f"{path}: a checkpoint cannot hold this NumPy value: {clip(str(error))}") from None
    if type(plain) is type(value):
        raise CheckpointError(f"{path}: a checkpoint cannot hold numpy.{type(value).__name__}")
    return to_node(plain, path, take, depth)


# -- to values ------------------------------------------------------------------------------------------------------------


def to_value(node: Node, path: str, tensor: Callable[[str], Any]) -> Any:
    """Return the value that ``node`` stands for; the tensors come from ``tensor``, by name."""
    if type(node) is list:
        return [to_value(each, join(path, at), tensor) for at, each in enumerate(node)] if not _is_plain(node) else list(node)
    if not isinstance(node, dict):
        return node
    tag = node.get(TAG)
    if tag is None:
        return {key: to_value(each, join(path, key), tensor) for key, each in node.items()}
    if tag == "tensor":
        return tensor(path)
    if tag == "array":
        return tensor(path).cpu().numpy()
    if tag == "dict":
        pairs = ((to_value(key, path, tensor), each) for key, each in node["items"])
        return _MAPPINGS[node["type"]]({key: to_value(each, join(path, key), tensor) for key, each in pairs})
    if tag == "module":
        return to_value(node["items"], path, tensor)
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](to_value(node["items"], path, tensor))
    if tag == "per_rank":
        raise CheckpointError(f"{clip(path)}: the checkpoint has a value per rank here; wrap this one in PerRank as well")
    return _SIMPLE[tag](node["value"])


_SIMPLE: dict[str, Callable[[str], Any]] = {
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "float": float,
    "complex": complex,
    "dtype": lambda text: DTYPES[text],
    "device": lambda text: torch.device(text),
}


def _is_plain(nodes: list[Node]) -> bool:
    return all(type(node) in PLAIN or type(node) is float for node in nodes)


# -- as bytes -------------------------------------------------------------------------------------------------------------


class Fixed(dict[str, Node]):
    """A node that never changes, so that its JSON is written once: the places of a module's or an optimizer's thousands of tensors."""

    json: str = ""


def encode_values(tree: Node) -> bytes:
    """Return ``tree`` as the bytes of values.json."""
    try:
        return _spell(tree).encode("ascii")
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the state cannot be written as JSON: {clip(str(error))}") from None


def _spell(node: Node) -> str:
    if type(node) is dict and any(isinstance(each, dict) for each in node.values()):
        return "{" + ",".join([f"{json.dumps(key)}:{_spell(each)}" for key, each in node.items()]) + "}"
    if isinstance(node, Fixed):
        node.json = node.json or json.dumps(node, separators=(",", ":"), allow_nan=False)
        return node.json
    return json.dumps(node, separators=(",", ":"), allow_nan=False)


def decode_values(data: bytes) -> dict[str, Node]:
    """Return the tree in ``data``, whose every tag can be read. Raises ``CheckpointError``."""
    tree = parse(data, MAX_BYTES)
    try:
        check_node(tree, 0)
    except (LookupError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"values.json does not hold a tree of values: {clip(f'{type(error).__name__}: {error}')}") from None
    return tree


def check_node(node: Node, depth: int = 0) -> None:
    """Raise an error where ``node`` has a tag that cannot be read."""
    if type(node) in PLAIN or type(node) is float:
        return
    if depth > 4 * MAX_DEPTH:  # a dict with tags has four levels in JSON: object, list, pair, value
        raise ValueError("it is too deep")
    if type(node) is list:
        for each in node:
            check_node(each, depth + 1)
        return
    tag = node.get(TAG)
    if tag is None:
        for each in node.values():
            check_node(each, depth + 1)
    elif tag not in ("tensor", "array", "per_rank"):
        _check_tagged(tag, node, depth)


def _check_tagged(tag: str, node: dict[str, Any], depth: int) -> None:
    if tag in _SIMPLE:
        _SIMPLE[tag](_text(node["value"]))
        return
    items = node["items"]
    if tag == "module":
        versions = node["versions"]
        if type(items) is not dict or type(versions) is not dict or not all(type(version) is int for version in versions.values()):
            raise TypeError("a module has no items, or no versions")
    elif type(items) is not list:
        raise TypeError("items are not a list")
    elif tag == "dict":
        if node["type"] not in _MAPPINGS or not all(type(pair) is list and len(pair) == 2 for pair in items):
            raise TypeError("a dict is not made of pairs")
        {hash(to_value(key, "", _no_key)) for key, _ in items}
    elif tag in ("set", "frozenset"):
        {hash(to_value(item, "", _no_key)) for item in items}
    elif tag == "size":
        torch.Size(items)
    elif tag != "tuple":
        raise TypeError(f"the tag {tag!r} is unknown")
    check_node(items, depth + 1)


def _text(value: object) -> str:
    if type(value) is not str:
        raise TypeError("a value is not a text")
    return value


def _no_key(_: str) -> Any:
    raise TypeError("a tensor is a key")


# -- its leaves, as torch.distributed.checkpoint sees them ------------------------------------------------------------------


def leaves(node: Node, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Node]]:
    """Yield (path, node) of each tensor and each value, as ``torch.distributed.checkpoint`` names them: lists are one value if plain.

    A value per rank has no leaf.
    """
    children = _children(node)
    if children is not None:
        for key, child in children:
            yield from leaves(child, (*path, key))
    elif node != PER_RANK:
        yield path, node


def _children(node: Node) -> list[tuple[str | int, Node]] | None:
    """Return what ``torch.distributed.checkpoint`` takes apart, by key; None for a leaf."""
    if type(node) is list:
        return list(enumerate(node)) if _is_taken_apart(node) else None
    if not isinstance(node, dict):
        return None
    tag = node.get(TAG)
    if tag is None:
        return list(node.items())
    if tag == "module":
        return list(node["items"].items())
    if tag == "dict":
        return [(str(to_value(key, "", _no_key)), child) for key, child in node["items"]]
    return list(enumerate(node["items"])) if tag == "tuple" and _has_tensor(node["items"]) else None


def _is_taken_apart(nodes: list[Node]) -> bool:
    """Return whether a list has tensors, or dicts that are taken apart as well."""
    return any(
        isinstance(node, (dict, list))
        and (_has_tensor(node) or (_children(node) is not None if isinstance(node, dict) else _is_taken_apart(node)))
        for node in nodes
    )


def _has_tensor(node: Node) -> bool:
    if type(node) is list:
        return any(map(_has_tensor, node))
    if not isinstance(node, dict):
        return False
    return is_tensor(node) or any(map(_has_tensor, node.values()))

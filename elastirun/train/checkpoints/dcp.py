"""The form of ``torch.distributed.checkpoint`` (DCP): what it needs beside our files to read them, and folders that it wrote.

Our own checkpoints are never read this way. The description of a foreign folder, ``.metadata``, is a pickle. It is read by an unpickler
that knows the names of a few classes, imports nothing, calls nothing of torch, and puts plain records in their place: see
docs/decisions/0017.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from elastirun.checkpoint.record import clip, is_file_name, number
from elastirun.checkpoint.tensors import MAX_DIMENSIONS, Box, Chunk, SavedTensor, check_chunks, volume
from elastirun.errors import CheckpointError
from elastirun.train.checkpoints.reading import Open, TorchSaved, check_targets, copy_pairs, files_in
from elastirun.train.state.layout import Plan
from elastirun.train.state.loading import PREFIXES
from elastirun.train.state.torch_zip import shell
from elastirun.train.state.values import DTYPES, MAX_DEPTH, PLAIN, TAG, Fixed, Node, is_tensor, items_of, join, leaves, to_node, to_value
from elastirun.train.torch_private import private

METADATA, VALUES = ".metadata", "values.distcp"  # the names of the files
MAX_METADATA = 256 << 20  # bytes: hundreds of thousands of tensors
SLOT = 64  # bytes; values begin at multiples of it, and may grow up to the next one
SPARE = 16  # bytes by which a value can grow at least


class DcpFiles:
    """Makes the files that DCP needs beside those of ``plan``. Keeps what is the same in each save."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._values: dict[str, tuple[str, bytes]] = {}  # name -> (the value in the last save as JSON, its bytes)
        self._slots: dict[str, tuple[int, int]] = {}  # name -> (offset, size)
        self._metadata = b""

    def encode(self, tree: Mapping[str, Node]) -> dict[str, bytes]:
        """Return ``.metadata`` and ``values.distcp`` for the plain values in ``tree``: the content by the file's name."""
        last, self._values = self._values, {}
        for path, node in value_leaves(tree):
            name, text = ".".join(map(str, path)), json.dumps(node)
            known = last.get(name)
            self._values[name] = known if known is not None and known[0] == text else (text, _spell(node))
        fits = list(self._slots) == list(self._values) and all(len(d) <= self._slots[name][1] for name, (_, d) in self._values.items())
        if not fits or not self._metadata:
            self._place_values(tree)
        values = b"".join(data.ljust(self._slots[name][1], b"\0") for name, (_, data) in self._values.items())
        return {METADATA: self._metadata, VALUES: values}

    def _place_values(self, tree: Mapping[str, Node]) -> None:
        """Choose where the values stand, and write the description."""
        at = 0
        self._slots = {}
        for name, (_, data) in self._values.items():
            size = -(-(len(data) + SPARE) // SLOT) * SLOT
            self._slots[name] = (at, size)
            at += size
        self._metadata = _metadata(self._plan, tree, self._slots)


def value_leaves(tree: Node) -> Iterator[tuple[tuple[str | int, ...], Node]]:
    """Yield (path, node) of the leaves that are no tensors."""
    if isinstance(tree, dict) and TAG not in tree and not isinstance(tree, Fixed):
        for key, each in tree.items():
            yield from (((key, *path), node) for path, node in value_leaves(each))
    elif not isinstance(tree, Fixed):
        yield from ((path, node) for path, node in leaves(tree) if not is_tensor(node))


def _spell(node: Node) -> bytes:
    """Return a value as ``torch.save`` writes it: in the old form, to which bytes can be appended."""
    file = io.BytesIO()
    torch.save(to_value(node, "", _no_tensor), file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def _no_tensor(name: str) -> Any:
    raise CheckpointError(f"{name} is a tensor among plain values")


def _metadata(plan: Plan, tree: Mapping[str, Node], slots: Mapping[str, tuple[int, int]]) -> bytes:
    from torch.distributed.checkpoint import metadata as theirs

    place_of = private("torch.distributed.checkpoint.filesystem", "_StorageInfo")
    paths: dict[str, tuple[str | int, ...]] = {".".join(map(str, path)): path for path, _ in leaves(tree)}
    described: dict[str, Any] = {name: theirs.BytesStorageMetadata() for name in slots}
    stored = {theirs.MetadataIndex(name): place_of(VALUES, *place) for name, place in slots.items()}
    for name, chunks in plan.chunks().items():
        dtype, shape = plan.tensors[name]
        boxes = [theirs.ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for _, chunk in chunks]
        properties = theirs.TensorProperties(dtype=DTYPES[dtype])
        described[name] = theirs.TensorStorageMetadata(properties, torch.Size(shape), boxes)
        for at, (file, chunk) in enumerate(chunks):
            stored[theirs.MetadataIndex(name, chunk.offsets, at)] = place_of(file.name, chunk.position, chunk.length)
    whole = theirs.Metadata(described, {name: paths.get(name, (name,)) for name in described}, stored, theirs.StorageMeta())
    if any(field.name == "version" for field in dataclasses.fields(whole)):
        whole.version = "1.0.0"
    return pickle.dumps(whole, protocol=4)


# -- what others wrote ----------------------------------------------------------------------------------------------------


class Foreign:
    """A checkpoint that was written by ``torch.distributed.checkpoint`` or ``torch.save``: the same as ours, to be read once.

    ``tree``, ``tensors``: as in values.json and tensors.json. ``skipped``: the paths of values that are left out, because reading them
    could run code.
    """

    def __init__(self, folder: Open | None = None) -> None:
        self.tree: dict[str, Node] = {}
        self.tensors: dict[str, TorchSaved] = {}
        self.skipped: list[str] = []
        self._memory: dict[str, Tensor] = {}  # tensors that are in memory, or mapped
        self._folder = folder  # has the chunks of the tensors that are not in memory
        self._whole: Node = None  # the tree as one node, with what a tree at the top cannot say

    def fill(self, targets: Mapping[str, Tensor], strict: bool = True) -> None:
        """Copy the tensors into ``targets``, as ``reading.fill`` does."""
        check_targets(self.tensors, targets, strict)
        with torch.no_grad():
            for to, source in copy_pairs(self.tensors, self._read, targets):
                to.copy_(source)

    def set_tree(self, value: Mapping[Any, Any]) -> None:
        """Take the tree and the tensors from ``value``."""
        self._whole = self.add_value("", value)
        self.tree = {str(key): each for key, each in items_of(self._whole).items()}

    def add_value(self, name: str, value: Any) -> Node:
        """Return the node of ``value``, whose tensors are kept."""
        return _node(value, name, self._add_tensor)

    def _add_tensor(self, name: str, tensor: Tensor) -> None:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
            raise CheckpointError(f"{clip(name)}: tensors of this kind cannot be read: {type(tensor).__name__}, {tensor.layout}")
        shape = tuple(tensor.shape)
        key = f"memory:{name}"  # which is the name of no file
        self._memory[key] = tensor.detach()
        self.tensors[name] = SavedTensor(tensor.dtype, shape, (Chunk(Box((0,) * len(shape), shape), key, 0, 0),))

    def under(self, key: str) -> None:
        """Put everything below ``key``."""
        self.tree = {key: self._whole if self._whole is not None else self.tree}
        self.tensors = {join(key, name): tensor for name, tensor in self.tensors.items()}

    def _read(self, saved: TorchSaved, chunk: Chunk) -> Tensor:
        if chunk.file in self._memory:
            return self._memory[chunk.file]
        assert self._folder is not None
        data = _slice(self._folder, chunk.file, chunk.at, chunk.nbytes)
        around = shell(str(saved.dtype).removeprefix("torch."), chunk.box.sizes)
        start = len(around.before)
        if around.size == len(data) and data[:start] == around.before:  # written as this version of torch does: no need to copy
            return torch.frombuffer(data, dtype=saved.dtype, count=volume(chunk.box.sizes), offset=start).view(chunk.box.sizes)
        loaded = _load(data, f"{chunk.file}, byte {chunk.at}")
        if not isinstance(loaded, Tensor) or loaded.dtype != saved.dtype or tuple(loaded.shape) != chunk.box.sizes:
            raise CheckpointError(f"{chunk.file}, byte {chunk.at}: here should be a tensor of {saved.dtype} {list(chunk.box.sizes)}")
        return loaded


def open_foreign(path: str | os.PathLike[str], state: Mapping[str, Any] | None = None) -> Foreign:
    """Return what ``path`` holds: a folder written by ``torch.distributed.checkpoint``, or a file written by ``torch.save``.

    ``state``: what is to be restored. If the file is the state dict of one module only, it belongs to the only module in ``state``.
    Raises ``CheckpointError``, with the path and the reason.
    """
    try:
        found = _open_folder(Path(path)) if os.path.isdir(path) else _open_file(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    modules = [key for key, value in (state or {}).items() if isinstance(value, nn.Module)]
    if state is not None and len(modules) == 1 and not state.keys() & found.tree.keys():
        found.under(modules[0])
    return found


def _open_file(path: str | os.PathLike[str]) -> Foreign:
    found = Foreign()
    with open(path, "rb") as file:
        if file.read(1) not in (b"P", b"\x80"):  # a zip archive; a pickle, which is torch's old form
            raise CheckpointError("the file is none that torch.save has written: give one, or the folder of a checkpoint")
    value = _load(path, "the file")
    if not isinstance(value, Mapping):
        raise CheckpointError(f"the file holds {type(value).__name__}, and a dict was expected")
    found.set_tree(value)
    return found


def _load(source: Any, where: str) -> Any:
    """Return what ``torch.load`` reads without running code. ``source``: a path, or a view of memory."""
    try:
        if isinstance(source, memoryview):
            return torch.load(io.BytesIO(source), map_location="cpu", weights_only=True)
        try:
            return torch.load(source, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            return torch.load(source, map_location="cpu", weights_only=True)  # the old form of torch.save cannot be mapped
    except OSError:
        raise
    except Exception as error:  # whatever damaged bytes lead to
        text = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{where} cannot be read by torch.load(weights_only=True): {type(error).__name__}: {clip(text, 200)}"
        ) from None


def _node(value: Any, name: str, take: Any) -> Node:
    """Return the node of ``value``; state dicts of modules keep the versions of their layers."""
    layers = getattr(value, "_metadata", None)
    if isinstance(value, Mapping) and all(type(key) is str and key != TAG for key in value):
        items = {key: _node(each, join(name, key), take) for key, each in value.items()}
        if not isinstance(layers, Mapping):
            return items
        found = {key: entry.get("version") for key, entry in layers.items() if isinstance(entry, Mapping)}
        versions = {key: version for key, version in found.items() if type(key) is str and type(version) is int and version != 1}
        for prefix in PREFIXES:
            versions |= {key.removeprefix(prefix): version for key, version in versions.items()}
        return {TAG: "module", "versions": versions, "items": items}
    return to_node(value, name, take)


# -- folders --------------------------------------------------------------------------------------------------------------


def _open_folder(path: Path) -> Foreign:
    if not (path / METADATA).exists():
        raise CheckpointError(f"the folder has no {METADATA}: it is no checkpoint of torch.distributed.checkpoint, or was not completed")
    with open(path / METADATA, "rb") as file:
        data = file.read(MAX_METADATA + 1)
    folder, tree = files_in(path), _Branch()
    found = Foreign(folder)
    try:
        described, paths, stored = _parts(_unpickle(data))
        for name, one in described.items():
            place = _checked_path(name, paths.get(name, (name,)))
            if one.kind == "TensorStorageMetadata":
                found.tensors[name] = _tensor(name, one, stored)
                node: Node = {TAG: "tensor"}
            else:
                try:
                    node = found.add_value(name, _load(_slice(folder, *stored[name, None]), name))
                except CheckpointError:
                    found.skipped.append(name)
                    continue
            _put(tree, place, node)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{METADATA} does not describe a checkpoint: {type(error).__name__}: {clip(str(error))}") from None
    found.tree = {key: _with_groups(_with_lists(node), key, found.tensors) for key, node in tree.items()}
    return found


def _parts(whole: Any) -> tuple[dict[str, Any], dict[str, Any], dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]]:
    """Return the tensors and values by name, their paths, and where their data is by (name, offsets)."""
    fields = whole.state
    stored = {}
    for index, info in fields["storage_data"].items():
        if info.state.get("transform_descriptors"):
            raise CheckpointError("its files are compressed; they can be read by torch.distributed.checkpoint only")
        name, offset = index.state["fqn"], index.state.get("offset")
        if type(name) is not str:
            raise TypeError(f"the name of a tensor is a {type(name).__name__}")
        place = _file_name(info.state["relative_path"]), _number(info.state["offset"]), _number(info.state["length"])
        stored[name, None if offset is None else _sizes(offset)] = place
    return fields["state_dict_metadata"], fields.get("planner_data") or {}, stored


def _file_name(name: Any) -> str:
    if type(name) is not str or not is_file_name(name):
        raise CheckpointError(f"{_shown(name)} is not the name of a file of a checkpoint")
    return name


def _tensor(name: str, described: Any, stored: Mapping[tuple[str, Any], tuple[str, int, int]]) -> TorchSaved:
    fields = described.state
    shape, properties = _sizes(fields["size"]), fields["properties"].state
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{clip(name)} has no type")
    chunks = []
    for one in fields["chunks"]:
        box = Box(_sizes(one.state["offsets"]), _sizes(one.state["sizes"]))
        if volume(box.sizes):
            chunks.append(Chunk(box, *stored[name, box.offsets]))
    check_chunks(shape, [chunk.box for chunk in chunks])
    return SavedTensor(dtype, shape, tuple(chunks))


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, (tuple, list)) or len(values) > MAX_DIMENSIONS:
        raise TypeError(f"{MAX_DIMENSIONS} sizes at most were expected, not a {type(values).__name__}")
    return tuple(map(_number, values))


def _number(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"a number was expected, not a {type(value).__name__}")
    return number(value)


def _shown(value: Any) -> str:
    """Return a value from a pickle for a message. Of a container its type: a small pickle can hold one whose text has no end."""
    return clip(repr(value)) if type(value) in PLAIN else f"a {type(value).__name__}"


def _slice(folder: Open, file: str, offset: int, length: int) -> memoryview:
    try:
        data = folder(file)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from None
    if offset + length > len(data):
        raise CheckpointError(f"{file} has {len(data)} bytes, and data should end at {offset + length}: the file is not whole")
    return data[offset : offset + length]


def _checked_path(name: Any, path: Any) -> tuple[str | int, ...]:
    """Return the path of a tensor or value in the tree, whose parts joined with dots are its name."""
    good = type(name) is str and isinstance(path, (tuple, list)) and path and all(type(key) in (str, int) and key != TAG for key in path)
    if not good or len(path) > MAX_DEPTH or ".".join(map(str, path)) != name or type(path[0]) is not str:
        raise ValueError(f"{_shown(name)} has a path that does not lead to it, or is no path")
    return tuple(path)


class _Branch(dict[Any, Any]):
    """A dict or list of the tree that is being built."""


def _put(tree: _Branch, path: Sequence[str | int], node: Node) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, _Branch())
        if not isinstance(tree, _Branch):
            raise ValueError(f"{clip(repr(path))} is below a value")
    if path[-1] in tree:
        raise ValueError(f"{clip(repr(path))} is there twice")
    tree[path[-1]] = node


def _with_lists(node: Node) -> Node:
    """Return ``node`` with lists where the keys are numbers."""
    if not isinstance(node, _Branch):
        return node
    nodes = {key: _with_lists(each) for key, each in node.items()}
    if nodes and all(type(key) is int for key in nodes):
        return [nodes[key] for key in sorted(nodes)]
    return {str(key): each for key, each in nodes.items()}


def _with_groups(node: Node, path: str, tensors: dict[str, TorchSaved]) -> Node:
    """Return ``node`` with optimizers as other state dicts have them, where DCP's option ``flatten_optimizer_state_dict`` has changed that.

    It puts the options of each parameter under ``param_groups.<name>.<option>``, and its state under ``state.<name>.<key>``.
    """
    if not isinstance(node, dict) or TAG in node:
        return node
    if not all(key.startswith(("state.", "param_groups.")) for key in node) or not any(key.startswith("param_groups.") for key in node):
        return {key: _with_groups(each, join(path, key), tensors) for key, each in node.items()}
    parts: dict[str, dict[str, dict[str, Node]]] = {"state": {}, "param_groups": {}}
    for key, each in node.items():
        part, _, rest = key.partition(".")
        name, _, option = rest.rpartition(".")
        parts[part].setdefault(name, {})[option] = each
        if part == "param_groups" and join(path, key) in tensors:
            tensors[f"{path}.param_groups.{len(parts[part]) - 1}.{option}"] = tensors.pop(join(path, key))
    return {"state": parts["state"], "param_groups": [{"params": [name], **options} for name, options in parts["param_groups"].items()]}


# -- the description of a folder, unpickled ---------------------------------------------------------------------------------


class Record:
    """An object in a pickle: the name of its class, and its state. No code of the class is run, nor is the class imported."""

    kind = ""
    state: Any = None

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


KINDS = {  # the classes and functions that DCP's description is made of
    "Metadata",
    "MetadataIndex",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
    "MEM_FORMAT_ENCODING",
    "_StorageInfo",
    "_get_layout",
    "PosixPath",
}
MODULES = ("torch.distributed.", "torch.serialization", "pathlib")


class _Unpickler(pickle.Unpickler):
    """Reads a pickle of a few known classes as records, and nothing else.

    What ``find_class`` returns can be called with any arguments, and attributes can be set on it. So each pickle gets objects of its own,
    whose calls only make a record, and copy nothing large. See docs/decisions/0017 before you add a name.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for ``module.name``. Raises ``CheckpointError`` for names that are not on the list."""
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if (module, name) == ("torch", "Size"):
            return lambda *args: _sizes(*args)
        if (module, name) == ("collections", "OrderedDict"):
            return lambda *args: _empty(*args)
        if name in KINDS and module.startswith(MODULES):
            return type(name, (Record,), {"kind": name})
        raise CheckpointError(
            f"{METADATA} refers to {clip(module)}.{clip(name)}, which does not belong into it: the file is not to be trusted"
        )

    def persistent_load(self, pid: Any) -> Any:
        """Refuse references to what is outside of the pickle."""
        raise CheckpointError(f"{METADATA} refers to something outside of it")


def _empty() -> OrderedDict[Any, Any]:
    """Return a dict into which the pickle puts its items one by one. A call with items could copy the same ones again and again."""
    return OrderedDict()


def _unpickle(data: bytes) -> Any:
    if len(data) > MAX_METADATA:
        raise CheckpointError(f"{METADATA} has more than {MAX_METADATA} bytes")
    try:
        whole = _Unpickler(io.BytesIO(data)).load()
    except CheckpointError:
        raise
    except Exception as error:  # whatever damaged bytes lead to
        raise CheckpointError(f"{METADATA} is damaged: {type(error).__name__}: {clip(str(error))}") from None
    if getattr(whole, "kind", "") != "Metadata":
        raise CheckpointError(f"{METADATA} does not describe a checkpoint")
    return whole

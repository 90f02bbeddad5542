"""Fills tensors from the files of a checkpoint, at any number of ranks: each rank reads the chunks that overlap with its own shards.

The files are mapped into memory, so that each byte is copied once, to where it is needed. What tensors.json says is checked against the
sizes of the files before anything is read; nothing is unpickled.
"""

from __future__ import annotations

import functools
import mmap
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from elastirun.checkpoint.record import clip, is_file_name, parse
from elastirun.errors import CheckpointError

from .boxes import Box, common, overlapping, volume, within
from .copying import copy_all
from .garbage import no_collection
from .layout import local_box
from .sharded import is_sharded
from .values import DTYPES

MAX_BYTES = 1 << 30  # of tensors.json
MAX_DIMENSIONS = 64  # as torch
MOST = 1 << 56  # elements, bytes, offsets: far beyond what exists, and products of two still fit into 128 bits
MAX_CHUNKS = 1 << 16  # of one tensor: as many ranks


@dataclass(frozen=True)
class SavedChunk:
    """A box of a tensor: ``nbytes`` bytes from ``at`` on in ``file``."""

    box: Box
    file: str
    at: int
    nbytes: int


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in a checkpoint. The chunks are the whole of it, and do not overlap."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[SavedChunk, ...]


class Sources(Protocol):
    """The files of a checkpoint, wherever they are."""

    def open(self, file_name: str) -> memoryview:
        """Return the content of a file. Raises OSError or ``CheckpointError``."""
        ...


class Folder:
    """The files in a directory, mapped into memory. Views of them keep the memory; nothing has to be closed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._files: dict[str, memoryview] = {}

    def open(self, file_name: str) -> memoryview:
        """Return the content of a file. Raises ``CheckpointError`` for names of other directories, OSError."""
        if not is_file_name(file_name):
            raise CheckpointError(f"{clip(repr(file_name))} is not the name of a file of a checkpoint")
        if file_name not in self._files:
            self._files[file_name] = map_file(self._path / file_name)
        return self._files[file_name]


def map_file(path: str | os.PathLike[str]) -> memoryview:
    """Return the content of a file. It can be written to, which changes nothing but this process's memory. Raises OSError."""
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else b"")


def decode_tensors(data: bytes) -> dict[str, SavedTensor]:
    """Return the tensors by name that tensors.json lists. Raises ``CheckpointError`` with what is wrong."""
    found = {}
    with no_collection():
        for name, plain in parse(data, MAX_BYTES).items():
            try:
                found[name] = _tensor(plain)
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(f"tensors.json: {clip(name)}: {clip(str(error))}") from None
    return found


def _tensor(plain: Any) -> SavedTensor:
    dtype, shape = DTYPES[plain["dtype"]], _numbers(plain["shape"])
    if len(plain["chunks"]) > MAX_CHUNKS or len(shape) > MAX_DIMENSIONS or volume(shape) > MOST:
        raise ValueError("it is too large")
    chunks = tuple([_chunk(each, dtype, shape) for each in plain["chunks"]])
    if len(chunks) != 1 or chunks[0].box.sizes != shape:
        check_chunks(shape, [chunk.box for chunk in chunks])
    return SavedTensor(dtype, shape, chunks)


def _chunk(plain: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> SavedChunk:
    box, file = Box(_numbers(plain["offsets"]), _numbers(plain["sizes"])), plain["file"]
    at, nbytes = _numbers([plain["at"], plain["nbytes"]])
    if type(file) is not str or not is_file_name(file):
        raise ValueError(f"{clip(repr(file))} is not the name of a file of a checkpoint")
    if not within(box, shape) or nbytes != volume(box.sizes) * dtype.itemsize:
        raise ValueError(f"a chunk of {nbytes} bytes at {list(box.offsets)} with sizes {list(box.sizes)} is no part of {list(shape)}")
    return SavedChunk(box, file, at, nbytes)


def _numbers(values: Any) -> tuple[int, ...]:
    if type(values) is not list or (values and not (_INTEGERS.issuperset(map(type, values)) and 0 <= min(values) and max(values) <= MOST)):
        raise ValueError(f"{clip(repr(values))} is not a list of sizes")
    return tuple(values)


_INTEGERS = frozenset({int})


def check_chunks(shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Raise ValueError unless ``boxes`` are the whole of a tensor with ``shape``, without overlaps."""
    if sum(volume(box.sizes) for box in boxes) != volume(shape) or (len(boxes) > 1 and overlapping(boxes)):
        raise ValueError(f"its chunks are not the whole of {list(shape)}, or overlap")


# -- fill -----------------------------------------------------------------------------------------------------------------

Read = Callable[[SavedTensor, SavedChunk], Tensor]


def fill(saved: Mapping[str, SavedTensor], sources: Sources, targets: Mapping[str, Tensor], strict: bool = True) -> list[str]:
    """Copy the checkpoint's tensors into ``targets``, each into its own or, of a DTensor, into the shard of this rank.

    Floating point numbers are converted to the target's width. Raises ``CheckpointError``, before anything is changed, for other types,
    other shapes and missing tensors, with the name, and for data that is not in its file. Returns the names of targets that the
    checkpoint does not have, where ``strict`` is false; they stay as they are.
    """
    missing = check_targets(saved, targets, strict)
    with torch.no_grad(), no_collection():
        pairs = list(copies(saved, _Views(sources), targets))
        copy_all([to for to, _ in pairs], [source for _, source in pairs])
    return missing


def check_targets(saved: Mapping[str, SavedTensor], targets: Mapping[str, Tensor], strict: bool) -> list[str]:
    """Return the names of the targets that the checkpoint does not have. Raises ``CheckpointError`` for targets that do not fit."""
    missing = [name for name in targets if name not in saved]
    if missing and strict:
        raise CheckpointError(f"the checkpoint has no tensor {clip(missing[0])}{f', and {len(missing) - 1} more' if missing[1:] else ''}")
    for name, target in targets.items():
        if name in saved:
            _check_target(name, saved[name], target)
    return missing


def copies(saved: Mapping[str, SavedTensor], read: Read, targets: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (part of a target, what is to be copied there). ``read`` gives the content of a chunk."""
    for name, target in targets.items():
        if name not in saved:
            continue
        chunks = saved[name].chunks
        if len(chunks) == 1 and not is_sharded(target):  # nearly all of a model's thousands
            yield target, read(saved[name], chunks[0])
            continue
        box, local = local_box(name, target)
        for chunk in chunks if volume(box.sizes) else ():
            both = box if chunk.box == box else common(box, chunk.box)
            if both is not None:
                yield _part(local, box, both), _part(read(saved[name], chunk), chunk.box, both)


def _check_target(name: str, saved: SavedTensor, target: Tensor) -> None:
    if tuple(target.shape) != saved.shape:
        raise CheckpointError(f"{clip(name)} has the shape {list(saved.shape)} in the checkpoint, and {list(target.shape)} here")
    if target.dtype != saved.dtype and not (target.dtype.is_floating_point and saved.dtype.is_floating_point):
        raise CheckpointError(f"{clip(name)} is {saved.dtype} in the checkpoint, and {target.dtype} here")


def _part(tensor: Tensor, whole: Box, part: Box) -> Tensor:
    """Return the ``part`` of ``tensor``, which is the box ``whole``."""
    if part == whole:
        return tensor
    for dim, (at, size, first, all_of_it) in enumerate(zip(part.offsets, part.sizes, whole.offsets, whole.sizes, strict=True)):
        if size != all_of_it:
            tensor = tensor.narrow(dim, at - first, size)
    return tensor


class _Views:
    """Chunks as views of the files' memory."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._files: dict[str, memoryview] = {}
        self._whole: dict[tuple[str, torch.dtype], Tensor] = {}

    def __call__(self, saved: SavedTensor, chunk: SavedChunk) -> Tensor:
        if chunk.file not in self._files:
            self._files[chunk.file] = self._sources.open(chunk.file).cast("B")
        data, width = self._files[chunk.file], saved.dtype.itemsize
        if chunk.at + chunk.nbytes > len(data):
            end = chunk.at + chunk.nbytes
            raise CheckpointError(f"{chunk.file} has {len(data)} bytes, and a tensor's data should end at {end}: the file is not whole")
        if chunk.at % width:
            return _view(data, saved.dtype, chunk.nbytes // width, chunk.at).view(chunk.box.sizes)
        key = (chunk.file, saved.dtype)
        if key not in self._whole:
            self._whole[key] = _view(data, saved.dtype, len(data) // width, 0)
        return self._whole[key].as_strided(chunk.box.sizes, _strides(chunk.box.sizes), chunk.at // width)


def _view(data: memoryview, dtype: torch.dtype, count: int, at: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of memory that is not writable: it is only read
        return torch.frombuffer(data, dtype=dtype, count=count, offset=at)


@functools.lru_cache(maxsize=1024)
def _strides(sizes: tuple[int, ...]) -> list[int]:
    strides, stride = [], 1
    for size in reversed(sizes):
        strides.append(stride)
        stride *= size
    return strides[::-1]

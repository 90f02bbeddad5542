"""Fills tensors from the files of a checkpoint, at any number of ranks: each rank reads the chunks that overlap with its own shards.

The files are mapped into memory, so that each byte is copied once, to where it is needed. What tensors.json says is checked against the
sizes of the files before anything is read; nothing is unpickled.
"""

from __future__ import annotations

import functools
import mmap
import os
import warnings
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from elastirun.checkpoint.record import clip, is_file_name
from elastirun.checkpoint.tensors import TENSORS, Box, Chunk, SavedTensor, common, decode_tensors, volume
from elastirun.errors import CheckpointError
from elastirun.train.checkpoints.bulk_copy import copy_all
from elastirun.train.sharded import is_sharded
from elastirun.train.state.gc_pause import no_collection
from elastirun.train.state.layout import local_box
from elastirun.train.state.values import DTYPES

TorchSaved = SavedTensor[torch.dtype]


# Returns the content of the file of this name, wherever the files of a checkpoint are. Raises OSError or ``CheckpointError``.
Open = Callable[[str], memoryview]


def files_in(folder: str | os.PathLike[str]) -> Open:
    """Return a function that maps a file in ``folder`` into memory. Views keep the memory; nothing has to be closed.

    The memory can be written to, which changes nothing but this process's copy. Other folders' files are refused.
    """

    @functools.cache
    def content(name: str) -> memoryview:
        if not is_file_name(name):
            raise CheckpointError(f"{clip(repr(name))} is not the name of a file of a checkpoint")
        with open(os.path.join(folder, name), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else b"")

    return content


def tensors_in(data: bytes) -> dict[str, TorchSaved]:
    """Return the tensors by name that tensors.json lists. Raises ``CheckpointError`` with what is wrong."""
    try:
        with no_collection():
            return decode_tensors(data, DTYPES)
    except CheckpointError as error:
        raise CheckpointError(f"{TENSORS}: {error}") from None


# -- fill -----------------------------------------------------------------------------------------------------------------

ReadChunk = Callable[[TorchSaved, Chunk], Tensor]


def fill(saved: Mapping[str, TorchSaved], content: Open, targets: Mapping[str, Tensor], strict: bool = True) -> None:
    """Copy the checkpoint's tensors into ``targets``, each into its own or, of a DTensor, into the shard of this rank.

    Floating point numbers are converted to the target's width. Raises ``CheckpointError``, before anything is changed, for other types,
    other shapes and missing tensors, with the name, and for data that is not in its file. Where ``strict`` is false, targets that the
    checkpoint does not have stay as they are.
    """
    check_targets(saved, targets, strict)
    with torch.no_grad(), no_collection():
        pairs = list(copy_pairs(saved, _Views(content), targets))
        copy_all([to for to, _ in pairs], [source for _, source in pairs])


def check_targets(saved: Mapping[str, TorchSaved], targets: Mapping[str, Tensor], strict: bool) -> None:
    """Raise ``CheckpointError`` for targets that do not fit and, if ``strict``, for those that the checkpoint does not have."""
    missing = [name for name in targets if name not in saved]
    if missing and strict:
        raise CheckpointError(f"the checkpoint has no tensor {clip(missing[0])}{f', and {len(missing) - 1} more' if missing[1:] else ''}")
    for name, target in targets.items():
        if name in saved:
            _check_target(name, saved[name], target)


def copy_pairs(saved: Mapping[str, TorchSaved], read: ReadChunk, targets: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
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


def _check_target(name: str, saved: TorchSaved, target: Tensor) -> None:
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

    def __init__(self, content: Open) -> None:
        self._content = content
        self._files: dict[str, memoryview] = {}
        self._whole: dict[tuple[str, torch.dtype], Tensor] = {}

    def __call__(self, saved: TorchSaved, chunk: Chunk) -> Tensor:
        if chunk.file not in self._files:
            self._files[chunk.file] = self._content(chunk.file).cast("B")
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
    return [volume(sizes[dim + 1 :]) for dim in range(len(sizes))]

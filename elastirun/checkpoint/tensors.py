"""The list of a checkpoint's tensors and of the places of their bytes: ``tensors.json``. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elastirun.checkpoint.record import clip, is_file_name, number, parse
from elastirun.errors import CheckpointError

TENSORS, VALUES = "tensors.json", "values.json"  # the files' names within a checkpoint
MAX_BYTES = 512 << 20  # of either of them
MAX_DIMENSIONS = 64  # torch's own limit


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, row by row: ``nbytes`` bytes at ``at`` in ``file``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    at: int
    nbytes: int


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in a checkpoint. ``dtype`` is torch's name of it: "float32"."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def decode_tensors(data: bytes) -> dict[str, SavedTensor]:
    """Return the tensors by name. Raises ``CheckpointError`` with what is wrong, in a few words."""
    found = {}
    for name, plain in parse(data, MAX_BYTES).items():
        try:
            found[name] = _tensor(plain)
        except (CheckpointError, KeyError, TypeError) as error:
            raise CheckpointError(f"its entry of the tensor {clip(name)} is wrong: {clip(str(error))}") from None
    return found


def assemble(tensor: SavedTensor, read: Callable[[str], memoryview]) -> bytearray:
    """Return the bytes of the whole tensor, row by row. ``read`` returns the content of a file. Raises ``CheckpointError``."""
    item = next((chunk.nbytes // math.prod(chunk.sizes) for chunk in tensor.chunks if chunk.nbytes), 0)
    whole = bytearray(item * math.prod(tensor.shape))
    for chunk in tensor.chunks:
        data = read(chunk.file)[chunk.at : chunk.at + chunk.nbytes]
        if len(data) != chunk.nbytes or chunk.nbytes != item * math.prod(chunk.sizes):
            raise CheckpointError(f"{chunk.file} does not hold the {chunk.nbytes} bytes at {chunk.at} that {TENSORS} names")
        _put(whole, tensor.shape, chunk, data, item)
    return whole


def _put(whole: bytearray, shape: tuple[int, ...], chunk: Chunk, data: memoryview, item: int) -> None:
    """Copy the box ``chunk`` to its place in ``whole``, in runs that are as long as possible."""
    outer = len(shape)  # dimensions whose rows are copied one by one; within the others the box has all of the tensor
    while outer and chunk.sizes[outer - 1 :] == shape[outer - 1 :]:
        outer -= 1
    inner = max(outer - 1, 0)
    run = item * math.prod(chunk.sizes[inner:])
    strides = [item * math.prod(shape[at + 1 :]) for at in range(len(shape))]
    first = sum(offset * stride for offset, stride in zip(chunk.offsets, strides, strict=True))
    for count, row in enumerate(itertools.product(*(range(size) for size in chunk.sizes[:inner])) if run else ()):
        at = first + sum(index * stride for index, stride in zip(row, strides, strict=False))
        whole[at : at + run] = data[count * run : (count + 1) * run]


def _tensor(plain: Mapping[str, Any]) -> SavedTensor:
    if not isinstance(plain["dtype"], str) or not plain["dtype"].isidentifier():
        raise CheckpointError("it has no type")
    shape = _numbers(plain["shape"])
    chunks = tuple(_chunk(chunk, shape) for chunk in plain["chunks"])
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise CheckpointError(f"its chunks are not the whole of its shape {list(shape)}")
    return SavedTensor(plain["dtype"], shape, chunks)


def _chunk(plain: Mapping[str, Any], shape: tuple[int, ...]) -> Chunk:
    offsets, sizes, file = _numbers(plain["offsets"]), _numbers(plain["sizes"]), plain["file"]
    inside = len(offsets) == len(sizes) == len(shape) and all(at + size <= end for at, size, end in zip(offsets, sizes, shape, strict=True))
    if not inside or not isinstance(file, str) or not is_file_name(file):
        raise CheckpointError("a chunk has no file, or is not within the tensor")
    return Chunk(offsets, sizes, file, number(plain["at"]), number(plain["nbytes"]))


def _numbers(plain: object) -> tuple[int, ...]:
    if not isinstance(plain, list) or len(plain) > MAX_DIMENSIONS:
        raise CheckpointError(f"a shape has {MAX_DIMENSIONS} numbers at most")
    return tuple(number(each) for each in plain)

"""The list of a checkpoint's tensors and of the places of their bytes: ``tensors.json``. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import add, sub
from typing import Any, Generic, NamedTuple, TypeVar

from elastirun.checkpoint.record import clip, is_file_name, parse
from elastirun.errors import CheckpointError

TENSORS, VALUES = "tensors.json", "values.json"  # the files' names within a checkpoint
MAX_BYTES = 512 << 20  # of either of them
MAX_DIMENSIONS = 64  # torch's own limit
MOST = 1 << 56  # elements, bytes, offsets: far beyond what exists, and products of two still fit into 128 bits
MAX_CHUNKS = 1 << 16  # of one tensor: as many ranks

T = TypeVar("T")


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, row by row: ``nbytes`` bytes from ``at`` on in ``file``."""

    box: Box
    file: str
    at: int
    nbytes: int


@dataclass(frozen=True)
class SavedTensor(Generic[T]):
    """A tensor in a checkpoint. The chunks are the whole of it, and do not overlap."""

    dtype: T
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class _Names(dict[str, str]):
    """Types by torch's names of them ("float32"), where torch is not at hand: the names themselves."""

    def __missing__(self, name: object) -> str:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError("it has no type")
        return name


NAMES: Mapping[str, str] = _Names()


def decode_tensors(data: bytes, dtypes: Mapping[str, T]) -> dict[str, SavedTensor[T]]:
    """Return the tensors by name. Raises ``CheckpointError`` with what is wrong, in a few words.

    ``dtypes``: types by their names: torch's, or ``NAMES``, where it is not known how many bytes an element has.
    """
    found = {}
    for name, plain in parse(data, MAX_BYTES).items():
        try:
            found[name] = _tensor(plain, dtypes)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"its entry of the tensor {clip(name)} is wrong: {clip(str(error))}") from None
    return found


def assemble(tensor: SavedTensor[Any], read: Callable[[str], memoryview]) -> bytearray:
    """Return the bytes of the whole tensor, row by row. ``read`` returns the content of a file. Raises ``CheckpointError``."""
    item = next((chunk.nbytes // volume(chunk.box.sizes) for chunk in tensor.chunks if chunk.nbytes), 0)
    whole = bytearray(item * volume(tensor.shape))
    for chunk in tensor.chunks:
        data = read(chunk.file)[chunk.at : chunk.at + chunk.nbytes]
        if len(data) != chunk.nbytes or chunk.nbytes != item * volume(chunk.box.sizes):
            raise CheckpointError(f"{chunk.file} does not hold the {chunk.nbytes} bytes at {chunk.at} that {TENSORS} names")
        _put(whole, tensor.shape, chunk.box, data, item)
    return whole


def _put(whole: bytearray, shape: tuple[int, ...], box: Box, data: memoryview, item: int) -> None:
    """Copy ``box`` to its place in ``whole``, in runs that are as long as possible."""
    outer = len(shape)  # dimensions whose rows are copied one by one; within the others the box has all of the tensor
    while outer and box.sizes[outer - 1 :] == shape[outer - 1 :]:
        outer -= 1
    inner = max(outer - 1, 0)
    run = item * volume(box.sizes[inner:])
    strides = [item * volume(shape[at + 1 :]) for at in range(len(shape))]
    first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    for count, row in enumerate(itertools.product(*(range(size) for size in box.sizes[:inner])) if run else ()):
        at = first + sum(index * stride for index, stride in zip(row, strides, strict=False))
        whole[at : at + run] = data[count * run : (count + 1) * run]


def _tensor(plain: Any, dtypes: Mapping[str, T]) -> SavedTensor[T]:
    dtype, shape = dtypes[plain["dtype"]], _numbers(plain["shape"])
    if len(plain["chunks"]) > MAX_CHUNKS or len(shape) > MAX_DIMENSIONS or volume(shape) > MOST:
        raise ValueError("it is too large")
    item = getattr(dtype, "itemsize", 0)
    chunks = tuple([_chunk(each, item, shape) for each in plain["chunks"]])
    if len(chunks) != 1 or chunks[0].box.sizes != shape:
        check_chunks(shape, [chunk.box for chunk in chunks])
    return SavedTensor(dtype, shape, chunks)


def _chunk(plain: Any, item: int, shape: tuple[int, ...]) -> Chunk:
    """Return a part of a tensor with ``shape``, of which an element has ``item`` bytes; 0: that is not known."""
    box, file = Box(_numbers(plain["offsets"]), _numbers(plain["sizes"])), plain["file"]
    at, nbytes = _numbers([plain["at"], plain["nbytes"]])
    if type(file) is not str or not is_file_name(file):
        raise ValueError(f"{clip(repr(file))} is not the name of a file of a checkpoint")
    if not within(box, shape) or (item and nbytes != volume(box.sizes) * item):
        raise ValueError(f"a chunk of {nbytes} bytes at {list(box.offsets)} with sizes {list(box.sizes)} is no part of {list(shape)}")
    return Chunk(box, file, at, nbytes)


def _numbers(values: Any) -> tuple[int, ...]:
    if type(values) is not list or (values and not (_INTEGERS.issuperset(map(type, values)) and 0 <= min(values) and max(values) <= MOST)):
        raise ValueError(f"{clip(repr(values))} is not a list of sizes")
    return tuple(values)


_INTEGERS = frozenset({int})


def check_chunks(shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Raise ValueError unless ``boxes`` are the whole of a tensor with ``shape``, without overlaps."""
    if sum(volume(box.sizes) for box in boxes) != volume(shape) or (len(boxes) > 1 and overlapping(boxes)):
        raise ValueError(f"its chunks are not the whole of {list(shape)}, or overlap")


class Box(NamedTuple):
    """A part of a tensor: in dimension ``d`` it begins at ``offsets[d]`` and has ``sizes[d]`` elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def volume(sizes: Sequence[int]) -> int:
    """Return the number of elements."""
    return math.prod(sizes)


def common(a: Box, b: Box) -> Box | None:
    """Return the box that both have; None if there is none."""
    offsets = tuple(map(max, a.offsets, b.offsets))
    ends = map(min, map(add, a.offsets, a.sizes), map(add, b.offsets, b.sizes))
    sizes = tuple(map(sub, ends, offsets))
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


def within(box: Box, shape: Sequence[int]) -> bool:
    """Return whether ``box`` is part of a tensor with ``shape``."""
    return len(box.offsets) == len(box.sizes) == len(shape) and all(
        0 <= at and 0 <= size and at + size <= whole for at, size, whole in zip(box.offsets, box.sizes, shape, strict=True)
    )


def overlapping(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two of ``boxes`` that have elements in common; None if there are none."""
    boxes = [box for box in boxes if volume(box.sizes)]
    if len(boxes) < 2:
        return None
    # Sweep along the dimension with the largest number of different offsets: there, few boxes are open at the same time.
    along = max(range(len(boxes[0].sizes)), key=lambda dim: len({box.offsets[dim] for box in boxes}), default=None)
    if along is None:
        return boxes[0], boxes[1]  # tensors without dimensions have one element each, the same one
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offsets[along]):
        open_boxes = [other for other in open_boxes if other.offsets[along] + other.sizes[along] > box.offsets[along]]
        for other in open_boxes:
            if common(box, other):
                return other, box
        open_boxes.append(box)
    return None

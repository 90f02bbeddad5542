"""Boxes: contiguous parts of a tensor, by offsets and sizes in each dimension."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import add, sub
from typing import NamedTuple


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

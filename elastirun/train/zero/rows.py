"""The rows of parameters of which each rank keeps the optimizer's state. Pure.

The parameters stand in a row, which is cut into as many pieces of about the same size as there are ranks. A cut within a parameter lies
between two of its rows, so that a piece is a box for checkpoints, and at a multiple of 64 elements: kernels that work on vectors then treat
each element as they would in the whole parameter, so no bit depends on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

CUT = 64  # elements of a parameter between two possible cuts, at least: as many as a kernel takes at once, or more


class Shape(NamedTuple):
    """Rows of a parameter, and the elements of one. ``whole``: it is not cut."""

    rows: int
    width: int
    whole: bool = False

    @property
    def unit(self) -> int:
        """Rows between two possible cuts."""
        return self.rows if self.whole else math.lcm(self.width, CUT) // self.width

    def nearest(self, wanted: float) -> int:
        """Return the possible cut that is nearest to so many rows."""
        below = max(0, int(wanted // self.unit)) * self.unit
        above = min(self.rows, below + self.unit)
        return above if wanted > (below + above) / 2 else min(below, self.rows)


class Rows(NamedTuple):
    """The rows from ``start`` to ``stop`` of parameter number ``param``."""

    param: int
    start: int
    stop: int


def cut(shapes: Sequence[Shape], ranks: int) -> list[list[Rows]]:
    """Return the rows of each rank, in the order of parameters. Every row belongs to one rank."""
    total = sum(shape.rows * shape.width for shape in shapes)
    pieces: list[list[Rows]] = [[] for _ in range(ranks)]
    rank = passed = 0
    for param, shape in enumerate(shapes):
        row = 0
        while row < shape.rows:
            wanted = (total * (rank + 1) // ranks - passed) / max(1, shape.width)  # rows of this parameter up to the end of the piece
            stop = shape.rows if rank == ranks - 1 else max(row, shape.nearest(wanted))
            if stop > row:
                pieces[rank].append(Rows(param, row, stop))
                row = stop
            if row < shape.rows:
                rank += 1
        passed += shape.rows * shape.width
    return pieces

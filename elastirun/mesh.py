"""The mesh of a job: its dimensions, of which the size of one follows from the number of workers. Pure.

``Mesh.parse("dp=auto,pp=2,tp=4")``: from the outermost dimension to the innermost, as torch's ``init_device_mesh`` has them. A *replica* is
one coordinate of ``auto``: the workers that hold the whole model once. A *cell* is one group of the innermost dimension, which never spans
nodes. See docs/parallelism.md.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MOST_DIMENSIONS, LARGEST = 8, 65_536  # of a mesh; more workers than those of any job


@dataclass(frozen=True)
class Mesh:
    """Dimensions from the outermost to the innermost. The size of ``auto`` is 0: as many replicas as the nodes allow."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Return the mesh that is written as ``dp=auto,pp=2,tp=4``. Errors: ``ValueError``."""
        names, sizes = [], []
        for part in text.split(","):
            name, _, size = part.strip().partition("=")
            number = int(size) if re.fullmatch("[1-9][0-9]{0,4}", size) else 0
            if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]{0,31}", name) or (size != "auto" and not 0 < number <= LARGEST):
                raise ValueError(f"{part.strip()[:40]!r} is no dimension of a mesh; write it as in dp=auto,pp=2,tp=4")
            names.append(name)
            sizes.append(number)
        if len(set(names)) < len(names):
            raise ValueError("two dimensions have one name; give each its own")
        if len(names) > MOST_DIMENSIONS:
            raise ValueError(f"{len(names)} dimensions are too many; give at most {MOST_DIMENSIONS}")
        if sizes.count(0) != 1:
            raise ValueError("exactly one dimension has the size auto; write it as in dp=auto,pp=2,tp=4")
        made = cls(tuple(names), tuple(sizes))
        if made.unit > LARGEST:
            raise ValueError(f"one replica would have {made.unit} workers; give sizes whose product is at most {LARGEST}")
        return made

    @classmethod
    def of_nodes(cls, unit: int, workers: int) -> Mesh:
        """Return the mesh of rounds with a multiple of ``unit`` nodes, each of which has so many workers. Errors: ``ValueError``."""
        return cls.parse(f"dp=auto,node={unit},worker={workers}")

    @property
    def auto(self) -> int:
        """The index of the dimension ``auto``."""
        return self.sizes.index(0)

    @property
    def inner(self) -> int:
        """Workers of a cell: the innermost dimension, unless that is ``auto``."""
        return self.sizes[-1] or 1

    @property
    def outer(self) -> int:
        """Groups of cells that lie outside of ``auto``: with pp=2,dp=auto,tp=4 a node holds one stage of several replicas."""
        return math.prod(self.sizes[: self.auto])

    @property
    def depth(self) -> int:
        """Cells of a replica within one outer group."""
        return math.prod(self.sizes[self.auto + 1 :]) // self.inner

    @property
    def unit(self) -> int:
        """Workers of one replica."""
        return self.outer * self.depth * self.inner

    def fits(self, world: int) -> bool:
        """Return whether ``world`` workers are whole replicas."""
        return world > 0 and world % self.unit == 0

    def is_formed_by(self, nodes: Sequence[int]) -> bool:
        """Return whether nodes with so many workers each have whole replicas, and no cell spans nodes."""
        return self.fits(sum(nodes)) and not any(workers % self.inner for workers in nodes)

    def shape(self, world: int) -> tuple[int, ...]:
        """Return the sizes in a world that fits."""
        return tuple(size or world // self.unit for size in self.sizes)

    def described(self, world: int) -> str:
        """Return the mesh of a world that fits, as workers get it in ELASTIRUN_MESH: ``dp=2,pp=2,tp=4``."""
        return ",".join(f"{name}={size}" for name, size in zip(self.names, self.shape(world), strict=True))

    def __str__(self) -> str:
        return ",".join(f"{name}={size or 'auto'}" for name, size in zip(self.names, self.sizes, strict=True))


def picture(mesh: Mesh, nodes: Sequence[tuple[str, int]]) -> Iterator[str]:
    """Yield a line for each cell of a round that the mesh fits: its place in the mesh, its ranks, and its node.

    ``nodes``: the name and the number of workers of each, in the order of ranks.
    """
    shape, rank = mesh.shape(sum(workers for _, workers in nodes)), 0
    outside = len(shape) - bool(mesh.sizes[-1])
    names = [name for name, workers in nodes for _ in range(workers // mesh.inner)]
    for at, node in zip(itertools.product(*map(range, shape[:outside])), names, strict=True):
        place = ", ".join(f"{name} {index}" for name, index in zip(mesh.names[:outside], at, strict=True))
        ranks = f"rank {rank}" if mesh.inner == 1 else f"ranks {rank}-{rank + mesh.inner - 1}"
        yield f"{place}: {ranks} on {node}"
        rank += mesh.inner

"""The plan of a checkpoint: which part of a state stands in which file, and which rank puts it there.

Pure, but for the pieces of a rank's own tensors.

A tensor is made of boxes: the shards of its owners, or one box that several ranks hold. Boxes with the same holders share files. Large
boxes are cut along their first dimension, so that the files of one group have about the same size. Every node stages each file that one
of its ranks can fill, so that the memory of a lost node is not needed; one rank of all writes it to the directory.
"""

from __future__ import annotations

import functools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from elastirun.checkpoint.image import PAGE, round_up
from elastirun.checkpoint.record import clip
from elastirun.checkpoint.tensors import Box, overlapping, volume
from elastirun.errors import CheckpointError
from elastirun.train.sharded import TensorPart, is_sharded, is_sharded_type, local_part
from elastirun.train.state.gc_pause import no_collection
from elastirun.train.state.torch_zip import ALIGNMENT, shell
from elastirun.train.state.tree import NESTED, Flat
from elastirun.train.state.values import DTYPES
from elastirun.train.torch_private import private

FILE = 64 << 20  # bytes of a file, unless one chunk has more: large enough for a disk, small enough to spread over ranks
SMALL = 1 << 20  # bytes; smaller files are not worth their fsync
LEAST_CUT = 256 << 10  # bytes; a smaller part of a tensor is not worth a chunk of its own
SHELL = 1792  # bytes around a chunk's data, about, and up to the next chunk

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """The box of one tensor that one rank holds. ``same_as``: the tensor in whose memory it is, for tied weights."""

    name: str
    dtype: str
    shape: Sizes  # of the whole tensor
    offsets: Sizes
    sizes: Sizes
    same_as: str = ""


@dataclass(frozen=True)
class FileBox:
    """A box in a file: the bytes from ``position`` on are what ``torch.save`` writes for it, the raw data begins at ``at``."""

    name: str
    dtype: str
    offsets: Sizes
    sizes: Sizes
    row: int  # of the holder's box, at which this chunk begins
    position: int
    length: int
    at: int
    nbytes: int


@dataclass(frozen=True)
class File:
    """A file with its chunks. ``stagers``: the ranks that fill it in their images, one a node; ``writer``: one of them."""

    name: str
    size: int
    chunks: tuple[FileBox, ...]
    stagers: tuple[int, ...]
    writer: int


@dataclass(frozen=True)
class Plan:
    """The files of a checkpoint, the same on all ranks."""

    files: tuple[File, ...]
    tensors: Mapping[str, tuple[str, Sizes]] = field(repr=False)  # name -> (dtype, shape)
    aliases: Mapping[str, str] = field(repr=False)  # name -> the tensor whose chunks it has

    def staged_by(self, rank: int) -> tuple[File, ...]:
        """Return the files that ``rank`` fills in its image."""
        return tuple(file for file in self.files if rank in file.stagers)

    def written_by(self, rank: int) -> tuple[File, ...]:
        """Return the files that ``rank`` writes to the directory."""
        return tuple(file for file in self.files if file.writer == rank)

    def chunks(self) -> dict[str, list[tuple[File, FileBox]]]:
        """Return the chunks of each tensor; of tied ones, the same."""
        found: dict[str, list[tuple[File, FileBox]]] = {name: [] for name in self.tensors}
        for file in self.files:
            for chunk in file.chunks:
                found[chunk.name].append((file, chunk))
        return {name: found[self.aliases.get(name, name)] for name in found}

    def tensors_json(self) -> bytes:
        """Return the bytes of tensors.json."""
        plain = {
            name: {
                "dtype": self.tensors[name][0],
                "shape": self.tensors[name][1],
                "chunks": [
                    {"offsets": chunk.offsets, "sizes": chunk.sizes, "file": file.name, "at": chunk.at, "nbytes": chunk.nbytes}
                    for file, chunk in chunks
                ],
            }
            for name, chunks in self.chunks().items()
        }
        return json.dumps(plain, separators=(",", ":")).encode("ascii")


# -- the pieces of a rank -------------------------------------------------------------------------------------------------


def local_box(name: str, tensor: Tensor) -> tuple[Box, Tensor]:
    """Return the box of ``tensor`` that this rank holds, and its memory. Raises ``CheckpointError`` for sums that are not reduced yet."""
    if not is_sharded(tensor):
        return Box((0,) * tensor.dim(), tuple(tensor.shape)), tensor
    if isinstance(tensor, TensorPart):
        return Box(tensor.offsets, tuple(tensor.local.shape)), tensor.local
    # The module is imported already, with the DTensor.
    local_sizes = private("torch.distributed.tensor._utils", "compute_local_shape_and_global_offset")
    sharded: Any = tensor
    if any(placement.is_partial() for placement in sharded.placements):
        raise CheckpointError(f"{name} is a DTensor with a partial placement: redistribute it before a checkpoint")
    with torch.no_grad():
        local = local_part(sharded)
    sizes, offsets = local_sizes(sharded.shape, sharded.device_mesh, sharded.placements)
    if not offsets and tensor.dim():  # this rank is not of the mesh
        return Box((0,) * tensor.dim(), (0,) * tensor.dim()), local
    if tuple(sizes) != tuple(local.shape):
        raise CheckpointError(f"{name}: its shard has the shape {tuple(local.shape)}, and {tuple(sizes)} was expected")
    return Box(tuple(offsets), tuple(sizes)), local


def pieces(flat: Flat) -> list[Piece]:
    """Return what this rank holds. Raises ``CheckpointError`` for tensors that a checkpoint cannot hold, with their names."""
    found, seen = [], dict[Any, str]()
    for name, tensor in flat.tensors.items():
        if is_lazy(tensor):
            raise CheckpointError(f"{name} has no shape yet: call the module once before the first checkpoint")
        if tensor.is_nested:  # which has no shape
            raise CheckpointError(f"{name}: {NESTED}")
        box, local = local_box(name, tensor)
        kind = str(tensor.dtype).removeprefix("torch.")
        odd = local.layout != torch.strided or local.is_quantized or local.device.type == "meta" or is_traceable_wrapper_subclass(local)
        if odd or kind not in DTYPES:
            what = f"{type(local).__name__} of {kind} with layout {local.layout} on {local.device}"
            raise CheckpointError(f"{name}: a checkpoint cannot hold this tensor: {what}")
        if not volume(box.sizes) and volume(tensor.shape):
            continue
        memory = (local.data_ptr(), local.stride(), local.device, box, tensor.shape, kind)
        other = seen.setdefault(memory, name) if local.numel() else name
        found.append(Piece(name, kind, tuple(tensor.shape), box.offsets, box.sizes, other if other != name else ""))
    return found


def signature(flat: Flat, own: Iterable[Piece]) -> tuple[Any, ...]:
    """Return a value that is equal for another ``flat`` as long as its pieces are ``own``; it takes a millisecond."""
    tensors = flat.tensors
    values = list(tensors.values())
    shapes, dtypes = list(map(attrgetter("shape"), values)), list(map(attrgetter("dtype"), values))
    sharded: list[Any] = [each for each in values if is_sharded(each)] if any(map(is_sharded_type, {*map(type, values)})) else []
    specs = [(each.offsets, each.local.shape) if isinstance(each, TensorPart) else (each.device_mesh, each.placements) for each in sharded]
    with torch.no_grad():
        tied = [_pointer(tensors.get(piece.name)) == _pointer(tensors.get(piece.same_as)) for piece in own if piece.same_as]
    return list(tensors), shapes, dtypes, specs, tied


def _pointer(tensor: Tensor | None) -> int:
    return local_part(tensor).data_ptr() if tensor is not None else 0


def encode(own: Sequence[Piece]) -> str:
    """Return the pieces as text, for the other ranks."""
    rows = [(p.name, p.dtype, p.shape, *((p.offsets, p.sizes, p.same_as) if p.same_as or p.sizes != p.shape else ())) for p in own]
    return json.dumps([_version(), rows], separators=(",", ":"))


@functools.lru_cache(maxsize=64)
def decode(text: str) -> tuple[Piece, ...]:
    """Return the pieces in ``text``; for the same text the same object, of which ``plan`` makes use.

    Raises ``CheckpointError`` if they are of a rank with another torch, whose shells may have other sizes.
    """
    version, plain = json.loads(text)
    if version != _version():
        raise CheckpointError(f"this rank has torch {_version()}, another one torch {version}: checkpoints need the same one everywhere")
    rows = [(name, kind, tuple(shape), tuple(map(_tuple, rest))) for name, kind, shape, *rest in plain]
    return tuple(Piece(name, kind, shape, *(rest or ((0,) * len(shape), shape))) for name, kind, shape, rest in rows)


def _version() -> str:
    return torch.__version__.partition("+")[0]  # which stands before what it was built for


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


# -- the plan -------------------------------------------------------------------------------------------------------------


@dataclass
class _Content:
    """The chunks of a file to be: (piece, first row, rows), and their size, about."""

    holders: tuple[int, ...]
    parts: list[tuple[Piece, int, int]] = field(default_factory=list)
    size: int = 0


def plan(pieces_by_rank: Sequence[Sequence[Piece]], node_of_rank: Sequence[int], keep_node_complete: bool = True) -> Plan:
    """Return the files for what all ranks hold. Raises ``CheckpointError`` if the pieces of a tensor are not the whole of it.

    ``node_of_rank``: the number of each rank's node. ``keep_node_complete``: every node stages all that its ranks hold, for restarts from
    memory; otherwise one rank of all.
    """
    with no_collection():
        return _plan(pieces_by_rank, list(node_of_rank) if keep_node_complete else [0] * len(node_of_rank))


def _plan(pieces_by_rank: Sequence[Sequence[Piece]], nodes: Sequence[int]) -> Plan:
    holders = _holders(pieces_by_rank)
    tensors = _tensors(holders)
    aliases = _aliases(pieces_by_rank, tensors)
    _check(holders, tensors)
    groups: dict[tuple[int, ...], list[Piece]] = {}  # the boxes that the same ranks hold
    for piece, ranks in holders.items():
        if piece.name not in aliases and volume(piece.sizes):
            groups.setdefault(ranks, []).append(piece)
    contents = [content for ranks, boxes in groups.items() for content in _cut(ranks, boxes, nodes)]
    return Plan(_assign(contents, nodes), tensors, aliases)


def _holders(pieces_by_rank: Sequence[Sequence[Piece]]) -> dict[Piece, tuple[int, ...]]:
    """Return the ranks that hold each box, in the order of the first rank that has it. The boxes do not say what they are tied to."""
    members: dict[int, list[int]] = {}  # ranks with the very same list
    for rank, own in enumerate(pieces_by_rank):
        members.setdefault(id(own), []).append(rank)
    sets: dict[Piece, list[int]] = defaultdict(list)
    for ranks in members.values():
        for piece in pieces_by_rank[ranks[0]]:
            sets[replace(piece, same_as="") if piece.same_as else piece].append(ranks[0])

    @functools.cache
    def all_of(firsts: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(rank for first in firsts for rank in members[id(pieces_by_rank[first])]))

    return {piece: all_of(tuple(firsts)) for piece, firsts in sets.items()}


def _tensors(holders: Iterable[Piece]) -> dict[str, tuple[str, Sizes]]:
    tensors: dict[str, tuple[str, Sizes]] = {}
    for piece in holders:
        first = tensors.setdefault(piece.name, (piece.dtype, piece.shape))
        if first != (piece.dtype, piece.shape):
            kinds = " and ".join(f"{dtype} {list(shape)}" for dtype, shape in (first, (piece.dtype, piece.shape)))
            raise CheckpointError(f"{clip(piece.name)} is {kinds} on different ranks: give one of them another place in the state")
    return tensors


def _aliases(pieces_by_rank: Sequence[Sequence[Piece]], tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return the tensors that all ranks have in the memory of one other, which is no alias itself."""
    others: dict[str, set[str]] = defaultdict(set)
    for own in {id(own): own for own in pieces_by_rank}.values():
        for piece in own:
            others[piece.name].add(piece.same_as)
    return {
        name: other
        for name, found in others.items()
        for other in found
        if len(found) == 1 and other and others.get(other) == {""} and tensors[name] == tensors[other]
    }


def _check(holders: Iterable[Piece], tensors: Mapping[str, tuple[str, Sizes]]) -> None:
    """Raise ``CheckpointError`` for a tensor of which something is missing, or is held in boxes that overlap."""
    boxes: dict[str, list[Box]] = defaultdict(list)
    for piece in holders:
        boxes[piece.name].append(Box(piece.offsets, piece.sizes))
    for name, own in boxes.items():
        there, shape = sum(volume(box.sizes) for box in own), tensors[name][1]
        if there != volume(shape) or overlapping(own):
            raise CheckpointError(f"{clip(name)} has {volume(shape)} elements, and the ranks' shards have {there}, or overlap")


def _cut(holders: tuple[int, ...], boxes: Sequence[Piece], nodes: Sequence[int]) -> list[_Content]:
    """Divide the boxes of the same ``holders`` into files of about the same size: as many as the ranks of every node can share."""
    total = sum(map(_size, boxes))
    counts = {sum(nodes[rank] == node for rank in holders) for node in {nodes[rank] for rank in holders}}
    share = math.lcm(*counts) if math.lcm(*counts) <= 64 else max(counts)
    number = share * -(-total // (share * FILE))
    if total < number * SMALL:
        number = max(1, total // SMALL)
    contents: list[_Content] = []
    done = capacity = 0
    for piece in boxes:
        row, rows = 0, piece.sizes[0] if piece.sizes else 1
        while row < rows:
            last = contents[-1] if contents else _Content(())
            count = _rows_for(piece, rows - row, capacity - last.size, FILE - last.size, not last.parts)
            if not contents or not count:
                capacity = max(SMALL, -(-(total - done) // max(1, number - len(contents))))
                contents.append(_Content(holders))
                continue
            size = _size(piece, count)
            last.parts.append((piece, row, count))
            last.size += size
            done, row = done + size, row + count
    return contents


def _size(piece: Piece, rows: int | None = None) -> int:
    """Return about how many bytes a chunk takes in its file."""
    count = volume(piece.sizes) if rows is None else rows * volume(piece.sizes[1:])
    return count * DTYPES[piece.dtype].itemsize + SHELL


def _rows_for(piece: Piece, rows: int, wanted: int, room: int, empty: bool) -> int:
    """Return how many of the next ``rows`` of a box go into a file: all, some, or none if they begin the next file.

    ``wanted``: bytes up to the file's share. ``room``: bytes up to the limit, which only a single row may exceed, in an ``empty`` file.
    """
    whole, one = _size(piece, rows), _size(piece, 1) - SHELL
    if whole <= min(wanted, room):
        return rows
    fitting = max(0, min(wanted, room) - SHELL) // one
    if fitting * one >= LEAST_CUT and (rows - fitting) * one >= LEAST_CUT:
        return fitting
    if whole <= room and (empty or (whole - wanted < LEAST_CUT and whole <= 2 * wanted)):
        return rows  # parts of it would be too small
    return min(rows, max(1, (room - SHELL) // one)) if empty else 0


def _assign(contents: Sequence[_Content], nodes: Sequence[int]) -> tuple[File, ...]:
    """Choose who stages and who writes each file: the rank with the least so far, after those that nobody else can stage."""
    staged, written = [0] * len(nodes), [0] * len(nodes)
    stagers: dict[int, tuple[int, ...]] = {}
    order = sorted(range(len(contents)), key=lambda at: (len(contents[at].holders), -contents[at].size))
    for at in order:
        content = contents[at]
        by_node: dict[int, list[int]] = {}
        for rank in content.holders:
            by_node.setdefault(nodes[rank], []).append(rank)
        stagers[at] = tuple(min(ranks, key=lambda rank: (staged[rank], rank)) for ranks in by_node.values())
        for rank in stagers[at]:
            staged[rank] += content.size
    writers = {}
    for at in sorted(order, key=lambda at: (len(stagers[at]), -contents[at].size)):
        writers[at] = min(stagers[at], key=lambda rank: (written[rank], rank))
        written[writers[at]] += contents[at].size
    numbers = [0] * len(nodes)
    files = []
    for at, content in enumerate(contents):
        writer = writers[at]
        files.append(_file(f"__{writer}_{numbers[writer]}.distcp", content, stagers[at], writer))
        numbers[writer] += 1
    return tuple(files)


def _file(name: str, content: _Content, stagers: tuple[int, ...], writer: int) -> File:
    chunks, position = [], 0
    for piece, row, rows in content.parts:
        offsets = (piece.offsets[0] + row, *piece.offsets[1:]) if piece.offsets else ()
        sizes = (rows, *piece.sizes[1:]) if piece.sizes else ()
        around = shell(piece.dtype, sizes)
        at = position + len(around.before)
        chunks.append(FileBox(piece.name, piece.dtype, offsets, sizes, row, position, around.size, at, around.nbytes))
        end = position + around.size
        position = -(-end // ALIGNMENT) * ALIGNMENT
    return File(name, end, tuple(chunks), stagers, writer)


# -- the image of a rank --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Raw:
    """Raw data in an image: ``sizes`` elements of ``dtype`` from byte ``at`` on, from row ``row`` on of the rank's part of ``name``."""

    name: str
    dtype: torch.dtype
    sizes: Sizes
    row: int
    at: int


@dataclass(frozen=True)
class ImageFiles:
    """The part of a rank's image that the plan determines. ``end``: the first byte after the files, at a page."""

    files: Mapping[str, tuple[int, int]]  # name -> (offset in the image, size)
    shells: tuple[tuple[int, bytes], ...] = field(repr=False)  # (offset in the image, bytes), written once
    raws: tuple[Raw, ...] = field(repr=False)  # written in each save
    end: int

    def write_shells(self, memory: Any) -> None:
        """Write what is the same in each save into ``memory``, the image."""
        for at, data in self.shells:
            memory[at : at + len(data)] = data

    def destinations(self, memory: Any) -> list[Tensor]:
        """Return views of ``memory``, the writable image, in the order of ``raws``."""
        return [torch.frombuffer(memory, dtype=raw.dtype, count=volume(raw.sizes), offset=raw.at).view(raw.sizes) for raw in self.raws]

    def sources(self, flat: Flat) -> list[Tensor]:
        """Return what is to be copied into the views: parts of the state's own tensors."""
        with torch.no_grad():
            tensors = flat.tensors
            if any(map(is_sharded_type, {*map(type, tensors.values())})):
                tensors = {name: local_part(tensor) for name, tensor in tensors.items()}
            found = [tensors[raw.name] for raw in self.raws]
            cut = [at for at, (raw, local) in enumerate(zip(self.raws, found, strict=True)) if local.shape != raw.sizes]
            for at in cut:
                found[at] = found[at].narrow(0, self.raws[at].row, self.raws[at].sizes[0])
        return found


def image_files(whole: Plan, rank: int) -> ImageFiles:
    """Return where the files that ``rank`` stages stand in its image, each at a page, from the second page on."""
    files, shells, raws, at = {}, [], [], PAGE
    for file in whole.staged_by(rank):
        files[file.name] = (at, file.size)
        for chunk in file.chunks:
            around = shell(chunk.dtype, chunk.sizes)
            shells.append((at + chunk.position, around.before))
            shells.append((at + chunk.at + chunk.nbytes, around.after))
            raws.append(Raw(chunk.name, DTYPES[chunk.dtype], chunk.sizes, chunk.row, at + chunk.at))
        at = round_up(at + file.size)
    return ImageFiles(files, tuple(shells), tuple(raws), at)

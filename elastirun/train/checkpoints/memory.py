"""Copies in memory: which complete saves the agents of all nodes hold together, and how every rank gets the files of one.

An agent holds the images of its node's workers beyond their end. Every node has the whole replicated state, so after the loss of a node the
others still have everything, and a new node gets it from them. Only what each rank has of its own (``PerRank``) is lost with its node.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from elastirun.checkpoint import memory_tier
from elastirun.checkpoint.image import Image
from elastirun.checkpoint.tensors import TENSORS, VALUES
from elastirun.errors import CheckpointError
from elastirun.train.checkpoints.ranks import Ranks
from elastirun.train.checkpoints.reading import tensors_in
from elastirun.train.state.values import PER_RANK, Node, decode_values, items_of, join


class SaveId(NamedTuple):
    """Identifies a save; a greater one is newer."""

    round: int
    number: int  # of the saves in that round: steps are no order, because a run may go back to an earlier one
    step: int
    fence: str


@dataclass(frozen=True)
class RankImage:
    """A complete image: what one rank has staged of a save."""

    save: SaveId
    which: int  # the number of the image
    rank: int  # that staged it
    local_rank: str
    image: Image
    files: Mapping[str, tuple[int, int]]

    def read(self, name: str) -> memoryview:
        """Return one file, without a copy."""
        at, size = self.files[name]
        return memoryview(self.image.memory)[at : at + size]


@dataclass
class HeldSave:
    """One save in the agents' memory, as all ranks know it."""

    save: SaveId
    which: int  # the number of the images that hold it
    sizes: dict[str, int] = field(default_factory=dict)  # of each file
    holders: dict[str, list[int]] = field(default_factory=dict)  # of each file: the ranks on whose nodes it is
    needed: set[str] = field(default_factory=set)  # files without which the save is not complete
    own: set[str] = field(default_factory=set)  # files that hold nothing but values of which every rank has its own
    values_of: int = 1 << 62  # the lowest rank that has staged it; its values.json counts

    @property
    def complete(self) -> bool:
        """Return whether the nodes have all of it."""
        return self.needed <= self.holders.keys()

    @property
    def lost(self) -> set[str]:
        """Return the files of ranks whose nodes are gone."""
        return self.own - self.holders.keys()


class Memory:
    """The images that the agent of this node holds for the checkpoints of ``directory``."""

    def __init__(self, directory: str) -> None:
        where = directory if "://" in directory else os.path.abspath(directory)
        self._prefix = hashlib.sha256(where.encode()).hexdigest()[:16]
        self._local_rank = os.environ.get("LOCAL_RANK", "0")
        self._kept: dict[int, Image] = {}  # by the image's number: what the agent has been offered
        self._refused: set[int] = set()  # those of them that the agent does not hold
        self.there = bool(os.environ.get("ELASTIRUN_SOCKET"))

    def keep(self, which: int, image: Image) -> str:
        """Let the agent hold image number ``which``, in place of the one before. Return why it does not; empty when it does."""
        if not self.there or self._kept.get(which) is image:
            return ""
        self._kept[which] = image
        why = memory_tier.put(f"{self._prefix}.{self._local_rank}.{which}", image.fd)
        if why:
            self._refused.add(which)
        return why

    def drop_others(self) -> None:
        """Let the agent give up the images of local ranks that an earlier round had and this one does not.

        To be called when all ranks have a newer save in their images: until then a restore needs the files that those ranks have staged.
        What the agent had no room for is offered again by the next ``keep``.
        """
        workers = os.environ.get("LOCAL_WORLD_SIZE", "")
        if not self.there or not workers.isdecimal():
            return
        for name in memory_tier.names(f"{self._prefix}."):
            if int(name.split(".")[1]) >= int(workers):
                memory_tier.drop(name)
        while self._refused:
            self._kept.pop(self._refused.pop(), None)

    def parts(self) -> list[RankImage]:
        """Return the complete images of this node."""
        found = []
        for name, fd in memory_tier.found(f"{self._prefix}.").items() if self.there else ():
            _, local_rank, which = name.split(".")
            try:
                image = Image.of(fd)
            except CheckpointError:
                os.close(fd)
                continue
            description = image.description()
            if description is None:
                image.close()
                continue
            save = SaveId(description.round, description.save, description.step, description.fence)
            found.append(RankImage(save, int(which), description.rank, local_rank, image, description.files))
        return found

    def adopt(self, parts: Iterable[RankImage]) -> dict[int, Image]:
        """Return the images that an earlier worker with this local rank has left, by number; close the others. They are kept already."""
        own: dict[int, Image] = {}
        for part in parts:
            if part.local_rank == self._local_rank:
                own[part.which] = part.image
            else:
                part.image.close()
        self._kept.update(own)
        return own


def describe(parts: Iterable[RankImage]) -> str:
    """Return what this node has, as text for the other ranks."""
    lines = []
    for part in parts:
        try:
            needed, own = _files_of(part)
        except (CheckpointError, KeyError):
            continue
        sizes = {name: size for name, (_, size) in part.files.items()}
        lines.append({"save": part.save, "which": part.which, "rank": part.rank, "sizes": sizes, "needed": needed, "own": own})
    return json.dumps(lines)


def _files_of(part: RankImage) -> tuple[list[str], list[str]]:
    """Return the files that every rank needs, and those that only hold the values of one rank. Raises CheckpointError and KeyError."""
    tensors = tensors_in(bytes(part.read(TENSORS)))
    marked = {name for name in tensors if "@" in name}
    if marked:
        paths = set(_per_rank(decode_values(bytes(part.read(VALUES))), ""))
        marked = {name for name in marked if name.rpartition("@")[0] in paths}
    needed = {chunk.file for name, tensor in tensors.items() if name not in marked for chunk in tensor.chunks}
    own = {chunk.file for name in marked for chunk in tensors[name].chunks}
    return sorted(needed), sorted(own - needed)


def _per_rank(node: Node, path: str) -> Iterator[str]:
    """Yield the paths of the values of which every rank has its own."""
    if node == PER_RANK:
        yield path
    else:
        for key, each in items_of(node).items():
            yield from _per_rank(each, join(path, key))


def together(texts: Sequence[str]) -> list[HeldSave]:
    """Return the saves that all nodes together have completely, the newest first. ``texts``: what ``describe`` has returned, by rank."""
    found: dict[SaveId, HeldSave] = {}
    for rank, text in enumerate(texts):
        for line in json.loads(text):
            save = SaveId(*line["save"])
            held = found.setdefault(save, HeldSave(save, line["which"], needed={TENSORS, VALUES}))
            held.needed.update(line["needed"])
            held.own.update(line["own"])
            if line["rank"] < held.values_of:
                held.values_of, held.holders[VALUES], held.sizes[VALUES] = line["rank"], [rank], line["sizes"][VALUES]
            for name, size in line["sizes"].items():
                if name != VALUES and rank not in held.holders.setdefault(name, []):
                    held.holders[name].append(rank)
                    held.sizes[name] = size
    return sorted((held for held in found.values() if held.complete), key=lambda held: held.save, reverse=True)


def fetch(held: HeldSave, parts: Iterable[RankImage], ranks: Ranks) -> dict[str, memoryview]:
    """Return the content of every file. Every rank calls it; what a node does not have comes from a rank that has it."""
    mine = sorted((part for part in parts if part.save == held.save), key=lambda part: part.rank)
    files: dict[str, memoryview] = {}
    for name, holders in sorted(held.holders.items()):
        here: Any = next((part.read(name) for part in mine if name in part.files), None)
        if len(holders) < ranks.world_size:
            source = holders[0]
            data = bytearray(here) if ranks.rank == source else bytearray(held.sizes[name])
            ranks.broadcast(data, source)
            here = memoryview(data) if here is None or name == VALUES else here
        files[name] = here
    return files

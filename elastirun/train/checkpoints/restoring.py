"""Finds the checkpoint to go on from, in memory or in the directory, and puts it into the state. Every rank takes the same one."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from elastirun.checkpoint.backends.folder import Folder
from elastirun.checkpoint.claims import Published
from elastirun.checkpoint.directory import Directory
from elastirun.checkpoint.record import COMMIT, MISSING, Commit, Damage, clip, decode, encode
from elastirun.checkpoint.tensors import TENSORS, VALUES
from elastirun.errors import CheckpointError
from elastirun.train.arguments import verify_type
from elastirun.train.checkpoints.dcp import open_foreign
from elastirun.train.checkpoints.memory import RankImage, describe, fetch, together
from elastirun.train.checkpoints.ranks import Ranks
from elastirun.train.checkpoints.reading import Open, fill, tensors_in
from elastirun.train.state.loading import load, targets, unused
from elastirun.train.state.values import decode_values

log = logging.getLogger("elastirun.checkpoints")


@dataclass
class Restorable:
    """A checkpoint that was found."""

    step: int
    where: str  # for people
    content: Open  # of its files
    image: int = -1  # the number of the image that holds it, on every rank that has one; -1: from the directory
    lost: Collection[str] = ()  # files with values that only one rank had, on a node that is gone


def find(
    directory: Directory, found: Sequence[Published], parts: Sequence[RankImage], fence: str, ranks: Ranks, step: int | None
) -> Restorable | None:
    """Return the checkpoint to go on from: the newest one, or that of ``step``. Every rank calls it; ``found`` is rank 0's
    list of what is published, ``parts`` what this node has in memory.

    Within one job the later round's is the newer one, then the later step; of equal ones that in memory, unless something of it was lost
    with a node. What another job has published is older than what is in memory here.
    """
    job = _job(fence)
    held = [one for one in together(ranks.gather_text(describe(parts))) if _job(one.save.fence) == job]
    best = next((one for one in held if step is None or one.save.step == step), None)

    def is_older(one: Commit) -> bool:
        if best is None:
            return False
        mine, theirs = (best.save.round, best.save.step), (one.round, one.step)
        return _job(one.fence) != job or theirs < mine or (theirs == mine and not best.lost)

    wanted = [one for one in found if step is None or one.commit is None or one.commit.step == step]
    candidates = sorted(wanted, key=lambda one: one.commit is not None)  # those without a record first, so that there is a line on each
    on_disk = newest_sound(directory, candidates, ranks, is_older)
    if on_disk is not None and on_disk.commit is not None:
        return Restorable(on_disk.commit.step, directory.file(on_disk, ""), partial(directory.content, on_disk))
    if best is None:
        return None
    files = fetch(best, parts, ranks)

    def content(name: str) -> memoryview:
        if name not in files:
            raise CheckpointError(f"the copy in memory has no {name}")
        return files[name]

    return Restorable(best.save.step, "memory", content, best.which, best.lost)


def _job(fence: str) -> str:
    """Return the part of a fence token that all rounds of a job share: the store's id."""
    return fence.rpartition(":")[0]


def load_checkpoint(path: str | os.PathLike[str], state: MutableMapping[str, Any], *, strict: bool = True) -> None:
    """Put a checkpoint that is no part of a ``Checkpointer``'s directory into ``state``, a dict as for ``Checkpointer.save``.

    path     a folder written by ``torch.distributed.checkpoint``, a file written by ``torch.save``, or one of our own (``step-00000100``).
             If it holds the state dict of a module alone, it belongs to the only module in ``state``
    strict   default: what ``state`` has below a key of the checkpoint, and the checkpoint does not, is an error; else it stays as it is.
             Keys of ``state`` that a foreign checkpoint does not have at all, such as ``step``, stay as they are, with a line in the log

    Each rank reads what it needs; no rank waits for another. Nothing is unpickled but by ``torch.load(weights_only=True)``. Raises
    CheckpointError.
    """
    check_state(state)
    verify_type(path, str | os.PathLike, "path", "that of a file or folder")
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    if os.path.isfile(os.path.join(path, COMMIT)):
        folder, name = os.path.split(os.path.abspath(path))
        directory = Directory(backend := Folder(folder))
        found = backend.checkpoint(name)
        for damage in directory.verify(found):
            raise CheckpointError(f"{path} cannot be used: {damage}")
        left = put(Restorable(found.commit.step if found.commit else 0, name, partial(directory.content, found)), state, rank, strict)
        _warn(left if rank == 0 else (), os.fspath(path))
        return
    foreign = open_foreign(path, state)
    known = {key: value for key, value in state.items() if key in foreign.tree}
    if not known:
        there = ", ".join(foreign.tree) or "nothing"
        raise CheckpointError(f"{path} has nothing of the state: it has {clip(there)}, the state has {clip(', '.join(state))}")
    wanted = targets(known, foreign.tree, foreign.tensors, rank, strict)
    foreign.fill(wanted, strict)
    left = _load(known, foreign.tree, wanted, rank, strict)
    _warn(left if rank == 0 else (), os.fspath(path))
    state.update(known)
    if rank == 0 and (others := state.keys() - known.keys()):
        log.warning("%s does not have %s: the state keeps its own", path, ", ".join(sorted(others)))
    if foreign.skipped and rank == 0:
        log.warning("%s: left out, because reading it could run code: %s", path, ", ".join(foreign.skipped[:5]))


def check_state(state: object) -> None:
    """Raise CheckpointError unless ``state`` is a dict, which a checkpoint can be put into."""
    if not isinstance(state, MutableMapping):
        raise CheckpointError(f"a checkpoint is restored into a dict like the one that was saved, not into {type(state).__name__}")


def put(found: Restorable, state: MutableMapping[str, Any], rank: int, strict: bool) -> list[str]:
    """Put the checkpoint into ``state``; return what ``state`` has no place for. Raises CheckpointError where it does not fit."""
    tree = decode_values(bytes(found.content(VALUES)))
    saved = tensors_in(bytes(found.content(TENSORS)))
    if found.lost:
        saved = {name: tensor for name, tensor in saved.items() if not any(chunk.file in found.lost for chunk in tensor.chunks)}
    wanted = targets(state, tree, saved, rank, strict)
    fill(saved, found.content, wanted, strict)
    return _load(state, tree, wanted, rank, strict)


def _load(state: MutableMapping[str, Any], tree: Mapping[str, Any], filled: Mapping[str, Tensor], rank: int, strict: bool) -> list[str]:
    """Put values and filled tensors into ``state``; return the paths of what ``state`` has no place for."""
    left = unused(state, tree)
    state.update(load(state, tree, filled, rank, strict))
    return left


def warn_of_unused(left: Sequence[str], found: Restorable, ranks: Ranks) -> None:
    """Say what no rank has a place for. Every rank calls it, with what it has none for: the stages of a pipeline are the others'."""
    firsts: list[str] = json.loads(ranks.from_first(json.dumps(left)))
    if not firsts:
        return
    mine = {*left}
    marks = ranks.gather_text("".join("01"[name in mine] for name in firsts))
    if ranks.rank == 0:
        _warn(
            [name for name, *all_marks in zip(firsts, *marks, strict=True) if "0" not in all_marks], f"the checkpoint of step {found.step}"
        )


def _warn(left: Sequence[str], where: str) -> None:
    if left:
        more = f" and {len(left) - 5} more" if left[5:] else ""
        log.warning("%s has what the state has no place for: %s%s", where, ", ".join(left[:5]), more)


def newest_sound(directory: Directory, found: Sequence[Published], ranks: Ranks, is_older: Callable[[Commit], bool]) -> Published | None:
    """Return the newest checkpoint of which every file is as its record says; None if there is none.

    ``found``: rank 0's, the newest first; those for which ``is_older`` is true do not count, nor do those after them. A damaged
    checkpoint is set aside, with a line that says so. Every rank calls it and checks a part of the files.
    """
    left = iter(found)
    while (one := _shared(next(left, None), ranks)) is not None:
        if one.commit is not None and is_older(one.commit):
            return None
        names = _share(one, ranks)
        damages = [(str(damage), damage.lasting) for damage in directory.verify(one, names)]
        everyones = [damage for text in ranks.gather_text(json.dumps(damages)) for damage in json.loads(text)]
        if not everyones:
            return one
        if ranks.rank == 0:
            _report(directory, one, everyones)
    return None


def _shared(found: Published | None, ranks: Ranks) -> Published | None:
    """Return rank 0's ``found`` on every rank: a file server may show each node another state. None: there is no more."""
    text = ""
    if found is not None:
        record = encode(found.commit).decode() if found.commit else ""
        text = json.dumps([found.name, record, astuple(found.damage) if found.damage else None])
    if not (text := ranks.from_first(text)):
        return None
    name, record, damage = json.loads(text)
    return Published(name, decode(record.encode()) if record else None, Damage(*damage) if damage else None)


def _share(found: Published, ranks: Ranks) -> list[str]:
    """Return the files that this rank checks: each file is checked by one rank, and all check about as many bytes."""
    bytes_of = [0] * ranks.world_size
    mine = []
    for name, file in sorted(found.commit.files.items() if found.commit else (), key=lambda item: (-item[1].size, item[0])):
        least = bytes_of.index(min(bytes_of))
        bytes_of[least] += file.size
        if least == ranks.rank:
            mine.append(name)
    return mine


def _report(directory: Directory, found: Published, damages: Sequence[tuple[str, bool]]) -> None:
    """Set a damaged checkpoint aside and say so; one that only could not be read stays where it is."""
    what, kept = damages[0][0], "it stays"
    if found.damage is not None and found.damage.what == MISSING:
        kept = "it stays, as if it were another tool's"
    elif any(lasting for _, lasting in damages):
        try:
            kept = f"it is now {directory.backend.set_aside(found)}"
        except OSError as error:
            kept = f"it cannot be renamed: {error.strerror}"
    log.warning("the checkpoint %s/%s cannot be used: %s; %s; an older one is tried", directory.path, found.name, what, kept)

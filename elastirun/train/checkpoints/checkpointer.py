"""``Checkpointer``: saves the state of a run while it trains, and restores the newest one. docs/checkpoints.md has the picture."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from elastirun.checkpoint.claims import round_of
from elastirun.checkpoint.directory import open_directory
from elastirun.checkpoint.image import Description
from elastirun.checkpoint.record import MAX_NUMBER
from elastirun.checkpoint.tensors import TENSORS, VALUES
from elastirun.checkpoint.writer_process import WriterProcess
from elastirun.errors import CheckpointError, TrainError
from elastirun.progress import at_step, saving
from elastirun.train.arguments import as_whole, shown, verify_type, whole
from elastirun.train.checkpoints import restoring
from elastirun.train.checkpoints.dcp import DcpFiles
from elastirun.train.checkpoints.due import due
from elastirun.train.checkpoints.memory import Memory
from elastirun.train.checkpoints.publishing import Publisher, Save
from elastirun.train.checkpoints.ranks import Ranks, on_every_rank
from elastirun.train.checkpoints.resources import END_LIMIT, CheckpointResources
from elastirun.train.checkpoints.same_tensors import kind_of, union_of, verify_options, verify_same_tensors
from elastirun.train.checkpoints.staging import IMAGES, MORE_IMAGES, Staging
from elastirun.train.errors import WrongUse
from elastirun.train.groups.connections import live_sockets
from elastirun.train.state.layout import Piece, Plan, decode, encode, image_files, pieces, plan, signature
from elastirun.train.state.tree import Flat, flatten
from elastirun.train.state.union import Union
from elastirun.train.state.values import encode_values
from elastirun.worker.current_round import FENCE

log = logging.getLogger("elastirun.checkpoints")

MOST_VALUES = 16 << 20  # bytes of values.json: they are copied and sent as JSON, while training waits
COMPARED_AGAIN = {8**power for power in range(1, 12)}  # saves before which ranks that had the same are compared once more
KEPT = 100  # saves whose durations ``stats`` reports


class Checkpointer:
    """Saves the state of a run in ``directory`` while training goes on, and restores the newest checkpoint at any world size.

        checkpoints = Checkpointer("runs/digits", every=100)
        state = {"model": model, "optimizer": optimizer, "data": loader}
        step = checkpoints.restore(state) or 0
        ...
            optimizer.step()
            step += 1
            checkpoints.save(step, state)

    A state is a dict of modules, optimizers, schedulers, whatever has ``state_dict`` and ``load_state_dict``, tensors, and plain values.
    Every rank makes the checkpointer, saves and restores at the same point. Replicated state is written once, spread over the ranks;
    a DTensor by the ranks that have its parts. Of plain values rank 0's are saved, except in ``PerRank``. Ranks may have different parts of
    a model, such as the stages of a pipeline (``Stages``): the checkpoint is that of the whole model, for any other layout.

    directory      where all nodes can write: a path, or a URL that fsspec knows (``s3://…``)
    keep           how many published checkpoints to keep
    every          from one checkpoint on the disk to the next: steps, or a ``datetime.timedelta``; ``save`` does nothing in other steps.
                   1 (default): each call counts. A time is that of rank 0 since the last save began (at first: since the checkpointer
                   was made); the ranks agree on it about once a second, so every rank calls ``save`` after each step
    memory_every   steps from one copy in memory to the next, at most ``every``, for a restart without the disk; default: only what goes
                   to the disk, too. A kill then costs no more steps than that, however slow the disk is; the state is three times
                   in shared memory
    group          the process group of the ranks; default: the default group, or this process alone

    ``save`` copies the state into shared memory and returns; a process of its own writes it. A checkpoint is published when the files of
    all ranks are on the disk, and only by the round that is current then. Raises TrainError for wrong arguments, CheckpointError for a
    directory that cannot be used. What goes wrong later while writing is logged (``elastirun.checkpoints``), and training goes on.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        every: int | timedelta = 1,
        memory_every: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        _check_arguments(directory, keep=keep, memory_every=1 if memory_every is None else memory_every)
        if memory_every and isinstance(every, int) and memory_every > every:
            raise WrongUse(f"memory_every={memory_every} must not be more than every={every}, after which a copy goes to the disk anyway")
        self.pid = os.getpid()
        self._url, self._keep = os.fspath(directory), keep
        self._due = due(every)
        self._memory_every = memory_every or (every if isinstance(every, int) else 0)  # steps; 0: only what goes to the disk
        self._fence = os.environ.get(FENCE, "")
        self._directory = open_directory(self._url)
        self._ranks = Ranks(group)
        self._memory = Memory(self._url)
        self._staging = Staging(IMAGES if memory_every is None else MORE_IMAGES)
        self._opened = CheckpointResources(self._url, self._ranks, self._directory, self._staging)
        self._dropped = weakref.finalize(self, self._opened.drop)
        self._dropped.atexit = False  # see checkpoints/resources.py
        self._planned: _Planned | None = None
        # The last save in each image that goes to the disk.
        self._by_image: list[Save | None] = [None] * len(self._staging.images)
        self._filled = -1  # the image filled last
        self._number = 0  # of the last save in this round
        self._costs = _Costs()
        self._last: Save | None = None  # the last one that goes to the disk
        self.restored: int | None = None  # the step that ``restore`` took from the directory as the newest; the same on all ranks
        self._closed = False

    # -- saving -----------------------------------------------------------------------------------------------------------

    def save(self, step: int, state: Mapping[str, Any], *, now: bool = False) -> bool:
        """Save ``state`` as that of ``step`` if this step is due; return whether it was. Every rank calls it.

        When it returns, the state may change; the checkpoint is published later (``wait``). ``now``: save to the disk in any case. The
        first call prepares the memory, also in a step that is not due. The step that was saved last, or restored from the directory as the
        newest, is not saved again, unless its save failed. Raises CheckpointError, on every rank, for a state that cannot be saved.
        """
        self._check_use()
        step = _whole(step)
        at_step(step)
        self._ranks.begin(f"save of step {step}")
        self._claim_directory().start_writer()
        on_disk = now or self._due.is_due(step, self._ranks)
        if not on_disk and (not self._memory_every or step % self._memory_every):
            if self._planned is None:
                self._prepare(step, *self._take_apart(state))
            return False
        if not self._is_saved(step):
            begun = time.perf_counter()
            with saving():
                self._stage(step, state, on_disk)
            self._costs.blocked.append(time.perf_counter() - begun)
        return True

    @property
    def last_save(self) -> tuple[int, int, int]:
        """Return what ``continue_from`` needs.

        When this rank saw the last save to the disk begin, the number of the last save, and its image.
        """
        return self._due.begun, self._number, self._filled

    def continue_from(self, last_save: tuple[int, int, int]) -> None:
        """Go on where an earlier checkpointer of this process has ended.

        ``every``, if it is a time, counts from its last save to the disk. The next save is newer than what it
        has left in memory, and does not take the place of the newest.
        """
        self._due.begun, self._number, self._filled = last_save

    def _check_use(self) -> None:
        """Raise TrainError where the writer is another process's, or has ended."""
        if os.getpid() != self.pid:
            raise TrainError("a Checkpointer cannot be used in a forked process")
        if self._closed:
            raise TrainError("this Checkpointer was closed")

    def _is_saved(self, step: int) -> bool:
        """Return whether the last save, or else what was restored, is that of ``step``, and no rank knows that the save failed."""
        if self._last is None or self._last.step != step:
            return self._last is None and self.restored == step
        return self._ranks.agree(not self._last.error)

    def _stage(self, step: int, state: Mapping[str, Any], on_disk: bool) -> None:
        """Copy the state into an image; hand it to the writer if it goes to the disk."""
        which, flat, values = self._prepare(step, *self._take_apart(state))
        assert self._planned is not None and self._opened.publisher is not None
        if on_disk:
            self._due.begin()
        self._number += 1
        self._costs.saves += 1
        if self._costs.saves == 2:  # all ranks have come here, so all have filled an image in this round
            self._opened.publisher.submit(self._memory.drop_others)
        large = self._planned.plan.written_by(self._ranks.rank)
        small = (TENSORS, VALUES) if self._ranks.rank == 0 else ()
        self._staging.fill(
            which,
            flat,
            values,
            Description(
                save=self._number,
                step=step,
                fence=self._fence,
                round=round_of(self._fence),
                rank=self._ranks.rank,
                world_size=self._ranks.world_size,
                files={},
                write=(*(file.name for file in large), *small),
            ),
        )
        self._filled = which
        image = self._staging.images[which]
        assert image is not None
        if why := self._memory.keep(which, image):
            log.warning("the agent does not keep the copy in memory: %s", why)
        if on_disk:
            self._last = self._by_image[which] = Save(self._number, step, which, partial(self._planned.dcp.encode, flat.tree))
            self._opened.publisher.submit(self._last)

    def _take_apart(self, state: Mapping[str, Any]) -> tuple[Flat, bytes, str]:
        """Return the tensors of ``state``, the content of values.json, and why it cannot be saved; empty if it can."""
        try:
            flat = flatten(state, self._ranks.rank)
            values = encode_values(flat.tree)
        except CheckpointError as error:
            return Flat(), b"", str(error) or "the state cannot be saved"
        if len(values) > MOST_VALUES:
            return flat, values, f"plain values take {len(values)} bytes, of {MOST_VALUES} at most: put large data into tensors"
        return flat, values, ""

    def _prepare(self, step: int, flat: Flat, values: bytes, error: str) -> tuple[int, Flat, bytes]:
        """Return the image that all ranks fill now, ready for the state, and the state with the values that other ranks have beyond it.

        Makes the plan anew where the state has changed on any rank. Raises CheckpointError on every rank if one of them cannot save its
        state, or if they are not at the same step.
        """
        changed = not error and (self._planned is None or not self._planned.fits(flat))
        busy = sum(1 << at for at, save in enumerate(self._by_image) if save is not None and not save.written.is_set())
        everyone = self._ranks.gather([step, bool(error), changed, busy, self._number, self._filled])
        if failed := [rank for rank, (_, fails, *_) in enumerate(everyone) if fails]:
            raise CheckpointError(error or f"rank {failed[0]} cannot save its state; it says why")
        if len(steps := {theirs for theirs, *_ in everyone}) > 1:
            raise CheckpointError(f"the ranks save different steps: {sorted(steps)}")
        if any(theirs for _, _, theirs, *_ in everyone):
            self._arrange(flat, values)
        assert self._planned is not None
        if self._planned.union is not None:
            verify_options(self._ranks, flat.tree)
            flat = replace(flat, tree=self._planned.union.completed(flat.tree))
            values = encode_values(flat.tree)
        # A rank that came later has filled none.
        self._number, self._filled = (max(theirs[at] for theirs in everyone) for at in (4, 5))
        if self._number in COMPARED_AGAIN:
            self._compare_again(flat)
        number = len(self._by_image)
        # The newest copy stays until the next one is complete.
        older = [(self._filled + more) % number for more in range(1, number)]
        free = [at for at in older if not any(theirs[3] >> at & 1 for theirs in everyone)]
        which = free[0] if free else min(older, key=lambda at: save.number if (save := self._by_image[at]) else 0)
        if (save := self._by_image[which]) is not None:
            self._wait_for_writer(save)
        if self._staging.prepare(which, len(values)) and self._opened.publisher is not None:
            self._opened.publisher.take_images(self._staging)
        return which, flat, values

    def _wait_for_writer(self, save: Save) -> None:
        """Wait until the image of ``save`` is written. Raises RuntimeError if the connections to the peers are cut meanwhile."""
        begun = time.perf_counter()
        live_sockets.wait_unless_cut(save.written, "a checkpoint is being written")
        self._costs.waited += time.perf_counter() - begun

    def _arrange(self, flat: Flat, values: bytes) -> None:
        """Plan which rank has which files. Every rank does it at the same point. ``values``: the tree of ``flat`` as bytes."""
        own: list[Piece] = []

        def take() -> str:
            own.extend(pieces(flat))
            return encode(own)

        made = plan([*map(decode, on_every_rank(self._ranks, take))], self._ranks.nodes, keep_node_complete=self._memory.there)
        verify_same_tensors(flat, self._ranks)
        gpu = next((tensor.device for tensor in flat.tensors.values() if tensor.is_cuda), None)
        self._staging.arrange(image_files(made, self._ranks.rank), made.tensors_json(), gpu)
        self._planned = _Planned(
            made, own, signature(flat, own), DcpFiles(made), union_of(self._ranks, kind_of(flat, self._ranks.rank), values)
        )

    def _compare_again(self, flat: Flat) -> None:
        """Say where tensors that were copies at the first save are no copies any more: one of them is saved for all."""
        try:
            verify_same_tensors(flat, self._ranks)
        except CheckpointError as error:
            if self._ranks.rank == 0:
                log.warning("after a restore all ranks will have the same, and now they have not: %s", error)

    # -- the directory ----------------------------------------------------------------------------------------------------

    def _claim_directory(self) -> Publisher:
        """Claim the directory for this round, unless that is done, and return its publisher. Every rank calls it at the same point."""
        if self._opened.publisher is not None:
            return self._opened.publisher
        if self._ranks.made_alone and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise TrainError("make the Checkpointer after torch.distributed.init_process_group(): this one was made for one process alone")

        def take() -> str:
            own = self._opened.claim_directory(self._fence)
            return json.dumps([own.name, own.sequence])

        claim, sequence = json.loads(on_every_rank(self._ranks, take if self._ranks.rank == 0 else str)[0])
        self._opened.publisher = publisher = Publisher(self._ranks, WriterProcess(), self._url, claim, sequence, self._keep, self._fence)
        return publisher

    # -- restoring --------------------------------------------------------------------------------------------------------

    def restore(self, state: MutableMapping[str, Any], step: int | None = None, *, strict: bool = True) -> int | None:
        """Put the newest checkpoint, or that of ``step``, into ``state``; return its step, or None if there is none. Every rank calls it.

        The newest is taken from the memory of the nodes where they still have all of it, else from the directory; damaged ones are set
        aside, with a line in the log. Modules, optimizers and the like get it by ``load_state_dict``, tensors in place, plain values by
        assignment in ``state``. ``strict``: what ``state`` has and the checkpoint does not is an error; else it stays as it is.

        Raises CheckpointError: the state does not fit, there is no checkpoint of ``step``, all that there are have been damaged, the
        directory cannot be used.
        """
        self._check_use()
        step = None if step is None else _whole(step)
        restoring.check_state(state)
        self._ranks.begin("restore")
        publisher = self._claim_directory()
        if self._last is not None:  # what was saved before counts, and may be saved again
            publisher.outcome(self._last, END_LIMIT)
            self._last = None
        published = self._directory.scan() if self._opened.claim is not None else []
        parts = self._memory.parts()
        try:
            found = restoring.find(self._directory, published, parts, self._fence, self._ranks, step)
            if found is not None:
                left: list[str] = []
                on_every_rank(self._ranks, lambda: left.extend(restoring.put(found, state, self._ranks.rank, strict)))
                restoring.warn_of_unused(left, found, self._ranks)
        finally:
            self._staging.adopt(self._memory.adopt(parts))
            publisher.start_writer()  # takes a processor for a moment, so not beside what restores
            publisher.take_images(self._staging)
        if found is None:
            if step is not None:
                raise CheckpointError(f"{self._url} has no checkpoint of step {step} that can be used")
            damaged = self._ranks.from_first(" ".join(self._directory.damaged()[-3:]) if self._opened.claim is not None else "")
            if damaged:  # to begin anew by itself would hide the loss
                raise CheckpointError(f"{self._url} has only damaged checkpoints ({damaged}): delete these to begin anew")
            return None
        self._filled = found.image
        self.restored = found.step if found.image < 0 and step is None else None
        at_step(found.step)
        if self._ranks.rank == 0:
            log.info("restored step %d from %s", found.step, found.where)
        return found.step

    # -- the end ----------------------------------------------------------------------------------------------------------

    def wait(self, timeout: float = END_LIMIT) -> None:
        """Wait until the last save that goes to the disk is published. Raises CheckpointError when it was not, with the reason.

        In a live job it raises RuntimeError if a peer is lost meanwhile.
        """
        if self._last is None or self._opened.publisher is None:
            return
        outcome = self._opened.publisher.outcome(self._last, timeout)
        if outcome != "published":
            raise _unpublished(self._last, outcome or f"it is not on the disk after {timeout:g} s")

    def close(self, timeout: float = END_LIMIT) -> None:
        """End the writer when it has written what was saved, or after ``timeout`` seconds.

        Raises CheckpointError where the last save that was to go to the disk could not be written or published: else a script would end
        as if all were well. Rank 0 raises in each such case, another rank for what it has to write itself. None raises while another
        exception is handled, which would be hidden, nor when the time is over: then there is a warning.

        A Checkpointer that nobody uses any more, or that is open at the end of the process, ends in the same way, with a warning.
        """
        if os.getpid() != self.pid:
            return  # a fork has the same writer, which its parent needs
        self._closed = True
        if self._dropped.detach() is None:
            return  # closed before
        self._opened.close(timeout)
        if self._last is not None and self._last.error and sys.exc_info()[0] is None:
            raise _unpublished(self._last, self._last.error)

    def stats(self) -> dict[str, Any]:
        """Return what saving has cost, as a dict fit for JSON; times in seconds.

        ``saves``; ``blocked``, how long each of the last calls took; ``waited``, in all, for the writer because no image was free;
        ``memory``, bytes of shared memory of this rank; ``published``, the step of the newest checkpoint that this rank knows of.
        """
        return {
            "saves": self._costs.saves,
            "blocked": list(self._costs.blocked),
            "waited": self._costs.waited,
            "memory": self._staging.nbytes,
            "published": self._opened.published,
        }


@dataclass(frozen=True)
class _Planned:
    """The plan of a state: which rank has which files. ``pieces``: what this rank holds of the state; ``signature``: of that.

    ``union``: what all ranks have together; None if they all have the same.
    """

    plan: Plan
    pieces: list[Piece]
    signature: Any
    dcp: DcpFiles
    union: Union | None

    def fits(self, flat: Flat) -> bool:
        """Return whether the plan is one for ``flat``, too."""
        return bool(signature(flat, self.pieces) == self.signature) and (self.union is None or self.union.is_for(flat.tree))


@dataclass
class _Costs:
    """The costs of saving. ``waited``: seconds in which there was no image to be filled; ``blocked``: seconds of each call."""

    saves: int = 0
    waited: float = 0.0
    blocked: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))


def _check_arguments(directory: Any, **numbers: int) -> None:
    for name, value in numbers.items():
        whole(name, value)
    verify_type(directory, str | os.PathLike, "directory", "a path, or a URL of an object store")
    directory = os.fspath(directory)
    if not directory:
        raise WrongUse("directory is empty: where are the checkpoints to be?")
    if directory.startswith("memory://"):
        raise WrongUse(f"{directory} is the memory of one process: no other rank, and no writer, can use it; take a path or a store")


def _unpublished(save: Save, why: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint of step {save.step} was not published: {why}")


def _whole(step: Any) -> int:
    number = as_whole(step)
    if number is None or not 0 <= number <= MAX_NUMBER:
        raise TrainError(f"step must be a whole number from 0 to 2**53, not {shown(step)}")
    return number

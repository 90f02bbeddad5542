"""Data that can only be read shard by shard (files, streams): each sample once per epoch, at any number of ranks, through resizes.

See docs/data.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from functools import cached_property, partial
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils import worker

from elastirun.train.arguments import shown, verify_callable, whole
from elastirun.train.data.permutation import Permutation
from elastirun.train.data.shard_order import Progress, Rest
from elastirun.train.data.shares import share
from elastirun.train.data.steps import Step, accumulate, verify_ranks
from elastirun.train.ddp.module import DistributedDataParallel
from elastirun.train.errors import TrainError, WrongUse
from elastirun.train.groups.collectives import digest, gather, gather_text
from elastirun.train.groups.process_groups import find_group, group_of

OURS = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator", "persistent_workers")  # arguments of DataLoader


class ElasticShards:
    """Loads batches from ``shards``, each of which ``read(shard)`` turns into an iterable of samples, always in the same order.

    The order of the shards in an epoch depends on (``seed``, epoch) alone. The ranks, and the loading workers of each, share the shards
    that are left; the position in each open shard is kept. So a job that stops anywhere continues at any world size and number of loading
    workers, and every sample is seen once per epoch.

        data = ElasticShards(files, read_lines, global_batch_size=256, num_workers=4)
        data.load_state_dict(checkpoint["data"])
        for epoch in range(data.epoch, epochs):
            for step in data.steps(ddp):
                optimizer.zero_grad()
                for batch in step:
                    loss_of(ddp(batch)).backward()
                optimizer.step()

    shards              a sequence, the same on every rank: paths, URLs, numbers, …; at least as many as there are ranks times workers, and
                        better many times as many, since ranks whose shards are read up wait for the others at the end of an epoch
    read                opens a shard. If what it returns has a method ``skip(n)`` (Hugging Face's IterableDataset), a shard that was begun
                        is continued with it; otherwise its first samples are read again and dropped
    global_batch_size   samples of a step over all ranks, as long as all ranks have some; at least one for each rank; always given
    shuffle             the order of the shards; samples within a shard come as ``read`` gives them. Default True
    seed                of the order
    process_group       the ranks; default: the default group, or this process alone if there is none
    device_mesh         in its place: a mesh of one dimension, as ``build_mesh()["dp"]``
    loading             the other arguments of ``torch.utils.data.DataLoader``: num_workers, collate_fn, pin_memory, …

    Where samples can be read by index, prefer ``ElasticDataLoader``: its global batches are the same at every world size. Raises TrainError
    for wrong arguments, and for the state of other shards.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        read: Callable[[Any], Iterable[Any]],
        global_batch_size: int | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        process_group: dist.ProcessGroup | None = None,
        device_mesh: Any = None,
        **loading: Any,
    ) -> None:
        if wrong := [name for name in OURS if name in loading]:
            raise WrongUse(f"{wrong[0]} is not an argument of ElasticShards: it has global_batch_size, shuffle and seed")
        verify_callable(read, 1, "read", "a function that opens a shard, read(shard)")
        if isinstance(shards, str) or not (hasattr(shards, "__len__") and hasattr(shards, "__getitem__")) or not len(shards):
            raise WrongUse(f"shards must be a sequence of one shard or more, such as a list of paths, not {shown(shards)}")
        group = group_of(process_group, device_mesh)
        self.group = find_group(group) if group or (dist.is_available() and dist.is_initialized()) else None
        self.rank = dist.get_rank(self.group) if self.group else 0
        self.world_size = dist.get_world_size(self.group) if self.group else 1
        global_batch_size = whole("global_batch_size", global_batch_size)
        if global_batch_size < self.world_size:
            raise WrongUse(f"global_batch_size must be at least 1 for each of {self.world_size} ranks, not {global_batch_size}")
        self.shards, self.read, self.shuffle, self.seed = shards, read, shuffle, whole("seed", seed, None)
        self.global_batch_size, self.epoch = global_batch_size, 0
        self._collate: Callable[[list[Any]], Any] = loading.pop("collate_fn", None) or default_collate
        self._workers, self._loading = max(int(loading.get("num_workers", 0)), 1), loading
        self._go_to(Rest(len(shards)))
        self._loader()  # raises for wrong arguments

    def _go_to(self, rest: Rest) -> None:
        """Continue with what is left of the epoch. Streams begin anew: one for each rank and each of its loading workers."""
        self._rest, self._progress = rest, [Progress()] * self._workers

    def steps(self, ddp: DistributedDataParallel) -> Iterator[Step]:
        """Yield the rest of the epoch as steps, each a loop over this rank's batch; every rank runs it.

        The last backward of a step reduces, and each sample counts the same. A rank whose shards are read up has loops without a turn,
        and the gradients of the others, until all are. A step counts as consumed when its loop is over.
        """
        verify_ranks(self.rank, self.world_size, ddp)
        parts = iter(self._loader())
        part = next(parts, None)
        more = any(there for (there,) in gather([part is not None], ddp.process_group, _device(ddp.process_group)))
        try:
            while more:
                following = next(parts, None)
                yield self._step(ddp, part, more=following is not None)
                self._count(part)
                more, part = ddp.agreement.more > 0, following
        finally:
            ddp._reducer.local_report.announce_batch(1.0, more=False)
        self.epoch += 1
        self._go_to(Rest(len(self.shards)))

    def _step(self, ddp: DistributedDataParallel, part: _Part | None, more: bool) -> Step:
        """Return a step with this rank's ``part``; tell the others whether there is ``more`` after it."""
        sizes, batches = ([], []) if part is None else ([part.samples], [part.batch])
        ddp._reducer.local_report.announce_batch(sum(sizes), more)
        return Step(None, sum(sizes), accumulate(ddp, sizes, batches), partial(self._count, part))

    def _count(self, part: _Part | None) -> None:
        """Count ``part`` as consumed."""
        if part is not None:
            self._progress[part.stream] = part.progress

    def __iter__(self) -> Iterator[Any]:
        """Load this rank's batches of the rest of the epoch, as for an evaluation: the position stays as it is."""
        return (part.batch for part in self._loader())

    def _loader(self) -> DataLoader[_Part]:
        """Return what loads this rank's batches from the present position on."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch)  # the loading workers' seed, not drawn from the program's
        return DataLoader(_Streams(self), batch_size=None, collate_fn=_whole, generator=generator, **self._loading)

    def state_dict(self) -> dict[str, Any]:
        """Return where the training stands in its data; the same on every rank. Every rank calls it at the same point, after a step.

        A few integers, and two for each shard that is begun and not read up.
        """
        progress = [astuple(one) for one in self._progress]
        if self.group is not None and self.world_size > 1:
            ranks = [json.loads(text) for text in gather_text(json.dumps(progress), self.group, _device(self.group))]
        else:
            ranks = [progress]
        streams = [Progress(*ranks[rank][number]) for number in range(self._workers) for rank in range(self.world_size)]
        rest = self._rest.after(streams)
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "next": rest.next_place,
            "open": [list(place) for place in rest.open],
            "shards": rest.shards,
            "names": self._names,
        }

    @cached_property
    def _names(self) -> int:
        """Return a digest of the shards' names, as far as they have some; objects without a name of their own differ in each process."""
        return digest("\n".join("" if f" object at {id(shard):#x}" in str(shard) else str(shard) for shard in self.shards))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` says, at the present world size, global batch size and number of loading workers."""
        try:
            seed, epoch, place, shards, names = (int(state[name]) for name in ("seed", "epoch", "next", "shards", "names"))
            opened = tuple((int(at), int(samples)) for at, samples in state["open"])
        except (KeyError, TypeError, ValueError) as error:
            raise TrainError(f"this is not the state of ElasticShards: {error!r}") from None
        if shards != len(self.shards) or names != self._names:
            raise TrainError(f"the state is of {shards} other shards, these are {len(self.shards)}: samples would be lost or doubled")
        if epoch < 0 or not 0 <= place <= shards or any(not 0 <= at < place or samples < 0 for at, samples in opened):
            raise TrainError(f"the state is out of range: epoch {epoch}, next shard {place} of {shards}, open {opened}")
        self.seed, self.epoch = seed, epoch
        self._go_to(Rest(shards, place, opened))


class _Part(NamedTuple):
    """A batch of one stream, and the progress of the stream after it."""

    stream: int  # number of the stream among those of the rank
    progress: Progress
    samples: int
    batch: Any


class _Streams(IterableDataset[_Part]):
    """The batches of a rank's streams: of one in each loading worker."""

    def __init__(self, data: ElasticShards) -> None:
        self._shards, self._read, self._collate = data.shards, data.read, data._collate
        self._key = (data.seed, data.epoch) if data.shuffle else None
        self._size = len(share(data.global_batch_size, data.rank, data.world_size))
        self._rest, self._progress = data._rest, list(data._progress)
        self._rank, self._world_size = data.rank, data.world_size

    def __iter__(self) -> Iterator[_Part]:
        number = 0
        if info := get_worker_info():
            number, worker._worker_info = info.id, None  # else an iterable such as Hugging Face's would give a part of a shard
        samples = self._samples(self._rank + self._world_size * number, self._world_size * len(self._progress), self._progress[number])
        while several := list(islice(samples, self._size)):
            yield _Part(number, several[-1][0], len(several), self._collate([sample for _, sample in several]))

    def _samples(self, stream: int, streams: int, progress: Progress) -> Iterator[tuple[Progress, Any]]:
        """Yield the samples of a stream, each with the progress after it."""
        order = Permutation(len(self._shards), *self._key) if self._key else None
        for before, place, read in self._rest.part(stream, streams, progress):
            index = place if order is None else int(order.at(torch.tensor([place]))[0])
            opened: Any = self._read(self._shards[index])
            rest = opened.skip(read) if read and hasattr(opened, "skip") else islice(opened, read, None)
            for samples, sample in enumerate(rest, read + 1):
                yield Progress(before, samples), sample


def _device(group: dist.ProcessGroup) -> torch.device:
    """Return the device of small tensors that ``group`` sends."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def _whole(part: Any) -> Any:
    """Leave a batch as it is: it has been collated."""
    return part

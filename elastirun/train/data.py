"""Data that every epoch brings exactly once, at any number of ranks, through resizes, crashes and restarts in the middle of an epoch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import chain, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from .errors import TrainError
from .permutation import Permutation

OURS = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator")  # arguments of DataLoader that have no place here


def share(size: int, rank: int, world_size: int) -> range:
    """Return which of ``size`` samples ``rank`` has: neighbours, as many as on the other ranks or one more or fewer."""
    return range(rank * size // world_size, (rank + 1) * size // world_size)


class ElasticDataLoader:
    """Loads this rank's share of each global batch of a map-style ``dataset``.

    The order of an epoch depends on (``seed``, epoch) alone, and the position in it is one number for all ranks. So a job that stops
    anywhere continues with the next sample, at any world size: every sample is seen once per epoch, none is padded or dropped.

        loader = ElasticDataLoader(dataset, global_batch_size=256, num_workers=4)
        loader.load_state_dict(checkpoint["data"])
        for epoch in range(loader.epoch, epochs):
            for batch in loader:                # what is left of the epoch
                ...

    global_batch_size   samples of a step over all ranks; the last batch of an epoch may be smaller
    shuffle             False: in the order of the dataset, for an evaluation in which each sample counts once
    seed                of the order
    drop_last           leave out the last batch of an epoch if it is smaller
    rank, world_size    default: those of the default process group, else RANK and WORLD_SIZE, else 0 of 1
    loading             the other arguments of ``torch.utils.data.DataLoader``: num_workers, collate_fn, pin_memory, …

    A batch is None where this rank has no sample of the global batch, because the batch has fewer samples than there are ranks. The others
    have some: take part in their reduction with ``ddp.skip()``. ``samples`` is the number of samples of this rank, for
    ``ddp.set_samples()``, so that every sample of the global batch counts the same.

    ``state_dict()`` counts a batch as consumed from the moment it is handed out, so save after the optimizer's step. What workers have
    loaded in advance is not counted. Raises TrainError for wrong arguments, and for the state of another dataset.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        global_batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        **loading: Any,
    ) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise TrainError(f"ElasticDataLoader needs a dataset with a length and samples by index, which {type(dataset).__name__} is not")
        if wrong := [name for name in OURS if name in loading]:
            raise TrainError(f"{wrong[0]} is not an argument of ElasticDataLoader: it has global_batch_size, shuffle, seed and drop_last")
        if global_batch_size < 1:
            raise TrainError(f"global_batch_size must be at least 1, not {global_batch_size}")
        self.length = len(dataset)
        self.global_batch_size, self.shuffle, self.seed, self.drop_last = global_batch_size, shuffle, seed, drop_last
        self.rank, self.world_size = _rank_and_world(rank, world_size)
        self.epoch = self.consumed = 0  # consumed: samples of the epoch, over all ranks
        self.samples = 0  # of this rank, in the batch handed out last
        # The generator gives the base seed of the loading workers. Without it each epoch would draw from the seed of the model's dropout.
        self._generator = torch.Generator()
        self._loader = DataLoader(dataset, batch_sampler=_Shares(self), generator=self._generator, **loading)

    def __len__(self) -> int:
        """Return the number of global batches of an epoch."""
        whole, rest = divmod(self.length, self.global_batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def sizes(self) -> Iterator[int]:
        """Return the sizes of the global batches that are left in the epoch."""
        whole, rest = divmod(self.length - self.consumed, self.global_batch_size)
        return chain(repeat(self.global_batch_size, whole), () if self.drop_last or not rest else (rest,))

    def __iter__(self) -> Iterator[Any]:
        """Load the rest of the epoch; when its last batch is done, the next epoch begins."""
        self._generator.manual_seed(self.seed + self.epoch)
        sizes, loaded = self.sizes(), iter(self._loader)
        for size in sizes:
            self.samples = len(share(size, self.rank, self.world_size))
            batch = next(loaded) if self.samples else None
            self.consumed += size
            yield batch
        self.epoch, self.consumed = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Return where the training stands in its data; the same on every rank."""
        return {"seed": self.seed, "epoch": self.epoch, "consumed": self.consumed, "length": self.length}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue where ``state`` says, at the present world size and global batch size."""
        try:
            seed, epoch, consumed, length = (int(state[name]) for name in ("seed", "epoch", "consumed", "length"))
        except (KeyError, TypeError, ValueError) as error:
            raise TrainError(f"this is not the state of an ElasticDataLoader: {error!r}") from None
        if length != self.length:
            raise TrainError(f"the state is of a dataset of {length} samples, this one has {self.length}: samples would be lost or doubled")
        if epoch < 0 or not 0 <= consumed <= length:
            raise TrainError(f"the state is out of range: epoch {epoch}, {consumed} of {length} samples consumed")
        self.seed, self.epoch, self.consumed = seed, epoch, consumed


class _Shares:
    """The indices of this rank's samples, batch by batch, from the position at which ``loader`` stands when an iteration begins."""

    def __init__(self, loader: ElasticDataLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        loader = self._loader  # read now: the position moves on before the first batch is asked for, if this rank has no part of it
        order = Permutation(loader.length, loader.seed, loader.epoch) if loader.shuffle else None
        return self._indices(order, loader.consumed, loader.sizes())

    def _indices(self, order: Permutation | None, position: int, sizes: Iterator[int]) -> Iterator[list[int]]:
        for size in sizes:
            if mine := share(size, self._loader.rank, self._loader.world_size):
                positions = torch.arange(position + mine.start, position + mine.stop, device="cpu")
                yield (positions if order is None else order.at(positions)).tolist()
            position += size


def _rank_and_world(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    if (rank is None) != (world_size is None):
        raise TrainError("give both rank and world_size, or neither")
    if rank is None or world_size is None:
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if not 0 <= rank < world_size:
        raise TrainError(f"rank must be between 0 and {world_size - 1}, not {rank}")
    return rank, world_size

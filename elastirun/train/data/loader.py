"""Data that every epoch brings exactly once, at any number of ranks, through resizes, crashes and restarts in the middle of an epoch.

See docs/data.md.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from elastirun.train.arguments import named, shown, verify_callable, whole
from elastirun.train.data.balance import Balance
from elastirun.train.data.deterministic import DeterministicShards
from elastirun.train.data.keyed_rng import KeyedSamples
from elastirun.train.data.permutation import Permutation
from elastirun.train.data.shares import share, split
from elastirun.train.data.steps import Step, accumulate, verify_ranks
from elastirun.train.ddp.module import DistributedDataParallel
from elastirun.train.errors import TrainError, WrongUse
from elastirun.train.groups.collectives import gather
from elastirun.train.mesh import place_in, verify_no_mesh
from elastirun.train.reduction.transports.base import reduction_errors

SCALES = {"linear": lambda times: times, "sqrt": math.sqrt}  # factor of the learning rate for a global batch that is so many times as large
OURS = {  # arguments of torch's DataLoader that have no place here, and what to do instead
    "batch_size": "give global_batch_size=, the samples of a step over all ranks together",
    "sampler": (own := "a dataset can give its samples in an order of its own (shuffle=False)"),
    "batch_sampler": own,
    "generator": "give seed=",
}


class ElasticDataLoader:
    """Loads this rank's share of each global batch of a map-style ``dataset``.

    The order of an epoch depends on (``seed``, epoch) alone, and the position in it is one number for all ranks. So a job that stops
    anywhere continues with the next sample, at any world size: every sample is seen once per epoch, none is padded or dropped.

        loader = ElasticDataLoader(dataset, global_batch_size=256, num_workers=4)
        loader.load_state_dict(checkpoint["data"])
        for epoch in range(loader.epoch, epochs):
            for batch in loader:                # what is left of the epoch
                ...

    global_batch_size   samples of a step over all ranks together, in place of torch's ``batch_size``; always given. The last batch of an
                        epoch may be smaller
    micro_batch_size    the most samples that a rank loads and computes at a time, in the steps of ``steps()``; default: its whole share
    scale               None (default): the global batch is the same at every world size. "linear" or "sqrt": ``global_batch_size`` is that
                        of ``base_world_size`` ranks, and each rank's share stays instead; multiply the learning rate by ``lr_factor``
    base_world_size     number of ranks that ``global_batch_size`` and the learning rate were chosen for; needed with ``scale``
    shuffle             False: in the order of the dataset, for an evaluation in which each sample counts once
    seed                of the order
    keyed_rng           seed torch, ``random`` and numpy for each sample by (seed, epoch, sample), so that random augmentations in the
                        dataset are the same at every world size and number of loading workers; default: with ``DeterministicShards``
    drop_last           leave out the last batch of an epoch if it is smaller
    balance             give slow ranks fewer samples of each global batch, in ``steps()`` on CPUs: the batch keeps its samples and their
                        order, and the gradients are its mean as before. Decided each 20 steps by the times of the ranks; a rank has at
                        least a quarter of an even share. Default False: as many for each rank
    work                a function that returns how much there is to compute in a batch as it is loaded, such as its number of tokens;
                        default: its samples. By it ``balance``, and the search for stragglers, judge how fast a rank is
    device_mesh         the dimension over which data are shared, as ``build_mesh()["dp"]``: ranks that share a replica (tensor
                        parallelism, pipelines) get the same samples. Needed in a job with ``--mesh``
    rank, world_size    in its place; default: those of the default process group, else RANK and WORLD_SIZE, else 0 of 1
    loading             the other arguments of ``torch.utils.data.DataLoader``: num_workers, collate_fn, pin_memory, …

    A batch is None where this rank has no sample of the global batch, because the batch has fewer samples than there are ranks. The others
    have some: take part in their reduction with ``ddp.skip()``. ``samples`` is the number of samples of this rank, for
    ``ddp.set_samples()``, so that every sample of the global batch counts the same. ``steps()`` does both.

    ``state_dict()`` counts a batch as consumed from the moment it is handed out, and a step when its loop is over, so save after the
    optimizer's step. What workers have loaded in advance is not counted. Raises TrainError for wrong arguments, and for the state of
    another dataset.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        global_batch_size: int | None = None,
        *,
        micro_batch_size: int | None = None,
        scale: str | None = None,
        base_world_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        keyed_rng: bool | None = None,
        drop_last: bool = False,
        balance: bool = False,
        work: Callable[[Any], float] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        device_mesh: Any = None,
        **loading: Any,
    ) -> None:
        self.length = _verify_dataset(dataset)
        if wrong := [name for name in OURS if name in loading]:
            raise WrongUse(f"{wrong[0]} is not an argument of ElasticDataLoader: {OURS[wrong[0]]}")
        global_batch_size = whole("global_batch_size", global_batch_size)
        micro_batch_size = None if micro_batch_size is None else whole("micro_batch_size", micro_batch_size)
        seed = whole("seed", seed, None)
        self.rank, self.world_size = _rank_and_world(rank, world_size) if device_mesh is None else place_in(device_mesh)
        self.global_batch_size, self.lr_factor = _scaled(global_batch_size, scale, base_world_size, self.world_size)
        self._follows_world = scale is not None  # the size of the global batch
        self.micro_batch_size, self.shuffle, self.seed, self.drop_last = micro_batch_size, shuffle, seed, drop_last
        self.epoch = 0  # the number of the epoch that is under way, or begins next
        self.consumed = 0  # samples of the epoch that were handed out, over all ranks
        self.samples = 0  # number of samples of this rank in the batch handed out last
        self.contract: dict[str, int | str] = {}  # of deterministic mode
        self._loading, self._keyed_rng, self._work = {"dataset": dataset, **loading}, keyed_rng, work
        if work is not None:
            verify_callable(work, 1, "work", "a function of a batch that returns a number")
        self._make_loader(keyed=bool(keyed_rng))
        ahead = self._loader.num_workers * (self._loader.prefetch_factor or 0)
        self.balance = Balance(self.world_size, ahead) if balance else None

    def set_world(self, rank: int, world_size: int) -> None:
        """Load the share of ``rank`` of ``world_size`` from the next iteration on. Raises TrainError with ``scale``."""
        if self._follows_world:
            raise WrongUse("a loader whose global batch depends on the world size (scale=) cannot go on in another world")
        if self.balance:
            raise WrongUse("a loader with balance=True cannot go on in another world: leave it out in a live job")
        self.rank, self.world_size = _rank_and_world(rank, world_size)

    def _make_loader(self, keyed: bool) -> None:
        """Make the loader; ``keyed``: random numbers of the dataset are keyed by sample."""
        self.keyed = keyed
        dataset = self._loading["dataset"]
        arguments = {**self._loading, "dataset": KeyedSamples(dataset) if keyed else dataset}
        # The generator gives the base seed of the loading workers. Without it each epoch would draw from the seed of the model's dropout.
        self._loader = DataLoader(batch_sampler=_Shares(self), generator=torch.Generator(), **arguments)

    def __len__(self) -> int:
        """Return the number of global batches of an epoch."""
        return self._batches(self.length)

    @property
    def left(self) -> int:
        """Return the number of global batches that are left in the epoch."""
        return self._batches(self.length - self.consumed)

    def _batches(self, samples: int) -> int:
        whole, rest = divmod(samples, self.global_batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def sizes(self) -> Iterator[int]:
        """Return the sizes of the global batches that are left in the epoch."""
        whole, rest = divmod(self.length - self.consumed, self.global_batch_size)
        return chain(repeat(self.global_batch_size, whole), () if self.drop_last or not rest else (rest,))

    def __iter__(self) -> Iterator[Any]:
        """Load the rest of the epoch; when its last batch is done, the next epoch begins. Raises WrongUse with ``balance``."""
        if self.balance:
            raise WrongUse("balance=True needs the loop `for step in loader.steps(ddp)`, which weighs the gradients of unequal shares")
        for size, _, batches in self._global_batches(self._whole):
            batch = next(batches, None)
            self.consumed += size
            yield batch

    def steps(self, ddp: DistributedDataParallel | DeterministicShards) -> Iterator[Step]:
        """Yield the rest of the epoch as steps, each a loop over this rank's micro-batches; every rank runs it.

            for step in loader.steps(ddp):
                optimizer.zero_grad()
                for batch in step:                   # at most micro_batch_size samples; none where this rank has no sample
                    loss_of(ddp(batch)).backward()   # the mean over the samples of ``batch``
                optimizer.step()                     # the gradients are the mean over the global batch

        The last backward of a step reduces, also where ranks have different numbers of micro-batches. A step counts as consumed when
        its loop is over. Raises TrainError within ``ddp.no_sync()`` and after ``ddp.accumulate()``; with ``DeterministicShards``, where
        the micro-batches are shards, if the result would have other bits than before.
        """
        if not isinstance(ddp, DeterministicShards):
            verify_ranks(self.rank, self.world_size, ddp)
        return self.steps_in_any_world(ddp)

    def steps_in_any_world(self, ddp: DistributedDataParallel | DeterministicShards) -> Iterator[Step]:
        """Yield steps as ``steps`` does, also where the module is in another world than the data.

        A new worker of a live job is in a world of its own until the others take it in.
        """
        balance = self.balance
        if balance:
            self._verify_balanced(ddp)
        if isinstance(ddp, DeterministicShards):
            self._begin_exact(ddp)
        else:
            self.contract = {}
        for size, sizes, batches in self._global_batches(ddp.parts if isinstance(ddp, DeterministicShards) else self._micro_batches):
            before, number = self.consumed, balance.step if balance else 0

            def done(consumed: int = before + size, number: int = number) -> None:
                self.consumed = consumed
                if balance:
                    balance.finish(number)

            if isinstance(ddp, DeterministicShards):
                computed = ddp.run((self.seed, self.epoch, before), size, batches)
            else:
                computed = accumulate(ddp, sizes, batches, self._work, balance.measure if balance else None)
            yield Step(size, self.samples, computed, done)
            done()
            if balance and balance.due and self.world_size > 1:
                with reduction_errors("the exchange of the ranks' speeds"):
                    told = gather(balance.told, ddp.process_group, torch.device("cpu"))
                balance.decide(told, self.global_batch_size)

    def _verify_balanced(self, ddp: DistributedDataParallel | DeterministicShards) -> None:
        """Raise WrongUse unless the ranks' shares can be balanced in steps with ``ddp``."""
        if isinstance(ddp, DeterministicShards) or ddp._reducer.parts.planner.device.type != "cpu":
            raise WrongUse(
                "balance=True needs a DistributedDataParallel of elastirun on CPUs: the times of a GPU are not measured, and "
                "DeterministicShards has shards of a fixed size"
            )
        if self.world_size != (dist.get_world_size() if dist.is_initialized() else 1):
            raise WrongUse("balance=True needs a replica on each rank: ranks that share one would decide about its samples apart")

    def _begin_exact(self, exact: DeterministicShards) -> None:
        """Begin steps of ``exact``. Raises TrainError if the steps before had other bits."""
        if (self.rank, self.world_size) != (exact.rank, exact.world_size):
            raise TrainError(
                f"the loader is of rank {self.rank} of {self.world_size}, DeterministicShards of rank {exact.rank} of {exact.world_size}"
            )
        if self.micro_batch_size is not None:
            raise TrainError(
                "micro_batch_size has no meaning with DeterministicShards, whose shards are the micro-batches: give it more shards"
            )
        now = {"global_batch_size": self.global_batch_size, **exact.contract()}
        for name, value in now.items():
            if (before := self.contract.get(name, value)) != value:
                raise TrainError(
                    f"the state is of deterministic training with {name} = {before}, now it is {value}, so the result would have other "
                    'bits; to continue all the same, delete "deterministic" from the state of the loader'
                )
        self.contract = now
        if self._keyed_rng is None and not self.keyed:
            self._make_loader(keyed=True)

    def _global_batches(self, cut: Callable[[int, int], list[range]]) -> Iterator[tuple[int, list[int], Iterator[Any]]]:
        """Yield what is left of the epoch: the size of each global batch, and this rank's parts of it, as sizes and as loaded batches."""
        self._loader.generator.manual_seed(self.seed + self.epoch)
        first = self.balance.step if self.balance else 0
        assert isinstance(self._loader.batch_sampler, _Shares)
        self._loader.batch_sampler.cut = cut
        sizes, loaded = self.sizes(), iter(self._loader)
        for step, size in enumerate(sizes, first):
            parts = [len(part) for part in cut(size, step)]
            self.samples = sum(parts)
            batches = islice(loaded, len(parts))
            yield size, parts, batches
            for _ in batches:  # those that the caller has not taken
                pass
        self.epoch, self.consumed = self.epoch + 1, 0

    def _whole(self, size: int, step: int) -> list[range]:
        return split(share(size, self.rank, self.world_size), None)

    def _micro_batches(self, size: int, step: int) -> list[range]:
        weights = self.balance.weights_at(step) if self.balance else None
        return split(share(size, self.rank, self.world_size, weights), self.micro_batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Return where the training stands in its data; the same on every rank. In deterministic mode also what its bits depend on.

        With ``balance`` also the shares of the ranks, which hold for as many ranks; others begin with an even split.
        """
        over = self.consumed > 0 and next(self.sizes(), None) is None  # the epoch: the next one begins
        epoch, consumed = (self.epoch + 1, 0) if over else (self.epoch, self.consumed)
        state: dict[str, Any] = {"seed": self.seed, "epoch": epoch, "consumed": consumed, "length": self.length}
        if self.contract:
            state["deterministic"] = dict(self.contract)
        if self.balance:
            state["balance"] = self.balance.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
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
        self.contract = dict(state.get("deterministic", {}))
        if self.balance and "balance" in state:
            self.balance.load_state_dict(state["balance"])


def _verify_dataset(dataset: Any) -> int:
    """Return the number of samples of ``dataset``. Raises WrongUse unless it has samples by index."""
    needs = "ElasticDataLoader needs a dataset with a length and samples by index"
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        instead = "give its dataset" if isinstance(dataset, DataLoader) else "without these use ElasticShards"
        raise WrongUse(f"{needs}, not {named(dataset)}: {instead}")
    if isinstance(dataset, Mapping) and 0 not in dataset:  # such as the splits of Hugging Face's datasets
        raise WrongUse(f"{needs}, not {named(dataset)} of {', '.join(map(shown, islice(dataset, 5)))}: give one of these")
    if not (length := len(dataset)):
        raise WrongUse(f"the dataset, {named(dataset)}, has no samples: see where it looks for them")
    return length


class _Shares:
    """The indices of this rank's samples, batch by batch, from the position at which ``loader`` stands when an iteration begins."""

    def __init__(self, loader: ElasticDataLoader) -> None:
        self._loader = loader
        self.cut: Callable[[int, int], list[range]] = loader._whole  # this rank's parts, by the batch's size and step

    def __iter__(self) -> Iterator[list[Any]]:
        loader = self._loader  # read now: the position moves on before the first batch is asked for, if this rank has no part of it
        order = Permutation(loader.length, loader.seed, loader.epoch) if loader.shuffle else None
        steps = enumerate(loader.sizes(), loader.balance.step if loader.balance else 0)
        indices = _indices(order, loader.consumed, steps, self.cut)
        if not loader.keyed:
            return indices
        seed, epoch = loader.seed, loader.epoch
        return ([(seed, epoch, index) for index in batch] for batch in indices)


def _indices(
    order: Permutation | None, position: int, steps: Iterator[tuple[int, int]], cut: Callable[[int, int], list[range]]
) -> Iterator[list[int]]:
    """Yield the indices of the samples of each part of each global batch, from ``position`` on. ``steps``: numbers and sizes."""
    for step, size in steps:
        if parts := cut(size, step):  # neighbours: found together, because a call takes half a millisecond however few they are
            first = parts[0].start
            positions = torch.arange(position + first, position + parts[-1].stop, device="cpu")
            found = (positions if order is None else order.at(positions)).tolist()
            yield from (found[part.start - first : part.stop - first] for part in parts)
        position += size


def _scaled(global_batch_size: int, scale: str | None, base_world_size: int | None, world_size: int) -> tuple[int, float]:
    """Return the global batch at ``world_size`` ranks, and the factor of the learning rate that goes with it."""
    if scale is None and base_world_size is None:
        return global_batch_size, 1.0
    if scale not in SCALES:
        raise WrongUse(f"scale must be one of {', '.join(SCALES)}, not {scale!r}; without it base_world_size has no meaning")
    if base_world_size is None:
        raise WrongUse("scale needs base_world_size: the number of ranks that global_batch_size and the learning rate were chosen for")
    size = max(round(global_batch_size * world_size / whole("base_world_size", base_world_size)), 1)
    return size, float(SCALES[scale](size / global_batch_size))


def _rank_and_world(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    if (rank is None) != (world_size is None):
        raise WrongUse("give both rank and world_size, or neither")
    if rank is None or world_size is None:
        verify_no_mesh('device_mesh=build_mesh()["dp"], or rank= and world_size=')
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if not 0 <= whole("rank", rank, None) < whole("world_size", world_size):
        raise WrongUse(f"rank must be between 0 and {world_size - 1}, not {rank}")
    return rank, world_size


def steps_at_once(loader: ElasticDataLoader, model: DistributedDataParallel) -> Iterator[Step]:
    """Yield the steps of ``loader`` for ``model``; each counts as consumed when it is handed out, as batches do."""
    for step in loader.steps_in_any_world(model):
        step.done()
        yield step

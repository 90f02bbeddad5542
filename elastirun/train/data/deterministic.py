"""Training with bitwise the same result at any number of ranks, and through resizes. See docs/data.md.

A global batch is cut into a fixed number of shards. The gradient of each shard is computed alone, with the same kernels and the same
random numbers whichever rank does it, and the gradients are added up along a fixed tree (``shard_tree``).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from elastirun.progress import progress
from elastirun.train.arguments import verify_module, whole
from elastirun.train.data.keyed_rng import keyed_rng
from elastirun.train.data.shard_tree import Span, add_up, halves, subtrees
from elastirun.train.data.shares import share
from elastirun.train.ddp.replica_description import check_reducible, describe, sparse_names
from elastirun.train.errors import TrainError, WrongUse
from elastirun.train.groups.collectives import copy_from, verify_same
from elastirun.train.groups.process_groups import find_group, group_of
from elastirun.train.reduction.buckets.memory import make_views
from elastirun.train.reduction.control_words import REQUESTS
from elastirun.train.reduction.transports.base import reduction_errors

PIECE = 1 << 22  # elements that are exchanged together: 16 MiB of float32, a few times which is the memory of an exchange


class DeterministicShards:
    """Takes the place of ``DistributedDataParallel(module)`` in ``ElasticDataLoader.steps()``, for bitwise the same result at any world.

        model = DeterministicShards(module, shards=8)
        for step in loader.steps(model):
            optimizer.zero_grad()
            for batch in step:                        # one shard of the global batch
                loss_of(model(batch)).backward()
            optimizer.step()                          # the gradients have the same bits at 1, 2, 3, … ranks

    shards          parts of each global batch, from 1; more ranks than shards are idle. Each shard is one forward and one backward
    threads         threads of this process for torch's operators on CPUs (``torch.set_num_threads``); default 1. A launcher's
                    OMP_NUM_THREADS changes with the number of workers on the node, and with it the bits
    process_group   the ranks; default: the default group. Each holds a replica; at construction the replicas are compared (a difference
                    is a ModelMismatch) and rank 0's parameters and buffers are copied to the others
    device_mesh     in its place: a mesh of one dimension, as ``build_mesh()["dp"]``

    ``request("checkpoint")`` or ``request("drain")`` of a rank is in ``requests`` of all ranks after the same step, and ``Drain(model)``
    works. ``step`` counts the steps.

    ``model(…)`` calls the module and nothing else: save and load the module itself. Random numbers of a forward (dropout) are keyed by
    (seed, epoch, position, shard), those of the dataset by (seed, epoch, sample), as with the loader's ``keyed_rng=True``. Gradients from
    before a step are dropped. A parameter that no shard used has no gradient.

    The bits depend on the number of shards, the global batch size, the number of threads, the version of torch and the kind of processor.
    All are in ``loader.state_dict()``; to continue with others is a TrainError that names the first. On a GPU it takes
    ``torch.use_deterministic_algorithms(True)``. Raises TrainError for what would depend on the number of ranks: BatchNorm in training
    mode, other buffers that a forward changes, sparse gradients. What a ``collate_fn`` draws is not keyed.
    """

    _without_reducer = False  # for ``Drain``: requests can be made at once

    def __init__(
        self,
        module: nn.Module,
        shards: int = 8,
        *,
        threads: int = 1,
        process_group: dist.ProcessGroup | None = None,
        device_mesh: Any = None,
    ) -> None:
        shards, threads = whole("shards", shards), whole("threads", threads)
        verify_module(module, "DeterministicShards")
        if sparse := sorted(sparse_names(module)):
            raise WrongUse(f"the gradient of {sparse[0]} is sparse, which deterministic mode does not reduce: use sparse=False")
        check_reducible(list(module.named_parameters()), None)
        self.module, self.shards, self.threads = module, shards, threads
        self.process_group = find_group(group_of(process_group, device_mesh))
        self.rank, self.world_size = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        self._spans = [subtrees(share(shards, rank, self.world_size), (0, shards)) for rank in range(self.world_size)]  # by rank
        self.step = 0
        self.requests: frozenset[str] = frozenset()
        self.drained: int | None = None  # the first step in which a rank requested "drain"
        self._asked: set[str] = set()
        self._params: list[nn.Parameter] = []  # those that are trained, as of the last step
        self._memory: list[_Sum] = []  # of earlier steps, for reuse
        self._result: _Sum | None = None
        tensors = [*module.named_parameters(), *module.named_buffers()]
        self._device = tensors[0][1].device if tensors else torch.device("cpu")
        with reduction_errors("comparing and copying the replicas"):
            verify_same(describe(tensors, (), self.contract()), "parameters, buffers and settings", self.process_group, self._device)
            copy_from(0, [tensor.detach() for _, tensor in tensors], self.process_group)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*inputs, **kwargs)

    def request(self, name: str) -> None:
        """Request "checkpoint" or "drain": after the next step, ``name in requests`` on every rank, for one step."""
        if name not in REQUESTS:
            raise TrainError(f'there is no request {name!r}: give "checkpoint" or "drain"')
        self._asked.add(name)

    def contract(self) -> dict[str, int | str]:
        """Return what the bits of the result depend on, besides the training script."""
        gpu = self._device.type == "cuda"
        return {
            "shards": self.shards,
            "threads": self.threads,
            "torch": str(torch.__version__),
            "processor": torch.cuda.get_device_name(self._device) if gpu else torch.backends.cpu.get_cpu_capability(),
            "matmul": torch.get_float32_matmul_precision(),
        }

    def parts(self, size: int, step: int = 0) -> list[range]:
        """Return the shards of this rank in a global batch of ``size`` samples, without those that are empty; the same in each ``step``."""
        mine = share(self.shards, self.rank, self.world_size)
        return [part for shard in mine if (part := share(size, shard, self.shards))]

    # -- one step -------------------------------------------------------------------------------------------------------

    def run(self, key: Sequence[int], size: int, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield this rank's ``batches`` of a global batch of ``size`` samples, for one backward each; then set the gradients.

        Random numbers depend on ``key`` and the shard. Every rank runs the loop.
        """
        self._prepare()
        buffers = self._buffers()
        sums = []
        for span in self._spans[self.rank]:
            sums.append((yield from self._add_up(span, key, size, batches)))
        if changed := [name for name, version in self._buffers().items() if buffers.get(name) != version]:
            raise TrainError(
                f"the forward changes the buffer {changed[0]}, whose value would depend on the number of ranks: deterministic mode needs "
                "buffers that stay as they are in training"
            )
        with reduction_errors("the exchange of gradients"), torch.no_grad():
            self._exchange(sums, size)
        self._memory += sums

    def _prepare(self) -> None:
        """Refuse what cannot be deterministic; set the number of threads; find the parameters that are trained now."""
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        if self._device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
            raise WrongUse("deterministic mode on a GPU needs torch.use_deterministic_algorithms(True)")
        for name, layer in self.module.named_modules():
            if isinstance(layer, _NormBase) and layer.training and (layer.running_mean is not None or isinstance(layer, nn.SyncBatchNorm)):
                raise WrongUse(
                    f"{name or 'the module'} is a {type(layer).__name__} in training mode, whose statistics would depend on the number of "
                    "ranks: use GroupNorm or LayerNorm, or freeze the statistics with eval() on this layer"
                )
        params = [param for param in self.module.parameters() if param.requires_grad]
        if not params:
            raise TrainError("no parameter of the module requires a gradient: there is nothing to reduce")
        if list(map(id, params)) != list(map(id, self._params)):
            self._params, self._memory, self._result = params, [], _Sum(params)

    def _buffers(self) -> dict[str, tuple[int, int]]:
        """Return which tensor each buffer is, and its version."""
        return {name: (id(buffer), buffer._version) for name, buffer in self.module.named_buffers()}

    def _add_up(self, span: Span, key: Sequence[int], size: int, batches: Iterator[Any]) -> Generator[Any, None, _Sum]:
        """Yield the batches of the shards in ``span``; return the sum of their gradients. Keeps one sum for each level of the tree."""
        if span[1] - span[0] == 1:
            weight = yield from self._compute(span[0], key, size, batches)
            total = self._memory.pop() if self._memory else _Sum(self._params)
            total.take(weight)
            return total
        left, right = halves(span)
        total = yield from self._add_up(left, key, size, batches)
        if right[1] - right[0] == 1:
            total.add_gradients((yield from self._compute(right[0], key, size, batches)))
        else:
            rest = yield from self._add_up(right, key, size, batches)
            total.add(rest)
            self._memory.append(rest)
        return total

    def _compute(self, shard: int, key: Sequence[int], size: int, batches: Iterator[Any]) -> Generator[Any, None, float]:
        """Yield the batch of ``shard``, if it is not empty, for its backward; return the weight of the gradients."""
        for param in self._params:
            param.grad = None
        samples = len(share(size, shard, self.shards))
        if samples:
            batch = next(batches)
            with keyed_rng(*key, shard):
                yield batch
        return samples / self._largest(size)

    def _largest(self, size: int) -> int:
        """Return the number of samples of the largest shards, whose weight is 1: their gradients need not be multiplied."""
        return -(-size // self.shards)

    def _exchange(self, sums: Sequence[_Sum], size: int) -> None:
        """Add up all ranks' ``sums`` along the tree; set the gradients, the mean over ``size`` samples."""
        progress()  # before this rank waits for the others: a rank that never comes has made fewer steps
        result, factor = self._result, self._largest(size) / size
        assert result is not None
        asked = frozenset(self._asked)  # a signal handler may add one meanwhile, for the next step
        words = result.flats[0].new_tensor([float(name in asked) for name in REQUESTS])
        for at, flat in enumerate(result.flats):
            mine = [one.flats[at] for one in sums]
            if self.world_size <= 2 and all(len(spans) == 1 for spans in self._spans):
                flat.copy_(mine[0])
                flat[-len(REQUESTS) :] = words
                if self.world_size == 2:
                    dist.all_reduce(flat, group=self.process_group)  # a + b is the tree
            else:
                for start in range(0, flat.numel(), PIECE):
                    told = self._exchange_piece([one[start : start + PIECE] for one in mine], flat[start : start + PIECE], words)
                flat[-len(REQUESTS) :] = told
            flat.mul_(factor)
        result.give()
        self._asked -= asked
        self._agree(result.flats[0][-len(REQUESTS) :].tolist())

    def _exchange_piece(self, mine: Sequence[Tensor], result: Tensor, words: Tensor) -> Tensor:
        """Send each rank its columns of all sums; each finishes the tree for them and sends the result to all.

        Return the sum of all ranks' ``words``, which stand behind the columns: a rank without a sum has words, too.
        """
        most, width = max(map(len, self._spans)), -(-result.numel() // self.world_size)
        sent = result.new_zeros(self.world_size, most, width + len(words))
        sent[:, 0, width:] = words
        for at, one in enumerate(mine):
            for rank, part in enumerate(torch.split(one, width)):
                sent[rank, at, : part.numel()] = part
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.process_group)
        known = {span: received[rank, at, :width] for rank, spans in enumerate(self._spans) for at, span in enumerate(spans)}
        whole = result.new_empty(self.world_size, width)
        dist.all_gather(list(whole), add_up((0, self.shards), known, Tensor.add_), group=self.process_group)
        result.copy_(whole.view(-1)[: result.numel()])
        return received[:, 0, width:].sum(0)

    def _agree(self, words: Sequence[float]) -> None:
        """Learn from the sums of all ranks' words what at least one of them asked for in this step."""
        self.step += 1
        self.requests = frozenset(name for name, word in zip(REQUESTS, words, strict=True) if word)
        if self.drained is None and "drain" in self.requests:
            self.drained = self.step


class _Sum:
    """Memory for the gradients of ``params``: a flat tensor for each type, with a view for each parameter, then a flag for each.

    The flags count in how many shards a parameter had a gradient, at least as far as the type can. A word for each request follows.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._groups = [list(group) for _, group in groupby(sorted(params, key=_kind), key=_kind)]
        self.flats, self._views, self._flags = [], [], []
        for group in self._groups:
            numel = sum(param.numel() * (2 if param.is_complex() else 1) for param in group)
            flat = torch.zeros(numel + len(group) + len(REQUESTS), dtype=group[0].dtype.to_real(), device=group[0].device)
            self.flats.append(flat)
            self._views.append(make_views(group, flat))
            self._flags.append(flat[numel : numel + len(group)])

    @torch.no_grad()
    def take(self, weight: float) -> None:
        """Take the parameters' gradients, times ``weight``."""
        for views, grads, flags, used in self._gradients(weight):
            torch._foreach_copy_(views, grads)
            flags.copy_(used)

    @torch.no_grad()
    def add_gradients(self, weight: float) -> None:
        """Add the parameters' gradients, times ``weight``: the same bits as with ``add``."""
        for views, grads, flags, used in self._gradients(weight):
            torch._foreach_add_(views, grads)
            flags.add_(used)

    def _gradients(self, weight: float) -> Iterator[tuple[list[Tensor], list[Tensor], Tensor, Tensor]]:
        """Yield for each type: views, gradients times ``weight`` (zeros where there is none), flags, and who has a gradient."""
        for group, views, flags in zip(self._groups, self._views, self._flags, strict=True):
            used = torch.tensor([param.grad is not None for param in group], dtype=flags.dtype, device=flags.device)
            grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in group]
            grads = [grad.to_dense() if grad.is_sparse else grad for grad in grads]
            if weight != 1:
                torch._foreach_mul_(grads, weight)
            yield views, grads, flags, used
            for param in group:
                param.grad = None

    @torch.no_grad()
    def add(self, other: _Sum) -> None:
        """Add ``other``."""
        for mine, theirs in zip(self.flats, other.flats, strict=True):
            mine.add_(theirs)

    def give(self) -> None:
        """Make the views the parameters' gradients."""
        for group, views, flags in zip(self._groups, self._views, self._flags, strict=True):
            for param, view, used in zip(group, views, flags.tolist(), strict=True):
                param.grad = view if used else None


def _kind(param: nn.Parameter) -> tuple[str, str]:
    return str(param.dtype), str(param.device)

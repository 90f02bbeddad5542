"""The parameters that have a hook, and how often each of them fires in a backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor, nn

from elastirun.train import autograd_engine
from elastirun.train.reduction.buckets.memory import Bucket
from elastirun.train.sharded import is_sharded, placed_as

UNKNOWN = 1 << 60  # how often a parameter fires, before the first backward


class GradHooks:
    """The hooks on ``params``. While the order of gradients is learnt, every parameter has one; later the last of each portion.

    A hook costs a microsecond. ``sparse`` parameters have no bucket, so each of them keeps its hook.
    """

    def __init__(self, params: Sequence[nn.Parameter], sparse: Sequence[int], always_all: bool) -> None:
        self._nodes = [autograd_engine.accumulator(param) for param in params]
        both = zip(self._nodes, params, strict=True)
        self._placing = [node.register_prehook(placing(param)) for node, param in both if is_sharded(param)]
        self._sparse, self._always_all = sparse, always_all
        self._handles: dict[int, Any] = {}  # by parameter
        self.all_watched = True  # every parameter has a hook
        self.begins_anywhere = False  # outputs hide in objects that are not searched: a backward may begin at any parameter
        self.surprised = False  # gradients came late: from then on every firing is counted
        self.expected = [UNKNOWN] * len(params)  # how often each parameter fires in a backward
        self._fired = [0] * len(params)  # how often each one did in the last reducing backward
        self.seen: set[int] = set()  # parameters that have fired since the last reduction
        self.unused: set[int] = set()  # parameters without a gradient on any rank in the last reduction
        self._ever_unused: set[int] = set()  # … in any reduction so far
        self.start_only: set[int] = set()  # parameters whose hook only reports that a backward starts, because they were unused

    def install(self, buckets: Sequence[Bucket], learning: bool, listener: autograd_engine.Listener) -> None:
        """Put hooks on the parameters that are to be watched now, and remove the others. Buckets must be reset afterwards."""
        self.all_watched = learning or self._always_all or self.surprised or self.begins_anywhere
        wanted = set(self._sparse if buckets else range(len(self._nodes)))
        for bucket in buckets:
            for portion in bucket.portions:
                watched = portion.indices if self.all_watched else portion.indices[-1:]
                portion.watched = len(watched)
                wanted.update(watched)
        self.start_only = self._ever_unused - wanted
        wanted |= self.start_only
        for index in self._handles.keys() - wanted:
            self._handles.pop(index).remove()
        for index in wanted - self._handles.keys():
            self._handles[index] = autograd_engine.after_accumulation(self._nodes[index], listener, index)

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in (*self._handles.values(), *self._placing):
            handle.remove()
        self._handles, self._placing = {}, []

    def executes_any(self) -> bool:
        """Return whether the backward under way accumulates the gradient of any parameter, as far as the engine knows."""
        return any(map(autograd_engine.executes, self._nodes))

    def note_unused(self, unused: Collection[int]) -> bool:
        """Remember the parameters that had no gradient on any rank; return whether hooks have to be installed for more of them.

        Another backward may still bring their gradients: that of a loss which the forward left aside.
        """
        self.unused = set(unused)
        if self.unused <= self._ever_unused:
            return False
        self._ever_unused |= self.unused
        return True

    def count(self, left: Sequence[int]) -> None:
        """Count how often each parameter has fired in a backward that ended with ``left``."""
        self._fired = [expected - still for expected, still in zip(self.expected, left, strict=True)]

    def learn(self) -> None:
        """Expect each parameter to fire as often as in the last reducing backward, or more often."""
        for index, (expected, fired) in enumerate(zip(self.expected, self._fired, strict=True)):
            self.expected[index] = max(fired, 1 if expected == UNKNOWN else expected)


def placing(param: nn.Parameter) -> Callable[[Sequence[Tensor]], tuple[Tensor, ...]]:
    """Return a hook that brings the gradient of ``param``, a DTensor, to where its parts are.

    All ranks of its mesh take part, so this comes where the graph has the gradient: the graph is the same on
    all of them, and their buckets may differ.
    """
    like = param.detach()
    return lambda grads: tuple(placed_as(like, grad) for grad in grads)


class Unannounced:
    """Gradients by backwards that did not begin at an output of the module's forward, or by none at all."""

    def __init__(self) -> None:
        self.announced = False  # there was a forward since the last reduction: gradients may come
        self.promised = False  # a pipeline has announced the last backward of a step, and none has come since
        self.due = False  # … outside of ``no_sync()``, so that it would have reduced
        self._there = UNKNOWN  # gradients that ``without_backward`` saw; UNKNOWN: backwards have come since
        self._found: dict[int, tuple[int, int]] = {}  # by parameter: version of its gradient, and how often it was zeroed before

    def zeroed(self, index: int, grad: Tensor) -> int:
        """Note one more such gradient of parameter ``index``; return how often ``grad`` was zeroed between them."""
        before, zeroed = self._found.get(index, (grad._version - 1, 0))
        zeroed += grad._version != before + 1
        self._found[index] = grad._version, zeroed
        return zeroed

    def accept(self) -> None:
        """Accept the gradients that are there."""
        self._there = UNKNOWN

    def promise(self, sync: bool) -> None:
        """Expect a backward that accumulates a gradient, and reduces unless it comes within ``no_sync()``."""
        self.promised, self.due = True, self.due or sync

    def by_backward(self) -> None:
        """Note that a backward accumulates gradients."""
        self.promised = self.due = False
        self.accept()

    def without_backward(self, buckets: Sequence[Bucket], sync: bool) -> bool:
        """Return whether gradients have come without a backward since the last call (``autograd.grad``).

        One parameter of each bucket is looked at, which has a hook. ``sync``: this is not within
        ``no_sync()``, where pipelines run their forwards.
        """
        there = sum(bucket.params[-1].grad is not None for bucket in buckets) if sync else 0
        if self.due or sync and (self.promised or there > self._there):
            return True
        self._there = there if sync else self._there
        return False

    def clear(self) -> None:
        """Begin anew after a reduction."""
        self.announced = False
        self._found.clear()
        self.by_backward()

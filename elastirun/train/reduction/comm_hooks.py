"""Communication hooks with torch's signature, ``hook(state, bucket) -> Future``, such as torch's own (fp16, bf16, PowerSGD, …)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from elastirun.train.arguments import named
from elastirun.train.errors import ReductionFailed, WrongType
from elastirun.train.reduction.transports.base import advice


class GradBucket:
    """A bucket for a hook, with the methods of ``torch.distributed.GradBucket``."""

    def __init__(self, index: int, flat: Tensor, gradients: Sequence[Tensor], parameters: Sequence[nn.Parameter], last: bool) -> None:
        self._index, self._flat, self._last = index, flat, last
        self._gradients, self._parameters = list(gradients), list(parameters)

    def index(self) -> int:
        """Return the position of the bucket in the order of launching, which stays the same until there is a new plan."""
        return self._index

    def buffer(self) -> Tensor:
        """Return all gradients of the bucket, one-dimensional."""
        return self._flat

    def set_buffer(self, tensor: Tensor) -> None:
        """Put ``tensor`` (of as many elements) in place of the buffer's contents."""
        self._flat.copy_(tensor.view(-1))

    def gradients(self) -> list[Tensor]:
        """Return views of the buffer, one per parameter."""
        return self._gradients

    def parameters(self) -> list[Tensor]:
        """Return the parameters whose gradients the bucket holds."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the backward."""
        return self._last


Hook = Callable[[Any, Any], Future[Any]]


class HookWork:
    """The ``Work`` of a reduction by a hook."""

    def __init__(self, future: Future[Any], flat: Tensor, what: str) -> None:
        if not hasattr(future, "done"):
            instead = "torch.futures.Future, as dist.all_reduce(bucket.buffer(), async_op=True).get_future()"
            raise WrongType(f"{what} returned {named(future)}: return a {instead}")
        self._future, self._flat, self._what = future, flat, what

    def done(self) -> bool:
        return bool(self._future.done())

    def wait(self) -> None:
        try:
            result = self._future.wait()
        except RuntimeError as error:
            text = (str(error).splitlines() or ["no reason given"])[0]
            raise ReductionFailed(f"{self._what} failed: {text}. {advice()}") from error
        tensor = result[0] if isinstance(result, (list, tuple)) else result
        if not isinstance(tensor, Tensor) or tensor.numel() != self._flat.numel():
            raise WrongType(
                f"a communication hook's future must hold a tensor of {self._flat.numel()} elements, not {type(tensor).__name__}"
            )
        if tensor.data_ptr() != self._flat.data_ptr():
            with torch.no_grad():
                self._flat.copy_(tensor.view(-1))

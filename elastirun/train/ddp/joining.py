"""``join()``: a rank without inputs takes part in the collectives of the ranks that still have some."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import JoinHook, _JoinConfig

from elastirun.train.groups.collectives import all_reduce
from elastirun.train.reduction.transports.base import reduction_errors

if TYPE_CHECKING:
    from elastirun.train.ddp.torch_names import TorchNames

NOT_JOINING = _JoinConfig(enable=False, throw_on_early_termination=False, is_first_joinable=False)


class JoinedRank(JoinHook):
    """Takes part in the other ranks' collectives; ``torch.distributed.algorithms.join.Join`` calls it once for each of their forwards.

    With ``counts`` the rank counts as one with gradients of zero; without, the gradients are the mean over the other ranks.
    """

    def __init__(self, ddp: TorchNames, counts: bool) -> None:
        self._ddp, self._counts = ddp, counts
        self._kept: list[tuple[nn.Parameter, Tensor | None]] = []  # this rank's gradients at the end of its inputs

    def main_hook(self) -> None:
        if not self._kept:
            self._kept = [(param, None if param.grad is None else param.grad.clone()) for param in self._ddp.module.parameters()]
        copies, reduces, next_copies = announce(self._ddp)
        if copies:
            self._ddp.require_forward_param_sync = True
            with reduction_errors("copying the buffers"):
                self._ddp._check_and_sync_module_buffers()  # type: ignore[no-untyped-call]
        if reduces:
            self._ddp._prepare()
            self._ddp._reducer.skip(self._ddp._reducer.local_report.samples if self._counts else 0.0)
        self._ddp.require_forward_param_sync = next_copies

    def post_hook(self, is_last_joiner: bool) -> None:
        for param, grad in self._kept:  # until here they are those of the other ranks, for optimizers within join()
            param.grad = grad
        self._kept = []
        with reduction_errors("copying the model of a rank that had inputs to the end"):
            self._ddp._sync_final_model(is_last_joiner)  # type: ignore[no-untyped-call]


def announce(ddp: TorchNames, *mine: bool) -> tuple[bool, bool, bool]:
    """Tell the ranks without inputs whether this forward copies buffers, whether its backward reduces, and whether the next forward may
    copy buffers. Return what any rank has announced; a rank without inputs announces nothing."""
    words = torch.tensor([float(word) for word in mine or (False, False, False)], device=ddp.device)
    with reduction_errors("the announcement of a forward within join()"):
        all_reduce(words, ddp.process_group, dist.ReduceOp.MAX)
    copies, reduces, next_copies = words.tolist()
    return bool(copies), bool(reduces), bool(next_copies)

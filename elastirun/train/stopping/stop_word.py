"""A word per optimizer step that all ranks reduce beside the training: for ``Drain`` where no module of this package reduces."""

from __future__ import annotations

import atexit
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from elastirun.train.errors import ReductionFailed
from elastirun.train.groups.process_groups import find_group


class StopWord:
    """Tells all ranks, after the same step of ``optimizer``, that one of them requested to stop.

    After each step a rank begins to add up its word with those of the others, in a gloo group of its own, and reads the sum after its next
    step: the exchange goes on beside that step, and no GPU is waited for. All ranks read the same sum after the same step. So every rank
    makes the word at the same point, and takes as many steps as the others.
    """

    _without_reducer = False  # for ``Drain``: requests can be made at once

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.process_group = find_group(None)
        self.step = 0
        self.drained: int | None = None  # the step after which all ranks know of a request
        self._asked = False
        self._word = torch.zeros(1)
        self._sum: dist.Work | None = None  # of the last step's words
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        self._hook, self._pid = optimizer.register_step_post_hook(self._stepped), os.getpid()
        atexit.register(self.close)  # gloo's threads must not outlive the interpreter: see ``at_exit``

    def request(self, name: str) -> None:
        """Tell all ranks after the next step that this one is to stop."""
        self._asked = True

    def close(self) -> None:
        """End the exchange, after the same step on every rank, and the group, unless the program has ended all groups already."""
        atexit.unregister(self.close)
        self._hook.remove()
        group, self._group, self._sum = self._group, None, None
        if group is not None and group in c10d._world.pg_map and os.getpid() == self._pid:
            dist.destroy_process_group(group)

    def _stepped(self, *_: Any) -> None:
        self.step += 1
        if self.drained is not None:
            return
        if self.step > 1 and self._told():
            self.drained = self.step
            return
        self._word.fill_(self._asked)
        if self._group is not None:
            self._sum = dist.all_reduce(self._word, group=self._group, async_op=True)

    def _told(self) -> bool:
        """Wait for the words of the step before, and return whether any of them is a request."""
        if self._sum is not None:
            try:
                self._sum.wait()
            except RuntimeError as error:
                first = (str(error).splitlines() or ["no reason given"])[0]
                raise ReductionFailed(f"the ranks could not tell each other of stops: {first}; a peer may be gone") from error
        return bool(self._word.item())

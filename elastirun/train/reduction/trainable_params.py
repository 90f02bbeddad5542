"""The parameters that are trained: those that are not frozen. They may change at each forward; all ranks must train the same ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from elastirun.train.errors import ModelMismatch
from elastirun.train.groups.collectives import digest, verify_same
from elastirun.train.reduction.control_words import TRAINED_LIMIT


class Trained:
    """Compares the parameters that are trained now with those that the reducer was made for.

    ``named``: all parameters of the module; ``needs``: which of them the reducer was made for, the same on every rank.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], needs: Sequence[bool]) -> None:
        self.named, self.needs = list(named), list(needs)
        self.now = self.needs  # which are trained now, on this rank
        self.digest = self._before = _digest(needs)  # of ``now``, for the control words
        self.changed = False  # every rank has reported the same other parameters
        self._held = {id(param) for _, param in self.named}
        pairs = [pair for pair, needed in zip(self.named, self.needs, strict=True) if needed]
        self.names, self.params = [name for name, _ in pairs], [param for _, param in pairs]

    def holds(self, param: nn.Parameter) -> bool:
        """Return whether ``param`` belongs to the module."""
        return id(param) in self._held

    def find_now(self) -> bool:
        """Find the parameters that are trained now; return whether there is any."""
        now = [param.requires_grad for _, param in self.named]
        if now != self.now:
            self.now, self.digest = now, _digest(now)
        return any(now)

    @property
    def differs(self) -> bool:
        """Whether other parameters are trained now than those that the reducer was made for. It is the same on every rank, or an error."""
        return self.digest != self._before

    def unfrozen(self, digests: Sequence[int]) -> list[nn.Parameter]:
        """Return the parameters that are trained since this step, if all ranks report the same (``digests``, by rank)."""
        if set(digests) != {self.digest}:
            return []
        both = zip(self.named, self.needs, self.now, strict=True)
        return [param for (_, param), before, now in both if now and not before]

    def learn(self, digests: Sequence[int]) -> None:
        """Note what all ranks have reported alike."""
        self.changed = digests[0] != self._before

    def drop_gradients(self) -> None:
        """Set all gradients to None: those of this step, of parameters that were just unfrozen too, must not be used."""
        for _, param in self.named:
            param.grad = None

    def refuse(self, group: dist.ProcessGroup, device: torch.device, all_take_part: bool) -> None:
        """Raise ModelMismatch, because the ranks do not train the same parameters.

        The message names the first difference if ``all_take_part``: every rank has read the words and calls this at the same point.
        """
        if all_take_part:
            verify_same([name for name, param in self.named if param.requires_grad], "parameters to train", group, device)
        raise ModelMismatch("the ranks do not have the same parameters to train: freeze the same ones on every rank")


def _digest(needs: Sequence[bool]) -> int:
    return digest(repr([at for at, needed in enumerate(needs) if not needed])) % TRAINED_LIMIT

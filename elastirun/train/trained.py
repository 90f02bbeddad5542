"""Which parameters are trained: those that are not frozen. That may change at each forward, and all ranks have to agree on it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from .collectives import digest, verify_same
from .control_words import TRAINED_LIMIT
from .errors import ModelMismatch


class Trained:
    """``named``: all parameters of a module; ``needs``: which of them are trained, as the reducer was made for; the same on every rank."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], needs: Sequence[bool]) -> None:
        self.named, self._needs = list(named), list(needs)
        self.now = self._needs  # what this rank has found since
        self.digest = self._before = _digest(needs)  # of ``now``, for the control words
        self.changed = False  # every rank has said that others are trained now
        self._held = {id(param) for _, param in self.named}
        pairs = [pair for pair, needed in zip(self.named, self._needs, strict=True) if needed]  # what the reducer was made for
        self.names, self.params = [name for name, _ in pairs], [param for _, param in pairs]

    def holds(self, param: nn.Parameter) -> bool:
        """Is ``param`` one of the module's?"""
        return id(param) in self._held

    def look(self) -> bool:
        """Find out which are trained now; return whether any is."""
        now = [param.requires_grad for _, param in self.named]
        if now != self.now:
            self.now, self.digest = now, _digest(now)
        return any(now)

    @property
    def differs(self) -> bool:
        """Has this rank found others than those that the reducer was made for? Then so has every rank, unless one is wrong."""
        return self.digest != self._before

    def newcomers(self, digests: Sequence[int]) -> list[nn.Parameter]:
        """The parameters that are trained since this step, if all ranks say the same (``digests``, by rank)."""
        if set(digests) != {self.digest}:
            return []
        both = zip(self.named, self._needs, self.now, strict=True)
        return [param for (_, param), before, now in both if now and not before]

    def learn(self, digests: Sequence[int]) -> None:
        """All ranks have said the same."""
        self.changed = digests[0] != self._before

    def drop_gradients(self) -> None:
        """The gradients of this step are of no use to anyone, those of newcomers included."""
        for _, param in self.named:
            param.grad = None

    def refuse(self, group: dist.ProcessGroup, device: torch.device, all_have_looked: bool) -> None:
        """Raise ModelMismatch: the ranks do not say the same. It names the first difference if ``all_have_looked``, and so come here."""
        if all_have_looked:
            verify_same([name for name, param in self.named if param.requires_grad], "parameters to train", group, device)
        raise ModelMismatch("the ranks do not have the same parameters to train: freeze the same ones on every rank")


def _digest(needs: Sequence[bool]) -> int:
    return digest(repr([at for at, needed in enumerate(needs) if not needed])) % TRAINED_LIMIT

"""Releases the process groups of modules before the interpreter ends."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable
from typing import Any

# The default arguments of its functions are the default group of the moment at which it is first imported, and torch.optim imports it. Had
# the group been made before, it would stay for ever, and its threads, too. With this import before there is a group they keep nothing.
import torch.distributed.nn.functional  # noqa: F401
from torch import nn

_living: weakref.WeakKeyDictionary[nn.Module, tuple[int, Callable[[Any], None]]] = weakref.WeakKeyDictionary()


def release_at_exit(ddp: nn.Module, release: Callable[[Any], None]) -> None:
    """Call ``release`` with ``ddp`` at the end of this process, if the module lives so long."""
    _living[ddp] = os.getpid(), release


def living() -> list[nn.Module]:
    """Return the modules that this process has made or copied, and still holds."""
    return [ddp for ddp, (pid, _) in list(_living.items()) if pid == os.getpid()]


@atexit.register
def _release() -> None:
    """Release the process groups while the interpreter still works.

    gloo's threads end with their group. Threads that outlive the interpreter may abort it (pytorch issue 190489), and modules of a
    script's top level would hold the groups for too long.
    """
    for ddp in living():
        _living[ddp][1](ddp)

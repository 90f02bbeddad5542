"""elastirun: an elastic launcher for distributed training, a drop-in for ``torchrun``."""

from collections.abc import Callable, Sequence
from typing import TypeVar

__version__ = "0.1.0"

_T = TypeVar("_T")


def launch(fn: Callable[..., _T], args: Sequence[object] = (), **options: object) -> dict[int, _T]:
    """Run ``fn(*args)`` in workers on this node, with RANK, WORLD_SIZE, ... in their environment; return what each returned.

    ``options`` are those of the command line: ``launch(train, (0.1,), nproc_per_node=8, max_restarts=3)``; True gives a flag, and
    ``set={"log-mode": 640}`` gives ``--set log-mode=640``. The call lasts until the job is over. The result has the returned values of
    this node's workers by global rank (of the last round).

    ``fn`` and ``args`` reach the workers as with multiprocessing's "spawn": ``fn`` is a function of a module or of the running script,
    not a lambda, nor one from a notebook's cell; a script that calls this does so below ``if __name__ == "__main__":``. Tensors are
    copied. Raises ``elastirun.errors.JobFailed`` with the root cause when the job failed, and ``UsageError`` when it cannot be started.
    """
    from elastirun.functions import launch_function  # imported here, because every agent imports this package and needs none of it

    return launch_function(fn, args, options)

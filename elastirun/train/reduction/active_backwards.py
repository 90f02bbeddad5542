"""The backwards under way of all modules, which end in the same order on every rank."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

from elastirun.train.errors import ReductionFailed
from elastirun.train.reduction.backward import Trigger

if TYPE_CHECKING:
    from elastirun.train.reduction.reducer import Reducer

reducers: weakref.WeakSet[Reducer] = weakref.WeakSet()  # those whose backward has begun and not ended


def in_task(task: int) -> list[Reducer]:
    """Return the reducers whose backward is a part of the engine's run ``task``, in the order in which they end."""
    return sorted((reducer for reducer in reducers if reducer.is_in(task)), key=lambda one: one.number)


def graph_done(task: int) -> None:
    """End all backwards of the engine's run ``task``, which is over.

    In which order the modules of one run began depends on the graph, which may differ between ranks.
    """
    for reducer in in_task(task):
        reducer.end(Trigger.GRAPH_DONE)


def settle() -> None:
    """Finish the backwards that an exception interrupted.

    It comes before anything else that all ranks do: the other ranks wait for it, or will. Where it fails, the module raises the error
    when it is used again.
    """
    if reducers:
        for reducer in sorted((one for one in reducers if one.interrupted and not one.broken), key=lambda one: one.number):
            with suppress(ReductionFailed):
                reducer.end(Trigger.INTERRUPTED)

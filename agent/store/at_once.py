"""Calls a function for several items at the same time, so that one that is slow does not hold up the others."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from elastirun import clock
from elastirun.threads import start_thread

T = TypeVar("T")
R = TypeVar("R")


def ask_each(thread: str, function: Callable[[T], R], items: Iterable[T]) -> queue.SimpleQueue[tuple[T, R]]:
    """Call ``function`` for each item in a thread called ``thread``. Return a queue, which gets each item with its result."""
    results: queue.SimpleQueue[tuple[T, R]] = queue.SimpleQueue()

    def call(item: T) -> None:
        results.put((item, function(item)))

    for item in items:
        if start_thread(thread, call, item) is None:
            call(item)
    return results


def at_once(function: Callable[[T], R], items: Sequence[T], limit: float) -> dict[T, R]:
    """Return the results of ``function`` by item, in the order of ``items``: those that come within ``limit`` seconds.

    ``function`` raises nothing. A call that takes longer goes on in its thread, and its result is lost.
    """
    until = clock.now() + limit
    results = ask_each("at once", function, items)
    found: dict[T, R] = {}
    with suppress(queue.Empty):
        while len(found) < len(items):
            item, result = results.get(timeout=max(0.001, until - clock.now()))
            found[item] = result
    return {item: found[item] for item in items if item in found}

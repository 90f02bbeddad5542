"""Listens to a store's ``watch``."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from elastirun.rendezvous.stores.base import Store
from tests.support.cluster import PATIENCE

S = TypeVar("S", bound=Store)


class Listener(Generic[S]):
    """A counter of the calls of ``changed``, each of which can be awaited."""

    def __init__(self, store: S, key: str) -> None:
        self.store = store
        self.calls = 0
        self._called = threading.Condition()
        store.watch(key, self._changed)
        assert self.hears(1), "it does not begin"

    def _changed(self) -> None:
        with self._called:
            self.calls += 1
            self._called.notify_all()

    def hears(self, calls: int, patience: float = PATIENCE) -> bool:
        """Wait until there were ``calls`` calls in all. Tell whether they came in time, and no more of them."""
        with self._called:
            return self._called.wait_for(lambda: self.calls >= calls, patience) and self.calls == calls


def count_up(store: Store, key: str) -> int:
    """Write the next number."""
    now = store.get([key]).get(key)
    number = int(now or 0) + 1
    assert store.put_if(key, now, b"%d" % number) == b"%d" % number
    return number

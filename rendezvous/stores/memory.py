"""A store in this process, for single-node jobs and for tests. It passes the same conformance suite as the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from elastirun.rendezvous.stores.base import Store


class MemoryStore(Store):
    """A connection to the map ``data``. Connections that share ``data`` and ``lock`` are connections to one store."""

    hosting = True

    def __init__(self, data: dict[str, bytes] | None = None, lock: threading.Lock | None = None) -> None:
        self._data = {} if data is None else data
        self._lock = lock or threading.Lock()

    def get(self, keys: Iterable[str]) -> dict[str, bytes]:
        with self._lock:
            return {key: self._data[key] for key in keys if key in self._data}

    def put_if(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        with self._lock:
            if self._data.get(key) == expected:
                self._data[key] = value
            return self._data.get(key)

    def has(self, key: str) -> bool:
        with self._lock:
            return key in self._data

    def keep_alive(self, key: str) -> bool:
        return self.has(key)  # there are no leases: a value stays as long as the store

    def delete(self, key: str) -> None:
        with self._lock:
            self._data.pop(key, None)

    def under(self, prefix: str) -> dict[str, bytes]:
        with self._lock:
            return {key: value for key, value in self._data.items() if key.startswith(prefix)}

    def watch(self, key: str, changed: Callable[[], None]) -> None:
        pass

    def close(self) -> None:
        pass

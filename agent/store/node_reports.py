"""Reports of the nodes of a round to each other, in the store beside the records of the rendezvous, which takes no part in it.

Each node writes a report under a key of its own. The agent of node rank 0 reads them and writes what follows from them under one more key,
which the others read: so a node costs the store a few operations, however many nodes there are. For ``hangs/reports.py`` and
``job_median.py``, whose threads have a connection of their own.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from elastirun.agent.store.locations import ASK_LIMIT, TcpAt, described
from elastirun.errors import BadRecord
from elastirun.rendezvous.stores.tcp import TcpStore
from elastirun.rendezvous.wire.codec import Codec

MOST_TRIES = 4  # writes of one key, which only this node writes


@dataclass(frozen=True)
class Meeting:
    """The place where the nodes of a round meet. ``store``: as ``StoreAccess.for_status`` describes it; ``prefix``: of the job's keys."""

    store: dict[str, Any]
    prefix: str
    token: bytes | None
    fence: str  # names the round
    node_rank: int
    nodes: int


class NodeReports:
    """A connection to where the nodes meet, for the keys of one ``topic``. Blocks. Errors, also of the methods: ``StoreError``."""

    def __init__(self, meeting: Meeting, topic: str) -> None:
        at = described(meeting.store)
        # etcd gives keys with "/node/" in their name a lease, so that they vanish some time after the last write.
        self._prefix, self._nodes = f"{meeting.prefix}{topic}/node/", meeting.nodes
        self._codec = Codec(meeting.token, at.owner)
        self._store: Any = TcpStore(at.address, at.port, ASK_LIMIT, (self._prefix,)) if isinstance(at, TcpAt) else at.open()

    def write(self, name: int | str, record: Any) -> None:
        """Set the record of a node rank, or of another name, whatever it was."""
        key = f"{self._prefix}{name}"
        value = self._codec.encode(key, record)
        before = self._store.get([key]).get(key)
        for _ in range(MOST_TRIES):
            now = self._store.put_if(key, before, value)
            if now == value:
                return
            before = now

    def read(self, name: str, kind: type[Any]) -> Any:
        """Return the record of that name; None when there is none, or anything else."""
        return self._read([f"{self._prefix}{name}"], kind)[0]

    def read_all(self, kind: type[Any]) -> list[Any]:
        """Return the record of each node, in the order of their ranks; None where there is none, or anything else."""
        return self._read([f"{self._prefix}{node_rank}" for node_rank in range(self._nodes)], kind)

    def close(self) -> None:
        self._store.close()

    def _read(self, keys: list[str], kind: type[Any]) -> list[Any]:
        found = self._store.get(keys)
        return [self._parse(key, found[key], kind) if key in found else None for key in keys]

    def _parse(self, key: str, value: bytes, kind: type[Any]) -> Any:
        with suppress(BadRecord):
            return self._codec.decode(key, value, kind)
        return None

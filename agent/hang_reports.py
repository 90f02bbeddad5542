"""Shares what each node sees of a hang, so that its cause is judged for the whole job. See docs/decisions/0022.

Each node writes a report into the rendezvous store. The agent of node rank 0 reads them, judges when all are there, and writes its
verdict, which the others read. While a hang lasts, a thread does this over a connection of its own. The rendezvous takes no part: its
records do not change, and without the verdict each node acts by what it sees itself.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Any

from elastirun.agent.hang_causes import WorkerState, judge
from elastirun.agent.status_stores import ASK_LIMIT, TcpAt, described
from elastirun.errors import BadRecord, StoreError
from elastirun.rendezvous.codec import MAX_INT, Codec, clip
from elastirun.rendezvous.stores.tcp_plain import PlainTcpStore

PAUSE = 0.25  # seconds between two reads of the store
MOST_TRIES = 4  # writes of one key, which only this node writes
LONGEST_PLACE = 200  # characters
# Below the job's prefix. etcd gives keys with "/node/" in their name a lease, so that they vanish soon after a hang.
KEYS = "hang/node/"
VERDICT = f"{KEYS}verdict"


@dataclass(frozen=True)
class Meeting:
    """The place where the nodes of a round meet. ``store``: as ``StoreAccess.for_status`` describes it; ``prefix``: of the job's keys."""

    store: dict[str, Any]
    prefix: str
    token: bytes | None
    fence: str  # names the round
    node_rank: int
    nodes: int


@dataclass(frozen=True)
class Report:
    """One node's view of a hang. ``id``: random, because a round may have several hangs; ``workers``: none when the hang is over."""

    fence: str
    id: str
    workers: tuple[WorkerState, ...]


@dataclass(frozen=True)
class SharedVerdict:
    """A ``Verdict`` on the workers of all nodes. ``reports``: ids of the reports that it follows from."""

    reports: tuple[str, ...]
    ranks: tuple[int, ...]
    how: int


def decide(reports: Sequence[Report]) -> SharedVerdict:
    """Return the verdict on the reports of all nodes."""
    verdict = judge([worker for report in reports for worker in report.workers])
    return SharedVerdict(tuple(report.id for report in reports), verdict.ranks, verdict.how)


class HangReports:
    """This node's part in the judgement of one hang, from when it exists until ``close``. ``workers``: at least one.

    ``verdict``: None until it is known, which may be never.
    """

    def __init__(self, meeting: Meeting, workers: Sequence[WorkerState]) -> None:
        self.verdict: SharedVerdict | None = None
        self._meeting = meeting
        short = (replace(one, steps=min(one.steps, MAX_INT), place=clip(one.place, LONGEST_PLACE)) for one in workers)
        self._own = Report(meeting.fence, secrets.token_hex(8), tuple(short))
        self._closed = threading.Event()
        with suppress(RuntimeError):  # the limit of threads is reached
            threading.Thread(target=self._run, name="hang-reports", daemon=True).start()

    def close(self) -> None:
        """The hang is over, or its round."""
        self._closed.set()

    def _run(self) -> None:
        with suppress(StoreError):
            at, prefix = described(self._meeting.store), self._meeting.prefix + KEYS
            codec = Codec(self._meeting.token, at.owner)
            opened = PlainTcpStore(at.address, at.port, ASK_LIMIT, (prefix,)) if isinstance(at, TcpAt) else at.open()
            with closing(opened) as store:
                self._take_part(store, codec)

    def _take_part(self, store: Any, codec: Codec) -> None:
        """Write this node's report, learn the verdict, and take the report back when the hang is over. Errors: ``StoreError``."""
        own = self._key(self._meeting.node_rank)
        _put(store, own, codec.encode(own, self._own))
        while self.verdict is None and not self._closed.wait(PAUSE):
            if self._meeting.node_rank == 0:
                self._judge(store, codec)
            else:
                key = self._meeting.prefix + VERDICT
                found = _parse(codec, key, store.get([key]), SharedVerdict)
                self.verdict = found if found and self._own.id in found.reports else None
        self._closed.wait()
        _put(store, own, codec.encode(own, replace(self._own, workers=())))

    def _judge(self, store: Any, codec: Codec) -> None:
        """Judge, if the reports of all nodes are there."""
        keys = [self._key(node_rank) for node_rank in range(self._meeting.nodes)]
        found = store.get(keys)
        reports = [report for key in keys if (report := _parse(codec, key, found, Report)) and report.workers]
        if len(reports) == len(keys) and all(report.fence == self._own.fence for report in reports):
            verdict = decide(reports)
            key = self._meeting.prefix + VERDICT
            _put(store, key, codec.encode(key, verdict))
            self.verdict = verdict

    def _key(self, node_rank: int) -> str:
        return f"{self._meeting.prefix}{KEYS}{node_rank}"


def _parse(codec: Codec, key: str, found: dict[str, bytes], kind: type[Any]) -> Any:
    """Return the record under ``key``; None when there is none, or anything else."""
    with suppress(BadRecord):
        return codec.decode(key, found[key], kind) if key in found else None
    return None


def _put(store: Any, key: str, value: bytes) -> None:
    """Set ``key`` to ``value``, whatever it was."""
    before = store.get([key]).get(key)
    for _ in range(MOST_TRIES):
        now = store.put_if(key, before, value)
        if now == value:
            return
        before = now

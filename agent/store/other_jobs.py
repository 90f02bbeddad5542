"""Tells people that another job waits for its nodes at the same endpoint: the job ids may be a mistake, such as --rdzv-id=$RANDOM."""

from __future__ import annotations

import math
import re
import urllib.parse
from contextlib import closing, suppress
from threading import Thread
from typing import Any

from elastirun.agent.part import Part
from elastirun.agent.store.locations import described
from elastirun.agent.store.shared_store import JOBS, rows_of_others
from elastirun.agent.store.store_access import StoreAccess
from elastirun.errors import StoreError
from elastirun.rendezvous.wire.codec import clip
from elastirun.threads import start_thread

LOOK_EVERY = 5.0  # seconds; of two looks, each waiting job has written a keep-alive in between
MOST_JOBS = 16  # jobs whose keep-alives are read; where more share an endpoint, somebody wants them to
_ROUND = re.compile(rb'"round": ?(\d+)')  # in a round record, which may be signed with a token of that job


class OtherJobs(Part):
    """While this node waits for the first round, names each other job that does so at the endpoint, once. A thread reads the store."""

    def __init__(self, access: StoreAccess) -> None:
        self._access, self._job = access, access.config.run_id
        shared = access.config.endpoint is not None and access.config.max_nodes > 1  # jobs at etcd share it on purpose
        self._look_at = 0.0 if shared else math.inf
        self._thread: Thread | None = None
        self._seen: dict[str, dict[str, bytes]] = {}  # by job: its rows
        self._named: set[str] = set()

    def tick(self, now: float) -> float:
        if not self._access.newcomer:
            return math.inf
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY
            if self._thread is None or not self._thread.is_alive():
                self._thread = start_thread("other-jobs", self._look)
        return self._look_at

    def _look(self) -> None:
        with suppress(StoreError), closing(described(self._access.for_status(None)).open()) as store:
            for job in waiting_jobs(store, self._job, self._seen):
                if job not in self._named:
                    self._named.add(job)
                    where = self._access.config.endpoint
                    what = f"job {clip(job, 200)!r} waits for its nodes at {where}, too, and this one is {self._job!r}"
                    self._access.notices.append(f"warning: {what}; if the two are one job, give all its nodes the same --rdzv-id")


def waiting_jobs(store: Any, job: str, seen: dict[str, dict[str, bytes]]) -> list[str]:
    """Return the jobs but ``job`` whose nodes wait for a first round. ``seen``: their rows at the last look, replaced by those of now."""
    found = []
    for name, rows in rows_of_others(store, job, MOST_JOBS):
        key = f"{JOBS}{name}/round"
        number = _ROUND.search(store.get([key]).get(key, b""))
        if seen.get(name, rows) != rows and (number is None or int(number[1]) == 0):
            found.append(urllib.parse.unquote(name))
        seen[name] = rows
    return found

"""Jobs that share the store which this agent hosts: the host must not end before the nodes of the other jobs.

Two jobs that name one endpoint share its store, as under torchrun; each has keys of its own. The list of jobs is under
``elastirun/jobs/``. A job is alive while its rows change, which they do with every keep-alive. Rows are compared as bytes and
not decoded, because another job may sign them with a token of its own.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from elastirun.errors import StoreError
from elastirun.rendezvous.stores.base import Store
from elastirun.rendezvous.wire.codec import clip

ROOT = "elastirun/"
JOBS = ROOT + "job/"  # the keys of each job are below it, and those of no job elsewhere: a job may be named "jobs" or "host"
LIST, HOST = ROOT + "jobs/", ROOT + "host"
QUIET = 10.0  # seconds without a change in a job's rows, after which the job counts as ended
READ_EVERY = 0.5  # seconds between two reads of the rows of other jobs


def prefix(job: str) -> str:
    """Return what every key of the job begins with."""
    return f"{JOBS}{urllib.parse.quote(job, safe='')}/"


def register(store: Store, job: str) -> str:
    """Put the job on the store's list of jobs. Returns the job of the agent that hosts the store; empty while that is not written yet."""
    name = urllib.parse.quote(job, safe="").encode()
    store.put_if(LIST + name.decode(), None, name)
    if store.hosting:
        store.put_if(HOST, None, name)
        return job
    return host_of(store, job)


def host_of(store: Any, job: str) -> str:
    """Return the job of the agent that hosts a store, which may be ``job``; empty: no agent has said so, as in each standby store."""
    host = store.get([HOST]).get(HOST, b"")
    return job if host == urllib.parse.quote(job, safe="").encode() else urllib.parse.unquote(host[:600].decode(errors="replace"))


def rows_of_others(store: Store, job: str, most: int | None = None) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield each other job on the store's list: its name, quoted as in keys, and its rows. ``most``: jobs to look at; None: all."""
    for key in list(store.under(LIST))[:most]:
        name = key.rpartition("/")[2]
        if f"{JOBS}{name}/" != prefix(job):
            yield name, store.under(f"{JOBS}{name}/node/")


def wait_for_other_jobs(store: Store, job: str, pause: Callable[[float], bool], say: Callable[[str], None]) -> None:
    """Return when no other job uses the store any more. ``pause`` waits for some seconds and returns True to end the wait."""
    seen: dict[str, dict[str, bytes]] = {}  # by the name of a job: its rows
    quiet: dict[str, float] = {}  # ... seconds without a change in them
    said: set[str] = set()  # names of the jobs that people were told of
    with suppress(StoreError):
        while True:
            alive = []
            for other, rows in rows_of_others(store, job):  # read again each time: a job may come while this agent waits for another
                quiet[other] = quiet.get(other, 0.0) + READ_EVERY if rows == seen.get(other) else 0.0
                seen[other] = rows
                if quiet[other] < QUIET and not _all_left(rows):
                    alive.append(other)
            if set(alive) - said:
                said.update(alive)
                names = ", ".join(clip(urllib.parse.unquote(other), 200) for other in alive[:4])
                say(f"this job is over; its store stays up for the nodes of job {names} (a signal ends this agent at once)")
            if not alive or pause(READ_EVERY):
                return


def _all_left(rows: dict[str, bytes]) -> bool:
    """Return whether all nodes of a job have left. A job without rows has not: it is about to write the first."""
    return bool(rows) and all(b'"status":"left"' in row for row in rows.values())

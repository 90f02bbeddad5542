"""Other jobs that meet on the store this agent hosts: their nodes would lose it with us, so the host stays for them.

Two jobs that name one endpoint share its store, as under torchrun; each has keys of its own. Which jobs there are stands
under ``elastirun/jobs/``; that one is alive shows in its rows, which change with every keep-alive. Only bytes are
compared: a lodger's records may be signed with a token of its own.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable
from contextlib import suppress

from elastirun.errors import StoreError
from elastirun.rendezvous.codec import clip
from elastirun.rendezvous.stores.base import Store

ROOT = "elastirun/"
JOBS = ROOT + "job/"  # the keys of the jobs, apart from the list of jobs: a job may be named "jobs" or "host"
LIST, HOST = ROOT + "jobs/", ROOT + "host"
QUIET = 10.0  # seconds without any change in a job's rows, after which it is taken to be over
LOOK_EVERY = 0.5


def prefix(job: str) -> str:
    """What every key of the job begins with."""
    return f"{JOBS}{urllib.parse.quote(job, safe='')}/"


def register(store: Store, job: str) -> str:
    """Put the job on the store's list. Returns the job whose agent hosts the store; empty while that agent has not written it."""
    name = urllib.parse.quote(job, safe="").encode()
    store.put_if(LIST + name.decode(), None, name)
    if store.hosting:
        store.put_if(HOST, None, name)
        return job
    host = store.get([HOST]).get(HOST, b"")
    return job if host == name else urllib.parse.unquote(host[:600].decode(errors="replace"))


def wait_for_lodgers(store: Store, job: str, pause: Callable[[float], bool], say: Callable[[str], None]) -> None:
    """Return when no other job is alive on the store. ``pause`` waits so many seconds; True: do not wait any longer."""
    seen: dict[str, dict[str, bytes]] = {}
    quiet: dict[str, float] = {}
    said: set[str] = set()
    with suppress(StoreError):
        while True:
            alive = []
            for key in store.under(LIST):  # read each time: a job may come while we stay for another
                other = f"{JOBS}{key.rpartition('/')[2]}/"
                if other == prefix(job):
                    continue
                rows = store.under(f"{other}node/")
                quiet[other] = quiet.get(other, 0.0) + LOOK_EVERY if rows == seen.get(other) else 0.0
                seen[other] = rows
                if quiet[other] < QUIET and not _all_left(rows):
                    alive.append(other)
            if set(alive) - said:
                said.update(alive)
                names = ", ".join(clip(urllib.parse.unquote(other[len(JOBS) : -1]), 200) for other in alive[:4])
                say(f"this job is over; its store stays up for the nodes of job {names} (a signal ends this agent at once)")
            if not alive or pause(LOOK_EVERY):
                return


def _all_left(rows: dict[str, bytes]) -> bool:
    """A job that has no row yet is about to write one."""
    return bool(rows) and all(b'"status":"left"' in row for row in rows.values())

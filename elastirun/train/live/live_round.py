"""The worlds of one round of a live job: which of its workers train together (docs/elastic.md, docs/decisions/0027).

Workers that have a state train on at once, as world 0 of the round. A new one prepares by itself, and says when it is ready. The ranks then
agree upon a step after which they make the next world, with the new one in it. Where nobody has a state, world 0 has all workers.

The workers agree by the store of the round. The keys, after a prefix for the round::

    node/NODE_RANK   from the agent of that node: its ranks that have a state, each with the round in which that was agreed upon
    here/WORLD       how many ranks have come to a world
    ready/RANK       a rank that is in no world yet has a model, and waits
    ready            how many of them there are
    world/WORLD      the ranks of a world after the first, from rank 0 of the one before; or from each rank, where they are the same
    switched/WORLD   its ranks have left the one before
    over             training has ended without those that wait
"""

from __future__ import annotations

import atexit
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from elastirun.worker.live_messages import store_prefix
from elastirun.worker.live_worlds import LiveWorld, first_world, parse_ranks, parse_states

T = TypeVar("T")

CONNECT = timedelta(seconds=2)  # for one attempt; the agent that serves the store may still be importing torch
NAPS = 0.001, 0.02  # seconds between two looks at the store, the first and the longest
NAP_SWITCH = 0.003  # the longest where those that train wait meanwhile
LOOK = 0.01  # seconds between two looks for ranks that are ready; each is one exchange with the store, by one rank, while some are missing
COME = 30.0  # seconds for ranks that begin a round with a state; it takes milliseconds, so one that does not come hangs
TOGETHER = 0.3  # seconds for which the first that is ready waits for the others, so that one change of the world takes them all in
LAST_CALL = 5.0  # seconds that the end of the process waits for its threads: one that is inside torch would abort the process
AGAIN = 0.5  # seconds from a broken connection to another one; if the store is gone, the agent ends the round before
AWAY = 10.0  # seconds without the store after which a wait ends with its error: then the agent hears of it
NUMBER = "ELASTIRUN_WORLD"  # set here: the number of the world within the round


class RoundOver(RuntimeError):
    """The agent ends the round."""


class LiveRound:
    """One round, for one worker; the environment is that of the round. ``asked``: whether the agent wants the worker to leave it.

    Waits end with a RoundOver when it does. They connect again where the connection to the store breaks, and raise
    torch's RuntimeError where the store is away for ``AWAY``.
    """

    def __init__(self, number: int, asked: Callable[[], bool]) -> None:
        self._asked, self._number = asked, number
        self._rank, self._workers, self._nodes = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE"))
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []  # that use torch, and end when this worker waits for nobody any more
        self._lock = threading.Lock()
        self.world: LiveWorld | None = None  # that this worker is in
        self.takes_in: LiveWorld | None = None  # the world that takes this new worker in
        self._first = 0  # ranks of world 0
        self._known = False  # the ranks of world 0 have a state, so they are there
        self.reconnect()

    @property
    def present(self) -> LiveWorld:
        """The world that this worker is in, once it is in one."""
        assert self.world is not None
        return self.world

    @property
    def rank(self) -> int:
        """The rank of this worker in its world."""
        return self.rank_in(self.present)

    @property
    def size(self) -> int:
        """The number of workers in the world."""
        return len(self.present.ranks)

    @property
    def whole(self) -> bool:
        """Whether all workers of the round are in the world."""
        return self.size == self._workers

    def find_first(self) -> LiveWorld:
        """Return world 0 of the round, which this worker need not be in. It is the same for every worker of the round."""
        read = [self._wait(partial(self._read, f"node/{node}")) for node in range(self._nodes)] if self._number > 1 else []
        told = [parse_states(value, self._workers) for value in read]
        world = first_world(told, self._workers)
        self._first, self._known = len(world.ranks), any(told)
        return world

    def has(self, world: LiveWorld) -> bool:
        """Return whether this worker is in ``world``."""
        return self._rank in world.ranks

    def enter(self) -> LiveWorld:
        """Return the first world of the round that this worker is in, when all its ranks have come.

        Ends the process, with code 0, if training ends before.
        """
        world = self.find_first()
        if self.has(world):
            self._come(world, COME if self._known else math.inf)
            return world
        self._say(f"ready/{self._rank}")
        self._store.add("ready", 1)
        self.takes_in = world = self._wait(lambda: self._unless_over(self._world_after(world.number)))
        self._come(world, or_over=True)
        return world

    def find_next(self) -> LiveWorld:
        """Return the next world, when all its ranks have come. All ranks of the present one call it when rank 0 has asked for it."""
        found = self._wait(partial(self._world_after, self.present.number))
        self._come(found)
        return found

    def reconnect(self) -> None:
        """Connect to the store, first or again, after the connections of this process were cut."""
        self._store = self._wait(self._opened)

    def repeat(self) -> None:
        """Be in the next world, which has the same ranks, when all of them have come. All of them call it, at any time."""
        world = LiveWorld(self.present.number + 1, self.present.ranks)
        self._store.compare_set(f"world/{world.number}", "", json.dumps(world.ranks))
        self._come(world)
        self.begin(world)

    def say_switched(self, world: LiveWorld) -> None:
        """Tell the new ranks of ``world`` that the others have left the one before."""
        self._say(f"switched/{world.number}")

    def wait_until_switched(self, world: LiveWorld) -> None:
        """Wait until the others are in ``world`` alone. That may take as long as a step, or what a script does between two epochs.

        Ends the process, with code 0, if training ends before.
        """
        self._wait(lambda: self._unless_over(self._store.check([f"switched/{world.number}"]) or None), longest=NAP_SWITCH)

    def end_if_over(self, within: float) -> None:
        """End the process, with code 0, if training ends within so many seconds. Returns before if the agent wants this worker to leave."""
        with suppress(RuntimeError):
            self._wait(partial(self._unless_over, None), within)

    def begin(self, world: LiveWorld) -> None:
        """Be in ``world`` from now on."""
        atexit.unregister(self._end_training)
        self.world = world
        os.environ.update({"RANK": str(self.rank), "WORLD_SIZE": str(self.size), NUMBER: str(world.number)})

    def rank_in(self, world: LiveWorld) -> int:
        """Return the rank of this worker in ``world``."""
        return world.ranks.index(self._rank)

    def name_of(self, world: LiveWorld) -> str:
        """Return a name for the default group of ``world``."""
        return f"elastirun world {self._number}.{world.number}"

    def trains(self, rank: int) -> bool:
        """Return whether the worker of ``rank`` in the round is in the present world."""
        return self.world is not None and rank in self.world.ranks

    def store(self, world: LiveWorld) -> Any:
        """Return a store for the process groups of ``world``."""
        return c10d.PrefixStore(f"groups/{world.number}", self._store)

    def look_for_ready(self, ask: Callable[[], object]) -> None:
        """If this is rank 0 of a world that lacks ranks: look in a thread for ready ones, then write the next world, and ``ask``."""
        if self.whole:
            return
        atexit.register(self._end_training)
        if self.rank == 0:
            self.start(threading.Thread(target=self._look, args=(self.present, ask), name="elastirun ready", daemon=True))

    def start(self, thread: threading.Thread) -> None:
        """Start a thread that ends with ``stop``: the end of the process waits for it."""
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        thread.start()

    def stop(self) -> None:
        """Look and wait for nobody any more: ``ask`` is not called after this. May be called in any thread."""
        with self._lock:
            self._stopped.set()

    def leave(self) -> None:
        """Take no part in the round any more."""
        self.stop()
        atexit.unregister(self._end_training)

    # -- the store --------------------------------------------------------------------------------------------------------

    def _opened(self) -> Any:
        """Return a connection to the store; None if there is nobody yet, or not any more."""
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        try:
            store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=CONNECT)  # type: ignore[attr-defined]
        except RuntimeError:
            return None
        return c10d.PrefixStore(store_prefix(self._number), store)

    def _open_again(self) -> None:
        """Replace a broken connection, unless this worker leaves the round: its connections are cut then."""
        if not self._stopped.wait(AGAIN) and not self._asked():
            self._store = self._opened() or self._store

    def _wait(self, look: Callable[[], T | None], limit: float = math.inf, longest: float = NAPS[1]) -> T:
        """Return what ``look`` returns when that is not None; it may be called again where it has failed.

        Raises RuntimeError after ``limit`` seconds, or if the store is away for ``AWAY``.
        """
        nap, now = NAPS[0], time.monotonic()
        end, missed = now + limit, math.inf  # since when the store is away
        while not (self._asked() or self._stopped.is_set()):  # before each look: torch would write a page of a connection that is cut
            try:
                found, missed = look(), math.inf
            except RuntimeError:
                now = time.monotonic()
                missed = min(missed, now)
                if now > min(end, missed + AWAY):
                    raise
                self._open_again()
                continue
            if found is not None:
                return found
            if time.monotonic() > end:
                raise RuntimeError(f"not all ranks of the world have come within {limit:g} s")
            time.sleep(nap)
            nap = min(1.5 * nap, longest)
        raise RoundOver("the agent ends the round")

    def _say(self, key: str, limit: float = math.inf) -> None:
        """Write ``key``, acknowledged: what is sent into a broken connection is lost without an error."""
        self._wait(lambda: self._store.compare_set(key, "", "1"), limit)

    def _read(self, key: str) -> Any:
        """Return a value that was written as JSON; None if there is none."""
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _come(self, world: LiveWorld, limit: float = math.inf, or_over: bool = False) -> None:
        """Wait until all ranks of ``world`` have come, so that no process group waits for one that never comes.

        Those that train come after a step, which may take any time. ``or_over``: training may end before, and this process then, too.
        Raises RuntimeError after ``limit`` seconds.
        """
        here = f"here/{world.number}"
        self._store.add(here, 1)

        def look() -> bool | None:
            come = self._store.add(here, 0) >= len(world.ranks) or None
            return self._unless_over(come) if or_over else come

        self._wait(look, limit)

    def _unless_over(self, found: T | None) -> T | None:
        """Return ``found``. Ends the process, with code 0, if that is None and training has ended."""
        if found is None and self._store.check(["over"]):
            raise SystemExit(0)
        return found

    def _world_after(self, number: int) -> LiveWorld | None:
        """Return the newest world after ``number``; None if there is none, or none with this rank."""
        found = None
        while (ranks := self._read(f"world/{number + 1}")) is not None:
            number += 1
            found = LiveWorld(number, parse_ranks(ranks, self._workers))
        return found if found is not None and self._rank in found.ranks else None

    def _look(self, world: LiveWorld, ask: Callable[[], object]) -> None:
        """Wait until ranks are ready, write the next world, and ``ask``. Only the end of the round ends this before."""
        first = None  # when the first was ready
        while not self._stopped.wait(LOOK):
            try:
                ready, now = self._store.add("ready", 0) - (len(world.ranks) - self._first), time.monotonic()
                first = now if first is None and ready > 0 else first
                if first is not None and (len(world.ranks) + ready == self._workers or now - first > TOGETHER):
                    missing = set(range(self._workers)) - set(world.ranks)
                    came = {rank for rank in missing if self._store.check([f"ready/{rank}"])}
                    ranks = json.dumps([*world.ranks, *sorted(came)])  # who trains keeps its rank
                    self._store.compare_set(f"world/{world.number + 1}", "", ranks)  # acknowledged: it is there when the others are asked
                    with self._lock:
                        if not self._stopped.is_set():
                            ask()
                    return
            except RuntimeError:
                self._open_again()

    def _end_training(self) -> None:
        """Tell those that wait to be taken in that training has ended. At the end of the process, unless an exception ends it.

        The agent tells it, too, when this worker has ended with code 0.
        """
        if not hasattr(sys, "last_value"):
            with suppress(RuntimeError):
                self._say("over", LAST_CALL)
        self.stop()
        end = time.monotonic() + LAST_CALL
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

"""Traps at points of a live worker: the process that comes to a point first kills, stops or holds up processes there, itself mostly.

A test sets a trap with ``set_trap`` in the folder that TEST_TRAPS names; tests/support/live_worker.py calls ``install``. The points:

    parks           a worker is about to leave its round
    comes WORLD     it is about to say that it has come to a world: ``first`` of a round, ``next``, or ``new`` for a worker without a state
    came WORLD      all ranks of that world have come; its groups are made now
    switches        a worker that trains is about to go on in the groups of the next world; ``switched``: it does
    sends N         the sender of the state is about to send its slice N, counted from 0; ``sent N``: it has begun to
    takes N         a new worker is about to wait for slice N; ``took N``: it has it
    agrees WORLD    a rank is about to agree on a checkpoint with the others, in the first world of a round or in the next ones
    rehearses       a new worker is about to make its first step by itself; ``rehearsed``: it has made it
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

STANDS = 0  # in place of a signal: the thread that came to the point stands still, the others of its process go on
FOREVER = 3600.0  # seconds; the agent kills the process long before


def set_trap(folder: Path, point: str, signum: int, by: int = 0, pids: Sequence[int] = (0,)) -> None:
    """Let the first process that comes to ``point`` send a signal, once.

    ``by``: only this process springs the trap; 0: any. ``pids``: the processes that get the signal, in this order; 0, which comes last, is
    the process that springs the trap.
    """
    path = folder / f"{point}.{by}"
    path.with_suffix(".new").write_text(json.dumps([signum, *pids]))
    path.with_suffix(".new").rename(path)


def install(folder: Path, write: Callable[..., None], slice_bytes: int) -> None:
    """Let this process spring the traps of ``folder``. ``write`` appends to the log; slices of the state have ``slice_bytes`` at most."""
    from elastirun.train.checkpoints.ranks import Ranks
    from elastirun.train.elastic import Elastic
    from elastirun.train.live import state_slices
    from elastirun.train.live.live_round import LiveRound
    from elastirun.train.live.world_change import WorldChange
    from elastirun.worker.live_worlds import LiveWorld

    def come(point: str) -> None:
        for by in (os.getpid(), 0):
            if (path := folder / f"{point}.{by}").exists():
                spring(path, point)

    def spring(path: Path, point: str) -> None:
        sprung = path.with_name(f"{path.name}.sprung by {os.getpid()}")
        try:
            path.rename(sprung)  # one process succeeds
        except FileNotFoundError:
            return
        signum, *named = json.loads(sprung.read_text())
        pids = [pid or os.getpid() for pid in named]
        write("sprung", point=point, signum=signum, pids=pids)
        if signum == STANDS:
            time.sleep(FOREVER)
        for pid in pids:
            os.kill(pid, signal.Signals(signum))

    def at(owner: Any, name: str, before: Callable[..., str], after: Callable[..., str] = lambda *args: "") -> None:
        """Make a method come to points. ``before`` and ``after`` return their names for its arguments; none: an empty text."""
        method = getattr(owner, name)

        def called(*args: Any, **more: Any) -> Any:
            first, last = before(*args), after(*args)
            if first:
                come(first)
            result = method(*args, **more)
            if last:
                come(last)
            return result

        setattr(owner, name, called)

    def world_of(live: LiveRound, world: LiveWorld) -> str:
        if world.number == 0:
            return "first"
        return "next" if live.world is not None else "new"

    at(Elastic, "_leave", lambda *args: "parks")
    at(Ranks, "_exchange", lambda *args: f"agrees {'first' if os.environ['ELASTIRUN_WORLD'] == '0' else 'next'}")
    at(Elastic, "_begin_rehearsal", lambda *args: "", lambda *args: "rehearses")
    at(Elastic, "_end_rehearsal", lambda *args: "rehearsed")
    came = (lambda live, world, *_, word=word: f"{word} {world_of(live, world)}" for word in ("comes", "came"))
    at(LiveRound, "_come", *came)
    trains = "switches", "switched"
    at(WorldChange, "_switch", *(lambda change, *_, one=one: one if change._thread is not None else "" for one in trains))
    at(state_slices.Sender, "go_on", lambda one: f"sends {one._sent}", lambda one: f"sent {one._sent}")
    at(state_slices.Receiver, "go_on", lambda one: f"takes {one._received}", lambda one: f"took {one._received}")
    state_slices.UNIT, state_slices.SECONDS, state_slices.PART = slice_bytes, 0, 0

"""Decisions about parking: which live workers are asked, and whose promise counts. The sockets are in ``agent/workers/live_workers.py``."""

from __future__ import annotations

from collections.abc import Collection


class Parking:
    """The live workers of one node, by pid.

    A worker is live from its hello on. One that is asked to park has not left its round before it has answered for this very round; an
    answer for another round, or a second one, is nothing but a message that came late.
    """

    def __init__(self) -> None:
        self._live: set[int] = set()
        self._asked: dict[int, int] = {}  # workers that were asked and have not answered: the round that they are to leave
        self._parked: dict[int, int] = {}  # with the round in which each one's state was agreed upon; 0: it has none

    def hello(self, pid: int) -> None:
        """A worker can be parked from now on."""
        self._live.add(pid)

    def is_live(self, pid: int) -> bool:
        """Return whether the worker can be parked."""
        return pid in self._live

    def ask(self, pids: Collection[int], round: int) -> list[int]:
        """Return which of the workers ``pids`` are asked to leave ``round``; the others have to be ended."""
        asked = [pid for pid in pids if pid in self._live and pid not in self._parked]
        self._asked.update(dict.fromkeys(asked, round))
        return asked

    def promise(self, pid: int, round: int, settled: int) -> bool:
        """Return whether a worker that promises to have left ``round`` is parked by that. ``settled``: see ``settled``."""
        if self._asked.get(pid) != round:
            return False
        del self._asked[pid]
        self._parked[pid] = settled
        return True

    def settled(self, pid: int) -> int:
        """Return the round in which the ranks agreed upon the state of a parked worker; 0: it has none, or is not parked."""
        return self._parked.get(pid, 0)

    def resume(self, pid: int) -> bool:
        """Return whether the worker may be given another round. From then on it is not parked."""
        may = pid in self._parked
        self._parked.pop(pid, None)
        return may

    def gone(self, pid: int) -> None:
        """The worker has ended, or its connection."""
        self._live.discard(pid)
        self._parked.pop(pid, None)
        self._asked.pop(pid, None)

"""Names the ranks that are missing when this one waits for the others for long, as when it alone has called ``save``."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from elastirun.train.groups.collectives import ranks

log = logging.getLogger("elastirun.checkpoints")

LOOK = 2.0  # seconds between two looks of the thread; a rank that waits for longer leaves a note in the store
REPORT = 15.0  # seconds of waiting until there is a line: a rank that claims a slow directory has mostly come by then
# Seconds that the end waits for the last call of a thread. A thread that is inside torch when the interpreter ends aborts the process: its
# exit code is then SIGABRT's and not that of its exception. Calls take milliseconds; on an overloaded machine an import takes seconds.
LAST_CALL = 20.0


class Waiting:
    """Watches the exchanges of this rank, in a thread that sleeps. An exchange that is over soon costs nothing.

    The ranks have the same exchanges in the same order, so that their number tells which of the ranks have come to one.
    """

    def __init__(self, rank: int, world_size: int, board: Any) -> None:
        self.what = "use of a Checkpointer"  # what this rank is at, for people
        self._rank, self._world_size, self._board = rank, world_size, board
        self.exchanges = 0
        self._begun: tuple[int, float] | None = None  # the number and the time of the one in which this rank waits
        self._noted = 0  # the number of the exchange of which there is a note in the store; 0: of none
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpoints-waiting", daemon=True)
        self._thread.start()

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Watch what is done within, until it returns or raises."""
        self.exchanges += 1
        self._begun = (self.exchanges, time.monotonic())
        try:
            yield
        finally:
            self._begun = None

    def close(self) -> None:
        """End the thread, and wait for that."""
        self._ended.set()
        self._thread.join(LAST_CALL)

    def _run(self) -> None:
        told = 0
        while not self._ended.wait(LOOK):
            begun = self._begun
            with suppress(Exception):  # the store is gone: the exchange itself says so
                self._note(begun[0] if begun else 0)
                if begun and told < begun[0] and (waited := time.monotonic() - begun[1]) >= REPORT:
                    told = begun[0]
                    self._report(told, waited)
        with suppress(Exception):
            self._note(0)

    def _note(self, number: int) -> None:
        """Let the note in the store say that this rank waits in exchange ``number``; 0: in none."""
        if self._noted not in (0, number):
            self._board.delete_key(self._key(self._noted, self._rank))
        if number not in (0, self._noted):
            self._board.set(self._key(number, self._rank), "")
        self._noted = number

    def _report(self, number: int, waited: float) -> None:
        """Write the line, if no lower rank waits and writes it."""
        missing = [rank for rank in range(self._world_size) if not self._board.check([self._key(number, rank)])]
        if missing and all(rank in missing for rank in range(self._rank)):
            log.warning(
                "%s: rank %d has waited for %s for %.0f s; all ranks must call save and restore at the same points, with the same steps, "
                "so see whether these have called it, are slow, or hang",
                *(self.what, self._rank, ranks(missing), waited),
            )

    @staticmethod
    def _key(number: int, rank: int) -> str:
        return f"waiting/{number}/{rank}"

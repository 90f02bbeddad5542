"""The thread that takes a staged save to the disk: this rank's writer writes its files, and rank 0 commits when every rank's are there.

The thread waits for the writer process and for the notes of the other ranks; it executes almost no Python, so the training keeps the
interpreter. Nothing here raises into the training: what went wrong is a line, and an outcome.
"""

from __future__ import annotations

import base64
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from elastirun.checkpoint.writer_process import WriterProcess
from elastirun.errors import CheckpointError

from .ranks import Ranks
from .staging import Staging

log = logging.getLogger("elastirun.checkpoints")

LOOK_AGAIN = 0.02  # seconds between two looks whether all ranks have written
LONGEST_LOOK = 1.0  # seconds; the pause grows to this while a rank is slow
PATIENCE = 900.0  # seconds for the slowest rank's disk; a rank that is gone ends the training long before


@dataclass(eq=False)
class Save:
    """One save on its way to the disk."""

    number: int  # counts the saves of this process; the same on all ranks
    step: int
    image: int
    small_files: Callable[[], dict[str, bytes]]  # what rank 0 adds; called in the thread
    written: threading.Event = field(default_factory=threading.Event)  # the image may be filled anew
    done: threading.Event = field(default_factory=threading.Event)
    error: str = ""  # why it was not written, or not published


class Publisher:
    """Writes and publishes saves in their order.

    ``target`` is what every request to the writer names: directory and claim. ``commit`` returns the commit record of a save, made from
    the files of all ranks; ``keep`` is how many checkpoints stay.
    """

    def __init__(self, ranks: Ranks, writer: WriterProcess, directory: str, claim: str, sequence: int, keep: int, fence: str) -> None:
        self._ranks, self._writer, self._keep, self._fence = ranks, writer, keep, fence
        self._target = {"directory": directory, "claim": claim}
        self._sequence = sequence  # of the next commit
        self.published: int | None = None  # the step of the newest checkpoint that this rank knows of
        self._queue: queue.SimpleQueue[Save | Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()

    def submit(self, work: Save | Callable[[], object]) -> None:
        """Write and publish a save, or call a function, in the thread."""
        self._queue.put(work)

    def take_images(self, staging: Staging) -> None:
        """Give the images to the writer, which allocates their memory, in the thread."""
        self.submit(lambda: self._hand_over(staging))

    def _hand_over(self, staging: Staging) -> None:
        fds = [image.fd for image in staging.images if image is not None]
        reply = self._ask({"do": "images"}, fds)
        if "error" in reply:
            log.warning("the writer cannot use the shared memory: %s", reply["error"])
        staging.make_resident()

    def close(self, timeout: float) -> None:
        """End when everything submitted is done, or after ``timeout`` seconds."""
        self._queue.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._writer.close(patience=0.0)  # the thread then learns that the writer has ended
            self._thread.join(1.0)
        else:
            self._writer.close()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            if not isinstance(work, Save):
                with suppress(CheckpointError):  # the writer has ended: the next save says so
                    work()
                continue
            try:
                self._write(work)
            except Exception as error:  # whatever it was: training goes on, and the next save may succeed
                work.error = f"{type(error).__name__}: {error}"
            if work.error:
                log.warning("the checkpoint of step %d was not published: %s", work.step, work.error)
            work.written.set()
            work.done.set()

    def _write(self, save: Save) -> None:
        small = save.small_files() if self._ranks.rank == 0 else {}
        more = {name: base64.b64encode(data).decode() for name, data in small.items()}
        reply = self._ask({"do": "write", "image": save.image, "more": more})
        save.written.set()
        if self._ranks.rank == 0:
            save.error = self._conclude(save, reply)
        else:
            self._ranks.board.set(f"{save.number}/{self._ranks.rank}", json.dumps(reply))

    def _conclude(self, save: Save, mine: dict[str, Any]) -> str:
        """Commit ``save`` when all ranks have written their files; return what went wrong, empty when nothing did. Rank 0 only."""
        replies = [mine, *self._replies(save)]
        errors = [f"rank {rank}: {reply['error']}" for rank, reply in enumerate(replies) if reply.get("error")]
        if errors:
            error = "; ".join(errors[:3]) + (f" and {len(errors) - 3} more" if len(errors) > 3 else "")
            self._ask({"do": "discard", "step": save.step})
        else:
            files = {name: pair for reply in replies for name, pair in reply["files"].items()}
            answer = self._ask({"do": "commit", "commit": self._record(save, files), "keep": self._keep, "save": save.number})
            error = answer.get("error", "")
            if "warning" in answer:
                log.warning("%s", answer["warning"])
        self.published = save.step if not error else self.published
        if self._ranks.world_size > 1:
            self._ranks.board.set(f"{save.number}/outcome", error or "published")
        return error

    def _record(self, save: Save, files: Mapping[str, Any]) -> dict[str, Any]:
        """Return the commit record of ``save``, with ``files`` as all ranks' writers report them."""
        round = self._fence.rpartition(":")[2]
        sequence, self._sequence = self._sequence, self._sequence + 1
        return {
            "step": save.step,
            "sequence": sequence,
            "fence": self._fence,
            "round": int(round) if round.isdigit() else 0,
            "world_size": self._ranks.world_size,
            "files": files,
        }

    def _replies(self, save: Save) -> list[dict[str, Any]]:
        """Return what the other ranks' writers said, in rank order."""
        if self._ranks.world_size == 1:
            return []
        board = self._ranks.board
        keys = [f"{save.number}/{rank}" for rank in range(1, self._ranks.world_size)]
        if not _await(lambda: board.check(keys), PATIENCE):
            return [{"error": f"the others have not all written their files within {PATIENCE:g} s"}]
        texts = [board.get(key) for key in keys]
        for key in keys:
            board.delete_key(key)
        return [json.loads(text) for text in texts]

    def outcome(self, save: Save, timeout: float) -> str:
        """Return "published", or why not, once all ranks know; empty after ``timeout`` seconds. Every rank may ask, in any thread."""
        end = time.monotonic() + timeout
        if not save.done.wait(timeout):
            return ""
        if save.error or self._ranks.rank == 0:
            return save.error or "published"
        key = f"{save.number}/outcome"
        if not _await(lambda: self._ranks.board.check([key]), end - time.monotonic()):
            return ""
        text: str = self._ranks.board.get(key).decode()
        return text

    def _ask(self, request: Mapping[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
        self._writer.request({**self._target, **request}, fds)
        return self._writer.reply()


def _await(condition: Callable[[], bool], timeout: float) -> bool:
    """Return whether ``condition`` came true within ``timeout`` seconds. Looks less and less often: other machines are asked."""
    end, pause = time.monotonic() + timeout, LOOK_AGAIN
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, LONGEST_LOOK)
    return True

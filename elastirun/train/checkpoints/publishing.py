"""The thread that takes a staged save to the disk: this rank's writer writes its files, and rank 0 commits when every rank's are there.

The thread waits for the writer process and for the notes of the other ranks; it executes almost no Python, so the training keeps the
interpreter. Nothing here raises into the training: what went wrong is a line, and an outcome.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from elastirun.checkpoint.claims import round_of
from elastirun.checkpoint.messages import close_all
from elastirun.checkpoint.writer_process import WriterProcess
from elastirun.errors import CheckpointError
from elastirun.train.checkpoints.missing_ranks import LAST_CALL
from elastirun.train.checkpoints.ranks import Ranks
from elastirun.train.checkpoints.staging import Staging
from elastirun.train.groups.connections import live_sockets

log = logging.getLogger("elastirun.checkpoints")

LOOK_AGAIN = 0.02  # seconds between two looks whether all ranks have written
LONGEST_LOOK = 1.0  # seconds; the pause grows to this while a rank is slow
PATIENCE = 900.0  # seconds for the slowest rank's disk; a rank that is gone ends the training long before
PUBLISHED = "a checkpoint is being published"  # for people
RETRY = 30.0  # seconds for which a failed write is repeated; not at all after a save that failed, so that the training need not wait again


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

    ``directory`` and ``claim`` are what every request to the writer names; ``sequence`` is that of the first commit, ``keep`` how many
    checkpoints stay.
    """

    def __init__(self, ranks: Ranks, writer: WriterProcess, directory: str, claim: str, sequence: int, keep: int, fence: str) -> None:
        self._ranks, self._writer, self._keep, self._fence = ranks, writer, keep, fence
        self._target = {"directory": directory, "claim": claim}
        self._board = ranks.board if ranks.world_size > 1 else None  # now: the script may end its groups before the last save is published
        self._sequence = sequence  # of the next commit
        self._images: list[int] = []  # descriptors of what the writer has
        self._retry = RETRY
        self._writer_started = False  # the thread starts the successors of one that was killed
        self._ending = threading.Event()
        self._noted = ""  # the key of the last outcome
        self.published: int | None = None  # the step of the newest checkpoint that this rank knows of
        self._queue: queue.SimpleQueue[Save | Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()

    def start_writer(self) -> None:
        """Start the writer process, unless that is done. Raises ``CheckpointError``. Nothing may be submitted before."""
        if not self._writer_started:
            self._writer.start()
            self._writer_started = True

    def submit(self, work: Save | Callable[[], object]) -> None:
        """Write and publish a save, or call a function, in the thread."""
        self._queue.put(work)

    def take_images(self, staging: Staging) -> None:
        """Have the pages of the images mapped, and give them to the writer, in the thread.

        Rank 0 then deletes what earlier rounds have written and not published.
        """
        fds = [os.dup(image.fd) for image in staging.images if image is not None]  # the thread may come to it when others have their place
        self.submit(lambda: self._hand_over(staging, fds))

    def _hand_over(self, staging: Staging, fds: list[int]) -> None:
        close_all(self._images)
        self._images = fds
        staging.make_resident()  # first: the writer takes a moment to start, and the training may save right away
        reply = self._ask({"do": "images"}, fds)
        if "error" in reply:
            log.warning("the writer cannot use the shared memory: %s", reply["error"])
        if fds and self._ranks.rank == 0:  # may take long, and the memory is there by now
            self._ask({"do": "clean"})

    def close(self, timeout: float) -> None:
        """End when everything submitted is done, or after ``timeout`` seconds."""
        self._queue.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._ending.set()
            self._writer.close(patience=0.0)  # the thread then learns that the writer has ended
            self._thread.join(LAST_CALL)
            if self._thread.is_alive():  # else it has said what became of each save
                log.warning("%s: what was saved last was not published before the end", self._target["directory"])
        else:
            self._writer.close()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            if isinstance(work, Save):
                self._take(work)
            else:
                with suppress(CheckpointError):  # the writer has ended: the next save says so
                    work()
        close_all(self._images)

    def _take(self, save: Save) -> None:
        """Write and publish a save; on every rank, whatever goes wrong, the others learn of it."""
        reply = self._attempt(lambda: self._write(save))
        save.written.set()
        if self._ranks.rank == 0:
            save.error = self._attempt(lambda: self._conclude(save, reply)).get("error", "")
            self.published = self.published if save.error else save.step
        else:
            save.error = reply.get("error", "")
        self._attempt(lambda: self._tell(save, reply))
        if save.error:
            log.warning("the checkpoint of step %d was not published: %s", save.step, save.error)
        save.done.set()

    def _attempt(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what ``work`` returns, or its exception as an "error": training goes on, and the next save may succeed."""
        try:
            return work()
        except CheckpointError as error:
            return {"error": str(error)}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def _write(self, save: Save) -> dict[str, Any]:
        """Let the writer write the files of this rank; return its answer."""
        small = save.small_files() if self._ranks.rank == 0 else {}
        more = {name: base64.b64encode(data).decode() for name, data in small.items()}
        reply = self._ask({"do": "write", "image": save.image, "more": more, "limit": self._retry})
        self._retry = 0.0 if "error" in reply else RETRY
        if "error" not in reply and reply["save"] != save.number:
            raise CheckpointError(f"image {save.image} has save {reply['save']} instead of {save.number}")
        return reply

    def _tell(self, save: Save, reply: dict[str, Any]) -> dict[str, Any]:
        """Tell the other ranks: rank 0 what became of the save, the others how their part went."""
        if self._board is None:
            return reply
        live_sockets.check(PUBLISHED)
        if self._ranks.rank > 0:
            self._board.set(f"{save.number}/{self._ranks.rank}", json.dumps(reply))
        else:
            before, self._noted = self._noted, f"{save.number}/outcome"
            self._board.set(self._noted, save.error or "published")
            if before:  # nobody waits for that save any more: all ranks have come to this one
                self._board.delete_key(before)
        return reply

    def _conclude(self, save: Save, mine: dict[str, Any]) -> dict[str, Any]:
        """Commit ``save`` when all ranks have written their files; return the answer. Rank 0 only."""
        replies = [mine, *self._replies(save)]
        errors = [f"rank {rank}: {reply['error']}" for rank, reply in enumerate(replies) if reply.get("error")]
        if errors:
            self._ask({"do": "discard", "step": save.step})
            return {"error": "; ".join(errors[:3]) + (f" and {len(errors) - 3} more" if len(errors) > 3 else "")}
        files = {name: pair for reply in replies for name, pair in reply["files"].items()}
        commit = {"do": "commit", "commit": self._record(save, files), "keep": self._keep, "save": save.number}
        answer = self._ask({**commit, "limit": RETRY})
        if "warning" in answer:
            log.warning("%s", answer["warning"])
        return answer

    def _record(self, save: Save, files: Mapping[str, Any]) -> dict[str, Any]:
        """Return the commit record of ``save``, with ``files`` as all ranks' writers report them."""
        sequence, self._sequence = self._sequence, self._sequence + 1
        return {
            "step": save.step,
            "sequence": sequence,
            "fence": self._fence,
            "round": round_of(self._fence),
            "world_size": self._ranks.world_size,
            "time": time.time(),
            "files": files,
        }

    def _replies(self, save: Save) -> list[dict[str, Any]]:
        """Return what the other ranks' writers said, in rank order."""
        board = self._board
        if board is None:
            return []
        keys = [f"{save.number}/{rank}" for rank in range(1, self._ranks.world_size)]
        if not self._await(lambda: board.check(keys), PATIENCE):
            return [{"error": f"the others have not all written their files within {PATIENCE:g} s"}]
        texts = [board.get(key) for key in keys]
        for key in keys:
            board.delete_key(key)
        return [json.loads(text) for text in texts]

    def outcome(self, save: Save, timeout: float) -> str:
        """Return "published", or why not, once all ranks know; empty after ``timeout`` seconds. Every rank may ask, in any thread.

        Raises RuntimeError if the connections to the peers are cut meanwhile.
        """
        end = time.monotonic() + timeout
        if not live_sockets.wait_unless_cut(save.done, PUBLISHED, timeout):
            return ""
        board = self._board
        if save.error or self._ranks.rank == 0 or board is None:
            return save.error or "published"
        key = f"{save.number}/outcome"
        if not self._await(lambda: board.check([key]), end - time.monotonic()):
            return ""
        text: str = board.get(key).decode()
        return text

    def _ask(self, request: Mapping[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
        """Return the writer's answer. A writer that was killed, as by the kernel for memory, gets a successor, which is asked once more.

        Any request can be repeated: what was published already is found to be so.
        """
        message = {**self._target, **request}
        try:
            return self._request(message, fds)
        except CheckpointError as error:
            if self._ending.is_set():
                raise
            log.warning("%s; a new one is started", error)
        self._writer.close(patience=0.0)
        self._writer.start()
        if request["do"] != "images":
            self._request({"do": "images"}, self._images)
        return self._request(message, fds)

    def _request(self, message: Mapping[str, Any], fds: Sequence[int]) -> dict[str, Any]:
        self._writer.request(message, fds)
        return self._writer.reply()

    def _await(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Return whether ``condition`` came true within ``timeout`` seconds. Looks less and less often: other machines are asked."""
        end, pause = time.monotonic() + timeout, LOOK_AGAIN
        while True:
            live_sockets.check(PUBLISHED)  # before each look: torch would write a page of a connection that is cut
            if condition():
                return True
            if time.monotonic() > end or self._ending.wait(pause):
                return False
            pause = min(pause * 1.5, LONGEST_LOOK)

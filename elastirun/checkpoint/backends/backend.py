"""The interface of a place that keeps checkpoints, and what such a place must guarantee."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import IO, Protocol

from elastirun.checkpoint.claims import Published
from elastirun.checkpoint.record import Commit, FileSum

# A check before a publish. Arguments: where the files are, for messages, and the size of each. An exception ends the publish.
Check = Callable[[str, Mapping[str, int]], None]


class Backend(Protocol):
    """One directory of checkpoints in some kind of storage. ``Directory`` adds the rules that are the same in all of them.

    A backend guarantees, and ``tests/checkpoint/test_backends.py`` checks:

    fence      When ``take`` has returned, no ``publish``, ``delete`` or ``clean`` of an earlier claim has an effect on what is published,
               not even of a process that was frozen in the middle of one. They raise ``ClaimLost``. What an earlier claim had
               published before is in every list that ``checkpoints`` returns from then on.
    whole      One atomic step makes a checkpoint visible, after all of its files.
    durable    What ``sync`` and ``publish`` have returned for survives a loss of power.
    repeated   Each method can be called again with the same arguments after an OSError, also where the storage has carried out the
               first call and only the answer was lost.

    ``claim`` is a name of ``claims.claim_name``, which is never used twice. What was written under one claim is not seen by another.
    Errors of the storage are OSErrors; those with an errno of ``writer.LASTING`` are not repeated.
    """

    @property
    def path(self) -> str:
        """The directory's path or URL, for messages. The files of a checkpoint are below it, in a folder of the checkpoint's name."""

    def take(self, claim: str, alone: bool) -> Callable[[], None]:
        """Take the directory over; return a function that gives the claim up in the end. Makes the directory where there is none.

        ``alone``: there is no agent that orders the rounds, so only one process at a time may hold the directory, if the storage
        can see to that. Raises ``ClaimLost`` when a later round of the same job has the directory, ``CheckpointError`` when another
        process is using it ``alone``.
        """

    def checkpoints(self) -> Iterable[Published]:
        """Return all published checkpoints in any order, with those that were set aside, which are marked.

        Raises FileNotFoundError if the directory does not exist.
        """

    def open(self, checkpoint: str, file: str) -> IO[bytes]:
        """Open a file of the checkpoint of this name for reading, from anywhere in it.

        Raises FileNotFoundError if it is missing, and ``CheckpointError`` for what is no file.
        """

    def set_aside(self, found: Published) -> str:
        """Mark a checkpoint, so that it never counts again; return where it is now. Nothing is deleted."""

    def write(self, claim: str, step: int, file: str, data: memoryview) -> FileSum:
        """Write one file of a checkpoint aside. Many processes write files of one step at the same time."""

    def sync(self, claim: str, step: int) -> None:
        """Wait until the files are durable that this process has written aside."""

    def discard(self, claim: str, step: int, files: Collection[str] | None = None) -> None:
        """Delete ``files`` (None: all) that were written aside for ``step``, as far as possible."""

    def publish(self, claim: str, commit: Commit, check: Check) -> str:
        """Publish what was written aside as the newest checkpoint; return its name. Exactly this commit counts once.

        Calls ``check`` right before the atomic step. The backend may give the commit another sequence than ``commit.sequence``, above
        all that are published.
        """

    def delete(self, claim: str, found: Collection[Published]) -> None:
        """Delete published checkpoints, and what an earlier deletion under this claim has left.

        Where a step that is saved again under one claim gets the same files, they stay until the last of its records goes.
        """

    def clean(self, claim: str) -> None:
        """Delete what earlier rounds have written aside and not published, as far as possible."""

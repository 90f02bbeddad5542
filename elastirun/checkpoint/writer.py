"""The writer process of one rank: writes images to the directory, and publishes for rank 0. ``writer_process`` starts it.

A process and not a thread, so that hashing and writing do not hold the trainer's interpreter lock. Requests arrive on a socket (see
messages.py) and are answered in order, one at a time:

    {"do": "images"} + descriptors
    {"did": "images"}

    {"do": "write", "image": 0, "directory": D, "claim": C, "more": {name: base64 of a small file}}
    {"did": "write", "save": S, "files": {name: [size, sha256, crc32]}}

    {"do": "commit", "directory": D, "claim": C, "commit": {...}, "keep": N, "save": S}          rank 0
    {"did": "commit", "save": S, "name": "step-00000100"}

    {"do": "discard", "directory": D, "claim": C, "step": 100}                                   rank 0, when a rank could not write
    {"did": "discard"}

    {"do": "clean", "directory": D, "claim": C}                                                  rank 0, once
    {"did": "clean"}

"commit" has the fields of ``record.Commit`` (without "time": now), with files as in the answers of all ranks. "limit" (seconds, optional)
says for how long failed writes are repeated. An answer may also have "error", one line, and then "lost": true when another round has
claimed the directory; what this rank, or for "commit" every rank, had written aside for the step is then deleted. Where only the
deletion of old checkpoints failed, "warning" says so.

The process ends when the trainer closes the socket or dies. It then publishes nothing and deletes nothing.
"""

from __future__ import annotations

import base64
import errno
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

from elastirun import clock, linux
from elastirun.checkpoint.claims import is_claim
from elastirun.checkpoint.directory import Directory, open_directory
from elastirun.checkpoint.image import Image
from elastirun.checkpoint.messages import close_all, receive, send
from elastirun.checkpoint.record import Commit, FileSum, clip, is_file_name, number, sums_from_lists, text
from elastirun.errors import CheckpointError, ClaimLost, TrainError
from elastirun.worker.current_round import is_current

# Ten steps of niceness are a tenth of a busy processor. At 19 (a seventieth), or with SCHED_IDLE and an idle I/O class, trainers that keep
# every processor busy would starve the writer, and the newest checkpoint would be minutes old. SCHED_BATCH: a request that arrives does not
# preempt a trainer. The I/O priority follows the niceness: level 6 of 7 among best-effort.
NICE = 10
MAX_KEEP = 1_000_000  # checkpoints
MAX_LINE = 500  # characters of an error
LIMIT = 30.0  # seconds until a failure is reported: longer than most restarts of a file server, shorter than most intervals of saves
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds between attempts; each pause is twice as long as the one before
# Errors that stay until somebody corrects a path or a permission: no write is tried again.
LASTING = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}
LASTING |= {errno.EFBIG, errno.EINVAL}
_T = TypeVar("_T")


def main(fd: int, parent: int) -> NoReturn:
    """Serve the trainer, the process ``parent``, at the other end of the socket ``fd`` until it is gone; exit."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a trainer that is asked to stop saves first
        signal.signal(signum, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(NICE)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with socket.socket(fileno=fd) as trainer:
        if os.getppid() == parent:
            serve(trainer, parent)
    os._exit(0)


def serve(trainer: socket.socket, parent: int) -> None:
    """Answer requests until the trainer closes the socket or the process ``parent`` has ended."""
    images: list[Image] = []
    poller = select.poll()
    poller.register(trainer, select.POLLIN)
    with suppress(OSError):  # a process that the trainer has forked may hold its end of the socket open
        poller.register(linux.pidfd_open(parent), select.POLLIN)
    while [fd for fd, _ in poller.poll()] == [trainer.fileno()]:
        try:
            received = receive(trainer)
            if received is None:
                return
            send(trainer, answer(*received, images))
        except (OSError, CheckpointError):  # the trainer is gone, perhaps in the middle of a message
            return


def answer(message: Mapping[str, Any], fds: Sequence[int], images: list[Image]) -> dict[str, Any]:
    """Carry out one request; return the answer. ``images`` changes with the request for that."""
    did = message.get("do")
    reply: dict[str, Any] = {"did": did}
    unused = list(fds)
    try:
        if did == "images":
            _replace(images, unused)
        elif did in COMMANDS:
            reply |= COMMANDS[did](message, images)
        else:
            raise CheckpointError(f"the writer has no request {clip(repr(did))}")
    except Exception as error:  # whatever a storage library raises: training goes on, and the trainer has the line
        reply |= {"error": one_line(error)} | ({"lost": True} if isinstance(error, ClaimLost) else {})
    close_all(unused)
    return reply


def one_line(error: Exception) -> str:
    """Return what an exception says, with the file that it is about."""
    if isinstance(error, OSError) and error.strerror:
        return clip(f"{error.filename}: {error.strerror}" if error.filename else error.strerror, MAX_LINE)
    if isinstance(error, (TrainError, OSError)):
        return clip(str(error), MAX_LINE)
    return clip(f"{type(error).__name__}: {error}", MAX_LINE)


def _replace(images: list[Image], fds: list[int]) -> None:
    """Give up the images, and map those in ``fds``, which become theirs."""
    while images:
        images.pop().close()
    while fds:
        images.append(Image.of(fds[0]))
        del fds[0]


def _write(message: Mapping[str, Any], images: list[Image]) -> dict[str, Any]:
    """Write the files of an image that are this rank's to write."""
    image = images[number(message["image"], len(images) - 1)]
    description = image.description()
    if description is None:
        raise CheckpointError(f"image {message['image']} is not complete")
    (directory, claim), step = _place(message), description.step
    more = {name: base64.b64decode(data) for name, data in message.get("more", {}).items() if is_file_name(name)}
    files: dict[str, FileSum] = {}

    def write_the_rest() -> None:
        for name in description.write:
            if name not in files:
                at, size = description.files[name]
                with memoryview(image.memory) as memory, memory[at : at + size] as data:
                    files[name] = directory.backend.write(claim, step, name, data)
        for name, small in more.items():
            files[name] = directory.backend.write(claim, step, name, memoryview(small))
        if files:  # else another rank may not have made the folder yet
            directory.backend.sync(claim, step)

    try:
        repeat(write_the_rest, float(message.get("limit", LIMIT)))
        if image.description() != description:
            raise CheckpointError(f"image {message['image']} changed while it was written")
    except BaseException:
        directory.backend.discard(claim, step, [*description.write, *more])
        raise
    return {"save": description.save, "files": {name: [file.size, file.sha256, file.crc32] for name, file in files.items()}}


def _commit(message: Mapping[str, Any], images: list[Image]) -> dict[str, Any]:
    """Publish what all ranks have written, and delete old checkpoints."""
    (directory, claim), limit = _place(message), float(message.get("limit", LIMIT))
    fields = dict(message["commit"])
    commit = Commit(**{"time": time.time(), **fields, "files": sums_from_lists(fields["files"])})
    keep = number(message["keep"], MAX_KEEP, 1)
    try:
        name = repeat(lambda: directory.publish(claim, commit, lambda: is_current(limit)), limit)
    except BaseException:
        directory.backend.discard(claim, commit.step)
        raise
    try:
        repeat(lambda: directory.prune(claim, keep), limit)
    except (OSError, CheckpointError) as error:
        return {"save": message.get("save"), "name": name, "warning": f"old checkpoints are not deleted: {one_line(error)}"}
    return {"save": message.get("save"), "name": name}


def _discard(message: Mapping[str, Any], images: list[Image]) -> dict[str, Any]:
    """Delete what was written for a step that is not published."""
    directory, claim = _place(message)
    directory.backend.discard(claim, number(message["step"]))
    return {}


def _clean(message: Mapping[str, Any], images: list[Image]) -> dict[str, Any]:
    """Delete what earlier rounds have written and not published."""
    directory, claim = _place(message)
    directory.backend.clean(claim)
    return {}


def _place(message: Mapping[str, Any]) -> tuple[Directory, str]:
    """Return the directory and the claim that a request is about."""
    url, claim = str(message["directory"]), text(message["claim"])
    if not url or not is_claim(claim):
        raise CheckpointError(f"{clip(repr(url))}, {clip(repr(claim))}: this is no directory with a claim on it")
    return open_directory(url), claim


Command = Callable[[Mapping[str, Any], list[Image]], dict[str, Any]]
COMMANDS: dict[object, Command] = {"write": _write, "commit": _commit, "discard": _discard, "clean": _clean}


def repeat(
    attempt: Callable[[], _T], limit: float = LIMIT, now: Callable[[], float] = clock.now, sleep: Callable[[float], None] = time.sleep
) -> _T:
    """Call ``attempt`` until it raises no OSError that may pass; return its result.

    Raises that error as soon as another one cannot pass, or ``limit`` seconds after the first one.
    """
    end, pause = None, FIRST_PAUSE
    while True:
        try:
            return attempt()
        except OSError as error:
            end = now() + limit if end is None else end
            if error.errno in LASTING or now() + pause > end:
                raise
        sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)

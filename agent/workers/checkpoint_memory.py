"""Keep the memory in which workers hold their last checkpoints beyond the workers' death, for those of the next round.

A worker sends one of these requests to the agent's socket (``local_socket.py``)::

    put NAME   with the descriptor of a memfd      ->  ok | no WHY       takes the place of what had that name
    get NAME                                       ->  ok, with the descriptor | none
    list                                           ->  a JSON object: names and sizes in bytes
    drop NAME                                      ->  ok | none

The agent holds descriptors and reads none of the content. It lets go of them when it ends, which ends the job on this node.
Client: ``elastirun/checkpoint/memory_tier.py``.

See docs/agent.md.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import InitVar, dataclass

from elastirun import clock, linux
from elastirun.agent.host import memory
from elastirun.agent.observe.events import CheckpointsHeld, Event
from elastirun.agent.part import Part
from elastirun.agent.workers.local_socket import LocalClient, LocalSocket, close_aside

# Descriptors: two or three for each worker of a node. The answer to ``list`` must fit into a socket's buffer
# (200 KiB).
MAX_HELD = 512
SHARE = 2  # what is held may take one half of the memory that was available when the agent started; the workers need the rest
SETTLE = 1.0  # seconds without a change until the amount is written to the events: the workers of a node put theirs one after another
NOTABLE = 0.1  # change of the amount, as a fraction, that is written to the events
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
_SEALS = linux.F_SEAL_SHRINK | linux.F_SEAL_GROW
GIB = 1 << 30


def limit() -> int:
    """Return how many bytes an agent that starts now would hold at most."""
    return memory.available() // SHARE


@dataclass(eq=False)
class CheckpointMemory(Part):
    """Answers at ``socket``. All calls happen in the loop's thread; nothing blocks. ``write`` gets events, ``say`` lines for people.

    ``limit_bytes``: how much to hold at most; None: ``limit()``.
    """

    _socket: LocalSocket
    _write: Callable[[Event], None]
    _say: Callable[[str], None]
    limit_bytes: InitVar[int | None] = None

    def __post_init__(self, limit_bytes: int | None) -> None:
        self._limit = limit() if limit_bytes is None else limit_bytes
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = MAX_HELD if files == resource.RLIM_INFINITY else min(MAX_HELD, files // 4)
        self._held: dict[str, int] = {}  # by name: the descriptor
        self._shown = 0  # bytes in the last event
        self._show_at = math.inf  # when to look whether an event is due, on ``elastirun.clock``
        self._full = False  # people were told that the limit is reached
        self._requests = {"put": self._put, "get": self._get, "list": self._list, "drop": self._drop}
        for word, answer in self._requests.items():
            self._socket.serve(word, answer)

    @property
    def size(self) -> int:
        """Bytes held. Pages that were never written count as well."""
        return sum(os.fstat(fd).st_size for fd in self._held.values())

    def tick(self, now: float) -> float:
        """Write an event if it is time."""
        if now >= self._show_at:
            self._show_at = math.inf
            size = self.size
            if abs(size - self._shown) > NOTABLE * self._shown:
                self._shown = size
                self._write(CheckpointsHeld(len(self._held), size, self._limit))
        return self._show_at

    def close(self) -> None:
        """Let all go."""
        for word in self._requests:
            self._socket.serve_no_longer(word)
        while self._held:
            os.close(self._held.popitem()[1])

    def _put(self, client: LocalClient, name: str) -> None:
        """Hold the descriptor that came along."""
        fd = client.take_fd()
        why = self._refusal(name, fd, client.lost_fds)
        if fd is not None and why:
            close_aside(fd)
        elif fd is not None:
            self._forget(name)
            self._held[name] = fd
            self._show_at = clock.now() + SETTLE
        self._socket.answer(client, f"no {why}" if why else "ok")

    def _get(self, client: LocalClient, name: str) -> None:
        fd = self._held.get(name)
        self._socket.answer(client, "none" if fd is None else "ok", fd)

    def _list(self, client: LocalClient, rest: str) -> None:
        self._socket.answer(client, json.dumps({name: os.fstat(fd).st_size for name, fd in self._held.items()}))

    def _drop(self, client: LocalClient, name: str) -> None:
        self._socket.answer(client, "ok" if self._forget(name) else "none")

    def _refusal(self, name: str, fd: int | None, lost: bool) -> str:
        """Return why the descriptor is not taken under this name; empty when it may be."""
        if not _NAME.fullmatch(name):
            return "a name has 1 to 64 of the characters A-Z a-z 0-9 _ . -"
        if fd is None or lost:
            return "one descriptor comes along, and the agent must have a free one for it"
        if not has_fixed_size(fd):
            return "what is held must be a memfd of a fixed size, sealed with F_SEAL_SHRINK and F_SEAL_GROW"
        old = self._held.get(name)
        if old is None and len(self._held) >= self._most:
            return f"{self._most} images are held already"
        size, before = os.fstat(fd).st_size, self.size - (os.fstat(old).st_size if old is not None else 0)
        if before + size > self._limit:
            return self._too_much(before, size)
        return ""

    def _too_much(self, before: int, size: int) -> str:
        of = f"{self._limit / GIB:.1f} GiB, half of the memory that was available when the agent started"
        why = f"{size / GIB:.1f} GiB beside {before / GIB:.1f} GiB exceed {of}"
        if not self._full:
            self._full = True
            self._say(f"not all checkpoints are kept in memory, so the next round may load them from disk: {why}")
        return why

    def _forget(self, name: str) -> bool:
        fd = self._held.pop(name, None)
        if fd is not None:
            close_aside(fd)  # to free gigabytes takes seconds
            self._show_at = clock.now() + SETTLE
        return fd is not None


def has_fixed_size(fd: int) -> bool:
    """Return whether ``fd`` is a memfd that nobody can make smaller or larger: what was counted stays so, and no reader gets SIGBUS.

    Asks for the seals only: fstat of a file of a network file system may take for ever, and only memory has seals.
    """
    with suppress(OSError):
        return fcntl.fcntl(fd, linux.F_GET_SEALS) & _SEALS == _SEALS
    return False

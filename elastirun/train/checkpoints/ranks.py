"""The ranks that save and restore together, and what they tell each other: numbers, texts and bytes, never pickled objects."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from elastirun.errors import CheckpointError
from elastirun.train.checkpoints.missing_ranks import Waiting
from elastirun.train.groups.collectives import gather
from elastirun.train.groups.process_groups import find_group, make_gloo_group
from elastirun.train.groups.waits import finish

CPU = torch.device("cpu")
SHORT = 1 << 10  # bytes of a text, with its length, that travel in one exchange; of what is longer the rest takes another one
_LENGTH = 8  # bytes
_numbers = count()  # every rank makes its checkpointers in the same order


def begin_world() -> None:
    """Count checkpointers from the beginning: all ranks have a new store, and some of them may be new processes."""
    global _numbers
    _numbers = count()


class Ranks:
    """The ranks of ``group`` (default: the default group; this process alone where there is none), in a gloo group of their own.

    A group of its own lets checkpoints be agreed upon beside the training's collectives, and on the host where these run on GPUs.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._number = next(_numbers)
        self._group: dist.ProcessGroup | None = None
        self._waiting: Waiting | None = None
        self.rank, self.world_size = 0, 1
        self._first = 0  # the group's rank 0, in the default group: other groups use the same numbers
        self.made_alone = group is None and not (dist.is_available() and dist.is_initialized())
        if not self.made_alone:
            found = find_group(group)
            self.rank, self.world_size = dist.get_rank(found), dist.get_world_size(found)
            self._first = dist.get_global_rank(found, 0)
            if self.world_size > 1:
                self._group = make_gloo_group(found)
                self._waiting = Waiting(self.rank, self.world_size, self.board)

    def begin(self, what: str) -> None:
        """Take note of what follows, for the line about ranks that do not come to it."""
        if self._waiting is not None:
            self._waiting.what = what

    def _exchange(self) -> AbstractContextManager[None]:
        return self._waiting.exchange() if self._waiting is not None else nullcontext()

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Return the ``values`` (equally many everywhere) of every rank, in rank order."""
        if self._group is None:
            return [list(values)]
        with self._exchange():
            return gather(values, self._group, CPU)

    def gather_text(self, text: str) -> list[str]:
        """Return the ``text`` of every rank, in rank order."""
        if self._group is None:
            return [text]
        data = text.encode()
        data = len(data).to_bytes(_LENGTH, "little") + data
        parts = self._gather_bytes(data[:SHORT], SHORT)
        sizes = [_LENGTH + int.from_bytes(part[:_LENGTH], "little") for part in parts]
        if max(sizes) > SHORT:
            rest = self._gather_bytes(data[SHORT:], max(sizes) - SHORT)
            parts = [first + more for first, more in zip(parts, rest, strict=True)]
        return [part[_LENGTH:size].decode() for part, size in zip(parts, sizes, strict=True)]

    def _gather_bytes(self, data: bytes, size: int) -> list[bytes]:
        """Return the ``data`` of every rank, in rank order, each with zeros up to ``size`` bytes."""
        assert self._group is not None
        mine = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        every = bytearray(size * self.world_size)
        with self._exchange():
            parts = [*torch.split(torch.frombuffer(every, dtype=torch.uint8), size)]
            finish(dist.all_gather(parts, mine, self._group, async_op=True), mine.device)
        return [bytes(every[at : at + size]) for at in range(0, len(every), size)]

    def agree(self, fine: bool) -> bool:
        """Return whether ``fine`` is true on every rank."""
        return all(theirs for (theirs,) in self.gather([fine]))

    def from_first(self, text: str) -> str:
        """Return rank 0's ``text``."""
        return self.from_first_of_each(0, text if self.rank == 0 else "")[0]

    def from_first_of_each(self, kind: int, text: str) -> dict[int, str]:
        """Return the ``text`` of the first rank of each ``kind`` (64 bits), by rank, in rank order."""
        rows = self.gather([kind, len(data := bytearray(text.encode()))])
        found, seen = {}, set[int]()
        for rank, (theirs, size) in enumerate(rows):
            if theirs not in seen:
                seen.add(theirs)
                self.broadcast(part := data if rank == self.rank else bytearray(size), rank)
                found[rank] = part.decode()
        return found

    def broadcast(self, data: bytearray, source: int) -> None:
        """Fill ``data``, equally long everywhere, with that of the rank ``source``."""
        if self._group is not None and data:
            tensor = torch.frombuffer(data, dtype=torch.uint8)
            with self._exchange():
                finish(dist.broadcast(tensor, dist.get_global_rank(self._group, source), self._group, async_op=True), tensor.device)

    @cached_property
    def nodes(self) -> list[int]:
        """The node of each rank, numbered from 0. Two agents on one machine are two nodes: each keeps its own memory."""
        names = self.gather_text(os.environ.get("ELASTIRUN_SOCKET") or socket.gethostname())
        return [names.index(name) for name in names]

    @cached_property
    def board(self) -> Any:
        """The key-value store in which ranks leave notes for each other at any time, from any thread. Only for more than one rank."""
        prefix = f"elastirun/checkpoints/{self._number}/{self._first}"
        return c10d.PrefixStore(prefix, c10d._get_default_store())

    def close(self) -> None:
        """End the group and the thread, unless the program has ended all groups already.

        A group in which there was no exchange stays until the program ends all groups: a slower rank may still connect to this one.
        """
        if self._waiting is not None:
            self._waiting.close()
            if self._waiting.exchanges and self._group in c10d._world.pg_map:
                dist.destroy_process_group(self._group)
        self._group = self._waiting = None


def on_every_rank(ranks: Ranks, work: Callable[[], str | None]) -> list[str]:
    """Do ``work`` on every rank; return what it returned, in rank order, without None: an empty text.

    If it raises CheckpointError on one rank, all raise the error of the first such rank.
    """
    try:
        mine = "+" + (work() or "")
    except CheckpointError as found:
        mine = "-" + (str(found) or "failed")
    everyones = ranks.gather_text(mine)
    for rank, text in enumerate(everyones):
        if text.startswith("-"):
            raise CheckpointError(text[1:] if ranks.world_size == 1 else f"rank {rank}: {text[1:]}")
    return [text[1:] for text in everyones]

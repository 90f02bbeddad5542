"""Shared memory for slices of the state: the sender writes, new ranks on the same host read. It saves both ranks the loopback connection.

A slice consists of units. Two words at the beginning count the units that are written, and those up to the end of the newest whole slice.
Only the sender writes the words, and they only grow. A slice overwrites the one before, which the new ranks have copied by then.
"""

from __future__ import annotations

import math
import os
import platform
import secrets
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from mmap import MAP_SHARED, PAGESIZE, mmap

import torch
import torch.distributed as dist
from torch import Tensor

from elastirun import linux
from elastirun.train.groups.connections import live_sockets
from elastirun.train.groups.waits import finish_message, limit_of
from elastirun.train.reduction.transports.shared_memory import touch

NAME = "elastirun slices"
TOKEN = 16  # bytes behind the words, by which a process finds out that it has opened the file that was meant
NAP = 0.0002  # seconds between two looks for the next unit, which takes the sender about a millisecond
ADDRESS = 128  # bytes of a message with an address: four numbers
TAG = 0x51CE  # of the messages that bring a state: the script may send others
ORDERED = ("x86_64",)  # machines on which the units are there when the words say so; Python has no memory barrier


class SliceMemory:
    """Memory of up to ``size`` bytes. The first ``ahead`` bytes are allocated at once, the others when they are used.

    ``address``: where another process of this host finds the memory; empty if it cannot.
    """

    def __init__(self, size: int, ahead: int = 0) -> None:
        self.address, self._file, self._allocated = "", -1, 0  # the file; -1: memory of this process alone
        token = secrets.token_bytes(TOKEN)
        try:
            if platform.machine() in ORDERED:
                self._file = linux.memfd_create(NAME)
                weakref.finalize(self, os.close, self._file)
                os.ftruncate(self._file, PAGESIZE + size)
                self.allocate(ahead)
                self.address = f"{os.getpid()} {self._file} {PAGESIZE + size} {token.hex()}"
        except OSError:
            self._file = -1
        self._map(mmap(self._file, PAGESIZE + size, flags=MAP_SHARED))
        self._head[16 : 16 + TOKEN] = token

    @classmethod
    def opened(cls, address: str) -> SliceMemory | None:
        """Return the memory that another process of this host has at ``address``; None if it cannot be had here."""
        memory = cls.__new__(cls)
        with suppress(OSError, ValueError):
            pid, descriptor, size, token = address.split()
            path = f"/proc/{int(pid)}/fd/{int(descriptor)}"
            if NAME not in os.readlink(path):  # that of a process of another host, whose file might be anything
                return None
            with linux.Descriptor(os.open(path, os.O_RDWR | os.O_CLOEXEC)) as file:
                memory._map(mmap(file, int(size), flags=MAP_SHARED))
            return memory if bytes(memory._head[16 : 16 + TOKEN]).hex() == token else None
        return None

    def _map(self, memory: mmap) -> None:
        self._head = memoryview(memory)[:PAGESIZE]
        self._words = self._head[:16].cast("Q")
        self.data = torch.frombuffer(memory, dtype=torch.uint8, offset=PAGESIZE)

    def allocate(self, size: int) -> None:
        """Allocate the first ``size`` bytes. Raises OSError if the host has not so many: a write to them would end this process."""
        if self._file >= 0 and (end := PAGESIZE + size) > self._allocated:
            os.posix_fallocate(self._file, self._allocated, end - self._allocated)
            self._allocated = end

    def touch(self, size: int) -> None:
        """Map each page of the first ``size`` bytes, which are allocated: the first use of a page takes longer than its copy."""
        touch(self.data[:size])

    def give_back(self) -> None:
        """Free all memory. Nobody may read it any more."""
        if self._file >= 0:
            os.ftruncate(self._file, PAGESIZE)

    def say_written(self, units: int) -> None:
        """Tell readers that so many units are there, counted from the first slice on."""
        self._words[0] = units

    def end_slice(self) -> None:
        """Tell readers that the slice is whole."""
        self._words[1] = self._words[0]

    def units(self, taken: int, limit: float = math.inf) -> Iterator[int]:
        """Yield the number of each unit of the next slice as soon as it is there. ``taken``: units of the slices before.

        Raises RuntimeError if a peer is lost meanwhile, or after ``limit`` seconds without a unit.
        """
        first, end = taken, time.monotonic() + limit
        while not first < self._words[1] == taken:
            if self._words[0] > taken:
                yield taken
                taken, end = taken + 1, time.monotonic() + limit
                continue
            live_sockets.check("a slice of the state is awaited")
            if time.monotonic() > end:
                raise RuntimeError(f"no slice of the state has come in {limit:g} s")
            time.sleep(NAP)


def offer(ranks: Sequence[int], group: dist.ProcessGroup, size: int, ahead: int) -> tuple[SliceMemory, list[int]]:
    """Return memory for slices, and those of the new ``ranks`` that have mapped it. Each of ``ranks`` calls ``accept``, in any thread.

    ``ahead``: bytes that are made ready for both, so that no step pays for the first use of a page.
    """
    memory, near = SliceMemory(size, ahead), []
    text = torch.frombuffer(bytearray(memory.address.encode().ljust(ADDRESS)), dtype=torch.uint8)
    sent = [dist.isend(text, rank, group, TAG) for rank in ranks]
    memory.touch(ahead)
    for rank, work in zip(ranks, sent, strict=True):
        finish_message(work, limit_of(group))
        answer = torch.zeros(1, dtype=torch.uint8, device="cpu")
        finish_message(dist.irecv(answer, rank, group, TAG), limit_of(group))
        near += [rank] * int(answer)
    return memory, near


def accept(source: int, group: dist.ProcessGroup, ahead: int) -> SliceMemory | None:
    """Return the memory that rank ``source`` offers; None where this rank cannot map it, so slices come through ``group``."""
    text: Tensor = torch.zeros(ADDRESS, dtype=torch.uint8, device="cpu")
    finish_message(dist.irecv(text, source, group, TAG), limit_of(group))
    memory = SliceMemory.opened(bytes(text.tolist()).decode())
    if memory is not None:
        memory.touch(ahead)
    finish_message(dist.isend(torch.tensor([memory is not None], dtype=torch.uint8, device="cpu"), source, group, TAG), limit_of(group))
    return memory

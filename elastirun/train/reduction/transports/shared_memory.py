"""Sums and gathering of buckets through memory that the ranks of one host share, instead of through loopback sockets.

A rank's buckets lie in a file in memory (memfd; /dev/shm has 64 MB in a container), which its neighbours on the host map, too. When all
ranks have launched a bucket, each adds up one slice of it, in the order of the ranks, and writes the sum to all: the same bits on
every rank and for any layout of the buckets. A word in a rank's own file says how far the rank is with a bucket; only this rank writes it,
and it only grows. There is no thread: a rank that begins, polls or waits continues what is pending. On several hosts, one leader of each
host takes part in a sum over gloo.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import platform
import select
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from mmap import MAP_SHARED, PAGESIZE, mmap
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from elastirun import linux
from elastirun.train.errors import PeerLost, ReductionFailed, TrainError
from elastirun.train.groups.collectives import all_reduce
from elastirun.train.groups.process_groups import connect_limit, connected
from elastirun.train.reduction.transports.base import Arena, Storage, advice, part_of, reduction_errors
from elastirun.train.reduction.transports.group import GroupTransport, GroupWork

log = logging.getLogger("elastirun.train")

TOUCHED = 4096  # pages at a time, fewer than torch divides among threads
BLOCK = 512 * 1024  # bytes added up at a time, half of a usual core's cache: a sum is still cached when it is written to the others
SPIN, NAP = 2e-4, 5e-4  # seconds: a wait is busy for SPIN, then sleeps an eighth of the time it has waited, at most NAP


class SharedMemory:
    """The transport for processors: shared memory between the ranks of a host, a gloo group between the hosts.

    Every rank of ``group`` makes one at the same point. All get a TrainError if one rank cannot or is not ``willing``, or if no two ranks
    share a host. ``host`` names the host; by default, ranks with the same kernel, pid namespace and user share one. A wait ends with an
    error after the timeout of ``group``, and milliseconds after a neighbour has ended or closed its transport. After an error, the
    transport is closed.
    """

    averages = False

    def __init__(self, group: dist.ProcessGroup, host: str | None = None, willing: bool = True, strict: bool = True) -> None:
        self._group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self._strict = strict
        self._instead: GroupTransport | None = None  # the transport of the buckets that found no memory
        self._processes: dict[int, int] = {}  # ranks by pidfd; a socket would stay open in a fork, such as a DataLoader's worker
        weakref.finalize(self, _close_all, self._processes)
        self._ended = select.poll()
        self._closed: list[memoryview] = []  # a word of each rank of this host: it has closed its transport
        self._interrupted = ""  # why nobody is to be waited for any more; empty: nothing is the matter
        self._arenas: weakref.WeakSet[SharedArena] = weakref.WeakSet()
        self.between: list[Any] = []  # on the leaders, if there are several hosts: their gloo group
        options = getattr(group._get_backend(torch.device("cpu")), "options", None)  # a backend need not have any
        self.timeout = getattr(options, "_timeout", c10d.default_pg_timeout)
        told = self._agreed(lambda: (_host(host, willing), os.getpid(), time.time_ns()))
        hosts = [numbers[0] for numbers in told]
        self.ranks = [rank for rank, there in enumerate(hosts) if there == hosts[self.rank]]
        self.leaders = [rank for rank, there in enumerate(hosts) if there not in hosts[:rank]]
        if len(self.leaders) == len(hosts):
            raise TrainError("no two ranks share a host")
        self._pids = {rank: told[rank][1] for rank in self.ranks}
        self._agreed(self._watch)
        self._closed = [memoryview(m).cast("Q") for m in self.share(PAGESIZE)]
        if len(self.leaders) > 1 and self.rank in self.leaders:
            # The time is in the prefix because the store may still hold the keys of an earlier transport.
            store = c10d.PrefixStore(f"elastirun/{told[0][2]}", c10d._get_process_group_store(group))
            made = dist.ProcessGroupGloo(store, self.leaders.index(self.rank), len(self.leaders), connect_limit(self.timeout))
            connected([made], self.timeout)
            self.between = [made]

    def _watch(self) -> None:
        """Open pidfds of the other ranks of this host, so that their end is noticed."""
        for rank in set(self.ranks) - {self.rank}:
            self._processes[descriptor := linux.pidfd_open(self._pids[rank])] = rank
            self._ended.register(descriptor, select.POLLIN)

    def allocate(self, storages: Sequence[Storage]) -> Arena:
        """Return memory for buckets. If a rank has not enough, every rank raises TrainError (``strict``), or uses the group from now on."""
        if self._instead is None:
            try:
                self._arenas.add(arena := SharedArena(self, storages))
                return arena
            except TrainError as error:
                if self._strict or isinstance(error, ReductionFailed):
                    raise
                self._instead = GroupTransport(self._group)
                if self.rank == 0:
                    log.warning("there is no shared memory for the gradients (%s): they go through the process group from now on", error)
        return self._instead.allocate(storages)

    def interrupt(self, why: str) -> None:
        """Let waits end with a PeerLost from now on, without a rank, unless the result is there."""
        self._interrupted = why

    def close(self) -> None:
        """Let neighbours that wait for this rank get a PeerLost. Buffers stay valid for as long as they are used."""
        if self._closed:
            self._closed[self.ranks.index(self.rank)][0] = 1
        self._ended = select.poll()
        _close_all(self._processes)
        for arena in self._arenas:
            arena.pending = []  # these will not end; they lead to the arena, so buckets and groups would stay for the garbage collector
        between, self.between = self.between, []
        if between:  # closes the connections, which the other leaders notice; it may wait until the deadline of a sum under way
            threading.Thread(target=between.clear, daemon=True).start()

    def share(self, size: int) -> list[mmap]:
        """Return maps of ``size`` zero bytes of each rank of this host, in rank order."""
        maps: list[mmap] = []
        with ExitStack() as stack:

            def create() -> tuple[int, int]:
                file = stack.enter_context(open(linux.memfd_create("elastirun"), "r+b", buffering=0)).fileno()
                os.posix_fallocate(file, 0, size)  # no memory left: an error here instead of SIGBUS later
                return file, os.fstat(file).st_ino

            def map_all() -> None:
                for rank, pid in self._pids.items():
                    with open(f"/proc/{pid}/fd/{files[rank][0]}", "r+b", buffering=0) as file:
                        if os.fstat(file.fileno()).st_ino != files[rank][1]:
                            raise OSError(f"process {pid} is another one now")
                        maps.append(mmap(file.fileno(), size, flags=MAP_SHARED))
                    touch(torch.frombuffer(maps[-1], dtype=torch.uint8))

            files = self._agreed(create)
            self._agreed(map_all)
        return maps

    def _agreed(self, action: Callable[[], tuple[int, ...] | None]) -> list[list[int]]:
        """Return up to three numbers of each rank, from its ``action``. Raise TrainError on all ranks if that raises an OSError on one."""
        told, why = torch.zeros((self.size, 4), dtype=torch.int64, device="cpu"), ""
        try:
            told[self.rank] = torch.tensor((1, *(action() or ()), 0, 0, 0)[:4], device="cpu")
        except (OSError, ValueError) as error:
            why = f": {error}"
        with reduction_errors("an agreement on shared memory"):
            all_reduce(told, self._group)
        if failed := [rank for rank, (fine, *_) in enumerate(told.tolist()) if not fine]:
            self.close()
            raise TrainError(f"ranks {failed} cannot share memory{why}")
        return [numbers for _, *numbers in told.tolist()]

    def lost(self) -> tuple[int, str] | None:
        """Return a rank of this host that is gone, and a sentence on how; None if there is none."""
        # Read the words first. A rank closes when it has seen the end of another one: that one is to be named, and is then seen here, too.
        closed = [(rank, "closed its transport, as after an error") for rank, word in zip(self.ranks, self._closed, strict=True) if word[0]]
        ended = [(self._processes[descriptor], "ended") for descriptor, _ in self._ended.poll(0)]
        found = next(((rank, f"rank {rank} (pid {self._pids[rank]}) {how}") for rank, how in ended + closed), None)
        return found or ((-1, self._interrupted) if self._interrupted else None)


def touch(memory: Tensor) -> None:
    """Read each page of ``memory``, so that it is mapped. Other threads run meanwhile: mmap with MAP_POPULATE would hold Python's lock."""
    for pages in memory[::PAGESIZE].split(TOUCHED):  # type: ignore[no-untyped-call]
        pages.sum()


def _close_all(descriptors: dict[int, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[0])


def _host(name: str | None, willing: bool) -> int:
    """Return a number for the kernel, the pid namespace and the user. Processes that share them can open each other's files."""
    if not willing or platform.machine() != "x86_64":
        # On other processors a neighbour may see the word before the contents of the bucket, and Python has no memory barrier.
        raise OSError(f"{platform.machine()} orders memory weakly" if willing else "it is switched off")
    with open("/proc/sys/kernel/random/boot_id") as file:
        name = name or f"{file.read()} {os.stat('/proc/self/ns/pid').st_ino} {os.getuid()}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


class SharedArena:
    """Buckets of all ranks of this host. The memory lives as long as a tensor in it."""

    def __init__(self, transport: SharedMemory, storages: Sequence[Storage]) -> None:
        self.transport, self._mine = transport, transport.ranks.index(transport.rank)
        self._rounds = [0] * len(storages)  # by bucket: collectives begun
        self._handed_on = 0  # sums that this leader has begun with the other leaders
        self.pending: list[SharedWork] = []
        lengths = (8 * len(storages) + 1, *(storage.numel * storage.dtype.itemsize for storage in storages))
        *offsets, size = itertools.accumulate(-(-length // PAGESIZE) * PAGESIZE for length in lengths)
        maps = transport.share(size)
        self._words = [memoryview(m)[: 8 * len(storages)].cast("Q") for m in maps]
        self._buckets = [[_tensor(m, *place) for m in maps] for place in zip(storages, offsets, strict=True)]
        self.buffers = [_tensor(maps[self._mine], *place) for place in zip(storages, offsets, strict=True)]  # versions of their own

    def all_reduce(self, index: int) -> SharedWork:
        return self._begin(index, self._reduce, self._buckets[index])

    def all_gather(self, index: int) -> SharedWork:
        """On several hosts, this is the sum of integers: what other ranks have in a part is zero, so no bit changes."""
        if not self._several:
            return self._begin(index, self._gather, self._buckets[index])
        part = part_of(self.buffers[index], self.transport.rank, self.transport.size)
        mine = part.clone()
        self.buffers[index].zero_()
        part.copy_(mine)
        return self._begin(index, self._reduce, [buffer.view(torch.uint8) for buffer in self._buckets[index]])

    def _begin(self, index: int, collective: Callable[[int, int, list[Tensor]], Iterator[bool]], buffers: list[Tensor]) -> SharedWork:
        self._rounds[index] += 1
        steps = collective(index, 3 * self._rounds[index], buffers)
        self.pending.append(work := SharedWork(self, index, steps))
        self.push()
        return work

    @property
    def _several(self) -> bool:
        """Whether the ranks are on several hosts."""
        return len(self.transport.leaders) > 1

    def push(self) -> None:
        """Continue all pending collectives, as far as the other ranks are."""
        try:
            for work in self.pending:
                work.over = next(work.steps, False)
        except ReductionFailed:  # between the hosts
            self.transport.close()
            raise
        self.pending = [work for work in self.pending if not work.over]

    def _gather(self, index: int, word: int, buffers: list[Tensor]) -> Iterator[bool]:
        """Copy the other ranks' parts step by step; yield whether that is over."""
        yield from self._meet(index, word)
        for at, buffer in enumerate(buffers):
            if at != self._mine:
                part_of(buffers[self._mine], at, len(buffers)).copy_(part_of(buffer, at, len(buffers)))
        yield from self._meet(index, word + 1)  # nobody may write to a buffer before the others have read it
        yield True

    def _reduce(self, index: int, word: int, buffers: list[Tensor]) -> Iterator[bool]:
        """Reduce one bucket step by step; yield whether the reduction is over."""
        number = sum(self._rounds)
        yield from self._meet(index, word)
        self._add(buffers, {0} if self._several else range(len(buffers)))
        yield from self._meet(index, word + 1)
        if self._several:
            while self.transport.between and self._handed_on < number - 1:  # in the same order on all leaders
                yield False
            if self.transport.between:
                self._handed_on += 1
                what = f"the sum of the hosts' bucket {index}"
                work = GroupWork(self.transport.between[0].allreduce(buffers[:1]), what, buffers[0].device)
                while not work.done():
                    yield False
                work.wait()
                del work  # it would keep the connections open
            else:
                while self._words[0][index] < word + 2:
                    yield False
                buffers[self._mine].copy_(buffers[0])
            yield from self._meet(index, word + 2)  # the leader must not write the next sum before the others have copied this one
        yield True

    def _meet(self, index: int, word: int) -> Iterator[bool]:
        """Publish that this rank has come to ``word`` with a bucket, and wait for the others."""
        # On x86-64 others see this store after all stores before it. That includes stores that bypass the cache, because torch's
        # operations end with locked instructions.
        self._words[self._mine][index] = word
        while self._behind(index, word):
            yield False

    def _behind(self, index: int, word: int) -> list[int]:
        """Return the ranks that have not come to ``word`` yet."""
        return [rank for rank, words in zip(self.transport.ranks, self._words, strict=True) if words[index] < word]

    def lacking(self, index: int) -> str:
        """Return a sentence on the ranks that a reduction waits for."""
        word = self._words[self._mine][index]
        behind = self._behind(index, word)
        return f"{f'ranks {behind}' if behind else 'other hosts'} did not {'finish' if word % 3 else 'come with'} bucket {index}"

    def _add(self, buffers: list[Tensor], targets: Collection[int]) -> None:
        """Add up this rank's part of ``buffers`` into the first one, and write the sum to those at ``targets``."""
        size, parts = BLOCK // buffers[0].element_size(), [part_of(buffer, self._mine, len(buffers)) for buffer in buffers]
        for blocks in zip(*(part.split(size) for part in parts), strict=True):  # type: ignore[no-untyped-call]
            for other in blocks[1:]:
                blocks[0].add_(other)
            for at in targets:
                if at:
                    blocks[at].copy_(blocks[0])


def _tensor(memory: mmap, storage: Storage, offset: int) -> Tensor:
    count = storage.numel  # frombuffer needs one at least
    if not count:
        return torch.zeros(0, dtype=storage.dtype, device="cpu")
    return torch.frombuffer(memory, dtype=storage.dtype, count=count, offset=offset)


class SharedWork:
    """The ``Work`` of one bucket in shared memory."""

    def __init__(self, arena: SharedArena, index: int, steps: Iterator[bool]) -> None:
        self._arena, self._index, self.steps, self.over = arena, index, steps, False

    def done(self) -> bool:
        self._arena.push()
        return self.over

    def wait(self) -> None:
        begun, transport = time.monotonic(), self._arena.transport
        while not self.done():
            waited = time.monotonic() - begun
            if waited < SPIN:
                os.sched_yield()  # with more ranks than cores, the rank that is awaited may need this core
                continue
            time.sleep(min(NAP, waited / 8))
            lost = transport.lost()
            # A neighbour may have finished its part before it ended, hence the last condition.
            if (lost or waited > transport.timeout.total_seconds()) and not self.done():
                text = f"{self._arena.lacking(self._index)} in {waited:.3g} s. {advice()}"
                transport.close()  # ranks that wait for this one get an error at once
                raise PeerLost(lost[0], f"{lost[1]}: {text}") if lost else ReductionFailed(text)

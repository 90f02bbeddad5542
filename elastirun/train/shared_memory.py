"""Sums of buckets through memory that the ranks of one host share, instead of through loopback sockets.

A rank's buckets lie in a file in memory (memfd; /dev/shm has 64 MB in a container) that its neighbours on the host map, too. When all of
them have come with a bucket, each adds up one slice of it, in the order of the ranks, and writes the sum to everybody: the same bits on
every rank and for any layout of the buckets. How far a rank is with a bucket is one word in its own file, which nobody else writes and
which only grows. There is no thread: whoever begins, asks or waits pushes on what is pending. On several hosts, the sums of the hosts are
added up over a gloo group of one leader each.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import platform
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import PeerLost, ReductionFailed, TrainError
from .transport import Storage

BLOCK = 256 * 1024  # bytes added up at a time: few enough that the block is still in the core's cache when it is written to the others
PAGE = 4096
ALIGNED = 64  # elements; slices begin at cache lines, whatever the dtype
SPIN, NAP = 2e-4, 2e-3  # seconds of a wait: first looking again and again, then napping, then sleeping with an eye on the neighbours
MEETING = 20.0  # seconds for the neighbours to connect to each other
READY, SUMMED, SPREAD, STAGES = 0, 1, 2, 3  # how far a rank is with a bucket; SPREAD on several hosts only
AGAIN = "Use set_group() with a new process group"


@dataclass(frozen=True)
class Neighbour:
    """Another rank of this host. ``pidfd`` is None where its process cannot be seen (another pid namespace)."""

    rank: int
    pid: int
    socket: socket.socket
    pidfd: int | None


def _listen() -> tuple[socket.socket | None, int, str]:
    """A listening socket and the number in its name; or no socket, 0, and why this process cannot share memory."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        # Other processors may show a neighbour the word before the bucket, and Python has no barrier against that.
        return None, 0, f"{platform.system()} on {platform.machine()}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        os.close(os.memfd_create("elastirun"))
        token = 1 + secrets.randbits(62)
        listener.bind(_address(token))
        listener.listen(4096)
    except OSError as error:
        listener.close()
        return None, 0, str(error)
    return listener, token, ""


def _address(token: int) -> str:
    return f"\0elastirun-{token:016x}"  # abstract: no file is left behind


def _host() -> str:
    """What two processes must have in common to share memory: the kernel, the network namespace (of socket names), the user."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.stat('/proc/self/ns/net').st_ino} {os.getuid()}"


def _gather(group: dist.ProcessGroup, numbers: Sequence[int]) -> list[list[int]]:
    mine = torch.tensor(numbers, dtype=torch.int64)
    everybodys = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybodys, mine, group)
    return [numbers.tolist() for numbers in everybodys]


def _neighbour(connection: socket.socket, rank: int) -> Neighbour:
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid():
        raise PermissionError(f"rank {rank} belongs to user {uid}")
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        pidfd = None
    return Neighbour(rank, pid, connection, pidfd)


def _meet(listener: socket.socket, rank: int, tokens: dict[int, int], found: list[Neighbour]) -> None:
    """Connect to the lower ranks of this host and let the higher ones connect; each says its token. Raises OSError."""
    until = time.monotonic() + MEETING
    for lower in (other for other in tokens if other < rank):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(MEETING)
        connection.connect(_address(tokens[lower]))
        connection.send(struct.pack("q", tokens[rank]))
        found.append(_neighbour(connection, lower))
    missing = {struct.pack("q", token): other for other, token in tokens.items() if other > rank}
    while missing:
        listener.settimeout(max(0.001, until - time.monotonic()))
        connection, _ = listener.accept()
        connection.settimeout(MEETING)
        other = missing.pop(connection.recv(8), None)
        if other is None:  # a stranger; its name can be read in /proc/net/unix
            connection.close()
        else:
            found.append(_neighbour(connection, other))
    found.sort(key=lambda neighbour: neighbour.rank)


class SharedMemory:
    """The transport for processors: shared memory between the ranks of a host, a gloo group between the hosts.

    Every rank of ``group`` makes one at the same time; TrainError on all of them if one cannot, is not ``willing``, or if no two share a
    host. ``host`` tells hosts apart (default: what shares a kernel, a network namespace and a user). A wait is bounded by the timeout of
    ``group``, and by the death of a neighbour. After an error, the transport is closed.
    """

    averages = False

    def __init__(self, group: dist.ProcessGroup, host: str | None = None, willing: bool = True) -> None:
        self.rank = dist.get_rank(group)
        self.neighbours: list[Neighbour] = []
        self.between: dist.ProcessGroupGloo | None = None  # of the leaders, on a leader of several hosts
        self._poll = select.poll()
        self._closed = False
        self.timeout = _timeout(group)
        listener, token, why = _listen() if willing else (None, 0, "it is switched off")
        here = int.from_bytes(hashlib.sha256((host or _host()).encode()).digest()[:8], "big", signed=True)
        told = _gather(group, [here, token])
        self.ranks = [rank for rank, (there, _) in enumerate(told) if there == here]
        self.leaders = [rank for rank, (there, _) in enumerate(told) if there not in {host for host, _ in told[:rank]}]
        try:
            if unable := [rank for rank, (_, token) in enumerate(told) if not token]:
                why = f"ranks {unable} cannot" + (f": {why}" if why else "")
            elif len(self.leaders) == len(told):
                why = "no two ranks share a host"
            elif listener:
                why = self._connect(group, listener, {rank: told[rank][1] for rank in self.ranks})
            if why:
                self.close()
                raise TrainError(f"no shared memory between the ranks: {why}")
        finally:
            if listener:
                listener.close()
        if len(self.leaders) > 1 and self.rank == self.ranks[0]:
            store = dist.distributed_c10d.PrefixStore(f"elastirun/{told[0][1]}", dist.distributed_c10d._get_process_group_store(group))
            self.between = dist.ProcessGroupGloo(store, self.leaders.index(self.rank), len(self.leaders), self.timeout)

    def _connect(self, group: dist.ProcessGroup, listener: socket.socket, tokens: dict[int, int]) -> str:
        """Connect the neighbours; why not, if not everywhere."""
        why = "it failed on another rank"
        try:
            _meet(listener, self.rank, tokens, self.neighbours)
            why = ""
        except OSError as error:
            why = str(error)
        if not all(fine for (fine,) in _gather(group, [not why])):
            return f"the neighbours could not connect, {why or 'for another rank'}"
        for neighbour in self.neighbours:
            neighbour.socket.setblocking(False)
            self._poll.register(neighbour.socket, select.POLLRDHUP)
            if neighbour.pidfd is not None:  # a fork of a killed rank, such as a DataLoader's worker, keeps the socket open
                self._poll.register(neighbour.pidfd, select.POLLIN)
        return ""

    def allocate(self, storages: Sequence[Storage]) -> SharedArena:
        """Raises ReductionFailed, on every rank of the host, if one has not the memory."""
        return SharedArena(self, storages)

    def close(self) -> None:
        """Neighbours who wait for this rank get a PeerLost. Buffers stay as they are for as long as they are used."""
        self._closed = True
        for neighbour in self.neighbours:
            try:
                neighbour.socket.shutdown(socket.SHUT_RDWR)  # forks of this process have the socket, too
            except OSError:
                pass
            neighbour.socket.close()
            if neighbour.pidfd is not None:
                os.close(neighbour.pidfd)
        self.neighbours = []
        self._poll = select.poll()
        if self.between is not None and hasattr(self.between, "abort"):
            self.between.abort()
        self.between = None

    def exchange(self, file: int, size: int) -> list[int]:
        """Hand ``file`` to the neighbours; theirs, in their order."""
        files: dict[int, int] = {}
        for neighbour in self.neighbours:
            try:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", file))]
                neighbour.socket.sendmsg([struct.pack("Q", size)], rights, socket.MSG_NOSIGNAL)
            except OSError as error:
                raise self.failed(f"memory could not be shared with rank {neighbour.rank}: {error}") from error

        def all_came() -> bool:
            for neighbour in self.neighbours:
                if neighbour.rank not in files:
                    try:
                        text, rights, _, _ = neighbour.socket.recvmsg(8, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
                    except BlockingIOError:
                        continue
                    if rights:
                        (files[neighbour.rank],) = struct.unpack("i", rights[0][2][:4])
                        if text != struct.pack("Q", size):
                            raise self.failed(f"rank {neighbour.rank} has buckets of another size")
            return len(files) == len(self.neighbours)

        self.wait(all_came, lambda: f"ranks {sorted({n.rank for n in self.neighbours} - set(files))} did not come with memory")
        return [files[neighbour.rank] for neighbour in self.neighbours]

    def failed(self, text: str) -> ReductionFailed:
        """The error to raise; the neighbours learn that this rank is out."""
        self.close()
        return ReductionFailed(f"{text}. {AGAIN}")

    def wait(self, reached: Callable[[], bool], lacking: Callable[[], str]) -> None:
        begun = time.monotonic()
        while not reached():
            waited = time.monotonic() - begun
            if self._closed:
                raise ReductionFailed(f"the transport is closed, while {lacking()}. {AGAIN}")
            if waited < SPIN:
                os.sched_yield()  # with more ranks than cores, the one that is waited for needs this core
            elif waited < NAP:
                time.sleep(5e-5)
            elif events := self._poll.poll(1):
                if reached():  # its last deed
                    return
                raise self._lost({descriptor for descriptor, _ in events}, lacking())
            elif waited > self.timeout.total_seconds():
                raise self.failed(f"{lacking()} within {self.timeout.total_seconds():.0f} s")

    def _lost(self, descriptors: set[int], lacking: str) -> PeerLost:
        gone = [n for n in self.neighbours if n.socket.fileno() in descriptors or n.pidfd in descriptors]
        ended = [n for n in gone if n.pidfd is not None and select.select([n.pidfd], [], [], 0.1)[0]]  # sockets close a little earlier
        lost = (ended or gone)[0]  # who closed has probably seen the end of one who ended
        how = "ended" if ended else "ended or closed its transport" if lost.pidfd is None else "closed its transport, as after an error"
        self.close()
        return PeerLost(lost.rank, f"rank {lost.rank} (pid {lost.pid}) {how}, and {lacking}. {AGAIN}")


def _timeout(group: dist.ProcessGroup) -> timedelta:
    try:
        return group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):  # backends need not have it
        return dist.distributed_c10d.default_pg_timeout


class SharedArena:
    """Buckets in a file of this rank, and the neighbours' views of theirs. The memory lives as long as a tensor in it."""

    def __init__(self, transport: SharedMemory, storages: Sequence[Storage]) -> None:
        self.transport = transport
        self.mine = transport.ranks.index(transport.rank)
        self.turn = 0  # how many sums of this host a leader has handed to the other leaders
        self._rounds = [0] * len(storages)
        self._begun = 0
        self._pending: list[Reduction] = []
        self._fence = threading.Lock()
        offsets, size = [], -(-8 * len(storages) // PAGE) * PAGE
        for storage in storages:
            if storage.device.type != "cpu":
                raise TrainError(f"shared memory is for processors, not for {storage.device}")
            offsets.append(size)
            size += -(-storage.numel * storage.dtype.itemsize // PAGE) * PAGE
        maps = self._map(max(size, PAGE))
        self._words = [memoryview(m)[: 8 * len(storages)].cast("Q") for m in maps]
        buckets = [[_tensor(m, storage, offset) for m in maps] for storage, offset in zip(storages, offsets, strict=True)]
        self.all = buckets
        self.buffers = [_tensor(maps[self.mine], s, offset) for s, offset in zip(storages, offsets, strict=True)]

    def _map(self, size: int) -> list[mmap.mmap]:
        files = []
        try:
            files.append(os.memfd_create("elastirun-buckets"))
            os.posix_fallocate(files[0], 0, size)  # no memory left: an error now instead of SIGBUS later
            files += self.transport.exchange(files[0], size)
            files.insert(self.mine, files.pop(0))
            return [mmap.mmap(file, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE) for file in files]
        except OSError as error:
            raise self.transport.failed(f"no shared memory of {size >> 20} MiB: {error}") from error
        finally:
            for file in files:
                os.close(file)

    def all_reduce(self, index: int) -> Reduction:
        self._rounds[index] += 1
        reduction = Reduction(self, index, STAGES * self._rounds[index], self._begun)
        self._begun += 1
        self._pending.append(reduction)
        self.push()
        return reduction

    def push(self) -> None:
        for reduction in self._pending:
            reduction.push()
        self._pending = [reduction for reduction in self._pending if not reduction.over]

    def reach(self, index: int, word: int) -> None:
        with self._fence:  # its instruction waits for stores that went past the cache, too; all others are in order on x86-64
            self._words[self.mine][index] = word

    def behind(self, index: int, word: int) -> list[int]:
        """The ranks of this host that have not reached ``word``."""
        return [rank for rank, words in zip(self.transport.ranks, self._words, strict=True) if words[index] < word]

    def add(self, index: int) -> None:
        """Add up this rank's slice, in blocks, into the first rank's buffer; on one host, write it to the others."""
        buffers = self.all[index]
        step = -(-buffers[0].numel() // (len(buffers) * ALIGNED)) * ALIGNED
        block = BLOCK // buffers[0].element_size()
        slices = [buffer[self.mine * step : (self.mine + 1) * step].split(block) for buffer in buffers]  # type: ignore[no-untyped-call]
        for total, *others in zip(*slices, strict=True):
            for other in others:
                total.add_(other)
            if len(self.transport.leaders) == 1:
                for other in others:
                    other.copy_(total)


def _tensor(memory: mmap.mmap, storage: Storage, offset: int) -> Tensor:
    if not storage.numel:
        return torch.zeros(0, dtype=storage.dtype)
    return torch.frombuffer(memory, dtype=storage.dtype, count=storage.numel, offset=offset)


class Reduction:
    """One bucket on its way; ``base`` is the word that says READY in this round."""

    def __init__(self, arena: SharedArena, index: int, base: int, number: int) -> None:
        self._arena, self._index, self._base, self._number = arena, index, base, number
        self._stage = READY
        self._between: dist.Work | None = None
        self.over = False
        arena.reach(index, base + READY)

    def done(self) -> bool:
        self._arena.push()
        return self.over

    def wait(self) -> None:
        if not self.over:
            self._arena.transport.wait(self.done, self._lacking)

    def push(self) -> None:
        """Go as far as the others allow."""
        if self._all_at(READY) and self._stage == READY:
            self._arena.add(self._index)
            self._reach(SUMMED)
        if self._stage == READY or not self._all_at(SUMMED):
            return
        if len(self._arena.transport.leaders) > 1 and self._stage == SUMMED and self._summed_between_hosts():
            self._reach(SPREAD)
        self.over = len(self._arena.transport.leaders) == 1 or self._all_at(SPREAD)

    def _summed_between_hosts(self) -> bool:
        """On the leader: add up with the other leaders. On the others: take the leader's sum."""
        arena, transport, total = self._arena, self._arena.transport, self._arena.all[self._index][0]
        if transport.rank != transport.ranks[0]:
            if transport.ranks[0] in arena.behind(self._index, self._base + SPREAD):
                return False
            arena.all[self._index][arena.mine].copy_(total)
            return True
        if self._between is None and transport.between is not None and arena.turn == self._number:  # in one order on all leaders
            arena.turn += 1
            self._between = transport.between.allreduce([total])  # type: ignore[attr-defined]
        if self._between is None or not self._between.is_completed():
            return False
        try:
            self._between.wait()
        except RuntimeError as error:
            raise transport.failed(f"the hosts' sums of bucket {self._index} were not added up: {str(error).splitlines()[0]}") from error
        return True

    def _all_at(self, stage: int) -> bool:
        return not self._arena.behind(self._index, self._base + stage)

    def _reach(self, stage: int) -> None:
        self._stage = stage
        self._arena.reach(self._index, self._base + stage)

    def _lacking(self) -> str:
        for stage, what in ((READY, "did not come with"), (SUMMED, "did not finish"), (SPREAD, "did not finish")):
            if behind := self._arena.behind(self._index, self._base + stage):
                return f"ranks {behind} {what} bucket {self._index}"
        return f"bucket {self._index} was about to be finished"

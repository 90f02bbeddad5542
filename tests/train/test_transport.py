"""Sums over the ranks: through shared memory, the process group, and both; what happens when a rank is gone."""

from __future__ import annotations

import gc
import os
import platform
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from elastirun.train.errors import PeerLost, ReductionFailed, TrainError
from elastirun.train.reduction.transports.base import Storage, part_of
from elastirun.train.reduction.transports.choose import choose
from elastirun.train.reduction.transports.group import GroupTransport
from elastirun.train.reduction.transports.shared_memory import SharedArena, SharedMemory
from tests.support.until import PATIENCE
from tests.support.worlds import GROUP_TIMEOUT, Died, run

CPU = torch.device("cpu")
SIZES = (1, 63, 64, 65, 1000, 0, 1_000_003)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)


def storages(*sizes: int, dtype: torch.dtype = torch.float32) -> list[Storage]:
    return [Storage(size, dtype, CPU) for size in sizes]


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def numbers(rank: int, size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (torch.randn(size, generator=generator) * 3).to(dtype) if dtype.is_floating_point else torch.full((size,), rank + 1, dtype=dtype)


def in_order(terms: list[Tensor]) -> Tensor:
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


def same(left: Tensor, right: Tensor) -> bool:
    """The same bits."""
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


# Sums


def all_sizes_and_dtypes(rank: int, ranks: int) -> list[Storage]:
    """Return the storages whose sum is not that in the order of the ranks."""
    transport = choose(world(), CPU)
    assert isinstance(transport, SharedMemory) and not transport.averages
    plan = [Storage(size, dtype, CPU) for dtype in DTYPES for size in SIZES]
    arena = transport.allocate(plan)
    assert not any(buffer.any() for buffer in arena.buffers)
    for buffer, storage in zip(arena.buffers, plan, strict=True):
        assert buffer.shape == (storage.numel,) and buffer.data_ptr() % 64 == 0
        buffer.copy_(numbers(rank, storage.numel, storage.dtype))
    for work in [arena.all_reduce(index) for index in range(len(plan))]:
        work.wait()
        assert work.done()
    sums = [in_order([numbers(r, storage.numel, storage.dtype) for r in range(ranks)]) for storage in plan]
    transport.close()
    return [storage for buffer, storage, total in zip(arena.buffers, plan, sums, strict=True) if not same(buffer, total)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_of_every_size_and_dtype_are_those_in_the_order_of_the_ranks(ranks: int) -> None:
    assert run(ranks, all_sizes_and_dtypes) == [[]] * ranks


def same_bits(rank: int, ranks: int) -> list[bool]:
    """Compare the sums in two layouts, those of all ranks, and of two ranks that of gloo."""
    transport = SharedMemory(world())
    values = numbers(rank, 300_000)
    results = []
    for sizes in ((300_000,), (1, 4_999, 200_000, 95_000)):
        arena = transport.allocate(storages(*sizes))
        for buffer, part in zip(arena.buffers, values.split(sizes), strict=True):
            buffer.copy_(part)
        for work in [arena.all_reduce(index) for index in range(len(sizes))]:
            work.wait()
        results.append(torch.cat(arena.buffers))
    results += [torch.empty_like(values) for _ in range(ranks)]
    dist.all_gather(results[2:], results[0])
    if ranks == 2:
        dist.all_reduce(values)
        results.append(values)
    transport.close()
    return [same(results[0], result) for result in results[1:]]


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_bits_are_the_same_on_every_rank_and_for_every_layout(ranks: int) -> None:
    assert run(ranks, same_bits) == [[True] * 4] * ranks


def rounds(rank: int, ranks: int, hosts: str, count: int, seed: int) -> list[tuple[int, int]]:
    """Return the round and bucket of each wrong sum."""
    transport = SharedMemory(world(), host=hosts[rank])
    arena, luck = transport.allocate(storages(1, 70, 5_000, 40_000)), random.Random(100 * seed + rank)
    patterns = [torch.arange(buffer.numel()) % 97 for buffer in arena.buffers]
    wrong: list[tuple[int, int]] = []

    def dawdle() -> None:
        if luck.random() < 0.1:
            time.sleep(luck.random() * 2e-3)

    for turn in range(count):
        works = {}
        for index, buffer in enumerate(arena.buffers):
            buffer.copy_(patterns[index] * (rank + 1) + turn)
            dawdle()
            works[index] = arena.all_reduce(index)
        for index in luck.sample(sorted(works), len(works)):
            dawdle()
            works[index].wait()
            expected = patterns[index] * (ranks * (ranks + 1) // 2) + turn * ranks
            wrong += [(turn, index)] * (not torch.equal(arena.buffers[index], expected.float()))
            if luck.random() < 0.5:
                arena.buffers[index].zero_()  # nobody may still be reading or writing there
    transport.close()
    return wrong


@pytest.mark.parametrize("hosts", ["aa", "aaa", "aabb", "aab", "abab"])
def test_many_rounds_with_ranks_that_dawdle(hosts: str) -> None:
    assert run(len(hosts), rounds, hosts, 300 if set(hosts) == {"a"} else 100, len(hosts)) == [[]] * len(hosts)


# Parts


def parts_of_every_size_and_dtype(rank: int, ranks: int, hosts: str | None) -> list[Storage]:
    """Return the storages of which what was gathered is wrong; negative zeros and NaN are gathered, too."""
    transport = SharedMemory(world(), host=hosts[rank]) if hosts else GroupTransport(world())
    plan = [Storage(size, dtype, CPU) for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64) for size in SIZES]
    arena, wrong = transport.allocate(plan), []
    for turn in range(2):  # the second one begins with what the first has left
        terms = [[odd(numbers(r, storage.numel, storage.dtype, turn)) for r in range(ranks)] for storage in plan]
        for buffer, theirs in zip(arena.buffers, terms, strict=True):
            part_of(buffer, rank, ranks).copy_(part_of(theirs[rank], rank, ranks))
        for work in [arena.all_gather(index) for index in range(len(plan))]:
            work.wait()
        for buffer, storage, theirs in zip(arena.buffers, plan, terms, strict=True):
            expected = torch.cat([part_of(theirs[r], r, ranks) for r in range(ranks)])
            wrong += [] if same(buffer, expected) else [storage]
    transport.close()
    return wrong


def odd(values: Tensor) -> Tensor:
    """Return ``values`` with some of the bit patterns that a sum does not keep."""
    values = values.clone()
    if values.dtype.is_floating_point:
        values[::3], values[1::7] = -0.0, float("nan")
    return values


@pytest.mark.parametrize("hosts", [None, "aa", "aaa", "aab", "abab"])
def test_what_is_gathered_is_right_for_every_size_and_dtype(hosts: str | None) -> None:
    ranks = len(hosts or "aa")
    assert run(ranks, parts_of_every_size_and_dtype, hosts) == [[]] * ranks


def test_three_ranks_of_a_group_gather_too() -> None:
    assert run(3, parts_of_every_size_and_dtype, None) == [[]] * 3


def test_parts_are_equal_but_for_the_last_ones_and_make_up_the_whole() -> None:
    for size, ranks in [(1, 3), (64, 2), (65, 2), (1000, 3), (0, 2), (200, 7)]:
        parts = [part_of(torch.arange(size), rank, ranks) for rank in range(ranks)]
        assert torch.equal(torch.cat(parts), torch.arange(size))
        assert sorted(map(len, parts), reverse=True) == list(map(len, parts)) and len(parts[0]) % 64 == 0 or size < 64


def both_at_once(rank: int, ranks: int) -> list[bool]:
    """Return whether a sum and what is gathered are right while both are under way, in two buckets."""
    transport = SharedMemory(world())
    arena, found = transport.allocate(storages(70_000, 70_000)), []
    for turn in range(20):
        terms = [numbers(r, 70_000, seed=turn) for r in range(ranks)]
        for buffer in arena.buffers:
            buffer.copy_(terms[rank])
        whole, gathered = arena.all_reduce(0), arena.all_gather(1)
        gathered.wait()
        whole.wait()
        expected = torch.cat([part_of(terms[r], r, ranks) for r in range(ranks)])
        found.append(same(arena.buffers[0], in_order(terms)) and same(arena.buffers[1], expected))
    transport.close()
    return found


def test_a_sum_and_what_is_gathered_do_not_disturb_each_other() -> None:
    assert run(3, both_at_once) == [[True] * 20] * 3


# Several hosts


def over_hosts(rank: int, ranks: int, hosts: str) -> list[tuple[bool, bool]]:
    """Tell of two sums whether each is right, and has the same bits on every rank."""
    transport = SharedMemory(world(), host=hosts[rank])
    assert transport.ranks == [r for r in range(ranks) if hosts[r] == hosts[rank]]
    assert transport.leaders == sorted(hosts.index(host) for host in set(hosts))
    found = []
    for _ in range(2):
        arena = transport.allocate(storages(100_003, dtype=torch.float64))
        arena.buffers[0].copy_(numbers(rank, 100_003, torch.float64))
        arena.all_reduce(0).wait()
        right = torch.allclose(arena.buffers[0], in_order([numbers(r, 100_003, torch.float64) for r in range(ranks)]))
        everybodys = [torch.empty_like(arena.buffers[0]) for _ in range(ranks)]
        dist.all_gather(everybodys, arena.buffers[0])
        found.append((right, all(same(everybodys[0], theirs) for theirs in everybodys)))
    transport.close()
    with pytest.raises(TrainError, match="no two ranks share a host"):
        SharedMemory(world(), host=str(rank))
    return found


@pytest.mark.parametrize("hosts", ["aabb", "aab", "abb", "abab"])
def test_shared_memory_within_hosts_and_a_group_between_them(hosts: str) -> None:
    assert run(len(hosts), over_hosts, hosts) == [[(True, True)] * 2] * len(hosts)


def within_a_subgroup(rank: int, ranks: int) -> list[float | str]:
    """Return the sum within one host, and for the group that is asked, what comes of two hosts with a rank each."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[rank % 2]
    found: list[float | str] = []
    for hosts in ("aa", "ab"):
        if hosts == "ab" and rank % 2:
            continue  # the other group knows nothing of it
        try:
            transport = SharedMemory(mine, host=hosts[rank // 2])
        except TrainError as error:
            found.append(str(error))
            continue
        arena = transport.allocate(storages(10))
        arena.buffers[0].fill_(rank)
        arena.all_reduce(0).wait()
        found += set(arena.buffers[0].tolist())
        transport.close()
    dist.barrier()
    return found


def test_subgroups_do_not_need_each_other() -> None:
    first, second, third, fourth = run(4, within_a_subgroup)
    assert second == fourth == [1.0 + 3.0]
    assert first == third == [0.0 + 2.0, "no two ranks share a host"]


# Memory


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def elastirun_maps() -> int:
    return sum("memfd:elastirun" in line for line in Path("/proc/self/maps").read_text().splitlines())


def memory(rank: int, ranks: int) -> list[bool]:
    """Tell whether descriptors and mappings stay as many with each new arena, and whether none is left at the end."""
    nothing = descriptors(), 0
    transport = SharedMemory(world())
    arena: Any = transport.allocate(storages(5_000, 3))
    arena.buffers[0].fill_(rank + 1)
    arena.buffers[1].fill_(7)
    arena.all_reduce(0).wait()
    gradient = arena.buffers[0][:4_000]
    arena = transport.allocate(storages(5_000, 3))
    assert not arena.buffers[0].any() and not arena.buffers[1].any()
    arena.buffers[0].fill_(100)
    arena.all_reduce(0).wait()
    assert gradient.eq(3).all() and arena.buffers[0].eq(200).all()
    assert not [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line]
    before = descriptors(), elastirun_maps()
    for _ in range(50):
        arena = transport.allocate(storages(5_000, 3))
        arena.all_reduce(0).wait()
    as_many = (descriptors(), elastirun_maps()) == before
    assert gradient.eq(3).all()
    dist.barrier()
    transport.close()
    del arena, gradient, transport
    return [as_many, (descriptors(), elastirun_maps()) == nothing]


def test_memory_lives_as_long_as_its_tensors_and_no_longer() -> None:
    assert run(2, memory) == [[True, True]] * 2


def memory_after_a_failure(rank: int, ranks: int) -> bool:
    """Tell whether nothing is left of a transport on which a reduction failed, without a garbage collection."""
    gc.disable()
    nothing = descriptors(), 0
    transport = SharedMemory(world())
    arena: Any = transport.allocate(storages(5_000, 3))
    if rank == 0:
        transport.interrupt("the test says so")
        arena.all_reduce(1)
        with suppress(PeerLost):  # pytest.raises would keep the traceback, and with it all that is in the frames
            arena.all_reduce(0).wait()
    dist.barrier()
    transport.close()
    del arena, transport
    return (descriptors(), elastirun_maps()) == nothing


def test_nothing_is_left_of_the_memory_of_a_failed_reduction() -> None:
    assert run(2, memory_after_a_failure) == [True, True]


def full(*arguments: object) -> int:
    raise OSError(28, "No space left on device")


def no_memory(rank: int, ranks: int) -> str:
    transport = SharedMemory(world())
    if rank == 1:
        os.posix_fallocate = full  # to ask for more than there is could cost other processes their lives
    with pytest.raises(TrainError) as caught:
        transport.allocate(storages(10))
    return str(caught.value)


def test_a_rank_that_has_no_memory_for_its_buckets_is_an_error_on_every_rank() -> None:
    first, second = run(2, no_memory)
    assert first == "ranks [1] cannot share memory" and second.endswith(": [Errno 28] No space left on device")


WITHOUT_NUMPY = """
import os, sys
sys.modules["numpy"] = None
import torch, torch.distributed as dist
from elastirun.train.reduction.transports.base import Storage, part_of
from elastirun.train.reduction.transports.choose import choose
rank = 1 if os.fork() else 0
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
transport = choose(dist.group.WORLD, torch.device("cpu"), "shared memory")
arena = transport.allocate([Storage(10, torch.float32, torch.device("cpu"))])
arena.buffers[0].fill_(1)
arena.all_reduce(0).wait()
assert arena.buffers[0].tolist() == [2.0] * 10
os.write(1, f"{rank} fine\\n".encode())
rank and os.wait()
os._exit(0)
"""


def test_numpy_is_not_needed(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_NUMPY, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert sorted(done.stdout.splitlines()) == ["0 fine", "1 fine"], done.stderr


# Ranks that are gone


def caught(arena: Any, index: int = 0) -> tuple[type[BaseException], int | None, str, float]:
    """Return the type of the exception that a reduction raises, the rank it names, its text, and the time of the exception."""
    with pytest.raises(ReductionFailed) as error:
        arena.all_reduce(index).wait()
    return error.type, getattr(error.value, "rank", None), str(error.value), time.monotonic()


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(1e-3)


def die(moment: Path) -> None:
    moment.write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def killed(rank: int, ranks: int, when: str, folder: Path) -> Any:
    transport = SharedMemory(world())
    arena = transport.allocate(storages(1_000_000))
    arena.all_reduce(0).wait()
    if rank != 1:
        return caught(arena)
    if when == "before":
        die(folder / "moment")
    if when == "inside":
        SharedArena._add = lambda *arguments, **options: die(folder / "moment")  # type: ignore[method-assign, assignment]
    arena.all_reduce(0)
    time.sleep(0.05)  # the others wait for this rank's slice only
    arena.push()
    return die(folder / "moment")


@pytest.mark.parametrize("when", ["before", "inside"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_killed_rank_is_named_at_once(ranks: int, when: str, tmp_path: Path) -> None:
    results = run(ranks, killed, when, tmp_path, died=True)
    assert results.pop(1) == Died(-signal.SIGKILL)
    for kind, rank, text, at in results:
        assert (kind, rank) == (PeerLost, 1)
        assert "rank 1 (pid " in text and "ended: ranks [" in text and "bucket 0" in text and "set_group" in text
        assert at - float((tmp_path / "moment").read_text()) < 1


def killed_with_child(rank: int, ranks: int, folder: Path) -> Any:
    transport = SharedMemory(world())
    arena = transport.allocate(storages(10))
    if rank == 1:
        child = os.fork()
        if child == 0:
            time.sleep(600)
        (folder / "child").write_text(str(child))
        dist.barrier()
        die(folder / "moment")
    dist.barrier()
    result = caught(arena)
    os.kill(int((folder / "child").read_text()), signal.SIGKILL)  # is still there
    return result


def test_a_killed_rank_is_noticed_though_its_child_lives_on(tmp_path: Path) -> None:
    (kind, rank, _, at), died = run(2, killed_with_child, tmp_path, died=True)
    assert (kind, rank, died) == (PeerLost, 1, Died(-signal.SIGKILL))
    assert at - float((tmp_path / "moment").read_text()) < 1


def stopped(rank: int, ranks: int, folder: Path) -> Any:
    transport = SharedMemory(world())
    assert transport.timeout == timedelta(seconds=GROUP_TIMEOUT)
    if rank == 0:
        transport.timeout = timedelta(seconds=0.3)
    arena = transport.allocate(storages(10))
    pids = [torch.empty(1, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    result = caught(arena)
    if rank == 2:
        (folder / "last").touch()
        os.kill(int(pids[1]), signal.SIGKILL)
    wait_for(folder / "last")
    return result


def test_a_stopped_rank_is_named_at_the_deadline_and_the_others_learn_who_gave_up(tmp_path: Path) -> None:
    (kind, rank, text, _), _, (others_kind, others_rank, others_text, _) = run(3, stopped, tmp_path, died=True)
    assert (kind, rank) == (ReductionFailed, None)
    assert text.startswith("ranks [1] did not come with bucket 0 in 0.3") and "set_group" in text
    assert (others_kind, others_rank) == (PeerLost, 0) and "closed its transport, as after an error: ranks [1] did not" in others_text


def closed(rank: int, ranks: int) -> Any:
    transport = SharedMemory(world())
    arena = transport.allocate(storages(10))
    if rank == 1:
        transport.close()
        transport.close()
        dist.barrier()
        return caught(arena)[0]
    result = caught(arena)
    dist.barrier()
    return result


def test_a_rank_that_closes_its_transport_is_named() -> None:
    (kind, rank, text, _), own = run(2, closed)
    assert (kind, rank) == (PeerLost, 1) and "closed its transport" in text
    assert issubclass(own, ReductionFailed)


def closed_after_the_last_sum(rank: int, ranks: int, hosts: str) -> int:
    """Return how many sums succeeded. A transport that ended too early would be an error on another rank."""
    for _ in range(30):
        transport = SharedMemory(world(), host=hosts[rank])
        arena = transport.allocate(storages(10))
        work = arena.all_reduce(0)
        time.sleep(random.random() * 1e-3)
        work.wait()
        transport.close()
    return 30


@pytest.mark.parametrize("hosts", ["aaa", "aabb"])
def test_a_rank_may_leave_as_soon_as_it_has_its_sum(hosts: str) -> None:
    assert run(len(hosts), closed_after_the_last_sum, hosts) == [30] * len(hosts)


def lost_on_a_host(rank: int, ranks: int, hosts: str, victim: int, moment: Path) -> Any:
    transport = SharedMemory(world(), host=hosts[rank])
    arena = transport.allocate(storages(1_000))
    (earlier := arena.all_reduce(0)).wait()
    assert earlier.done()
    dist.barrier()
    if rank == victim:
        die(moment)
    result = caught(arena)
    if rank == 3:
        (moment.parent / "last").touch()
    wait_for(moment.parent / "last")  # nobody is to learn it from the end of another one's process
    return result


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_an_error_on_every_host(victim: int, tmp_path: Path) -> None:
    results = run(4, lost_on_a_host, "aabb", victim, tmp_path / "moment", died=True)
    assert results[victim] == Died(-signal.SIGKILL)
    assert results[1 - victim][:2] == (PeerLost, victim)
    for kind, _, text, at in (results[2], results[3]):
        assert issubclass(kind, ReductionFailed) and "set_group" in text
        assert at - float((tmp_path / "moment").read_text()) < 5


# The choice


def chosen(rank: int, ranks: int, wanted: list[str], without: int | None) -> str:
    if rank == without:
        os.memfd_create = full  # type: ignore[assignment]
    dist.barrier()  # gloo is still connecting where a rank ends at once
    try:
        transport = choose(world(), CPU, wanted[rank])
    except TrainError as error:
        return str(error)
    arena = transport.allocate(storages(10))
    arena.buffers[0].fill_(1)
    arena.all_reduce(0).wait()
    assert arena.buffers[0].tolist() == [10.0 if transport.averages else ranks] * 10
    dist.barrier()
    transport.close()
    return type(transport).__name__


def pages_mapped(rank: int, world_size: int) -> int:
    """Return how many bytes of the memory of both ranks this one has mapped before it uses them."""
    maps = SharedMemory(world()).share(1 << 20)
    blocks = Path("/proc/self/smaps").read_text().split("VmFlags")
    kilobytes = [int(block.split("Rss:")[1].split()[0]) for block in blocks if "memfd:elastirun" in block]
    assert len(maps) == 2
    return 1024 * sum(kilobytes)


def test_memory_is_mapped_before_a_step_uses_it() -> None:
    assert min(run(2, pages_mapped)) >= 2 << 20


def test_shared_memory_is_chosen_where_it_can_be_had_unless_it_is_switched_off() -> None:
    assert run(2, chosen, ["auto", "auto"], None) == ["SharedMemory"] * 2
    assert run(2, chosen, ["group", "group"], None) == ["GroupTransport"] * 2
    assert run(1, chosen, ["auto"], None) == ["GroupTransport"]
    assert "1 ranks" in run(1, chosen, ["shared memory"], None)[0]
    assert run(2, chosen, ["gloo", "gloo"], None) == ["there is no transport 'gloo': auto, group or shared memory"] * 2


def test_the_ranks_agree_when_one_of_them_cannot_share_memory_or_does_not_want_to() -> None:
    assert run(3, chosen, ["auto"] * 3, 1) == ["GroupTransport"] * 3
    assert run(2, chosen, ["auto", "group"], None) == ["GroupTransport"] * 2
    assert run(2, chosen, ["shared memory"] * 2, 1) == [
        "ranks [1] cannot share memory",
        "ranks [1] cannot share memory: [Errno 28] No space left on device",
    ]


def choice_for_other_devices(rank: int, ranks: int) -> tuple[str, str]:
    found = type(choose(world(), torch.device("meta"))).__name__
    with pytest.raises(TrainError) as error:
        choose(world(), torch.device("meta"), "shared memory")
    dist.barrier()
    return found, str(error.value)


def test_shared_memory_is_for_processors() -> None:
    for found, refused in run(2, choice_for_other_devices):
        assert found == "GroupTransport" and "parameters on meta" in refused


def weak(rank: int, ranks: int) -> str:
    platform.machine = lambda: "aarch64"
    with pytest.raises(TrainError) as error:
        choose(world(), CPU, "shared memory")
    assert isinstance(choose(world(), CPU), GroupTransport)
    return str(error.value)


def test_shared_memory_is_not_for_processors_that_reorder_stores() -> None:
    assert run(2, weak) == ["ranks [0, 1] cannot share memory: aarch64 orders memory weakly"] * 2


def group_loses_a_rank(rank: int, ranks: int) -> Any:
    arena = GroupTransport(world()).allocate(storages(10))
    arena.all_reduce(0).wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return caught(arena)


def test_a_process_group_that_loses_a_rank_is_a_failed_reduction() -> None:
    kind, _, text, _ = run(2, group_loses_a_rank, died=True)[0]
    assert kind is ReductionFailed and text.startswith("the reduction of bucket 0 failed: ") and text.endswith("new process group")

"""Waits end when a peer is lost in the middle of a transfer and the connections are cut: gloo itself goes on to wait for its timeout."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from elastirun.train.errors import TrainError
from elastirun.train.groups import waits as group_waits
from elastirun.train.groups.connections import GroupConnections, live_sockets
from elastirun.train.groups.process_groups import end_beside
from elastirun.train.groups.waits import confirm, finish, finish_message
from tests.support.worlds import Died, run

LARGE = 16 << 20  # numbers; more than the kernel takes for a peer that stands still
TIMEOUT = timedelta(seconds=5)  # of gloo, for a wait
TRIES = 10  # for a transfer that is still under way when the peer stands still


def stop(pid: int, number: torch.Tensor) -> None:
    """Let a process stand still as soon as something has come."""
    while not number.item():
        os.sched_yield()
    os.kill(pid, signal.SIGSTOP)


def lose(pid: int) -> None:
    """Kill a process that stands still, and cut the connections to it."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    live_sockets.cut()


def transfer(rank: int, world: int, what: str) -> tuple[str, float]:
    """Rank 1 is lost in the middle of a transfer between the two. Return how the wait of rank 0 ends, and how long its group takes."""
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    victim = int(pids[1])
    live_sockets.begin()
    group = dist.new_group([0, 1], timeout=TIMEOUT)
    live_sockets.end()
    source = 0 if what.startswith("sends") else 1
    box = torch.full((LARGE,), float(rank == source))
    if rank != source:
        threading.Thread(target=stop, args=(victim, box[0]), daemon=True).start()
    if rank == 0:
        threading.Thread(target=lose, args=(victim,), daemon=True).start()
    try:
        if what.endswith("collective"):
            finish(dist.broadcast(box, source, group, async_op=True), box.device)
        else:
            finish_message((dist.isend if rank == source else dist.irecv)(box, 1 - rank, group), TIMEOUT)
    except RuntimeError as error:
        held, ends = [group], time.monotonic()
        dist.destroy_process_group(group)
        del group
        end_beside(held)
        return str(error), time.monotonic() - ends
    return "it was complete", 0.0


@pytest.mark.parametrize("what", ["sends_a_collective", "receives_a_collective", "sends_a_message", "receives_a_message"])
def test_a_wait_ends_that_gloo_forgets(what: str) -> None:
    for _ in range(TRIES):
        (said, seconds), lost = run(2, transfer, what, died=True)
        if said == "it was complete":
            continue  # before the peer stood still
        assert lost == Died(-signal.SIGKILL)
        assert "Timed out" not in said and seconds < TIMEOUT.total_seconds() / 2
        if "gloo does not end a wait" in said:
            return
    raise AssertionError(f"in {TRIES} tries no wait was left: {said}")


class Kernel:
    """A reduction on a GPU that has ended when somebody has looked for it four times, and its event. ``at``: when ``happens`` is called."""

    def __init__(self, at: int = 0, happens: Callable[[], object] = lambda: None) -> None:
        self.looks, self._at, self._happens = 0, at, happens

    def wait(self) -> None:
        """The GPU waits, not the host."""

    def record(self, stream: object) -> None:
        """The event comes after what the stream has been given so far."""

    def query(self) -> bool:
        self.looks += 1
        if self.looks == self._at:
            self._happens()
        return self.looks > 3


def reduces(monkeypatch: pytest.MonkeyPatch, kernel: Kernel, groups: GroupConnections) -> None:
    monkeypatch.setattr(group_waits, "live_sockets", groups)
    monkeypatch.setattr(torch.cuda, "Event", lambda: kernel)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    finish(cast(Any, kernel), torch.device("cuda"))


def test_the_host_waits_for_a_reduction_on_a_gpu_in_a_live_job_only(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    for live in (False, True):
        groups, kernel = GroupConnections(), Kernel()
        if live:
            groups.begin()
        reduces(monkeypatch, kernel, groups)
        looks.append(kernel.looks)
    assert looks == [0, 4]


@pytest.mark.parametrize("at", [2, 4], ids=["before it ends", "when it ends"])
def test_a_reduction_on_a_gpu_that_ends_by_an_abort_has_failed(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """NCCL's kernels end then as if all were well, with anything in their memory."""
    groups = GroupConnections()
    groups.begin()
    with pytest.raises(RuntimeError, match="aborted"):
        reduces(monkeypatch, Kernel(at, groups.cut), groups)


def test_a_gpu_that_fails_is_no_lost_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    groups = GroupConnections()
    groups.begin()
    with pytest.raises(TrainError, match="the GPU failed: CUDA error: an illegal memory access"):
        reduces(monkeypatch, Kernel(2, fails), groups)


def cut_after_its_own(rank: int, world: int, cut: bool) -> str:
    """With ``cut``, rank 1 is cut when its own reduction has ended. Return how the confirmation ends."""
    kernel = Kernel()
    group_waits.torch.cuda.Event = lambda: kernel  # type: ignore[attr-defined,misc,assignment]
    group_waits.torch.cuda.current_stream = lambda device: None  # type: ignore[attr-defined,assignment]
    live_sockets.begin()
    group = dist.new_group([0, 1])
    live_sockets.end()
    dist.barrier()  # both have connected
    if cut and rank == 1:
        live_sockets.cut()
    try:
        confirm(group, torch.device("cuda"))
        return "confirmed"
    except RuntimeError as error:
        return type(error).__name__


def test_no_rank_confirms_a_step_of_which_another_rank_has_been_cut() -> None:
    """The kernel of a rank that aborts may have sent anything to the others, whose own have ended."""
    assert run(2, cut_after_its_own, False) == ["confirmed", "confirmed"]
    assert run(2, cut_after_its_own, True) == ["RuntimeError", "RuntimeError"]


def test_the_groups_of_a_round_that_is_cut_stay_cut_until_it_is_left() -> None:
    """They would be taken for whole if new ones are begun just then."""
    groups = GroupConnections()
    groups.begin()
    groups.cut()
    groups.begin()
    assert groups.is_cut
    groups.forget()
    groups.begin()
    assert not groups.is_cut

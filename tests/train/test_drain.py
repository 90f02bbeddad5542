"""``Drain``: a signal to one rank stops all after the same step, whenever it comes; nobody ends with 0, or before the others are done."""

from __future__ import annotations

import atexit
import copy
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elastirun.train import DistributedDataParallel as DDP
from elastirun.train import Drain, TrainError
from tests.support.cluster import PATIENCE
from tests.support.worlds import Died, run

STEPS = 2000  # far more than are needed


def train(ddp: DDP, steps: int = 1) -> None:
    for _ in range(steps):
        ddp(torch.ones(2, 4)).sum().backward()


def stops(ddp: DDP, drain: Drain) -> int | None:
    """Train until all stop; the step after which they do."""
    for _ in range(STEPS):
        train(ddp)
        if drain.now:
            assert drain.requested and drain.step == ddp.agreement.step
            return drain.step
    return None


def signalled_at_random(rank: int, world: int, tries: int) -> list[int | None]:
    found = []
    for number in range(tries):
        ddp = DDP(nn.Linear(4, 4))
        drain = Drain(ddp)
        assert not drain.now and not drain.requested and drain.deadline is None and drain.seconds_left == float("inf")
        train(ddp)
        if rank == number % world:
            threading.Timer(0.001 * number, os.kill, (os.getpid(), signal.SIGTERM)).start()
        found.append(stops(ddp, drain))
        assert drain.deadline is not None and 20.0 < drain.seconds_left <= 30.0
        drain.close()
    return found


def test_all_ranks_stop_after_the_same_step_whenever_the_signal_comes() -> None:
    first, *others = run(3, signalled_at_random, 12)
    assert None not in first and others == [first] * 2


def signalled_within_a_reduction(rank: int, world: int) -> int | None:
    ddp = DDP(nn.Linear(4, 4), transport="group")
    drain = Drain(ddp)
    train(ddp, 3)
    if rank == 1:  # the words of this step have been written then, and are not forgotten yet
        receive = ddp._reducer.world.buckets.read_words

        def signalled(*args: Any) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            return receive(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ddp._reducer.world.buckets, "read_words", signalled)
            train(ddp)
    else:
        train(ddp)
    early = "drain" in ddp.agreement.requests
    train(ddp)
    return None if early else drain.step


def test_a_signal_within_a_reduction_is_told_in_the_next_one() -> None:
    assert run(2, signalled_within_a_reduction) == [5, 5]


def who_looks_seldom(rank: int, world: int) -> list[Any]:
    ddp = DDP(nn.Linear(4, 4))
    drain = Drain(ddp)
    train(ddp)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    train(ddp, 5)
    told = ["drain" in ddp.agreement.requests, drain.now, drain.step]
    ddp.module.bias.requires_grad_(False)
    train(ddp, 3)
    return [*told, drain.now, drain.step]


def test_a_stop_is_not_missed_by_looking_seldom_nor_by_freezing_something() -> None:
    assert run(2, who_looks_seldom) == [[False, True, 2, True, 2]] * 2


def in_another_world(rank: int, world: int) -> list[Any]:
    ddp = DDP(nn.Linear(4, 4), transport="group")
    drain = Drain(ddp)
    train(ddp)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    train(ddp)
    told = [drain.now]
    ddp.set_group(dist.new_group([0, 1]))
    told.append(drain.now)
    train(ddp)
    return [*told, drain.now, drain.step]


def test_a_stop_is_told_again_in_the_world_that_a_module_has_next() -> None:
    assert run(2, in_another_world) == [[True, False, True, 3]] * 2


def as_on_a_gpu(rank: int, world: int) -> list[bool]:
    ddp = DDP(nn.Linear(4, 4))
    ddp._reducer.conclusion.may_defer = True
    drain, told = Drain(ddp), []
    for step in range(8):
        if step == 6 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        train(ddp)
        told.append(drain.now)
    assert drain.step == 7
    return told


def test_on_a_gpu_all_stop_a_step_later_because_nobody_waits_for_the_words() -> None:
    assert run(2, as_on_a_gpu) == [[False] * 7 + [True]] * 2


# --- the handlers


def handlers(rank: int, world: int) -> list[Any]:
    heard = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    before = signal.getsignal(signal.SIGTERM)
    ddp = DDP(nn.Linear(4, 4))
    elsewhere = []
    thread = threading.Thread(target=lambda: elsewhere.append(Drain(ddp)))
    thread.start()
    thread.join()
    untouched = signal.getsignal(signal.SIGTERM) is before
    drain = Drain(ddp)
    os.kill(os.getpid(), signal.SIGTERM)
    deadline = drain.deadline
    os.kill(os.getpid(), signal.SIGTERM)
    again = drain.deadline == deadline is not None
    drain.close()
    drain.close()
    return [heard, untouched, again, drain.requested, drain.now, signal.getsignal(signal.SIGTERM) is before]


def test_a_handler_that_was_there_before_is_called_and_comes_back() -> None:
    assert run(1, handlers) == [[[15, 15], True, True, True, False, True]]


def copied(rank: int, world: int) -> list[Any]:
    """A copy has no reducer before its first backward, and no rank may make one alone."""
    ddp = copy.deepcopy(DDP(nn.Linear(4, 4), transport="group"))
    drain = Drain(ddp)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    told = [drain.now]
    for _ in range(2):
        train(ddp)
        told.append(drain.now)
    return told


def test_a_copy_is_asked_when_it_reduces() -> None:
    assert run(2, copied) == [[False, False, True]] * 2


def quits(rank: int, world: int) -> None:
    drain = Drain(DDP(nn.Linear(4, 4)), [signal.SIGQUIT])
    os.kill(os.getpid(), signal.SIGQUIT)
    drain.leave()


def test_leaving_dumps_no_memory() -> None:
    assert run(1, quits, died=True) == [Died(-15)]


def interrupts(rank: int, world: int) -> list[Any]:
    os.environ.update(ELASTIRUN_DEADLINE="7.5", TORCHELASTIC_SIGNALS_TO_HANDLE="SIGTERM,SIGINT,SIGNONE,")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    drain = Drain(DDP(nn.Linear(4, 4)))
    os.kill(os.getpid(), signal.SIGINT)
    return [drain.requested, 6.0 < drain.seconds_left <= 7.5]


def test_below_an_agent_all_signals_that_it_passes_on_are_requests() -> None:
    assert run(1, interrupts) == [[True, True]]


def answers(agent: socket.socket, answer: str) -> None:
    """Signal this process twice, play its agent, and let rank 1 go on: at the second question, the first answer has had its effect."""
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        connection, _ = agent.accept()
        with connection, connection.makefile("rw") as stream:
            assert stream.readline() == "stop\n"
            stream.write(f"{answer}\n")
            stream.flush()
            assert connection.recv(1) == b""
    Path(agent.getsockname()).with_name("go on").touch()


def hangs(rank: int, world: int, folder: str, answer: str, agreed: bool, ends: bool) -> str:
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(f"{folder}/{rank}")
        agent.listen()
        os.environ.update(ELASTIRUN_SOCKET=f"{folder}/{rank}", ELASTIRUN_DEADLINE="30", TORCHELASTIC_SIGNALS_TO_HANDLE="SIGTERM,SIGINT")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        ddp = DDP(nn.Linear(4, 4), transport="group")
        drain = Drain(ddp)
        train(ddp)
        if agreed:
            ddp.request("drain")
            train(ddp)
        if rank == 0:
            threading.Timer(0.1, answers, (agent, answer)).start()
        if rank and ends:
            return "goes on"
        while rank and not Path(folder, "go on").exists():
            time.sleep(0.02)
        train(ddp)  # rank 0 waits here, in gloo, for rank 1
        drain.close()
        return "goes on"


@pytest.mark.parametrize(("answer", "agreed", "ends"), [("failure", False, True), ("failure", True, False), ("planned", False, False)])
def test_a_signal_after_a_failure_ends_a_rank_at_once(tmp_path: Path, answer: str, agreed: bool, ends: bool) -> None:
    """Nobody is left to agree with. Even a rank that hangs in a collective ends: a thread reads the signal."""
    assert run(2, hangs, str(tmp_path), answer, agreed, ends, died=True) == [Died(143) if ends else "goes on", "goes on"]


def forks(rank: int, world: int) -> list[Any]:
    drain = Drain(DDP(nn.Linear(4, 4)))
    child = os.fork()
    if not child:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.0)
        os._exit(1)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), drain.requested]


def test_a_fork_is_ended_by_the_signal_as_if_there_was_no_handler() -> None:
    assert run(1, forks) == [[-15, False]]


def in_half_of_the_world(rank: int, world: int) -> str:
    halves = [dist.new_group([0]), dist.new_group([1])]
    with pytest.raises(TrainError) as raised:
        Drain(DDP(nn.Linear(4, 4), process_group=halves[rank]))
    return str(raised.value)


def test_a_module_of_some_ranks_cannot_tell_all() -> None:
    told = "the module reduces over 1 of 2 ranks, so the others would not know of a stop: give Drain the optimizer"
    assert run(2, in_half_of_the_world) == [told] * 2


# --- the end


def leaves(rank: int, world: int, folder: str, agent: bool) -> None:
    if agent:
        os.environ["ELASTIRUN_DEADLINE"] = "30"
    sys.stdout = open(f"{folder}/{rank}", "w")  # noqa: SIM115
    ddp = DDP(nn.Linear(4, 4))
    drain = Drain(ddp)
    pids: list[Any] = [None] * world
    dist.all_gather_object(pids, os.getpid())
    train(ddp)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stops(ddp, drain)
    if rank == 1:
        time.sleep(0.3)  # saves for longer than the others
        sys.stdout.write("all there" if all(Path(f"/proc/{pid}").exists() for pid in pids) else "somebody left")
    if agent and rank:
        threading.Timer(0.2 * rank, os.kill, (os.getpid(), signal.SIGTERM)).start()
    drain.leave()


@pytest.mark.parametrize(("agent", "codes"), [(True, [-15, -15, -15]), (False, [-15, 143, 143])])
def test_everybody_ends_as_if_it_was_signalled_when_the_last_one_is_done(tmp_path: Path, agent: bool, codes: list[int]) -> None:
    assert run(3, leaves, str(tmp_path), agent, died=True) == [Died(code) for code in codes]
    assert (tmp_path / "1").read_text() == "all there", "and output is flushed"


def test_who_waits_in_vain_ends_at_the_deadline() -> None:
    began = time.monotonic()
    results = run(3, some_leave, died=True)
    assert results == [Died(-15), Died(143), "stayed"] and time.monotonic() - began < PATIENCE


def fails_to_save(rank: int, world: int) -> None:
    os.environ["ELASTIRUN_DEADLINE"] = "1000"
    ddp = DDP(nn.Linear(4, 4))
    drain = Drain(ddp)
    train(ddp)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stops(ddp, drain)
    if rank == 1:
        atexit._run_exitfuncs()  # as at the end of a script that an exception has ended
        os._exit(3)
    drain.leave()


def test_nobody_waits_for_a_rank_that_failed_to_save() -> None:
    assert run(2, fails_to_save, died=True) == [Died(-15), Died(3)]


def some_leave(rank: int, world: int) -> str:
    os.environ["ELASTIRUN_DEADLINE"] = "0.5"
    ddp = DDP(nn.Linear(4, 4))
    drain = Drain(ddp)
    train(ddp)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stops(ddp, drain)
    if rank != 2:
        drain.leave()
    return "stayed"

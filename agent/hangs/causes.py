"""The cause of a hang: from what is seen of the workers to those that are to be ended. Pure. See docs/decisions/0022."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

STOPPED, BEHIND, OUTSIDE, ELSEWHERE, UNCLEAR, WAITING = range(6)  # how well the cause is known, best first; see ``HangVerdict``
HOLD = (0.0, 1.0, 2.0, 3.0, 5.0, 10.0)  # seconds until it is acted upon: a node that knows the cause better ends the round first
WORDS = {
    STOPPED: "stopped by a signal",
    BEHIND: "behind the others in steps",
    OUTSIDE: "not where the others wait",
    ELSEWHERE: "in another collective than most",
    UNCLEAR: "the lowest rank, since nothing tells the workers apart",
    WAITING: "the lowest rank, since all wait for each other",
}

Frame = tuple[str, str, str]  # file, line, function

_FRAME = re.compile(r'  File "(.{0,1000})", line (\d{1,9}|\?\?\?) in (.{0,200})')
_THREAD = re.compile(r"(Current thread|Thread) 0x")
# Python's own files, and torch's that every call of an operator goes through. Such frames do not show whether a worker waits for others.
_PASSED = re.compile(
    r"<frozen |/python3\.\d+t?/(?!site-packages/|dist-packages/)|/torch/(_ops|_compile|utils/_contextlib)\.py|/torch/_dynamo/"
)
# Files in which a rank waits for others; a backward waits inside the engine, without a frame of its own.
_WAITS_FOR_PEERS = re.compile(
    r"/torch/distributed/(?!checkpoint/|elastic/)|/torch/nn/parallel/|/torch/autograd/(graph|__init__|function)\.py"
    r"|/torch/cuda/(__init__|streams)\.py|/elastirun/train/(?!data/(loader|sharded_data)\.py|state/|checkpoints/(?!ranks|missing_ranks|publishing))"
)
_OURS_OR_TORCH = re.compile(r"/elastirun/train/|/torch/(autograd|cuda|distributed|nn|optim|utils|_\w+)\b")
_DEBUGGER = re.compile(r"/python3\.\d+t?/(pdb|bdb)\.py|/debugpy/|/pydevd")
MOST_RANKS = 8  # that a line names for one place
INNERMOST, OUTERMOST = 3, 2  # frames of a stack that a line shows


@dataclass(frozen=True)
class WorkerState:
    """One worker during a hang, as far as the cause depends on it. Nodes send this to each other (hangs/reports.py)."""

    rank: int
    steps: int
    stopped: bool  # by a signal, such as SIGSTOP
    known: bool  # it has stamped a step, or its stack is known
    waits_for_peers: bool  # it is in a collective, as far as its stack tells
    place: str  # where it is: alike on two ranks that have made the same call


@dataclass(frozen=True)
class Observed:
    """One worker during a hang, as its agent sees it."""

    local_rank: int
    rank: int
    pid: int
    steps: int
    stopped: bool  # by a signal, such as SIGSTOP
    stack: tuple[Frame, ...] = ()  # of its main thread, innermost first; empty: unknown
    waits_in: str = ""  # the kernel's function in which it waits; empty: unknown, or in none

    @property
    def state(self) -> WorkerState:
        known = bool(self.stack or self.steps)
        return WorkerState(self.rank, self.steps, self.stopped, known, waits_for_peers(self.stack), self._place)

    @property
    def _place(self) -> str:
        return self.own_call.partition(" in ")[0]

    @property
    def own_call(self) -> str:
        """The innermost line of the script, below which all is Python's, torch's or ours, and its function."""
        own = [frame for frame in self.stack if not _PASSED.search(frame[0]) and not _OURS_OR_TORCH.search(frame[0])]
        for file, line, function in own[:1] or self.stack[-1:]:
            return f"{file.rpartition('/')[2]}:{line} in {function}"
        return f"the kernel's {self.waits_in}" if self.waits_in else ""


def in_debugger(stack: Sequence[Frame]) -> bool:
    """Return whether a debugger for Python runs a program with this stack: then its pauses are a person's."""
    return any(_DEBUGGER.search(file) for file, _, _ in stack)


def waits_for_peers(stack: Sequence[Frame]) -> bool:
    """Return whether a worker with this stack is in a collective. The innermost frame outside of the files of ``_PASSED`` decides."""
    file = next((file for file, _, _ in stack if not _PASSED.search(file)), "")
    return bool(_WAITS_FOR_PEERS.search(file))


@dataclass(frozen=True)
class HangVerdict:
    """The workers that are to be ended, and why these.

    ``how``: ``STOPPED`` by a signal; ``BEHIND`` others in steps; ``OUTSIDE`` of collectives while others wait in one, or not where most of
    the others are; ``ELSEWHERE``: in a collective, and most of the others in the same other one; ``UNCLEAR``: none of the workers is seen
    in a collective; ``WAITING``: all are, so that the cause is probably on another node.
    """

    ranks: tuple[int, ...]
    how: int

    @property
    def hold(self) -> float:
        """Seconds in which another node, which knows the cause better, may end the round."""
        return HOLD[self.how]


def judge(workers: Sequence[WorkerState]) -> HangVerdict:
    """Return which of the workers, of one node or of all, are the cause of a hang. There is at least one."""
    if stopped := [worker for worker in workers if worker.stopped]:
        return HangVerdict(_ranks(stopped), STOPPED)
    most = max(worker.steps for worker in workers)
    known = [worker for worker in workers if worker.known or not most]
    usual = _where_most_are(known)
    suspects = [worker for worker in known if (worker.steps, worker.place) != usual]
    behind = [worker for worker in suspects if 0 < worker.steps < most and not worker.waits_for_peers]
    outside = [worker for worker in suspects if not worker.waits_for_peers]
    if behind:
        return HangVerdict(_ranks(behind), BEHIND)
    if outside and (usual or len(outside) < len(suspects)):
        return HangVerdict(_ranks(outside), OUTSIDE)
    if usual and suspects:
        return HangVerdict(_ranks(suspects), ELSEWHERE)
    lowest = min(workers, key=lambda worker: (worker.steps or most, worker.rank))
    return HangVerdict((lowest.rank,), WAITING if lowest.waits_for_peers else UNCLEAR)


def elsewhere(running: Sequence[Observed], victims: Sequence[tuple[int, int]]) -> list[Observed]:
    """Return the running workers that are not where failed peers have waited for them. ``victims``: ranks and steps of such peers.

    Without any here, the peers are those of another node. Workers whose stack is not known are never named.
    """
    seen = [worker for worker in running if worker.stack or worker.stopped]
    most = max((worker.steps for worker in seen), default=0)
    lost = [WorkerState(rank, steps, False, True, True, "") for rank, steps in victims or ((-1, most),)]
    verdict = judge([*(worker.state for worker in seen), *lost])
    return [] if verdict.how in (UNCLEAR, WAITING) else [worker for worker in seen if worker.rank in verdict.ranks]


def _where_most_are(workers: Sequence[WorkerState]) -> tuple[int, str] | None:
    """Return the number of steps and the place that more than half of the workers have in common; None: there is no such place."""
    first = Counter((worker.steps, worker.place) for worker in workers if worker.place).most_common(1)
    return next((where for where, count in first if count * 2 > len(workers)), None)


def _ranks(workers: Sequence[WorkerState]) -> tuple[int, ...]:
    return tuple(worker.rank for worker in workers)


def main_stack(text: str) -> tuple[Frame, ...]:
    """Return the frames of the main thread in what Python's faulthandler has written, innermost first."""
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (found := _FRAME.fullmatch(line)):
            threads[-1].append((found[1], found[2], found[3]))
    return tuple(threads[-1]) if threads else ()  # the main thread is the oldest, and the oldest comes last


def describe(worker: Observed) -> str:
    """Return where the worker is, in one line."""
    if worker.stopped:
        return "stopped by a signal"
    frames = [f"{file.rpartition('/')[2]}:{line} in {function}" for file, line, function in worker.stack]
    if len(frames) > INNERMOST + OUTERMOST:
        frames[INNERMOST:-OUTERMOST] = ["..."]
    return " < ".join(frames) or (f"in the kernel's {worker.waits_in}" if worker.waits_in else "no stack")


def standing(running: Sequence[Observed], finished: Sequence[int]) -> str:
    """Return in one line which workers have ended, and what the others do. ``finished``: ranks."""
    groups: dict[str, list[int]] = {"ended with 0": [*finished]} if finished else {}
    for worker in running:
        steps = f"{worker.steps} steps, " if worker.steps else "no step yet, "
        does = "waits for others" if waits_for_peers(worker.stack) else "runs"
        where = f" ({worker.own_call})" if worker.own_call else ""
        groups.setdefault("stopped by a signal" if worker.stopped else f"{steps}{does}{where}", []).append(worker.rank)
    named = {text: ", ".join([*map(str, ranks[:MOST_RANKS]), *["..."] * (len(ranks) > MOST_RANKS)]) for text, ranks in groups.items()}
    return "; ".join(f"rank {ranks}: {text}" for text, ranks in named.items())


def traceback(worker: Observed) -> list[str]:
    """Return the stack as Python writes that of an exception."""
    if not worker.stack:
        return [describe(worker)]
    frames = [f'  File "{file}", line {line}, in {function}' for file, line, function in reversed(worker.stack)]
    return ["Stack of the main thread when it hung (most recent call last):", *frames]

"""The control words: a few numbers at the end of the last bucket, so that all ranks know the same after each reduction.

A reduction gives only sums, so each word is a count, or there is one word for each rank::

    samples · ranks with data · ranks with more to come · ranks that lack a gradient · ranks that read each step's words first
    a request's askers, for each request
    seconds[rank] · status[rank] · trained[rank] · work[rank] · late[bucket] · users[parameter]

The words are float32: counts are exact up to 2**24, and small integers survive a division by the world size that is undone.

See docs/ddp.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

# The requests of a live job, see world_change.py: to prepare the next world; when all ask, to go on in it, and to share the data in it.
ADMIT, SWITCH, WHOLE = "admit", "switch", "whole"
LEFT = "left"  # of a live job: this rank has left the loop over the batches in the middle of an epoch
REQUESTS = ("checkpoint", "drain", ADMIT, SWITCH, WHOLE, LEFT)
FAILED, NOT_FINITE = 1, 2  # bits of a rank's status
TRAINED_LIMIT = 1 << 20  # digests are smaller, so that not even the rounding of a mean changes one
_COUNTS = 5
_FIXED = _COUNTS + len(REQUESTS)


@dataclass
class LocalReport:
    """The values that this rank reports to the others in its next reduction."""

    samples: float = 1.0  # weight of its gradients
    work: float | None = None  # that its gradients have taken, in any unit; None: as much as ``samples``
    counts: bool = True  # else its gradients have no weight, whatever ``samples`` is
    backwards: float = 1.0  # its gradients are sums of this many means, and are divided by the number
    more: bool = False  # this rank has data for the reduction after this one
    requests: set[str] = field(default_factory=set)  # of REQUESTS
    reads_first: bool = False  # this rank reads the words of each step before the gradients are used, and asks all ranks to do so
    status: int = 0  # FAILED, NOT_FINITE
    trained: int = 0  # a digest of which parameters are not frozen
    taken: frozenset[str] = frozenset()  # those of ``requests`` that the reduction under way carries

    @property
    def weight(self) -> float:
        """Return the weight of this rank's gradients."""
        return self.samples if self.counts else 0.0

    def weigh(self, samples: float, backwards: float, work: float | None) -> None:
        """Let this rank's gradients, divided by ``backwards``, count as ``samples`` from now on. All ranks have to read the words first."""
        self.samples, self.backwards, self.work, self.reads_first = samples, backwards, work, True

    def announce_batch(self, samples: float, more: bool) -> None:
        """Report the weight of the next batch, and whether there is ``more`` after it."""
        self.samples, self.backwards, self.more, self.work = samples, 1.0, more, None

    def take_requests(self) -> frozenset[str]:
        """Return the requests for the reduction that begins. A signal handler may add one while it is under way, for the next one."""
        self.taken = frozenset(self.requests)
        return self.taken

    def clear(self) -> None:
        """Forget what was reported once, after a reduction."""
        self.requests -= self.taken
        self.status = 0


@dataclass(frozen=True)
class Agreement:
    """The values that all ranks know after reduction number ``step``; the same on each rank."""

    step: int
    samples: float  # over all ranks
    with_data: int  # ranks that had data
    more: int  # number of ranks that also have data for the next reduction
    lacking: int  # ranks that had data, and parameters without a gradient
    looking: int  # ranks that have read the words of this step before its gradients were used, and asked all ranks to do so
    requests: frozenset[str]  # of REQUESTS: what at least one rank asked for
    unanimous: frozenset[str]  # of REQUESTS: what all ranks asked for
    seconds: tuple[float, ...]  # by rank: from the start of its forward to the end of its backward, without waiting
    failed: tuple[int, ...]  # ranks whose backward ended with an exception
    not_finite: tuple[int, ...]  # ranks that had an infinite or undefined gradient; known with check_finite=True
    trained: tuple[int, ...]  # by rank: a digest of which parameters are not frozen
    work: tuple[float, ...]  # by rank: what ``seconds`` were needed for; 0 without data
    late: tuple[int, ...]  # buckets that a gradient came too late for, on some rank; these were reduced once more
    users: tuple[int, ...]  # by parameter: how many ranks had a gradient; empty if all ranks with data had all of them


class ControlWords:
    """Writes and reads the words of a group of ``world`` ranks, ``buckets`` and ``parameters``."""

    def __init__(self, rank: int, world: int, buckets: int, parameters: int) -> None:
        self._rank, self._world = rank, world
        self._late = _FIXED + 4 * world
        self._users = self._late + buckets
        self.size = self._users + parameters

    def write(self, tail: Tensor, report: LocalReport, samples: float, seconds: float, late: Iterable[int], lacking: Sequence[int]) -> None:
        """Write this rank's words. ``samples``: 0 without data; ``late``: buckets; ``lacking``: parameters without a gradient."""
        words = [0.0] * self._users
        requests = report.take_requests()
        counts = [samples > 0, report.more, bool(lacking) and samples > 0, report.reads_first]
        words[:_COUNTS] = [samples, *map(float, counts)]
        words[_COUNTS:_FIXED] = [float(name in requests) for name in REQUESTS]
        words[_FIXED + self._rank] = seconds
        words[_FIXED + self._world + self._rank] = float(report.status)
        words[_FIXED + 2 * self._world + self._rank] = float(report.trained)
        words[_FIXED + 3 * self._world + self._rank] = samples and (samples if report.work is None else report.work)
        for bucket in late:
            words[self._late + bucket] = 1.0
        tail[: self._users].copy_(_on_host(words, tail.dtype, tail), non_blocking=True)
        users = tail[self._users :]
        users.fill_(1.0)
        if lacking:
            users.index_fill_(0, _on_host(lacking, torch.int64, tail).to(tail.device, non_blocking=True), 0.0)

    def read(self, words: Sequence[float], step: int) -> Agreement:
        """Return the agreement that ``words``, summed over the ranks, stand for."""
        status, trained = ([round(word) for word in words[_FIXED + at * self._world :][: self._world]] for at in (1, 2))
        asked = {name: round(word) for name, word in zip(REQUESTS, words[_COUNTS:_FIXED], strict=True)}
        return Agreement(
            step=step,
            samples=words[0],
            with_data=round(words[1]),
            more=round(words[2]),
            lacking=round(words[3]),
            looking=round(words[4]),
            requests=frozenset(name for name, count in asked.items() if count),
            unanimous=frozenset(name for name, count in asked.items() if count == self._world),
            seconds=tuple(words[_FIXED : _FIXED + self._world]),
            failed=tuple(rank for rank, bits in enumerate(status) if bits & FAILED),
            not_finite=tuple(rank for rank, bits in enumerate(status) if bits & NOT_FINITE),
            trained=tuple(trained),
            work=tuple(words[_FIXED + 3 * self._world : self._late]),
            late=tuple(bucket for bucket, word in enumerate(words[self._late : self._users]) if round(word)),
            users=tuple(round(word) for word in words[self._users :]) if round(words[3]) else (),
        )


def _on_host(values: Sequence[float], dtype: torch.dtype, target: Tensor) -> Tensor:
    """Return ``values`` in host memory from which they can be copied to ``target`` without waiting for the GPU: pinned memory."""
    made = torch.tensor(values, dtype=dtype, device="cpu")
    return made.pin_memory() if target.is_cuda else made


class PendingAgreement:
    """The copy of reduced words to the host. On a GPU nobody waits for the copy before the words are needed."""

    def __init__(self, words: ControlWords, tail: Tensor, step: int, factor: float) -> None:
        self.step = step
        self._words, self._factor = words, factor  # the factor undoes an average (the world size) or nothing (1)
        self._copy = tail.to("cpu", non_blocking=True) if tail.is_cuda else tail.clone()
        self._event = torch.cuda.Event() if tail.is_cuda else None  # type: ignore[no-untyped-call]
        if self._event is not None:
            self._event.record()

    @cached_property
    def agreement(self) -> Agreement:
        """The words of the reduction; waits for the copy."""
        if self._event is not None:
            self._event.synchronize()
        return self._words.read((self._copy * self._factor).tolist(), self.step)

"""The progress page: the memory in which a worker stamps each step, and its agent reads. The layout is described in docs/worker.md.

The agent makes one page per worker and names it in the worker's environment. Numbers are unsigned, of 64 bits, little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

VARIABLE = "ELASTIRUN_PROGRESS"  # in a worker's environment: the path of its page; empty: there is none
MAGIC = b"elastpg1"  # the first eight bytes; written by the agent. The digit is the version of the layout
HEADER = 4096  # bytes: a page of memory; the numbers are at its beginning
SIZE = 64 << 10  # bytes with the room for stacks, which begins at HEADER: a traceback of 100 threads fits in
PID, SIGNAL, STEPS, STAMPED, LONGEST, WITHIN = range(1, 7)  # indices of the numbers; index 0 is MAGIC
FIRST, AT, FARTHEST, CAUGHT_UP, SAVING, BUSY, MEDIAN, SAMPLED, SHOWS, WORK, TOTAL = range(7, 18)
NS = 1_000_000_000  # nanoseconds in a second
PARTS = 1000  # of a unit of work, in which WORK is counted
FOREVER = (1 << 64) - 1  # as WITHIN: no limit

_NUMBERS = struct.Struct("<8s17Q")


@dataclass(frozen=True)
class Page:
    """One worker's page, as it was read. All values come from the worker and may be anything."""

    pid: int  # of the process that stamps; 0: none has opened the page
    signal: int  # which makes that process write its Python stacks; 0: none
    steps: int
    stamped: int  # when the last step was stamped, in nanoseconds of CLOCK_MONOTONIC
    longest: int  # nanoseconds; the longest time between two steps so far
    within: int  # nanoseconds that the worker has asked for until its next step; 0: it has not asked; FOREVER: no limit
    first: int = 0  # when the first step was stamped, in nanoseconds of CLOCK_MONOTONIC; 0: there is none, or it is not known
    at: int = 0  # 1 + the number of the training's last step, as the worker counts over all rounds; 0: it has not said
    farthest: int = 0  # the highest ``at`` of earlier rounds, written by the agent; 0: none is known
    caught_up: int = 0  # when ``at`` came to ``farthest``, in nanoseconds of CLOCK_MONOTONIC; 0: not yet
    saving: int = 0  # nanoseconds for which saves of checkpoints have held the training up; 0: none has, or it is not known
    busy: int = 0  # nanoseconds for which the worker has computed so far, without waiting for other ranks; 0: unknown
    median: int = 0  # the sum over the steps of what the median rank of the job has computed in each
    sampled: int = 0  # the number of steps of which ``busy`` tells, if it tells of some only; then ``median`` is unknown
    shows: int = 0  # pid of the process that writes its stacks at ``signal`` since its start, stamps or not; 0: none
    work: int = 0  # thousandths of a unit, modulo 2**64: what the worker says that there was to compute in its steps; 0: it does not say
    total: int = 0  # steps of the whole training, as the worker says; 0: it does not say

    @staticmethod
    def parse(data: bytes) -> Page | None:
        """Return the page whose first bytes are ``data``; None if that is no page of this version."""
        if len(data) < _NUMBERS.size:
            return None
        magic, *numbers = _NUMBERS.unpack_from(data)
        return Page(*numbers) if magic == MAGIC else None

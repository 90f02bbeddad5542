"""Gives each rank the rows that the others have stepped, a chunk at a time, in memory that does not grow with the model."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from elastirun.train.reduction.transports.base import ALIGNED, Storage, Transport, Work, part_of

CHUNK, GPU_CHUNK = 2 << 20, 32 << 20  # bytes of a chunk, for all ranks together; on the CPU larger ones are no faster
BUFFERS = 2  # chunks under way: one is copied while the other travels


class _Chunk(NamedTuple):
    """The content of one chunk: this rank's tensors with their places in it, and those that come from the others."""

    sent: list[tuple[Tensor, Tensor]]  # (place, tensor)
    received: list[tuple[Tensor, Tensor]]  # (tensor, place)


class Gathering:
    """Copies tensors of each rank to all the others. ``tensors``: flat, by the rank whose values count; of one type, on one device.

    Every rank makes it, and calls ``run``, at the same point. The transport may have an error for a rank that does not.
    """

    def __init__(self, tensors: Sequence[Sequence[Tensor]], transport: Transport, rank: int) -> None:
        ranks, first = len(tensors), next(tensor for own in tensors for tensor in own)
        chunk = CHUNK if first.device.type == "cpu" else GPU_CHUNK
        part = max(ALIGNED, chunk // first.element_size() // ranks // ALIGNED * ALIGNED)
        most = max(sum(tensor.numel() for tensor in own) for own in tensors)
        part = min(part, -(-most // ALIGNED) * ALIGNED)
        self._arena = transport.allocate([Storage(part * ranks, first.dtype, first.device)] * BUFFERS)
        self._chunks = [_Chunk([], []) for _ in range(-(-most // part))]
        for owner, own in enumerate(tensors):
            places = [part_of(buffer, owner, ranks) for buffer in self._arena.buffers]
            at = 0
            for tensor in own:
                done = 0
                while done < tensor.numel():
                    number, offset = divmod(at, part)
                    count = min(part - offset, tensor.numel() - done)
                    place, piece = places[number % BUFFERS][offset : offset + count], tensor[done : done + count]
                    if owner == rank:
                        self._chunks[number].sent.append((place, piece))
                    else:
                        self._chunks[number].received.append((piece, place))
                    at, done = at + count, done + count

    @torch.no_grad()
    def run(self) -> None:
        """Send this rank's tensors, and fill the others'."""
        under_way: deque[tuple[Work, _Chunk]] = deque()
        for number, chunk in enumerate(self._chunks):
            if len(under_way) == BUFFERS:
                _take(*under_way.popleft())
            _copy(chunk.sent)
            under_way.append((self._arena.all_gather(number % BUFFERS), chunk))
        while under_way:
            _take(*under_way.popleft())


def _take(work: Work, chunk: _Chunk) -> None:
    work.wait()
    _copy(chunk.received)


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    if pairs:
        torch._foreach_copy_([to for to, _ in pairs], [source for _, source in pairs])

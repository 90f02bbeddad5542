"""The bytes around a tensor's raw data in what ``torch.save(tensor)`` writes: a zip with the data at a 64-byte boundary.

They depend on the type and the shape only. So they are written once, and each save copies nothing but the raw data.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import IO, Any, cast

import torch
from torch.serialization import skip_data

from elastirun.errors import CheckpointError
from elastirun.train.state.values import DTYPES

ALIGNMENT = 64  # bytes; of the raw data within a file


@dataclass(frozen=True)
class Shell:
    """``torch.save`` writes ``before``, the raw data of ``nbytes`` bytes, and ``after``."""

    before: bytes
    nbytes: int
    after: bytes

    @property
    def size(self) -> int:
        return len(self.before) + self.nbytes + len(self.after)


@functools.lru_cache(maxsize=1 << 16)
def shell(dtype: str, sizes: tuple[int, ...]) -> Shell:
    """Return the shell of a contiguous tensor in the memory of the CPU. Raises ``CheckpointError`` if torch cannot save the type."""
    file = _Sparse()
    tensor = torch.empty(sizes, dtype=DTYPES[dtype], device="cpu")  # large ones only reserve addresses: nothing is written to them
    try:
        with skip_data():
            torch.save(tensor, cast("IO[bytes]", file))
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(f"torch cannot save tensors of {dtype}: {error}") from None
    at, nbytes = file.hole(), tensor.nbytes
    before, after = file.between(0, at), file.between(at + nbytes, file.end)
    if at % ALIGNMENT or len(before) != at or len(after) != file.end - at - nbytes:
        raise CheckpointError(f"this version of torch ({torch.__version__}) writes tensors of {dtype} in an unknown form")
    return Shell(before, nbytes, after)


class _Sparse:
    """A file that keeps what is written, with its place: the raw data is passed over by seeking."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, bytes]] = []
        self._at = 0
        self.end = 0

    def write(self, data: Any) -> int:
        self._parts.append((self._at, bytes(data)))
        self.seek(len(data), os.SEEK_CUR)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.end}[whence] + offset
        self.end = max(self.end, self._at)
        return self._at

    def tell(self) -> int:
        return self._at

    def flush(self) -> None:
        pass

    def hole(self) -> int:
        """Return where the first bytes are that were not written; the end if there are none."""
        end = 0
        for at, data in sorted(self._parts):
            if at > end:
                break
            end = max(end, at + len(data))
        return end

    def between(self, start: int, end: int) -> bytes:
        """Return what was written there."""
        return b"".join(data for at, data in sorted(self._parts) if start <= at and at + len(data) <= end)

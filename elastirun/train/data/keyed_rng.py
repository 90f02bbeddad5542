"""Random numbers that depend on a key, such as (seed, epoch, sample), and not on the process or on what was drawn before."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import Dataset

from elastirun.train.arguments import whole


@contextmanager
def keyed_rng(*key: int, cuda: bool = True) -> Iterator[None]:
    """Seed the default generators of torch, ``random`` and numpy by ``key`` within this context; restore their states after it.

    With the key (seed, step, shard) the dropout of a forward is the same whatever rank computes the shard. numpy's generator counts if
    numpy is loaded; ``cuda``: the generator of the current GPU counts, too, if CUDA is in use. A ``torch.Generator`` or
    ``numpy.random.Generator`` of your own is left alone. Costs 30 µs, 150 µs where numpy is loaded. Raises TrainError for a key without
    numbers, or with others than whole ones.
    """
    numbers = [whole("each part of the key of keyed_rng()", number, None) for number in key or (None,)]
    with _states_kept(cuda):
        _seed(numbers, cuda)
        yield


class KeyedSamples(Dataset[Any]):
    """A map-style ``dataset`` whose sample is indexed by (seed, epoch, index), which also seeds what it draws (see ``keyed_rng``)."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __getitems__(self, keys: Sequence[tuple[int, int, int]]) -> list[Any]:
        """Return the samples of a batch. The states are restored once a batch, because that takes as long as to seed twice."""
        with _states_kept(cuda=False):
            return [self[key] for key in keys]

    def __getitem__(self, key: tuple[int, int, int]) -> Any:
        _seed(key, cuda=False)
        return self._dataset[key[-1]]


def _seed(key: Sequence[int], cuda: bool) -> None:
    """Seed the default generators by ``key``."""
    number = int.from_bytes(hashlib.sha256(repr(tuple(key)).encode()).digest()[:8], "little")
    torch.default_generator.manual_seed(number)
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number >> 32)
    if cuda and _uses_cuda():
        torch.cuda.manual_seed(number)


@contextmanager
def _states_kept(cuda: bool) -> Iterator[None]:
    """Restore the states of the default generators after this context."""
    numpy = sys.modules.get("numpy")
    torchs, pythons = torch.default_generator.get_state(), random.getstate()
    numpys = None if numpy is None else numpy.random.get_state()
    gpus = torch.cuda.get_rng_state() if cuda and _uses_cuda() else None
    try:
        yield
    finally:
        torch.default_generator.set_state(torchs)
        random.setstate(pythons)
        if numpys is not None:
            sys.modules["numpy"].random.set_state(numpys)
        if gpus is not None:
            torch.cuda.set_rng_state(gpus)


def _uses_cuda() -> bool:
    """Return whether this process has initialized CUDA. To ask for a GPU's generator before would initialize it."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

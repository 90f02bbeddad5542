"""Copies of many tensors are what ``Tensor.copy_`` gives, whatever the tensors are."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from elastirun import linux
from elastirun.train.checkpoints.bulk_copy import LARGE, copy_all, write

COUNT = LARGE // 4  # elements of a tensor that is large with 4 bytes each


def pair(name: str) -> tuple[Tensor, Tensor]:
    """A target and a source that differ."""
    source = torch.arange(COUNT, dtype=torch.float64)
    match name:
        case "another type":
            return torch.zeros(COUNT, dtype=torch.float32), source
        case "a transposed source":
            return torch.zeros(8, COUNT // 8, dtype=torch.float64), source.view(-1, 8).t()
        case "a transposed target":
            return torch.zeros(COUNT // 8, 8, dtype=torch.float64).t(), source.view(8, -1)
        case "a conjugate":
            return torch.zeros(COUNT, dtype=torch.complex64), torch.complex(source.float(), source.float()).conj()
        case "a negative view":
            return torch.zeros(COUNT, dtype=torch.float64), torch._neg_view(source)
        case "small":
            return torch.zeros(4, dtype=torch.float64), source[:4]
        case "one row for two":
            return torch.zeros(2, COUNT, dtype=torch.float64), source.view(1, -1)
        case _:
            return torch.nn.Parameter(torch.zeros(COUNT, dtype=torch.float64)), source


NAMES = ["large", "small", "another type", "a transposed source", "a transposed target", "a conjugate", "a negative view"]
NAMES += ["one row for two"]


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_is_what_torch_gives(name: str) -> None:
    target, source = pair(name)
    expected = torch.empty_like(target.detach()).copy_(source)
    small = (torch.zeros(3), torch.ones(3))
    copy_all([small[0], target], [small[1], source])
    assert torch.equal(target.detach(), expected) and float(small[0].sum()) == 3.0


def test_autograd_notices_that_a_tensor_has_changed() -> None:
    target, source = pair("large")
    loss = (target * target).sum()
    copy_all([target], [source])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.fixture
def memory() -> Iterator[int]:
    fd = linux.memfd_create("elastirun-test")
    yield fd
    os.close(fd)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_what_torch_gives_or_nothing(name: str, memory: int) -> None:
    target, source = pair(name)
    expected = torch.empty_like(target.detach()).copy_(source)
    assert write(memory, 3, target, source) is (name == "large")
    written = os.pread(memory, 1 << 30, 3)
    assert written == (bytes(expected.view(torch.uint8).tolist()) if name == "large" else b"")


def test_a_write_that_is_cut_short_goes_on(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target, source = pair("large")
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: whole(fd, data[:99_999], at))
    assert write(memory, 5, target, source)
    is_whole = os.pread(memory, 1 << 30, 5) == bytes(source.view(torch.uint8).tolist())
    assert is_whole  # a name, because pytest would compare large bytes line by line

"""The memory of slices: who may map it, and when a reader sees what."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from elastirun.train.live import slice_memory
from elastirun.train.live.slice_memory import SliceMemory

PAGES = 64 << 10


def resident(memory: SliceMemory) -> int:
    """Return how many bytes of ``memory`` this process has mapped."""
    first = f"{memory.data.data_ptr() - 4096:x}-"
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.startswith(first))
    return 1024 * int(next(line for line in lines if line.startswith("Rss:")).split()[1])


def test_another_map_has_the_same_bytes() -> None:
    mine = SliceMemory(PAGES)
    theirs = SliceMemory.opened(mine.address)
    assert theirs is not None
    mine.allocate(4)
    mine.data[:4] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    assert theirs.data[:4].tolist() == [1, 2, 3, 4]


def test_memory_of_another_host_is_not_mapped(tmp_path: Path) -> None:
    mine = SliceMemory(PAGES)
    pid, descriptor, size, token = mine.address.split()
    with open(tmp_path / "file", "wb") as file:
        file.truncate(int(size))
        wrong = [f"{pid} {file.fileno()} {size} {'0' * len(token)}"]  # a file that has the same number there
        wrong += [f"{pid} {descriptor} {size} {'0' * len(token)}", f"{pid} 999999 {size} {token}", f"999999999 3 {size} {token}", ""]
        assert [SliceMemory.opened(address) for address in wrong] == [None] * len(wrong)


def test_memory_that_cannot_be_shared_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_memory, "ORDERED", ())
    mine = SliceMemory(PAGES)
    mine.allocate(PAGES)
    mine.data[:] = 1
    mine.give_back()
    assert mine.address == ""


def test_memory_is_used_when_it_is_allocated_and_given_back() -> None:
    mine = SliceMemory(PAGES, 4096)
    begun = os.fstat(mine._file).st_blocks
    mine.allocate(PAGES)
    assert 512 * os.fstat(mine._file).st_blocks >= PAGES > 512 * begun
    mine.give_back()
    assert 512 * os.fstat(mine._file).st_blocks <= 4096


def test_touched_pages_are_mapped() -> None:
    mine = SliceMemory(PAGES, PAGES)
    theirs = SliceMemory.opened(mine.address)
    assert theirs is not None and resident(theirs) < PAGES
    theirs.touch(PAGES)
    assert resident(theirs) >= PAGES


def test_units_are_read_as_they_come_until_the_slice_ends() -> None:
    mine = SliceMemory(PAGES)
    theirs = SliceMemory.opened(mine.address)
    assert theirs is not None
    mine.say_written(1)
    units = theirs.units(0, 10.0)
    assert next(units) == 0
    mine.say_written(2)
    mine.end_slice()
    assert list(units) == [1]
    mine.say_written(3)  # the next slice
    units = theirs.units(2, 0.0)
    assert next(units) == 2
    with pytest.raises(RuntimeError, match="no slice of the state has come"):
        next(units)

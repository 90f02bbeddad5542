"""The images of a rank: their memory is there before the first save, and preparing it never slows a save down."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elastirun.checkpoint.image import PAGE, Description, Image, round_up
from elastirun.train.checkpoints import staging
from elastirun.train.checkpoints.bulk_copy import LARGE, write
from elastirun.train.checkpoints.staging import Staging
from elastirun.train.state.layout import ImageFiles, Raw
from elastirun.train.state.tree import Flat
from tests.support.cluster import PATIENCE

SIZE = 1 << 20
LATER = SIZE // 2  # where the second half of an image begins


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> Iterator[Staging]:
    """Two images of 1 MiB, whose pages are mapped 64 KiB at a time."""
    monkeypatch.setattr(staging, "AT_ONCE", 64 << 10)
    made = Staging()
    made.adopt({which: Image.create(SIZE, f"elastirun-test-{which}") for which in (0, 1)})
    yield made
    made.close()


def mapped(which: int) -> int:
    """Return the bytes of an image that are in this process's page tables."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if f"memfd:elastirun-test-{which}" in line:
            found = True
        elif found and line.startswith("Rss:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no such mapping")


def test_every_page_is_mapped_before_the_first_save(images: Staging) -> None:
    assert mapped(0) < SIZE and mapped(1) < SIZE
    images.make_resident()
    assert (mapped(0), mapped(1)) == (SIZE, SIZE)


def test_who_leaves_does_not_wait_until_all_pages_are_mapped(images: Staging, gate: Gate) -> None:
    """A live worker that has to leave its round within seconds has images of gigabytes, which were made a moment ago."""
    with images.copying(0):  # so that it waits
        maps = threading.Thread(target=images.make_resident)
        maps.start()
        assert gate.reached.wait(PATIENCE)
        images.stop()
    maps.join()
    assert mapped(0) < SIZE and mapped(1) < SIZE


class Gate(threading.Event):
    """An event that says when a thread has come to it; then the thread waits for the event itself."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.reached.set()
        return super().wait(timeout)


@pytest.fixture
def gate(images: Staging) -> Gate:
    """The gate at which the mapping of the first image waits while there is a copy."""
    made = Gate()
    made.set()
    images._may_map[0] = made
    return made


def test_no_page_is_mapped_beside_a_copy(images: Staging, gate: Gate) -> None:
    before = mapped(0), mapped(1)
    with images.copying(0):
        thread = threading.Thread(target=images.make_resident)
        thread.start()
        assert gate.reached.wait(PATIENCE)
        thread.join(0.1)
        assert thread.is_alive() and (mapped(0), mapped(1)) == before
    thread.join(PATIENCE)
    assert (mapped(0), mapped(1)) == (SIZE, SIZE)


def test_a_copy_from_a_gpu_does_not_stop_the_mapping_of_its_own_image(images: Staging) -> None:
    images.arrange(ImageFiles({}, (), (), PAGE), b"", torch.device("cuda"))
    images._pinned = [True, True]
    with images.copying(0):
        thread = threading.Thread(target=images.make_resident)
        thread.start()
        end = time.monotonic() + 30.0
        while mapped(0) < SIZE and time.monotonic() < end:
            thread.join(0.01)
        assert mapped(0) == SIZE > mapped(1)
    thread.join(PATIENCE)
    images._pinned = [False, False]


def test_pages_that_are_not_there_yet_are_written_and_not_mapped(images: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy to them would take three times as long; to write them again, twice as long as a copy."""
    written = []
    monkeypatch.setattr(staging, "write", lambda fd, at, *tensors: written.append(at) or write(fd, at, *tensors))
    half = torch.arange(LARGE // 4, dtype=torch.float32)
    raws = tuple(Raw(name, torch.float32, half.shape, 0, at) for name, at in (("a", PAGE), ("b", LATER)))
    files = ImageFiles({"f": (PAGE, LATER)}, (), raws, round_up(LATER + half.nbytes))
    images.arrange(files, b"{}", None)
    images.prepare(0, 2)
    before = mapped(0)
    description = Description(1, 1, "", 0, 0, 1, {}, ("f",))
    for value in (1.0, 2.0):
        images.fill(0, Flat({"a": half + value, "b": half - value}), b"{}", description)
        assert value == 2.0 or mapped(0) < before + half.nbytes  # what comes after the tensors is mapped
        first = images.images[0]
        assert first is not None and first.description() is not None
        for at, expected in ((PAGE, half + value), (LATER, half - value)):
            assert first.memory[at : at + half.nbytes] == bytes(expected.view(torch.uint8).tolist())
    assert written == [PAGE, LATER]


def test_the_memory_of_an_image_that_was_replaced_is_left_alone(images: Staging, gate: Gate, tmp_path: Path) -> None:
    """Its descriptor is closed, and another file may have the number."""
    old = images.images[0]
    assert old is not None
    with images.copying(0):
        thread = threading.Thread(target=images.make_resident)
        thread.start()
        assert gate.reached.wait(PATIENCE)
        new = Image.create(SIZE, "elastirun-test-2")
        images.adopt({0: new})
        other = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
        if other != old.fd:
            os.dup2(other, old.fd)
    thread.join(PATIENCE)
    size = os.fstat(old.fd).st_size
    for fd in {other, old.fd}:
        os.close(fd)
    assert size == 0 and images._there == [0, SIZE]

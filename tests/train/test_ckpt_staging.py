"""The images of a rank: their memory is there before the first save, and preparing it never slows a save down."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastirun.checkpoint.image import Image
from elastirun.train.checkpoints import staging
from elastirun.train.checkpoints.staging import Staging

SIZE = 1 << 20


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


def test_an_image_is_not_mapped_beside_a_copy_into_the_other_one(images: Staging) -> None:
    before = mapped(1)
    with images.copying(0):
        thread = threading.Thread(target=images.make_resident)
        thread.start()
        thread.join(0.1)
        assert thread.is_alive() and mapped(1) == before
    thread.join(60.0)
    assert (mapped(0), mapped(1)) == (SIZE, SIZE)

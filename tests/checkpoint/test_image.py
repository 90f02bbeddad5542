"""Images: complete or not, whatever moment a trainer was killed at, and never trusted."""

from __future__ import annotations

import mmap
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elastirun import linux
from elastirun.checkpoint.image import PAGE, Description, Image
from elastirun.errors import CheckpointError
from tests.checkpoint.saves import image_for
from tests.support.descriptors import descriptors

FILES = {"a": (PAGE, 5), "b": (2 * PAGE, PAGE), "c": (3 * PAGE + 8, 0)}
ONE = Description(save=1, step=10, fence="s:2", round=2, rank=1, world_size=2, files=FILES, write=("a", "b"))


@pytest.fixture
def image() -> Iterator[Image]:
    made = image_for(ONE)
    yield made
    made.close()


def test_an_image_is_complete_from_its_finish_to_the_next_begin(image: Image) -> None:
    assert image.description() is None
    for save in (1, 99_999_999):
        image.begin()
        image.memory[PAGE : PAGE + 5] = b"hello"
        assert image.description() is None
        image.finish(replace(ONE, save=save, step=save))
        assert image.description() == replace(ONE, save=save, step=save)
    image.begin()
    assert image.description() is None


def test_another_process_reads_what_a_killed_one_has_written() -> None:
    image = image_for(ONE)
    if not (child := os.fork()):
        image.memory[PAGE : PAGE + 5] = b"hello"
        image.finish(ONE)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    again = Image.of(os.dup(image.fd))
    image.close()
    assert again.description() == ONE and again.memory[PAGE : PAGE + 5] == b"hello"
    again.close()


def test_an_image_without_room_for_its_description_is_refused(image: Image) -> None:
    with pytest.raises(CheckpointError, match="no room"):
        image.finish(replace(ONE, files={"a": (PAGE, image.size - PAGE)}))
    assert image.description() is None


def test_a_changed_description_does_not_count(image: Image) -> None:
    image.finish(ONE)
    good = image.memory[:]
    for seed in range(300):
        rng = random.Random(seed)
        at = rng.choice([rng.randrange(64), rng.randrange(3 * PAGE, image.size)])
        image.memory[at] ^= 1 << rng.randrange(8)
        found = image.description()
        assert found is None or found == ONE
        image.memory[:] = good


@pytest.mark.parametrize(
    "bad",
    [
        {"files": {"a": (0, 5)}},
        {"files": {"a": (PAGE, 1 << 40)}},
        {"files": {"a/b": (PAGE, 5)}},
        {"files": {"a": (PAGE, -1)}},
        {"files": {"a": (PAGE, 5, 6)}},
        {"write": ("z",)},
        {"write": ("a", "a")},
        {"write": ({},)},
        {"fence": "\n"},
        {"world_size": 0},
    ],
)
def test_a_description_that_is_out_of_range_does_not_count(bad: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    image = Image.create(1 << 20)
    monkeypatch.setattr("elastirun.checkpoint.image._end_of", lambda description: 8 * PAGE)
    image.finish(replace(ONE, **bad))  # type: ignore[arg-type]
    assert image.description() is None
    image.close()


def test_memory_that_could_be_cut_off_is_no_image(tmp_path: Path) -> None:
    before = descriptors()
    unsealed = linux.memfd_create("x")
    os.ftruncate(unsealed, 2 * PAGE)
    file = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 2 * PAGE)
    read, write = os.pipe()
    for fd in (unsealed, file, read, write):
        with pytest.raises(CheckpointError, match="no.* image"):
            Image.of(fd)
        os.close(fd)
    assert descriptors() == before
    with pytest.raises(PermissionError):
        image = Image.create(PAGE)
        os.ftruncate(image.fd, PAGE)
    image.close()
    assert mmap.PAGESIZE % PAGE == 0

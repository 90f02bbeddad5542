"""The rules of ``Backend``, which every place that keeps checkpoints has to hold: a folder, object stores, and a dict."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest

from elastirun.checkpoint.backends.backend import Backend
from elastirun.checkpoint.backends.choose import backend_at
from elastirun.checkpoint.claims import Published
from elastirun.checkpoint.directory import Directory
from elastirun.errors import CheckpointError, ClaimLost, RoundUnknown
from tests.checkpoint.in_memory import InMemory
from tests.checkpoint.saves import FENCE, claimed, content, save, stage, yes

KINDS = ("folder", "memory", "local", "in-memory")


class Place:
    """A backend, and a way around it to the bytes of a published file."""

    def __init__(self, kind: str, path: Path) -> None:
        self.backend: Backend = InMemory() if kind == "in-memory" else backend_at(f"{kind}://{path}" if kind != "folder" else str(path))
        self.directory = Directory(self.backend)
        self._fs, self._root = fsspec.core.url_to_fs(f"{kind}://{path}") if kind in ("memory", "local") else (None, "")

    def spoil(self, found: Published, file: str, data: bytes | None) -> None:
        """Put ``data`` in the place of a file; None: delete it."""
        path = f"{self._root or self.backend.path}/{found.name}/{file}"
        if isinstance(self.backend, InMemory):
            self.backend.files |= {(found.name, file): data or b""}
            if data is None:
                del self.backend.files[found.name, file]
        elif self._fs:
            self._fs.rm_file(path) if data is None else self._fs.pipe_file(path, data)
        else:
            os.unlink(path) if data is None else Path(path).write_bytes(data)

    def close(self) -> None:
        if self._fs and self._fs.exists(self._root):
            self._fs.rm(self._root, recursive=True)


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    made = Place(request.param, tmp_path / "made" / "here")
    yield made
    made.close()


@pytest.fixture
def directory(place: Place) -> Directory:
    return place.directory


def steps(directory: Directory) -> list[int]:
    return [one.commit.step for one in directory.scan() if one.commit]


def test_a_checkpoint_is_published_whole(directory: Directory) -> None:
    assert directory.scan() == [] == directory.damaged() and not directory.exists()
    claim = claimed(directory, FENCE.format(1))
    assert claim.found == [] and directory.exists()
    name = save(directory, claim.name, 100, claim.sequence)
    (found,) = directory.scan()
    assert found.name == name and found.commit and found.commit.step == 100 and list(directory.verify(found)) == []
    assert {file: directory.read(found, file) for file in content(100)} == content(100)
    assert {file: bytes(directory.content(found, file)) for file in content(100)} == content(100)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: it has 4192 bytes, of 10 at most"):
        directory.read(found, "__0_0.distcp", 10)
    with pytest.raises(CheckpointError, match=rf"{directory.path}/{name}/none cannot be read: "):
        directory.read(found, "none")
    claim.release()
    again = claimed(directory, FENCE.format(2))
    assert again.found == [found] and again.sequence > found.commit.sequence


def test_the_newest_are_those_published_last_and_only_they_remain(directory: Directory) -> None:
    claim = claimed(directory, FENCE.format(1))
    names = [save(directory, claim.name, step, claim.sequence + n, keep=2) for n, step in enumerate((100, 300, 200, 50))]
    assert [one.name for one in directory.scan()] == [names[3], names[2]] and steps(directory) == [50, 200]
    assert directory.prune(claim.name, 1) == [names[2]] and directory.prune(claim.name, 1) == []
    again = claimed(directory, FENCE.format(2))
    assert [one.name for one in again.found] == [names[3]]


def test_a_step_that_is_saved_again_stays_when_its_first_checkpoint_is_deleted(directory: Directory) -> None:
    claim = claimed(directory, FENCE.format(1))
    for n in (0, 1):  # as after a restore of an earlier step by the same process
        commit = replace(stage(directory, claim.name, 5, claim.sequence + n), time=1e9 + n)
        directory.publish(claim.name, commit, yes)
    directory.prune(claim.name, 1)
    (found,) = directory.scan()
    assert found.commit and found.commit.time == 1e9 + 1 and list(directory.verify(found)) == []


def test_what_a_later_round_has_claimed_an_earlier_one_cannot_change(directory: Directory) -> None:
    old = claimed(directory, FENCE.format(1)).name
    for n in (1, 2):
        save(directory, old, n, n)
    commit = stage(directory, old, 3, 3)
    new = claimed(directory, FENCE.format(2))
    changes: list[Callable[[], object]] = [
        lambda: directory.publish(old, commit, yes),
        lambda: directory.prune(old, 1),
        lambda: claimed(directory, FENCE.format(1)),
    ]
    for change in changes:
        with pytest.raises(ClaimLost):
            change()
    assert steps(directory) == [2, 1] and directory.scan() == new.found


def test_a_publisher_that_freezes_before_the_last_step_publishes_nothing(directory: Directory) -> None:
    for n in range(1, 21):
        old = claimed(directory, FENCE.format(2 * n)).name

        def current(n: int = n) -> bool:  # a later round claims the directory between this question and the last step
            claimed(directory, FENCE.format(2 * n + 1))
            return True

        with pytest.raises(ClaimLost):
            save(directory, old, n, n, current=current)
        assert directory.scan() == []


def test_an_earlier_round_that_cleans_late_deletes_nothing_of_a_later_one(directory: Directory) -> None:
    old = directory.claim(FENCE.format(1), yes).name
    new = claimed(directory, FENCE.format(2)).name
    commit = stage(directory, new, 3, 1)
    try:
        directory.backend.clean(old)
    except ClaimLost:
        pass
    directory.publish(new, commit, yes)
    (found,) = directory.scan()
    assert list(directory.verify(found)) == []


def test_publishing_again_after_a_lost_answer_is_the_same_checkpoint(directory: Directory) -> None:
    claim = claimed(directory, FENCE.format(1))
    commit = stage(directory, claim.name, 1, claim.sequence)
    assert directory.publish(claim.name, commit, yes) == directory.publish(claim.name, commit, yes)
    assert steps(directory) == [1]


def test_files_that_are_missing_or_short_are_not_published_and_others_are_left_out(directory: Directory) -> None:
    claim = claimed(directory, FENCE.format(1)).name
    commit = stage(directory, claim, 1, 1)
    directory.backend.discard(claim, 1, ["__0_0.distcp"])
    with pytest.raises(CheckpointError, match=r"__0_0.distcp is missing: is the (URL|directory) the same one on every node\?"):
        directory.publish(claim, commit, yes)
    directory.backend.write(claim, 1, "__0_0.distcp", memoryview(b"x"))
    with pytest.raises(CheckpointError, match="__0_0.distcp has 1 bytes, its rank has written 4192"):
        directory.publish(claim, commit, yes)
    directory.backend.discard(claim, 1)
    assert directory.scan() == []
    directory.backend.write(claim, 2, "left.over", memoryview(b"x"))
    save(directory, claim, 2, 2)
    with pytest.raises(FileNotFoundError):
        directory.backend.open(directory.scan()[0].name, "left.over")


def no() -> bool:
    return False


def unknown() -> bool:
    raise RoundUnknown("within 10 s nobody could tell whether this round is current")


def test_once_the_round_is_over_nothing_is_published_and_nothing_claimed(directory: Directory) -> None:
    name = claimed(directory, FENCE.format(1)).name
    with pytest.raises(ClaimLost, match="step 100 is not published: another round has taken the place of this one"):
        save(directory, name, 100, 1, current=no)
    with pytest.raises(ClaimLost, match="another round"):
        directory.claim(FENCE.format(1), no)
    with pytest.raises(CheckpointError, match="nobody could tell"):
        directory.claim(FENCE.format(1), unknown)
    assert directory.scan() == []
    save(directory, name, 200, 2)  # the claim still holds
    assert steps(directory) == [200]


DAMAGES = {
    "flipped": (b"x" * 4192, "its checksum is wrong: bytes have changed"),
    "cut off": (b"x", "has 1 bytes instead of 4192"),
    "missing": (None, "is missing"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_and_kept(place: Place, kind: str) -> None:
    directory = place.directory
    claim = claimed(directory, FENCE.format(1))
    for n in (0, 1):
        save(directory, claim.name, n + 1, claim.sequence + n)
    found = directory.scan()[0]
    place.spoil(found, "__0_0.distcp", DAMAGES[kind][0])
    (damage,) = directory.verify(found, look="sha256")
    assert [damage] == list(directory.verify(found)) and (kind == "flipped") == (not [*directory.verify(found, look="size")])
    assert str(damage) == f"__0_0.distcp: {DAMAGES[kind][1]}" and damage.lasting
    assert list(directory.verify(found, {"tensors.json"})) == []
    assert directory.backend.set_aside(found)
    assert steps(directory) == [1] and len(directory.damaged()) == 1
    again = claimed(directory, FENCE.format(2))
    assert found.commit and again.sequence > found.commit.sequence  # which it may still have
    save(directory, again.name, 3, again.sequence, keep=1)
    assert steps(directory) == [3] and len(directory.damaged()) == 1

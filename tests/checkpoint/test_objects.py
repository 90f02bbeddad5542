"""Object stores: the same rules as in a folder, with a log of conditional puts in place of renames."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from elastirun.checkpoint.claims import Found
from elastirun.checkpoint.directory import Directory
from elastirun.checkpoint.objects import ObjectDirectory, open_directory
from elastirun.checkpoint.writer_process import WriterProcess
from elastirun.errors import CheckpointError, ClaimLost
from tests.checkpoint.saves import FENCE, claimed, content, image_of, save, stage, yes


class Flaky(MemoryFileSystem):  # type: ignore[misc]
    """A store whose answers get lost: ``fails`` of the next puts have an effect and raise."""

    protocol = "flaky"
    fails = 0

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
        super().pipe_file(path, value, mode=mode, **more)
        if Flaky.fails:
            Flaky.fails -= 1
            raise RuntimeError("the connection was reset")


fsspec.register_implementation("flaky", Flaky, clobber=True)


@pytest.fixture(params=["memory", "local"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    name = f"{request.param}://{tmp_path}"
    yield name
    if request.param == "memory":
        fs, root = fsspec.core.url_to_fs(name)
        if fs.exists(root):
            fs.rm(root, recursive=True)


def everything(url: str) -> list[str]:
    fs, root = fsspec.core.url_to_fs(url)
    return sorted(os.path.relpath(path, root) for path in fs.find(root)) if fs.exists(root) else []


def test_the_kind_of_storage_is_chosen_by_the_url(tmp_path: Path) -> None:
    assert type(open_directory(str(tmp_path))) is type(open_directory(f"file://{tmp_path}")) is Directory
    assert open_directory(f"file://{tmp_path}").path == str(tmp_path)
    assert type(open_directory("memory://x")) is ObjectDirectory


def test_a_checkpoint_is_published_whole(url: str) -> None:
    directory = open_directory(url)
    assert directory.scan() == []
    claim = claimed(directory, FENCE.format(1))
    name = save(directory, claim.name, 100, claim.sequence)
    (found,) = directory.scan()
    assert found.name == name == f"step-00000100.{claim.name}" and found.commit and found.commit.step == 100
    assert list(directory.verify(found)) == []
    assert {name: directory.read(found, name) for name in content(100)} == content(100)
    assert {name: bytes(directory.content(found, name)) for name in content(100)} == content(100)
    with pytest.raises(CheckpointError, match="it has 4192 bytes, of 10 at most"):
        directory.read(found, "__0_0.distcp", 10)
    with pytest.raises(CheckpointError, match="none cannot be read: FileNotFoundError"):
        directory.read(found, "none")


def test_only_the_newest_remain(url: str) -> None:
    directory = open_directory(url)
    claim = claimed(directory, FENCE.format(1))
    names = [save(directory, claim.name, step, step, keep=2) for step in range(1, 5)]
    assert [one.name for one in directory.scan()] == [names[3], names[2]]
    again = claimed(directory, FENCE.format(2))
    assert [one.name for one in again.found] == [names[3], names[2]]
    assert everything(url) == sorted(
        [f"commits/{n:012d}.json" for n in (1, 4, 5, 6)] + [f"{name}/{file}" for name in names[2:] for file in content(1)]
    )


def test_what_a_later_round_has_claimed_an_earlier_one_cannot_change(url: str) -> None:
    directory = open_directory(url)
    old = claimed(directory, FENCE.format(1)).name
    for n in (1, 2):
        save(directory, old, n, n)
    commit = stage(directory, old, 3, 3)
    new = claimed(directory, FENCE.format(2))
    for change in (
        lambda: directory.publish(old, commit, yes),
        lambda: directory.prune(old, 1),
        lambda: claimed(directory, FENCE.format(1)),
    ):
        with pytest.raises(ClaimLost):
            change()
    assert [one.commit.step for one in new.found if one.commit] == [2, 1] and directory.scan() == new.found
    assert not any("step-00000003" in path for path in everything(url))


def test_an_earlier_round_that_cleans_late_deletes_nothing_of_a_later_one(url: str) -> None:
    directory = open_directory(url)
    old = directory.claim(FENCE.format(1), yes).name
    new = claimed(directory, FENCE.format(2)).name
    commit = stage(directory, new, 3, 1)
    with pytest.raises(ClaimLost):
        directory.clean(old)
    assert directory.publish(new, commit, yes)
    assert [one.damage for one in directory.scan()] == [None]


def test_a_publisher_that_freezes_before_its_put_publishes_nothing(url: str) -> None:
    directory = open_directory(url)
    for n in range(1, 21):
        old = claimed(directory, FENCE.format(2 * n)).name

        def current(n: int = n) -> bool:  # a later round claims the directory after this question, before the put
            claimed(directory, FENCE.format(2 * n + 1))
            return True

        with pytest.raises(ClaimLost):
            save(directory, old, n, n, current=current)
        assert directory.scan() == []
    assert [path for path in everything(url) if not path.startswith("commits/")] == []


def test_a_gap_in_the_numbers_of_the_trainer_is_none_in_the_log(url: str) -> None:
    directory = open_directory(url)
    old = claimed(directory, FENCE.format(1)).name
    commit = stage(directory, old, 1, 10)
    new: list[str] = []

    def current() -> bool:
        new.append(claimed(directory, FENCE.format(2)).name)
        return True

    with pytest.raises(ClaimLost):
        directory.publish(old, commit, current)
    save(directory, new[0], 2, 77)
    assert [one.commit.sequence for one in directory.scan() if one.commit] == [3]


def test_a_put_whose_answer_was_lost_counts_once(tmp_path: Path) -> None:
    directory = open_directory(f"flaky://{tmp_path}")
    Flaky.fails = 1
    claim = claimed(directory, FENCE.format(1)).name
    commit = stage(directory, claim, 1, 2)
    Flaky.fails = 1
    assert directory.publish(claim, commit, yes) == directory.publish(claim, commit, yes)
    assert len(directory.scan()) == 1
    Flaky.fails = 1
    with pytest.raises(OSError, match="RuntimeError: the connection was reset"):
        directory.write(claim, 2, "x", memoryview(b"1"))


DAMAGES = {
    "flipped": (lambda fs, path: fs.pipe_file(path, b"x" * 4192), "its checksum is wrong: bytes have changed"),
    "cut off": (lambda fs, path: fs.pipe_file(path, b"x"), "has 1 bytes instead of 4192"),
    "missing": (lambda fs, path: fs.rm_file(path), "is missing"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_and_kept(url: str, kind: str) -> None:
    directory = open_directory(url)
    claim = claimed(directory, FENCE.format(1))
    for step in (1, 2):
        save(directory, claim.name, step, step)
    fs, root = fsspec.core.url_to_fs(url)
    found = directory.scan()[0]
    DAMAGES[kind][0](fs, f"{root}/{found.name}/__0_0.distcp")
    (damage,) = directory.verify(found, look="sha256")
    assert [damage] == list(directory.verify(found)) and (kind == "flipped") == (not [*directory.verify(found, look="size")])
    assert re.fullmatch(f"__0_0.distcp: {DAMAGES[kind][1]}", str(damage)) and damage.lasting
    directory.set_aside(found)
    again = claimed(directory, FENCE.format(2))
    assert [one.commit.step for one in again.found if one.commit] == [1]
    save(directory, again.name, 3, 3, keep=1)
    assert [one.commit.step for one in directory.scan() if one.commit] == [3]
    assert any(path.startswith(found.name) for path in everything(url))


def test_an_entry_that_is_no_record_is_reported_and_can_be_set_aside(url: str) -> None:
    directory = open_directory(url)
    claim = claimed(directory, FENCE.format(1))
    save(directory, claim.name, 1, 1)
    fs, root = fsspec.core.url_to_fs(url)
    fs.pipe_file(f"{root}/commits/{2:012d}.json", b"{}")
    (found,) = directory.scan()
    assert found.commit is None and found.damage and found.name == "commits/000000000002.json"
    directory.set_aside(found)
    assert directory.scan() == []


def test_a_file_that_is_missing_is_not_published(url: str) -> None:
    directory = open_directory(url)
    claim = claimed(directory, FENCE.format(1)).name
    commit = stage(directory, claim, 1, 1)
    directory.discard(claim, 1, ["__0_0.distcp"])
    with pytest.raises(CheckpointError, match="__0_0.distcp is missing: is the URL the same one on every node"):
        directory.publish(claim, commit, yes)
    directory.write(claim, 1, "__0_0.distcp", memoryview(b"x"))
    with pytest.raises(CheckpointError, match="__0_0.distcp has 1 bytes, its rank has written 4192"):
        directory.publish(claim, commit, yes)
    directory.discard(claim, 1)
    assert everything(url) == ["commits/000000000001.json"]


def test_a_store_that_does_not_exist_is_an_error_in_one_line() -> None:
    with pytest.raises(CheckpointError, match=r"nothing://x cannot be used as a directory of checkpoints: Protocol not known"):
        open_directory("nothing://x").scan()
    assert open_directory("memory://none-there").scan() == []
    assert isinstance(Found("x", None).damage, type(None))


def test_the_writer_process_finds_the_storage_library(tmp_path: Path) -> None:
    url = f"local://{tmp_path}"
    directory, image = open_directory(url), image_of(7)
    claim, writer = claimed(directory, FENCE.format(1)).name, WriterProcess()
    writer.start()
    writer.request({"do": "images"}, [image.fd])
    writer.request({"do": "write", "image": 0, "directory": url, "claim": claim})
    assert writer.reply() == {"did": "images"}
    written = writer.reply()
    commit = {"step": 7, "sequence": 1, "fence": "", "round": 0, "world_size": 1, "files": written["files"]}
    writer.request({"do": "commit", "directory": url, "claim": claim, "commit": commit, "keep": 1})
    assert writer.reply()["name"] == f"step-00000007.{claim}"
    writer.close()
    (found,) = directory.scan()
    assert list(directory.verify(found)) == []
    image.close()

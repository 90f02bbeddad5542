"""Object stores: what is theirs alone. test_backends.py has the rules that hold everywhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from elastirun.checkpoint.backends.choose import backend_at
from elastirun.checkpoint.backends.folder import Folder
from elastirun.checkpoint.backends.objects import ObjectStore
from elastirun.checkpoint.directory import open_directory
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
    assert type(backend_at(str(tmp_path))) is type(backend_at(f"file://{tmp_path}")) is Folder
    assert open_directory(f"file://{tmp_path}").path == str(tmp_path)
    assert type(backend_at("memory://x")) is ObjectStore


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
        directory.backend.write(claim, 2, "x", memoryview(b"1"))


def test_an_entry_that_is_no_record_is_reported_and_can_be_set_aside(url: str) -> None:
    directory = open_directory(url)
    claim = claimed(directory, FENCE.format(1))
    save(directory, claim.name, 1, 1)
    fs, root = fsspec.core.url_to_fs(url)
    fs.pipe_file(f"{root}/commits/{2:012d}.json", b"{}")
    (found,) = directory.scan()
    assert found.commit is None and found.damage and found.name == "commits/000000000002.json"
    directory.backend.set_aside(found)
    assert directory.scan() == []


def test_what_is_discarded_or_unpublished_is_deleted_and_what_was_set_aside_is_not(url: str) -> None:
    directory = open_directory(url)
    claim = claimed(directory, FENCE.format(1)).name
    stage(directory, claim, 1, 1)
    directory.backend.discard(claim, 1)
    assert everything(url) == ["commits/000000000001.json"]
    aside = save(directory, claim, 2, 2)
    directory.backend.set_aside(directory.scan()[0])
    stage(directory, claim, 3, 3)
    claimed(directory, FENCE.format(2))
    log = [f"commits/{n:012d}.json" for n in (1, 2, 3)]
    assert everything(url) == sorted([*log, "damaged/000000000002.json", *(f"{aside}/{file}" for file in content(1))])


def test_where_all_were_damaged_those_to_delete_are_named(url: str) -> None:
    directory = open_directory(url)
    claim = claimed(directory, FENCE.format(1)).name
    save(directory, claim, 1, 1)
    directory.backend.set_aside(directory.scan()[0])
    assert directory.damaged() == ["commits/000000000002.json"] and directory.scan() == []
    fs, root = fsspec.core.url_to_fs(url)
    fs.rm_file(f"{root}/commits/000000000002.json")
    assert directory.damaged() == directory.scan() == []


def test_a_store_that_does_not_exist_is_an_error_in_one_line() -> None:
    with pytest.raises(CheckpointError, match=r"nothing://x cannot be used as a directory of checkpoints: Protocol not known"):
        open_directory("nothing://x").scan()
    assert open_directory("memory://none-there").scan() == []


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

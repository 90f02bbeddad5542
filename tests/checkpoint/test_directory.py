"""The directory on a file system: claims, publishing, verification, retention. test_backends.py has the rules that hold everywhere."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastirun.checkpoint import claims
from elastirun.checkpoint.backends import folder
from elastirun.checkpoint.claims import Published, claim_name, is_claim, is_newer, is_step_name, outdated
from elastirun.checkpoint.directory import Directory, open_directory
from elastirun.checkpoint.record import COMMIT, Damage
from elastirun.errors import CheckpointError, ClaimLost, RoundUnknown
from tests.checkpoint.saves import FENCE, claimed, commit_of, content, entries, save, stage, yes

ROOT = Path(__file__).resolve().parents[2]


def steps(directory: Directory) -> list[int]:
    return [one.commit.step for one in directory.scan() if one.commit]


def no() -> bool:
    return False


def unknown() -> bool:
    raise RoundUnknown("within 10 s nobody could tell whether this round is current")


# -- names: pure ---------------------------------------------------------------------------------------------------------------


def test_the_name_of_a_claim_says_the_round() -> None:
    assert claim_name("abc:12", "0" * 16) == "abc-12-" + "0" * 16
    for fence in ("", "abc", "a/b:3", "a:b:3", "é:1", "x" * 300 + ":2", "abc:", "abc:-1", "abc:" + "9" * 40, ":7", "..:1"):
        name = claim_name(fence, "0" * 16)
        assert is_claim(name) and "/" not in name
    assert not is_claim("abc-12-" + "0" * 16 + "\n")


def test_only_rounds_of_one_store_are_compared() -> None:
    one, two, other = (claim_name(fence, "a" * 16) for fence in ("abc:9", "abc:10", "abd:10"))
    assert is_newer(two, one)
    assert not any((is_newer(one, two), is_newer(one, one), is_newer(other, one), is_newer("x", one)))


@pytest.mark.parametrize("name", ["step-00000100", "step-123456789", "step-00000100.2", "step-00000100.abc-1-00000000"])
def test_a_folder_of_ours_is_recognised(name: str) -> None:
    assert is_step_name(name)


@pytest.mark.parametrize("name", ["step-1", "step-00000100-old", "step-00000100.", "step-", "step-abcdefgh", "damaged-step-00000100"])
def test_a_folder_of_others_is_left_alone(name: str) -> None:
    assert not is_step_name(name)


def test_the_newest_remain() -> None:
    found = [Published(f"s{n}", commit_of(n, n, {})) for n in (3, 1, 2)] + [Published("wreck", None)]
    assert [one.name for one in outdated(found, 2)] == ["s1"]
    assert [one.name for one in outdated(found, 0)] == ["s2", "s1"]  # one remains whatever the number
    assert outdated(found, 9) == outdated([], 1) == []


# -- publishing ----------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_published_whole(tmp_path: Path) -> None:
    directory = open_directory(str(tmp_path / "a" / "b"))
    assert directory.scan() == []
    claim = claimed(directory, "")
    assert (claim.found, claim.sequence) == ([], 1)
    assert save(directory, claim.name, 100, 1) == "step-00000100"
    (found,) = directory.scan()
    assert found.commit and found.commit.step == 100 and list(directory.verify(found)) == []
    assert {name: directory.read(found, name) for name in content(100)} == content(100)
    assert entries(directory.file(found, "")) == sorted([*content(100), COMMIT])
    assert entries(directory.path) == [".lock", f".staging-{claim.name}", "step-00000100"]
    assert entries(f"{directory.path}/.staging-{claim.name}") == []
    claim.release()
    again = claimed(directory, "")
    assert again.found == [found] and again.sequence == 2
    again.release()


def test_newest_is_what_was_published_last_not_the_highest_step(tmp_path: Path) -> None:
    directory = open_directory(str(tmp_path))
    name = claimed(directory, FENCE.format(1)).name
    published = [save(directory, name, step, n, keep=3) for n, step in enumerate((100, 200, 300, 100, 100), 1)]
    assert published[3:] == ["step-00000100.2", "step-00000100"]  # the former is there until the latter is published
    assert steps(directory) == [100, 100, 300]
    assert claimed(directory, FENCE.format(2)).sequence == 6


def test_a_folder_of_another_tool_is_neither_counted_nor_touched(tmp_path: Path) -> None:
    (tmp_path / "step-00000100").mkdir()
    (tmp_path / "step-00000100" / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / ".staging-mine").mkdir()
    directory = open_directory(str(tmp_path))
    claim = claimed(directory, "")
    assert claim.found == [Published("step-00000100", None, Damage(COMMIT, "is missing"))] and claim.sequence == 1
    assert save(directory, claim.name, 100, 1, keep=1) == "step-00000100.2"
    assert (tmp_path / "step-00000100" / "__0_0.distcp").read_bytes() == b"half" and (tmp_path / ".staging-mine").is_dir()
    claim.release()


def test_nothing_is_published_once_the_round_is_over(tmp_path: Path) -> None:
    directory = open_directory(str(tmp_path))
    name = claimed(directory, FENCE.format(1)).name
    with pytest.raises(ClaimLost, match="another round"):
        save(directory, name, 100, 1, current=no)
    assert directory.scan() == []
    before = entries(tmp_path)
    with pytest.raises(ClaimLost, match="another round"):
        directory.claim(FENCE.format(1), no)
    with pytest.raises(CheckpointError, match="nobody could tell"):
        directory.claim(FENCE.format(1), unknown)
    assert entries(tmp_path) == before


def test_whether_the_round_is_current_is_asked_when_all_is_written(tmp_path: Path) -> None:
    directory = open_directory(str(tmp_path))
    name = claimed(directory, FENCE.format(1)).name
    commit = stage(directory, name, 100, 1)

    def asked() -> bool:
        assert entries(tmp_path / f".staging-{name}" / "step-00000100") == sorted([*content(100), COMMIT])
        return True

    directory.publish(name, commit, asked)


def test_what_a_later_round_has_claimed_an_earlier_one_cannot_change(tmp_path: Path) -> None:
    directory = open_directory(str(tmp_path))
    old = claimed(directory, FENCE.format(1)).name
    for n in (1, 2):
        save(directory, old, n, n)
    commit = stage(directory, old, 3, 3)
    new = claimed(directory, FENCE.format(2))
    assert [one.name for one in new.found] == ["step-00000002", "step-00000001"]
    with pytest.raises(ClaimLost, match="has claimed this directory"):
        directory.publish(old, commit, yes)
    with pytest.raises(ClaimLost):
        stage(directory, old, 4, 4)
    with pytest.raises(ClaimLost):
        directory.prune(old, 1)
    with pytest.raises(ClaimLost, match="a later round"):
        claimed(directory, FENCE.format(1))
    directory.backend.discard(old, 3)
    assert directory.scan() == new.found
    assert entries(tmp_path) == [f".staging-{new.name}", "step-00000001", "step-00000002"]


def test_a_publisher_that_freezes_before_its_rename_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    directory = open_directory(str(tmp_path))
    for n in range(1, 201):
        old = claimed(directory, FENCE.format(2 * n)).name
        newer = []

        def current(n: int = n, newer: list[str] = newer) -> bool:  # the moment between the question and the rename
            newer.append(claimed(directory, FENCE.format(2 * n + 1)).name)
            return True

        with pytest.raises(ClaimLost):
            save(directory, old, n, n, current=current)
        assert directory.scan() == [] and entries(tmp_path) == [f".staging-{newer[0]}"]


def test_a_client_that_still_knows_the_staging_folder_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of a network file system may rename by a handle of the folder, which a rename of the folder does not change."""
    directory = open_directory(str(tmp_path))
    old = claimed(directory, FENCE.format(1)).name
    stage(directory, old, 1, 1)
    handle = os.open(tmp_path / f".staging-{old}", os.O_RDONLY)
    monkeypatch.setattr(shutil, "rmtree", lambda *arguments, **named: None)  # the claim has not come to that yet
    claimed(directory, FENCE.format(2))
    with pytest.raises(FileNotFoundError):
        os.rename("step-00000001", tmp_path / "step-00000001", src_dir_fd=handle)
    os.close(handle)


def test_of_claims_at_the_same_time_one_counts_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, mkdir = open_directory(str(tmp_path)), os.mkdir
    late: list[str] = []

    def pause(path: str, *mode: int) -> None:
        if not late and ".staging-" in path:
            late.append("")
            late[0] = claimed(directory, FENCE.format(2)).name
        mkdir(path, *mode)

    monkeypatch.setattr(os, "mkdir", pause)
    with pytest.raises(ClaimLost):
        claimed(directory, FENCE.format(1))  # it has looked before the later round made its folder
    assert entries(tmp_path) == [f".staging-{late[0]}"]


def test_what_a_claim_has_left_half_done_the_next_one_ends(tmp_path: Path) -> None:
    directory = open_directory(str(tmp_path))
    old = claimed(directory, FENCE.format(1)).name
    save(directory, old, 1, 1)
    stage(directory, old, 2, 2)
    (tmp_path / f".staging-{old}").rename(tmp_path / f".dead-{old}")
    new = claimed(directory, FENCE.format(2))
    assert entries(tmp_path) == [f".staging-{new.name}", "step-00000001"]


def test_what_no_rank_has_reported_is_not_published(tmp_path: Path) -> None:
    directory = open_directory(str(tmp_path))
    name = claimed(directory, FENCE.format(1)).name
    directory.backend.write(name, 1, "left.over", memoryview(b"x"))
    save(directory, name, 1, 1)
    assert entries(tmp_path / "step-00000001") == sorted([*content(1), COMMIT])


# -- verification --------------------------------------------------------------------------------------------------------------


def published(path: Path) -> tuple[Directory, Published]:
    directory = open_directory(str(path))
    save(directory, claimed(directory, FENCE.format(1)).name, 1, 1)
    return directory, directory.scan()[0]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "flipped": (flip, r"its checksum is wrong: bytes have changed"),
    "cut off": (lambda path: os.truncate(path, 5), r"has 5 bytes instead of 4192"),
    "missing": (lambda path: path.unlink(), "is missing"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "is not a regular file"),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "is not a regular file"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_file_is_named(tmp_path: Path, kind: str) -> None:
    directory, found = published(tmp_path)
    spoil, message = DAMAGES[kind]
    spoil(tmp_path / found.name / "__0_0.distcp")
    (damage,) = directory.verify(found, look="sha256")
    assert [damage] == list(directory.verify(found)) and (kind == "flipped") == (not [*directory.verify(found, look="size")])
    assert re.fullmatch(f"__0_0.distcp: {message}", str(damage)) and damage.lasting
    assert list(directory.verify(found, {"tensors.json"})) == []
    assert directory.backend.set_aside(found) == f"damaged-{found.name}"
    assert directory.scan() == [] and claimed(directory, FENCE.format(2)).sequence == 2


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_record_makes_no_checkpoint(tmp_path: Path, kind: str) -> None:
    directory, found = published(tmp_path)
    DAMAGES[kind][0](tmp_path / found.name / COMMIT)
    (again,) = directory.scan()
    assert again.commit is None and again.damage and again.damage.lasting and list(directory.verify(again)) == [again.damage]


def test_a_file_that_cannot_be_read_now_is_no_lasting_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, found = published(tmp_path)

    def fails(*arguments: object) -> bytes:
        raise OSError(5, "Input/output error")

    class Unreadable(io.FileIO):
        read = fails  # type: ignore[assignment]

    monkeypatch.setattr(folder, "open_regular", Unreadable)
    damages = list(directory.verify(found))
    (again,) = directory.scan()
    monkeypatch.undo()
    assert [str(one) for one in damages] == [f"{name}: cannot be read: Input/output error" for name in sorted(content(1))]
    assert not any(one.lasting for one in damages) and again.damage == Damage(COMMIT, "cannot be read: Input/output error", False)


# -- the lock where there is no agent ------------------------------------------------------------------------------------------

HOLDER = """
import sys
from elastirun.checkpoint.directory import Directory, open_directory
claim = open_directory(sys.argv[1]).claim("")
print("claimed", flush=True)
sys.stdin.read()
"""


def test_a_directory_that_another_process_writes_is_refused(tmp_path: Path) -> None:
    directory = open_directory(str(tmp_path))
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as holder:
        assert holder.stdout and holder.stdout.readline() == b"claimed\n"
        before = entries(tmp_path)
        with pytest.raises(CheckpointError, match=f"is being written by pid {holder.pid} on {os.uname().nodename}; stop that process"):
            directory.claim("")
        assert entries(tmp_path) == before
        holder.send_signal(signal.SIGKILL)
    claim = claimed(directory, "")
    assert len(entries(tmp_path)) == 2
    claim.release()


def test_a_fork_does_not_keep_the_directory_locked(tmp_path: Path) -> None:
    directory, (read, write) = open_directory(str(tmp_path)), os.pipe()
    if not (holder := os.fork()):
        try:
            directory.claim("")
            if not os.fork():
                os.close(write)
                os.read(read, 1)  # until the test ends
        finally:
            os._exit(7)
    assert os.waitpid(holder, 0)[1] == 7 << 8 and (tmp_path / ".lock").read_text() == f"pid {holder} on {os.uname().nodename}\n"
    directory.claim("").release()
    os.close(read)
    os.close(write)


def test_a_directory_that_cannot_be_made_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        open_directory(str(tmp_path / "file" / "x")).claim("")
    assert open_directory(str(tmp_path / "none")).scan() == []
    assert claims.next_sequence([]) == 1
    shutil.rmtree(tmp_path)

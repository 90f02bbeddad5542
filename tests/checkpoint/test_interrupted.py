"""Saves and claims that are killed, frozen or failed at each of their system calls: the directory always has whole checkpoints only."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastirun.checkpoint.directory import Directory, open_directory
from elastirun.checkpoint.image import Image
from elastirun.checkpoint.writer import answer
from elastirun.errors import ClaimLost
from tests.checkpoint.kills import freezes, kills
from tests.checkpoint.saves import FENCE, claimed, content, entries, image_of, save
from tests.checkpoint.system_calls import Act, die, failing, forked, freeze, recorded
from tests.support.until import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
KEEP = 2


def prepared(path: Path) -> tuple[Directory, str]:
    """A directory with the steps 1 and 2, and the claim of round 1 on it."""
    directory = open_directory(str(path))
    claim = claimed(directory, FENCE.format(1)).name
    for n in (1, 2):
        save(directory, claim, n, n, KEEP)
    return directory, claim


def write_and_commit(directory: Directory, claim: str, step: int, sequence: int, image: Image | None = None) -> list[dict[str, Any]]:
    """Carry out the two requests of a save, as the writer process does."""
    image = image or image_of(step)
    place = {"directory": directory.path, "claim": claim, "limit": 0}
    replies = [answer({"do": "write", "image": 0, **place}, [], [image])]
    if "error" not in replies[0]:
        commit = {"step": step, "sequence": sequence, "fence": "", "round": 0, "world_size": 1, "files": replies[0]["files"]}
        replies.append(answer({"do": "commit", "commit": commit, "keep": KEEP, "save": 1, **place}, [], []))
    image.close()
    return replies


def whole_steps(directory: Directory) -> list[int]:
    """The steps, the newest first; every published checkpoint must be complete."""
    found = directory.scan()
    assert [str(damage) for one in found for damage in directory.verify(one, look="sha256")] == []
    for one in found:
        assert one.commit and {name: directory.read(one, name) for name in content(1)} == content(one.commit.step)
    return [one.commit.step for one in found if one.commit]


def calls_of(path: Path, work: Callable[[Directory, str], object]) -> int:
    """The number of system calls of ``work``."""
    directory, claim = prepared(path)
    with recorded(directory.path) as all_calls:
        work(directory, claim)
    return len(all_calls.calls)


def a_save(directory: Directory, claim: str) -> object:
    replies = write_and_commit(directory, claim, 3, 3)
    return [reply for reply in replies if "error" in reply]


def a_claim(directory: Directory, claim: str) -> object:
    directory.backend.write(claim, 3, "half", memoryview(b"x"))
    return claimed(directory, FENCE.format(2))


def a_claim_and_a_save(directory: Directory, claim: str) -> None:
    """Exits with 7 if the claim is lost."""
    try:
        own: Any = a_claim(directory, claim)
        save(directory, own.name, 4, own.sequence)
    except ClaimLost:
        os._exit(7)


def started(work: Callable[[Directory, str], object], directory: Directory, claim: str, at: int, then: Act) -> int:
    """Do ``work`` in a child, which dies or freezes (``then``) at its system call number ``at``. Return the child's process number."""

    def child() -> None:
        with recorded(directory.path, at, then):
            work(directory, claim)

    return forked(child)


@pytest.fixture(autouse=True)
def no_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A process that is killed loses nothing that the kernel has, so these tests need no fsync, except those about the order of calls."""
    if "order" not in request.node.name:
        monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.mark.daily(2)
@pytest.mark.parametrize("work", [a_save, a_claim])
def test_killed_at_any_system_call_the_previous_or_the_new_checkpoint_is_whole(
    tmp_path: Path, work: Callable[[Directory, str], object]
) -> None:
    number = calls_of(tmp_path / "all", work)
    outcomes = set()
    for at in range(1, number + 1):
        directory, claim = prepared(tmp_path / str(at))
        assert os.waitpid(started(work, directory, claim, at, die), 0)[1] == signal.SIGKILL
        steps = whole_steps(directory)
        assert steps in ([2, 1], [3, 2, 1], [3, 2])
        outcomes.add(steps[0])
        new = claimed(directory, FENCE.format(3))
        assert [one.commit.step for one in new.found if one.commit] == whole_steps(directory) == steps
        assert entries(directory.path) == sorted([f".staging-{new.name}", *(one.name for one in new.found)])
        save(directory, new.name, 4, new.sequence, KEEP)
        assert whole_steps(directory) == [4, steps[0]]
    assert outcomes == ({2, 3} if work is a_save else {2})


def test_killed_at_random_moments_the_previous_or_the_new_checkpoint_is_whole(tmp_path: Path) -> None:
    assert kills(tmp_path, 12, random.Random(1)) == []


@pytest.mark.daily(2)
def test_frozen_at_any_system_call_nothing_is_published_or_deleted_after_a_later_claim(tmp_path: Path) -> None:
    number = calls_of(tmp_path / "all", a_save)
    outcomes = set()
    for at in range(1, number + 1):
        directory, claim = prepared(tmp_path / str(at))
        child = started(a_save, directory, claim, at, freeze)
        assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
        new = claimed(directory, FENCE.format(2))
        steps = [one.commit.step for one in new.found if one.commit]
        outcomes.add(tuple(steps))
        os.kill(child, signal.SIGCONT)
        assert os.waitpid(child, 0)[1] == 0
        assert whole_steps(directory) == steps
        assert directory.scan() == new.found
        assert entries(directory.path) == sorted([f".staging-{new.name}", *(one.name for one in new.found)])
        assert entries(f"{directory.path}/.staging-{new.name}") == []
    assert outcomes == {(2, 1), (3, 2, 1), (3, 2)}


def test_a_frozen_claim_gives_way_to_a_later_one(tmp_path: Path) -> None:
    number = calls_of(tmp_path / "all", a_claim)
    for at in range(1, number + 1):
        directory, claim = prepared(tmp_path / str(at))
        child = started(a_claim_and_a_save, directory, claim, at, freeze)
        assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
        new = claimed(directory, FENCE.format(3))
        os.kill(child, signal.SIGCONT)
        assert os.waitpid(child, 0)[1] == 7 << 8
        assert whole_steps(directory) == [2, 1] == [one.commit.step for one in new.found if one.commit]
        save(directory, new.name, 5, new.sequence)
        assert whole_steps(directory) == [5, 2]


@pytest.mark.daily(2)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_failed_at_any_system_call_the_next_save_is_good(tmp_path: Path, code: int) -> None:
    number = calls_of(tmp_path / "all", a_save)
    failures = 0
    for at in range(1, number + 1):
        directory, claim = prepared(tmp_path / str(at))
        with recorded(directory.path, at, failing(code)):
            replies = write_and_commit(directory, claim, 3, 3)
        assert whole_steps(directory) in ([2, 1], [3, 2, 1], [3, 2])
        for reply in replies:
            if error := reply.get("error") or reply.get("warning"):
                failures += 1
                assert os.strerror(code) in error and "\n" not in error
        assert "error" not in write_and_commit(directory, claim, 4, 4)[-1]
        assert whole_steps(directory)[0] == 4 and len(whole_steps(directory)) == KEEP
        assert entries(f"{directory.path}/.staging-{claim}") in ([], ["step-00000003"])
        new = claimed(directory, FENCE.format(2))
        assert entries(directory.path) == sorted([f".staging-{new.name}", *(one.name for one in new.found)])
    assert failures > 20


def test_the_order_of_the_calls_survives_a_loss_of_power(tmp_path: Path) -> None:
    directory, claim = prepared(tmp_path)
    with recorded(directory.path) as recorder:
        a_save(directory, claim)
    staged, calls = f"{tmp_path}/.staging-{claim}/step-00000003", recorder.calls

    def last(*call: str) -> int:
        return max(at for at, each in enumerate(calls) if each == call)

    published, record = last("rename", staged), f"{staged}/commit.json"
    for name in content(3):
        written = [at for at, each in enumerate(calls) if each in (("pwrite", f"{staged}/{name}"), ("open", f"{staged}/{name}"))]
        assert max(written) < last("fsync", f"{staged}/{name}") < min(at for at, each in enumerate(calls) if each == ("open", record))
    assert last("pwrite", record) < last("fsync", record) < last("fsync", staged) < published < last("fsync", str(tmp_path))
    assert last("fsync", str(tmp_path)) < last("rename", f"{tmp_path}/step-00000001")


# -- real file systems that refuse ---------------------------------------------------------------------------------------------

LIMITED = """
import resource, sys
from tests.checkpoint.test_interrupted import *
directory, claim = prepared(Path(sys.argv[1]))
image = image_of(3)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
print(write_and_commit(directory, claim, 3, 3, image)[-1]["error"])
print(whole_steps(directory), entries(f"{directory.path}/.staging-{claim}/step-00000003"))
"""
MOUNTED = """
import subprocess, sys
from tests.checkpoint.test_interrupted import *
path = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", path], check=True)
directory, claim = prepared(Path(path))
with open(f"{path}/others", "wb", buffering=0) as file:
    try:
        while file.write(bytes(4096)): pass
    except OSError: pass
print(write_and_commit(directory, claim, 3, 3)[-1]["error"])
print(whole_steps(directory), entries(f"{directory.path}/.staging-{claim}/step-00000003"))
os.unlink(f"{path}/others")
print(write_and_commit(directory, claim, 3, 3)[-1].get("name"))
subprocess.run(["mount", "-o", "remount,ro", path], check=True)
print(write_and_commit(directory, claim, 4, 4)[-1]["error"])
print(whole_steps(directory))
try: claimed(directory, FENCE.format(2))
except OSError as error: print(error.strerror)
"""


def script(code: str, path: Path, *before: str) -> list[str]:
    command = [*before, sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    if before and done.returncode and ("unshare" in done.stderr or "mount" in done.stderr):
        pytest.skip("this user can make no mount namespace")
    assert done.returncode == 0, done.stderr
    return [line.replace(str(path), "DIR") for line in done.stdout.splitlines()]


def test_a_file_that_may_not_grow_is_reported_and_removed(tmp_path: Path) -> None:
    error, left = script(LIMITED, tmp_path)
    assert error.startswith("DIR/.staging-") and error.endswith("/step-00000003/__0_0.distcp: File too large")
    assert left == "[2, 1] []"


def test_a_full_and_a_read_only_file_system(tmp_path: Path) -> None:
    full, left, published, read_only, steps, claim = script(MOUNTED, tmp_path, "unshare", "--mount", "--map-root-user")
    assert full.endswith("No space left on device") and left == "[2, 1] []" and published == "step-00000003"
    assert read_only.endswith("Read-only file system") and steps == "[3, 2]" and claim == "Read-only file system"


def test_a_writer_that_waits_for_space_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, claim = prepared(tmp_path)
    image, fails, pwrite = image_of(3), [errno.ENOSPC, errno.EIO], os.pwrite

    def full_at_first(fd: int, data: memoryview, at: int) -> int:
        if fails:
            raise OSError(fails.pop(), "")
        return pwrite(fd, data, at)

    monkeypatch.setattr(os, "pwrite", full_at_first)
    reply = answer({"do": "write", "image": 0, "directory": str(tmp_path), "claim": claim}, [], [image])
    assert "error" not in reply and not fails
    image.close()


def test_a_writer_that_is_frozen_at_random_moments_publishes_nothing_later(tmp_path: Path) -> None:
    _, wrong = freezes(tmp_path, 6, random.Random(2))
    assert wrong == []

"""The writer process: requests and answers, errors in one line, its end."""

from __future__ import annotations

import errno
import hashlib
import os
import select
import signal
import socket
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastirun.checkpoint.backends import folder as folder_module
from elastirun.checkpoint.backends.files import CHUNK, write_file
from elastirun.checkpoint.directory import Directory, open_directory
from elastirun.checkpoint.image import PAGE, Image
from elastirun.checkpoint.record import FileSum
from elastirun.checkpoint.writer import NICE, answer, repeat, serve
from elastirun.checkpoint.writer_process import WriterProcess
from elastirun.errors import CheckpointError
from tests.checkpoint.saves import FENCE, claimed, content, entries, image_of, stage, yes
from tests.support.cluster import dies
from tests.support.descriptors import descriptors

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def writer() -> Iterator[WriterProcess]:
    before = descriptors()
    made = WriterProcess()
    made.start()
    yield made
    made.close()
    assert descriptors() == before


def commit_message(path: Path, claim: str, step: int, sequence: int, files: Any, **more: Any) -> dict[str, Any]:
    commit = {"step": step, "sequence": sequence, "fence": "", "round": 0, "world_size": 1, "files": files}
    return {"do": "commit", "directory": str(path), "claim": claim, "commit": commit, "keep": 2, "save": sequence, **more}


def test_images_are_written_and_published(tmp_path: Path, writer: WriterProcess) -> None:
    directory = open_directory(str(tmp_path))
    claim = directory.claim("")
    images = [image_of(1, save=1), image_of(2, save=2)]
    writer.request({"do": "images"}, [image.fd for image in images])
    for n in (0, 1):  # requests may be sent ahead of the answers
        writer.request({"do": "write", "image": n, "directory": str(tmp_path), "claim": claim.name})
    assert writer.reply() == {"did": "images"}
    for n in (1, 2):
        poller = select.poll()
        poller.register(writer.fileno(), select.POLLIN)
        assert poller.poll(60_000)
        written = writer.reply()
        assert (written["did"], written["save"], set(written["files"])) == ("write", n, set(content(n)))
        writer.request(commit_message(tmp_path, claim.name, n, n, written["files"]))
    assert [writer.reply() for _ in (1, 2)] == [{"did": "commit", "save": n, "name": f"step-0000000{n}"} for n in (1, 2)]
    found = directory.scan()
    assert [one.name for one in found] == ["step-00000002", "step-00000001"]
    assert [damage for one in found for damage in directory.verify(one)] == []
    claim.release()
    for image in images:
        image.close()


def test_the_writer_gives_way_to_the_trainer(writer: WriterProcess) -> None:
    writer.request({"do": "images"})
    writer.reply()
    assert writer._process
    pid = writer._process.pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.nice(0) + NICE) and os.sched_getscheduler(pid) == os.SCHED_BATCH


def test_a_stop_signal_does_not_end_the_writer(writer: WriterProcess) -> None:
    writer.request({"do": "images"})
    writer.reply()
    assert writer._process
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        writer._process.send_signal(signum)
    writer.request({"do": "images"})
    assert writer.reply() == {"did": "images"}


@pytest.mark.parametrize("code", [-signal.SIGKILL, 0])
def test_the_end_of_the_writer_is_reported(writer: WriterProcess, code: int) -> None:
    assert writer._process and writer._socket
    if code:
        writer._process.kill()
    else:
        writer._socket.shutdown(1)
    with pytest.raises(CheckpointError, match="was killed by signal 9" if code else "ended with exit code 0"):
        writer.reply()
    with pytest.raises(CheckpointError, match="the process that writes checkpoints"):
        while True:
            writer.request({"do": "images"})
    writer.close()
    with pytest.raises(CheckpointError, match="has not been started, or was closed"):
        writer.request({})


TRAINER = """
import os, signal, sys, time
from elastirun.checkpoint.writer_process import WriterProcess
writer = WriterProcess()
writer.start()
writer.request({"do": "images"})
writer.reply()
if not os.fork():
    while True: signal.pause()
os.write(1, b"%d %d" % (writer._process.pid, os.getpid()))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_writer_ends_with_the_trainer_though_a_fork_holds_the_socket(tmp_path: Path) -> None:
    done = subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True)
    assert done.stdout
    pid = int(os.read(done.stdout.fileno(), 100).split()[0])
    ended = dies(pid)
    os.killpg(done.pid, signal.SIGKILL)
    done.wait()
    done.stdout.close()
    assert ended


def test_a_trainer_that_dies_in_the_middle_of_a_message_is_not_an_error() -> None:
    trainer, mine = socket.socketpair()
    with trainer, mine:
        trainer.sendall(bytes([0, 0, 0, 9]) + b'{"do":')
        trainer.close()
        serve(mine, os.getpid())
        assert mine.recv(1) == b"", "all was read, and no exception raised"


# -- one request at a time, without a process ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({}, "the writer has no request None"),
        ({"do": "sing"}, "the writer has no request 'sing'"),
        ({"do": "write", "image": 7, "directory": "x", "claim": "s-1-" + "0" * 16}, "7 is not a number from 0 to 0"),
        ({"do": "write"}, "KeyError: 'image'"),
        ({"do": "write", "image": 0, "directory": "x", "claim": "../y"}, "'x', '../y': this is no directory with a claim on it"),
        ({"do": "commit", "directory": "x", "claim": "s-1-" + "0" * 16, "commit": {"files": []}, "keep": 1}, "its files are not an object"),
    ],
)
def test_a_bad_request_is_answered_in_one_line(message: dict[str, Any], error: str) -> None:
    image = image_of(1)
    assert answer(message, [], [image])["error"].startswith(error)
    image.close()


def test_what_an_earlier_round_has_not_published_is_deleted_on_request(tmp_path: Path) -> None:
    directory = open_directory(str(tmp_path))
    stage(directory, directory.claim(FENCE.format(1), yes).name, 1, 1)
    claim = directory.claim(FENCE.format(2), yes).name
    assert len(entries(tmp_path)) == 2
    assert answer({"do": "clean", "directory": str(tmp_path), "claim": claim}, [], []) == {"did": "clean"}
    assert entries(tmp_path) == [f".staging-{claim}"]


def test_an_image_that_is_not_complete_is_not_written(tmp_path: Path) -> None:
    image, directory = image_of(1), open_directory(str(tmp_path))
    claim = claimed(directory, FENCE.format(1)).name
    image.begin()
    reply = answer({"do": "write", "image": 0, "directory": str(tmp_path), "claim": claim}, [], [image])
    assert reply == {"did": "write", "error": "image 0 is not complete"}
    image.close()


def test_an_image_that_changes_while_it_is_written_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image, directory = image_of(1), open_directory(str(tmp_path))
    claim = claimed(directory, FENCE.format(1)).name
    description = image.description()
    assert description

    def changes(path: str) -> None:
        image.begin()
        image.finish(replace(description, save=2))

    monkeypatch.setattr(folder_module, "sync_folder", changes)
    reply = answer({"do": "write", "image": 0, "directory": str(tmp_path), "claim": claim}, [], [image])
    assert reply["error"] == "image 0 changed while it was written" and entries(tmp_path / f".staging-{claim}" / "step-00000001") == []
    image.close()


def test_descriptors_that_are_no_images_are_closed() -> None:
    good, before = image_of(1), descriptors()
    images: list[Image] = []
    reply = answer({"do": "images"}, [os.dup(good.fd), os.open("/dev/null", os.O_RDONLY), os.dup(good.fd)], images)
    assert "is not an image" in reply["error"]
    for image in images:
        image.close()
    answer({"do": "write"}, [os.dup(good.fd)], [])
    assert descriptors() == before
    good.close()


def test_a_lost_claim_is_said(tmp_path: Path) -> None:
    image, directory = image_of(1), open_directory(str(tmp_path))
    old = claimed(directory, FENCE.format(1)).name
    written = answer({"do": "write", "image": 0, "directory": str(tmp_path), "claim": old}, [], [image])
    new = claimed(directory, FENCE.format(2)).name
    for reply in (
        answer(commit_message(tmp_path, old, 1, 1, written["files"]), [], []),
        answer({"do": "write", "image": 0, "directory": str(tmp_path), "claim": old}, [], [image]),
    ):
        what = "another round or job has claimed this directory, it was removed meanwhile, or it is not the same one on every node"
        assert reply["error"] == f"{tmp_path}: {what}; nothing was published" and reply["lost"]
    assert entries(tmp_path) == [f".staging-{new}"]
    image.close()


def test_a_write_that_fails_leaves_nothing_of_this_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image, directory = image_of(1), open_directory(str(tmp_path))
    claim, pwrite = claimed(directory, FENCE.format(1)).name, os.pwrite
    directory.backend.write(claim, 1, "of-another-rank", memoryview(b"x"))

    def full(fd: int, data: memoryview, at: int) -> int:
        if at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data[:PAGE], at)

    monkeypatch.setattr(os, "pwrite", full)
    reply = answer({"do": "write", "image": 0, "directory": str(tmp_path), "claim": claim, "limit": 0}, [], [image])
    assert reply["error"] == f"{tmp_path}/.staging-{claim}/step-00000001/__0_0.distcp: No space left on device"
    assert entries(tmp_path / f".staging-{claim}" / "step-00000001") == ["of-another-rank"]
    monkeypatch.undo()
    answer({"do": "discard", "directory": str(tmp_path), "claim": claim, "step": 1}, [], [])
    assert entries(tmp_path / f".staging-{claim}") == []
    image.close()


def test_old_checkpoints_that_cannot_be_deleted_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = open_directory(str(tmp_path))
    claim = claimed(directory, FENCE.format(1)).name
    monkeypatch.setattr(Directory, "prune", lambda *arguments: os.rmdir("/proc/1"))
    files = {"a": directory.backend.write(claim, 1, "a", memoryview(b"x"))}
    reply = answer(commit_message(tmp_path, claim, 1, 1, {"a": [1, files["a"].sha256, files["a"].crc32]}, limit=0), [], [])
    assert reply["name"] == "step-00000001" and reply["warning"].startswith("old checkpoints are not deleted: /proc/1: ")


def test_a_failure_that_may_pass_is_repeated_until_the_limit() -> None:
    now, errors = [100.0], [errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EDQUOT]

    def attempt() -> str:
        if errors:
            raise OSError(errors.pop(), "")
        return "written"

    def sleep(seconds: float) -> None:
        now[0] += seconds

    assert repeat(attempt, 5.0, lambda: now[0], sleep) == "written" and now[0] == pytest.approx(101.5)
    errors[:] = [errno.ENOSPC] * 1000
    with pytest.raises(OSError):
        repeat(attempt, 5.0, lambda: now[0], sleep)
    assert 104.0 < now[0] <= 106.5 and len(errors) > 990
    errors[:] = [errno.ENOSPC, errno.EROFS]
    with pytest.raises(OSError):
        repeat(attempt, 5.0, lambda: now[0], sleep)
    assert errors == [errno.ENOSPC]  # a read-only file system is reported at once


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE, PAGE + 1, CHUNK, CHUNK + PAGE + 1])
@pytest.mark.parametrize("offset", [0, 8])
@pytest.mark.parametrize("refused", [False, True])
def test_a_file_has_its_bytes_whatever_its_size_and_place(
    tmp_path: Path, size: int, offset: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, pwrite, path = Image.create(size + 2 * PAGE), os.pwrite, str(tmp_path / "x")
    image.memory[:] = os.urandom(PAGE) * (image.size // PAGE)

    def short(fd: int, data: memoryview, at: int) -> int:
        return pwrite(fd, data[: max(1, len(data) - 100)], at)

    if refused:
        monkeypatch.setattr(os, "pwrite", short)
    with memoryview(image.memory) as memory, memory[offset : offset + size] as data:
        found = write_file(path, data)
        assert (tmp_path / "x").read_bytes() == data
    assert found == FileSum(size, hashlib.sha256((tmp_path / "x").read_bytes()).hexdigest(), zlib.crc32((tmp_path / "x").read_bytes()))
    image.close()

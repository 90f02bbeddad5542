"""What is published, what counts in memory, and what a process does at its end; without agents and other ranks."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastirun.checkpoint import memory_tier
from elastirun.checkpoint.directory import Directory, open_directory
from elastirun.checkpoint.image import PAGE, Description, Image, round_up
from elastirun.errors import CheckpointError
from elastirun.train import Checkpointer, PerRank
from elastirun.train.checkpoints import checkpointer, publishing, restoring, staging
from elastirun.train.checkpoints import resources as opened
from elastirun.train.checkpoints.memory import Memory, RankImage, SaveId, describe, together
from elastirun.train.checkpoints.publishing import Publisher, Save
from elastirun.train.checkpoints.ranks import Ranks
from elastirun.train.checkpoints.reading import tensors_in
from elastirun.train.checkpoints.resources import CheckpointResources
from elastirun.train.checkpoints.staging import TENSORS
from tests.agent.test_checkpoint_memory import Agent
from tests.checkpoint.saves import image_for, stage, yes
from tests.support.children import children
from tests.support.cluster import PATIENCE
from tests.support.worlds import run

ROOT = Path(__file__).resolve().parents[2]


class Writer:
    """Answers as the writer process does. ``dies``: the requests at which it is found dead."""

    def __init__(self, dies: Sequence[str] = (), error: str = "") -> None:
        self.requests: list[dict[str, Any]] = []
        self.starts, self._dies, self._error = 0, list(dies), error

    def start(self) -> None:
        self.starts += 1

    def request(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        if self._dies and message["do"] == self._dies[0]:
            del self._dies[0]
            raise CheckpointError("the process that writes checkpoints was killed by signal 9")
        self.requests.append(dict(message))

    def reply(self) -> dict[str, Any]:
        did = self.requests[-1]["do"]
        return {"did": did, "save": 1, "files": {}} | ({"error": self._error} if self._error and did == "write" else {})

    def close(self, patience: float = 0.0) -> None:
        pass

    def asked(self) -> list[str]:
        return [request["do"] for request in self.requests]


def publisher(writer: Writer, rank: int = 0, world: int = 2) -> tuple[Publisher, Any]:
    board = dist.HashStore()
    ranks: Any = SimpleNamespace(rank=rank, world_size=world, board=board)
    return Publisher(ranks, writer, "d", "store-1-abcdefab", 5, 3, "store:1"), board  # type: ignore[arg-type]


def one_save() -> Save:
    return Save(1, 7, 0, dict)


def test_a_commit_needs_the_files_of_all_ranks() -> None:
    writer = Writer()
    made, board = publisher(writer)
    one = one_save()
    made.submit(one)
    assert one.written.wait(PATIENCE) and not one.done.wait(0.1) and writer.asked() == ["write"]
    board.set("1/1", '{"did": "write", "save": 1, "files": {"f": [1, "", 0]}}')
    assert made.outcome(one, PATIENCE) == "published" and writer.asked() == ["write", "commit"]
    assert writer.requests[1]["commit"]["files"] == {"f": [1, "", 0]}
    made.close(PATIENCE)


def test_what_one_rank_could_not_write_is_not_published_and_all_learn_of_it() -> None:
    writer = Writer()
    made, board = publisher(writer)
    one = one_save()
    board.set("1/1", '{"error": "disk full"}')
    made.submit(one)
    assert made.outcome(one, PATIENCE) == "rank 1: disk full" == board.get("1/outcome").decode()
    assert writer.asked() == ["write", "discard"] and made.published is None
    made.close(PATIENCE)


def test_an_end_that_cannot_wait_for_the_disk_waits_for_the_call_that_the_thread_is_in() -> None:
    """Inside torch, as in an import, it would abort the process."""
    made, _ = publisher(Writer())
    inside, returned = threading.Event(), threading.Event()

    def call() -> None:
        inside.set()
        time.sleep(1.5)
        returned.set()

    made.submit(call)
    assert inside.wait(PATIENCE)
    made.close(0.0)
    assert returned.is_set()


@pytest.mark.parametrize("dies", ["write", "commit"])
def test_a_writer_that_was_killed_gets_a_successor(dies: str) -> None:
    writer = Writer([dies])
    made, _ = publisher(writer, world=1)
    one = one_save()
    made.submit(one)
    assert made.outcome(one, PATIENCE) == "published" and writer.starts == 1
    assert writer.asked()[-3:] == (["images", "write", "commit"] if dies == "write" else ["write", "images", "commit"])
    made.close(PATIENCE)


def test_nobody_waits_for_a_rank_whose_writers_die() -> None:
    made, board = publisher(Writer(["write", "write"]), rank=1)
    one = one_save()
    made.submit(one)
    assert one.done.wait(PATIENCE) and board.check(["1/1"]) and "killed by signal 9" in board.get("1/1").decode()
    made.close(PATIENCE)


def test_a_write_after_one_that_failed_is_not_repeated_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise training would wait for each of them."""
    writer = Writer(error="No space left on device")
    made, _ = publisher(writer, world=1)
    for _ in range(2):
        one = one_save()
        made.submit(one)
        assert "No space left" in made.outcome(one, PATIENCE)
    assert [request["limit"] for request in writer.requests if request["do"] == "write"] == [publishing.RETRY, 0.0]
    made.close(PATIENCE)


def test_an_end_without_patience_does_not_wait_for_other_ranks() -> None:
    made, _ = publisher(Writer())
    one = one_save()
    made.submit(one)
    assert one.written.wait(PATIENCE)
    made.close(0.0)
    assert not made._thread.is_alive() and one.error


@pytest.mark.daily(3)
def test_an_end_that_does_not_wait_says_what_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    made, _ = publisher(Writer())
    begun, end = threading.Event(), threading.Event()
    made.submit(lambda: (begun.set(), end.wait(PATIENCE)))  # as mapping the pages of a large state
    made.submit(one_save())
    assert begun.wait(PATIENCE)
    with caplog.at_level(logging.WARNING):
        made.close(0.0)
    assert caplog.messages == ["d: what was saved last was not published before the end"]
    end.set()
    made._thread.join(PATIENCE)


def test_the_end_after_an_exception_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    stub: Any = SimpleNamespace(pid=os.getpid(), close=limits.append)
    monkeypatch.setattr(opened, "_living", {stub.pid: stub}.values())
    opened._close_all()
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    opened._close_all()
    assert limits == [opened.END_LIMIT, 0.0]


# -- memory -------------------------------------------------------------------------------------------------------------------


def parts_of(made: Checkpointer) -> list[RankImage]:
    """What an agent would hold for a worker with this checkpointer."""
    found = []
    for which, image in enumerate(made._staging.images):
        description = image and image.description()
        if image and description:
            again = Image.of(os.dup(image.fd))
            number = SaveId(description.round, description.save, description.step, description.fence)
            found.append(RankImage(number, which, description.rank, "0", again, description.files))
    return found


def test_the_newest_copy_stays_until_the_next_one_is_complete(tmp_path: Path) -> None:
    made = Checkpointer(tmp_path)
    state = {"x": torch.zeros(4)}
    for step in range(1, 5):
        made.save(step, state)
        made.wait()
        assert {part.save.step for part in parts_of(made)} == {step, step - 1} - {0}
    made.close()


class Killed(BaseException):
    """Ends a save in the middle, as the kill of its process does."""


def kill(*given: Any, **more: Any) -> None:
    raise Killed


def newest(made: Checkpointer) -> tuple[int, bool]:
    """Return the step that a restore would take from memory, and whether it is whole."""
    best = together([describe(parts_of(made))])[0]
    part = next(part for part in parts_of(made) if part.save == best.save)
    [chunk] = tensors_in(bytes(part.read(TENSORS)))["x"].chunks
    return best.save.step, bytes([best.save.step]) * 4 in bytes(part.read(chunk.file))


def test_a_kill_in_a_save_costs_that_save_alone_while_the_disk_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to two saves are on their way to the disk. Of two images, the newest would be filled again and again."""
    slow, write = threading.Event(), Publisher._write
    monkeypatch.setattr(Publisher, "_write", lambda self, save: (slow.wait(PATIENCE), write(self, save))[1])
    made, found, waits = Checkpointer(tmp_path, every=4, memory_every=1), [], list[int]()
    wait = lambda save: save.written.is_set() or waits.append(save.step)  # noqa: E731
    monkeypatch.setattr(made, "_wait_for_writer", wait)
    state = {"x": torch.zeros(4, dtype=torch.uint8)}
    for step in range(4, 11):  # 4 and 8 go to the disk
        state["x"].fill_(step)
        with monkeypatch.context() as patch, suppress(Killed):
            patch.setattr(staging, "copy_all", kill)
            made.save(step, state)
        if step > 4:
            found.append(newest(made))
        if step < 10:
            made.save(step, state)
    slow.set()
    made.close()
    assert found == [(step, True) for step in range(4, 10)]
    assert waits == [4], "no save waits until two are on their way, then for the first of them"


def save_in_the_next_world(rank: int, world: int, folder: str, killed: bool) -> int | None:
    """Return the step that is restored after saves in two worlds of a round. The second has a new rank 1."""
    where = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"ELASTIRUN_SOCKET": f"{folder}/agent", **where}
    made = [Checkpointer(f"{folder}/c", every=100, memory_every=1) for _ in range(3)]
    state = {"x": torch.zeros(1 << 18), "y": torch.zeros(1 << 18)}  # one for each rank
    for step in range(1, 5):
        made[0].save(step, state)
    made[0].close(0.0)
    if rank == 0:
        made[1].continue_from(made[0].last_save)
    if killed and rank == 1:
        staging.copy_all = kill
    with suppress(Killed):
        made[1].save(5, state)
    made[1].close(0.0)
    return made[2].restore(state)


@pytest.mark.parametrize("killed", [True, False])
def test_the_first_save_in_the_next_world_leaves_the_newest_copy_and_is_newer(tmp_path: Path, killed: bool) -> None:
    """Live workers restore nothing there, and count the saves of the round on."""
    agent = Agent(tmp_path, 1 << 30)
    found = run(2, save_in_the_next_world, str(tmp_path), killed)
    agent.close()
    assert found == [4 if killed else 5] * 2


@pytest.mark.parametrize("fits", [True, False])
def test_images_of_an_earlier_round_are_filled_and_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: bool) -> None:
    state: dict[str, Any] = {"x": torch.full((4,), 1.0)}
    first = Checkpointer(tmp_path)
    for step in (1, 2):
        state["x"].fill_(step)
        first.save(step, state)
    parts = parts_of(first)
    first.close()
    for path in tmp_path.glob("step-*"):
        path.rename(tmp_path / f"no-{path.name}")
    again = Checkpointer(tmp_path)
    monkeypatch.setattr(again._memory, "parts", lambda: parts)
    state["x"].zero_()
    if fits:
        assert again.restore(state) == 2 and state["x"].tolist() == [2.0] * 4
    else:
        with pytest.raises(CheckpointError, match="has the shape"):
            again.restore({"x": torch.zeros(3)})
    again.save(3, state)
    again.wait()
    assert {part.save.step for part in parts_of(again)} == {2, 3} and (tmp_path / "step-00000003").is_dir()
    again.close()


def test_images_of_local_ranks_that_are_gone_stay_until_all_ranks_have_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sockets").mkdir()
    agent = Agent(tmp_path / "sockets", 1 << 30)
    for name, value in (("ELASTIRUN_SOCKET", f"{tmp_path}/sockets/agent"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    made = Checkpointer(tmp_path / "c")
    prefix = made._memory._prefix
    others = {f"{prefix}.{local}.{which}" for local in (2, 3, 11) for which in (0, 1)}
    stay = {f"{prefix}.1.0", f"{prefix}.1.1", "0123456789abcdef.7.0"}
    image = Image.create(PAGE)
    for name in others | stay:
        assert memory_tier.put(name, image.fd) == ""
    image.close()
    found = []
    for step in range(1, 4):
        made.save(step, {"x": torch.zeros(4)})
        made.wait()
        found.append({*memory_tier.names()} - {f"{prefix}.0.0", f"{prefix}.0.1"})
    made.close()
    agent.close()
    assert found == [others | stay, stay, stay]


def test_what_the_agent_had_no_room_for_is_offered_again_when_there_is_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Memory("d")
    made.there, image, room = True, Image.create(PAGE), False
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(memory_tier, "put", lambda name, fd: "" if room else "full")
    monkeypatch.setattr(memory_tier, "names", lambda prefix: [f"{prefix}1.0"])
    monkeypatch.setattr(memory_tier, "drop", lambda name: False)  # another rank was quicker
    assert [made.keep(0, image), made.keep(0, image)] == ["full", ""]  # said once
    made.drop_others()
    assert made.keep(0, image) == "full"
    room = True
    made.drop_others()
    assert made.keep(0, image) == "" and not made._refused
    image.close()


def held(step: int, fence: str, files: Mapping[str, bytes], rank: int = 0) -> RankImage:
    places, at = {}, PAGE
    for name, data in files.items():
        places[name] = (at, len(data))
        at = round_up(at + len(data))
    round = int(fence.rpartition(":")[2])
    description = Description(1, step, fence, round, rank, 2, places, ())
    image = image_for(description)
    for name, data in files.items():
        image.memory[places[name][0] : places[name][0] + len(data)] = data
    image.finish(description)
    return RankImage(SaveId(round, 1, step, fence), 0, rank, "0", image, places)


def of_two_ranks() -> dict[str, bytes]:
    """Return the files that the node of rank 0 has of a save by two ranks. File ``c``, with the random numbers of rank 1, is missing."""
    chunk = '"dtype":"uint8","shape":[2],"chunks":[{"offsets":[0],"sizes":[2],"at":0,"nbytes":2,"file"'
    tensors = "{" + ",".join(f'"{name}":{{{chunk}:"{file}"}}]}}' for name, file in (("x", "a"), ("rng@0", "b"), ("rng@1", "c"))) + "}"
    values = checkpointer.encode_values(checkpointer.flatten({"x": torch.zeros(2), "rng": PerRank(1)}, 0).tree)
    return {"a": b"aa", "b": b"bb", "tensors.json": tensors.encode(), "values.json": values}


def test_what_only_a_lost_rank_had_does_not_make_a_copy_incomplete() -> None:
    (copies,) = together([describe([held(3, "store:1", of_two_ranks())]), "[]"])
    assert copies.lost == {"c"}
    without_x = {name: data for name, data in of_two_ranks().items() if name != "a"}
    assert together([describe([held(3, "store:1", without_x)])]) == []


def find(directory: Directory, parts: list[RankImage], fence: str) -> tuple[int, str] | None:
    found = restoring.find(directory, directory.scan(), parts, fence, Ranks(), None)
    return found and (found.step, found.where)


@pytest.mark.parametrize(("published", "fence", "expected"), [(2, "store:2", "memory"), (4, "store:2", "disk"), (2, "other:2", "disk")])
def test_the_newer_of_memory_and_disk_counts_and_no_memory_of_another_job(
    tmp_path: Path, published: int, fence: str, expected: str
) -> None:
    directory = publish(tmp_path, published)
    whole = of_two_ranks() | {"c": b"cc"}
    found = find(directory, [held(3, "store:1", whole)], fence)
    assert found is not None and found[0] == (3 if expected == "memory" else published)


def test_of_equal_ones_memory_counts_unless_it_has_lost_something(tmp_path: Path) -> None:
    directory = publish(tmp_path, 3)
    lost = of_two_ranks()
    assert find(directory, [held(3, "store:1", lost | {"c": b"cc"})], "store:2") == (3, "memory")
    found = find(directory, [held(3, "store:1", lost)], "store:2")
    assert found is not None and "step-00000003" in found[1]


def publish(path: Path, step: int) -> Directory:
    """Publish as round 1 of the job "store"."""
    directory = open_directory(str(path))
    claim = directory.claim("store:1", yes)
    commit = stage(directory, claim.name, step, claim.sequence)
    directory.publish(claim.name, replace(commit, fence="store:1", round=1), yes)
    return directory


# -- checkpointers that nobody closes -----------------------------------------------------------------------------------------


def used() -> tuple[set[int], list[str], set[str]]:
    """The children, the descriptors of memory and of the sockets, and the threads of this process."""
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            links.append(os.readlink(fd))
    mine = sorted(link for link in links if "memfd:elastirun" in link or link.endswith("/.lock"))
    return children(os.getpid()), mine, {thread.name for thread in threading.enumerate() if thread.name.startswith("checkpoints")}


def save_and_forget(path: Path, step: int) -> CheckpointResources:
    made = Checkpointer(path)
    made.save(step, {"x": torch.full((1000,), float(step))})
    return made._opened


def test_what_was_saved_and_dropped_is_published_and_nothing_is_left(tmp_path: Path) -> None:
    before = used()
    for step in (1, 2):  # the second one claims the directory when the first one is through
        ending = save_and_forget(tmp_path, step)._ending
    assert ending is not None
    ending.join(PATIENCE)
    assert used() == before
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == ["step-00000001", "step-00000002"]


def test_one_that_was_never_used_leaves_nothing(tmp_path: Path) -> None:
    before, living = used(), len(opened._living)
    Checkpointer(tmp_path / "c")
    Checkpointer(tmp_path / "c").close()
    for thread in threading.enumerate():
        if thread.name == "checkpoints-end":
            thread.join(PATIENCE)
    assert used() == before and len(opened._living) == living and not (tmp_path / "c").exists()


SCRIPT = """
import sys, torch
from elastirun.train import Checkpointer
def save():
    made = Checkpointer(sys.argv[1])
    made.save(7, {"x": torch.ones(1_000_000)})
    return made
kept = save()
if sys.argv[2] == "dropped":
    del kept
"""


@pytest.mark.daily(2)
@pytest.mark.parametrize("how", ["kept", "dropped"])
def test_the_end_of_the_interpreter_waits_for_what_was_saved(tmp_path: Path, how: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, tmp_path, how], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "") and (tmp_path / "step-00000007").is_dir()
    assert {path.name for path in tmp_path.iterdir()} <= {"step-00000007", ".lock"}

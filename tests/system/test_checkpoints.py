"""Checkpoints of real jobs in trouble. ``python -m tests.system.checkpoint_kills`` does the same at many random moments."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from elastirun.checkpoint.directory import open_directory
from tests.agent.test_net import cannot_unshare
from tests.support.cluster import PATIENCE, Cluster
from tests.support.until import until
from tests.system.checkpoint_kills import Freezes, Job, Kills, Lines, restored, tell, writer_of


def test_a_worker_that_ends_in_any_way_leaves_its_newest_save_in_memory(nodes: Cluster) -> None:
    """Killed, or by an exception, which does not wait for the files of a rank that is slow."""
    job = Job(nodes, nproc=2, nnodes="1")
    agent = job.start(1, "--max-restarts=2", "--grace=0.1")
    workers = nodes.round(2)
    assert restored(workers) == (None, "")
    lines = [Lines(worker) for worker in workers]
    tell(workers, "train 3")
    tell(workers, "wait")
    assert {each.until("waited") for each in lines} == {"published"}
    for path in job.directory.glob("step-*"):
        path.rename(nodes.tmp_path / path.name)
    os.kill(workers[1].pid, signal.SIGKILL)

    workers = nodes.round(2, after=1)
    assert restored(workers) == (3, "memory")
    lines = [Lines(worker) for worker in workers]
    until(lambda: writer_of(workers[1].pid), "a writer: a process that was just forked has another command line")
    writer = writer_of(workers[1].pid)
    assert writer is not None
    os.kill(writer, signal.SIGSTOP)
    tell(workers, "train 1")
    for each in lines:
        each.until("step", 4)
    begun = time.monotonic()
    tell(workers[:1], "fail")
    lines[0].end()
    assert time.monotonic() - begun < PATIENCE / 2, "it could wait for rank 1's files for five minutes"

    workers = nodes.round(2, after=2)
    assert restored(workers) == (4, "memory") and "rank 0 on" in workers[0].env["ELASTIRUN_ROUND_REASON"]
    assert "(exit code 1)" in workers[0].env["ELASTIRUN_ROUND_REASON"]
    agent.send_signal(signal.SIGKILL)


def test_survivors_of_a_lost_node_go_on_with_what_they_have_in_memory(nodes: Cluster) -> None:
    """It is newer than what is on the disk. The node in the lost one's place gets it from them."""
    job = Job(nodes, nnodes="2", expire=1, every=3, memory_every=1)
    _, lost = job.start(1), job.start(2)
    workers = nodes.round(2)
    lines = [Lines(worker) for worker in workers]
    tell(workers, "train 4")
    tell(workers, "wait")
    assert {each.until("waited") for each in lines} == {"published"} and job.steps() == [3]
    lost.kill()
    job.start(3)
    workers = nodes.round(2, after=1)
    assert restored(workers) == (4, "memory")


@pytest.mark.daily(2)
def test_planned_changes_replay_no_step(nodes: Cluster) -> None:
    job = Job(nodes, every=1000, pause=0.02)
    agents = [job.start(1)]
    done: list[int] = []
    stopped = None
    number = 0
    for size in (1, 2, 1):
        workers = nodes.round(size, after=number)
        number = workers[0].round
        assert restored(workers)[0] == stopped
        lines = [Lines(worker) for worker in workers]
        tell(workers, "run")
        lines[0].until("step", (stopped or 0) + 3)
        if size == 1 and not stopped:
            agents.append(job.start(2))
        else:
            agents.pop().send_signal(signal.SIGTERM)
        for each in lines:
            each.end()
        (stopped,) = {each.until("stop") for each in lines}
        assert all(each.all("step") == lines[0].all("step") for each in lines)
        done += lines[0].all("step")
    assert done == list(range(1, stopped + 1)) and job.steps()[0] == stopped


def test_training_goes_on_without_room_on_the_disk_and_what_is_saved_later_is_published(nodes: Cluster) -> None:
    """The last save is published although the script ends at once and closes nothing."""
    job = Job(nodes, nproc=2, nnodes="1", retry=0.3)
    if reason := cannot_unshare("-m", trial="mount -t tmpfs tmpfs /mnt"):
        import pytest

        pytest.skip(f"mounting a file system needs root: {reason}")
    job.directory.mkdir()
    mount = f'mount -t tmpfs -o size=1m tmpfs {job.directory} && exec "$@"'
    agent = job.start(1, before=("unshare", "-m", "sh", "-c", mount, "sh"))
    workers = nodes.round(2)
    lines = [Lines(worker) for worker in workers]
    inside = os.open(f"/proc/{agent.pid}/root{job.directory}", os.O_RDONLY)  # stays mounted as long as this is open
    directory = Path(f"/proc/self/fd/{inside}")
    ballast = directory / "ballast"
    try:
        ballast.write_bytes(bytes(2 << 20))
    except OSError:
        pass
    tell(workers, "train 1")
    tell(workers, "wait")
    assert all("No space left on device" in each.until("waited") for each in lines)
    tell(workers, "train 5")
    for each in lines:
        each.until("step", 6)
    ballast.unlink()
    tell(workers, "train 1")
    tell(workers, "end")
    assert nodes.ends(agent) == 0
    found = open_directory(str(directory))
    assert [one.commit.step for one in found.scan() if one.commit][0] == 7
    assert not [damage for one in found.scan() for damage in found.verify(one)]
    os.close(inside)


@pytest.mark.daily(2)
def test_what_is_killed_at_random_moments_loses_nothing(nodes: Cluster) -> None:
    story = Kills(nodes, seed=1)
    assert story.once("writer").wrong == []
    assert story.once("worker").wrong == []
    assert story.end() == []


@pytest.mark.daily(2)
def test_a_node_that_was_frozen_publishes_nothing_after_a_later_claim(nodes: Cluster) -> None:
    story = Freezes(nodes, seed=1)
    assert story.once().wrong == []
    assert story.end() == []

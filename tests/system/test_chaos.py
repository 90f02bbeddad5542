"""Real cuts: a few faults on real agents and workers in network namespaces. ``python -m tests.chaos`` does many more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import checks, faults
from tests.chaos.checks import Done
from tests.chaos.faults import Fault
from tests.chaos.job import Agent, Job, Terms, Ticks
from tests.chaos.network import Network, missing
from tests.chaos.play import Play
from tests.support.until import PATIENCE, until

reason = missing()
needs_network = pytest.mark.skipif(bool(reason), reason=f"nothing can be cut here: {reason}")

FEW = [
    [Fault("cut", 1, 3.0), Fault("stop", 2, 0.8, after=0.5), Fault("worker", 0, 0.0, after=3.5)],
    [Fault("mute", 2, 2.5), Fault("kill", 1, 0.0, after=0.5), Fault("kill", 0, 0.0, after=2.7)],
]


@needs_network
def test_a_job_keeps_its_promises_while_its_network_and_its_processes_are_broken(tmp_path: Path) -> None:
    said: list[str] = []
    play = Play(tmp_path, 3, Terms(expire=2.0, store_grace=10.0), seed=1, say=said.append, bound=30.0)
    violations = play.run(FEW)
    if violations == [play.late] and play.starved():
        pytest.skip(f"this machine is too busy: agents and this process did not get to run. {play.late}")
    assert not violations, "\n".join([*violations, *said, play.report()])
    assert len(play.settled) == len(FEW) + 1 and len(play.done) == 6
    assert {name for _, name, _ in checks.lost(play.job.all)} & {"h1", "h2"}, "a node cut off for longer than expire is noticed"


@needs_network
def test_packets_are_dropped_one_way_lost_and_held_up(tmp_path: Path) -> None:
    network = Network(2, tmp_path)

    def echo(count: int, patience: float) -> list[str]:
        """Which packets host 1 sends back to host 0, each within so many seconds."""
        asking = network[0].inside(sys.executable, "-c", ASK, network[1].address, str(count), str(patience))
        return subprocess.run(asking, stdout=subprocess.PIPE, text=True, timeout=PATIENCE, check=True).stdout.split()

    answering = subprocess.Popen(network[1].inside(sys.executable, "-c", ANSWER), stdout=subprocess.PIPE, text=True)
    try:
        assert answering.stdout and answering.stdout.readline() == "ready\n"
        assert len(echo(5, 20.0)) == 5
        network.dropped = {(1, 0)}
        assert echo(2, 0.3) == []
        network.dropped = {(0, 1)}
        assert echo(2, 0.3) == []
        network.dropped = set()
        network.noisy[1] = (0.3, 0.02)
        assert 0 < len(echo(12, 0.5)) < 12
        network.noisy.clear()
        network[1].carrier(False)
        assert echo(2, 0.3) == []
        network[1].carrier(True)
        until(lambda: echo(1, 1.0) == ["0"], "the kernel to take note of the carrier, until when it drops packets")
        assert len(echo(5, 20.0)) == 5
    finally:
        network.close()
        answering.communicate()


ASK = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(float(sys.argv[3]))
for i in range(int(sys.argv[2])):
    s.sendto(b"%d" % i, (sys.argv[1], 4000))
    try:
        while s.recv(100) != b"%d" % i:
            pass
        print(i)
    except TimeoutError:
        pass
"""
ANSWER = """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("0.0.0.0", 4000))
print("ready", flush=True)
while True:
    s.sendto(*s.recvfrom(100))
"""


def test_the_same_seed_is_the_same_faults() -> None:
    assert faults.draw(3, 40, 4, Terms()) == faults.draw(3, 40, 4, Terms()) != faults.draw(4, 40, 4, Terms())
    assert sum(map(len, faults.draw(3, 40, 4, Terms()))) == 40


def written(folder: Path, number: int, rank: int, begin: float, end: float, world: int = 2, store: str = "s") -> Ticks:
    """The file of a worker that was alive from ``begin`` to ``end``, in seconds."""
    path = folder / f"{store}_{number}_{rank}_{world}_h{rank}-0_{1000 + number}"
    times = [begin + i / 20 for i in range(int((end - begin) * 20) + 1)]
    path.write_text("".join(f"{number} {rank} 1 {time}\n" for time in times))
    return Ticks.of(path)


def test_two_rounds_that_are_both_complete_are_noticed(tmp_path: Path) -> None:
    one = [written(tmp_path, 1, 0, 0.0, 9.0), written(tmp_path, 1, 1, 0.0, 5.0)]
    half = [written(tmp_path, 2, 0, 4.0, 9.0), written(tmp_path, 2, 1, 5.5, 9.0)]
    assert not list(checks._side_by_side(one + half)), "one of its workers lived on, and could finish nothing"
    early = [written(tmp_path, 2, 0, 4.0, 9.0), written(tmp_path, 2, 1, 4.5, 9.0)]
    assert list(checks._side_by_side(one + early)) == ["rounds 1 and 2 were both complete for 0.50 s"]


def agent(name: str, *events: dict[str, Any], code: int = 0) -> Agent:
    made = Agent(name, subprocess.Popen(["sh", "-c", f"exit {code}"]), Path("/nowhere"), 0.0)
    made.process.wait()
    made.events = [{"name": name.partition("-")[0], **e} for e in events]
    return made


def test_a_false_expulsion_is_noticed() -> None:
    class Now:
        terms = Terms()
        all = [agent("h0-0", {"event": "broken", "round": 1, "by": "h0", "lost": ["h2"], "mono": 100.0})]

    def found(*done: Done) -> list[str]:
        return list(checks._expulsions(Now, list(done), 1000.0))  # type: ignore[arg-type]

    assert not found(Done("cut h2", "cut", 2, {2}, 95.0, 99.0))
    assert len(found()) == len(found(Done("cut h1", "cut", 1, {1}, 95.0, 99.0))) == 1
    assert len(found(Done("cut h2", "cut", 2, {2}, 40.0, 45.0))) == 1, "that was long ago"
    Now.all.append(agent("h2-0", {"event": "stood_still", "seconds": 4.0, "mono": 99.0}))
    assert not found(), "the machine did not let it run"
    assert len(list(checks._expulsions(Now, [], 1000.0, strict=True))) == 1  # type: ignore[arg-type]


def test_a_host_that_leaves_may_be_called_lost_by_who_only_hears_that_it_has_gone() -> None:
    class Now:
        terms = Terms()
        all = [agent("h1-0", {"event": "broken", "round": 1, "by": "h1", "lost": ["h0"], "mono": 100.0})]

    def found(*done: Done) -> list[str]:
        return list(checks._expulsions(Now, list(done), 1000.0))  # type: ignore[arg-type]

    left = Done("term h0", "term", 0, set(), 99.0, 99.0)
    assert len(found(left)) == 1, "another node that leaves is not lost"
    Now.all[0].events[0]["reason"] = "h0 10.77.0.10, which hosted the rendezvous store, was lost"
    assert not found(left)
    assert len(found()) == len(found(Done("term h2", "term", 2, set(), 99.0, 99.0))) == 1


def test_an_agent_gives_up_a_store_only_for_what_was_done(tmp_path: Path) -> None:
    (tmp_path / "h1-0.out").touch()
    job = object.__new__(Job)
    job.terms, job.folder = Terms(store_grace=15.0), tmp_path
    away = f"{checks.AWAY} for 15 s: no answer within 2 s"
    replaced = "the rendezvous store was replaced by another one"

    def found(reason: str, *done: Done, host: tuple[dict[str, Any], ...] = (), ended: float = 0.0) -> list[str]:
        """What is wrong with the end of h1 at 100.0."""
        end = {"event": "end", "outcome": "store lost", "code": 201, "reason": reason, "mono": 100.0}
        job.all = [agent("h1-0", end, code=201), agent("h0-0", *host, code=143)]
        job.all[1].sent = {checks.SIGTERM}
        job.all[0].ended, job.all[1].ended = 100.0, ended
        return list(checks._codes(job, list(done)))

    cut = Done("cut h1", "cut", 1, {1}, 83.0, 101.0)
    assert not found(away, cut)
    noise = Done("noise h1", "noise", 1, {1}, 91.0, 95.0)
    assert not found(away, Done("cut h0", "cut", 0, {0, 1, 2}, 83.0, 92.0), noise)
    stood_still = {"event": "stood_still", "mono": 99.0, "seconds": 14.0}
    assert not found(away, host=(stood_still,))
    assert len(found(away, noise)) == 1, "it was over soon"
    assert len(found(away, Done("cut h2", "cut", 2, {2}, 83.0, 101.0))) == 1, "neither is cut off"
    assert len(found(away, Done("worker h0", "worker", 0, set(), 84.0, 84.0))) == 1, "the store goes on"
    assert not found(replaced, ended=97.0)
    for ended in (0.0, 60.0, 101.0):
        assert len(found(replaced, cut, ended=ended)) == 1, "its host was there"
    job.terms = Terms(store_grace=15.0, succession="majority")
    assert not found(replaced, cut), "the job may have moved meanwhile"
    assert checks.gave_up(job.all, 90.0) == [f"h1-0 ended with 201 at 10.0 s: {replaced}"]


def test_the_seconds_for_which_newcomers_are_held_are_read(tmp_path: Path) -> None:
    job = object.__new__(Job)
    job.folder, job.agents = tmp_path, [agent("h0-0"), agent("h1-0")]
    held = "elastirun: 4 rounds in a row lost a node within 60 s of their start; newcomers are taken in after"
    (tmp_path / "h0-0.out").write_text(f"{held} 10 s\n{held} 20 s\n")
    (tmp_path / "h1-0.out").write_text("elastirun: round 1\n")
    before = job.written()
    assert job.hold() == 20.0 and job.hold(before) == 0.0
    with open(tmp_path / "h1-0.out", "a") as out:
        out.write(f"{held} 40 s\n")
    assert job.hold() == job.hold(before) == 40.0


def test_a_round_with_two_tables_or_wrong_ranks_is_noticed() -> None:
    formed = {"event": "formed", "round": 1, "nodes": ["h0", "h1"], "world_size": 2}
    began = {"event": "round", "round": 1, "node_rank": 1, "ranks": [1]}
    stores = {"h0-0": "s", "h1-0": "s"}
    assert not list(checks._tables([agent("h0-0", formed), agent("h1-0", formed, began)], stores))
    assert list(checks._tables([agent("h0-0", formed), agent("h1-0", {**formed, "nodes": ["h1", "h0"]})], stores))
    assert list(checks._tables([agent("h0-0", formed, began)], stores)), "h0 has rank 0"
    assert list(checks._tables([agent("h0-0", {**formed, "round": 2}, {**began, "round": 2}, formed)], stores)), "rounds grow"
    waited = {**formed, "round": 6, "nodes": ["h2", "h0"]}
    assert not list(checks._tables([agent("h1-0", waited, formed, began)], stores)), "it has waited in another store"

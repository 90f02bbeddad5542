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
from tests.chaos.job import Agent, Terms, Ticks
from tests.chaos.network import Network, missing
from tests.chaos.play import Play

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
        return subprocess.run(asking, stdout=subprocess.PIPE, text=True, timeout=60, check=True).stdout.split()

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


def agent(name: str, *events: dict[str, Any]) -> Agent:
    made = Agent(name, subprocess.Popen(["true"]), Path("/nowhere"), 0.0)
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

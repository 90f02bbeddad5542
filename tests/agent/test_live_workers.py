"""Live workers: who is served, whose promise counts, and what the worker's end of the connection does."""

from __future__ import annotations

import math
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from elastirun.agent.part import WorkerExit
from elastirun.agent.workers.live_workers import LiveWorkers
from elastirun.agent.workers.parking import Parking
from elastirun.errors import TrainError
from elastirun.rendezvous.stores import tcp_server
from elastirun.rendezvous.stores.tcp import TcpStore
from elastirun.worker import live_connection, live_messages
from elastirun.worker.live_connection import ENDED, LiveConnection
from elastirun.worker.live_messages import VARIABLE, AllTrain, Hello, Lost, Park, Parked, Resume, decode, encode, store_prefix
from tests.agent.test_workers import FOREVER, FakeClock, Fifo, Loop, clock, fifo, loop, slow, spec, with_fifo
from tests.support.cluster import PATIENCE

__all__ = ["clock", "fifo", "loop", "slow"]  # fixtures

US = os.getpid()


def test_only_who_has_said_hello_is_asked() -> None:
    parking = Parking()
    parking.hello(7)
    assert parking.ask([7, 8], 3) == [7]


def test_a_promise_counts_for_the_round_that_was_asked_for_and_once() -> None:
    parking = Parking()
    parking.hello(7)
    assert not parking.promise(7, 3, 2), "nobody has asked"
    parking.ask([7], 3)
    assert not parking.promise(7, 2, 2), "a promise of the round before"
    assert parking.promise(7, 3, 2) and not parking.promise(7, 3, 2)


def test_only_a_parked_worker_is_given_another_round() -> None:
    parking = Parking()
    parking.hello(7)
    assert not parking.resume(7)
    parking.ask([7], 3)
    assert not parking.resume(7), "it may still make a step"
    parking.promise(7, 3, 2)
    assert parking.resume(7) and not parking.resume(7)


def test_a_parked_worker_has_the_state_of_its_promise() -> None:
    parking = Parking()
    parking.hello(7)
    parking.ask([7], 3)
    assert parking.settled(7) == 0
    parking.promise(7, 3, 2)
    assert parking.settled(7) == 2
    parking.resume(7)
    assert parking.settled(7) == 0


def test_a_worker_that_is_gone_is_neither_asked_nor_resumed() -> None:
    parking = Parking()
    parking.hello(7)
    parking.ask([7], 3)
    parking.promise(7, 3, 2)
    parking.gone(7)
    assert not parking.resume(7) and parking.ask([7], 4) == []


@pytest.mark.parametrize("message", [Hello(), Park(3), Parked(3, 1000, 2), AllTrain(3), Lost(3), Resume(4, {"RANK": "1"})])
def test_messages_are_read_as_they_were_written(message: live_messages.Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"do":"park"}',
        b'{"do":"park","round":-1}',
        b'{"do":"park","round":true}',
        b'{"do":"park","round":1,"step":1}',
        b'{"do":"parked","round":1,"step":1}',
        b'{"do":"parked","round":1,"step":1e9,"settled":1}',
        b'{"do":"resume","round":1,"env":{"A":1}}',
        b'{"do":"resume","round":1,"env":{"A":"\\u0000"}}',
        b'{"do":"hello","version":1}',
        b'{"do":"gathered","round":-1}',
        b'{"do":"gathered","round":1,"step":1}',
        b'{"do":"lost"}',
        b'{"do":"lost","round":-1}',
        b"\xff",
        b"[" * 50_000,
        b'{"do":"park","round":1' + b" " * live_messages.MAX_MESSAGE + b"}",
    ],
)
def test_anything_else_is_no_message(data: bytes) -> None:
    assert decode(data) is None


class Agent:
    """An agent's end, turned in a thread; this process is its worker."""

    def __init__(self, workers: set[int]) -> None:
        self.selector = selectors.PollSelector()
        self.parked: list[int] = []
        self.lost: list[tuple[int, int]] = []
        self.gathered: list[int] = []
        heard = self.parked.append, lambda *lost: self.lost.append(lost), self.gathered.append
        self.live = LiveWorkers(self.selector, lambda pid: pid in workers, *heard)

    def turn(self, until: Callable[[], Any]) -> None:
        end = time.monotonic() + PATIENCE
        while not until():
            assert time.monotonic() < end, "it did not come"
            for key, mask in self.selector.select(0.01):
                key.data(mask)

    def connect(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made.settimeout(PATIENCE)
        made.connect("\0" + self.live.name)
        return made

    def close(self) -> None:
        self.live.close()
        assert not self.selector.get_map()
        self.selector.close()


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent({US})
    yield made
    made.close()


def test_a_worker_is_asked_and_goes_on(agent: Agent) -> None:
    with agent.connect() as worker:
        worker.send(encode(Hello()))
        agent.turn(lambda: agent.live._parking._live)
        assert agent.live.park([US], 3) == [US]
        assert decode(worker.recv(1000)) == Park(3)
        worker.send(encode(Parked(3, 10, 2)))
        agent.turn(lambda: agent.parked)
        assert agent.live.settled(US) == 2 and agent.live.resume(US, 4, {"RANK": "1"})
        assert decode(worker.recv(1000)) == Resume(4, {"RANK": "1"})


@pytest.mark.parametrize(("settled", "code", "told"), [(2, 0, True), (0, 0, False), (2, 1, False)], ids=["succeeds", "new", "fails"])
def test_of_a_worker_with_a_state_that_has_succeeded_those_that_wait_hear(agent: Agent, settled: int, code: int, told: bool) -> None:
    """It may not have said so itself: it has lost the store, or has ended by ``os._exit``."""
    listening = socket.create_server(("127.0.0.1", 0))
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listening.getsockname()[1])}
    server = tcp_server.serve(listening)
    with agent.connect() as worker:
        worker.send(encode(Hello()))
        agent.turn(lambda: agent.live._parking._live)
        agent.live.park([US], 3)
        worker.send(encode(Parked(3, 10, settled)))
        agent.turn(lambda: agent.parked)
        agent.live.resume(US, 4, env)
    agent.live.worker_ended(WorkerExit(0, 0, US, code, 1.0, False))
    for thread in [thread for thread in threading.enumerate() if thread.name == "live states"]:
        thread.join(PATIENCE)
    with closing(TcpStore("127.0.0.1", int(env["MASTER_PORT"]))) as store:
        key = f"{store_prefix(4)}/over"
        assert (key in store.get([key])) == told
    del server


def test_a_worker_that_connects_while_no_descriptor_is_left_is_live_later(agent: Agent) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with agent.connect() as worker:
        worker.send(encode(Hello()))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard))
        taken = []
        try:
            with suppress(OSError):
                while True:
                    taken.append(os.dup(0))
            for key, mask in agent.selector.select(PATIENCE):
                key.data(mask)
            assert agent.selector.select(0) == [], "it does not spin"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for fd in taken:
                os.close(fd)
        due = agent.live.tick(0.0)
        assert due < math.inf and agent.live.tick(due) == math.inf
        agent.turn(lambda: agent.live.park([US], 3))


def test_a_stranger_gets_nothing() -> None:
    """Whoever is no worker of this agent is hung up on, whatever it sends."""
    agent = Agent(set())
    try:
        with agent.connect() as stranger:
            stranger.send(encode(Hello()))
            heard: list[bytes] = []

            def hear() -> None:
                try:
                    heard.append(stranger.recv(1000))
                except ConnectionError:
                    heard.append(b"")

            thread = threading.Thread(target=hear)
            thread.start()
            agent.turn(lambda: heard)
            thread.join()
            assert heard == [b""] and agent.live.park([US], 1) == []
    finally:
        agent.close()


def test_who_follows_another_protocol_is_hung_up_on(agent: Agent) -> None:
    with agent.connect() as worker:
        worker.send(encode(Hello()))
        agent.turn(lambda: agent.live._parking._live)
        worker.send(b"GET / HTTP/1.1\r\n\r\n")
        agent.turn(lambda: not agent.live._connections)
        assert worker.recv(1000) == b"" and agent.live.park([US], 1) == []


# -- the worker's end ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cuts() -> list[float]:
    return []


@pytest.fixture
def worker(agent: Agent, cuts: list[float], monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveConnection]:
    monkeypatch.setenv(VARIABLE, agent.live.name)
    monkeypatch.setenv("ELASTIRUN_ROUND", "3")
    made = LiveConnection()
    made.cut = lambda: cuts.append(time.monotonic())
    agent.turn(lambda: agent.live._parking._live)
    yield made
    agent.live.close()
    made.leave(0, 0)
    made.thread.join()


def test_a_worker_that_is_in_no_round_yet_promises_at_once(agent: Agent, worker: LiveConnection, cuts: list[float]) -> None:
    agent.live.park([US], 3)
    agent.turn(lambda: agent.parked)
    agent.live.resume(US, 4, {"RANK": "1"})
    assert worker.enter(0, PATIENCE) == (4, {"RANK": "1"}) and not cuts


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's name, which only root can")
def test_a_worker_speaks_to_no_other_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of the socket is free when the agent has ended, and anybody may take it."""
    name = f"elastirun-test-{os.urandom(8).hex()}"
    listens = "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)"
    listens += f"; s.bind(chr(0) + {name!r}); s.listen(); print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", listens], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout is not None and stranger.stdout.readline() == b"ready\n"
        monkeypatch.setenv(VARIABLE, name)
        with pytest.raises(OSError, match="another user listens"):
            LiveConnection()


def test_a_worker_in_a_round_is_cut_until_its_main_thread_has_left(agent: Agent, worker: LiveConnection, cuts: list[float]) -> None:
    assert worker.enter(0, PATIENCE) == (3, {})
    agent.live.park([US], 3)
    agent.turn(lambda: len(cuts) > 2)
    assert not agent.parked and worker.asked
    worker.leave(17, 3)
    agent.turn(lambda: agent.parked)
    agent.live.resume(US, 4, {})
    assert worker.enter(3, PATIENCE) == (4, {}) and not worker.asked


def test_a_worker_that_has_left_by_itself_promises_when_it_is_asked(agent: Agent, worker: LiveConnection) -> None:
    worker.enter(0, PATIENCE)
    worker.leave(17, 3)
    assert agent.live.park([US], 3) == [US] and not agent.parked
    agent.turn(lambda: agent.parked)
    assert agent.parked == [US]


def test_a_worker_that_hears_of_no_new_round_gives_up(worker: LiveConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_connection, "ANSWER", 0.01)
    worker.enter(0, PATIENCE)
    worker.leave(17, 3)
    with pytest.raises(TrainError, match="no new round"):
        worker.enter(3, 0.01)


@pytest.mark.parametrize("left", [False, True], ids=["in_the_round", "after_a_failed_reduction"])
def test_an_agent_that_knows_of_no_failure_is_told_of_lost_peers_and_the_worker_goes_on(
    agent: Agent, worker: LiveConnection, monkeypatch: pytest.MonkeyPatch, left: bool
) -> None:
    monkeypatch.setattr(live_connection, "ANSWER", PATIENCE)
    with ThreadPoolExecutor(1) as threads:
        worker.enter(0, PATIENCE)
        if left:
            worker.leave(17, 3)
        waits = threads.submit(worker.enter, 3, 0.01) if left else threads.submit(worker.wait_until_asked, 0.01, 17, "no peer")
        agent.turn(lambda: agent.lost or waits.done())
        assert agent.lost == [(US, 3)]
        agent.live.park([US], 3)
        if left:
            agent.turn(lambda: agent.parked)
            agent.live.resume(US, 4, {})
        assert waits.result(PATIENCE) == ((4, {}) if left else True)
        worker.leave(17, 3)


def test_an_agent_hears_that_all_workers_of_the_round_train_together(agent: Agent, worker: LiveConnection) -> None:
    worker.enter(0, PATIENCE)
    worker.gathered()
    agent.turn(lambda: agent.gathered)
    assert agent.gathered == [3]


def test_a_worker_that_has_made_no_step_since_ends_with_its_error(
    agent: Agent, worker: LiveConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_connection, "ANSWER", 0.0)
    worker.enter(0, PATIENCE)
    assert not any(worker.wait_until_asked(0.0, step, "no peer") for step in (17, 17, 18))
    agent.turn(lambda: len(agent.lost) > 1)
    agent.live.park([US], 3)
    assert worker.wait_until_asked(PATIENCE, 18, "no peer") and len(agent.lost) == 2
    worker.leave(18, 3)


def test_a_worker_ends_when_its_agent_wants_no_more_of_it(agent: Agent, worker: LiveConnection) -> None:
    worker.enter(0, PATIENCE)
    worker.leave(17, 3)
    agent.live.worker_ended(WorkerExit(0, 0, US, -9, 1.0, False))
    with pytest.raises(SystemExit) as ended:
        worker.enter(3, PATIENCE)
    assert ended.value.code == ENDED


# -- processes ----------------------------------------------------------------------------------------------------------------------

SPEAKS = "import sys\nprint('first', file=sys.stderr, flush=True)\nopen(FIFO, 'w').write('.')\nopen(FIFO + '2').read(1)\n"
SPEAKS += "print('second', file=sys.stderr, flush=True)\n"


def test_a_parked_worker_goes_on_in_the_next_round_with_its_output(loop: Loop, fifo: Fifo) -> None:
    os.mkfifo(fifo.path + "2")
    loop.start(spec(with_fifo(SPEAKS + FOREVER, fifo)), spec(FOREVER, 1))
    fifo.read(1)
    first, second = (loop.workers.processes[at].pid for at in (0, 1))
    loop.workers.stop(PATIENCE, signal.SIGTERM, [first])
    loop.run(lambda: loop.exits)
    assert [end.pid for end in loop.exits] == [second] and not loop.idle
    loop.workers.park(first)
    loop.run(lambda: loop.idle)
    assert not loop.workers.running and loop.workers.deadline is None and [*loop.workers.parked] == [0]
    specs = [spec(FOREVER), spec(FOREVER, 1)]
    going_on: list[int] = []
    loop.workers.start(specs, loop.logs.open_round(1, specs, going_on=[0]), lambda: going_on.extend(loop.workers.processes))
    assert going_on == [0], "before the other one is started"
    assert loop.workers.processes[0].pid == first and loop.workers.processes[1].pid != second
    word = os.open(fifo.path + "2", os.O_RDWR)  # waits for no reader: without the rule there may be none
    os.write(word, b".")
    loop.run(lambda: "second" in loop.logs.last_lines(0))
    os.close(word)
    assert loop.logs.last_lines(0) == ("first", "second") and loop.idle == 1


def test_a_parked_worker_holds_up_nobody(slow: Loop, clock: FakeClock) -> None:
    """Its pipes stay open, and are not waited for."""
    slow.start(spec(FOREVER))
    pid = slow.workers.processes[0].pid
    slow.workers.stop(PATIENCE, signal.SIGTERM, [pid])
    slow.workers.park(pid)
    assert slow.idle == 1


def test_a_worker_that_does_not_park_in_time_is_killed(loop: Loop) -> None:
    loop.start(spec(FOREVER))
    pid = loop.workers.processes[0].pid
    loop.workers.stop(0.05, signal.SIGTERM, [pid])
    loop.run(lambda: loop.idle)
    assert [(end.pid, end.code, end.killed_by_us) for end in loop.exits] == [(pid, -9, True)] and not loop.workers.parked


def test_a_parked_worker_that_dies_is_reported_and_its_place_is_free(loop: Loop) -> None:
    loop.start(spec(FOREVER))
    pid = loop.workers.processes[0].pid
    loop.workers.stop(PATIENCE, signal.SIGTERM, [pid])
    loop.workers.park(pid)
    loop.run(lambda: loop.idle)
    os.kill(pid, signal.SIGKILL)
    loop.run(lambda: loop.exits)
    assert not loop.workers.parked and loop.idle == 1
    loop.start(spec(FOREVER))
    assert loop.workers.processes[0].pid != pid


def test_parked_workers_are_stopped_when_there_is_no_next_round(loop: Loop) -> None:
    loop.start(spec(FOREVER))
    pid = loop.workers.processes[0].pid
    loop.workers.stop(PATIENCE, signal.SIGTERM, [pid])
    loop.workers.park(pid)
    loop.run(lambda: loop.idle)
    loop.workers.stop(PATIENCE)
    assert loop.workers.running
    loop.run(lambda: loop.idle == 2)
    assert [(end.pid, end.code) for end in loop.exits] == [(pid, -15)]


def test_what_others_have_left_behind_is_ended_while_a_worker_is_parked(tmp_path: Path) -> None:
    """The sweep after a round spares parked workers and what these have started."""
    code = f"""
import os, selectors, signal, subprocess, sys, time
from elastirun.agent.processes.process_tree import ProcessTree
tree = ProcessTree("job", 0.0, selectors.PollSelector(), print)
started = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True) for _ in range(2)]
tree.add_workers([one.pid for one in started])
tree.kill_left_behind([started[0].pid])
assert started[1].wait({PATIENCE}) == -9 and started[0].poll() is None
tree.kill_left_behind()
assert started[0].wait({PATIENCE}) == -9
tree.close()
"""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env={**os.environ, "TMPDIR": str(tmp_path)}, timeout=PATIENCE, text=True)
    assert done.returncode == 0

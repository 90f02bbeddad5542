"""A stranger at the store of a running job: no byte of it runs, crashes or hangs an agent, and each attack ends as SECURITY.md says.

Who reaches a TCPStore can do all that any client can. Here it overwrites, deletes, appends and floods while real agents run.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import select
import signal
import socket
import struct
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from elastirun.errors import BadRecord
from elastirun.rendezvous.stores.tcp import TcpStore
from elastirun.rendezvous.stores.torch_class import tcp_store_class
from elastirun.rendezvous.wire.actions import Sync
from elastirun.rendezvous.wire.codec import Codec
from elastirun.rendezvous.wire.records import Broken, Cause, Closed, ExitRecord, NodeRow, RoundRecord, Status, Verdict
from elastirun.rendezvous.wire.sync import SyncProtocol
from tests.support.cluster import PATIENCE, Cluster, Worker

JOB = "elastirun/job/test/"
TOKEN = b"0123456789abcdef"
LOST = "giving up: the rendezvous store lost this job: it began anew, or its keys were deleted"
ROOM = 160 << 10  # KiB that an agent may grow by: the largest value in these tests is 7 MiB, and each is read several times


class Trap:
    """Unpickled, it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


class Stranger:
    """A client of the job's store, which reads records with ``codec`` and may write whatever it likes."""

    def __init__(self, port: int, codec: Codec) -> None:
        self.port, self.codec = port, codec
        self.reader = TcpStore("127.0.0.1", port)
        self.client = self.connect()

    def connect(self) -> Any:
        return tcp_store_class()("127.0.0.1", self.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))

    def put(self, key: str, value: bytes) -> None:
        self.client.set(key, value)
        self.client.check([key])  # an answer: it has arrived

    def peek(self, key: str) -> bytes:
        return self.reader.get([key]).get(key, b"")

    def rows(self) -> dict[str, NodeRow]:
        """By key, those that stand there as their nodes wrote them."""
        found = {}
        for key, data in self.reader.under(JOB + "node/").items():
            try:
                found[key] = self.codec.decode(key, data, NodeRow)
            except BadRecord:
                continue
        return found

    def record(self) -> RoundRecord:
        return self.codec.decode(JOB + "round", self.peek(JOB + "round"), RoundRecord)

    def await_beats(self, keys: list[str], beats: int = 4) -> None:
        """Wait until each node has polled the store and written its own row ``beats`` more times."""
        last: dict[str, int] = {}
        left = dict.fromkeys(keys, beats)
        deadline = time.monotonic() + PATIENCE
        while any(left.values()):
            assert time.monotonic() < deadline, f"no keep-alive of {left}"
            for key in keys:
                try:
                    seq = self.codec.decode(key, self.peek(key), NodeRow).seq
                except BadRecord:
                    continue
                if last.setdefault(key, seq) != seq:
                    last[key], left[key] = seq, max(0, left[key] - 1)
            time.sleep(0.05)


@dataclasses.dataclass
class Job:
    """Two agents with a worker each."""

    nodes: Cluster
    agents: list[subprocess.Popen[str]]
    workers: list[Worker]
    stranger: Stranger
    keys: list[str]  # of the two nodes' rows
    before: list[int]  # KiB of memory of each agent

    def assert_undisturbed(self) -> None:
        """The workers that ran at first still run, and no other has been started."""
        self.stranger.await_beats(self.keys)
        assert [agent.poll() for agent in self.agents] == [None, None], self.nodes.everything()
        ends = [self.nodes.listening, *(worker.connection for worker in self.workers)]
        ready, _, _ = select.select(ends, [], [], 0)
        assert self.nodes.listening not in ready, f"another worker was started\n{self.nodes.everything()}"
        assert not ready, f"a worker was ended\n{self.nodes.everything()}"
        self.assert_not_grown()

    def assert_not_grown(self) -> None:
        for agent, before in zip(self.agents, self.before, strict=True):
            if agent.poll() is None:
                assert peak(agent) < before + ROOM

    def succeed(self) -> None:
        for worker in self.workers:
            worker.tell("exit 0")
        self.end([0, 0])

    def end(self, codes: list[int]) -> None:
        """Both agents end like this; whatever happened, neither has met a bug."""
        assert [self.nodes.ends(agent) for agent in self.agents] == codes, self.nodes.everything()
        for i in (1, 2):
            for word in ("Traceback", "internal error"):
                assert word not in self.nodes.out(i), self.nodes.everything()
            said = self.nodes.out(i).replace("\n", "")
            assert said.isprintable(), f"what a stranger wrote reached the terminal: {said!r}"


def peak(agent: subprocess.Popen[str]) -> int:
    """The most memory that the agent has had, in KiB."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{agent.pid}/status").read_text())[1])  # type: ignore[index]


def start(nodes: Cluster, *options: str, token: bytes | None = None, expire: int = 60) -> Job:
    """Start a job. ``expire`` is long where no silence matters, so that no node is lost because this machine is busy."""
    codec = Codec(token)
    if token is not None:
        secret = nodes.tmp_path / "token"
        secret.write_bytes(token)
        secret.chmod(0o600)
        options += (f"--token-file={secret}",)
    agents = [nodes.agent(i, "--last-call=60", f"--expire={expire}", *options, nnodes="1:2") for i in (1, 2)]
    workers = nodes.round(2)
    stranger = Stranger(nodes.port, codec)
    round_now = SyncProtocol(JOB, "stranger", codec, time.monotonic).carry_out(stranger.reader, Sync(rows=()), 0.0).round
    assert round_now is not None
    return Job(nodes, agents, workers, stranger, [f"{JOB}node/{m.id}" for m in round_now.members], [peak(agent) for agent in agents])


def garbage(trap: Path) -> list[bytes]:
    return [
        *(pickle.dumps(Trap(trap), protocol) for protocol in (0, 2, 5)),
        b"",
        b"\x00\xff\x1b[2J" * 50,
        b"[" * 50_000,
        b'{"v":3}',
        b"9" * 50_000,
        b"\n" * 50_000,
        b"x" * (7 << 20),  # the largest that the store takes at once
    ]


def forged(record: RoundRecord, row: NodeRow) -> list[tuple[str, Any]]:
    """Well-formed records that would end the round, were they believed."""
    left = dataclasses.replace(row, seq=row.seq + 10, status=Status.LEFT, note="bye")
    twin = dataclasses.replace(row, id="stranger", name="stranger", status=Status.JOINING, slots=4096)
    return [(f"{JOB}node/{row.id}", left), (JOB + "node/stranger", twin), (JOB + "node/\x1b[2J", dataclasses.replace(twin, id="\x1b[2J"))]


# -- with a token --------------------------------------------------------------------------------------------------------------


def test_with_a_token_no_forged_row_and_no_garbage_in_any_row_disturbs_the_job(nodes: Cluster) -> None:
    job = start(nodes, token=TOKEN)
    stranger, trap = job.stranger, nodes.tmp_path / "trap"
    for i, signer in enumerate((Codec(), Codec(b"another token 16"))):
        for key, value in forged(stranger.record(), stranger.rows()[job.keys[i]]):
            stranger.put(key, signer.encode(key, value))
            stranger.client.append(JOB + "node/~index", f"\n{key}\n")
    job.assert_undisturbed()
    members = f"{JOB}members/{stranger.record().members_digest}"
    lists = [JOB + "node/~index", JOB + "~index", "elastirun/host", "elastirun/jobs/test", "elastirun/jobs/~index"]
    for value in garbage(trap):  # a node writes its own row anew with its next keep-alive
        for key in (*job.keys, members, *lists):
            stranger.put(key, value)
    job.assert_undisturbed()
    for key in (*job.keys, JOB + "node/~index"):
        stranger.client.delete_key(key)
    job.assert_undisturbed()
    job.succeed()
    assert not trap.exists()


def test_with_a_token_a_forged_round_ends_nothing_and_the_job_goes_on_when_the_true_one_is_back(nodes: Cluster) -> None:
    job = start(nodes, "--store-succession=proof", token=TOKEN, expire=3)
    stranger, key = job.stranger, JOB + "round"
    record, true = stranger.record(), stranger.peek(JOB + "round")
    closed, over = Closed(Verdict.FAILED, "forged", "stranger"), Broken(Cause.LEAVE, "forged", "stranger")
    stranger.put(key, Codec().encode(key, dataclasses.replace(record, version=99, closed=closed)))
    for i in (1, 2):
        nodes.says(i, "the round record is unreadable: elastirun/job/test/round: not signed with this node's token")
    stranger.put(key, Codec(b"another token 16").encode(key, dataclasses.replace(record, version=99, broken=over)))
    stranger.put(key, true)
    for i in (1, 2):
        nodes.says(i, "the store is back")
    job.assert_undisturbed()
    job.succeed()


# -- without one, or beyond what it can do ----------------------------------------------------------------------------------------


def test_the_nodes_leave_a_store_whose_round_stays_forged(nodes: Cluster) -> None:
    job = start(nodes, token=TOKEN, expire=4)
    job.stranger.put(JOB + "round", Codec().encode(JOB + "round", job.stranger.record()))
    job.workers = nodes.round(2, after=job.workers[0].round)
    nodes.says(2, "the store moves to 127.0.0.")
    job.succeed()


def test_a_node_with_another_token_or_none_ends_soon_and_the_job_goes_on(nodes: Cluster) -> None:
    secrets = {2: nodes.tmp_path / "first", 3: nodes.tmp_path / "second"}
    for i, path in secrets.items():
        path.write_bytes(b"%d" % i * 16)
        path.chmod(0o600)
    nodes.agent(1, f"--token-file={secrets[2]}", "--last-call=0", "--expire=1")
    (worker,) = nodes.round(1)
    other = nodes.agent(2, f"--token-file={secrets[3]}", "--expire=1")
    none = nodes.agent(3, "--expire=1")
    assert [nodes.ends(other), nodes.ends(none)] == [3, 3]
    assert "not signed with this node's token (is --token-file the same on every node?)" in nodes.out(2)
    assert "signed, but this node has no token (give the job's --token-file)" in nodes.out(3)
    worker.tell("exit 0")
    assert nodes.ends(nodes.agents[0]) == 0


@pytest.mark.daily(2)
@pytest.mark.parametrize("token", [TOKEN, None], ids=["token", "no token"])
def test_a_round_record_that_stays_unreadable_ends_the_job_after_the_store_grace(nodes: Cluster, token: bytes | None) -> None:
    job = start(nodes, "--store-grace=2", token=token)
    trap = nodes.tmp_path / "trap"
    job.stranger.put(JOB + "round", pickle.dumps(Trap(trap)))
    for worker in job.workers:
        worker.await_death()
    job.end([201, 201])
    for i in (1, 2):
        assert re.search(r"giving up: the rendezvous store was away for \d+ s: the round record is unreadable", nodes.out(i))
    assert not trap.exists()


def test_a_round_record_that_is_deleted_ends_the_job_at_once(nodes: Cluster) -> None:
    job = start(nodes, "--store-succession=off", token=TOKEN)
    job.stranger.client.delete_key(JOB + "round")
    for worker in job.workers:
        worker.await_death()
    job.end([201, 201])
    for i in (1, 2):
        assert LOST in nodes.out(i)


def test_when_the_round_record_is_deleted_the_others_go_on_without_the_store(nodes: Cluster) -> None:
    job = start(nodes, token=TOKEN)
    job.stranger.client.delete_key(JOB + "round")
    after = nodes.round(1, after=job.workers[0].round)
    assert nodes.ends(job.agents[0]) == 201 and LOST in nodes.out(1)
    after[0].tell("exit 0")
    assert nodes.ends(job.agents[1]) == 0


@pytest.mark.daily(3)
@pytest.mark.parametrize("kind", ["runs", "is broken", "has failed"])
def test_a_signed_round_of_an_earlier_run_ends_the_job(nodes: Cluster, kind: str) -> None:
    """All nodes read that the store has another job, of whose nodes they are none. See SECURITY.md."""
    job = start(nodes, token=TOKEN)
    earlier = dataclasses.replace(job.stranger.record(), store_id="an earlier run")
    if kind == "is broken":
        earlier = dataclasses.replace(earlier, broken=Broken(Cause.LEAVE, "left", "n"))
    elif kind == "has failed":
        earlier = dataclasses.replace(earlier, closed=Closed(Verdict.FAILED, "failed", "n"))
    job.stranger.put(JOB + "round", Codec(TOKEN).encode(JOB + "round", earlier))
    for worker in job.workers:
        worker.await_death()
    job.end([201, 201])


@pytest.mark.daily(2)
def test_an_older_signed_round_that_is_put_back_is_not_obeyed(nodes: Cluster) -> None:
    """It names a round that ran before: the number, and with it the fence, would come a second time."""
    job = start(nodes, "--max-restarts=3", "--store-succession=proof", token=TOKEN, expire=3)
    old = job.stranger.peek(JOB + "round")
    job.workers[1].tell("exit 3")
    job.workers = nodes.round(2, after=1)
    job.stranger.await_beats(job.keys, 2)
    true, rows = job.stranger.peek(JOB + "round"), [job.stranger.peek(key) for key in job.keys]
    job.stranger.put(JOB + "round", old)
    for i in (1, 2):
        nodes.says(i, "somebody has put back an older round record: version 2 after 4")
    job.stranger.put(JOB + "round", true)
    for i in (1, 2):
        nodes.says(i, "the store is back")
    job.assert_undisturbed()
    for key, row in zip(job.keys, rows, strict=True):
        job.stranger.put(key, row)  # an older row is written over
    job.assert_undisturbed()
    job.succeed()


def test_without_a_token_a_forged_verdict_ends_the_job_as_it_says_with_a_report(nodes: Cluster) -> None:
    job = start(nodes)
    stranger = job.stranger
    failure = ExitRecord("n", 2**53, -(2**53), 0, -(2**53), -5, 2.0**53, ("\x1b[2J\ud800\x00",) * 50, "why")
    closed = Closed(Verdict.FAILED, "because", "stranger", (failure,) * 100)
    stranger.put(JOB + "round", stranger.codec.encode(JOB + "round", dataclasses.replace(stranger.record(), closed=closed)))
    for worker in job.workers:
        worker.await_death()
    job.end([1, 1])
    assert "reason    : because" in nodes.out(1) and "time      : unknown" in nodes.out(2)


# -- floods ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.daily(2)
def test_thousands_of_keys_neither_disturb_a_round_nor_prevent_the_next(nodes: Cluster) -> None:
    job = start(nodes, token=TOKEN)
    stranger = job.stranger
    keys = [f"{JOB}node/flood{i}" for i in range(4000)]
    for first in range(0, len(keys), 500):
        stranger.client.multi_set(keys[first : first + 500], ["x" * 200] * 500)
    stranger.client.append(JOB + "node/~index", "".join(f"\n{key}\n" for key in keys))
    stranger.client.append(JOB + "node/~index", "".join(f"\n{JOB}node/invented{i}\n" for i in range(2000)))
    for i in range(500):
        stranger.put(f"elastirun/jobs/{i}", b"x")
    job.assert_undisturbed()
    job.agents[1].send_signal(signal.SIGTERM)
    assert nodes.ends(job.agents[1]) == 143
    (alone,) = nodes.round(1, after=1)
    job.assert_not_grown()
    alone.tell("exit 0")
    job.end([0, 143])


@pytest.mark.daily(2)
def test_an_index_beyond_all_bounds_delays_the_next_round_is_reported_and_a_signal_still_ends_the_job(nodes: Cluster) -> None:
    job = start(nodes, token=TOKEN, expire=5)  # an agent reports trouble with the store after 5 s
    stranger = job.stranger
    lines = "".join(f"\n{JOB}node/{i}\n" for i in range(150_000))
    stranger.client.append(JOB + "node/~index", lines)
    job.assert_undisturbed()
    job.workers[0].tell("exit 3")
    nodes.says(1, "somebody floods the store")
    for agent in job.agents:
        agent.send_signal(signal.SIGTERM)
    job.assert_not_grown()
    job.end([143, 143])


def test_what_is_no_client_at_all_disturbs_nobody(nodes: Cluster) -> None:
    """Raw bytes at the store's port: noise, connections that say nothing, lengths of a terabyte."""
    job = start(nodes)
    validate = bytes([9]) + struct.pack("<I", 0x3C85F7CE)  # how torch's clients begin
    huge = struct.pack("<Q", 1 << 40)
    openings = [b"", b"\xff" * 3000, b"GET / HTTP/1.1\r\n\r\n", validate, validate + b"\x00" + huge, validate + b"\x08" + huge + huge]
    openings += [validate + bytes([i]) + struct.pack("<Q", 3) + b"abc" + huge for i in range(20)]
    held = []
    for opening in openings * 4:
        connection = socket.create_connection(("127.0.0.1", nodes.port), PATIENCE)
        connection.sendall(opening)
        held.append(connection)
    job.assert_undisturbed()
    for connection in held:
        connection.close()
    job.assert_undisturbed()
    job.succeed()

"""Two jobs that wait for nodes at one endpoint: each tells people of the other, since one of the ids may be a mistake."""

from __future__ import annotations

from elastirun.agent.store import shared_store
from elastirun.agent.store.other_jobs import MOST_JOBS, waiting_jobs
from elastirun.rendezvous.stores.memory import MemoryStore
from elastirun.rendezvous.wire.codec import Codec
from elastirun.rendezvous.wire.records import RoundRecord
from tests.support.cluster import Cluster

SIGNED = Codec(b"a token of the other job")


def test_each_of_two_that_wait_is_told_of_the_other(nodes: Cluster) -> None:
    """As of --rdzv-id=$RANDOM, which the shell of each node makes another number."""
    for i in (1, 2):
        where = (f"--rdzv-endpoint=127.0.0.1:{nodes.port}", f"--rdzv-conf=is_host={int(i == 1)}", f"--local-addr=127.0.0.{i}")
        nodes.launch(i, "--nnodes=2", f"--rdzv-id={i}000", *where, str(nodes.script))
    for i, other in ((1, 2), (2, 1)):
        nodes.says(i, f"job '{other}000' waits for its nodes at 127.0.0.1:{nodes.port}, too, and this one is '{i}000'; if the two are one")
        assert nodes.out(i).count("waits for its nodes at") == 1, "it is said once"


def put(store: MemoryStore, key: str, value: bytes) -> None:
    store.put_if(key, store.get([key]).get(key), value)


def look_twice(record: RoundRecord | None, codec: Codec | None = None, between: bytes = b"2") -> list[str]:
    """Return which jobs are found to wait beside "mine", when "an other" has this record and a row that changes to ``between``."""
    store, seen = MemoryStore(), dict[str, dict[str, bytes]]()
    for job in ("mine", "an other"):
        shared_store.register(store, job)
        put(store, f"{shared_store.prefix(job)}node/n", b"1")
    if record is not None:
        key = f"{shared_store.prefix('an other')}round"
        put(store, key, (codec or Codec()).encode(key, record))
    assert waiting_jobs(store, "mine", seen) == []
    for job in ("mine", "an other"):
        put(store, f"{shared_store.prefix(job)}node/n", between)
    return waiting_jobs(store, "mine", seen)


def test_only_a_job_that_lives_and_has_had_no_round_waits() -> None:
    assert look_twice(None) == look_twice(RoundRecord("s")) == look_twice(RoundRecord("s"), SIGNED) == ["an other"]
    assert look_twice(RoundRecord("s", round=1)) == look_twice(RoundRecord("s", round=12), SIGNED) == []
    assert look_twice(None, between=b"1") == [], "its nodes have ended"


def test_an_endpoint_with_many_jobs_is_not_searched_through() -> None:
    store, seen = MemoryStore(), dict[str, dict[str, bytes]]()
    for number in range(3 * MOST_JOBS):
        shared_store.register(store, f"job{number}")
    waiting_jobs(store, "mine", seen)
    assert len(seen) == MOST_JOBS

"""The host of a store stays while other jobs use the store, also for jobs that come while it stays."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from elastirun import clock
from elastirun.agent.agent import Agent
from elastirun.agent.store import shared_store
from elastirun.rendezvous.stores.memory import MemoryStore

RUNNING, LEFT = b'{"status":"running","seq":%d}', b'{"status":"left"}'


def stay(store: MemoryStore, script: list[Callable[[], object]]) -> tuple[int, list[str]]:
    """How often it looked, and what it said; at each pause the next step of ``script`` is taken, none at all after its end."""
    steps, said = iter(script), list[str]()
    looks = 0

    def pause(seconds: float) -> bool:
        nonlocal looks
        looks += 1
        next(steps, lambda: None)()
        return looks > 1000

    shared_store.wait_for_other_jobs(store, "mine", pause, said.append)
    return looks, said


def put(store: MemoryStore, job: str, row: bytes) -> None:
    key = f"{shared_store.prefix(job)}node/n"
    store.put_if(key, store.get([key]).get(key), row)


def test_nobody_else_nobody_to_wait_for() -> None:
    store = MemoryStore()
    shared_store.register(store, "mine")
    assert stay(store, []) == (0, [])


def test_stays_until_the_other_has_left_and_for_one_that_comes_meanwhile() -> None:
    store = MemoryStore()
    for job in ("mine", "second"):
        shared_store.register(store, job)
    put(store, "second", RUNNING % 1)
    script: list[Callable[[], object]] = [
        lambda: shared_store.register(store, "third"),  # it has no row yet
        lambda: put(store, "second", LEFT),
        lambda: put(store, "third", RUNNING % 1),
        lambda: put(store, "third", RUNNING % 2),
        lambda: put(store, "third", LEFT),
    ]
    looks, said = stay(store, script)
    assert looks == 5
    assert [text.split("job ")[-1].split(" (")[0] for text in said] == ["second", "second, third"]


def test_does_not_stay_for_one_that_is_silent() -> None:
    store = MemoryStore()
    shared_store.register(store, "dead")
    put(store, "dead", RUNNING % 1)
    looks, _ = stay(store, [])
    assert looks * shared_store.READ_EVERY == shared_store.QUIET


@pytest.mark.parametrize("name", ["jobs", "host"])
def test_a_job_may_have_the_name_of_the_list_of_jobs(name: str) -> None:
    store = MemoryStore()
    shared_store.register(store, "mine")
    shared_store.register(store, name)
    assert stay(store, [lambda: put(store, name, LEFT)])[0] == 1
    assert [key for key in store.under(shared_store.prefix(name)) if "/node/" not in key] == [], "nothing else is among the job's keys"


def test_a_pause_lasts_although_something_keeps_the_loop_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a job whose rows did not change within a few short pauses would lose its store."""
    agent, turns, now = SimpleNamespace(_signum=0), list[float](), [7.0]
    monkeypatch.setattr(clock, "now", lambda: now[0])
    agent._turn = lambda until: (turns.append(until), now.__setitem__(0, now[0] + 0.03))
    assert not Agent._pause(cast(Agent, agent), 0.1)
    assert turns == [7.1] * 4
    agent._turn = lambda until: setattr(agent, "_signum", 15)
    assert Agent._pause(cast(Agent, agent), 600.0)

"""The part of ``elastirun check`` before the nodes have met: a store that cannot be reached, or has moved."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from elastirun.agent.check import run
from elastirun.agent.check.run import Asked
from elastirun.config import Command, Endpoint, LaunchConfig
from elastirun.errors import StoreError, StoreMoved, StoreRefused
from tests.agent.test_check_verdict import SOUND

CONFIG = LaunchConfig(command=Command("t.py"), nproc=1, min_nodes=2, max_nodes=2, run_id="job", endpoint=Endpoint("node0", 29400))


class Broken:
    """A way to a store that cannot be opened."""

    key_prefix, serves_standby, host_failure = "job/", True, ""

    def __init__(self, *errors: StoreError) -> None:
        self.errors = [*errors]

    def connect(self, at: object) -> object:
        raise self.errors.pop(0)

    def end_store(self) -> None:
        pass


def take_part(access: Broken, monkeypatch: pytest.MonkeyPatch, lines: list[str], limit: float = 60.0) -> tuple[str, ...]:
    """Return the findings of a node with this way to the store, as text."""
    monkeypatch.setattr(run, "store_access", lambda config: access)
    monkeypatch.setattr(run, "RETRY", 0.0)
    with ExitStack() as stack:
        node = run._Node(CONFIG, Asked(torch=False, limit=limit), SOUND, "n", {}, stack)
        return tuple(one.text for one in node.take_part(lines.append).findings)


def test_where_the_job_has_moved_a_node_checks_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    access = Broken(StoreError("connection refused"), StoreMoved("the store is elsewhere", None))
    assert take_part(access, monkeypatch, lines) == () and not access.serves_standby
    assert lines == ["the job has begun already, so only this node is checked"]


def test_a_store_that_refuses_this_node_or_cannot_be_served_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match="cannot reach the place where the nodes meet: wrong password"):
        take_part(Broken(StoreRefused("wrong password")), monkeypatch, [])
    access = Broken(StoreError("another process has that port"))
    access.host_failure = "another process has that port"
    with pytest.raises(StoreError, match="another process has that port"):
        take_part(access, monkeypatch, [])


def test_the_last_reason_is_told_when_the_limit_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SAY_AFTER", 0.0)
    lines: list[str] = []
    errors = [StoreError("connection refused") for _ in range(100_000)]
    with pytest.raises(StoreError, match="cannot reach the place where the nodes meet: connection refused"):
        take_part(Broken(*errors), monkeypatch, lines, limit=0.05)
    assert lines == ["waits for the store: connection refused"]

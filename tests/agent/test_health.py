"""The pages of the health port, made from snapshots, and what a snapshot shows of an agent's parts."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from elastirun.agent.observe.account import Totals
from elastirun.agent.observe.node_states import NodeState
from elastirun.agent.observe.round_ends import ended_rounds
from elastirun.agent.observe.step_rates import WorkerSteps
from elastirun.agent.status.health import BY_ROW, CAUSES, PAGES, STATES, Snapshot
from elastirun.rendezvous.wire.records import Broken, Cause, Closed, Member, RoundRecord, Status, Verdict

NOW = Snapshot(
    state=NodeState.RUNNING,
    version="1.2.3",
    job='job "7"\n',
    node="node0",
    address="10.0.0.1",
    node_rank=1,
    round=3,
    reason="node2 joined",
    world_size=16,
    nodes=("node1", "node0"),
    min_nodes=1,
    max_nodes=4,
    joins_waiting=1,
    failures=1,
    max_restarts=3,
    failures_caused=5,
    strikes=2,
    hangs=4,
    restarts={**dict.fromkeys(CAUSES, 0), "failure": 2},
    seconds_since_round_start=12.5,
    seconds_since_keep_alive=0.25,
    hosts_store=False,
    finished=(8,),
    workers={"running": 7, "stopping": 0, "ended": 1},
    checkpoints_held_bytes=1 << 30,
    steps=(WorkerSteps(9, 1, 120, 0.5, 2.0, 1.75), WorkerSteps(10, 2, 121, 0.25, None)),
    account=Totals(100.0, 0.8, {"training": 80.0, "restarting": 20.0, "repeated": None}, {"failure": 20.0}, {"failure": 2}, True),
)


def metrics(now: Snapshot) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """The samples of /metrics by name and labels, as Prometheus' own client reads them."""
    page = PAGES["/metrics"](now)
    assert page.status == 200 and page.content_type.startswith("text/plain; version=")
    families = text_string_to_metric_families(page.body.decode())
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for family in families for sample in family.samples}


def test_metrics_are_what_prometheus_reads() -> None:
    found = metrics(NOW)
    assert found[("elastirun_info", (("host", "node0"), ("run_id", 'job "7"\n'), ("version", "1.2.3")))] == 1
    for state in STATES:
        assert found.pop(("elastirun_state", (("state", state),))) == (state == "running")
    for cause in CAUSES:
        assert found.pop(("elastirun_restarts_total", (("cause", cause),))) == 2 * (cause == "failure")
    for state, count in NOW.workers.items():
        assert found.pop(("elastirun_workers", (("state", state),))) == count
    for worker in NOW.steps:
        labels = (("local_rank", str(worker.local_rank)),)
        assert found.pop(("elastirun_worker_steps_total", labels)) == worker.steps
        assert found.pop(("elastirun_worker_step_age_seconds", labels)) == worker.seconds_since_step
    assert found[("elastirun_worker_times_median", (("local_rank", "1"),))] == 1.75
    assert ("elastirun_worker_times_median", (("local_rank", "2"),)) not in found, "it is no straggler"
    assert {labels: value for (name, labels), value in found.items() if name == "elastirun_spent_seconds"} == {
        (("on", "training"),): 80.0,
        (("on", "restarting"),): 20.0,
    }
    for cause in CAUSES:  # 0 from the beginning: the first loss is an increase, too
        assert found.pop(("elastirun_lost_seconds", (("cause", cause),))) == 20.0 * (cause == "failure")
    assert {name: value for (name, labels), value in found.items() if not labels} == {
        "elastirun_round": 3,
        "elastirun_world_size": 16,
        "elastirun_nodes": 2,
        "elastirun_failures": 1,
        "elastirun_max_restarts": 3,
        "elastirun_hangs_total": 4,
        "elastirun_stragglers": 1,
        "elastirun_joins_waiting": 1,
        "elastirun_failures_caused_total": 5,
        "elastirun_strikes": 2,
        "elastirun_goodput_ratio": 0.8,
        "elastirun_round_age_seconds": 12.5,
        "elastirun_keep_alive_age_seconds": 0.25,
        "elastirun_checkpoints_held_bytes": 1 << 30,
    }


def test_before_the_first_round_there_is_no_time_since_its_start() -> None:
    found = metrics(replace(NOW, seconds_since_round_start=None))
    assert "elastirun_round_age_seconds" not in [name for name, _ in found]


def test_a_node_whose_workers_do_not_stamp_has_no_steps() -> None:
    assert not [name for name, _ in metrics(replace(NOW, steps=())) if "step" in name]


def test_without_prometheus_client_metrics_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("prometheus_client")]:
        monkeypatch.setitem(sys.modules, name, None)
    page = PAGES["/metrics"](NOW)
    assert page.status == 501 and b"pip install '.[metrics]'" in page.body and page.body.count(b"\n") == 1


def test_status_is_the_snapshot() -> None:
    page = PAGES["/status"](NOW)
    assert page.status == 200 and page.content_type == "application/json"
    nested = {"nodes": list(NOW.nodes), "finished": [8], "steps": [vars(worker) for worker in NOW.steps], "account": vars(NOW.account)}
    assert json.loads(page.body) == {**vars(NOW), **nested}


@pytest.mark.parametrize("state", STATES)
def test_an_agent_is_healthy_in_each_state_and_ready_when_a_round_runs(state: NodeState) -> None:
    now = replace(NOW, state=state)
    assert (PAGES["/healthz"](now).status, PAGES["/healthz"](now).body) == (200, f"{state}\n".encode())
    assert (PAGES["/readyz"](now).status, PAGES["/readyz"](now).body) == (200 if state == "running" else 503, f"{state}\n".encode())


def test_each_status_of_a_row_has_a_state() -> None:
    assert set(BY_ROW) == set(Status)


ONE, TWO, FIVE = (RoundRecord("s", round=number) for number in (1, 2, 5))
BROKEN = Broken(Cause.LOST, "silent", "n1")
TWO_NODES = tuple(Member(name, name, "", 1, 1) for name in ("n1", "n2"))
FAILED = RoundRecord("s", round=1, members=TWO_NODES, broken=Broken(Cause.FAILURE, "failed", "n1"))
FAILED_AND_LOST = replace(FAILED, broken=Broken(Cause.FAILURE, "failed", "n1", ("n2",)))
WITHOUT_N2 = replace(TWO, members=TWO_NODES[:1])


@pytest.mark.parametrize(
    ("old", "new", "causes"),
    [
        (None, ONE, []),
        (None, replace(TWO, broken=BROKEN), []),  # what was before this agent does not count
        (RoundRecord("s"), ONE, []),
        (ONE, ONE, []),
        (ONE, replace(ONE, broken=BROKEN), ["lost"]),
        (replace(ONE, broken=BROKEN), replace(ONE, broken=BROKEN, version=9), []),
        (replace(ONE, broken=BROKEN), TWO, []),
        (ONE, TWO, ["unknown"]),
        (ONE, replace(TWO, broken=BROKEN), ["unknown", "lost"]),
        (ONE, FIVE, ["unknown"] * 4),
        (replace(TWO, broken=BROKEN), FIVE, ["unknown"] * 2),
        (replace(TWO, broken=BROKEN), replace(ONE, broken=BROKEN, term=1), []),  # who took over had not read round 2
        (ONE, FAILED, []),  # a failure is judged when the next round forms
        (FAILED, replace(TWO, members=TWO_NODES, failures=1), ["failure"]),
        (FAILED, replace(WITHOUT_N2, failures=1), ["failure"]),  # the other node has left
        (FAILED, replace(TWO, members=TWO_NODES), ["failure"]),  # as after --restart-window, where the count begins anew
        (FAILED, replace(FAILED, closed=Closed(Verdict.FAILED, "spent", "n1")), ["failure"]),
        (FAILED, FAILED_AND_LOST, ["lost"]),
        (FAILED_AND_LOST, WITHOUT_N2, []),
        (FAILED, WITHOUT_N2, ["lost"]),  # the record that names it was not read
        (FAILED, FIVE, ["failure", *["unknown"] * 3]),
        (FAILED, replace(TWO, failures=1, broken=BROKEN), ["failure", "lost"]),
    ],
)
def test_each_round_that_ended_is_counted_once(old: RoundRecord | None, new: RoundRecord, causes: list[str]) -> None:
    assert ended_rounds(old, new) == causes

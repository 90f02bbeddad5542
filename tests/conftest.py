"""What every test shares: an environment in which no launcher has run yet, and what several of them start."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.daily import resting

if TYPE_CHECKING:
    from tests.support.cluster import Cluster
    from tests.support.etcd_server import Etcd

LAUNCHER_PREFIXES = ("ELASTIRUN_", "GROUP_", "KUBEFLOW_", "KUBERNETES_", "LOCAL_", "MASTER_", "PET_", "ROLE_", "TORCHELASTIC_")
KEPT = "ELASTIRUN_ETCD_BINARY"  # the server that the tests start

for _name in list(os.environ):  # before any test module is imported, so that the processes the tests start do not see them either
    if (_name.startswith(LAUNCHER_PREFIXES) and _name != KEPT) or _name in ("RANK", "WORLD_SIZE"):
        del os.environ[_name]

# TEST_PRELOAD=off, TEST_PRELOAD=torch: the agents that the tests start have this --preload, except where a test says something else
# (make test-executed, make test-forked). Without it see tests/system/conftest.py.
if _preload := os.environ.get("TEST_PRELOAD"):
    os.environ["PET_PRELOAD"] = _preload

# Hundreds of agents and workers start here, and several processes collect the tests: none compiles what another one has compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# TCPStore asks DNS for the name of each peer, for a line in a log. A name server that drops a question costs a second then, not five.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

# A test run under nohup, or in the background of a script, begins with these ignored, and so would all that it starts.
for _signum, _usual in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGQUIT, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(_signum) is signal.SIG_IGN:
        signal.signal(_signum, _usual)

# Files that take longest. They are begun first, those that wait beside those that compute, so that at the end no process is alone with one.
LONGEST = (
    "gpu/test_run.py",
    *("train/test_mutants.py", "deploy/test_containers.py", "system/test_failover.py", "system/test_etcd_agents.py"),
    *("system/test_checkpoints.py", "system/test_elastic.py", "train/test_kinds.py", "system/test_hostile.py", "system/test_example.py"),
    *("rendezvous/test_sim.py", "system/test_planned_stops.py", "system/test_endings.py", "train/test_ways.py"),
    *("agent/test_failure_tracker.py", "train/test_property.py", "system/test_stopping.py", "rendezvous/test_mutants.py"),
    *("deploy/test_slurm.py", "deploy/test_slurm_requeue.py", "deploy/test_slurm_scale.py"),
    *("system/test_chaos.py", "checkpoint/test_mutants.py", "agent/test_process_tree.py", "system/test_restarts.py"),
    *("system/test_silent_loss.py", "agent/test_mutants.py"),
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    later = set(resting(items))
    config.hook.pytest_deselected(items=later)
    items[:] = [item for item in items if item not in later]
    place = {name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get("/".join(item.path.parts[-2:]), len(place)))
    if not os.environ.get("TEST_LONG"):
        skipped = pytest.mark.skip(reason="long: make test-long")
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(skipped)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Cluster]:
    """The agents of one job, each on a loopback address of its own."""
    from tests.support.cluster import cluster

    with cluster(tmp_path) as made:
        yield made


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.daily(2)) for name in ("c10d", "etcd")])
def anywhere(nodes: Cluster, request: pytest.FixtureRequest) -> Cluster:
    """Nodes that meet at one of their agents, or at etcd. Tests take it where the store could make a difference."""
    if request.param == "etcd":
        nodes.etcd = request.getfixturevalue("server").endpoints
    return nodes


@pytest.fixture(scope="module")
def server() -> Iterator[Etcd]:
    """An etcd of one member."""
    from tests.support.etcd_server import etcd

    with etcd() as made:
        yield made

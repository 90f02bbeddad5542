"""A machine that was suspended notices it: its clock goes on, and the agent says that it stood still."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agent.test_net import cannot_unshare
from tests.support.cluster import Cluster, dies
from tests.system.test_endings import with_change

# SIGUSR1 suspends the machine for 12 s, as the agent sees it: afterwards its clock shows 12 s more.
SUSPENDED = """
import signal
from elastirun import clock
from elastirun.agent.workers.workers import Workers
real, suspended = clock.now, []
clock.now = lambda: real() + sum(suspended)
signal.signal(signal.SIGUSR1, lambda *_: suspended.append(12.0))
Workers.forward = lambda *_: suspended.append(12.0)
"""


@pytest.mark.parametrize("option", ["--signals-to-handle=SIGTERM", "--forward-signals=SIGUSR1"], ids=["waits", "handles an event"])
def test_an_agent_that_was_suspended_says_so_and_it_costs_no_restart(nodes: Cluster, option: str) -> None:
    """The guard has the same clock, as far as the agent's messages tell it: it ends the workers, for others may have taken their place."""
    where = (f"--rdzv-endpoint=127.0.0.1:{nodes.port}", "--rdzv-id=test", "--rdzv-conf=is_host=1", "--last-call=0.1")
    options = ("--nnodes=1:2", *where, "--event-log-handler=console", option, str(nodes.script))
    agent = nodes.launch(1, *options, program=with_change(SUSPENDED))
    (worker,) = nodes.round(1)
    agent.send_signal(signal.SIGUSR1)
    assert dies(worker.pid)
    (again,) = nodes.round(1, after=1)
    assert "stood still for 1" in again.env["ELASTIRUN_ROUND_REASON"], "12 s, and what a busy machine adds"
    again.tell("exit 0")
    assert nodes.ends(agent) == 0, "no restart was spent: there is none"
    assert "this agent stood still for 1" in nodes.out(1) and " s; its workers were ended" in nodes.out(1)
    assert '"name": "stood_still"' in nodes.out(1) and '"workers_ended": true' in nodes.out(1)


def test_the_clock_counts_the_time_of_a_suspension() -> None:
    """In a time namespace, whose machine was suspended for 100,000 s more than this one."""
    suspended = ("--map-root-user", "--time", "--boottime=100000")
    if reason := cannot_unshare(*suspended):
        pytest.skip(f"no time namespace: {reason}")
    code = "from elastirun import clock; print(clock.now())"

    def shown(*before: str) -> float:
        done = subprocess.run([*before, sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, check=True)
        return float(done.stdout)

    here = shown()
    assert here + 100_000 <= shown("unshare", *suspended) < here + 200_000

"""Worker after worker killed with -9, real gloo: every restart comes up, although the workers enter the process group at different times.

``benchmarks/restarts.py`` does the same a hundred times, with wider gaps.
"""

from __future__ import annotations

import pytest

from benchmarks.lab import ELASTIRUN
from benchmarks.restarts import kill_in_a_row


@pytest.mark.daily(2)
def test_every_restart_comes_up_at_once() -> None:
    restarts = kill_in_a_row(ELASTIRUN, kills=2, delay=0.5, seed=1, cap=90.0)
    assert [restart.at_once for restart in restarts] == [True] * 2, restarts

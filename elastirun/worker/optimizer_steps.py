"""The steps of torch's optimizers, in a script that tells nothing itself: their stamps, and for how long a rank computes. Needs no torch.

``on_step`` is called behind each step, see agent/processes/preload/forkserver.py. Every two seconds this also reads how long torch's
DistributedDataParallel has computed in a step, where there is one. That module measures it itself, without the communication, in the steps
that its sample rate names: see docs/running.md#stragglers. Nothing of torch is wrapped or replaced.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from time import time_ns
from typing import Any

from elastirun.progress import look_after, sampled, step_of_optimizer
from elastirun.worker.progress_page import NS

FIRST_LOOK = 12  # steps until the module is looked for: torch measures the first ten, which are slower than others
MOST_LOOKS = 3  # for the module, each after ten times as many steps as the one before
PAUSE = 2.0  # seconds between two samples; ten of them lie in a window of the agent
LONGEST_PAUSE = 2000  # steps
SHORTEST_PAUSE = 4  # steps: if fewer lie between two samples, each step is one
MOST_READS = 20  # steps until a sample is given up
EACH, USUAL = 1, 100  # sample rates: of each step, and torch's own

on_step = step_of_optimizer


class ComputeTimes:
    """Takes samples of the times of the one DistributedDataParallel module in this process."""

    def __init__(self) -> None:
        self._looks = 0
        self._found: weakref.ref[Any] | None = None
        self._since = 0  # when each step began to be measured, in nanoseconds of the clock that torch uses; 0: not now
        self._reads = 0  # since then, or since the last sample
        self._before: Mapping[str, int] = {}  # what the module said of the step before
        self._last: deque[float] = deque(maxlen=3)  # samples, in seconds

    def look(self) -> int:
        """Look for the module, begin to measure, or take a sample. Return in how many steps to call again; 0: never."""
        if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":  # torch would log each sample
            return 0
        module = self._found() if self._found else None
        try:
            if _may_hold_lock():
                return 0
            if module is None:
                return self._find()
            return self._read(module) if self._since else self._begin(module)
        except Exception:  # the interface is torch's own, and may change: training goes on without samples
            with suppress(Exception):
                self._end(module, 0)
            return 0

    def _find(self) -> int:
        self._since, self._found = 0, None
        self._looks += 1
        found = _modules()
        if len(found) == 1:
            self._found = weakref.ref(found[0])
            return 1
        return FIRST_LOOK * 10**self._looks if self._looks < MOST_LOOKS else 0

    def _begin(self, module: Any) -> int:
        module._set_ddp_runtime_logging_sample_rate(EACH)
        self._since, self._reads, self._before = time_ns(), 0, {}
        return 1

    def _read(self, module: Any) -> int:
        """Take a sample if there is a new one. The times of a step are known when the forward of the next one has begun."""
        self._reads += 1
        times, before = module.logger._get_ddp_logging_data().ints_map, self._before
        known = times["forward_compute_time_start"] > self._since  # else it is a step that was measured long ago
        if known:
            self._before = times
        if not (known and before and times["iteration"] > before["iteration"]):
            return 1 if self._reads < MOST_READS else self._end(module, LONGEST_PAUSE)
        self._reads = 0
        self._last.append(compute_seconds(before, times, module.device_type == "cpu"))
        if len(self._last) == self._last.maxlen:
            sampled(sorted(self._last)[1])  # a save or a compilation in one of three does not count
        elapsed = max(1, times["forward_compute_time_start"] - before["forward_compute_time_start"])
        pause = min(LONGEST_PAUSE, int(PAUSE * NS * (times["iteration"] - before["iteration"]) / elapsed))
        return 1 if pause < SHORTEST_PAUSE else self._end(module, pause)

    def _end(self, module: Any, pause: int) -> int:
        """Measure as few steps as before, for ``pause`` steps."""
        module._set_ddp_runtime_logging_sample_rate(USUAL)
        self._since = 0
        return pause


def compute_seconds(before: Mapping[str, int], times: Mapping[str, int], on_host: bool) -> float:
    """Return for how long a rank has computed in the step of ``times``, without waiting for others. ``before``: of an earlier step.

    ``on_host``: the times are those of the CPU, so that the time between the two steps can be added: the optimizer, and loading data.
    On a GPU the host may spend that time waiting for the GPU, and so for other ranks. Between steps that do not follow each other
    there is communication.
    """
    found = times["forward_compute_time"] + times["backward_compute_time"]
    if on_host and times["iteration"] == before["iteration"] + 1:
        found += times["forward_compute_time_start"] - before["backward_comm_time_end"]
    return found / NS


def _may_hold_lock() -> bool:
    """Return whether this optimizer may step inside of a backward: then the module may hold the lock that reading its times takes."""
    torch: Any = sys.modules["torch"]
    return threading.current_thread() is not threading.main_thread() or torch._C._current_graph_task_id() != -1


def _modules() -> list[Any]:
    """Return the modules of torch's DistributedDataParallel. Takes milliseconds: in a fork gc knows no objects of the fork server."""
    distributed: Any = sys.modules.get("torch.distributed")
    kind = getattr(sys.modules.get("torch.nn.parallel.distributed"), "DistributedDataParallel", None)
    if kind is None or not distributed.is_available() or not distributed.is_initialized():
        return []
    return [found for found in gc.get_objects() if type(found) is kind]


look_after(FIRST_LOOK, ComputeTimes().look)

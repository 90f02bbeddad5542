"""All-reduces of torch for a check: among the workers of this node, then with one other node at a time, so that a pair is named."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from elastirun.agent.check.records import Arrival, Collective
from elastirun.agent.host import net
from elastirun.errors import StartError
from elastirun.rendezvous.wire.codec import clip

START_LIMIT = 60.0  # seconds for importing torch: a cold disk may take most of a minute
TOGETHER_LIMIT = 30.0  # seconds that a node waits before a turn for the others: they may have to import torch still
SLACK = 5.0  # seconds beyond a limit, after which the process itself hangs
TURN_LIMIT, GPU_TURN_LIMIT = 8.0, 40.0  # seconds for one all-reduce; the first one with GPUs starts CUDA and NCCL
MOST_WORKERS = 8  # of a node without GPUs that take part inside: they import nothing, but each needs memory


class TorchProbe:
    """The process ``torch_probe.py``, which starts at once, so that torch is imported while other things are found."""

    def __init__(self, environ: Mapping[str, str], nproc: int, gpus: int) -> None:
        self._workers = min(nproc, gpus or MOST_WORKERS)
        self._gpu, self._turn_limit = gpus > 0, GPU_TURN_LIMIT if gpus else TURN_LIMIT
        self.limit = START_LIMIT + self._turn_limit + SLACK  # seconds for any of the all-reduces
        self.spread = 3 * (TOGETHER_LIMIT + self._turn_limit)  # seconds from the first node that is ready to the last one
        command = [sys.executable, "-m", "elastirun.agent.check.torch_probe"]
        self._environ = {**environ, "TORCH_CPP_LOG_LEVEL": "FATAL"}
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        try:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, env=self._environ)
        except OSError as error:
            raise StartError(f"no process can be started here: {error.strerror}") from None

    def close(self) -> None:
        """Kill the process. Idempotent."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):  # a request that the process has not read
                    pipe.close()
        self._process.wait()

    def inside(self) -> Collective:
        """Multiply matrices and reduce among the workers of this node."""
        return self._ask("", self._turn_limit, "127.0.0.1", ranks=[*range(self._workers)], size=self._workers, address="127.0.0.1", port=0)

    def across(self, me: Arrival, other: Arrival) -> Collective:
        """Reduce with another node, which does the same now. The one with the smaller id serves the store, at its port for that."""
        first, rank = (me, 0) if me.id < other.id else (other, 1)
        gpu = self._gpu and bool(other.facts.gpus) and me.host != other.host  # NCCL refuses two ranks on one GPU
        where: dict[str, Any] = {"address": first.address, "port": first.meet}
        return self._ask(other.id, self._turn_limit, me.address, ranks=[rank], size=2, gpu=gpu, **where)

    def _ask(self, peer: str, limit: float, own: str, **request: Any) -> Collective:
        assert self._process.stdin is not None and self._process.stdout is not None
        interface = net.interface_of(own)
        names = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {}  # as in the job
        given = {name: value for name, value in names.items() if name not in self._environ}
        request = {"gpu": self._gpu, "inside": not peer, "limit": limit, "env": given, "own": bool(interface), **request}
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            if not select.select([self._process.stdout], [], [], limit + SLACK + (0.0 if peer else START_LIMIT))[0]:
                self.close()
            answer = json.loads(self._process.stdout.readline())
            error = clip(answer["error"], 300) if answer.get("error") else ""
            return Collective(peer, error, float(answer.get("took", 0.0)), float(answer.get("matmul", 0.0)))
        except (OSError, ValueError):
            return Collective(peer, "torch cannot be used here: the process that imports it has ended, or hangs")

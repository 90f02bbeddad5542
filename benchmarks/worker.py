"""A worker that only all-reduces over gloo, and reports its start and each step to the bench.

Variables: ``BENCH_SOCKET`` (the bench's Unix socket), ``BENCH_NODE`` (the name of its agent), ``BENCH_TIMEOUT`` (seconds for the process
group; unset: torch's default), ``BENCH_DELAY`` (enter ``init_process_group`` up to this many seconds late), ``BENCH_SEED`` (of the delay).
"""

import json
import os
import random
import socket
import time

started = time.monotonic()  # the same clock for every process of a machine, and of its network namespaces
bench = socket.socket(socket.AF_UNIX)
bench.connect(os.environ["BENCH_SOCKET"])


def say(**fields: object) -> None:
    bench.sendall(json.dumps(fields).encode() + b"\n")


rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
say(at=started, node=os.environ["BENCH_NODE"], pid=os.getpid(), rank=rank, world=world, attempt=attempt)

from datetime import timedelta  # noqa: E402  the start is reported before torch takes its second

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

delay = random.Random(f"{os.environ.get('BENCH_SEED', 0)} {rank} {attempt}").uniform(0, float(os.environ.get("BENCH_DELAY", 0)))
time.sleep(delay)
limit = os.environ.get("BENCH_TIMEOUT")
dist.init_process_group("gloo", timeout=timedelta(seconds=float(limit)) if limit else None)
while True:
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == world, f"{x.item()} workers took part, not {world}"
    say(at=time.monotonic())
    time.sleep(0.05)

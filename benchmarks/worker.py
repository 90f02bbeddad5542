"""A worker that only all-reduces over gloo, and reports its start and each step to the bench. It ends when the bench says so, or is gone.

Variables: ``BENCH_SOCKET`` (the bench's Unix socket), ``BENCH_NODE`` (the name of its agent), ``BENCH_TIMEOUT`` (seconds for the process
group; unset: torch's default), ``BENCH_DELAY`` (enter ``init_process_group`` up to this many seconds late), ``BENCH_SEED`` (of the delay),
``BENCH_OPTIMIZER`` (if set: each step includes one of an optimizer, the first of which imports about as much as torch itself),
``BENCH_IDLE`` (if set: sleep after the first step), ``BENCH_DEVICE`` (if set: each step includes a kernel there, whose result is read).
In a job with ``--mesh`` the worker makes the mesh, with the groups of its dimensions, before its first step.
"""

import json
import os
import random
import select
import socket
import time

started = time.monotonic()  # the same clock for every process of a machine, and of its network namespaces
bench = socket.socket(socket.AF_UNIX)
bench.connect(os.environ["BENCH_SOCKET"])
os.dup(bench.fileno())  # the interpreter closes ``bench`` at its end; the bench sees the connection's end when the process has ended


def say(**fields: object) -> None:
    bench.sendall(json.dumps(fields).encode() + b"\n")


rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
say(at=started, node=os.environ["BENCH_NODE"], pid=os.getpid(), rank=rank, world=world, attempt=attempt)

from datetime import timedelta  # noqa: E402  the start is reported before torch takes its second

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.device_mesh  # noqa: E402

delay = random.Random(f"{os.environ.get('BENCH_SEED', 0)} {rank} {attempt}").uniform(0, float(os.environ.get("BENCH_DELAY", 0)))
time.sleep(delay)
limit = os.environ.get("BENCH_TIMEOUT")
dist.init_process_group("gloo", timeout=timedelta(seconds=float(limit)) if limit else None)
if mesh := os.environ.get("ELASTIRUN_MESH"):
    torch.distributed.device_mesh.init_device_mesh("cpu", tuple(int(part.partition("=")[2]) for part in mesh.split(",")))
parameter = torch.zeros(1, requires_grad=True)
optimizer = torch.optim.SGD([parameter], lr=0.1) if "BENCH_OPTIMIZER" in os.environ else None
device = os.environ.get("BENCH_DEVICE")
pause = None if "BENCH_IDLE" in os.environ else 0.05  # seconds between two steps; None: until the bench says something
to_end = False
while True:
    x = torch.tensor([1.0, float(to_end)])
    dist.all_reduce(x)
    assert x[0].item() == world, f"{x[0].item()} workers took part, not {world}"
    if device:
        assert torch.ones(1 << 20, device=device).sum().item() == 1 << 20
    if optimizer:
        parameter.grad = x[:1]
        optimizer.step()
    say(at=time.monotonic())
    if x[1].item():  # all workers end after the same step
        break
    to_end = bool(select.select([bench], [], [], pause)[0])
dist.destroy_process_group()

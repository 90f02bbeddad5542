"""The program that uses torch for a check: a matrix product and all-reduces, each in processes of its own that are killed when they hang.

Reads requests from stdin, a line of JSON each, and answers each with a line. It ends with its parent.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

SIZE, TRIALS = 512, 4  # of the matrices; the fastest product counts
ELEMENTS = 1 << 18  # floats that are reduced


def main() -> None:
    """Answer requests until stdin ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: this process dies with its parent
    import torch
    import torch.distributed  # before the forks, which then need not

    torch.set_num_threads(1)  # one core is timed, and forks must not miss threads
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(_together(request)), flush=True)


def _together(request: dict[str, Any]) -> dict[str, Any]:
    """Carry out a request in one process for each of its ranks. Return the first error, or the longest times."""
    until, pipes, pids, found = time.monotonic() + request["limit"], {}, [], []
    listening = socket.create_server((request["address"], 0)) if request["inside"] else None  # for the store of the ranks here
    if listening is not None:
        request = {**request, "listening": listening, "port": listening.getsockname()[1]}
    for rank in request["ranks"]:
        reading, writing = os.pipe()
        if not (pid := os.fork()):
            _one(request, rank, writing)
        os.close(writing)
        pipes[reading] = rank
        pids.append(pid)
    while pipes and (ready := select.select([*pipes], [], [], max(0.0, until - time.monotonic()))[0]):
        for reading in ready:
            text = os.read(reading, 4096)
            os.close(reading)
            found.append(json.loads(text) if text else {"error": f"local rank {pipes[reading]} crashed"})
            del pipes[reading]
    if listening is not None:
        listening.close()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    errors = [one["error"] for one in found if one["error"]] + [f"no answer within {request['limit']:g} s"] * bool(pipes)
    return {"error": errors[0]} if errors else {name: max(one[name] for one in found) for name in found[0]}


def _one(request: dict[str, Any], rank: int, writing: int) -> None:
    """Carry out a request as one rank, write the answer, and end this process."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)  # what gloo and NCCL say of an error is in the exception, too
    os.environ.update(request["env"])
    try:
        answer: dict[str, Any] = {"error": "", **_reduce(request, rank)}
    except Exception as error:  # torch raises many kinds
        answer = {"error": " ".join(str(error).split())[:500] or type(error).__name__}
    os.write(writing, json.dumps(answer).encode())
    os._exit(0)


def _reduce(request: dict[str, Any], rank: int) -> dict[str, float]:
    """Multiply matrices, meet the other ranks, and reduce. Return the milliseconds of the product and of the reduction."""
    torch, dist = sys.modules["torch"], sys.modules["torch.distributed"]
    limit, size = timedelta(seconds=request["limit"]), request["size"]
    gpu = request["gpu"] and torch.cuda.is_available()
    device = torch.device("cuda", rank % torch.cuda.device_count() if request["inside"] else 0) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    matrix, count = torch.rand(SIZE, SIZE, device=device), time.perf_counter if gpu else time.thread_time
    product = min(_timed(lambda: torch.mm(matrix, matrix), gpu, count) for _ in range(TRIALS))
    if size < 2 and not gpu:
        return {"matmul": product, "took": 0.0}
    store = _tcp_store(request, rank == 0)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", store=store, rank=rank, world_size=size, timeout=limit)
    took = 0.0
    for where in ("cpu", device) if gpu else ("cpu",):
        ones = torch.ones(ELEMENTS, device=where)
        took = _timed(functools.partial(dist.all_reduce, ones), gpu, time.perf_counter)
        if float(ones[-1]) != size:
            raise ValueError(f"a sum of {size} ones is {float(ones[-1]):g} on {where}")
    dist.all_reduce(torch.ones(1))  # who serves the store must not end before the others are done
    return {"matmul": product, "took": took}


def _tcp_store(request: dict[str, Any], serves: bool) -> Any:
    from elastirun.rendezvous.stores import tcp_server, torch_class

    if serves and request["inside"]:
        return tcp_server.serve(request["listening"])
    if serves:
        family = socket.AF_INET6 if ":" in request["address"] else socket.AF_INET
        address = request["address"] if request["own"] else ""  # NAT leads to one of our addresses
        return tcp_server.serve(socket.create_server((address, request["port"]), family=family))
    return torch_class.tcp_store_class()(request["address"], request["port"], is_master=False, timeout=timedelta(seconds=request["limit"]))


def _timed(function: Callable[[], object], gpu: bool, count: Callable[[], float]) -> float:
    began = count()
    function()
    if gpu:
        sys.modules["torch"].cuda.synchronize()
    return round(1000 * (count() - began), 3)


if __name__ == "__main__":
    main()

"""Waits for reductions and messages of gloo that end when the connections of their group are cut (``GroupConnections``).

When a connection ends gloo tells whoever waits for it, except for a message of which a part is on its way, or whose writing has failed
(``Pair::signalException`` in its tcp/pair.cc leaves out unbound buffers in ``tx_`` and ``rx_``): that wait goes on until the timeout of the
group, half an hour. Here such a wait is given up. The thread of gloo that waits stays until the timeout, and the group with it.

NCCL lets the GPU wait, not the host, and its kernels end only when their communicator is aborted, as if all had gone well. Such a kernel
may send anything to its peers. So reductions of a step count when gloo says that every rank has found its own whole (``confirm``).
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from elastirun.train.errors import TrainError
from elastirun.train.groups.connections import live_sockets

LOOK = 0.1  # seconds from one look at the connections to the next: a wait that is given up takes as long; each look costs 0.3 ms
LATEST = 0.3  # seconds for which a wait may last after the cut; usually it ends within milliseconds
NAPS = 0.00002, 0.001  # seconds between two looks at the GPU, the first and the longest


def finish(work: dist.Work | None, device: torch.device) -> None:
    """Wait for a collective with tensors on ``device``. In a live job the host waits for the GPU, too.

    Raises torch's RuntimeError if it fails, or does not end although its connections are cut; TrainError if the GPU fails.
    """
    if work is None:  # this process is not a member
        return
    if device.type == "cuda" and live_sockets.made:
        work.wait()  # the current stream waits
        _wait_for_gpu(device)
        return
    while live_sockets.made and not work.is_completed():
        try:
            work.wait(timedelta(seconds=LOOK))
        except RuntimeError:
            if not work.is_completed():  # it has not failed, it takes longer
                _give_up_if_cut()
    work.wait()


def confirm(group: dist.ProcessGroup, device: torch.device) -> None:
    """Wait until every rank of ``group`` has found its reductions on ``device`` whole, and all else that its GPU was given. Raises like
    ``finish``.

    A rank that has not been cut by then has not aborted its communicators, so what it sent was right.
    """
    _wait_for_gpu(device)
    finish(dist.all_reduce(torch.zeros(1, device="cpu"), group=group, async_op=True), torch.device("cpu"))


def _wait_for_gpu(device: torch.device) -> None:
    """Wait until the current stream has done what it was given, and no communicator was aborted before."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    nap, longest = NAPS
    while not _is_done(event) and not live_sockets.is_cut:
        time.sleep(nap)
        nap = min(1.5 * nap, longest)
    if live_sockets.is_cut:  # read after the end, because communicators are aborted after the cut
        raise RuntimeError("the connections of the process group are cut, and its communicator is aborted")


def _is_done(event: torch.cuda.Event) -> bool:
    try:
        return bool(event.query())  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # of a kernel of the script, for instance: no peer is lost
        raise TrainError(f"the GPU failed: {error}") from None


def finish_message(work: dist.Work | None, limit: timedelta) -> None:
    """Wait for ``dist.isend`` or ``irecv`` for at most ``limit``. Raises like ``finish``.

    gloo gives up all connections of the group after a ``limit``, so there cannot be a short one to look in between.
    """
    assert work is not None
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            work.wait(limit)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=wait, name="elastirun message", daemon=True)
    thread.start()
    thread.join(LOOK)
    while thread.is_alive():
        _give_up_if_cut()
        thread.join(LOOK)
    if failed:
        raise failed[0]


def _give_up_if_cut() -> None:
    if live_sockets.cut_for() > LATEST:
        raise RuntimeError("the connections of the process group are cut, and gloo does not end a wait for one of them")


def limit_of(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of ``group``. Messages between two ranks need it: theirs is the one with which the connections were made."""
    found: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return found

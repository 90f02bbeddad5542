"""``Drain``: when one rank is asked to stop, all ranks stop after the same step, without a collective that training waits for.

See docs/worker.md.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from elastirun.train.arguments import named
from elastirun.train.errors import WrongUse
from elastirun.train.stopping.failure_stop import FailureStop
from elastirun.train.stopping.stop_word import StopWord

DEADLINE = "ELASTIRUN_DEADLINE"  # seconds from the signal to SIGKILL; set by the agent
USUAL_DEADLINE = 30.0  # seconds without an agent of elastirun: torchrun's and Kubernetes' default
PASSED_ON = "TORCHELASTIC_SIGNALS_TO_HANDLE"  # the signals that make an agent leave, which it passes on to its workers
MARGIN = 0.1  # of the deadline, which is left for the end itself
LONGEST_NAP = 0.25  # seconds between two looks for the others: a thousand ranks may ask the same store
CODE = 128 + signal.SIGTERM  # of a rank that ends for the sake of the others. Never 0: when all workers end with 0 the job has succeeded


Handler = Callable[[int, FrameType | None], object] | int | None


class Agreeing(Protocol):
    """A module whose ranks tell each other of requests as they reduce: ``DistributedDataParallel`` and ``DeterministicShards``."""

    process_group: dist.ProcessGroup

    @property
    def drained(self) -> int | None:
        """The first reduction in which a rank requested "drain"; the same on all ranks after the same reduction."""

    @property
    def _without_reducer(self) -> bool:
        """Whether there is nobody to tell of a request yet."""

    def request(self, name: str) -> None:
        """Tell all ranks of the request in the next reduction."""


class Drain:
    """Lets all ranks of ``ddp`` stop after the same step when one of them gets SIGTERM: a planned stop loses no step.

        drain = Drain(ddp)             # or, with a mesh, torch's DistributedDataParallel or FSDP2: Drain(optimizer)
        for batch in batches:
            ...                        # forward, backward, step
            if drain.now:              # on every rank after the same step
                save()                 # within drain.seconds_left
                drain.leave()

    A rank that gets the signal says so in the control words of its next reduction, so all ranks know it after the same step (on a GPU a
    step later, because the host reads the words late). Of an optimizer the steps are counted: every rank makes the Drain at the same
    point and takes as many steps as the others, and all know of the stop a step later.

    ``signals``: those that stop this process; default SIGTERM, and below an agent of elastirun all that it passes on. A handler that was
    there before is called as well. The handlers can only be installed in the main thread; elsewhere this rank is stopped by the others
    alone. When the agent stops the workers because one has failed, there is nobody left to agree with: then the signal ends this process
    at once, unless all had agreed before or there was another handler.

    Raises TrainError for signals that cannot be handled, and if ``ddp`` is a module of torch, or does not span all ranks: its control
    words would not reach the others.
    """

    def __init__(self, ddp: Agreeing | torch.optim.Optimizer, signals: Iterable[int] | None = None) -> None:
        self._word = StopWord(ddp) if isinstance(ddp, torch.optim.Optimizer) else None
        self._ddp: Agreeing = self._word or _agreeing(ddp)
        self._pid = os.getpid()
        self._seconds = _deadline()
        self._known: float | None = None  # when this rank knew of the stop, on time.monotonic
        self._signum = 0  # the first signal that this process got; 0: none
        self._before: dict[int, Handler] = {}
        self._failure_stop: FailureStop | None = None
        if threading.current_thread() is threading.main_thread():
            self._install(_signals() if signals is None else signals)
        if self._before:
            self._failure_stop = FailureStop(self._before, self._give_up)
        atexit.register(self._release_others)

    def _install(self, signals: Any) -> None:
        for signum in signals if isinstance(signals, Iterable) else [signals]:
            try:
                self._before[signum] = signal.signal(signum, self._arrived)
            except (OSError, TypeError, ValueError):
                self.close()
                raise WrongUse(f"signals: no handler can be installed for {signum!r}; give numbers, as [signal.SIGTERM]") from None

    @property
    def requested(self) -> bool:
        """Whether this rank knows that it is to stop. The others may not know it yet: use ``now`` to decide what all do together."""
        return bool(self._signum) or self.now

    @property
    def now(self) -> bool:
        """Whether all ranks know that they are to stop. Becomes True after the same step on every rank, and stays so."""
        if self.step is not None:
            self._know()
            return True
        if self._signum:
            self._ask()  # again: after set_group() there are others to tell
        return False

    @property
    def step(self) -> int | None:
        """The reduction (as ``agreement.step`` counts), or step of the optimizer, in which all ranks were told; None: there is none yet."""
        return self._ddp.drained

    @property
    def deadline(self) -> float | None:
        """The time at which this process will be killed, on ``time.monotonic``: ELASTIRUN_DEADLINE seconds after it knew of the stop."""
        return None if self._known is None else self._known + self._seconds

    @property
    def seconds_left(self) -> float:
        """Seconds until ``deadline``, at least 0; infinity while there is no stop."""
        return float("inf") if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def leave(self) -> NoReturn:
        """End this process, when every rank has come here. Call it after the checkpoint, at the same point on every rank.

        A rank that got a signal ends by that signal, without exit handlers: close what must be closed before. A rank that only learnt of
        the stop from the others waits for the signal, which its agent is about to send. If none comes until the deadline it ends
        with 143. Never with 0: the agent would take the work for done.
        """
        self._know()
        self._wait_for_others()
        self._nap_until(lambda: bool(self._signum) or not _has_agent(), self.deadline or 0.0)
        _flush()
        if self._signum and threading.current_thread() is threading.main_thread():
            signum = signal.SIGTERM if self._signum == signal.SIGQUIT else self._signum  # SIGQUIT would dump the memory to the disk
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            time.sleep(1.0)  # until the kernel delivers it
        os._exit(CODE)

    def close(self) -> None:
        """Put the handlers back that were there before. With an optimizer, every rank calls it after the same step."""
        for signum, before in self._before.items():
            if signal.getsignal(signum) == self._arrived:
                signal.signal(signum, signal.SIG_DFL if before is None else before)
        self._before.clear()
        atexit.unregister(self._release_others)
        if self._failure_stop is not None:
            self._failure_stop.close()
        if self._word is not None:
            self._word.close()

    def _arrived(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal: ask all ranks to stop. A second signal changes nothing: the agent alone makes the time shorter."""
        before = self._before.get(signum)
        if os.getpid() != self._pid:  # a fork has this handler, too, and nothing to drain
            signal.signal(signum, before if callable(before) else signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            return
        self._signum = self._signum or signum
        self._know()
        self._ask()
        if callable(before) and _by_user(before):
            before(signum, frame)

    def _ask(self) -> None:
        """Ask all ranks to stop."""
        if not self._ddp._without_reducer:  # a copy gets its reducer in a collective, in its first backward
            self._ddp.request("drain")

    def _give_up(self) -> None:
        """End this process: its agent stops the workers after a failure. Called in a thread; the main thread may hang."""
        if self.step is None and not any(map(_by_user, self._before.values())):
            os._exit(CODE)

    def _know(self) -> None:
        if self._known is None:
            self._known = time.monotonic()

    def _wait_for_others(self) -> None:
        """Wait until every rank has come here: one that leaves early would fail the others in their last collectives."""
        if not dist.is_initialized() or self.deadline is None:
            return
        try:
            store = c10d._get_default_store()
            if store.add(self._key("here"), 1) == dist.get_world_size():
                store.set(self._key("done"), "1")
            self._nap_until(lambda: bool(store.check([self._key("done")])), self.deadline - MARGIN * self._seconds)
        except (RuntimeError, ValueError):  # the process that serves the store has gone, so its ranks have left
            return

    def _release_others(self) -> None:
        """Let nobody wait in ``leave`` for this process, which ends in another way: by an exception, or with its work done."""
        if os.getpid() == self._pid and self.step is not None and dist.is_initialized():
            with suppress(RuntimeError, ValueError):
                c10d._get_default_store().set(self._key("done"), "1")

    def _key(self, name: str) -> str:
        return f"elastirun/drain/{self.step}/{name}"

    def _nap_until(self, done: Callable[[], bool], deadline: float) -> None:
        """Wait until ``done()`` or the deadline. Naps let the signal handler run."""
        began = time.monotonic()
        while not done() and (now := time.monotonic()) < deadline:
            time.sleep(min(LONGEST_NAP, 0.005 + (now - began) / 8, deadline - now))


def _agreeing(module: Any) -> Agreeing:
    """Return ``module`` if its ranks can tell each other of a stop. Raises TrainError if they cannot."""
    if not hasattr(module, "drained"):
        raise WrongUse(f"{named(module)} does not tell other ranks of stops: give Drain a module of elastirun.train, or the optimizer")
    world, group = dist.get_world_size(), dist.get_world_size(module.process_group)
    if world != group:
        raise WrongUse(
            f"the module reduces over {group} of {world} ranks, so the others would not know of a stop: give Drain the optimizer"
        )
    agreeing: Agreeing = module
    return agreeing


def _by_user(handler: Handler) -> bool:
    """Return whether it is a handler that somebody has installed, not Python's or the kernel's own."""
    return callable(handler) and handler is not signal.default_int_handler


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # nobody reads it, it is closed, or there is none
            stream.flush()


def _signals() -> list[int]:
    """Return the signals that stop this process."""
    names = os.environ.get(PASSED_ON, "").split(",") if _has_agent() else []
    return [signal.SIGTERM, *(signal.Signals[name] for name in names if name in signal.Signals.__members__ and name != "SIGTERM")]


def _has_agent() -> bool:
    """Return whether an agent of elastirun has started this process, which tells all nodes when one of them leaves."""
    return DEADLINE in os.environ


def _deadline() -> float:
    with suppress(KeyError, ValueError):
        return max(0.0, float(os.environ[DEADLINE]))
    return USUAL_DEADLINE

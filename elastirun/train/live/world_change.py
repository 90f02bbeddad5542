"""A change to the next world of a round while the present one trains: a new rank costs the others some milliseconds in a step.

Its stages, in this order:

    admit    a new rank is ready, as rank 0 has seen. All ranks make the groups and the memory of the next world, each in a thread
    switch   each rank asks for it when its thread is done. The step in which all ask is the last one in the old groups
    slices   new ranks make the same steps as the others, with data of no weight, and get a slice of the state after each one
    whole    each rank asks for it when all slices are sent or taken. After the step in which all ask, the data are shared among all
"""

from __future__ import annotations

import functools
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elastirun.train.ddp.module import DistributedDataParallel
from elastirun.train.ddp.world_switch import WorldSwitch
from elastirun.train.errors import ModelMismatch
from elastirun.train.groups.connections import live_sockets
from elastirun.train.groups.process_groups import connects_within, end_beside, end_retired, make_default_group, replace_groups
from elastirun.train.live.live_round import LiveRound
from elastirun.train.live.slice_memory import SliceMemory, accept, offer
from elastirun.train.live.state_slices import LARGEST, UNIT, Receiver, Sender
from elastirun.train.reduction.control_words import SWITCH, WHOLE
from elastirun.train.reduction.world import World
from elastirun.train.state.train_state import TrainState
from elastirun.worker.live_worlds import LiveWorld

# Seconds for the connections of a process group, and more for each worker, when all its ranks have come: what takes longer is a peer that
# has died just then. It is less than --failure-grace (5 s), after which the worker would be killed.
CONNECT, CONNECT_EACH = 3.0, 0.02
AHEAD = 64 << 20  # bytes of the memory for slices that are made ready before the switch: about as many as a slice has


def connecting(world: LiveWorld) -> Any:
    """Return a context in which the groups of ``world`` are made."""
    return connects_within(timedelta(seconds=CONNECT + CONNECT_EACH * len(world.ranks)))


class WorldChange:
    """The change for a rank that trains (``find_next`` in a thread) or for a new one (``world`` is given: it waits for the others)."""

    def __init__(
        self,
        live: LiveRound,
        model: DistributedDataParallel,
        state: TrainState,
        backend: str,
        timeout: timedelta | None,
        world: LiveWorld | None = None,
    ) -> None:
        self._live, self._model, self._state, self._backend, self._timeout = live, model, state, backend, timeout
        self._model_switch = WorldSwitch(model)
        self._next: tuple[LiveWorld, World] | None = None
        self._prepared = False  # this rank can switch to ``_next``
        self._error: BaseException | None = None
        self._work: Sender | Receiver | None = None
        self._offered: tuple[SliceMemory, list[int]]  # on rank 0: memory for slices, and the new ranks that have it
        self.sharing = 0  # ranks that the data are shared among, for a new rank
        self.world: LiveWorld | None = None  # that this rank has switched to
        self._thread: threading.Thread | None = None
        self._stepped, self._seconds = time.monotonic(), 0.0  # when the last step was made, and how long it took
        self._model_switch.hold_plan(True)
        if world is None:
            live_sockets.begin()
            self._thread = threading.Thread(target=self._prepare, name="elastirun next world", daemon=True)
            live.start(self._thread)
            return
        default = self._default_group(world)
        end_beside(replace_groups(default))
        with connecting(world):
            self._next = world, self._model_switch.prepare(default, new=True)
            memory = accept(0, default, self._ahead)
        live.wait_until_switched(world)
        self._switch()
        self._work = receiver = Receiver(state, 0, default, memory)
        self.sharing, self._model_switch.reducer.position = int(receiver.more[0]), receiver.more[1:]
        receiver.go_on()
        self._say_if_done()

    def after_step(self, left: int) -> bool:
        """Do what is due after a step. Return whether all ranks are whole: the next step is the first one of the new world.

        ``left``: steps that are left in the epoch. From the switch on until all are whole there is no end of an epoch: what the script
        does there, such as an evaluation, a new rank would do with a part of the state.
        """
        now = time.monotonic()
        self._seconds, self._stepped = now - self._stepped, now
        self._raise_error()
        unanimous = self._model.agreement.unanimous
        if self.world is not None:
            end_retired()  # all ranks have made a step in the new groups
        if self.world is None:
            if SWITCH in unanimous and left > 0:
                self._switch(left)
                self._say_if_done()
            elif self._prepared:
                self._model.request(SWITCH)
            return False
        if WHOLE in unanimous:
            if isinstance(self._work, Sender):
                self._work.finish()
            self._model_switch.hold_plan(False)
            return True
        if self._work is not None and not self._work.done:
            self._work.go_on()
        self._say_if_done()
        return False

    def _say_if_done(self) -> None:
        """Tell the others, with the next step, that this rank has nothing more to send or to take."""
        if self._work is None or self._work.done:
            self._model.request(WHOLE)

    def _raise_error(self) -> None:
        """Raise what has gone wrong in the thread."""
        if isinstance(self._error, ModelMismatch):  # the new rank ends with it: this one has a state, and goes on with the others
            raise RuntimeError(f"a new rank cannot be taken in: {self._error}")
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Let go of what was prepared: the round is over. Its connections are cut meanwhile."""
        self._live.stop()  # the thread waits for no rank any more
        if self._thread is not None:
            self._thread.join()
        if self.world is None and self._next is not None:
            self._next[1].transport.close()
        self._next = self._work = None

    def _default_group(self, world: LiveWorld) -> dist.ProcessGroup:
        live = self._live
        with connecting(world):
            store, name = live.store(world), live.name_of(world)
            return make_default_group(self._backend, store, live.rank_in(world), len(world.ranks), self._timeout, name)

    def _prepare(self) -> None:
        device = self._model.device
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # each thread has its own
            world = self._live.find_next()
            default = self._default_group(world)
            stream = _stream_of(device) if device.type == "cuda" else None
            with connecting(world), nullcontext() if stream is None else torch.cuda.stream(stream):
                self._next = world, self._model_switch.prepare(default)
                if stream is not None:
                    stream.synchronize()
                if self._live.rank == 0:
                    self._offered = offer(self._new_in(world), default, LARGEST + UNIT, self._ahead)
            self._prepared = True
            self._model.request(SWITCH)  # perhaps in the step under way
        except BaseException as error:  # raised in the main thread
            self._error = error

    def _say_switched(self, world: LiveWorld) -> None:
        """Tell the new ranks that the others have switched. Called in a thread: the store may take some milliseconds."""
        try:
            self._live.say_switched(world)
        except RuntimeError as error:  # raised in the main thread
            self._error = error

    def _new_in(self, world: LiveWorld) -> list[int]:
        """Return the new ranks of ``world``."""
        return [rank for rank, worker in enumerate(world.ranks) if not self._live.trains(worker)]

    @property
    def _ahead(self) -> int:
        """Return how many bytes of the memory for slices are made ready before the switch: the state has more than the parameters."""
        return min(AHEAD, sum(param.nbytes for param in self._model.parameters()))

    def _switch(self, left: int = 0) -> None:
        """Go on in the new groups. ``left``: steps in which new ranks get the state."""
        assert self._next is not None
        (self.world, following), self._next = self._next, None
        left_behind = [self._model_switch.enter(following), replace_groups(following.process_group, following.group)]
        # Let go of them in a thread: the end of a group waits for its threads.
        threading.Thread(target=left_behind.clear, name="elastirun ends groups", daemon=True).start()
        live_sockets.end()
        self._model_switch.withdraw(SWITCH)
        if self._thread is not None and self._live.rank == 0:
            self._live.start(threading.Thread(target=self._say_switched, args=(self.world,), name="elastirun switched", daemon=True))
            more = [self._live.size, *self._model_switch.reducer.position]
            new, group = self._new_in(self.world), following.process_group
            self._work = sender = Sender(self._state, new, group, more, self._seconds, left, *self._offered)
            sender.go_on()


@functools.cache
def _stream_of(device: torch.device) -> Any:
    """Return a stream for what a thread does on a GPU. On that of the training the two would wait for each other.

    The same stream each time: torch keeps freed memory for the stream for which it was allocated.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

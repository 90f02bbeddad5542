"""Live elasticity: when workers are lost, come or leave, the others keep their processes and go on with the next step (docs/elastic.md).

The ranks agree on the state when the world has changed: the furthest one wins. A rank finishes a step only after the reduction of all
gradients, so ranks are one step apart at most. A step that no rank has finished is dropped, and its samples are loaded again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.optim import Optimizer

from elastirun.live_connection import LiveConnection
from elastirun.live_messages import VARIABLE
from elastirun.progress import begin_round

from .checkpoints.checkpointer import Checkpointer
from .checkpoints.ranks import begin_world
from .collectives import gather
from .control_words import ADMIT
from .data import ElasticDataLoader
from .ddp import DistributedDataParallel
from .errors import ModelMismatch, TrainError
from .group_connections import GroupConnections
from .live_round import LiveRound
from .process_groups import connects_within, init_default_group
from .state_copy import copy_state
from .train_state import TrainState

CPU = torch.device("cpu")
PATIENCE = 30.0  # seconds from a failed reduction to the agent's word that the world changes; it comes within milliseconds, or never
# Seconds for the connections of a process group, and more for each worker, when all its ranks have come: what takes longer is a peer that
# has died just then. It is less than --failure-grace (5 s), after which the worker would be killed.
CONNECT, CONNECT_EACH = 3.0, 0.02
LAUNCHED = "RANK"  # in the environment of a worker of any launcher

_groups = GroupConnections()
_timeout: timedelta | None = None  # of the groups, as given to ``init_process_group``
_connection: LiveConnection | None = None  # to the agent; None: the world of this process never changes


def init_process_group(backend: str = "gloo", timeout: timedelta | None = None) -> None:
    """Make the default process group, in place of ``torch.distributed.init_process_group``.

    With gloo it is a group of this process alone: what comes next (the model, its first compilation) waits for nobody. ``Elastic`` makes
    the group of all workers that the launcher has started. With another backend it is that group at once. ``timeout``: for a collective;
    None: torch's default, 30 minutes for gloo. Raises TrainError if there is an agent of elastirun that cannot be reached.
    """
    global _timeout, _connection
    _timeout = timeout
    if backend == "gloo":
        _connection = _connect()
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    else:
        dist.init_process_group(backend, timeout=timeout)


class Elastic:
    """Trains ``state`` in worlds that change, in one process.

        elastic.init_process_group()
        model = DistributedDataParallel(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = ElasticDataLoader(dataset, global_batch_size=64)
        run = Elastic(TrainState(model=model, optimizer=optimizer, data=loader), lambda: Checkpointer("runs/digits", every=100))
        while loader.epoch < epochs:
            for batch in run.batches():
                optimizer.zero_grad()
                loss_of(model(batch)).backward()
                optimizer.step()

    state         with a ``DistributedDataParallel`` as a part, and an ``ElasticDataLoader`` as ``data``
    checkpoints   a function that returns the ``Checkpointer``: it is called in each world, when the environment is that of the round. A
                  run in which no rank has a state begins with the newest checkpoint, and each finished step is offered to ``save``
    on_change     called with rank and world size in each world, the first one too, when the ranks have the same state

    ``Elastic(…)`` returns when this worker takes part, with the state of those who have trained already; these train on meanwhile. Where
    nobody has a state, it waits for all workers of the round. If training ends before this worker takes part, the process ends with 0.
    Without an agent of elastirun, and with another backend than gloo, the world never changes. Raises TrainError for a state that it
    cannot work with.
    """

    def __init__(
        self,
        state: TrainState,
        checkpoints: Callable[[], Checkpointer] | None = None,
        on_change: Callable[[int, int], object] = lambda rank, world_size: None,
    ) -> None:
        self.state = state
        self._model, self._loader = _parts(state)
        self._make_checkpoints, self._on_change = checkpoints, on_change
        self._checkpoints: Checkpointer | None = None
        self._round = 0  # of the world that this rank is in, or was in last
        self._settled = 0  # the round in which this rank's state was last agreed upon; 0: it is that of a new process
        self._before = _Position(state, self._loader)
        self._connection = _connection
        self._live: LiveRound | None = None  # the round that this rank is in; None: its world never changes
        if dist.get_backend() != "gloo":
            self._begin()
            return
        _check(self._model)
        if self._connection is not None:
            self._model.drop_failed_steps()
            self._connection.cut = self._interrupt
            self._enter(self._connection)
        elif LAUNCHED in os.environ:
            self._make_world(None)
        else:
            self._begin()

    @property
    def step(self) -> int:
        """Return the number of finished steps."""
        return self.state.step

    @property
    def checkpoints(self) -> Checkpointer | None:
        """Return the checkpointer of the present world."""
        return self._checkpoints

    def batches(self) -> Iterator[Any]:
        """Yield this rank's share of each global batch that is left in the epoch; each is one step.

        A batch is None where this rank has no sample of it: call ``model.skip()`` in place of forward and backward. If the world changes,
        the gradients of the step under way are None, which optimizers leave out; the step does not count, and its batch comes again.
        """
        epoch = self._loader.epoch
        while self._loader.epoch == epoch:
            for batch in self._loader:
                if batch is not None:
                    self._model.set_samples(self._loader.samples)
                yield batch
                if not self._end_step():
                    break

    def _end_step(self) -> bool:
        """Count the step, unless its reduction failed. Return whether the world is still the same: else what was loaded ahead is wrong."""
        if self._model.failed:
            self._before.restore()
        else:
            self.state.step += 1
            self._before.take()
            self._save()
        connection, live = self._connection, self._live
        if connection is None or live is None:
            return True
        if self._model.failed or connection.asked:
            self._leave(connection)
            self._enter(connection)
        elif ADMIT in self._model.agreement.requests:
            self._close_checkpoints()
            if not self._attempted(connection, partial(self._change_world, live)):
                self._enter(connection)
        else:
            return True
        return False

    def _save(self) -> None:
        """Offer the state to the checkpointer. If a peer is lost meanwhile the agent says so, and the step counts all the same."""
        if self._checkpoints is None:
            return
        try:
            self._checkpoints.save(self.state.step, self.state)
        except RuntimeError:
            if self._connection is None or not self._connection.wait_until_asked(PATIENCE):
                raise

    # -- changes of the world -----------------------------------------------------------------------------------------

    def _interrupt(self) -> None:
        """Let the main thread's waits for peers fail. Called in a thread."""
        if (live := self._live) is not None:
            live.stop()
        _groups.cut()
        self._model.interrupt("the agent ends this round")

    def _leave(self, connection: LiveConnection) -> None:
        """Take no part in the round any more, and promise that. Its checkpoints end before: nothing of it may be published later."""
        self._close_checkpoints()
        if self._live is not None:
            self._live.leave()
            self._live = None
        _groups.forget()
        connection.leave(self.state.step, self._settled)
        if dist.is_initialized():
            dist.destroy_process_group()
        self._model.leave_group()  # while the agents form the next round

    def _close_checkpoints(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close(0.0)
            self._checkpoints = None

    def _enter(self, connection: LiveConnection) -> None:
        """Take part in the next round; in the one after it if that one fails before all have come."""
        while True:
            self._round, env = connection.enter(self._round, PATIENCE)
            if env:
                os.environ.update(env)
                begin_round()
            if self._attempted(connection, partial(self._enter_round, connection)):
                return

    def _attempted(self, connection: LiveConnection, step: Callable[[], object]) -> bool:
        """Take part in a world: that of ``step``. Return False if a peer was lost meanwhile; then this rank has left the round."""
        try:
            step()
            return True
        except (RuntimeError, ValueError, OSError) as error:  # what torch raises when a peer is lost
            if isinstance(error, ModelMismatch) or not connection.wait_until_asked(PATIENCE):
                raise
            self._leave(connection)
            return False

    def _enter_round(self, connection: LiveConnection) -> None:
        """Take part in the first world of the round that this rank is in."""
        _groups.begin()
        self._live = live = LiveRound(self._round, lambda: connection.asked)
        live.enter()
        self._make_world(live)

    def _change_world(self, live: LiveRound) -> None:
        """Take part in the next world of the round."""
        if dist.is_initialized():
            dist.destroy_process_group()
        _groups.begin()
        live.change()
        self._make_world(live)

    def _make_world(self, live: LiveRound | None) -> None:
        """Make the process groups of a world, and agree on the state. ``live``: its round; None: all that the launcher has started."""
        if dist.is_initialized():
            dist.destroy_process_group()
        c10d._world.group_count = 0  # of which names are made: one that could not be made, as a peer was lost, has been counted
        if live is None:
            dist.init_process_group("gloo", timeout=_timeout)
            self._model.set_group(init_sync=False)
            self._settle()
            return
        self._model.withdraw(ADMIT)  # what this rank has asked for in a world that is over
        with connects_within(timedelta(seconds=CONNECT + CONNECT_EACH * live.size)):
            init_default_group(live.store(), live.rank, live.size, _timeout)
            self._model.set_group(init_sync=False)
        self._settle()
        _groups.end()
        live.look_for_ready(lambda: self._model.request(ADMIT))

    def _settle(self) -> None:
        """Give all ranks the state of the furthest one; where nobody has trained, that of the newest checkpoint, or rank 0's."""
        world = dist.group.WORLD
        assert world is not None
        rank, everyone = dist.get_rank(), [tuple(theirs) for theirs in gather([self._settled, self.state.step], world, CPU)]
        furthest = max(everyone)
        source = everyone.index(furthest)
        self._loader.set_world(rank, len(everyone))
        if furthest[0] == 0:
            behind = list(range(1, len(everyone)))
        else:
            behind = [at for at, theirs in enumerate(everyone) if theirs != furthest]
        if behind:
            copy_state(self.state, source, rank in behind, world)
        self._begin(restores=furthest[0] == 0)

    def _begin(self, restores: bool = True) -> None:
        """Begin to train in this world. ``restores``: from the newest checkpoint, if there is one."""
        if self._make_checkpoints is not None:
            begin_world()
            self._checkpoints = self._make_checkpoints()
            if restores:
                self._checkpoints.restore(self.state)
        self._settled = max(self._round, 1)
        self._before.take()
        self._on_change(dist.get_rank(), dist.get_world_size())


class _Position:
    """The state at the last finished step, of what a step changes that has no gradients in the end: the loader, and a scheduler."""

    def __init__(self, state: TrainState, loader: ElasticDataLoader) -> None:
        self._state, self._loader = state, loader
        self.take()

    def take(self) -> None:
        """Note where the run stands."""
        self._data = self._loader.state_dict()
        scheduler = self._state.get("scheduler")
        self._scheduler = None if scheduler is None else dict(scheduler.state_dict())
        self._options = [] if scheduler is None else [_options(group) for group in self._groups()]

    def restore(self) -> None:
        """Go back to where the run stood."""
        self._loader.load_state_dict(self._data)
        if self._scheduler is not None:
            self._state["scheduler"].load_state_dict(self._scheduler)
            for group, options in zip(self._groups(), self._options, strict=True):
                group.update(options)

    def _groups(self) -> list[dict[str, Any]]:
        return [group for part in self._state.values() if isinstance(part, Optimizer) for group in part.param_groups]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's learning rate and the like."""
    return {name: value for name, value in group.items() if name != "params"}


def _parts(state: TrainState) -> tuple[DistributedDataParallel, ElasticDataLoader]:
    """Return the module that reduces, and the loader. Raises TrainError if the state has none, or several."""
    models = [part for part in state.values() if isinstance(part, DistributedDataParallel)]
    loaders = [part for part in state.values() if isinstance(part, ElasticDataLoader)]
    if len(models) != 1 or len(loaders) != 1:
        raise TrainError(
            "Elastic needs a state with one DistributedDataParallel of elastirun.train and one ElasticDataLoader, "
            f"this one has {len(models)} and {len(loaders)}"
        )
    return models[0], loaders[0]


def _connect() -> LiveConnection | None:
    """Connect to the agent; None if there is none. Raises TrainError if it cannot be reached."""
    if not os.environ.get(VARIABLE):
        return None
    try:
        return LiveConnection()
    except OSError as error:
        raise TrainError(f"the agent cannot be reached at the socket {os.environ[VARIABLE]}: {error.strerror}") from None


def _check(model: DistributedDataParallel) -> None:
    """Raise TrainError if the model cannot change worlds."""
    if dist.get_world_size() > 1:
        raise TrainError("call elastic.init_process_group() in place of torch.distributed.init_process_group()")
    if any(param.is_cuda for param in model.parameters()):
        raise TrainError("with gloo, Elastic works with parameters on the CPU only")
    if model.steps_in_backward:
        raise TrainError("a step that is made in the backward cannot be dropped: Elastic does not work with step_in_backward()")

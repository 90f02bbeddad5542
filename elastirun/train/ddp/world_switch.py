"""The verbs of live elasticity for a module: to prepare the next world beside the present one, to go on in it, to drop steps."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch.distributed as dist

from elastirun.train.ddp.at_exit import living
from elastirun.train.ddp.module import DistributedDataParallel
from elastirun.train.errors import ReductionFailed
from elastirun.train.groups.collectives import broadcast, digest, gather, verify_same
from elastirun.train.groups.process_groups import make_own_group
from elastirun.train.reduction.reducer import Reducer, settle
from elastirun.train.reduction.transports.base import reduction_errors
from elastirun.train.reduction.world import World

OTHERS_TRAINED = "other parameters are trained than when the next world was prepared"


class WorldSwitch:
    """Takes ``model`` from one world to the next. It holds nothing else."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model

    def prepare(self, process_group: dist.ProcessGroup, new: bool = False) -> World:
        """Make what the module needs in another world, beside what it has. Every rank of ``process_group`` calls it, in any thread.

        The plan must not change until ``enter``: see ``hold_plan``. ``new``: train from now on the parameters that rank 0 trains.
        """
        model, device = self._model, self.reducer.parts.planner.device
        with reduction_errors("preparing the next world"):
            described = model._describe(model._list_copied(), init_sync=False, trained=False)
            verify_same(described, "parameters, buffers and options", process_group, device)
            needs = broadcast(list(map(int, self.reducer.parts.trained.needs)), process_group, device)
            if new:
                self._train(needs, process_group)
            reducer = self.reducer  # the one of this moment: a forward makes another one where other parameters are trained
            digests = gather([digest(str([*map(int, reducer.parts.trained.needs)]))], process_group, device)
            if any(theirs != digests[0] for theirs in digests):
                raise ReductionFailed(OTHERS_TRAINED)
            group = make_own_group(process_group, device)
            return reducer.prepare_world(process_group, group, model._choose_transport(group, device))

    def _train(self, needs: Sequence[int], group: dist.ProcessGroup) -> None:
        """Train the parameters that ``needs`` says, and freeze all others. ``group``: in place of this rank's, which may have ended."""
        for (_, param), needed in zip(self._model._named, needs, strict=True):
            param.requires_grad_(bool(needed))
        self.reducer.find_frozen()
        if self.reducer.parts.trained.differs:
            self._model._adapt(group)

    def enter(self, world: World) -> World:
        """Go on in another world. Every rank calls it between the same two steps. Return the old one.

        Whoever holds the old one may drop it in a thread, which takes a while. Its groups are the caller's to end.
        Raises ReductionFailed if other parameters are trained than when the world was prepared.
        """
        settle()
        model, reducer, old = self._model, self.reducer, self.reducer.world
        if reducer.parts.trained.differs or not world.buckets.are_for(reducer.params):
            raise ReductionFailed(OTHERS_TRAINED)
        old.transport.close()
        if isinstance(model._end_own_group, weakref.finalize):
            model._end_own_group.detach()
        model.process_group = world.process_group
        model._keep_own_group(world.group, reducer.parts.planner.device)
        reducer.enter_world(world)
        model.require_forward_param_sync = True  # of buffers, in the next forward, on every rank: a new one has made no forward yet
        return old

    def leave(self) -> None:
        """Let go of the process groups, which takes 10 to 20 ms for each, before ``set_group``: nothing else may come between the two."""
        self._model._leave_group()

    def interrupt(self, why: str) -> None:
        """Let waits for ranks of this host end with a PeerLost. May be called in any thread."""
        if isinstance(reducer := self._model.__dict__.get("_made"), Reducer):
            reducer.world.transport.interrupt(why)

    def drop_failed_steps(self) -> None:
        """Let a step whose reduction fails, or whose forward loses a peer, go on to its end without gradients, not with an exception.

        ``model.failed`` is true then, and all backwards end without gradients until ``set_group``.
        """
        self._model._drops_failed_steps = True
        self.reducer.drop_failed_steps()

    def count_samples(self, counts: bool) -> None:
        """Let this rank's samples count from now on, or not, whatever ``set_samples`` says: not while it has a part of the state only."""
        self.reducer.local_report.counts = counts

    def withdraw(self, name: str) -> None:
        """Take a request of this rank back that no reduction has carried yet."""
        self.reducer.local_report.requests.discard(name)

    @property
    def plans(self) -> bool:
        """Return whether the plan of the buckets will change in the next steps, as it is made from measured times. On every rank alike."""
        return self.reducer.parts.planner.learning or self.reducer.world.buckets.outdated

    def hold_plan(self, hold: bool) -> None:
        """Keep the plan of the buckets, and compare no replicas, until the next call. Every rank calls it at the same point."""
        self.reducer.parts.planner.held = hold

    @property
    def steps_in_backward(self) -> bool:
        """Return whether an optimizer steps in the backward."""
        return self.reducer.parts.extensions.optimizer_step is not None

    @property
    def hook_with_state(self) -> bool:
        """Return whether there is a communication hook that keeps something from one reduction to the next."""
        return self._model._hook[1] is not None

    @property
    def reducer(self) -> Reducer:
        return self._model._reducer


def reducing() -> int:
    """Return how many modules of this process reduce; a copy of one, as in an average, does not."""
    return sum("_made" in module.__dict__ for module in living())

"""Live elasticity: when workers are lost, come or leave, the others keep their processes and go on with the next step (docs/elastic.md).

The ranks agree on the state when the world has changed: the furthest one wins. A rank finishes a step only after the reduction of all
gradients, so ranks are one step apart at most. A step that no rank has finished is dropped, and its samples are loaded again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from elastirun.progress import begin_round
from elastirun.train.arguments import verify_callable
from elastirun.train.checkpoints.checkpointer import Checkpointer
from elastirun.train.data.loader import steps_at_once
from elastirun.train.data.steps import Step
from elastirun.train.ddp.world_switch import WorldSwitch
from elastirun.train.errors import CheckpointError, ModelMismatch, ReductionFailed, TrainError, WrongUse
from elastirun.train.groups.collectives import gather
from elastirun.train.groups.connections import live_sockets
from elastirun.train.groups.process_groups import abort_groups, end_beside, init_default_group, leave_groups
from elastirun.train.groups.rank_prefix import one_prefix
from elastirun.train.live import phases
from elastirun.train.live.live_round import LiveRound
from elastirun.train.live.phases import NONE, Fact, Following, Phase, PhaseAction, PhaseEvent
from elastirun.train.live.start import LAUNCHED, LIVE, Given, check, init_alone, parts_of
from elastirun.train.live.start import init_process_group as init_process_group
from elastirun.train.live.state_copy import copy_state
from elastirun.train.live.step_snapshot import Rehearsal, StepSnapshot
from elastirun.train.live.world_change import WorldChange, connecting
from elastirun.train.live.world_checkpoints import WorldCheckpoints
from elastirun.train.reduction.control_words import ADMIT, LEFT, SWITCH, WHOLE
from elastirun.train.reduction.reducer import settle
from elastirun.train.state.train_state import TrainState
from elastirun.worker.live_worlds import furthest, late

log = logging.getLogger("elastirun.train")

CPU = torch.device("cpu")
PATIENCE = 10.0  # seconds from a failed reduction to the agent's word that the world changes; later, this worker reports lost peers
OVER = 2.0  # seconds for the peers of a new worker to say that training has ended, which their processes do at their end
ONE_HAS_LEFT = (
    "a rank has left the loop over the batches and is in run.save(), while another is still in the loop: leave it "
    "by run.step or loader.epoch, not by a number that the script counts, which differs on a worker that came later"
)
CHANGED = (
    "the state's %s changed in step %d, which does not count as a peer was lost, and changes once more when the step "
    "comes again: change what is neither loader, optimizer nor scheduler within `if not model.failed:`"
)


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
                if batch is None:          # fewer samples are left than there are ranks
                    model.skip()
                else:
                    loss_of(model(batch)).backward()
                optimizer.step()
        run.save()

    state         a ``TrainState`` with a ``DistributedDataParallel`` of elastirun as ``model``, and an ``ElasticDataLoader`` as ``data``
    checkpoints   a function without arguments that makes a ``Checkpointer``: it is called in each world, when the environment is that of
                  the round. A run in which no rank has a state begins with the newest checkpoint, and each finished step is offered to
                  ``save``. Default: no checkpoints
    on_change     called with rank and world size in each world, the first one too, when the ranks have the same state

    A new worker whose round has others that have trained already makes a first step by itself, a rehearsal: what is slow the first time
    happens then. Then it takes the state of the others, who train on, and makes their steps with them; its samples have no weight until it
    has all. ``counts`` is False until then. If training ends before, the process ends with 0. Where nobody has a state, ``Elastic(…)``
    waits for all workers of the round.
    Without an agent of elastirun, and with another backend than gloo and "cpu:gloo,cuda:nccl", the world never changes. Raises TrainError
    for a state that it cannot work with.
    """

    _worlds = 0  # that this rank has begun, or begun to join
    _phase = Phase.FIXED
    _saves = False  # this rank is in ``save``
    _saves_done = 0  # calls of ``save`` since the last epoch ended
    _tried = 0  # dropped steps, since the ranks agreed on the state, that may have changed parts of it which cannot be brought back
    _rehearsal: Rehearsal | None = None  # of this worker, until it has the state of the others
    _completed = 0  # reductions that were completed before the batch under way
    _open: object | None = None  # a token of the batch that the script has, and has not come back from; None: it has none
    # The number of the world in whose step the script has left the loop, if that step counts (-1: it does
    # not). What follows is due when the script comes back. None: it has not left the loop since the last batch.
    _left: int | None = None

    def __init__(
        self,
        state: TrainState,
        checkpoints: Callable[[], Checkpointer] | None = None,
        on_change: Callable[[int, int], object] = lambda rank, world_size: None,
    ) -> None:
        if checkpoints is not None:
            verify_callable(checkpoints, 0, "checkpoints", 'a function, such as lambda: Checkpointer("runs/digits")')
        verify_callable(on_change, 2, "on_change", "a function, on_change(rank, world_size)")
        self.state = state
        self._model, self._loader = parts_of(state)
        self._checkpoints, self._on_change = WorldCheckpoints(state, checkpoints), on_change
        self._round = 0  # of the world that this rank is in, or was in last
        self._settled = 0  # the round in which this rank's state was last agreed upon; 0: it is that of a new process
        self._before = StepSnapshot(state, self._loader)
        self._connection = Given.connection
        self._live: LiveRound | None = None  # the round that this rank is in; None: its world never changes
        self._change: WorldChange | None = None  # to the next world of the round
        is_live = dist.get_backend() in LIVE
        if is_live:
            check(self._model)
        if is_live and self._connection is not None:
            self._switch.drop_failed_steps()
            self._connection.cut, self._phase = self._interrupt, Phase.LEFT
            self._happens(PhaseEvent.STARTS)
        else:
            self._happens(PhaseEvent.ROUND_BEGINS if is_live and LAUNCHED in os.environ else PhaseEvent.AGREED)

    @property
    def step(self) -> int:
        """Return the number of finished steps."""
        return self.state.step

    @property
    def _in_round(self) -> LiveRound:
        assert self._live is not None
        return self._live

    @property
    def _switch(self) -> WorldSwitch:
        return WorldSwitch(self._model)

    @property
    def counts(self) -> bool:
        """Return whether the step under way counts: not if its reduction failed, nor while this worker has no state."""
        return self._trains and not self._is_dropped

    @property
    def _trains(self) -> bool:
        """Return whether this rank's samples count: not in a rehearsal, nor while the worker has no state."""
        return self._phase not in (Phase.REHEARSING, Phase.JOINING)

    @property
    def _is_dropped(self) -> bool:
        """Return whether the step under way has no gradients, as its reduction failed: not, if a peer was lost after that."""
        return self._model.failed and self._switch.reducer.completed == self._completed

    @property
    def checkpoints(self) -> Checkpointer | None:
        """Return the checkpointer of the present world."""
        return self._checkpoints.current

    def batches(self) -> Iterator[Any]:
        """Yield this rank's share of each global batch that is left in the epoch; each is one step.

        A batch is None where this rank has no sample of it: call ``model.skip()`` in place of forward and backward. If the world changes,
        the gradients of the step under way are None, which optimizers leave out; the step does not count, and its batch comes again.
        A step in which the script leaves the loop counts if its gradients came. Raises CheckpointError if two
        saves in a row fail, and TrainError after a batch without a reduction, or with several.
        """
        return self._loop(lambda: self._loader)

    def steps(self) -> Iterator[Step]:
        """Yield each global batch that is left in the epoch as a loop over this rank's micro-batches.

        See ``ElasticDataLoader.steps``: the loader's ``micro_batch_size`` is the most samples of one.
        The last backward of a step reduces; a rank without samples has an empty loop. Else as ``batches``.
        """
        return self._loop(lambda: steps_at_once(self._loader, self._model))

    def _loop(self, begin: Callable[[], Iterable[Any]]) -> Iterator[Any]:
        """Yield each batch of ``begin()`` that is left in the epoch; end its step when the script comes back."""
        self._begin_loop()
        epoch = self._loader.epoch
        while self._loader.epoch == epoch and self._phase is not Phase.LATE:
            for batch in begin():
                has_weight = self._phase is not Phase.JOINING
                self._switch.count_samples(has_weight)
                if batch is not None:
                    self._model.set_samples(self._loader.samples if has_weight else 0)
                self._completed, self._open = self._switch.reducer.completed, (token := object())
                try:
                    yield batch
                except GeneratorExit:  # the script has left the loop
                    self._end_loop(token)
                    raise
                if self._open is not token:
                    raise TrainError("run.save() or another loop came within the loop over the batches: leave that loop first")
                self._open = None
                trained = self._trains
                if not self._end_step():
                    if not trained or self._phase is Phase.JOINING:
                        epoch = self._loader.epoch  # a new worker is in that of the others now
                    break

    def _begin_loop(self) -> None:
        """Do what is due before the first batch: first what follows the step in which the loop was left."""
        self._before.verify()
        self._end_loop(self._open)
        self._saves_done = 0
        self._happens(PhaseEvent.COMES_BACK)
        if self._left == self._worlds:
            self._follow_up(dropped=False)
        self._left = None
        self._happens(PhaseEvent.LOOP_BEGINS, self._round_over)
        if self._phase is not Phase.LATE:
            self._before.take()  # with what the script has done between two epochs, such as the step of a scheduler

    def _end_loop(self, token: object | None) -> None:
        """Count the step in which the script has left the loop if its reduction was made; else its batch comes again.

        ``token``: of its batch; nothing is done unless that is still open. This takes part in nothing: an exception may be ending this
        worker, and then its peers go on without it. So what follows a step is done when the script comes back.
        """
        if token is None or token is not self._open:
            return
        self._open, self._left = None, -1
        if self._model.failed:
            self._tried += bool(self._before.others)
        counts = self._switch.reducer.completed > self._completed
        if counts:
            self._left = self._worlds
        if counts and self._phase is not Phase.REHEARSING:
            self.state.step += 1
            self._before.take()
            self._before.restore()  # after an epoch's last batch: the next one begins, as where the loop ends
            self._ask_again()
        else:
            self._before.restore()

    def _ask_again(self) -> None:
        """Ask again to take a new worker in, if a reduction that nobody may follow up has asked for it."""
        if self._live is not None and self._change is None and ADMIT in self._model.agreement.requests:
            self._model.request(ADMIT)

    def _end_step(self) -> bool:
        """Count the step, unless its reduction failed. Return whether the world is still the same: else what was loaded ahead is wrong."""
        settle()  # the others wait for what an exception has interrupted, before they come to the collectives of a checkpoint
        dropped = self._is_dropped
        if not dropped:
            self._verify_step()
        if self._phase is Phase.REHEARSING or self._model.failed:  # other parts may not be what they are on the other ranks
            self._tried += bool(self._before.others)
        if dropped and self._phase is not Phase.JOINING and (changed := self._before.changed):
            log.warning(CHANGED, ", ".join(changed), self.state.step + 1)
        if dropped or self._phase is Phase.REHEARSING:
            self._before.restore()
        else:
            self.state.step += 1
            self._before.take()
        return self._follow_up(dropped)

    def _verify_step(self) -> None:
        """Raise TrainError unless the script has made one reduction for its batch, with the same parameters as before.

        A step with another number would count with other gradients, or not count, where a peer is lost.
        """
        made = self._switch.reducer.completed - self._completed
        if made == 0:
            raise TrainError(
                f"no reduction was made for the batch of step {self.state.step + 1}: make one for each batch "
                "before asking for the next. To accumulate gradients use run.steps(); for a batch that is "
                "left out, also after an exception, call model.skip()"
            )
        if made > 1:
            raise TrainError(
                f"{made} reductions were made for the batch of step {self.state.step + 1}: make one for each "
                "batch, and all other backwards of it within model.no_sync()"
            )
        self._before.verify_groups()

    def _follow_up(self, dropped: bool) -> bool:
        """Do what follows a step: a save that is due, and a change of the world.

        Return whether the world is still the same. Raises TrainError if another rank has left the loop, and
        takes part in this step from ``save``.
        """
        if self._live is not None and not dropped and LEFT in self._model.agreement.requests:
            raise TrainError(ONE_HAS_LEFT)
        if not dropped and self._phase is not Phase.REHEARSING:
            self._save()
        number = self._worlds
        is_alone = self._phase is Phase.TRAINING and self._in_round.size == 1
        facts = (NONE if dropped else Fact.COUNTS) | (NONE if self._steps_left else Fact.EPOCH_ENDS) | (Fact.ALONE if is_alone else NONE)
        self._happens(PhaseEvent.STEP_ENDS, facts | self._round_over)
        return self._worlds == number

    @property
    def _steps_left(self) -> int:
        """Return how many steps are left in the epoch after one that counts."""
        return self._loader.left if self._loader.consumed else 0

    def _change_world(self) -> Following | None:
        """Do what is due after a step to go on to the next world of the round, if there is one."""
        if self._change is None:
            if ADMIT not in self._model.agreement.requests:
                return None
            if self._switch.plans:
                self._model.request(ADMIT)  # later: the buckets of the next world are made by the plan
            else:
                self._change = WorldChange(self._in_round, self._model, self.state, Given.backend, Given.timeout)
        elif self._change.after_step(self._steps_left):
            return PhaseEvent.ALL_WHOLE, NONE
        return None

    def _share_data(self) -> None:
        """Share the data in the world that this rank has switched to, and in which all ranks are whole now."""
        live = self._in_round
        assert self._change is not None and self._change.world is not None
        self._checkpoints.close()
        world, self._change = self._change.world, None
        live.begin(world)
        self._loader.set_world(live.rank, live.size)
        live_sockets.begin()  # the checkpoints make a group of their own

    def _save(self) -> None:
        """Offer the state to the checkpointer. If a peer is lost meanwhile the agent says so, and the step counts all the same."""
        try:
            self._checkpoints.offer()
        except RuntimeError as error:
            if not self._is_loss(error):
                raise

    def save(self) -> None:
        """Save the state of the last step to the disk, also where it is not due, and return when that checkpoint is published.

        Every rank calls it after the loop, or between two epochs. A step that was restored from the newest checkpoint, or whose checkpoint
        was published already, is not saved again. If a peer is lost meanwhile, this rank goes on in the next round, and the ranks that are
        left save there; if these have seen it published and have gone on, this call returns. Does nothing without ``checkpoints``.

        Raises CheckpointError if the state cannot be saved, or is not published: the disk is full, for example. Raises TrainError if
        the others have gone on without this worker, which was cut off for long.
        """
        self._saves = True
        try:
            self._end_loop(self._open)
            settle()
            was_late = self._phase is Phase.LATE
            self._happens(PhaseEvent.COMES_BACK)
            if was_late:
                self._must_be_whole()
            else:
                self._leave_loop()
            self._save_together()
        finally:
            self._saves, self._saves_done = False, self._saves_done + 1

    def _leave_loop(self) -> None:
        """Find out in a reduction whether all ranks have left the loop.

        Raises TrainError if not: where a script counts batches or epochs by itself, a rank that came later may
        still be in the loop, and the two would wait for each other.
        """
        if self._phase is Phase.REHEARSING:
            return  # the rehearsal ends when the script comes back to the loop
        left, self._left, number, trained = self._left, None, self._round, self._trains
        if self._live is None:
            return
        if left == self._worlds:
            self._follow_up(dropped=False)
            if trained:
                self._must_be_whole()
        if self._round != number or self._model.failed:
            return  # where a peer is lost, others may be in ``save`` already
        self._model.request(LEFT)
        self._model.skip()
        self._switch.withdraw(LEFT)
        if not self._model.failed:
            if LEFT not in self._model.agreement.unanimous:
                raise TrainError(ONE_HAS_LEFT)
            self._ask_again()

    def _save_together(self) -> None:
        """Publish the last step with the ranks that are left, unless these have seen it published, and have gone on."""
        number = None
        while number != self._round:
            if number is not None:
                self._must_be_whole()
            number = self._round
            self._happens(PhaseEvent.SAVES)

    def _must_be_whole(self) -> None:
        """Raise TrainError if this worker, which was cut off for long, would leave the script with a part of the others' state."""
        if self._phase is Phase.JOINING:
            raise TrainError("other workers have gone on without this one, so its last step is not saved; it has to begin anew")

    def _publish(self) -> None:
        """Save the state of the last step, unless it comes from the newest checkpoint, and wait until it is published."""
        if self._checkpoints.current is not None and self._model.failed and self._live is not None:
            raise ReductionFailed("a peer was lost in the last step")  # others may have completed a step that this rank has not
        self._checkpoints.publish()

    # -- phases ---------------------------------------------------------------------------------------------------------

    def _happens(self, event: PhaseEvent, facts: Fact = NONE) -> None:
        """Do what follows ``event`` in the present phase, and what follows that in turn."""
        following: Following | None = (event, facts)
        while following is not None:
            self._phase, actions = phases.step(self._phase, *following)
            following = self._perform(actions)

    def _perform(self, actions: Sequence[PhaseAction]) -> Following | None:
        """Do ``actions``, each by the method of its name. Return the event with which the last one has ended."""
        following = None
        try:
            for action in actions:
                following = getattr(self, f"_{action.name.lower()}")()
        except (RuntimeError, ValueError, OSError) as error:  # what torch raises when a peer is lost
            if not self._is_loss(error):
                raise
            following = PhaseEvent.PEERS_LOST, NONE
        return following

    def _is_loss(self, error: Exception) -> bool:
        """Return whether ``error`` comes from a lost peer: the agent asks this worker to leave its round then."""
        connection = self._connection
        if connection is None or not phases.can(self._phase, PhaseEvent.PEERS_LOST) or isinstance(error, ModelMismatch | WrongUse):
            return False
        begins = self._settled != max(self._round, 1)  # this world has not begun, so the error is not that of a save
        is_lost = live_sockets.is_cut or self._is_asked()
        if isinstance(error, CheckpointError) and not is_lost and not begins and self._checkpoints.fails_again():
            return False
        if self._phase is Phase.JOINING:
            self._end_if_over()
        return connection.wait_until_asked(PATIENCE, self.state.step, f"{type(error).__name__}: {error}")

    @property
    def _round_over(self) -> Fact:
        return Fact.ROUND_OVER if self._model.failed or self._is_asked() else NONE

    def _is_asked(self) -> bool:
        """Return whether the agent asks this worker to leave its round."""
        return self._connection is not None and self._connection.asked

    # -- changes of the world -----------------------------------------------------------------------------------------

    def _interrupt(self) -> None:
        """Let the main thread's waits for peers fail. Called in a thread."""
        if (live := self._live) is not None:
            live.stop()
        live_sockets.cut()
        self._switch.interrupt("the agent ends this round")
        abort_groups()

    def _leave(self) -> None:
        """Take no part in the round any more, and promise that. Its checkpoints end before: nothing of it may be published later."""
        self._checkpoints.close()
        if self._change is not None:
            self._change.abandon()
            self._change = None
        if self._live is not None:
            self._live.leave()
        live_sockets.cut()  # the agent may not have heard yet, and groups of the script's own have other peers than the lost one
        self._promise(self.state.step)
        groups = leave_groups()
        self._switch.leave()  # while the agents form the next round
        end_beside(groups)

    def _promise(self, steps: int) -> None:
        """Tell the agent that this worker, which has made so many ``steps``, takes no part in the round."""
        assert self._connection is not None
        self._live = None
        live_sockets.forget()
        self._connection.leave(steps, self._settled)

    def _end_if_over(self) -> None:
        self._in_round.end_if_over(OVER)

    def _wait_for_round(self) -> Following:
        """Take part in the next round, when the agent starts it."""
        assert self._connection is not None
        self._round, env = self._connection.enter(self._round, PATIENCE)
        if env:
            os.environ.update(env)
            begin_round()
        return PhaseEvent.ROUND_BEGINS, NONE

    def _find_world(self) -> Following:
        """Find out which ranks begin the round."""
        live_sockets.begin()
        self._live = live = LiveRound(self._round, self._is_asked)
        is_in = live.has(live.find_first())
        is_prepared = self._rehearsal is not None or self._settled > 0
        return PhaseEvent.WORLD_FOUND, Fact.IN_WORLD if is_in else Fact.PREPARED if is_prepared else NONE

    def _enter_world(self) -> None:
        """Come to the first world of the round, with all of its ranks."""
        self._in_round.begin(self._in_round.enter())

    def _wait_until_taken_in(self) -> Following:
        self._in_round.enter()
        return PhaseEvent.TAKEN_IN, NONE

    def _begin_rehearsal(self) -> None:
        """Let the script make a step by itself, while this worker takes part in no round: it may be parked meanwhile."""
        self._in_round.leave()
        self._promise(0)
        self._be_alone()
        self._loader.set_world(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        self._rehearsal = Rehearsal(self.state, self._model, self._loader)

    def _be_alone(self) -> None:
        """Have a world of this rank alone, if it has left a round before it had the state of the others."""
        if not dist.is_initialized():
            init_alone()
            self._model.set_group(init_sync=False)

    def _end_rehearsal(self) -> None:
        """Forget what the rehearsal has changed. The round for which it was made may still be the newest."""
        assert self._rehearsal is not None
        self._rehearsal.undo()
        self._round -= 1
        self._worlds += 1

    def _join(self) -> None:
        """Take part in a world whose other ranks train already. Their state comes with the next steps."""
        live, self._settled = self._in_round, 0  # an older state that this rank may have is overwritten slice by slice
        if self._rehearsal is None:
            self._rehearsal = Rehearsal(self.state, self._model, self._loader)  # to be brought back if nobody has a whole state then
        self._be_alone()
        self._change = change = WorldChange(live, self._model, self.state, Given.backend, Given.timeout, live.takes_in)
        self._loader.set_world(0, change.sharing)
        self._worlds += 1
        self._before.take()

    def _make_groups(self) -> Following:
        """Make the process groups of a world, or of all that the launcher has started, and agree on the state."""
        end_beside(leave_groups())
        c10d._world.group_count = 0  # of which names are made: one that could not be made, as a peer was lost, has been counted
        live = self._live
        if live is None:
            with one_prefix():
                dist.init_process_group(Given.backend, timeout=Given.timeout)
            self._model.set_group(init_sync=False)
            return self._settle()
        for request in (ADMIT, SWITCH, WHOLE):
            self._switch.withdraw(request)  # what this rank has asked for in a world that is over
        if self._rehearsal is not None:
            self._rehearsal.train_as_before()  # nobody has a state
        with connecting(live.present):
            init_default_group(Given.backend, live.store(live.present), live.rank, live.size, Given.timeout)
            self._model.set_group(init_sync=False)
        return self._settle()

    def _be_late(self) -> None:
        """Let the script do what is left until the next batch, or the next ``save``. The others have done it: collectives fail until then.

        What it changes in the state is not kept: that is the state of the others, who have made that change.
        """
        self._before.take(with_others=True)
        self._worlds += 1
        live_sockets.end()  # those of the script, from now on, are not cut
        live_sockets.cut()
        self._switch.interrupt("the other ranks are in the next epoch")
        abort_groups()

    def _put_back(self) -> None:
        """Undo what the script of a late rank has changed. The connection to the store of the round was cut with those of the groups."""
        self._before.restore()
        live_sockets.forget()
        live_sockets.begin()
        self._in_round.reconnect()

    def _meet_again(self) -> None:
        """Come to a world of the same ranks. Those that were ahead wait here for the late ones."""
        self._in_round.repeat()

    def _look_for_others(self) -> None:
        """Take the other workers of the round in when they are ready; tell the agent if none is missing."""
        live_sockets.end()
        self._in_round.look_for_ready(lambda: self._model.request(ADMIT))
        if self._in_round.whole and self._connection is not None:
            self._connection.gathered()

    def _settle(self) -> Following:
        """Give all ranks the state of the furthest one; where nobody has trained, that of the newest checkpoint, or rank 0's.

        Where ranks are late in the script, all have to meet again, in another world, when these have come as far as the others.
        """
        world = dist.group.WORLD
        assert world is not None
        rank, mine = dist.get_rank(), [self._settled, self.state.step, *self._place(), -self._tried]
        source, behind = furthest(everyone := [tuple(theirs) for theirs in gather(mine, world, CPU)])
        begins_anew = everyone[source][0] == 0
        self._loader.set_world(rank, len(everyone))
        if begins_anew and self._rehearsal is not None:
            self._rehearsal.forget()
        if behind:
            copy_state(self.state, source, rank in behind, world)
        if begins_anew:
            return PhaseEvent.AGREED, Fact.NEW
        are_late = late([theirs[2:-1] for theirs in everyone])
        if rank in are_late:
            self._tried = 1 + max(-theirs[-1] for theirs in everyone)  # it gets the state once more when all meet
            return PhaseEvent.AGREED, Fact.BEHIND
        return PhaseEvent.AGREED, Fact.AHEAD if are_late else NONE

    def _place(self) -> tuple[int, bool, int]:
        """Return how far this rank is in the script: its epoch, whether it is within that, and calls of ``save`` since the one before."""
        return self._loader.epoch, not self._saves, self._saves_done

    def _begin_anew(self) -> None:
        """Begin to train with the newest checkpoint, if there is one."""
        self._begin(restores=True)

    def _begin(self, restores: bool = False) -> None:
        """Begin to train in this world."""
        world = self._live.world if self._live is not None else None
        with connecting(world) if world is not None else nullcontext():
            self._checkpoints.begin()
        if restores:
            self._checkpoints.restore()
        self._model.check_replicas(gradually=True)
        self._settled, self._tried = max(self._round, 1), 0
        self._worlds += 1
        self._rehearsal = None
        self._before.take()
        self._on_change(dist.get_rank(), dist.get_world_size())

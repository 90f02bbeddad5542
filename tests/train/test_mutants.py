"""Every rule of the training core has a test that notices when it is taken out, as in tests/rendezvous/test_mutants.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.changes import always, gets, instead_of, never, part_always, returns, skips, without
from tests.support.mutants import Mutant, copy, each, failing, mutants_in, named_in, unnoticed

__all__ = ["copy"]  # the fixture


mutant = named_in("elastirun/train", "tests/train")
quoted = mutants_in("elastirun/train", "tests/train")
of_steps = named_in("elastirun", "tests/train")
MEAN = "a_step_has_the_mean_over_the_global_batch_whatever_its_micro_batches"
AUGMENTED = "augmentations_are_the_same_whatever_the_world_and_the_workers"
BALANCED = "a_slow_rank_gets_less_and_the_training_is_the_same_also_resumed_at_another_world_size"
BITS = "the_same_bits_at_any_number_of_ranks"
REFUSED = "what_would_depend_on_the_number_of_ranks_is_refused"
SHARDS = "each_sample_once_whatever_becomes_of_the_world[3-64]"
REAL = "each_sample_once_on_real_ranks_with_loading_workers"
LEFT = "the_statistics_of_the_last_reduction_are_used_whatever_forwards_came_after_it"
SELDOM = "a_stop_is_not_missed_by_looking_seldom_nor_by_freezing_something"
LEAVES = "everybody_ends_as_if_it_was_signalled_when_the_last_one_is_done"
HANDLERS = "a_handler_that_was_there_before_is_called_and_comes_back"
FAILURE = "a_signal_after_a_failure_ends_a_rank_at_once"
SLOW = "a_kill_in_a_save_costs_that_save_alone_while_the_disk_is_slow"
NEXT = "the_first_save_in_the_next_world_leaves_the_newest_copy_and_is_newer"
PUBLISHES = "    Row(TRAINING, PhaseEvent.SAVES, NONE, TRAINING, (PhaseAction.PUBLISH,)),\n"
MUTANTS = (
    mutant(
        "what only some ranks have is a part of every rank's tree",
        *("state.union:Union.completed", returns("tree")),
        seen_by="mesh_checkpoints::the_trees_of_all_stages_are_the_tree_of_the_whole",
    ),
    mutant(
        "values that others have from this rank are watched",
        *("state.union:Union.is_for", returns("True")),
        seen_by="mesh_checkpoints::values_that_one_rank_alone_has_are_those_of_each_save",
    ),
    mutant(
        "stages whose optimizers have other options are refused",
        *("state.union:verify_same_options", never("odd")),
        seen_by="mesh_checkpoints::stages_whose_optimizers_have_other_options_are_refused_when_that_begins",
    ),
    mutant(
        "tensors of one name are compared on all ranks",
        *("checkpoints.same_tensors:compare", never("close")),
        seen_by="mesh::stages_with_the_same_names_are_not_saved_as_copies_of_one_another",
    ),
    mutant(
        "a parameter is cut at multiples of what a kernel takes at once",
        *("zero.rows:Shape.unit", instead_of("math.lcm", "self.width")),
        seen_by="zero::the_parameters_have_the_bits_of_plain_data_parallelism[2-shared memory]",
    ),
    mutant(
        "parts of one box are compared",
        *("checkpoints.same_tensors:part_samples", returns("{}")),
        seen_by="mesh_checkpoints::parts_of_one_box_are_compared[tp]",
    ),
    mutant(
        "values that are removed are gone",
        *("state.union:_lacking", returns("whole")),
        seen_by="mesh_checkpoints::values_that_are_removed_are_gone",
    ),
    mutant(
        "a sharded optimizer takes no other rank's part",
        *("zero.sharded_optimizer:ShardedOptimizer.load_state_dict", without("self._verify_own")),
        seen_by="zero::what_cannot_be_sharded_is_refused_in_one_line",
    ),
    mutant(
        "the rows of the others come after each step",
        *("zero.sharded_optimizer:ShardedOptimizer.step", without("gathering.run")),
        seen_by="zero::the_parameters_have_the_bits_of_plain_data_parallelism[2-group]",
    ),
    mutant(
        "a chunk is not filled before it has arrived everywhere",
        *("zero.gathering:Gathering.run", never("len(under_way)")),
        seen_by="zero::the_parameters_have_the_bits_of_plain_data_parallelism[3-group]",
    ),
    mutant(
        "a sharded optimizer is not used in another world",
        *("zero.sharded_optimizer:ShardedOptimizer._check", never("transport")),
        seen_by="zero::what_cannot_be_sharded_is_refused_in_one_line",
    ),
    mutant(
        "a stage's norm counts for all stages",
        *("mesh:_norm_over", always("mesh.size")),
        seen_by="build_mesh::gradients_are_clipped_by_the_norm_of_the_whole_model[0.5-2.0]",
    ),
    mutant(
        "in a job with a mesh all ranks are no default",
        *("mesh:verify_no_mesh", returns("None")),
        seen_by="build_mesh::a_job_with_a_mesh_has_to_say_which_ranks_share_data",
    ),
    mutant(
        "a loop in which a rank has become late has no batch",
        *("elastic:Elastic._loop", part_always("Phase.LATE")),
        seen_by="live_loop::a_script_that_left_the_loop_in_the_failed_last_step_gets_no_batch_of_the_epoch_that_the_others_are_in",
    ),
    mutant(
        "a rehearsal ends also where the script saves before it comes back to the loop",
        *("elastic:Elastic._leave_loop", never("Phase.REHEARSING")),
        seen_by="live_loop::a_new_worker_whose_script_leaves_the_loop_and_saves_ends_its_rehearsal_when_it_comes_back",
    ),
    quoted(
        "what the checkpoints of a later world wait for is cut",
        *("elastic", "        live_sockets.begin()  #", "        return self._begin(restores=False)  #"),
        *("live_loop", "what_the_checkpoints_of_a_later_world_wait_for_is_cut"),
    ),
    mutant(
        "the agent is told for how long the ranks compute",
        "reduction.conclusion:Conclusion.conclude",
        without("computed"),
        seen_by="progress::the_agent_is_told_for_how_long_this_rank_and_the_median_rank_compute",
    ),
    mutant(
        "what all ask for is not what one asks for",
        "reduction.control_words:ControlWords.read",
        gets("unanimous", "frozenset((name for name, count in asked.items() if count))"),
        seen_by="elastic::ranks_know_what_one_asks_for_and_what_all_ask_for",
    ),
    mutant(
        "who has left a round without a state has a world of its own",
        *("elastic:Elastic._be_alone", without("set_group")),
        seen_by="elastic::who_has_left_a_round_without_a_state_is_alone_again",
    ),
    mutant(
        "what is left of the state comes with the last slice",
        "live.state_slices:_rest_is_due",
        instead_of("together or not is_slice", "not is_slice"),
        seen_by="state_slices::what_is_left_comes_with_the_last_slice_unless_it_is_more_than_a_slice",
    ),
    mutant(
        "much that is left of the state comes by itself",
        "live.state_slices:_rest_is_due",
        instead_of("together or not is_slice", "True"),
        seen_by="state_slices::what_is_left_comes_with_the_last_slice_unless_it_is_more_than_a_slice",
    ),
    mutant(
        "counts of steps come before the first slice",
        "live.state_slices:Receiver._receive_values",
        instead_of("fill_", "told['single'][name]"),
        seen_by="state_slices::a_new_rank_has_the_same_state_although_all_train_meanwhile[Adam-True]",
    ),
    mutant(
        "a slice has what the optimizer keeps for its elements",
        "live.state_slices:belonging",
        instead_of("(param, *kept)", "(param,)"),
        seen_by="state_slices::a_new_rank_has_the_same_state_although_all_train_meanwhile[Adam-True]",
    ),
    mutant(
        "an optimizer that is not known to treat elements alone gets all at once",
        "live.state_slices:belonging",
        never("is_elementwise"),
        seen_by="state_slices::an_optimizer_of_another_package_comes_at_once",
    ),
    mutant(
        "replicas are not compared while one has no state",
        "reduction.conclusion:Conclusion.conclude",
        instead_of(
            "every > 0 and (not self._parts.extensions.hooked) and (not held)",
            "every > 0 and (not self._parts.extensions.hooked)",
        ),
        seen_by="state_slices::a_new_rank_has_the_same_state_although_all_train_meanwhile[SGD-True]",
    ),
    mutant(
        "groups are not changed between two epochs",
        "live.world_change:WorldChange.after_step",
        instead_of("SWITCH in unanimous and left > 0", "SWITCH in unanimous"),
        seen_by="elastic::the_last_step_of_an_epoch_is_not_the_last_one_in_the_old_groups[True]",
    ),
    mutant(
        "replicas are compared after a change of the world",
        "elastic:Elastic._begin",
        without("check_replicas"),
        seen_by="elastic::replicas_are_compared_after_a_change_of_the_world",
    ),
    mutant(
        "all elements are compared in turn",
        "reduction.replica_check:GradualCheck.go_on",
        instead_of("len(part)", "len(flat)"),
        seen_by="more::replicas_are_compared_gradually_each_element_once",
    ),
    quoted(
        "no step compares more than its share",
        *("reduction/replica_check", "            room -= part.nbytes\n", ""),
        *("more", "replicas_are_compared_gradually_each_element_once"),
    ),
    of_steps(
        "the furthest rank wins",
        "worker.live_worlds:furthest",
        gets("best", "everyone[0]"),
        seen_by="elastic::the_furthest_of_the_newest_round_wins[a_step_ahead]",
    ),
    mutant(
        "a state of an older round does not count",
        "elastic:Elastic._settle",
        gets("mine", "[min(self._settled, 1), self.state.step, *self._place(), -self._tried]"),
        seen_by="elastic::the_furthest_of_the_newest_round_wins[an_older_history_does_not_count]",
    ),
    of_steps(
        "steps without a state make no rank the furthest",
        "worker.live_worlds:furthest",
        never("0"),
        seen_by="elastic::the_furthest_of_the_newest_round_wins[steps_without_a_state]",
    ),
    mutant(
        "who is in an older epoch than others is late",
        "elastic:Elastic._place",
        instead_of("epoch", "0"),
        seen_by="elastic::who_has_not_come_as_far_in_the_script_as_others_is_late[an_older_epoch]",
    ),
    mutant(
        "who saves while others train is late",
        "elastic:Elastic._place",
        never("_saves"),
        seen_by="elastic::who_has_not_come_as_far_in_the_script_as_others_is_late[a_save]",
    ),
    mutant(
        "where nobody has a state nobody is late",
        *("elastic:Elastic._settle", gets("begins_anew", "False")),
        seen_by="elastic::who_has_not_come_as_far_in_the_script_as_others_is_late[no_state]",
    ),
    quoted(
        "what one who is late does to its state is not kept",
        *("elastic", "            self._tried = 1 + max(-theirs[-1] for theirs in everyone)", "            pass"),
        *("elastic", "who_has_not_come_as_far_in_the_script_as_others_is_late[a_save]"),
    ),
    mutant(
        "nor where all others are lost meanwhile",
        *("elastic:Elastic._put_back", without("restore")),
        seen_by="elastic::what_comes_until_the_next_batch_does_not_count_for_one_who_is_late",
    ),
    mutant(
        "nor in its averages",
        *("live.step_snapshot:StepSnapshot.restore", never("_kept_others")),
        seen_by="live_loop::what_a_late_rank_changes_until_it_has_caught_up_is_not_kept",
    ),
    mutant(
        "a worker whose older state does not count stays in the loop",
        "elastic:Elastic._loop",
        instead_of("not trained or self._phase is Phase.JOINING", "not trained"),
        seen_by="live_loop::a_worker_whose_older_state_does_not_count_stays_in_the_loop",
    ),
    mutant(
        "a worker alone leaves its round",
        *("elastic:Elastic._follow_up", gets("is_alone", "False")),
        seen_by="live_loop::a_worker_alone_leaves_its_round_also_where_each_step_is_the_last_of_an_epoch",
    ),
    mutant(
        "the step in which the script leaves the loop counts",
        "elastic:Elastic._end_loop",
        gets("counts", "False"),
        seen_by="live_loop::the_step_in_which_the_script_leaves_the_loop_counts_if_its_reduction_was_made[False]",
    ),
    mutant(
        "but not if its reduction failed",
        "elastic:Elastic._end_loop",
        gets("counts", "True"),
        seen_by="live_loop::the_step_in_which_the_script_leaves_the_loop_counts_if_its_reduction_was_made[True]",
    ),
    mutant(
        "who leaves the loop in a failed step leaves the round when it comes back",
        *("elastic:Elastic._begin_loop", instead_of("_round_over", "NONE")),
        seen_by="live_loop::a_script_that_leaves_the_loop_in_a_failed_step_leaves_its_round_when_it_comes_back",
    ),
    mutant(
        "a batch without a reduction is an error",
        "elastic:Elastic._verify_step",
        never("0"),
        seen_by="live_loop::a_batch_without_one_reduction_of_its_own_is_an_error[live-accumulates]",
    ),
    mutant(
        "a batch with two reductions is an error",
        "elastic:Elastic._verify_step",
        never("1"),
        seen_by="live_loop::a_batch_without_one_reduction_of_its_own_is_an_error[live-makes_two_steps]",
    ),
    mutant(
        "a batch whose reduction failed is none",
        "elastic:Elastic._end_step",
        instead_of("not dropped", "True"),
        seen_by="live_loop::steps_of_micro_batches_are_those_of_whole_batches[a_peer_is_lost]",
    ),
    mutant(
        "a step is not counted twice by a save within the loop",
        "elastic:Elastic._loop",
        never("_open"),
        seen_by="live_loop::a_batch_without_one_reduction_of_its_own_is_an_error[live-saves_in_the_loop]",
    ),
    mutant(
        "a step of micro-batches that was left at its end is consumed",
        "data.loader:steps_at_once",
        without("done"),
        seen_by="live_loop::steps_of_micro_batches_are_those_of_whole_batches[left_at_its_end_then_a_peer_is_lost]",
    ),
    mutant(
        "what follows a step is done when the script comes back to the loop",
        "elastic:Elastic._begin_loop",
        never("_worlds"),
        seen_by="live_loop::ranks_that_leave_the_loop_at_different_batches_and_come_back_make_the_same_saves[batches1]",
    ),
    mutant(
        "and when it saves",
        "elastic:Elastic._leave_loop",
        never("_worlds"),
        seen_by="live_loop::ranks_that_leave_the_loop_at_different_batches_and_come_back_make_the_same_saves[batches2]",
    ),
    mutant(
        "who is in the loop learns that another has left it",
        "elastic:Elastic._follow_up",
        instead_of(
            "self._live is not None and (not dropped) and (LEFT in self._model.agreement.requests)",
            "self._live is not None and False and (LEFT in self._model.agreement.requests)",
        ),
        seen_by="live_loop::a_rank_that_saves_while_another_one_is_in_the_loop_is_an_error_on_both[batches0]",
    ),
    mutant(
        "also where none has left it in the middle of an epoch",
        "elastic:Elastic._leave_loop",
        instead_of("_live", "left"),
        seen_by="live_loop::a_rank_that_saves_between_epochs_of_another_one_is_an_error_on_both",
    ),
    mutant(
        "who has left the loop learns that another is in it",
        "elastic:Elastic._leave_loop",
        never("agreement"),
        seen_by="live_loop::a_rank_that_saves_while_another_one_is_in_the_loop_is_an_error_on_both[batches0]",
    ),
    quoted(
        "to leave the loop in the last step of an epoch is as to go on",
        *("elastic", "            self._before.restore()  # after an", "            pass  # after an"),
        *("live_loop", "ranks_that_leave_the_loop_in_one_step_save_it[batches1-saved1]"),
    ),
    mutant(
        "a step counts where somebody still holds the loop",
        "elastic:Elastic.save",
        without("_end_loop"),
        seen_by="live_loop::a_step_counts_once_where_somebody_still_holds_the_loop",
    ),
    mutant(
        "and only once",
        "elastic:Elastic._end_loop",
        instead_of("token is None or token is not self._open", "token is None"),
        seen_by="live_loop::a_step_counts_once_where_somebody_still_holds_the_loop",
    ),
    mutant(
        "a request to take a new worker in is made again",
        "elastic:Elastic._end_loop",
        without("_ask_again"),
        seen_by="live_loop::a_request_to_take_a_new_worker_in_is_made_again_where_the_script_leaves_the_loop",
    ),
    mutant(
        "without an agent there is no other round to save in",
        *("elastic:Elastic._publish", part_always("_live")),
        seen_by="live_loop::without_an_agent_a_state_is_saved_after_an_interrupted_reduction",
    ),
    mutant(
        "parts that have become something else are put back",
        "live.state_copy:StateKept.put_back",
        gets("back[name]", "here.detach().copy_(kept) if here is not None else kept.clone()"),
        seen_by="live_loop::parts_that_have_become_something_else_are_put_back[one_element]",
    ),
    mutant(
        "a step counts when the script has left the loop in it",
        "elastic:Elastic._loop",
        without("_end_loop"),
        seen_by="live_loop::the_step_in_which_the_script_leaves_the_loop_counts_if_its_reduction_was_made[False]",
    ),
    mutant(
        "a step counts whose gradients were used before a peer was lost",
        "elastic:Elastic._is_dropped",
        always("_completed"),
        seen_by="live_loop::a_step_counts_whose_gradients_were_used_before_a_peer_was_lost",
    ),
    mutant(
        "what an exception has interrupted is made before a save",
        "elastic:Elastic._end_step",
        without("settle"),
        seen_by="live_loop::a_backward_that_an_exception_has_interrupted_is_made_before_a_save[due]",
    ),
    mutant(
        "and before the last one",
        *("elastic:Elastic.save", without("settle")),
        seen_by="live_loop::a_backward_that_an_exception_has_interrupted_is_made_before_a_save[last]",
    ),
    quoted(
        "a worker that an exception ends takes part in no reduction on its way out",
        *("elastic", "        counts = self._switch", "        settle()\n        counts = self._switch"),
        *("live_loop", "a_worker_that_an_exception_ends_takes_part_in_no_reduction_on_its_way_out"),
    ),
    mutant(
        "a save that fails twice in a row ends the worker",
        *("live.world_checkpoints:WorldCheckpoints.fails_again", gets("again", "False")),
        seen_by="live_loop::a_save_that_fails_twice_in_a_row_ends_the_worker_with_its_error[fail fail-True]",
    ),
    mutant(
        "a save that was made in between is no failure",
        *("live.world_checkpoints:WorldCheckpoints.offer", gets("_failed", "self._failed")),
        seen_by="live_loop::a_save_that_fails_twice_in_a_row_ends_the_worker_with_its_error[fail fine fail-False]",
    ),
    mutant(
        "a lost peer is no failure of a save",
        *("elastic:Elastic._is_loss", part_always("CheckpointError")),
        seen_by="live_loop::a_save_that_fails_twice_in_a_row_ends_the_worker_with_its_error[lost lost-False]",
    ),
    mutant(
        "a save that cannot be made as the agent ends the round is no failure",
        *("elastic:Elastic._is_loss", gets("is_lost", "False")),
        seen_by="live_loop::a_save_that_fails_twice_in_a_row_ends_the_worker_with_its_error[asked asked-False]",
    ),
    mutant(
        "a last save waits for a step that this rank has lost",
        *("elastic:Elastic._publish", never("failed")),
        seen_by="live_loop::a_last_save_waits_for_a_step_that_this_rank_has_lost",
    ),
    mutant(
        "what a rehearsal has changed beside the model is brought back",
        "live.step_snapshot:Rehearsal.forget",
        without("put_back"),
        seen_by="live_loop::what_a_rehearsal_has_changed_beside_the_model_is_brought_back_for_a_run_that_begins",
    ),
    mutant(
        "who leaves does not wait until all pages are mapped",
        "checkpoints.staging:Staging._map",
        instead_of("self.images[which] is not image or self._stopped", "self.images[which] is not image"),
        seen_by="ckpt_staging::who_leaves_does_not_wait_until_all_pages_are_mapped",
    ),
    mutant(
        "who is in an earlier save than others is late",
        "elastic:Elastic._place",
        instead_of("_saves_done", "0"),
        seen_by="elastic::who_has_not_come_as_far_in_the_script_as_others_is_late[the_save_before]",
    ),
    mutant(
        "the state is that of the one that has come furthest in the script",
        "elastic:Elastic._settle",
        gets("mine", "[self._settled, self.state.step, -self._tried, *self._place()]"),
        seen_by="elastic::who_has_not_come_as_far_in_the_script_as_others_is_late[a_save]",
    ),
    mutant(
        "the collectives of one who is late fail",
        "elastic:Elastic._be_late",
        without("cut"),
        seen_by="elastic::what_comes_until_the_next_batch_does_not_count_for_one_who_is_late",
    ),
    mutant(
        "what a stranger writes in place of ranks is refused",
        "live.live_round:LiveRound._world_after",
        instead_of("parse_ranks", "tuple(ranks)"),
        seen_by="live_round::a_world_that_a_stranger_has_written_is_no_world",
    ),
    mutant(
        "the others of a round find the world after the one in which its ranks meet again",
        "live.live_round:LiveRound.repeat",
        instead_of("f'world/{world.number}'", "f'world/{world.number + 9}'"),
        seen_by="live_round::the_same_ranks_meet_again_in_another_world_and_new_ones_find_the_one_after_it",
    ),
    quoted(
        "who is late when it saves has nothing to save",
        *("live/phases", PUBLISHES, PUBLISHES + PUBLISHES.replace("TRAINING", "LATE")),
        *("elastic", "who_is_late_when_it_saves_has_nothing_to_save_and_saves_the_next_time"),
    ),
    mutant(
        "a state that is being overwritten counts as none",
        *("elastic:Elastic._join", gets("_settled", "self._settled")),
        seen_by="elastic::a_worker_that_is_being_given_the_state_of_the_others_has_none",
    ),
    of_steps(
        "a state of an older round counts as none",
        "worker.live_worlds:first_world",
        instead_of("(rank for rank, settled in having if settled == newest)", "(rank for rank, settled in having)"),
        seen_by="live_round::those_with_the_newest_state_begin[an_older_state_counts_as_none]",
    ),
    of_steps(
        "where nobody has a state all begin together",
        "worker.live_worlds:first_world",
        never("range"),
        seen_by="live_round::those_with_the_newest_state_begin[nobody_has_a_state]",
    ),
    mutant(
        "a world waits for all its ranks",
        "live.live_round:LiveRound._come.look",
        always("_store"),
        seen_by="live_round::a_world_waits_for_all_its_ranks",
    ),
    mutant(
        "a rank with a state that hangs is not waited for for ever",
        "live.live_round:LiveRound.enter",
        instead_of("self._come(world, COME if self._known else math.inf)", "self._come(world)"),
        seen_by="live_round::a_rank_with_a_state_that_hangs_is_not_waited_for_for_ever[2]",
    ),
    mutant(
        "one of the first round is",
        "live.live_round:LiveRound.enter",
        instead_of("COME if self._known else math.inf", "COME"),
        seen_by="live_round::a_rank_with_a_state_that_hangs_is_not_waited_for_for_ever[1]",
    ),
    mutant(
        "who has left asks for no world",
        "live.live_round:LiveRound._look",
        always("is_set"),
        seen_by="live_round::who_has_left_asks_for_no_world",
    ),
    mutant(
        "several new workers are taken in together",
        "live.live_round:LiveRound._look",
        instead_of("now - first > TOGETHER", "True"),
        seen_by="live_round::several_that_are_ready_are_taken_in_together",
    ),
    mutant(
        "nobody waits for ever for another new worker",
        "live.live_round:LiveRound._look",
        instead_of("len(world.ranks) + ready == self._workers or now - first > TOGETHER", "len(world.ranks) + ready == self._workers"),
        seen_by="live_round::one_that_is_ready_does_not_wait_for_ever_for_another_one",
    ),
    mutant(
        "who waits hears that training has ended",
        "live.live_round:LiveRound._unless_over",
        never("_store"),
        seen_by="live_round::who_waits_ends_well_when_training_ends_without_it",
    ),
    mutant(
        "a new worker waits as long as a step takes",
        "live.live_round:LiveRound.enter",
        instead_of("self._come(world, or_over=True)", "self._come(world, COME, or_over=True)"),
        seen_by="live_round::a_new_worker_waits_as_long_as_the_others_need_for_a_step",
    ),
    mutant(
        "who is asked for after the last step ends well",
        "live.live_round:LiveRound.enter",
        instead_of("self._come(world, or_over=True)", "self._come(world)"),
        seen_by="live_round::a_new_worker_that_is_asked_for_after_the_last_step_ends_well",
    ),
    mutant(
        "a buffer that has grown in a rehearsal stays",
        "live.step_snapshot:Rehearsal.undo",
        instead_of("before is not None and before.shape == tensor.shape", "before is not None"),
        seen_by="elastic::a_rehearsal_that_makes_buffers_is_undone_but_for_these",
    ),
    mutant(
        "schedulers of any name are brought back",
        "live.step_snapshot:StepSnapshot.__init__",
        gets("_schedulers", "[part for name, part in named if name == 'scheduler']"),
        seen_by="elastic::every_scheduler_is_brought_back_and_other_parts_are_known_to_have_changed",
    ),
    mutant(
        "a rank without traces of a dropped step is further",
        "elastic:Elastic._settle",
        gets("mine", "[self._settled, self.state.step, *self._place(), 0]"),
        seen_by="elastic::the_furthest_of_the_newest_round_wins[dropped_steps]",
    ),
    mutant(
        "a new rank that does not fit ends nobody else",
        "live.world_change:WorldChange._raise_error",
        never("ModelMismatch"),
        seen_by="elastic::a_new_rank_that_does_not_fit_does_not_end_those_that_train",
    ),
    mutant(
        "a state comes before the epoch is over",
        "live.state_slices:Sender._least",
        instead_of("max(1, self._left)", "100"),
        seen_by="state_slices::a_state_comes_in_as_few_pieces_as_an_epoch_has_steps_left[2]",
    ),
    quoted(
        "a new rank is whole before the epoch is over",
        *("live/world_change", "self._switch(left)\n                self._say_if_done()\n", "self._switch(left)\n"),
        *("elastic", "the_last_step_of_an_epoch_is_not_the_last_one_in_the_old_groups[False]"),
    ),
    mutant(
        "wrong use is no lost peer",
        "elastic:Elastic._is_loss",
        instead_of("ModelMismatch | WrongUse", "ModelMismatch"),
        seen_by="elastic::wrong_use_within_a_round_is_no_lost_peer",
    ),
    quoted(
        "who looks for new workers survives a broken connection",
        *("live/live_round", "RuntimeError:\n                self._open_again()\n", "RuntimeError:\n                return\n"),
        *("live_round", "who_looks_for_new_workers_finds_them_although_its_connection_has_broken"),
    ),
    mutant(
        "a wait survives a broken connection",
        "live.live_round:LiveRound._wait",
        always("missed"),
        seen_by="live_round::a_new_worker_is_taken_in_although_its_connection_has_broken[a_world]",
    ),
    mutant(
        "a wait without a store has an end",
        "live.live_round:LiveRound._wait",
        never("missed"),
        seen_by="live_round::a_wait_without_a_store_ends_so_that_the_agent_hears_of_it",
    ),
    mutant(
        "who leaves the round does not connect again",
        "live.live_round:LiveRound._open_again",
        always("_stopped"),
        seen_by="live_round::a_worker_that_leaves_the_round_does_not_connect_again",
    ),
    mutant(
        "a change that is given up waits for nobody",
        "live.live_round:LiveRound._wait",
        instead_of("self._asked() or self._stopped.is_set()", "self._asked()"),
        seen_by="live_round::nobody_is_waited_for_when_the_change_of_the_world_is_given_up",
    ),
    mutant(
        "an exception is no end of training",
        "live.live_round:LiveRound._end_training",
        always("'last_value'"),
        seen_by="live_round::a_worker_that_ends_with_an_exception_does_not_say_that_training_is_over",
    ),
    mutant(
        "slices that are copied have a limit",
        "live.state_slices:Sender.__init__",
        never("LARGEST"),
        seen_by="state_slices::a_state_that_is_too_large_for_slices_that_are_copied_comes_at_once",
    ),
    mutant(
        "a wait for the writer ends with the round",
        "groups.connections:GroupConnections.wait_unless_cut",
        without("check"),
        seen_by="checkpointer::a_wait_for_the_writer_ends_with_the_round",
    ),
    mutant(
        "the end of the process waits for threads of the round",
        "live.live_round:LiveRound._end_training",
        without("join"),
        seen_by="elastic::the_end_of_the_process_waits_for_the_threads_of_its_round",
    ),
    mutant(
        "the last step is saved although it is not due",
        *("live.world_checkpoints:WorldCheckpoints.publish", gets("now", "False")),
        seen_by="elastic::the_last_step_is_on_the_disk_when_save_returns_and_is_not_saved_again",
    ),
    mutant(
        "a save returns when it is published",
        *("live.world_checkpoints:WorldCheckpoints.publish", without("wait")),
        seen_by="elastic::a_save_that_loses_a_peer_is_made_in_the_next_round",
    ),
    mutant(
        "a worker that has lost its state in a save does not end well",
        *("elastic:Elastic._save_together", without("_must_be_whole")),
        seen_by="elastic::a_worker_without_whom_the_others_have_gone_on_does_not_end_as_if_it_had_saved",
    ),
    mutant(
        "a request for a world ends with its round",
        "elastic:Elastic._make_groups",
        without("withdraw"),
        seen_by="elastic::a_request_for_a_world_of_a_round_that_is_over_is_not_carried_into_the_next",
    ),
    mutant(
        "groups are named alike after one that could not be made",
        "elastic:Elastic._make_groups",
        skips("group_count"),
        seen_by="elastic::groups_are_made_by_the_same_names_after_one_that_could_not_be_made",
    ),
    mutant(
        "a dropped step does not move the loader",
        "live.step_snapshot:StepSnapshot.restore",
        without("self._loader.load_state_dict"),
        seen_by="elastic::a_dropped_step_moves_neither_loader_nor_scheduler",
    ),
    mutant(
        "what a script does between two epochs stays",
        "elastic:Elastic._begin_loop",
        without("take"),
        seen_by="elastic::what_a_script_does_between_two_epochs_is_not_undone",
    ),
    mutant(
        "what comes between two epochs is done in one world",
        *("elastic:Elastic._follow_up", instead_of("EPOCH_ENDS", "NONE")),
        seen_by="elastic::what_comes_between_two_epochs_is_done_in_one_world[0-False-True]",
    ),
    mutant(
        "a rank with a part of the state has no weight",
        "reduction.control_words:LocalReport.weight",
        instead_of("self.samples if self.counts else 0.0", "self.samples"),
        seen_by="elastic::a_rank_with_a_part_of_the_state_has_no_weight_whatever_the_script_says",
    ),
    mutant(
        "a hook with a state is refused",
        *("live.start:check", never("hook_with_state")),
        seen_by="elastic::a_hook_with_a_state_is_refused",
    ),
    mutant(
        "a learning rate that is a tensor is brought back",
        "live.step_snapshot:_options",
        instead_of("value.clone() if isinstance(value, torch.Tensor) else value", "value"),
        seen_by="elastic::learning_rates_that_are_tensors_and_schedulers_in_a_list_are_brought_back",
    ),
    mutant(
        "a scheduler in a list is brought back",
        "live.step_snapshot:StepSnapshot.__init__",
        gets("named", "[(name, part) for name, value in state.items() for part in [value] if hasattr(part, 'state_dict')]"),
        seen_by="elastic::learning_rates_that_are_tensors_and_schedulers_in_a_list_are_brought_back",
    ),
    mutant(
        "what an optimizer keeps only later comes with all of its parameter",
        "live.state_slices:_rest",
        instead_of("tensors.keys() - sliced | grown", "tensors.keys() - sliced"),
        seen_by="state_slices::what_an_optimizer_keeps_only_later_comes_with_the_rest",
    ),
    mutant(
        "a state with more than the script makes is a mismatch",
        "live.state_slices:Receiver._receive_values",
        gets("missing", "set()"),
        seen_by="state_slices::a_state_that_has_more_than_the_script_makes_is_a_mismatch",
    ),
    mutant(
        "a view of a parameter does not stand for it",
        "live.state_slices:_memory",
        instead_of("numel", "0"),
        seen_by="state_slices::a_view_of_a_parameter_does_not_stand_for_it",
    ),
    quoted(
        "a dropped step does not move the learning rate",
        *("live/step_snapshot", "                    group[name] = value\n", "                    pass\n"),
        *("elastic", "a_dropped_step_moves_neither_loader_nor_scheduler"),
    ),
    mutant(
        "a group that was there before is not cut",
        "groups.connections:GroupConnections.end",
        gets("_groups", "set(_sockets())"),
        seen_by="elastic::a_wait_for_a_peer_that_never_comes_is_cut_and_other_groups_go_on",
    ),
    mutant(
        "a worker with an older state keeps it until it joins",
        *("elastic:Elastic._find_world", gets("is_prepared", "self._rehearsal is not None")),
        seen_by="elastic::a_new_worker_rehearses_and_one_with_an_older_state_keeps_that_until_it_joins[4-joins]",
    ),
    mutant(
        "a collective that gloo forgets is given up",
        "groups.waits:finish",
        without("_give_up_if_cut"),
        seen_by="group_waits::a_wait_ends_that_gloo_forgets[receives_a_collective]",
    ),
    mutant(
        "the host waits for a GPU in a live job",
        "groups.waits:finish",
        never("device"),
        seen_by="group_waits::a_reduction_on_a_gpu_that_ends_by_an_abort_has_failed[before it ends]",
    ),
    mutant(
        "nobody waits for a GPU in other jobs",
        "groups.waits:finish",
        instead_of("device.type == 'cuda' and live_sockets.made", "device.type == 'cuda'"),
        seen_by="group_waits::the_host_waits_for_a_reduction_on_a_gpu_in_a_live_job_only",
    ),
    quoted(
        "what ends when the connections are cut has failed",
        *("groups/waits", "    if live_sockets.is_cut:  # read after", "    if False:  # read after"),
        *("group_waits", "a_reduction_on_a_gpu_that_ends_by_an_abort_has_failed[when it ends]"),
    ),
    quoted(
        "a rank alone confirms no step",
        *("groups/waits", "    finish(dist.all_reduce(torch.zeros(1", "    None and finish(dist.all_reduce(torch.zeros(1"),
        *("group_waits", "no_rank_confirms_a_step_of_which_another_rank_has_been_cut"),
    ),
    quoted(
        "a GPU that fails is no lost peer",
        *("groups/waits", 'raise TrainError(f"the GPU failed: {error}") from None', "raise"),
        *("group_waits", "a_gpu_that_fails_is_no_lost_peer"),
    ),
    quoted(
        "new groups in a round that is cut are cut",
        *(
            "groups/connections",
            "set(_sockets()) - (self._groups or set()), None",
            "set(_sockets()), None\n            self._cut_at = None",
        ),
        *("group_waits", "the_groups_of_a_round_that_is_cut_stay_cut_until_it_is_left"),
    ),
    mutant(
        "a message that gloo forgets is given up",
        "groups.waits:finish_message",
        without("_give_up_if_cut"),
        seen_by="group_waits::a_wait_ends_that_gloo_forgets[sends_a_message]",
    ),
    mutant(
        "the mean is over samples",
        "reduction.reduction:ReductionOutcome.correction",
        instead_of("self.expected_samples / self.samples", "1.0"),
        seen_by="ddp::the_mean_is_over_samples",
    ),
    mutant(
        "a request is heard once",
        "reduction.control_words:LocalReport.clear",
        skips("requests"),
        seen_by="more::a_request_of_one_rank_is_heard_by_all_in_the_same_step",
    ),
    mutant(
        "a step whose words come too late is not passed over",
        "reduction.conclusion:Conclusion._check_deferred",
        never("failed"),
        seen_by="ddp::on_a_gpu_the_words_are_read_a_step_later",
    ),
    mutant(
        "a failed backward drops the step everywhere",
        "reduction.conclusion:Conclusion.conclude",
        never("failed"),
        seen_by="trouble::an_exception_in_a_backward_drops_the_step_everywhere[group]",
    ),
    mutant(
        "a checksum weighs each place",
        "reduction.replica_check:checksum",
        instead_of("weights[:part.numel()]", "weights[0]"),
        seen_by="more::two_changes_that_cancel_in_a_sum_are_found",
    ),
    mutant(
        "who freezes something else later is told",
        "reduction.conclusion:Conclusion.conclude",
        never("trained"),
        seen_by="order::what_one_rank_freezes_later_is_an_error_on_every_rank[group]",
    ),
    mutant(
        "autograd.grad that fails reduces nothing",
        "reduction.backward:",
        gets("(STARTED, BackwardTrigger.INTERRUPTED)", "DRAINING"),
        seen_by="ways::the_same_as_with_torchs_class[gradients_asked_for-group]",
    ),
    mutant(
        "replicas that differ on purpose are not compared",
        "reduction.conclusion:Conclusion.conclude",
        instead_of("every > 0 and (not self._parts.extensions.hooked) and (not held)", "every > 0 and (not held)"),
        seen_by="ways::the_same_as_with_torchs_class[local_steps_wrapped-group]",
    ),
    mutant(
        "all look when one has said so",
        "reduction.conclusion:Conclusion.conclude",
        instead_of("agreement.lacking or agreement.looking", "agreement.lacking"),
        seen_by="lazily::one_rank_says_how_many_samples_it_has[group]",
    ),
    mutant(
        "nor a gradient",
        "reduction.reduction:Reduction.reduce",
        always("looking"),
        seen_by="lazily::who_reads_the_words_alone_does_as_the_others[2-group]",
    ),
    mutant(
        "sums of samples are compared by closeness",
        "reduction.conclusion:Conclusion._check_deferred",
        gets("close", "agreement.samples == expected_samples"),
        seen_by="lazily::who_reads_the_words_alone_does_as_the_others[2-group]",
    ),
    mutant(
        "a step that freezes or unfreezes is looked at",
        "reduction.conclusion:Conclusion.defers",
        always("trained"),
        seen_by="lazily::what_is_unfrozen_is_reduced_from_the_first_step_on[2-group]",
    ),
    # the transitions of a backward
    mutant(
        "a backward that accumulates nothing reduces nothing",
        "reduction.backward:",
        gets("(STARTED, BackwardTrigger.GRAPH_DONE)", "REDUCING"),
        seen_by="ways::the_same_as_with_torchs_class[gradients_asked_for-group]",
    ),
    mutant(
        "what accumulates nothing is no backward",
        "reduction.backward:",
        gets("(STARTED, BackwardTrigger.GRAPH_DONE)", "DONE"),
        seen_by="more::a_stage_of_a_pipeline_reduces_once_per_step",
    ),
    mutant(
        "a backward within no_sync stays local",
        "reduction.backward:",
        gets("(KEEPING, BackwardTrigger.GRAPH_DONE)", "REDUCING"),
        seen_by="ddp::micro_batches_within_no_sync_cost_one_reduction[5]",
    ),
    mutant(
        "an exception within no_sync is nobody else's matter",
        "reduction.backward:",
        gets("(KEEPING, BackwardTrigger.INTERRUPTED)", "DRAINING"),
        seen_by="backward::an_exception_within_no_sync_concerns_no_other_rank",
    ),
    mutant(
        "a rank whose backward failed brings no gradients",
        "reduction.backward:",
        gets("(COLLECTING, BackwardTrigger.INTERRUPTED)", "REDUCING"),
        seen_by="trouble::an_exception_in_a_backward_drops_the_step_everywhere[group]",
    ),
    mutant(
        "the others do not wait for a rank whose backward failed",
        "reduction.backward:",
        gets("(COLLECTING, BackwardTrigger.INTERRUPTED)", "DONE"),
        seen_by="trouble::an_exception_in_a_backward_drops_the_step_everywhere[group]",
    ),
    mutant(
        "a reduction that has failed is over",
        "reduction.backward:",
        gets("(COLLECTING, BackwardTrigger.FAILED)", "COLLECTING"),
        seen_by="backward::nothing_more_is_launched_when_a_reduction_has_failed",
    ),
    mutant(
        "a backward may begin without a gradient in sight",
        "reduction.backward:Backward.has_accumulated",
        instead_of("self._versions != _versions(params)", "False"),
        seen_by="backward::gradients_are_found_by_their_versions",
    ),
    # the data
    mutant(
        "other shares hold from a step that no loader has cut in advance",
        *("data.balance:Balance.decide", instead_of("max", "0")),
        seen_by="balance::a_change_holds_from_a_step_that_no_loader_has_cut_yet",
    ),
    mutant(
        "shares change only where a step becomes much shorter",
        *("data.balance:rebalance", instead_of("WORTH", "0.0")),
        seen_by="balance::shares_change_only_where_a_step_becomes_much_shorter[paces5-before5-expected5]",
    ),
    mutant(
        "a rank that is much too slow has a quarter of an even share",
        *("data.balance:apportion", instead_of("LEAST", "0.0")),
        seen_by="balance::shares_change_only_where_a_step_becomes_much_shorter[paces6-before6-expected6]",
    ),
    mutant(
        "a resumed loader deals by the shares in the checkpoint",
        *("data.loader:ElasticDataLoader.load_state_dict", without("self.balance.load_state_dict")),
        seen_by=f"balance::{BALANCED}",
    ),
    mutant(
        "the wait for the gradients of the others is not a rank's own time",
        *("data.steps:accumulate", instead_of("ddp._reducer.last.times.exposed", "0.0")),
        seen_by="balance::a_slow_rank_costs_less_time_than_with_an_even_split",
    ),
    mutant(
        "a rank is judged by its time for the work in its batches",
        *("reduction.step_times:usual_seconds", returns("[median_low(seconds)] * len(work)")),
        seen_by="more::who_computes_much_longer_than_the_median_is_named",
    ),
    mutant(
        "an iteration begins where the last one ended",
        "data.loader:_Shares.__iter__",
        gets("indices", "_indices(order, 0, steps, self.cut)"),
        seen_by="data::what_is_loaded_in_advance_does_not_count[2]",
    ),
    quoted(
        "a batch counts from the moment it is handed out",
        *("data/loader", "self.consumed += size\n            yield batch\n", "yield batch\n            self.consumed += size\n"),
        *("data", "each_sample_once_whatever_becomes_of_the_world[2-64]"),
    ),
    quoted(
        "a step counts when its loop is over",
        *("data/loader", "            yield Step(size,", "            done()\n            yield Step(size,"),
        *("data", "a_step_that_is_not_finished_is_not_counted_and_holds_nobody_up"),
    ),
    mutant(
        "micro-batches weigh by their samples",
        "data.steps:accumulate",
        never("before"),
        seen_by=f"data::{f'{MEAN}[1]'}",
    ),
    mutant(
        "a rank without a micro-batch takes part",
        "data.steps:accumulate",
        never("reductions"),
        seen_by=f"data::{f'{MEAN}[5]'}",
    ),
    mutant(
        "only the last micro-batch reduces",
        "data.steps:accumulate",
        gets("sync", "ddp._reducer.schedule.set_sync(True)"),
        seen_by=f"data::{f'{MEAN}[2]'}",
    ),
    mutant(
        "the epoch is a part of the key",
        "data.loader:_Shares.__iter__",
        instead_of("(seed, epoch, index)", "(seed, 0, index)"),
        seen_by=f"keyed_rng::{AUGMENTED}",
    ),
    # deterministic mode
    mutant(
        "the state after the last batch is that of the next epoch",
        "data.loader:ElasticDataLoader.state_dict",
        never("over"),
        seen_by="data::after_the_last_batch_the_state_is_that_of_the_next_epoch",
    ),
    mutant(
        "augmentations belong to the sample",
        "data.loader:ElasticDataLoader._begin_exact",
        never("_keyed_rng"),
        seen_by=f"deterministic::{BITS}",
    ),
    mutant(
        "groups of parameters that come in mid-training are refused in the step",
        "elastic:Elastic._verify_step",
        without("verify_groups"),
        seen_by="live_loop::parameters_that_come_in_mid_training_are_refused_at_once",
    ),
    mutant(
        "to continue with other bits is refused",
        "data.loader:ElasticDataLoader._begin_exact",
        gets("before", "value"),
        seen_by=f"deterministic::{REFUSED}",
    ),
    # sharded data
    mutant(
        "the position in an open shard is kept",
        "data.shard_order:Rest.after",
        instead_of("max(samples, done.samples)", "samples"),
        seen_by=f"sharded_data::{SHARDS}",
    ),
    mutant(
        "open shards that no stream has come to stay open",
        "data.shard_order:Rest.after",
        instead_of("max(until, len(self.open))", "until"),
        seen_by=f"sharded_data::{SHARDS}",
    ),
    mutant(
        "a shard that is read up is not open",
        "data.shard_order:Rest.after",
        instead_of("before >= done.shards", "before >= done.shards - 1"),
        seen_by="sharded_data::what_is_left_is_little_when_streams_are_alike",
    ),
    mutant(
        "a step of shards counts when its loop is over",
        "data.sharded_data:ElasticShards._step",
        instead_of("partial", "lambda: None"),
        seen_by=f"sharded_data::{f'{REAL}[workers0-plain]'}",
    ),
    mutant(
        "a rank whose shards are read up goes on until all are",
        "data.sharded_data:ElasticShards.steps",
        instead_of("ddp.agreement.more > 0", "following is not None"),
        seen_by=f"sharded_data::{f'{REAL}[workers0-plain]'}",
    ),
    quoted(
        "a loading worker reads whole shards",
        *("data/sharded_data", "number, worker._worker_info = info.id, None", "number = info.id"),
        *("sharded_data", f"{REAL}[workers1-Samples]"),
    ),
    mutant(
        "loading draws no random numbers of the model",
        "data.loader:ElasticDataLoader._make_loader",
        gets("_loader", "DataLoader(dataset, batch_sampler=_Shares(self), **self._loading)"),
        seen_by="data::the_models_random_numbers_are_left_alone",
    ),
    quoted(
        "a request that comes within a reduction is for the next one",
        *("reduction/control_words", "self.requests -= self.taken", "self.requests.clear()"),
        *("drain", "a_signal_within_a_reduction_is_told_in_the_next_one"),
    ),
    quoted(
        "a stop stays",
        *("reduction/conclusion", "        if self.drained is None and ", "        self.drained = None\n        if "),
        *("drain", SELDOM),
    ),
    mutant(
        "a stop stays when something is frozen",
        "reduction.conclusion:Conclusion.continue_from",
        skips("drained"),
        seen_by=f"drain::{SELDOM}",
    ),
    mutant(
        "all stop after the same step",
        "stopping.drain:Drain.now",
        instead_of("self.step is not None", "self.step is not None or self._signum"),
        seen_by="drain::all_ranks_stop_after_the_same_step_whenever_the_signal_comes",
    ),
    mutant(
        "a new world is told",
        "stopping.drain:Drain.now",
        without("_ask"),
        seen_by="drain::a_stop_is_told_again_in_the_world_that_a_module_has_next",
    ),
    mutant(
        "nobody leaves before the last one is done",
        "stopping.drain:Drain.leave",
        without("_wait_for_others"),
        seen_by=f"drain::{f'{LEAVES}[True-codes0]'}",
    ),
    mutant(
        "nobody waits for a rank that ends in another way",
        "stopping.drain:Drain.__init__",
        without("register"),
        seen_by="drain::nobody_waits_for_a_rank_that_failed_to_save",
    ),
    mutant(
        "who learnt of a stop waits for the signal",
        "stopping.drain:Drain.leave",
        always("bool"),
        seen_by=f"drain::{f'{LEAVES}[True-codes0]'}",
    ),
    mutant(
        "to leave is no success",
        "stopping.drain:Drain.leave",
        instead_of("CODE", "0"),
        seen_by=f"drain::{f'{LEAVES}[False-codes1]'}",
    ),
    mutant(
        "a deadline does not move",
        "stopping.drain:Drain._know",
        always("_known"),
        seen_by=f"drain::{HANDLERS}",
    ),
    mutant(
        "handlers of others are called",
        "stopping.drain:Drain._arrived",
        without("before"),
        seen_by=f"drain::{HANDLERS}",
    ),
    mutant(
        "a fork has nothing to drain",
        "stopping.drain:Drain._arrived",
        never("getpid"),
        seen_by="drain::a_fork_is_ended_by_the_signal_as_if_there_was_no_handler",
    ),
    mutant(
        "what all have agreed on is carried out after a failure, too",
        "stopping.drain:Drain._give_up",
        instead_of(
            "self.step is None and (not any(map(_by_user, self._before.values())))", "not any(map(_by_user, self._before.values()))"
        ),
        seen_by=f"drain::{f'{FAILURE}[failure-True-False]'}",
    ),
    mutant(
        "a commit needs the files of all ranks",
        "checkpoints.publishing:Publisher._conclude",
        gets("replies", "[mine]"),
        seen_by="ckpt_rounds::a_commit_needs_the_files_of_all_ranks",
    ),
    mutant(
        "a killed writer has a successor",
        "checkpoints.publishing:Publisher._ask",
        always("_ending"),
        seen_by="ckpt_rounds::a_writer_that_was_killed_gets_a_successor[write]",
    ),
    mutant(
        "the successor gets the images",
        "checkpoints.publishing:Publisher._ask",
        never("'images'"),
        seen_by="ckpt_rounds::a_writer_that_was_killed_gets_a_successor[commit]",
    ),
    quoted(
        "a rank tells the others that it could not write",
        *(
            "checkpoints/publishing",
            "        if self._ranks.rank > 0:\n",
            "        if self._ranks.rank > 0 and save.error:\n            pass\n        elif self._ranks.rank > 0:\n",
        ),
        *("ckpt_rounds", "nobody_waits_for_a_rank_whose_writers_die"),
    ),
    mutant(
        "training waits for a full disk once",
        "checkpoints.publishing:Publisher._write",
        gets("_retry", "RETRY"),
        seen_by="ckpt_rounds::a_write_after_one_that_failed_is_not_repeated_for_long",
    ),
    mutant(
        "an end without patience ends the thread",
        "checkpoints.publishing:Publisher.close",
        without("set"),
        seen_by="ckpt_rounds::an_end_without_patience_does_not_wait_for_other_ranks",
    ),
    mutant(
        "memory is there before the first save",
        "checkpoints.staging:Staging._map",
        always("_POPULATE_WRITE"),
        seen_by="ckpt_staging::every_page_is_mapped_before_the_first_save",
    ),
    mutant(
        "it is not prepared beside a copy",
        "checkpoints.staging:Staging._map",
        without("wait"),
        seen_by="ckpt_staging::no_page_is_mapped_beside_a_copy",
    ),
    mutant(
        "nor that of the image that is filled",
        "checkpoints.staging:Staging.copying",
        gets("paused", "[each for number, each in enumerate(self._may_map) if number != which]"),
        seen_by="ckpt_staging::no_page_is_mapped_beside_a_copy",
    ),
    mutant(
        "but for a GPU",
        "checkpoints.staging:Staging.copying",
        always("number"),
        seen_by="ckpt_staging::a_copy_from_a_gpu_does_not_stop_the_mapping_of_its_own_image",
    ),
    mutant(
        "what is not mapped yet is written",
        "checkpoints.staging:Staging.fill",
        always("nbytes"),
        seen_by="ckpt_staging::pages_that_are_not_there_yet_are_written_and_not_mapped",
    ),
    quoted(
        "only once",
        *("checkpoints/staging", "            self._there[which] = image.size\n", ""),
        *("ckpt_staging", "pages_that_are_not_there_yet_are_written_and_not_mapped"),
    ),
    mutant(
        "memory that was replaced is left alone",
        "checkpoints.staging:Staging._map",
        instead_of("self.images[which] is not image or self._stopped", "self._stopped"),
        seen_by="ckpt_staging::the_memory_of_an_image_that_was_replaced_is_left_alone",
    ),
    mutant(
        "an error of one rank is that of all",
        "checkpoints.ranks:on_every_rank",
        instead_of("startswith", "text.startswith('-') and rank == ranks.rank"),
        seen_by="ckpt_ranks::an_error_of_one_rank_is_that_of_all_and_results_are_shared",
    ),
    quoted(
        "the writer starts after a restore",
        *(
            "checkpoints/checkpointer",
            "        publisher = self._claim_directory()\n",
            "        publisher = self._claim_directory()\n        publisher.start_writer()\n",
        ),
        *("ckpt_ranks", "the_writer_does_not_start_beside_a_restore"),
    ),
    mutant(
        "the newest copy is not the next to be filled",
        "checkpoints.checkpointer:Checkpointer._prepare",
        gets("older", "[(self._filled + more) % number for more in range(number)]"),
        seen_by="ckpt_rounds::the_newest_copy_stays_until_the_next_one_is_complete",
    ),
    mutant(
        "nor where all others are on their way to the disk",
        "checkpoints.checkpointer:Checkpointer._prepare",
        gets("older", "[(self._filled + more) % number for more in range(1, number + 1)]"),
        seen_by=f"ckpt_rounds::{SLOW}",
    ),
    mutant(
        "saves for the memory alone have an image more",
        "checkpoints.checkpointer:Checkpointer.__init__",
        gets("_staging", "Staging(IMAGES)"),
        seen_by=f"ckpt_rounds::{SLOW}",
    ),
    mutant(
        "where no image is free a save waits for the first one that will be",
        "checkpoints.checkpointer:Checkpointer._prepare",
        gets("which", "free[0] if free else max(older, key=lambda at: save.number if (save := self._by_image[at]) else 0)"),
        seen_by=f"ckpt_rounds::{SLOW}",
    ),
    quoted(
        "nor in the next world of live workers",
        *("checkpoints/checkpointer", "self._number, self._filled = last_save", "self._number, _ = last_save"),
        *("ckpt_rounds", f"{NEXT}[True]"),
    ),
    quoted(
        "where the saves are newer than those before",
        *("checkpoints/checkpointer", "self._number, self._filled = last_save", "_, self._filled = last_save"),
        *("ckpt_rounds", f"{NEXT}[False]"),
    ),
    mutant(
        "also for a worker that came later",
        "checkpoints.checkpointer:Checkpointer._prepare",
        gets("(self._number, self._filled)", "(self._number, self._filled)"),
        seen_by=f"ckpt_rounds::{f'{NEXT}[False]'}",
    ),
    mutant(
        "nor is it after a restore",
        "checkpoints.checkpointer:Checkpointer.restore",
        gets("_filled", "1 - found.image"),
        seen_by="ckpt_rounds::images_of_an_earlier_round_are_filled_and_written_again",
    ),
    mutant(
        "the writer gets images of an earlier round",
        "checkpoints.checkpointer:Checkpointer.restore",
        without("take_images"),
        seen_by="ckpt_rounds::images_of_an_earlier_round_are_filled_and_written_again",
    ),
    mutant(
        "memory of another job does not count",
        "checkpoints.restoring:find",
        always("one.save.fence"),
        seen_by="ckpt_rounds::the_newer_of_memory_and_disk_counts_and_no_memory_of_another_job[2-other:2-disk]",
    ),
    mutant(
        "the disk counts where it is newer",
        "checkpoints.restoring:find.is_older",
        instead_of("theirs < mine", "True"),
        seen_by="ckpt_rounds::the_newer_of_memory_and_disk_counts_and_no_memory_of_another_job[4-store:2-disk]",
    ),
    mutant(
        "and where memory has lost something",
        "checkpoints.restoring:find.is_older",
        instead_of("theirs == mine and (not best.lost)", "theirs == mine"),
        seen_by="ckpt_rounds::of_equal_ones_memory_counts_unless_it_has_lost_something",
    ),
    mutant(
        "images of local ranks that are gone stay until all have saved",
        "checkpoints.checkpointer:Checkpointer._stage",
        instead_of("2", "1"),
        seen_by="ckpt_rounds::images_of_local_ranks_that_are_gone_stay_until_all_ranks_have_saved",
    ),
    mutant(
        "images of local ranks of this round stay",
        "checkpoints.memory:Memory.drop_others",
        always("split"),
        seen_by="ckpt_rounds::images_of_local_ranks_that_are_gone_stay_until_all_ranks_have_saved",
    ),
    mutant(
        "a Checkpointer that nobody uses any more ends",
        "checkpoints.checkpointer:Checkpointer.__init__",
        gets("_dropped", "weakref.finalize(self, lambda: None)"),
        seen_by="ckpt_rounds::what_was_saved_and_dropped_is_published_and_nothing_is_left",
    ),
    mutant(
        "one of those that wait writes who is missing",
        "checkpoints.missing_ranks:Waiting._report",
        instead_of("missing and all((rank in missing for rank in range(self._rank)))", "missing"),
        seen_by="checkpointer::who_is_missing_is_named_once_and_no_note_remains",
    ),
    mutant(
        "a rank that waits leaves a note",
        "checkpoints.missing_ranks:Waiting._note",
        without("set"),
        seen_by="checkpointer::who_is_missing_is_named_once_and_no_note_remains",
    ),
    mutant(
        "values of lost ranks are not needed",
        "checkpoints.memory:_files_of",
        always("marked", "name"),
        seen_by="ckpt_rounds::what_only_a_lost_rank_had_does_not_make_a_copy_incomplete",
    ),
    mutant(
        "ranks that share a replica load the same samples",
        "data.steps:verify_ranks",
        instead_of("(rank, world_size) != (world.rank, world.size)", "() != () and (world.rank, world.size)"),
        seen_by="mesh::ranks_that_share_a_replica_are_told_to_load_the_same_samples",
    ),
    mutant(
        "all else is",
        "checkpoints.memory:HeldSave.complete",
        instead_of("self.needed <= self.holders.keys()", "True"),
        seen_by="ckpt_rounds::what_only_a_lost_rank_had_does_not_make_a_copy_incomplete",
    ),
)


@each(MUTANTS)
def test_a_rule_that_is_taken_out_is_missed(copy: Path, one: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_STANDSTILL", "1.5")  # where ranks then wait for one another
    assert unnoticed(copy, one) == ""


def test_as_long_as_no_rule_is_taken_out_the_same_tests_pass(copy: Path) -> None:
    assert failing(copy, MUTANTS) == ""

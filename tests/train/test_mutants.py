"""Every rule of the training core has a test that notices when it is taken out, as in tests/rendezvous/test_mutants.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.changes import always, gets, instead_of, never, without
from tests.support.mutants import Mutant, copy, each, failing, mutants_in, named_in, unnoticed

__all__ = ["copy"]  # the fixture


mutant = mutants_in("elastirun/train", "tests/train")
by_name = named_in("elastirun/train", "tests/train")
of_steps = mutants_in("elastirun", "tests/train")
MEAN = "a_step_has_the_mean_over_the_global_batch_whatever_its_micro_batches"
AUGMENTED = "augmentations_are_the_same_whatever_the_world_and_the_workers"
BITS = "the_same_bits_at_any_number_of_ranks"
REFUSED = "what_would_depend_on_the_number_of_ranks_is_refused"
SHARDS = "each_sample_once_whatever_becomes_of_the_world[3-64]"
REAL = "each_sample_once_on_real_ranks_with_loading_workers"
LEFT = "the_statistics_of_the_last_reduction_are_used_whatever_forwards_came_after_it"
SELDOM = "a_stop_is_not_missed_by_looking_seldom_nor_by_freezing_something"
LEAVES = "everybody_ends_as_if_it_was_signalled_when_the_last_one_is_done"
HANDLERS = "a_handler_that_was_there_before_is_called_and_comes_back"
FAILURE = "a_signal_after_a_failure_ends_a_rank_at_once"
ONLY_IN_AN_EPOCH = "if self._live is None:\n            return\n        if left"
SLOW = "a_kill_in_a_save_costs_that_save_alone_while_the_disk_is_slow"
NEXT = "the_first_save_in_the_next_world_leaves_the_newest_copy_and_is_newer"
PUBLISHES = "    Row(TRAINING, PhaseEvent.SAVES, NONE, TRAINING, (PhaseAction.PUBLISH,)),\n"
MUTANTS = (
    by_name(
        "a loop in which a rank has become late has no batch",
        *("elastic:Elastic._loop", always("Phase.LATE")),
        seen_by="live_loop::a_script_that_left_the_loop_in_the_failed_last_step_gets_no_batch_of_the_epoch_that_the_others_are_in",
    ),
    by_name(
        "a rehearsal ends also where the script saves before it comes back to the loop",
        *("elastic:Elastic._leave_loop", never("Phase.REHEARSING")),
        seen_by="live_loop::a_new_worker_whose_script_leaves_the_loop_and_saves_ends_its_rehearsal_when_it_comes_back",
    ),
    mutant(
        "what the checkpoints of a later world wait for is cut",
        *("elastic", "        live_sockets.begin()  #", "        return self._begin(restores=False)  #"),
        *("live_loop", "what_the_checkpoints_of_a_later_world_wait_for_is_cut"),
    ),
    mutant(
        "the agent is told for how long the ranks compute",
        *("reduction/conclusion", "        computed(agreement.seconds[world.rank], median(agreement.seconds))\n", ""),
        *("progress", "the_agent_is_told_for_how_long_this_rank_and_the_median_rank_compute"),
    ),
    mutant(
        "what all ask for is not what one asks for",
        *("reduction/control_words", "if count == self._world", "if count"),
        *("elastic", "ranks_know_what_one_asks_for_and_what_all_ask_for"),
    ),
    by_name(
        "who has left a round without a state has a world of its own",
        *("elastic:Elastic._be_alone", without("set_group")),
        seen_by="elastic::who_has_left_a_round_without_a_state_is_alone_again",
    ),
    mutant(
        "what is left of the state comes with the last slice",
        *("live/state_slices", " if done == slices - 1 and together else (done,)", " if False else (done,)"),
        *("state_slices", "what_is_left_comes_with_the_last_slice_unless_it_is_more_than_a_slice"),
    ),
    mutant(
        "much that is left of the state comes by itself",
        *("live/state_slices", " and together else", " else"),
        *("state_slices", "what_is_left_comes_with_the_last_slice_unless_it_is_more_than_a_slice"),
    ),
    mutant(
        "counts of steps come before the first slice",
        *("live/state_slices", "            self._wanted[name].detach().fill_(told", "            (told"),
        *("state_slices", "a_new_rank_has_the_same_state_although_all_train_meanwhile[Adam]"),
    ),
    mutant(
        "a slice has what the optimizer keeps for its elements",
        *("live/state_slices", "for tensor in (param, *kept)])", "for tensor in (param,)])"),
        *("state_slices", "a_new_rank_has_the_same_state_although_all_train_meanwhile[Adam]"),
    ),
    mutant(
        "an optimizer that is not known to treat elements alone gets all at once",
        *("live/state_slices", "        if type(optimizer).__name__ not in ELEMENTWISE or not", "        if False and not"),
        *("state_slices", "an_optimizer_of_another_package_comes_at_once"),
    ),
    mutant(
        "replicas are not compared while one has no state",
        *("reduction/conclusion", "extensions.compares_replicas and not held", "extensions.compares_replicas"),
        *("state_slices", "a_new_rank_has_the_same_state_although_all_train_meanwhile[SGD]"),
    ),
    mutant(
        "groups are not changed between two epochs",
        *("live/world_change", "if SWITCH in unanimous and left > 0:", "if SWITCH in unanimous:"),
        *("elastic", "the_last_step_of_an_epoch_is_not_the_last_one_in_the_old_groups[True]"),
    ),
    mutant(
        "replicas are compared after a change of the world",
        *("elastic", "        self._model.check_replicas(gradually=True)\n", ""),
        *("elastic", "replicas_are_compared_after_a_change_of_the_world"),
    ),
    mutant(
        "all elements are compared in turn",
        *("reduction/replica_check", "            self._element += len(part)\n", "            self._element += len(flat)\n"),
        *("more", "replicas_are_compared_gradually_each_element_once"),
    ),
    mutant(
        "no step compares more than its share",
        *("reduction/replica_check", "            room -= part.nbytes\n", ""),
        *("more", "replicas_are_compared_gradually_each_element_once"),
    ),
    of_steps(
        "the furthest rank wins",
        *("worker/live_worlds", "    best = max(everyone)\n", "    best = everyone[0]\n"),
        *("elastic", "the_furthest_of_the_newest_round_wins[a_step_ahead]"),
    ),
    mutant(
        "a state of an older round does not count",
        *("elastic", "mine = dist.get_rank(), [self._settled, ", "mine = dist.get_rank(), [min(self._settled, 1), "),
        *("elastic", "the_furthest_of_the_newest_round_wins[an_older_history_does_not_count]"),
    ),
    of_steps(
        "steps without a state make no rank the furthest",
        *("worker/live_worlds", "    if best[0] == 0:\n", "    if False:\n"),
        *("elastic", "the_furthest_of_the_newest_round_wins[steps_without_a_state]"),
    ),
    mutant(
        "who is in an older epoch than others is late",
        *("elastic", "return self._loader.epoch, not", "return 0, not"),
        *("elastic", "who_has_not_come_as_far_in_the_script_as_others_is_late[an_older_epoch]"),
    ),
    mutant(
        "who saves while others train is late",
        *("elastic", "return self._loader.epoch, not self._saves,", "return self._loader.epoch, True,"),
        *("elastic", "who_has_not_come_as_far_in_the_script_as_others_is_late[a_save]"),
    ),
    by_name(
        "where nobody has a state nobody is late",
        *("elastic:Elastic._settle", gets("begins_anew", "False")),
        seen_by="elastic::who_has_not_come_as_far_in_the_script_as_others_is_late[no_state]",
    ),
    mutant(
        "what one who is late does to its state is not kept",
        *("elastic", "            self._tried = 1 + max(-theirs[-1] for theirs in everyone)", "            pass"),
        *("elastic", "who_has_not_come_as_far_in_the_script_as_others_is_late[a_save]"),
    ),
    by_name(
        "nor where all others are lost meanwhile",
        *("elastic:Elastic._put_back", without("restore")),
        seen_by="elastic::what_comes_until_the_next_batch_does_not_count_for_one_who_is_late",
    ),
    by_name(
        "nor in its averages",
        *("live.step_snapshot:StepSnapshot.restore", never("_kept_others")),
        seen_by="live_loop::what_a_late_rank_changes_until_it_has_caught_up_is_not_kept",
    ),
    mutant(
        "a worker whose older state does not count stays in the loop",
        *("elastic", "if not trained or self._phase is Phase.JOINING:", "if not trained:"),
        *("live_loop", "a_worker_whose_older_state_does_not_count_stays_in_the_loop"),
    ),
    by_name(
        "a worker alone leaves its round",
        *("elastic:Elastic._follow_up", gets("is_alone", "False")),
        seen_by="live_loop::a_worker_alone_leaves_its_round_also_where_each_step_is_the_last_of_an_epoch",
    ),
    mutant(
        "the step in which the script leaves the loop counts",
        *("elastic", "counts = self._switch.completed > self._completed", "counts = False"),
        *("live_loop", "the_step_in_which_the_script_leaves_the_loop_counts_if_its_reduction_was_made[False]"),
    ),
    mutant(
        "but not if its reduction failed",
        *("elastic", "counts = self._switch.completed > self._completed", "counts = True"),
        *("live_loop", "the_step_in_which_the_script_leaves_the_loop_counts_if_its_reduction_was_made[True]"),
    ),
    by_name(
        "who leaves the loop in a failed step leaves the round when it comes back",
        *("elastic:Elastic._begin_loop", instead_of("_round_over", "NONE")),
        seen_by="live_loop::a_script_that_leaves_the_loop_in_a_failed_step_leaves_its_round_when_it_comes_back",
    ),
    mutant(
        "a batch without a reduction is an error",
        *("elastic", "        if made == 0:\n", "        if False:\n"),
        *("live_loop", "a_batch_without_one_reduction_of_its_own_is_an_error[live-accumulates]"),
    ),
    mutant(
        "a batch with two reductions is an error",
        *("elastic", "        if made > 1:\n", "        if False:\n"),
        *("live_loop", "a_batch_without_one_reduction_of_its_own_is_an_error[live-makes_two_steps]"),
    ),
    mutant(
        "a batch whose reduction failed is none",
        *("elastic", "        if not dropped:\n            self._verify_step()", "        if True:\n            self._verify_step()"),
        *("live_loop", "steps_of_micro_batches_are_those_of_whole_batches[a_peer_is_lost]"),
    ),
    mutant(
        "a step is not counted twice by a save within the loop",
        *("elastic", "                if self._open is not token:\n", "                if False:\n"),
        *("live_loop", "a_batch_without_one_reduction_of_its_own_is_an_error[live-saves_in_the_loop]"),
    ),
    mutant(
        "a step of micro-batches that was left at its end is consumed",
        *("data/loader", "            step.done()\n", ""),
        *("live_loop", "steps_of_micro_batches_are_those_of_whole_batches[left_at_its_end_then_a_peer_is_lost]"),
    ),
    mutant(
        "what follows a step is done when the script comes back to the loop",
        *("elastic", "        if self._left == self._worlds:\n", "        if False:\n"),
        *("live_loop", "ranks_that_leave_the_loop_at_different_batches_and_come_back_make_the_same_saves[batches1]"),
    ),
    mutant(
        "and when it saves",
        *("elastic", "        if left == self._worlds:\n", "        if False:\n"),
        *("live_loop", "ranks_that_leave_the_loop_at_different_batches_and_come_back_make_the_same_saves[batches2]"),
    ),
    mutant(
        "who is in the loop learns that another has left it",
        *("elastic", "not dropped and LEFT in", "False and LEFT in"),
        *("live_loop", "a_rank_that_saves_while_another_one_is_in_the_loop_is_an_error_on_both[batches0]"),
    ),
    mutant(
        "also where none has left it in the middle of an epoch",
        *("elastic", ONLY_IN_AN_EPOCH, ONLY_IN_AN_EPOCH.replace("self._live", "left")),
        *("live_loop", "a_rank_that_saves_between_epochs_of_another_one_is_an_error_on_both"),
    ),
    mutant(
        "who has left the loop learns that another is in it",
        *("elastic", "            if LEFT not in self._model.agreement.unanimous:", "            if False:"),
        *("live_loop", "a_rank_that_saves_while_another_one_is_in_the_loop_is_an_error_on_both[batches0]"),
    ),
    mutant(
        "to leave the loop in the last step of an epoch is as to go on",
        *("elastic", "            self._before.restore()  # after an", "            pass  # after an"),
        *("live_loop", "ranks_that_leave_the_loop_in_one_step_save_it[batches1-saved1]"),
    ),
    mutant(
        "a step counts where somebody still holds the loop",
        *("elastic", "            self._end_loop(self._open)\n            settle()", "            settle()"),
        *("live_loop", "a_step_counts_once_where_somebody_still_holds_the_loop"),
    ),
    mutant(
        "and only once",
        *("elastic", "if token is None or token is not self._open:", "if token is None:"),
        *("live_loop", "a_step_counts_once_where_somebody_still_holds_the_loop"),
    ),
    mutant(
        "a request to take a new worker in is made again",
        *("elastic", "            self._ask_again()\n        else:", "            pass\n        else:"),
        *("live_loop", "a_request_to_take_a_new_worker_in_is_made_again_where_the_script_leaves_the_loop"),
    ),
    by_name(
        "without an agent there is no other round to save in",
        *("elastic:Elastic._publish", always("_live")),
        seen_by="live_loop::without_an_agent_a_state_is_saved_after_an_interrupted_reduction",
    ),
    mutant(
        "parts that have become something else are put back",
        *("live/state_copy", "if here is not None and fits else kept.clone()", "if here is not None else kept.clone()"),
        *("live_loop", "parts_that_have_become_something_else_are_put_back[one_element]"),
    ),
    mutant(
        "a step counts when the script has left the loop in it",
        *("elastic", "                    self._end_loop(token)\n", "                    pass\n"),
        *("live_loop", "the_step_in_which_the_script_leaves_the_loop_counts_if_its_reduction_was_made[False]"),
    ),
    mutant(
        "a step counts whose gradients were used before a peer was lost",
        *("elastic", "return self._model.failed and self._switch.completed == self._completed", "return self._model.failed"),
        *("live_loop", "a_step_counts_whose_gradients_were_used_before_a_peer_was_lost"),
    ),
    mutant(
        "what an exception has interrupted is made before a save",
        *("elastic", "        settle()  # the others wait", "        #"),
        *("live_loop", "a_backward_that_an_exception_has_interrupted_is_made_before_a_save[due]"),
    ),
    by_name(
        "and before the last one",
        *("elastic:Elastic.save", without("settle")),
        seen_by="live_loop::a_backward_that_an_exception_has_interrupted_is_made_before_a_save[last]",
    ),
    mutant(
        "a worker that an exception ends takes part in no reduction on its way out",
        *("elastic", "        counts = self._switch", "        settle()\n        counts = self._switch"),
        *("live_loop", "a_worker_that_an_exception_ends_takes_part_in_no_reduction_on_its_way_out"),
    ),
    by_name(
        "a save that fails twice in a row ends the worker",
        *("live.world_checkpoints:WorldCheckpoints.fails_again", gets("again", "False")),
        seen_by="live_loop::a_save_that_fails_twice_in_a_row_ends_the_worker_with_its_error[fail fail-True]",
    ),
    by_name(
        "a save that was made in between is no failure",
        *("live.world_checkpoints:WorldCheckpoints.offer", gets("_failed", "self._failed")),
        seen_by="live_loop::a_save_that_fails_twice_in_a_row_ends_the_worker_with_its_error[fail fine fail-False]",
    ),
    by_name(
        "a lost peer is no failure of a save",
        *("elastic:Elastic._is_loss", always("CheckpointError")),
        seen_by="live_loop::a_save_that_fails_twice_in_a_row_ends_the_worker_with_its_error[lost lost-False]",
    ),
    by_name(
        "a last save waits for a step that this rank has lost",
        *("elastic:Elastic._publish", never("failed")),
        seen_by="live_loop::a_last_save_waits_for_a_step_that_this_rank_has_lost",
    ),
    mutant(
        "what a rehearsal has changed beside the model is brought back",
        *("live/step_snapshot", "        self._others.put_back(self._state)\n", ""),
        *("live_loop", "what_a_rehearsal_has_changed_beside_the_model_is_brought_back_for_a_run_that_begins"),
    ),
    mutant(
        "who leaves does not wait until all pages are mapped",
        *("checkpoints/staging", "if self.images[which] is not image or self._stopped:", "if self.images[which] is not image:"),
        *("ckpt_staging", "who_leaves_does_not_wait_until_all_pages_are_mapped"),
    ),
    mutant(
        "who is in an earlier save than others is late",
        *("elastic", "not self._saves, self._saves_done\n", "not self._saves, 0\n"),
        *("elastic", "who_has_not_come_as_far_in_the_script_as_others_is_late[the_save_before]"),
    ),
    mutant(
        "the state is that of the one that has come furthest in the script",
        *("elastic", "*self._place(), -self._tried]", "-self._tried, *self._place()]"),
        *("elastic", "who_has_not_come_as_far_in_the_script_as_others_is_late[a_save]"),
    ),
    mutant(
        "the collectives of one who is late fail",
        *("elastic", "are not cut\n        live_sockets.cut()\n", "are not cut\n"),
        *("elastic", "what_comes_until_the_next_batch_does_not_count_for_one_who_is_late"),
    ),
    mutant(
        "what a stranger writes in place of ranks is refused",
        *("live/live_round", "found = LiveWorld(number, parse_ranks(ranks, self._workers))", "found = LiveWorld(number, tuple(ranks))"),
        *("live_round", "a_world_that_a_stranger_has_written_is_no_world"),
    ),
    mutant(
        "the others of a round find the world after the one in which its ranks meet again",
        *(
            "live/live_round",
            'self._store.compare_set(f"world/{world.number}", ""',
            'self._store.compare_set(f"world/{world.number + 9}", ""',
        ),
        *("live_round", "the_same_ranks_meet_again_in_another_world_and_new_ones_find_the_one_after_it"),
    ),
    mutant(
        "who is late when it saves has nothing to save",
        *("live/phases", PUBLISHES, PUBLISHES + PUBLISHES.replace("TRAINING", "LATE")),
        *("elastic", "who_is_late_when_it_saves_has_nothing_to_save_and_saves_the_next_time"),
    ),
    by_name(
        "a state that is being overwritten counts as none",
        *("elastic:Elastic._join", gets("_settled", "self._settled")),
        seen_by="elastic::a_worker_that_is_being_given_the_state_of_the_others_has_none",
    ),
    of_steps(
        "a state of an older round counts as none",
        *("worker/live_worlds", "for rank, settled in having if settled == newest)", "for rank, settled in having)"),
        *("live_round", "those_with_the_newest_state_begin[an_older_state_counts_as_none]"),
    ),
    of_steps(
        "where nobody has a state all begin together",
        *("worker/live_worlds", ") or tuple(range(size)))", "))"),
        *("live_round", "those_with_the_newest_state_begin[nobody_has_a_state]"),
    ),
    mutant(
        "a world waits for all its ranks",
        *("live/live_round", "self._store.add(here, 0) >= len(world.ranks) or None", "True"),
        *("live_round", "a_world_waits_for_all_its_ranks"),
    ),
    mutant(
        "a rank with a state that hangs is not waited for for ever",
        *("live/live_round", "self._come(world, COME if self._known else math.inf)", "self._come(world)"),
        *("live_round", "a_rank_with_a_state_that_hangs_is_not_waited_for_for_ever[2]"),
    ),
    mutant(
        "one of the first round is",
        *("live/live_round", "COME if self._known else math.inf", "COME"),
        *("live_round", "a_rank_with_a_state_that_hangs_is_not_waited_for_for_ever[1]"),
    ),
    mutant(
        "who has left asks for no world",
        *("live/live_round", "                        if not self._stopped.is_set():\n", "                        if True:\n"),
        *("live_round", "who_has_left_asks_for_no_world"),
    ),
    mutant(
        "several new workers are taken in together",
        *("live/live_round", "self._workers or now - first > TOGETHER)", "self._workers or True)"),
        *("live_round", "several_that_are_ready_are_taken_in_together"),
    ),
    mutant(
        "nobody waits for ever for another new worker",
        *("live/live_round", " or now - first > TOGETHER)", ")"),
        *("live_round", "one_that_is_ready_does_not_wait_for_ever_for_another_one"),
    ),
    mutant(
        "who waits hears that training has ended",
        *("live/live_round", 'if found is None and self._store.check(["over"]):', "if False:"),
        *("live_round", "who_waits_ends_well_when_training_ends_without_it"),
    ),
    mutant(
        "a new worker waits as long as a step takes",
        *("live/live_round", "self._come(world, or_over=True)", "self._come(world, COME, or_over=True)"),
        *("live_round", "a_new_worker_waits_as_long_as_the_others_need_for_a_step"),
    ),
    mutant(
        "who is asked for after the last step ends well",
        *("live/live_round", "self._come(world, or_over=True)", "self._come(world)"),
        *("live_round", "a_new_worker_that_is_asked_for_after_the_last_step_ends_well"),
    ),
    mutant(
        "a buffer that has grown in a rehearsal stays",
        *("live/step_snapshot", "if before is not None and before.shape == tensor.shape:", "if before is not None:"),
        *("elastic", "a_rehearsal_that_makes_buffers_is_undone_but_for_these"),
    ),
    mutant(
        "schedulers of any name are brought back",
        *("live/step_snapshot", 'name == "scheduler" or isinstance(part, LRScheduler)', 'name == "scheduler"'),
        *("elastic", "every_scheduler_is_brought_back_and_other_parts_are_known_to_have_changed"),
    ),
    mutant(
        "a rank without traces of a dropped step is further",
        *("elastic", "*self._place(), -self._tried]", "*self._place(), 0]"),
        *("elastic", "the_furthest_of_the_newest_round_wins[dropped_steps]"),
    ),
    mutant(
        "a new rank that does not fit ends nobody else",
        *("live/world_change", "if isinstance(self._error, ModelMismatch):", "if False:"),
        *("elastic", "a_new_rank_that_does_not_fit_does_not_end_those_that_train"),
    ),
    mutant(
        "a state comes before the epoch is over",
        *("live/state_slices", "while len(self._slices) >= pieces > 1:", "while False:"),
        *("state_slices", "a_state_comes_in_as_few_pieces_as_an_epoch_has_steps_left[2]"),
    ),
    mutant(
        "a new rank is whole before the epoch is over",
        *("live/world_change", "self._switch(left)\n                self._say_if_done()\n", "self._switch(left)\n"),
        *("elastic", "the_last_step_of_an_epoch_is_not_the_last_one_in_the_old_groups[False]"),
    ),
    mutant(
        "wrong use is no lost peer",
        *("elastic", "isinstance(error, ModelMismatch | WrongUse)", "isinstance(error, ModelMismatch)"),
        *("elastic", "wrong_use_within_a_round_is_no_lost_peer"),
    ),
    mutant(
        "who looks for new workers survives a broken connection",
        *("live/live_round", "RuntimeError:\n                self._open_again()\n", "RuntimeError:\n                return\n"),
        *("live_round", "who_looks_for_new_workers_finds_them_although_its_connection_has_broken"),
    ),
    mutant(
        "a wait survives a broken connection",
        *("live/live_round", "                if now > min(end, missed + AWAY):\n", "                if True:\n"),
        *("live_round", "a_new_worker_is_taken_in_although_its_connection_has_broken[a_world]"),
    ),
    mutant(
        "a wait without a store has an end",
        *("live/live_round", "                if now > min(end, missed + AWAY):\n", "                if False:\n"),
        *("live_round", "a_wait_without_a_store_ends_so_that_the_agent_hears_of_it"),
    ),
    mutant(
        "who leaves the round does not connect again",
        *("live/live_round", "if not self._stopped.wait(AGAIN) and not self._asked():", "if True:"),
        *("live_round", "a_worker_that_leaves_the_round_does_not_connect_again"),
    ),
    mutant(
        "a change that is given up waits for nobody",
        *("live/live_round", "while not (self._asked() or self._stopped.is_set()):", "while not self._asked():"),
        *("live_round", "nobody_is_waited_for_when_the_change_of_the_world_is_given_up"),
    ),
    mutant(
        "an exception is no end of training",
        *("live/live_round", '        if not hasattr(sys, "last_value"):\n', "        if True:\n"),
        *("live_round", "a_worker_that_ends_with_an_exception_does_not_say_that_training_is_over"),
    ),
    mutant(
        "slices that are copied have a limit",
        *("live/state_slices", "together if most < LARGEST else []", "together"),
        *("state_slices", "a_state_that_is_too_large_for_slices_that_are_copied_comes_at_once"),
    ),
    mutant(
        "a wait for the writer ends with the round",
        *("groups/connections", "            self.check(what)\n", ""),
        *("checkpointer", "a_wait_for_the_writer_ends_with_the_round"),
    ),
    mutant(
        "the end of the process waits for threads of the round",
        *("live/live_round", "            thread.join(max(0.0, end - time.monotonic()))\n", "            pass\n"),
        *("elastic", "the_end_of_the_process_waits_for_the_threads_of_its_round"),
    ),
    by_name(
        "the last step is saved although it is not due",
        *("live.world_checkpoints:WorldCheckpoints.publish", gets("now", "False")),
        seen_by="elastic::the_last_step_is_on_the_disk_when_save_returns_and_is_not_saved_again",
    ),
    by_name(
        "a step that comes from the directory is not saved again",
        *("live.world_checkpoints:WorldCheckpoints.publish", never("restored")),
        seen_by="elastic::the_last_step_is_on_the_disk_when_save_returns_and_is_not_saved_again",
    ),
    by_name(
        "a save returns when it is published",
        *("live.world_checkpoints:WorldCheckpoints.publish", without("wait")),
        seen_by="elastic::a_save_that_loses_a_peer_is_made_in_the_next_round",
    ),
    by_name(
        "a worker that has lost its state in a save does not end well",
        *("elastic:Elastic._save_together", without("_must_be_whole")),
        seen_by="elastic::a_worker_without_whom_the_others_have_gone_on_does_not_end_as_if_it_had_saved",
    ),
    mutant(
        "a request for a world ends with its round",
        *("elastic", "            self._switch.withdraw(request)", "            pass"),
        *("elastic", "a_request_for_a_world_of_a_round_that_is_over_is_not_carried_into_the_next"),
    ),
    mutant(
        "groups are named alike after one that could not be made",
        *("elastic", "        c10d._world.group_count = 0  #", "        #"),
        *("elastic", "groups_are_made_by_the_same_names_after_one_that_could_not_be_made"),
    ),
    mutant(
        "a dropped step does not move the loader",
        *("live/step_snapshot", "        self._loader.load_state_dict(self._data)\n", ""),
        *("elastic", "a_dropped_step_moves_neither_loader_nor_scheduler"),
    ),
    mutant(
        "what a script does between two epochs stays",
        *("elastic", "        self._before.take()  # with what the script", "        pass  # with what the script"),
        *("elastic", "what_a_script_does_between_two_epochs_is_not_undone"),
    ),
    by_name(
        "what comes between two epochs is done in one world",
        *("elastic:Elastic._follow_up", instead_of("EPOCH_ENDS", "NONE")),
        seen_by="elastic::what_comes_between_two_epochs_is_done_in_one_world[0-False-True]",
    ),
    mutant(
        "a rank with a part of the state has no weight",
        *("reduction/control_words", "return self.samples if self.counts else 0.0", "return self.samples"),
        *("elastic", "a_rank_with_a_part_of_the_state_has_no_weight_whatever_the_script_says"),
    ),
    by_name(
        "a hook with a state is refused",
        *("live.start:check", never("hook_with_state")),
        seen_by="elastic::a_hook_with_a_state_is_refused",
    ),
    mutant(
        "a learning rate that is a tensor is brought back",
        *("live/step_snapshot", "value.clone() if isinstance(value, torch.Tensor) else value", "value"),
        *("elastic", "learning_rates_that_are_tensors_and_schedulers_in_a_list_are_brought_back"),
    ),
    mutant(
        "a scheduler in a list is brought back",
        *("live/step_snapshot", "for part in _leaves(value) if hasattr", "for part in [value] if hasattr"),
        *("elastic", "learning_rates_that_are_tensors_and_schedulers_in_a_list_are_brought_back"),
    ),
    mutant(
        "what an optimizer keeps only later comes with all of its parameter",
        *("live/state_slices", "(tensors.keys() - sliced) | grown", "tensors.keys() - sliced"),
        *("state_slices", "what_an_optimizer_keeps_only_later_comes_with_the_rest"),
    ),
    mutant(
        "a state with more than the script makes is a mismatch",
        *("live/state_slices", "if missing := saved.keys() - self._wanted.keys():", "if missing := set():"),
        *("state_slices", "a_state_that_has_more_than_the_script_makes_is_a_mismatch"),
    ),
    mutant(
        "a view of a parameter does not stand for it",
        *("live/state_slices", "return tensor.data_ptr(), tensor.numel()", "return tensor.data_ptr(), 0"),
        *("state_slices", "a_view_of_a_parameter_does_not_stand_for_it"),
    ),
    mutant(
        "a dropped step does not move the learning rate",
        *("live/step_snapshot", "                    group[name] = value\n", "                    pass\n"),
        *("elastic", "a_dropped_step_moves_neither_loader_nor_scheduler"),
    ),
    mutant(
        "a group that was there before is not cut",
        *("groups/connections", "self._groups = set(_sockets()) - self._before", "self._groups = set(_sockets())"),
        *("elastic", "a_wait_for_a_peer_that_never_comes_is_cut_and_other_groups_go_on"),
    ),
    by_name(
        "a worker with an older state keeps it until it joins",
        *("elastic:Elastic._find_world", gets("is_prepared", "self._rehearsal is not None")),
        seen_by="elastic::a_new_worker_rehearses_and_one_with_an_older_state_keeps_that_until_it_joins[4-joins]",
    ),
    mutant(
        "a collective that gloo forgets is given up",
        *("groups/waits", "                _give_up_if_cut()\n", "                pass\n"),
        *("group_waits", "a_wait_ends_that_gloo_forgets[receives_a_collective]"),
    ),
    mutant(
        "the host waits for a GPU in a live job",
        *("groups/waits", 'if device.type == "cuda" and live_sockets.made:', "if False:"),
        *("group_waits", "a_reduction_on_a_gpu_that_ends_by_an_abort_has_failed[before it ends]"),
    ),
    mutant(
        "nobody waits for a GPU in other jobs",
        *("groups/waits", 'if device.type == "cuda" and live_sockets.made:', 'if device.type == "cuda":'),
        *("group_waits", "the_host_waits_for_a_reduction_on_a_gpu_in_a_live_job_only"),
    ),
    mutant(
        "what ends when the connections are cut has failed",
        *("groups/waits", "    if live_sockets.is_cut:  # read after", "    if False:  # read after"),
        *("group_waits", "a_reduction_on_a_gpu_that_ends_by_an_abort_has_failed[when it ends]"),
    ),
    mutant(
        "a rank alone confirms no step",
        *("groups/waits", "    finish(dist.all_reduce(torch.zeros(1", "    None and finish(dist.all_reduce(torch.zeros(1"),
        *("group_waits", "no_rank_confirms_a_step_of_which_another_rank_has_been_cut"),
    ),
    mutant(
        "a GPU that fails is no lost peer",
        *("groups/waits", 'raise TrainError(f"the GPU failed: {error}") from None', "raise"),
        *("group_waits", "a_gpu_that_fails_is_no_lost_peer"),
    ),
    mutant(
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
        *("groups/waits", "        _give_up_if_cut()\n        thread", "        thread"),
        *("group_waits", "a_wait_ends_that_gloo_forgets[sends_a_message]"),
    ),
    mutant(
        "the mean is over samples",
        *("reduction/reduction", "return self.expected_samples / self.samples", "return 1.0"),
        *("ddp", "the_mean_is_over_samples"),
    ),
    mutant(
        "a request is heard once",
        *("reduction/control_words", "self.requests -= self.taken", "pass"),
        *("more", "a_request_of_one_rank_is_heard_by_all_in_the_same_step"),
    ),
    mutant(
        "a step whose words come too late is not passed over",
        *("reduction/conclusion", "if agreement.failed or not same:", "if False:"),
        *("ddp", "on_a_gpu_the_words_are_read_a_step_later"),
    ),
    mutant(
        "a failed backward drops the step everywhere",
        *("reduction/conclusion", "        if agreement.failed:\n", "        if False:\n"),
        *("trouble", "an_exception_in_a_backward_drops_the_step_everywhere[group]"),
    ),
    mutant(
        "a checksum weighs each place",
        *("reduction/replica_check", "weights[: part.numel()]).sum()", "weights[0]).sum()"),
        *("more", "two_changes_that_cancel_in_a_sum_are_found"),
    ),
    mutant(
        "who freezes something else later is told",
        *("reduction/conclusion", "if len(set(agreement.trained)) > 1:", "if False:"),
        *("order", "what_one_rank_freezes_later_is_an_error_on_every_rank[group]"),
    ),
    mutant(
        "autograd.grad that fails reduces nothing",
        *("reduction/backward", "(STARTED, BackwardTrigger.INTERRUPTED): EMPTY", "(STARTED, BackwardTrigger.INTERRUPTED): DRAINING"),
        *("ways", "the_same_as_with_torchs_class[gradients_asked_for-group]"),
    ),
    mutant(
        "replicas that differ on purpose are not compared",
        *("reduction/conclusion", "every > 0 and self._parts.extensions.compares_replicas and", "every > 0 and"),
        *("ways", "the_same_as_with_torchs_class[local_steps_wrapped-group]"),
    ),
    mutant(
        "all look when one has said so",
        *("reduction/conclusion", "if agreement.lacking or agreement.looking:", "if agreement.lacking:"),
        *("lazily", "one_rank_says_how_many_samples_it_has[group]"),
    ),
    mutant(
        "nor a gradient",
        *("reduction/reduction", "and (not defers or agreed.looking == self._world.size)", ""),
        *("lazily", "who_reads_the_words_alone_does_as_the_others[2-group]"),
    ),
    mutant(
        "sums of samples are compared by closeness",
        *(
            "reduction/conclusion",
            "math.isclose(agreement.samples, expected_samples, rel_tol=1e-5)",
            "agreement.samples == expected_samples",
        ),
        *("lazily", "who_reads_the_words_alone_does_as_the_others[2-group]"),
    ),
    mutant(
        "a step that freezes or unfreezes is looked at",
        *("reduction/conclusion", " and not parts.trained.differs", ""),
        *("lazily", "what_is_unfrozen_is_reduced_from_the_first_step_on[2-group]"),
    ),
    # the transitions of a backward
    mutant(
        "a backward that accumulates nothing reduces nothing",
        *("reduction/backward", "(STARTED, BackwardTrigger.GRAPH_DONE): EMPTY", "(STARTED, BackwardTrigger.GRAPH_DONE): REDUCING"),
        *("ways", "the_same_as_with_torchs_class[gradients_asked_for-group]"),
    ),
    mutant(
        "what accumulates nothing is no backward",
        *("reduction/backward", "(STARTED, BackwardTrigger.GRAPH_DONE): EMPTY", "(STARTED, BackwardTrigger.GRAPH_DONE): DONE"),
        *("more", "a_stage_of_a_pipeline_reduces_once_per_step"),
    ),
    mutant(
        "a backward within no_sync stays local",
        *("reduction/backward", "(KEEPING, BackwardTrigger.GRAPH_DONE): DONE", "(KEEPING, BackwardTrigger.GRAPH_DONE): REDUCING"),
        *("ddp", "micro_batches_within_no_sync_cost_one_reduction[5]"),
    ),
    mutant(
        "an exception within no_sync is nobody else's matter",
        *("reduction/backward", "(KEEPING, BackwardTrigger.INTERRUPTED): DONE", "(KEEPING, BackwardTrigger.INTERRUPTED): DRAINING"),
        *("backward", "an_exception_within_no_sync_concerns_no_other_rank"),
    ),
    mutant(
        "a rank whose backward failed brings no gradients",
        *(
            "reduction/backward",
            "(COLLECTING, BackwardTrigger.INTERRUPTED): DRAINING",
            "(COLLECTING, BackwardTrigger.INTERRUPTED): REDUCING",
        ),
        *("trouble", "an_exception_in_a_backward_drops_the_step_everywhere[group]"),
    ),
    mutant(
        "the others do not wait for a rank whose backward failed",
        *("reduction/backward", "(COLLECTING, BackwardTrigger.INTERRUPTED): DRAINING", "(COLLECTING, BackwardTrigger.INTERRUPTED): DONE"),
        *("trouble", "an_exception_in_a_backward_drops_the_step_everywhere[group]"),
    ),
    mutant(
        "a reduction that has failed is over",
        *("reduction/backward", "(COLLECTING, BackwardTrigger.FAILED): BROKEN", "(COLLECTING, BackwardTrigger.FAILED): COLLECTING"),
        *("backward", "nothing_more_is_launched_when_a_reduction_has_failed"),
    ),
    mutant(
        "a backward may begin without a gradient in sight",
        *("reduction/backward", "self._versions != _versions(params)", "False"),
        *("backward", "gradients_are_found_by_their_versions"),
    ),
    # the data
    mutant(
        "an iteration begins where the last one ended",
        *("data/loader", "_indices(order, loader.consumed, loader.sizes()", "_indices(order, 0, loader.sizes()"),
        *("data", "what_is_loaded_in_advance_does_not_count[2]"),
    ),
    mutant(
        "a batch counts from the moment it is handed out",
        *("data/loader", "self.consumed += size\n            yield batch\n", "yield batch\n            self.consumed += size\n"),
        *("data", "each_sample_once_whatever_becomes_of_the_world[2-64]"),
    ),
    mutant(
        "a step counts when its loop is over",
        *("data/loader", "            yield Step(size,", "            done()\n            yield Step(size,"),
        *("data", "a_step_that_is_not_finished_is_not_counted_and_holds_nobody_up"),
    ),
    mutant(
        "micro-batches weigh by their samples",
        *("data/steps", "        if before not in (None, size):\n", "        if False:\n"),
        *("data", f"{MEAN}[1]"),
    ),
    mutant(
        "a rank without a micro-batch takes part",
        *("data/steps", "    if ddp._reducer.step == reductions:\n", "    if False:\n"),
        *("data", f"{MEAN}[5]"),
    ),
    mutant(
        "only the last micro-batch reduces",
        *("data/steps", "schedule.set_sync(at == len(sizes))", "schedule.set_sync(True)"),
        *("data", f"{MEAN}[2]"),
    ),
    mutant(
        "the epoch is a part of the key",
        *("data/loader", "([(seed, epoch, index) for index", "([(seed, 0, index) for index"),
        *("keyed_rng", AUGMENTED),
    ),
    # deterministic mode
    mutant(
        "the state after the last batch is that of the next epoch",
        *("data/loader", "if over else (self.epoch, self.consumed)", "if False else (self.epoch, self.consumed)"),
        *("data", "after_the_last_batch_the_state_is_that_of_the_next_epoch"),
    ),
    mutant(
        "augmentations belong to the sample",
        *("data/loader", "if self._keyed_rng is None and not self.keyed:", "if False:"),
        *("deterministic", BITS),
    ),
    mutant(
        "groups of parameters that come in mid-training are refused in the step",
        *("elastic", "        self._before.verify_groups()\n", ""),
        *("live_loop", "parameters_that_come_in_mid_training_are_refused_at_once"),
    ),
    mutant(
        "to continue with other bits is refused",
        *("data/loader", "if (before := self.contract.get(name, value)) != value:", "if (before := value) != value:"),
        *("deterministic", REFUSED),
    ),
    # sharded data
    mutant(
        "the position in an open shard is kept",
        *("data/shard_order", "still.append((place, max(samples, done.samples) if", "still.append((place, samples if"),
        *("sharded_data", SHARDS),
    ),
    mutant(
        "open shards that no stream has come to stay open",
        *("data/shard_order", "range(max(until, len(self.open)))", "range(until)"),
        *("sharded_data", SHARDS),
    ),
    mutant(
        "a shard that is read up is not open",
        *("data/shard_order", "            if before >= done.shards:\n", "            if before >= done.shards - 1:\n"),
        *("sharded_data", "what_is_left_is_little_when_streams_are_alike"),
    ),
    mutant(
        "a step of shards counts when its loop is over",
        *("data/sharded_data", "partial(self._count, part)", "lambda: None"),
        *("sharded_data", f"{REAL}[workers0-plain]"),
    ),
    mutant(
        "a rank whose shards are read up goes on until all are",
        *("data/sharded_data", "more, part = ddp.agreement.more > 0, following", "more, part = following is not None, following"),
        *("sharded_data", f"{REAL}[workers0-plain]"),
    ),
    mutant(
        "a loading worker reads whole shards",
        *("data/sharded_data", "number, worker._worker_info = info.id, None", "number = info.id"),
        *("sharded_data", f"{REAL}[workers1-Samples]"),
    ),
    mutant(
        "loading draws no random numbers of the model",
        *("data/loader", ", generator=torch.Generator()", ""),
        *("data", "the_models_random_numbers_are_left_alone"),
    ),
    mutant(
        "a request that comes within a reduction is for the next one",
        *("reduction/control_words", "self.requests -= self.taken", "self.requests.clear()"),
        *("drain", "a_signal_within_a_reduction_is_told_in_the_next_one"),
    ),
    mutant(
        "a stop stays",
        *("reduction/conclusion", "        if self.drained is None and ", "        self.drained = None\n        if "),
        *("drain", SELDOM),
    ),
    mutant(
        "a stop stays when something is frozen",
        *("reduction/conclusion", "        self.drained = old.drained\n", ""),
        *("drain", SELDOM),
    ),
    mutant(
        "all stop after the same step",
        *("stopping/drain", "        if self.step is not None:\n", "        if self.step is not None or self._signum:\n"),
        *("drain", "all_ranks_stop_after_the_same_step_whenever_the_signal_comes"),
    ),
    mutant(
        "a new world is told",
        *("stopping/drain", "            self._ask()  # again", "            pass  # again"),
        *("drain", "a_stop_is_told_again_in_the_world_that_a_module_has_next"),
    ),
    mutant(
        "nobody leaves before the last one is done",
        *("stopping/drain", "        self._wait_for_others()\n", ""),
        *("drain", f"{LEAVES}[True-codes0]"),
    ),
    mutant(
        "nobody waits for a rank that ends in another way",
        *("stopping/drain", "        atexit.register(self._release_others)\n", ""),
        *("drain", "nobody_waits_for_a_rank_that_failed_to_save"),
    ),
    mutant(
        "who learnt of a stop waits for the signal",
        *("stopping/drain", "bool(self._signum) or not _has_agent()", "True"),
        *("drain", f"{LEAVES}[True-codes0]"),
    ),
    mutant(
        "to leave is no success",
        *("stopping/drain", "os._exit(CODE)\n\n    def close", "os._exit(0)\n\n    def close"),
        *("drain", f"{LEAVES}[False-codes1]"),
    ),
    mutant(
        "a deadline does not move",
        *("stopping/drain", "if self._known is None:", "if True:"),
        *("drain", HANDLERS),
    ),
    mutant(
        "handlers of others are called",
        *("stopping/drain", "            before(signum, frame)\n", "            pass\n"),
        *("drain", HANDLERS),
    ),
    mutant(
        "a fork has nothing to drain",
        *("stopping/drain", "if os.getpid() != self._pid:", "if False:"),
        *("drain", "a_fork_is_ended_by_the_signal_as_if_there_was_no_handler"),
    ),
    mutant(
        "what all have agreed on is carried out after a failure, too",
        *("stopping/drain", "if self.step is None and not any(", "if not any("),
        *("drain", f"{FAILURE}[failure-True-False]"),
    ),
    mutant(
        "a commit needs the files of all ranks",
        *("checkpoints/publishing", "replies = [mine, *self._replies(save)]", "replies = [mine]"),
        *("ckpt_rounds", "a_commit_needs_the_files_of_all_ranks"),
    ),
    mutant(
        "a killed writer has a successor",
        *("checkpoints/publishing", "            if self._ending.is_set():\n", "            if True:\n"),
        *("ckpt_rounds", "a_writer_that_was_killed_gets_a_successor[write]"),
    ),
    mutant(
        "the successor gets the images",
        *("checkpoints/publishing", 'if request["do"] != "images":', "if False:"),
        *("ckpt_rounds", "a_writer_that_was_killed_gets_a_successor[commit]"),
    ),
    mutant(
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
        *("checkpoints/publishing", 'self._retry = 0.0 if "error" in reply else RETRY', "self._retry = RETRY"),
        *("ckpt_rounds", "a_write_after_one_that_failed_is_not_repeated_for_long"),
    ),
    mutant(
        "an end without patience ends the thread",
        *("checkpoints/publishing", "            self._ending.set()\n", "            pass\n"),
        *("ckpt_rounds", "an_end_without_patience_does_not_wait_for_other_ranks"),
    ),
    mutant(
        "memory is there before the first save",
        *("checkpoints/staging", "                if madvise(where, ctypes.c_size_t(size), _POPULATE_WRITE):", "                if True:"),
        *("ckpt_staging", "every_page_is_mapped_before_the_first_save"),
    ),
    mutant(
        "it is not prepared beside a copy",
        *("checkpoints/staging", "            self._may_map[which].wait()\n", ""),
        *("ckpt_staging", "no_page_is_mapped_beside_a_copy"),
    ),
    mutant(
        "nor that of the image that is filled",
        *("checkpoints/staging", "if number != which or self._gpu is None]", "if number != which]"),
        *("ckpt_staging", "no_page_is_mapped_beside_a_copy"),
    ),
    mutant(
        "but for a GPU",
        *("checkpoints/staging", "if number != which or self._gpu is None]", "if True]"),
        *("ckpt_staging", "a_copy_from_a_gpu_does_not_stop_the_mapping_of_its_own_image"),
    ),
    mutant(
        "what is not mapped yet is written",
        *("checkpoints/staging", "if raw.at + view.nbytes <= self._there[which] or", "if True or"),
        *("ckpt_staging", "pages_that_are_not_there_yet_are_written_and_not_mapped"),
    ),
    mutant(
        "only once",
        *("checkpoints/staging", "            self._there[which] = image.size\n", ""),
        *("ckpt_staging", "pages_that_are_not_there_yet_are_written_and_not_mapped"),
    ),
    mutant(
        "memory that was replaced is left alone",
        *("checkpoints/staging", "if self.images[which] is not image or self._stopped:", "if self._stopped:"),
        *("ckpt_staging", "the_memory_of_an_image_that_was_replaced_is_left_alone"),
    ),
    mutant(
        "an error of one rank is that of all",
        *("checkpoints/ranks", '        if text.startswith("-"):', '        if text.startswith("-") and rank == ranks.rank:'),
        *("ckpt_ranks", "an_error_of_one_rank_is_that_of_all_and_results_are_shared"),
    ),
    mutant(
        "the writer starts after a restore",
        *(
            "checkpoints/checkpointer",
            "        self._claim_directory()\n        if self._last",
            "        self._claim_directory()\n        self._opened.publisher.start_writer()\n        if self._last",
        ),
        *("ckpt_ranks", "the_writer_does_not_start_beside_a_restore"),
    ),
    mutant(
        "the newest copy is not the next to be filled",
        *("checkpoints/checkpointer", "for more in range(1, number)]", "for more in range(number)]"),
        *("ckpt_rounds", "the_newest_copy_stays_until_the_next_one_is_complete"),
    ),
    mutant(
        "nor where all others are on their way to the disk",
        *("checkpoints/checkpointer", "for more in range(1, number)]", "for more in range(1, number + 1)]"),
        *("ckpt_rounds", SLOW),
    ),
    mutant(
        "saves for the memory alone have an image more",
        *("checkpoints/checkpointer", "IMAGES if memory_every is None else MORE_IMAGES", "IMAGES"),
        *("ckpt_rounds", SLOW),
    ),
    mutant(
        "where no image is free a save waits for the first one that will be",
        *("checkpoints/checkpointer", "if free else min(older,", "if free else max(older,"),
        *("ckpt_rounds", SLOW),
    ),
    mutant(
        "nor in the next world of live workers",
        *("checkpoints/checkpointer", "self._number, self._filled = last_save", "self._number, _ = last_save"),
        *("ckpt_rounds", f"{NEXT}[True]"),
    ),
    mutant(
        "where the saves are newer than those before",
        *("checkpoints/checkpointer", "self._number, self._filled = last_save", "_, self._filled = last_save"),
        *("ckpt_rounds", f"{NEXT}[False]"),
    ),
    mutant(
        "also for a worker that came later",
        *("checkpoints/checkpointer", "(max(theirs[at] for theirs in everyone) for at in (4, 5))", "(self._number, self._filled)"),
        *("ckpt_rounds", f"{NEXT}[False]"),
    ),
    mutant(
        "nor is it after a restore",
        *("checkpoints/checkpointer", "        self._filled = found.image\n", "        self._filled = 1 - found.image\n"),
        *("ckpt_rounds", "images_of_an_earlier_round_are_filled_and_written_again"),
    ),
    mutant(
        "the writer gets images of an earlier round",
        *(
            "checkpoints/checkpointer",
            "                self._opened.publisher.take_images(self._staging)\n        if found",
            "                pass\n        if found",
        ),
        *("ckpt_rounds", "images_of_an_earlier_round_are_filled_and_written_again"),
    ),
    mutant(
        "memory of another job does not count",
        *("checkpoints/restoring", "if _job(one.save.fence) == job]", "if True]"),
        *("ckpt_rounds", "the_newer_of_memory_and_disk_counts_and_no_memory_of_another_job[2-other:2-disk]"),
    ),
    mutant(
        "the disk counts where it is newer",
        *("checkpoints/restoring", "or theirs < mine or", "or True or"),
        *("ckpt_rounds", "the_newer_of_memory_and_disk_counts_and_no_memory_of_another_job[4-store:2-disk]"),
    ),
    mutant(
        "and where memory has lost something",
        *("checkpoints/restoring", "(theirs == mine and not best.lost)", "theirs == mine"),
        *("ckpt_rounds", "of_equal_ones_memory_counts_unless_it_has_lost_something"),
    ),
    mutant(
        "images of local ranks that are gone stay until all have saved",
        *("checkpoints/checkpointer", "        if self._costs.saves == 2:  #", "        if self._costs.saves == 1:  #"),
        *("ckpt_rounds", "images_of_local_ranks_that_are_gone_stay_until_all_ranks_have_saved"),
    ),
    mutant(
        "images of local ranks of this round stay",
        *("checkpoints/memory", 'if int(name.split(".")[1]) >= int(workers):', "if True:"),
        *("ckpt_rounds", "images_of_local_ranks_that_are_gone_stay_until_all_ranks_have_saved"),
    ),
    mutant(
        "a Checkpointer that nobody uses any more ends",
        *("checkpoints/checkpointer", "weakref.finalize(self, self._opened.drop)", "weakref.finalize(self, lambda: None)"),
        *("ckpt_rounds", "what_was_saved_and_dropped_is_published_and_nothing_is_left"),
    ),
    mutant(
        "one of those that wait writes who is missing",
        *("checkpoints/missing_ranks", "if missing and all(rank in missing for rank in range(self._rank)):", "if missing:"),
        *("checkpointer", "who_is_missing_is_named_once_and_no_note_remains"),
    ),
    mutant(
        "a rank that waits leaves a note",
        *("checkpoints/missing_ranks", 'self._board.set(self._key(number, self._rank), "")', "pass"),
        *("checkpointer", "who_is_missing_is_named_once_and_no_note_remains"),
    ),
    mutant(
        "values of lost ranks are not needed",
        *("checkpoints/memory", "if name not in marked for chunk", "if True for chunk"),
        *("ckpt_rounds", "what_only_a_lost_rank_had_does_not_make_a_copy_incomplete"),
    ),
    mutant(
        "ranks that share a replica load the same samples",
        *("data/steps", "if (rank, world_size) != (world", "if () != () and (world"),
        *("mesh", "ranks_that_share_a_replica_are_told_to_load_the_same_samples"),
    ),
    mutant(
        "all else is",
        *("checkpoints/memory", "return self.needed <= self.holders.keys()", "return True"),
        *("ckpt_rounds", "what_only_a_lost_rank_had_does_not_make_a_copy_incomplete"),
    ),
)


@each(MUTANTS)
def test_a_rule_that_is_taken_out_is_missed(copy: Path, one: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_STANDSTILL", "1.5")  # where ranks then wait for one another
    assert unnoticed(copy, one) == ""


def test_as_long_as_no_rule_is_taken_out_the_same_tests_pass(copy: Path) -> None:
    assert failing(copy, MUTANTS) == ""

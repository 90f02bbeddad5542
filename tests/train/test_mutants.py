"""Every rule of the training core has a test that notices when it is taken out, as in tests/rendezvous/test_mutants.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.mutants import Mutant, copy, each, failing, mutants_in, unnoticed

__all__ = ["copy"]  # the fixture


mutant = mutants_in("elastirun/train", "tests/train")
of_steps = mutants_in("elastirun", "tests/train")
MEAN = "a_step_has_the_mean_over_the_global_batch_whatever_its_micro_batches"
AUGMENTED = "augmentations_are_the_same_whatever_the_world_and_the_workers"
BITS = "the_same_bits_at_any_number_of_ranks"
REFUSED = "what_would_depend_on_the_number_of_ranks_is_refused"
SHARDS = "each_sample_once_whatever_becomes_of_the_world[3-64]"
REAL = "each_sample_once_on_real_ranks_with_loading_workers"
LATE = "a_gradient_that_comes_after_it_was_looked_for_is_added[bucket]"
BUFFERS = "buffers_are_what_they_are_under_torchs_class"
TWO = "an_exception_in_a_backward_through_two_modules_holds_nobody_up"
LEFT = "the_statistics_of_the_last_reduction_are_used_whatever_forwards_came_after_it"
SELDOM = "a_stop_is_not_missed_by_looking_seldom_nor_by_freezing_something"
LEAVES = "everybody_ends_as_if_it_was_signalled_when_the_last_one_is_done"
HANDLERS = "a_handler_that_was_there_before_is_called_and_comes_back"
FAILURE = "a_signal_after_a_failure_ends_a_rank_at_once"
ONE_DEVICE = "shared_memory_is_for_parameters_on_one_device_in_each_world"
ONLY_IN_AN_EPOCH = "if self._live is None:\n            return\n        if left"
NAME = "a_torch_without_one_is_one_sentence"
SLOW = "a_kill_in_a_save_costs_that_save_alone_while_the_disk_is_slow"
NEXT = "the_first_save_in_the_next_world_leaves_the_newest_copy_and_is_newer"
MUTANTS = (
    mutant(
        "what the checkpoints of a later world wait for is cut",
        *("elastic", "        live_sockets.begin()  #", "        return self._begin(restores=False)  #"),
        *("live_loop", "what_the_checkpoints_of_a_later_world_wait_for_is_cut"),
    ),
    mutant(
        "a torch that lacks a private name is refused at once",
        *("torch_private", "    if absent:\n        raise _without_frames", "    if False:\n        raise _without_frames"),
        *("torch_private", NAME),
    ),
    mutant(
        "and in one sentence",
        *("torch_private", "        if value is error:\n", "        if False:\n"),
        *("torch_private", NAME),
    ),
    mutant(
        "parameters on several devices go through the process group",
        *("ddp/module", '"group" if others and self._transport_wanted == "auto" else self._transport_wanted)', "self._transport_wanted)"),
        *("more", ONE_DEVICE),
    ),
    mutant(
        "shared memory that was asked for is not replaced in silence",
        *("ddp/module", 'if others and self._transport_wanted == "shared memory":', "if False:"),
        *("more", ONE_DEVICE),
    ),
    mutant(
        "a backward is a step",
        *("reduction/reducer", "        progress()  # before", "        # before"),
        *("progress", "each_backward_is_a_step_and_each_reduction_of_shards"),
    ),
    mutant(
        "the agent is told for how long the ranks compute",
        *("reduction/conclusion", "        computed(agreement.seconds[self._rank], median(agreement.seconds))\n", ""),
        *("progress", "the_agent_is_told_for_how_long_this_rank_and_the_median_rank_compute"),
    ),
    of_steps(
        "torch's sample rate is set again",
        *("worker/optimizer_steps", "        module._set_ddp_runtime_logging_sample_rate(USUAL)\n", ""),
        *("optimizer_steps", "a_sample_is_taken_every_two_seconds_and_is_the_time_without_the_wait"),
    ),
    of_steps(
        "a step that was measured long ago is no sample",
        *("worker/optimizer_steps", 'known = times["forward_compute_time_start"] > self._since', "known = True"),
        *("optimizer_steps", "a_sample_is_taken_every_two_seconds_and_is_the_time_without_the_wait"),
    ),
    of_steps(
        "samples are two seconds apart",
        *("worker/optimizer_steps", "return 1 if pause < SHORTEST_PAUSE else self._end(module, pause)", "return 1"),
        *("optimizer_steps", "a_sample_is_taken_every_two_seconds_and_is_the_time_without_the_wait"),
    ),
    of_steps(
        "one long step in three is no sample",
        *("worker/optimizer_steps", "sampled(sorted(self._last)[1])", "sampled(self._last[-1])"),
        *("optimizer_steps", "the_time_of_a_slow_loader_counts_and_a_pause_in_one_sample_does_not"),
    ),
    of_steps(
        "a slow loader computes",
        *("worker/optimizer_steps", '] - before["backward_comm_time_end"]\n', "] * 0\n"),
        *("optimizer_steps", "the_time_of_a_slow_loader_counts_and_a_pause_in_one_sample_does_not"),
    ),
    of_steps(
        "on a GPU only forward and backward count",
        *("worker/optimizer_steps", "if on_host and times", "if times"),
        *("optimizer_steps", "on_a_gpu_and_between_steps_with_communication_only_forward_and_backward_count"),
    ),
    of_steps(
        "between steps with communication nothing counts",
        *("worker/optimizer_steps", ' and times["iteration"] == before["iteration"] + 1:', ":"),
        *("optimizer_steps", "on_a_gpu_and_between_steps_with_communication_only_forward_and_backward_count"),
    ),
    of_steps(
        "a step is one sample",
        *("worker/optimizer_steps", '(known and before and times["iteration"] > before["iteration"])', "(known and before)"),
        *("optimizer_steps", "a_module_that_reduces_nothing_any_more_is_seldom_looked_at"),
    ),
    of_steps(
        "one module is sampled",
        *("worker/optimizer_steps", "if len(found) == 1:", "if found:"),
        *("optimizer_steps", "no_module_or_several_are_looked_for_a_few_times[found1]"),
    ),
    of_steps(
        "a module is looked for a few times",
        *("worker/optimizer_steps", " if self._looks < MOST_LOOKS else 0\n", "\n"),
        *("optimizer_steps", "no_module_or_several_are_looked_for_a_few_times[found0]"),
    ),
    of_steps(
        "an interface of torch that has changed is no error",
        *("worker/optimizer_steps", "        except Exception:  # the interface", "        except OSError:  # the interface"),
        *("optimizer_steps", "an_interface_that_has_changed_is_no_error"),
    ),
    of_steps(
        "torch's sample rate is set again after an error",
        *("worker/optimizer_steps", "                self._end(module, 0)\n", "                pass\n"),
        *("optimizer_steps", "an_interface_that_has_changed_is_no_error"),
    ),
    of_steps(
        "times are not read inside of a backward",
        *("worker/optimizer_steps", " or torch._C._current_graph_task_id() != -1\n", "\n"),
        *("optimizer_steps", "nothing_is_read_inside_of_a_backward"),
    ),
    of_steps(
        "times are read in the main thread",
        *("worker/optimizer_steps", "return threading.current_thread() is not threading.main_thread() or torch", "return torch"),
        *("optimizer_steps", "nothing_is_read_in_another_thread_or_where_torch_would_log_it"),
    ),
    mutant(
        "what all ask for is not what one asks for",
        *("reduction/control_words", "if count == self._world", "if count"),
        *("elastic", "ranks_know_what_one_asks_for_and_what_all_ask_for"),
    ),
    mutant(
        "who has left a round without a state has a world of its own",
        *("elastic", "            _init_alone()\n            self._model.set_group(init_sync=False)\n", "            _init_alone()\n"),
        *("elastic", "who_has_left_a_round_without_a_state_is_alone_again"),
    ),
    mutant(
        "the hook for exceptions is installed once",
        *("groups/rank_prefix", "before if _installed else partial(_write_prefixed, before)", "partial(_write_prefixed, before)"),
        *("elastic", "a_thousand_worlds_add_one_hook_for_exceptions"),
    ),
    mutant(
        "torch's own prefixes go",
        *("groups/rank_prefix", '_TORCHS.sub("", line)', "line"),
        *("elastic", "each_line_of_an_exception_has_one_prefix_with_the_rank_in_the_last_world"),
    ),
    mutant(
        "a group that could not be made leaves no hook",
        *("groups/rank_prefix", "        sys.excepthook = before\n        raise\n", "        raise\n"),
        *("elastic", "a_group_that_could_not_be_made_leaves_no_prefix"),
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
        *("reduction/conclusion", "self._extensions.compares_replicas and not self._planner.held", "self._extensions.compares_replicas"),
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
    mutant(
        "a measured plan stays in the next world",
        *("reduction/reducer", "        if any(epochs):\n", "        if False:\n"),
        *("plans", "a_measured_plan_stays_in_the_next_world_and_new_ranks_take_it_over[group]"),
    ),
    mutant(
        "it is the plan of who has one",
        *("reduction/reducer", "epochs.index(max(epochs))", "0"),
        *("plans", "a_measured_plan_stays_in_the_next_world_and_new_ranks_take_it_over[group]"),
    ),
    mutant(
        "new ranks know which parameters were seen to lack a gradient",
        *("reduction/buckets/planner", "mark & 2}", "mark & 4}"),
        *("plans", "a_rank_that_joins_makes_the_next_plan_with_the_others"),
    ),
    mutant(
        "a plan for another transport is made anew",
        *("reduction/buckets/planner", " and plan.transport is type(self._transport)", ""),
        *("plans", "a_plan_for_another_transport_is_made_anew"),
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
    mutant(
        "where nobody has a state nobody is late",
        *("elastic", "are_late = [] if begins_anew else late(", "are_late = late("),
        *("elastic", "who_has_not_come_as_far_in_the_script_as_others_is_late[no_state]"),
    ),
    mutant(
        "what one who is late does to its state is not kept",
        *("elastic", "            self._tried = 1 + max(-theirs[-1] for theirs in everyone)", "            pass"),
        *("elastic", "who_has_not_come_as_far_in_the_script_as_others_is_late[a_save]"),
    ),
    mutant(
        "nor where all others are lost meanwhile",
        *("elastic", "            self._before.restore()\n            self._late.put_back", "            self._late.put_back"),
        *("elastic", "what_comes_until_the_next_batch_does_not_count_for_one_who_is_late"),
    ),
    mutant(
        "nor in its averages",
        *("elastic", "            self._late.put_back(self.state)\n", ""),
        *("live_loop", "what_a_late_rank_changes_until_it_has_caught_up_is_not_kept"),
    ),
    mutant(
        "a worker whose older state does not count stays in the loop",
        *("elastic", "                    if not (trains and self._whole):\n", "                    if not trains:\n"),
        *("live_loop", "a_worker_whose_older_state_does_not_count_stays_in_the_loop"),
    ),
    mutant(
        "a worker alone leaves its round",
        *("elastic", "self._steps_left == 0 and self._live.size > 1:", "self._steps_left == 0:"),
        *("live_loop", "a_worker_alone_leaves_its_round_also_where_each_step_is_the_last_of_an_epoch"),
    ),
    mutant(
        "the step in which the script leaves the loop counts",
        *("elastic", "counts = self._model.completed > self._completed", "counts = False"),
        *("live_loop", "the_step_in_which_the_script_leaves_the_loop_counts_if_its_reduction_was_made[False]"),
    ),
    mutant(
        "but not if its reduction failed",
        *("elastic", "counts = self._model.completed > self._completed", "counts = True"),
        *("live_loop", "the_step_in_which_the_script_leaves_the_loop_counts_if_its_reduction_was_made[True]"),
    ),
    mutant(
        "who leaves the loop in a failed step leaves the round when it comes back",
        *("elastic", "self._live is not None and (self._model.failed or connection.asked):", "False:"),
        *("live_loop", "a_script_that_leaves_the_loop_in_a_failed_step_leaves_its_round_when_it_comes_back"),
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
        *("elastic", "            step.done()\n", ""),
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
    mutant(
        "without an agent there is no other round to save in",
        *("elastic", "if self._model.failed and self._live is not None:", "if self._model.failed:"),
        *("live_loop", "without_an_agent_a_state_is_saved_after_an_interrupted_reduction"),
    ),
    mutant(
        "parts that have become something else are put back",
        *("live/state_copy", "if here is not None and fits else kept.clone()", "if here is not None else kept.clone()"),
        *("live_loop", "parts_that_have_become_something_else_are_put_back[one_element]"),
    ),
    mutant(
        "a copy of the model computes after the end of all groups",
        *("ddp/module", "if dist.is_initialized() and self.process_group not in", "if self.process_group not in"),
        *("live_loop", "a_copy_of_the_model_computes_after_the_end_of_all_groups"),
    ),
    mutant(
        "a step counts when the script has left the loop in it",
        *("elastic", "                    self._end_loop(token)\n", "                    pass\n"),
        *("live_loop", "the_step_in_which_the_script_leaves_the_loop_counts_if_its_reduction_was_made[False]"),
    ),
    mutant(
        "a step counts whose gradients were used before a peer was lost",
        *("elastic", "return self._model.failed and self._model.completed == self._completed", "return self._model.failed"),
        *("live_loop", "a_step_counts_whose_gradients_were_used_before_a_peer_was_lost"),
    ),
    mutant(
        "what an exception has interrupted is made before a save",
        *("elastic", "        settle()  # the others wait", "        #"),
        *("live_loop", "a_backward_that_an_exception_has_interrupted_is_made_before_a_save[due]"),
    ),
    mutant(
        "and before the last one",
        *("elastic", "            settle()\n            if self._late", "            if self._late"),
        *("live_loop", "a_backward_that_an_exception_has_interrupted_is_made_before_a_save[last]"),
    ),
    mutant(
        "a worker that an exception ends takes part in no reduction on its way out",
        *("elastic", "        counts = self._model", "        settle()\n        counts = self._model"),
        *("live_loop", "a_worker_that_an_exception_ends_takes_part_in_no_reduction_on_its_way_out"),
    ),
    mutant(
        "a save that fails twice in a row ends the worker",
        *("elastic", "again, self._save_failed = self._save_failed, True", "again = False"),
        *("live_loop", "a_save_that_fails_twice_in_a_row_ends_the_worker_with_its_error[fail fail-True]"),
    ),
    mutant(
        "a save that was made in between is no failure",
        *("elastic", "                self._save_failed = False\n", "                pass\n"),
        *("live_loop", "a_save_that_fails_twice_in_a_row_ends_the_worker_with_its_error[fail fine fail-False]"),
    ),
    mutant(
        "a lost peer is no failure of a save",
        *("elastic", "if not isinstance(error, CheckpointError) or", "if"),
        *("live_loop", "a_save_that_fails_twice_in_a_row_ends_the_worker_with_its_error[lost lost-False]"),
    ),
    mutant(
        "a last save waits for a step that this rank has lost",
        *("elastic", "        if self._model.failed and self._live is not None:  # others", "        if False:  # others"),
        *("live_loop", "a_last_save_waits_for_a_step_that_this_rank_has_lost"),
    ),
    mutant(
        "what a rehearsal has changed beside the model is brought back",
        *("live/step_snapshot", "        self._others.put_back(self._state)\n", ""),
        *("live_loop", "what_a_rehearsal_has_changed_beside_the_model_is_brought_back_for_a_run_that_begins"),
    ),
    mutant(
        "an average of the model is used in another world",
        *("ddp/module", "            self._follow_default_group()\n            return", "            return"),
        *("live_loop", "an_average_of_the_model_is_used_in_another_world_than_it_was_made_in"),
    ),
    mutant(
        "a peer that never comes to the group of the checkpoints is not waited for",
        *("groups/process_groups", "        gather([0], group, CPU)  #", "        pass  #"),
        *("live_loop", "a_peer_that_never_comes_to_the_group_of_the_checkpoints_is_not_waited_for"),
    ),
    mutant(
        "the group of the checkpoints has the time limit of any group",
        *("groups/process_groups", "    connected(_backends(made), timeout)\n    return made\n", "    return made\n"),
        *("live_loop", "the_group_of_the_checkpoints_has_the_time_limit_of_any_group"),
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
        *("live/live_round", "found = World(number, parse_ranks(ranks, self._workers))", "found = World(number, tuple(ranks))"),
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
        *("elastic", "while self._late is None and not self._attempted", "while not self._attempted"),
        *("elastic", "who_is_late_when_it_saves_has_nothing_to_save_and_saves_the_next_time"),
    ),
    mutant(
        "a state that is being overwritten counts as none",
        *("elastic", "        self._whole, self._settled = False, 0  #", "        self._whole = False  #"),
        *("elastic", "a_worker_that_is_being_given_the_state_of_the_others_has_none"),
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
        "a step whose forward loses a peer is dropped",
        *("ddp/torch_names", "            if not self._drops_failed_steps:\n                raise\n", "            raise\n"),
        *("elastic", "a_step_whose_forward_loses_a_peer_changes_nothing"),
    ),
    mutant(
        "all backwards of a failed step end without gradients",
        *("reduction/reducer", "            self._end_with_graph(self._backward)\n", ""),
        *("elastic", "a_step_whose_reduction_is_interrupted_changes_nothing[group]"),
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
        "a new rank trains what the others train",
        *("ddp/module", "            if new:\n", "            if False:\n"),
        *("plans", "a_rank_that_joins_trains_the_parameters_that_the_others_train"),
    ),
    mutant(
        "a world for other parameters is not entered",
        *("ddp/module", " or not world.buckets.are_for(self._reducer.params):", ":"),
        *("plans", "a_world_that_was_prepared_for_other_parameters_is_not_entered[2]"),
    ),
    mutant(
        "a world is not entered in the step in which all have heard of other parameters",
        *("ddp/module", "if self._reducer.trained.differs or not world", "if not world"),
        *("plans", "a_world_that_was_prepared_for_other_parameters_is_not_entered[1]"),
    ),
    mutant(
        "no world is prepared for different parameters",
        *("ddp/module", "if any(theirs != digests[0] for theirs in digests):", "if False:"),
        *("plans", "no_world_is_prepared_by_ranks_that_train_different_parameters"),
    ),
    mutant(
        "a group that has ended is not asked for its ranks",
        *("ddp/module", "            self._group = group\n            self._adapt()", "            self._adapt()"),
        *("plans", "a_rank_that_joins_trains_the_parameters_that_the_others_train"),
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
        "a later backward of a failed step is dropped, too",
        *(
            "reduction/reducer",
            "            self._backward = None  # further backwards of a dropped step begin anew\n",
            "            pass\n",
        ),
        *("elastic", "a_step_whose_reduction_is_interrupted_changes_nothing[group]"),
    ),
    mutant(
        "slices that are copied have a limit",
        *("live/state_slices", "together if most < LARGEST else []", "together"),
        *("state_slices", "a_state_that_is_too_large_for_slices_that_are_copied_comes_at_once"),
    ),
    mutant(
        "a copy of a live model is no live one",
        *("ddp/deepcopy_support", '    "_drops_failed_steps",\n', ""),
        *("elastic", "a_copy_of_a_live_model_can_be_used"),
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
    mutant(
        "the end of the process waits for the end of a group",
        *("groups/process_groups", "            lock.acquire(timeout=max(0.0, end - time.monotonic()))", "            pass"),
        *("elastic", "the_end_of_the_process_waits_for_the_end_of_a_group_that_is_under_way"),
    ),
    mutant(
        "the last step is saved although it is not due",
        *("elastic", "self.state, now=True)", "self.state)"),
        *("elastic", "the_last_step_is_on_the_disk_when_save_returns_and_is_not_saved_again"),
    ),
    mutant(
        "a step that comes from the directory is not saved again",
        *("elastic", "        if checkpoints.restored == self.state.step:\n", "        if False:\n"),
        *("elastic", "the_last_step_is_on_the_disk_when_save_returns_and_is_not_saved_again"),
    ),
    mutant(
        "a save returns when it is published",
        *("elastic", "            checkpoints.wait(LAST_SAVE)\n", "            pass\n"),
        *("elastic", "a_save_that_loses_a_peer_is_made_in_the_next_round"),
    ),
    mutant(
        "a worker that has lost its state in a save does not end well",
        *("elastic", "            self._enter(connection)\n            self._must_be_whole()\n", "            self._enter(connection)\n"),
        *("elastic", "a_worker_without_whom_the_others_have_gone_on_does_not_end_as_if_it_had_saved"),
    ),
    mutant(
        "a failure keeps no process group",
        *("reduction/reducer", "        self._broken = self._backward = None  #", "        #"),
        *("elastic", "nothing_of_a_group_is_left_when_the_module_has_left_it"),
    ),
    mutant(
        "a request for a world ends with its round",
        *("elastic", "            self._model.withdraw(request)", "            pass"),
        *("elastic", "a_request_for_a_world_of_a_round_that_is_over_is_not_carried_into_the_next"),
    ),
    mutant(
        "connections of a group have a limit of their own",
        *(
            "groups/process_groups",
            "return timeout if _connect_limit is None else min(timeout, _connect_limit / GLOO_WAITS)",
            "return timeout",
        ),
        *("elastic", "connections_of_a_group_are_not_waited_for_as_long_as_for_a_collective"),
    ),
    mutant(
        "the limit of the connections is not that of collectives",
        *("groups/process_groups", "        backend._set_default_timeout(timeout)\n", "        pass\n"),
        *("elastic", "connections_of_a_group_are_not_waited_for_as_long_as_for_a_collective"),
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
        "the time from one checkpoint to the next goes on in the next world",
        *("checkpoints/due", "        self.begun = begun\n", "        pass\n"),
        *("ckpt_due", "a_period_goes_on_in_the_next_world"),
    ),
    mutant(
        "what a script does between two epochs stays",
        *("elastic", "        self._before.take()  # with what the script", "        pass  # with what the script"),
        *("elastic", "what_a_script_does_between_two_epochs_is_not_undone"),
    ),
    mutant(
        "what comes between two epochs is done in one world",
        *("elastic", "not dropped and self._steps_left == 0", "not dropped and False"),
        *("elastic", "what_comes_between_two_epochs_is_done_in_one_world[0-False-True]"),
    ),
    mutant(
        "a rank with a part of the state has no weight",
        *("reduction/control_words", "return self.samples if self.counts else 0.0", "return self.samples"),
        *("elastic", "a_rank_with_a_part_of_the_state_has_no_weight_whatever_the_script_says"),
    ),
    mutant(
        "a rank without data copies the buffers too",
        *("ddp/module", "        if self._check_sync_bufs_pre_fwd() or self._check_sync_bufs_post_fwd():", "        if False:"),
        *("elastic", "a_rank_without_data_takes_part_in_the_copy_of_the_buffers"),
    ),
    mutant(
        "after a reduction without data the buffers are copied again",
        *("ddp/module", "        self.require_forward_param_sync = True\n        self._reducer.skip()", "        self._reducer.skip()"),
        *("elastic", "a_rank_without_data_takes_part_in_the_copy_of_the_buffers"),
    ),
    mutant(
        "a hook with a state is refused",
        *("elastic", "if model.hook_with_state:", "if False:"),
        *("elastic", "a_hook_with_a_state_is_refused"),
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
        "a step whose reduction failed has no gradients",
        *("reduction/reducer", "                raise\n            self.trained.drop_gradients()\n", "                raise\n"),
        *("elastic", "gradients_that_are_there_when_a_peer_is_lost_are_dropped"),
    ),
    mutant(
        "waits in shared memory can be interrupted",
        *("reduction/transports/shared_memory", "        self._interrupted = why\n", "        pass\n"),
        *("elastic", "a_step_whose_reduction_is_interrupted_changes_nothing[shared_memory]"),
    ),
    mutant(
        "a reduction that failed keeps no memory",
        *("reduction/transports/shared_memory", "            arena.drop_pending()\n", "            pass\n"),
        *("transport", "nothing_is_left_of_the_memory_of_a_failed_reduction"),
    ),
    mutant(
        "a group that was there before is not cut",
        *("groups/connections", "self._groups = set(_sockets()) - self._before", "self._groups = set(_sockets())"),
        *("elastic", "a_wait_for_a_peer_that_never_comes_is_cut_and_other_groups_go_on"),
    ),
    mutant(
        "a worker with an older state keeps it until it joins",
        *("elastic", "self._rehearsal is None and self._settled == 0", "self._rehearsal is None"),
        *("elastic", "a_new_worker_rehearses_and_one_with_an_older_state_keeps_that_until_it_joins[4-joins]"),
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
        "nobody waits for the end of a group with such a wait",
        *("groups/process_groups", "    lock = threading.Lock()\n", "    groups.clear()\n    lock = threading.Lock()\n"),
        *("group_waits", "a_wait_ends_that_gloo_forgets[sends_a_collective]"),
    ),
    mutant("late gradients are reduced once more", "reduction/arrival", "        if late:\n", "        if False:\n", "ddp", LATE),
    mutant(
        "a travelling bucket is nobody's gradient",
        *("reduction/buckets/memory", "            param.grad = None\n\n    def _copy(", "            pass\n\n    def _copy("),
        *("ddp", LATE),
    ),
    mutant(
        "what comes after its portion is added",
        "reduction/buckets/memory",
        " if param.grad is not None:\n                grad = local_part(param.grad)\n                view.add_",
        " if False:\n                grad = local_part(param.grad)\n                view.add_",
        *("ddp", "a_gradient_that_comes_after_it_was_looked_for_is_added[portion]"),
    ),
    mutant(
        "a new plan waits for a backward of all ranks",
        *("reduction/reducer", "        if reduces:\n", "        if reduces:\n            self.bucket_set.release_outdated()\n"),
        *("plans", "a_new_plan_waits_for_a_backward_that_every_rank_has"),
    ),
    mutant(
        "the former memory is given up first",
        *("reduction/buckets/bucket_set", "self.buckets, self.home, self._arena = [], {}, None", "self.home = {}"),
        *("plans", "the_memory_of_a_plan_is_given_up_before_there_is_more[group]"),
    ),
    mutant(
        "the words leave when everything is known",
        *("reduction/reducer", "while backward.launched < len(buckets) - 1 and", "while backward.launched < len(buckets) and"),
        *("ddp", LATE),
    ),
    mutant(
        "the mean is over samples",
        *("reduction/conclusion", "return self.expected_samples / self.samples", "return 1.0"),
        *("ddp", "the_mean_is_over_samples"),
    ),
    mutant(
        "a rank without inputs counts as gradients of zero",
        *("reduction/buckets/bucket_set", "self._tail[0] += zero_samples", "pass"),
        *("in_place", "the_same_as_with_torchs_class[uneven-3]"),
    ),
    mutant(
        "versions are found without the prefix, too",
        *("ddp/state_dicts", "        _rename_versions(wrapper,", "        (lambda *_: None)(wrapper,"),
        *("in_place", "state_dicts_of_unwrapped_modules_load_with_their_versions"),
    ),
    mutant(
        "a copy reduces its gradients",
        *("ddp/deepcopy_support", "            ddp._reducer.backward_starts()\n", "            pass\n"),
        *("in_place", "the_same_as_with_torchs_class[copied-2]"),
    ),
    mutant(
        "no data, not even a NaN",
        "reduction/buckets/memory",
        "if scale == 0.0:",
        "if scale is None:",
        "ddp",
        "a_rank_without_data_brings_no_nan",
    ),
    mutant(
        "a request is heard once",
        *("reduction/control_words", "self.requests -= self.taken", "pass"),
        *("more", "a_request_of_one_rank_is_heard_by_all_in_the_same_step"),
    ),
    mutant(
        "what accumulates nothing does not count",
        *("reduction/reducer", "            self.schedule.take_back()\n", "            pass\n"),
        *("more", "a_stage_of_a_pipeline_reduces_once_per_step"),
    ),
    mutant(
        "what nobody used has no gradient",
        *("reduction/buckets/memory", "if users is not None and users[self.indices[at]] == 0:", "if False:"),
        *("kinds", "the_gradients_are_those_of_one_process[branches-2]"),
    ),
    mutant(
        "the mean over users",
        *("reduction/buckets/memory", "if 0 < users[index] < with_data:", "if False:"),
        *("ddp", "a_parameter_that_a_rank_does_not_use[users]"),
    ),
    mutant(
        "a step whose words come too late is not passed over",
        *("reduction/conclusion", "if self._deferred and (agreement.failed", "if False and (agreement.failed"),
        *("ddp", "on_a_gpu_the_words_are_read_a_step_later"),
    ),
    mutant(
        "an interrupt after a reduction breaks the module",
        *("reduction/reducer", "elif not isinstance(what, raised_by_all):", "elif not raised_by_all:"),
        *("trouble", "an_interrupt_after_a_reduction_is_not_passed_over[group]"),
    ),
    mutant(
        "a failed backward drops the step everywhere",
        *("reduction/conclusion", "        if agreement.failed:\n", "        if False:\n"),
        *("trouble", "an_exception_in_a_backward_drops_the_step_everywhere[group]"),
    ),
    mutant(
        "all that an exception interrupted is finished first: before a construction",
        *("ddp/module", "        settle()\n        if device_mesh", "        if device_mesh"),
        *("trouble", f"{TWO}[construction-group]"),
    ),
    mutant(
        "before replicas are compared",
        *("ddp/module", "        settle()\n        self._reducer.check_replicas", "        self._reducer.check_replicas"),
        *("trouble", f"{TWO}[check_replicas-group]"),
    ),
    mutant(
        "before buffers are copied",
        *("ddp/module", "        settle()\n        buffers =", "        buffers ="),
        *("trouble", f"{TWO}[sync_buffers-group]"),
    ),
    mutant(
        "parameters may be reduced by another module that holds them",
        *("reduction/reducer", "if not self.schedule.sync or elsewhere or grad is None:", "if not self.schedule.sync or grad is None:"),
        *("ways", "the_same_as_with_torchs_class[half_of_it-group]"),
    ),
    mutant(
        "layouts are compared",
        *("ddp/replica_description", 'return "" if tensor.is_contiguous() else', 'return "" if True else'),
        *("torch_cases", "a_case_of_torchs_own[strides_differ]"),
    ),
    mutant(
        "rank 0's statistics are taken over",
        *("reduction/running_stats", "        if self.at_once:\n", "        if False:\n"),
        *("more", "running_statistics_are_rank_0s_after_each_reduction"),
    ),
    mutant(
        "a gradient nobody would reduce is an error",
        *("reduction/reducer", "if self._unannounced.zeroed(index, grad) == 2:", "if False:"),
        *("trouble", "a_backward_outside_the_forward_is_one_clear_sentence"),
    ),
    mutant(
        "parameters do not hold the module",
        *("autograd_engine", "    ref = weakref.ref(listener)\n\n    def ready", "    ref = lambda: listener\n\n    def ready"),
        *("torch_cases", "a_case_of_torchs_own[goes_away]"),
    ),
    mutant(
        "groups are let go before the interpreter ends",
        *("ddp/at_exit", "    for ddp in living():", "    for ddp in []:"),
        *("torch_cases", "a_case_of_torchs_own[lets_go_at_exit]"),
    ),
    mutant(
        "what is known outlives another choice of parameters",
        *("ddp/module", "        self._reducer.continue_from(old)\n", ""),
        *("more", "freezing_does_not_begin_anew"),
    ),
    mutant(
        "statistics that were written stay",
        *("reduction/running_stats", "self._noted == _versions(buffers) != self._taken", "_versions(buffers) != self._taken"),
        *("beside_torch", "the_same_numbers[statistics_written]"),
    ),
    mutant(
        "a forward after it does not undo that",
        *("reduction/running_stats", "if self._arrived and self._untouched:", "if self._arrived:"),
        *("beside_torch", "the_same_numbers[statistics_written]"),
    ),
    mutant(
        "what a forward writes is nobody else's write",
        *("reduction/running_stats", "if self._arrived and self._untouched:", "if False:"),
        *("buffers", f"{LEFT}[no_sync-group]"),
    ),
    mutant(
        "a module that is evaluated uses rank 0's statistics",
        *("reduction/running_stats", "if any(not layer.training for layer in self._layers):", "if False:"),
        *("buffers", f"{LEFT}[inference-group]"),
    ),
    mutant(
        "a reduction that fails leaves the statistics alone",
        *("reduction/running_stats", "torch.mul(self._tail, factor, out=self._kept)", "self._arrived = make_views(buffers, self._tail)"),
        *("buffers", "a_reduction_that_fails_leaves_the_statistics_alone[checkpoint-group]"),
    ),
    mutant(
        "what forwards have saved may be overwritten with what it was",
        *("reduction/running_stats", "torch.no_grad(), versions_kept(buffers):", "torch.no_grad():"),
        *("buffers", f"{BUFFERS}[a_forward_kept_over_a_reduction-group]"),
    ),
    mutant(
        "counts are whole numbers",
        *("reduction/running_stats", "if factor != 1.0 and self._counts:", "if False:"),
        *("buffers", "counts_that_travel_as_a_mean_are_whole_numbers_again"),
    ),
    mutant(
        "buffers that were copied are newer",
        *("ddp/module", "        self._reducer.running_stats.forget()\n", ""),
        *("buffers", "an_evaluation_keeps_what_sync_buffers_has_copied"),
    ),
    mutant(
        "a rank 0 without inputs has no statistics for the others",
        *("ddp/module", "before_forward(at_once=not self._join_config.enable)", "before_forward(at_once=True)"),
        *("buffers", "a_rank_0_without_inputs_does_not_stop_the_statistics_of_the_others[False]"),
    ),
    mutant(
        "ranks without inputs take part in copies without gradients",
        *("ddp/torch_names", "if self._join_config.enable and (trained or copies):", "if self._join_config.enable and trained:"),
        *("buffers", "a_rank_0_without_inputs_does_not_stop_the_statistics_of_the_others[True]"),
    ),
    mutant(
        "they know whether the next forward copies",
        *("ddp/joining", "        self._ddp.require_forward_param_sync = next_copies\n", ""),
        *("buffers", "a_rank_0_without_inputs_does_not_stop_the_statistics_of_the_others[True]"),
    ),
    mutant(
        "buffers of the user's hook are left alone",
        *("ddp/torch_names", "            self._reducer.running_stats.stop()\n", "            pass\n"),
        *("buffers", f"{BUFFERS}[sums_of_buffers-group]"),
    ),
    mutant(
        "each rank's own are left alone",
        *("ddp/module", "self.parameters_to_ignore) if self._buffers_wanted is None else ()", "self.parameters_to_ignore)"),
        *("buffers", f"{BUFFERS}[evaluated_with_ones_own-group]"),
    ),
    mutant(
        "an evaluation copies buffers that do not travel",
        *("ddp/torch_names", "        copies = self._check", "        copies = trained and self.training and self._check"),
        *("buffers", f"{BUFFERS}[codebook_evaluated-group]"),
    ),
    mutant(
        "copies follow forwards with gradients",
        *("ddp/module", "self.require_forward_param_sync = torch.is_grad_enabled() and", "self.require_forward_param_sync ="),
        *("buffers", f"{BUFFERS}[codebook_evaluated-group]"),
    ),
    mutant(
        "a checksum weighs each place",
        *("reduction/replica_check", "weights[: part.numel()]).sum()", "weights[0]).sum()"),
        *("more", "two_changes_that_cancel_in_a_sum_are_found"),
    ),
    mutant(
        "overlap under recomputation",
        *("reduction/grad_hooks", "max(fired, 1 if expected == UNKNOWN else expected)", "UNKNOWN"),
        *("plans", "overlap_is_kept_under_reentrant_recomputation"),
    ),
    mutant(
        "a backward that brings a new plan takes nothing early",
        *("reduction/buckets/bucket_set", "if self.outdated and self.buckets:", "if False:"),
        *("order", "collectives_of_the_model_in_its_backward_are_not_in_the_way[-group]"),
    ),
    mutant(
        "each module has a group of its own",
        *("ddp/module", "self._group = make_own_group(self.process_group, devices[0])", "self._group = self.process_group"),
        *("order", "two_modules_in_one_backward_whose_order_differs_between_ranks[2-False-group]"),
    ),
    mutant(
        "the modules of one backward finish in one order",
        *("reduction/reducer", "partial(self._graph_done, backward.task)", "partial(self.end, Trigger.GRAPH_DONE)"),
        *("order", "two_modules_in_one_backward_whose_order_differs_between_ranks[2-False-shared memory]"),
    ),
    mutant(
        "on CPUs hooks run one by one, at the end",
        *("reduction/user_hooks", 'return self._hook is not None and self._device.type == "cpu"', "return False"),
        *("order", "collectives_of_the_model_in_its_backward_are_not_in_the_way[powersgd-group]"),
    ),
    mutant(
        "who freezes something else is told",
        *("ddp/replica_description", "{frozen(t) * trained}", ""),
        *("order", "ranks_that_are_built_otherwise_are_told[frozen-group]"),
    ),
    mutant(
        "other options are told",
        *("ddp/replica_description", "return lines + [", "return lines or ["),
        *("order", "ranks_that_are_built_otherwise_are_told[check_replicas_every-group]"),
    ),
    mutant(
        "who freezes something else later is told",
        *("reduction/conclusion", "if len(set(agreement.trained)) > 1:", "if False:"),
        *("order", "what_one_rank_freezes_later_is_an_error_on_every_rank[group]"),
    ),
    mutant(
        "what is trained from now on is reduced at once",
        *("reduction/reducer", "            arrival.reduce_unfrozen(unfrozen,", "            (lambda *_: None)(unfrozen,"),
        *("order", "what_is_frozen_and_unfrozen_later_is_reduced_from_the_first_step_on[group]"),
    ),
    mutant(
        "without shared memory the group is taken",
        *("reduction/transports/shared_memory", "if self._strict or isinstance(error, ReductionFailed):", "if True:"),
        *("order", "buckets_go_through_the_group_where_there_is_no_memory_to_share[later]"),
    ),
    mutant(
        "a frozen layer uses rank 0's statistics",
        *("reduction/running_stats", "if any(not layer.training for layer in self._layers):", "if False:"),
        *("buffers", f"{LEFT}[frozen-group]"),
    ),
    mutant(
        "buffers that do not travel are copied in each forward",
        *(
            "ddp/module",
            "self.forward_sync_buffers = self._buffers_wanted is not False",
            "self.forward_sync_buffers = bool(self._buffers_wanted)",
        ),
        *("buffers", "buffers_are_what_they_are_under_torchs_class[codebook-group]"),
    ),
    mutant(
        "buffers that travel are not copied",
        *(
            "ddp/torch_names",
            "        if self._buffers_wanted is None:\n            travelling",
            "        if False:\n            travelling",
        ),
        *("buffers", "what_travels_with_the_gradients_costs_no_broadcast[False-0]"),
    ),
    mutant(
        "a new group keeps what was asked",
        *("ddp/module", "        self._reducer.keep_requests(left)\n", ""),
        *("buffers", "a_new_group_goes_on_from_what_a_checkpoint_has_and_from_what_was_asked"),
    ),
    mutant(
        "a new rank 0 goes on with the old one's statistics",
        *("ddp/module", "        _adopt(self)  # rank 0 may be another one later\n", ""),
        *("buffers", "a_new_group_goes_on_from_what_a_checkpoint_has_and_from_what_was_asked"),
    ),
    mutant(
        "a penalty has no forward",
        *("reduction/reducer", "if self._unannounced.zeroed(index, grad) == 2:", "if True:"),
        *("ways", "the_same_as_with_torchs_class[penalty_first-group]"),
    ),
    mutant(
        "a forward counts until the next reduction",
        *("reduction/grad_hooks", "        self.announced = False\n        self._found.clear()", "        self._found.clear()"),
        *("trouble", "a_backward_outside_the_forward_is_one_clear_sentence"),
    ),
    mutant(
        "what nobody used may come in another backward",
        *("reduction/reducer", "self._unannounced.announced or index in self.watch.unused", "self._unannounced.announced"),
        *("ways", "the_same_as_with_torchs_class[loss_left_aside-group]"),
    ),
    mutant(
        "a backward from hidden outputs begins at any parameter",
        *("reduction/grad_hooks", "or self.surprised or self.begins_anywhere", "or self.surprised"),
        *("ways", "outputs_that_nobody_can_look_into[group]"),
    ),
    mutant(
        "an exception within a reduction is not passed over",
        *("reduction/reducer", "            elif not isinstance(what, raised_by_all):", "            elif False:"),
        *("trouble", "an_exception_within_a_reduction_is_not_passed_over[hook-group]"),
    ),
    mutant(
        "autograd.grad that fails reduces nothing",
        *("reduction/backward", "(STARTED, Trigger.INTERRUPTED): EMPTY", "(STARTED, Trigger.INTERRUPTED): DRAINING"),
        *("ways", "the_same_as_with_torchs_class[gradients_asked_for-group]"),
    ),
    mutant(
        "autograd.grad that fails reduces nothing whatever becomes of the gradients until the next forward",
        *("reduction/reducer", "STARTED and trigger is Trigger.GRAPH_DONE\n", "STARTED\n"),
        *("ways", "the_same_as_with_torchs_class[gradients_asked_for_then_dropped-group]"),
    ),
    mutant(
        "a backward does not join an autograd.grad that has failed",
        *("reduction/reducer", "self._backward.phase is not STARTED or self.is_in(autograd_engine.task())", "True"),
        *("ways", "the_same_as_with_torchs_class[gradients_asked_for_between-group]"),
    ),
    mutant(
        "the compiler does not look into the wrapper",
        *("ddp/module", 'return _disabled(function) if "torch._dynamo" in sys.modules else function', "return function"),
        *("more", "nothing_of_the_wrapper_is_compiled_again_in_later_steps"),
    ),
    mutant(
        "replicas that differ on purpose are not compared",
        *("reduction/conclusion", "every > 0 and self._extensions.compares_replicas and", "every > 0 and"),
        *("ways", "the_same_as_with_torchs_class[local_steps_wrapped-group]"),
    ),
    mutant(
        "optimizers of parameters step after the reduction",
        *("ddp/module", "if take_over(self._reducer.params):", "if False:"),
        *("ways", "the_same_as_with_torchs_class[optimizer_in_backward-group]"),
    ),
    mutant(
        "a parameter put in place later is named",
        *("ddp/module", "if param.requires_grad and not ours:", "if False:"),
        *("ways", "a_parameter_that_is_put_in_place_later_is_named[added-adapter.weight]"),
    ),
    mutant(
        "who adapts to what is frozen waits for nobody",
        *("ddp/module", "self._reducer.continue_from(old)", "(self._reducer.continue_from(old), self._reducer.install())"),
        *("order", "an_evaluation_on_one_rank_waits_for_nobody_where_freezing_changes[2-shared memory]"),
    ),
    mutant(
        "who begins without copying is told",
        *("ddp/module", '            "init_sync": init_sync,\n', ""),
        *("order", "ranks_that_are_built_otherwise_are_told[init_sync-group]"),
    ),
    mutant(
        "who looks for unused parameters alone is told",
        *("ddp/module", '            "find_unused_parameters": self.find_unused_parameters,\n', ""),
        *("order", "ranks_that_are_built_otherwise_are_told[find_unused-group]"),
    ),
    mutant(
        "who has other sparse gradients is told",
        *("ddp/replica_description", "{' sparse' * (name in sparse)}", ""),
        *("order", "ranks_that_are_built_otherwise_are_told[sparse-group]"),
    ),
    mutant(
        "who has a hook alone is told",
        *("reduction/user_hooks", "        if not self._compared:\n", "        if False:\n"),
        *("order", "what_one_rank_alone_registers_is_an_error_on_every_rank[hook-2-shared memory]"),
    ),
    mutant(
        "optimizers that are given to parameters at any time are found",
        *("ddp/module", "if seldom or self._applied != applied():", "if seldom:"),
        *("ways", "the_same_as_with_torchs_class[optimizer_in_backward_much_later-group]"),
    ),
    mutant(
        "a rank does not begin to look alone",
        *("ddp/module", "self._reducer.local_report.weigh(float(samples), float(backwards))", "self._reducer.conclusion.read_always()"),
        *("lazily", "one_rank_says_how_many_samples_it_has[group]"),
    ),
    mutant(
        "all look when one has said so",
        *("reduction/conclusion", "if agreement.lacking or agreement.looking:", "if agreement.lacking:"),
        *("lazily", "one_rank_says_how_many_samples_it_has[group]"),
    ),
    mutant(
        "who says how many samples it has reads the words of that step",
        *("reduction/reducer", "wants = self.local_report.reads_first or any(", "wants = any("),
        *("lazily", "all_ranks_say_how_many_samples_they_have[2-group]"),
    ),
    mutant(
        "what one rank alone has read changes no collective",
        *("reduction/arrival", "self.outcome.users if self.outcome.common else None", "self.outcome.users"),
        *("lazily", "who_reads_the_words_alone_does_as_the_others[2-group]"),
    ),
    mutant(
        "nor a gradient",
        *("reduction/conclusion", "and (not self._deferred or agreed.looking == self._world)", ""),
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
        "find_unused_parameters keeps looking",
        *("ddp/module", "            self._reducer.conclusion.read_always()\n", "            pass\n"),
        *("lazily", "with_find_unused_parameters_graphs_may_change[2-group]"),
    ),
    mutant(
        "a step that freezes or unfreezes is looked at",
        *("reduction/conclusion", " and not self._trained.differs", ""),
        *("lazily", "what_is_unfrozen_is_reduced_from_the_first_step_on[2-group]"),
    ),
    mutant(
        "the weight of a step is remembered",
        *("reduction/reducer", "        self.expected_samples = outcome.samples\n", ""),
        *("ddp", "even_weights_cost_no_second_pass"),
    ),
    # the transitions of a backward
    mutant(
        "a backward that accumulates nothing reduces nothing",
        *("reduction/backward", "(STARTED, Trigger.GRAPH_DONE): EMPTY", "(STARTED, Trigger.GRAPH_DONE): REDUCING"),
        *("ways", "the_same_as_with_torchs_class[gradients_asked_for-group]"),
    ),
    mutant(
        "what accumulates nothing is no backward",
        *("reduction/backward", "(STARTED, Trigger.GRAPH_DONE): EMPTY", "(STARTED, Trigger.GRAPH_DONE): DONE"),
        *("more", "a_stage_of_a_pipeline_reduces_once_per_step"),
    ),
    mutant(
        "a backward within no_sync stays local",
        *("reduction/backward", "(KEEPING, Trigger.GRAPH_DONE): DONE", "(KEEPING, Trigger.GRAPH_DONE): REDUCING"),
        *("ddp", "micro_batches_within_no_sync_cost_one_reduction[5]"),
    ),
    mutant(
        "an exception within no_sync is nobody else's matter",
        *("reduction/backward", "(KEEPING, Trigger.INTERRUPTED): DONE", "(KEEPING, Trigger.INTERRUPTED): DRAINING"),
        *("backward", "an_exception_within_no_sync_concerns_no_other_rank"),
    ),
    mutant(
        "a rank whose backward failed brings no gradients",
        *("reduction/backward", "(COLLECTING, Trigger.INTERRUPTED): DRAINING", "(COLLECTING, Trigger.INTERRUPTED): REDUCING"),
        *("trouble", "an_exception_in_a_backward_drops_the_step_everywhere[group]"),
    ),
    mutant(
        "the others do not wait for a rank whose backward failed",
        *("reduction/backward", "(COLLECTING, Trigger.INTERRUPTED): DRAINING", "(COLLECTING, Trigger.INTERRUPTED): DONE"),
        *("trouble", "an_exception_in_a_backward_drops_the_step_everywhere[group]"),
    ),
    mutant(
        "a reduction that has failed is over",
        *("reduction/backward", "(COLLECTING, Trigger.FAILED): BROKEN", "(COLLECTING, Trigger.FAILED): COLLECTING"),
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
        "the shares of two ranks have no sample in common",
        *("data/shares", "range(rank * size // world_size,", "range(max(rank * size // world_size - 1, 0),"),
        *("data", "the_shares_of_all_ranks_are_the_whole_and_differ_by_one_at_most"),
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
        "the sum of several means is divided",
        *("reduction/reducer", "(self.expected_samples * self.local_report.backwards)", "self.expected_samples"),
        *("data", f"{MEAN}[2]"),
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
    mutant(
        "each sample has a key",
        *("data/keyed_rng", "        _seed(key, cuda=False)\n        return", "        return"),
        *("keyed_rng", AUGMENTED),
    ),
    mutant(
        "the program's random numbers are restored",
        *("data/keyed_rng", "        yield\n    finally:\n        _restore(states)", "        yield\n    finally:\n        pass"),
        *("keyed_rng", "what_the_program_draws_is_not_touched[True]"),
    ),
    # deterministic mode
    mutant(
        "gradients are added up along the tree",
        *("data/deterministic", "add_up((0, self.shards), known, Tensor.add_)", "torch.stack(list(known.values())).sum(0)"),
        *("deterministic", BITS),
    ),
    mutant(
        "a rank adds up whole subtrees",
        *("data/shard_tree", "    if (start, stop) == span:\n", "    if stop - start > 1:\n"),
        *("deterministic", "every_world_adds_up_in_the_same_order[7]"),
    ),
    mutant(
        "every rank has the same number of threads",
        *("data/deterministic", "            torch.set_num_threads(self.threads)\n", "            pass\n"),
        *("deterministic", BITS),
    ),
    mutant(
        "requests are known to all in deterministic mode",
        *("data/deterministic", "return received[:, 0, width:].sum(0)", "return words"),
        *("deterministic", "a_signal_to_one_rank_stops_all_after_the_same_step[3]"),
    ),
    mutant(
        "a rank without a shard can stop all in deterministic mode",
        *("data/deterministic", "sent[:, 0, width:] = words", "sent[:, 0, width:] = words if mine else 0"),
        *("deterministic", "a_signal_to_one_rank_stops_all_after_the_same_step[3]"),
    ),
    mutant(
        "the state after the last batch is that of the next epoch",
        *("data/loader", "if over else (self.epoch, self.consumed)", "if False else (self.epoch, self.consumed)"),
        *("data", "after_the_last_batch_the_state_is_that_of_the_next_epoch"),
    ),
    mutant(
        "dropout belongs to the shard",
        *("data/deterministic", "with keyed_rng(*key, shard):", "with keyed_rng(*key, self.rank):"),
        *("deterministic", BITS),
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
        "a shard counts by its samples",
        *("data/deterministic", "        return samples / self._largest(size)\n", "        return 1.0\n"),
        *("deterministic", "a_step_has_the_mean_over_the_global_batch[20]"),
    ),
    mutant(
        "what no shard used has no gradient in deterministic mode",
        *("data/deterministic", "param.grad = view if used else None", "param.grad = view"),
        *("deterministic", BITS),
    ),
    mutant(
        "statistics that follow the order of shards are refused",
        *("data/deterministic", "if isinstance(layer, _NormBase) and", "if False and"),
        *("deterministic", REFUSED),
    ),
    mutant(
        "buffers that follow the order of shards are refused",
        *("data/deterministic", "if buffers.get(name) != version]:", "if False]:"),
        *("deterministic", REFUSED),
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
        *("data/loader", ", generator=self._generator", ""),
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
        "all read an optimizer's stop after the same step",
        *("stopping/stop_word", "return bool(self._word.item())", "return bool(self._word.item()) or self._asked"),
        *("drain_torch", "all_know_a_step_after_the_first_that_follows_the_signal[False]"),
    ),
    mutant(
        "a word is told beside the next step",
        *("stopping/stop_word", "async_op=True", "async_op=False"),
        *("drain_torch", "no_step_waits_for_the_words_of_the_same_step"),
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
        "after a failure there is nobody to agree with",
        *("stopping/failure_stop", "[0] == FAILURE", '[0] == "nothing"'),
        *("drain", f"{FAILURE}[failure-False-True]"),
    ),
    mutant(
        "a planned stop ends no rank",
        *("stopping/failure_stop", "[0] == FAILURE", "[0] != FAILURE"),
        *("drain", f"{FAILURE}[planned-False-False]"),
    ),
    mutant(
        "what all have agreed on is carried out after a failure, too",
        *("stopping/drain", "if self.step is None and not any(", "if not any("),
        *("drain", f"{FAILURE}[failure-True-False]"),
    ),
    mutant(
        "each row of a tensor stands in one chunk",
        *("state/layout", "done, row = done + size, row + count", "done, row = done + size, row + max(1, count - 1)"),
        *("ckpt_layout", "ranks_stage_and_write_alike[1-1]"),
    ),
    mutant(
        "each node stages what its ranks hold",
        *("state/layout", "list(node_of_rank) if keep_node_complete else", "list(node_of_rank) if not keep_node_complete else"),
        *("ckpt_layout", "a_plan_holds_each_element_once_and_each_node_what_its_ranks_have[1]"),
    ),
    mutant(
        "the rank with the least stages the next file",
        *("state/layout", "key=lambda rank: (staged[rank], rank)", "key=lambda rank: rank"),
        *("ckpt_layout", "ranks_stage_and_write_alike[1-0]"),
    ),
    mutant(
        "shards that are not the whole are refused",
        *("state/layout", "if there != volume(shape) or overlapping(own):", "if there != volume(shape):"),
        *("ckpt_layout", "what_ranks_do_not_hold_alike_is_named"),
    ),
    mutant(
        "what is tied on one rank only is stored twice",
        *("state/layout", "if len(found) == 1 and other and", "if other and"),
        *("ckpt_layout", "tied_tensors_are_stored_once"),
    ),
    mutant(
        "what is no longer tied needs a new plan",
        *("state/layout", "return list(tensors), shapes, dtypes, specs, tied", "return list(tensors), shapes, dtypes, specs"),
        *("ckpt_layout", "tied_tensors_are_stored_once"),
    ),
    mutant(
        "data lie within their file",
        *("checkpoints/reading", "if chunk.at + chunk.nbytes > len(data):", "if chunk.at > len(data):"),
        *("ckpt_reading", "a_file_that_was_cut_off_is_named"),
    ),
    mutant(
        "only floats are converted",
        *("checkpoints/reading", "target.dtype.is_floating_point and saved.dtype.is_floating_point", "saved.dtype.is_floating_point"),
        *("ckpt_reading", "floats_are_converted_and_nothing_else_is"),
    ),
    mutant(
        "a pickle runs no code",
        *(
            "checkpoints/dcp",
            "if name in KINDS and module.startswith(MODULES):",
            "return super().find_class(module, name)\n        if False:",
        ),
        *("ckpt_dcp", "a_pickle_that_would_run_code_does_not[0]"),
    ),
    mutant(
        "a call in a pickle copies nothing large",
        *("checkpoints/dcp", "return lambda *args: _sizes(*args)", "return tuple"),
        *("ckpt_dcp", "a_call_in_a_description_copies_nothing_large[size]"),
    ),
    mutant(
        "values that do not fit into their place have a new description",
        *("checkpoints/dcp", "all(len(d) <= self._slots[name][1] for", "all(len(d) <= 1 << 20 for"),
        *("ckpt_dcp", "values_may_change_without_a_new_description_until_they_do_not_fit"),
    ),
    mutant(
        "one name is one tensor",
        *("state/tree", "if len(self.tensors) < before + len(tensors):", "if False:"),
        *("ckpt_tree", "two_tensors_with_one_name_are_refused"),
    ),
    mutant(
        "the names of the last save are not those of this one",
        *("state/tree", "last is None or last.path != path or last.shape != shape", "last is None or last.path != path"),
        *("ckpt_tree", "the_json_of_thousands_of_tensors_is_written_once_and_changes_with_their_names"),
    ),
    mutant(
        "optimizers go by names",
        *("state/loading", "if any(type(name) is int for name in (*saved, *names)):", "if True:"),
        *("ckpt_tree", "optimizers_go_by_the_names_of_their_parameters"),
    ),
    mutant(
        "only wrappers are left out of names",
        *("state/names", "if part != wrapped_child(at):", 'if part != "module":'),
        *("ckpt_tree", "a_layer_that_is_called_module_keeps_its_name"),
    ),
    mutant(
        "a few more digits need no new plan",
        *("state/per_rank", "            size *= 2\n", "            size += 1\n"),
        *("ckpt_tree", "a_value_per_rank_may_have_a_state_and_keeps_its_size"),
    ),
    mutant(
        "versions of layers are those of the checkpoint",
        *("state/loading", '"version": versions.get(name, 1)', '"version": 1'),
        *("ckpt_tree", "versions_of_layers_are_kept"),
    ),
    mutant(
        "layers with a way of their own are loaded in that way",
        *("state/loading", "type(layer)._load_from_state_dict in _COPYING", "True"),
        *("ckpt_tree", "versions_of_layers_are_kept"),
    ),
    mutant(
        "hooks of users are called when a module is loaded",
        *("state/loading", '"__module__", "")) in _FOR_NAMES', '"__module__", "")) != ""'),
        *("ckpt_tree", "modules_with_a_way_of_their_own_are_loaded_in_that_way[layer]"),
    ),
    mutant(
        "what lies outside of the order is permuted again",
        *("data/permutation", "while (outside := found >= self.n).any():", "while (outside := found >= self.n + 1).any():"),
        *("data", "an_order_has_every_number_once"),
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
        "after an exception nobody is waited for",
        *("checkpoints/resources", "opened.close(0.0 if failed else END_LIMIT)", "opened.close(END_LIMIT)"),
        *("ckpt_rounds", "the_end_after_an_exception_waits_for_nothing"),
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
        "a short write goes on where it ended",
        *("checkpoints/copying", "os.pwrite(fd, view[done:], at + done)", "os.pwrite(fd, view[done:], at)"),
        *("ckpt_copying", "a_write_that_is_cut_short_goes_on"),
    ),
    mutant(
        "only bytes that are the tensor's in order are written",
        *("checkpoints/copying", "target.nbytes >= LARGE and _is_plain(source) and", "target.nbytes >= LARGE and"),
        *("ckpt_copying", "what_is_written_is_what_torch_gives_or_nothing"),
    ),
    mutant(
        "the rest of a long text follows",
        *("checkpoints/ranks", "        if max(sizes) > SHORT:\n", "        if len(data) > SHORT:\n"),
        *("ckpt_ranks", "texts_of_any_length_arrive_in_rank_order"),
    ),
    mutant(
        "an error of one rank is that of all",
        *("checkpoints/restoring", '        if text.startswith("-"):', '        if text.startswith("-") and rank == ranks.rank:'),
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
        *("checkpoints/checkpointer", "        if self._saves == 2:  #", "        if self._saves == 1:  #"),
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
        "a claim waits for what was dropped before",
        *("checkpoints/resources", "other._ending.join(END_LIMIT)", "pass"),
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
        "the clock of the first rank decides",
        *("checkpoints/due", "now - self._looked])[0]", "now - self._looked])[-1]"),
        *("ckpt_due", "the_clock_of_rank_0_decides_for_all[0.0]"),
    ),
    mutant(
        "quick calls do not put off the next look",
        *("checkpoints/due", "max(recent, 1), 2 * self._calls))", "max(recent, 1)))"),
        *("ckpt_due", "calls_right_after_each_other_do_not_put_off_the_next_look"),
    ),
    mutant(
        "a time is asked for seldom",
        *("checkpoints/due", "        if self._calls < self._pause:\n", "        if False:\n"),
        *("ckpt_due", "a_period_is_kept_to_the_step_with_few_exchanges"),
    ),
    mutant(
        "values of lost ranks are not needed",
        *("checkpoints/memory", "if name not in marked for chunk", "if True for chunk"),
        *("ckpt_rounds", "what_only_a_lost_rank_had_does_not_make_a_copy_incomplete"),
    ),
    mutant(
        "gradients that a pipeline has promised are missed in its next step",
        *("reduction/grad_hooks", "if self.due or sync and", "if sync and"),
        *("mesh", "a_pipeline_whose_gradients_nothing_reduces_is_refused[ScheduleInterleavedZeroBubble]"),
    ),
    mutant(
        "gradients that are set by hand are refused",
        *("reduction/grad_hooks", "(self.promised or there > self._there)", "self.promised"),
        *("mesh", "gradients_that_are_set_by_hand_are_refused_until_they_are_reduced[state]"),
    ),
    mutant(
        "gradients within no_sync may stay local",
        *("ddp/module", "            self._reducer.accept_gradients()\n", ""),
        *("mesh", "gradients_that_are_set_by_hand_are_refused_until_they_are_reduced[no_sync]"),
    ),
    mutant(
        "gradients are there as a backward of samples",
        *("reduction/reducer", "self._reduce_now(self.local_report.weight)", "self._reduce_now(0.0)"),
        *("mesh", "a_pipeline_trains_as_one_process[ScheduleInterleavedZeroBubble-True]"),
    ),
    mutant(
        "sums over the ranks of a split layer are made",
        *("reduction/grad_hooks", "tuple(placed_as(like, grad) for grad in grads)", "tuple(grads)"),
        *("mesh", "a_module_that_is_split_trains_as_one_process_and_keeps_its_parameters[True-False]"),
    ),
    mutant(
        "the gradient of a DTensor is one",
        *("reduction/buckets/memory", "self.grads = [with_part(param, view) for", "self.grads = [view for"),
        *("mesh", "a_module_that_is_split_trains_as_one_process_and_keeps_its_parameters[False-False]"),
    ),
    mutant(
        "a plain tensor is a copy of rank 0's",
        *("checkpoints/copies", "abs(a - b) > close", "False"),
        *("mesh", "stages_are_not_saved_as_copies_of_one_another[same]"),
    ),
    mutant(
        "rank 0 has each tensor",
        *("checkpoints/copies", "        if name not in first:\n", "        if name not in own:\n"),
        *("mesh", "stages_are_not_saved_as_copies_of_one_another[other]"),
    ),
    mutant(
        "checkpointers of several groups have notes of their own",
        *("checkpoints/ranks", "{self._number}/{self._first}", "{self._number}"),
        *("mesh", "stages_are_not_saved_as_copies_of_one_another[same]"),
    ),
    mutant(
        "ranks that share a replica load the same samples",
        *("data/steps", "if (rank, world_size) != (theirs", "if () != () and (theirs"),
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

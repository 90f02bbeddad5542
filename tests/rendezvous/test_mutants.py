"""Every rule has a test that notices when it is taken out: it is broken in a copy of the package, and the test must fail there."""

from __future__ import annotations

from pathlib import Path

from tests.support.changes import gets, instead_of, part_always, part_never, returns
from tests.support.mutants import Mutant, copy, each, failing, mutants_in, named_in, unnoticed

__all__ = ["copy"]  # the fixture


def mutant(rule: str, module: str, old: str, new: str, file: str, test: str) -> Mutant:
    """Return a mutant of a module of the rendezvous, unless ``module``, or ``file`` with its test, names another folder."""
    folder, _, name = file.rpartition("/")
    where = "elastirun" if module.startswith(("agent/", "rendezvous/")) else "elastirun/rendezvous"
    return Mutant(rule, module, old, new, f"tests/{folder or 'rendezvous'}/test_{name}.py::test_{test}", where)


by_name = named_in("elastirun/rendezvous", "tests/rendezvous")
live_worker = mutants_in("elastirun", "tests/rendezvous")
simulated = mutants_in("tests/sim", "tests/rendezvous")  # of what the simulator plays: the invariants notice it
FORWARDS_WHILE_RUNNING = "return self._failover.forward(self.record) if 'RUNNING' in str(self._link.own.stored) else None"
MUTANTS = (
    # Who sits where.
    mutant(
        "a newcomer takes the hole, not the end",
        *("peers/ranks", "waiting.pop(0) if waiting else None", "None"),
        *("formation", "survivors_keep_their_place_and_newcomers_take_holes"),
    ),
    mutant(
        "no newcomer puts a survivor out",
        *("peers/ranks", "limit - sum(s is not None for s in survivors)", "limit"),
        *("formation", "survivors_keep_their_place_and_newcomers_take_holes"),
    ),
    mutant(
        "a fixed rank is the wish",
        *("peers/ranks", "    if fixed:", "    if False:"),
        *("machine", "fixed_ranks_follow_the_wish"),
    ),
    mutant(
        "numbers in addresses count as numbers",
        *("peers/ranks", "(0, int(part)) if part.isdecimal() else (1, part)", "(1, part)"),
        *("formation", "numbers_in_addresses_are_compared_as_numbers"),
    ),
    mutant(
        "the first round is in the order of addresses",
        *("peers/ranks", "_natural(row.address), row.id", "_natural(row.name), row.id"),
        *("formation", "numbers_in_addresses_are_compared_as_numbers"),
    ),
    mutant(
        "nobody's address crashes us",
        *("peers/ranks", "part.isdecimal()", "part.isdigit()"),
        *("formation", "numbers_in_addresses_are_compared_as_numbers"),
    ),
    # When a round forms.
    mutant(
        "no round while a member of the last one may still work",
        *("formation", "    if active:", "    if False:"),
        *("formation", "no_round_before_every_member_of_the_last_is_over"),
    ),
    mutant(
        "a re-formation waits for no last call",
        *("formation", "redirected_since) if record.round == 0 else None", "redirected_since)"),
        *("formation", "a_re_formation_waits_for_no_last_call"),
    ),
    mutant(
        "in a hosted store each member that leaves is named",
        *("updates", "(broken.over and not record.host)", "broken.over"),
        *("updates", "after_the_first_mark_a_hosted_record_names_the_next_that_leaves_too"),
    ),
    mutant(
        "the host of the store is not held back",
        *("formation", "began + (0.0 if own.hosts else hold(record))", "began + hold(record)"),
        *("formation", "the_host_of_the_store_is_not_held_back_after_early_losses"),
    ),
    mutant(
        "in a store that has taken over only its owner is the host",
        *("formation", "if row.hosts and not (record.term and row.id != record.host)]", "if row.hosts]"),
        *("formation", "in_a_store_that_has_taken_over_only_its_owner_counts_as_host"),
    ),
    mutant(
        "nodes that come and go do not extend a last call without end",
        *("machine", "self.store.same.settled_since(self.rules.last_call)", "self.store.same.candidates.since"),
        *("machine", "nodes_that_come_and_go_extend_the_last_call_to_five_times_at_most"),
    ),
    mutant(
        "newcomers that come and go do not hold up another one without end",
        *("machine", "self.store.same.settled_since(self.rules.debounce)", "self.store.same.candidates.since"),
        *("machine", "newcomers_that_crash_keep_a_sound_one_waiting_for_five_times_the_wait_at_most"),
    ),
    mutant(
        "a node that comes and says goodbye is a loss",
        *("updates", "        came = record.came\n", "        came = ()\n"),
        *("crash_loops", "nor_does_one_that_comes_and_says_goodbye_again_and_again"),
    ),
    mutant(
        "a node that leaves after a long time is no loss",
        *("updates", "        came = record.came\n", "        came = record.ids\n"),
        *("crash_loops", "nodes_that_are_upgraded_one_after_the_other_are_not_held_back"),
    ),
    mutant(
        "each answer of a slow network is progress",
        *("wire/sync", "        answered()\n", "        pass\n"),
        *("slow_network", "an_exchange_may_take_longer_than_each_of_its_answers"),
    ),
    mutant(
        "a lost member costs no restart",
        *("updates", "record.broken.cause is not Cause.FAILURE or lost:", "record.broken.cause is not Cause.FAILURE:"),
        *("machine", "a_lost_node_is_dropped_within_expire_and_two_seconds_and_costs_no_restart"),
    ),
    mutant(
        "--max-restarts restarts are allowed",
        *("formation", "    if record.failures > rules.max_restarts:", "    if record.failures >= rules.max_restarts:"),
        *("machine", "a_worker_failure_restarts_everyone_quickly_and_keeps_ranks"),
    ),
    mutant(
        "restarts are counted",
        *("updates", "failures=before + 1,", "failures=before,"),
        *("formation", "only_a_failure_without_a_lost_member_costs_a_restart"),
    ),
    mutant(
        "a success is of this very round",
        *("peers/view", "row.succeeded == self.record.round", "row.succeeded > 0"),
        *("formation", "success_is_of_the_very_round"),
    ),
    mutant(
        "what one has found lost is lost for all",
        *("peers/view", "m.id in broken.lost", "False"),
        *("formation", "a_loss_that_one_node_has_found_counts_for_all"),
    ),
    mutant(
        "quick failures wait longer and longer",
        *("formation", "if now < over_since + pause and not", "if False and not"),
        *("rules", "rounds_that_fail_quickly_one_after_the_other_wait_longer_and_longer"),
    ),
    mutant(
        "a round that ran for long is no quick failure",
        *("updates", "record.quick + 1 if ran < QUICK else 0", "record.quick + 1"),
        *("rules", "rounds_that_fail_quickly_one_after_the_other_wait_longer_and_longer"),
    ),
    mutant(
        "a round that may go on where nobody sees it has the time to stop",
        *("formation", "    if left > 0:\n", "    if False:\n"),
        *("formation", "a_round_of_which_nothing_is_heard_is_given_the_time_to_stop_by_itself"),
    ),
    mutant(
        "no round without the node that hosts the store",
        *("formation", "    if waiting is not None:\n", "    if False:\n"),
        *("host", "nobody_takes_the_place_of_a_silent_host"),
    ),
    mutant(
        "the store's host has a place in a full round, too",
        *("peers/ranks", "if row.hosts), None)", "if False), None)"),
        *("host", "the_host_has_a_place_in_a_full_round_too"),
    ),
    mutant(
        "of two nodes with one fixed rank the host has it",
        *("peers/ranks", "key=lambda row: not row.hosts", "key=lambda row: 0"),
        *("host", "of_two_nodes_with_one_fixed_rank_the_host_has_it"),
    ),
    mutant(
        "the first round waits for the row of the host",
        *("formation", "if first and view.now < until else None", "if False else None"),
        *("host", "the_first_round_waits_for_the_row_of_the_host_and_not_for_ever"),
    ),
    mutant(
        "a host that comes late is no spare",
        *("formation", ">= rules.max_nodes and not own.hosts:", ">= rules.max_nodes:"),
        *("host", "a_host_that_comes_late_is_no_spare"),
    ),
    # Who is silent.
    mutant(
        "a slow answer does not count against the others",
        *("peers/liveness", "started - self._since(seen) > self.expire", "self.expire < received - self._since(seen)"),
        *("liveness", "silence_is_a_read_started_more_than_expire_after_the_last_change_was_received"),
    ),
    mutant(
        "time counts from when a change was received",
        *("peers/liveness", "_Seen(seq, received, proven=seen is not None)\n", "_Seen(seq, started, proven=seen is not None)\n"),
        *("liveness", "silence_is_a_read_started_more_than_expire_after_the_last_change_was_received"),
    ),
    mutant(
        "a keep-alive of before the trouble is no sign of life",
        *("peers/liveness", "self._excused = max(self._excused, until)", "for seen in self._seen.values(): seen.changed = until"),
        *("silence", "at_a_store_that_outlives_the_job_the_last_may_find_it_back_seconds_after_the_first"),
    ),
    mutant(
        "where rows have leases, one that is away for a moment makes nobody lost",
        *("peers/liveness", "started > max(seen.absent_since + lease.absence,", "started > max(seen.absent_since,"),
        *("silence", "a_row_that_is_away_for_a_moment_makes_nobody_lost"),
    ),
    mutant(
        "where rows have leases, one that has vanished makes its node lost in time",
        *("peers/liveness", " if self._lease is None else self._observe_leased, self", ", self"),
        *("silence", "where_rows_have_leases_a_node_is_lost_between_expire_and_two_seconds_later"),
    ),
    mutant(
        "where rows have leases, a keep-alive writes nothing",
        *("peers/own_row", "due = lease_is_over if rules.lasting else", "due ="),
        *("silence", "where_rows_have_leases_a_node_that_has_nothing_new_to_say_writes_nothing"),
    ),
    mutant(
        "a row whose lease may be over is written anew",
        *("peers/own_row", "lease_is_over = self.doubts > (asked.put is not None)", "lease_is_over = False"),
        *("silence", "a_node_writes_its_row_anew_when_its_lease_may_be_over"),
    ),
    mutant(
        "a word beside a record of another job, or of a later store, changes nothing in it",
        *("wire/sync", "if record is not None and _is_earlier(record, job):", "if record is not None and job is not None:"),
        *("succession", "a_standby_store_that_has_had_the_job_says_so_in_its_record"),
    ),
    mutant(
        "a lease that is renewed while its row is gone is no keep-alive",
        *("wire/sync", "last, kept_alive and row is not None, votes", "last, kept_alive, votes"),
        *("sync", "a_keep_alive_counts_only_with_its_row"),
    ),
    mutant(
        "an old row that is put back is no sign of life",
        *("peers/liveness", "(row.seq < seq or (left and not has_left))", "(left and not has_left)"),
        *("liveness", "old_rows_are_left_out_and_who_has_left_does_not_come_back"),
    ),
    mutant(
        "who has left does not come back",
        *("peers/liveness", "(row.seq < seq or (left and not has_left))", "row.seq < seq"),
        *("replay", "old_joining_rows_are_taken_into_no_round"),
    ),
    mutant(
        "only a rising seq is a sign of life",
        *("peers/liveness", "seq > seen.seq:", "seq != seen.seq:"),
        *("liveness", "silence_is_a_read_started_more_than_expire_after_the_last_change_was_received"),
    ),
    mutant(
        "a node's own seq rises when an older row of it was put back",
        *("peers/own_row", "max(self.seq, self.stored.seq if self.stored else 0) + 1", "(self.stored.seq if self.stored else 0) + 1"),
        *("replay", "a_node_whose_own_old_row_is_put_back_goes_on_above_its_newest"),
    ),
    mutant(
        "a run whose nodes have left binds nobody",
        *("earlier_run", "if not rules.lasting or (found.round == 0", "if True or (found.round == 0"),
        *("machine", "where_the_store_outlives_the_job_a_run_whose_nodes_have_left_binds_nobody"),
    ),
    mutant(
        "a run that may go on out of reach is waited for",
        *("earlier_run", "max(may_still_work(rules, view), same", "max(0.0, same"),
        *("machine", "where_the_store_outlives_the_job_nodes_that_were_killed_are_waited_for"),
    ),
    mutant(
        "who leaves a broken round says in the record that it has stopped",
        *("updates", "if broken is None or record.closed or", "if True or record.closed or"),
        *("machine", "where_the_store_outlives_the_job_a_run_whose_nodes_have_left_binds_nobody"),
    ),
    mutant(
        "the neighbours of a late member are watched before it is lost",
        *("peers/view", "return record.open and own_rank(record, own) is not None and bool(left)", "return False"),
        *("machine", "a_rack_that_is_lost_at_once_is_dropped_as_fast_as_one_node"),
    ),
    # The decisions of a node.
    mutant(
        "no worker starts before every member has seen the round",
        *("machine", "elif self.store.view(record).seen_by_all(self.store.own.stored) and", "elif"),
        *("steps", "a_ready_node_whose_round_breaks_starts_nothing"),
    ),
    mutant(
        "nobody waits for a node that sits out",
        *("machine", "done_round=self.row.round, failures=event.failures, note=", "failures=event.failures, note="),
        *("steps", "a_node_that_sits_out_says_at_once_that_its_last_round_is_over_and_joins_no_other"),
    ),
    mutant(
        "only a node whose workers are being stopped sits out",
        *("machine", "if self.state is DRAINING:\n            self.row = ", "if True:\n            self.row = "),
        *("steps", "a_node_that_sits_out_says_at_once_that_its_last_round_is_over_and_joins_no_other"),
    ),
    mutant(
        "the last node of a moved job says where it is while its workers may train",
        *("store_tracker", "return self._failover.forward(self.record)", FORWARDS_WHILE_RUNNING),
        *("succession", "the_last_node_of_a_job_that_has_moved_says_where_it_is_as_long_as_its_workers_may_train[29.0]"),
    ),
    by_name(
        "an owner that leaves and is not alone does",
        "failover.decide:claims",
        part_always("alone"),
        seen_by="succession::an_owner_that_leaves_keeps_a_second_run_from_beginning_beside_the_others[majority-10.0]",
    ),
    mutant(
        "who leaves has its end named in the record",
        *("machine", "names_ends = self.rules.lasting or (self.rules.succession and", "names_ends = self.rules.lasting or (False and"),
        *("succession", "a_node_leaves_and_then_the_host_goes[True-0.2-majority]"),
    ),
    mutant(
        "a round that is over names the end of who had stopped before",
        *("death_notice", "if stopped and record.broken is None:", "if stopped:"),
        *("death_notice", "a_round_that_is_over_names_the_end_of_who_had_stopped_before_and_does_not_call_it_lost"),
    ),
    mutant(
        "who is about to leave sends no newcomer to its store",
        *("machine", "stays=self._outcome is None", "stays=True"),
        *("succession", "an_owner_that_leaves_sends_no_newcomer_to_its_store"),
    ),
    mutant(
        "a vote names no nodes that nobody counts any more",
        *("failover/succession", "tuple(sorted(counted.intersection(ended)))", "tuple(sorted(ended))"),
        *("succession", "a_vote_names_only_nodes_that_its_record_names"),
    ),
    mutant(
        "a reason to end a round does not end the next one",
        *("machine", "        if record.round != self.row.round:\n", "        if False:\n"),
        *("steps", "the_reason_to_end_a_round_does_not_end_the_next_one"),
    ),
    mutant(
        "another store is another rendezvous",
        *("rules", "if found.store_id == record.store_id else", "if True else"),
        *("steps", "a_store_that_answers_with_another_id_is_another_rendezvous"),
    ),
    mutant(
        "who was in no round joins the job that is in the store now",
        *("store_tracker", "if stays and self._may_begin_again(self.record, event, row):", "if False:"),
        *("steps", "who_was_in_no_round_joins_the_job_that_is_in_the_store_now"),
    ),
    mutant(
        "who was in a round does not",
        *("store_tracker", "return in_no_round and is_over", "return is_over"),
        *("steps", "a_store_that_answers_with_another_id_is_another_rendezvous"),
    ),
    mutant(
        "nor who has read of a round that may go on",
        *("store_tracker", "return in_no_round and is_over", "return in_no_round"),
        *("steps", "who_may_not_join_another_store_ends"),
    ),
    mutant(
        "nor who leaves",
        *("machine", "stays = self._outcome is None and not self._closing", "stays = not self._closing"),
        *("steps", "who_may_not_join_another_store_ends"),
    ),
    mutant(
        "a node offers each id to one store",
        *("store_tracker", "        self._take_another_store_id()\n        self._link = self._link", "        self._link = self._link"),
        *("steps", "a_node_offers_each_id_to_one_store"),
    ),
    mutant(
        "also where it has not heard whether the store has it",
        *("store_tracker", "            self._take_another_store_id()  # the store may", "            pass  # the store may"),
        *("steps", "a_node_offers_each_id_to_one_store"),
    ),
    mutant(
        "a spare that begins again gives up its standby store",
        *("store_tracker", "            self._standby = 0\n            effects", "            effects"),
        *("succession", "nobody_finds_a_spare_that_has_begun_again_where_it_was"),
    ),
    mutant(
        "and connects again, to serve another one",
        *("store_tracker", "            effects.append(Reconnect())  # another", "            pass  # another"),
        *("succession", "nobody_finds_a_spare_that_has_begun_again_where_it_was"),
    ),
    mutant(
        "a node with other settings takes no part",
        *("store_tracker", 'how = rules.disagreement(self.rules, found) if found is not None else ""', 'how = ""'),
        *("rules", "nodes_started_with_other_settings_are_told_so_and_change_nothing"),
    ),
    mutant(
        "a fixed place has one holder",
        *("formation", "view.now >= began + rules.replacement", "False"),
        *("rules", "a_second_node_with_a_fixed_rank_is_excluded_once_the_round_runs"),
    ),
    mutant(
        "a replacement has the time until the lost one is missed",
        *("formation", "view.now >= began + rules.replacement", "True"),
        *("rules", "the_replacement_of_a_lost_node_with_a_fixed_rank_is_not_excluded"),
    ),
    mutant(
        "into the store of a job that is over nothing is written",
        *("store_tracker", "earlier_run.may_be_earlier(self.rules, found, rows, all_rows) else None", "False else None"),
        *("steps", "into_the_store_of_a_job_that_is_over_nothing_is_written"),
    ),
    mutant(
        "a running round is not broken before it is clear that no more newcomers come",
        *("formation", "if more_may_come and view.now < settled_since + rules.debounce:", "if False:"),
        *("steps", "a_running_round_is_not_broken_for_a_newcomer_before_it_is_clear_that_no_more_come"),
    ),
    mutant(
        "who fills the last place waits for no other newcomer",
        *("formation", "if more_may_come and view.now", "if view.now"),
        *("steps", "a_newcomer_who_fills_the_last_place_of_a_running_round_waits_for_no_other"),
    ),
    mutant(
        "a spare disturbs nobody",
        *("formation", "if len(record.members) >= rules.max_nodes and not own.hosts:", "if False:"),
        *("machine", "a_spare_waits_without_disturbing_and_steps_in"),
    ),
    mutant(
        "nobody is taken in while a round is finishing",
        *("formation", "if any(view.has_succeeded(m) for m in record.members):", "if False:"),
        *("steps", "nobody_is_taken_in_while_a_round_is_finishing"),
    ),
    mutant(
        "a done node that goes spoils no success",
        *("updates", "if view.is_over(m) and not view.has_succeeded(m):", "if view.is_over(m):"),
        *("steps", "a_member_that_has_succeeded_may_fall_silent"),
    ),
    mutant(
        "success needs every member",
        *("machine", "            if not missing:\n", "            if True:\n"),
        *("machine", "success_needs_every_member_in_one_round"),
    ),
    mutant(
        "a round of one that is cut off stops in time",
        *("machine", "return self._now >= limit", "return False"),
        *("machine", "a_round_of_one_cut_off_stops_before_others_may_take_over"),
    ),
    mutant(
        "one exchange at a time",
        *("store_tracker", "        if schedule.under_way:\n            return []\n", ""),
        *("steps", "a_node_asks_the_store_once_at_a_time_and_no_more_often_than_it_must"),
    ),
    mutant(
        "who is ready for another round is not ready for this one",
        *("peers/view", "if row is not None and row.round == self.record.round]", "if row is not None]"),
        *("steps", "a_member_that_is_ready_for_another_round_is_not_ready_for_this_one"),
    ),
    mutant(
        "a node named with other slots takes no part",
        *("peers/ranks", "rank is not None and record.members[rank].slots == row.slots", "rank is not None"),
        *("steps", "a_node_that_is_named_with_other_slots_takes_no_part"),
    ),
    mutant(
        "a verdict does not overrule that a node leaves",
        *("machine", "(overrule and self._outcome[0] is not Outcome.LEFT)", "overrule"),
        *("steps", "a_verdict_does_not_overrule_that_this_node_leaves"),
    ),
    mutant(
        "a lone round's time counts from when its keep-alive was sent",
        *("peers/own_row", "kept_alive=answer.started if", "kept_alive=answer.now if"),
        *("lone_round", "its_time_counts_from_when_the_keep_alive_was_sent_not_answered"),
    ),
    mutant(
        "a keep-alive whose answer was lost does not count later",
        *("peers/own_row", "put is not None and row.seq >= put.row.seq", "(self.stored is None or row.seq > self.stored.seq)"),
        *("lone_round", "a_keep_alive_whose_answer_was_lost_does_not_count_when_it_is_read_later"),
    ),
    mutant(
        "a lone round is not started when it would have to stop",
        *("machine", "seen_by_all(self.store.own.stored) and not self._may_not_run_alone(record)", "seen_by_all(self.store.own.stored)"),
        *("lone_round", "it_is_not_started_when_it_would_have_to_stop"),
    ),
    mutant(
        "a lone round that drains is hurried when it is cut off",
        *("machine", "self.row.round != self._hurried and self._may_not_run_alone(record)", "self.row.round != self._hurried and False"),
        *("lone_round", "it_is_hurried_when_it_is_cut_off_while_it_drains"),
    ),
    mutant(
        "of a round that is cut off the shortest silence counts",
        *("formation", "rules.longest_alone - min(", "rules.longest_alone - max("),
        *("formation", "of_a_round_that_is_cut_off_the_member_heard_of_last_counts"),
    ),
    mutant(
        "who is not read is not silent",
        *("peers/liveness", "self.found_silent = frozenset([i for", "self.found_silent = before | frozenset([i for"),
        *("liveness", "who_is_not_read_is_not_called_silent"),
    ),
    mutant(
        "many rows are read when a watched one is away",
        *("store_tracker", "more_lost = self._may_have_lost_more(row)", "more_lost = False"),
        *("machine", "a_rack_that_is_lost_at_once_is_dropped_as_fast_as_one_node"),
    ),
    mutant(
        "an absence that nobody watched begins anew",
        *("peers/liveness", "if started - seen.read_at > SURE * lease.ttl:", "if False:"),
        *("liveness", "at_a_store_with_leases_a_row_must_stay_away_as_long_as_somebody_looks"),
    ),
    # A node that crashes again and again.
    mutant(
        "newcomers wait beside a round after many early losses",
        *("formation", "if view.now < admitted_at:", "if False:"),
        *("crash_loops", "a_node_that_crashes_again_and_again_does_not_keep_the_others_from_their_work"),
    ),
    mutant(
        "a host that has left with its store is no loss",
        *("updates", "    lost = [m for m in lost if m.id in broken.died or m.id not in broken.lost]\n", ""),
        *("crash_loops", "a_host_that_has_left_with_its_store_is_no_loss"),
    ),
    mutant(
        "who hears from the votes why the host has gone says so",
        *("store_tracker", "broken = known.broken or Broken(", "broken = Broken("),
        *("succession", "a_host_that_has_left_before_the_others_heard_of_it_was_not_lost"),
    ),
    mutant(
        "threads that hang at another store delay nothing",
        *("store_thread", "hanging = sum(at == connection.at for at, _ in self._abandoned)", "hanging = len(self._abandoned)"),
        *("store_thread", "threads_that_hang_at_one_store_do_not_delay_another_one"),
    ),
    mutant(
        "threads that hang at earlier stores do not pile up without end",
        *("store_thread", "len(self._abandoned) - hanging - HANGING_ELSEWHERE", "0"),
        *("store_thread", "threads_that_hang_at_many_stores_do_not_pile_up"),
    ),
    mutant(
        "who reaches too few of its round does not take it for the current one",
        *("store_tracker", "return not all(quorum.is_met(needed, here, view.ended)", "return not all(True"),
        *("majority", "a_host_that_is_cut_off_knows_that_it_may_have_been_replaced"),
    ),
    mutant(
        "a store that nobody has taken over says nothing about a round",
        *("store_tracker", "return self.undecided or (", "return ("),
        *("majority", "a_store_that_nobody_has_taken_over_says_nothing_about_a_round"),
    ),
    mutant(
        "the record says whose end a guard has told",
        *("death_notice", "ended=(*record.broken.ended, row.id)", "ended=()"),
        *("succession", "a_member_dies_and_then_the_host_before_the_third_has_stopped_its_workers[proof]"),
    ),
    by_name(
        "a vote brings the word of the guards that its record has",
        "failover.evidence:Evidence.heard",
        part_never("vote.record.broken"),
        seen_by="succession::a_member_dies_and_then_the_host_before_the_third_has_stopped_its_workers[proof]",
    ),
    by_name(
        "who has taken over goes on reading the words of guards",
        "failover.failover:Failover.complete",
        gets("few", "False"),
        seen_by="majority::who_has_taken_over_still_hears_the_guard_of_the_host_while_no_round_is_on",
    ),
    mutant(
        "votes are read while a round is over",
        *("wire/sync", "(record is None or record.broken)", "record is None"),
        *("majority", "who_has_taken_over_still_hears_the_guard_of_the_host_while_no_round_is_on"),
    ),
    mutant(
        "a round forms without a node of whose end a guard has told",
        *("peers/view", "self.gone | quorum.left", "quorum.left"),
        *("majority", "who_has_taken_over_still_hears_the_guard_of_the_host_while_no_round_is_on"),
    ),
    mutant(
        "nodes whose end is proven replace nobody",
        *("store_tracker", "quorum.is_met(needed, here, view.ended) for", "quorum.is_met(needed, here) for"),
        *("majority", "a_host_whose_others_have_died_has_not_been_replaced"),
    ),
    mutant(
        "who has given up its standby store serves another one",
        *("store_tracker", "        self._standby = 0\n        return [Reconnect()]", "        return [Reconnect()]"),
        *("majority", "who_has_given_up_its_own_standby_store_has_none_until_it_serves_the_next_one"),
    ),
    mutant(
        "a store that cannot move needs no majority",
        *("peers/quorum", " if host else ()", ""),
        *("formation", "a_job_in_the_store_of_another_one_needs_no_majority"),
    ),
    mutant(
        "after many early losses the survivors go on by themselves",
        *("formation", "if held and len(survivors) >= rules.min_nodes:", "if False:"),
        *("crash_loops", "after_many_early_losses_the_survivors_go_on_by_themselves"),
    ),
    mutant(
        "a loss counts unless workers go on with their state",
        *("updates", "(gone and not kept)", "gone"),
        *("crash_loops", "a_loss_does_not_count_where_workers_go_on_with_their_state"),
    ),
    mutant(
        "a node says that its workers keep their state",
        *("machine", "kept = self.row.round if event.kept else self.row.kept", "kept = self.row.kept"),
        *("crash_loops", "where_workers_keep_their_state_a_node_that_crashes_again_and_again_is_taken_in_each_time"),
    ),
    mutant(
        "only a state of the round that is over is one to go on with",
        *("rules", "any(row.kept == round for", "any(row.kept > 0 for"),
        *("crash_loops", "a_loss_does_not_count_where_workers_go_on_with_their_state"),
    ),
    mutant(
        "no round waits whose workers go on with their state",
        *("formation", " and not keeps_state(chosen, record.round):", ":"),
        *("crash_loops", "no_round_waits_whose_workers_go_on_with_their_state"),
    ),
    mutant(
        "a refusal that comes again ends the job",
        *("formation", "    if cause.blame == Blame.FINAL and not trains:", "    if False:"),
        *("crash_loops", "a_refusal_that_each_restart_would_meet_again_ends_the_job_unless_others_train"),
    ),
    mutant(
        "a refusal of a newcomer does not end the job",
        *("formation", "Blame.FINAL and not trains:", "Blame.FINAL:"),
        *("crash_loops", "a_refusal_that_each_restart_would_meet_again_ends_the_job_unless_others_train"),
    ),
    mutant(
        "a new worker waits where others go on with their state",
        *("machine", "record.round - 1)", "record.round)"),
        *("crash_loops", "only_the_new_worker_waits_where_others_go_on_with_their_state"),
    ),
    mutant(
        "a round that ran for long makes early losses forgotten",
        *("updates", "0 if broken.ran >= EARLY else record.losses", "record.losses"),
        *("crash_loops", "a_round_counts_when_it_lost_a_node_soon"),
    ),
    mutant(
        "a round that newcomers ended says nothing of them",
        *("updates", "    if broken.cause is Cause.JOIN and not gone:\n        return record\n", ""),
        *("crash_loops", "a_round_counts_when_it_lost_a_node_soon"),
    ),
    mutant(
        "who has ended a round and is gone before the next one is a loss",
        *("updates", "        came = (broken.by,)\n", "        came = ()\n"),
        *("crash_loops", "a_node_that_crashes_again_and_again_does_not_keep_the_others_from_their_work"),
    ),
    mutant(
        "whoever ended the round lives",
        *("peers/view", " | ({record.broken.by} if record.broken else set())", ""),
        *("crash_loops", "a_newcomer_with_a_slow_beat_is_taken_in_by_the_round_that_was_ended_for_it"),
    ),
    # Bytes from outside.
    mutant(
        "an older round record is not believed",
        *("wire/sync", "            if record and newest and old and", "            if False and record and newest and old and"),
        *("sync", "an_older_round_record_is_not_believed"),
    ),
    mutant(
        "the old list of members stays when the record was not written",
        *("wire/sync", "if found == value and before is not None", "if before is not None"),
        *("sync", "the_list_of_the_members_stays_when_the_record_is_not_written"),
    ),
    mutant(
        "no success while own workers run",
        *("rules", 'and row.succeeded != record.round:\n        return f"it says', 'and False:\n        return f"it says'),
        *("replay", "success_is_not_believed_while_own_workers_run"),
    ),
    mutant(
        "a round of more nodes than --nnodes allows is refused",
        *("rules", "if len(record.members) > most and", "if False and"),
        *("replay", "a_record_with_more_members_than_nnodes_allows_is_refused"),
    ),
    mutant(
        "members are those that the record names",
        *("wire/sync", "if hashlib.sha256(data).hexdigest() != digest:", "if False:"),
        *("sync", "a_list_of_members_that_is_not_the_one_named_is_not_believed"),
    ),
    mutant(
        "a record has one spelling",
        *("wire/codec", 'if _spell({**plain, "v": FORMAT}) != payload:', "if False:"),
        *("codec", "what_is_not_canonical_json_is_bad"),
    ),
    mutant(
        "a member that was read before is the same in type, too",
        *("wire/codec", "functools.lru_cache(KEPT, typed=True)", "functools.lru_cache(KEPT)"),
        *("codec", "a_member_that_was_read_before_admits_no_equal_value_of_another_type"),
    ),
    mutant(
        "a signature holds for one key",
        *("wire/codec", 'f"{self.store}\\0{key}\\0"', 'f"{self.store}\\0"'),
        *("codec", "a_signature_holds_for_one_key_one_token_and_nothing_unsigned"),
    ),
    mutant(
        "a signature holds for one store",
        *("wire/codec", 'f"{self.store}\\0{key}\\0"', 'f"{key}\\0"'),
        *("codec", "a_signature_holds_for_one_key_one_token_and_nothing_unsigned"),
    ),
    mutant(
        "an exchange signs for the store that it goes to",
        *("wire/exchanges", 'fresh(at.name if at else "")', "fresh()"),
        *("store_thread", "what_is_signed_for_one_store_is_nothing_in_another_one"),
    ),
    mutant(
        "another's row under one's own key is written over",
        *("wire/sync", "self._parse_row(key, found)", "self._codec.decode(key, found, NodeRow)"),
        *("sync", "what_others_have_put_into_ones_own_row_is_written_over"),
    ),
    mutant(
        "a changed row is parsed anew",
        *("wire/sync", "if known is None or known[0] != data:", "if known is None:"),
        *("sync", "an_unchanged_or_renewed_row_is_parsed_once_and_a_changed_one_anew"),
    ),
    mutant(
        "a row that differs in more than its seq is parsed anew",
        *("wire/codec", "seq=int(new[1])) if around == old_around else None", "seq=int(new[1]))"),
        *("codec", "a_renewed_row_is_read_as_any_other_and_whatever_else_is_not_read_quickly"),
    ),
    mutant(
        "a renewed row is signed",
        *("wire/codec", "or (self.token and not hmac.compare_digest(mac, self._mac(key, payload))):\n", "or False:\n"),
        *("codec", "a_row_is_not_read_quickly_without_its_signature"),
    ),
    # The session, which agents and the simulated world share.
    mutant(
        "a loop that stood still says so",
        *("agent/session", "if not workers_ended and overdue <= STANDSTILL:", "if not workers_ended:"),
        *("machine", "ones_own_standstill_is_nobodys_absence"),
    ),
    mutant(
        "a standstill is told before what happened meanwhile",
        *("agent/session", "self._events.appendleft(StoodStill(", "self._events.append(StoodStill("),
        *("agent/session", "a_standstill_comes_before_any_other_event"),
    ),
    mutant(
        "the time before the loop begins is no wait",
        *("agent/session", "        self.machine.begin(self._checked_at, prepares)\n", ""),
        *("agent/session", "the_time_before_the_loop_begins_counts_as_no_wait"),
    ),
    mutant(
        "the machine knows the time while an exchange hangs",
        *("agent/session", "if now >= self.machine.wake:", "if now >= self.machine.wake and self._exchanges.deadline is None:"),
        *("agent/session", "the_machine_is_told_the_time_while_an_exchange_hangs"),
    ),
    mutant(
        "an answer that comes too late reaches nobody",
        *("wire/exchanges", "        self.reconnect()\n        self._pending = False\n", "        self._pending = False\n"),
        *("agent/session", "an_answer_after_the_limit_reaches_nobody"),
    ),
    mutant(
        "the next round knows the port that is held for it",
        *("agent/session", "self.post(self._reachable(self._now(), self.machine.row.address, self.worker_store))", "pass"),
        *("agent/session", "when_a_round_has_started_the_next_port_is_told"),
    ),
    # The guard of an agent that has died tells the others.
    mutant(
        "a told loss is written before the row of the dead",
        *("death_notice", "if lost is not None:  #", "if lost is not None and left is None:  #"),
        *("death_notice", "the_loss_is_written_before_the_row"),
    ),
    mutant(
        "a death notice is about members alone",
        *("death_notice", "or record.index(row.id) is None:", "or False:"),
        *("death_notice", "a_spare_that_dies_disturbs_nobody"),
    ),
    mutant(
        "a death notice changes no verdict",
        *("death_notice", "if record is None or record.closed or", "if record is None or"),
        *("death_notice", "a_record_is_left_alone_where_nobody_waits_for_the_dead"),
    ),
    mutant(
        "who has stopped its workers is not lost by dying",
        *("death_notice", "stopped = row.done_round >= record.round or", "stopped ="),
        *("death_notice", "a_record_is_left_alone_where_nobody_waits_for_the_dead"),
    ),
    mutant(
        "who has succeeded is not lost by dying",
        *("death_notice", "or row.succeeded == record.round\n", "\n"),
        *("death_notice", "a_member_that_has_succeeded_may_die"),
    ),
    mutant(
        "a told death ends its round for good",
        *("death_notice", "lost=lost, over=True", "lost=lost"),
        *("death_notice", "a_round_that_is_broken_already_learns_of_the_loss"),
    ),
    mutant(
        "a death notice in a broken round names the lost member",
        *("death_notice", "if known else (*record.broken.lost, row.id)", ""),
        *("death_notice", "a_round_that_is_broken_already_learns_of_the_loss"),
    ),
    mutant(
        "the row of a dead agent says left",
        *("death_notice", "    if row.status is Status.LEFT:\n        return None\n", "    return None\n"),
        *("death_notice", "a_member_that_runs_is_lost_and_its_row_says_that_it_has_left"),
    ),
    mutant(
        "the row of a dead agent is its newest",
        *("death_notice", "note=NOTE, seq=row.seq + 1)", "note=NOTE)"),
        *("death_notice", "a_member_that_runs_is_lost_and_its_row_says_that_it_has_left"),
    ),
    mutant(
        "a round that the agent did not know counts as short",
        *("death_notice", "ran if record is not None and record.round == round_ else 0.0", "ran"),
        *("death_notice", "how_long_the_round_ran_is_known_of_the_round_that_the_agent_knew_alone"),
    ),
    mutant(
        "in a store without the row of the dead nothing is written",
        *("death_notice", "            return False  # this store", "            row = NodeRow(me, me, me, 1, 1)  # this store"),
        *("death_notice", "in_the_store_of_another_run_nothing_is_written"),
    ),
    mutant(
        "a death notice is tried again",
        *("death_notice", "for _ in range(TRIES):", "for _ in range(2):"),
        *("death_notice", "a_notice_is_tried_again_when_somebody_else_writes_at_the_same_moment"),
    ),
    mutant(
        "a guard tells those who watch",
        *("rendezvous/stores/tcp", "        if key.endswith(WATCHED):\n", "        if False:\n"),
        *("tcp_plain", "who_watches_hears_of_what_it_replaces"),
    ),
    mutant(
        "a guard creates no key",
        *("rendezvous/stores/tcp", "if not (expected or key.startswith(self._creates)):", "if False:"),
        *("tcp_plain", "it_creates_no_key"),
    ),
    mutant(
        "a connection without torch finds the rows of a job",
        *("rendezvous/stores/tcp_wire", "        while wanted:\n", "        if wanted:\n"),
        *("tcp_plain", "it_lists_what_torchs_clients_have_written"),
    ),
    mutant(
        "requests for long keys fit into the buffers of a connection",
        *("rendezvous/stores/tcp_wire", "never)) <= AT_ONCE:", "never)) <= AT_ONCE * 128:"),
        *("tcp_plain", "requests_for_long_keys_fit_into_the_buffers_of_a_connection"),
    ),
    # Pushes and polls.
    mutant(
        "the machine says since when it waits",
        *("machine", "self._now - self._waiting.since, takes_over)", "self._now, takes_over)"),
        *("steps", "a_node_that_has_stopped_its_workers_soon_reads_the_others_rows_again"),
    ),
    mutant(
        "an answer has one limit, however many parts it comes in",
        *("rendezvous/stores/tcp_wire", "max(0.0 if self._arrived else 0.001, until - clock.now())", "0.5"),
        *("tcp_plain", "a_peer_that_answers_byte_by_byte_has_no_more_time"),
    ),
    mutant(
        "many keys are read at once",
        *("rendezvous/stores/tcp_wire", "never)) <= AT_ONCE:", "never)) <= AT_ONCE // 128:"),
        *("stores", "many_keys_are_not_read_one_by_one"),
    ),
    mutant(
        "who replaces a watched value says so",
        *("rendezvous/stores/tcp", "        if now == value:\n", "        if False:\n"),
        *("tcp_watch", "a_change_is_heard_of_at_once"),
    ),
    mutant(
        "marks do not pile up in the store",
        *("rendezvous/stores/tcp", "if len(self._marks) > KEPT_MARKS:", "if False:"),
        *("tcp_watch", "threads_descriptors_and_keys_are_flat_over_reconnects_and_writes"),
    ),
    mutant(
        "a store ends its watch",
        *("rendezvous/stores/tcp", "            watch.close()\n", "            pass\n"),
        *("tcp_watch", "it_ends_with_its_connection_at_once_and_leaves_no_descriptor"),
    ),
    mutant(
        "a watch that gets no answer can be ended",
        *("rendezvous/stores/tcp", "self._connection.interrupt()", "pass"),
        *("tcp_watch", "one_that_is_accepted_and_never_answered_ends_at_once"),
    ),
    mutant(
        "a mark without a change is no news, and no reason to spin",
        *("rendezvous/stores/tcp", "            elif marked:\n", "            elif False:\n"),
        *("tcp_watch", "marks_that_a_stranger_makes_cost_no_more_than_the_push"),
    ),
    mutant(
        "a watch reads the value again now and then",
        *("rendezvous/stores/tcp", "mark(self._key, value), RECHECK)", "mark(self._key, value), 1e6)"),
        *("tcp_watch", "a_change_whose_writer_died_before_it_made_the_mark_is_noticed_when_the_value_is_read_again"),
    ),
    mutant(
        "a record that changes without pause does not keep the agents busy",
        *("rendezvous/stores/tcp", "        if len(self._told) == BURST:\n", "        if False:\n"),
        *("tcp_watch", "a_record_that_changes_without_pause_is_told_of_a_few_times_a_second_and_the_last_change_is_not_missed"),
    ),
    mutant(
        "the index does not grow with the rounds",
        *("rendezvous/stores/tcp", "key not in self._indexed and is_listed(key):", "key not in self._indexed:"),
        *("stores", "keys_that_each_round_has_anew_pile_up_neither_in_an_index_nor_in_a_connection"),
    ),
    mutant(
        "the loss of the store is told at once",
        *("rendezvous/stores/tcp", "            if not self._closed.is_set():\n                self._tell()\n", ""),
        *("tcp_watch", "a_lost_connection_is_told_of_once_and_a_change_meanwhile_later"),
    ),
    mutant(
        "a connection that was given up is not heard",
        *("store_thread", "if connection is self._connection:", "if True:"),
        *("store_thread", "a_store_that_tells_of_a_change_wakes_the_loop_and_is_no_answer"),
    ),
    # The store survives its host.
    mutant(
        "a store is taken over by more than half, not by half",
        *("peers/quorum", "2 * count > len(ids)", "2 * count >= len(ids)"),
        *("succession", "two_groups_are_never_both_enough"),
    ),
    mutant(
        "all that have not died are enough",
        *("peers/quorum", "return all(i in here or i in ended or", "return not ids or all(i in here or"),
        *("succession", "enough_is_more_than_half_of_the_others_or_all_that_have_not_died"),
    ),
    by_name(
        "nobody gives up the store before the end of its host is proven",
        "failover.decide:trusts_host",
        returns("False"),
        seen_by="succession::nobody_follows_before_the_end_of_the_host_is_proven",
    ),
    by_name(
        "nobody goes to a standby store whose owner is not there",
        "failover.decide:decide",
        part_always("quorum.is_there"),
        seen_by="succession::nobody_follows_into_a_store_whose_owner_is_not_there",
    ),
    by_name(
        "the next in line waits until it has asked in vain for long enough",
        "failover.decide:is_away",
        instead_of("rules.expire", "0.0"),
        seen_by="succession::the_first_in_line_opens_its_own_store_the_next_only_after_it_has_asked_in_vain",
    ),
    by_name(
        "an owner gives up its undecided store only for one before it in line",
        "failover.decide:precedes_own",
        part_always("before"),
        seen_by="succession::an_owner_gives_up_its_undecided_store_only_for_one_before_it_in_line",
    ),
    mutant(
        "who waits in an undecided store stays until its owner has left",
        *("failover/decide", "quorum.is_there(answer.rows.get(at.id)) and has_ended(at, answer)", "True"),
        *("succession", "who_waits_in_an_undecided_store_leaves_it_when_its_owner_has"),
    ),
    by_name(
        "a node waits for no store before its own that it has left",
        "failover.decide:before",
        part_always("evidence.left"),
        seen_by="succession::who_has_left_a_store_does_not_wait_for_it",
    ),
    by_name(
        "a round that ran for long before its host was lost is no early loss",
        "failover.decide:change",
        gets("ran", "0.0"),
        seen_by="majority::each_node_can_host_the_store_again_and_again",
    ),
    by_name(
        "nobody goes back to a store that it has left",
        "failover.decide:places",
        part_always("evidence.left"),
        seen_by="succession::nobody_goes_back_to_a_store_that_it_has_left",
    ),
    mutant(
        "who says that a host has died knows the record that it knew",
        *("failover/evidence", "            known = newest(vote.record, known)\n", "            pass\n"),
        *("succession", "who_says_that_a_host_has_died_knows_the_record_that_it_knew"),
    ),
    mutant(
        "all owners count in the round that the guard of the host has named",
        *("failover/decide", "else word.quorums[-1:]", "else known.quorums[-1:]"),
        *("succession", "owners_count_in_the_round_that_the_guard_of_the_host_has_named"),
    ),
    mutant(
        "who has not heard the guard of the last host does not take over",
        *("failover/decide", "if word is not None and proven:", "if word is not None:"),
        *("succession", "who_has_not_heard_the_guard_of_the_last_host_does_not_take_over"),
    ),
    by_name(
        "the votes of all that are counted are read",
        "failover.failover:Failover.complete",
        part_never("evidence.word"),
        seen_by="succession::an_owner_reads_the_votes_of_all_that_it_may_count",
    ),
    by_name(
        "a node counts for the store that it had given up when it came",
        "failover.decide:counted",
        part_always("terms"),
        seen_by="succession::a_node_counts_only_for_the_store_that_it_had_given_up_when_it_came",
    ),
    by_name(
        "the dead are not there",
        "failover.decide:counted",
        part_always("gone"),
        seen_by="succession::the_dead_are_not_there",
    ),
    by_name(
        "who hears of a later store votes again",
        "failover.failover:Failover.answered",
        instead_of("self._words", "self.votes"),
        seen_by="succession::who_hears_in_an_undecided_store_of_a_later_one_votes_again[b]",
    ),
    mutant(
        "who waits reads the vote of the owner",
        *("failover/failover", "rows=(at.id,), voters=(at.id,)", "rows=(at.id,)"),
        *("succession", "who_hears_in_an_undecided_store_of_a_later_one_votes_again[b]"),
    ),
    mutant(
        "whose end the record names is no candidate",
        *("peers/view", "            if row.id not in ended\n", ""),
        *("updates", "whose_end_the_record_names_is_no_candidate"),
    ),
    mutant(
        "of many that leave at once one names the others",
        *("updates", "ended = (*broken.ended, row.id, *more)", "ended = (*broken.ended, row.id)"),
        *("updates", "of_many_that_leave_at_once_one_names_the_others"),
    ),
    mutant(
        "an empty store is not the one in which the others wait",
        *("death_notice", "            return False  # this store", "            return True  # this store"),
        *("death_notice", "in_the_store_of_another_run_nothing_is_written"),
    ),
    by_name(
        "only the owner of a standby store takes over",
        "failover.decide:needed",
        part_never("case.view.me"),
        seen_by="succession::only_the_owner_takes_over_and_only_when_enough_have_come_and_no_other_run_has_begun",
    ),
    by_name(
        "the owner itself must be there",
        "failover.decide:needed",
        part_never("at.id", "here"),
        seen_by="succession::only_the_owner_takes_over_and_only_when_enough_have_come_and_no_other_run_has_begun",
    ),
    by_name(
        "before it takes over an owner asks where the job was started",
        "failover.decide:change",
        part_always("start_is_clear"),
        seen_by="succession::only_the_owner_takes_over_and_only_when_enough_have_come_and_no_other_run_has_begun",
    ),
    mutant(
        "an empty store where the job was started is claimed before the take-over",
        *("failover/evidence", "found is None or found.moved == self.at or", "found is None or found.round == 0 or"),
        *("succession", "before_it_takes_over_an_owner_keeps_another_run_from_forming_its_first_round"),
    ),
    by_name(
        "a look where the job was started holds for one exchange",
        "failover.evidence:Evidence.answered",
        gets("start_is_clear", "self.start_is_clear"),
        seen_by="succession::a_look_at_the_start_holds_for_one_exchange",
    ),
    by_name(
        "a store of another job is not followed",
        "failover.decide:is_later",
        part_always("found.store_id"),
        seen_by="succession::a_store_that_was_taken_over_is_followed_at_once",
    ),
    mutant(
        "a round whose host has died is over",
        *("failover/succession", "(*before.lost, *names))), over=True)", "(*before.lost, *names))))"),
        *("succession", "a_record_that_is_taken_over_says_that_its_round_is_over"),
    ),
    by_name(
        "who waits in an undecided store gives up in the end",
        "failover.failover:Failover.waits",
        part_never("undecided_since"),
        seen_by="succession::who_waits_in_a_store_that_too_few_reach_gives_up",
    ),
    mutant(
        "a newcomer begins no job in a standby store",
        *("machine", "elif record is None and self.store.place is not None:", "elif False:"),
        *("succession", "a_newcomer_begins_no_job_in_a_standby_store"),
    ),
    mutant(
        "a newcomer is not sent in vain for ever",
        *("store_tracker", "if self.place is not None and self.record is None and event.now", "if False and event.now"),
        *("succession", "a_newcomer_is_not_sent_in_vain_for_ever"),
    ),
    mutant(
        "a moved job yields to one that has begun where it was started",
        *("store_tracker", "(why := self._failover.found_at_start(found, self.record, waits, self.now))", "(why := '')"),
        *("succession", "a_job_that_has_moved_yields_to_one_that_has_begun_where_it_was_started"),
    ),
    by_name(
        "an owner that waits yields to another run that has moved",
        "failover.failover:Failover.found_at_start",
        part_never("store_grace"),
        seen_by="succession::an_owner_that_waits_while_another_run_takes_the_nodes_that_come_gives_up",
    ),
    mutant(
        "another owner of the same run is none",
        *("failover/failover", 'other.run not in ("", record.store_id)', "other.run"),
        *("succession", "an_owner_that_waits_while_another_run_takes_the_nodes_that_come_gives_up"),
    ),
    mutant(
        "an owner that does not wait for nodes does not yield",
        *("machine", "waits = self.state is JOINING and self.record is not None and not self.record.open", "waits = True"),
        *("succession", "an_owner_that_gives_up_ends_with_its_store_lost"),
    ),
    mutant(
        "two runs do not both yield",
        *("failover/failover", "(1 if record.store_id < other.run else 2)", "1"),
        *("succession", "of_two_runs_that_wait_one_waits_for_twice_as_long"),
    ),
    mutant(
        "the words of two runs do not count together",
        *("failover/failover", "run == other.run and now - last <= OVERRULED_AGAIN", "now - last <= OVERRULED_AGAIN"),
        *("succession", "words_of_another_run_count_while_they_come_again_and_again"),
    ),
    mutant(
        "one word of another run is not enough",
        *("failover/failover", "run == other.run and now - last <= OVERRULED_AGAIN", "run == other.run"),
        *("succession", "words_of_another_run_count_while_they_come_again_and_again"),
    ),
    by_name(
        "what was found before this agent stood still does not count",
        "failover.failover:Failover.stood_still",
        gets("self._overruled", "self._overruled"),
        seen_by="succession::words_of_another_run_count_while_they_come_again_and_again",
    ),
    by_name(
        "a node goes back to the store that it gave up, where that has gone on",
        "failover.decide:host_is_back",
        returns("False"),
        seen_by="split::a_node_goes_back_from_its_own_store_to_the_one_that_has_gone_on",
    ),
    by_name(
        "it goes back to the last store that was decided and to no other",
        "failover.decide:host_is_back",
        part_never("evidence.before"),
        seen_by="split::it_goes_back_to_no_store_but_the_last_one_that_was_decided",
    ),
    mutant(
        "it looks at that store",
        *("failover/decide", "[None, evidence.before] if", "[None] if"),
        *("split", "it_goes_back_to_no_store_but_the_last_one_that_was_decided"),
    ),
    by_name(
        "it goes back to no host whose end is proven",
        "failover.decide:host_is_back",
        part_never("evidence.gone"),
        seen_by="split::it_does_not_go_back_to_a_host_whose_end_is_proven",
    ),
    by_name(
        "it goes back to its own run",
        "failover.decide:host_is_back",
        part_always("found.store_id"),
        seen_by="split::it_does_not_go_back_to_anything_else[another run]",
    ),
    by_name(
        "it goes back to no store that another one has taken over from",
        "failover.decide:host_is_back",
        part_always("found.term"),
        seen_by="split::it_does_not_go_back_to_anything_else[taken over since]",
    ),
    by_name(
        "it goes back to no older record",
        "failover.decide:host_is_back",
        part_always("found.version"),
        seen_by="split::it_does_not_go_back_to_anything_else[an older one]",
    ),
    by_name(
        "it goes back only where the host writes",
        "failover.decide:host_is_back",
        part_always("lives"),
        seen_by="split::it_goes_back_where_the_host_has_written_its_row_since_although_nothing_else_had_to_be_written",
    ),
    mutant(
        "the row of a host that it had not read there is read twice",
        *("failover/decide", "and seq is not None and host.seq > seq", "and host.seq > (seq or 0)"),
        *("split", "the_row_of_a_host_that_it_had_not_read_there_is_read_twice"),
    ),
    by_name(
        "it does not go back to a store of its own",
        "failover.decide:host_is_back",
        part_never("place.id"),
        seen_by="split::it_does_not_go_back_to_a_store_of_its_own",
    ),
    by_name(
        "an old row of the owner lures nobody away",
        "failover.decide:owner_has_come",
        part_always("has_ended"),
        seen_by="split::whoever_waits_in_the_store_of_another_node_is_not_lured_away_by_a_row_that_this_one_wrote_before",
    ),
    mutant(
        "who has ended its own store serves another one soon",
        *("store_tracker", "        return [Reconnect()]  # another", "        return []  # another"),
        *("split", "a_node_that_goes_back_serves_another_standby_store"),
    ),
    by_name(
        "from the side of the few it goes back only to a new round",
        "failover.decide:host_is_back",
        part_always("evidence.unreached"),
        seen_by="split::it_goes_back_from_the_side_of_the_few_only_when_a_round_has_formed_without_it",
    ),
    by_name(
        "it stays in its own store when enough have come",
        "failover.decide:host_is_back",
        instead_of("needed", "None"),
        seen_by="split::it_does_not_go_back_when_enough_have_come_to_its_own_store",
    ),
    by_name(
        "it leaves the store of another node only when that one has ended it",
        "failover.decide:has_ended",
        part_always("owner.standby"),
        seen_by="split::whoever_waits_in_the_store_of_another_node_goes_back_when_that_one_has_ended_its_store",
    ),
    mutant(
        "a look back reads the row of the owner of the store in use",
        *("failover/failover", ".host, *here))), look", ".host,))), look"),
        *("split", "a_look_back_reads_the_row_of_the_owner_of_the_store_in_use"),
    ),
    mutant(
        "who goes back has ended its own store",
        *("store_tracker", "effects = self._end_own_store()\n        self._begin", "effects = []\n        self._begin"),
        *("split", "a_node_that_goes_back_serves_another_standby_store"),
    ),
    by_name(
        "votes are not written where a node goes back to",
        "failover.failover:Failover.go_back",
        gets("self.votes", "self.votes"),
        seen_by="split::votes_are_not_written_where_a_node_goes_back_to",
    ),
    by_name(
        "nor what was found before the store moved",
        "failover.failover:Failover.move",
        gets("self._overruled", "self._overruled"),
        seen_by="succession::words_of_another_run_count_while_they_come_again_and_again",
    ),
    mutant(
        "what was found before a round ran does not count",
        *("failover/failover", "if not waits:\n            self._overruled = None", "if not waits:\n            pass"),
        *("succession", "words_of_another_run_count_while_they_come_again_and_again"),
    ),
    mutant(
        "the first round waits until it would have heard of the job elsewhere",
        *("formation", "if rules.succession and others_could_run and now < until:", "if False:"),
        *("succession", "a_first_round_waits_until_it_would_have_heard_of_the_job_elsewhere"),
    ),
    mutant(
        "no round without the owner of a store that has taken over",
        *("formation", "if not hosts and record.term:", "if False:"),
        *("succession", "no_round_is_formed_without_the_owner_of_a_store_that_has_taken_over"),
    ),
    mutant(
        "a record of a later term is not an older one",
        *("wire/sync", "(record.term, record.version) < (newest.term, newest.version)", "record.version < newest.version"),
        *("succession", "a_record_of_a_later_term_is_not_an_older_one"),
    ),
    mutant(
        "the vote of one node does not count for another",
        *("wire/sync", "if self._vote_key(vote.id) != key:", "if False:"),
        *("succession", "votes_come_with_the_members_of_their_round_and_garbage_is_ignored"),
    ),
    mutant(
        "where a round has formed nobody says that the store has moved",
        *("wire/sync", "spoken_for = written is not None and", "spoken_for = False and"),
        *("succession", "where_a_round_has_formed_nobody_says_that_the_store_has_moved"),
    ),
    mutant(
        "a newcomer goes where another endpoint sends it",
        *(
            "store_tracker",
            "self._failover.is_sent(sent, event.now)) is not None:",
            "self._failover.is_sent(None, event.now)) is not None:",
        ),
        *("succession", "a_newcomer_goes_where_another_endpoint_sends_it"),
    ),
    by_name(
        "an owner in the smaller part overrules no other word",
        "failover.failover:Failover.forward",
        part_always("self.waits"),
        seen_by="succession::an_owner_in_the_smaller_part_does_not_overrule_another_word",
    ),
    mutant(
        "an owner in the smaller part says where it is",
        *(
            "failover/failover",
            "or self.evidence.undecided or record is None or record.closed:",
            "or self.waits or record is None or record.closed:",
        ),
        *("succession", "an_owner_in_the_smaller_part_does_not_overrule_another_word"),
    ),
    mutant(
        "a word that overrules none is not written over another",
        *("wire/sync", "or (written.moved is not None and not over)", ""),
        *("succession", "a_word_that_overrules_none_is_written_where_nothing_is_said"),
    ),
    mutant(
        "nor in a standby store",
        *("wire/sync", "if found is None or (over and found != value):", "if found != value:"),
        *("succession", "a_word_that_overrules_none_is_written_where_nothing_is_said"),
    ),
    mutant(
        "who has read of no round is a newcomer where the store has moved",
        *("store_tracker", "and self.record is not None and self.formed:", "and self.record is not None:"),
        *("sim", "what_once_went_wrong_does_not[82037468]"),
    ),
    mutant(
        "a newcomer that knows of a moved job begins no other one at once",
        *("formation", "if place is not None and redirected_since is not None and others_could_run and now", "if False and now"),
        *("succession", "a_newcomer_is_not_sent_in_vain_for_ever"),
    ),
    mutant(
        "the time since a newcomer was told does not begin anew when it is told again",
        *("failover/failover", "self._redirected.see(found.moved, now)", "self._redirected.see(now, now)"),
        *("succession", "a_newcomer_is_not_sent_in_vain_for_ever"),
    ),
    by_name(
        "the last word of a node that leaves is no doubt",
        "failover.decide:others_doubt",
        part_always("v.gone"),
        seen_by="majority::the_last_word_of_a_node_that_leaves_is_no_doubt",
    ),
    mutant(
        "a member is sent nowhere",
        *("store_tracker", "and place is None and not self.formed else None", "and place is None else None"),
        *("succession", "a_member_is_sent_nowhere"),
    ),
    mutant(
        "a node that prepares ends no round",
        *("machine", "        if self._prepares:\n            self._progress", "        if False:\n            self._progress"),
        *("preparing", "a_newcomer_ends_a_round_when_it_is_prepared_and_then_at_once"),
    ),
    mutant(
        "a member that has succeeded has seen its round",
        *("peers/view", "if any(map(self.has_succeeded, self.record.members)):", "if False:"),
        *("preparing", "a_member_starts_although_another_one_has_succeeded_and_died_meanwhile[1.0]"),
    ),
    mutant(
        "a node that prepares starts no workers",
        *("machine", "        elif self._prepares:\n", "        elif False:\n"),
        *("preparing", "a_first_round_forms_meanwhile_and_starts_when_all_are_prepared"),
    ),
    mutant(
        "a node that is prepared knows it",
        *("machine", "events.Prepared: _on_prepared,", ""),
        *("preparing", "a_first_round_forms_meanwhile_and_starts_when_all_are_prepared"),
    ),
    # ... with a majority.
    mutant(
        "half of the members are enough only with the node that breaks the tie",
        *("peers/quorum", "2 * count == len(ids) and quorum.tie in here", "2 * count == len(ids)"),
        *("majority", "of_two_halves_the_one_with_the_host_may_go_on"),
    ),
    mutant(
        "the node that breaks a tie does",
        *("peers/quorum", " or (2 * count == len(ids) and quorum.tie in here)", ""),
        *("majority", "of_two_halves_the_one_with_the_host_may_go_on"),
    ),
    mutant(
        "what had ended when the store moved is known afterwards",
        *("peers/quorum", "i in here or i in ended or i in quorum.ended", "i in here or i in ended"),
        *("majority", "what_had_ended_when_the_store_moved_is_known_afterwards"),
    ),
    mutant(
        "a round that may not have started does not take the place of the one before",
        *("peers/quorum", "return record.quorums[-1:] if started else record.quorums", "return record.quorums[-1:]"),
        *("majority", "a_round_that_may_not_have_started_does_not_take_the_place_of_the_one_before"),
    ),
    mutant(
        "a round that has started does",
        *("peers/quorum", "return record.quorums[-1:] if started else record.quorums", "return record.quorums"),
        *("majority", "a_round_that_may_not_have_started_does_not_take_the_place_of_the_one_before"),
    ),
    mutant(
        "a node says which round's workers it has started",
        *("machine", "self._go(Trigger.ALL_READY, started=record.round)", "self._go(Trigger.ALL_READY)"),
        *("majority", "hosts_that_fall_silent_one_after_the_other_are_survived_as_long_as_more_than_half_are_left"),
    ),
    mutant(
        "the next round forms only with a quorum",
        *("formation", "is_met(q, ids, view.ended)] if rules.majority else []", "is_met(q, ids, view.ended)] if False else []"),
        *("majority", "a_round_forms_in_the_store_only_with_enough_members_of_the_one_before"),
    ),
    by_name(
        "nobody gives up the store alone",
        "failover.decide:opens",
        part_always("others_doubt"),
        seen_by="majority::the_first_in_line_gives_up_the_store_when_enough_others_doubt_too",
    ),
    by_name(
        "a doubt about an earlier round does not count",
        "failover.decide:others_doubt",
        part_always("v.record.round"),
        seen_by="majority::the_first_in_line_gives_up_the_store_when_enough_others_doubt_too",
    ),
    by_name(
        "nobody doubts early",
        "failover.decide:doubts",
        part_always("patience"),
        seen_by="majority::nobody_doubts_early_nor_without_majority",
    ),
    by_name(
        "an owner without a word waits a moment for more",
        "failover.decide:change",
        part_never("waits_for_more"),
        seen_by="majority::an_owner_without_a_word_waits_a_moment_for_those_that_are_about_to_come",
    ),
    by_name(
        "who is not there when the store moves away from a silent host is not waited for",
        "failover.decide:change",
        part_always("known.host"),
        seen_by="majority::an_owner_without_a_word_waits_a_moment_for_those_that_are_about_to_come",
    ),
    mutant(
        "a suspended node has not waited meanwhile",
        *("store_tracker", "        self._failover.stood_still(self.now, seconds)\n", ""),
        *("majority", "nodes_that_were_suspended_together_go_on"),
    ),
    by_name(
        "what an owner has found at the start may not be so any more when it was suspended",
        "failover.evidence:Evidence.suspended",
        gets("start_is_clear", "self.start_is_clear"),
        seen_by="succession::what_an_owner_has_found_at_the_start_does_not_count_after_it_was_suspended",
    ),
    by_name(
        "nor what it finds by a look that was under way",
        "failover.evidence:Evidence.suspended",
        gets("was_suspended", "self.was_suspended"),
        seen_by="succession::what_an_owner_has_found_at_the_start_does_not_count_after_it_was_suspended",
    ),
    by_name(
        "nor from the answer to such a look",
        "failover.evidence:Evidence.looked",
        part_never("was_suspended"),
        seen_by="succession::what_an_owner_has_found_at_the_start_does_not_count_after_it_was_suspended",
    ),
    mutant(
        "a record that is replaced while an owner reads it is no silence",
        *("store_tracker", "            if not event.overtaken:\n", "            if True:\n"),
        *("succession", "a_record_that_is_replaced_while_an_owner_reads_it_is_no_silence"),
    ),
    mutant(
        "the two are told apart",
        *("wire/exchanges", "(StoreRefused, UnreadableRound, UnreadableMembers)", "(StoreRefused, UnreadableRound, StoreMoved)"),
        *("succession", "a_record_that_is_replaced_while_an_owner_reads_it_is_no_silence"),
    ),
    mutant(
        "two owners never take over with the same term",
        *("failover/succession", "term=record.term + turn", "term=record.term + 1"),
        *("majority", "two_owners_never_take_over_with_the_same_term"),
    ),
    by_name(
        "a verdict that the guard of the host has brought ends the job",
        "store_tracker:StoreTracker._looked",
        gets("self.record", "record"),
        seen_by="majority::a_verdict_that_the_guard_of_the_host_has_brought_ends_the_job",
    ),
    mutant(
        "who has doubted long enough waits for no answer of the silent host",
        *(
            "store_tracker",
            "            if schedule.under_way:\n                schedule",
            "            if False:\n                schedule",
        ),
        *("majority", "who_begins_to_doubt_waits_for_no_answer_any_more"),
    ),
    mutant(
        "a take-over goes before another look",
        *("machine", "takes_over = self.store.undecided and self._wanted is not None", "takes_over = False"),
        *("majority", "a_take_over_goes_before_another_look"),
    ),
    by_name(
        "the host's word is brought along",
        "failover.failover:Failover._words",
        part_always("word"),
        seen_by="succession::who_says_that_a_host_has_died_knows_the_record_that_it_knew",
    ),
    mutant(
        "the line begins with that of the round which the guard of the host has named",
        *("failover/evidence", "(*standbys(self.word.record), *standbys(record))", "standbys(record)"),
        *("majority", "who_knows_another_round_looks_first_where_the_guard_of_the_host_says"),
    ),
    mutant(
        "a newcomer does not wait in an empty store for ever",
        *("machine", "                self.store.turn_back()  # the store", "                pass  # the store"),
        *("majority", "a_newcomer_that_was_sent_to_an_empty_store_turns_back"),
    ),
    mutant(
        "another run that has ended is none",
        *("failover/succession", "found.round > 0 and found.closed is None and", "found.round > 0 and"),
        *("majority", "another_run_that_has_ended_does_not_end_this_one"),
    ),
    mutant(
        "the smaller side ends in the end",
        *("machine", "        if self.store.waits is not None:\n", "        if False:\n"),
        *("majority", "the_smaller_side_ends_after_the_store_grace"),
    ),
    mutant(
        "only an earlier store of the same job is sent elsewhere in spite of its rounds",
        *("wire/sync", "record.store_id == job.store_id and record.term < job.term", "job.term > 0"),
        *("succession", "an_earlier_store_of_the_job_whose_host_lives_says_where_the_job_is"),
    ),
    mutant(
        "a member that is sent elsewhere remains a member",
        *(
            "store_tracker",
            "if event.round is not None and event.round.round > 0 and self.record is not None and self.formed:",
            "if False:",
        ),
        *("succession", "an_earlier_store_of_the_job_whose_host_lives_says_where_the_job_is"),
    ),
    mutant(
        "a first round of all nodes that there can be waits for no word",
        *("formation", "rules.succession and others_could_run and now", "rules.succession and now"),
        *("succession", "a_first_round_of_all_nodes_that_there_can_be_waits_for_no_word"),
    ),
    mutant(
        "a look at an empty store makes nobody believe an older record",
        *("wire/sync", "self._newest = record or newest", "self._newest = record"),
        *("succession", "a_look_at_an_empty_store_makes_nobody_believe_an_older_record"),
    ),
    mutant(
        "members do not stay with a host that has gone to another store",
        *("formation", "minority=gone and rules.majority and record.round > 0)", "minority=False)"),
        *("majority", "who_waits_for_a_silent_host_looks_for_it_elsewhere"),
    ),
    by_name(
        "a majority that has succeeded forms no round beside the host",
        "failover.decide:needed",
        part_always("succeeded"),
        seen_by="majority::who_comes_late_to_a_decision_after_success_does_not_undo_it",
    ),
    mutant(
        "looks that hang leave time for the store in use",
        *("store_tracker", "starved = schedule.looks >= looks and", "starved = False and"),
        *("split", "looks_that_hang_leave_time_for_the_store_in_use"),
    ),
    mutant(
        "a silent host does not hold up the looks at those that fell silent with it",
        *("store_tracker", "if self._link.contact.trouble else 1", "if False else 1"),
        *("split", "a_silent_host_does_not_hold_up_the_looks_at_those_that_fell_silent_with_it[9-3-30]"),
    ),
    mutant(
        "a look says nothing about the store in use",
        *("store_tracker", "or (self._link.schedule.under_way and self._link.schedule.asked.look)", "or False"),
        *("majority", "a_look_says_nothing_about_the_store_in_use"),
    ),
    mutant(
        "a take-over sends nobody elsewhere",
        *("failover/succession", "quorums=needed, moved=None)", "quorums=needed)"),
        *("majority", "a_take_over_sends_nobody_elsewhere"),
    ),
    mutant(
        "a word of a guard is not lost to a doubt that arrives late",
        *("wire/sync", "                    return True\n", "                    pass\n"),
        *("succession", "a_word_of_a_guard_is_not_lost_to_a_doubt_that_arrives_late"),
    ),
    # ... and others with it.
    by_name(
        "the guard of any member speaks where the store is gone",
        "failover.failover:Failover.notice",
        part_never("known.index"),
        seen_by="succession::the_host_dies_and_others_with_it[1-4]",
    ),
    mutant(
        "who looks for a store hears of the end of those in line",
        *("failover/failover", "(record.host, *here, *(p.id for p in evidence.line(record)))", "(record.host, *here)"),
        *("succession", "the_host_dies_and_others_with_it[2-5]"),
    ),
    mutant(
        "who leaves without the store says so in the standby stores",
        *("store_tracker", "vote = None if has_left and not (record", "vote = None if not self.hosting and not (False and record"),
        *("succession", "a_member_that_leaves_while_the_host_dies_is_not_waited_for"),
    ),
    mutant(
        "members are written once beside the votes of a connection",
        *("wire/sync", "if vote.record.members and short.members_digest not in self._voted:", "if vote.record.members:"),
        *("succession", "the_members_beside_the_votes_of_a_connection_are_written_once"),
    ),
    by_name(
        "votes about another run are not heard",
        "failover.evidence:Evidence.heard",
        part_always("store_id"),
        seen_by="succession::votes_about_another_run_are_not_heard",
    ),
    mutant(
        "an empty store in its place shows that a store is gone",
        *("store_tracker", "                self._failover.replaced()", "                pass"),
        *("majority", "a_host_that_is_started_anew_at_once_joins_the_others"),
    ),
    # Live workers, in simulated histories.
    simulated(
        "who has promised to have left a round makes no step in it",
        *("live", "            worker.word = worker.settled\n        worker.inside = None\n", "            worker.word = worker.settled\n"),
        *("live_sim", "a_worker_dies_and_the_others_lose_no_step"),
    ),
    simulated(
        "a node is done with a round when all its workers are parked or have ended",
        *("live", "        if not any(worker.lives for worker in crew.running.values()):", "        if True:"),
        *("live_sim", "a_worker_dies_and_the_others_lose_no_step"),
    ),
    live_worker(
        "an answer for an older round parks nobody",
        *("agent/workers/parking", "        if self._asked.get(pid) != round:", "        if pid not in self._asked:"),
        *("live_sim", "an_answer_that_comes_again_late_does_not_count_for_the_next_round"),
    ),
    live_worker(
        "an answer of a worker that was killed counts for nothing",
        *("agent/workers/parking", "        self._asked.pop(pid, None)\n", ""),
        *("live_sim", "histories_hold_in_which_a_rule_is_missed[5004]"),
    ),
    live_worker(
        "who has an abandoned state begins no round",
        *("worker/live_worlds", "for rank, settled in having if settled == newest)", "for rank, settled in having)"),
        *("live_sim", "a_node_that_was_away_takes_the_state_of_those_that_went_on"),
    ),
    live_worker(
        "an agent says in which round each state was agreed upon",
        *("agent/workers/parking", "        return self._parked.get(pid, 0)", "        return 1 if pid in self._parked else 0"),
        *("live_sim", "a_node_that_was_away_takes_the_state_of_those_that_went_on"),
    ),
    live_worker(
        "a step that one rank has finished is not lost",
        *("worker/live_worlds", "    best = max(everyone)\n", "    best = max(everyone, key=lambda theirs: theirs[0])\n"),
        *("live_sim", "histories_hold_in_which_a_rule_is_missed[5042]"),
    ),
    simulated(
        "a worker with an older state keeps it until it joins",
        *("live_rounds", "worker.rehearsed or worker.settled", "worker.rehearsed"),
        *("live_sim", "histories_hold_in_which_a_rule_is_missed[73068433]"),
    ),
    mutant(
        "workers that train before the others stop when their node is cut off",
        *("machine", "len(record.members) > 1 and not self.trains_apart", "len(record.members) > 1"),
        *("live_sim", "a_node_that_trains_before_the_others_has_stopped_before_these_go_on_without_it[False]"),
    ),
    mutant(
        "workers that all train together bear that the store is away",
        *("machine", "            self._gathered = True", "            pass"),
        *("live_sim", "it_bears_a_store_that_is_away_for_long_once_all_train_together"),
    ),
    mutant(
        "workers that train before the others are known by what they kept",
        *("machine", "self._kept, self._gathered = event.kept, False", "self._kept, self._gathered = False, False"),
        *("live_sim", "histories_hold_in_which_a_rule_is_missed[71084496]"),
    ),
    simulated(
        "the guard ends workers that train before the others in time",
        *("world", "apart = len(action.record.members) == 1 or self.machine.trains_apart", "apart = len(action.record.members) == 1"),
        *("live_sim", "a_node_that_trains_before_the_others_has_stopped_before_these_go_on_without_it[True]"),
    ),
    simulated(
        "a state that has not come whole is none",
        *("live_rounds", "worker.state, worker.settled, worker.steps = None, 0, 0", "worker.state, worker.steps = None, 0"),
        *("live_sim", "a_state_that_did_not_come_whole_begins_no_round"),
    ),
)


@each(MUTANTS)
def test_a_rule_that_is_taken_out_is_missed(copy: Path, one: Mutant) -> None:
    assert unnoticed(copy, one) == ""


def test_as_long_as_no_rule_is_taken_out_the_same_tests_pass(copy: Path) -> None:
    assert failing(copy, MUTANTS) == ""

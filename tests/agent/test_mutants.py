"""Rules of the agent about forked workers, memory, health port, termination message and death notices.

As in tests/rendezvous/test_mutants.py, a test notices each rule that is taken out.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.mutants import Mutant, copy, each, failing, mutants_in, unnoticed

__all__ = ["copy"]  # the fixture


mutant = mutants_in("elastirun/agent", "tests/agent")
of_rendezvous = mutants_in("elastirun/rendezvous", "tests/rendezvous")
of_workers = mutants_in("elastirun", "tests/agent")
of_jobs = mutants_in("elastirun/agent", "tests/system")
of_scripts = mutants_in("elastirun", "tests/system")
EVALUATION = "an_evaluation_as_long_as_twenty_steps_is_no_hang_by_the_learned_limit[10.0]"
CAUSE = "the_worker_that_is_not_where_the_others_wait_is_the_cause"
LIMIT = "memory_is_held_up_to_the_limit_and_a_replaced_image_does_not_count"
STRANGERS = "strangers_neither_hang_nor_fill_the_agent"
SERVED = "self._selector.unregister(connection.socket)\n        if self._is_served(connection):"
DROPPED = "a_module_that_forks_cannot_share_is_dropped_and_the_others_are_learnt"
OTHERS = "other users are not answered"
AGAIN = "            found = yield _put_if(key, found, value)\n"
MOVED = "            store = self._open_standby(at)\n        else:\n            store = self._open_or_search()\n"
MUTANTS = (
    mutant(
        "a line that is only begun is not shown between lines of others",
        *("output/round_logs", " or may_tear(lines, raw, now)", ""),
        *("logs", "the_beginning_of_a_line_is_not_shown_between_lines_of_others"),
    ),
    mutant(
        "nobody waits for ever for the end of a line",
        *("output/lines", "now < line.begun + PARTIAL_LINE_LIMIT and", "True and"),
        *("lines", "a_line_waits_longer_for_its_end_while_others_write"),
    ),
    mutant(
        "a worker that goes on keeps the file that it shares",
        *("output/round_logs", "            earlier._shared.difference_update(worker.shared_files)\n", ""),
        *("logs", "a_worker_that_goes_on_keeps_the_file_that_filters_fill_and_its_end_closes_it"),
    ),
    mutant(
        "a shared file is closed with the last worker that goes on",
        *("output/round_logs", "            self._shared.update(worker.shared_files)\n", ""),
        *("logs", "a_worker_that_goes_on_keeps_the_file_that_filters_fill_and_its_end_closes_it"),
    ),
    mutant(
        "a closed file writes nowhere",
        *("output/log_files", "        if self._fd < 0:\n            return\n", ""),
        *("lines", "a_closed_file_writes_into_no_file_that_gets_its_number"),
    ),
    mutant(
        "the disk's thread goes on after an operation that raises",
        *("output/disk", "except Exception as error:  # all later", "except ZeroDivisionError as error:  # all later"),
        *("disk", "an_operation_that_raises_is_said_and_the_next_one_runs"),
    ),
    mutant(
        "a close that fails keeps no other file open",
        *("output/log_files", "in opened.values():\n        with suppress(OSError):", "in opened.values():\n        if True:"),
        *("disk", "a_close_that_fails_keeps_no_other_file_open"),
    ),
    mutant(
        "lines that no filter finds do not reach the disk",
        *("output/lines", "for needle in self._needles)]):", "for needle in self._needles)] or [b'']):"),
        *("lines", "lines_that_no_filter_finds_do_not_reach_the_disk"),
    ),
    of_jobs(
        "a newcomer is seen while it imports",
        *("agent", "and not self._forks.nearly_loaded and", "and"),
        *("preload", "a_newcomer_is_seen_while_it_imports_and_the_others_train_on_until_it_is_done"),
    ),
    of_jobs(
        "workers that need not import find their store at once",
        *("agent", "                torch_class.import_ahead()", "                pass"),
        *("preload", "the_store_of_the_workers_can_be_served_at_once_when_their_modules_are_imported"),
    ),
    of_jobs(
        "a newcomer ends no round while it imports",
        *("agent", "prepares = self._forks.loading", "prepares = False"),
        *("preload", "a_newcomer_is_seen_while_it_imports_and_the_others_train_on_until_it_is_done"),
    ),
    mutant(
        "a fork server that cannot be started leaves no descriptor open",
        *("processes/preload/parked_forks", "            ours.close()\n            raise\n", "            raise\n"),
        *("parked_forks", "where_no_server_can_be_started_it_is_tried_again[a process]"),
    ),
    mutant(
        "a node joins early only where a part of torch is missing",
        *("processes/preload/forkserver", "if name == modules[-1] and name in PARTS:", "if name == modules[-1]:"),
        *("parked_forks", "that_only_a_part_of_torch_is_missing_is_told"),
    ),
    mutant(
        "a node joins early only where torch was imported soon",
        *("processes/preload/parked_forks", "self.nearly_loaded = clock.now() < self.began + NEARLY_WITHIN", "self.nearly_loaded = True"),
        *("parked_forks", "that_only_a_part_of_torch_is_missing_is_told"),
    ),
    # elastirun status
    mutant(
        "of two stores with one job the higher term counts",
        *("status/reader", "if sight.job not in best or best[sight.job].newness < sight.newness:", "if True:"),
        *("status_reader", "of_two_stores_the_one_with_the_higher_term_counts"),
    ),
    mutant(
        "a store that has moved is followed",
        *("status/reader", "                return moved\n", "                pass\n"),
        *("status_reader", "a_store_that_has_moved_is_followed"),
    ),
    mutant(
        "an earlier store of a job is left for the one in use",
        *("status/reader", "if record is not None and record.moved is not None:", "if record and record.moved and not record.round:"),
        *("status_reader", "an_earlier_store_whose_host_was_cut_off_is_left"),
    ),
    mutant(
        "a store in use is not left for where it was once",
        *("status/reader", "if moved is not None and (record is None or record.round == 0):", "if moved is not None:"),
        *("status_reader", "a_store_that_says_where_it_was_once_and_where_it_is_now"),
    ),
    mutant(
        "a store that has moved is that of a node",
        *("status/reader", "if self._at.owner and store.get([OWNER])", "if False and store.get([OWNER])"),
        *("status_reader", "the_store_at_the_place_must_be_that_nodes"),
    ),
    mutant(
        "a record that is replaced is read again",
        *("status/reader", "            if not left:\n", "            if True:\n"),
        *("status_reader", "a_record_that_is_replaced_while_it_is_read_is_read_again"),
    ),
    mutant(
        "stores that are down are not waited for",
        *("status/reader", "until = min(until, clock.now() + later) if answer.sights else until", "pass"),
        *("status_reader", "stores_that_do_not_answer_delay_no_answer_and_are_named_when_there_is_none"),
    ),
    mutant(
        "a store that has not finished its answer is named",
        *("status/reader", '        yield _Answer(problems=[f"{name}: no complete', '        _Answer(problems=[f"{name}: no complete'),
        *("status_reader", "a_store_that_has_not_finished_its_answer_is_named"),
    ),
    mutant(
        "who was not waited for is no problem",
        *("status/reader", "    if until == limit:\n", "    if True:\n"),
        *("status_reader", "stores_that_do_not_answer_delay_no_answer_and_are_named_when_there_is_none"),
    ),
    mutant(
        "a status keeps no connection of a job that has ended",
        *("status/reader", "        self._drop_unused()\n", ""),
        *("status_reader", "nothing_is_kept_of_a_job_that_has_ended"),
    ),
    mutant(
        "a status closes no connection that a thread uses",
        *("status/reader", "source.look < self._looks and not source.users", "source.look < self._looks"),
        *("status_reader", "nothing_is_kept_of_a_job_that_has_ended"),
    ),
    mutant(
        "a status keeps no rows of a job that has ended",
        *("status/reader", "for key, rows in self._watched.items() if key in shown", "for key, rows in self._watched.items()"),
        *("status_reader", "nothing_is_kept_of_a_job_that_has_ended"),
    ),
    mutant(
        "a status keeps its connections",
        *("status/reader", "            if self._store is None:\n", "            if True:\n"),
        *("status_reader", "one_connection_serves_all_looks_unless_it_is_lost"),
    ),
    mutant(
        "an agent of another user is not asked for its store",
        *("status/own_agents", "found.st_uid == os.geteuid() and", "True and"),
        *("own_agents", "the_folder_of_the_socket_must_be_ours_alone"),
    ),
    mutant(
        "an agent whose folder others can write to is not asked for its store",
        *("status/own_agents", "and not found.st_mode & 0o022", ""),
        *("own_agents", "the_folder_of_the_socket_must_be_ours_alone"),
    ),
    mutant(
        "an agent says nothing of jobs that meet elsewhere",
        *("status/reader", "(names and not _have_common_place(names, agent.endpoints))", "False"),
        *("status_reader", "an_agent_leads_to_the_store_of_its_job"),
    ),
    mutant(
        "an endpoint may be spelled in two ways",
        *("status/reader", "return bool(places(ours) & places(theirs))", "return False"),
        *("status_reader", "an_endpoint_may_be_spelled_in_another_way_than_in_the_launch"),
    ),
    mutant(
        "at etcd a row that does not change is no silence",
        *("status/reader", "        if sight.rows_change:\n", "        if True:\n"),
        *("status_reader", "rows_that_do_not_change_between_two_looks_are_silent_but_at_etcd_a_lease_is_renewed"),
    ),
    mutant(
        "two agents whose jobs share a store are both heard",
        *("status/reader", "acquire(timeout=ASK_LIMIT / 2)", "acquire(blocking=False)"),
        *("status_reader", "two_agents_whose_jobs_share_a_store_are_asked_one_after_the_other"),
    ),
    mutant(
        "steps are shown with the job of their agent",
        *("status/reader", "[one for name, one in steps if name == job]", "[one for name, one in steps]"),
        *("status_reader", "an_agent_says_the_steps_of_its_workers_and_which_are_live"),
    ),
    mutant(
        "the host of a store says where it is",
        *("store/endpoint_access", "if at is not None or not self._served:", "if True:"),
        *("standby_stores", "a_status_is_sent_to_the_store_in_use_also_on_its_host"),
    ),
    mutant(
        "a member that has not started is waited for",
        *("status/job_status", "    if missing := _not_started(view):\n", "    if missing := []:\n"),
        *("job_status", "who_is_waited_for_while_a_round_runs"),
    ),
    mutant(
        "a member that is lost is not waited for",
        *("status/job_status", "if not view.is_over(m)]:", "if not view.says_over(m)]:"),
        *("job_status", "who_is_waited_for_between_two_rounds"),
    ),
    mutant(
        "newcomers that are held back are told of",
        *("status/job_status", "return _held(view, high), []", 'return "", []'),
        *("job_status", "newcomers_that_are_held_back_after_early_losses"),
    ),
    mutant(
        "a dry run names the ports of the list",
        *("store/listening", "{''.join(ports)}", ""),
        *("listening", "with_a_list_of_endpoints_the_standby_store_listens_where_newcomers_look"),
    ),
    mutant(
        "the nodes that differ are shown",
        *("status/screen", "(_is_usual(nodes[i], usual), i)", "(i,)"),
        *("job_status", "of_a_large_job_the_nodes_that_differ_are_shown_and_the_others_counted"),
    ),
    mutant(
        "a screen is printable",
        *("status/screen", 'return [clip(f"{title:9} {text}", WIDTH)', 'return [(f"{title:9} {text}")'),
        *("job_status", "whatever_the_records_hold_the_screen_is_printable_and_no_wider"),
    ),
    mutant(
        "only memory of a fixed size is held",
        *("workers/checkpoint_memory", "linux.F_GET_SEALS) & _SEALS == _SEALS", "linux.F_GET_SEALS) & _SEALS != 0"),
        *("checkpoint_memory", "what_is_refused_is_refused_with_a_reason[a-2-of a fixed size]"),
    ),
    mutant(
        "memory is limited",
        *("workers/checkpoint_memory", "if before + size > self._limit:", "if size > self._limit:"),
        *("checkpoint_memory", LIMIT),
    ),
    mutant(
        "what is replaced does not count",
        *("workers/checkpoint_memory", "self.size - (os.fstat(old).st_size if old is not None else 0)", "self.size"),
        *("checkpoint_memory", LIMIT),
    ),
    mutant(
        "people are told once",
        *("workers/checkpoint_memory", "            self._full = True\n", ""),
        *("checkpoint_memory", LIMIT),
    ),
    mutant(
        "the number of images is limited",
        *("workers/checkpoint_memory", "if old is None and len(self._held) >= self._most:", "if False:"),
        *("checkpoint_memory", "the_number_of_images_is_limited"),
    ),
    mutant(
        "what is replaced is let go",
        *("workers/checkpoint_memory", "        self._drop(name)\n", ""),
        *("checkpoint_memory", "what_is_put_is_found_again_under_its_name"),
    ),
    mutant(
        "what is refused is closed",
        *(
            "workers/checkpoint_memory",
            "                close_aside(fd)\n            return why",
            "                pass\n            return why",
        ),
        *("checkpoint_memory", "what_a_client_brings_is_closed_with_it"),
    ),
    mutant(
        "nobody waits for a descriptor to close",
        *("workers/local_socket", "threading.Thread(target=os.close, args=(fd,), daemon=True).start()", "os.close(fd)"),
        *("checkpoint_memory", "a_descriptor_that_takes_for_ever_to_close_does_not_hold_the_agent_up"),
    ),
    mutant(
        "a client brings one descriptor",
        *("workers/local_socket", "client.lost_fds = client.lost_fds or bool(flags & socket.MSG_CTRUNC)", "pass"),
        *("checkpoint_memory", STRANGERS),
    ),
    mutant(
        "what a client has brought is closed with it",
        *("workers/local_socket", "            close_aside(fd)\n\n    def close", "            pass\n\n    def close"),
        *("checkpoint_memory", "what_a_client_brings_is_closed_with_it"),
    ),
    of_workers(
        "a live worker speaks to no other user",
        *("worker/live_connection", "if peer_of(self._socket)[1] != os.geteuid():", "if False:"),
        *("live_workers", "a_worker_speaks_to_no_other_user"),
    ),
    mutant(
        "the link to the newest run is in a folder of ours",
        *("output/log_files", "os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC", "os.O_DIRECTORY | os.O_CLOEXEC"),
        *("logs", "each_node_has_a_link_to_its_newest_run_where_no_glob_follows"),
    ),
    mutant(
        OTHERS,
        *("workers/local_socket", "if peer_of(connection)[1] != os.geteuid():", "if False:"),
        *("checkpoint_memory", "another_user_is_not_answered"),
    ),
    mutant(
        "an event waits until the amount has settled",
        *("workers/checkpoint_memory", 'clock.now() + SETTLE\n        return ""', 'clock.now()\n        return ""'),
        *("checkpoint_memory", "events_tell_the_amount_when_it_has_settled"),
    ),
    mutant(
        "a loop that stands still is told",
        *("status/http_port", "is Phase.WAITING:\n                since", "is None:\n                since"),
        *("http_port", "a_loop_that_stands_still_is_503_and_answers_again_when_it_goes_on"),
    ),
    mutant(
        "a standstill is counted from the first question",
        *("status/http_port", "now - (self._snapshots.asked_at or connection.asked_at)", "now - connection.asked_at"),
        *("http_port", "how_long_it_has_stood_still_counts_from_the_first_question"),
    ),
    mutant(
        "an answer is no older than its request",
        *("status/http_port", "newest[0] >= connection.asked_at - FRESH", "True"),
        *("http_port", "an_answer_is_no_older_than_the_request"),
    ),
    mutant(
        "requests share a snapshot",
        *("status/http_port", SERVED, SERVED.replace("self._is_served(connection)", "False")),
        *("http_port", "requests_that_wait_together_cost_one_snapshot"),
    ),
    mutant(
        "nobody wakes while nobody asks",
        *("status/http_port", "- clock.now()) if times else None", "- clock.now()) if times else 0.05"),
        *("http_port", "nobody_wakes_while_nobody_asks"),
    ),
    mutant(
        "a snapshot with a bug does not end the agent",
        *("status/http_port", "        except Exception as error:  # training", "        except ValueError as error:  # training"),
        *("http_port", "a_bug_of_ours_is_500_and_the_port_goes_on[/a]"),
    ),
    mutant(
        "a page with a bug does not end the port",
        *("status/http_port", "Exception as error:\n            return text", "ValueError as error:\n            return text"),
        *("http_port", "a_bug_of_ours_is_500_and_the_port_goes_on[/b]"),
    ),
    mutant(
        "a request has a time limit",
        *("status/http_port", "if now >= connection.due]", "if now >= connection.due and connection.request]"),
        *("http_port", "a_client_that_sends_half_of_it_is_told_so_and_holds_nobody_up"),
    ),
    mutant(
        "the time limit is for the whole request",
        *("status/http_port", "connection.received += data\n", "connection.received += data\n        connection.due += READ_LIMIT\n"),
        *("http_port", "who_sends_bytes_for_ever_is_not_waited_for"),
    ),
    mutant(
        "headers are limited",
        *("status/http_port", "if too_long else None\n", "if False else None\n"),
        *("http_port", "a_request_is_understood_or_refused"),
    ),
    mutant(
        "connections are limited",
        *("status/http_port", "if len(self._connections) >= MAX_CONNECTIONS:", "if False:"),
        *("http_port", "many_idle_connections_leave_room_for_one_that_asks"),
    ),
    mutant(
        "who waits for the loop is not the one that is dropped",
        *("status/http_port", "key=lambda other: other.phase is Phase.WAITING)", "key=lambda other: 0)"),
        *("http_port", "a_request_that_waits_for_the_loop_outlives_newer_idle_connections"),
    ),
    mutant(
        "the rate of connections is limited",
        *("status/http_port", "if self._accepted >= MAX_RATE:", "if False:"),
        *("http_port", "the_rate_of_connections_is_limited"),
    ),
    mutant(
        "without a free descriptor the port pauses",
        *("status/http_port", "                self._pause(now + RETRY)\n", ""),
        *("http_port", "without_a_free_descriptor_it_tries_again_later_and_does_not_spin"),
    ),
    mutant(
        "an answer that is not taken has a time limit",
        *("status/http_port", "Phase.WRITING, clock.now() + WRITE_LIMIT", "Phase.WRITING, clock.now() + 1000.0"),
        *("http_port", "a_client_that_does_not_read_is_dropped"),
    ),
    mutant(
        "a node that waits is healthy and not ready",
        *("status/health", "text(HTTPStatus.OK if snapshot.state == RUNNING else", "text(HTTPStatus.OK if snapshot.state != STOPPING else"),
        *("health", "an_agent_is_healthy_in_each_state_and_ready_when_a_round_runs"),
    ),
    mutant(
        "a message fits",
        *("termination_log", "len(line) - MAX_BYTES) // 6]", "len(line) - MAX_BYTES) * 2]"),
        *("termination_log", "it_is_one_line_of_json_that_fits_and_begins_with_what_matters"),
    ),
    mutant(
        "a file that hangs does not hold the end up",
        *("termination_log", "thread.join(LIMIT)", "thread.join(4)"),
        *("termination_log", "a_file_that_hangs_delays_the_end_by_the_limit"),
    ),
    mutant(
        "half a message is none",
        *("termination_log", "            file.truncate(0)  # half", "            pass  # half"),
        *("termination_log", "a_file_that_takes_half_of_it_gets_nothing"),
    ),
    mutant(
        "a launcher below an agent writes no message",
        *("termination_log", "if environ.get(marks.VARIABLE):", "if False:"),
        *("termination_log", "it_is_written_in_a_pod_or_where_told_and_not_below_another_agent"),
    ),
    mutant(
        "a worker's own exit code is no verdict on its node",
        *("ending", "if code == ExitCode.SICK and (self.sick or", "if code == ExitCode.SICK and (True or"),
        *("termination_log", "a_workers_own_code_is_no_verdict_on_this_node"),
    ),
    mutant(
        "forks draw numbers of their own",
        *("processes/preload/forkserver", 'sys.modules["numpy.random"].seed()', "pass"),
        *("parked_forks", "every_fork_draws_other_numbers"),
    ),
    mutant(
        "no script runs in a fork and executed as well",
        *("processes/preload/forkserver", "if not job.recv(1):", "if False:"),
        *("parked_forks", "a_fork_that_answers_when_the_agent_waits_no_longer_runs_nothing"),
    ),
    mutant(
        "a fork with work takes signals",
        *("processes/preload/forkserver", "    for signum, handler in handlers.items():\n", "    for signum, handler in ():\n"),
        *("parked_forks", "signals_are_ignored_without_work_and_none_is_lost_afterwards"),
    ),
    mutant(
        "what waits ignores signals",
        *("processes/preload/forkserver", "stopping = (SIGTERM, ", "stopping = ("),
        *("parked_forks", "signals_are_ignored_without_work_and_none_is_lost_afterwards"),
    ),
    mutant(
        "a worker with another environment is executed",
        *("processes/preload/parked_forks", "return self._env == server.env", "return True"),
        *("parked_forks", "the_rounds_own_names_reach_the_fork_and_nothing_else_may_differ"),
    ),
    mutant(
        "modules beside the script come first",
        *("processes/preload/forkserver", "sorted(names & names_in(folder))", "sorted(set())"),
        *("parked_forks", "a_script_that_a_fork_would_run_otherwise_is_executed[a module of the same name]"),
    ),
    mutant(
        "tracebacks are those of the script",
        *("processes/preload/forkserver", "hook(kind, error.with_traceback(rest), rest)", "hook(kind, error, traceback)"),
        *("parked_forks", "an_error_is_shown_without_our_frame"),
    ),
    mutant(
        "what reads its rank at import is not imported for all",
        *("processes/preload/forkserver", "read.update({name} & ROUND_NAMES)", "read.update(set())"),
        *("parked_forks", "a_module_that_reads_a_variable_of_its_rank_is_left_out"),
    ),
    mutant(
        "imports are not held up by the collection of garbage",
        *("processes/preload/forkserver", "    gc.set_threshold(RARELY)  #", "    pass  #"),
        *("parked_forks", "no_garbage_is_collected_while_modules_are_imported_and_as_always_in_forks"),
    ),
    mutant(
        "what a module has chosen for the collector stays",
        *("processes/preload/forkserver", "thresholds[0] * (first // RARELY), *others)", "*thresholds)"),
        *("parked_forks", "no_garbage_is_collected_while_modules_are_imported_and_as_always_in_forks"),
    ),
    mutant(
        "a process with threads is not forked",
        *("processes/preload/forkserver", '/proc/self/task"))) > 1:', '/proc/self/task"))) > 100:'),
        *("parked_forks", "a_module_that_leaves_something_behind_makes_all_workers_executed[a thread]"),
    ),
    mutant(
        "a process that a module has started is not shared",
        *("processes/preload/forkserver", "    if children():\n", "    if False:\n"),
        *("parked_forks", "a_module_that_leaves_something_behind_makes_all_workers_executed[a process]"),
    ),
    mutant(
        "a process that has ended is no obstacle",
        *("processes/preload/forkserver", ' and state not in b"ZX"', ""),
        *("parked_forks", "a_process_that_a_module_has_started_and_that_has_ended_is_no_obstacle"),
    ),
    mutant(
        "modules see the command line of the worker",
        *("processes/preload/forkserver", 'sys.argv[:] = ["-m", *command[2:]]', '_ = ["-m", *command[2:]]'),
        *("parked_forks", "a_module_sees_the_command_line_of_the_worker"),
    ),
    mutant(
        "a fork's number may be another process's by now",
        *("processes/preload/parked_forks", "                os.close(pidfd)\n                pidfd = None", "                pass"),
        *("parked_forks", "a_process_that_has_the_number_of_a_fork_that_was_killed_is_left_alone"),
    ),
    mutant(
        "a part of a module is learnt only with the module",
        *("processes/preload/forkserver", "parent and parent not in sys.modules or ", ""),
        *("learnt_modules", "a_part_of_a_module_that_was_left_out_does_not_bring_it_in"),
    ),
    mutant(
        "a trial has a limit",
        *("processes/preload/parked_forks", "if now < server.limit:", "if True:"),
        *("learnt_modules", "a_trial_that_does_not_end_is_given_up"),
    ),
    mutant(
        "a guard that nobody watches is ended",
        *("processes/process_tree", "            if started is not None:\n", "            if False:\n"),
        *("process_tree", "a_guard_that_cannot_be_watched_is_ended_and_kills_nothing"),
    ),
    mutant(
        "a server that comes up too late is ended",
        *("store/worker_store", "with self._lock, listening:", "with listening:"),
        *("worker_store", "a_round_that_ends_while_its_server_comes_up_leaves_none"),
    ),
    mutant(
        "an agent leaves the range of its ports never",
        *("store/worker_store", "return self._listening.dup()", "return net.listen_on(self._address)"),
        *("worker_store", "the_only_port_of_a_range_serves_each_round"),
    ),
    mutant(
        "all ports of the range are tried",
        *("host/net", "if ports is None or error.errno != errno.EADDRINUSE:", "if True:"),
        *("worker_store", "a_port_of_the_range_that_is_taken_is_passed_over"),
    ),
    mutant(
        "what leaves a thread is not learnt",
        *("processes/preload/forkserver", '    if trouble["obstacle"]:\n        why', "    if False:\n        why"),
        *("learnt_modules", f"{DROPPED}[a thread]"),
    ),
    mutant(
        "what has initialised CUDA is not learnt",
        *("processes/preload/forkserver", "os._exit(int(asks()) if asks else 0)", "os._exit(0)"),
        *("learnt_modules", f"{DROPPED}[CUDA]"),
    ),
    mutant(
        "what leaves a descriptor open is not learnt",
        *("processes/preload/forkserver", "if before.get(fd) != path]", "if False]"),
        *("learnt_modules", f"{DROPPED}[a descriptor]"),
    ),
    mutant(
        "what reads its rank at import is not learnt",
        *("processes/preload/forkserver", '    if trouble["reads"]:\n        why', "    if False:\n        why"),
        *("learnt_modules", f"{DROPPED}[a variable of the rank]"),
    ),
    mutant(
        "a module is imported on trial first",
        *("processes/preload/forkserver", "        seconds, why = try_out(name)\n", "        seconds, why = judge(name)\n"),
        *("learnt_modules", f"{DROPPED}[a crash]"),
    ),
    mutant(
        "what is imported quickly is not learnt",
        *("processes/preload/forkserver", "elif seconds >= LEAST_IMPORT:", "else:"),
        *("learnt_modules", "a_module_that_is_imported_quickly_is_not_worth_it"),
    ),
    mutant(
        "what is looked for and not imported is not learnt",
        *("processes/preload/forkserver", " and sys._getframe(2).f_code.co_name == IMPORTS:", ":"),
        *("learnt_modules", "a_module_that_is_looked_for_and_not_imported_is_not_learnt"),
    ),
    mutant(
        "what the script has set a variable for is not learnt",
        *("processes/preload/forkserver", "if digest != environment_digest():", "if False:"),
        *("learnt_modules", "a_module_before_whose_import_the_script_changes_a_variable_is_not_learnt"),
    ),
    mutant(
        "what may come from another folder is not learnt",
        *("processes/preload/forkserver", "if new and sys.path == self._path", "if new"),
        *("learnt_modules", "nothing_is_learnt_of_a_script_that_changes_sys_path"),
    ),
    mutant(
        "modules beside the script are not learnt",
        *("processes/preload/forkserver", ", *names_in(sys.path[0]), own}", ", own}"),
        *("learnt_modules", "the_users_own_modules_are_never_imported_for_the_workers"),
    ),
    mutant(
        "only installed packages are learnt",
        *("processes/preload/forkserver", "or not is_third_party(name):", "or False:"),
        *("learnt_modules", "the_users_own_modules_are_never_imported_for_the_workers"),
    ),
    mutant(
        "no name of a module goes into a socket of the script",
        *("processes/preload/forkserver", " and os.path.samestat(os.fstat(self._job.fileno()), self._socket):", ":"),
        *("learnt_modules", "a_script_that_closes_all_descriptors_gets_no_names_into_its_sockets"),
    ),
    mutant(
        "forks that lack what was learnt are replaced",
        *("processes/preload/parked_forks", "        if learnt:\n", "        if learnt and not self._parked:\n"),
        *("learnt_modules", "what_a_worker_has_imported_the_next_ones_have_from_the_start"),
    ),
    mutant(
        "modules are learnt when the workers train",
        *("processes/preload/parked_forks", "        if now < self._learn_at:\n", "        if False:\n"),
        *("learnt_modules", "what_a_worker_has_imported_the_next_ones_have_from_the_start"),
    ),
    mutant(
        "a fork server that dies is replaced",
        *("processes/preload/parked_forks", "elif lived >= RESTART_AFTER:", "elif False:"),
        *("parked_forks", "a_server_that_dies_is_replaced_and_workers_are_executed_meanwhile"),
    ),
    mutant(
        "a worker that is bound to CPUs is executed",
        *("processes/preload/parked_forks", "if not like_python or spec.cpus is not None:", "if not like_python:"),
        *("parked_forks", "a_worker_that_is_bound_to_cpus_is_executed"),
    ),
    mutant(
        "the sweep after a round spares the fork server",
        *("processes/process_tree", "self._evidence.outside.add(session)", "pass"),
        *("parked_forks", "a_spared_session_is_left_alone_until_it_is_spared_no_longer"),
    ),
    mutant(
        "a number that is free again is spared no longer",
        *("processes/process_tree", "self._evidence.outside.discard(session)", "pass"),
        *("parked_forks", "a_spared_session_is_left_alone_until_it_is_spared_no_longer"),
    ),
    mutant(
        "no worker holds the descriptors of another",
        *("processes/preload/forkserver", "        os.dup2(fd, target)\n        os.close(fd)\n", "        os.dup2(fd, target)\n"),
        *("parked_forks", "no_worker_has_the_descriptors_of_another"),
    ),
    mutant(
        "no traceback of a fork server tells of the agent's death",
        *("processes/preload/forkserver", "    except ConnectionError:", "    except ZeroDivisionError:"),
        *("parked_forks", "a_fork_server_says_nothing_when_the_agent_dies_with_its_report_unread"),
    ),
    mutant(
        "no death notice while the agent lives",
        *("processes/kills", "if not evidence.mark.is_dead():", "if False:"),
        *("guard", "all_has_ended_when_the_agent_and_all_that_its_workers_started_have"),
    ),
    mutant(
        "no death notice before the workers have ended",
        *("processes/kills", "if owned(evidence, table, os.getppid()) or any(", "if any("),
        *("guard", "all_has_ended_when_the_agent_and_all_that_its_workers_started_have"),
    ),
    mutant(
        "no death notice while a dying orphan hides its environment",
        *("processes/kills", "any(map(_hides, orphans(evidence, table, os.getppid())))", "False"),
        *("guard", "an_orphan_without_an_environment_may_be_the_agents"),
    ),
    mutant(
        "no death notice when a process cannot be read",
        *("processes/kills", "table = proc.everything(certain=True)", "table = proc.everything()"),
        *("guard", "what_cannot_be_read_is_no_proof_of_an_end"),
    ),
    mutant(
        "an agent that cannot be read is not dead",
        *("processes/marks", "found = proc.look(self.pid, certain=True)", "found = proc.look(self.pid)"),
        *("guard", "what_cannot_be_read_is_no_proof_of_an_end"),
    ),
    mutant(
        "numbers of another namespace's /proc mean nothing",
        *("processes/proc", 'if pid == "self" and os.readlink("/proc/self") != str(os.getpid()):', "if False:"),
        *("guard", "numbers_of_another_namespace_mean_nothing"),
    ),
    mutant(
        "a guard without threads waits for a store as long as any",
        *("processes/guard", "    signal.setitimer(signal.ITIMER_REAL, timeout)\n", ""),
        *("guard", "a_guard_that_can_start_no_thread_ends_although_the_store_does_not"),
    ),
    mutant(
        "a control group that cannot be read is not empty",
        *("processes/control_group", "return error.errno in (errno.ENOENT, errno.ENODEV)", "return True"),
        *("guard", "what_cannot_be_read_is_no_proof_of_an_end"),
    ),
    mutant(
        "no death notice before the control group is empty",
        *("processes/kills", "if evidence.group and not control_group.is_empty(evidence.group):", "if False:"),
        *("guard", "all_has_ended_when_the_agent_and_all_that_its_workers_started_have"),
    ),
    mutant(
        "a guard has imported what it needs before its agent dies",
        *("processes/guard", "                    prepare_in_thread(each[1:])", "                    pass"),
        *("guard", "what_writes_a_notice_is_imported_before_it_is_needed"),
    ),
    mutant(
        "the guard looks before it writes a death notice",
        *("processes/guard", "if not guard.notice or not has_ended(guard.evidence, END_TIMEOUT):", "if not guard.notice:"),
        *("guard", "no_death_notice_is_written_before_all_has_ended"),
    ),
    mutant(
        "an agent that has left has no death notice",
        *("processes/guard", "if not guard.notice or not", "if not"),
        *("guard", "no_death_notice_is_written_before_all_has_ended"),
    ),
    mutant(
        "why a worker is stopped needs no store",
        *("workers/round_check", "self.stopping if client.line == STOP else", "self.stopping if False else"),
        *("round_check", "who_asks_why_it_is_stopped_is_answered_at_once"),
    ),
    # The store moves when its host has died.
    mutant(
        "no standby store without the option",
        *("store/endpoint_access", "        if self.config.succession:\n", "        if True:\n"),
        *("standby_stores", "an_agent_without_the_option_serves_none"),
    ),
    mutant(
        "a single port is left to the workers' store",
        *("store/standby_store", "if self._served is not None or only_one:", "if self._served is not None:"),
        *("standby_stores", "a_node_with_a_single_port_serves_no_standby_store"),
    ),
    mutant(
        "a later agent's standby store at the same port is not taken for an earlier one's",
        *("store/endpoint_access", "if owner != at.name.encode():", "if False:"),
        *("standby_stores", "the_standby_store_of_a_later_agent_at_the_same_port_is_not_that_of_an_earlier_one"),
    ),
    mutant(
        "a round that ends by a fault is a span with an error",
        *("observe/tracing", "            if not event.planned:", "            if event.planned:"),
        *("tracing", "a_life_with_a_failure_and_a_signal_is_one_trace"),
    ),
    mutant(
        "a collector that does not answer delays no end",
        *("observe/tracing", "self._thread.join(LAST_SPANS)", "self._thread.join()"),
        *("tracing", "the_last_spans_are_not_waited_for_without_end"),
    ),
    mutant(
        "a store that has answered has more time when it is reached again",
        *("store/endpoint_access", "ANSWER_LIMIT if at == self._answered else STANDBY_LIMIT", "STANDBY_LIMIT"),
        *("standby_stores", "a_store_that_has_answered_is_given_more_time_when_it_is_reached_again"),
    ),
    mutant(
        "one standby store for each agent",
        *("store/standby_store", "if self._served is not None or only_one:", "if only_one:"),
        *("standby_stores", "each_agent_serves_an_empty_standby_store_on_its_own_address"),
    ),
    mutant(
        "who serves a standby store knows that it does",
        *("store/endpoint_access", "            return own\n", "            pass\n"),
        *("standby_stores", "each_agent_serves_an_empty_standby_store_on_its_own_address"),
    ),
    mutant(
        "no job is on the list of a standby store",
        *("store/endpoint_access", "            return self._open_standby(at)\n        store = self._open_or_search()\n", MOVED),
        *("standby_stores", "each_agent_serves_an_empty_standby_store_on_its_own_address"),
    ),
    mutant(
        "a member does not ask a store that stands still for its name",
        *("store/endpoint_access", "again=self.newcomer)", "again=True)"),
        *("standby_stores", "a_store_that_stands_still_is_asked_once_and_by_a_newcomer_again[False]"),
    ),
    mutant(
        "the guard is sent to the store in use",
        *("store/store_access", '"owner": at.name} if at else self._for_guard', '"owner": at.name} if False else self._for_guard'),
        *("standby_stores", "the_guard_is_sent_to_the_store_in_use"),
    ),
    mutant(
        "the port of the standby store is told with each new port",
        *("session", "address, worker_store.port, self.access.standby_port)", "address, worker_store.port)"),
        *("session", "the_port_of_the_standby_store_is_told_with_the_address_and_with_each_new_port"),
    ),
    mutant(
        "where the store has moved is said after each answer",
        *("session", "if isinstance(event, Synced):\n            self.access.forward(", "if False:\n            self.access.forward("),
        *("session", "where_the_store_has_moved_is_said_after_each_answer"),
    ),
    mutant(
        "where the job was started is looked at again and again",
        *("store/forwarding", "while not self._closed.wait(FORWARD_EVERY if first else OTHERS_EVERY):", "for _ in range(3):"),
        *("standby_stores", "whatever_else_is_there_does_not_end_the_tries[nobody]"),
    ),
    mutant(
        "a store that cannot be written to does not end the tries",
        *("store/forwarding", "        except StoreError:\n", "        except BlockingIOError:\n"),
        *("standby_stores", "whatever_else_is_there_does_not_end_the_tries[another program]"),
    ),
    mutant(
        "what is found where the job was started is reported once",
        *("store/forwarding", "(record != self._last or record.moved not in (None, place))", "True"),
        *("standby_stores", "a_run_that_has_begun_where_the_job_was_started_is_reported_once"),
    ),
    mutant(
        "standby stores are told at the same time",
        *("processes/death_notice", "            thread.start()\n", "            thread.run()\n"),
        *("standby_stores", "several_stores_are_asked_at_the_same_time"),
    ),
    mutant(
        "a standby store that never finishes its answer is left behind",
        *("processes/death_notice", "thread.join(max(0.0, until - clock.now()))", "thread.join(30.0)"),
        *("standby_stores", "a_store_that_never_finishes_its_answer_is_left_behind"),
    ),
    mutant(
        "standby stores that did not answer are tried again",
        *("processes/death_notice", "return told >= places.keys()", "return bool(told)"),
        *("standby_stores", "stores_that_did_not_answer_are_tried_again"),
    ),
    mutant(
        "a guard that can start no thread tells one store after the other",
        *("processes/death_notice", "            thread.run()\n", "            pass\n"),
        *("standby_stores", "where_no_thread_can_be_started_one_is_told_after_the_other"),
    ),
    mutant(
        "the pipe to the guard grows",
        *("processes/process_tree", "fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, min(2 * size, LARGEST_PIPE))", "pass"),
        *("standby_stores", "the_pipe_to_the_guard_grows_as_far_as_the_kernel_allows"),
    ),
    mutant(
        "a notice that does not fit into the pipe is left out",
        *("processes/process_tree", "self._notice if fits else", "self._notice if True else"),
        *("standby_stores", "a_notice_too_long_for_the_pipe_is_left_out_and_the_guard_stays"),
    ),
    mutant(
        "a guard votes where the store cannot be reached",
        *("processes/death_notice", "        if tell_standbys", "        if not notice.store and tell_standbys"),
        *("standby_stores", "the_vote_of_a_member_is_for_a_store_that_cannot_be_reached"),
    ),
    mutant(
        "a guard votes only where the store cannot be reached",
        *("processes/death_notice", "                return True\n", "                pass\n"),
        *("standby_stores", "the_vote_of_a_member_is_for_a_store_that_cannot_be_reached"),
    ),
    mutant(
        "who hands over ends its store first",
        *("agent", "        self._session.access.end_store()\n        if tell", "        if tell"),
        *("standby_stores", "who_hands_over_ends_its_store_before_it_tells_the_others"),
    ),
    mutant(
        "the guard tells the others where the agent could not",
        *("agent", "        if tell_standbys(notice, set()):\n", "        if tell_standbys(notice, set()) or True:\n"),
        *("standby_stores", "who_hands_over_ends_its_store_before_it_tells_the_others"),
    ),
    of_rendezvous(
        "each exchange is with the store that it names",
        *("wire/exchanges", "        if sync.at != self._connection.at:\n", "        if False:\n"),
        *("store_thread", "each_exchange_is_with_the_store_that_it_names"),
    ),
    of_rendezvous(
        "a connection leads to the store that the exchange names",
        *("store_thread", "self._connect(connection.at)", "self._connect(None)"),
        *("store_thread", "each_exchange_is_with_the_store_that_it_names"),
    ),
    of_rendezvous(
        "a guard creates votes alone",
        *("stores/tcp_plain", "if key.startswith(self._creates) else", "if True else"),
        *("tcp_plain", "it_creates_the_keys_that_it_may_and_replaces_none"),
    ),
    mutant(
        "garbage in the place of a vote is replaced",
        *("../rendezvous/wire/sync", f"{AGAIN}        return found == value", "        return found == value"),
        *("standby_stores", "garbage_where_the_vote_belongs_is_replaced"),
    ),
    mutant(
        "a job whose rounds have begun is not sent elsewhere",
        *("../rendezvous/wire/sync", "spoken_for = written is not None and", "spoken_for = False and"),
        *("standby_stores", "a_store_in_which_a_round_has_formed_is_left_alone"),
    ),
    # Several endpoints.
    mutant(
        "a newcomer asks the other endpoints",
        *(
            "store/endpoint_access",
            "(place := self._search.find((*self._own_stores(), *self._unreached), hosting=False))",
            "(place := None)",
        ),
        *("search", "a_newcomer_is_sent_where_a_standby_store_says[4]"),
    ),
    mutant(
        "who looks for a job knows whose store it asks",
        *("store/discovery", "execute(execute(protocol.here(), store).find_job(), store)", "execute(protocol.find_job(), store)"),
        *("search", "what_is_signed_for_one_standby_store_sends_nobody_from_another_one"),
    ),
    mutant(
        "each word of another run is reported",
        *("store/forwarding", "(record != self._last or record.moved not in (None, place))", "record != self._last"),
        *("standby_stores", "the_word_of_another_run_is_reported_each_time_that_it_stands_there[at another one]"),
    ),
    mutant(
        "who has too few nodes overrules no other word",
        *("store/forwarding", "put_moved(place, job=job, over=over)", "put_moved(place, job=job)"),
        *("standby_stores", "who_has_too_few_nodes_overrules_no_other_word"),
    ),
    mutant(
        "who says where the store is knows whom it tells",
        *("store/forwarding", "execute(here.put_place(place, job, over)", "execute(protocol.put_place(place, job, over)"),
        *("search", "what_is_signed_for_one_standby_store_sends_nobody_from_another_one"),
    ),
    mutant(
        "who was found silent is not asked again",
        *("store/endpoint_access", "(*self._own_stores(), *self._unreached)", "(*self._own_stores(),)"),
        *("search", "who_was_found_silent_is_not_asked_again"),
    ),
    mutant(
        "a member waits for proof",
        *("store/endpoint_access", "            if self.newcomer and (place", "            if (place"),
        *("search", "a_member_looks_nowhere_else"),
    ),
    mutant(
        "a node is a newcomer until it has seen a round",
        *("session", "self.access.newcomer = self.machine.store.round_known[0] == 0", "self.access.newcomer = True"),
        *("session", "a_node_is_a_newcomer_until_it_has_seen_a_round"),
    ),
    mutant(
        "the access knows the id of this node",
        *("session", "        access.me = row.id\n", ""),
        *("session", "the_access_knows_the_standby_store_of_this_node_by_the_id_of_its_row"),
    ),
    mutant(
        "who serves the first endpoint asks the others",
        *("store/endpoint_access", "if store.hosting and self.newcomer and (place", "if False and (place"),
        *("search", "who_serves_the_first_endpoint_says_there_what_the_others_say"),
    ),
    mutant(
        "no job starts in a standby store",
        *("store/endpoint_access", '        if not self._search.several:\n            return ""\n', '        return ""\n'),
        *("search", "a_standby_store_is_not_taken_for_the_one_where_a_job_starts"),
    ),
    mutant(
        "a node that has given up its standby store serves another one",
        *("session", "            self.access.renew_standby()\n", "            pass\n"),
        *("session", "who_gives_up_its_own_standby_store_serves_another_one"),
    ),
    mutant(
        "the next standby store of a node has another port",
        *("store/standby_store", "getsockname()[1] in self._ports:", "getsockname()[1] in ():"),
        *("standby_stores", "a_node_without_another_port_goes_on_without_a_standby_store"),
    ),
    mutant(
        "a node without another port goes on without a standby store",
        *("store/standby_store", "                if self._ports:  # it", "                if False:  # it"),
        *("standby_stores", "a_node_without_another_port_goes_on_without_a_standby_store"),
    ),
    mutant(
        "the own standby store is known by its port",
        *("store/endpoint_access", "(at.id, at.port) == (self.me, self.standby_port) and", "at.id == self.me and"),
        *("standby_stores", "a_node_that_has_given_up_its_standby_store_serves_another_one_at_another_port"),
    ),
    mutant(
        "the port of another standby store is told",
        *("session", " or self.access.standby_port not in (0, self.machine.row.standby)", ""),
        *("session", "who_gives_up_its_own_standby_store_serves_another_one"),
    ),
    mutant(
        "a standby store is where newcomers look",
        *("store/standby_store", "if not self._ports and (found", "if False and (found"),
        *("search", "each_node_of_the_list_serves_its_standby_store_where_newcomers_look"),
    ),
    mutant(
        "no standby store where the job is started",
        *("store/discovery", "if (address, port) != (*first, self._first.port):", "if True:"),
        *("search", "no_standby_store_is_where_the_job_is_started"),
    ),
    mutant(
        "a node that was sent serves a standby store",
        *("store/endpoint_access", "            self._serve_standby()\n            return store\n", "            return store\n"),
        *("search", "a_newcomer_that_was_sent_serves_a_standby_store_as_well"),
    ),
    mutant(
        "a node does not take its own store for that of a dead one",
        *("store/endpoint_access", "self._endpoint.port) and self._is_own(at):", "self._endpoint.port) and False:"),
        *("search", "a_node_that_has_taken_the_port_of_a_dead_one_is_not_taken_for_it"),
    ),
    mutant(
        "a store that the job has left says so in its record",
        *("store/forwarding", "put_place(place, job, over)", "put_place(place)"),
        *("search", "a_store_that_the_job_has_left_sends_a_newcomer_on"),
    ),
    mutant(
        "a round in a store that the job has left is none to go to",
        *("store/discovery", "record.moved is None and (record.round", "(record.round"),
        *("search", "a_store_that_the_job_has_left_sends_a_newcomer_on"),
    ),
    mutant(
        "a round that is found is surer than a word",
        *("store/discovery", "sorted(words.values(), key=lambda word: -word.term)", "words.values()"),
        *("search", "a_newcomer_joins_the_store_in_which_it_finds_a_round"),
    ),
    mutant(
        "a job that is over is not joined",
        *("store/discovery", "goes_on = record.closed is None and bool(record.host)", "goes_on = bool(record.host)"),
        *("search", "a_store_without_a_round_that_can_go_on_is_no_job[record2]"),
    ),
    mutant(
        "each place that is named has its turn",
        *("store/discovery", "place = min(found, key=lambda one: self._sent.index(one) if one in self._sent else -1)", "place = found[0]"),
        *("search", "where_several_places_are_named_each_has_its_turn"),
    ),
    mutant(
        "two orders of the list are found",
        *("store/discovery", "raise StoreRefused(why) if hosting else StoreError(why)", "return None"),
        *("search", "two_orders_of_the_list_are_found"),
    ),
    mutant(
        "the store of an earlier run is not about to begin a job",
        *("store/discovery", "(record.round > 0 or record.closed is not None):", "record.closed is None and record.round > 0:"),
        *("search", "the_store_of_an_earlier_run_stops_no_new_one"),
    ),
    mutant(
        "a name of several machines does not say who serves",
        *("store/discovery", "return len({net.is_own(address) for address in found}) > 1", "return False"),
        *("search", "a_name_of_several_machines_does_not_say_which_of_them_serves"),
    ),
    mutant(
        "a name server that does not know a name any more takes no address away",
        *("store/forwarding", "net.resolve(self._host) or self._known", "net.resolve(self._host)"),
        *("search", "a_name_server_that_is_gone_does_not_keep_a_node_from_being_told"),
    ),
    mutant(
        "a slow name server holds up nobody",
        *("store/forwarding", "                self._thread.start()\n", "                self._thread.run()\n"),
        *("search", "a_name_server_that_is_gone_does_not_keep_a_node_from_being_told"),
    ),
    mutant(
        "a round does not hold where the others may have gone on without this node",
        *("workers/round_check", '"yes" if not replaced() and still_holds(', '"yes" if still_holds('),
        *("round_check", "where_the_others_may_have_gone_on_the_answer_is_no"),
    ),
    mutant(
        "a round whose job has moved does not hold",
        *("workers/round_check", " or record.moved is not None:", ":"),
        *("round_check", "a_round_whose_job_has_moved_does_not_hold"),
    ),
    of_jobs(
        "who has come back stays for another job where a moved one was started",
        *("agent", "if self._session.access.serves_jobs and", "if self._session.machine.store.place is None and"),
        *("succession", "the_node_that_comes_back_where_a_moved_job_was_started_stays_for_another_job_there"),
    ),
    mutant(
        "a silent host delays a job that has moved for a second only",
        *("store/endpoint_access", "limit = STANDBY_LIMIT if self.has_moved else ANSWER_LIMIT", "limit = ANSWER_LIMIT"),
        *("search", "who_looks_where_a_moved_job_was_started_waits_a_second_at_most"),
    ),
    of_workers(
        "a Python that was built for an old C library gets its system calls",
        *("linux", "PIDFD_SEND_SIGNAL, PIDFD_OPEN = 424, 434", "PIDFD_SEND_SIGNAL, PIDFD_OPEN = 434, 424"),
        *("linux", "a_process_is_watched_and_signalled"),
    ),
    mutant(
        "a silent endpoint delays no other",
        *("store/at_once", "            thread.start()\n", "            thread.run()\n"),
        *("search", "several_are_asked_at_the_same_time"),
    ),
    mutant(
        "who never answers is left behind",
        *("store/at_once", "results.get(timeout=max(0.001, until - clock.now()))", "results.get()"),
        *("search", "one_that_never_answers_is_left_behind[items0]"),
    ),
    mutant(
        "the only one that never answers is left behind, too",
        *("store/at_once", "    until = clock.now() + limit\n", "    until = clock.now() + (limit if items[1:] else 1e6)\n"),
        *("status_reader", "a_name_server_that_does_not_answer_holds_nobody_up"),
    ),
    mutant(
        "a slow name server is waited for where there is one name",
        *("store/discovery", "        if len(hosts) > 1:\n", "        if True:\n"),
        *("search", "a_name_server_that_is_slow_is_waited_for_where_there_is_one_name"),
    ),
    mutant(
        "all endpoints are told where the store has moved",
        *("store/endpoint_access", "Forwarding((self._endpoint, *self.config.other_endpoints),", "Forwarding((self._endpoint,),"),
        *("search", "a_thread_that_cannot_start_is_told_once_and_tried_again"),
    ),
    mutant(
        "the store in use is not told where it is",
        *("store/forwarding", " if first or Endpoint(a, endpoint.port) != self._own]", "]"),
        *("search", "all_other_endpoints_are_told"),
    ),
    mutant(
        "tries that are of no use become rarer",
        *("store/forwarding", "SLOWER ** min(self._useless, 100)", "1.0"),
        *("search", "tries_that_are_of_no_use_become_rarer[True-1.0]"),
    ),
    mutant(
        "news is told at once",
        *("store/forwarding", "(place != self._place or clock.now() >= self._due)", "clock.now() >= self._due"),
        *("search", "tries_that_are_of_no_use_become_rarer[False-5.0]"),
    ),
    mutant(
        "an answer makes the tries frequent again",
        *("store/forwarding", "            self._useless = 0\n        except", "        except"),
        *("search", "an_answer_makes_the_tries_frequent_again"),
    ),
    mutant(
        "a store is asked over one connection",
        *("store/forwarding", "            if self._store is None:\n", "            if True:\n"),
        *("search", "a_store_that_was_told_is_asked_over_the_same_connection"),
    ),
    mutant(
        "a thread that cannot start is told once",
        *("store/forwarding", "said, self._said = self._said, True", "said = False"),
        *("search", "a_thread_that_cannot_start_is_told_once_and_tried_again"),
    ),
    mutant(
        "a thread that cannot start is tried again",
        *("store/forwarding", "said, self._said = self._said, True", "said, self._said, self._without_thread = self._said, True, []"),
        *("search", "a_thread_that_cannot_start_is_told_once_and_tried_again"),
    ),
    mutant(
        "a first round waits for the rarest tries",
        *("../rendezvous/formation", "LOOK_BACK = 2.0", "LOOK_BACK = 1.0"),
        *("search", "a_first_round_waits_longer_than_the_rarest_tries"),
    ),
    mutant(
        "one worker that makes steps is enough",
        *("hangs/detection", "if any(age <= max(", "if all(age <= max("),
        *("hangs", "a_hang_is_a_time_without_a_step_of_any_worker"),
    ),
    mutant(
        "nothing counts before the first step",
        *(
            "hangs/detection",
            "if self._first_step and now - self._began > self._first_step",
            "if now - self._began > (self._first_step or 9.0)",
        ),
        *("hangs", "before_its_first_step_a_worker_does_not_hang"),
    ),
    mutant(
        "a limit is learned first",
        "hangs/detection",
        "LEAST_STEPS = 30",
        "LEAST_STEPS = 1",
        "hangs",
        "a_learned_limit_needs_some_dozen_steps",
    ),
    mutant("an evaluation is no hang", "hangs/detection", "PAUSE_FACTOR = 30, 2", "PAUSE_FACTOR = 3, 2", "hangs", EVALUATION),
    mutant(
        "a pause may be longer than the last one",
        *("hangs/detection", "PAUSE_FACTOR = 30, 2", "PAUSE_FACTOR = 30, 1"),
        *("hangs", "a_pause_may_be_twice_as_long_as_the_longest_before_also_in_another_round"),
    ),
    mutant(
        "a standstill of the agent is no hang",
        *("hangs/detection", "            self.excuse(now)\n", "            pass\n"),
        *("hangs", "the_time_of_a_standstill_does_not_count"),
    ),
    mutant(
        "a worker gets the time that it asks for",
        *("hangs/detection", "max(limit, _within(pages[local_rank]))", "limit"),
        *("hangs", "a_worker_may_ask_for_time"),
    ),
    mutant(
        "a stopped worker is the cause",
        *("hangs/causes", "[worker for worker in workers if worker.stopped]", "[]"),
        *("hang_causes", f"{CAUSE}[workers0-named0-0]"),
    ),
    mutant(
        "a worker in a collective is not behind",
        *("hangs/causes", "0 < worker.steps < most and not worker.waits_for_peers", "0 < worker.steps < most"),
        *("hang_causes", f"{CAUSE}[workers5-named5-5]"),
    ),
    mutant(
        "a worker that is not where most are is the cause",
        *("hangs/causes", "if count * 2 > len(workers)", "if False"),
        *("hang_causes", f"{CAUSE}[workers10-named10-3]"),
    ),
    mutant(
        "a call of the script inside of a collective is no collective",
        *(
            "hangs/causes",
            "for file, _, _ in stack if not _PASSED.search(file)",
            "for file, _, _ in stack if _WAITS_FOR_PEERS.search(file)",
        ),
        *("hang_causes", "the_innermost_frame_that_tells_says_whether_a_worker_waits_for_others[stack5-False]"),
    ),
    mutant(
        "the verdict needs all reports",
        *("hangs/reports", "if len(there) == len(found):", "if len(there) > 1:"),
        *("hang_reports", "reports_of_strangers_do_not_count"),
    ),
    mutant(
        "a report is about its round",
        *("hangs/reports", " and report.fence == self._own.fence", ""),
        *("hang_reports", "without_the_reports_of_all_nodes_there_is_no_verdict"),
    ),
    mutant(
        "a verdict is about the reports that it names",
        *("hangs/reports", "if found and self._own.id in found.reports else", "if found else"),
        *("hang_reports", "what_was_said_of_an_earlier_hang_of_the_round_does_not_count"),
    ),
    mutant(
        "a debugger for Python is no hang",
        *("hangs/watch", "if causes.in_debugger(one.stack)}", "if one.stopped}"),
        *("hangs", "a_program_in_pythons_debugger_does_not_hang"),
    ),
    mutant(
        "a worker that hangs has failed before those that its end makes fail",
        *("failures/tracker", "end.after - seconds", "end.after"),
        *("hangs", "the_failure_of_a_worker_that_hung_is_reported_before_its_end_which_adds_nothing"),
    ),
    mutant(
        "a node waits for the one with the cause",
        *("hangs/watch", "self._act_at = now + self._verdict.hold", "self._act_at = now"),
        *("hangs", "the_verdict_of_all_nodes_takes_the_place_of_this_nodes_own[ranks1]"),
    ),
    mutant(
        "no rank is missed where nothing tells the ranks apart",
        *("hangs/causes", "[] if verdict.how in (UNCLEAR, WAITING) else ", ""),
        *("hang_causes", "who_is_not_where_failed_peers_have_waited_is_missed[running1-victims1-named1]"),
    ),
    mutant(
        "no rank is missed whose stack is not known",
        *("hangs/causes", "[worker for worker in running if worker.stack or worker.stopped]", "list(running)"),
        *("hang_causes", "who_is_not_where_failed_peers_have_waited_is_missed[running3-victims3-named3]"),
    ),
    mutant(
        "a signal without a handler is not sent",
        *("hangs/stacks", " and process.catches(page.signal):", ":"),
        *("hangs", "a_signal_that_the_worker_does_not_catch_is_not_sent"),
    ),
    mutant(
        "a step ends the alarm",
        *("hangs/watch", "                self._forget()\n            elif", "            elif"),
        *("hangs", "a_step_in_the_meantime_ends_the_alarm"),
    ),
    mutant(
        "a page keeps its size",
        *("observe/progress_pages", "                fcntl.fcntl(fd, linux.F_ADD_SEALS, _FIXED_SIZE)\n", ""),
        *("hangs", "nobody_can_make_a_page_smaller_so_that_another_reads_beyond_its_end"),
    ),
    mutant(
        "the end of a worker that hung is no second failure",
        *("failures/tracker", "        if end.local_rank in self.hung:\n            return\n", ""),
        *("hangs", "the_failure_of_a_worker_that_hung_is_reported_before_its_end_which_adds_nothing"),
    ),
    mutant(
        "time after the last step is lost with the round",
        *("observe/account", "            until = min(now, found.last)\n", "            pass\n"),
        *("account", "training_ends_with_the_last_step_and_what_follows_is_charged_to_the_cause"),
    ),
    mutant(
        "the start after a round that ended early is charged to its cause",
        *("observe/account", "return cause if kind in (Spent.STARTING, Spent.REPEATED)", "return cause if kind in (Spent.REPEATED,)"),
        *("account", "training_ends_with_the_last_step_and_what_follows_is_charged_to_the_cause"),
    ),
    mutant(
        "the round record names the cause",
        *("observe/account", "self._cause, self._certain = (cause, True) if certain else (self._cause, False)", "pass"),
        *("account", "the_cause_is_that_of_the_round_record_also_when_a_worker_failed_first"),
    ),
    mutant(
        "a round ends once however often its record changes",
        *("observe/accounting", "again=again", "again=False"),
        *("account", "a_round_whose_record_names_more_lost_nodes_later_has_ended_once"),
    ),
    mutant(
        "an earlier round says nothing about the end of the last one",
        *("observe/accounting", " or record.round < self._over", ""),
        *("account", "the_next_round_ends_once_more"),
    ),
    mutant(
        "steps up to the farthest are done again",
        *("observe/account", "        if self.farthest and found.at:\n", "        if False:\n"),
        *("account", "steps_up_to_the_farthest_of_earlier_rounds_are_done_again"),
    ),
    mutant(
        "the farthest step is that of all rounds",
        *("observe/account", "max(self.farthest, found.at), None", "found.at, None"),
        *("account", "whatever_rounds_reached_the_farthest_counts"),
    ),
    mutant(
        "what is not known is null",
        *("observe/account", "{} if self._numbered else {Spent.REPEATED.value: None}", "{}"),
        *("account", "without_stamps_a_start_ends_with_the_processes_and_what_is_not_known_is_null"),
    ),
    mutant(
        "a script that stamps starts until its first step",
        *("observe/account", "until if self._stamped or one.started is None else", "until if one.started is None else"),
        *("account", "until_the_first_step_of_a_script_that_stamps_all_is_starting"),
    ),
    mutant(
        "a round without a step was starting",
        *("observe/account", "for cause, value in self._unstamped.items() if self._stamped else ():", "for cause, value in ():"),
        *("account", "a_round_that_ended_before_its_first_step_was_starting_as_later_rounds_show"),
    ),
    mutant(
        "no stamp makes a part negative or too long",
        *("observe/account", "first = min(max(one.began, first), until)", "first = max(one.began, first)"),
        *("account", "whatever_happens_and_is_stamped_the_parts_add_up"),
    ),
    mutant(
        "the decision of the job is no restart",
        *("observe/account", '            self._kind, self._cause = Spent.FINISHING, ""\n', "            pass\n"),
        *("account", "the_end_of_a_job_is_no_restart_but_a_wait_in_vain_is"),
    ),
    of_workers(
        "a worker stamps when it has come to the farthest step",
        *("progress", "number >= words[FARTHEST]", "number > words[FARTHEST]"),
        *("account", "a_worker_says_when_it_has_come_to_the_farthest_step_of_earlier_rounds"),
    ),
    of_workers(
        "the first step keeps its time",
        *("progress", "    if not _steps:\n        words[FIRST] = now", "    if True:\n        words[FIRST] = now"),
        *("account", "a_worker_stamps_its_first_step_its_number_its_saves_and_when_it_caught_up"),
    ),
    mutant(
        "a straggler is slow for long",
        *("hangs/stragglers", "if one and self._windows[one.local_rank] >= LASTING", "if one"),
        *("stragglers", "a_worker_that_is_slow_for_three_windows_is_named_once"),
    ),
    mutant(
        "a victim of others has no strike",
        *("failures/strikes", "first is not None and first.blame < Blame.VICTIM", "first is not None"),
        *("strikes", "a_victim_of_others_and_a_worker_that_was_stopped_are_no_suspects"),
    ),
    mutant(
        "a strike is for the cause that the next round names",
        *("failures/strikes", "found.reason == describe(self.failure) if", "True if"),
        *("strikes", "the_cause_is_the_one_that_the_reason_of_the_next_round_names"),
    ),
    mutant(
        "a later round does not bring the cause of an earlier one back",
        *("failures/strikes", "if found.round == self.round + 1 else None", "if found.round > self.round else None"),
        *("sit_out", "a_later_round_does_not_bring_the_cause_back"),
    ),
    mutant(
        "the others must be a quorum of the last round",
        *("failures/strikes", "if outvoted else", "if False else"),
        *("strikes", "a_node_sits_out_only_where_the_others_are_enough_without_it"),
    ),
    mutant(
        "a node that sits out looks again where no round forms",
        *("quarantine", " or self._why_needed(now)", ""),
        *("sit_out", "nodes_that_go_at_the_same_moment_join_again_where_the_rest_is_too_few"),
    ),
    mutant(
        "a node that sits out is no other",
        *("failures/strikes", "if row.status is Status.LEFT or sits_out(row)", "if row.status is Status.LEFT"),
        *("strikes", "the_others_are_the_members_and_the_spares_that_are_left"),
    ),
    mutant(
        "a node that has left is no other",
        *("failures/strikes", "if row.status is Status.LEFT or sits_out(row)", "if sits_out(row)"),
        *("strikes", "the_others_are_the_members_and_the_spares_that_are_left"),
    ),
    mutant(
        "a lost member is no other",
        *("failures/strikes", "set(record.broken.lost) if record.broken else set()", "set[str]()"),
        *("strikes", "a_lost_member_is_no_other"),
    ),
    mutant(
        "a node that is needed does not sit out",
        *("failures/strikes", "if left < least:", "if False:"),
        *("strikes", "a_node_sits_out_only_where_the_others_are_enough_without_it"),
    ),
    mutant(
        "the host of the store does not sit out",
        *("failures/strikes", "    if hosts_store:\n", "    if False:\n"),
        *("strikes", "a_node_sits_out_only_where_the_others_are_enough_without_it"),
    ),
    mutant(
        "a node with a fixed rank does not sit out",
        *("failures/strikes", "if fixed_ranks else", "if False else"),
        *("strikes", "a_node_sits_out_only_where_the_others_are_enough_without_it"),
    ),
    mutant(
        "a node joins again after its time",
        *("failures/strikes", "now.out >= limits.cooldown", "False"),
        *("strikes", "when_it_joins_again"),
    ),
    mutant(
        "a node that was not the cause joins again",
        *("failures/strikes", "now.cause is False", "False"),
        *("strikes", "when_it_joins_again"),
    ),
    mutant(
        "a node joins again where the others are too few",
        *("failures/strikes", "now.broken >= limits.no_round", "False"),
        *("strikes", "when_it_joins_again"),
    ),
    mutant(
        "a node to which the store moves joins again",
        *("failures/strikes", "(now.hosts_store, ", "(False, "),
        *("strikes", "when_it_joins_again"),
    ),
    mutant(
        "a node that sits out ends with its job",
        *("failures/strikes", "(now.decided, ", "(False, "),
        *("strikes", "when_it_joins_again"),
    ),
    mutant(
        "one round is one strike",
        *("quarantine", "            self._suspicion = None  # one round, one strike\n", ""),
        *("sit_out", "one_round_is_one_strike"),
    ),
    mutant(
        "a node that leaves does not sit out",
        *("quarantine", "if not limit or leaving or", "if not limit or"),
        *("sit_out", "a_node_that_leaves_sits_out_no_more"),
    ),
    mutant(
        "the last strike counts before the next round tells of it",
        *("quarantine", "len(self.strikes) + (self._suspicion is not None) < limit", "len(self.strikes) < limit"),
        *("sit_out", "it_sits_out_from_its_last_strike_on_and_ends_with_its_time"),
    ),
    mutant(
        "the count is fresh after the time out",
        *("quarantine", "        self.strikes.clear()\n", ""),
        *("sit_out", "it_sits_out_from_its_last_strike_on_and_ends_with_its_time"),
    ),
    mutant(
        "workers that keep their state are none when their node has sat out",
        *("quarantine", "        self._kept = False\n        self._say", "        self._say"),
        *("sit_out", "workers_that_keep_their_state_are_ended_when_their_node_sits_out"),
    ),
    mutant(
        "a node that stays says so once",
        *("quarantine", "        if why != self._told:\n", "        if True:\n"),
        *("sit_out", "it_stays_where_it_is_needed_or_nobody_knows_and_says_so_once"),
    ),
    mutant(
        "the look at all rows takes a limited time",
        *("quarantine", "if not self._look.done and now < self._since + LOOK_LIMIT:", "if not self._look.done:"),
        *("sit_out", "it_stays_where_it_is_needed_or_nobody_knows_and_says_so_once"),
    ),
    mutant(
        "each round that ends has its own time until the next",
        *("quarantine", "        if record is None or record.open:\n            self._broken = None\n        elif", "        if"),
        *("sit_out", "the_others_have_time_for_their_next_round_from_its_end_on"),
    ),
    mutant(
        "rounds of others do not end the time out in the account",
        *("observe/account", "not in (Spent.WAITING, Spent.SITTING_OUT) and certain", "is not Spent.WAITING and certain"),
        *("account", "a_node_that_sits_out_does_so_until_it_joins_again"),
    ),
    mutant(
        "a worker that does not know the job's median is compared with its node",
        *("hangs/stragglers", "usual.seconds if time.median is None else time.median", "time.median or 0.0"),
        *("stragglers", "workers_that_tell_of_some_steps_are_compared_with_the_median_of_their_node"),
    ),
    mutant(
        "of two workers the quicker one is the usual one",
        *("hangs/stragglers", "median_low(seconds) if seconds", "max(seconds) if seconds"),
        *("stragglers", "workers_that_tell_of_some_steps_are_compared_with_the_median_of_their_node"),
    ),
    mutant(
        "few samples say nothing",
        *("hangs/stragglers", " if samples >= LEAST_SAMPLES else None", " if samples else None"),
        *("stragglers", "workers_that_tell_of_some_steps_are_compared_with_the_median_of_their_node"),
    ),
    mutant(
        "the time of a sample is not spread over all steps",
        *("hangs/stragglers", "StepTime(busy / (samples * NS)", "StepTime(busy / (steps * NS)"),
        *("stragglers", "workers_that_tell_of_some_steps_are_compared_with_the_median_of_their_node"),
    ),
    mutant(
        "the median of the job is used if it is of more ranks than this node's own",
        *("hangs/stragglers", "job is not None and job.ranks > here.ranks", "job is not None"),
        *("stragglers", "workers_that_tell_of_some_steps_are_compared_with_the_median_of_more_ranks"),
    ),
    mutant(
        "without the median of the job that of the node counts",
        *("hangs/stragglers", "job if job is not None and of_job else here", "job or Median(0.0, 0)"),
        *("stragglers", "workers_that_tell_of_some_steps_are_compared_with_the_median_of_their_node"),
    ),
    mutant(
        "a worker that knows the median of the job shares nothing",
        *("hangs/stragglers", "for time in taken.values() if time.median is None)", "for time in taken.values())"),
        *("stragglers", "a_worker_that_knows_the_median_of_the_job_has_no_other"),
    ),
    mutant(
        "times and medians are of one round",
        *("hangs/job_median", " and record.fence == self._fence", ""),
        *("job_median", "times_and_medians_of_another_round_do_not_count"),
    ),
    mutant(
        "the median of the last round is not that of this one",
        *("hangs/job_median", " if fence == self._fence else None", ""),
        *("job_median", "times_and_medians_of_another_round_do_not_count"),
    ),
    mutant(
        "only node rank 0 writes the median",
        *("hangs/job_median", "if meeting.node_rank == 0:", "if True:"),
        *("job_median", "only_node_rank_0_writes_the_median"),
    ),
    mutant(
        "times and medians that nobody renews are forgotten",
        *("hangs/job_median", "record if self._window - window < LASTS else None", "record"),
        *("job_median", "a_node_that_shares_no_times_any_more_is_left_out"),
    ),
    mutant(
        "the median that was read last is forgotten while the store is away",
        *("hangs/job_median", "record if self._window - window < LASTS else None", "record"),
        *("job_median", "of_a_store_that_is_away_the_last_median_is_used_for_some_windows"),
    ),
    mutant(
        "times that cannot be do not count",
        *("hangs/job_median", " and record.plausible", ""),
        *("job_median", "a_median_that_cannot_be_does_not_count"),
    ),
    mutant(
        "a list of times is limited",
        *("hangs/job_median", "0 < len(self.seconds) <= MOST_WORKERS and", "self.seconds and"),
        *("job_median", "what_is_not_a_list_of_times_does_not_count"),
    ),
    mutant(
        "no time is negative",
        *("hangs/job_median", " and min(self.seconds) >= 0.0", ""),
        *("job_median", "what_is_not_a_list_of_times_does_not_count"),
    ),
    mutant(
        "a slow store holds up one thread",
        *("hangs/job_median", "        if self._thread is not None and self._thread.is_alive():\n            return\n", ""),
        *("job_median", "as_long_as_the_store_is_slow_there_is_one_thread"),
    ),
    mutant(
        "without a thread the agent goes on",
        *("hangs/job_median", "suppress(RuntimeError)", "suppress(KeyError)"),
        *("job_median", "without_a_thread_nothing_is_shared_and_nothing_fails"),
    ),
    mutant(
        "an agent compares its workers with the median of the job",
        *("hangs/watch", "self._job_times.median(meeting.fence) if meeting else None", "None"),
        *("hangs", "a_worker_that_knows_its_own_time_only_is_compared_with_the_other_nodes[False]"),
    ),
    mutant(
        "an agent shares the times of its workers",
        *("hangs/watch", "self._job_times.share(meeting, self._stragglers.alone)", "pass"),
        *("hangs", "a_worker_that_knows_its_own_time_only_is_compared_with_the_other_nodes[False]"),
    ),
    of_scripts(
        "the steps of an optimizer are sampled",
        *("worker/optimizer_steps", "look_after(FIRST_LOOK, ComputeTimes().look)", "pass"),
        *("stragglers", "the_slow_rank_of_an_unmodified_script_is_named_by_its_agent_once"),
    ),
    mutant(
        "a straggler is named once",
        *("hangs/stragglers", "if local_rank not in self._named]", "]"),
        *("stragglers", "a_worker_that_is_slow_for_three_windows_is_named_once"),
    ),
    mutant(
        "a rate is that of the last minute",
        *("observe/step_rates", "                samples.popleft()", "                break"),
        *("step_rates", "a_rate_is_that_of_the_last_minute_or_since_the_question_before"),
    ),
    mutant(
        "few samples are kept however many ask",
        *("observe/step_rates", "APART = 1.0", "APART = 0.0"),
        *("step_rates", "however_many_ask_few_samples_are_kept"),
    ),
    mutant(
        "steps of another process are not compared",
        *("observe/step_rates", "before.pid == page.pid and ", ""),
        *("step_rates", "a_new_round_begins_anew"),
    ),
    mutant(
        "steps of two rounds are not compared",
        *("observe/step_rates", "before.first == page.first and ", ""),
        *("step_rates", "a_live_worker_that_counts_anew_in_the_next_round_has_no_rate_of_two_rounds"),
    ),
    mutant(
        "an old torch has no hook for steps",
        *("processes/preload/forkserver", '"register_optimizer_step_post_hook", None)', '"register_optimizer_step_post_hook")'),
        *("parked_forks", "without_torch_or_with_an_old_one_there_is_no_hook_and_no_error"),
    ),
    mutant(
        "training goes on without our package",
        *("processes/preload/forkserver", "        except Exception:  # whatever stands", "        except KeyError:  # whatever stands"),
        *("parked_forks", "a_step_is_no_error_where_our_package_cannot_be_imported"),
    ),
    of_workers(
        "steps of a script that stamps its own are not counted twice",
        *("progress", "    if not _by_script:\n", "    if True:\n"),
        *("hangs", "optimizers_stamp_until_the_script_stamps_its_own_steps"),
    ),
    # live workers
    mutant(
        "only who has said hello is asked to park",
        *("workers/parking", "if pid in self._live and pid not in", "if pid not in"),
        *("live_workers", "only_who_has_said_hello_is_asked"),
    ),
    of_workers(
        "an agent that knows of no failure is told of lost peers",
        *("worker/live_connection", "self.asked, limit)) or self._report_loss(step, why)", "self.asked, limit))"),
        *("live_workers", "an_agent_that_knows_of_no_failure_is_told_of_lost_peers_and_the_worker_goes_on[in_the_round]"),
    ),
    of_jobs(
        "the guard ends workers that train before the others when these may go on without them",
        *("agent", "(len(record.members) == 1 or self._session.machine.trains_apart)", "len(record.members) == 1"),
        *("live", "who_trains_before_the_others_are_there_has_ended_when_these_go_on_without_it"),
    ),
    mutant(
        "an agent whose workers all train together hears of it",
        *("workers/live_workers", "                self._on_gathered(message.round)", "                pass"),
        *("live_workers", "an_agent_hears_that_all_workers_of_the_round_train_together"),
    ),
    of_workers(
        "but once while no step is made",
        *("worker/live_connection", "        if step == self._told_at:", "        if False:"),
        *("live_workers", "a_worker_that_has_made_no_step_since_ends_with_its_error"),
    ),
    of_workers(
        "so is it after a failed reduction",
        *("worker/live_connection", "                if not self._report_loss(self._state[0], REDUCTION):", "                if True:"),
        *("live_workers", "an_agent_that_knows_of_no_failure_is_told_of_lost_peers_and_the_worker_goes_on[after_a_failed_reduction]"),
    ),
    mutant(
        "a promise counts for the round that was asked for",
        *("workers/parking", "        if self._asked.get(pid) != round:", "        if pid not in self._asked:"),
        *("live_workers", "a_promise_counts_for_the_round_that_was_asked_for_and_once"),
    ),
    mutant(
        "only a parked worker is given another round",
        *("workers/parking", "        may = pid in self._parked\n", "        may = pid in self._live\n"),
        *("live_workers", "only_a_parked_worker_is_given_another_round"),
    ),
    mutant(
        "a worker that goes on has its state no more as a parked one",
        *("workers/parking", "        self._parked.pop(pid, None)\n        return may\n", "        return may\n"),
        *("live_workers", "a_parked_worker_has_the_state_of_its_promise"),
    ),
    mutant(
        "parked workers go on before others are started",
        *("workers/workers", "            go_on()\n", ""),
        *("live_workers", "a_parked_worker_goes_on_in_the_next_round_with_its_output"),
    ),
    mutant(
        "live workers are those of the job",
        *("status/reader", "for name, rank in found if name == job})", "for name, rank in found})"),
        *("status_reader", "an_agent_says_the_steps_of_its_workers_and_which_are_live"),
    ),
    mutant(
        "a refusal that comes again is known in a job of one worker, too",
        *("failures/classify", "    if end.code > 0 and (name == _FINAL", "    if end.code > 0 and not alone and (name == _FINAL"),
        *("classify", "a_refusal_that_each_restart_would_meet_again_is_final[refused-True]"),
    ),
    mutant(
        "of a new worker only the time counts for which it did not have to wait",
        *("workers/workers", "self._began - spec.pause)", "self._began)"),
        *("workers", "a_worker_that_has_to_wait_first_fails_as_soon_after_its_start_as_without"),
    ),
    mutant(
        "a new worker waits",
        *("processes/exec_worker", "    sleep(pause)\n", ""),
        *("spawn", "a_worker_that_has_to_wait_begins_later_and_is_ended_meanwhile_like_any_other"),
    ),
    mutant(
        "a new worker in a fork waits, too",
        *("processes/preload/forkserver", '    wait(message["pause"])\n', ""),
        *("parked_forks", "a_fork_that_has_to_wait_begins_its_script_later"),
    ),
    mutant(
        "an agent says that training has ended",
        *("workers/live_workers", "        if round and code == 0:\n", "        if False:\n"),
        *("live_workers", "of_a_worker_with_a_state_that_has_succeeded_those_that_wait_hear[succeeds]"),
    ),
    mutant(
        "a worker that fails ends no training",
        *("workers/live_workers", "        if round and code == 0:\n", "        if round:\n"),
        *("live_workers", "of_a_worker_with_a_state_that_has_succeeded_those_that_wait_hear[fails]"),
    ),
    mutant(
        "a new worker that ends does not end the training of the others",
        *("workers/live_workers", "        if self.settled(pid):\n", "        if True:\n"),
        *("live_workers", "of_a_worker_with_a_state_that_has_succeeded_those_that_wait_hear[new]"),
    ),
    mutant(
        "an agent says which ranks have a state until it is heard",
        *("workers/live_states", "        while goes_on():\n", "        if goes_on():\n"),
        *("live_states", "the_word_comes_as_soon_as_there_is_a_store"),
    ),
    mutant(
        "nothing is said of a round that is over",
        *("workers/live_states", "        while goes_on():\n", "        while True:\n"),
        *("live_states", "nothing_is_said_of_a_round_that_is_over"),
    ),
    mutant(
        "connections are accepted again when a descriptor may be free",
        *("host/accepting", "            self._selector.register(self._listening", "            (self._listening"),
        *("live_workers", "a_worker_that_connects_while_no_descriptor_is_left_is_live_later"),
    ),
    mutant(
        "a listening socket that cannot be served does not keep the loop busy",
        *("host/accepting", "                self._selector.unregister(self._listening)\n                self", "                self"),
        *("live_workers", "a_worker_that_connects_while_no_descriptor_is_left_is_live_later"),
    ),
    mutant(
        "a process that is no worker of this agent is not served",
        *("workers/live_workers", " or not self._is_worker(pid):", ":"),
        *("live_workers", "a_stranger_gets_nothing"),
    ),
    mutant(
        "a worker that is asked to park gets no signal",
        *("workers/workers", "if p.pid not in asked and p.signal(signum))", "if p.signal(signum))"),
        *("live_workers", "a_parked_worker_goes_on_in_the_next_round_with_its_output"),
    ),
    mutant(
        "a parked worker is not waited for",
        *("workers/workers", "self._logs.is_drained(self._parked)", "self._logs.is_drained()"),
        *("live_workers", "a_parked_worker_holds_up_nobody"),
    ),
    mutant(
        "the sweep after a round spares parked workers",
        *("processes/process_tree", "self._evidence.outside = outside | set(parked)", "pass"),
        *("live_workers", "what_others_have_left_behind_is_ended_while_a_worker_is_parked"),
    ),
    mutant(
        "torch asks no name server",
        *("host/name_servers", ' attempts:0"', '"'),
        *("name_servers", "glibc_is_told_to_ask_no_name_server_beside_what_the_user_tells_it"),
    ),
    of_jobs(
        "a node that cannot start its workers leaves the job",
        *("agent", 'self._leave_sick(f"cannot start workers here: {error}")', "raise"),
        *("endings", "202_when_this_node_cannot_start_workers_and_the_others_spend_no_restart"),
    ),
    of_scripts(
        "what this machine alone may lack is no verdict on the job",
        *("cli/main", "(ElastirunError, ExitCode.SICK))", "(ElastirunError, ExitCode.ENVIRONMENT))"),
        *("endings", "2_for_wrong_use_3_for_a_missing_script_and_202_for_what_is_missing_here"),
    ),
    of_jobs(
        "nor where Python has asked before",
        *("host/name_servers", "libc.__res_state()[1] = 0", "pass"),
        *("slow_names", "an_endpoint_is_found_by_a_slow_name_server_that_nobody_asks_for_names_of_clients"),
    ),
    of_jobs(
        "Python asks name servers",
        *("host/name_servers", "libc.__res_state()[1] = ATTEMPTS", "pass"),
        *("slow_names", "an_endpoint_is_found_by_a_slow_name_server_that_nobody_asks_for_names_of_clients"),
    ),
    of_workers(
        "only the main thread promises to have left its round",
        *("worker/live_connection", "if self._asked and not self._inside:", "if self._asked:"),
        *("live_workers", "a_worker_in_a_round_is_cut_until_its_main_thread_has_left"),
    ),
    of_workers(
        "the cut is repeated",
        *("worker/live_connection", "        while self._inside and self.asked", "        if self._inside and self.asked"),
        *("live_workers", "a_worker_in_a_round_is_cut_until_its_main_thread_has_left"),
    ),
    of_workers(
        "one process stamps a page",
        *("progress", "words[PID] not in (0, os.getpid())", "False"),
        *("hangs", "one_process_stamps_a_page"),
    ),
    of_workers(
        "a fork stamps nothing",
        *("progress", "        os.register_at_fork(after_in_child=_forget)\n", "        pass\n"),
        *("hangs", "one_process_stamps_a_page"),
    ),
    of_workers(
        "a worker that exits has time for it",
        *("progress", "        atexit.register(_ask_for_time_to_exit)\n", ""),
        *("hangs", "a_worker_whose_interpreter_exits_has_time_for_it"),
    ),
    mutant(
        "also before the first step",
        *("hangs/detection", "if any(page.within for", "if False and any(page.within for"),
        *("hangs", "the_exit_of_a_worker_before_the_first_step_is_no_late_first_step"),
    ),
    of_workers(
        "a pause that was announced is not learned",
        *("progress", "    elif not _announced:\n", "    else:\n"),
        *("hangs", "a_pause_that_was_announced_is_not_learned"),
    ),
)


@each(MUTANTS)
def test_a_rule_that_is_taken_out_is_missed(copy: Path, one: Mutant) -> None:
    if one.rule == OTHERS and os.geteuid():
        pytest.skip("only root can become another user")
    assert unnoticed(copy, one) == ""


def test_as_long_as_no_rule_is_taken_out_the_same_tests_pass(copy: Path) -> None:
    assert failing(copy, MUTANTS) == ""

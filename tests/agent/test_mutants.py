"""Rules of the agent behind its promises: processes that end, the store that moves, causes that are named.

As in tests/rendezvous/test_mutants.py, a test notices each rule that is taken out.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.changes import always, gets, instead_of, never, skips, without
from tests.support.mutants import Mutant, copy, each, failing, mutants_in, named_in, unnoticed

__all__ = ["copy"]  # the fixture


mutant = named_in("elastirun/agent", "tests/agent")
quoted = mutants_in("elastirun/agent", "tests/agent")
of_rendezvous_seen_here = named_in("elastirun/rendezvous", "tests/agent")
of_rendezvous = named_in("elastirun/rendezvous", "tests/rendezvous")
CAUSE = "the_worker_that_is_not_where_the_others_wait_is_the_cause"
OTHERS = "other users are not answered"
AGAIN = "            found = yield _put_if(key, found, value)\n"
MUTANTS = (
    mutant(
        "a guard that nobody watches is ended",
        "processes.process_tree:ProcessTree._start_guard",
        never("started"),
        seen_by="process_tree::a_guard_that_cannot_be_watched_is_ended_and_kills_nothing",
    ),
    mutant(
        "an agent that stood still beyond its lease tells the guard so",
        "processes.process_tree:ProcessTree._set_timer",
        instead_of("0 < before <= now", "False"),
        seen_by="process_tree::the_first_renewal_after_the_lease_ends_the_workers",
    ),
    quoted(
        "a server that comes up too late is ended",
        *("store/worker_store", "with self._lock, listening:", "with listening:"),
        *("worker_store", "a_round_that_ends_while_its_server_comes_up_leaves_none"),
    ),
    mutant(
        "an agent leaves the range of its ports never",
        "store.worker_store:WorkerStore._listen_for_next_round",
        instead_of("dup", "net.listen_on(self._address)"),
        seen_by="worker_store::the_only_port_of_a_range_serves_each_round",
    ),
    mutant(
        "the sweep after a round spares the fork server",
        "processes.process_tree:ProcessTree.spare",
        without("add"),
        seen_by="parked_forks::a_spared_session_is_left_alone_until_it_is_spared_no_longer",
    ),
    mutant(
        "a number that is free again is spared no longer",
        "processes.process_tree:ProcessTree.spare_no_longer",
        without("discard"),
        seen_by="parked_forks::a_spared_session_is_left_alone_until_it_is_spared_no_longer",
    ),
    mutant(
        "no death notice while the agent lives",
        "processes.kills:all_ended",
        never("is_dead"),
        seen_by="guard::all_has_ended_when_the_agent_and_all_that_its_workers_started_have",
    ),
    quoted(
        "no death notice before the workers have ended",
        *("processes/kills", "if owned(evidence, table, os.getppid()) or any(", "if any("),
        *("guard", "all_has_ended_when_the_agent_and_all_that_its_workers_started_have"),
    ),
    mutant(
        "no death notice while a dying orphan hides its environment",
        "processes.kills:all_ended",
        instead_of("any", "False"),
        seen_by="guard::an_orphan_without_an_environment_may_be_the_agents",
    ),
    mutant(
        "no death notice when a process cannot be read",
        "processes.kills:all_ended",
        gets("table", "proc.everything()"),
        seen_by="guard::what_cannot_be_read_is_no_proof_of_an_end",
    ),
    mutant(
        "an agent that cannot be read is not dead",
        "processes.marks:Mark.is_dead",
        gets("found", "proc.look(self.pid)"),
        seen_by="guard::what_cannot_be_read_is_no_proof_of_an_end",
    ),
    mutant(
        "numbers of another namespace's /proc mean nothing",
        "processes.proc:pid_namespace",
        never("'/proc/self'"),
        seen_by="guard::numbers_of_another_namespace_mean_nothing",
    ),
    mutant(
        "a guard without threads waits for a store as long as any",
        "processes.guard:write_here",
        without("setitimer"),
        seen_by="guard::a_guard_that_can_start_no_thread_ends_although_the_store_does_not",
    ),
    mutant(
        "a control group that cannot be read is not empty",
        "processes.control_group:is_empty",
        instead_of("error.errno in (errno.ENOENT, errno.ENODEV)", "True"),
        seen_by="guard::what_cannot_be_read_is_no_proof_of_an_end",
    ),
    mutant(
        "no death notice before the control group is empty",
        "processes.kills:all_ended",
        never("control_group"),
        seen_by="guard::all_has_ended_when_the_agent_and_all_that_its_workers_started_have",
    ),
    mutant(
        "a guard has imported what it needs before its agent dies",
        "processes.guard:Guard.receive",
        without("prepare_in_thread"),
        seen_by="guard::what_writes_a_notice_is_imported_before_it_is_needed",
    ),
    mutant(
        "the guard looks before it writes a death notice",
        "processes.guard:begin_death_notice",
        instead_of("not guard.notice or not has_ended(guard.evidence, END_TIMEOUT)", "not guard.notice"),
        seen_by="guard::no_death_notice_is_written_before_all_has_ended",
    ),
    mutant(
        "an agent that has left has no death notice",
        "processes.guard:begin_death_notice",
        instead_of("not guard.notice or not has_ended(guard.evidence, END_TIMEOUT)", "not has_ended(guard.evidence, END_TIMEOUT)"),
        seen_by="guard::no_death_notice_is_written_before_all_has_ended",
    ),
    mutant(
        "why a worker is stopped needs no store",
        "workers.round_check:RoundCheck.__init__",
        instead_of("STOP", "CURRENT"),
        seen_by="round_check::who_asks_why_it_is_stopped_is_answered_at_once",
    ),
    # The store moves when its host has died.
    mutant(
        "a single port is left to the workers' store",
        "store.standby_store:StandbyStore.serve",
        instead_of("self._served is not None or only_one", "self._served is not None"),
        seen_by="standby_stores::a_node_with_a_single_port_serves_no_standby_store",
    ),
    mutant(
        "one standby store for each agent",
        "store.standby_store:StandbyStore.serve",
        instead_of("self._served is not None or only_one", "only_one"),
        seen_by="standby_stores::each_agent_serves_an_empty_standby_store_on_its_own_address",
    ),
    mutant(
        "the port of the standby store is told with each new port",
        "session:Session._reachable",
        instead_of("Reachable", "Reachable(now, address, worker_store.port)"),
        seen_by="session::the_port_of_the_standby_store_is_told_with_the_address_and_with_each_new_port",
    ),
    quoted(
        "where the store has moved is said after each answer",
        *("session", "if isinstance(event, Synced):\n            self.access.forward(", "if False:\n            self.access.forward("),
        *("session", "where_the_store_has_moved_is_said_after_each_answer"),
    ),
    quoted(
        "where the job was started is looked at again and again",
        *("store/forwarding", "while not self._closed.wait(FORWARD_EVERY if first else OTHERS_EVERY):", "for _ in range(3):"),
        *("standby_stores", "whatever_else_is_there_does_not_end_the_tries[nobody]"),
    ),
    mutant(
        "a store that cannot be written to does not end the tries",
        "store.forwarding:_Address.write",
        instead_of("StoreError", "BlockingIOError"),
        seen_by="standby_stores::whatever_else_is_there_does_not_end_the_tries[another program]",
    ),
    mutant(
        "what is found where the job was started is reported once",
        "store.forwarding:Forwarding._write_at",
        instead_of("record != self._last or record.moved not in (None, place)", "True"),
        seen_by="standby_stores::a_run_that_has_begun_where_the_job_was_started_is_reported_once",
    ),
    mutant(
        "standby stores are told at the same time",
        "processes.death_notice:tell_standbys",
        gets("thread", "(lambda name, tell, *given: tell(*given))('death notice', _tell, notice, vote, place, told)"),
        seen_by="standby_stores::several_stores_are_asked_at_the_same_time",
    ),
    mutant(
        "a standby store that never finishes its answer is left behind",
        "processes.death_notice:tell_standbys",
        instead_of("max", "30.0"),
        seen_by="standby_stores::a_store_that_never_finishes_its_answer_is_left_behind",
    ),
    mutant(
        "standby stores that did not answer are tried again",
        "processes.death_notice:tell_standbys",
        instead_of("told >= places.keys()", "bool(told)"),
        seen_by="standby_stores::stores_that_did_not_answer_are_tried_again",
    ),
    mutant(
        "a guard that can start no thread tells one store after the other",
        "processes.death_notice:tell_standbys",
        without("_tell"),
        seen_by="standby_stores::where_no_thread_can_be_started_one_is_told_after_the_other",
    ),
    quoted(
        "the pipe to the guard grows",
        *("processes/process_tree", "fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, min(2 * size, LARGEST_PIPE))", "pass"),
        *("standby_stores", "the_pipe_to_the_guard_grows_as_far_as_the_kernel_allows"),
    ),
    mutant(
        "a notice that does not fit into the pipe is left out",
        "processes.process_tree:ProcessTree._send_notice",
        always("fits"),
        seen_by="standby_stores::a_notice_too_long_for_the_pipe_is_left_out_and_the_guard_stays",
    ),
    mutant(
        "a guard votes where the store cannot be reached",
        "processes.death_notice:write",
        instead_of("tell_standbys", "not notice.store and tell_standbys(notice, told)"),
        seen_by="standby_stores::the_vote_of_a_member_is_for_a_store_that_cannot_be_reached",
    ),
    quoted(
        "a guard votes only where the store cannot be reached",
        *("processes/death_notice", "                return True\n", "                pass\n"),
        *("standby_stores", "the_vote_of_a_member_is_for_a_store_that_cannot_be_reached"),
    ),
    of_rendezvous(
        "each exchange is with the store that it names",
        "wire.exchanges:Exchanges.submit",
        never("_connection"),
        seen_by="store_thread::each_exchange_is_with_the_store_that_it_names",
    ),
    of_rendezvous(
        "a connection leads to the store that the exchange names",
        "store_thread:StoreThread._serve",
        instead_of("at", "None"),
        seen_by="store_thread::each_exchange_is_with_the_store_that_it_names",
    ),
    of_rendezvous(
        "a guard creates votes alone",
        "stores.tcp:TcpStore.put_if",
        instead_of("startswith", "self._creates"),
        seen_by="tcp_plain::it_creates_the_keys_that_it_may_and_replaces_none",
    ),
    quoted(
        "garbage in the place of a vote is replaced",
        *("../rendezvous/wire/sync", f"{AGAIN}        return found == value", "        return found == value"),
        *("standby_stores", "garbage_where_the_vote_belongs_is_replaced"),
    ),
    of_rendezvous_seen_here(
        "a job whose rounds have begun is not sent elsewhere",
        "wire.sync:SyncProtocol.put_moved",
        gets("spoken_for", "False and written.round > 0 and (not _is_earlier(record, job))"),
        seen_by="standby_stores::a_store_in_which_a_round_has_formed_is_left_alone",
    ),
    # Several endpoints.
    mutant(
        "each word of another run is reported",
        "store.forwarding:Forwarding._write_at",
        instead_of("record != self._last or record.moved not in (None, place)", "record != self._last"),
        seen_by="standby_stores::the_word_of_another_run_is_reported_each_time_that_it_stands_there[at another one]",
    ),
    mutant(
        "who has too few nodes overrules no other word",
        "store.forwarding:_Address.write",
        instead_of("put_moved", "here.put_moved(place, job=job)"),
        seen_by="standby_stores::who_has_too_few_nodes_overrules_no_other_word",
    ),
    mutant(
        "who says where the store is knows whom it tells",
        "store.forwarding:_Address.write",
        gets("other", "execute(protocol.put_place(place, job, over), self._store)"),
        seen_by="search::what_is_signed_for_one_standby_store_sends_nobody_from_another_one",
    ),
    mutant(
        "a node is a newcomer until it has seen a round",
        "session:Session.step",
        gets("newcomer", "True"),
        seen_by="session::a_node_is_a_newcomer_until_it_has_seen_a_round",
    ),
    mutant(
        "the access knows the id of this node",
        "session:Session.of",
        skips("me"),
        seen_by="session::the_access_knows_the_standby_store_of_this_node_by_the_id_of_its_row",
    ),
    mutant(
        "a node that has given up its standby store serves another one",
        "session:Session.step",
        without("renew_standby"),
        seen_by="session::who_gives_up_its_own_standby_store_serves_another_one",
    ),
    mutant(
        "the next standby store of a node has another port",
        "store.standby_store:StandbyStore._listen",
        instead_of(
            "(other := net.listen_on(number, self._config.port_range)).getsockname()[1] in self._ports",
            "(other := net.listen_on(number, self._config.port_range)).getsockname()[1] in ()",
        ),
        seen_by="standby_stores::a_node_without_another_port_goes_on_without_a_standby_store",
    ),
    mutant(
        "a node without another port goes on without a standby store",
        "store.standby_store:StandbyStore.serve",
        never("_ports"),
        seen_by="standby_stores::a_node_without_another_port_goes_on_without_a_standby_store",
    ),
    mutant(
        "the port of another standby store is told",
        "session:Session._is_reached_elsewhere",
        never("standby_port"),
        seen_by="session::who_gives_up_its_own_standby_store_serves_another_one",
    ),
    mutant(
        "a standby store is where newcomers look",
        "store.standby_store:StandbyStore._listen",
        never("_listen_at_endpoint"),
        seen_by="search::each_node_of_the_list_serves_its_standby_store_where_newcomers_look",
    ),
    mutant(
        "a store that the job has left says so in its record",
        "store.forwarding:_Address.write",
        gets("other", "execute(here.put_place(place), self._store)"),
        seen_by="search::a_store_that_the_job_has_left_sends_a_newcomer_on",
    ),
    mutant(
        "a name server that does not know a name any more takes no address away",
        "store.forwarding:_Name._look_up",
        never("_known"),
        seen_by="search::a_name_server_that_is_gone_does_not_keep_a_node_from_being_told",
    ),
    mutant(
        "a slow name server holds up nobody",
        "store.forwarding:_Name.addresses",
        without("start_thread"),
        seen_by="search::a_name_server_that_is_gone_does_not_keep_a_node_from_being_told",
    ),
    mutant(
        "a round does not hold where the others may have gone on without this node",
        "workers.round_check:RoundCheck.settle",
        instead_of("not replaced() and still_holds(event.round, fence, self._me)", "still_holds(event.round, fence, self._me)"),
        seen_by="round_check::where_the_others_may_have_gone_on_the_answer_is_no",
    ),
    quoted(
        "a round whose job has moved does not hold",
        *("workers/round_check", " or record.moved is not None:", ":"),
        *("round_check", "a_round_whose_job_has_moved_does_not_hold"),
    ),
    mutant(
        "the store in use is not told where it is",
        "store.forwarding:Forwarding._run",
        always("Endpoint"),
        seen_by="search::all_other_endpoints_are_told",
    ),
    mutant(
        "tries that are of no use become rarer",
        "store.forwarding:_Address.write",
        instead_of("SLOWER ** min(self._useless, 100)", "1.0"),
        seen_by="search::tries_that_are_of_no_use_become_rarer[True-1.0]",
    ),
    mutant(
        "news is told at once",
        "store.forwarding:_Address.is_due",
        instead_of("place != self._place or clock.now() >= self._due", "clock.now() >= self._due"),
        seen_by="search::tries_that_are_of_no_use_become_rarer[False-5.0]",
    ),
    quoted(
        "an answer makes the tries frequent again",
        *("store/forwarding", "            self._useless = 0\n        except", "        except"),
        *("search", "an_answer_makes_the_tries_frequent_again"),
    ),
    mutant(
        "a store is asked over one connection",
        "store.forwarding:_Address.write",
        instead_of("self._store is None", "True"),
        seen_by="search::a_store_that_was_told_is_asked_over_the_same_connection",
    ),
    quoted(
        "a thread that cannot start is told once",
        *("store/forwarding", "said, self._said = self._said, True", "said = False"),
        *("search", "a_thread_that_cannot_start_is_told_once_and_tried_again"),
    ),
    quoted(
        "a thread that cannot start is tried again",
        *("store/forwarding", "said, self._said = self._said, True", "said, self._said, self._without_thread = self._said, True, []"),
        *("search", "a_thread_that_cannot_start_is_told_once_and_tried_again"),
    ),
    of_rendezvous_seen_here(
        "a first round waits for the rarest tries",
        "formation:",
        gets("LOOK_BACK", "1.0"),
        seen_by="search::a_first_round_waits_longer_than_the_rarest_tries",
    ),
    mutant(
        "a stopped worker is the cause",
        "hangs.causes:judge",
        gets("stopped", "[]"),
        seen_by=f"hang_causes::{CAUSE}[workers0-named0-0]",
    ),
    mutant(
        "a worker in a collective is not behind",
        "hangs.causes:judge",
        gets("behind", "[worker for worker in suspects if 0 < worker.steps < most]"),
        seen_by=f"hang_causes::{CAUSE}[workers5-named5-5]",
    ),
    mutant(
        "a worker that is not where most are is the cause",
        "hangs.causes:_where_most_are",
        never("workers"),
        seen_by=f"hang_causes::{CAUSE}[workers10-named10-3]",
    ),
    mutant(
        "a call of the script inside of a collective is no collective",
        "hangs.causes:waits_for_peers",
        gets("file", "next((file for file, _, _ in stack if _WAITS_FOR_PEERS.search(file)), '')"),
        seen_by="hang_causes::the_innermost_frame_that_tells_says_whether_a_worker_waits_for_others[stack5-False]",
    ),
    mutant(
        "a worker that hangs has failed before those that its end makes fail",
        "failures.tracker:FailureTracker.worker_hung",
        gets("after", "max(0.0, end.after)"),
        seen_by="hangs::the_failure_of_a_worker_that_hung_is_reported_before_its_end_which_adds_nothing",
    ),
    quoted(
        "no rank is missed where nothing tells the ranks apart",
        *("hangs/causes", "[] if verdict.how in (UNCLEAR, WAITING) else ", ""),
        *("hang_causes", "who_is_not_where_failed_peers_have_waited_is_missed[running2-victims2-named2]"),
    ),
    mutant(
        "no rank is missed whose stack is not known",
        "hangs.causes:elsewhere",
        gets("seen", "list(running)"),
        seen_by="hang_causes::who_is_not_where_failed_peers_have_waited_is_missed[running3-victims3-named3]",
    ),
    mutant(
        "the end of a worker that hung is no second failure",
        "failures.tracker:FailureTracker.record_end",
        never("hung"),
        seen_by="hangs::the_failure_of_a_worker_that_hung_is_reported_before_its_end_which_adds_nothing",
    ),
    # live workers
    mutant(
        "only who has said hello is asked to park",
        "workers.parking:Parking.ask",
        gets("asked", "[pid for pid in pids if pid not in self._parked]"),
        seen_by="live_workers::only_who_has_said_hello_is_asked",
    ),
    mutant(
        "an agent whose workers all train together hears of it",
        "workers.live_workers:LiveWorkers._read",
        without("_on_gathered"),
        seen_by="live_workers::an_agent_hears_that_all_workers_of_the_round_train_together",
    ),
    mutant(
        "a promise counts for the round that was asked for",
        "workers.parking:Parking.promise",
        instead_of("self._asked.get(pid) != round", "pid not in self._asked"),
        seen_by="live_workers::a_promise_counts_for_the_round_that_was_asked_for_and_once",
    ),
    mutant(
        "only a parked worker is given another round",
        "workers.parking:Parking.resume",
        gets("may", "pid in self._live"),
        seen_by="live_workers::only_a_parked_worker_is_given_another_round",
    ),
    mutant(
        "a worker that goes on has its state no more as a parked one",
        "workers.parking:Parking.resume",
        without("pop"),
        seen_by="live_workers::a_parked_worker_has_the_state_of_its_promise",
    ),
    mutant(
        "an agent says that training has ended",
        "workers.live_workers:LiveWorkers.worker_ended",
        never("round"),
        seen_by="live_workers::of_a_worker_with_a_state_that_has_succeeded_those_that_wait_hear[succeeds]",
    ),
    mutant(
        "a worker that fails ends no training",
        "workers.live_workers:LiveWorkers.worker_ended",
        instead_of("round and end.code == 0", "round"),
        seen_by="live_workers::of_a_worker_with_a_state_that_has_succeeded_those_that_wait_hear[fails]",
    ),
    mutant(
        "a new worker that ends does not end the training of the others",
        "workers.live_workers:LiveWorkers.resume",
        always("settled"),
        seen_by="live_workers::of_a_worker_with_a_state_that_has_succeeded_those_that_wait_hear[new]",
    ),
    mutant(
        "a process that is no worker of this agent is not served",
        "workers.live_workers:LiveWorkers._take",
        instead_of("uid != os.geteuid() or not self._is_worker(pid)", "uid != os.geteuid()"),
        seen_by="live_workers::a_stranger_gets_nothing",
    ),
    mutant(
        "the sweep after a round spares parked workers",
        "processes.process_tree:ProcessTree.kill_left_behind",
        skips("outside", "parked"),
        seen_by="live_workers::what_others_have_left_behind_is_ended_while_a_worker_is_parked",
    ),
    mutant(
        "an exception in whose handling peers were lost is shown",
        "failures.consequences:Consequences.add",
        never("held.names_another_exception()"),
        seen_by="held_traceback::a_traceback_that_may_be_the_cause_is_shown[an exception before]",
    ),
    mutant(
        "a worker that was stopped while it went on keeps its output",
        "failures.consequences:Consequences.add",
        instead_of("held.names_another_exception() or (end.killed_by_us and (not held.is_the_end()))", "held.names_another_exception()"),
        seen_by="held_traceback::a_traceback_that_may_be_the_cause_is_shown[stopped after it had gone on]",
    ),
    mutant(
        "of victims alone the first is shown",
        "failures.consequences:Consequences.tell",
        never("victims and cause_is_unknown"),
        seen_by="held_traceback::if_the_cause_is_unknown_the_first_victim_is_shown",
    ),
)


@each(MUTANTS)
def test_a_rule_that_is_taken_out_is_missed(copy: Path, one: Mutant) -> None:
    if one.rule == OTHERS and os.geteuid():
        pytest.skip("only root can become another user")
    assert unnoticed(copy, one) == ""


def test_as_long_as_no_rule_is_taken_out_the_same_tests_pass(copy: Path) -> None:
    assert failing(copy, MUTANTS) == ""

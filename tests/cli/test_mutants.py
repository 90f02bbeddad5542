"""Each rule of the detection, of lists of endpoints and of ``elastirun status`` has a test that notices when the rule is broken."""

from __future__ import annotations

from pathlib import Path

from tests.support.mutants import Mutant, copy, each, failing, unnoticed

__all__ = ["copy"]  # the fixture


def mutant(rule: str, module: str, old: str, new: str, test: str) -> Mutant:
    return Mutant(rule, module, old, new, f"tests/cli/test_detect.py::test_{test}", "elastirun/cli")


NAMED = "a_command_that_names_its_rendezvous_is_never_changed"
ALONE_IN_SLURM = "slurm_without_a_step_of_one_task_per_node"
ALONE_IN_KUBERNETES = "pods_that_work_alone"

MUTANTS = (
    # A command that names its rendezvous is not changed.
    mutant(
        "a port of the master names it",
        "rendezvous_options",
        '("rdzv_endpoint", "master_addr", "master_port")',
        '("rdzv_endpoint", "master_addr")',
        NAMED,
    ),
    mutant("standalone names it", "rendezvous_options", '["standalone"] if options.flag("standalone") else []', "[]", NAMED),
    mutant("one node names it", "rendezvous_options", 'if options.is_given("nnodes") and not several:', "if False:", NAMED),
    mutant("the static backend and etcd name it", "rendezvous_options", 'options.text("rdzv_backend") != "c10d"', "False", NAMED),
    mutant("--detect=off", "rendezvous_options", 'parse.choice("auto", "off")) == "off"', 'parse.choice("auto", "off")) == "no"', NAMED),
    mutant("a launcher inside a worker is for this node", "detect/schedulers", "    if inside:", "    if False:", ALONE_IN_SLURM),
    # Given values take precedence over detected ones.
    mutant(
        "what is detected is not given",
        *("given_options", "self.origin(dest) > Origin.DETECTED", "self.origin(dest) > Origin.DEFAULT"),
        "a_step_of_slurm_with_one_task_per_node",
    ),
    mutant(
        "an empty text is not given",
        *("given_options", "empty_counts or self.environ[option.env].strip()", "True"),
        "a_step_of_slurm_with_one_task_per_node",
    ),
    mutant(
        "a detected endpoint means c10d",
        *("rendezvous_options", "    if options.detected.where:", "    if False:"),
        "a_step_of_slurm_with_one_task_per_node",
    ),
    mutant(
        "is_host of --rdzv-conf goes first",
        *("rendezvous_options", "conf.is_host if conf.is_host is not None else", "None if False else"),
        "a_step_of_slurm_with_one_task_per_node",
    ),
    mutant(
        "an index beyond the most nodes is a spare",
        *("rendezvous_options", "    if rank < max_nodes:", "    if rank < max_nodes or options.detected.where:"),
        "an_index_beyond_the_most_nodes_is_a_spare",
    ),
    # Slurm.
    mutant("one agent per node", "detect/slurm", "    if tasks > nodes:", "    if False:", ALONE_IN_SLURM),
    mutant("a step of one node is for itself", "detect/slurm", "    if nodes == 1:", "    if False:", ALONE_IN_SLURM),
    mutant("no part of a heterogeneous job", "detect/slurm", "HETEROGENEOUS) > 1:", "HETEROGENEOUS) > 9:", ALONE_IN_SLURM),
    mutant("no step of other nodes", "detect/slurm", "if environ.get(NAME, hosts[0]) not in hosts:", "if False:", ALONE_IN_SLURM),
    mutant("no step of another job", "detect/slurm", "if JOB_NODE_LIST in environ and not", "if False and not", ALONE_IN_SLURM),
    mutant("a script alone is warned", "detect/slurm", "    if nodes < 2 or not in_script:", "    if True:", ALONE_IN_SLURM),
    mutant(
        "a requeued job is a new one",
        *("detect/slurm", 'if restarts else ""', 'if False else ""'),
        "a_step_of_slurm_with_one_task_per_node",
    ),
    mutant(
        "the first node of the list hosts",
        *("detect/slurm", "own == hosts[0] if own else index == 0", "index == 0"),
        "a_step_of_slurm_with_one_task_per_node",
    ),
    mutant(
        "steps side by side have ports of their own",
        *("detect/slurm", "STEP_STRIDE = 1009", "STEP_STRIDE = 1"),
        "steps_side_by_side_have_ports_and_names_of_their_own",
    ),
    mutant(
        "a list of nodes is as long as their number",
        "detect/slurm",
        "if len(hosts) != nodes:",
        "if False:",
        "contradictions_name_both_and_what_to_do",
    ),
    mutant("numbers keep their width", "detect/node_list", ".zfill(len(low))", "", "a_list_of_nodes"),
    mutant(
        "a list of nodes has a limit",
        "detect/node_list",
        "if len(names) + math.prod(map(len, choices)) > MOST_NODES:",
        "if False:",
        "what_is_no_list_of_nodes",
    ),
    mutant("a list names each node once", "detect/node_list", "if len({*names}) < len(names):", "if False:", "what_is_no_list_of_nodes"),
    # Kubernetes.
    mutant("a pod without a service is of a sweep", "detect/kubernetes", r"\.svc(?:", r"(?:\.svc)?(?:", ALONE_IN_KUBERNETES),
    mutant("a name is of this pod", "detect/kubernetes", "if match and match[1] == own:", "if match:", ALONE_IN_KUBERNETES),
    mutant(
        "the index is that of the name",
        "detect/kubernetes",
        "if from_name != index:",
        "if False:",
        "contradictions_name_both_and_what_to_do",
    ),
    mutant("a StatefulSet needs a number of nodes", "detect/kubernetes", "    if not several:", "    if False:", ALONE_IN_KUBERNETES),
    mutant(
        "the manifest says what a JobSet is",
        "detect/kubernetes",
        "if not environ.get(JOB_SET) and int(match[2]) > 0:",
        "if False:",
        ALONE_IN_KUBERNETES,
    ),
    mutant(
        "a pod is of the JobSet that is given",
        "detect/kubernetes",
        "        if environ.get(JOB_SET):\n            both",
        "        if False:\n            both",
        "contradictions_name_both_and_what_to_do",
    ),
    mutant("pods of later jobs have no rank", "detect/kubernetes", "    if job == 0:", "    if True:", "a_pod_with_an_index_and_a_name"),
    mutant(
        "one pod of a JobSet hosts", "detect/kubernetes", "is_host=job == index == 0", "is_host=index == 0", "one_pod_of_a_job_set_hosts"
    ),
    # elastirun status, and a list of endpoints.
    *(
        Mutant(rule, module, old, new, f"tests/cli/{test}", "elastirun/cli")
        for rule, module, old, new, test in (
            (
                "a script that is called status is started",
                *("subcommands", "or os.path.isfile(name) or", "or"),
                "test_status_command.py::test_a_script_that_is_called_so_is_started[status]",
            ),
            (
                "status after an option is a script",
                *("subcommands", 'argv[0] if argv else ""', 'argv[-1] if argv else ""'),
                "test_status_command.py::test_the_word_after_an_option_is_a_script[--standalone]",
            ),
            (
                "a variable says what the script is",
                *("subcommands", 'for dest in ("module", "no_python"))', "for dest in ())"),
                "test_status_command.py::test_where_a_variable_says_what_the_script_is_the_word_is_a_script[PET_MODULE]",
            ),
            (
                "records that cannot be read are no missing job",
                *("status_command", "    if found.unreadable:\n", "    if False:\n"),
                "test_status_command.py::test_where_no_job_is_found_one_line_says_what_was_looked_at",
            ),
            (
                "a job of this machine whose store does not answer is not missing",
                *("status_command", "        if found.problems:  #", "        if False:  #"),
                "test_status_command.py::test_a_job_of_this_machine_whose_store_does_not_answer_is_not_said_to_be_missing",
            ),
            (
                "a full stdout is said",
                *("subcommands", "    if error is not None and not isinstance(error, BrokenPipeError):", "    if False:"),
                "test_status_command.py::test_a_screen_that_cannot_be_written_is_said",
            ),
            (
                "no endpoint twice",
                *("parse", "if found.count(one) > 1:", "if False:"),
                "test_parse.py::test_what_are_no_endpoints[a:1,b:1,a:1-names a:1 twice]",
            ),
            (
                "no empty endpoint",
                *("parse", "    if not all(items):\n", "    items = [item for item in items if item]\n    if False:\n"),
                "test_parse.py::test_what_are_no_endpoints[a,,b-an empty item]",
            ),
            (
                "each endpoint has a port",
                *("parse", "        if one.port == 0:\n", "        if False:\n"),
                "test_parse.py::test_what_are_no_endpoints[a:1,b:0-port 0 is any free port]",
            ),
            (
                "a list is for a store that moves",
                *("rendezvous_options", "return store.others if succession else ()", "return store.others"),
                "test_resolve.py::test_a_list_of_endpoints_is_for_a_store_that_moves",
            ),
            (
                "a list that has no effect is warned of",
                *("rendezvous_options", "if store.others and not succession:", "if False:"),
                "test_resolve.py::test_a_list_of_endpoints_is_for_a_store_that_moves",
            ),
            (
                "the static backend takes one endpoint",
                *("rendezvous_options", 'one = backend == "static"', "one = False"),
                "test_resolve.py::test_the_static_backend_takes_one_endpoint",
            ),
        )
    ),
)


@each(MUTANTS)
def test_a_rule_that_is_taken_out_is_missed(copy: Path, one: Mutant) -> None:
    assert unnoticed(copy, one) == ""


def test_as_long_as_no_rule_is_taken_out_the_same_tests_pass(copy: Path) -> None:
    assert failing(copy, MUTANTS) == ""

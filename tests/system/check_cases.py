"""Break one node, or the network, of a small cluster in one of thirteen ways, and see whether ``elastirun check`` names the right one.

Usage:

    python -m tests.stress check-cases                        every case five times, ten sound clusters, 64 nodes five times
    python -m tests.stress check-cases --case loss --tries 1

Hosts are network namespaces (tests/support/hosts.py): needs root, iproute2 and iptables.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import hosts
from tests.support.cluster import free_port
from tests.support.hosts import NET, Hosts
from tests.support.tries import Try, parser, unless

PYTHON = sys.executable
RANGE = "40000:40007"  # --port-range of the nodes
COME = 8  # seconds that nodes wait for each other
LIMIT = 120.0  # seconds for a whole check; it takes some
TRACED = "import sys; sys.settrace(lambda *a: (lambda *b: None)); from elastirun.__main__ import main; main()"  # each line costs a call
AHEAD = "import time; now = time.time; time.time = lambda: now() + 3600; from elastirun.__main__ import main; main()"
FORKS = """
import os
from elastirun.agent.check import run, table
from elastirun.cli.check import command
for i in range({count}):
    if os.fork() == 0:
        os.dup2(os.open(f"{folder}/{{i}}", os.O_WRONLY | os.O_CREAT), 1)
        where = ["--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf=is_host={{int(i == 0)}}", f"--local-addr=127.0.1.{{i + 1}}"]
        command.main(["--json", "--torch=off", "--nnodes={count}", "--rdzv-id=many", *where])
for i in range({count}):
    os.wait()
"""
GPUS = "#!/bin/sh\nfor gpu in 0 1; do echo 'Some GPU, 81559, 80000, [N/A]'; done\n"


@dataclass
class Node:
    """How the check is started on one host."""

    options: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)  # a command in front
    program: list[str] = field(default_factory=lambda: ["-m", "elastirun"])
    env: dict[str, str] = field(default_factory=dict)


@dataclass
class Cluster:
    """Hosts, and the folder that all of them see."""

    network: Hosts
    folder: Path
    nodes: list[Node]
    number: int  # of the try: some cases have variants

    def drop(self, at: int, *rule: str) -> None:
        self.network[at].run("iptables", "-A", "INPUT", *rule, "-j", ("DROP", "REJECT")[self.number % 2])


@dataclass(frozen=True)
class Case:
    """One way to break a cluster of ``count`` nodes, and the finding that is expected: its kind, and the nodes that it names."""

    count: int
    break_: Callable[[Cluster], None]
    kind: str
    names: tuple[str, ...]
    code: int  # exit code of the last of these nodes
    meets: bool = True  # the broken node reaches the others
    torch: str = "off"  # --torch


def closed_one_way(made: Cluster) -> None:
    made.drop(2, "-p", "tcp", "-s", made.network[1].address, "--dport", RANGE)


def wrong_interface(made: Cluster) -> None:
    host = made.network[1]
    host.run("ip", "link", "add", "other", "type", "veth", "peer", "name", "end")
    host.run("ip", "address", "add", "10.99.0.2/24", "dev", "other")
    host.run("ip", "link", "set", "other", "up")
    host.run("ip", "link", "set", "end", "up")
    made.nodes[1].options.append("--local-addr=10.99.0.2")


def elsewhere(made: Cluster) -> None:
    path = made.folder / "hosts2"
    path.write_text(path.read_text().replace(f"{NET}.10 h0", f"{NET}.99 h0"))


def full_shm(made: Cluster) -> None:
    made.network[1].run("mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", "/dev/shm")
    made.network[1].run("sh", "-c", "head -c 63M /dev/zero > /dev/shm/left-behind")


def another_torch(made: Cluster) -> None:
    package = made.folder / "other" / "torch-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    made.nodes[1].env["PYTHONPATH"] = str(package.parent)


def no_gpu(made: Cluster) -> None:
    program = made.folder / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(GPUS)
    program.chmod(0o755)
    for node in (*made.nodes[:1], *made.nodes[2:]):
        node.env["PATH"] = f"{program.parent}:{os.environ['PATH']}"


def slow_core(made: Cluster) -> None:
    made.nodes[1].program = ["-c", TRACED]


def clock_ahead(made: Cluster) -> None:
    made.nodes[1].program = ["-c", AHEAD]


def not_shared(made: Cluster) -> None:
    made.network[1].run("mount", "-t", "tmpfs", "tmpfs", str(made.folder / "shared"))


def few_descriptors(made: Cluster) -> None:
    made.nodes[1].before = ["prlimit", "--nofile=64:64"]


def loss(made: Cluster) -> None:
    made.network[1].run("iptables", "-A", "INPUT", "-m", "statistic", "--mode", "random", "--probability", "0.1", "-j", "DROP")


def few_ports(made: Cluster) -> None:
    """Let only the ports of --port-range in, and the store's. gloo takes others."""
    for a, b in ((1, 2), (2, 1)):
        others = ("-m", "multiport", "!", "--dports", f"29400,{RANGE}")
        made.drop(a, "-p", "tcp", "-s", made.network[b].address, "--syn", *others)


def firewall(made: Cluster) -> None:
    for a, b in ((1, 3), (3, 1)):
        made.drop(a, "-s", made.network[b].address)


CASES = {
    "closed-one-way": Case(3, closed_one_way, "unreached", ("h1", "h2"), 202),
    "wrong-interface": Case(3, wrong_interface, "unreached", ("h1",), 202),
    "elsewhere": Case(3, elsewhere, "store", ("h2",), 202, meets=False),
    "full-shm": Case(3, full_shm, "shm", ("h1",), 202),
    "another-torch": Case(3, another_torch, "torch", ("h1",), 202),
    "no-gpu": Case(3, no_gpu, "gpu", ("h1",), 202),
    "slow-core": Case(3, slow_core, "slow", ("h1",), 0),
    "clock": Case(3, clock_ahead, "clock", ("h1",), 0),
    "not-shared": Case(3, not_shared, "folder", ("h1",), 202),
    "descriptors": Case(3, few_descriptors, "descriptors", ("h1",), 202),
    "loss": Case(3, loss, "loss", ("h1",), 202),
    "few-ports": Case(3, few_ports, "collective", ("h1", "h2"), 202, torch="on"),
    "firewall": Case(5, firewall, "unreached", ("h1", "h3"), 202),
}
SOUND = (  # sound clusters: nodes, their names as Debian writes them, options
    (1, False, ("--nnodes=1",)),
    (2, False, ("--nnodes=2",)),
    (2, True, ("--nnodes=2",)),
    (3, False, ("--nnodes=1:3", f"--port-range={RANGE}")),
    (3, True, ("--nnodes=3", "--store-succession=off")),
    (4, False, ("--nnodes=4", "--rdzv-endpoint=h0:29400,h1:29400,h2:29400")),
    (5, True, ("--nnodes=2:5", "--store-succession=proof")),
    (6, False, ("--nnodes=6", f"--port-range={RANGE}")),
    (7, True, ("--nnodes=7",)),
    (8, False, ("--nnodes=8",)),
)
WITH_TORCH = (1, 3)  # of these


def check(made: Cluster, options: Iterable[str]) -> list[tuple[int, dict[str, Any], str]]:
    """Run the check on all hosts. Return of each the exit code, the JSON, and what it has written to stderr."""
    shared, running = made.folder / "shared", []
    for host, node in zip(made.network.hosts, made.nodes, strict=True):
        words = ["check", "--json", "--rdzv-endpoint=h0", "--rdzv-id=check", f"--join-timeout={COME}", f"--shared={shared}"]
        command = host.inside(*node.before, PYTHON, *node.program, *words, *options, *node.options)
        env = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}", **node.env}
        running.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    found = []
    for process in running:
        try:
            out, err = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        found.append((process.returncode, json.loads(out) if out.startswith("{") else {}, err))
    return found


def prepared(count: int, folder: Path, debian: bool, number: int) -> Cluster:
    (folder / "shared").mkdir()
    return Cluster(Hosts(count, folder, debian), folder, [Node() for _ in range(count)], number)


def one_case(name: str, number: int) -> Try:
    """Break a cluster in the way ``name`` and check it."""
    case = CASES[name]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        made = prepared(case.count, Path(folder), debian=number % 2 == 1, number=number)
        try:
            case.break_(made)
            found = check(made, [f"--nnodes={case.count}", f"--port-range={RANGE}", f"--torch={case.torch}"])
        finally:
            made.network.close()
    broken = int(case.names[-1][1:])
    wrong: list[str] = []
    for i, (code, said, err) in enumerate(found):
        expected = [(case.kind, list(case.names))] if case.meets or i == broken else [("missing", [])]
        named = [(one["kind"], one["nodes"]) for one in said.get("findings", ())]
        codes = case.code if i == broken else 0 if case.meets else 201
        wrong += unless((named == expected, f"h{i} has found {named}"), (code == codes, f"h{i} exited with {code}"))
        wrong += [err, *(f"{one['text']}; {one['advice']}" for one in said.get("findings", ()))] if wrong else []
    text = next((one["text"] for one in found[broken][1].get("findings", ())), "nothing found")
    return Try(f"{name}: {time.monotonic() - began:.1f} s, {text}", wrong)


def one_sound(number: int) -> Try:
    """Check a cluster that is sound."""
    count, debian, options = SOUND[number % len(SOUND)]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        made = prepared(count, Path(folder), debian, number)
        try:
            found = check(made, [*options, f"--torch={'on' if number in WITH_TORCH else 'off'}"])
        finally:
            made.network.close()
    wrong: list[str] = []
    for i, (code, said, err) in enumerate(found):
        texts = [one["text"] for one in said.get("findings", ())]
        seen = len(said.get("nodes", ())) == count
        wrong += unless((code == 0, f"h{i} exited with {code}: {err}"), (not texts, f"h{i} has found {texts}"), (seen, f"h{i} saw {said}"))
    return Try(f"sound, {count} nodes, {' '.join(options)}: {time.monotonic() - began:.1f} s", wrong)


def many(count: int) -> Try:
    """Check ``count`` nodes on this machine, each a fork of one process that has imported elastirun: nodes do that each on its own."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        code = FORKS.format(count=count, port=free_port(), folder=folder)
        found = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, timeout=LIMIT)
        results = [json.loads(path.read_text() or "{}") for path in Path(folder).iterdir()]
    results = [result for result in results if result]
    slowest = max((result["seconds"] for result in results), default=LIMIT)
    wrong = [f"{one['nodes']}: {one['text']}" for result in results for one in result["findings"]][:5]
    wrong += unless((len(results) == count, f"{len(results)} results\n{found.stderr[-1000:]}"), (slowest < 10, "more than 10 s"))
    return Try(f"{count} nodes on this machine: {time.monotonic() - began:.1f} s, the slowest node took {slowest:.1f} s", wrong)


def missing() -> str:
    """Return why the cases cannot be tried here; empty: they can."""
    if reason := hosts.missing():
        return reason
    if absent := [program for program in ("iptables", "prlimit", "mount") if shutil.which(program) is None]:
        return f"{absent[0]} is missing"
    trial = "ip link set lo up && iptables -A INPUT -m statistic --mode random --probability 0.1 -j DROP"
    tried = subprocess.run(["unshare", "--net", "sh", "-ec", trial], capture_output=True, text=True)
    return tried.stderr.strip()


def show_all(tries: Sequence[Try]) -> int:
    for one in tries:
        print(one.text, *one.wrong, sep="\n  ", flush=True)
    return sum(bool(one.wrong) for one in tries)


def main() -> None:
    made = parser(__doc__, 5)
    made.add_argument("--case", choices=[*CASES, "sound", "many"], help="this one only")
    made.add_argument("--nodes", type=int, default=64, metavar="N", help="of the case many")
    options = made.parse_args()
    if reason := missing():
        raise SystemExit(f"cannot be tried here: {reason}")
    wrong = count = 0
    for name in [options.case] if options.case else [*CASES, "sound", "many"]:
        for number in range(len(SOUND) if name == "sound" else options.tries):
            wrong += show_all([many(options.nodes) if name == "many" else one_sound(number) if name == "sound" else one_case(name, number)])
            count += 1
    print(f"{count - wrong} of {count} as expected")
    raise SystemExit(int(wrong > 0))


if __name__ == "__main__":
    main()

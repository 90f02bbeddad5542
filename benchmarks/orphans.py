"""Kills agents in four ways at twenty moments, and counts the processes that are left one second later.

    python -m benchmarks.orphans [--runs 200] [--torchrun 40] [--parallel 4]

Deaths: SIGKILL, SIGSEGV, the kernel's out-of-memory killer in a memory control group, and SIGSTOP for longer than the guard's
lease of 10 s (then the workers must be gone one second after the lease). Moments: while the agent starts and waits for other nodes,
while it spawns two workers, while the workers run, and while it waits for them to stop, which they refuse. Each worker has two
grandchildren, double-forked and in sessions of their own, and one of them is stopped. All processes are found by a variable in
the agent's environment.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lab import ELASTIRUN, TORCHRUN, Bench, Launcher, machine, shown, table
from elastirun.agent.host.cpus import cgroup_folders
from tests.support.left_behind import DAEMONS

SCRIPT = f"""
import json, os, signal, socket, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
{DAEMONS}bench = socket.socket(socket.AF_UNIX)
bench.connect(os.environ["BENCH_SOCKET"])
about = dict(at=time.monotonic(), node="", pid=os.getpid(), rank=int(os.environ["RANK"]), world=2, attempt="")
bench.sendall(json.dumps(about).encode() + bytes([10]))
while True:
    signal.pause()
"""
WORKERS = 2
RENDEZVOUS = ("--rdzv-backend=c10d", "--rdzv-id=orphans", "--rdzv-conf=last_call_timeout=1,is_host=1")
OPTIONS = ("--nnodes=1:2", f"--nproc-per-node={WORKERS}", *RENDEZVOUS)
DEATHS = {"kill -9": signal.SIGKILL, "SIGSEGV": signal.SIGSEGV, "out of memory": None, "SIGSTOP": signal.SIGSTOP}
AFTER = 1.0  # seconds from the death until processes count as left: elastirun's promise
PATIENCE = 5.0  # seconds until the left processes are looked up again: on a busy machine killed processes wait for a CPU to exit on
LEASE = 10.0  # seconds; the default of the guard's lease
LIMIT = 60.0  # seconds for a job to come up
PIECE = 8 << 20  # bytes that the hog allocates at a time
HOG = f"import sys\nsys.stdin.readline()\nhog = [bytearray(b'x') * {PIECE} for _ in range(64)]\nsys.stdin.readline()"


@dataclass(frozen=True)
class Moment:
    """The moment of a death.

    ``at``: in "rendezvous" a fraction of the time until the first worker is there, else seconds after the phase began.
    """

    phase: str
    at: float


PHASES = {
    "rendezvous": (0.3, 0.5, 0.7, 0.9, 0.98),
    "spawn": (0.0, 0.002, 0.005, 0.01, 0.03),
    "running": (0.0, 0.05, 0.1, 0.3, 0.6),
    "stopping": (0.0, 0.005, 0.02, 0.1, 0.5),
}
MOMENTS = tuple(Moment(phase, ats[i]) for i in range(5) for phase, ats in PHASES.items())


@dataclass(frozen=True)
class Case:
    launcher: Launcher
    death: str
    moment: Moment


@dataclass(frozen=True)
class Result:
    case: Case
    left: tuple[str, ...] = ()  # a description of each process that was left
    stayed: bool = False  # whether one was still there ``PATIENCE`` later
    trouble: str = ""  # the reason why nothing was measured


# -- processes in /proc


def read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def carriers(token: str) -> list[int]:
    """Return the living processes with ``token`` in their environment. A zombie has no environment."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return [pid for pid in pids if token.encode() in read(f"/proc/{pid}/environ")]


def has_spawned(agent: int) -> bool:
    """Tell whether the agent has a worker, even one that has not reported yet."""
    tasks = os.listdir(f"/proc/{agent}/task") if os.path.exists(f"/proc/{agent}/task") else []
    children = [int(pid) for task in tasks for pid in read(f"/proc/{agent}/task/{task}/children").split()]
    return any(b"\0LOCAL_RANK=" in read(f"/proc/{pid}/environ") for pid in children)


def is_guard(pid: int) -> bool:
    return b"/guard.py\0" in read(f"/proc/{pid}/cmdline")


def end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


# -- out of memory


@contextmanager
def memory_group() -> Iterator[Path]:
    """Make a memory control group, without a limit yet. Raises OSError when this machine allows none."""
    own = cgroup_folders(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text(), "memory")
    folder = Path(own[0] if own else "/nowhere") / f"elastirun-bench-{secrets.token_hex(4)}"
    folder.mkdir()
    try:
        if limit_file(folder) is None:
            raise OSError(f"no memory controller in {folder.parent}")
        yield folder
    finally:
        deadline = time.monotonic() + 5
        while folder.exists() and time.monotonic() < deadline:
            try:
                folder.rmdir()
            except OSError:  # killed processes are still exiting
                time.sleep(0.05)


def limit_file(folder: Path) -> tuple[Path, Path] | None:
    """Return the group's files for the limit and the use, of version 2 or 1."""
    names = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    return next(((folder / limit, folder / use) for limit, use in names if (folder / limit).exists()), None)


def run_out_of_memory(folder: Path, agent: int, hog: subprocess.Popen[bytes]) -> None:
    """Fill the group until the kernel kills a process of it. The agent is the first choice."""
    files = limit_file(folder)
    assert files is not None and hog.stdin is not None
    Path(f"/proc/{agent}/oom_score_adj").write_text("1000")
    limit, use = files
    limit.write_text(str(int(use.read_text()) + PIECE))
    hog.stdin.write(b"\n")
    hog.stdin.flush()


# -- one case


def run(case: Case, until_first_worker: float) -> Result:
    if case.death != "out of memory":
        return measure(case, until_first_worker, None)
    try:
        with memory_group() as group:
            return measure(case, until_first_worker, group)
    except OSError as error:
        return Result(case, trouble=f"no memory control group: {error}")


def measure(case: Case, until_first_worker: float, group: Path | None) -> Result:
    token = f"BENCH_TOKEN={secrets.token_hex(8)}"
    inside = ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh") if group else ()
    hog = subprocess.Popen([*inside, sys.executable, "-I", "-S", "-c", HOG], stdin=subprocess.PIPE) if group else None
    with Bench(case.launcher) as bench, hog or nullcontext():
        try:
            script = Path(bench.folder) / "worker.py"
            script.write_text(SCRIPT)
            arguments = [*OPTIONS, f"--rdzv-endpoint=127.0.0.1:{bench.port}", str(script)]
            agent = bench.agent("n", arguments, prefix=inside, env=dict([token.split("=")])).process
            reached = come_to(case.moment, bench, agent, until_first_worker)
            if not reached or agent.poll() is not None:
                return Result(case, trouble=f"{case.moment.phase} was not reached\n{bench.tails()}")
            left = strike(case, agent, token, group, hog)
            if left and case.launcher is ELASTIRUN:
                time.sleep(PATIENCE)
            return Result(case, tuple(left.values()), any(read(f"/proc/{pid}/environ") for pid in left))
        finally:
            for process in filter(None, (hog, *(a.process for a in bench.agents))):
                process.kill()
            for pid in carriers(token):
                if not is_guard(pid):  # the guard ends by itself, after its clean-up
                    end(pid)


def come_to(moment: Moment, bench: Bench, agent: subprocess.Popen[bytes], until_first_worker: float) -> bool:
    """Wait for the moment. Return False when it does not come within ``LIMIT``."""
    if moment.phase == "rendezvous":
        time.sleep(moment.at * until_first_worker)
        return True
    if moment.phase == "spawn":
        deadline = time.monotonic() + LIMIT
        while not has_spawned(agent.pid):
            if time.monotonic() > deadline or agent.poll() is not None:
                return False
            time.sleep(0.001)
    elif not bench.wait(lambda: len(bench.workers) == WORKERS, LIMIT):
        return False
    if moment.phase == "stopping":
        agent.send_signal(signal.SIGTERM)
    time.sleep(moment.at)
    return True


def strike(
    case: Case, agent: subprocess.Popen[bytes], token: str, group: Path | None, hog: subprocess.Popen[bytes] | None
) -> dict[int, str]:
    """Kill the agent. Return the processes that are left after their time: pid to description."""
    signum = DEATHS[case.death]
    if signum is not None:
        agent.send_signal(signum)
    elif group is not None and hog is not None:
        run_out_of_memory(group, agent.pid, hog)
    spared: set[int] = set()
    if signum == signal.SIGSTOP:  # the agent and its guard may live on
        time.sleep(LEASE + AFTER)
        spared = {pid for pid in carriers(token) if pid == agent.pid or is_guard(pid)}
    else:
        agent.wait(LIMIT)
        if hog is not None:
            hog.kill()
        time.sleep(AFTER)
    return {pid: about(pid) for pid in carriers(token) if pid not in spared}


def about(pid: int) -> str:
    status = dict(line.split(":\t", 1) for line in read(f"/proc/{pid}/status").decode().splitlines())
    killed = int(status.get("ShdPnd", "0"), 16) >> (signal.SIGKILL - 1) & 1
    what = "killed, but has not had a CPU to die on" if killed else f"not killed, {status.get('State', '?')}"
    return f"pid {pid}, {what}, load {os.getloadavg()[0]:.0f}: {read(f'/proc/{pid}/cmdline')[:200].decode(errors='replace')!r}"


def time_to_first_worker(launcher: Launcher) -> float:
    """Return the seconds until the first worker, the median of three runs."""
    times = []
    for _ in range(3):
        with Bench(launcher) as bench:
            script = Path(bench.folder) / "worker.py"
            script.write_text(SCRIPT.replace("signal.SIG_IGN", "signal.SIG_DFL"))
            began = time.monotonic()
            agent = bench.agent("n", [*OPTIONS, f"--rdzv-endpoint=127.0.0.1:{bench.port}", str(script)]).process
            token = f"BENCH_SOCKET={bench.folder}/s"
            if not come_to(Moment("spawn", 0.0), bench, agent, 0.0):
                raise SystemExit(f"{launcher.name} did not come up\n{bench.tails()}")
            times.append(time.monotonic() - began)
            agent.kill()
            agent.wait()
            for pid in carriers(token):
                end(pid)
    return statistics.median(times)


# -- all of them


def cases(launcher: Launcher, runs: int) -> list[Case]:
    """Return ``runs`` cases: every death in turn, at every moment in turn."""
    deaths = list(DEATHS)
    return [Case(launcher, deaths[i % len(deaths)], MOMENTS[i // len(deaths) % len(MOMENTS)]) for i in range(runs)]


def alternating(first: Sequence[Case], second: Sequence[Case]) -> list[Case]:
    """Merge both lists into one, evenly."""
    places = [((i + 0.5) / len(each), case) for each in (first, second) for i, case in enumerate(each)]
    return [case for _, case in sorted(places, key=lambda place: place[0])]


def rows(results: Sequence[Result]) -> list[list[str]]:
    launchers = list(dict.fromkeys(result.case.launcher for result in results))
    found = [["death", "moment", *(f"{launcher.name}: runs that left processes" for launcher in launchers)]]
    for death in DEATHS:
        found += [[death, phase, *(cell(results, launcher, death, phase) for launcher in launchers)] for phase in PHASES]
    found.append(["all", "", *(cell(results, launcher, "", "") for launcher in launchers)])
    return found


def cell(results: Sequence[Result], launcher: Launcher, death: str, phase: str) -> str:
    chosen = [r for r in results if r.case.launcher is launcher and death in r.case.death and phase in r.case.moment.phase]
    measured = [r for r in chosen if not r.trouble]
    left = [len(r.left) for r in measured if r.left]
    if not measured:
        return "not measured" if chosen else "-"
    return f"{len(left)} of {len(measured)}" + (f" (up to {max(left)} processes)" if left else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--torchrun", type=int, default=40, help="runs of torchrun, 0: none")
    parser.add_argument("--parallel", type=int, default=4, help="runs at a time; most of a SIGSTOP is waiting")
    options = parser.parse_args()
    print(machine(), flush=True)
    todo = alternating(cases(ELASTIRUN, options.runs), cases(TORCHRUN, options.torchrun))
    first = {launcher: time_to_first_worker(launcher) for launcher in dict.fromkeys(case.launcher for case in todo)}
    for launcher, took in first.items():
        print(f"{shown(launcher, [*OPTIONS, '--rdzv-endpoint=127.0.0.1:PORT', 'worker.py'])}: first worker after {took:.2f} s")
    results = []
    with ThreadPoolExecutor(options.parallel) as pool:
        for result in pool.map(lambda case: run(case, first[case.launcher]), todo):
            results.append(result)
            case = result.case
            if result.trouble or (result.left and case.launcher is ELASTIRUN):
                later = f"left, {'still there' if result.stayed else 'gone'} {PATIENCE:.0f} s later:"
                what = result.trouble or "\n    ".join((later, *result.left))
                print(f"{case.launcher.name}, {case.death} at {case.moment}: {what}", flush=True)
    print(table(rows(results)))
    for reason in sorted({r.trouble.splitlines()[0] for r in results if r.trouble}):
        print(f"not measured: {sum(r.trouble.startswith(reason) for r in results)} runs, {reason}")
    return int(any(r.left for r in results if r.case.launcher is ELASTIRUN))


if __name__ == "__main__":
    sys.exit(main())

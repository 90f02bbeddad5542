"""Disturb a live job at chosen moments of a change of the world: it goes on, and no step and no sample is lost or doubled.

    python -m tests.system.live_disturbances --tries 20 [--only NAME …] [--preload torch] [--keep FOLDER]

    hang-in-switch    a worker stands still while it parks, enters a round, makes the next world, or takes part in a slice of the state
    death-in-switch   a worker dies there
    two-deaths        two of four workers die at one moment, two agents of three with their workers, or two workers that change worlds
    sender-dies       the worker that sends the state dies between two slices
    newcomer-dies     the new worker dies in its rehearsal, when it is taken in, or between two slices, there with its agent, too
    store-host-dies   the agent that hosts the rendezvous store dies with its workers, in a step or in a change of the world

Each kind has several ways, which take turns. A trap in the worker (tests/support/live_traps.py) disturbs at the very point, and says so in
the log. A try ends when as many workers as before train in a new world and are further than before. It went on *live* if all workers that
were not disturbed are still there, else by *restart*. The seconds without a step are counted from the disturbance on; a step is done when
all ranks have made it. A worker that hangs outside of a park is found by ``--hang-timeout`` and
``--set first-step-timeout``, in seconds here.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count, cycle, islice, pairwise
from pathlib import Path

from tests.support import live_log, live_time
from tests.support.live_traps import STANDS, set_trap
from tests.system.live_kills import SAMPLES, Job, children, is_worker, job

WIDTH, SLICE = 128, 16 << 10  # of the network, and bytes of a slice: its state comes in a dozen slices
HANG, FIRST_STEP = 3, 12  # seconds: --hang-timeout, --set first-step-timeout; a new worker imports torch before its first step
RECENT = 20_000  # lines of the log that a try reads
STEP = 0.01  # seconds in each step that its ranks sleep


@dataclass(frozen=True)
class Done:
    """What one way did to the job."""

    survivors: set[int]  # pids of workers that nothing was done to
    disturbed: set[int]  # pids of those that cannot be in a later world
    at: float  # when, on the clock of the log
    round: int  # the world in which that was, as in the log
    absent: tuple[int, ...] = ()  # nodes to start again when the others have made a step


@dataclass(frozen=True)
class Way:
    """One way to disturb a job of ``nodes`` agents with ``nproc`` workers each."""

    name: str
    disturb: Callable[[Job, list[live_log.Line]], Done]  # gets the job, and its workers by rank
    nodes: int = 1
    nproc: int = 4

    @property
    def size(self) -> int:
        return self.nodes * self.nproc


@dataclass
class Outcome:
    """What became of the tries of one kind."""

    ways: Counter[str] = field(default_factory=Counter)  # "live", "by restart", "not at all"
    longest: float = 0.0  # seconds without a step
    where: str = ""  # the way with the longest time
    wrong: list[str] = field(default_factory=list)


# -- ways -----------------------------------------------------------------------------------------------------------------


def pids_of(lines: Sequence[live_log.Line]) -> set[int]:
    return {line["pid"] for line in lines}


def traps_of(running: Job) -> Path:
    return Path(running.env["TEST_TRAPS"])


def sprung(running: Job, since: float, number: int = 1) -> list[live_log.Line]:
    """Wait until so many traps were sprung since the moment ``since``. Return their lines."""
    return sprung_since(running.wait(lambda lines: len(sprung_since(lines, since)) >= number), since)


def sprung_since(lines: Sequence[live_log.Line], since: float) -> list[live_log.Line]:
    return [line for line in live_log.of(lines[-RECENT:], "sprung") if line["at"] > since]


def in_switch(point: str, signum: int, of: int | None = None) -> Callable[[Job, list[live_log.Line]], Done]:
    """Return a way: kill a worker, and let a process at ``point`` get ``signum``. ``of``: its index among the survivors; None: any."""

    def disturb(running: Job, before: list[live_log.Line]) -> Done:
        victim, *others = (line["pid"] for line in reversed(before))
        since = time.monotonic()
        set_trap(traps_of(running), point, signum, by=0 if of is None else others[of])
        os.kill(victim, signal.SIGKILL)
        until_sprung(running, before, point, since)
        return done(running, before, victim, since)

    return disturb


def until_sprung(running: Job, before: list[live_log.Line], point: str, since: float) -> None:
    """Kill the new worker again and again until the trap at ``point`` is sprung. Near the end of an epoch the state comes in few slices."""
    killed = {before[-1]["pid"]}
    while point.startswith(("sends", "sent", "takes", "took")):
        lines = running.wait(partial(is_sprung_or_whole, since, len(before), frozenset(killed)))
        if sprung_since(lines, since):
            return
        [new] = pids_of(live_log.newest_round(lines)[0]) - pids_of(before)
        killed.add(new)
        os.kill(new, signal.SIGKILL)


def is_sprung_or_whole(since: float, size: int, killed: frozenset[int], lines: Sequence[live_log.Line]) -> bool:
    return bool(sprung_since(lines, since)) or is_whole(lines, size, 0, set(killed))


def both_in_switch(point: str) -> Callable[[Job, list[live_log.Line]], Done]:
    """Return a way: kill a worker, and let two of the others kill themselves at ``point``."""

    def disturb(running: Job, before: list[live_log.Line]) -> Done:
        victim, *others = (line["pid"] for line in reversed(before))
        since = time.monotonic()
        for pid in others[:2]:
            set_trap(traps_of(running), point, signal.SIGKILL, by=pid)
        os.kill(victim, signal.SIGKILL)
        return done(running, before, victim, since, traps=2)

    return disturb


def in_agreement(running: Job, before: list[live_log.Line]) -> Done:
    """Stop a worker that is to agree on a checkpoint with the others, in a later world of a round, and kill a worker then.

    The others wait for the stopped one when they are asked to park.
    """
    since = time.monotonic()
    set_trap(traps_of(running), "agrees next", signal.SIGSTOP, by=before[1]["pid"])
    os.kill(before[-1]["pid"], signal.SIGKILL)
    found = done(running, before, before[-1]["pid"], since)
    [*_, new] = whole(running, len(before), before[0]["round"], set(), steps=0)
    at = time.monotonic()
    os.kill(new["pid"], signal.SIGKILL)
    return Done(found.survivors, found.disturbed | {new["pid"]}, at, found.round)


def done(running: Job, before: list[live_log.Line], victim: int, since: float, traps: int = 1) -> Done:
    """Wait until the traps were sprung. ``victim``: who was killed for a change of the world."""
    lines = sprung(running, since, traps)
    disturbed = {pid for line in lines for pid in line["pids"]} | {victim}
    return Done(pids_of(before) - disturbed, disturbed, lines[-1]["at"], lines[-1]["round"])


def two_workers(running: Job, before: list[live_log.Line]) -> Done:
    """Kill two workers at one moment."""
    disturbed, at = pids_of(before[1:3]), time.monotonic()
    for pid in disturbed:
        os.kill(pid, signal.SIGKILL)
    return Done(pids_of(before) - disturbed, disturbed, at, before[0]["round"])


def two_agents(running: Job, before: list[live_log.Line]) -> Done:
    """Kill two agents with their workers at one moment: those that do not host the store."""
    host, at = host_of(running, before), time.monotonic()
    absent = tuple(node for node in running.agents if node != host)
    return lose(running, before, absent, at)


def store_host(running: Job, before: list[live_log.Line]) -> Done:
    """Kill the agent that hosts the store, with its workers."""
    return lose(running, before, (host_of(running, before),), time.monotonic())


def store_host_at(point: str) -> Callable[[Job, list[live_log.Line]], Done]:
    """Return a way: kill a worker of another agent, and at ``point`` the agent that hosts the store, with its workers."""

    def disturb(running: Job, before: list[live_log.Line]) -> Done:
        host, since, first = host_of(running, before), time.monotonic(), before[0]["pid"]
        agent = running.agents[host].pid
        others = [pid for pid in children(agent) if is_worker(pid) and pid != first]
        set_trap(traps_of(running), point, signal.SIGKILL, by=first, pids=[agent, *others, 0])
        os.kill(before[-1]["pid"], signal.SIGKILL)
        until_sprung(running, before, point, since)
        found = done(running, before, before[-1]["pid"], since)
        running.agents.pop(host).wait()
        return Done(found.survivors, found.disturbed, found.at, found.round, (host,))

    return disturb


def new_agent(running: Job, before: list[live_log.Line]) -> Done:
    """Kill an agent with its worker, start another one, and kill this one when its new worker has a part of the state."""
    host = host_of(running, before)
    node = max(node for node in running.agents if node != host)
    since = time.monotonic()
    lost = lose(running, before, (node,), since)
    running.start(node)
    set_trap(traps_of(running), "takes 3", signal.SIGKILL, pids=[running.agents[node].pid, 0])
    [line] = sprung(running, since)
    running.agents.pop(node).wait()
    return Done(lost.survivors, lost.disturbed | set(line["pids"]), line["at"], line["round"], (node,))


def host_of(running: Job, before: list[live_log.Line]) -> int:
    """Return the node that hosts the store: that of rank 0, since nodes keep their order and the next one takes the store over."""
    return next(node for node, agent in running.agents.items() if before[0]["pid"] in children(agent.pid))


def lose(running: Job, before: list[live_log.Line], nodes: tuple[int, ...], at: float) -> Done:
    """Kill the agents of ``nodes`` with their workers."""
    workers = {node: [pid for pid in children(running.agents[node].pid) if is_worker(pid)] for node in nodes}
    for pid in [*(running.agents[node].pid for node in nodes), *(pid for pids in workers.values() for pid in pids)]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for node in nodes:
        running.agents.pop(node).wait()
    disturbed = {pid for pids in workers.values() for pid in pids}
    return Done(pids_of(before) - disturbed, disturbed, at, before[0]["round"], nodes)


def ways_at(signum: int, points: Sequence[str], word: str, of: int | None = None) -> list[Way]:
    return [Way(f"{word} at: {point}", in_switch(point, signum, of)) for point in points]


OF_CHANGE = ("parks", "comes first", "came first", "comes next", "came next", "switches", "switched")  # points for workers with a state
KINDS: dict[str, list[Way]] = {
    "hang-in-switch": [
        *ways_at(STANDS, ["parks"], "main thread stands", 0),
        *ways_at(signal.SIGSTOP, [*OF_CHANGE, "sends 3", "took 3"], "stopped"),
        Way("stopped in an agreement", in_agreement),
    ],
    "death-in-switch": [
        *ways_at(signal.SIGKILL, OF_CHANGE, "last rank dies", 0),
        *ways_at(signal.SIGKILL, OF_CHANGE, "rank 0 dies", 2),
    ],
    "two-deaths": [
        Way("two workers", two_workers),
        Way("two agents", two_agents, 3, 1),
        *(Way(f"both at: {point}", both_in_switch(point)) for point in ("parks", "came first", "came next", "switched")),
    ],
    "sender-dies": ways_at(signal.SIGKILL, ["sends 1", "sent 3", "sends 6", "sent 9"], "dies"),
    "newcomer-dies": [
        *ways_at(signal.SIGKILL, ["rehearses", "rehearsed", "comes new", "came new", "takes 3", "took 6"], "dies"),
        Way("its agent dies, too", new_agent, 3, 1),
    ],
    "store-host-dies": [
        Way("in a step", store_host, 3, 1),
        *(Way(f"host dies at: {point}", store_host_at(point), 3, 2) for point in ("parks", "came next", "sends 3")),
    ],
}


# -- tries ----------------------------------------------------------------------------------------------------------------


def once(running: Job, way: Way) -> tuple[bool, float]:
    """Disturb the job once, and wait until it has gone on. Return whether it did so live, and the seconds without a step."""
    before = whole(running, way.size, 0, set())
    what = way.disturb(running, before)
    if what.absent:
        furthest = max(line["step"] for line in live_log.of(running.lines()[-RECENT:], "made"))
        running.wait(lambda lines: further(lines, furthest, what.round))
        for node in what.absent:
            running.start(node)
    after = whole(running, way.size, what.round, what.disturbed)
    furthest = max(line["step"] for line in live_log.of(running.lines()[-RECENT:], "made") if line["round"] < after[0]["round"])
    running.wait(lambda lines: further(lines, furthest, what.round))
    live = bool(what.survivors) and what.survivors <= pids_of(after)
    return live, longest_pause(running.lines()[-RECENT:], what.at)


def whole(running: Job, size: int, after: int, without: set[int], steps: int = 1) -> list[live_log.Line]:
    """Wait until a world after world ``after`` with ``size`` workers, none of them ``without``, has made a step. Return them by rank.

    ``steps``: 0: until it has begun.
    """

    here, _ = live_log.newest_round(running.wait(lambda lines: is_whole(lines, size, after, without, steps)))
    return sorted(here, key=lambda line: int(line["rank"]))


def is_whole(lines: Sequence[live_log.Line], size: int, after: int, without: set[int], steps: int = 1) -> bool:
    here, made = live_log.newest_round(lines)
    pids = pids_of(here)
    return bool(here) and here[0]["round"] > after and len(here) == size and not pids & without and (made >= pids or not steps)


def further(lines: Sequence[live_log.Line], step: int, after: int) -> bool:
    """Return whether a step behind ``step`` was made in a world after world ``after``."""
    return any(line["step"] > step and line["round"] > after for line in live_log.of(lines[-100:], "made"))


def longest_pause(lines: Sequence[live_log.Line], at: float) -> float:
    """Return the longest time without a step that counts, from the moment ``at`` on."""
    steps = live_time.done([line for line in live_log.of(lines, "made") if line["at"] > at])
    times = [at, *sorted(when for when, _ in steps.values())]
    return max((later - earlier for earlier, later in pairwise(times)), default=0.0)


def play(folder: Path, tries: Sequence[Way], options: Sequence[str], outcome: Outcome) -> None:
    """Disturb a job in one way after the other, all of one size, and judge its log. After a try that failed, another job goes on."""
    left = list(tries)
    for number in count():
        if not left:
            return
        here, first = folder / f"job{number}", left[0]
        (here / "traps").mkdir(parents=True)
        given = {"TEST_TRAPS": str(here / "traps"), "TEST_SLICE": str(SLICE), "TEST_WIDTH": str(WIDTH), "TEST_PAUSE": str(STEP)}
        given |= {"TEST_CHECKPOINTS": str(here / "checkpoints"), "TEST_EVERY": "50"}
        with job(here, first.nodes, first.nproc, *options, slots={}, hosts=first.nodes, **given) as running:
            while left:
                way = left.pop(0)
                try:
                    live, pause = once(running, way)
                except AssertionError as error:
                    outcome.ways["not at all"] += 1
                    outcome.wrong.append(f"{way.name}: {error}")
                    print(f"  {way.name}: it did not go on", flush=True)
                    break
                outcome.ways["live" if live else "by restart"] += 1
                outcome.longest, outcome.where = max((outcome.longest, outcome.where), (pause, way.name))
                print(f"  {way.name}: {'live' if live else 'by restart'}, {pause:.2f} s without a step", flush=True)
        lines, _ = live_log.read(running.log)
        outcome.wrong += live_log.violations(lines, SAMPLES)


def by_size(ways: Sequence[Way], tries: int) -> list[list[Way]]:
    """Return ``tries`` of the ways in turn, those of jobs of one size together."""
    chosen = list(islice(cycle(ways), tries))
    sizes = dict.fromkeys((way.nodes, way.nproc) for way in chosen)
    return [[way for way in chosen if (way.nodes, way.nproc) == size] for size in sizes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=20, help="of each kind")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--preload", default="torch")
    parser.add_argument("--keep", help="a folder for the logs, which stay")
    args = parser.parse_args()
    options = [f"--preload={args.preload}"] * bool(args.preload)
    options += [f"--hang-timeout={HANG}", f"--set=first-step-timeout={FIRST_STEP}"]
    failed = False
    with ExitStack() as stack:
        folder = Path(args.keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="live-disturbances-")))
        for kind in args.only:
            outcome = Outcome()
            for number, ways in enumerate(by_size(KINDS[kind], args.tries)):
                play(folder / kind / str(number), ways, options, outcome)
            ways = ", ".join(f"{number} {how}" for how, number in sorted(outcome.ways.items()))
            print(f"{kind}: {args.tries} tries, went on {ways}; {len(outcome.wrong)} violations", end="")
            print(f"; longest time without a step {outcome.longest:.2f} s ({outcome.where}); load {os.getloadavg()[0]:.1f}")
            for line in outcome.wrong[:20]:
                print(f"  {line}")
            failed = failed or bool(outcome.wrong)
    sys.exit(failed)


if __name__ == "__main__":
    main()

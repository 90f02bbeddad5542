"""One play: the job begins, the faults come and go, the job ends; then everything is checked."""

from __future__ import annotations

import math
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.chaos import checks
from tests.chaos.checks import Done
from tests.chaos.faults import Fault, begin
from tests.chaos.job import Job, Terms, Ticks
from tests.support.left_behind import own_files

LOOK = 0.1  # seconds between two looks
CALM = 0.7  # seconds between two steps
BOUND = 90.0  # seconds until all are in the newest round after the last fault has healed; a machine shared with others is slow
END = 60.0  # seconds until all have ended


class Play:
    """``folder`` keeps what everybody writes; ``say`` gets lines for people."""

    def __init__(self, folder: Path, nodes: int, terms: Terms, seed: int, say: Callable[[str], None] = print, bound: float = BOUND) -> None:
        self._say, self._bound = say, bound
        self.settled: list[float] = []  # seconds after each step
        self.held: list[float] = []  # for how many seconds newcomers had to wait meanwhile (docs/decisions/0011)
        self.excused: list[str] = []
        self.late = ""  # why not everybody was in the newest round in time
        self.done: list[Done] = []
        self.codes: Counter[str] = Counter()
        self.held_up = 0.0  # seconds for which this process did not get to run: a busy machine is no fault of the job
        self.longest = 0.0  # of them, at one time
        self._began = time.monotonic()
        self.job = Job(folder, nodes, terms, seed)

    def run(self, steps: list[list[Fault]], calm: float = 0.0) -> list[str]:
        """All of it. Returns what did not hold."""
        found: list[str] = []
        try:
            self.late = self._settle("the start")
            for step in steps:
                if not self.late:
                    self._step(step)
                    self.late = self._settle(", ".join(map(str, step)))
            if not self.late:
                self._wait(calm)
            found += [self.late] if self.late else []
            ending = time.monotonic()
            found += self._end()
            for agent in self.job.all:
                agent.process.poll()
                agent.ended = agent.ended or time.monotonic()
                self.codes[str(agent.process.returncode)] += 1
            found += checks.broken(self.job, self.done, ending)
            self.excused = checks.excused(self.job, self.done, ending)
        finally:
            self.job.close()
        return found

    def starved(self) -> bool:
        """Whether this machine did not let everybody run: then it is no fault of the job that it was late."""
        return self.longest > 1.0 or checks.starved(self.job.all) > 0

    def report(self) -> str:
        """The figures, in lines."""
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(Counter(fault.kind for fault in self.done).items()))
        files = [Ticks.of(path) for path in self.job.ticks.iterdir()]
        rounds = {(ticks.store, ticks.round) for ticks in files}
        beside = [(one, other, seconds) for one, other, seconds in checks.overlaps(files) if one[0] != other[0]]
        took = sorted(self.settled) or [0.0]
        free = [seconds for seconds, held in zip(self.settled, self.held, strict=True) if not held]
        noisy = [f for f in self.done if f.kind == "noise"]
        lost = checks.lost(self.job.all)
        by_noise = sum(any(f.begin <= when <= f.end for f in noisy) for when, _, _ in lost)
        return "\n".join(
            [
                f"{len(self.done)} faults in {time.monotonic() - self._began:.0f} s: {kinds}",
                f"{len(rounds)} rounds with workers in {len({store for store, _ in rounds})} stores, {len(self.job.all)} agents,"
                f" ended with {dict(self.codes)}",
                f"all in the newest round {took[len(took) // 2]:.1f} s after the last fault in the middle,"
                f" {took[-1]:.1f} s at most; {max(free, default=0.0):.1f} s at most"
                f" in the {len(free)} of {len(self.settled)} times when no newcomer was held",
                f"called lost {len(lost)} times, {by_noise} of them under loss and delay;"
                f" {checks.starved(self.job.all)} agents stood still by themselves, this process for {self.longest:.1f} s at most;"
                f" excused for that: {self.excused};"
                f" rounds of two stores complete at once: {[round(seconds, 2) for _, _, seconds in beside]}",
                *checks.gave_up(self.job.all, self._began),
            ]
        )

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.job.tend()
            before = time.monotonic()
            time.sleep(min(LOOK, left))
            late = time.monotonic() - before - min(LOOK, left)
            self.held_up, self.longest = self.held_up + late, max(self.longest, late)

    def _step(self, step: list[Fault]) -> None:
        """Each fault begins and ends in its time."""
        origin, waiting, on = time.monotonic(), sorted(step, key=lambda f: f.after), list[tuple[float, Callable[[], None], Done]]()
        while waiting or on:
            now = time.monotonic() - origin
            if waiting and now >= waiting[0].after:
                fault = waiting.pop(0)
                touched = fault.touched(len(self.job.agents), self.job.terms)
                done = Done(str(fault), fault.kind, fault.node, touched, time.monotonic())
                self.done.append(done)
                on.append((now + fault.seconds, begin(self.job, fault), done))
            for entry in [entry for entry in on if now >= entry[0]]:
                on.remove(entry)
                entry[1]()
                entry[2].end = time.monotonic()
            due = min([fault.after for fault in waiting] + [entry[0] for entry in on], default=-math.inf)
            self._wait(min(due - (time.monotonic() - origin), LOOK))

    def _settle(self, after: str) -> str:
        """Wait until everybody is in the newest round. Returns why not, when they are not within the bound."""
        origin, held_up, before = time.monotonic(), self.held_up, self.job.written()
        while why := self.job.unsettled(origin):
            if time.monotonic() > origin + self._bound + self.job.hold() + 3 * (self.held_up - held_up):
                return f"not in one round {self._bound:g} s after {after}: {why}"
            self._wait(LOOK)
        took, held = time.monotonic() - origin, self.job.hold(before)
        self.settled.append(took)
        self.held.append(held)
        note = f"; newcomers were held for {held:g} s" if held else ""
        now = f"{time.monotonic() - self._began:6.1f} s  {len(self.done):3} faults"
        self._say(f"{now}  settled {took:4.1f} s after {after}{note}")
        self._wait(CALM)
        return ""

    def _end(self) -> list[str]:
        """Stop all agents with SIGTERM and return what is left running."""
        self.job.stopping = True
        for agent in self.job.agents:
            agent.send(signal.SIGTERM)
        until = time.monotonic() + END
        hosts = self.job.network.hosts
        agents = [agent.process for agent in self.job.agents]  # one that is ending is for a moment in no namespace, and not gone
        own = hosts[: len(agents)]
        while time.monotonic() < until and (any(agent.poll() is None for agent in agents) or any(host.pids() for host in own)):
            self._wait(LOOK)
        self.job.stop_etcd()
        left = [f"{host.name}: {pid} {_command(pid)}" for host in hosts for pid in host.pids()]
        return [f"left running at the end: {what}" for what in left] + [f"left in TMPDIR: {name}" for name in own_files(self.job.temporary)]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "gone meanwhile"

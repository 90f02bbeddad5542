"""Many nodes without workers in a few processes, which report their rounds: code that the benchmarks of the rendezvous share."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from benchmarks.lab import machine, table

PROCESSES = 8
PATIENCE = 300.0  # seconds for an answer of every process; many nodes on few cores take long to start
SPAWN = multiprocessing.get_context("spawn")

F = TypeVar("F", bound="Fleet")
Rows = Iterator[tuple[list[str], list[str]]]  # cells, and notes


@dataclass
class Plan:
    """The share of one process: the nodes ``first``, ``first + step``, ... of ``nodes``. ``endpoint``: the address of the store."""

    endpoint: str
    nodes: int
    first: int
    step: int

    @property
    def mine(self) -> range:
        return range(self.first, self.nodes, self.step)


def report(head: list[str], rows: Rows) -> None:
    """Print each row with its notes as soon as it was measured, and the whole table at the end."""
    print(machine(), flush=True)
    found = [head]
    for cells, notes in rows:
        found.append(cells)
        print("   ", *cells, *notes, sep="  ", flush=True)
    print("\n" + table(found))


def split(endpoint: str) -> tuple[str, int]:
    """Return host and port of ``host:port``."""
    host, _, port = endpoint.rpartition(":")
    return host, int(port)


class Fleet:
    """The processes of one measurement. Over a pipe each one takes commands, ``(name, ...)``, and sends reports, ``(what, ...)``.

    The nodes' processes say ``connected`` once, answer ``go`` with ``("gone", time)``, and report ``("round", node, members, time)`` for
    each start of workers, ``("stopped", node, reason)`` and ``("ended", node, reason)``. Times in seconds of one clock of this machine.
    """

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.sizes: dict[int, tuple[int, float]] = {}  # by node: members of its round, and since when
        self.notes: list[str] = []
        self._processes: list[Any] = []
        self._pipes: list[Any] = []  # of the processes that run nodes

    def __enter__(self: F) -> F:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def start(self, target: Callable[..., None], *arguments: object) -> tuple[Any, Connection]:
        """Start a process that calls ``target`` with ``arguments`` and its end of a pipe. Return the process and our end."""
        ours, theirs = SPAWN.Pipe()
        process = SPAWN.Process(target=target, args=(*arguments, theirs), daemon=True)
        process.start()
        self._processes.append(process)
        return process, ours

    def start_nodes(self, target: Callable[..., None], endpoint: str, *arguments: object, first: int = 0) -> None:
        """Start the nodes from ``first`` on. Each process calls ``target(*arguments, plan, pipe)``."""
        step = min(PROCESSES, self.nodes - first)
        for one in range(first, first + step):
            _, ours = self.start(target, *arguments, Plan(endpoint, self.nodes, one, step))
            self._pipes.append(ours)

    def go(self) -> float:
        """Make all nodes join, and return when the last one began."""
        self.tell("go")
        return max(float(answer[0]) for answer in self.answers("gone"))

    def in_round(self, size: int, limit: float) -> float | None:
        """Return when ``size`` nodes had a round of ``size``; None when that took longer than ``limit`` seconds."""
        deadline = time.monotonic() + limit
        while True:
            since = [t for n, t in self.sizes.values() if n == size]
            if len(since) >= size:
                return max(since)
            if not self.hear(deadline - time.monotonic()):
                found = statistics.multimode(n for n, _ in self.sizes.values())[:3]
                self.notes.append(f"{len(since)} of {size} nodes after {limit:g} s (most have a round of {found})")
                return None

    def hear(self, seconds: float) -> list[tuple[str, list[Any]]]:
        """Return the messages that are ready, after ``seconds`` at most; empty when there is none."""
        heard: list[tuple[str, list[Any]]] = []
        ready: list[Any] = wait(self._pipes, max(0.0, seconds))
        for pipe in ready:
            what, *rest = pipe.recv()
            heard.append((what, rest))
            self.note(what, rest)
        return heard

    def note(self, what: str, rest: list[Any]) -> None:
        """Take in one message."""
        if what == "round":
            self.sizes[rest[0]] = (rest[1], rest[2])
        elif what in ("ended", "stopped") and f"{what}: {rest[1]}" not in self.notes[:8]:
            self.notes.append(f"{what}: {rest[1]}")

    def tell(self, *command: object) -> None:
        for pipe in self._pipes:
            pipe.send(command)

    def answers(self, what: str) -> list[list[Any]]:
        """Return one answer of every process that runs nodes."""
        found: list[list[Any]] = []
        deadline = time.monotonic() + PATIENCE
        while len(found) < len(self._pipes):
            heard = self.hear(deadline - time.monotonic())
            if not heard:
                raise SystemExit(f"no answer to {what!r} within {PATIENCE:g} s: {self.notes}")
            found += [rest for name, rest in heard if name == what]
        return found

    def rest(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.hear(left)

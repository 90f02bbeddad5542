"""Routes of the workers' output in one round: to the agent's own streams, to the console line by line, to files; keeps the last lines.

Each stream of each worker has one of seven routes (``route_of``), by torchrun's rules. If a stream needs only a file, or the agent's
own descriptor, the worker gets that descriptor. Every other stream comes through a pipe that the agent's loop reads.
"""

from __future__ import annotations

import math
import os
import selectors
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial

from elastirun.agent.output.console import Console, Stream
from elastirun.agent.output.disk import DiskThread
from elastirun.agent.output.held_traceback import HeldTraceback
from elastirun.agent.output.lines import PARTIAL_LINE_DELAY, PIECE_DELAY, LastLines, PrefixedLines, WholeLines, may_tear, show_when_due
from elastirun.agent.output.log_files import LogFile, close_all
from elastirun.agent.processes.spawn import WorkerSpec
from elastirun.config import NO_FILES, LogPolicy, Std

STREAM_NAMES = {Std.OUT: "stdout", Std.ERR: "stderr"}
_READ_SIZE = 64 * 1024  # bytes; the default capacity of a pipe
_DRAIN_LIMIT = 1 << 20  # bytes read of a pipe when its worker has ended; another process may keep on writing


class Route(Enum):
    """The destinations of one stream of one worker."""

    INHERIT = "the agent's own stream"
    DEVNULL = "nowhere"
    FILE = "a file, given to the worker"
    CAPPED = "a pipe; a file of limited size"
    TEE = "a pipe; a file and the console, in prefixed lines"
    RAW = "a pipe; the console, unchanged but in whole lines"
    QUIET = "a pipe; only the last lines are kept"


def route_of(policy: LogPolicy, local_rank: int, stream: Std, shown: bool) -> Route:
    """Return the route of a stream. ``shown``: whether the console shows this rank.

    --tee comes before --redirects. A rank that the console does not show keeps its file. The agent always keeps the last lines of stderr.
    """
    files = policy.log_dir != NO_FILES
    teed = bool(policy.tee.of(local_rank) & stream)
    if teed and shown:
        return Route.TEE
    if files and (teed or policy.redirects.of(local_rank) & stream):
        return Route.CAPPED if policy.limit else Route.FILE
    if stream is Std.OUT:
        return Route.INHERIT if shown else Route.DEVNULL
    return Route.RAW if shown else Route.QUIET


@dataclass(frozen=True)
class RoundFiles:
    """The files of one round on this node."""

    streams: Mapping[tuple[int, Std], str] = field(default_factory=dict)  # by local rank and stream
    filtered: Mapping[Std, str] = field(default_factory=dict)  # what the filters fill
    folders: Sequence[str] = ()  # to be made before, outermost first

    @property
    def paths(self) -> list[str]:
        """Every file once: a plug-in may send two streams to one file."""
        return list(dict.fromkeys((*self.streams.values(), *self.filtered.values())))

    def only(self, local_ranks: Collection[int]) -> RoundFiles:
        """Return the files without those of other workers."""
        return replace(self, streams={key: path for key, path in self.streams.items() if key[0] in local_ranks})


def files_of(policy: LogPolicy, attempt_dir: str, routes: Mapping[int, Mapping[Std, Route]]) -> RoundFiles:
    """Return the files for the workers with these ``routes``, by local rank, below ``attempt_dir``. Pure."""
    kept = (Route.FILE, Route.CAPPED, Route.TEE)
    streams = {
        (i, stream): f"{attempt_dir}/{i}/{STREAM_NAMES[stream]}.log"
        for i, own in routes.items()
        for stream, route in own.items()
        if route in kept
    }
    filtered = {stream: f"{attempt_dir}/filtered_{STREAM_NAMES[stream]}.log" for stream in filtered_streams(policy, routes)}
    return RoundFiles(streams, filtered, [attempt_dir, *(f"{attempt_dir}/{local_rank}" for local_rank in routes)])


def filtered_streams(policy: LogPolicy, routes: Mapping[int, Mapping[Std, Route]]) -> set[Std]:
    """Return the streams of which some teed lines go to a file of their own."""
    filters = {Std.OUT: policy.stdout_filters, Std.ERR: policy.stderr_filters}
    return {stream for own in routes.values() for stream, route in own.items() if route is Route.TEE and filters[stream]}


@dataclass(eq=False)
class Pump:
    """The agent's end of one worker pipe: passes all data to each of ``to``, and stops reading while one of ``destinations`` is full.

    ``lines``: flushed when the worker has ended. ``on_end``: called at the end of the pipe.
    """

    _selector: selectors.BaseSelector
    _fd: int
    _to: Sequence[Callable[[bytes], None]]
    _lines: PrefixedLines | WholeLines | None
    _destinations: Sequence[Stream | DiskThread]
    on_end: Callable[[], None]

    def __post_init__(self) -> None:
        self.open = True
        self._reading = False
        os.set_blocking(self._fd, False)
        self._resume()

    def drain(self) -> None:
        """Read what the pipe holds although a destination may be full, and flush the last line. Call it when the worker has ended."""
        read = 0
        while self.open and read < _DRAIN_LIMIT and (count := self._read()):
            read += count
        if self._lines is not None:
            self._lines.flush()

    def close(self) -> None:
        """Close the pipe; a process that still writes into it gets SIGPIPE. Idempotent."""
        if not self.open:
            return
        self._pause()
        self.open = False
        os.close(self._fd)
        if self._lines is not None:
            self._lines.flush()
        self.on_end()

    def _ready(self, mask: int) -> None:
        if not self.open:
            return
        for destination in self._destinations:
            if destination.full:
                self._pause()
                destination.when_room(self._resume)
                return
        self._read()

    def _read(self) -> int:
        """Read once and pass the data on. Returns the number of bytes; 0 when there is no data now, or at the end."""
        try:
            data = os.read(self._fd, _READ_SIZE)
        except BlockingIOError:
            return 0
        if not data:
            self.close()
            return 0
        for write in self._to:
            write(data)
        return len(data)

    def _pause(self) -> None:
        if self._reading:
            self._selector.unregister(self._fd)
            self._reading = False

    def _resume(self) -> None:
        if self.open and not self._reading:
            self._selector.register(self._fd, selectors.EVENT_READ, self._ready)
            self._reading = True


@dataclass
class WorkerOutput:
    """The output of one worker of the round. ``last``: the last lines of its stderr that came through a pipe."""

    prefix: bytes
    files: Mapping[Std, str]  # of its streams, where they have one
    given: dict[Std, int] = field(default_factory=dict)  # descriptors for the worker; closed here once it has them
    pumps: list[Pump] = field(default_factory=list)
    last: LastLines = field(default_factory=LastLines)
    raw: list[WholeLines] = field(default_factory=list)  # of its streams with Route.RAW
    prefixed: list[PrefixedLines] = field(default_factory=list)  # of its streams with Route.TEE
    held: HeldTraceback | None = None  # in front of its stderr on the console
    log_files: list[LogFile] = field(default_factory=list)  # those that only its pumps write to
    shared_files: list[LogFile] = field(default_factory=list)  # those that pumps of other workers may write to as well
    inherits_stdout: bool = False  # it writes to the agent's stdout
    stderr_file: str | None = None  # the file that it writes stderr to without a pipe


@dataclass(eq=False)
class RoundLogs:
    """The output of the workers of one round. ``RunLogs.open_round`` makes it. ``on_drained``: called when every pipe is at its end."""

    _policy: LogPolicy
    _console: Console
    _selector: selectors.BaseSelector
    _disk: DiskThread
    _opened: dict[str, int]  # a descriptor of every file of ``_files``; this object closes them
    _files: RoundFiles
    _holds: bool  # tracebacks, see held_traceback.py

    def __post_init__(self) -> None:
        self._taken: dict[str, int] = {}  # by path: descriptors that are open until the workers are started
        self.workers: dict[int, WorkerOutput] = {}  # by local rank
        self._filtered: dict[Std, LogFile] = {}  # the files that the filters fill in this round
        self._shared: set[LogFile] = set()  # files of several workers, also of those that were adopted; closed here
        self.on_drained: Callable[[], None] = lambda: None

    def add(self, spec: WorkerSpec, prefix: str, routes: Mapping[Std, Route]) -> None:
        """Open the streams of one worker. ``prefix``: of its lines on the console. Raises OSError when the system refuses a pipe."""
        files = {stream: path for (local_rank, stream), path in self._files.streams.items() if local_rank == spec.local_rank}
        worker = self.workers[spec.local_rank] = WorkerOutput(prefix.encode(errors="backslashreplace"), files)
        for stream, route in routes.items():
            self._open_stream(worker, route, stream)

    def adopt(self, earlier: RoundLogs, local_ranks: Collection[int]) -> None:
        """Take over the streams of workers that go on in this round: they keep their files, and the prefix of their lines.

        The files that they share with workers that do not go on stay open until this round is finished.
        """
        for local_rank in local_ranks:
            worker = self.workers[local_rank] = earlier.workers.pop(local_rank)
            self._shared.update(worker.shared_files)
            earlier._shared.difference_update(worker.shared_files)
            for pump in worker.pumps:
                pump.on_end = self._pump_ended

    def descriptors(self, local_rank: int) -> tuple[int | None, int | None]:
        """Return standard output and error for a worker; None: the agent's own."""
        given = self.workers[local_rank].given
        return given.get(Std.OUT), given.get(Std.ERR)

    def close_worker_ends(self) -> None:
        """Close the workers' ends of the pipes. Call it once the workers have them, or will never have them."""
        for worker in self.workers.values():
            for fd in worker.given.values():
                os.close(fd)
            worker.given.clear()

    def worker_ended(self, local_rank: int) -> None:
        """Read all that the worker had written before it ended."""
        for pump in list(self.workers[local_rank].pumps):
            pump.drain()

    def is_drained(self, parked: Collection[int] = ()) -> bool:
        """Return whether every pipe is at its end, but for those of the workers with the local ranks ``parked``."""
        return not any(pump.open for local_rank, worker in self.workers.items() if local_rank not in parked for pump in worker.pumps)

    def tick(self, now: float) -> float:
        """Show the lines that have waited long enough for their end. Returns when to call it next, on ``elastirun.clock``."""
        raw = [lines for worker in self.workers.values() for lines in worker.raw]
        for lines in raw:
            waits = self._console.err.full or may_tear(lines, raw, now)
            show_when_due(lines, lines.flush, now, PARTIAL_LINE_DELAY if waits else 0.0)
        held = [worker.held for worker in self.workers.values() if worker.held is not None]
        for one in held:
            if now >= one.due:
                one.show()
        prefixed = [lines for worker in self.workers.values() for lines in worker.prefixed]
        paused = self._console.out.full or self._console.err.full or self._disk.full  # pumps are: the end may already be in the pipe
        for begun in prefixed:
            waits = paused or (not begun.is_bar and may_tear(begun, prefixed, now))
            show_when_due(begun, begun.show_begun, now, PIECE_DELAY if waits else 0.0)
        return min((*(lines.due for lines in raw), *(one.due for one in held), *(begun.due for begun in prefixed)), default=math.inf)

    def finish(self) -> None:
        """Close everything. What is known of the workers stays."""
        self.on_drained = lambda: None
        self.close_worker_ends()
        for worker in self.workers.values():
            for pump in worker.pumps:
                pump.drain()
                pump.close()
            worker.raw.clear()
            worker.prefixed.clear()
            if worker.held is not None and worker.held.due < math.inf:
                worker.held.show()
            for file in worker.log_files:
                file.close()
            worker.log_files.clear()
        for file in self._shared:
            file.close()
        self._shared.clear()
        if self._opened:  # files that no worker got, because the round was not started
            self._disk.submit(partial(close_all, self._opened))
            self._opened = {}
        self._console.stop_dropping()

    def _open_stream(self, worker: WorkerOutput, route: Route, stream: Std) -> None:
        path = worker.files.get(stream)
        if route is Route.DEVNULL:
            worker.given[stream] = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        elif route is Route.FILE and (fd := self._take(path)) is not None:
            worker.given[stream] = fd
            worker.stderr_file = path if stream is Std.ERR else worker.stderr_file
        elif route is Route.INHERIT:
            worker.inherits_stdout = True
        else:
            self._open_pipe(worker, route, stream, path)

    def _open_pipe(self, worker: WorkerOutput, route: Route, stream: Std, path: str | None) -> None:
        screen = self._console.out if stream is Std.OUT else self._console.err
        to: list[Callable[[bytes], None]] = []
        lines: PrefixedLines | WholeLines | None = None
        if route is Route.RAW:
            lines = WholeLines(screen.write_output)
            worker.raw.append(lines)
        elif route is Route.TEE:
            needles = self._policy.stdout_filters if stream is Std.OUT else self._policy.stderr_filters
            copy = self._filter_file(worker, stream) if needles else None
            lines = PrefixedLines(worker.prefix, screen.write_output, [os.fsencode(needle) for needle in needles], copy)
            worker.prefixed.append(lines)
        if lines is not None and stream is Std.ERR and self._holds:
            worker.held = HeldTraceback(lines.feed)
            to.append(worker.held.feed)
        elif lines is not None:
            to.append(lines.feed)
        destinations: list[Stream | DiskThread] = [] if lines is None else [screen]
        if (file := self._log_file(path)) is not None:
            worker.log_files.append(file)
            to.append(file.write)
            destinations.append(self._disk)
        if stream is Std.ERR:
            to.append(worker.last.feed)
        ours, worker.given[stream] = os.pipe()
        worker.pumps.append(Pump(self._selector, ours, to, lines, destinations, self._pump_ended))

    def _filter_file(self, worker: WorkerOutput, stream: Std) -> LogFile | None:
        if stream not in self._filtered and (file := self._log_file(self._files.filtered.get(stream))) is not None:
            self._filtered[stream] = file
            self._shared.add(file)
        if stream in self._filtered:
            worker.shared_files.append(self._filtered[stream])
        return self._filtered.get(stream)

    def _log_file(self, path: str | None) -> LogFile | None:
        """Return the log file at ``path``; None when none was opened there."""
        fd = self._take(path)
        return None if path is None or fd is None else LogFile(path, fd, self._disk, self._policy.limit)

    def _take(self, path: str | None) -> int | None:
        """Return a descriptor of a file that was opened, which the caller closes; of a file of two streams, the second one gets a copy."""
        if path in self._taken:
            return os.dup(self._taken[path])
        if path is None or path not in self._opened:
            return None
        self._taken[path] = fd = self._opened.pop(path)
        return fd

    def _pump_ended(self) -> None:
        if self.is_drained():
            self.on_drained()

"""Where the workers' output goes: the agent's own streams, the console line by line, files; and the last lines of each.

Per worker stream one of seven ways (``way_of``), by torchrun's rules. A stream that only needs a file or the agent's own
descriptor is handed over and never touched again; the others come through a pipe that the agent's loop reads.
"""

from __future__ import annotations

import math
import os
import selectors
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from string import Template
from typing import Protocol, TypeVar

from elastirun.agent.output.console import Console
from elastirun.agent.output.disk import DiskThread
from elastirun.agent.output.lines import HOLD, LastLines, PrefixedLines, WholeLines
from elastirun.agent.output.log_files import LogFile, close_all, make_run_folder, open_all, tail
from elastirun.agent.processes.spawn import WorkerSpec
from elastirun.config import LogPolicy, Std
from elastirun.errors import StartError, UsageError

T = TypeVar("T")

START_LIMIT = 10.0  # seconds for the run's folder, before this node takes part in anything
END_LIMIT = 3.0  # seconds for what is still to be written when the agent ends
_READ = 64 * 1024
_MAX_DRAIN = 1 << 20  # read at a worker's exit, in case some other process keeps on writing
_NOWHERE = Path(os.devnull)
_NAMES = {Std.OUT: "stdout", Std.ERR: "stderr"}


class Way(Enum):
    """What becomes of one stream of one worker."""

    INHERIT = "the agent's own stream"
    DEVNULL = "nowhere"
    FILE = "a file, given to the worker"
    CAPPED = "a pipe; a file that is kept small"
    TEE = "a pipe; a file and the console, in prefixed lines"
    RAW = "a pipe; the console, as it comes but in whole lines"
    QUIET = "a pipe; only the last lines are kept"


def way_of(policy: LogPolicy, local_rank: int, stream: Std, shown: bool) -> Way:
    """The rules: tee before redirect; a rank that is not shown keeps its file; stderr is always seen by us."""
    files = policy.log_dir != _NOWHERE
    teed = bool(policy.tee.of(local_rank) & stream)
    if teed and shown:
        return Way.TEE
    if files and (teed or policy.redirects.of(local_rank) & stream):
        return Way.CAPPED if policy.limit else Way.FILE
    if stream is Std.OUT:
        return Way.INHERIT if shown else Way.DEVNULL
    return Way.RAW if shown else Way.QUIET


class Gate(Protocol):
    """Where a worker's output goes, and which may ask the pumps to wait."""

    @property
    def full(self) -> bool: ...

    def when_room(self, resume: Callable[[], None]) -> None: ...


class Pump:
    """The agent's end of one worker pipe: passes what comes to each of ``to``, and stops while one of ``gates`` is full."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        fd: int,
        to: Sequence[Callable[[bytes], None]],
        lines: PrefixedLines | WholeLines | None,
        gates: Sequence[Gate],
        on_end: Callable[[], None],
    ) -> None:
        self._selector, self._fd, self._to, self._lines, self._gates = selector, fd, to, lines, gates
        self._on_end = on_end
        self.open = True
        self._reading = False
        os.set_blocking(fd, False)
        self._resume()

    def drain(self) -> None:
        """Read what is there although a gate may be full, up to a limit, and end the last line: the worker has ended."""
        read = 0
        while self.open and read < _MAX_DRAIN and (count := self._read()):
            read += count
        if self._lines is not None:
            self._lines.flush()

    def close(self) -> None:
        """Idempotent. Whoever still writes into the pipe gets SIGPIPE."""
        if not self.open:
            return
        self._pause()
        self.open = False
        os.close(self._fd)
        if self._lines is not None:
            self._lines.flush()
        self._on_end()

    def _ready(self, mask: int) -> None:
        if not self.open:
            return
        for gate in self._gates:
            if gate.full:
                self._pause()
                gate.when_room(self._resume)
                return
        self._read()

    def _read(self) -> int:
        """Bytes read; 0 when there are none now, or no more ever."""
        try:
            data = os.read(self._fd, _READ)
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
class _Worker:
    """What belongs to one worker of the round."""

    prefix: bytes
    files: str | None  # its directory
    given: dict[Std, int] = field(default_factory=dict)  # descriptors the worker gets; closed here once it has them
    pumps: list[Pump] = field(default_factory=list)
    last: LastLines = field(default_factory=LastLines)
    own_stdout: bool = False  # it writes to the agent's stdout
    stderr_file: str | None = None  # where stderr goes without passing through us


class RoundLogs:
    """The output of the workers of one round; made by ``RunLogs.open_round``."""

    def __init__(
        self,
        policy: LogPolicy,
        console: Console,
        selector: selectors.BaseSelector,
        disk: DiskThread,
        opened: dict[str, int],
        attempt_dir: str | None,
    ) -> None:
        """``opened``: a descriptor of every file of ``files_of``, ours from now on."""
        self._policy, self._console, self._selector, self._disk = policy, console, selector, disk
        self._opened = opened
        self._dir = attempt_dir
        self._workers: dict[int, _Worker] = {}
        self._raw: list[WholeLines] = []
        self._written: list[LogFile] = []
        self._filtered: dict[Std, LogFile] = {}
        self.on_drained: Callable[[], None] = lambda: None

    def add(self, spec: WorkerSpec, prefix: str, ways: Mapping[Std, Way]) -> None:
        files = None if self._dir is None else f"{self._dir}/{spec.local_rank}"
        worker = self._workers[spec.local_rank] = _Worker(prefix.encode(errors="backslashreplace"), files)
        for stream, way in ways.items():
            self._route(worker, way, stream)

    def descriptors(self, local_rank: int) -> tuple[int | None, int | None]:
        """Standard output and error for a worker; None: the agent's own."""
        given = self._workers[local_rank].given
        return given.get(Std.OUT), given.get(Std.ERR)

    def own_stdout(self, local_rank: int) -> bool:
        return self._workers[local_rank].own_stdout

    def close_worker_ends(self) -> None:
        """To be called once the workers have their descriptors, or will never have them."""
        for worker in self._workers.values():
            for fd in worker.given.values():
                os.close(fd)
            worker.given.clear()

    def worker_ended(self, local_rank: int) -> None:
        """Take in all that the worker has written before it ended."""
        for pump in list(self._workers[local_rank].pumps):
            pump.drain()

    @property
    def drained(self) -> bool:
        """Every pipe is at its end; ``on_drained`` is called when that comes true."""
        return not any(pump.open for worker in self._workers.values() for pump in worker.pumps)

    def tick(self, now: float) -> float:
        """Show what was begun long enough ago and has no end yet. Returns when to be called next, on ``elastirun.clock``."""
        for lines in self._raw:
            if now >= lines.due and self._console.err.full:
                lines.due = now + HOLD  # the end may be what is held up
            elif now >= lines.due and lines.late:
                lines.flush()
            lines.late = now >= lines.due  # one more turn: the end may have come while the loop stood still
        return min((lines.due for lines in self._raw), default=math.inf)

    def finish(self) -> None:
        """Close everything. ``last_lines`` goes on working."""
        self.on_drained = lambda: None
        self.close_worker_ends()
        for worker in self._workers.values():
            for pump in worker.pumps:
                pump.drain()
                pump.close()
        for file in self._written:
            file.close()
        self._written.clear()
        if self._opened:  # not needed after all
            self._disk.submit(partial(close_all, self._opened))
            self._opened = {}
        self._raw.clear()
        self._console.relax()

    def stderr_file(self, local_rank: int) -> str | None:
        """Where stderr goes without passing through us."""
        return self._workers[local_rank].stderr_file

    def last_lines(self, local_rank: int) -> tuple[str, ...]:
        """The last lines of stderr that have passed through us."""
        return self._workers[local_rank].last.lines()

    def _route(self, worker: _Worker, way: Way, stream: Std) -> None:
        path = None if worker.files is None else f"{worker.files}/{_NAMES[stream]}.log"
        if way is Way.DEVNULL:
            worker.given[stream] = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        elif way is Way.FILE and path in self._opened:
            worker.given[stream] = self._opened.pop(path)
            worker.stderr_file = path if stream is Std.ERR else worker.stderr_file
        elif way is Way.INHERIT:
            worker.own_stdout = True
        else:
            self._pipe(worker, way, stream, path)

    def _pipe(self, worker: _Worker, way: Way, stream: Std, path: str | None) -> None:
        screen = self._console.out if stream is Std.OUT else self._console.err
        to: list[Callable[[bytes], None]] = []
        lines: PrefixedLines | WholeLines | None = None
        if way is Way.RAW:
            lines = WholeLines(screen.pass_on)
            self._raw.append(lines)
        elif way is Way.TEE:
            needles = self._policy.stdout_filters if stream is Std.OUT else self._policy.stderr_filters
            copy = self._filter_file(stream) if needles else None
            lines = PrefixedLines(worker.prefix, screen.pass_on, [os.fsencode(needle) for needle in needles], copy)
        if lines is not None:
            to.append(lines.feed)
        gates: list[Gate] = [] if lines is None else [screen]
        if (file := self._log_file(path)) is not None:
            to.append(file.write)
            gates.append(self._disk)
        if stream is Std.ERR:
            to.append(worker.last.feed)
        ours, worker.given[stream] = os.pipe()
        worker.pumps.append(Pump(self._selector, ours, to, lines, gates, self._pump_ended))

    def _filter_file(self, stream: Std) -> LogFile | None:
        if stream not in self._filtered and (file := self._log_file(f"{self._dir}/filtered_{_NAMES[stream]}.log")) is not None:
            self._filtered[stream] = file
        return self._filtered.get(stream)

    def _log_file(self, path: str | None) -> LogFile | None:
        """The file at ``path``; None when none was opened there."""
        if path not in self._opened:
            return None
        self._written.append(LogFile(path, self._opened.pop(path), self._disk, self._policy.limit))
        return self._written[-1]

    def _pump_ended(self) -> None:
        if self.drained:
            self.on_drained()


def files_of(policy: LogPolicy, attempt_dir: str, ways: Mapping[int, Mapping[Std, Way]]) -> tuple[list[str], list[str]]:
    """Folders to make, outermost first, and files to open for the workers whose streams go these ``ways``, by local rank. Pure."""
    folders = [attempt_dir, *(f"{attempt_dir}/{local_rank}" for local_rank in ways)]
    kept = (Way.FILE, Way.CAPPED, Way.TEE)
    files = [f"{attempt_dir}/{i}/{_NAMES[stream]}.log" for i, own in ways.items() for stream, way in own.items() if way in kept]
    filters = {Std.OUT: policy.stdout_filters, Std.ERR: policy.stderr_filters}
    teed = {stream for own in ways.values() for stream, way in own.items() if way is Way.TEE and filters[stream]}
    return folders, files + [f"{attempt_dir}/filtered_{_NAMES[stream]}.log" for stream in teed]


class RunLogs:
    """The logs of one agent's whole life: the folders, and the output of one round after the other.

    ``<log_dir>/<run_id>_<node>_<random>/attempt_<n>/<local_rank>/{stdout.log,stderr.log,error.json}``, for the owner's eyes only
    unless ``--log-mode`` says otherwise. Without ``log_dir``: a folder under the system's temporary one, kept and named in a line
    when something is redirected or teed, else only for the error files and gone after ``close``. With ``log_dir`` /dev/null: no
    files at all. ``<log_dir>/.latest/<node>`` is a link to that node's newest run.

    A round whose files cannot be made, or not within ``limit`` seconds, has none; a line says so and the workers run all the same.
    Raises UsageError when ``log_dir`` cannot be a folder.
    """

    def __init__(
        self, policy: LogPolicy, run_id: str, host: str, console: Console, selector: selectors.BaseSelector, limit: float = 2.0
    ) -> None:
        self._policy, self._run_id, self._host, self._limit = policy, run_id, host, limit
        self._console, self._selector = console, selector
        self.disk = DiskThread(selector, console.say)
        self._run_dir: str | None = None
        self._begun = False
        streams = (std for std_map in (policy.redirects, policy.tee) for std in (std_map.default, *dict(std_map.by_rank).values()))
        self._private = policy.log_dir is None and not any(streams)  # the run's folder is for error files only, and temporary
        self._round: RoundLogs | None = None
        self._last_attempt_dir: str | None = None
        self._without_files: int | None = None  # the attempt whose files could not be made
        log_dir = policy.log_dir
        if log_dir is not None and log_dir != _NOWHERE and log_dir.exists() and not log_dir.is_dir():
            raise UsageError(f"--log-dir {log_dir}: this is not a directory; name another one")

    @property
    def directory(self) -> str | None:
        """Where this run's files are kept; None when nothing is kept."""
        return None if self._private else self._run_dir

    @property
    def temporary(self) -> str | None:
        """The folder of error files that nobody asked to keep."""
        return self._run_dir if self._private else None

    def begin(self) -> None:
        """Make the run's folder. Raises StartError when that fails: nothing runs yet, so nothing is lost by saying so."""
        if self._begun or self._policy.log_dir == _NOWHERE:
            return
        make = partial(make_run_folder, self._policy.log_dir, self._run_id, self._host, self._policy.mode)
        try:
            self._run_dir = self.disk.call(make, START_LIMIT)
        except OSError as exc:
            if not self._private:  # else no error files then; stderr tells the story too
                raise StartError(f"cannot make a directory for the workers' logs: {_why(exc)}; set --log-dir") from exc
        self._begun = True
        if self._policy.log_dir is None and not self._private:
            self._console.say(f"no --log-dir given: the workers' logs are kept in {self._run_dir}")

    def events_file(self) -> LogFile | None:
        """Open events.jsonl; None: there is no ``log_dir``. Raises StartError as ``begin`` does."""
        self.begin()
        if self._policy.log_dir is None or self._run_dir is None:
            return None
        path = f"{self._run_dir}/events.jsonl"
        try:
            opened = self.disk.call(partial(open_all, (), (path,), self._policy.mode), START_LIMIT, close_all)
        except OSError as exc:
            raise StartError(f"cannot make {path}: {exc.strerror}; set --log-dir") from exc
        return LogFile(path, opened[path], self.disk)

    def error_file(self, attempt: int, local_rank: int) -> str:
        """The path for TORCHELASTIC_ERROR_FILE, in a folder that ``open_round`` makes; empty: there are no files."""
        self.begin()
        gone = self._run_dir is None or attempt == self._without_files
        return "" if gone else f"{self._run_dir}/attempt_{attempt}/{local_rank}/error.json"

    def open_round(self, attempt: int, specs: Sequence[WorkerSpec], world_size: int | None = None) -> RoundLogs:
        """Make the folders, files and pipes of a round. ``attempt`` must not have been used before.

        ``world_size``: of the whole job; None: these are all. Raises StartError when the system refuses a pipe.
        """
        self.begin()
        ways = {spec.local_rank: self._ways(spec, world_size or len(specs)) for spec in specs}
        attempt_dir = None if self._run_dir is None else f"{self._run_dir}/attempt_{attempt}"
        if self._private and self._last_attempt_dir is not None:  # its error files have been read
            self.disk.submit(partial(shutil.rmtree, self._last_attempt_dir, ignore_errors=True))
        opened: dict[str, int] = {}
        if attempt_dir is not None:
            folders, files = files_of(self._policy, attempt_dir, ways)
            try:
                opened = self.disk.call(partial(open_all, folders, files, self._policy.mode), self._limit, close_all)
            except OSError as exc:
                self._do_without(attempt, attempt_dir, exc)
                attempt_dir = None
        self._last_attempt_dir = attempt_dir
        self._round = logs = RoundLogs(self._policy, self._console, self._selector, self.disk, opened, attempt_dir)
        try:
            for spec in specs:
                logs.add(spec, self._prefix(spec), ways[spec.local_rank])
        except OSError as exc:
            logs.finish()
            raise StartError(f"cannot open the workers' logs: {exc}") from exc
        return logs

    def tick(self, now: float) -> float:
        """See ``RoundLogs.tick`` and ``DiskThread.tick``."""
        due = self.disk.tick()
        return min(math.inf if due is None else due, math.inf if self._round is None else self._round.tick(now))

    def last_lines(self, local_rank: int) -> tuple[str, ...]:
        """The last lines of stderr of that worker of the latest round, as far as they have been read."""
        if self._round is None:
            return ()
        path = self._round.stderr_file(local_rank)
        if path is None:
            return self._round.last_lines(local_rank)
        last = LastLines()
        last.feed(self.in_time(partial(tail, path), b""))
        return last.lines()

    def own_stdout(self, local_rank: int) -> bool:
        """Whether that worker of the latest round has the agent's own stdout."""
        return self._round is not None and self._round.own_stdout(local_rank)

    def in_time(self, read: Callable[[], T], default: T) -> T:
        """Read from the disk; ``default`` when that fails or takes too long."""
        try:
            return self.disk.call(read, self._limit)
        except OSError:
            return default

    def close(self) -> None:
        """Close what is open; remove the error files that nobody asked to keep."""
        if self._round is not None:
            self._round.finish()
        if self._private and self._run_dir is not None:
            self.disk.submit(partial(shutil.rmtree, self._run_dir, ignore_errors=True))
        self.disk.close(END_LIMIT)

    def _do_without(self, attempt: int, attempt_dir: str, error: OSError) -> None:
        """The workers run without the round's files: redirected streams keep their last lines only, teed ones the console."""
        self._without_files = attempt
        if not self._private or isinstance(error, TimeoutError):
            lost = "" if self._private else "; their output is not kept in files, training goes on"
            self._console.say(f"cannot make the workers' logs in {attempt_dir}: {error.strerror}{lost}")

    def _ways(self, spec: WorkerSpec, world_size: int) -> dict[Std, Way]:
        shown = self._policy.shows(spec.local_rank, spec.rank, world_size)
        return {stream: way_of(self._policy, spec.local_rank, stream, shown) for stream in _NAMES}

    def _prefix(self, spec: WorkerSpec) -> str:
        if self._policy.prefix_template is None:
            return f"{self._host}:{spec.rank}> "
        role = spec.env.get("ROLE_NAME", "default")
        return Template(self._policy.prefix_template).safe_substitute(role_name=role, rank=spec.rank, local_rank=spec.local_rank)


def _why(error: OSError) -> str:
    return f"{error.strerror} ({error.filename})" if error.filename else str(error.strerror)

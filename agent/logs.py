"""Where the workers' output goes: the agent's own streams, the console line by line, files; and the last lines of each.

Per worker stream one of seven ways (``way_of``), by torchrun's rules. A stream that only needs a file or the agent's own
descriptor is handed over and never touched again; the others come through a pipe that the agent's loop reads.
"""

from __future__ import annotations

import math
import os
import re
import selectors
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from string import Template

from elastirun.agent.console import Console, Stream
from elastirun.agent.lines import HOLD, LastLines, LogFile, PrefixedLines, WholeLines, open_log
from elastirun.agent.process import WorkerSpec
from elastirun.config import LogPolicy, Std
from elastirun.errors import StartError, UsageError

_TAIL = 16 * 1024  # read of a redirected file for its last lines
_READ = 64 * 1024
_MAX_DRAIN = 1 << 20  # read at a worker's exit, in case some other process keeps on writing
_NOWHERE = Path(os.devnull)


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


class Pump:
    """The agent's end of one worker pipe: passes what comes to each of ``to``, and stops while ``console`` holds us back."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        fd: int,
        to: Sequence[Callable[[bytes], None]],
        lines: PrefixedLines | WholeLines | None,
        console: Stream | None,
        on_end: Callable[[], None],
    ) -> None:
        self._selector, self._fd, self._to, self._lines, self._console = selector, fd, to, lines, console
        self._on_end = on_end
        self.open = True
        self._reading = False
        os.set_blocking(fd, False)
        self._resume()

    def drain(self) -> None:
        """Read what is there although the console may be full, up to a limit, and end the last line: the worker has ended."""
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
        if self._console is not None and self._console.full:
            self._pause()
            self._console.when_room(self._resume)
        else:
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
    stderr_file: str | None = None  # where stderr goes without passing through us


class RoundLogs:
    """The output of the workers of one round; made by ``RunLogs.open_round``."""

    def __init__(self, policy: LogPolicy, console: Console, selector: selectors.BaseSelector, attempt_dir: str | None) -> None:
        self._policy, self._console, self._selector = policy, console, selector
        self._dir = attempt_dir
        self._workers: dict[int, _Worker] = {}
        self._raw: list[WholeLines] = []
        self._opened: list[LogFile] = []
        self._filtered: dict[Std, LogFile] = {}
        self.on_drained: Callable[[], None] = lambda: None

    def add(self, spec: WorkerSpec, prefix: str, files: str | None, shown: bool) -> None:
        worker = self._workers[spec.local_rank] = _Worker(prefix.encode(errors="backslashreplace"), files)
        for stream in (Std.OUT, Std.ERR):
            self._route(worker, way_of(self._policy, spec.local_rank, stream, shown), stream)

    def descriptors(self, local_rank: int) -> tuple[int | None, int | None]:
        """Standard output and error for a worker; None: the agent's own."""
        given = self._workers[local_rank].given
        return given.get(Std.OUT), given.get(Std.ERR)

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
        for file in self._opened:
            file.close()
        self._opened.clear()
        self._raw.clear()
        self._console.relax()

    def last_lines(self, local_rank: int) -> tuple[str, ...]:
        worker = self._workers[local_rank]
        if worker.stderr_file is not None:
            worker.last = LastLines()
            worker.last.feed(_tail(worker.stderr_file))
        return worker.last.lines()

    def _route(self, worker: _Worker, way: Way, stream: Std) -> None:
        name = "stdout" if stream is Std.OUT else "stderr"
        path = None if worker.files is None else f"{worker.files}/{name}.log"
        if way is Way.DEVNULL:
            worker.given[stream] = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        elif way is Way.FILE and path is not None:
            worker.given[stream] = open_log(path)
            worker.stderr_file = path if stream is Std.ERR else worker.stderr_file
        elif way is not Way.INHERIT:
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
        if way in (Way.TEE, Way.CAPPED) and path is not None:
            to.append(self._open(path).write)
        if stream is Std.ERR:
            to.append(worker.last.feed)
        ours, worker.given[stream] = os.pipe()
        worker.pumps.append(Pump(self._selector, ours, to, lines, None if lines is None else screen, self._pump_ended))

    def _filter_file(self, stream: Std) -> LogFile | None:
        if self._dir is not None and stream not in self._filtered:
            self._filtered[stream] = self._open(f"{self._dir}/filtered_{'stdout' if stream is Std.OUT else 'stderr'}.log")
        return self._filtered.get(stream)

    def _open(self, path: str) -> LogFile:
        self._opened.append(LogFile(path, self._console, self._policy.limit))
        return self._opened[-1]

    def _pump_ended(self) -> None:
        if self.drained:
            self.on_drained()


class RunLogs:
    """The logs of one agent's whole life: the directories, and the output of one round after the other.

    ``<log_dir>/<run_id>_<random>/attempt_<n>/<local_rank>/{stdout.log,stderr.log,error.json}``, for the owner's eyes only.
    Without ``log_dir``: a directory under the system's temporary one, kept and told when something is redirected or teed,
    else only for the error files and gone after ``close``. With ``log_dir`` /dev/null: no files at all.
    ``<log_dir>/latest`` is a link to the run that has begun last.

    Raises UsageError when ``log_dir`` cannot be a directory, StartError when one cannot be made.
    """

    def __init__(self, policy: LogPolicy, run_id: str, host: str, console: Console, selector: selectors.BaseSelector) -> None:
        self._policy, self._run_id, self._host = policy, run_id, host
        self._console, self._selector = console, selector
        self._run_dir: str | None = None
        self._private = False  # the run directory is for error files only, and temporary
        self._round: RoundLogs | None = None
        self._last_attempt_dir: str | None = None
        log_dir = policy.log_dir
        if log_dir is not None and log_dir != _NOWHERE and log_dir.exists() and not log_dir.is_dir():
            raise UsageError(f"--log-dir {log_dir}: this is not a directory; name another one")

    @property
    def directory(self) -> str | None:
        """Where this run's files are kept, made at the latest now when there is a ``log_dir``; None when nothing is kept."""
        if self._policy.log_dir is not None:
            self._make_run_dir()
        return None if self._private else self._run_dir

    @property
    def temporary(self) -> str | None:
        """The folder of error files that nobody asked to keep."""
        return self._run_dir if self._private else None

    def error_file(self, attempt: int, local_rank: int) -> str:
        """The path for TORCHELASTIC_ERROR_FILE, in a directory that ``open_round`` makes; empty: there are no files."""
        base = self._make_run_dir()
        return "" if base is None else f"{base}/attempt_{attempt}/{local_rank}/error.json"

    def open_round(self, attempt: int, specs: Sequence[WorkerSpec], world_size: int | None = None) -> RoundLogs:
        """Make the directories, files and pipes of a round. ``attempt`` must not have been used before.

        ``world_size``: of the whole job; None: these are all. Raises StartError when the system refuses one.
        """
        base = self._make_run_dir()
        attempt_dir = None if base is None else f"{base}/attempt_{attempt}"
        if self._private and self._last_attempt_dir is not None:
            shutil.rmtree(self._last_attempt_dir, ignore_errors=True)  # its error files have been read
        self._last_attempt_dir = attempt_dir
        self._round = logs = RoundLogs(self._policy, self._console, self._selector, attempt_dir)
        try:
            self._make_directory(attempt_dir)
            for spec in specs:
                worker_dir = None if attempt_dir is None else f"{attempt_dir}/{spec.local_rank}"
                self._make_directory(worker_dir)
                shown = self._policy.shows(spec.local_rank, spec.rank, world_size or len(specs))
                logs.add(spec, self._prefix(spec), worker_dir, shown)
        except OSError as exc:
            logs.finish()
            raise StartError(f"cannot open the workers' logs: {exc}") from exc
        return logs

    def tick(self, now: float) -> float:
        """See ``RoundLogs.tick``."""
        return math.inf if self._round is None else self._round.tick(now)

    def last_lines(self, local_rank: int) -> tuple[str, ...]:
        """The last lines of stderr of that worker of the latest round, as far as they have been read."""
        return self._round.last_lines(local_rank) if self._round is not None else ()

    def close(self) -> None:
        """Close what is open; remove the error files that nobody asked to keep."""
        if self._round is not None:
            self._round.finish()
        if self._private and self._run_dir is not None:
            shutil.rmtree(self._run_dir, ignore_errors=True)

    def _prefix(self, spec: WorkerSpec) -> str:
        if self._policy.prefix_template is None:
            return f"{self._host}:{spec.rank}> "
        role = spec.env.get("ROLE_NAME", "default")
        return Template(self._policy.prefix_template).safe_substitute(role_name=role, rank=spec.rank, local_rank=spec.local_rank)

    def _make_run_dir(self) -> str | None:
        """The run's directory, made when first needed; None: no files."""
        policy = self._policy
        if self._run_dir is not None or policy.log_dir == _NOWHERE:
            return self._run_dir
        wanted = any(std for std_map in (policy.redirects, policy.tee) for std in (std_map.default, *dict(std_map.by_rank).values()))
        self._private = policy.log_dir is None and not wanted
        name = re.sub(r"[^\w.-]", "_", self._run_id)[:100] + "_"
        try:
            base = Path(tempfile.gettempdir()) if policy.log_dir is None else policy.log_dir
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._run_dir = tempfile.mkdtemp(prefix=name if policy.log_dir else f"elastirun_{name}", dir=base.absolute())
        except OSError as exc:
            if self._private:
                return None  # no error files then; stderr tells the story too
            raise StartError(f"cannot make a directory for the workers' logs: {exc}; set --log-dir") from exc
        if policy.log_dir is not None:
            self._link_latest(self._run_dir)
        elif wanted:
            self._console.say(f"no --log-dir given: the workers' logs are kept in {self._run_dir}")
        return self._run_dir

    def _link_latest(self, run_dir: str) -> None:
        """Point ``latest`` at this run; it may be missing, and what somebody else has put there stays."""
        base, name = os.path.split(run_dir)
        link = f"{base}/latest"
        with suppress(OSError):
            if os.path.islink(link) or not os.path.lexists(link):
                os.symlink(name, f"{run_dir}/latest")
                os.rename(f"{run_dir}/latest", link)  # there is always one, the old or the new

    def _make_directory(self, path: str | None) -> None:
        try:
            if path is not None:
                os.mkdir(path, 0o700)
        except OSError:
            if not self._private:
                raise


def _tail(path: str) -> bytes:
    """The last ``_TAIL`` bytes of a file; nothing when it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            return file.read(_TAIL)
    except OSError:
        return b""

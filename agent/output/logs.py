"""The logs of one agent's whole life: the folder of the run, and the output of one round after the other.

``round_logs.py`` decides where each stream of a worker goes.
"""

from __future__ import annotations

import math
import selectors
import shutil
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from string import Template
from typing import TypeVar

from elastirun.agent.output.console import Console
from elastirun.agent.output.disk import DiskThread
from elastirun.agent.output.held_traceback import HeldTraceback
from elastirun.agent.output.lines import LastLines
from elastirun.agent.output.log_files import LogFile, close_all, make_run_folder, open_all, open_log, tail
from elastirun.agent.output.logs_specs import ERROR_FILE, Layout, LogsPlugIn
from elastirun.agent.output.round_logs import STREAM_NAMES, RoundFiles, RoundLogs, Route, files_of, route_of
from elastirun.agent.part import Part
from elastirun.agent.processes.spawn import WorkerSpec
from elastirun.config import NO_FILES, LogPolicy, Std
from elastirun.errors import StartError, UsageError

T = TypeVar("T")

START_LIMIT = 10.0  # seconds to make the run's folder; this node takes part in nothing yet, so a slow disk holds up nobody
END_LIMIT = 3.0  # seconds for what is still to be written when the agent ends


class RunLogs(Part):
    """The logs of all rounds of one agent.

    Files: ``<log_dir>/<run_id>_<node>_<random>/attempt_<n>/<local_rank>/{stdout.log,stderr.log,error.json}``. Only their owner
    may read them, unless ``--set log-mode`` says otherwise. ``<log_dir>/.latest/<node>`` is a link to that node's newest run.

    - Without ``log_dir``, the folder is made in the system's folder for temporary files. If a stream is redirected or teed, the
      folder is kept and a line names it. Else it only holds the error files, and ``close`` removes it.
    - With ``log_dir`` /dev/null there are no files at all.

    If the files of a round cannot be made within ``limit`` seconds, a line says so and the workers run without them.
    Raises UsageError when ``log_dir`` exists and is no folder.
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
        self._error_files_only = policy.log_dir is None and not any(streams) and not policy.specs  # so the run's folder is temporary
        self._round: RoundLogs | None = None
        self._last_attempt_dir: str | None = None
        self._without_files: int | None = None  # the attempt whose files could not be made
        self._plug_in = LogsPlugIn(policy.specs, policy) if policy.specs else None
        self._layout = Layout()  # of the latest round, by the plug-in
        log_dir = policy.log_dir
        if log_dir is not None and log_dir != NO_FILES and log_dir.exists() and not log_dir.is_dir():
            raise UsageError(f"--log-dir {log_dir}: this is not a directory; name another one")

    @property
    def directory(self) -> str | None:
        """The folder in which this run's files are kept; None when nothing is kept."""
        if self._plug_in is not None:
            return self._plug_in.directory
        return None if self._error_files_only else self._run_dir

    @property
    def temporary(self) -> str | None:
        """The folder that ``close`` removes; None when the folder is kept."""
        return self._run_dir if self._error_files_only else None

    def begin(self) -> None:
        """Make the run's folder. Raises StartError when that fails: nothing runs yet, so nothing is lost."""
        if self._begun or self._policy.log_dir == NO_FILES or (self._plug_in is not None and self._policy.log_dir is None):
            return
        make = partial(make_run_folder, self._policy.log_dir, self._run_id, self._host, self._policy.mode)
        try:
            self._run_dir = self.disk.call(make, START_LIMIT)
        except OSError as exc:
            if not self._error_files_only:  # error files can be missed, because stderr has the traceback too
                raise StartError(f"cannot make a directory for the workers' logs: {_why(exc)}; set --log-dir") from exc
        self._begun = True
        if self._policy.log_dir is None and not self._error_files_only:
            self._console.say(f"no --log-dir given: the workers' logs are kept in {self._run_dir}")

    def events_file(self) -> LogFile | None:
        """Open events.jsonl; return None without ``log_dir``. Raises StartError as ``begin`` does."""
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
        """Return the path for TORCHELASTIC_ERROR_FILE, in a folder that ``open_round`` makes; empty if there are no files."""
        if self._plug_in is not None:
            return next((spec.env[ERROR_FILE] for spec in self._layout.specs if spec.local_rank == local_rank), "")
        self.begin()
        missing = self._run_dir is None or attempt == self._without_files
        return "" if missing else f"{self._run_dir}/attempt_{attempt}/{local_rank}/error.json"

    def ask_plug_in(self, specs: list[WorkerSpec], world_size: int) -> list[WorkerSpec]:
        """Ask the plug-in where the output of the workers goes. Returns them with its changes; without a plug-in, as they are.

        Raises StartError when the plug-in fails.
        """
        if self._plug_in is None:
            return specs

        def shows(spec: WorkerSpec) -> bool:
            return self._policy.shows(spec.local_rank, spec.rank, world_size)

        try:
            self._layout = self.disk.call(partial(self._plug_in.layout_of, specs, shows), self._limit)
        except OSError as exc:
            raise StartError(f"cannot open the workers' logs: {exc.strerror}") from exc
        return list(self._layout.specs)

    def open_round(
        self, attempt: int, specs: Sequence[WorkerSpec], world_size: int | None = None, going_on: Collection[int] = ()
    ) -> RoundLogs:
        """Make the folders, files and pipes of a round. ``attempt`` must not have been used before.

        ``world_size``: the number of workers on all nodes; None: ``specs`` are all. ``going_on``: local ranks of workers that keep the
        streams they have, see ``RoundLogs.adopt``; they only get a folder for error files.
        Raises StartError when the system refuses a pipe.
        """
        self.begin()
        started = [spec for spec in specs if spec.local_rank not in going_on]
        if self._error_files_only and self._last_attempt_dir is not None:  # the error files of the last round have been read
            self.disk.submit(partial(shutil.rmtree, self._last_attempt_dir, ignore_errors=True))
        routes, files, attempt_dir = self._places(attempt, started, world_size or len(specs))
        opened = dict[str, int]()
        if attempt_dir is not None:
            folders = [*files.folders, *(f"{attempt_dir}/{local_rank}" for local_rank in going_on if files.folders)]
            try:
                opened = self.disk.call(partial(open_all, folders, files.paths, self._policy.mode), self._limit, close_all)
            except OSError as exc:
                self._go_on_without_files(attempt, attempt_dir, exc)
                attempt_dir = None
        self._last_attempt_dir = attempt_dir
        has_peers = (world_size or len(specs)) > 1
        self._round = logs = RoundLogs(self._policy, self._console, self._selector, self.disk, opened, files, has_peers)
        try:
            for spec in started:
                logs.add(spec, self._prefix(spec), routes[spec.local_rank])
        except OSError as exc:
            logs.finish()
            raise StartError(f"cannot open the workers' logs: {exc}") from exc
        return logs

    def _places(
        self, attempt: int, started: Sequence[WorkerSpec], world_size: int
    ) -> tuple[Mapping[int, Mapping[Std, Route]], RoundFiles, str | None]:
        """Return the routes of the workers that are started, their files, and the folder of the files; None: there are no files."""
        if self._plug_in is not None:
            return self._layout.routes, self._layout.files.only({spec.local_rank for spec in started}), self._plug_in.directory
        routes = {spec.local_rank: self._routes(spec, world_size) for spec in started}
        if self._run_dir is None:
            return routes, RoundFiles(), None
        attempt_dir = f"{self._run_dir}/attempt_{attempt}"
        return routes, files_of(self._policy, attempt_dir, routes), attempt_dir

    def tick(self, now: float) -> float:
        """Do what is due at ``now``, see ``RoundLogs.tick`` and ``DiskThread.tick``. Returns when to call it next."""
        due = self.disk.tick()
        return min(math.inf if due is None else due, math.inf if self._round is None else self._round.tick(now))

    def last_lines(self, local_rank: int) -> tuple[str, ...]:
        """Return the last lines of stderr of a worker of the latest round, as far as they have been read."""
        if self._round is None:
            return ()
        worker = self._round.workers[local_rank]
        if (path := worker.stderr_file) is None:
            return worker.last.lines()
        last = LastLines()
        last.feed(self.in_time(partial(tail, path), b""))
        return last.lines()

    def held(self, local_rank: int) -> HeldTraceback | None:
        """Return what holds back the traceback of a worker of the latest round on its way to the console; None: nothing does."""
        return None if self._round is None else self._round.workers[local_rank].held

    def keep_traceback(self, local_rank: int, text: bytes) -> str:
        """Write the traceback of a worker of the latest round to a file, or find the file that has it. Returns its path; empty: no file."""
        if self._round is not None and (log := self._round.workers[local_rank].files.get(Std.ERR)) is not None:
            return log
        if self._error_files_only or self._last_attempt_dir is None or self._plug_in is not None:
            return ""
        path = f"{self._last_attempt_dir}/{local_rank}/traceback.log"
        self.disk.submit(partial(self._append, path, text), len(text))
        return path

    def _append(self, path: str, text: bytes) -> None:
        try:
            with open(open_log(path, self._policy.mode), "wb") as file:
                file.write(text)
        except OSError as exc:
            kept = text.decode(errors="backslashreplace")
            self.disk.notice(f"warning: cannot write {path}: {exc.strerror}; this was to be kept there:\n{kept}")

    def inherits_stdout(self, local_rank: int) -> bool:
        """Return whether a worker of the latest round writes to the agent's stdout."""
        return self._round is not None and self._round.workers[local_rank].inherits_stdout

    def in_time(self, read: Callable[[], T], default: T) -> T:
        """Return what ``read`` returns, or ``default`` if it fails or takes too long."""
        with suppress(OSError):
            return self.disk.call(read, self._limit)
        return default

    def close(self) -> None:
        """Close what is open, and remove the run's folder if it is temporary."""
        if self._round is not None:
            self._round.finish()
        if self._error_files_only and self._run_dir is not None:
            self.disk.submit(partial(shutil.rmtree, self._run_dir, ignore_errors=True))
        self.disk.close(END_LIMIT)

    def _go_on_without_files(self, attempt: int, attempt_dir: str, error: OSError) -> None:
        """Say that this round has no files: of redirected streams only the last lines are kept, teed ones still reach the console."""
        self._without_files = attempt
        if not self._error_files_only or isinstance(error, TimeoutError):
            lost = "" if self._error_files_only else "; their output is not kept in files, training goes on"
            self._console.say(f"cannot make the workers' logs in {attempt_dir}: {error.strerror}{lost}")

    def _routes(self, spec: WorkerSpec, world_size: int) -> dict[Std, Route]:
        shown = self._policy.shows(spec.local_rank, spec.rank, world_size)
        return {stream: route_of(self._policy, spec.local_rank, stream, shown) for stream in STREAM_NAMES}

    def _prefix(self, spec: WorkerSpec) -> str:
        if self._policy.prefix_template is None:
            return f"{self._host}:{spec.rank}> "
        role = spec.env.get("ROLE_NAME", "default")
        known = {"role_name": role, "rank": spec.rank, "local_rank": spec.local_rank, "hostname": socket.gethostname()}
        return Template(self._policy.prefix_template).safe_substitute(known)


def _why(error: OSError) -> str:
    return f"{error.strerror} ({error.filename})" if error.filename else str(error.strerror)

"""A layout of the logs by a plug-in of torchrun (``--logs-specs=NAME``): a ``LogsSpecs`` class of the group ``torchrun.logs_specs``.

The plug-in says before each round where each stream of each worker goes. It runs in the disk's thread, because it makes folders.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elastirun.agent.output.round_logs import RoundFiles, Route, filtered_streams
from elastirun.agent.processes.spawn import WorkerSpec
from elastirun.config import LogPolicy, Std, StdMap
from elastirun.errors import BadCommand

GROUP, OPTION = "torchrun.logs_specs", "--logs-specs"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


@dataclass(frozen=True)
class Layout:
    """The answer of the plug-in for one round."""

    specs: Sequence[WorkerSpec] = ()  # the workers, with what the plug-in has changed in their environments
    routes: Mapping[int, Mapping[Std, Route]] = field(default_factory=dict)  # by local rank
    files: RoundFiles = RoundFiles()


def load(name: str) -> Any:
    """Return the class of the plug-in, for which its package and torch are imported. Raises BadCommand."""
    from importlib.metadata import entry_points  # slow, and a linker's lock is held for the modules in C that it imports

    found = {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        known = ", ".join(sorted(found))
        wanted = f"no installed package has {name!r} among its entry points {GROUP} (found: {known})"
        raise BadCommand(f"{OPTION}: {wanted}; install the package that has it, or leave the option out")
    try:
        return found[name].load()
    except Exception as error:  # of any package
        raise BadCommand(f"{OPTION}: {found[name].value} cannot be loaded: {_why(error)}") from None


class LogsPlugIn:
    """The plug-in ``name`` with the options of ``policy``. Raises BadCommand when its class cannot be loaded or made."""

    def __init__(self, name: str, policy: LogPolicy) -> None:
        from torch.distributed.elastic.multiprocessing import Std as TorchStd

        def std(given: StdMap) -> object:
            return {rank: TorchStd(int(one)) for rank, one in given.by_rank} or TorchStd(int(given.default))

        made = load(name)
        log_dir = None if policy.log_dir is None else str(policy.log_dir)
        ranks = None if policy.local_ranks is None else set(policy.local_ranks)
        try:
            self._made = made(log_dir=log_dir, redirects=std(policy.redirects), tee=std(policy.tee), local_ranks_filter=ranks)
        except Exception as error:
            raise BadCommand(f"{OPTION}: {name} cannot be used: {_why(error)}") from None
        self._name, self._policy = name, policy

    @property
    def directory(self) -> str:
        """The folder that the plug-in names for people."""
        return str(self._made.root_log_dir)

    def layout_of(self, specs: Sequence[WorkerSpec], shows: Callable[[WorkerSpec], bool]) -> Layout:
        """Return where the output of the workers goes. Raises OSError, also when the plug-in fails.

        ``shows``: whether the console shows a worker.
        """
        envs = {spec.local_rank: {name: value for name, value in spec.env.items() if name != ERROR_FILE} for spec in specs}
        try:
            dest = self._made.reify(envs)
            given = {Std.OUT: (dest.stdouts, dest.tee_stdouts), Std.ERR: (dest.stderrs, dest.tee_stderrs)}
            routes: dict[int, dict[Std, Route]] = {spec.local_rank: {} for spec in specs}
            streams: dict[tuple[int, Std], str] = {}
            for spec in specs:
                for stream, (redirected, teed) in given.items():
                    i = spec.local_rank
                    path, tee = str(redirected.get(i, "")), str(teed.get(i, ""))
                    routes[i][stream] = route = self._route(stream, path, tee, shows(spec))
                    if route in (Route.FILE, Route.CAPPED, Route.TEE):
                        streams[i, stream] = path or tee
                envs[spec.local_rank].setdefault(ERROR_FILE, str(dest.error_files.get(spec.local_rank, "")))
            filtered = {Std.OUT: str(dest.filtered_stdout), Std.ERR: str(dest.filtered_stderr)}
        except Exception as error:  # of any package
            raise OSError(0, f"{OPTION}: {self._name} failed: {_why(error)}") from error
        filtered = {stream: filtered[stream] for stream in filtered_streams(self._policy, routes)}
        return Layout([replace(spec, env=envs[spec.local_rank]) for spec in specs], routes, RoundFiles(streams, filtered))

    def _route(self, stream: Std, path: str, tee: str, shown: bool) -> Route:
        """Return the route of a stream. ``path``: its file; empty: the console. ``tee``: the file whose lines go to the console, too."""
        if tee not in ("", os.devnull) and shown:
            return Route.TEE
        if path not in ("", os.devnull):
            return Route.CAPPED if self._policy.limit else Route.FILE
        shown = shown and path != os.devnull
        if stream is Std.OUT:
            return Route.INHERIT if shown else Route.DEVNULL
        return Route.RAW if shown else Route.QUIET


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"

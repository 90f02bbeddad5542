"""Records the system calls by which checkpoints are written, and does something at the n-th: a kill, a stop, an error."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CALLS = ("open", "close", "write", "pwrite", "read", "pread", "fsync", "mkdir", "rename", "unlink", "rmdir", "listdir", "scandir", "stat")
CALLS += ("ftruncate", "fstat", "readv")

Act = Callable[[str, tuple[Any, ...]], None]  # with the call's name and its arguments


@dataclass
class Recorder:
    """Counts the calls about files below ``root``; before the one with the number ``at``, from 1, it calls ``act``."""

    root: str
    at: int = 0
    act: Act = lambda name, arguments: None
    calls: list[tuple[str, str]] = field(default_factory=list)  # (name, path)
    paths: dict[int, str] = field(default_factory=dict)  # of open descriptors

    def path(self, target: Any, dir_fd: int | None) -> str:
        """Return the path that a call is about."""
        if isinstance(target, int):
            return self.paths.get(target, "")
        return os.path.join(self.paths[dir_fd], target) if dir_fd is not None else os.fspath(target)

    def before(self, name: str, path: str, arguments: tuple[Any, ...]) -> None:
        """Note a call that is about to be made."""
        if path.startswith(self.root):
            self.calls.append((name, path))
            if len(self.calls) == self.at:
                self.act(name, arguments)


@contextmanager
def recorded(root: str | Path, at: int = 0, act: Act = lambda name, arguments: None) -> Iterator[Recorder]:
    """Record the calls within the block."""
    recorder = Recorder(str(root), at, act)
    originals = {name: getattr(os, name) for name in CALLS}

    def wrap(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            path = recorder.path(arguments[0] if arguments else ".", named.get("dir_fd"))
            recorder.before(name, path, arguments)
            result = original(*arguments, **named)
            if name == "open":
                recorder.paths[result] = path
            elif name == "close":
                recorder.paths.pop(arguments[0], None)
            return result

        return call

    for name, original in originals.items():
        setattr(os, name, wrap(name, original))
    try:
        yield recorder
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


_pwrite, _write, _kill = os.pwrite, os.write, os.kill


def die(name: str, arguments: tuple[Any, ...]) -> None:
    """Die as by ``kill -9``, in the middle of the call if that is a write."""
    if name == "pwrite":
        with suppress(OSError):  # half a page cannot bypass the page cache
            _pwrite(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2], arguments[2])
    if name == "write":
        _write(arguments[0], arguments[1][: len(arguments[1]) // 2])
    _kill(os.getpid(), signal.SIGKILL)


def freeze(name: str, arguments: tuple[Any, ...]) -> None:
    """Stop until somebody sends SIGCONT."""
    _kill(os.getpid(), signal.SIGSTOP)


def failing(code: int) -> Act:
    """Return what lets the call fail with this error number. A descriptor that cannot be closed is lost, as in the kernel."""

    def fail(name: str, arguments: tuple[Any, ...]) -> None:
        if name != "close":
            raise OSError(code, os.strerror(code))

    return fail


def forked(work: Callable[[], None], status: int = 0) -> int:
    """Do ``work`` in a child, which then exits with 0; with 99 if it raised an error. Return the child's process number."""
    if child := os.fork():
        return child
    status = 99
    try:
        work()
        status = 0
    finally:
        os._exit(status)

"""Log folders and files. Whatever touches the disk here is meant for the disk's thread (``agent/output/disk.py``)."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from elastirun.agent.output.disk import DiskThread

MAX_LINE = 64 * 1024  # bytes; a longer line may be cut
PRIVATE = 0o600  # permissions of a file that only its owner may read
LATEST = ".latest"  # folder of links to each node's newest run; hidden, so that a glob does not find each log twice
_RUN_NAME, _NODE_NAME = 100, 60  # bytes of a folder's name; a name has 255 at most
_TAIL = 16 * 1024  # bytes of a file read for its last lines


class LogFile:
    """An append-only file of the agent, written by the disk's thread. A write that fails is dropped, and said once.

    ``limit`` (bytes, at least ``MAX_LINE``; 0: none): before it would grow beyond, it becomes ``<path>.1``, in place of an older
    one, and a new one is begun; at the end of a line, unless that is longer than ``MAX_LINE``.
    """

    def __init__(self, path: str, fd: int, disk: DiskThread, limit: int = 0) -> None:
        """``fd``: of ``path``, from ``open_log``; closed by ``close``."""
        self._path, self._fd, self._disk, self._limit = path, fd, disk, limit
        self._size = self._line = 0  # where its end is, and where its last line begins
        self._told = False

    def write(self, data: bytes) -> None:
        self._disk.submit(partial(self._write, data), len(data))

    def close(self) -> None:
        self._disk.submit(self._close)

    def _close(self) -> None:
        with suppress(OSError):  # a network disk may say only now that it is full
            os.close(self._fd)

    def _write(self, data: bytes) -> None:
        try:
            while self._limit and self._size + len(data) > self._limit:
                data = self._turn(data)
            self._append(data)
        except OSError as exc:
            if not self._told:
                self._told = True
                self._disk.notice(f"cannot write {self._path}: {exc.strerror}; output that does not fit is lost there")

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            done = os.write(self._fd, view)
            self._size += done
            view = view[done:]
        if end := data.rfind(b"\n") + 1:
            self._line = self._size - len(data) + end

    def _turn(self, data: bytes) -> bytes:
        """Write the lines that still fit, begin a new file, and return what is to go there."""
        room = self._limit - self._size
        cut = data.rfind(b"\n", 0, room) + 1
        begun = 0 if cut else self._size - self._line  # of the last line, to be taken along
        if not cut and (begun == self._size or begun > MAX_LINE):
            cut, begun = room, 0
        self._append(data[:cut])
        taken = os.pread(self._fd, begun, self._size - begun)
        os.ftruncate(self._fd, self._size - begun)
        with suppress(FileNotFoundError):  # somebody has taken it away
            os.replace(self._path, f"{self._path}.1")
        fd = open_log(self._path, stat.S_IMODE(os.fstat(self._fd).st_mode))
        os.close(self._fd)
        self._fd, self._size, self._line = fd, 0, 0
        return taken + data[cut:]


def open_log(path: str, mode: int = PRIVATE) -> int:
    """Return a descriptor that appends to ``path``; a new file gets the permissions ``mode``, whatever the umask is."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode)
    found = stat.S_IMODE(os.fstat(fd).st_mode)
    if found != mode and stat.S_ISREG(os.fstat(fd).st_mode):
        with suppress(OSError):  # a file system without permissions
            os.fchmod(fd, mode)
    return fd


def open_all(folders: Iterable[str], files: Iterable[str], mode: int = PRIVATE) -> dict[str, int]:
    """Make the folders, which must not exist, and open the files; return a descriptor for each path. Raises OSError, all closed again."""
    opened: dict[str, int] = {}
    try:
        for folder in folders:
            make_folder(folder, mode)
        for path in files:
            opened[path] = open_log(path, mode)
    except OSError:
        close_all(opened)
        raise
    return opened


def close_all(opened: dict[str, int]) -> None:
    for fd in opened.values():
        os.close(fd)


def make_folder(path: str, mode: int = PRIVATE) -> None:
    """Make one folder, which those who may read a file of ``mode`` may enter. A set-group-ID bit from its parent stays."""
    wanted = mode | 0o700 | (mode & 0o444) >> 2
    os.mkdir(path, wanted)
    found = stat.S_IMODE(os.stat(path).st_mode)
    if found & 0o777 != wanted:
        with suppress(OSError):  # a file system without permissions
            os.chmod(path, found & 0o7000 | wanted)


def make_run_folder(base: Path | None, run_id: str, node: str, mode: int = PRIVATE) -> str:
    """Make ``<base>/<run id>_<node>_<random>`` and the folders above it that are missing; return its path. Raises OSError.

    ``base`` None: ``elastirun_<run id>_<node>_<random>`` in the system's folder for temporary files.
    """
    name = f"{_file_name(run_id, _RUN_NAME)}_{_file_name(node, _NODE_NAME)}_"
    if base is None:
        return tempfile.mkdtemp(prefix=f"elastirun_{name}")
    base = base.absolute()
    for folder in reversed((base, *base.parents)):
        with suppress(FileExistsError):  # or another node has made it at the same moment
            if not folder.exists():
                make_folder(str(folder), mode)
    made = tempfile.mkdtemp(prefix=name, dir=base)
    os.rmdir(made)
    make_folder(made, mode)  # mkdtemp knows one mode only
    _link_latest(base, os.path.basename(made), _file_name(node, _NODE_NAME), mode)
    return made


def _link_latest(base: Path, run: str, node: str, mode: int) -> None:
    """Point ``.latest/<node>`` at this run; it may be missing, and what somebody else has put there stays."""
    links, link = base / LATEST, base / LATEST / node
    with suppress(OSError):
        with suppress(FileExistsError):
            make_folder(str(links), mode)
        if link.is_symlink() or not os.path.lexists(link):
            new = base / run / LATEST
            os.symlink(os.path.join("..", run), new)
            try:
                os.rename(new, link)  # there is always one, the old or the new
            except OSError:
                os.unlink(new)


def _file_name(text: str, most: int) -> str:
    """``text`` as a part of a file name, of at most ``most`` bytes."""
    return re.sub(r"[^\w.-]", "_", text).encode(errors="replace")[:most].decode(errors="ignore")


def tail(path: str) -> bytes:
    """The last ``_TAIL`` bytes of a file; nothing when it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            return file.read(_TAIL)
    except OSError:
        return b""

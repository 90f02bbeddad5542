"""Log folders and files. Functions that touch the disk are to be called in the disk's thread (``agent/output/disk.py``)."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from elastirun import linux
from elastirun.agent.output.disk import DiskThread

MAX_LINE = 64 * 1024  # bytes; a longer line may be cut, so that memory stays bounded
PRIVATE = 0o600  # permissions of a file that only its owner may read
LATEST = ".latest"  # the folder of links to each node's newest run; hidden, so that a glob does not find each log twice
_RUN_NAME, _NODE_NAME = 100, 60  # bytes of the parts of a folder's name, which may have 255 in all
_TAIL = 16 * 1024  # bytes that are read of a file's end; LAST_LINES lines of LAST_LINE_BYTES fit


class LogFile:
    """An append-only file of the agent, written by the disk's thread. If a write fails its data is lost; the first failure gets a notice.

    ``limit``: bytes, at least MAX_LINE; 0: none. Before the file would grow beyond it, the file is renamed to ``<path>.1``, which
    replaces an older one, and a new file is begun. This happens at the end of a line, unless the line is longer than MAX_LINE.
    Data that is written after ``close`` is dropped.
    """

    def __init__(self, path: str, fd: int, disk: DiskThread, limit: int = 0) -> None:
        """``fd``: a descriptor of ``path`` from ``open_log``, which ``close`` closes."""
        self._path, self._fd, self._disk, self._limit = path, fd, disk, limit
        self._size = self._line_start = 0  # bytes in the file; where its last line begins
        self._failed = False

    def write(self, data: bytes) -> None:
        """Queue ``data`` for the disk's thread."""
        self._disk.submit(partial(self._write, data), len(data))

    def close(self) -> None:
        """Close the file after the writes that are queued."""
        self._disk.submit(self._close)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1  # another file may get the number
        with suppress(OSError):  # a network disk may report only now that it is full
            os.close(fd)

    def _write(self, data: bytes) -> None:
        if self._fd < 0:
            return
        try:
            while self._limit and self._size + len(data) > self._limit:
                data = self._rotate(data)
            self._append(data)
        except OSError as exc:
            if not self._failed:
                self._failed = True
                self._disk.notice(f"warning: cannot write {self._path}: {exc.strerror}; output that does not fit is lost there")

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            done = os.write(self._fd, view)
            self._size += done
            view = view[done:]
        if end := data.rfind(b"\n") + 1:
            self._line_start = self._size - len(data) + end

    def _rotate(self, data: bytes) -> bytes:
        """Write the lines of ``data`` that still fit, begin a new file, and return what belongs there."""
        room = self._limit - self._size
        cut = data.rfind(b"\n", 0, room) + 1
        partial_line = 0 if cut else self._size - self._line_start  # bytes of an unfinished last line, which moves to the new file
        if not cut and (partial_line == self._size or partial_line > MAX_LINE):
            cut, partial_line = room, 0
        self._append(data[:cut])
        moved = os.pread(self._fd, partial_line, self._size - partial_line)
        os.ftruncate(self._fd, self._size - partial_line)
        with suppress(FileNotFoundError):  # another program has removed or renamed the file
            os.replace(self._path, f"{self._path}.1")
        fd = open_log(self._path, stat.S_IMODE(os.fstat(self._fd).st_mode))
        os.close(self._fd)
        self._fd, self._size, self._line_start = fd, 0, 0
        return moved + data[cut:]


def open_log(path: str, mode: int = PRIVATE) -> int:
    """Return a descriptor that appends to ``path``. A new file gets the permissions ``mode``, whatever the umask is."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode)
    found = stat.S_IMODE(os.fstat(fd).st_mode)
    if found != mode and stat.S_ISREG(os.fstat(fd).st_mode):
        with suppress(OSError):  # the file system has no permissions
            os.fchmod(fd, mode)
    return fd


def open_all(folders: Iterable[str], files: Iterable[str], mode: int = PRIVATE) -> dict[str, int]:
    """Make the folders, which must not exist, and open the files. Returns a descriptor for each path. Closes all if it raises OSError."""
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
    """Close what ``open_all`` has opened."""
    for fd in opened.values():
        with suppress(OSError):  # a network disk may report only now that it is full
            os.close(fd)


def make_folder(path: str, mode: int) -> None:
    """Make one folder that whoever may read a file of ``mode`` can enter. Keeps the set-group-ID bit that its parent gives it."""
    wanted = mode | 0o700 | (mode & 0o444) >> 2
    os.mkdir(path, wanted)
    found = stat.S_IMODE(os.stat(path).st_mode)
    if found & 0o777 != wanted:
        with suppress(OSError):  # the file system has no permissions
            os.chmod(path, found & 0o7000 | wanted)


def make_run_folder(base: Path | None, run_id: str, node: str, mode: int = PRIVATE) -> str:
    """Make ``<base>/<run id>_<node>_<random>`` and the missing folders above it, and return its path. Raises OSError.

    If ``base`` is None: make ``elastirun_<run id>_<node>_<random>`` in the system's folder for temporary files.
    """
    name = f"{_file_name(run_id, _RUN_NAME)}_{_file_name(node, _NODE_NAME)}_"
    if base is None:
        return tempfile.mkdtemp(prefix=f"elastirun_{name}")
    base = base.absolute()
    for folder in reversed((base, *base.parents)):
        with suppress(FileExistsError):  # another node may make it at the same moment
            if not folder.exists():
                make_folder(str(folder), mode)
    made = tempfile.mkdtemp(prefix=name, dir=base)
    os.rmdir(made)
    make_folder(made, mode)  # once more, because mkdtemp cannot be given permissions
    _link_latest(base, os.path.basename(made), _file_name(node, _NODE_NAME), mode)
    return made


def _link_latest(base: Path, run: str, node: str, mode: int) -> None:
    """Point the link ``.latest/<node>`` at this run. Ignores errors, and never replaces anything but a link.

    In a log folder that others may write to, ``.latest`` may be somebody else's, or a link to a folder elsewhere. Then nothing is done.
    """
    links = base / LATEST
    with suppress(OSError):
        with suppress(FileExistsError):
            make_folder(str(links), mode)
        with linux.Descriptor(os.open(links, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)) as folder:
            if os.fstat(folder).st_uid != os.geteuid() or not _is_free(node, folder):
                return
            new = base / run / LATEST
            os.symlink(os.path.join("..", run), new)
            try:
                os.rename(new, node, dst_dir_fd=folder)  # atomic: there is always a link, the old or the new one
            except OSError:
                os.unlink(new)


def _is_free(name: str, folder: int) -> bool:
    """Return whether a link, or nothing, has this name in the open ``folder``."""
    with suppress(FileNotFoundError):
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    return True


def _file_name(text: str, max_bytes: int) -> str:
    """Return ``text`` as a part of a file name, cut to ``max_bytes``."""
    return re.sub(r"[^\w.-]", "_", text).encode(errors="replace")[:max_bytes].decode(errors="ignore")


def tail(path: str) -> bytes:
    """Return the last 16 KiB of a file; empty when it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            return file.read(_TAIL)
    except OSError:
        return b""

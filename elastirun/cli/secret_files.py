"""Secrets in files: reads the token of ``--token-file``, and gives advice if others can read a secret."""

from __future__ import annotations

import os
import select
import stat
from dataclasses import dataclass
from pathlib import Path

from elastirun import clock, linux
from elastirun.cli.given_options import GivenOptions
from elastirun.cli.parse import quote
from elastirun.errors import UsageError

TOKEN_BYTES = range(16, 4097)  # length of a secret, in bytes: short enough to read whole, too long to guess
PIPE_WAIT = 10.0  # seconds for the program that writes the secret into a pipe, as in --token-file=<(vault read ...)


@dataclass(frozen=True)
class SecretFile:
    """The content of a secret file, and advice."""

    content: bytes
    advice: str  # "others on this machine can read it; chmod 600 it"; empty: nobody else can


def read_token(options: GivenOptions) -> bytes | None:
    """Return the secret in ``--token-file``, without the white space around it. It is never shown."""
    path, label = options.text("token_file"), options.label("token_file")
    if path is None:
        return None
    try:
        file = read_secret_file(path, TOKEN_BYTES.stop + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a path"
        raise UsageError(f"{label}: {quote(path)} cannot be read ({reason}); give a file with a secret") from None
    token = file.content.strip()
    if len(token) not in TOKEN_BYTES:
        size = "too short" if len(token) < TOKEN_BYTES.start else "too long"
        limits = f"{TOKEN_BYTES.start} to {TOKEN_BYTES.stop - 1} bytes"
        raise UsageError(f"{label}: the secret in {quote(path)} is {size}; give one of {limits}, such as openssl rand -hex 32 makes")
    if file.advice:
        options.warn(f"{label}: {quote(path)}: {file.advice}")
    return token


def read_secret_file(path: str, max_bytes: int) -> SecretFile:
    """Read at most ``max_bytes``. A pipe is read until its writer closes it, for at most PIPE_WAIT seconds; it cannot be read twice.

    Raises OSError, whose ``strerror`` also says when nobody writes into the pipe, and ValueError when ``path`` is not a path.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # a pipe without a writer must not block the open
    with linux.Descriptor(os.open(path, flags)) as fd:
        mode, content = os.fstat(fd).st_mode, _read(fd, max_bytes)
    return SecretFile(content, _advice(path, mode) if stat.S_ISREG(mode) else "")


def advice(path: str) -> str:
    """Return what to do if others can read the file ``path``; empty if nobody else can, or if it is no regular file. Does not open it."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return ""
    return _advice(path, mode) if stat.S_ISREG(mode) else ""


def _read(fd: int, max_bytes: int) -> bytes:
    regular = stat.S_ISREG(os.fstat(fd).st_mode)  # poll() always calls a regular file readable
    end = clock.now() + PIPE_WAIT
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    content = b""
    while len(content) < max_bytes:
        if not regular and not poller.poll(max(0.0, end - clock.now()) * 1000):
            raise TimeoutError(0, f"nothing more was written to it within {PIPE_WAIT:g} s, and it was not closed")
        try:
            data = os.read(fd, max_bytes - len(content))
        except BlockingIOError:
            continue
        if not data:
            break
        content += data
    return content


def _advice(path: str, mode: int) -> str:
    """Return the advice for a file with these permissions.

    Kubernetes mounts each Secret read-only, as a link into a folder named ``..DATE``, and lets the group of ``fsGroup`` read it.
    """
    in_kubernetes = any(part.startswith("..") for part in Path(os.path.realpath(path)).parts)
    if in_kubernetes:
        return "others in this container can read it; set defaultMode: 0400 for the Secret's volume" if mode & 0o007 else ""
    return "others on this machine can read it; chmod 600 it" if mode & 0o077 else ""

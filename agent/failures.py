"""From exits to a verdict: who is to blame, and the report that is printed last. Pure, but for torch's error files."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import time
from collections.abc import Iterable, Sequence
from typing import Any

from elastirun.agent.workers import WorkerExit
from elastirun.rendezvous.forming import root_cause
from elastirun.rendezvous.records import ExitRecord

OWN_FAULT, VICTIM, KILLED_BY_US = 0, 5, 9  # values of ExitRecord.blame

_MAX_ERROR_FILE = 1 << 20
_MAX_LINES = 30
_MAX_LINE = 500
_MAX_OTHERS = 16  # other failures that get a line in the report
_WIDTH = 80

# What a process says that lost its peers: the socket layer, TCPStore, gloo, NCCL and its watchdog.
_VICTIM_SIGNS = re.compile(
    r"connection (was )?(likely )?(reset|closed|aborted)|connection refused|broken pipe|got 0 bytes|recvValue\w* failed"
    r"|socket (has )?time(d )?out|socketProgress|connectFullMesh|timed out waiting \d+ ?ms|wait timeout after \d+ ?ms"
    r"|application timeout caused pair closure"
    r"|NCCL watchdog|ProcessGroup\w*.*watchdog|watchdog caught collective|remote process exited|NCCL communicator was aborted",
    re.IGNORECASE,
)
# Exceptions that a lost peer can cause; any other type is the process's own fault whatever its text says.
_PEER_EXCEPTION = re.compile(r"(.*\.)?(RuntimeError|OSError|EOFError|TimeoutError|Connection\w*Error|BrokenPipeError|Dist\w*Error)")
_EXCEPTION_LINE = re.compile(r"(?:\[rank\d+\]: ?)?([A-Za-z_][\w.]*)(?::|$)")  # not indented, as the frames above it are
_SHELL_CODES = {126: "command cannot be executed", 127: "command not found"}


def classify(end: WorkerExit, lines: Sequence[str]) -> int:
    """The blame of a failed worker, by how it ended and the last ``lines`` of its stderr; the least is the root cause.

    ``OWN_FAULT`` an exception, exit code or signal of its own (or sent by a stranger, such as the kernel's OOM killer) ·
    ``VICTIM`` it lost its peers · ``KILLED_BY_US`` it was alive when its agent stopped it.
    """
    if end.killed_by_us:
        return KILLED_BY_US
    if end.code == -signal.SIGPIPE:
        return VICTIM
    if end.code < 0 and end.code != -signal.SIGABRT:
        return OWN_FAULT  # an abort may be a watchdog's, no other crash is
    name, said = _last_exception(lines) if end.code > 0 else (None, lines)
    if name is not None and not _PEER_EXCEPTION.fullmatch(name):
        return OWN_FAULT
    return VICTIM if any(_VICTIM_SIGNS.search(line) for line in said) else OWN_FAULT


def _last_exception(lines: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """The type of the last Python traceback's exception, and its lines from that on; (None, all lines) when there is none."""
    headers = [i for i, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    for i in range(headers[-1] + 1 if headers else len(lines), len(lines)):
        if found := _EXCEPTION_LINE.match(lines[i]):
            return found[1], lines[i:]
    return None, lines


def describe_code(code: int) -> str:
    """``code`` of a worker in words: ``exit code 3``, ``killed by SIGSEGV (signal 11)``."""
    if code < 0:
        return f"killed by {_signal_name(-code)}"
    if code in _SHELL_CODES:
        return f"exit code {code}: {_SHELL_CODES[code]}"
    if 128 < code < 128 + signal.NSIG:
        return f"exit code {code}: a shell's word for {_signal_name(code - 128)}"
    return f"exit code {code}"


def _signal_name(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"


def make_record(
    node: str, end: WorkerExit, lines: Sequence[str], error: Sequence[str] | None = None, note: str = "", alone: bool = False
) -> ExitRecord:
    """The record of a failed worker on the node called ``node``.

    ``lines``: the last lines of its stderr; ``error``: what it left in its error file (``read_error_file``), which is
    shown instead of them where there is one; ``note``: what else is known of its end;
    ``alone``: it had no peers to lose.
    """
    return ExitRecord(
        node=node,
        rank=end.rank,
        local_rank=end.local_rank,
        pid=end.pid,
        code=end.code,
        blame=OWN_FAULT if alone and not end.killed_by_us else classify(end, error or lines),
        after=round(end.after, 3),
        lines=_bounded(error or lines),
        note=note,
    )


def read_error_file(path: str) -> tuple[str, ...] | None:
    """The traceback (or message) that torch's ``@record`` left at ``path``, at most 30 lines.

    None when there is none, or nothing in that format: the file is the worker's and may be anything. Never raises.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # non-blocking: it might be a pipe
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            data = json.loads(file.read(_MAX_ERROR_FILE))
    except (OSError, ValueError, RecursionError):
        return None
    text = _error_text(data)
    return _bounded(text.splitlines()) if text else None


def write_error_file(path: str, reason: str, records: Iterable[ExitRecord]) -> None:
    """Leave the root cause at ``path`` as torch's ``@record`` does, for what started this launcher: a scheduler, another launcher.

    ``errorCode`` is that worker's exit code, and missing when no worker failed. Overwrites what is there. Raises OSError.
    """
    causes = root_cause(records)
    lines = causes[0].lines if causes else ()
    last = next((line.strip() for line in reversed(lines) if line.strip()), reason)  # of a traceback, the exception
    extra = {"py_callstack": "\n".join(lines or [reason]), "timestamp": str(int(time.time()))}
    message = {"message": last, "extraInfo": extra} | ({"errorCode": causes[0].code} if causes else {})
    with open(path, "w") as file:
        json.dump({"message": message}, file)


def _error_text(data: Any) -> str | None:
    message = data.get("message") if isinstance(data, dict) else None
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        callstack = extra.get("py_callstack") if isinstance(extra, dict) else None
        message = callstack if isinstance(callstack, str) and callstack.strip() else message.get("message")
    return message if isinstance(message, str) else None


def _bounded(lines: Sequence[str]) -> tuple[str, ...]:
    return tuple(line[:_MAX_LINE] for line in lines[-_MAX_LINES:])


def report(script: str, reason: str, records: Iterable[ExitRecord], logs: str | None = None) -> str:
    """The failure report, to be printed last on every node: the root cause with its last words, a line for each other failure.

    ``reason``: the verdict in one line; ``logs``: where the log files of this node are. Ends with a newline. Of what
    workers wrote, characters that are not printable come out as escapes.
    """
    rule, thin = "=" * _WIDTH, "-" * _WIDTH
    lines = [rule, f"{script} FAILED", f"  reason    : {reason}"]
    causes = root_cause(records)
    if causes:
        lines += [thin, "Root cause:", *_root(causes[0])]
    if causes[1:]:
        lines += [thin, f"Other failures ({len(causes) - 1}):", *(_other(record) for record in causes[1 : 1 + _MAX_OTHERS])]
        if len(causes) > 1 + _MAX_OTHERS:
            lines.append(f"  ... and {len(causes) - 1 - _MAX_OTHERS} more")
    if logs is not None:
        lines += [thin, f"Logs of this node: {logs}"]
    return "".join(f"{_printable(line)}\n" for line in [*lines, rule])


def _root(record: ExitRecord) -> list[str]:
    words = record.lines or ("(nothing)",)
    return [
        f"  host      : {record.node}",
        f"  rank      : {record.rank} (local_rank: {record.local_rank})",
        f"  exitcode  : {record.code} (pid: {record.pid}) {_how(record)}",
        f"  when      : {record.after:.1f} s after the start of its round",
        "  last lines of its stderr:",
        *(f"    {line}" for line in words),
    ]


def _other(record: ExitRecord) -> str:
    where = f"rank {record.rank} ({record.node}, local_rank {record.local_rank}, pid {record.pid})"
    return f"  {where}: {_how(record)} after {record.after:.1f} s"


def _how(record: ExitRecord) -> str:
    why = {VICTIM: ", probably for having lost its peers", KILLED_BY_US: ", stopped by its agent"}.get(record.blame, "")
    return describe_code(record.code) + why + (f", {record.note}" if record.note else "")


def _printable(line: str) -> str:
    text = line.replace("\t", "    ")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)

"""From exits to a verdict: who is to blame, and the report that is printed last. Pure, but for torch's error files."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import stat
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from elastirun.agent.processes.workers import WorkerExit, stopped_by_signal
from elastirun.rendezvous.formation import root_cause, signal_name
from elastirun.rendezvous.records import ExitRecord

OWN_FAULT, SUSPECT, VICTIM, KILLED_BY_US = 0, 3, 5, 9  # values of ExitRecord.blame
_BLAME_WORDS = {VICTIM: ", probably for having lost its peers", KILLED_BY_US: ", stopped by its agent"}

_MAX_ERROR_FILE = 1 << 20
_MAX_LINES = 30
_MAX_LINE = 500
_MAX_BYTES = 28 << 10  # of all lines as JSON, where a character has up to twelve: eight such records fit into a row
# Characters of a line and bytes of a failure that is not its node's worst: at etcd the rows of 1,000 nodes stay below 64 MiB.
_WIDE_LINE, _MAX_OTHER_BYTES = 200, 3 << 10
_MAX_OTHERS = 16  # other failures that get a line in the report
_WIDTH = 80

# What a process says that lost its peers: the socket layer, TCPStore, gloo, NCCL and its watchdog.
_VICTIM_SIGNS = re.compile(
    r"connection (was )?(likely )?(reset|closed|aborted)|connection refused|broken pipe|got 0 bytes|recvValue\w* failed"
    r"|socket (has )?time(d )?out|socketProgress|connectFullMesh|timed out waiting \d+ ?ms|wait timeout after \d+ ?ms"
    r"|application timeout caused pair closure"
    r"|\b(PeerLost|ReductionFailed): (?!the process group has been destroyed)"  # elastirun.train's
    r"|NCCL watchdog|ProcessGroup\w*.*watchdog|watchdog caught collective|remote process exited|NCCL communicator was aborted",
    re.IGNORECASE,
)
# Exceptions that a lost peer can cause; any other type is the process's own fault whatever its text says.
_PEER_EXCEPTION = re.compile(
    r"(.*\.)?(RuntimeError|OSError|EOFError|TimeoutError|Connection\w*Error|BrokenPipeError|Dist\w*Error|PeerLost|ReductionFailed)"
)
_EXCEPTION_LINE = re.compile(r"(?:\[rank\d+\]: ?)?([A-Za-z_][\w.]*)(?::|$)")  # not indented, as the frames above it are
_TRACEBACK = "Traceback (most recent call last)"
_STOP_EXCEPTION = re.compile(r"(.*\.)?(KeyboardInterrupt|SystemExit|SIGTERMException|SignalException)")  # Lightning's, torch's
_WRAPPED = "The above exception was the direct cause of the following exception"
_UNCAUGHT = re.compile(r"\[rank\d+\]: ?Traceback")  # only torch's hook for exceptions that nobody caught puts it so
_CHILD_KILLED = "is killed by signal: Killed"  # what torch's DataLoader says of its worker
STDOUT_CLOSED = "its stdout was closed: the program that read this launcher's output has ended"
_SHELL_CODES = {126: "command cannot be executed", 127: "command not found"}


def classify(end: WorkerExit, lines: Sequence[str]) -> int:
    """The blame of a failed worker, by how it ended and the last ``lines`` of its stderr; the least is the root cause.

    ``OWN_FAULT`` an exception, exit code or signal of its own (or sent by a stranger, such as the kernel's OOM killer) ·
    ``VICTIM`` it lost its peers · ``KILLED_BY_US`` it was alive when its agent stopped it. ``SUSPECT``, between the first
    two, is for ``make_record`` to say.
    """
    if end.killed_by_us:
        return KILLED_BY_US
    if end.code == -signal.SIGPIPE:
        return VICTIM
    if end.code < 0 and end.code != -signal.SIGABRT:
        return OWN_FAULT  # an abort may be a watchdog's, no other crash is
    if end.code < 0 and has_failed(lines, None):
        return OWN_FAULT  # it aborted while it wound up
    name, said = _last_exception(lines) if end.code > 0 else (None, lines)
    if name is not None and not _PEER_EXCEPTION.fullmatch(name):
        return OWN_FAULT
    return VICTIM if any(_VICTIM_SIGNS.search(line) for line in said) else OWN_FAULT


def has_failed(lines: Sequence[str], error: Sequence[str] | None) -> bool:
    """Whether a worker that still runs shows by the last ``lines`` of its stderr or its error file that it is about to fail.

    An exception of its own, that is, which nobody has caught as far as can be seen: it takes long to wind up, and its
    peers may be the first to end.
    """
    name, said = _last_exception(error or lines)
    if name is None or _PEER_EXCEPTION.fullmatch(name) and any(_VICTIM_SIGNS.search(line) for line in said):
        return False
    return error is not None or len(said) == 1 or any(_UNCAUGHT.match(line) for line in lines)


def may_be_asked_for(end: WorkerExit, lines: Sequence[str]) -> bool:
    """Whether a worker may have ended because somebody signalled all processes of its node, its agent being next.

    A stop signal has ended it; or it had a handler for SIGTERM, and has shown no exception but one that such handlers raise.
    """
    if stopped_by_signal(end.code):
        return True
    if end.code <= 0 or not end.catches_term:
        return False
    name, _ = _last_exception(lines) if any(_TRACEBACK in line for line in lines) else (None, lines)
    return name is None or _STOP_EXCEPTION.fullmatch(name) is not None


def _last_exception(lines: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """The type of the last Python traceback's exception, and its lines from that on; (None, all lines) when there is none.

    Of one that was raised ``from`` another, that other: a lost peer stays a lost peer in whatever it is wrapped.
    """
    headers = [i for i, line in enumerate(lines) if _TRACEBACK in line]
    while headers[1:] and any(_WRAPPED in line for line in lines[headers[-2] : headers[-1]]):
        headers.pop()
    for i in range(headers[-1] + 1 if headers else len(lines), len(lines)):
        if found := _EXCEPTION_LINE.match(lines[i]):
            return found[1], lines[i:]
    return None, lines


def describe_code(code: int) -> str:
    """``code`` of a worker in words: ``exit code 3``, ``killed by SIGSEGV (signal 11)``."""
    if code < 0:
        return f"killed by {_signal(-code)}"
    if code in _SHELL_CODES:
        return f"exit code {code}: {_SHELL_CODES[code]}"
    if 128 < code < 128 + signal.NSIG:
        return f"exit code {code}: a shell's word for {_signal(code - 128)}"
    return f"exit code {code}"


def _signal(number: int) -> str:
    name = signal_name(number)
    return name if name.endswith(str(number)) else f"{name} (signal {number})"


def explain(code: int, lines: Sequence[str], out_of_memory: str | None) -> str:
    """What is known of an end that was not at our hands besides its ``code``, for ``ExitRecord.note``; empty: nothing.

    ``out_of_memory``: what the kernel's counters say, see ``memory.explain``.
    """
    if code == -signal.SIGKILL:
        unknown = "; the kernel's count of out-of-memory kills cannot be read"
        denied = unknown if out_of_memory is None else ", and the kernel counts no out-of-memory kill"
        return out_of_memory or f"sent from outside (not by this agent{denied})"
    if out_of_memory and (code == 128 + signal.SIGKILL or any(_CHILD_KILLED in line for line in lines)):
        return f"a process of it was {out_of_memory}"
    return "sent from outside (not by this agent)" if code == -signal.SIGTERM else ""  # others may be passed on by --forward-signals


def lost_its_stdout(code: int, lines: Sequence[str]) -> bool:
    """Whether a worker may have ended because nobody reads its stdout any more (``elastirun ... | head``)."""
    name, _ = _last_exception(lines)
    ignored = any("name='<stdout>'" in line for line in lines) and any("BrokenPipeError" in line for line in lines)
    return code == -signal.SIGPIPE or (code > 0 and (ignored or name == "BrokenPipeError"))


def nobody_reads(fd: int) -> bool:
    """Whether ``fd`` is a pipe or a socket that has no reader left."""
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    return any(mask & (select.POLLERR | select.POLLHUP) for _, mask in poller.poll(0))


def full_disk(folder: str) -> str:
    """In words that the file system of ``folder`` is full, which may be why nothing is known of a failure; empty: it is not."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return ""
    what = "space" if found.f_blocks and not found.f_bavail else "inode" if found.f_files and not found.f_favail else ""
    return f"the file system of its logs has no {what} left ({folder})" if what else ""


def exit_code(records: Iterable[ExitRecord]) -> int:
    """That of the worker to blame, as a shell would have it; 1 when its agent has ended it."""
    causes = root_cause(records)
    if not causes or causes[0].blame in (SUSPECT, KILLED_BY_US):
        return 1
    return causes[0].code if causes[0].code > 0 else 128 - causes[0].code


def make_record(
    node: str, end: WorkerExit, lines: Sequence[str], error: Sequence[str] | None = None, note: str = "", alone: bool = False
) -> ExitRecord:
    """The record of a failed worker on the node called ``node``.

    ``lines``: the last lines of its stderr; ``error``: what it left in its error file (``read_error_file``), which is
    shown instead of them where there is one; ``note``: what else is known of its end;
    ``alone``: it had no peers to lose. One that we have killed is given here only when it ``has_failed`` before.
    """
    blame = OWN_FAULT if alone else classify(end, error or lines)
    if end.killed_by_us:
        blame, note = SUSPECT, "stopped by its agent after it had shown an exception of its own"
    return ExitRecord(
        node=node,
        rank=end.rank,
        local_rank=end.local_rank,
        pid=end.pid,
        code=end.code,
        blame=blame,
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


def shorten(record: ExitRecord) -> ExitRecord:
    """Return a failure that is not the root cause with its last lines only: the report has one line for it."""
    return replace(record, lines=_bounded([line[:_WIDE_LINE] for line in record.lines], _MAX_OTHER_BYTES))


def _bounded(lines: Sequence[str], room: int = _MAX_BYTES) -> tuple[str, ...]:
    kept: list[str] = []
    for line in reversed(lines[-_MAX_LINES:]):
        room -= len(json.dumps(line[:_MAX_LINE])) + 1
        if room < 0:
            break
        kept.insert(0, line[:_MAX_LINE])
    return tuple(kept)


def report(
    script: str,
    reason: str,
    records: Iterable[ExitRecord],
    round: int = 0,
    used: str = "",
    began: float | None = None,
    logs: str | None = None,
) -> str:
    """The failure report, to be printed last on every node, in torchrun's layout: the root cause with its last words, then the verdict.

    The other failures get a line each, above. Ten lines from the end suffice to know what happened, forty have all of the
    root cause. ``reason``: the verdict in one line; ``round``: the one that failed; ``used``: restarts, "2 of 3"; ``began``:
    when that round's workers were started here, seconds since the epoch (None: they were not); ``logs``: where the log
    files of this node are. Ends with a newline. Of what workers wrote, characters that are not printable come out as escapes.
    """
    rule, thin = "=" * _WIDTH, "-" * _WIDTH
    lines = [rule, f"{script} FAILED", thin]
    causes = root_cause(records)
    if causes[1:]:
        lines += [f"Other failures ({len(causes) - 1}):", *(_other(record) for record in causes[1 : 1 + _MAX_OTHERS])]
        more = len(causes) - 1 - _MAX_OTHERS
        lines += [f"  ... and {more} more", thin] if more > 0 else [thin]
    if causes:
        lines += ["Root Cause (first observed failure):", "[0]:", *_root(causes[0], round, began), thin]
    lines += [f"  logs      : {logs} (on this node)"] if logs is not None else []
    lines += [f"  restarts used: {used}"] if used else []
    return "".join(f"{_printable(line)}\n" for line in [*lines, f"  reason    : {reason}", rule])


def _root(record: ExitRecord, round: int, began: float | None) -> list[str]:
    """``time`` is this node's own: its start of the round plus the time that the worker ran."""
    time_line = [f"  time      : {_date(began + record.after)}"] if began is not None else []
    name = f" ({signal_name(-record.code)})" if record.code < 0 else ""
    how = _how(record)
    return [
        *time_line,
        f"  host      : {record.node}",
        f"  rank      : {record.rank} (local_rank: {record.local_rank})",
        f"  exitcode  : {record.code} (pid: {record.pid}){name}",
        *([f"  how       : {how}"] if how != f"exit code {record.code}" else []),
        f"  when      : {record.after:.1f} s after the start of round {round}",
        "  traceback : its last words (stderr, or what @record kept)",
        *(f"    {line}" for line in record.lines or ("(nothing)",)),
    ]


def _date(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(int(seconds)).isoformat(sep="_")
    except (ValueError, OverflowError, OSError):  # the record is what some node says
        return "unknown"


def _other(record: ExitRecord) -> str:
    where = f"rank {record.rank} ({record.node}, local_rank {record.local_rank}, pid {record.pid})"
    return f"  {where}: {_how(record)}; {record.after:.1f} s after the start"


def _how(record: ExitRecord) -> str:
    return describe_code(record.code) + _BLAME_WORDS.get(record.blame, "") + (f", {record.note}" if record.note else "")


def _printable(line: str) -> str:
    text = line.replace("\t", "    ")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)

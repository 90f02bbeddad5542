"""Classification of worker failures: which worker is to blame, and what its exit code and its last words mean. Pure functions.

See docs/agent.md.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import replace

from elastirun.agent.failures.exit_codes import ExitCode
from elastirun.agent.part import WorkerExit
from elastirun.agent.workers.workers import stopped_by_signal
from elastirun.rendezvous.failures import root_cause, signal_name
from elastirun.rendezvous.wire.codec import clip
from elastirun.rendezvous.wire.records import Blame, ExitRecord

# Limits of one ExitRecord. The node's row carries up to eight of them (``tracker.MAX_REPORTED``).
_MAX_LINES = 30
_MAX_LINE = 500  # characters
_MAX_BYTES = 28 << 10  # bytes of all lines as JSON, where a character may take twelve; eight such records fit into a row
# Stricter limits for all but the root cause: the rows of 1,000 nodes must stay below 64 MiB, the largest answer of etcd.
_SHORT_LINE, _SHORT_BYTES = 200, 3 << 10  # characters of a line, bytes of all lines

# Messages of the socket layer, TCPStore, gloo, NCCL and NCCL's watchdog when a peer is lost.
_PEER_LOST_MESSAGE = re.compile(
    r"connection (was )?(likely )?(reset|closed|aborted)|connection refused|broken pipe|got 0 bytes|recvValue\w* failed"
    r"|socket (has )?time(d )?out|socketProgress|connectFullMesh|timed out waiting \d+ ?ms|wait timeout after \d+ ?ms"
    r"|application timeout caused pair closure"
    r"|\b(PeerLost|ReductionFailed): (?!the process group has been destroyed)"  # elastirun.train's
    r"|NCCL watchdog|ProcessGroup\w*.*watchdog|watchdog caught collective|remote process exited|NCCL communicator was aborted",
    re.IGNORECASE,
)
# Exceptions that a lost peer can cause. Any other type is the worker's own fault, whatever its message says.
_PEER_EXCEPTION = re.compile(
    r"(.*\.)?(RuntimeError|OSError|EOFError|TimeoutError|Connection\w*Error|BrokenPipeError|Dist\w*Error|PeerLost|ReductionFailed)"
)
_FINAL = re.compile(r"elastirun\.train\.errors\.Wrong(?:Use|Type)")  # the exceptions after which a restart is of no use
_EXCEPTION_LINE = re.compile(r"(?:\[rank\d+\]: ?)?([A-Za-z_][\w.]*)(?::|$)")  # not indented, unlike the frames above it
_TRACEBACK = "Traceback (most recent call last)"
# Exceptions that signal handlers raise: Python's, Lightning's, torch's.
_STOP_EXCEPTION = re.compile(r"(.*\.)?(KeyboardInterrupt|SystemExit|SIGTERMException|SignalException)")
_RAISED_FROM = "The above exception was the direct cause of the following exception"
_UNCAUGHT = re.compile(r"\[rank\d+\]: ?Traceback")  # from torch's hook for uncaught exceptions, or that of train/groups/rank_prefix.py
_CHILD_KILLED = "is killed by signal: Killed"  # from the error of torch's DataLoader when one of its processes was killed
STDOUT_CLOSED = "its stdout was closed: the program that read this launcher's output has ended"
_SHELL_CODES = {126: "command cannot be executed", 127: "command not found"}


def classify(end: WorkerExit, lines: Sequence[str]) -> Blame:
    """Return the blame of a failed worker, by how it ended and by the last ``lines`` of its stderr.

    Never returns ``Blame.SUSPECT``: ``make_record`` decides that, by what the worker had shown before its agent stopped it.
    Nor ``Blame.FINAL``, which ``make_record`` decides, too.
    """
    if end.killed_by_us:
        return Blame.KILLED_BY_US
    if end.code == -signal.SIGPIPE:
        return Blame.VICTIM
    if end.code < 0 and end.code != -signal.SIGABRT:
        return Blame.OWN_FAULT  # an abort may be NCCL's watchdog, no other crash is
    if end.code < 0 and shows_own_failure(lines, None):
        return Blame.OWN_FAULT  # it aborted during interpreter exit, after an exception of its own
    lost = shows_lost_peers(lines) if end.code > 0 else any(_PEER_LOST_MESSAGE.search(line) for line in lines)
    return Blame.VICTIM if lost else Blame.OWN_FAULT


def shows_own_failure(lines: Sequence[str], error: Sequence[str] | None) -> bool:
    """Return whether a worker that has not ended shows an uncaught exception of its own. ``error``: its error file (None: there is none).

    A worker may need seconds between its traceback and its exit, and its peers may end first.
    """
    name, said = _last_exception(error or lines)
    if name is None or shows_lost_peers(error or lines):
        return False
    return error is not None or len(said) == 1 or any(_UNCAUGHT.match(line) for line in lines)


def shows_lost_peers(lines: Sequence[str]) -> bool:
    """Return whether the last exception of a worker, or without one its last ``lines``, are what a lost peer causes."""
    name, said = _last_exception(lines)
    return (name is None or bool(_PEER_EXCEPTION.fullmatch(name))) and any(_PEER_LOST_MESSAGE.search(line) for line in said)


def may_be_stopped_from_outside(end: WorkerExit, lines: Sequence[str]) -> bool:
    """Return whether the worker may have ended because all processes of its node were signalled, so that its agent is signalled next.

    True when a stop signal ended the worker, or when the worker handles SIGTERM and showed no exception but one that such
    handlers raise.
    """
    if stopped_by_signal(end.code):
        return True
    if end.code <= 0 or not end.catches_term:
        return False
    name, _ = _last_exception(lines) if any(_TRACEBACK in line for line in lines) else (None, lines)
    return name is None or _STOP_EXCEPTION.fullmatch(name) is not None


def lost_its_stdout(code: int, lines: Sequence[str]) -> bool:
    """Return whether a worker may have ended because nobody reads its stdout any more (``elastirun ... | head``)."""
    name, _ = _last_exception(lines)
    ignored = any("name='<stdout>'" in line for line in lines) and any("BrokenPipeError" in line for line in lines)
    return code == -signal.SIGPIPE or (code > 0 and (ignored or name == "BrokenPipeError"))


def last_words(lines: Sequence[str]) -> str:
    """Return the first line of the last exception's message, such as "ValueError: no data"; without a traceback the last line with text."""
    name, said = _last_exception(lines)
    return said[0].strip() if name is not None else next((line.strip() for line in reversed(lines) if line.strip()), "")


def _last_exception(lines: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """Return the type of the last traceback's exception, and the lines from there on; (None, all lines) without a traceback.

    For an exception raised ``from`` another one, return the other: a lost peer stays a lost peer whatever it is wrapped in.
    """
    headers = [i for i, line in enumerate(lines) if _TRACEBACK in line]
    while headers[1:] and any(_RAISED_FROM in line for line in lines[headers[-2] : headers[-1]]):
        headers.pop()
    for i in range(headers[-1] + 1 if headers else len(lines), len(lines)):
        if found := _EXCEPTION_LINE.match(lines[i]):
            return found[1], lines[i:]
    return None, lines


# -- exit codes -------------------------------------------------------------------------------------------------------------


def describe_code(code: int) -> str:
    """Return a worker's exit code in words: ``exit code 3``, ``killed by SIGSEGV (signal 11)``."""
    if code < 0:
        return f"killed by {_describe_signal(-code)}"
    if code in _SHELL_CODES:
        return f"exit code {code}: {_SHELL_CODES[code]}"
    if 128 < code < 128 + signal.NSIG:
        return f"exit code {code}: a shell's word for {_describe_signal(code - 128)}"
    return f"exit code {code}"


def _describe_signal(number: int) -> str:
    name = signal_name(number)
    return name if name.endswith(str(number)) else f"{name} (signal {number})"


def explain_signal(code: int, lines: Sequence[str], out_of_memory: str | None) -> str:
    """Return the note (``ExitRecord.note``) on a worker that a signal from outside may have ended; empty when there is nothing to add.

    ``out_of_memory``: the kernel's account of it, see ``oom.explain``.
    """
    if code == -signal.SIGKILL:
        unknown = "; the kernel's count of out-of-memory kills cannot be read"
        denied = unknown if out_of_memory is None else ", and the kernel counts no out-of-memory kill"
        return out_of_memory or f"sent from outside (not by this agent{denied})"
    if out_of_memory and (code == 128 + signal.SIGKILL or any(_CHILD_KILLED in line for line in lines)):
        return f"a process of it was {out_of_memory}"
    # Other signals may come from the agent itself, which passes them on (--forward-signals).
    return "sent from outside (not by this agent)" if code == -signal.SIGTERM else ""


def exit_code(records: Iterable[ExitRecord]) -> int:
    """Return the exit code of the worker to blame as a shell gives it (``--exit-code-from-worker``); 1 when its agent ended it."""
    causes = root_cause(records)
    if not causes or causes[0].blame in (Blame.SUSPECT, Blame.KILLED_BY_US):
        return 1
    return causes[0].code if causes[0].code > 0 else ExitCode.signalled(-causes[0].code)


# -- records ----------------------------------------------------------------------------------------------------------------


def make_record(
    node: str, end: WorkerExit, lines: Sequence[str], error: Sequence[str] | None = None, note: str = "", alone: bool = False
) -> ExitRecord:
    """Return the record of a failed worker on the node called ``node``.

    ``lines``: the last lines of its stderr. ``error``: the content of its error file (``read_error_file``), which takes
    their place. ``note``: what else is known of its end. ``alone``: it had no peers to lose.
    A worker that its agent killed gets a record only when it had shown a failure before (``shows_own_failure``).
    """
    blame = Blame.OWN_FAULT if alone else classify(end, error or lines)
    name, _ = _last_exception(error or lines)
    words = last_words(error or lines)
    if end.code > 0 and _FINAL.fullmatch(words.partition(": ")[0] if name is None else name):  # None: printed without a traceback
        blame, note = Blame.FINAL, clip(_FINAL.split(words, 1)[-1].removeprefix(": "))
    if end.killed_by_us:
        blame, note = Blame.SUSPECT, "stopped by its agent after it had shown an exception of its own"
    return record_of(node, end, blame, error or lines, note)


def record_of(node: str, end: WorkerExit, blame: Blame, lines: Sequence[str], note: str) -> ExitRecord:
    """Return the record of a worker on the node called ``node``, with as many of the ``lines`` as fit into it."""
    return ExitRecord(node, end.rank, end.local_rank, end.pid, end.code, blame, round(end.after, 3), limit_lines(lines), note)


def shorten(record: ExitRecord) -> ExitRecord:
    """Return the record of a failure that is not the root cause with its last lines only: the report has one line for it."""
    return replace(record, lines=limit_lines([line[:_SHORT_LINE] for line in record.lines], _SHORT_BYTES))


def limit_lines(lines: Sequence[str], max_bytes: int = _MAX_BYTES) -> tuple[str, ...]:
    """Return the last lines that fit into a record: at most 30, of at most 500 characters, in ``max_bytes`` as JSON."""
    kept: list[str] = []
    for line in reversed(lines[-_MAX_LINES:]):
        max_bytes -= len(json.dumps(line[:_MAX_LINE])) + 1
        if max_bytes < 0:
            break
        kept.insert(0, line[:_MAX_LINE])
    return tuple(kept)

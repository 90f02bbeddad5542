"""Every exception of elastirun in one tree. ``elastirun.agent.failures.exit_codes`` has the exit codes.

    ElastirunError
    ├── UsageError         invalid option, variable or combination; nothing was started      ExitCode.USAGE
    ├── StartError         a valid command that this machine cannot carry out                ExitCode.SICK
    │   └── BadCommand     what the command names is not there: no node can carry it out       ExitCode.ENVIRONMENT
    ├── NothingFound       there is nothing that a command of ``elastirun`` could show       4
    ├── StoreError         the store did not answer, or answered with an error                retried; ExitCode.RENDEZVOUS when it lasts
    │   ├── StoreRefused   the store refuses this node, so waiting does not help
    │   ├── StoreMoved     the store is elsewhere, and this node knows where
    │   ├── UnreadableRound  the round record does not parse
    │   └── UnreadableMembers  the members that the round record names are not there, mostly because it is being replaced
    ├── JobFailed          the job of ``elastirun.launch`` failed; carries the root cause and the launcher's exit code
    └── BadRecord          bytes in the store that are not a record of ours
        └── BadSignature   a record that was not signed with our token

Errors in a worker have a root of their own. ``elastirun.train.errors`` has those of this tree that need torch.

    TrainError (a RuntimeError)
    ├── RoundUnknown       nobody could tell whether this worker's round is still the current one (``is_current``)
    └── CheckpointError    a checkpoint cannot be written, or is not whole: which file, and what to do
        └── ClaimLost      another round or job has taken the directory over; nothing was published
"""

from __future__ import annotations

from typing import Any


class ElastirunError(Exception):
    """The root of the tree; never raised itself."""


class UsageError(ElastirunError):
    """An option, a variable or a combination cannot work. The message is one line: what, where it was set, what to do."""


class StartError(ElastirunError):
    """The command is valid, but this machine cannot carry it out: a port is in use, there is no GPU."""


class BadCommand(StartError):
    """A command that no node can carry out: the script, torch or a package is missing."""


class NothingFound(ElastirunError):
    """There is nothing to show: no such job, no events. The message says where it was looked for, and what to give."""


class StoreError(ElastirunError):
    """A store operation failed. The store may or may not have applied the operation."""


class StoreRefused(StoreError):
    """The store answers and refuses this node: wrong password, no permission, expired certificate. Only people can correct that."""


class StoreMoved(StoreError):
    """The store of the job is not where the job was started. ``place``: where it is, a ``Place`` of ``rendezvous/wire/records.py``."""

    def __init__(self, text: str, place: Any) -> None:
        super().__init__(text)
        self.place = place


class LargeAnswer(StoreError):
    """The answer of the store is too large to be taken without waiting."""


class UnreadableRound(StoreError):
    """The round record does not parse: the nodes have different tokens or versions, or another program wrote it."""


class UnreadableMembers(StoreError):
    """The members that the round record names are not there, or do not parse: a newer record may just be written."""


class JobFailed(ElastirunError):
    """The job of ``elastirun.launch`` failed. ``exit_code``: the launcher's. ``cause``: one line. ``details``: its traceback."""

    def __init__(self, exit_code: int, cause: str = "", details: str = "") -> None:
        self.exit_code, self.cause, self.details = exit_code, cause, details
        text = f"the job ended with exit code {exit_code}: {cause or 'see the report on stderr'}"
        super().__init__(f"{text}\n{details}" if details else text)


class BadRecord(ElastirunError):
    """Bytes from the store do not parse as the record that belongs under their key."""


class BadSignature(BadRecord):
    """A record has no valid signature although a token is configured."""


class TrainError(RuntimeError):
    """The root of a worker's errors; raised itself for wrong use without a class of its own."""


class RoundUnknown(TrainError):
    """The agent, or the rendezvous store behind it, did not answer in time: the round may be current or not."""


class CheckpointError(TrainError):
    """A checkpoint cannot be written or read. The message is one line: what, where (file, tensor), what to do."""


class ClaimLost(CheckpointError):
    """Another round or job has claimed the directory since, or the round is over: this process can publish nothing there any more."""

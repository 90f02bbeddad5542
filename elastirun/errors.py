"""Every exception of elastirun, and the exit codes.

    ElastirunError
    ├── UsageError         bad option, variable or combination; nothing was started        exit 2
    ├── StartError         a valid command that this machine cannot carry out              exit 3
    ├── StoreError         the rendezvous store did not answer, or answered with an error  (retried; exit 201 when it stays)
    │   └── StoreRefused   … or does not let us in: waiting does not help
    ├── JobFailed          ``elastirun.launch``: the job ended without success; with the root cause and the exit code
    └── BadRecord          bytes in the store that are not one of our records
        └── BadSignature   … or that were not signed with our token

Exit codes of the launcher (``ExitCode``): what a supervisor such as Kubernetes or Slurm may act on.

    0    every worker of the job's last round succeeded
    1    the job failed: a worker failed and the restart budget is spent
    2    the command line or an environment variable is wrong; nothing was started
    3    this machine cannot carry out a valid command: the script or torch is missing, a port is in use, a log folder
         cannot be made; or this node was started with other settings than the job
    128+n  the agent was told to stop by signal n (143 for SIGTERM, 130 for SIGINT)
    200  peers were lost, and not enough nodes came back within the join timeout
    201  no rendezvous: too few nodes within the join timeout, or the store could not be reached
    202  this node is sick: a worker hangs in the kernel and cannot be killed; look at the machine before using it again
    203  a bug in elastirun itself (please report the traceback)
    204  this node is excluded: another one holds its fixed --node-rank

With --exit-code-from-worker the worker's own code (128 + n when signal n ended it) takes the place of 1.

From 128 on, running the same command again may help; below, it does not (Kubeflow's convention).
"""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    ENVIRONMENT = 3
    PEERS_LOST = 200
    RENDEZVOUS = 201
    SICK = 202
    BUG = 203
    EXCLUDED = 204

    @staticmethod
    def signalled(signum: int) -> int:
        """The shell's convention for "ended by signal ``signum``"."""
        return 128 + signum


class ElastirunError(Exception):
    """The root of the tree; never raised itself."""


class UsageError(ElastirunError):
    """What the user gave cannot work. The message is one line: what, where it came from, what to do."""


class StartError(ElastirunError):
    """The command is valid but this machine cannot carry it out (a port in use, a name that is not ours)."""


class StoreError(ElastirunError):
    """A store operation failed; whether it was applied is not known."""


class StoreRefused(StoreError):
    """The store is there and will not have us: a wrong password, no permission, an expired certificate. Only people can mend that."""


class JobFailed(ElastirunError):
    """The job that ``elastirun.launch`` ran has failed. ``exit_code``: the launcher's. ``cause``: one line; ``details``: its traceback."""

    def __init__(self, exit_code: int, cause: str = "", details: str = "") -> None:
        self.exit_code, self.cause, self.details = exit_code, cause, details
        text = f"the job ended with exit code {exit_code}: {cause or 'see the report on stderr'}"
        super().__init__(f"{text}\n{details}" if details else text)


class UnreadableRound(StoreError):
    """The round record does not parse: nodes have other tokens or versions, or somebody else has written there."""


class BadRecord(ElastirunError):
    """Bytes from the store that do not parse as the record expected under that key."""


class BadSignature(BadRecord):
    """A record without a valid signature although a token is configured."""

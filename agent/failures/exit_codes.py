"""The exit codes of the agent: one table, from which the text of ``--help`` and of docs/exit-codes.md is made.

A code below 128 stands for what is the same on every node, so running the same command again does not help.
From 128 on it may, on this machine or on another one. This is Kubeflow's convention.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class ExitCodeRow(NamedTuple):
    """One row of the table, in words."""

    code: str
    summary: str  # for --help
    meaning: str  # for the docs, in Markdown
    advice: str  # what a scheduler such as Kubernetes or Slurm, or whoever reads the code, should do


class ExitCode(enum.IntEnum):
    """The exit codes that have a fixed number. ``signalled`` computes the others."""

    summary: str
    meaning: str
    advice: str

    def __new__(cls, code: int, summary: str, meaning: str, advice: str) -> ExitCode:
        member = int.__new__(cls, code)
        member._value_ = code
        member.summary, member.meaning, member.advice = summary, meaning, advice
        return member

    OK = 0, "all workers succeeded", "every worker of the last round succeeded", "nothing: the job is complete"
    FAILED = (
        1,
        "a worker failed and no restart was left",
        "the job failed: a worker failed, and `--max-restarts` is spent, `--fail-fast` applies, or `elastirun.train` "
        "has refused what the script asks for, as it would again; "
        "with `--exit-code-from-worker` that worker's own code instead, 128 + n for signal n",
        "fail the job; the failure report has the cause",
    )
    USAGE = (
        2,
        "wrong use, nothing was started",
        "wrong use: the command line or a variable; nothing was started",
        "fail the job; correct the command",
    )
    ENVIRONMENT = (
        3,
        "the script or torch is missing, or the nodes were started differently",
        "no node can carry it out: the script, torch or a package is missing; or this node's settings or token differ from the job's",
        "fail the job; correct what the last line names",
    )
    PEERS_LOST = 200, "peers were lost and did not come back", "peers were lost, and too few came back within `--join-timeout`", "retry"
    RENDEZVOUS = (
        201,
        "too few nodes came, or the rendezvous was lost",
        "no rendezvous: too few nodes within `--join-timeout`, the store refused this node, or the store, or too many nodes of the last "
        "round, could not be reached for `--store-grace`",
        "retry; if it repeats, see whether all nodes start and reach the endpoint",
    )
    SICK = (
        202,
        "this node is sick",
        "this node is sick: no worker can be started (no process, descriptor, memory, disk space or thread is left, "
        "torch sees no GPU, a port is in use, the log folder cannot be made), [a check](check.md) has found that it should not take part, "
        "or a worker hangs in the kernel and cannot be killed",
        "retry on another node; look at this machine before using it again (`kubectl cordon`, `scontrol update state=drain`)",
    )
    BUG = 203, "a bug in elastirun", "a bug in elastirun; the workers had their grace period", "retry; please report the traceback"
    EXCLUDED = (
        204,
        "another node has this one's rank",
        "this node is excluded: another node holds its fixed `--node-rank`",
        "retry when the other node has ended, or give each node a `--node-rank` of its own",
    )

    @staticmethod
    def signalled(signum: int) -> int:
        """Return the exit code of an agent that signal ``signum`` told to stop, by the shell's convention."""
        return 128 + signum


SIGNALLED = ExitCodeRow(
    "128 + n",
    "told to stop by signal n",
    "signal n told the agent to stop: 143 for SIGTERM, 130 for SIGINT",
    "retry, without counting it: the node was preempted, drained or cancelled",
)


def rows() -> list[ExitCodeRow]:
    """Return all rows of the table, by rising code."""
    fixed = [ExitCodeRow(str(int(code)), code.summary, code.meaning, code.advice) for code in ExitCode]
    return [*(row for row in fixed if int(row.code) <= 128), SIGNALLED, *(row for row in fixed if int(row.code) > 128)]


def help_text() -> str:
    """Return the table as one sentence for ``--help``."""
    return f"Exit status: {'; '.join(f'{row.code} {row.summary}' for row in rows())}. From 128 on, trying again may help."

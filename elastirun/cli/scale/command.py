"""``elastirun scale``: how many nodes a job is to have, written into the round record where its nodes meet. See docs/running.md#scaling."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import click

from elastirun import standard_streams
from elastirun.agent.status.job_status import JobStatus
from elastirun.agent.status.reader import StatusReader
from elastirun.agent.wanted_nodes import count_of, why_not
from elastirun.cli.parse import quote
from elastirun.cli.status_command import find_one, options_of_job, read_words, target_of
from elastirun.cli.subcommands import show
from elastirun.errors import StartError, StoreError, UsageError

ALONE = "with one node nobody takes the store over when it is lost: spares cannot, and end with 201"
_HELP = """\
Says how many nodes a job is to have, within its --nnodes=MIN:MAX. A first round that waits for more starts
as soon as so many are there. A larger job goes on with fewer nodes, those with the highest ranks become
spares; a smaller one takes in spares and nodes that come. Workers are stopped as for a newcomer.

  elastirun scale 4                                 the one job of your agents on this machine
  elastirun scale 4 job7                            one of several
  elastirun scale max job7 --rdzv-endpoint=node0    from elsewhere: as many as --nnodes allows again

Exit status: 0 written; 2 wrong use; 3 the record cannot be read or written; 4 no such job there.
"""


def main(argv: Sequence[str]) -> int:
    """Write the number of nodes that ``argv`` asks for. Return the exit code. Raises UsageError, StartError and NothingFound."""
    given = read_words("scale", argv, [click.Argument(["count"], required=False)])
    if "help" in given:
        return show(f"usage: elastirun scale COUNT|max [JOB] [OPTIONS]\n\n{_HELP}\n{options_of_job()}")
    count = given.pop("count", "")
    if not count:
        raise UsageError("the number of nodes is missing; give one from 1 on, or max for as many as --nnodes allows")
    asked = count_of(count)
    if asked is None:
        raise UsageError(f"{quote(count)} is no number of nodes; give one from 1 on, or max for as many as --nnodes allows")
    target = target_of(given)
    try:
        with closing(StatusReader(target)) as reader:
            job = find_one(reader.look(), target)
            wanted = asked and _within(job, asked)
            reader.scale(job.job, wanted)
    except StoreError as error:
        raise StartError(f"the number of nodes cannot be written: {error}") from None
    if wanted == 1 and len(job.nodes) > 1 and "etcd" not in job.store:
        standard_streams.write("stderr", f"elastirun scale: warning: {ALONE}\n")
    members = sum(node.node_rank is not None for node in job.nodes)
    now = f"{members} in the round" if members else f"{len(job.nodes)} joined"
    return show(f"{_called(job)}: {count if wanted else f'at most {job.max_nodes}'} node{'s' * (count != '1')} wanted, {now}")


def _within(job: JobStatus, count: int) -> int:
    """Return the number of nodes if the job may have so many. Raises UsageError."""
    low, high = job.min_nodes, job.max_nodes
    if low is None or high is None:
        raise StartError(f"{_called(job)} has no record yet: its first node has just begun")
    if why := why_not(count, _called(job), low, high):
        raise UsageError(why)
    return count


def _called(job: JobStatus) -> str:
    return f"job {quote(job.job)}" if job.job else "the job"

"""The command ``elastirun warm``: shows and ends the fork servers that ``--keep-warm`` has left. See docs/agent.md."""

from __future__ import annotations

from collections.abc import Sequence

from elastirun.agent.processes.preload import keep_warm
from elastirun.cli.parse import quote
from elastirun.cli.subcommands import show
from elastirun.errors import NothingFound, StartError, UsageError

_HELP = """\
usage: elastirun warm [stop]

Shows what --keep-warm has left in memory: fork servers that have imported modules and wait for your
next command.

  elastirun warm        show them
  elastirun warm stop   end them; their jobs go on

Exit status: 0 shown or ended; 2 wrong use; 4 there are none.
"""


def main(argv: Sequence[str]) -> int:
    """Do what ``argv`` asks for. Return the exit code. Raises UsageError, StartError and NothingFound."""
    if any(word in ("--help", "-h") for word in argv):
        return show(_HELP)
    if list(argv) not in ([], ["stop"]):
        raise UsageError(f"{quote(argv[0])} is not known here; the only word is stop (see elastirun warm --help)")
    try:
        found = keep_warm.servers()
    except (OSError, keep_warm.NotWarm) as error:
        raise StartError(str(error)) from None
    if not found:
        raise NothingFound("nothing is kept warm; start a job with --keep-warm=10m")
    lines = [f"{'ended' if argv else 'kept warm'}: {line(server)}" for server in found]
    for server in found if argv else ():
        server.stop()
    return show("\n".join(lines))


def line(server: keep_warm.WarmServer) -> str:
    """Return a line for people about one server."""
    memory = server.memory
    return f"{server.modules} (pid {server.pid}{'' if memory is None else f', {memory / (1 << 20):.0f} MiB'})"

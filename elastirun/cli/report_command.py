"""The command ``elastirun report``: makes a page of what happened in a job, from its log folders. See docs/report.md.

The command reads files and writes one. Bad input ends in one line on stderr.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence

import click

from elastirun.cli.parse import quote
from elastirun.cli.subcommands import read_options, show
from elastirun.errors import NothingFound, StartError, UsageError

OUT = "report.html"
_HELP = f"""\
usage: elastirun report DIR... [--out={OUT}] [--trace=FILE]

Writes a page about a job that opens in any browser, also offline: who did what when, what the time
was lost to, and the failures with their stacks. DIR: the folder of --log-dir, with the logs of all
nodes, or the folder of one node; several are merged.

  --out=FILE, -o FILE   the page [{OUT}]
  --trace=FILE          the same as a trace for ui.perfetto.dev and chrome://tracing, besides

Exit status: 0 written; 2 wrong use; 3 a file cannot be written; 4 no events there.
"""


def main(argv: Sequence[str]) -> int:
    """Write the report that ``argv`` asks for. Return the exit code. Raises UsageError, StartError and NothingFound."""
    from elastirun.report import clocks, page, reader, story, trace, words  # no launch needs them

    parameters: list[click.Parameter] = [
        click.Option(["out", "-o", "--out"], callback=_given),
        click.Option(["trace", "--trace"], callback=_given),
        click.Argument(["folders"], nargs=-1),
    ]
    given = read_options("report", parameters, argv)
    if given["help"]:
        return show(_HELP)
    if not given["folders"]:
        raise UsageError("give the folders of the logs (see elastirun report --help)")
    found = reader.read(given["folders"])
    if not found.events:
        why = "; ".join(found.left_out[:3]) or f"no {reader.NAME} is in or below them"
        raise NothingFound(f"no events in {', '.join(map(quote, given['folders']))}: {words.clean(why)}; give the folder of --log-dir")
    agents = clocks.align(found.events)
    told = story.tell(agents)
    shown = show("\n".join(words.summary(told)))
    files = {given["out"] or OUT: page.page(told, found.left_out)}
    if given["trace"]:
        if os.path.abspath(given["trace"]) in map(os.path.abspath, files):
            raise UsageError(f"--trace is the file of the page, {quote(given['trace'])}; give another one")
        files[given["trace"]] = trace.trace(told)
    for path in files:
        if os.path.basename(os.path.realpath(path)) == reader.NAME:
            raise UsageError(f"{quote(path)} is a file of events, which the report is made from; give another place")
    for path, text in files.items():
        _save(text.encode(errors="replace"), path)
    return max(shown, show(f"Written: {', '.join(map(quote, files))}"))


def _given(context: click.Context, option: click.Parameter, path: str | None) -> str | None:
    """Return ``path``. Raises click.UsageError where it is empty, as with a shell's variable that is not set."""
    if path == "":
        raise click.UsageError(f"--{option.name} is empty; give a path")
    return path


def _save(data: bytes, path: str) -> None:
    """Write a file for its owner alone, as the logs are, in one piece; write into what is no file. Raises StartError."""
    try:
        if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):  # such as /dev/stdout
            with open(path, "wb") as device:
                device.write(data)
            return
        target = os.path.realpath(path)  # a link stays one
        with tempfile.NamedTemporaryFile(dir=os.path.dirname(target), delete=False) as file:
            try:
                file.write(data)
                file.close()
                os.replace(file.name, target)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise StartError(f"cannot write {quote(path)}: {error.strerror}; give another place with --out") from None

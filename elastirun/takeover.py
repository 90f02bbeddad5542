"""Runs another launcher with elastirun in torchrun's place: ``elastirun takeover accelerate launch ... train.py``.

Some launchers call torchrun from inside: ``accelerate launch``, ``fabric run``, ``tune run``. They build its arguments and call
``torch.distributed.run.run(args)`` or ``main(argv)`` in their own process. This module replaces these two functions: they execute
elastirun with the same arguments. All that a launcher does before (configuration files, environment variables) is unchanged.

See docs/frameworks.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from elastirun.agent.failures.exit_codes import ExitCode
from elastirun.errors import UsageError
from elastirun.start_command import start_command

_USAGE = "usage: elastirun takeover (COMMAND | -m MODULE | FILE.py) [ARGUMENTS...]"
_ABOUT = """Runs a launcher that calls torchrun from inside, with elastirun in torchrun's place and the same arguments:
  elastirun takeover accelerate launch --multi_gpu --num_processes=8 train.py

COMMAND is one that a Python package installs, such as accelerate, fabric or tune. Options that only elastirun has are given by
their PET_ variables, see elastirun --help-all."""
_SCRIPT = ("training_script", "training_script_args")  # positional; the second takes all the rest


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher named in ``argv`` (None: this process's arguments). Returns an exit code only if it did not call torchrun."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in ("-h", "--help"):
        print(f"{_USAGE}\n\n{_ABOUT}")
        return ExitCode.OK
    try:
        start = _entry(arguments)
        take_over()
        start()
    except UsageError as error:
        print(f"elastirun takeover: {error}", file=sys.stderr)
        return ExitCode.USAGE
    print(f"elastirun takeover: {arguments[0]} ended without calling torch.distributed.run, so elastirun did not run", file=sys.stderr)
    return ExitCode.OK


def take_over() -> None:
    """Replace ``run`` and ``main`` of ``torch.distributed.run`` by functions that execute elastirun in this process.

    Call it before a launcher is imported, because ``from torch.distributed.run import run`` keeps the function that it finds.
    Raises UsageError without torch.
    """
    try:
        from torch.distributed import run as torchrun
    except ImportError as error:
        raise UsageError(f"torch cannot be imported ({error}); pip install torch") from None
    parser = torchrun.get_args_parser  # type: ignore[attr-defined,unused-ignore]

    def run(args: argparse.Namespace) -> NoReturn:
        environ = dict(os.environ)
        _become_elastirun(arguments(args, parser(), environ), environ)

    def main(args: Sequence[str] | None = None) -> NoReturn:
        _become_elastirun(list(sys.argv[1:] if args is None else args), dict(os.environ))

    torchrun.run, torchrun.main = run, main  # type: ignore[attr-defined,unused-ignore]


def arguments(args: argparse.Namespace, parser: argparse.ArgumentParser, environ: dict[str, str]) -> list[str]:
    """Return the command line that ``parser`` reads as ``args``. It has only what differs from the defaults, so elastirun's defaults hold.

    A command line cannot say that a flag is off. If a flag is off in ``args``, its variable in ``environ`` is set to 0.
    """
    line: list[str] = []
    for action in parser._actions:  # argparse has no public list of a parser's options
        value = getattr(args, action.dest, action.default)
        if not action.option_strings or action.dest == "help" or value is None or value == action.default:
            continue
        if action.nargs != 0:
            if str(value) != str(action.default):
                line.append(f"{_longest(action)}={_text(value)}")
        elif value:
            line.append(_longest(action))
        else:
            environ[f"PET_{action.dest.upper()}"] = "0"
    script, rest = (getattr(args, name, None) for name in _SCRIPT)
    local_rank = [] if getattr(args, "use_env", True) else ["--local-rank=${local_rank}"]  # torch.distributed.launch
    return [*line, str(script), *local_rank, *map(str, rest or ())]


def _longest(action: argparse.Action) -> str:
    return max(action.option_strings, key=len).replace("_", "-")


def _text(value: Any) -> str:
    """Return a value as text for a command line. The items of a list are separated by commas; a comma in an item is doubled."""
    if isinstance(value, list | tuple):
        return ",".join(str(item).replace(",", ",,") for item in value)
    return str(value)


def _become_elastirun(line: list[str], environ: dict[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, start_command(line), environ)


def _entry(arguments: list[str]) -> Callable[[], object]:
    """Return the function that starts the launcher, and set ``sys.argv`` for it. Raises UsageError when there is no such launcher."""
    if not arguments or arguments == ["-m"]:
        raise UsageError(f"no launcher is named; {_USAGE}")
    name, rest = arguments[0], arguments[1:]
    if name == "-m":
        sys.path.insert(0, os.getcwd())
        _check_module(rest[0])
        sys.argv = rest
        return lambda: runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    sys.argv = arguments
    if name.endswith(".py"):
        if not os.path.isfile(name):
            raise UsageError(f"there is no file {name!r} in {os.getcwd()}; give its path")
        sys.path.insert(0, os.path.dirname(os.path.abspath(name)))
        return lambda: runpy.run_path(name, run_name="__main__")
    found = importlib.metadata.entry_points(group="console_scripts", name=name)
    if not found:
        raise UsageError(f"no package of {sys.executable} installs a command {name!r}; give one that does, -m MODULE, or a file.py")
    return lambda: next(iter(found)).load()()


def _check_module(name: str) -> None:
    """Raise UsageError if ``python -m name`` would find no module."""
    try:
        found = importlib.util.find_spec(name)  # imports the packages above it, as python -m does
    except (ModuleNotFoundError, ValueError):
        found = None
    if found is None:
        raise UsageError(f"no module {name!r} for {sys.executable}; give one that is installed or in {os.getcwd()}")


if __name__ == "__main__":
    if sys.path[0] == os.getcwd():  # "python -m" has put it there; it is not in the path of the launcher's own command
        del sys.path[0]
    sys.exit(main())

"""``elastirun.launch``: runs a function on workers, from scripts and notebooks. See docs/frameworks.md.

The launcher runs in a process of its own. Its workers run ``worker/function_worker.py`` with a folder that only this user can enter. The
folder holds the call and takes the results, both pickled as the standard library does for spawned processes (multiprocessing's
ForkingPickler). Only this user's processes can write there, so no bytes of other users are unpickled.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import spawn
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from elastirun.agent.failures.exit_codes import ExitCode
from elastirun.cli import command_line as cli
from elastirun.cli.options import BY_DEST
from elastirun.errors import JobFailed, UsageError
from elastirun.start_command import start_command

OF_SCRIPTS = ("module", "no_python", "run_path")  # options
WORKER = str(Path(__file__).with_name("worker") / "function_worker.py")


class ByValue(ForkingPickler):
    """Pickles as for a spawned process, but copies everything: otherwise torch's tensors become handles to memory of this process."""

    _extra_reducers: dict[type, Callable[..., Any]] = {}


def launch_function(fn: Callable[..., Any], args: Sequence[object], options: Mapping[str, object]) -> dict[int, Any]:
    """Implement ``elastirun.launch``, which documents the arguments."""
    with tempfile.TemporaryDirectory(prefix="elastirun_launch_") as folder:  # 0700
        line = [*command_line({"detect": "off", **options}), WORKER, folder]  # a call on each node of a job is for that node
        cli.parse(line)  # a wrong option is an error of this process, not of the launcher
        Path(folder, "preparation").write_bytes(_preparation())
        Path(folder, "call").write_bytes(_pickled_call(fn, args))
        error_file = f"{folder}/error.json"
        environ = {**os.environ, "TORCHELASTIC_ERROR_FILE": error_file}
        code = _run(start_command(line, tied=True), environ)
        if code == ExitCode.OK:
            return _results(folder)
        if code == ExitCode.USAGE:
            raise UsageError("launch: elastirun refused these options, see its line on stderr")
        raise JobFailed(code, *_cause(error_file))


def command_line(options: Mapping[str, object]) -> list[str]:
    """Return ``nproc_per_node=2, fail_fast=True`` as options of the command line. None and False leave an option out.

    A dict becomes ``KEY=VALUE,...``, as for ``--set``, without keys whose value is None.
    """
    line = []
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        if name in OF_SCRIPTS and value:
            raise UsageError(f"launch: {name} is for scripts, and this runs a function; leave it out")
        if value is True and name in BY_DEST and not BY_DEST[name].flag:
            raise UsageError(f"launch: {name}=True: give {option} a value, {BY_DEST[name].metavar}")
        if value is True:
            line.append(option)
        elif value is not None and value is not False:
            value = [f"{key}={item}" for key, item in value.items() if item is not None] if isinstance(value, Mapping) else value
            text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            line.append(f"{option}={text}")
    return line


def _preparation() -> bytes:
    """Return the pickled state that a spawned process sets up first: sys.path, sys.argv, the working folder, the script as a module."""
    chosen: str | None = multiprocessing.get_start_method(allow_none=True)
    data = spawn.get_preparation_data("elastirun worker")
    multiprocessing.set_start_method(chosen, force=True)  # get_preparation_data has fixed the method; undo that
    data.pop("authkey", None)  # a secret between this process and its children, which the workers are not
    if chosen is None:
        del data["start_method"]
    return bytes(ByValue.dumps(data))


def _pickled_call(fn: Callable[..., Any], args: Sequence[object]) -> bytes:
    if not callable(fn):
        raise UsageError(f"launch: the first argument is {fn!r}, no function; give the function itself, as in launch(train, (0.1,))")
    name, main = getattr(fn, "__qualname__", repr(fn)), sys.modules["__main__"]
    interactive = getattr(main, "__spec__", None) is None and not hasattr(main, "__file__")
    if getattr(fn, "__module__", "") == "__main__" and interactive:
        where = "a notebook's cell or an interactive session, where new processes cannot find it"
        what_to_do = "write it to a module (%%writefile my_training.py) and import it from there"
        raise UsageError(f"launch: {name} is defined in {where}; {what_to_do}")
    if not isinstance(args, tuple | list):
        raise UsageError(f"launch: the arguments of {name} are {args!r}; give a tuple, such as ({args!r},)")
    try:
        return bytes(ByValue.dumps((fn, tuple(args))))
    except Exception as error:  # a class's own __reduce__ may raise anything
        why = f"{type(error).__name__}: {error}"
        raise UsageError(f"launch: {name} and its arguments cannot be sent to new processes ({why}); give a function of a module") from None


def _run(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the launcher and return its exit code.

    Each Ctrl-C is passed on to the launcher, and raised as KeyboardInterrupt when the launcher has ended. The launcher has a session
    of its own, so that the terminal does not signal it a second time.
    """
    interrupted: KeyboardInterrupt | None = None
    with subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, start_new_session=True) as process:
        while True:
            try:
                code = process.wait()
                break
            except KeyboardInterrupt as error:
                interrupted = error
                process.send_signal(signal.SIGINT)
            except BaseException:
                process.terminate()
                raise
    if interrupted is not None:
        raise interrupted
    return code if code >= 0 else ExitCode.signalled(-code)


def _results(folder: str) -> dict[int, Any]:
    """Return the results by global rank.

    Files are named ROUND-RANK. Only those of the last round count: in earlier rounds some workers may have returned before others failed.
    """
    rounds: dict[int, dict[int, Path]] = {}
    for path in Path(folder).glob("result-*"):
        number, rank = map(int, path.name.split("-")[1:])
        rounds.setdefault(number, {})[rank] = path
    last = rounds[max(rounds)] if rounds else {}
    return {rank: ForkingPickler.loads(path.read_bytes()) for rank, path in sorted(last.items())}


def _cause(error_file: str) -> tuple[str, str]:
    """Return the root cause from the launcher's error file: one line, and the traceback or the last lines of the worker to blame."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        message = json.loads(Path(error_file).read_text())["message"]
        if isinstance(message, str):
            return message, ""
        return str(message["message"]), str(message["extraInfo"].get("py_callstack", ""))
    return "", ""

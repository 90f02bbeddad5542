"""The command ``elastirun``: reads the command line and the environment, checks the files named there, and starts the agent.

Bad input ends in one line on stderr and exit status 2, before anything is started.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from elastirun import __version__, early_signals, standard_streams
from elastirun.agent.failures.exit_codes import ExitCode
from elastirun.agent.host.cpus import usable_cpus
from elastirun.agent.output.agent_lines import Level, LineFormat
from elastirun.agent.processes.preload import script_imports, warm_server
from elastirun.cli import command_line, completion, subcommands
from elastirun.cli.detect.detected import Host
from elastirun.cli.given_options import DEFAULT_SOURCE, GivenOptions, MachineFacts
from elastirun.cli.options import GROUPS
from elastirun.cli.parse import nearest, quote
from elastirun.cli.resolve import resolve
from elastirun.cli.secret_files import advice, read_token
from elastirun.config import NO_FILES, Command, Etcd, LaunchConfig
from elastirun.errors import BadCommand, ElastirunError, StartError, UsageError

PROBE_TIMEOUT = 300.0  # seconds for importing torch and counting devices: a cold disk or a busy driver may take minutes


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one agent to its end, and exit with its status. ``argv`` is without the program's name; None: ``sys.argv``."""
    words = sys.argv[1:] if argv is None else argv
    prepared: LaunchConfig | int = ExitCode.OK
    try:
        if (command := subcommands.asked_for(words, os.environ)) == "help":
            words = subcommands.words_of_help(words[1:])
            command = subcommands.asked_for(words, os.environ)
        if command:
            sys.exit(subcommands.run(command, words[1:]))
        given = _given_server()
        prepared = _prepare(words, warn=given is None)
        if isinstance(prepared, LaunchConfig) and prepared.check and given is None:
            prepared = _check_first(words) or prepared
        status = prepared if isinstance(prepared, int) else _launch(prepared, given, may_stay_above=argv is None)
    except ElastirunError as error:
        _say(str(error))
        kinds = ((UsageError, ExitCode.USAGE), (BadCommand, ExitCode.ENVIRONMENT), (ElastirunError, ExitCode.SICK))
        status = next(code for kind, code in kinds if isinstance(error, kind))
        _tell_scheduler(status, str(error))
    except KeyboardInterrupt:
        status = ExitCode.signalled(signal.SIGINT)
    except Exception as error:
        standard_streams.write("stderr", traceback.format_exc())
        _say("this is a bug in elastirun; please report it with the lines above")
        status = ExitCode.BUG
        _tell_scheduler(status, f"{type(error).__name__}: {error}")
    if isinstance(prepared, LaunchConfig):
        # A normal exit of the interpreter would wait for, or abort on, threads that are still inside torch's store.
        standard_streams.flush()
        os._exit(status)
    standard_streams.flush()
    sys.exit(status)


def _given_server() -> tuple[int, int] | None:
    """Return the pid and the control socket of the fork server that --keep-warm has given this process; None: none."""
    with suppress(ValueError):
        control, pid = map(int, os.environ.pop(warm_server.VARIABLE, "").split(","))
        return pid, control
    return None


def _launch(config: LaunchConfig, given: tuple[int, int] | None, may_stay_above: bool) -> int:
    """Run the agent. With --keep-warm and no fork server ``given`` it runs below this process, if that may be."""
    from elastirun.agent.processes import marks  # slow imports, which --help does without
    from elastirun.agent.processes.preload.server_start import start_ahead, taken_over
    from elastirun.agent.workers.spec import NodeEnvironment, worker_like

    mark, environ = marks.own(), dict(os.environ)
    like = worker_like(config, NodeEnvironment(environ, usable_cpus(), mark=marks.for_workers(environ.get(marks.VARIABLE, ""), mark)))
    if config.preload.keep_warm and given is None and may_stay_above:
        from elastirun.agent.processes.preload import keep_warm

        try:
            return keep_warm.run(config.preload, like.env, (*config.signals, *config.forward_signals))
        except keep_warm.NotWarm as error:
            _say(f"warning: --keep-warm has no effect: {error}")
    server = taken_over(*given) if given else start_ahead(config.preload, like, mark)
    from elastirun.agent.agent import run

    early_signals.restrict_to(config.signals)
    return run(config, server)


def _check_first(argv: Sequence[str]) -> ExitCode:
    """Check this node and its network as ``elastirun check`` does. Return 0, or the exit code of a node that takes no part.

    In a process of its own: the agent begins with a process that has no threads, no sockets, and nothing of torch.
    """
    checked = subprocess.run([sys.executable, "-m", "elastirun", "check", "--check", *argv], stdin=subprocess.DEVNULL)
    code = next((one for one in (ExitCode.SICK, ExitCode.RENDEZVOUS) if one == checked.returncode), ExitCode.OK)
    if code != ExitCode.OK:
        _say(reason := "--check: this node takes no part in the job, see the lines above")
        _tell_scheduler(code, reason)
    return code


def _prepare(argv: Sequence[str], warn: bool) -> LaunchConfig | int:
    """Return the configuration to launch, or the exit status when something was only to be shown."""
    given, script = command_line.parse(argv)
    if "help" in given:
        return subcommands.show(command_line.help_text())
    if "help_all" in given:
        return subcommands.show(command_line.full_help_text())
    if "version" in given:
        return subcommands.show(f"elastirun {__version__}")
    if "print_completion" in given:
        return subcommands.show(completion.script(given["print_completion"]))
    try:
        os.getcwd()
    except OSError:
        raise UsageError("the working folder is gone; change to one that exists") from None
    _tell_scheduler_of_signals()
    options = GivenOptions(given, dict(os.environ))
    facts = MachineFacts(usable_cpus, count_devices, lambda: str(uuid.uuid4()), this_host, script_imports.of_command)
    config = resolve(options, script, facts)
    check_command(config.command, os.environ.get("PYTHON_EXEC"))
    if importlib.util.find_spec("torch") is None:
        raise BadCommand(f"torch is not installed for {sys.executable}; pip install torch, or start elastirun with another Python")
    _check_log_dir(options, config.logs.log_dir)
    if config.logs.specs:
        from elastirun.agent.output import logs_specs  # a slow import

        logs_specs.load(config.logs.specs)
    config = replace(config, token=read_token(options))
    _warn_of_readable_secrets(options, config.etcd)
    dry_run = options.flag("dry_run")
    for warning in options.warnings if warn else ():  # else the command above has written them
        _warn(warning, config)
    return subcommands.show(_dry_run(config, options)) if dry_run else config


def _say(text: str) -> None:
    standard_streams.write("stderr", f"elastirun: {' '.join(text.splitlines())}\n")


def _warn(text: str, config: LaunchConfig) -> None:
    form = LineFormat(config.node_name or socket.gethostname(), config.run_id, config.logs.format)
    if form.kind == "json":
        standard_streams.write("stderr", f"{form.as_json(text, Level.WARNING, time.time())}\n")
    else:
        _say(f"warning: {text}")


def _tell_scheduler(status: ExitCode, reason: str) -> None:
    """Write the termination message of an agent that ends without a verdict of its own."""
    from elastirun.agent import termination_log  # a slow import, which --help does without

    if trouble := termination_log.write(termination_log.message(status.name.lower(), status, reason, node=socket.gethostname())):
        _say(trouble)


def _tell_scheduler_of_signals() -> None:
    """Write the termination message, too, when a signal ends this process before the agent handles it: counting devices takes long."""
    from elastirun.agent import termination_log  # imported here, because a signal may interrupt any import

    def tell(signum: int) -> None:
        reason = f"{signal.Signals(signum).name} before anything was started"
        termination_log.write(termination_log.message("left", ExitCode.signalled(signum), reason, node=socket.gethostname()))

    early_signals.call_before_exit(tell)


# --- checks on this machine


def check_command(command: Command, python: str | None) -> None:
    """Raise BadCommand where what the command names is not on this machine."""
    script = command.script
    if python and not command.no_python and shutil.which(python) is None:
        raise BadCommand(f"PYTHON_EXEC: there is no program {quote(python)}; give the path of a Python interpreter")
    if command.module or "${local_rank}" in script or script == "-":
        return
    if command.no_python:
        if shutil.which(script) is None:
            if os.path.isfile(script):
                raise BadCommand(f"--no-python: {quote(script)} is not executable; chmod +x it, or give the path of a program")
            raise BadCommand(f"--no-python: there is no program {quote(script)}; give its path, or a name that is in PATH")
    elif os.path.isdir(script):
        if not os.path.isfile(os.path.join(script, "__main__.py")):
            raise BadCommand(f"SCRIPT: {quote(script)} is a folder without __main__.py; give a script")
    elif not os.path.exists(script):
        hint = nearest(script, subcommands.MODULES).replace("mean ", "mean elastirun ") if script.isalpha() else ""
        raise BadCommand(f"SCRIPT: there is no file {quote(script)} in {os.getcwd()}; give its path, or say --module or --no-python{hint}")
    elif not os.access(script, os.R_OK):
        raise BadCommand(f"SCRIPT: {quote(script)} cannot be read; change its permissions or its owner")


def _check_log_dir(options: GivenOptions, log_dir: Path | None) -> None:
    if log_dir is None or log_dir == NO_FILES:
        return
    label = options.label("log_dir")
    existing = next(str(folder) for folder in (log_dir, *log_dir.absolute().parents) if os.path.lexists(folder))
    if not os.path.isdir(existing):
        raise UsageError(f"{label}: {quote(existing)} is not a folder; give another, or /dev/null for no files")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise StartError(f"{label}: {quote(existing)} cannot be written to; give another folder, or /dev/null for no files")


def _warn_of_readable_secrets(options: GivenOptions, etcd: Etcd | None) -> None:
    """Warn of secrets for etcd that other users can read. The store reads them when it connects, and reports what it cannot read."""
    for name, path in {"password_file": etcd.password_file, "key": etcd.key}.items() if etcd else ():
        if path and (found := advice(path)):
            options.warn(f"{options.label('rdzv_conf')}: {name}={quote(path)}: {found}")


_PROBE = """
import ctypes, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: this process dies with its parent
sys.path = [folder for folder in sys.path if folder]  # a torch.py in the working folder is not torch
import torch
kind = sys.argv[1]
if kind in ("gpu", "xpu", torch._C._get_privateuse1_backend_name()):
    devices = getattr(torch, {"gpu": "cuda"}.get(kind, kind), None)
else:
    devices = torch.accelerator if kind == "auto" else None
print("devices:", -1 if devices is None else devices.device_count() if devices.is_available() else 0)
"""


def count_devices(kind: str) -> int | None:
    """Return how many devices of ``kind`` torch can use here: "gpu", "xpu", "auto" for any accelerator, or torch's name of another kind.

    None: torch knows no such kind. Raises ValueError when torch does not answer. A separate process asks it: importing torch takes a
    second and hundreds of megabytes, and counting may initialise the devices.
    """
    command = [sys.executable, "-c", _PROBE, kind]
    try:
        answer = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=PROBE_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"torch could not be asked for its devices ({type(error).__name__}); give a number") from None
    for line in answer.stdout.splitlines():
        if line.startswith("devices: "):
            count = int(line.removeprefix("devices: "))
            return None if count < 0 else count
    last = (answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"])[-1]
    raise ValueError(f"torch could not be asked for its devices ({last[:200]}); give a number, or cpu")


def this_host() -> Host:
    """Return the names of this machine. A name server is asked only if /etc/hosts has no longer name than the host name."""
    from elastirun.agent.host import net

    name = socket.gethostname()
    longer = tuple(text for text in net.own_names()[0] if text.startswith(f"{name}."))
    return Host(name, longer or (socket.getfqdn(name),))


# --- --dry-run


def _dry_run(config: LaunchConfig, options: GivenOptions) -> str:
    """Return the text of --dry-run: the options given or derived, where this node would listen, and a worker's argv; no secret."""
    from elastirun.agent.store import listening
    from elastirun.agent.workers import checkpoint_memory, spec

    rows = [row for row in options.rows() if row.option != "--dry-run" and row.source != DEFAULT_SOURCE]
    option_width = max((len(row.option) for row in rows), default=0)
    value_width = min(40, max((len(row.value) for row in rows), default=0))
    lines = [f"elastirun {__version__}: what would be run, and where each value came from"]
    for title, group in GROUPS.items():
        names = [option.name for option in group]
        shown = [row for row in rows if row.option in names]
        lines += ["", f"{title}:"] if shown else []
        lines += [f"  {row.option:{option_width}}  {row.value:{value_width}}  {row.source}" for row in shown]
    lines += ["", "Every other option has its default; elastirun --help-all shows them."]
    lines += [f"detected: {options.detected.why if options.detected.where else f'nothing; {options.detected.why}'}"]
    lines += [f"listens: {line}" for line in listening.describe(config)]
    lines += [f"keeps: checkpoints of its workers in memory, at most {checkpoint_memory.limit() / checkpoint_memory.GIB:.1f} GiB"]
    lines += ["live: workers whose script calls elastirun.train.elastic.init_process_group(), and no others; elastirun status shows them"]
    lines += [f"mesh: {line}" for line in spec.describe_mesh(config)]
    each = "1 worker would run" if config.nproc == 1 else f"{config.nproc} workers would each run"
    argv = spec.command_line(config.command, options.environ)
    return "\n".join([*lines, f"{each}: {shlex.join(argv)}", "Nothing was started."])

"""The first program of every worker: arms the parent-death signal, then executes the worker's command (see docs/decisions/0003).

    python -I -S exec_worker.py AGENT_PID CPUS GROUP FILES PAUSE COMMAND [ARGUMENT...]

CPUS: the numbers of the CPUs that the worker may run on, as in 0,1,5; "-": those of the agent.
GROUP: the control group (version 2) to enter, below the agent's own; "-": none.
FILES: the soft limit of open descriptors; "-": the agent's.
PAUSE: seconds to wait before the command is executed. Signals end this program as they would end the command.

This is a program and not a ``preexec_fn``, because between fork and exec of a process with threads nothing but exec is safe.
It runs once per worker, so it imports next to nothing: ``_signal`` instead of ``signal`` saves 8 ms.
"""

import os
import sys
from _signal import SIG_DFL, SIG_IGN, SIGINT, SIGKILL, SIGPIPE, SIGXFSZ, getsignal, signal  # type: ignore[import-not-found,unused-ignore]
from ctypes import CDLL, c_ulong
from time import sleep

PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


def main(agent_pid: int, cpus: str, group: str, files: str, pause: float, argv: list[str]) -> None:
    """Execute ``argv`` as a child of the agent. Does not return."""
    if getsignal(SIGINT) is not SIG_IGN:
        signal(SIGINT, SIG_DFL)  # exec would reset it anyway; until then it prevents a KeyboardInterrupt traceback
    CDLL(None).prctl(PR_SET_PDEATHSIG, c_ulong(SIGKILL), c_ulong(0), c_ulong(0), c_ulong(0))
    if os.getppid() != agent_pid:  # the agent died before the line above, so the signal will never come
        os._exit(1)
    signal(SIGPIPE, SIG_DFL)  # Python ignores these two signals, and ignored signals stay ignored across exec
    signal(SIGXFSZ, SIG_DFL)
    if cpus != "-":
        bind(cpus)
    if group != "-":
        enter(group)
    if files != "-":
        limit_files(int(files))
    sleep(pause)
    try:
        os.execvp(argv[0], argv)  # execvpe would refuse an environment entry without a name
    except OSError as exc:
        os.write(2, os.fsencode(f"elastirun: cannot run {argv[0]}: {missing_interpreter(argv[0]) or exc.strerror}\n"))
        os._exit(127 if isinstance(exc, FileNotFoundError) else 126)


def missing_interpreter(command: str) -> str:
    """Return a note when the interpreter in the script's first line does not exist: the kernel then says "No such file" of the script."""
    for folder in [""] if "/" in command else os.get_exec_path():
        try:
            with open(os.path.join(folder, command), "rb") as file:
                line = file.readline(256)
        except OSError:
            continue
        interpreter = os.fsdecode(line[2:].strip(b" \t\n").split(b" ")[0]) if line.startswith(b"#!") else ""
        if interpreter and not os.path.exists(interpreter):
            return f"its interpreter {interpreter!r}, named in its first line, does not exist"
    return ""


def bind(cpus: str) -> None:
    """Bind the worker, and every thread that it will start, to ``cpus``. If none of them can be used any more, run on all CPUs."""
    try:
        os.sched_setaffinity(0, map(int, cpus.split(",")))
    except OSError as exc:
        os.write(2, os.fsencode(f"elastirun: cannot bind to CPUs {cpus}: {exc.strerror}; this worker runs on all it may use\n"))


def limit_files(soft: int) -> None:
    """Set the soft limit of open descriptors to the value that the agent had before it raised its own."""
    from resource import RLIMIT_NOFILE, getrlimit, setrlimit

    try:
        setrlimit(RLIMIT_NOFILE, (soft, getrlimit(RLIMIT_NOFILE)[1]))
    except OSError:
        pass  # a sandbox refuses; it did not let the agent raise its limit either


def enter(group: str) -> None:
    """Enter the control group. If the kernel refuses, the guard still recognises this worker by its environment."""
    try:
        os.write(os.open(f"{group}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC), b"0")
    except OSError:
        pass


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], float(sys.argv[5]), sys.argv[6:])

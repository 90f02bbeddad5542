"""The first program of every worker: ties its life to the agent's, then becomes the worker's command.

    python -I -S exec_worker.py AGENT_PID CPUS GROUP FILES COMMAND [ARGUMENT...]

CPUS are the numbers of those it may run on, as in 0,1,5; "-" leaves it all that the agent has.
GROUP is the control group (version 2) to enter, below the agent's own; "-": none.
FILES is the soft limit of open descriptors; "-" leaves the agent's.
A separate program and not a ``preexec_fn``, because nothing but exec is safe between fork and exec of a process with
threads. It runs once per worker, so it imports next to nothing: ``_signal`` spares the 8 ms that ``signal`` costs.
"""

import os
import sys
from _signal import SIG_DFL, SIG_IGN, SIGINT, SIGKILL, SIGPIPE, SIGXFSZ, getsignal, signal  # type: ignore[import-not-found,unused-ignore]
from ctypes import CDLL, c_ulong

PR_SET_PDEATHSIG = 1


def main(agent_pid: int, cpus: str, group: str, files: str, argv: list[str]) -> None:
    if getsignal(SIGINT) is not SIG_IGN:  # what exec would do anyway; no KeyboardInterrupt traceback until then
        signal(SIGINT, SIG_DFL)
    CDLL(None).prctl(PR_SET_PDEATHSIG, c_ulong(SIGKILL), c_ulong(0), c_ulong(0), c_ulong(0))
    if os.getppid() != agent_pid:  # it died before the line above: no signal will come any more
        os._exit(1)
    signal(SIGPIPE, SIG_DFL)  # Python ignores these two, and ignored signals stay ignored across exec
    signal(SIGXFSZ, SIG_DFL)
    if cpus != "-":
        bind(cpus)
    if group != "-":
        enter(group)
    if files != "-":
        limit_files(int(files))
    try:
        os.execvp(argv[0], argv)  # takes the environment as it is, also an entry without a name, which execvpe refuses
    except OSError as exc:
        os.write(2, os.fsencode(f"elastirun: cannot run {argv[0]}: {missing(argv[0]) or exc.strerror}\n"))
        os._exit(127 if isinstance(exc, FileNotFoundError) else 126)


def missing(command: str) -> str:
    """What is missing when the file is there but its interpreter is not: the kernel says "No such file" of that, too."""
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
    """Every thread that the worker ever starts inherits it. Refused when none of them is left to us: better slow than not at all."""
    try:
        os.sched_setaffinity(0, map(int, cpus.split(",")))
    except OSError as exc:
        os.write(2, os.fsencode(f"elastirun: cannot bind to CPUs {cpus}: {exc.strerror}; this worker runs on all it may use\n"))


def limit_files(soft: int) -> None:
    """Set the soft limit of open descriptors."""
    from resource import RLIMIT_NOFILE, getrlimit, setrlimit

    try:
        setrlimit(RLIMIT_NOFILE, (soft, getrlimit(RLIMIT_NOFILE)[1]))
    except OSError:
        pass  # refused by a sandbox: the agent's own limit was not raised there either


def enter(group: str) -> None:
    """Where the kernel refuses, the guard still knows this worker by its environment."""
    try:
        os.write(os.open(f"{group}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC), b"0")
    except OSError:
        pass


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5:])

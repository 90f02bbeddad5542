"""The fork server: imports modules once; its forks become workers without importing them again (see docs/decisions/0018).

    python -u forkserver.py AGENT_PID CONTROL MODULE,... TRIED,... COMMAND...
    python -u forkserver.py warm ...                      one that stays when a job has ended, see warm_server.py

The agent executes this program like a worker, with the environment of the workers but for ``ROUND_NAMES``, so that everything that
is read at import takes effect. COMMAND is the command of a worker without ``python -u``: people see it in ps, and its length is the
room for a fork's own command line. CONTROL is a stream socket to the agent.

- When the modules are imported, the server writes one line of JSON: what went wrong, if anything. If forks would not be as good as
  executed workers, the server then ends.
- The agent writes one byte with one end of a socket pair for each fork that it wants. The fork is a child of the agent: the process
  between it and the server ends at once, and the agent is the subreaper. The parent-death signal is armed then, not before, because
  the change of the parent would fire it. The fork writes its pid into the socket and waits. It stays in the server's session, by
  which the agent knows it, until it gets work.
- The agent sends one line of JSON with the descriptors for stdout and stderr. The fork makes a session of its own, restores the
  signals, writes an empty line, gets one in return, and runs the script. End of file: the fork is not wanted any more.

The modules of TRIED, which nobody has named, are imported in a child of the server after the others. If forks would not be as good with
one of them, the child ends and the next one does without it. The last child is then the server; its parent waits, and ends with it.

A script that cannot run in a fork as ``python -u`` would run it is executed by the fork instead; the reason goes to the agent.
This program imports nothing of ours, and the standard library only inside functions: the folder of the script comes first in
sys.path of the worker.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import all_suffixes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from socket import socket
    from typing import Any

ROUND_NAMES = frozenset(
    "RANK LOCAL_RANK ROLE_RANK ROLE_WORLD_SIZE WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE MASTER_ADDR MASTER_PORT "
    "TORCHELASTIC_RESTART_COUNT TORCHELASTIC_ERROR_FILE ELASTIRUN_ROUND ELASTIRUN_ROUND_REASON ELASTIRUN_FENCE ELASTIRUN_PROGRESS "
    "GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME ELASTIRUN_SOCKET ELASTIRUN_LIVE ELASTIRUN_MESH ELASTIRUN_TERMINAL "
    "TORCHELASTIC_TIMER_FILE".split()
)  # variables that differ between the workers of a node, or between its rounds, or are not known yet when the server is started
ALSO = {"torch": ("torch._dynamo",)}  # the first optimizer imports it, which takes as long as torch itself
PARTS = frozenset(part for parts in ALSO.values() for part in parts)
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/xpu", "/dev/accel")  # a driver whose device file is open is in use
LINE_LIMIT = 16 << 20  # bytes of one message from the agent; the kernel allows 6 MiB of arguments and environment
NEARLY_LOADED = b"."  # tells the agent that only the last module is missing, and that it is one of ``PARTS``
TRIAL_LIMIT = 20  # seconds for an import on trial; the agent waits for 60 s for all
RARELY = 100_000_007  # new objects before a collection of garbage; no module chooses this number
TORCH_FIXED_SEED = 67280421310721  # torch's default generator begins with it where it is not seeded from the system
PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>

OF_THEIR_OWN = frozenset({"tqdm.utils"})  # modules that go through the environment for variables with a prefix of their own
watched_names = ROUND_NAMES  # variables whose value a module must not read while it is imported
on_step: Callable[[], object] | None = None  # what stamps a step; None: no optimizer has made one yet

_FRESH = {name: value for name, value in globals().items() if name.startswith("__")}  # what the interpreter puts into __main__
_LOADED = frozenset(sys.modules)  # what the interpreter imports before any script
_ENVIRON = {} if sys.argv[1:2] == ["warm"] else dict(os.environ)  # one that stays keeps no copies


# -- the server


def serve(agent: int, control: socket, modules: list[str], tried: list[str]) -> Callable[[], object]:
    """Import ``modules``, and those of ``tried`` that forks can share, then make forks.

    Returns in each fork that got work: the function that runs the script.
    """
    before = ignore_signals({})  # a signal to the agent's group is for the agent alone
    trouble = load(modules, lambda: control.sendall(NEARLY_LOADED))
    if not trouble["reads"] and not trouble["obstacle"]:
        try_out(tried)
    before = ignore_signals(before)  # a module may have set a handler: so it would in the worker
    report(control, trouble)
    return make_forks(agent, control, before)


def ignore_signals(before: dict[Any, Any]) -> dict[Any, Any]:
    """Ignore the signals that stop programs. Return ``before`` with the handlers that they had, as far as they were not ignored."""
    from signal import SIG_IGN, SIGHUP, SIGINT, SIGQUIT, SIGTERM, signal

    had = {signum: signal(signum, SIG_IGN) for signum in (SIGTERM, SIGINT, SIGHUP, SIGQUIT)}
    return had | {signum: handler for signum, handler in before.items() if had[signum] is SIG_IGN}


def make_forks(agent: int, control: socket, before: dict[Any, Any]) -> Callable[[], object]:
    """Make a fork whenever the agent asks for one. ``before``: the handlers of signals for the forks.

    Returns in each fork that got work: the function that runs the script.
    """
    while True:
        job = next_job(control)
        if job and be_parked(agent, job):
            control.close()
            return work(job, before)


def watching(read: set[str], on_read: Callable[[], object]) -> Any:
    """Return a class for os.environ that adds to ``read`` which variables of ``watched_names`` are read, and calls ``on_read`` then."""

    class Watching(type(os.environ)):  # type: ignore[misc]
        def __getitem__(self, name: str) -> Any:
            if name in watched_names:
                read.add(name)
                on_read()
            return super().__getitem__(name)

        def __iter__(self) -> Any:
            caller = sys._getframe(2).f_globals.get("__name__")  # that of ``items()``
            return (name for name in super().__iter__() if caller not in OF_THEIR_OWN or name not in watched_names)

    return Watching


def load(
    modules: list[str], before_last: Callable[[], object] = lambda: None, on_read: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Import ``modules`` and return what went wrong, see ``report``. Modules must not be in use by a thread or a device at a fork.

    ``before_last`` is called before the last one is imported, if it is one of ``PARTS``: how long another one takes nobody knows.
    ``on_read`` is called when a module reads a variable of ``watched_names``.
    """
    import gc
    import importlib

    read: set[str] = set()
    trouble: dict[str, Any] = {"failed": {}, "reads": {}, "obstacle": ""}
    thresholds = gc.get_threshold()
    gc.set_threshold(RARELY)  # nearly all that is imported stays; the collections would take a fifth of the time
    usual, os.environ.__class__ = type(os.environ), watching(read, on_read)
    unset = "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a module that asks for GPUs must not initialise CUDA
    for name in modules:
        read.clear()
        if name == modules[-1] and name in PARTS:
            before_last()
        try:
            importlib.import_module(name)
        except BaseException as error:  # what a module may raise: anything
            trouble["failed"][name] = f"{type(error).__name__}: {error}"[:300]
        if read:
            trouble["reads"][name] = sorted(read)
        if found := obstacle():
            trouble["obstacle"] = f"importing {name} left {found}"
            break
    os.environ.__class__ = usual
    if unset:
        os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    gc.freeze()  # a collection in a fork then does not write to, and so copy, the memory of all that was imported
    first, *others = gc.get_threshold()
    if first % RARELY == 0:  # no module has chosen another, or one has multiplied it
        gc.set_threshold(thresholds[0] * (first // RARELY), *others)
    return trouble


def obstacle() -> str:
    """Return what stands in the way of forks of this process; empty: nothing. Some libraries end their threads at the first fork."""
    child = os.fork()
    if child == 0:
        asks = getattr(sys.modules.get("torch._C"), "_cuda_isInBadFork", None)  # missing where torch was built without CUDA
        os._exit(int(asks()) if asks else 0)
    if os.waitpid(child, 0)[1]:
        return "CUDA initialised"
    if children():
        return "a process running"
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"{threads - 1} thread{'s' * (threads > 2)}"
    return next((f"the device {path} open" for path in open_files().values() if path.startswith(DEVICES)), "")


def children() -> list[int]:
    """Return the pids of the processes that run below this one."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # there is none, as nearly always
        return []
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except OSError:  # it has ended
            continue
        if int(parent) == os.getpid() and state not in b"ZX":
            found.append(int(pid))
    return found


def report(control: socket, trouble: dict[str, Any]) -> None:
    """Tell the agent that the modules are imported, and what went wrong; end where forks would not be as executed workers.

    ``failed``: modules that cannot be imported, with the reason. ``reads``: modules that have read ``watched_names``, which have no
    value here. ``obstacle``: a thread, or a device in use.
    """
    import json

    control.sendall(json.dumps(trouble).encode() + b"\n")
    if trouble["reads"] or trouble["obstacle"]:
        os._exit(0)


def try_out(names: list[str], settled: Callable[[], object] | None = None) -> None:
    """Import those of ``names`` that forks can share. Returns in a child that has imported them, if there are any to import.

    ``settled`` is called before that, in the parent, which has nothing more to do than to wait for the end of the child.
    """
    from signal import SIGCONT, SIGSTOP

    names = list(names)
    while wanted := [name for name in names if name not in sys.modules]:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            die_with_parent()
            for name in wanted:
                os.write(write, f"{name}\n".encode())
                if not is_good(name):
                    give_up()
            os.write(write, b"\n")
            os.close(write)
            if settled:
                os.kill(os.getpid(), SIGSTOP)
            return
        if os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED if settled else 0)[1]) and settled:
            settled()
            os.kill(child, SIGCONT)
            os.waitpid(child, 0)
        begun = os.read(read, 1 << 16).decode().split("\n")[-2:-1]
        os.close(read)
        os.close(write)
        if begun == [""]:  # it was the server, and has ended
            os._exit(0)
        names = [name for name in names if [name] != begun]


def is_good(name: str) -> bool:
    """Import a module, and return whether forks are then as executed workers: it has written nothing, and left nothing to share."""
    import atexit
    import gc
    from signal import SIG_DFL, SIGALRM, alarm, signal

    before, hooks = open_files(), atexit._ncallbacks()
    muted = mute()
    handler = signal(SIGALRM, SIG_DFL)
    alarm(TRIAL_LIMIT)  # which ends this process
    trouble = load([name], on_read=give_up)
    alarm(0)
    if handler is not SIG_DFL:
        signal(SIGALRM, handler)
    gc.collect()  # which may close a file
    wrote = unmute(muted)
    left = [path for fd, path in open_files().items() if before.get(fd) != path]
    return not (wrote or left or atexit._ncallbacks() > hooks or any(trouble.values()))


def mute() -> list[int]:
    """Let nobody read what this process writes to stdout and stderr. Return what ``unmute`` needs."""
    streams, (heard, written) = [os.dup(fd) for fd in (1, 2)], os.pipe()
    os.set_blocking(written, False)  # who writes more than a pipe holds gets an error
    for fd in (1, 2):
        os.dup2(written, fd)
    return [*streams, heard, written]


def unmute(muted: list[int]) -> bool:
    """Undo ``mute``. Return whether anything was written."""
    from select import select

    wrote = bool(select([muted[2]], [], [], 0)[0])
    for fd, stream in enumerate(muted[:2], start=1):
        os.dup2(stream, fd)
    for fd in muted:
        os.close(fd)
    return wrote


def give_up() -> None:
    """End this process and what a module has started in it."""
    from signal import SIGKILL

    for pid in children():
        os.kill(pid, SIGKILL)
    os._exit(0)


def open_files() -> dict[str, str]:
    """Return what each descriptor of this process is, by its number."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the descriptor of the listing itself
            pass
    return found


def next_job(control: socket) -> socket | None:
    """Wait for the agent to ask for a fork. Return the fork's socket in the fork, None in the server. Ends with the agent."""
    import socket

    data, fds, _, _ = socket.recv_fds(control, 1, 1)
    if not data or not fds:
        os._exit(0)
    with socket.socket(fileno=fds[0]) as job:
        try:
            between = os.fork()
        except OSError:  # no process can be made: the agent sees the end of the socket, and executes a worker
            return None
        if between == 0:
            return socket.socket(fileno=job.detach())
        os.waitpid(between, 0)
    return None


# -- a fork


def be_parked(agent: int, job: socket) -> bool:
    """Make a child of the agent that waits. Called between it and the server; returns in the fork only."""
    import time

    between = os.getpid()
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        os._exit(1)
    while (parent := os.getppid()) == between:
        time.sleep(0.0005)
    die_with_parent()
    if parent != agent or os.getppid() != agent:  # the agent has died, before the signal was armed or after
        os._exit(1)
    job.sendall(b"%d\n" % os.getpid())
    return True


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies."""
    from ctypes import CDLL, c_ulong
    from signal import SIGKILL

    CDLL(None).prctl(PR_SET_PDEATHSIG, c_ulong(SIGKILL), c_ulong(0), c_ulong(0), c_ulong(0))


def work(job: socket, handlers: dict[Any, Any]) -> Callable[[], object]:
    """Wait for work, become a worker, and return the function that runs the script."""
    import json
    from signal import signal

    job.set_inheritable(False)
    line, fds = receive(job)
    message = json.loads(line)
    os.setsid()
    for target, fd in zip((1, 2), fds, strict=True):
        os.dup2(fd, target)
        os.close(fd)
    if message["own"].get("RANK", "0") != "0":  # as in ``spawn``
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
    for signum, handler in handlers.items():
        signal(signum, handler)
    job.sendall(b"\n")  # from here on the agent's signals have their effect, and reach the process group
    if not job.recv(1):  # the agent has waited for too long, and executes this worker
        os._exit(0)
    if message["group"]:
        enter(message["group"])
    argv: list[str] = message["argv"]
    os.environ.update(message["own"])
    renew_identity()
    set_title(argv)
    wait(message["pause"])
    why, run = prepare(argv)
    if run is None:
        job.sendall(why.encode(errors="replace"))
        os.execve(argv[0], argv, {**_ENVIRON, **message["own"], **message["executed"]})
    if message["executed"]:
        show_stacks()
    stamp_steps()
    job.close()
    return run


def receive(job: socket) -> tuple[bytes, list[int]]:
    """Return the line of JSON and the two descriptors that the agent sends. Ends this process when it is not wanted any more."""
    import socket

    data, fds, _, _ = socket.recv_fds(job, 1 << 16, 2)
    line = bytearray(data)
    while data and not line.endswith(b"\n"):
        data = job.recv(1 << 16)
        line += data
        if len(line) > LINE_LIMIT:
            os._exit(1)
    if not data or len(fds) != 2:
        os._exit(0)
    return bytes(line), list(fds)


def enter(group: str) -> None:
    """Enter the control group. If the kernel refuses, the guard still recognises this worker by its environment."""
    try:
        with open(f"{group}/cgroup.procs", "wb", buffering=0) as file:
            file.write(b"0")
    except OSError:
        pass


def wait(seconds: float) -> None:
    """Wait before the script begins. As in ``exec_worker.py``, SIGINT ends this process without a traceback."""
    from signal import SIG_DFL, SIG_IGN, SIGINT, getsignal, signal
    from time import sleep

    if (handler := getsignal(SIGINT)) is not SIG_IGN:
        signal(SIGINT, SIG_DFL)
    sleep(seconds)
    signal(SIGINT, handler)


def renew_identity() -> None:
    """Make anew what belongs to one process, and is made at import.

    Generators that are seeded from the system would draw the same numbers in every fork, of any rank and round.
    """
    if "torch" in sys.modules and sys.modules["torch"].initial_seed() != TORCH_FIXED_SEED:
        sys.modules["torch"].default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
    if "threading" in sys.modules:
        main = sys.modules["threading"].main_thread()
        if hasattr(main, "_set_native_id"):
            main._set_native_id()


def show_stacks() -> None:
    """Let the agent's signal write the stacks of this process, as in an executed worker: the server's Python has run that file already."""
    with open(os.path.join(os.path.dirname(os.path.dirname(__file__)), "startup", "sitecustomize.py")) as file:
        exec(compile(file.read(), file.name, "exec"), {"__name__": "startup"})


def stamp_steps() -> None:
    """Let torch's optimizers stamp the steps of a script that does not do so, where torch is imported and can tell of them."""
    register = getattr(sys.modules.get("torch.optim.optimizer"), "register_optimizer_step_post_hook", None)
    if register and os.environ.get("ELASTIRUN_PROGRESS"):
        register(on_optimizer_step)


def on_optimizer_step(*_: object) -> None:
    """Stamp a step, and for how long it has computed. The first one imports what does it, after the imports of the script."""
    global on_step
    if on_step is None:
        try:
            from elastirun.worker.optimizer_steps import on_step as step

            on_step = step
        except Exception:  # whatever stands in the script's way to our package: training goes on without stamps
            on_step = int
    on_step()


def set_title(argv: list[str]) -> None:
    """Show ``argv`` as the command line of this process, where there is room for it."""
    from ctypes import memmove

    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, see proc(5)
    text = b"".join(os.fsencode(arg) + b"\0" for arg in argv)
    if start and len(text) <= end - start:
        memmove(start, text.ljust(end - start, b"\0"), end - start)


def prepare(argv: list[str]) -> tuple[str, Callable[[], object] | None]:
    """Prepare the interpreter for ``argv``, PYTHON -u SCRIPT or PYTHON -u -m MODULE. Return the function that runs it.

    Without a function: the reason why it cannot run in a fork as it would by itself.
    """
    from functools import partial

    main = type(sys)("__main__")
    main.__dict__.clear()
    main.__dict__.update(_FRESH, __doc__=None)
    if "__annotations__" in _FRESH:
        main.__dict__["__annotations__"] = {}
    sys.modules["__main__"] = main
    sys.orig_argv[:] = argv
    if argv[2] == "-m":
        sys.argv[:] = ["-m", *argv[4:]]
        del main.__dict__["__file__"]
        why = put_first(os.getcwd())
        import runpy

        return why, None if why else partial(runpy._run_module_as_main, argv[3])  # type: ignore[attr-defined]
    sys.argv[:] = argv[2:]
    path = absolute(argv[2])
    why = put_first(os.path.dirname(os.path.realpath(path)))
    if why:
        return why, None
    try:
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    except Exception as error:  # a folder, a zip, compiled code, an error of syntax: Python itself knows what to do
        return f"{type(error).__name__}: {error}", None
    from importlib.machinery import SourceFileLoader

    main.__dict__.update(__file__=path, __loader__=SourceFileLoader("__main__", path))
    return "", partial(exec, code, main.__dict__)


def absolute(path: str) -> str:
    """Return the path as Python makes a script's absolute: nothing is left out."""
    return path if path.startswith("/") else os.path.join(os.getcwd(), path)


def put_first(folder: str) -> str:
    """Let modules be found in ``folder`` first. Return why they would not be in a fork: one of that name is already imported."""
    from functools import partial

    if getattr(sys.flags, "safe_path", False):
        return ""
    loaded = {name.partition(".")[0] for name in sys.modules.keys() - _LOADED}
    found = sorted(filter(partial(is_module, folder), loaded & names_in(folder)))
    sys.path.insert(0, folder)
    return f"{folder} has a module {found[0]}, and another one of that name is already imported" if found else ""


def names_in(folder: str) -> set[str]:
    """Return the names of all that is in the folder, up to the first dot."""
    try:
        return {entry.partition(".")[0] for entry in os.listdir(folder)}
    except OSError:
        return set()


def is_module(folder: str, name: str) -> bool:
    """Return whether the folder has a module of that name. A folder without a file __init__ comes after all others of its name."""
    places = (f"{folder}/{name}{part}{suffix}" for part in ("", "/__init__") for suffix in all_suffixes())
    return any(map(os.path.isfile, places))


def hide_own_frame(error: BaseException) -> None:
    """Show the traceback of an error that nobody has caught without the frame of this file."""
    rest = error.__traceback__.tb_next if error.__traceback__ else None
    hook = sys.excepthook
    sys.excepthook = lambda kind, value, traceback: hook(kind, error.with_traceback(rest), rest)


def stay_warm() -> Callable[[], object]:
    """Be a server that stays. Its program is in no module of workers, like this one."""
    path = os.path.join(os.path.dirname(__file__), "warm_server.py")
    program: dict[str, Any] = {"__name__": "warm_server", "__file__": path}
    with open(path) as file:
        exec(compile(file.read(), path, "exec"), program)
    run: Callable[[], object] = program["main"](sys.modules["__main__"])
    return run


def main() -> Callable[[], object]:
    """Read the arguments and serve."""
    import socket

    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the folder of this file
    if sys.argv[1] == "warm":
        return stay_warm()
    control = socket.socket(fileno=int(sys.argv[2]))
    control.set_inheritable(False)
    agent, modules, tried = int(sys.argv[1]), *(list(filter(None, text.split(","))) for text in sys.argv[3:5])
    command = sys.argv[5:]
    sys.argv[:] = ["-m", *command[2:]] if command[0] == "-m" else command  # modules may read it while they are imported
    return serve(agent, control, [each for name in modules for each in (name, *ALSO.get(name, ()))], tried)


if __name__ == "__main__":
    try:
        run = main()
    except ConnectionError:  # the agent has died: people need no traceback of that
        os._exit(1)
    try:
        run()
    except SystemExit:
        raise
    except BaseException as error:
        hide_own_frame(error)
        raise

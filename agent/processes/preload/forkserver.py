"""The fork server: imports modules once; its forks become workers without importing them again (see docs/decisions/0018).

    python -u forkserver.py AGENT_PID CONTROL GROUP MODULE,... COMMAND...

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
- With ``--preload=auto`` a worker writes ``+NAME DIGEST`` into its socket when it begins to import a module that Python does not bring
  along. Later the agent sends NAME:DIGEST of each in one line over CONTROL, without a descriptor. The server imports each in a fork
  first, and then itself if that took long and left nothing behind. It answers with another line of JSON; later forks have these modules.

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
    "GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME".split()
)  # variables that differ between the workers of a node, or between its rounds
ALSO = {"torch": ("torch._dynamo",)}  # the first optimizer imports it, which takes as long as torch itself
PARTS = frozenset(part for parts in ALSO.values() for part in parts)
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/xpu", "/dev/accel")  # a driver whose device file is open is in use
LINE_LIMIT = 16 << 20  # bytes of one message from the agent; the kernel allows 6 MiB of arguments and environment
NEARLY_LOADED = b"."  # tells the agent that only the last module is missing, and that it is one of ``PARTS``
LEAST_IMPORT = 0.02  # seconds; a module that is imported sooner is not worth a place in all workers
TRIAL_LIMIT = 60  # seconds for an import on trial
LONGEST_NAME, MOST_NAMES = 100, 256  # characters of a module's name; names that a worker tells of
IMPORTS = "_find_and_load_unlocked"  # the function of importlib in which an import asks the finders
RARELY = 100_000_007  # new objects before a collection of garbage; no module chooses this number
TORCH_FIXED_SEED = 67280421310721  # torch's default generator begins with it where it is not seeded from the system
PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>

on_step: Callable[[], object] | None = None  # what stamps a step; None: no optimizer has made one yet

_FRESH = {name: value for name, value in globals().items() if name.startswith("__")}  # what the interpreter puts into __main__
_LOADED = frozenset(sys.modules)  # what the interpreter imports before any script
_ENVIRON = dict(os.environ)


# -- the server


def serve(agent: int, control: socket, group: str, modules: list[str]) -> Callable[[], object]:
    """Import ``modules``, then make forks. Returns in each fork that got work: the function that runs the script."""
    from signal import SIG_IGN, SIGHUP, SIGINT, SIGQUIT, SIGTERM, getsignal, signal

    stopping = (SIGTERM, SIGINT, SIGHUP, SIGQUIT)
    before = {signum: signal(signum, SIG_IGN) for signum in stopping}  # a signal to the agent's group is for the agent alone
    trouble = load(modules, lambda: control.sendall(NEARLY_LOADED))
    for signum in stopping:
        if getsignal(signum) is not SIG_IGN:  # a module has set a handler: so it would in the worker
            before[signum] = signal(signum, SIG_IGN)
    report(control, trouble)
    while True:
        job = next_job(control)
        if job and be_parked(agent, job):
            control.close()
            return work(job, group, before)


def load(modules: list[str], before_last: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Import ``modules`` and return what went wrong, see ``report``. Modules must not be in use by a thread or a device at a fork.

    ``before_last`` is called before the last one is imported, if it is one of ``PARTS``: how long another one takes nobody knows.
    """
    import gc
    import importlib
    import time

    read: set[str] = set()

    class Watching(type(os.environ)):  # type: ignore[misc]
        def __getitem__(self, name: str) -> Any:
            read.update({name} & ROUND_NAMES)
            return super().__getitem__(name)

    trouble: dict[str, Any] = {"failed": {}, "reads": {}, "obstacle": "", "took": {}}
    thresholds = gc.get_threshold()
    gc.set_threshold(RARELY)  # nearly all that is imported stays; the collections would take a fifth of the time
    os.environ.__class__ = Watching
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a module that asks for GPUs must not initialise CUDA
    for name in modules:
        read.clear()
        if name == modules[-1] and name in PARTS:
            before_last()
        began = time.perf_counter()
        try:
            importlib.import_module(name)
        except BaseException as error:  # what a module may raise: anything
            trouble["failed"][name] = f"{type(error).__name__}: {error}"[:300]
        trouble["took"][name] = time.perf_counter() - began
        if read:
            trouble["reads"][name] = sorted(read)
        if found := obstacle():
            trouble["obstacle"] = f"importing {name} left {found}"
            break
    os.environ.__class__ = Watching.__base__
    if "PYTORCH_NVML_BASED_CUDA_CHECK" not in _ENVIRON:
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

    ``failed``: modules that cannot be imported, with the reason. ``reads``: modules that have read variables of ``ROUND_NAMES``, which
    have no value here. ``obstacle``: a thread, or a device in use. After ``learn`` also ``learnt``: modules that were imported;
    ``left_out``: modules that were not, with the reason.
    """
    import json

    control.sendall(json.dumps(trouble).encode() + b"\n")
    if trouble["reads"] or trouble["obstacle"]:
        os._exit(0)


def learn(names: list[str]) -> dict[str, Any]:
    """Import those of ``names`` that take long and leave nothing behind. Return what ``report`` tells."""
    trouble: dict[str, Any] = {"failed": {}, "reads": {}, "obstacle": ""}
    learnt, left_out = [], {}
    changed = ""
    for name, digest in (name.split(":") for name in names):
        parent = name.rpartition(".")[0]
        if name in sys.modules or parent and parent not in sys.modules or not is_third_party(name):  # to look for a part imports the parent
            continue
        if digest != environment_digest():
            changed = changed or name
            continue
        seconds, why = try_out(name)
        if why:
            left_out[name] = why
        elif seconds >= LEAST_IMPORT:
            learnt.append(name)
            trouble = load([name])
            if trouble["failed"] or trouble["reads"] or trouble["obstacle"]:  # although it was not so in the fork
                break
    if changed:
        left_out[changed] = "environment variables were changed before its import, in the script or by a module"
    return {**trouble, "learnt": learnt, "left_out": left_out}


def environment_digest() -> str:
    """Return a digest of the variables that are the same for all workers: a module may read them while it is imported."""
    from binascii import crc32

    same = sorted((name, value) for name, value in os.environ.items() if name not in ROUND_NAMES)
    return str(crc32(repr(same).encode(errors="surrogateescape")))


def is_third_party(name: str) -> bool:
    """Return whether the module is found among installed packages: it is no part of Python, and not the user's own work."""
    from importlib.util import find_spec

    try:
        spec = find_spec(name)
    except Exception:  # what a finder may raise: anything
        return False
    places = [spec.origin or "", *(spec.submodule_search_locations or ())] if spec else []
    return any({"site-packages", "dist-packages"} & {*place.split("/")} for place in places)


def try_out(name: str) -> tuple[float, str]:
    """Import a module in a fork. Return the seconds that this took, and why workers cannot be forks with that module; empty: they can."""
    import json
    from signal import SIGALRM

    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, json.dumps(judge(name)).encode())
        finally:
            os._exit(0)
    os.close(write)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.set_blocking(read, False)  # a process that the module has left running may hold the other end
    try:
        text = os.read(read, 1 << 16)
    except BlockingIOError:
        text = b""
    os.close(read)
    if not text:
        return 0.0, f"its import takes more than {TRIAL_LIMIT} s" if status == -SIGALRM else "its import ends the process"
    seconds, why = json.loads(text)
    return float(seconds), str(why)


def judge(name: str) -> tuple[float, str]:
    """Import a module in this process, which is made for that, and say what ``try_out`` returns."""
    import gc
    from signal import SIG_DFL, SIGALRM, SIGKILL, alarm, signal

    signal(SIGALRM, SIG_DFL)
    alarm(TRIAL_LIMIT)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (1, 2):
        os.dup2(nowhere, fd)  # what it has to say, it says again when the server imports it
    before = open_files()
    trouble = load([name])
    gc.collect()  # which may close a file
    left = [path for fd, path in open_files().items() if before.get(fd) != path]
    why = f"importing {name} left {left[0]} open, which forks would share" if left else ""
    if trouble["obstacle"]:
        why = f"{trouble['obstacle']}, which forks cannot share"
    if trouble["reads"]:
        why = f"importing it reads {', '.join(trouble['reads'][name])}, which differs between workers"
    for pid in children():
        os.kill(pid, SIGKILL)
    if trouble["failed"]:
        why = f"it cannot be imported without the script: {trouble['failed'][name]}"
    return trouble["took"][name], why


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
    """Wait for the agent to ask for a fork. Return the fork's socket in the fork, None in the server. Ends with the agent.

    The agent may also name modules to learn.
    """
    import socket

    data, fds, _, _ = socket.recv_fds(control, 1, 1)
    if not data:
        os._exit(0)
    if not fds:
        while data and not data.endswith(b"\n"):
            data += control.recv(1 << 16)
        report(control, learn(data.decode().split()))
        return None
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
    from ctypes import CDLL, c_ulong
    from signal import SIGKILL

    between = os.getpid()
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        os._exit(1)
    while (parent := os.getppid()) == between:
        time.sleep(0.0005)
    CDLL(None).prctl(PR_SET_PDEATHSIG, c_ulong(SIGKILL), c_ulong(0), c_ulong(0), c_ulong(0))
    if parent != agent or os.getppid() != agent:  # the agent has died, before the signal was armed or after
        os._exit(1)
    job.sendall(b"%d\n" % os.getpid())
    return True


def work(job: socket, group: str, handlers: dict[Any, Any]) -> Callable[[], object]:
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
    for signum, handler in handlers.items():
        signal(signum, handler)
    job.sendall(b"\n")  # from here on the agent's signals have their effect, and reach the process group
    if not job.recv(1):  # the agent has waited for too long, and executes this worker
        os._exit(0)
    if group != "-":
        enter(group)
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
    if message["tells"]:
        sys.meta_path.insert(0, Reporter(job, argv))
    else:
        job.close()
    return run


class Reporter:
    """A finder that finds nothing, and tells the agent of each module that Python does not bring along, when its import begins.

    It does not tell of modules beside the script: they are the user's own work, and may change. It tells of nothing after the script has
    changed sys.path: a name may then mean another module than without the script.
    """

    def __init__(self, job: socket, argv: list[str]) -> None:
        job.setblocking(False)
        self._job, self._socket, self._pid = job, os.fstat(job.fileno()), os.getpid()
        own = argv[3].partition(".")[0] if argv[2] == "-m" else ""
        self._known = {*sys.stdlib_module_names, *names_in(sys.path[0]), own}
        self._path = list(sys.path)
        self._left = MOST_NAMES

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Find nothing."""
        new = (path is None or name in PARTS) and self._left and name not in self._known and len(name) <= LONGEST_NAME
        if new and sys.path == self._path and sys._getframe(2).f_code.co_name == IMPORTS:  # else importlib.util.find_spec only asks
            self._known.add(name)
            self._left -= 1
            try:
                if os.getpid() == self._pid and os.path.samestat(os.fstat(self._job.fileno()), self._socket):  # a script may close it
                    self._job.send(f"+{name} {environment_digest()}\n".encode())
            except OSError:
                pass


def names_in(folder: str) -> set[str]:
    """Return the names that modules in the folder may have: a package is a folder, which has no dot in its name."""
    suffixes = tuple(all_suffixes())
    try:
        return {entry.partition(".")[0] for entry in os.listdir(folder) if "." not in entry or entry.endswith(suffixes)}
    except OSError:
        return set()


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
    if getattr(sys.flags, "safe_path", False):
        return ""
    names = {name.partition(".")[0] for name in sys.modules.keys() - _LOADED}
    found = sorted(names & names_in(folder))
    sys.path.insert(0, folder)
    return f"{folder} has a module {found[0]}, and another one of that name is already imported" if found else ""


def hide_own_frame(error: BaseException) -> None:
    """Show the traceback of an error that nobody has caught without the frame of this file."""
    rest = error.__traceback__.tb_next if error.__traceback__ else None
    hook = sys.excepthook
    sys.excepthook = lambda kind, value, traceback: hook(kind, error.with_traceback(rest), rest)


def main() -> Callable[[], object]:
    """Read the arguments and serve."""
    import socket

    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the folder of this file
    control = socket.socket(fileno=int(sys.argv[2]))
    control.set_inheritable(False)
    agent, group, names, command = int(sys.argv[1]), sys.argv[3], sys.argv[4], sys.argv[5:]
    sys.argv[:] = ["-m", *command[2:]] if command[0] == "-m" else command  # modules may read it while they are imported
    return serve(agent, control, group, [each for name in filter(None, names.split(",")) for each in (name, *ALSO.get(name, ()))])


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

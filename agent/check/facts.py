"""Facts of this node for a check: versions, GPUs, memory, limits, folders, the speed of a core. torch is not imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from elastirun import __version__
from elastirun.agent.check.records import Facts, Gpu, SharedFolder
from elastirun.agent.host.cpus import own_groups, usable_cpus
from elastirun.agent.host.numa import NO_PROGRAM, ask_driver
from elastirun.agent.store.at_once import at_once
from elastirun.config import NO_FILES, LaunchConfig
from elastirun.rendezvous.wire.codec import clip

SHM = "/dev/shm"
FOLDER_LIMIT = 5.0  # seconds for each folder: a file system whose server is gone hangs
LOOPS, TURNS = 20, 20_000  # of the loop that is timed: some milliseconds each; the fastest counts, which a busy machine disturbs least
INTERFACE_VARIABLES = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"
MOST_TEXT = 200  # characters of an error of a driver or a file system
_QUERY = "name,memory.total,memory.free,ecc.errors.uncorrected.volatile.total"
_CUDA = re.compile(r"^cuda[^=\n]*= *['\"]([^'\"\n]{1,40})['\"]", re.MULTILINE)


def find_facts(config: LaunchConfig, shared: tuple[str, ...], environ: Mapping[str, str]) -> Facts:
    """Return the facts of this node. Takes less than a second, unless a driver or a file system hangs. ``shared``: folders."""
    loop = loop_time()
    gpus, gpu_error = find_gpus()
    log_dir = str(config.logs.log_dir or NO_FILES)
    folders = dict.fromkeys([*shared, *([log_dir] if log_dir != str(NO_FILES) else [])])
    errors = at_once(_write_error, [*folders], FOLDER_LIMIT)
    late = f"no answer within {FOLDER_LIMIT:g} s"
    return Facts(
        elastirun=__version__,
        python=platform.python_version(),
        torch=_version("torch"),
        cuda=_cuda(),
        nccl=next(filter(None, (_version(f"nvidia-nccl-cu{major}") for major in (13, 12, 11))), ""),
        cpus=usable_cpus(),
        loop=loop,
        gpus=gpus,
        gpu_error=gpu_error,
        shm=shutil.disk_usage(SHM).free if os.path.isdir(SHM) else 0,
        descriptors=_limit(resource.RLIMIT_NOFILE),
        processes=processes_left(),
        log_error=errors.get(log_dir, late) if log_dir in folders else "",
        interfaces=wrong_interfaces(environ, several=config.max_nodes > 1),
        folders=tuple(SharedFolder(path, errors.get(path, late)) for path in shared),
    )


def loop_time() -> float:
    """Return the milliseconds of CPU time that a fixed loop takes on this core."""
    times = []
    for _ in range(LOOPS):
        began, number = time.thread_time(), 1
        for turn in range(TURNS):
            number = number * 3 + turn & 0xFFFF
        times.append(time.thread_time() - began)
    return round(1000 * min(times), 3)


def find_gpus() -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs of this machine, and why the driver does not answer, if it does not. Without ``nvidia-smi``: none, and no reason."""
    code, answer = ask_driver(_QUERY)
    gpus = gpus_in(answer)
    return gpus, "" if gpus or code in (0, NO_PROGRAM) else clip(" ".join(answer.split()), MOST_TEXT) or f"exit status {code}"


def gpus_in(answer: str) -> tuple[Gpu, ...]:
    """Return the GPUs in the answer of ``nvidia-smi``. Lines of another form are left out."""
    found = []
    for line in answer.splitlines():
        name, *numbers = (word.strip() for word in line.rsplit(",", 3))
        if len(numbers) == 3 and numbers[0].isdecimal() and numbers[1].isdecimal():
            ecc = int(numbers[2]) if numbers[2].isdecimal() else 0
            found.append(Gpu(clip(name, MOST_TEXT), int(numbers[0]), int(numbers[1]), ecc))
    return tuple(found)


def wrong_interfaces(environ: Mapping[str, str], several: bool) -> tuple[str, ...]:
    """Return the variables that name interfaces of which none is here and up, or, for ``several`` nodes, only the loopback."""
    stats = psutil.net_if_stats()
    up = {name for name, stat in stats.items() if stat.isup and not (several and name == "lo")}
    return tuple(
        clip(f"{variable}={value}", MOST_TEXT)
        for variable in INTERFACE_VARIABLES
        if (value := environ.get(variable, "")) and not value.startswith("^") and not _names_one(value, up)
    )


def processes_left() -> int:
    """Return how many processes the control groups of this one still allow; -1: they set no limit."""
    left = []
    for folder in own_groups("pids"):
        with suppress(OSError, ValueError):  # no such file, or the word "max"
            left.append(int(Path(folder, "pids.max").read_text()) - int(Path(folder, "pids.current").read_text()))
    return max(0, min(left)) if left else -1


def mark(folder: str, id: str) -> Path:
    """Return the file by which the other nodes see that ``folder`` is the same one for them."""
    return Path(folder, f".elastirun-check-{id}")


def _names_one(value: str, up: set[str]) -> bool:
    """Tell whether ``value``, a list for gloo or NCCL, names an interface: a beginning of its name, after ``=`` the whole name."""
    names = [name.partition(":")[0] for name in value.removeprefix("=").split(",")]
    return any(one == name or (not value.startswith("=") and one.startswith(name)) for one in up for name in names)


def _version(package: str) -> str:
    with suppress(importlib.metadata.PackageNotFoundError):
        return clip(importlib.metadata.version(package), MOST_TEXT)
    return ""


def _cuda() -> str:
    """Return the version of CUDA that torch was built for, by the text of a file of it."""
    with suppress(OSError, ValueError, ImportError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin:
            found = _CUDA.search(Path(spec.origin).with_name("version.py").read_text(errors="replace"))
            return found[1] if found else ""
    return ""


def _limit(which: int) -> int:
    hard = resource.getrlimit(which)[1]
    return -1 if hard == resource.RLIM_INFINITY else min(hard, sys.maxsize >> 11)


def _write_error(folder: str) -> str:
    """Return why no file can be made in ``folder``, which is made if it is missing; empty: one can."""
    trial = mark(folder, f"{os.getpid()}-{os.urandom(4).hex()}")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        trial.write_bytes(bytes(4096))
        trial.unlink()
    except OSError as error:
        with suppress(OSError):
            trial.unlink()
        return clip((error.strerror or str(error)).lower(), MOST_TEXT)
    return ""

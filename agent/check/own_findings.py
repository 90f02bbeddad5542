"""Findings on single nodes: by the facts of one node, and beside those of the others. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from elastirun.agent.check.records import Arrival, Finding

MIB = 1 << 20
LEAST_SHM = 32 * MIB  # bytes; half of what a container gets by default. The DataLoader's workers and NCCL need it
LEAST_DESCRIPTORS = 256  # an agent uses 40, each worker of torch some 50, and each connection to a peer one
LEAST_PROCESSES = 64  # for one worker: its threads count, of OpenMP, gloo and the DataLoader
SLOW = 2.5  # times the median: a core that throttles is slower than that, another generation of machines is not
FULL_GPU = 0.5  # of the median of the free memory of all GPUs


def of_node(one: Arrival) -> Iterator[Finding]:
    """Yield what is wrong with a node by its own facts."""
    facts = one.facts
    left, needed = facts.processes, LEAST_PROCESSES * one.slots
    errors = [
        f"GPU {number} ({gpu.name}) has {gpu.uncorrected} ECC error{'s' * (gpu.uncorrected > 1)} that could not be corrected"
        for number, gpu in enumerate(facts.gpus)
        if gpu.uncorrected
    ]
    no_torch = "" if facts.torch else "torch is not installed for this Python"
    driver = f"the GPU driver fails: {facts.gpu_error}" if facts.gpu_error else ""
    shm = f"/dev/shm has {facts.shm // MIB} MiB left" if facts.shm < LEAST_SHM else ""
    files = f"a process may open {facts.descriptors} files at most" if 0 <= facts.descriptors < LEAST_DESCRIPTORS else ""
    few = f"{left} more processes may be started, workers of torch here may need {needed}" if 0 <= left < needed else ""
    log = f"nothing can be written to the log folder: {facts.log_error}" if facts.log_error else ""
    interfaces = [f"{given} names no interface that leads to other nodes" for given in facts.interfaces]
    folders = [f"{folder.path} cannot be written: {folder.error}" for folder in facts.folders if folder.error]
    for kind, texts, advice in (
        ("torch", [no_torch], "pip install torch, or start elastirun with another Python"),
        ("gpu", [driver], "look at nvidia-smi and dmesg; restart the machine, or leave it out"),
        ("gpu", errors, "reset the GPU (nvidia-smi --gpu-reset), or leave the node out"),
        ("shm", [shm], "delete what is left in /dev/shm, or give it more (mount -o remount,size=; --shm-size of a container)"),
        ("descriptors", [files], "raise the limit (ulimit -Hn, or LimitNOFILE= of a systemd unit)"),
        ("processes", [few], "raise pids.max of the control group (--pids-limit of a container, TasksMax= of a systemd unit)"),
        ("log-dir", [log], "correct --log-dir or its permissions"),
        ("interface", interfaces, "correct the variable, or unset it: the interface is detected"),
        ("folder", folders, "mount it on this node, or correct its permissions"),
    ):
        yield from (Finding(kind, (one.name,), text, advice) for text in texts if text)


def beside_others(arrivals: Sequence[Arrival], matmuls: Mapping[str, float]) -> Iterator[Finding]:
    """Yield where a node differs from most of the others, or is much slower. ``matmuls``: milliseconds by id, where they were measured."""
    same = "install the same version on all nodes"
    yield from _different(arrivals, "torch", lambda one: one.facts.torch, same)
    yield from _different(arrivals, "elastirun", lambda one: one.facts.elastirun, same)
    yield from _different([one for one in arrivals if one.facts.gpus], "nccl", lambda one: one.facts.nccl, same)
    yield from _different(arrivals, "cuda", lambda one: one.facts.cuda, same, bad=False)
    yield from _different(arrivals, "python", lambda one: ".".join(one.facts.python.split(".")[:2]), same, bad=False)
    yield from _gpus(arrivals)
    loops = {one.id: one.facts.loop for one in arrivals}
    both = (loops, "a loop of Python"), (matmuls, "a product of matrices")
    for one, times, what in [(one, *each) for each in both for one in arrivals]:
        usual = statistics.median_low(times.values()) if one.id in times else 0.0
        if (time := times.get(one.id, 0.0)) > SLOW * usual > 0:
            text = f"{what} takes {time:.3g} ms, {time / usual:.1f} times the median of the nodes"
            yield Finding("slow", (one.name,), text, "look for throttling (lscpu, dmesg) and a limit of CPU time", bad=False)


def _different(arrivals: Sequence[Arrival], what: str, value: Callable[[Arrival], str], advice: str, bad: bool = True) -> Iterator[Finding]:
    """Yield each node whose ``value`` is not that of most. Where as many have another one: each pair of the first node and such a node."""
    counts = Counter(value(one) for one in arrivals if value(one))
    most = max(counts.values(), default=0)
    first = next((one for one in arrivals if counts[value(one)] == most), None)
    equal = [*counts.values()].count(most) > 1
    for one in arrivals:
        if first is not None and value(one) not in ("", value(first)):
            text = f"{what} is {value(one)} on {one.name}, and {value(first)} on {first.name}"
            more = f" and {most - 1} more" if most > 1 else ""
            yield Finding(what, (first.name, one.name) if equal else (one.name,), text + more, advice, bad)


def _gpus(arrivals: Sequence[Arrival]) -> Iterator[Finding]:
    counts = Counter(len(one.facts.gpus) for one in arrivals)
    usual = max(counts, key=lambda count: (counts[count], count))
    free = [gpu.free for one in arrivals for gpu in one.facts.gpus]
    for one in arrivals:
        count = len(one.facts.gpus)
        if count < usual and not one.facts.gpu_error:
            text = f"{count or 'no'} GPU{'s' * (count > 1)} here, {usual} on most nodes"
            yield Finding("gpu", (one.name,), text, "look at nvidia-smi, dmesg and the devices of the container, or leave the node out")
        for number, gpu in enumerate(one.facts.gpus):
            if gpu.free < FULL_GPU * statistics.median_low(free):
                text = f"GPU {number} has {gpu.free} of {gpu.total} MiB free, much less than the others"
                yield Finding("gpu-memory", (one.name,), text, "end what else uses it (nvidia-smi shows which process)", bad=False)

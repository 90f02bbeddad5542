"""Trains with accelerate, Lightning and transformers on a GPU; a worker of each is killed, and the jobs must recover.

    python -m tests.gpu.frameworks

The jobs are those of ``tests.nightly.frameworks``, with one worker each: NCCL takes one rank for each GPU, and the
frameworks know nothing of ``tests.support.gpu.share``. The three run side by side, first with executed workers, then
with ``--preload=torch``. The figure is of the frameworks that are installed. Ends with 1 if a job did not recover,
otherwise with ``MISSING`` if a framework is not installed; without a figure if none is.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from tests.nightly.frameworks import CASES, ONE_WORKER, Case, Recovery, recover
from tests.support.gpu import DEVICE, DRY, HERE, NCCL, NO_GPU, figure

NAMES = ("accelerate", "lightning", "transformers")
SECONDS = 80.0  # for both turns: the part has 90, and a job that is late needs some to end
FIRST = 48.0  # seconds for the first turn, which reads the frameworks from a cold disk
MODES = {"off": "", "torch": "with --preload=torch"}  # the values of PET_PRELOAD, and their words in the figure
# A line of each worker: the device of the parameters, and the backend of the process group.
TRAINED = re.compile(r"^DEVICE (\w+)\S* (\w+)$", re.MULTILINE)
FROM = 5  # the step of each script's first checkpoint: a worker that goes on from one does not begin below it
MISSING = 77  # exit code: what this needs is not installed here
END = 2500  # characters of a failed job's output


@dataclass
class Found:
    """The jobs of one framework that have ended. ``good``: those that recovered; ``wrong``: what went wrong."""

    name: str
    good: list[Recovery] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        try:
            return f"{self.name} {version(self.name)}"
        except PackageNotFoundError:
            return self.name


def job(name: str) -> Case:
    """Return the framework's job with one worker. ``accelerate launch`` would call torchrun for several only."""
    return replace(CASES[name], launcher=ONE_WORKER, ranks=1)


def train(name: str, preload: str, limit: float) -> Recovery:
    """Run the job of a framework, and kill its worker once.

    Both workers must have trained on the device (over NCCL if it is a GPU), the second one from the checkpoint.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        environ = {
            "TMPDIR": folder,  # DataLoader workers of a killed process leave folders there
            "TEST_DEVICE": DEVICE,
            "PET_PRELOAD": preload,
            "NCCL_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
        }
        recovery = recover(job(name), folder, limit, **environ)
        output = Path(folder, "output").read_text()
    trained = TRAINED.findall(output)
    if not recovery.wrong and trained != [(DEVICE, NCCL)] * 2:
        recovery = Recovery(f"the two workers trained with {trained}")
    if not recovery.wrong and recovery.step < FROM:
        recovery = Recovery(f"the second worker began with step {recovery.step}")
    said = f"step {recovery.step} came {recovery.again:.1f} s after the kill; {trained}"
    if recovery.wrong:
        said = f"FAILED: {recovery.wrong}\n{output[-END:]}"
    print(f"{name}, {MODES[preload] or 'executed'}: {said}", flush=True)
    return recovery


def tell(found: list[Found], modes: list[str]) -> None:
    """Print the figure of what is known so far; ``modes``: those in which the jobs have run."""
    good = [one for one in found if not one.wrong]
    texts: list[str] = []
    values: dict[str, float] = {}
    if good:
        names = ", ".join(one.title for one in good)
        times = []
        for turn, mode in enumerate(modes):
            seconds = {one.name: one.good[turn].again for one in good}
            times.append(f"{', '.join(f'{value:.1f}' for value in seconds.values())} s {mode}".strip())
            values |= {f"{name}_{'preload' if mode else 'executed'}_s": round(value, 2) for name, value in seconds.items()}
        texts.append(f"{names}: killed, first step again after {'; '.join(times)}; ended with 0 ({DEVICE}, {NCCL}, 1 rank)")
    texts += [f"{one.title} failed: {'; '.join(one.wrong)}" for one in found if one.wrong]
    figure("frameworks", "; ".join(texts), **values)


def main() -> int:
    if not HERE and not DRY:
        print(NO_GPU)
        return 1
    found = [Found(name) for name in NAMES if find_spec(CASES[name].needs)]
    missing = [name for name in NAMES if not find_spec(CASES[name].needs)]
    if missing:
        print(f"not installed: {', '.join(missing)}", flush=True)
    if not found:
        return MISSING
    end = time.monotonic() + SECONDS
    modes: list[str] = []
    for preload, mode in MODES.items():
        modes.append(mode)
        turn = partial(train, preload=preload, limit=min(FIRST, end - time.monotonic()))
        with ThreadPoolExecutor(len(found)) as pool:
            recoveries = list(pool.map(turn, [one.name for one in found]))
        for one, recovery in zip(found, recoveries, strict=True):
            if recovery.wrong:
                one.wrong.append(f"{mode or 'executed'}: {recovery.wrong}")
            else:
                one.good.append(recovery)
        tell(found, modes)
    if any(one.wrong for one in found):
        return 1
    return MISSING if missing else 0


if __name__ == "__main__":
    sys.exit(main())

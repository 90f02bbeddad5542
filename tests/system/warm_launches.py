"""Launch scripts one after another with ``--keep-warm``: each does what it does cold, the warm server does not grow, and nothing is left.

Usage:

    python -m tests.system.warm_launches --launches 200 [--modules torch] [--seed 1]

Scripts that need a package which is not installed are left out, and named.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from elastirun.agent.processes import proc
from elastirun.agent.processes.preload import keep_warm
from tests.support.cluster import Cluster, cluster
from tests.support.tries import unless
from tests.support.until import poll
from tests.system.preload_kills import TAG, everything

BEGINNING = """import json, os, signal, sys, time
if __name__ == "__main__":
    os.write(1, f"names {json.dumps(sorted(os.environ))}\\n".encode())
"""
PLAIN = {  # name -> script; these need no package
    "plain": "print(sys.argv, os.getcwd(), sorted(os.listdir('/proc/self/fd')), os.umask(0o22))",
    "module beside": "import beside\nprint(beside.VALUE, beside.__file__)",
    "reads stdin": "print(sys.stdin.read())",
    "changes itself": "os.environ.clear()\nos.umask(0o77)\nos.chdir('/')\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\nprint(os.getcwd())",
    "raises": "raise LookupError('of the script')",
    "exit status": "sys.exit(7)",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "segmentation fault": "import ctypes\nctypes.string_at(0)",
    "leaves processes": "import subprocess\nfor apart in (False, True):\n"
    "    subprocess.Popen(['sleep', '2'], start_new_session=apart, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)",
    "leaves threads and files": "import threading\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
    "files = [os.open('/dev/null', os.O_RDONLY) for _ in range(100)]\nprint(len(files))",
    "writes much": "for number in range(3000):\n    print(number, 'x' * 100)",
}
TRAINS = """
import torch
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = {wrapped}
for _ in range(3):
    optimizer.zero_grad()
    loss = step(torch.ones(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
print(f"{{loss.item():.6f}}", torch.get_num_threads(), torch.initial_seed())
"""
LOADS = """
import torch
from torch.utils.data import DataLoader
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, number): return number, "RANK" in os.environ
if __name__ == "__main__":
    for batch in DataLoader(Numbers(), batch_size=2, num_workers=2, multiprocessing_context={method!r}):
        print(batch)
"""
WORLD = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(3)
dist.all_reduce(total)
print(total, dist.get_world_size())
dist.destroy_process_group()
"""
TORCH = {
    "training": TRAINS.format(wrapped="model"),
    "compiled": TRAINS.format(wrapped="torch.compile(model, backend='eager')"),
    "process group": WORLD,
    **{f"loader, {method}": LOADS.format(method=method) for method in ("fork", "spawn", "forkserver")},
}
FRAMEWORKS = {
    "accelerate": TRAINS.format(wrapped="__import__('accelerate').Accelerator(cpu=True).prepare(model)"),
    "lightning": "import lightning\nprint(lightning.Trainer(accelerator='cpu', devices=1, logger=False).num_devices)",
    "transformers": "from transformers import BertConfig, BertModel\n"
    "print(sum(each.numel() for each in BertModel(BertConfig(hidden_size=8, num_attention_heads=2)).parameters()))",
}
SLACK = 4 << 10  # KiB of memory that the server may have more at the end than after the first launches: what Python's allocator keeps
SHOWN = 600  # characters of a difference
SETTLED = 8  # launches after which the server has what it needs


@dataclass(frozen=True)
class Seen:
    """What a launch has shown: its exit status and the lines of its standard output."""

    status: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Sample:
    """The server while it has no job. ``pss`` and ``own``: KiB, all of it and what is in no file."""

    descriptors: int
    processes: int
    pss: int
    own: int


class Launches:
    """Commands that run ``scripts``, each in a folder of its own."""

    def __init__(self, nodes: Cluster, scripts: dict[str, str], modules: str) -> None:
        self.tag, self.modules, self.folder, self.scripts = uuid.uuid4().hex, modules, nodes.tmp_path, list(scripts)
        (nodes.tmp_path / "tmp").mkdir()
        given = {name: value for name, value in nodes.env.items() if name not in ("PET_PRELOAD", "PET_KEEP_WARM")}
        self.env = given | {
            TAG: self.tag,
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
            "XDG_RUNTIME_DIR": str(nodes.tmp_path),
            "TMPDIR": str(nodes.tmp_path / "tmp"),
        }
        for name, text in scripts.items():
            (nodes.tmp_path / name).mkdir()
            (nodes.tmp_path / name / "script.py").write_text(BEGINNING + text)
            (nodes.tmp_path / name / "beside.py").write_text(f"VALUE = {name!r}\n")

    def launch(self, name: str, keep: str) -> tuple[Seen, str]:
        """Run a command. Return what is to be the same as always, and its standard error."""
        line = [sys.executable, "-m", "elastirun", f"--keep-warm={keep}", f"--preload={self.modules}", "--exit-code-from-worker"]
        line += ["--max-restarts=1"]  # else the only worker is executed where nothing is kept, without what is preloaded
        line += ["script.py", "an argument"]
        ended = subprocess.run(
            line, env=self.env, cwd=self.folder / name, input="of stdin\n" * 3, capture_output=True, text=True, timeout=300
        )
        return Seen(ended.returncode, tuple(ended.stdout.splitlines())), ended.stderr

    def servers(self) -> list[int]:
        os.environ["XDG_RUNTIME_DIR"] = str(self.folder)
        return [server.pid for server in keep_warm.servers()]

    def left(self) -> list[proc.ProcessStat]:
        """Return the processes of a job. The server has no environment."""
        return everything(self.tag)


def look(server: int) -> Sample:
    """Wait until the server has no job, then look."""
    found = [0, 0]

    def rests() -> bool:  # counted once: whoever has just asked who the server is may be a descriptor of it for a moment still
        found[:] = len(os.listdir(f"/proc/{server}/fd")), len(proc.children(server))
        return found == [5, 0]

    poll(rests)
    rollup = dict(line.split(":") for line in Path(f"/proc/{server}/smaps_rollup").read_text().splitlines()[1:])
    pss, own = (int(rollup[name].split()[0]) for name in ("Pss", "Pss_Anon"))
    return Sample(found[0], found[1], pss, own)


def compare(nodes: Cluster, scripts: dict[str, str], modules: str, launches: int, seed: int) -> list[str]:
    """Run each script cold, then as many as ``launches`` warm ones. Return what was wrong."""
    jobs, draw = Launches(nodes, scripts, modules), random.Random(seed)
    began = time.monotonic()
    cold = {name: jobs.launch(name, "off")[0] for name in scripts}
    of_scripts = set(os.listdir(jobs.env["TMPDIR"]))  # such as torch's folder of what it has compiled
    print(f"{len(cold)} scripts, cold: {time.monotonic() - began:.0f} s", flush=True)
    samples, servers, seconds, differ, said, left = [], set[int](), [], Counter[str](), Counter[str](), Counter[str]()
    order = [name for _ in range(-(-launches // len(scripts))) for name in draw.sample(jobs.scripts, len(scripts))][:launches]
    for number, name in enumerate(order, start=1):
        began = time.monotonic()
        seen, stderr = jobs.launch(name, "10m" if number < launches else "1s")
        seconds.append(time.monotonic() - began)
        if seen != cold[name]:
            differ[name] += 1
            lines = set(seen.lines) ^ set(cold[name].lines)
            print(f"{name}: exit status {seen.status}, cold {cold[name].status}; lines of one only: {str(lines)[:SHOWN]}", flush=True)
            print(stderr[-SHOWN:], flush=True)
        said.update(line for line in stderr.splitlines() if "--keep-warm" in line or "--preload" in line)
        if not poll(lambda: not jobs.left()):
            left[name] += 1
        if number < launches:
            found = jobs.servers()
            servers.update(found)
            samples.extend(map(look, found))
        if number % max(1, launches // 10) == 0 and samples:
            print(f"{number}: {seconds[-1]:.1f} s for {name}; {samples[-1]}", flush=True)
    settled = samples[min(SETTLED, len(samples) - 1) :]
    grown = settled[-1].own - settled[0].own
    pss = [one.pss for one in samples]
    print(f"{launches} launches of {len(scripts)} scripts, median {sorted(seconds)[launches // 2]:.1f} s; {len(servers)} server")
    print(f"PSS {min(pss)} to {max(pss)} KiB, {grown} KiB grown; descriptors {Counter(one.descriptors for one in settled)}")
    gone = poll(lambda: not jobs.servers() and not jobs.left())
    files = set(os.listdir(jobs.folder / keep_warm.FOLDER)) | (set(os.listdir(jobs.env["TMPDIR"])) - of_scripts)
    return unless(
        (not differ, f"other than cold: {differ}"),
        (not said, f"warnings: {said}"),
        (not left, f"left processes: {left}"),
        (len(servers) == 1, f"{len(servers)} servers"),
        (len({(one.descriptors, one.processes) for one in samples}) == 1, f"descriptors or processes differ: {samples}"),
        (grown < SLACK, f"the server's memory has grown by {grown} KiB: {samples}"),
        (bool(gone), f"left at the end: {jobs.servers()} {jobs.left()}"),
        (files == {"key"}, f"left files: {files}"),
    )


def installed(names: list[str]) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name)]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--launches", type=int, default=100)
    arguments.add_argument("--modules", default="torch")
    arguments.add_argument("--seed", type=int, default=1)
    options = arguments.parse_args()
    there = installed(list(FRAMEWORKS))
    print(f"left out, because they are not installed: {json.dumps(sorted(FRAMEWORKS.keys() - there))}")
    scripts = {**PLAIN, **TORCH, **{name: FRAMEWORKS[name] for name in there}}
    with tempfile.TemporaryDirectory(prefix="warm-launches-") as folder, cluster(Path(folder)) as nodes:
        if wrong := compare(nodes, scripts, options.modules, options.launches, options.seed):
            raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()

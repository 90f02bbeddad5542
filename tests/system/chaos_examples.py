"""Run ``elastirun chaos`` on two nodes that train an example: the live one, or the one with nothing but torch.

    python -m tests.system.chaos_examples live [--node OPTION ...] [-- --every=30s --for=10m ...]
    python -m tests.system.chaos_examples torch --node=--store-succession=off -- --kinds=host

``--node``: one more option of each agent; with a rule of recovery taken out the verdict is "not held". What follows ``--`` are options of
``elastirun chaos``; ``--restart=1s --yes`` are always given. To examples/train_torch.py a call of ``progress`` is added, which numbers
the steps. The exit code is that of ``elastirun chaos``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from elastirun.agent.processes import proc
from elastirun.chaos.watch import look
from tests.support.cluster import free_port
from tests.support.until import until

EXAMPLES = Path(__file__).parents[2] / "examples"
JOB = "chaos-examples"
NUMBERED = {  # in train_torch.py
    "from elastirun.train import": "from elastirun.progress import progress\nfrom elastirun.train import",
    "for indices in order.split(args.batch):": "for number, indices in enumerate(order.split(args.batch)):",
    "optimizer.step()\n": "optimizer.step()\n        progress(step=epoch * len(order.split(args.batch)) + number)\n",
}


def script(example: str, folder: Path) -> Path:
    """Return the path of the example."""
    if example == "live":
        return EXAMPLES / "live.py"
    text = (EXAMPLES / "train_torch.py").read_text()
    for before, after in NUMBERED.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    (folder / "train_torch.py").write_text(text)
    return folder / "train_torch.py"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", choices=("live", "torch"))
    parser.add_argument("--node", action="append", default=[], metavar="OPTION")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    given = parser.parse_args(words[:end])
    port, env = free_port(), {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        path = script(given.example, Path(folder))
        common = ["--nnodes=1:2", f"--rdzv-id={JOB}", "--max-restarts=1000", *given.node]
        common += [f"--rdzv-endpoint=127.0.0.1:{port},127.0.0.2:{port}"]
        training = ["--epochs=1000000", "--pause=0.05", f"--checkpoint={folder}/checkpoint"]
        for node in (1, 2):
            line = [sys.executable, "-m", "elastirun", *common, f"--rdzv-conf=is_host={int(node == 1)}", f"--local-addr=127.0.0.{node}"]
            with open(f"{folder}/said{node}", "w") as said:
                subprocess.Popen([*line, str(path), *training], env=env, stdout=said, stderr=said)
        try:
            until(lambda: sum(bool(agent.training) for agent in look(JOB)) == 2, "both nodes to train")
            chaos = [sys.executable, "-m", "elastirun", "chaos", JOB, "--restart=1s", "--yes", *words[end + 1 :]]
            return subprocess.run(chaos).returncode
        finally:
            for agent in look(JOB):
                proc.kill(agent.process)
            until(lambda: not look(JOB), "the agents to end")


if __name__ == "__main__":
    sys.exit(main())

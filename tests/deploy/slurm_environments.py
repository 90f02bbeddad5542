"""Records the SLURM_* variables that processes of a real Slurm see. tests/cli/slurm_environments.json is made so:

    python -m tests.deploy.slurm_environments > tests/cli/slurm_environments.json

Paths and the version of this machine are replaced. Each entry is one kind of process; the processes stand in the order of SLURM_PROCID.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.slurm import Slurm, missing, slurm
from tests.support.until import until

DUMP = """#!/usr/bin/env python3
import json, os, sys
name, text = f"{sys.argv[1]}.{int(os.environ.get('SLURM_PROCID', 0)):02}", json.dumps(dict(sorted(os.environ.items())))
with open(name + ".part", "w") as file:
    file.write(text)
os.rename(name + ".part", name)
"""
BATCH = """#!/bin/bash
#SBATCH --nodes=3 --ntasks-per-node=1 --requeue --no-kill
if [ -z "${SLURM_RESTART_COUNT-}" ]; then
  ./dump batch_script
  srun ./dump step_of_batch
  srun --nodes=3 --ntasks=6 --ntasks-per-node=2 --overcommit ./dump step_with_two_tasks_per_node
  srun --nodes=1 --ntasks=1 ./dump step_on_one_node_of_three
  srun --nodes=2 --ntasks=2 --exclude=h0 ./dump step_on_two_nodes_of_three
  scontrol requeue "$SLURM_JOB_ID"
  sleep 60
fi
./dump batch_script_requeued
srun ./dump step_of_batch_requeued
"""
ARRAY = "#!/bin/bash\n#SBATCH --nodes=3 --ntasks-per-node=1 --array=5\nsrun ./dump step_of_array\n"
HETEROGENEOUS = """#!/bin/bash
#SBATCH --nodes=1 --ntasks=1
#SBATCH hetjob
#SBATCH --nodes=2 --ntasks=2
srun --het-group=0,1 ./dump step_of_heterogeneous_job
"""


def record(folder: Path) -> dict[str, list[dict[str, str]]]:
    os.chdir(folder)
    for name, text in (("dump", DUMP), ("batch", BATCH), ("array", ARRAY), ("heterogeneous", HETEROGENEOUS)):
        Path(name).write_text(text)
        Path(name).chmod(0o755)
    with slurm(folder, more="LaunchParameters=use_interactive_step\nInteractiveStepOptions=--interactive") as cluster:
        cluster.run("srun", "--nodes=3", "--ntasks-per-node=1", "./dump", "srun_alone")
        cluster.run("srun", "--nodes=1", "--ntasks=1", "./dump", "srun_alone_on_one_node")
        cluster.run("srun", "--nodes=3", "--ntasks=6", "./dump", "srun_alone_with_two_tasks_per_node")
        cluster.run("srun", "--nodes=2", "--ntasks=3", "./dump", "srun_alone_with_three_tasks_on_two_nodes")
        cluster.run("salloc", "--nodes=3", "--ntasks-per-node=1", "./dump", "salloc_shell")
        cluster.run("salloc", "--nodes=3", "--ntasks-per-node=1", "srun", "./dump", "step_of_salloc")
        cluster.run("salloc", "--nodes=3", "--ntasks-per-node=1", "srun", "--interactive", "./dump", "salloc_shell_on_a_node")
        for script in ("batch", "array", "heterogeneous"):
            run_to_the_end(cluster, script)
    found: dict[str, list[dict[str, str]]] = {}
    for path in sorted(folder.glob("*.[0-9][0-9]")):
        found.setdefault(path.stem, []).append(tidy(json.loads(path.read_text()), folder))
    return found


def run_to_the_end(cluster: Slurm, script: str) -> None:
    number = cluster.run("sbatch", "--parsable", script).strip()
    over = ("COMPLETED", "FAILED")
    until(lambda: cluster.job(number)["JobState"] in over, f"the end of {script}", 180, state=cluster.log, pause=0.1)


def tidy(environ: dict[str, str], folder: Path) -> dict[str, str]:
    new = {**environ, "SLURM_CONF": "/etc/slurm/slurm.conf", "SLURM_SUBMIT_DIR": "/home/user/digits"}
    return {name: value.replace(str(folder), "/home/user") for name, value in new.items() if name.startswith("SLURM")}


def main() -> None:
    if reason := missing():
        sys.exit(reason)
    for name in list(os.environ):
        if name.startswith(("SLURM", "SBATCH", "SALLOC")):
            del os.environ[name]
    version = subprocess.run(["slurmd", "-V"], capture_output=True, text=True, check=True).stdout.split()[-1]
    with tempfile.TemporaryDirectory() as folder:
        found = record(Path(folder))
    print(json.dumps({"recorded by": "python -m tests.deploy.slurm_environments", "slurm": version, "environments": found}, indent=1))


if __name__ == "__main__":
    main()

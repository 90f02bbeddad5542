"""--logs-specs: a plug-in of torchrun's entry point group decides where the output of the workers goes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.cluster import Cluster

SCRIPT = """
import os, sys
print("out of", os.environ["RANK"], os.environ.get("FROM_PLUG_IN"), flush=True)
print("err of", os.environ["RANK"], file=sys.stderr, flush=True)
fails = os.environ["ELASTIRUN_ROUND"] in sys.argv
met = os.environ["TEST_SOCKET"] + ".met"  # a named pipe: rank 1 fails when rank 0 has written
if fails and os.environ["RANK"] == "0":
    open(met, "w").close()
elif fails:
    open(met).close()
    message = '{"message": {"message": "m", "extraInfo": {"py_callstack": "ValueError: in the error file", "timestamp": "1"}}}'
    open(os.environ["TORCHELASTIC_ERROR_FILE"], "w").write(message)
    sys.exit(1)
"""
PLUG_IN = """
import os
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

class OneFile(LogsSpecs):
    # both streams of a worker in one file, whatever -r and -t say
    @property
    def root_log_dir(self):
        return self._root_log_dir

    def reify(self, envs):
        os.makedirs(self._root_log_dir, exist_ok=True)
        for env in envs.values():
            env["FROM_PLUG_IN"] = env["TORCHELASTIC_RESTART_COUNT"]
        files = {i: f"{self._root_log_dir}/worker{i}" for i in envs}
        return LogsDest(files, files, {}, {}, {i: f"{path}.json" for i, path in files.items()})

class CannotBeMade(OneFile):
    def __init__(self, **options):
        raise ValueError("not\\nhere")

class Fails(OneFile):
    def reify(self, envs):
        return None
"""
ENTRY_POINTS = """
[torchrun.logs_specs]
as_torch = torch.distributed.elastic.multiprocessing:DefaultLogsSpecs
one_file = plug_in:OneFile
cannot_be_made = plug_in:CannotBeMade
fails = plug_in:Fails
missing = plug_in:Missing
"""


@pytest.fixture
def plugged(nodes: Cluster) -> Cluster:
    """Return a cluster for agents in whose Python a package with such plug-ins is installed."""
    installed = nodes.tmp_path / "installed"
    info = installed / "plug_in-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plug-in\nVersion: 1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (installed / "plug_in.py").write_text(PLUG_IN)
    nodes.env["PYTHONPATH"] = str(installed)
    nodes.script.write_text(SCRIPT)
    os.mkfifo(nodes.env["TEST_SOCKET"] + ".met")
    return nodes


def lines_of(path: Path) -> list[str]:
    return sorted(path.read_text().splitlines())


def test_torch_s_own_layout_as_a_plug_in(plugged: Cluster) -> None:
    logs = plugged.tmp_path / "logs"
    options = ("--nproc-per-node=2", "--max-restarts=1", "-r", "0:1,1:3", "-t", "1:2", "--rdzv-id=job", f"--log-dir={logs}")
    filters = ("--duplicate-stderr-filters=of 1",)
    assert plugged.ends(plugged.launch(1, "--logs-specs=as_torch", *options, *filters, str(plugged.script), "1")) == 0
    (attempt,) = logs.glob("job_*/attempt_1")
    files = {str(path.relative_to(attempt)): lines_of(path) for path in attempt.rglob("*.log")}
    assert files == {
        "0/stdout.log": ["out of 0 None"],
        "1/stdout.log": ["out of 1 None"],
        "1/stderr.log": ["err of 1"],
        "filtered_stderr.log": [f"{os.uname().nodename}:1> err of 1"],
    }
    said = plugged.out(1)
    assert said.count("err of 0") == 2 and said.count(":1> err of 1") == 2 and "out of" not in said, "each of two rounds"
    assert list(logs.glob("job_*/events.jsonl")), "beside the folder of the plug-in"


def test_a_plug_in_names_files_and_variables(plugged: Cluster) -> None:
    logs = plugged.tmp_path / "logs"
    options = ("--nproc-per-node=2", "--max-restarts=1", f"--log-dir={logs}")
    assert plugged.ends(plugged.launch(1, "--logs-specs=one_file", *options, str(plugged.script), "1", "2")) == 1
    assert lines_of(logs / "worker0") == ["err of 0", "err of 0", "out of 0 0", "out of 0 1"]
    said = plugged.out(1)
    assert "    ValueError: in the error file" in said and f"  logs      : {logs} (on this node)" in said


@pytest.mark.parametrize(
    ("name", "code", "part"),
    [
        ("nosuch", 3, "no installed package has 'nosuch' among its entry points torchrun.logs_specs (found: as_torch, "),
        ("missing", 3, "plug_in:Missing cannot be loaded: AttributeError: "),
        ("cannot_be_made", 3, "cannot_be_made cannot be used: ValueError: not here"),
        ("fails", 202, "fails failed: AttributeError: 'NoneType' object has no attribute"),
    ],
)
def test_what_cannot_be_used_is_one_line(plugged: Cluster, name: str, code: int, part: str) -> None:
    assert plugged.ends(plugged.launch(1, f"--logs-specs={name}", str(plugged.script))) == code
    assert f"--logs-specs: {part}" in plugged.out(1) and "Traceback" not in plugged.out(1)

"""The failover example from end to end, with real training, in a shortened form."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.digits import without_sklearn
from tests.support.until import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


def test_nodes_are_lost_and_replaced_and_the_training_ends_undisturbed(tmp_path: Path) -> None:
    imports_before = os.environ.get("PET_PRELOAD") is None  # a node that comes imports torch, and the others train on meanwhile
    epochs, pause = (24, 0.15) if imports_before else (12, 0.06)
    options = [f"--epochs={epochs}", f"--pause={pause}", f"--svg={tmp_path / 'run.svg'}"]
    command = [sys.executable, str(ROOT / "examples" / "failover.py"), *options]
    environ = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": without_sklearn(tmp_path)}
    done = subprocess.run(
        command, env=environ, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=2 * PATIENCE
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
    progress, _, table = done.stdout.partition("what happened")
    sizes = re.findall(r"round (\d) formed after +[\d.]+ s: (\d) nodes?, (\d) workers?", table)
    assert sizes == [(str(i), n, n) for i, n in enumerate("132323", start=1)], "one round for each change"
    assert len(re.findall("noticed after", table)) == 5 and len(re.findall("trains after", table)) == 6
    assert "node 3 killed" in table and "node 1 killed, which hosts the rendezvous store" in table
    assert re.search(r"test accuracy 9[5-9]\.\d %, exit status of the nodes \[0, 0, 0\]", table)
    assert len(re.findall(r"round \d goes on after step [1-9]", table)) == 5 and "  0 steps replayed at 3 planned stops" in table
    assert "same final weights as undisturbed, bit by bit: 24 tensors" in table and "  0 samples lost or doubled" in table
    assert "HELD" in table.splitlines()[-1]
    assert re.search(r"node 1 \| epoch +1/\d+ ", progress), "progress is shown"
    drawn = "".join(ElementTree.parse(tmp_path / "run.svg").getroot().itertext())
    assert all(words in drawn for words in ("node 4", "round 6", "kill -9 at ")), "the run is drawn"
    assert done.stderr == "" and not list(tmp_path.glob("elastirun*")), "nothing is left behind"


def test_a_replayed_step_and_other_weights_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    failover = importlib.import_module("failover")
    job = failover.Job(tmp_path, 1, 0.0)
    for text in ("1 worker on cpu: from scratch", "all workers stop after step 5", "3 workers on cpu: going on after step 4 of x"):
        job.take(failover.Line(0.0, 1, text, failover.event_in(text)))
    with pytest.raises(failover.ScenarioFailed, match="5, 4"):
        asyncio.run(failover.prove(job))
    right = {"model.bias": b"F32 [1] abcd"}
    assert failover.compare(right, dict(right)) == ""
    assert failover.compare({"model.bias": b"F32 [1] abce"}, right) == "model.bias differs"
    assert "other tensors" in failover.compare({}, right) and "other tensors" in failover.compare({}, {})

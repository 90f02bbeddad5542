"""The failover example from end to end, with real training, in a shortened form."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]


def test_a_node_is_lost_and_replaced_and_the_training_ends_undisturbed(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "failover.py"), "--epochs=12", "--pause=0.06", f"--svg={tmp_path / 'run.svg'}"]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environ, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
    progress, _, table = done.stdout.partition("what happened")
    sizes = re.findall(r"round (\d) formed after +[\d.]+ s: (\d) nodes?, (\d) workers?", table)
    assert sizes == [("1", "1", "1"), ("2", "3", "3"), ("3", "2", "2"), ("4", "3", "3")], "one round for each change"
    assert len(re.findall("noticed after", table)) == 3 and len(re.findall("trains after", table)) == 4
    assert "node 3 killed" in table and re.search(r"test accuracy 9[5-9]\.\d %, exit status of the nodes \[0, 0, 0\]", table)
    assert "HELD" in table.splitlines()[-1]
    assert re.search(r"node 1 \| epoch +1/12 ", progress), "progress is shown"
    drawn = "".join(ElementTree.parse(tmp_path / "run.svg").getroot().itertext())
    assert all(words in drawn for words in ("node 4", "round 4", "kill -9 at ")), "the run is drawn"
    assert done.stderr == "" and not list(tmp_path.glob("elastirun*")), "nothing is left behind"

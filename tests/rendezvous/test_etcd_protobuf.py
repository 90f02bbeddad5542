"""The etcd store with other versions of protobuf than the installed one, with which all other tests run.

Needs the network, so it is done only when asked for:

    PROTOBUF_VERSIONS="3.20.3 4.25.9 5.29.6 6.33.6 7.36.2" python -m pytest -q tests/rendezvous/test_etcd_protobuf.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.etcd_server import needs_etcd

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = os.environ.get("PROTOBUF_VERSIONS", "").split()
TENSORBOARD_NEEDS = 6  # so it is tried from this version on
TOGETHER = """
import importlib, sys
def etcd():
    from elastirun.rendezvous.stores.etcd.messages import load
    return load().RangeRequest(key=b"k").SerializeToString()
if sys.argv[1] == "first":
    etcd()
importlib.import_module("torch")
event = importlib.import_module("tensorboard.compat.proto.event_pb2").Event(step=3)
assert event.FromString(event.SerializeToString()).step == 3
assert etcd() == b"\\n\\x01k"
"""


def run(*command: str | Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(not VERSIONS, reason="PROTOBUF_VERSIONS names no versions to try")
@needs_etcd
@pytest.mark.parametrize("version", VERSIONS)
def test_the_store_keeps_its_contract_beside_protobuf(version: str, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path)
    python, (site,) = tmp_path / "bin" / "python", tmp_path.glob("lib/python*/site-packages")
    run(python, "-m", "pip", "install", "--no-deps", f"protobuf=={version}")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")  # everything else is ours
    assert run(python, "-c", "import google.protobuf as p; print(p.__version__)").strip() == version
    suites = [f"tests/rendezvous/test_{name}.py" for name in ("stores", "etcd_messages", "etcd_store", "etcd_watch")]
    settings = ("-p", "no:cacheprovider", "-o", "filterwarnings=default", "-k", "etcd")  # old ones have warnings of their own
    print(run(python, "-m", "pytest", "-q", *settings, *suites).splitlines()[-1])
    if int(version.partition(".")[0]) >= TENSORBOARD_NEEDS:
        run(python, "-m", "pip", "install", "tensorboard", f"protobuf=={version}")
        for order in ("first", "second"):
            run(python, "-c", TOGETHER, order)

"""The TCPStore class with and without the rest of torch, each in a separate process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.until import PATIENCE

ROUND_TRIP = """
import socket, sys
from elastirun.rendezvous.stores import tcp, tcp_server, torch_class
{before}
listening = socket.create_server(("127.0.0.1", 0))
server = tcp_server.serve(listening)
store = tcp.connect("127.0.0.1", server.port)
assert store.put_if("job/a/x", None, b"1") == b"1" and store.put_if("job/a/x", b"2", b"3") == b"1"
assert store.get(["job/a/x", "job/a/y"]) == {{"job/a/x": b"1"}} == store.under("job/a/")
print("torch.nn" in sys.modules, "numpy" in sys.modules)
"""


@pytest.mark.daily(3)
@pytest.mark.parametrize(
    ("before", "whole"),
    [
        ("", True),
        ("torch_class.store_only()", False),
        ('torch_class.store_only(); sys.modules["torch._C"] = None', True),  # importing it alone fails
    ],
)
def test_one_class_serves_however_it_is_imported(before: str, whole: bool) -> None:
    code = ROUND_TRIP.format(before=before)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=PATIENCE)
    assert (done.stdout.strip(), done.stderr) == (f"{whole} {whole}", "")

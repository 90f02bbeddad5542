"""The library of torch that is loaded while the agent is imported, in a separate process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.until import PATIENCE

LOAD = """
import sys
from elastirun.agent.processes.preload import torch_library
def in_c():
    return {name for name, module in sys.modules.items() if str(getattr(module, "__file__", "")).endswith(".so")}
torch_library.load()
before = in_c()
import elastirun.cli.main, elastirun.agent.agent
print(in_c() - before)
from elastirun.rendezvous.stores import torch_class
torch_class.store_only()
assert torch_class.tcp_store_class().__name__ == "TCPStore"
print("libtorch_cpu.so" in open("/proc/self/maps").read())
"""


def test_nothing_that_the_agent_imports_waits_for_the_linker() -> None:
    done = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=PATIENCE)
    assert (done.stdout.split(), done.stderr) == (["set()", "True"], "")

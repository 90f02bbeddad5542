"""Standard input of workers, and the debugger at the agent's terminal."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.cluster import PATIENCE

READS = "import os, sys\nos.write(1, f'{os.environ[\"RANK\"]} {sys.stdin.read()!r}\\n'.encode())\n"
DEBUGS = """
import os
seen = int(os.environ['RANK']) + 40
breakpoint()
seen += 2
os.write(1, b'after %d\\n' % seen)
"""


def command(tmp_path: Path, text: str, *options: str) -> list[str]:
    script = tmp_path / "script.py"
    script.write_text(text)
    return [sys.executable, "-m", "elastirun", "--nproc-per-node=2", *options, str(script)]


@pytest.mark.parametrize("preload", ["off", "json"])
def test_standard_input_is_that_of_rank_0_alone(tmp_path: Path, preload: str) -> None:
    argv = command(tmp_path, READS, f"--preload={preload}", "--max-restarts=1")
    done = subprocess.run(argv, input="for rank 0", capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0 and sorted(done.stdout.splitlines()) == ["0 'for rank 0'", "1 ''"], done.stderr


class Terminal:
    """A terminal with a user who types."""

    def __init__(self) -> None:
        self.ours, self.theirs = os.openpty()
        self.text = ""

    def reads(self, pattern: str) -> str:
        """Wait until the terminal shows ``pattern``; forget what was before it, and return it."""
        end = time.monotonic() + PATIENCE
        while (found := re.search(pattern, self.text)) is None:
            assert select.select([self.ours], [], [], max(0.0, end - time.monotonic()))[0], self.text
            self.text += os.read(self.ours, 4096).decode()
        self.text = self.text[found.end() :]
        return found[0]

    def types(self, text: str) -> None:
        os.write(self.ours, text.encode() + b"\n")

    def close(self) -> None:
        os.close(self.ours)
        os.close(self.theirs)


@pytest.mark.parametrize("options", [("--preload=off",), ("--preload=json", "--max-restarts=1"), ("--tee=3", "--log-dir=/dev/null")])
def test_several_workers_are_debugged_at_the_terminal_one_after_the_other(tmp_path: Path, options: tuple[str, ...]) -> None:
    terminal = Terminal()
    with subprocess.Popen(command(tmp_path, DEBUGS, *options), stdin=terminal.theirs, stdout=subprocess.PIPE, text=True) as agent:
        stops: list[str] = []
        for _ in range(4):
            stops.append(terminal.reads(r"rank \d \(pid \d+\) is at a breakpoint")[5])
            terminal.reads(r"\(Pdb\) ")
            if stops.count(stops[-1]) == 1:
                terminal.types("b 6")
                terminal.reads(r"Breakpoint 1 at ")
                terminal.reads(r"\(Pdb\) ")
            terminal.types("p 'seen is', seen")
            terminal.reads(rf"\('seen is', {40 + int(stops[-1]) + 2 * (stops.count(stops[-1]) - 1)}\)")
            terminal.reads(r"\(Pdb\) ")
            terminal.types("c")
        assert sorted(stops) == ["0", "0", "1", "1"]
        assert agent.wait(PATIENCE) == 0
        assert agent.stdout is not None and sorted(re.findall(r"after 4\d", agent.stdout.read())) == ["after 42", "after 43"]
    terminal.close()

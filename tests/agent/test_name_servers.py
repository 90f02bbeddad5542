"""What torch looks up in an agent asks no name server. See also tests/system/test_slow_names.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ASKS = "import os; from elastirun.agent.host import name_servers; name_servers.only_python_asks(); print(os.environ['RES_OPTIONS'])"


def test_glibc_is_told_to_ask_no_name_server_beside_what_the_user_tells_it() -> None:
    env = {**os.environ, "RES_OPTIONS": "timeout:3"}
    told = subprocess.run([sys.executable, "-c", ASKS], env=env, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["timeout:3", "attempts:0"]
